/*
 * Execution order: three growing records and a cursor. The unit to prefetch is
 * found ahead in the previous pre-forward record, or back in the post-forward
 * record.
 */
#include "order/order.h"

#include <assert.h>
#include <inttypes.h>

#include "base/alloc.h"

typedef struct record {
  int64_t *units;
  size_t capacity;
  int64_t length;
} record;

struct fsdp_order {
  record previous; /* pre-forward, of the iteration before */
  record pre_forward;
  record post_forward;
  bool is_off_record;      /* this iteration left the previous one's order */
  int64_t backward_cursor; /* into post_forward; its length at the start */
};

static fsdp_status append(record *target, int64_t unit, fsdp_error *error) {
  assert(unit >= 0);
  void *units = target->units;
  if (!fsdp_grow(&units, &target->capacity, (size_t)target->length + 1,
                 sizeof *target->units)) {
    return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY,
                     "out of host memory for an execution order of %" PRId64
                     " entries",
                     target->length + 1);
  }
  target->units = units;
  target->units[target->length++] = unit;
  return FSDP_OK;
}

fsdp_status fsdp_order_create(fsdp_order **order, fsdp_error *error) {
  fsdp_order *self = fsdp_calloc(1, sizeof *self);
  if (self == NULL) {
    return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY,
                     "out of host memory while creating the execution order");
  }
  *order = self;
  return FSDP_OK;
}

void fsdp_order_destroy(fsdp_order *order) {
  if (order == NULL) return;
  fsdp_free(order->previous.units);
  fsdp_free(order->pre_forward.units);
  fsdp_free(order->post_forward.units);
  fsdp_free(order);
}

void fsdp_order_begin(fsdp_order *order) {
  /* Swapped, not copied: both keep their memory. */
  const record recycled = order->previous;
  order->previous = order->pre_forward;
  order->pre_forward = recycled;
  order->pre_forward.length = 0;
  order->post_forward.length = 0;
  order->is_off_record = false;
  order->backward_cursor = 0;
}

fsdp_status fsdp_order_pre_forward(fsdp_order *order, int64_t unit,
                                   fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  const int64_t position = order->pre_forward.length;
  FSDP_TRY(append(&order->pre_forward, unit, error));
  if (position >= order->previous.length ||
      order->previous.units[position] != unit) {
    order->is_off_record = true;
  }
done:
  return status;
}

fsdp_status fsdp_order_post_forward(fsdp_order *order, int64_t unit,
                                    fsdp_error *error) {
  return append(&order->post_forward, unit, error);
}

bool fsdp_order_is_known(const fsdp_order *order) {
  return !order->is_off_record;
}

int64_t fsdp_order_next_forward(const fsdp_order *order, int64_t distance) {
  assert(distance >= 1);
  if (order->is_off_record) return -1;
  /* On the record, the last entry is at length - 1. */
  const int64_t remaining = order->previous.length - order->pre_forward.length;
  if (distance > remaining) return -1;
  return order->previous.units[order->pre_forward.length + distance - 1];
}

void fsdp_order_begin_backward(fsdp_order *order) {
  order->backward_cursor = order->post_forward.length;
}

void fsdp_order_pre_backward(fsdp_order *order, int64_t unit) {
  const record *entries = &order->post_forward;
  int64_t i = order->backward_cursor;
  if (i >= entries->length) i = entries->length - 1;
  for (; i >= 0; i--) {
    if (entries->units[i] != unit) continue;
    order->backward_cursor = i;
    return;
  }
}

int64_t fsdp_order_next_backward(const fsdp_order *order, int64_t distance) {
  assert(distance >= 1);
  if (distance > order->backward_cursor) return -1;
  return order->post_forward.units[order->backward_cursor - distance];
}

uint64_t fsdp_order_fold(uint64_t fingerprint, const char *text) {
  for (; *text != '\0'; text++) {
    fingerprint ^= (unsigned char)*text;
    fingerprint *= UINT64_C(0x100000001b3);
  }
  return fingerprint;
}
