/* Planned offload: items without memory, whose bytes the device counts. */
#include "plan/planned_offload.h"

#include "base/alloc.h"

static fsdp_status hold(void *context, int64_t nbytes, fsdp_error *error) {
  const fsdp_planned_offload *self = context;
  return fsdp_counting_device_hold(self->device, FSDP_COUNTED_ACTIVATIONS,
                                   nbytes, error);
}

static bool is_alone(void *context, void *token) {
  (void)context, (void)token;
  return true;
}

static void let_go(void *context, void *token) {
  fsdp_planned_item *item = token;
  item->is_on_device = false;
  FSDP_IGNORE(hold(context, -item->nbytes, NULL)); /* fits: it was held */
}

static fsdp_status make(void *context, void *token, void **data,
                        fsdp_error *error) {
  fsdp_planned_item *item = token;
  fsdp_status status = FSDP_OK;
  FSDP_TRY(hold(context, item->nbytes, error));
  item->is_on_device = true;
  *data = item; /* an address; never written */
done:
  return status;
}

static void forget(void *context, void *token) {
  const fsdp_planned_item *item = token;
  if (item->is_on_device) let_go(context, token);
}

fsdp_status fsdp_planned_offload_init(fsdp_planned_offload *self,
                                      fsdp_counting_device *device,
                                      int64_t num_items, int64_t keep_last,
                                      fsdp_error *error) {
  fsdp_status status = FSDP_OK;

  *self = (fsdp_planned_offload){.device = device};
  if (keep_last == 0) return FSDP_OK;
  self->ops = fsdp_counting_device_ops(device);
  self->items = fsdp_calloc((size_t)num_items, sizeof *self->items);
  if (self->items == NULL) {
    status = FSDP_FAIL(error, FSDP_OUT_OF_MEMORY, "plan of an offload");
    goto done;
  }
  self->num_items = num_items;
  const fsdp_offload_calls calls = {self, is_alone, let_go, make, forget};
  FSDP_TRY(fsdp_offload_create(&self->ops, &calls, FSDP_OFFLOAD_CHUNK_NBYTES,
                               &self->offload, error));
  fsdp_offload_keep_last(self->offload, keep_last);
done:
  return status;
}

void fsdp_planned_offload_fini(fsdp_planned_offload *self) {
  for (int64_t i = 0; i < self->num_items; i++) {
    fsdp_planned_offload_drop(self, i);
  }
  fsdp_offload_destroy(self->offload);
  fsdp_free(self->items);
}

fsdp_status fsdp_planned_offload_enter(fsdp_planned_offload *self,
                                       fsdp_error *error) {
  if (self->offload == NULL) return FSDP_OK;
  return fsdp_offload_enter(self->offload, error);
}

fsdp_status fsdp_planned_offload_leave(fsdp_planned_offload *self,
                                       fsdp_error *error) {
  if (self->offload == NULL) return FSDP_OK;
  return fsdp_offload_leave(self->offload, error);
}

fsdp_status fsdp_planned_offload_end_backward(fsdp_planned_offload *self,
                                              fsdp_error *error) {
  if (self->offload == NULL) return FSDP_OK;
  return fsdp_offload_end_backward(self->offload, error);
}

fsdp_status fsdp_planned_offload_save(fsdp_planned_offload *self, int64_t index,
                                      int64_t nbytes, fsdp_error *error) {
  if (self->offload == NULL || nbytes == 0) return FSDP_OK;
  fsdp_planned_item *item = &self->items[index];
  item->nbytes = nbytes;
  item->is_on_device = true;
  return fsdp_offload_add(self->offload, item, item, nbytes, &item->item,
                          error);
}

fsdp_status fsdp_planned_offload_need(fsdp_planned_offload *self, int64_t index,
                                      fsdp_error *error) {
  if (self->offload == NULL || self->items[index].item == NULL) return FSDP_OK;
  return fsdp_offload_need(self->offload, self->items[index].item, error);
}

void fsdp_planned_offload_drop(fsdp_planned_offload *self, int64_t index) {
  if (self->offload == NULL || self->items[index].item == NULL) return;
  fsdp_offload_drop(self->offload, self->items[index].item);
  self->items[index].item = NULL;
}

fsdp_offload_stats fsdp_planned_offload_stats(
    const fsdp_planned_offload *self) {
  fsdp_offload_stats stats = {0};
  if (self->offload != NULL) fsdp_offload_get_stats(self->offload, &stats);
  return stats;
}
