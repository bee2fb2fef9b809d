/*
 * Converts any floating dtype to any other, by one loop or through blocks of
 * fp32.
 */
#include <string.h>

#include "base/dtypes.h"
#include "host/convert_priv.h"

bool fsdp_host_priv_float_of(fsdp_dtype dtype, fsdp_host_float *index) {
  switch (dtype.code) {
    case FSDP_DTYPE_FLOAT16:
      *index = FSDP_HOST_F16;
      return true;
    case FSDP_DTYPE_BFLOAT16:
      *index = FSDP_HOST_BF16;
      return true;
    case FSDP_DTYPE_FLOAT32:
      *index = FSDP_HOST_F32;
      return true;
    case FSDP_DTYPE_FLOAT64:
      *index = FSDP_HOST_F64;
      return true;
    default:
      return false;
  }
}

void fsdp_host_priv_convert(const fsdp_host_lanes *lanes, void *to,
                            fsdp_host_float to_index, const void *from,
                            fsdp_host_float from_index, int64_t numel) {
  float values[FSDP_HOST_BLOCK_NUMEL];
  char *target = to;
  const char *source = from;
  if (to_index == from_index) {
    if (to == from || numel == 0) return;
    memcpy(to, from, (size_t)(numel * fsdp_host_priv_itemsize(to_index)));
    return;
  }
  if (lanes->cast[to_index][from_index] != NULL) {
    lanes->cast[to_index][from_index](to, from, numel);
    return;
  }
  while (numel > 0) {
    const int64_t block = fsdp_host_priv_block(numel);
    lanes->cast[FSDP_HOST_F32][from_index](values, source, block);
    lanes->cast[to_index][FSDP_HOST_F32](target, values, block);
    source += block * fsdp_host_priv_itemsize(from_index);
    target += block * fsdp_host_priv_itemsize(to_index);
    numel -= block;
  }
}
