/*
 * The element types that C code computes with. The codes are torch's
 * ScalarType, which is part of its serialised format and does not change; the
 * bridge asserts that they agree.
 */
#ifndef FSDP_BASE_DTYPES_H
#define FSDP_BASE_DTYPES_H

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
  FSDP_DTYPE_BOOL = 11,
  FSDP_DTYPE_BFLOAT16 = 15
} fsdp_dtype_code;

#ifdef __cplusplus
}
#endif
#endif /* FSDP_BASE_DTYPES_H */
