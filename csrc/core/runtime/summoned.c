/*
 * Whole segments in memory of their own: gathered from the shards, moved to the
 * host, broadcast, and written back. Parameters are in master dtype, gradients
 * in grad dtype.
 */
#include <string.h>

#include "runtime/engine_priv.h"

static fsdp_summoned *whole_of(fsdp_unit *unit, bool is_grad) {
  return is_grad ? &unit->whole_grad : &unit->whole;
}

static int64_t whole_nbytes(const fsdp_unit *unit, bool is_grad) {
  return is_grad ? unit->full_grad_nbytes : unit->full_nbytes;
}

static fsdp_dtype dtype_of(const fsdp_unit *unit, int64_t segment,
                           bool is_grad) {
  return is_grad ? unit->segments[segment].options.grad_dtype
                 : unit->segments[segment].layout->dtype;
}

static void *own_slot(fsdp_unit *unit, int64_t segment, bool is_grad) {
  return fsdp_priv_slot(whole_of(unit, is_grad)->data[segment],
                        unit->options.shard_group.rank,
                        unit->segments[segment].layout->shard_numel,
                        dtype_of(unit, segment, is_grad));
}

/* The shard of the segment, or its sharded gradient. */
static void *shard_of(const fsdp_unit *unit, int64_t segment, bool is_grad) {
  return is_grad ? unit->segments[segment].grad_shard
                 : unit->segments[segment].shard;
}

static void place_whole(fsdp_unit *unit, bool is_grad, void *block) {
  fsdp_summoned *whole = whole_of(unit, is_grad);
  for (int64_t i = 0; i < unit->num_segments; i++) {
    const fsdp_unit_segment *segment = &unit->segments[i];
    const int64_t offset =
        is_grad ? segment->full_grad_offset : segment->full_offset;
    whole->data[i] =
        is_grad && !segment->is_trainable ? NULL : (char *)block + offset;
  }
}

static fsdp_status take_block(fsdp_unit *unit, bool is_grad,
                              fsdp_error *error) {
  fsdp_summoned *whole = whole_of(unit, is_grad);
  fsdp_status status = FSDP_OK;

  FSDP_TRY(fsdp_engine_priv_alloc(unit->engine, whole_nbytes(unit, is_grad),
                                  &whole->block, error));
  place_whole(unit, is_grad, whole->block);
done:
  return status;
}

/* Whether the shard itself can be the send buffer of the all-gather. */
static bool sends_shard(const fsdp_unit *unit, bool is_grad) {
  return unit->options.shard_group.world_size > 1 && !unit->options.offloads &&
         (!is_grad || fsdp_unit_priv_has_grads(unit, FSDP_GRADS_SHARDED));
}

/* Copies this rank's shards into their slots; zeros for gradients it lacks. */
static fsdp_status fill_own_slots(fsdp_unit *unit, bool is_grad,
                                  fsdp_error *error) {
  const fsdp_device_ops *ops = &unit->engine->ops;
  const bool is_zero =
      is_grad && !fsdp_unit_priv_has_grads(unit, FSDP_GRADS_SHARDED);
  fsdp_status status = FSDP_OK;
  int64_t num_items = 0;

  for (int64_t i = 0; i < unit->num_segments; i++) {
    const fsdp_dtype dtype = dtype_of(unit, i, is_grad);
    const int64_t numel = unit->segments[i].layout->shard_numel;
    if (whole_of(unit, is_grad)->data[i] == NULL || numel == 0) continue;
    if (!is_zero && unit->options.offloads) {
      FSDP_TRY(ops->copy_to_device(
          ops->context, FSDP_LANE_COMPUTE, own_slot(unit, i, is_grad),
          shard_of(unit, i, is_grad), numel * dtype.itemsize, error));
      continue;
    }
    unit->items[num_items++] =
        (fsdp_pack_item){.to = own_slot(unit, i, is_grad),
                         .to_dtype = dtype,
                         .from_dtype = dtype,
                         .from = is_zero ? NULL : shard_of(unit, i, is_grad),
                         .numel = numel};
  }
  FSDP_TRY(fsdp_unit_priv_pack_items(unit, FSDP_LANE_COMPUTE, num_items, 1.0,
                                     error));
done:
  return status;
}

static fsdp_status gather_slots(fsdp_unit *unit, bool is_grad,
                                fsdp_error *error) {
  fsdp_engine *engine = unit->engine;
  const fsdp_group *group = &unit->options.shard_group;
  const fsdp_summoned *whole = whole_of(unit, is_grad);
  fsdp_priv_launch launch;

  fsdp_op_log_add(&engine->log, "all_gather (summon)", unit->name);
  fsdp_status status = fsdp_engine_priv_open_launch(engine, FSDP_LANE_UNSHARD,
                                                    group, &launch, error);
  for (int64_t i = 0; status == FSDP_OK && i < unit->num_segments; i++) {
    const int64_t shard_numel = unit->segments[i].layout->shard_numel;
    if (whole->data[i] == NULL || shard_numel == 0) continue;
    const void *input = sends_shard(unit, is_grad) ? shard_of(unit, i, is_grad)
                                                   : own_slot(unit, i, is_grad);
    status = group->transport->ops->all_gather(
        group->transport, &launch.call, whole->data[i], input, shard_numel,
        dtype_of(unit, i, is_grad), &launch.ticket, error);
  }
  FSDP_TRY(fsdp_engine_priv_close_launch(engine, &launch, status, error));
  engine->num_all_gathers++;
done:
  return status;
}

/* The host waits for the work now on COMPUTE. */
static fsdp_status join_compute(fsdp_unit *unit, fsdp_error *error) {
  const fsdp_device_ops *ops = &unit->engine->ops;
  fsdp_status status = FSDP_OK;
  FSDP_TRY(ops->event_record(ops->context, unit->unsharded, FSDP_LANE_COMPUTE,
                             error));
  FSDP_TRY(ops->event_synchronize(ops->context, unit->unsharded, error));
done:
  return status;
}

fsdp_status fsdp_unit_priv_gather_whole(fsdp_unit *unit, bool is_grad,
                                        fsdp_error *error) {
  fsdp_engine *engine = unit->engine;
  const fsdp_summoned *whole = whole_of(unit, is_grad);
  fsdp_status status = FSDP_OK;

  FSDP_TRY(take_block(unit, is_grad, error));
  for (int64_t i = 0; i < unit->num_segments; i++) {
    if (whole->data[i] == NULL) continue;
    if (is_grad && fsdp_unit_priv_has_grads(unit, FSDP_GRADS_SHARDED)) {
      FSDP_TRY(fsdp_unit_priv_make_grad_shard(unit, i, false, error));
    }
  }
  if (!sends_shard(unit, is_grad)) {
    FSDP_TRY(fill_own_slots(unit, is_grad, error));
  }
  /* The user may write the shards on the host as soon as this is over. */
  if (unit->options.offloads) FSDP_TRY(join_compute(unit, error));
  FSDP_TRY(fsdp_engine_priv_wait_lane(engine, FSDP_LANE_UNSHARD,
                                      FSDP_LANE_COMPUTE, engine->compute_done,
                                      error));
  if (unit->options.shard_group.world_size > 1) {
    FSDP_TRY(gather_slots(unit, is_grad, error));
  }
  FSDP_TRY(fsdp_engine_priv_wait_lane(
      engine, FSDP_LANE_COMPUTE, FSDP_LANE_UNSHARD, unit->unsharded, error));
done:
  return status;
}

static void free_device_block(fsdp_unit *unit, bool is_grad) {
  const fsdp_device_ops *ops = &unit->engine->ops;
  fsdp_summoned *whole = whole_of(unit, is_grad);
  if (whole->block == NULL) return;
  ops->block_free(ops->context, whole->block, whole_nbytes(unit, is_grad));
  whole->block = NULL;
}

fsdp_status fsdp_unit_priv_move_to_host(fsdp_unit *unit, bool is_grad,
                                        fsdp_error *error) {
  const fsdp_device_ops *ops = &unit->engine->ops;
  const int64_t nbytes = whole_nbytes(unit, is_grad);
  fsdp_summoned *whole = whole_of(unit, is_grad);
  fsdp_status status = FSDP_OK;

  FSDP_TRY(ops->host_alloc(ops->context, nbytes, &whole->host_block, error));
  FSDP_TRY(ops->copy_to_host(ops->context, FSDP_LANE_COMPUTE, whole->host_block,
                             whole->block, nbytes, error));
  FSDP_TRY(join_compute(unit, error));
  free_device_block(unit, is_grad);
  place_whole(unit, is_grad, whole->host_block);
done:
  return status;
}

static fsdp_status broadcast_over(fsdp_unit *unit, bool is_grad,
                                  const fsdp_group *group, fsdp_error *error) {
  const fsdp_summoned *whole = whole_of(unit, is_grad);
  fsdp_priv_launch launch;

  if (group->world_size == 1) return FSDP_OK;
  fsdp_status status = fsdp_engine_priv_open_launch(
      unit->engine, FSDP_LANE_UNSHARD, group, &launch, error);
  for (int64_t i = 0; status == FSDP_OK && i < unit->num_segments; i++) {
    const int64_t numel = unit->segments[i].layout->padded_numel;
    if (whole->data[i] == NULL || numel == 0) continue;
    status = group->transport->ops->broadcast(
        group->transport, &launch.call, whole->data[i], numel, 0,
        dtype_of(unit, i, is_grad), &launch.ticket, error);
  }
  return fsdp_engine_priv_close_launch(unit->engine, &launch, status, error);
}

/* The first rank's block, on the device of every rank. */
static fsdp_status bring_to_device(fsdp_unit *unit, bool is_grad,
                                   fsdp_error *error) {
  const fsdp_device_ops *ops = &unit->engine->ops;
  fsdp_summoned *whole = whole_of(unit, is_grad);
  fsdp_status status = FSDP_OK;

  /* Both blocks exist if an earlier call failed half-way. */
  if (whole->block == NULL) FSDP_TRY(take_block(unit, is_grad, error));
  if (whole->host_block != NULL) {
    FSDP_TRY(ops->copy_to_device(ops->context, FSDP_LANE_COMPUTE, whole->block,
                                 whole->host_block, whole_nbytes(unit, is_grad),
                                 error));
    FSDP_TRY(join_compute(unit, error));
    ops->host_free(ops->context, whole->host_block);
    whole->host_block = NULL;
  }
done:
  return status;
}

fsdp_status fsdp_unit_priv_broadcast_whole(fsdp_unit *unit, bool is_grad,
                                           fsdp_error *error) {
  fsdp_engine *engine = unit->engine;
  fsdp_status status = FSDP_OK;

  FSDP_TRY(bring_to_device(unit, is_grad, error));
  FSDP_TRY(fsdp_engine_priv_wait_lane(engine, FSDP_LANE_UNSHARD,
                                      FSDP_LANE_COMPUTE, engine->compute_done,
                                      error));
  if (unit->options.shard_group.rank == 0) {
    FSDP_TRY(
        broadcast_over(unit, is_grad, &unit->options.replica_group, error));
  }
  FSDP_TRY(fsdp_engine_priv_wait_lane(
      engine, FSDP_LANE_COMPUTE, FSDP_LANE_UNSHARD, unit->unsharded, error));
  FSDP_TRY(broadcast_over(unit, is_grad, &unit->options.shard_group, error));
  FSDP_TRY(fsdp_engine_priv_wait_lane(
      engine, FSDP_LANE_COMPUTE, FSDP_LANE_UNSHARD, unit->unsharded, error));
done:
  return status;
}

/* Copies between memory of which one at least is on the host. */
static fsdp_status move_bytes(fsdp_unit *unit, void *to, bool to_host,
                              const void *from, bool from_host, int64_t nbytes,
                              fsdp_error *error) {
  const fsdp_device_ops *ops = &unit->engine->ops;
  if (to_host && from_host) {
    memcpy(to, from, (size_t)nbytes);
    return FSDP_OK;
  }
  return to_host ? ops->copy_to_host(ops->context, FSDP_LANE_COMPUTE, to, from,
                                     nbytes, error)
                 : ops->copy_to_device(ops->context, FSDP_LANE_COMPUTE, to,
                                       from, nbytes, error);
}

fsdp_status fsdp_unit_priv_keep_own_piece(fsdp_unit *unit, bool is_grad,
                                          fsdp_error *error) {
  const fsdp_summoned *whole = whole_of(unit, is_grad);
  const bool from_host = whole->host_block != NULL;
  const bool to_host = unit->options.offloads;
  fsdp_status status = FSDP_OK;
  int64_t num_items = 0;

  for (int64_t i = 0; i < unit->num_segments; i++) {
    const int64_t numel = unit->segments[i].layout->shard_numel;
    const fsdp_dtype dtype = dtype_of(unit, i, is_grad);
    if (whole->data[i] == NULL || numel == 0) continue;
    if (is_grad) {
      FSDP_TRY(fsdp_unit_priv_make_grad_shard(unit, i, false, error));
    }
    void *to = shard_of(unit, i, is_grad);
    const void *from = own_slot(unit, i, is_grad);
    if (to_host || from_host) {
      FSDP_TRY(move_bytes(unit, to, to_host, from, from_host,
                          numel * dtype.itemsize, error));
      continue;
    }
    unit->items[num_items++] = (fsdp_pack_item){.to = to,
                                                .to_dtype = dtype,
                                                .from_dtype = dtype,
                                                .from = from,
                                                .numel = numel};
  }
  FSDP_TRY(fsdp_unit_priv_pack_items(unit, FSDP_LANE_COMPUTE, num_items, 1.0,
                                     error));
  if (from_host || to_host) FSDP_TRY(join_compute(unit, error));
  if (!is_grad) { /* a backward may come before the next iteration */
    FSDP_TRY(fsdp_engine_priv_wait_lane(unit->engine, FSDP_LANE_UNSHARD,
                                        FSDP_LANE_COMPUTE,
                                        unit->engine->compute_done, error));
  }
done:
  return status;
}

void fsdp_unit_priv_free_whole(fsdp_unit *unit, bool is_grad) {
  const fsdp_device_ops *ops = &unit->engine->ops;
  fsdp_summoned *whole = whole_of(unit, is_grad);

  free_device_block(unit, is_grad);
  if (whole->host_block != NULL) {
    ops->host_free(ops->context, whole->host_block);
    whole->host_block = NULL;
  }
}

void fsdp_unit_priv_abandon_whole(fsdp_unit *unit) {
  /* Errors are ignored: the first one was reported. */
  FSDP_IGNORE(fsdp_engine_priv_wait_lane(unit->engine, FSDP_LANE_COMPUTE,
                                         FSDP_LANE_UNSHARD, unit->unsharded,
                                         NULL));
  FSDP_IGNORE(join_compute(unit, NULL));
  fsdp_unit_priv_free_whole(unit, false);
  fsdp_unit_priv_free_whole(unit, true);
}
