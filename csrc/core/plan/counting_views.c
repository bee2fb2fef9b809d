/* The counting port's views: no parameters, gradients that are counted. */
#include <inttypes.h>

#include "plan/counting_port.h"

static fsdp_status show_params(void *context, void *owner, fsdp_view view,
                               void *const *segments, fsdp_error *error) {
  (void)context, (void)owner, (void)view, (void)segments, (void)error;
  return FSDP_OK;
}

static void empty_params(void *context, void *owner) {
  (void)context, (void)owner;
}

static void keep_grads(void *context, void *owner, fsdp_view view) {
  (void)context, (void)owner, (void)view;
}

static fsdp_status take_params(void *context, void *owner, fsdp_view view,
                               void *const *segments, bool *any_copied,
                               fsdp_error *error) {
  *any_copied = false;
  return show_params(context, owner, view, segments, error);
}

static void mark_params(void *context, void *owner) {
  fsdp_counting_device *self = context;
  (void)owner;
  self->params_changed = false;
}

static fsdp_status take_writes(void *context, void *owner, bool in_backward,
                               fsdp_error *error) {
  (void)context, (void)owner, (void)in_backward, (void)error;
  return FSDP_OK;
}

static bool params_changed(void *context, void *owner) {
  const fsdp_counting_device *self = context;
  (void)owner;
  return self->params_changed;
}

static fsdp_status take_grads(void *context, void *owner, bool unsharded_live,
                              void *const *unsharded, bool *any_live,
                              fsdp_error *error) {
  fsdp_counted_unit *unit = owner;
  (void)context, (void)unsharded_live, (void)unsharded, (void)error;
  *any_live = unit->has_grads;
  unit->has_grads = false;
  return FSDP_OK;
}

static fsdp_status take_full_grads(void *context, void *owner, fsdp_view view,
                                   void *const *segments, bool *any_live,
                                   fsdp_error *error) {
  (void)view;
  return take_grads(context, owner, false, segments, any_live, error);
}

static bool grads_live(void *context, void *owner) {
  const fsdp_counted_unit *unit = owner;
  (void)context;
  return unit->has_grads;
}

/* Bytes of one sharded gradient; they fit, since the segment's do. */
static int64_t grad_shard_nbytes(const fsdp_counted_unit *unit,
                                 int64_t segment) {
  return fsdp_flat_layout_segment(unit->layout, segment)->shard_numel *
         unit->segments[segment].grad_dtype.itemsize;
}

static fsdp_counted grad_purpose(const fsdp_counted_unit *unit) {
  return unit->is_on_host ? FSDP_COUNTED_HOST : FSDP_COUNTED_GRAD_SHARDS;
}

static void grads_free(void *context, void *owner) {
  const fsdp_counted_unit *unit = owner;
  const int64_t num_segments = fsdp_flat_layout_num_segments(unit->layout);
  for (int64_t i = 0; i < num_segments; i++) {
    if (!unit->has_grad_shard[i]) continue;
    unit->has_grad_shard[i] = false;
    fsdp_counting_device_drop(context, grad_purpose(unit),
                              grad_shard_nbytes(unit, i));
  }
}

static fsdp_status show_grads(void *context, void *owner, fsdp_view view,
                              void *const *segments, fsdp_error *error) {
  fsdp_counted_unit *unit = owner;
  unit->has_grads = true;
  return show_params(context, owner, view, segments, error);
}

static fsdp_status grad_shard(void *context, void *owner, int64_t segment,
                              bool is_replaced, void **data,
                              fsdp_error *error) {
  const fsdp_counted_unit *unit = owner;
  fsdp_status status = FSDP_OK;
  (void)is_replaced;
  if (!unit->has_grad_shard[segment]) {
    FSDP_TRY(fsdp_counting_device_hold(
        context, grad_purpose(unit), grad_shard_nbytes(unit, segment), error));
    unit->has_grad_shard[segment] = true;
  }
  *data = (void *)(uintptr_t)1; /* nobody reads or writes it */
done:
  return status;
}

static void grad_release(void *context, void *token) {
  fsdp_counting_device_drop(context, FSDP_COUNTED_PENDING_GRADS,
                            (int64_t)(uintptr_t)token - 1);
}

static fsdp_status reduce_hook(void *context, void *owner, fsdp_lane lane,
                               int64_t segment, void *buffer,
                               fsdp_error *error) {
  (void)context, (void)owner, (void)lane, (void)buffer;
  return FSDP_FAIL(error, FSDP_INVALID_STATE,
                   "a step plan has no communication hook for segment %" PRId64,
                   segment);
}

fsdp_view_ops fsdp_counting_device_views(fsdp_counting_device *device) {
  return (fsdp_view_ops){
      .context = device,
      .show_params = show_params,
      .empty_params = empty_params,
      .take_params = take_params,
      .mark_params = mark_params,
      .take_writes = take_writes,
      .params_changed = params_changed,
      .take_grads = take_grads,
      .take_full_grads = take_full_grads,
      .grads_live = grads_live,
      .grads_free = grads_free,
      .keep_grads = keep_grads,
      .show_grads = show_grads,
      .grad_shard = grad_shard,
      .grad_release = grad_release,
      .reduce_hook = reduce_hook,
  };
}
