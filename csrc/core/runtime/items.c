/*
 * The unit's list of items: all that one moment writes, whatever the segments
 * and dtypes, goes to the device in one call.
 */
#include "runtime/engine_priv.h"

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
