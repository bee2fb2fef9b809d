/*
 * Calls of the device that every sequence makes.
 *
 * Memory besides the arena's blocks: where the device has none left, the blocks
 * that nobody holds are freed and the call is made once more. The unit's list
 * of items: all that one moment writes, whatever the segments and dtypes, goes
 * to the device in one call. Waiting between lanes.
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

fsdp_status fsdp_unit_priv_pack_items(fsdp_unit *unit, fsdp_lane lane,
                                      int64_t num_items, double scale,
                                      fsdp_error *error) {
  const fsdp_device_ops *ops = &unit->engine->ops;
  if (num_items == 0) return FSDP_OK;
  return ops->pack(ops->context, lane, unit->items, num_items, scale, error);
}

fsdp_status fsdp_unit_priv_accumulate_items(fsdp_unit *unit, fsdp_lane lane,
                                            int64_t num_items, double scale,
                                            fsdp_error *error) {
  const fsdp_device_ops *ops = &unit->engine->ops;
  if (num_items == 0) return FSDP_OK;
  return ops->accumulate(ops->context, lane, unit->items, num_items, scale,
                         error);
}

fsdp_status fsdp_engine_priv_wait_lane(fsdp_engine *engine, fsdp_lane waiter,
                                       fsdp_lane recorder, fsdp_event *event,
                                       fsdp_error *error) {
  const fsdp_device_ops *ops = &engine->ops;
  fsdp_status status = FSDP_OK;
  FSDP_TRY(ops->event_record(ops->context, event, recorder, error));
  FSDP_TRY(ops->event_wait(ops->context, waiter, event, error));
done:
  return status;
}

fsdp_status fsdp_engine_join_host(fsdp_engine *engine, fsdp_error *error) {
  const fsdp_device_ops *ops = &engine->ops;
  fsdp_status status = FSDP_OK;
  if (!engine->offloads) return FSDP_OK;
  FSDP_TRY(fsdp_engine_priv_wait_lane(engine, FSDP_LANE_DOWNLOAD,
                                      FSDP_LANE_UPLOAD, engine->upload_done,
                                      error));
  FSDP_TRY(ops->event_record(ops->context, engine->download_done,
                             FSDP_LANE_DOWNLOAD, error));
  FSDP_TRY(ops->event_synchronize(ops->context, engine->download_done, error));
done:
  return status;
}
