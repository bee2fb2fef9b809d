/*
 * Summon: a unit's whole parameters (and gradients), between steps, in memory
 * of their own.
 */
#include "base/alloc.h"
#include "runtime/engine_priv.h"

static fsdp_view whole_view(const fsdp_unit *unit) {
  return unit->summon.on_host ? FSDP_VIEW_FULL_ON_HOST : FSDP_VIEW_FULL;
}

/* Whether this rank shows what was gathered. */
static bool is_shown_here(const fsdp_unit *unit) {
  return !unit->summon.on_first_rank_only ||
         unit->options.shard_group.rank == 0;
}

/* Whether a summon moves the parameters at all. */
static bool moves_params(const fsdp_unit *unit) {
  return unit->full_nbytes > 0 && (!unit->is_resident || unit->summon.on_host);
}

/* Whether writes are kept without a write-back too. FSDP1 keeps them where a
 * rank holds all of a unit (NO_SHARD), because it shows the storage itself.
 * Here this holds with and without a cast, and for gradients. */
static bool keeps_writes(const fsdp_unit *unit) {
  return unit->options.shard_group.world_size == 1 && !unit->options.offloads &&
         !unit->summon.on_host && !unit->summon.on_first_rank_only;
}

/* Gathers, and where this rank shows it, moves it to where it is shown. */
static fsdp_status bring_whole(fsdp_unit *unit, bool is_grad,
                               fsdp_error *error) {
  fsdp_status status = FSDP_OK;

  FSDP_TRY(fsdp_unit_priv_gather_whole(unit, is_grad, error));
  if (!is_shown_here(unit)) {
    fsdp_unit_priv_free_whole(unit, is_grad);
  } else if (unit->summon.on_host) {
    FSDP_TRY(fsdp_unit_priv_move_to_host(unit, is_grad, error));
  }
done:
  return status;
}

static fsdp_status summon_params(fsdp_unit *unit, fsdp_error *error) {
  const fsdp_view_ops *views = &unit->engine->views;
  fsdp_status status = FSDP_OK;

  if (!moves_params(unit)) return FSDP_OK;
  FSDP_TRY(bring_whole(unit, false, error));
  if (is_shown_here(unit)) {
    FSDP_TRY(views->show_params(views->context, unit->options.owner,
                                whole_view(unit), unit->whole.data, error));
    unit->whole.is_shown = true;
  }
done:
  return status;
}

/* flag [in, out]: its value on the first rank of `group` or, with `any`,
 * whether it is set on any rank. The host waits for the exchange. */
static fsdp_status agree(fsdp_unit *unit, const fsdp_group *group, bool any,
                         bool *flag, fsdp_error *error) {
  const fsdp_device_ops *ops = &unit->engine->ops;
  const uint8_t mine = *flag ? 1 : 0;
  uint8_t *all = NULL;
  fsdp_status status = FSDP_OK;

  if (group->world_size == 1) return FSDP_OK;
  all = fsdp_calloc((size_t)group->world_size, sizeof *all);
  if (all == NULL) {
    return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY,
                     "unit '%s': out of host memory for a summon", unit->name);
  }
  FSDP_TRY(ops->all_gather_bytes(ops->context, group, &mine, 1, all, error));
  *flag = all[0] != 0;
  for (int64_t rank = 1; any && rank < group->world_size; rank++) {
    *flag = *flag || all[rank] != 0;
  }
done:
  fsdp_free(all);
  return status;
}

/* flag [in, out]: its value on the rank whose values a write-back broadcasts,
 * the first of the shard group of the first replica. */
static fsdp_status follow_first(fsdp_unit *unit, bool *flag,
                                fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  if (unit->options.shard_group.rank == 0) {
    FSDP_TRY(agree(unit, &unit->options.replica_group, false, flag, error));
  }
  FSDP_TRY(agree(unit, &unit->options.shard_group, false, flag, error));
done:
  return status;
}

/* A segment that was frozen after it had gradients may have them still. Whether
 * it has is known on this rank alone, so all ranks bring it. */
static void thaw(fsdp_unit *unit) {
  for (int64_t i = 0; i < unit->num_segments; i++) {
    fsdp_unit_segment *segment = &unit->segments[i];
    segment->is_thawed = segment->has_grad_place && !segment->is_trainable;
    if (segment->is_thawed) { /* it has a place, so this cannot fail */
      FSDP_IGNORE(fsdp_unit_priv_train(unit, i, true, NULL));
    }
  }
}

static void freeze_again(fsdp_unit *unit) {
  for (int64_t i = 0; i < unit->num_segments; i++) {
    fsdp_unit_segment *segment = &unit->segments[i];
    if (segment->is_thawed) {
      FSDP_IGNORE(fsdp_unit_priv_train(unit, i, false, NULL));
    }
    segment->is_thawed = false;
  }
}

/* Unsharded and partial gradients (no_sync) stay as they are. */
static fsdp_status summon_grads(fsdp_unit *unit, fsdp_error *error) {
  const fsdp_view_ops *views = &unit->engine->views;
  bool has_grads = false;
  fsdp_status status = FSDP_OK;

  if (unit->full_grad_nbytes == 0 || fsdp_unit_holds_grads(unit)) {
    return FSDP_OK;
  }
  thaw(unit);
  FSDP_TRY(views->take_grads(views->context, unit->options.owner, false, NULL,
                             &has_grads, error));
  fsdp_unit_priv_set_grads(unit, FSDP_GRADS_SHARDED, has_grads);
  FSDP_TRY(agree(unit, &unit->options.shard_group, true, &has_grads, error));
  if (!has_grads) return FSDP_OK;
  FSDP_TRY(bring_whole(unit, true, error));
  if (is_shown_here(unit)) {
    FSDP_TRY(views->show_grads(views->context, unit->options.owner,
                               whole_view(unit), unit->whole_grad.data, error));
    unit->whole_grad.is_shown = true;
  } else if (fsdp_unit_priv_has_grads(unit, FSDP_GRADS_SHARDED)) {
    FSDP_TRY(views->show_grads(views->context, unit->options.owner,
                               FSDP_VIEW_SHARDED, NULL, error));
  }
  unit->has_whole_grads = true;
done:
  return status;
}

/* Takes the blocks away from the user, then frees them. */
static void abandon(fsdp_unit *unit) {
  const fsdp_view_ops *views = &unit->engine->views;
  if (unit->whole.is_shown) { /* best effort: an error was reported */
    FSDP_IGNORE(views->show_params(views->context, unit->options.owner,
                                   FSDP_VIEW_SHARDED, NULL, NULL));
  }
  if (unit->whole_grad.is_shown) {
    bool is_live = false; /* of no interest */
    FSDP_IGNORE(views->take_full_grads(views->context, unit->options.owner,
                                       whole_view(unit), unit->whole_grad.data,
                                       &is_live, NULL));
  }
  unit->whole.is_shown = false;
  unit->whole_grad.is_shown = false;
  freeze_again(unit);
  fsdp_unit_priv_abandon_whole(unit);
}

fsdp_status fsdp_unit_summon(fsdp_unit *unit,
                             const fsdp_summon_options *options,
                             fsdp_error *error) {
  fsdp_engine *engine = unit->engine;
  const fsdp_summon_options usual = {0};
  bool any_copied = false; /* on COMPUTE, which every gather waits for */
  fsdp_status status = FSDP_OK;
  FSDP_LOCAL_ERROR(local);
  bool is_enqueued = false;

  if (engine == NULL || unit->is_summoned || engine->depth > 0 ||
      engine->in_backward) {
    return FSDP_FAIL_WITH(
        unit->is_summoned ? FSDP_REMEDY_DISMISS : FSDP_REMEDY_NONE, error,
        FSDP_INVALID_STATE, "the parameters of unit '%s' cannot be summoned %s",
        unit->name,
        engine == NULL        ? "before it was added to an engine"
        : unit->is_summoned   ? "twice"
        : engine->in_backward ? "inside backward"
                              : "inside forward");
  }
  unit->summon = options != NULL ? *options : usual;
  unit->has_whole_grads = false;
  FSDP_TRY(fsdp_unit_priv_reshard(unit, &local)); /* kept for a backward */
  if (unit->num_segments > 0) {
    FSDP_TRY(engine->views.take_params(engine->views.context,
                                       unit->options.owner, FSDP_VIEW_SHARDED,
                                       NULL, &any_copied, &local));
  }
  is_enqueued = true;
  FSDP_TRY(summon_params(unit, &local));
  if (unit->summon.with_grads) FSDP_TRY(summon_grads(unit, &local));
  unit->is_summoned = true;
done:
  if (status != FSDP_OK) {
    if (is_enqueued) {
      abandon(unit);
      fsdp_unit_priv_fail(unit, &local, NULL);
    }
    if (error != NULL) *error = local;
  }
  return status;
}

/* The parameter's shards are shown as a whole: only a replica can differ. */
static fsdp_status write_back_resident(fsdp_unit *unit, fsdp_error *error) {
  fsdp_engine *engine = unit->engine;
  const fsdp_view_ops *views = &engine->views;
  const fsdp_group *group = &unit->options.replica_group;
  fsdp_priv_launch launch;
  bool any_copied = false; /* the copy is on COMPUTE, as what follows */
  fsdp_status status = FSDP_OK;

  FSDP_TRY(views->take_params(views->context, unit->options.owner,
                              FSDP_VIEW_SHARDED, NULL, &any_copied, error));
  if (!unit->summon.on_first_rank_only || group->world_size == 1) {
    return FSDP_OK;
  }
  FSDP_TRY(fsdp_engine_priv_wait_lane(engine, FSDP_LANE_UNSHARD,
                                      FSDP_LANE_COMPUTE, engine->compute_done,
                                      error));
  status = fsdp_engine_priv_open_launch(engine, FSDP_LANE_UNSHARD, group,
                                        &launch, error);
  for (int64_t i = 0; status == FSDP_OK && i < unit->num_segments; i++) {
    const fsdp_segment *segment = unit->segments[i].layout;
    if (segment->padded_numel == 0) continue;
    status = group->transport->ops->broadcast(
        group->transport, &launch.call, unit->segments[i].shard,
        segment->padded_numel, 0, segment->dtype, &launch.ticket, error);
  }
  FSDP_TRY(fsdp_engine_priv_close_launch(engine, &launch, status, error));
  FSDP_TRY(fsdp_engine_priv_wait_lane(
      engine, FSDP_LANE_COMPUTE, FSDP_LANE_UNSHARD, unit->unsharded, error));
done:
  return status;
}

static fsdp_status dismiss_params(fsdp_unit *unit, bool writeback,
                                  fsdp_error *error) {
  const fsdp_view_ops *views = &unit->engine->views;
  bool any_copied = false; /* the copy is on COMPUTE, as what follows */
  fsdp_status status = FSDP_OK;

  if (unit->num_segments == 0) return FSDP_OK;
  if (!moves_params(unit)) {
    return writeback ? write_back_resident(unit, error) : FSDP_OK;
  }
  writeback = writeback || keeps_writes(unit);
  /* First: if a later call fails, another dismiss goes on from here. */
  if (unit->whole.is_shown) {
    if (writeback) {
      FSDP_TRY(views->take_params(views->context, unit->options.owner,
                                  whole_view(unit), unit->whole.data,
                                  &any_copied, error));
    }
    FSDP_TRY(views->show_params(views->context, unit->options.owner,
                                FSDP_VIEW_SHARDED, NULL, error));
    unit->whole.is_shown = false;
  }
  if (writeback && unit->summon.on_first_rank_only) {
    FSDP_TRY(fsdp_unit_priv_broadcast_whole(unit, false, error));
  }
  if (writeback) FSDP_TRY(fsdp_unit_priv_keep_own_piece(unit, false, error));
done:
  return status;
}

static fsdp_status dismiss_grads(fsdp_unit *unit, bool writeback,
                                 fsdp_error *error) {
  const fsdp_view_ops *views = &unit->engine->views;
  fsdp_summoned *whole = &unit->whole_grad;
  fsdp_status status = FSDP_OK;

  if (!unit->has_whole_grads) return FSDP_OK;
  writeback = writeback || keeps_writes(unit);
  if (whole->is_shown) {
    FSDP_TRY(views->take_full_grads(views->context, unit->options.owner,
                                    whole_view(unit), whole->data,
                                    &whole->is_live, error));
    whole->is_shown = false;
  } else if (writeback && !is_shown_here(unit)) {
    /* The first rank's gradients replace those that this rank shows. */
    FSDP_TRY(views->take_grads(views->context, unit->options.owner, false, NULL,
                               &whole->is_live, error));
  }
  if (writeback && unit->summon.on_first_rank_only) {
    FSDP_TRY(follow_first(unit, &whole->is_live, error));
    if (whole->is_live) {
      FSDP_TRY(fsdp_unit_priv_broadcast_whole(unit, true, error));
    }
  }
  if (writeback) {
    if (whole->is_live) {
      FSDP_TRY(fsdp_unit_priv_keep_own_piece(unit, true, error));
    }
    fsdp_unit_priv_set_grads(unit, FSDP_GRADS_SHARDED, whole->is_live);
  }
  if (fsdp_unit_priv_has_grads(unit, FSDP_GRADS_SHARDED)) {
    FSDP_TRY(views->show_grads(views->context, unit->options.owner,
                               FSDP_VIEW_SHARDED, NULL, error));
  }
done:
  return status;
}

fsdp_status fsdp_unit_dismiss(fsdp_unit *unit, bool writeback,
                              fsdp_error *error) {
  fsdp_status status = FSDP_OK;

  if (!unit->is_summoned) {
    return FSDP_FAIL(error, FSDP_INVALID_STATE,
                     "the parameters of unit '%s' are not summoned",
                     unit->name);
  }
  FSDP_TRY(dismiss_params(unit, writeback, error));
  FSDP_TRY(dismiss_grads(unit, writeback, error));
  fsdp_unit_priv_free_whole(unit, false);
  fsdp_unit_priv_free_whole(unit, true);
  freeze_again(unit);
  unit->is_summoned = false;
done:
  return status;
}

void fsdp_unit_priv_end_summon(fsdp_unit *unit) {
  if (!unit->is_summoned) return;
  if (fsdp_unit_dismiss(unit, false, NULL) == FSDP_OK) return;
  abandon(unit);
  unit->is_summoned = false;
}

bool fsdp_unit_is_summoned(const fsdp_unit *unit) {
  return unit->is_summoned;
}
