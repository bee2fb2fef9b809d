/*
 * Unsharded gradients: autograd's gradients are packed into the unit's
 * gradient block, in reduce dtype.
 */
#include <string.h>

#include "runtime/engine_priv.h"

bool fsdp_unit_priv_holds_grads(const fsdp_unit *unit) {
  return unit->grad_nbytes > 0 &&
         fsdp_arena_data(unit->engine->arena, unit->grad_client) != NULL;
}

fsdp_status fsdp_unit_priv_take_grad_block(fsdp_unit *unit, fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  void *block = NULL;

  if (fsdp_unit_priv_holds_grads(unit)) return FSDP_OK;
  FSDP_TRY(fsdp_arena_take(unit->engine->arena, unit->grad_client,
                           FSDP_LANE_COMPUTE, &block, error));
  for (int64_t i = 0; i < unit->num_segments; i++) {
    const fsdp_unit_segment *segment = &unit->segments[i];
    const bool has_grad = segment->is_trainable;
    unit->grad_data[i] = has_grad ? (char *)block + segment->grad_offset : NULL;
    unit->stage_data[i] = has_grad && unit->options.offloads
                              ? (char *)block + segment->grad_stage_offset
                              : NULL;
  }
done:
  return status;
}

static bool is_pending(const fsdp_unit *unit, int64_t param) {
  for (int64_t i = 0; i < unit->num_pending; i++) {
    if (unit->pending[i].param == param) return true;
  }
  return false;
}

fsdp_status fsdp_unit_priv_add_grad(fsdp_unit *unit, const fsdp_grad *grad,
                                    fsdp_error *error) {
  const fsdp_param_slot *slot =
      fsdp_flat_layout_slot(unit->options.layout, grad->param);
  fsdp_status status = FSDP_OK;

  if (unit->grad_nbytes == 0) goto done; /* of parameters without elements */
  FSDP_TRY(fsdp_unit_priv_take_grad_block(unit, error));
  /* A second gradient of one parameter (a nested backward): add it after the
   * first. Also keeps num_pending within the array. */
  if (is_pending(unit, grad->param)) {
    FSDP_TRY(fsdp_unit_priv_pack_grads(unit, error));
  }
  unit->pending[unit->num_pending++] = *grad;
  unit->pending_nbytes += slot->numel * grad->dtype.itemsize;
  return FSDP_OK;
done:
  unit->engine->views.grad_release(unit->engine->views.context, grad->token);
  return status;
}

/* Collects the pending gradients that lie in `segment`; they count as filled
 * from then on. */
static int64_t pending_items(fsdp_unit *unit, int64_t segment,
                             fsdp_pack_item *items) {
  int64_t num_items = 0;

  for (int64_t i = 0; i < unit->num_pending; i++) {
    const fsdp_grad *grad = &unit->pending[i];
    const fsdp_param_slot *slot =
        fsdp_flat_layout_slot(unit->options.layout, grad->param);
    if (slot->segment != segment) continue;
    if (slot->numel > 0) {
      items[num_items++] = (fsdp_pack_item){
          .data = grad->data,
          .dtype = grad->dtype,
          .offset = slot->offset,
          .numel = slot->numel,
          .add = unit->is_filled[grad->param] != 0,
      };
    }
    unit->is_filled[grad->param] = 1;
  }
  return num_items;
}

/* Collects what is unfilled in `segment`, as zeros, neighbours merged. */
static int64_t unfilled_items(const fsdp_unit *unit, int64_t segment,
                              fsdp_pack_item *items) {
  const fsdp_flat_layout *layout = unit->options.layout;
  const fsdp_segment *info = unit->segments[segment].layout;
  const int64_t *params = fsdp_flat_layout_segment_params(layout, segment);
  const fsdp_dtype dtype = unit->segments[segment].options.reduce_dtype;
  int64_t num_items = 0;
  int64_t begin = 0; /* of the unfilled range that is open */

  for (int64_t i = 0; i <= info->num_params; i++) {
    const bool is_end = i == info->num_params;
    if (!is_end && !unit->is_filled[params[i]]) continue;
    const fsdp_param_slot *slot =
        is_end ? NULL : fsdp_flat_layout_slot(layout, params[i]);
    const int64_t end = is_end ? info->padded_numel : slot->offset;
    if (end > begin) {
      items[num_items++] = (fsdp_pack_item){
          .data = NULL, .dtype = dtype, .offset = begin, .numel = end - begin};
    }
    if (!is_end) begin = slot->offset + slot->numel;
  }
  return num_items;
}

/* One launch for the segment. */
static fsdp_status pack_segment(fsdp_unit *unit, int64_t segment, bool fills,
                                fsdp_error *error) {
  const fsdp_device_ops *ops = &unit->engine->ops;
  int64_t num_items = pending_items(unit, segment, unit->items);

  if (fills) {
    num_items += unfilled_items(unit, segment, unit->items + num_items);
  }
  if (num_items == 0) return FSDP_OK;
  return ops->pack(ops->context, FSDP_LANE_COMPUTE, unit->grad_data[segment],
                   unit->segments[segment].options.reduce_dtype, unit->items,
                   num_items,
                   unit->has_reduce_hook ? 1.0 : unit->options.prescale, error);
}

static fsdp_status pack(fsdp_unit *unit, bool fills, fsdp_error *error) {
  const fsdp_view_ops *views = &unit->engine->views;
  fsdp_status status = FSDP_OK;

  for (int64_t i = 0; i < unit->num_segments; i++) {
    if (!unit->segments[i].is_trainable) continue;
    FSDP_TRY(pack_segment(unit, i, fills, error));
  }
done:
  for (int64_t i = 0; i < unit->num_pending; i++) {
    views->grad_release(views->context, unit->pending[i].token);
  }
  unit->num_pending = 0;
  unit->pending_nbytes = 0;
  return status;
}

fsdp_status fsdp_unit_priv_pack_grads(fsdp_unit *unit, fsdp_error *error) {
  return unit->num_pending == 0 ? FSDP_OK : pack(unit, false, error);
}

fsdp_status fsdp_unit_priv_fill_grads(fsdp_unit *unit, fsdp_error *error) {
  return pack(unit, true, error);
}

fsdp_status fsdp_unit_priv_drop_grads(fsdp_unit *unit, fsdp_lane lane,
                                      fsdp_error *error) {
  memset(unit->is_filled, 0,
         (size_t)fsdp_flat_layout_num_params(unit->options.layout));
  if (!fsdp_unit_priv_holds_grads(unit)) return FSDP_OK;
  return fsdp_arena_give(unit->engine->arena, unit->grad_client, lane, error);
}

bool fsdp_unit_holds_grads(const fsdp_unit *unit) {
  return unit->has_partial ||
         (unit->engine != NULL && fsdp_unit_priv_holds_grads(unit));
}

void fsdp_unit_priv_drop_cleared_grads(fsdp_unit *unit) {
  const fsdp_view_ops *views = &unit->engine->views;
  /* What a summoned unit's user sees is not the sharded gradient. */
  if (!unit->has_sharded_grad || unit->has_partial || unit->is_summoned ||
      fsdp_unit_priv_holds_grads(unit) ||
      views->grads_live(views->context, unit->options.owner)) {
    return;
  }
  fsdp_unit_priv_free_grad_shards(unit);
}

void fsdp_unit_drop_sharded_grads(fsdp_unit *unit) {
  fsdp_unit_priv_free_grad_shards(unit);
}

void fsdp_unit_priv_free_grad_shards(fsdp_unit *unit) {
  const fsdp_view_ops *views = &unit->engine->views;
  unit->has_sharded_grad = false;
  views->grads_free(views->context, unit->options.owner);
  for (int64_t i = 0; i < unit->num_segments; i++) {
    unit->segments[i].has_grad_shard = false;
  }
}
