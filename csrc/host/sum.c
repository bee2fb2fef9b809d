/*
 * The sum of several pieces of host memory, from the left. A block of every
 * piece is read before that block of the destination is written, so the
 * destination may be one of the pieces.
 */
#include <string.h>

#include "base/dtypes.h"
#include "host/convert_priv.h"
#include "host/kernels.h"
#include "host/lanes_priv.h"

static const void *at(const void *data, int64_t nbytes) {
  return (const char *)data + nbytes;
}

static void sum_floats(fsdp_host_sum_loop *add, char *to, int64_t itemsize,
                       const void *const *pieces, int64_t num_pieces,
                       int64_t numel) {
  double sum[FSDP_HOST_BLOCK_NUMEL]; /* or as many of a smaller dtype */
  for (int64_t begin = 0; begin < numel; begin += FSDP_HOST_BLOCK_NUMEL) {
    const int64_t block = fsdp_host_priv_block(numel - begin);
    const int64_t offset = begin * itemsize;
    const void *left = at(pieces[0], offset);
    for (int64_t i = 1; i < num_pieces; i++) {
      void *next = i + 1 < num_pieces ? (void *)sum : to + offset;
      add(next, left, at(pieces[i], offset), block);
      left = next;
    }
  }
}

#define SUM_INTEGERS(type)                                    \
  static void sum_##type(void *to, const void *const *pieces, \
                         int64_t num_pieces, int64_t numel) { \
    for (int64_t i = 0; i < numel; i++) {                     \
      type sum = 0;                                           \
      for (int64_t j = 0; j < num_pieces; j++) {              \
        sum = (type)(sum + ((const type *)pieces[j])[i]);     \
      }                                                       \
      ((type *)to)[i] = sum;                                  \
    }                                                         \
  }

/* Unsigned, so that they wrap around; the bits are those of signed sums. */
SUM_INTEGERS(uint8_t)
SUM_INTEGERS(uint16_t)
SUM_INTEGERS(uint32_t)
SUM_INTEGERS(uint64_t)
#undef SUM_INTEGERS

/* False for a dtype that is not an integer. */
static bool sum_integers(void *to, int32_t code, const void *const *pieces,
                         int64_t num_pieces, int64_t numel) {
  switch (code) {
    case FSDP_DTYPE_UINT8:
    case FSDP_DTYPE_INT8:
      sum_uint8_t(to, pieces, num_pieces, numel);
      return true;
    case FSDP_DTYPE_INT16:
      sum_uint16_t(to, pieces, num_pieces, numel);
      return true;
    case FSDP_DTYPE_INT32:
      sum_uint32_t(to, pieces, num_pieces, numel);
      return true;
    case FSDP_DTYPE_INT64:
      sum_uint64_t(to, pieces, num_pieces, numel);
      return true;
    default:
      return false;
  }
}

fsdp_status fsdp_host_sum(void *destination, fsdp_dtype dtype,
                          const void *const *pieces, int64_t num_pieces,
                          int64_t numel, fsdp_error *error) {
  const fsdp_host_lanes *lanes = fsdp_host_priv_lanes();
  fsdp_host_float index;
  if (num_pieces < 1 || numel < 0) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "sum: %lld pieces of %lld elements, there must be >= 1 of "
                     ">= 0",
                     (long long)num_pieces, (long long)numel);
  }
  if (fsdp_host_priv_float_of(dtype, &index)) {
    const size_t itemsize = (size_t)fsdp_host_priv_itemsize(index);
    if (num_pieces == 1) {
      memmove(destination, pieces[0], (size_t)numel * itemsize);
    } else if (num_pieces == 2) {
      lanes->sum[index](destination, pieces[0], pieces[1], numel);
    } else {
      sum_floats(lanes->sum[index], destination, (int64_t)itemsize, pieces,
                 num_pieces, numel);
    }
    return FSDP_OK;
  }
  if (!sum_integers(destination, dtype.code, pieces, num_pieces, numel)) {
    return FSDP_FAIL(
        error, FSDP_INVALID_ARGUMENT,
        "sum: no host kernel for dtype %d, use a floating dtype or "
        "integers (not bool)",
        (int)dtype.code);
  }
  return FSDP_OK;
}
