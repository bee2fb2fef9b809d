/*
 * Checked int64 arithmetic, for sizes that come from outside. Each function
 * returns false on overflow and leaves `out` untouched then.
 */
#ifndef FSDP_BASE_ARITH_H
#define FSDP_BASE_ARITH_H

#include <stdbool.h>
#include <stdint.h>

static inline bool fsdp_add_i64(int64_t a, int64_t b, int64_t *out) {
  int64_t sum;
  if (__builtin_add_overflow(a, b, &sum)) return false;
  *out = sum;
  return true;
}

static inline bool fsdp_mul_i64(int64_t a, int64_t b, int64_t *out) {
  int64_t product;
  if (__builtin_mul_overflow(a, b, &product)) return false;
  *out = product;
  return true;
}

/* Smallest multiple of `multiple` (>= 1) that is >= `value` (>= 0). */
static inline bool fsdp_round_up_i64(int64_t value, int64_t multiple,
                                     int64_t *out) {
  int64_t sum;
  if (__builtin_add_overflow(value, multiple - 1, &sum)) return false;
  *out = sum - sum % multiple;
  return true;
}

#endif /* FSDP_BASE_ARITH_H */
