/*
 * The element types that C code computes with. The codes are torch's
 * ScalarType, which is part of its serialised format and does not change; the
 * bridge asserts that they agree.
 */
#ifndef FSDP_BASE_DTYPES_H
#define FSDP_BASE_DTYPES_H

#include <stdint.h>

#include "base/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum fsdp_dtype_code {
  FSDP_DTYPE_UINT8 = 0,
  FSDP_DTYPE_INT8 = 1,
  FSDP_DTYPE_INT16 = 2,
  FSDP_DTYPE_INT32 = 3,
  FSDP_DTYPE_INT64 = 4,
  FSDP_DTYPE_FLOAT16 = 5,
  FSDP_DTYPE_FLOAT32 = 6,
  FSDP_DTYPE_FLOAT64 = 7,
  FSDP_DTYPE_COMPLEX64 = 9,
  FSDP_DTYPE_COMPLEX128 = 10,
  FSDP_DTYPE_BOOL = 11,
  FSDP_DTYPE_BFLOAT16 = 15
} fsdp_dtype_code;

/* The dtype in which `numel` elements are summed: complex ones as twice as many
 * real ones, which transports know. */
static inline fsdp_dtype fsdp_dtype_of_sum(fsdp_dtype dtype, int64_t *numel) {
  const int is_complex =
      dtype.code == FSDP_DTYPE_COMPLEX64 || dtype.code == FSDP_DTYPE_COMPLEX128;
  if (!is_complex) return dtype;
  *numel *= 2;
  dtype.code = dtype.code == FSDP_DTYPE_COMPLEX64 ? FSDP_DTYPE_FLOAT32
                                                  : FSDP_DTYPE_FLOAT64;
  dtype.itemsize /= 2;
  return dtype;
}

#ifdef __cplusplus
}
#endif
#endif /* FSDP_BASE_DTYPES_H */
