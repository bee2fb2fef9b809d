/* Forward: what happens before and after a unit's module runs. */
#include "runtime/engine_priv.h"

/*
 * Note [Kept between forwards]
 * A unit that does not reshard after forward gathers once for several forwards
 * before a backward: of one loss, or without gradients. With
 * keeps_for_inference it keeps its block also after a forward without gradients
 * that no backward awaits, and shows the shards: an evaluation, or the tokens
 * that a model generates, gather once. Parameters are gathered again
 *   - if they were written in between, or somebody was about to
 *     (fsdp_engine_expect_writes). Then those of all units are: a rank may see
 *     writes to a part of the units only, and all must gather the same;
 *   - if a forward that records a graph finds what one without gradients kept:
 *     weights that were put in place for an evaluation may have been taken back
 *     by writes that torch does not count, such as those into `param.data`.
 * Otherwise such writes between two forwards are not seen. So nothing is kept
 * for inference unless the user said so.
 */

static bool is_kept_for_inference(const fsdp_unit *unit) {
  return unit->state == FSDP_UNIT_KEPT && unit->is_for_inference;
}

/* After a forward without gradients that no backward awaits. */
static bool keeps_for_inference(const fsdp_unit *unit) {
  return !unit->engine->records_graph && !unit->is_resident &&
         unit->settings.keeps_for_inference && !unit->step.is_awaited;
}

/* Whether the unit holds a block that a later forward may use. */
static bool is_kept_between(const fsdp_unit *unit) {
  if (unit->state == FSDP_UNIT_KEPT) return unit->is_for_inference;
  return !unit->settings.reshard_after_forward && unit->step.is_awaited &&
         (unit->state == FSDP_UNIT_HIDDEN ||
          unit->state == FSDP_UNIT_UNSHARDED);
}

static bool any_is_stale(const fsdp_engine *engine) {
  for (size_t i = 0; i < engine->num_units; i++) {
    const fsdp_unit *unit = engine->units[i];
    if (is_kept_between(unit) && fsdp_unit_priv_is_stale(unit)) return true;
  }
  return false;
}

/* Gives back blocks that an earlier iteration kept, but for those that this one
 * may use. */
static fsdp_status drop_stale_params(fsdp_engine *engine, fsdp_error *error) {
  const bool are_stale = any_is_stale(engine);
  fsdp_status status = FSDP_OK;
  for (size_t i = 0; i < engine->num_units; i++) {
    fsdp_unit *unit = engine->units[i];
    if (unit->state == FSDP_UNIT_FAILED) continue;
    if (is_kept_between(unit)) {
      const bool is_in_doubt =
          engine->records_graph && is_kept_for_inference(unit);
      if (!are_stale && !is_in_doubt) continue;
    } else if (unit->state == FSDP_UNIT_KEPT &&
               !fsdp_unit_priv_is_stale(unit)) {
      continue; /* for this micro-batch */
    }
    if (fsdp_unit_priv_is_pinned(unit)) continue;
    FSDP_TRY(fsdp_unit_priv_reshard(unit, error));
  }
done:
  return status;
}

void fsdp_engine_set_records_graph(fsdp_engine *engine, bool records_graph) {
  engine->records_graph = records_graph;
}

/* Whether it has, or gathers, whole parameters between steps. */
static bool keeps_params(const fsdp_unit *unit) {
  return fsdp_unit_state_is_hidden(unit->state) ||
         fsdp_unit_state_is_in_flight(unit->state) ||
         unit->state == FSDP_UNIT_UNSHARDED;
}

bool fsdp_engine_keeps_params(const fsdp_engine *engine) {
  for (size_t i = 0; i < engine->num_units; i++) {
    if (keeps_params(engine->units[i])) return true;
  }
  return false;
}

fsdp_status fsdp_engine_expect_writes(fsdp_engine *engine, fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  if (engine->depth > 0 || engine->in_backward) return FSDP_OK;
  for (size_t i = 0; i < engine->num_units; i++) {
    fsdp_unit *unit = engine->units[i];
    unit->may_be_stale = keeps_params(unit);
    /* Nobody waits for these. */
    if (is_kept_for_inference(unit)) {
      FSDP_TRY(fsdp_unit_priv_reshard(unit, error));
    }
  }
done:
  return status;
}

/* The outermost unit enters: a new iteration. */
static fsdp_status begin_iteration(fsdp_unit *root, fsdp_error *error) {
  fsdp_engine *engine = root->engine;
  fsdp_status status = FSDP_OK;

  FSDP_TRY(drop_stale_params(engine, error));
  engine->shows_kept = false;
  for (size_t i = 0; i < engine->num_units; i++) {
    fsdp_unit_priv_drop_cleared_grads(engine->units[i]);
  }
  /* Once per iteration: the optimizer wrote the shards on the compute lane. */
  FSDP_TRY(fsdp_engine_priv_wait_lane(engine, FSDP_LANE_UNSHARD,
                                      FSDP_LANE_COMPUTE, engine->compute_done,
                                      error));
  if (engine->timeline != NULL && !fsdp_timeline_begin_step(engine->timeline)) {
    engine->timeline = NULL; /* full */
  }
  fsdp_order_begin(engine->order);
  engine->root = root;
  engine->num_iterations++;
  for (size_t i = 0; i < engine->num_units; i++) {
    FSDP_TRY(fsdp_unit_priv_share(engine->units[i], error));
  }
done:
  return status;
}

/* Reserves the block of the unit that is gathered next, so that its gather need
 * not wait for `unit`: see Note [Blocks of a step] in arena.h. Where the order
 * is not known, units are alike, but for the root. */
static fsdp_status reserve_next(const fsdp_unit *unit, fsdp_error *error) {
  const fsdp_engine *engine = unit->engine;
  if (fsdp_engine_priv_is_host(engine)) return FSDP_OK;
  if (!fsdp_order_is_known(engine->order)) {
    if (unit->main == engine->root) return FSDP_OK;
    return fsdp_unit_priv_reserve(unit, error);
  }
  for (int64_t distance = 1;; distance++) {
    const int64_t index = fsdp_order_next_forward(engine->order, distance);
    if (index < 0) return FSDP_OK;
    const fsdp_unit *next = engine->units[index];
    if (!fsdp_unit_state_is_at_rest(next->state)) continue; /* has its block */
    return fsdp_unit_priv_reserve(next, error);
  }
}

/* The outermost unit leaves: unused prefetches are dropped, blocks kept for
 * backward stay shown or are hidden. The user may write
 * the shards on the host next, so the host waits for the uploads, unless a
 * backward follows, which does. */
static fsdp_status end_iteration(fsdp_engine *engine, bool expects_backward,
                                 fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  fsdp_arena_unreserve(engine->arena);
  for (size_t i = 0; i < engine->num_units; i++) {
    fsdp_unit *unit = engine->units[i];
    if (unit->is_pinned) continue;
    if (fsdp_unit_state_is_in_flight(unit->state)) {
      FSDP_TRY(fsdp_unit_priv_reshard(unit, error));
    }
    const bool is_for_backward =
        expects_backward ||
        (unit->options.stays_shown && unit->step.is_awaited);
    if (is_for_backward && unit->options.shows_kept && !unit->is_in_place) {
      fsdp_unit_priv_leave_shown(unit);
    } else {
      FSDP_TRY(fsdp_unit_priv_hide(unit, error));
    }
    if (unit->state == FSDP_UNIT_HIDDEN && keeps_for_inference(unit)) {
      FSDP_TRY(fsdp_unit_priv_advance(unit, FSDP_EVENT_FINISH, error));
      unit->is_for_inference = true;
    }
  }
  if (!expects_backward) FSDP_TRY(fsdp_engine_join_host(engine, error));
done:
  return status;
}

fsdp_status fsdp_unit_pre_forward(fsdp_unit *unit, bool in_backward,
                                  fsdp_error *error) {
  fsdp_engine *engine = unit->engine;
  fsdp_status status = FSDP_OK;

  if (engine == NULL) {
    return FSDP_FAIL(error, FSDP_INVALID_STATE,
                     "unit '%s' ran forward before it was added to an engine",
                     unit->name);
  }
  FSDP_TRY(fsdp_unit_priv_check(unit, error));
  if (unit->is_summoned) return FSDP_OK; /* runs on the whole parameters */

  if (in_backward) { /* a recomputation: no new iteration, no new order */
    FSDP_TRY(fsdp_unit_priv_unshard(unit, error));
    FSDP_TRY(fsdp_unit_priv_wait_unshard(unit, error));
    return FSDP_OK;
  }
  if (engine->in_backward) {
    return FSDP_FAIL_WITH(FSDP_REMEDY_RESET, error, FSDP_INVALID_STATE,
                          "unit '%s' ran forward while a backward that raised "
                          "is still open",
                          unit->name);
  }
  if (engine->depth == 0) FSDP_TRY(begin_iteration(unit, error));
  FSDP_TRY(fsdp_order_pre_forward(engine->order, unit->index, error));
  if (unit->is_full !=
      fsdp_unit_priv_wants_full(unit)) { /* kept, or prefetched too early */
    FSDP_TRY(fsdp_unit_priv_reshard(unit, error));
  }
  FSDP_TRY(fsdp_unit_priv_unshard(unit, error));
  if (fsdp_unit_priv_has_prefetches(unit, FSDP_PASS_FORWARD)) {
    FSDP_TRY(fsdp_unit_priv_prefetch_listed(unit, FSDP_PASS_FORWARD, error));
  } else if (unit->options.forward_prefetch) {
    FSDP_TRY(fsdp_engine_priv_prefetch(
        engine, fsdp_order_next_forward(engine->order, 1), error));
  } else {
    FSDP_TRY(reserve_next(unit, error));
  }
  FSDP_TRY(fsdp_unit_priv_wait_unshard(unit, error));
  unit->step.ran_forward = true;
  engine->ran_forward = true;
  unit->num_forwards++;
  engine->depth++; /* last: the caller leaves forward only if it entered */
done:
  /* Not entered, so nothing stays in flight. The first error is reported. */
  if (status != FSDP_OK) {
    if (unit->state != FSDP_UNIT_UNSHARDED) {
      FSDP_IGNORE(fsdp_unit_priv_reshard(unit, NULL));
    }
    if (engine->depth == 0) FSDP_IGNORE(end_iteration(engine, false, NULL));
  }
  return status;
}

/* Nothing happens if a reset ended the forward already. */
static void leave(fsdp_unit *unit) {
  if (unit->num_forwards > 0) unit->num_forwards--;
  if (unit->engine->depth > 0) unit->engine->depth--;
}

fsdp_status fsdp_unit_post_forward(fsdp_unit *unit, bool in_backward,
                                   bool expects_backward, fsdp_error *error) {
  fsdp_engine *engine = unit->engine;
  fsdp_status status = FSDP_OK;

  /* A unit cannot be summoned during its own forward, so it was before it. */
  if (unit->is_summoned || in_backward) return FSDP_OK;
  FSDP_TRY(fsdp_unit_priv_check(unit, error));
  FSDP_TRY(fsdp_order_post_forward(engine->order, unit->index, error));
  fsdp_unit_priv_unpin(unit);
  const bool is_root = unit->main == engine->root;
  unit->step.is_awaited |= expects_backward;
  /* Also for the graph of an earlier forward, which may reach its parameters
   * first: see fsdp_engine_show_hidden(). */
  const bool is_kept =
      (expects_backward || (unit->step.is_awaited && !unit->is_full)) &&
      (!unit->settings.reshard_after_forward ||
       (is_root && !unit->options.reshards_as_root));
  if (!is_kept && !keeps_for_inference(unit)) {
    FSDP_TRY(expects_backward ? fsdp_unit_priv_part(unit, error)
                              : fsdp_unit_priv_reshard(unit, error));
  }
  if (engine->depth <= 1) {
    FSDP_TRY(fsdp_engine_priv_end_phase(engine, error));
    FSDP_TRY(end_iteration(engine, expects_backward, error));
    FSDP_TRY(fsdp_engine_priv_await_readers(engine, error));
  }
  leave(unit); /* last: see abandon_forward */
done:
  return status;
}

void fsdp_unit_abandon_forward(fsdp_unit *unit, bool in_backward) {
  fsdp_engine *engine = unit->engine;
  if (engine == NULL || unit->is_summoned || in_backward) return;
  leave(unit);
  /* The module's own exception is what the user must see. */
  FSDP_IGNORE(fsdp_unit_priv_reshard(unit, NULL));
  if (engine->depth == 0) FSDP_IGNORE(end_iteration(engine, false, NULL));
}
