/*
 * Reduce: a complete gradient block becomes a part of the sharded gradient.
 *
 * Note [Order of reductions]
 * All ranks must issue their collectives in one order, also where gradients
 * become ready in another. The order of the last backward is recorded. In the
 * next one a unit that stands in the record waits until every unit before it
 * that ran forward has been reduced; a unit that does not stand there, or
 * whose turn is over, is reduced as soon as it is ready.
 */
#include "base/alloc.h"
#include "runtime/engine_priv.h"

/* The start of the piece of segment `index`'s gradient that this rank keeps. */
static void *own_slot(const fsdp_unit *unit, int64_t index) {
  const fsdp_unit_segment *segment = &unit->segments[index];
  return (char *)unit->grad_data[index] +
         unit->options.shard_group.rank * segment->layout->shard_numel *
             segment->options.reduce_dtype.itemsize;
}

static fsdp_status reduce_scatter_segments(fsdp_unit *unit, fsdp_error *error) {
  fsdp_engine *engine = unit->engine;
  const fsdp_device_ops *ops = &engine->ops;
  const fsdp_group *group = &unit->options.shard_group;
  fsdp_status status = FSDP_OK;

  fsdp_trace_add(&engine->trace, "reduce_scatter", unit->name);
  FSDP_TRY(ops->group_begin(ops->context, FSDP_LANE_REDUCE, group, error));
  for (int64_t i = 0; i < unit->num_segments; i++) {
    if (unit->grad_data[i] == NULL) continue;
    FSDP_TRY(ops->reduce_scatter(
        ops->context, FSDP_LANE_REDUCE, group, unit->grad_data[i],
        unit->scratch_data[i], unit->segments[i].layout->shard_numel,
        unit->segments[i].options.reduce_dtype, error));
  }
  FSDP_TRY(ops->group_end(ops->context, FSDP_LANE_REDUCE, group, error));
done:
  return status;
}

static fsdp_status all_reduce_segments(fsdp_unit *unit, fsdp_error *error) {
  fsdp_engine *engine = unit->engine;
  const fsdp_device_ops *ops = &engine->ops;
  const fsdp_group *group = &unit->options.replica_group;
  fsdp_status status = FSDP_OK;

  fsdp_trace_add(&engine->trace, "all_reduce", unit->name);
  FSDP_TRY(ops->group_begin(ops->context, FSDP_LANE_REPLICATE, group, error));
  for (int64_t i = 0; i < unit->num_segments; i++) {
    if (unit->grad_data[i] == NULL) continue;
    FSDP_TRY(ops->all_reduce(ops->context, FSDP_LANE_REPLICATE, group,
                             own_slot(unit, i),
                             unit->segments[i].layout->shard_numel,
                             unit->segments[i].options.reduce_dtype, error));
  }
  FSDP_TRY(ops->group_end(ops->context, FSDP_LANE_REPLICATE, group, error));
done:
  return status;
}

/* Adds the reduced pieces to the sharded gradient, scaled to the mean over all
 * ranks. */
static fsdp_status accumulate_segments(fsdp_unit *unit, fsdp_lane lane,
                                       fsdp_error *error) {
  const fsdp_device_ops *ops = &unit->engine->ops;
  const double num_ranks = (double)unit->options.shard_group.world_size *
                           (double)unit->options.replica_group.world_size;
  fsdp_status status = FSDP_OK;

  for (int64_t i = 0; i < unit->num_segments; i++) {
    const fsdp_unit_segment *segment = &unit->segments[i];
    void *grad_shard = NULL;
    if (unit->grad_data[i] == NULL) continue;
    FSDP_TRY(ops->grad_shard(ops->context, unit->options.owner, i, &grad_shard,
                             error));
    FSDP_TRY(ops->accumulate(ops->context, lane, grad_shard,
                             segment->layout->dtype, own_slot(unit, i),
                             segment->options.reduce_dtype,
                             segment->layout->shard_numel,
                             1.0 / (unit->options.prescale * num_ranks),
                             unit->has_sharded_grad, error));
  }
done:
  return status;
}

/* Enqueues everything from the packed block to the sharded gradient. */
static fsdp_status enqueue_reduce(fsdp_unit *unit, fsdp_error *error) {
  fsdp_engine *engine = unit->engine;
  const bool has_shards = unit->options.shard_group.world_size > 1;
  const bool has_replicas = unit->options.replica_group.world_size > 1;
  fsdp_lane lane =
      has_shards || !has_replicas ? FSDP_LANE_REDUCE : FSDP_LANE_REPLICATE;
  fsdp_status status = FSDP_OK;

  FSDP_TRY(fsdp_engine_priv_wait_lane(engine, lane, FSDP_LANE_COMPUTE,
                                      engine->compute_done, error));
  if (has_shards) FSDP_TRY(reduce_scatter_segments(unit, error));
  if (has_replicas) {
    if (has_shards) {
      FSDP_TRY(fsdp_engine_priv_wait_lane(engine, FSDP_LANE_REPLICATE,
                                          FSDP_LANE_REDUCE, engine->reduce_done,
                                          error));
      lane = FSDP_LANE_REPLICATE;
    }
    FSDP_TRY(all_reduce_segments(unit, error));
  }
  FSDP_TRY(accumulate_segments(unit, lane, error));
  FSDP_TRY(fsdp_unit_priv_drop_grads(unit, lane, error));
done:
  return status;
}

static fsdp_status issue_reduce(fsdp_unit *unit, fsdp_error *error) {
  fsdp_engine *engine = unit->engine;
  fsdp_status status = FSDP_OK;
  fsdp_error local = {0};

  unit->is_reduce_ready = false;
  if (!fsdp_grow((void **)&engine->issued_reduces, &engine->issued_capacity,
                 engine->num_issued_reduces + 1,
                 sizeof *engine->issued_reduces)) {
    status = FSDP_FAIL(&local, FSDP_OUT_OF_MEMORY, "record of reductions");
    goto done;
  }
  FSDP_TRY(enqueue_reduce(unit, &local));
  FSDP_TRY(fsdp_unit_state_advance(&unit->state, FSDP_EVENT_REDUCE, &local));
  unit->has_sharded_grad = true;
  unit->had_reduce = true;
  engine->issued_reduces[engine->num_issued_reduces++] = unit;
  engine->num_reduces++;
done:
  if (status != FSDP_OK) {
    fsdp_unit_priv_fail(unit, &local);
    if (error != NULL) *error = local;
  }
  return status;
}

/* Issues, from the cursor on, what stands in the record and is ready. */
static fsdp_status advance_cursor(fsdp_engine *engine, bool skip_unready,
                                  fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  while (engine->reduce_cursor < engine->num_recorded_reduces) {
    fsdp_unit *next = engine->recorded_reduces[engine->reduce_cursor];
    if (next->is_reduce_ready) {
      engine->reduce_cursor++;
      FSDP_TRY(issue_reduce(next, error));
    } else if (skip_unready || !next->ran_forward) {
      engine->reduce_cursor++;
    } else {
      break;
    }
  }
done:
  return status;
}

fsdp_status fsdp_unit_priv_submit_reduce(fsdp_unit *unit, fsdp_error *error) {
  fsdp_engine *engine = unit->engine;
  const int64_t position = unit->reduce_position;

  unit->is_reduce_ready = true;
  if (position < (int64_t)engine->reduce_cursor) { /* -1: not recorded */
    return issue_reduce(unit, error);
  }
  return advance_cursor(engine, false, error);
}

fsdp_status fsdp_engine_priv_flush_reduces(fsdp_engine *engine,
                                           fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  FSDP_TRY(advance_cursor(engine, true, error));
  for (size_t i = engine->num_units; i-- > 0;) {
    if (engine->units[i]->is_reduce_ready) {
      FSDP_TRY(issue_reduce(engine->units[i], error));
    }
  }
done:
  return status;
}

/* This backward's order becomes the recorded one; the arrays swap. */
static void record_order(fsdp_engine *engine) {
  fsdp_unit **units = engine->recorded_reduces;
  const size_t capacity = engine->recorded_capacity;

  for (size_t i = 0; i < engine->num_units; i++) {
    engine->units[i]->reduce_position = -1;
  }
  for (size_t i = 0; i < engine->num_issued_reduces; i++) {
    engine->issued_reduces[i]->reduce_position = (int64_t)i;
  }
  engine->recorded_reduces = engine->issued_reduces;
  engine->recorded_capacity = engine->issued_capacity;
  engine->num_recorded_reduces = engine->num_issued_reduces;
  engine->issued_reduces = units;
  engine->issued_capacity = capacity;
  engine->num_issued_reduces = 0;
  engine->reduce_cursor = 0;
}

fsdp_status fsdp_engine_priv_finish_reduces(fsdp_engine *engine,
                                            fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  if (engine->num_issued_reduces == 0) {
    engine->reduce_cursor = 0;
    return FSDP_OK;
  }
  FSDP_TRY(fsdp_engine_priv_wait_lane(
      engine, FSDP_LANE_COMPUTE, FSDP_LANE_REDUCE, engine->reduce_done, error));
  FSDP_TRY(fsdp_engine_priv_wait_lane(engine, FSDP_LANE_COMPUTE,
                                      FSDP_LANE_REPLICATE,
                                      engine->replicate_done, error));
  record_order(engine);
done:
  return status;
}

void fsdp_engine_priv_reset_reduces(fsdp_engine *engine) {
  engine->num_issued_reduces = 0;
  record_order(engine);
}
