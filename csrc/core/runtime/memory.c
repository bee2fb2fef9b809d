/*
 * Device memory besides the arena's blocks. Where the device has none left, the
 * blocks that nobody holds are freed and the call is made once more. See Note
 * [Memory that blocks leave] in arena.h.
 */
#include "runtime/engine_priv.h"

/* Whether a call that ended with `status` is worth another try. */
static bool has_made_room(fsdp_engine *engine, fsdp_status status) {
  return status == FSDP_OUT_OF_MEMORY && fsdp_arena_trim(engine->arena);
}

fsdp_status fsdp_engine_priv_alloc(fsdp_engine *engine, int64_t nbytes,
                                   void **block, fsdp_error *error) {
  const fsdp_device_ops *ops = &engine->ops;
  const fsdp_status status =
      ops->block_alloc(ops->context, nbytes, block, error);
  if (!has_made_room(engine, status)) return status;
  return ops->block_alloc(ops->context, nbytes, block, error);
}

fsdp_status fsdp_unit_priv_grad_shard(fsdp_unit *unit, int64_t segment,
                                      bool is_replaced, void **data,
                                      fsdp_error *error) {
  const fsdp_view_ops *views = &unit->engine->views;
  void *owner = unit->options.owner;
  const fsdp_status status = views->grad_shard(views->context, owner, segment,
                                               is_replaced, data, error);
  if (!has_made_room(unit->engine, status)) return status;
  return views->grad_shard(views->context, owner, segment, is_replaced, data,
                           error);
}
