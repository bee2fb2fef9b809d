/*
 * Packing: autograd's gradients go into the unit's gradient block. It is in
 * reduce dtype; in held dtype if they are kept, or some were: a reduction casts
 * the sum.
 */
#include <string.h>

#include "runtime/engine_priv.h"

fsdp_status fsdp_unit_priv_open_grads(fsdp_unit *unit, fsdp_error *error) {
  fsdp_status status = FSDP_OK;

  if (fsdp_unit_priv_has_grads(unit, FSDP_GRADS_UNSHARDED)) return FSDP_OK;
  FSDP_TRY(fsdp_unit_priv_take_grad_block(unit, error));
  memset(unit->is_filled, 0,
         (size_t)fsdp_flat_layout_num_params(unit->options.layout));
  unit->is_whole = false;
done:
  return status;
}

static bool is_pending(const fsdp_unit *unit, int64_t param) {
  return unit->pending[param].dtype.itemsize > 0;
}

fsdp_status fsdp_unit_priv_add_grad(fsdp_unit *unit, const fsdp_grad *grad,
                                    fsdp_error *error) {
  const fsdp_param_slot *slot =
      fsdp_flat_layout_slot(unit->options.layout, grad->param);
  fsdp_status status = FSDP_OK;

  /* A second gradient of one parameter (a nested backward): add it after the
   * first. */
  if (is_pending(unit, grad->param)) {
    FSDP_TRY(fsdp_unit_priv_pack_grads(unit, error));
  }
  unit->pending[grad->param] = *grad;
  unit->num_pending++;
  if (!fsdp_dtype_equal(grad->dtype,
                        unit->segments[slot->segment].options.reduce_dtype)) {
    unit->num_unlike++;
  }
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
  const fsdp_flat_layout *layout = unit->options.layout;
  const fsdp_segment *info = unit->segments[segment].layout;
  const int64_t *params = fsdp_flat_layout_segment_params(layout, segment);
  const fsdp_dtype dtype = fsdp_unit_priv_block_dtype(unit, segment);
  int64_t num_items = 0;

  for (int64_t i = 0; i < info->num_params; i++) {
    if (!is_pending(unit, params[i])) continue;
    const fsdp_grad *grad = &unit->pending[params[i]];
    const fsdp_param_slot *slot = fsdp_flat_layout_slot(layout, grad->param);
    if (slot->numel > 0) {
      items[num_items++] = (fsdp_pack_item){
          .to =
              (char *)unit->grad_data[segment] + slot->offset * dtype.itemsize,
          .to_dtype = dtype,
          .from_dtype = grad->dtype,
          .from = grad->data,
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
  const fsdp_dtype dtype = fsdp_unit_priv_block_dtype(unit, segment);
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
          .to = (char *)unit->grad_data[segment] + begin * dtype.itemsize,
          .to_dtype = dtype,
          .numel = end - begin};
    }
    if (!is_end) begin = slot->offset + slot->numel;
  }
  return num_items;
}

void fsdp_unit_priv_release_pending(fsdp_unit *unit) {
  const fsdp_view_ops *views = &unit->engine->views;
  for (int64_t i = 0; unit->num_pending > 0; i++) {
    if (!is_pending(unit, i)) continue;
    views->grad_release(views->context, unit->pending[i].token);
    unit->pending[i] = (fsdp_grad){0};
    unit->num_pending--;
  }
  unit->pending_nbytes = 0;
  unit->num_unlike = 0;
}

/* One launch for the unit. */
static fsdp_status pack(fsdp_unit *unit, bool fills, fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  bool is_whole = fills;
  int64_t num_items = 0;

  FSDP_TRY(fsdp_unit_priv_open_grads(unit, error));
  is_whole = is_whole || unit->is_whole;
  for (int64_t i = 0; i < unit->num_segments; i++) {
    if (!unit->segments[i].is_trainable) continue;
    num_items += pending_items(unit, i, unit->items + num_items);
    if (!fills) continue;
    num_items += unfilled_items(unit, i, unit->items + num_items);
  }
  if (is_whole) {
    num_items += fsdp_unit_priv_mark_items(unit, unit->items + num_items);
  }
  FSDP_TRY(fsdp_unit_priv_pack_items(
      unit, FSDP_LANE_COMPUTE, num_items,
      unit->is_held ? 1.0 : fsdp_unit_priv_prescale(unit), error));
  unit->is_whole = is_whole;
  if (is_whole) FSDP_TRY(fsdp_unit_priv_spread_marks(unit, error));
done:
  fsdp_unit_priv_release_pending(unit);
  return status;
}

fsdp_status fsdp_unit_priv_pack_grads(fsdp_unit *unit, fsdp_error *error) {
  return unit->num_pending == 0 ? FSDP_OK : pack(unit, false, error);
}

fsdp_status fsdp_unit_priv_fill_grads(fsdp_unit *unit, fsdp_error *error) {
  const bool is_done = unit->num_pending == 0 && unit->is_whole &&
                       fsdp_unit_priv_has_grads(unit, FSDP_GRADS_UNSHARDED);
  return is_done ? FSDP_OK : pack(unit, true, error);
}
