/*
 * Lanes: the loops over elements in the kernels, compiled for any processor,
 * for x86 with AVX2, and for x86 with AVX-512.
 */
#ifndef FSDP_HOST_LANES_PRIV_H
#define FSDP_HOST_LANES_PRIV_H

#include <stdint.h>

/* The floating dtypes, as indices of the tables of loops. */
typedef enum fsdp_host_float {
  FSDP_HOST_F16 = 0,
  FSDP_HOST_BF16,
  FSDP_HOST_F32,
  FSDP_HOST_F64,
  FSDP_HOST_NUM_FLOATS
} fsdp_host_float;

/* Elements converted at a time through a buffer on the stack. */
enum { FSDP_HOST_BLOCK_NUMEL = 512 };

typedef void fsdp_host_cast_loop(void *to, const void *from, int64_t numel);
typedef void fsdp_host_scale_loop(void *to, const void *from, int64_t numel,
                                  double scale);
typedef void fsdp_host_sum_loop(void *to, const void *a, const void *b,
                                int64_t numel);

/* Indexed by the dtype of `to`, then that of `from`. NULL where a pair has no
 * loop. Equal dtypes always have one, and so do casts between fp32 and each
 * other dtype. Both arguments of a loop may be the same memory, in the same
 * dtype. */
typedef struct fsdp_host_lanes {
  const char *name;
  fsdp_host_cast_loop *cast[FSDP_HOST_NUM_FLOATS][FSDP_HOST_NUM_FLOATS];
  /* to = scale * from, cast first */
  fsdp_host_scale_loop *scale[FSDP_HOST_NUM_FLOATS][FSDP_HOST_NUM_FLOATS];
  /* to += scale * from */
  fsdp_host_scale_loop *add[FSDP_HOST_NUM_FLOATS][FSDP_HOST_NUM_FLOATS];
  /* to = a + b */
  fsdp_host_sum_loop *sum[FSDP_HOST_NUM_FLOATS];
} fsdp_host_lanes;

/* The fastest loops that this processor can run. Cannot fail. */
const fsdp_host_lanes *fsdp_host_priv_lanes(void);

/* For tests: all that this processor can run, the slowest first; NULL behind
 * the last. */
const fsdp_host_lanes *fsdp_host_priv_lanes_at(int index);

#endif /* FSDP_HOST_LANES_PRIV_H */
