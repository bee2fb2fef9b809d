/* Engine and units: creation, destruction, settings, reset after a failure. */
#include <inttypes.h>
#include <string.h>

#include "base/alloc.h"
#include "base/arith.h"
#include "runtime/engine_priv.h"

/* Engine ------------------------------------------------------------------ */

fsdp_status fsdp_engine_create(const fsdp_device_ops *ops,
                               const fsdp_view_ops *views, fsdp_engine **engine,
                               fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  fsdp_engine *self = fsdp_calloc(1, sizeof *self);
  if (self == NULL) {
    return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY,
                     "out of host memory while creating the engine");
  }
  self->ops = *ops;
  self->views = *views;
  self->sync = FSDP_SYNC_REDUCE;
  self->records_graph = true;
  self->order_fingerprint = FSDP_ORDER_FINGERPRINT;
  FSDP_TRY(fsdp_arena_create(&self->ops, &self->arena, error));
  FSDP_TRY(fsdp_order_create(&self->order, error));
  FSDP_TRY(ops->event_create(ops->context, &self->compute_done, error));
  FSDP_TRY(ops->event_create(ops->context, &self->reduce_done, error));
  FSDP_TRY(ops->event_create(ops->context, &self->replicate_done, error));
  FSDP_TRY(ops->event_create(ops->context, &self->upload_done, error));
  FSDP_TRY(ops->event_create(ops->context, &self->download_done, error));
  *engine = self;
  self = NULL;
done:
  fsdp_engine_destroy(self);
  return status;
}

static void destroy_event(fsdp_engine *engine, fsdp_event *event) {
  if (event != NULL) engine->ops.event_destroy(engine->ops.context, event);
}

/* The records hold indices, pointers and names. */
static void forget_unit(fsdp_engine *engine, const fsdp_unit *unit) {
  fsdp_engine_priv_forget_reduces(engine, unit);
  fsdp_order_begin(engine->order);
  fsdp_order_begin(engine->order);
  for (int i = 0; i < FSDP_OP_LOG_CAPACITY; i++) {
    fsdp_op_log_entry *entry = &engine->log.entries[i];
    if (entry->unit == unit->name) entry->unit = NULL;
  }
}

/* Removes the unit from its engine; frees what the engine holds for it. */
static void detach_unit(fsdp_unit *unit) {
  fsdp_engine *engine = unit->engine;
  if (engine == NULL) return;
  fsdp_unit_priv_end_summon(unit);
  /* If it fails, another reset follows. */
  FSDP_IGNORE(fsdp_engine_join_reduces(engine, NULL));
  /* If the record fails, the older event is what is left to wait for. */
  FSDP_IGNORE(fsdp_unit_priv_drop_grads(unit, FSDP_LANE_COMPUTE, NULL));
  fsdp_unit_priv_free_partial(unit);
  fsdp_unit_priv_free_marks(unit);
  fsdp_unit_priv_unshare(unit);
  forget_unit(engine, unit);
  fsdp_engine_priv_forget_prefetches(engine, unit);
  destroy_event(engine, unit->unsharded);
  unit->unsharded = NULL;
  engine->timeline = NULL; /* its entries hold indices */
  for (size_t i = (size_t)unit->index + 1; i < engine->num_units; i++) {
    engine->units[i - 1] = engine->units[i];
    engine->units[i - 1]->index--;
  }
  engine->num_units--;
  if (engine->root == unit) engine->root = NULL;
  for (size_t i = 0; i < engine->num_units; i++) {
    fsdp_unit *other = engine->units[i];
    if (other->main == unit) other->main = other;
  }
  unit->engine = NULL;
  unit->main = NULL;
  unit->param_client = -1;
  unit->grad_client = -1;
  unit->held_client = -1;
  unit->full_client = -1;
  unit->part_client = -1;
}

void fsdp_engine_destroy(fsdp_engine *engine) {
  if (engine == NULL) return;
  if (engine->download_done != NULL) { /* made completely */
    fsdp_engine_reset(engine);         /* joins the lanes */
  }
  while (engine->num_units > 0) {
    detach_unit(engine->units[engine->num_units - 1]);
  }
  fsdp_engine_priv_free_scratch(engine);
  fsdp_engine_priv_free_part_lists(engine);
  destroy_event(engine, engine->compute_done);
  destroy_event(engine, engine->reduce_done);
  destroy_event(engine, engine->replicate_done);
  destroy_event(engine, engine->upload_done);
  destroy_event(engine, engine->download_done);
  fsdp_order_destroy(engine->order);
  fsdp_arena_destroy(engine->arena);
  fsdp_free(engine->recorded_reduces);
  fsdp_free(engine->issued_reduces);
  fsdp_free(engine->units);
  fsdp_free(engine);
}

void fsdp_engine_set_sync(fsdp_engine *engine, fsdp_sync sync) {
  engine->sync = sync;
  for (size_t i = 0; i < engine->num_units; i++)
    engine->units[i]->settings.sync = sync;
}

void fsdp_engine_set_waits_for_reduces(fsdp_engine *engine, bool waits) {
  engine->leaves_reduces_open = !waits;
}

fsdp_sync fsdp_engine_get_sync(const fsdp_engine *engine) {
  return engine->sync;
}

bool fsdp_engine_in_forward(const fsdp_engine *engine) {
  return engine->depth > 0;
}

/* Drops everything of the open step that belongs to one unit. */
static void reset_unit(fsdp_unit *unit) {
  fsdp_engine *engine = unit->engine;
  const fsdp_view_ops *views = &engine->views;

  fsdp_unit_priv_release_pending(unit);
  /* The lanes were drained, so every block is free after COMPUTE. Errors are
   * ignored: the first one was reported. */
  if (unit->step.entered_backward || unit->state == FSDP_UNIT_FAILED) {
    FSDP_IGNORE(fsdp_unit_priv_drop_grads(unit, FSDP_LANE_COMPUTE, NULL));
    /* They may be half accumulated. */
    fsdp_unit_priv_set_grads(unit, FSDP_GRADS_PARTIAL | FSDP_GRADS_SHARDED,
                             false);
  }
  const int64_t clients[] = {unit->param_client, unit->full_client,
                             unit->part_client};
  for (size_t i = 0; i < sizeof clients / sizeof *clients; i++) {
    if (clients[i] < 0 || fsdp_arena_data(engine->arena, clients[i]) == NULL) {
      continue;
    }
    FSDP_IGNORE(
        fsdp_arena_give(engine->arena, clients[i], FSDP_LANE_COMPUTE, NULL));
  }
  fsdp_unit_priv_close(unit);
  if (unit->is_extended) views->ungather(views->context, unit->options.owner);
  if (!unit->is_resident && !unit->is_summoned && unit->num_segments > 0) {
    FSDP_IGNORE(views->show_params(views->context, unit->options.owner,
                                   FSDP_VIEW_SHARDED, NULL, NULL));
  }
  unit->step = (fsdp_unit_step){0};
  unit->num_forwards = 0;
  unit->is_left_shown = false;
  fsdp_unit_priv_unpin(unit);
  FSDP_IGNORE(fsdp_unit_priv_advance(unit, FSDP_EVENT_RESET, NULL));
}

/* Waits until no lane uses memory that may be reused next. */
static void join_lanes(fsdp_engine *engine) {
  for (int lane = FSDP_LANE_UNSHARD; lane < FSDP_NUM_LANES; lane++) {
    /* Work still in flight may fail once more; the first error was reported. */
    FSDP_IGNORE(fsdp_engine_priv_wait_lane(engine, FSDP_LANE_COMPUTE,
                                           (fsdp_lane)lane,
                                           engine->compute_done, NULL));
  }
  FSDP_IGNORE(fsdp_engine_join_host(engine, NULL));
}

void fsdp_engine_reset(fsdp_engine *engine) {
  join_lanes(engine);
  for (size_t i = 0; i < engine->num_units; i++) reset_unit(engine->units[i]);
  fsdp_arena_unreserve(engine->arena);
  if (!fsdp_engine_priv_is_host(engine)) {
    FSDP_IGNORE(fsdp_arena_settle(engine->arena, NULL));
  }
  /* The ranks may have failed at different collectives. */
  engine->order_fingerprint = FSDP_ORDER_FINGERPRINT;
  fsdp_engine_priv_reset_reduces(engine);
  fsdp_order_begin(engine->order);
  engine->in_backward = false;
  engine->depth = 0;
  engine->root = NULL;
}

void fsdp_engine_get_stats(const fsdp_engine *engine,
                           fsdp_engine_stats *stats) {
  memset(stats, 0, sizeof *stats);
  fsdp_arena_get_stats(engine->arena, &stats->arena);
  stats->num_units = (int64_t)engine->num_units;
  for (size_t i = 0; i < engine->num_units; i++) {
    const fsdp_unit *unit = engine->units[i];
    for (int64_t j = 0; j < unit->num_segments; j++) {
      const fsdp_segment *segment = unit->segments[j].layout;
      stats->shard_nbytes += segment->shard_numel * segment->dtype.itemsize;
      if (unit->segments[j].grad_shard != NULL) {
        stats->grad_shard_nbytes +=
            segment->shard_numel *
            unit->segments[j].options.grad_dtype.itemsize;
      }
    }
    if (unit->partial_block != NULL) {
      stats->partial_grad_nbytes += unit->partial_nbytes;
    }
  }
  stats->scratch_nbytes = fsdp_engine_priv_scratch_nbytes(engine);
  stats->num_iterations = engine->num_iterations;
  stats->num_all_gathers = engine->num_all_gathers;
  stats->num_reduces = engine->num_reduces;
  stats->num_prefetches = engine->num_prefetches;
}

const fsdp_op_log *fsdp_engine_log(const fsdp_engine *engine) {
  return &engine->log;
}

/* Unit -------------------------------------------------------------------- */

static fsdp_status check_group(const char *name, const char *what,
                               const fsdp_group *group, fsdp_error *error) {
  if (group->world_size >= 1 && group->rank >= 0 &&
      group->rank < group->world_size) {
    return FSDP_OK;
  }
  return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                   "unit '%s': rank %" PRId64 " is outside the %s of %" PRId64
                   " ranks",
                   name, group->rank, what, group->world_size);
}

static fsdp_status check_unit_options(const fsdp_unit_options *options,
                                      fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  FSDP_TRY(
      check_group(options->name, "shard group", &options->shard_group, error));
  FSDP_TRY(check_group(options->name, "replica group", &options->replica_group,
                       error));
  if (fsdp_flat_layout_world_size(options->layout) !=
      options->shard_group.world_size) {
    status =
        FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                  "unit '%s': its layout is for %" PRId64
                  " ranks, but its shard group has %" PRId64,
                  options->name, fsdp_flat_layout_world_size(options->layout),
                  options->shard_group.world_size);
  }
done:
  return status;
}

fsdp_status fsdp_unit_create(const fsdp_unit_options *options, fsdp_unit **unit,
                             fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  fsdp_unit *self = NULL;

  FSDP_TRY(check_unit_options(options, error));
  const size_t num_segments =
      (size_t)fsdp_flat_layout_num_segments(options->layout);
  const size_t num_params =
      (size_t)fsdp_flat_layout_num_params(options->layout);
  self = fsdp_calloc(1, sizeof *self);
  if (self == NULL) goto no_memory;
  self->options = *options;
  self->options.segments = NULL; /* copied into `segments` below */
  self->param_client = -1;
  self->grad_client = -1;
  self->held_client = -1;
  self->full_client = -1;
  self->part_client = -1;
  self->settings = options->settings;
  self->reduce_position = -1;
  self->num_segments = (int64_t)num_segments;
  self->name = fsdp_strdup(options->name);
  self->segments = fsdp_calloc(num_segments + 1, sizeof *self->segments);
  self->param_data = fsdp_calloc(num_segments, sizeof *self->param_data);
  self->grad_data = fsdp_calloc(num_segments + 1, sizeof *self->grad_data);
  self->stage_data = fsdp_calloc(num_segments + 1, sizeof *self->stage_data);
  self->partial_data =
      fsdp_calloc(num_segments + 1, sizeof *self->partial_data);
  self->whole.data = fsdp_calloc(num_segments, sizeof *self->whole.data);
  self->whole_grad.data =
      fsdp_calloc(num_segments, sizeof *self->whole_grad.data);
  self->is_filled = fsdp_calloc(num_params, sizeof *self->is_filled);
  self->was_used = fsdp_calloc(num_params, sizeof *self->was_used);
  self->pending = fsdp_calloc(num_params, sizeof *self->pending);
  self->items =
      fsdp_calloc(3 * num_params + num_segments + 1, sizeof *self->items);
  if (self->name == NULL || self->segments == NULL ||
      self->param_data == NULL || self->grad_data == NULL ||
      self->stage_data == NULL || self->partial_data == NULL ||
      self->whole.data == NULL || self->whole_grad.data == NULL ||
      self->is_filled == NULL || self->was_used == NULL ||
      self->pending == NULL || self->items == NULL) {
    goto no_memory;
  }
  self->options.name = self->name;
  for (size_t i = 0; i < num_segments; i++) {
    self->segments[i].options = options->segments[i];
    if (options->finds_unused ||
        options->segments[i].held_dtype.itemsize == 0) {
      self->segments[i].options.held_dtype = options->segments[i].reduce_dtype;
    }
    self->segments[i].shard = options->segments[i].shard;
    self->segments[i].layout =
        fsdp_flat_layout_segment(options->layout, (int64_t)i);
  }
  FSDP_TRY(fsdp_unit_priv_place_segments(self, error));
  *unit = self;
  self = NULL;
  goto done;

no_memory:
  status = FSDP_FAIL(error, FSDP_OUT_OF_MEMORY,
                     "unit '%s': out of host memory while creating it",
                     options->name);
done:
  fsdp_unit_destroy(self);
  return status;
}

void fsdp_unit_destroy(fsdp_unit *unit) {
  if (unit == NULL) return;
  if (unit->engine != NULL) {
    /* Collectives in flight end before their memory is used again. */
    FSDP_IGNORE(fsdp_unit_priv_reshard(unit, NULL));
    join_lanes(unit->engine);
    reset_unit(unit);
    detach_unit(unit);
  }
  for (int i = 0; i < FSDP_NUM_PASSES; i++) {
    fsdp_free(unit->prefetches[i].units);
  }
  fsdp_free(unit->items);
  fsdp_free(unit->pending);
  fsdp_free(unit->was_used);
  fsdp_free(unit->is_filled);
  fsdp_free(unit->whole_grad.data);
  fsdp_free(unit->whole.data);
  fsdp_free(unit->partial_data);
  fsdp_free(unit->stage_data);
  fsdp_free(unit->grad_data);
  fsdp_free(unit->param_data);
  fsdp_free(unit->segments);
  fsdp_free(unit->name);
  fsdp_free(unit);
}

/* A unit moves only between steps; kept unsharded gradients stay with the
 * arena that holds them. */
static fsdp_status check_can_leave(const fsdp_unit *unit, fsdp_error *error) {
  const fsdp_engine *engine = unit->engine;

  if (engine == NULL) return FSDP_OK;
  if (engine->depth > 0 || engine->in_backward || unit->is_summoned ||
      fsdp_unit_holds_grads(unit)) {
    return FSDP_FAIL_WITH(FSDP_REMEDY_END_STEP, error, FSDP_INVALID_STATE,
                          "unit '%s' cannot join another FSDP root now: its "
                          "own is in the middle of a step",
                          unit->name);
  }
  return fsdp_unit_priv_check(unit, error);
}

fsdp_status fsdp_engine_add_unit(fsdp_engine *engine, fsdp_unit *unit,
                                 fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  fsdp_event *event = NULL;
  int64_t param_client = -1;
  int64_t grad_client = -1;

  if (engine->depth > 0 || engine->in_backward) {
    return FSDP_FAIL(error, FSDP_INVALID_STATE,
                     "unit '%s' cannot be added in the middle of a step",
                     unit->name);
  }
  FSDP_TRY(check_can_leave(unit, error));
  if (!fsdp_grow((void **)&engine->units, &engine->units_capacity,
                 engine->num_units + 1, sizeof(fsdp_unit *))) {
    status = FSDP_FAIL(error, FSDP_OUT_OF_MEMORY,
                       "unit '%s': out of host memory while adding it to the "
                       "engine",
                       unit->name);
    goto done;
  }
  FSDP_TRY(engine->ops.event_create(engine->ops.context, &event, error));
  if (unit->param_nbytes > 0) {
    FSDP_TRY(fsdp_arena_add_client(engine->arena, unit->param_nbytes,
                                   &param_client, error));
  }
  if (unit->grad_nbytes > 0) {
    FSDP_TRY(fsdp_arena_add_client(engine->arena, unit->grad_nbytes,
                                   &grad_client, error));
  }
  if (unit->engine != NULL) { /* last: until here the unit stays where it is */
    FSDP_TRY(fsdp_unit_priv_reshard(unit, error)); /* kept for a backward */
    detach_unit(unit);
  }
  unit->unsharded = event;
  event = NULL;
  unit->param_client = param_client;
  unit->grad_client = grad_client;
  unit->engine = engine;
  unit->settings.sync = engine->sync;
  unit->index = (int64_t)engine->num_units;
  unit->main = unit->options.is_apart && unit->index > 0
                   ? engine->units[unit->index - 1]->main
                   : unit;
  engine->units[engine->num_units++] = unit;
  engine->offloads = engine->offloads || unit->options.offloads;
done:
  destroy_event(engine, event);
  return status;
}

void *fsdp_unit_shard(const fsdp_unit *unit, int64_t segment) {
  return unit->segments[segment].shard;
}

void fsdp_unit_move_shard(fsdp_unit *unit, int64_t segment, void *shard) {
  unit->segments[segment].shard = shard;
}

void fsdp_unit_set_transports(fsdp_unit *unit, fsdp_transport *shard,
                              fsdp_transport *replica, fsdp_transport *part) {
  unit->options.part_group.transport = part;
  unit->options.shard_group.transport = shard;
  unit->options.replica_group.transport = replica;
}

fsdp_unit_state fsdp_unit_get_state(const fsdp_unit *unit) {
  return unit->state;
}

const char *fsdp_unit_name(const fsdp_unit *unit) {
  return unit->name;
}

int64_t fsdp_unit_pending_grads(const fsdp_unit *unit) {
  return unit->step.expected_grads + unit->step.expected_inputs;
}

fsdp_unit_settings *fsdp_unit_get_settings(fsdp_unit *unit) {
  return &unit->settings;
}

bool fsdp_unit_is_of_parts(const fsdp_unit *unit) {
  return unit->is_of_parts;
}
