/* Unshard and reshard: an all-gather fills a block; reshard gives it back. */
#include <assert.h>

#include "base/alloc.h"
#include "runtime/engine_priv.h"

static void *at_nbytes(void *base, int64_t nbytes) {
  assert(base != NULL);
  return (char *)base + nbytes;
}

/* Where this rank's shard, or part, of an unsharded segment lies. */
static void *slot_in(const fsdp_unit *unit, int64_t segment, bool of_parts) {
  const fsdp_unit_segment *self = &unit->segments[segment];
  const fsdp_group *group =
      of_parts ? &unit->options.part_group : &unit->options.shard_group;
  const int64_t numel =
      of_parts ? self->options.part_numel : self->layout->shard_numel;
  return fsdp_priv_slot(unit->param_data[segment], group->rank, numel,
                        fsdp_unit_priv_param_dtype(unit, segment));
}

static int64_t param_client(const fsdp_unit *unit) {
  return unit->is_full ? unit->full_client : unit->param_client;
}

/* Points param_data at the segments of `block`; NULL: all are resident. */
static void place_segments(fsdp_unit *unit, void *block) {
  for (int64_t i = 0; i < unit->num_segments; i++) {
    const fsdp_unit_segment *segment = &unit->segments[i];
    const int64_t offset =
        unit->is_full ? segment->full_offset : segment->param_offset;
    unit->param_data[i] = segment->is_resident || block == NULL
                              ? segment->shard
                              : at_nbytes(block, offset);
  }
}

/* The lane that uses the unit's block first. */
static fsdp_lane first_lane(const fsdp_unit *unit, bool of_parts) {
  return unit->options.offloads && !of_parts ? FSDP_LANE_UPLOAD
                                             : FSDP_LANE_UNSHARD;
}

/* Takes the block that this unshard needs. */
static fsdp_status take_block(fsdp_unit *unit, bool of_parts, void **block,
                              fsdp_error *error) {
  fsdp_engine *engine = unit->engine;
  fsdp_status status = FSDP_OK;

  if (unit->is_full && unit->full_client < 0) {
    FSDP_TRY(fsdp_arena_add_client(engine->arena, unit->full_nbytes,
                                   &unit->full_client, error));
  }
  FSDP_TRY(fsdp_arena_take(engine->arena, param_client(unit),
                           first_lane(unit, of_parts), block, error));
done:
  return status;
}

/* Gives back what this unshard took; the work now on `last_use` was
 * its last. */
static fsdp_status give_block(fsdp_unit *unit, fsdp_lane last_use,
                              fsdp_error *error) {
  if (unit->is_in_place) {
    fsdp_unit_priv_close(unit);
    return FSDP_OK;
  }
  return fsdp_arena_give(unit->engine->arena, param_client(unit), last_use,
                         error);
}

/* Casts the shard of each segment whose parameters have another dtype into its
 * slot of the block; a lone rank copies all that is not resident. */
static fsdp_status cast_shards(fsdp_unit *unit, fsdp_error *error) {
  const bool is_alone = unit->options.shard_group.world_size == 1;
  int64_t num_items = 0;

  for (int64_t i = 0; i < unit->num_segments; i++) {
    const fsdp_unit_segment *segment = &unit->segments[i];
    if (segment->is_resident) continue;
    if (!is_alone && !fsdp_unit_priv_is_cast(unit, i)) continue;
    unit->items[num_items++] = (fsdp_pack_item){
        .to = slot_in(unit, i, false),
        .to_dtype = fsdp_unit_priv_param_dtype(unit, i),
        .from_dtype = segment->layout->dtype,
        .from = segment->shard,
        .numel = segment->layout->shard_numel,
    };
  }
  return fsdp_unit_priv_pack_items(unit, FSDP_LANE_UNSHARD, num_items, 1.0,
                                   error);
}

/* Brings the parts into their slots, instead of the shards, and gives their
 * block back. */
static fsdp_status place_parts(fsdp_unit *unit, fsdp_error *error) {
  fsdp_engine *engine = unit->engine;
  const fsdp_device_ops *ops = &engine->ops;
  const fsdp_view_ops *views = &engine->views;
  const char *parts = fsdp_arena_data(engine->arena, unit->part_client);
  fsdp_status status = FSDP_OK;
  int64_t num_items = 0;

  FSDP_TRY(
      ops->event_wait(ops->context, FSDP_LANE_UNSHARD, unit->unsharded, error));
  for (int64_t i = 0; i < unit->num_segments; i++) {
    const fsdp_unit_segment *segment = &unit->segments[i];
    const fsdp_dtype dtype = fsdp_unit_priv_param_dtype(unit, i);
    if (segment->is_resident) continue;
    unit->items[num_items++] =
        (fsdp_pack_item){.to = slot_in(unit, i, true),
                         .to_dtype = dtype,
                         .from_dtype = dtype,
                         .from = parts + segment->part_offset,
                         .numel = segment->options.part_numel};
  }
  FSDP_TRY(fsdp_unit_priv_pack_items(unit, FSDP_LANE_UNSHARD, num_items, 1.0,
                                     error));
  FSDP_TRY(views->show_params(views->context, unit->options.owner,
                              FSDP_VIEW_SHARDED, NULL, error));
  FSDP_TRY(fsdp_arena_give(engine->arena, unit->part_client, FSDP_LANE_UNSHARD,
                           error));
done:
  return status;
}

/* Brings the shards into their slots, where they need it. last_use [out] the
 * lane that used the block last. */
static fsdp_status place_shards(fsdp_unit *unit, void *block,
                                fsdp_lane *last_use, fsdp_error *error) {
  if (!unit->options.offloads) return cast_shards(unit, error);
  return fsdp_unit_priv_upload(unit, block, last_use, error);
}

static fsdp_status gather_extended(fsdp_unit *unit, int64_t segment,
                                   const fsdp_call *call, uint64_t *ticket,
                                   int64_t *nbytes, fsdp_error *error) {
  const fsdp_view_ops *views = &unit->engine->views;
  return views->gather(views->context, unit->options.owner, segment,
                       &unit->options.shard_group, call, ticket, nbytes, error);
}

/* A group of one rank. */
static fsdp_status gather_alone(fsdp_unit *unit, fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  int64_t nbytes = 0;
  for (int64_t i = 0; i < unit->num_segments; i++) {
    if (!unit->segments[i].options.is_extended) continue;
    FSDP_TRY(gather_extended(unit, i, NULL, NULL, &nbytes, error));
  }
done:
  return status;
}

/* One grouped all-gather of all segments, of the shards or of the parts.
 * Without a cast or an upload, the shard itself is the send buffer. */
static fsdp_status gather_segments(fsdp_unit *unit, bool of_parts,
                                   fsdp_error *error) {
  fsdp_engine *engine = unit->engine;
  const fsdp_view_ops *views = &engine->views;
  const fsdp_group *group =
      of_parts ? &unit->options.part_group : &unit->options.shard_group;
  fsdp_priv_launch launch;

  if (group->world_size == 1) return gather_alone(unit, error);
  fsdp_op_log_add(&engine->log, "all_gather", unit->name);
  const fsdp_priv_span span =
      fsdp_engine_priv_begin(engine, FSDP_TIMELINE_ALL_GATHER);
  const bool is_custom = (unit->settings.custom & FSDP_CUSTOM_ALL_GATHER) != 0;
  int64_t nbytes = 0;
  fsdp_status status = fsdp_engine_priv_open_launch(engine, FSDP_LANE_UNSHARD,
                                                    group, &launch, error);
  if (status == FSDP_OK && unit->is_in_place) {
    status = fsdp_unit_priv_open(unit, &launch.call, &launch.ticket, error);
    nbytes = unit->param_nbytes;
  }
  for (int64_t i = 0;
       status == FSDP_OK && !unit->is_in_place && i < unit->num_segments; i++) {
    const fsdp_unit_segment *segment = &unit->segments[i];
    const fsdp_dtype dtype = fsdp_unit_priv_param_dtype(unit, i);
    const bool sends_shard = !of_parts && !unit->options.offloads &&
                             fsdp_dtype_equal(dtype, segment->layout->dtype);
    if (segment->options.is_extended) {
      status = gather_extended(unit, i, &launch.call, &launch.ticket, &nbytes,
                               error);
      continue;
    }
    const int64_t numel =
        of_parts ? segment->options.part_numel : segment->layout->shard_numel;
    if (numel == 0) continue;
    const void *input =
        sends_shard ? segment->shard : slot_in(unit, i, of_parts);
    status = is_custom
                 ? views->custom_add(
                       views->context, unit->options.owner, unit->param_data[i],
                       numel * group->world_size, input, numel, dtype, error)
                 : group->transport->ops->all_gather(
                       group->transport, &launch.call, unit->param_data[i],
                       input, numel, dtype, &launch.ticket, error);
    nbytes += numel * group->world_size * dtype.itemsize;
  }
  FSDP_TRY(fsdp_engine_priv_close_launch(engine, &launch, status, error));
  if (is_custom) {
    FSDP_TRY(views->custom_run(views->context, unit->options.owner,
                               FSDP_LANE_UNSHARD, FSDP_CUSTOM_ALL_GATHER, group,
                               1.0, error));
  }
  fsdp_engine_priv_end(engine, unit, span, nbytes, 0);
  engine->num_all_gathers++;
done:
  return status;
}

/* A gather that only other ranks want: into memory of its own, so that the
 * unit's block, state and views stay as they are. */
static fsdp_status gather_for_others(fsdp_unit *unit, bool is_full,
                                     fsdp_error *error) {
  fsdp_engine *engine = unit->engine;
  const fsdp_device_ops *ops = &engine->ops;
  const fsdp_view_ops *views = &engine->views;
  const int64_t nbytes = is_full ? unit->full_nbytes : unit->param_nbytes;
  void **own_data = unit->param_data;
  const bool was_full = unit->is_full;
  fsdp_status status = FSDP_OK;
  fsdp_lane last_use = FSDP_LANE_UNSHARD;
  void *block = NULL;
  bool any_copied = false;

  if (unit->is_resident) return FSDP_OK;
  void **data = fsdp_calloc((size_t)unit->num_segments, sizeof *data);
  if (data == NULL) {
    return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY,
                     "unit '%s': out of host memory for gathering it for other "
                     "ranks",
                     unit->name);
  }
  if (unit->state != FSDP_UNIT_UNSHARDED && !unit->is_summoned &&
      !unit->step.shows_shapes) {
    FSDP_TRY(views->take_params(views->context, unit->options.owner,
                                FSDP_VIEW_SHARDED, NULL, &any_copied, error));
  }
  FSDP_TRY(fsdp_engine_priv_alloc(engine, nbytes, &block, error));
  FSDP_TRY(fsdp_engine_priv_wait_lane(engine, first_lane(unit, false),
                                      FSDP_LANE_COMPUTE, engine->compute_done,
                                      error));
  unit->param_data = data;
  unit->is_full = is_full;
  place_segments(unit, block);
  FSDP_TRY(place_shards(unit, block, &last_use, error));
  FSDP_TRY(gather_segments(unit, false, error));
done:
  unit->param_data = own_data;
  unit->is_full = was_full;
  if (block != NULL) { /* also after a failure: the lane may be writing it */
    const bool is_first = status == FSDP_OK;
    const fsdp_status waited = fsdp_engine_priv_wait_lane(
        engine, FSDP_LANE_COMPUTE, last_use, engine->compute_done,
        is_first ? error : NULL);
    if (is_first) status = waited;
    ops->block_free(ops->context, block, nbytes);
  }
  fsdp_free(data);
  return status;
}

fsdp_status fsdp_engine_priv_agree(fsdp_engine *engine,
                                   const fsdp_priv_next *next,
                                   fsdp_priv_turn *turn, fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  do {
    FSDP_TRY(fsdp_engine_priv_compare_next(engine, next, turn, error));
    if (turn->kind == FSDP_TURN_SERVE) {
      FSDP_TRY(gather_for_others(turn->unit, turn->is_full, error));
    }
  } while (turn->kind == FSDP_TURN_SERVE || turn->kind == FSDP_TURN_AGAIN);
done:
  return status;
}

/* With the check of the order on: all ranks gather the unit now. */
static fsdp_status agree_on_gather(fsdp_unit *unit, fsdp_error *error) {
  const fsdp_priv_next next = {.op = FSDP_OP_GATHER,
                               .unit = unit,
                               .is_full = fsdp_unit_priv_wants_full(unit),
                               .detail = ""};
  fsdp_priv_turn turn;
  return fsdp_engine_priv_agree(unit->engine, &next, &turn, error);
}

fsdp_status fsdp_unit_priv_hide_shapes(fsdp_unit *unit, fsdp_error *error) {
  const fsdp_view_ops *views = &unit->engine->views;
  if (!unit->step.shows_shapes) return FSDP_OK;
  unit->step.shows_shapes = false;
  return views->show_params(views->context, unit->options.owner,
                            FSDP_VIEW_SHARDED, NULL, error);
}

/* event: UNSHARD or PREFETCH. */
static fsdp_status unshard(fsdp_unit *unit, fsdp_unit_event event,
                           bool is_on_demand, fsdp_error *error) {
  fsdp_engine *engine = unit->engine;
  const fsdp_device_ops *ops = &engine->ops;
  const fsdp_view_ops *views = &engine->views;
  fsdp_status status = FSDP_OK;
  FSDP_LOCAL_ERROR(local);
  void *block = NULL;
  fsdp_lane last_use =
      FSDP_LANE_UNSHARD; /* of the block, if it is given back */
  const bool of_parts = unit->state == FSDP_UNIT_PARTED;
  bool is_enqueued = false;
  bool any_copied = false;

  if (!fsdp_unit_state_is_at_rest(unit->state) &&
      unit->state != FSDP_UNIT_REDUCING) {
    return fsdp_unit_priv_check(unit, error);
  }
  const fsdp_priv_span span =
      fsdp_engine_priv_begin(engine, FSDP_TIMELINE_UNSHARD);
  FSDP_TRY(fsdp_unit_priv_hide_shapes(unit, &local));
  if (!of_parts) { /* those may be older than what the user writes */
    FSDP_TRY(views->take_params(views->context, unit->options.owner,
                                FSDP_VIEW_SHARDED, NULL, &any_copied, &local));
  }
  if (any_copied) {
    FSDP_TRY(fsdp_engine_priv_wait_lane(engine, FSDP_LANE_UNSHARD,
                                        FSDP_LANE_COMPUTE, engine->compute_done,
                                        &local));
  }
  if (fsdp_unit_priv_is_checked(unit)) FSDP_TRY(agree_on_gather(unit, &local));
  unit->is_full = fsdp_unit_priv_wants_full(unit);
  unit->may_be_stale = false;
  fsdp_unit_priv_choose_place(unit, is_on_demand);
  if (!unit->is_resident && !unit->is_in_place) {
    FSDP_TRY(take_block(unit, of_parts, &block, &local));
  }
  unit->is_of_parts = of_parts;
  place_segments(unit, unit->is_in_place ? unit->shared_whole : block);
  if (!unit->is_resident) {
    if (of_parts) {
      is_enqueued = true;
      FSDP_TRY(place_parts(unit, &local));
    } else if (!unit->is_in_place) {
      FSDP_TRY(place_shards(unit, block, &last_use, &local));
    }
    is_enqueued = true;
    FSDP_TRY(gather_segments(unit, of_parts, &local));
    FSDP_TRY(ops->event_record(ops->context, unit->unsharded, FSDP_LANE_UNSHARD,
                               &local));
  }
  FSDP_TRY(fsdp_unit_priv_advance(unit, event, &local));
  fsdp_engine_priv_end(
      engine, unit, span, 0,
      event == FSDP_EVENT_PREFETCH ? FSDP_TIMELINE_IS_AHEAD : 0);
done:
  if (status != FSDP_OK) {
    if (block != NULL || unit->is_in_place) {
      /* Best effort: the first error is the one to report. */
      FSDP_IGNORE(give_block(unit, last_use, NULL));
    }
    /* A collective that may have been enqueued cannot be taken back. */
    if (is_enqueued) fsdp_unit_priv_fail(unit, &local, NULL);
    if (error != NULL) *error = local;
  }
  return status;
}

fsdp_status fsdp_unit_priv_unshard(fsdp_unit *unit, fsdp_error *error) {
  return unshard(unit, FSDP_EVENT_UNSHARD, false, error);
}

fsdp_status fsdp_unit_priv_unshard_on_demand(fsdp_unit *unit,
                                             fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  if (unit->is_in_place) FSDP_TRY(fsdp_unit_priv_reshard(unit, error));
  FSDP_TRY(unshard(unit, FSDP_EVENT_UNSHARD, true, error));
done:
  return status;
}

fsdp_status fsdp_unit_priv_wait_unshard(fsdp_unit *unit, fsdp_error *error) {
  const fsdp_device_ops *ops = &unit->engine->ops;
  const fsdp_view_ops *views = &unit->engine->views;
  const bool is_hidden = fsdp_unit_state_is_hidden(unit->state);
  const bool is_ahead = unit->state == FSDP_UNIT_PREFETCHED;
  fsdp_status status = FSDP_OK;
  FSDP_LOCAL_ERROR(local);

  if (!is_hidden && !fsdp_unit_state_is_in_flight(unit->state)) {
    return fsdp_unit_priv_check(unit, error);
  }
  const fsdp_priv_span span =
      fsdp_engine_priv_begin(unit->engine, FSDP_TIMELINE_WAIT_UNSHARD);
  if (!unit->is_resident) {
    FSDP_TRY(ops->event_wait(ops->context, FSDP_LANE_COMPUTE, unit->unsharded,
                             &local));
    FSDP_TRY(
        views->show_params(views->context, unit->options.owner,
                           unit->is_full ? FSDP_VIEW_FULL : FSDP_VIEW_UNSHARDED,
                           unit->param_data, &local));
  }
  fsdp_engine_priv_end(unit->engine, unit, span, 0,
                       (is_hidden ? FSDP_TIMELINE_IS_KEPT : 0) |
                           (is_ahead ? FSDP_TIMELINE_IS_AHEAD : 0));
  FSDP_TRY(fsdp_unit_priv_advance(unit, FSDP_EVENT_WAIT, &local));
done:
  if (status != FSDP_OK) fsdp_unit_priv_fail(unit, &local, error);
  return status;
}

void fsdp_unit_priv_leave_shown(fsdp_unit *unit) {
  const fsdp_view_ops *views = &unit->engine->views;
  if (unit->state != FSDP_UNIT_UNSHARDED || unit->is_resident) return;
  views->mark_params(views->context, unit->options.owner);
  unit->is_left_shown = unit->engine->shows_kept = true;
}

fsdp_status fsdp_unit_priv_take_writes(fsdp_unit *unit, bool in_backward,
                                       fsdp_error *error) {
  const fsdp_view_ops *views = &unit->engine->views;
  if (!unit->is_left_shown) return FSDP_OK;
  unit->is_left_shown = false;
  return views->take_writes(views->context, unit->options.owner, in_backward,
                            error);
}

/* PARTED -> SHARDED. */
static fsdp_status drop_parts(fsdp_unit *unit, fsdp_error *error) {
  const fsdp_view_ops *views = &unit->engine->views;
  fsdp_status status = FSDP_OK;
  FSDP_TRY(views->show_params(views->context, unit->options.owner,
                              FSDP_VIEW_SHARDED, NULL, error));
  FSDP_TRY(fsdp_arena_give(unit->engine->arena, unit->part_client,
                           FSDP_LANE_COMPUTE, error));
  FSDP_TRY(fsdp_unit_priv_advance(unit, FSDP_EVENT_RESHARD, error));
done:
  return status;
}

fsdp_status fsdp_unit_priv_part(fsdp_unit *unit, fsdp_error *error) {
  fsdp_engine *engine = unit->engine;
  const fsdp_device_ops *ops = &engine->ops;
  const fsdp_view_ops *views = &engine->views;
  fsdp_status status = FSDP_OK;
  FSDP_LOCAL_ERROR(local);
  void *block = NULL;

  if (!unit->settings.keeps_part || unit->options.part_group.world_size < 2 ||
      unit->state != FSDP_UNIT_UNSHARDED || unit->is_full ||
      unit->part_nbytes == 0) {
    return fsdp_unit_priv_reshard(unit, error);
  }
  if (unit->part_client < 0) {
    FSDP_TRY(fsdp_arena_add_client(engine->arena, unit->part_nbytes,
                                   &unit->part_client, &local));
  }
  FSDP_TRY(fsdp_arena_take(engine->arena, unit->part_client, FSDP_LANE_COMPUTE,
                           &block, &local));
  for (int64_t i = 0; i < unit->num_segments; i++) {
    unit->param_data[i] = at_nbytes(block, unit->segments[i].part_offset);
  }
  FSDP_TRY(views->show_params(views->context, unit->options.owner,
                              FSDP_VIEW_PART, unit->param_data, &local));
  FSDP_TRY(ops->event_record(ops->context, unit->unsharded, FSDP_LANE_COMPUTE,
                             &local));
  FSDP_TRY(fsdp_arena_give(engine->arena, unit->param_client, FSDP_LANE_COMPUTE,
                           &local));
  FSDP_TRY(fsdp_unit_priv_advance(unit, FSDP_EVENT_PART, &local));
done:
  if (status != FSDP_OK) fsdp_unit_priv_fail(unit, &local, error);
  return status;
}

fsdp_status fsdp_unit_priv_reshard(fsdp_unit *unit, fsdp_error *error) {
  const fsdp_device_ops *ops = &unit->engine->ops;
  const fsdp_view_ops *views = &unit->engine->views;
  fsdp_status status = FSDP_OK;
  FSDP_LOCAL_ERROR(local);
  const bool is_shown = unit->state == FSDP_UNIT_UNSHARDED;
  /* Otherwise its own lane is still writing the block. */
  const bool was_used = is_shown || fsdp_unit_state_is_hidden(unit->state);

  if (unit->state == FSDP_UNIT_PARTED) {
    FSDP_TRY(drop_parts(unit, &local));
    return FSDP_OK;
  }
  if (!was_used && !fsdp_unit_state_is_in_flight(unit->state)) {
    return fsdp_unit_priv_check(unit, error);
  }
  status = fsdp_unit_priv_take_writes(unit, false, error);
  if (status != FSDP_OK) return status; /* nothing has changed */
  const fsdp_priv_span span =
      fsdp_engine_priv_begin(unit->engine, FSDP_TIMELINE_RESHARD);
  if (!unit->is_resident) {
    if (is_shown) {
      FSDP_TRY(views->show_params(views->context, unit->options.owner,
                                  FSDP_VIEW_SHARDED, NULL, &local));
    } else if (was_used) {
      views->empty_params(views->context, unit->options.owner);
    }
    /* Nobody reads the shards any more when the optimizer steps them. */
    if (!was_used) {
      FSDP_TRY(ops->event_wait(ops->context, FSDP_LANE_COMPUTE, unit->unsharded,
                               &local));
    }
    if (unit->is_extended) {
      views->ungather(views->context, unit->options.owner);
    }
    FSDP_TRY(give_block(unit, FSDP_LANE_COMPUTE, &local));
  }
  FSDP_TRY(fsdp_unit_priv_advance(unit, FSDP_EVENT_RESHARD, &local));
  fsdp_engine_priv_end(unit->engine, unit, span, 0,
                       was_used ? 0 : FSDP_TIMELINE_IS_UNUSED);
done:
  if (status != FSDP_OK) fsdp_unit_priv_fail(unit, &local, error);
  return status;
}

fsdp_status fsdp_unit_priv_show_shapes(fsdp_unit *unit, fsdp_error *error) {
  const fsdp_view_ops *views = &unit->engine->views;
  fsdp_status status = FSDP_OK;
  if (unit->is_resident) return fsdp_unit_priv_unshard(unit, error);
  FSDP_TRY(fsdp_unit_priv_reshard(unit, error)); /* a part of the block */
  FSDP_TRY(views->show_params(views->context, unit->options.owner,
                              FSDP_VIEW_UNSHARDED, NULL, error));
  unit->step.shows_shapes = true;
done:
  return status;
}

fsdp_status fsdp_unit_priv_hide(fsdp_unit *unit, fsdp_error *error) {
  const fsdp_view_ops *views = &unit->engine->views;
  fsdp_status status = FSDP_OK;
  FSDP_LOCAL_ERROR(local);

  if (unit->state != FSDP_UNIT_UNSHARDED || unit->is_resident) return FSDP_OK;
  if (unit->is_in_place) return fsdp_unit_priv_reshard(unit, error);
  status = fsdp_unit_priv_take_writes(unit, false, error);
  if (status != FSDP_OK) return status; /* nothing has changed */
  FSDP_TRY(views->show_params(views->context, unit->options.owner,
                              FSDP_VIEW_SHARDED, unit->param_data, &local));
  views->mark_params(views->context, unit->options.owner);
  FSDP_TRY(fsdp_unit_priv_advance(unit, FSDP_EVENT_HIDE, &local));
done:
  if (status != FSDP_OK) fsdp_unit_priv_fail(unit, &local, error);
  return status;
}

fsdp_status fsdp_unit_priv_reserve(const fsdp_unit *unit, fsdp_error *error) {
  const int64_t nbytes =
      fsdp_unit_priv_wants_full(unit) ? unit->full_nbytes : unit->param_nbytes;
  if (unit->is_resident || unit->is_summoned) return FSDP_OK;
  return fsdp_arena_reserve(unit->engine->arena, nbytes, error);
}

fsdp_status fsdp_engine_priv_prefetch(fsdp_engine *engine, int64_t index,
                                      fsdp_error *error) {
  if (index < 0) return FSDP_OK;
  fsdp_unit *unit = engine->units[index];
  if (!fsdp_unit_state_is_at_rest(unit->state) || unit->is_summoned) {
    return FSDP_OK;
  }
  engine->num_prefetches++;
  return unshard(unit, FSDP_EVENT_PREFETCH, false, error);
}
