/*
 * Conversion of blocks of elements between any two floating dtypes, for kernels
 * over pairs of dtypes that have no loop of their own.
 */
#ifndef FSDP_HOST_CONVERT_PRIV_H
#define FSDP_HOST_CONVERT_PRIV_H

#include <stdbool.h>
#include <stdint.h>

#include "base/types.h"
#include "host/lanes_priv.h"

/* Whether the dtype is FLOAT16, BFLOAT16, FLOAT32 or FLOAT64; index [out]. */
bool fsdp_host_priv_float_of(fsdp_dtype dtype, fsdp_host_float *index);

/* Converts any number of elements, through fp32 where there is no direct loop.
 * The two memories are disjoint, or the same and of one dtype. */
void fsdp_host_priv_convert(const fsdp_host_lanes *lanes, void *to,
                            fsdp_host_float to_index, const void *from,
                            fsdp_host_float from_index, int64_t numel);

/* The number of elements in the next block when `numel` are left. */
static inline int64_t fsdp_host_priv_block(int64_t numel) {
  return numel < FSDP_HOST_BLOCK_NUMEL ? numel : FSDP_HOST_BLOCK_NUMEL;
}

static inline int64_t fsdp_host_priv_itemsize(fsdp_host_float index) {
  static const int64_t itemsizes[FSDP_HOST_NUM_FLOATS] = {2, 2, 4, 8};
  return itemsizes[index];
}

#endif /* FSDP_HOST_CONVERT_PRIV_H */
