/*
 * Device memory besides the arena's blocks. Where the device has none left, the
 * blocks that nobody holds are freed and the call is made once more.
 */
#include "runtime/engine_priv.h"

bool fsdp_engine_priv_has_made_room(fsdp_engine *engine, fsdp_status status) {
  return status == FSDP_OUT_OF_MEMORY && fsdp_arena_trim(engine->arena);
}

fsdp_status fsdp_engine_priv_alloc(fsdp_engine *engine, int64_t nbytes,
                                   void **block, fsdp_error *error) {
  const fsdp_device_ops *ops = &engine->ops;
  const fsdp_status status =
      ops->block_alloc(ops->context, nbytes, block, error);
  if (!fsdp_engine_priv_has_made_room(engine, status)) return status;
  return ops->block_alloc(ops->context, nbytes, block, error);
}
