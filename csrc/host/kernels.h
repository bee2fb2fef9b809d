/*
 * Kernels over host memory: the work of a step on a unit's elements on a CPU
 * (pack, sum), vectorised by the compiler.
 *
 * Note [Rounding]
 * fp16 and bf16 are computed in fp32 and rounded to nearest, ties to even, once
 * per stored element. If either side is fp64, the computation is in fp64, and
 * goes to fp16 and bf16 through fp32. A product and a sum are rounded
 * separately, never fused, so every processor gives the same bits. NaN stays
 * NaN; its bits are not defined. torch does the same, except that it fuses
 * product and sum where the processor can, and rounds a C++ Scalar to a 16-bit
 * tensor's dtype before it multiplies. With powers of two there is no
 * difference.
 *
 * Floating dtypes are FLOAT16, BFLOAT16, FLOAT32 and FLOAT64. A function that
 * does not support a dtype, or a pair of dtypes, returns FSDP_INVALID_ARGUMENT
 * and writes nothing. Memory of 0 elements may be NULL.
 */
#ifndef FSDP_HOST_KERNELS_H
#define FSDP_HOST_KERNELS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "base/types.h"
#include "port/device.h"

#ifdef __cplusplus
extern "C" {
#endif

/* item.to = scale * item.from, or += with item.add; device.h describes an item.
 * With another dtype and without `add`, the source is cast first and then
 * scaled, as FSDP1 does with gradients before it reduces them: a value that
 * overflows fp16 is infinite whatever the scale. With item.scales_first it is
 * scaled first, in the dtype that a sum has, as both of torch's classes do with
 * gradients after it: a sum that overflows fp16 has a mean. Floating dtypes, or
 * any one dtype with scale 1 and no `add`. Source and destination are disjoint,
 * or the same memory and dtype. */
FSDP_NODISCARD fsdp_status fsdp_host_pack(const fsdp_pack_item *items,
                                          int64_t num_items, double scale,
                                          fsdp_error *error);

/* destination = pieces[0] + pieces[1] + ..., added from the left. fp16 and bf16
 * are rounded after each addition. Integers (not bool) wrap around. num_pieces
 * >= 1. The destination may be one of the pieces, or apart from them. */
FSDP_NODISCARD fsdp_status fsdp_host_sum(void *destination, fsdp_dtype dtype,
                                         const void *const *pieces,
                                         int64_t num_pieces, int64_t numel,
                                         fsdp_error *error);

/* Elements that the CUDA kernels read for a norm, and scale in place. */
typedef struct fsdp_host_span {
  const void *data;
  fsdp_dtype dtype; /* floating */
  int64_t numel;
} fsdp_host_span;

#ifdef __cplusplus
}
#endif
#endif /* FSDP_HOST_KERNELS_H */
