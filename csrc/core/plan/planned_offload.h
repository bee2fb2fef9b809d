/*
 * Planned offload: drives the offload of saved tensors over the counting port,
 * with one item for each forward event of a step plan that saves some.
 */
#ifndef FSDP_PLAN_PLANNED_OFFLOAD_H
#define FSDP_PLAN_PLANNED_OFFLOAD_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "offload/offload.h"
#include "plan/counting_port.h"

typedef struct fsdp_planned_item {
  int64_t nbytes;
  bool is_on_device;
  fsdp_offload_item *item; /* NULL: nothing is saved now */
} fsdp_planned_item;

typedef struct fsdp_planned_offload {
  fsdp_counting_device *device; /* borrowed */
  fsdp_device_ops ops;
  fsdp_offload *offload; /* NULL: nothing is offloaded */
  fsdp_planned_item *items;
  int64_t num_items;
} fsdp_planned_offload;

/* keep_last 0: nothing is offloaded, and the other functions do nothing. The
 * caller's storage, which must not move; fini also after a failure. */
FSDP_NODISCARD fsdp_status fsdp_planned_offload_init(
    fsdp_planned_offload *self, fsdp_counting_device *device, int64_t num_items,
    int64_t keep_last, fsdp_error *error);
void fsdp_planned_offload_fini(fsdp_planned_offload *self);

/* A unit's forward begins; the forward of the root ends; a backward ends. */
FSDP_NODISCARD fsdp_status
fsdp_planned_offload_enter(fsdp_planned_offload *self, fsdp_error *error);
FSDP_NODISCARD fsdp_status
fsdp_planned_offload_leave(fsdp_planned_offload *self, fsdp_error *error);
FSDP_NODISCARD fsdp_status fsdp_planned_offload_end_backward(
    fsdp_planned_offload *self, fsdp_error *error);

/* Item `index` has been saved, `nbytes` (0: nothing) that are held already;
 * backward needs it; it goes. */
FSDP_NODISCARD fsdp_status fsdp_planned_offload_save(fsdp_planned_offload *self,
                                                     int64_t index,
                                                     int64_t nbytes,
                                                     fsdp_error *error);
FSDP_NODISCARD fsdp_status fsdp_planned_offload_need(fsdp_planned_offload *self,
                                                     int64_t index,
                                                     fsdp_error *error);
void fsdp_planned_offload_drop(fsdp_planned_offload *self, int64_t index);

/* Zeros if nothing is offloaded. */
fsdp_offload_stats fsdp_planned_offload_stats(const fsdp_planned_offload *self);

#endif /* FSDP_PLAN_PLANNED_OFFLOAD_H */
