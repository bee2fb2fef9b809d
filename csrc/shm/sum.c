/*
 * Sums of the ranks' pieces, in rank order, vectorised by the compiler.
 */
#include <inttypes.h>
#include <stddef.h>
#include <string.h>

#include "base/dtypes.h"
#include "shm/shm_priv.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3")
#endif

enum { BLOCK = 512 }; /* elements that are summed in the first-level cache */

/* SUMMER(name, type, sum type, load, store): blocks are loaded and added up
 * from the left in the sum type, scaled, and stored. */
#define SUMMER(name, type, sum_type, load, store)                         \
  static void name(void *destination, const void *const *pieces,          \
                   int64_t num_pieces, int64_t numel, sum_type scale) {   \
    sum_type sums[BLOCK];                                                 \
    for (int64_t begin = 0; begin < numel; begin += BLOCK) {              \
      const int64_t rest = numel - begin;                                 \
      const int64_t num = rest < BLOCK ? rest : BLOCK;                    \
      const type *first = (const type *)pieces[0] + begin;                \
      for (int64_t i = 0; i < num; i++) sums[i] = load(first[i]);         \
      for (int64_t p = 1; p < num_pieces; p++) {                          \
        const type *next = (const type *)pieces[p] + begin;               \
        for (int64_t i = 0; i < num; i++) {                               \
          sums[i] = (sum_type)(sums[i] + load(next[i]));                  \
        }                                                                 \
      }                                                                   \
      type *to = (type *)destination + begin;                             \
      if (scale == 1) {                                                   \
        for (int64_t i = 0; i < num; i++) to[i] = store(sums[i]);         \
      } else {                                                            \
        for (int64_t i = 0; i < num; i++) to[i] = store(sums[i] * scale); \
      }                                                                   \
    }                                                                     \
  }

#define AS_IS(x) (x)
#define AS_U8(x) ((uint8_t)(x))
#define AS_U16(x) ((uint16_t)(x))

static inline float float_of_bits(uint32_t bits) {
  float number;
  memcpy(&number, &bits, sizeof number);
  return number;
}

static inline uint32_t bits_of_float(float number) {
  uint32_t bits;
  memcpy(&bits, &number, sizeof bits);
  return bits;
}

static inline float load_bf16(uint16_t bits) {
  return float_of_bits((uint32_t)bits << 16);
}

/* To the nearest, ties to even; NaN stays NaN. */
static inline uint16_t store_bf16(float number) {
  const uint32_t bits = bits_of_float(number);
  const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  return (uint16_t)(number != number ? 0x7FC0 : rounded);
}

static inline float load_fp16(uint16_t bits) {
  const uint32_t sign = (uint32_t)(bits & 0x8000) << 16;
  const uint32_t rest = (uint32_t)(bits & 0x7FFF);
  /* The exponent's bias is corrected by a product, which is exact and right
   * for subnormal numbers too; infinity and NaN get float's own exponent. */
  const float scaled = float_of_bits(rest << 13) * 0x1p112F;
  const uint32_t large = rest << 13 | 0x7F800000;
  const uint32_t number = rest >= 0x7C00 ? large : bits_of_float(scaled);
  return float_of_bits(sign | number);
}

/* To the nearest, ties to even. */
static inline uint16_t store_fp16(float number) {
  const uint32_t bits = bits_of_float(number);
  const uint32_t sign = bits >> 16 & 0x8000;
  const uint32_t size = bits & 0x7FFFFFFF;
  /* Subnormal: adding 0.5 leaves the 2^-24 units in the last bits, rounded. */
  const uint32_t tiny =
      bits_of_float(float_of_bits(size) + 0.5F) - bits_of_float(0.5F);
  const uint32_t normal =
      (size + 0xFFF + (size >> 13 & 1) - (UINT32_C(112) << 23)) >> 13;
  uint32_t half = size < UINT32_C(113) << 23 ? tiny : normal;
  if (size >= UINT32_C(0x477FF000)) half = 0x7C00; /* rounds to 65536 */
  if (size > 0x7F800000) half = 0x7E00;
  return (uint16_t)(sign | half);
}

SUMMER(sum_f32, float, float, AS_IS, AS_IS)
SUMMER(sum_f64, double, double, AS_IS, AS_IS)
SUMMER(sum_bf16, uint16_t, float, load_bf16, store_bf16)
SUMMER(sum_fp16, uint16_t, float, load_fp16, store_fp16)
/* Integers wrap around. */
SUMMER(sum_u8, uint8_t, uint32_t, AS_IS, AS_U8)
SUMMER(sum_u16, uint16_t, uint32_t, AS_IS, AS_U16)
SUMMER(sum_u32, uint32_t, uint32_t, AS_IS, AS_IS)
SUMMER(sum_u64, uint64_t, uint64_t, AS_IS, AS_IS)

#undef AS_U16
#undef AS_U8
#undef AS_IS
#undef SUMMER

static int32_t itemsize_of(int32_t code) {
  switch (code) {
    case FSDP_DTYPE_UINT8:
    case FSDP_DTYPE_INT8:
      return 1;
    case FSDP_DTYPE_INT16:
    case FSDP_DTYPE_FLOAT16:
    case FSDP_DTYPE_BFLOAT16:
      return 2;
    case FSDP_DTYPE_INT32:
    case FSDP_DTYPE_FLOAT32:
      return 4;
    case FSDP_DTYPE_INT64:
    case FSDP_DTYPE_FLOAT64:
      return 8;
    default:
      return 0;
  }
}

fsdp_status fsdp_shm_priv_check_sum(fsdp_dtype dtype, double scale,
                                    fsdp_error *error) {
  const bool is_integer =
      dtype.code <= FSDP_DTYPE_INT64; /* the codes before float16 */
  if (itemsize_of(dtype.code) == 0 ||
      itemsize_of(dtype.code) != dtype.itemsize) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "elements of dtype %d with %d bytes cannot be summed in "
                     "shared memory, use a floating or integer dtype",
                     (int)dtype.code, (int)dtype.itemsize);
  }
  if (is_integer && scale != 1) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "a sum of integers (dtype %d) cannot be scaled by %g",
                     (int)dtype.code, scale);
  }
  return FSDP_OK;
}

void fsdp_shm_priv_sum(void *destination, fsdp_dtype dtype,
                       const void *const *pieces, int64_t num_pieces,
                       int64_t numel, double scale) {
  switch (dtype.code) {
    case FSDP_DTYPE_UINT8:
    case FSDP_DTYPE_INT8:
      sum_u8(destination, pieces, num_pieces, numel, 1);
      break;
    case FSDP_DTYPE_INT16:
      sum_u16(destination, pieces, num_pieces, numel, 1);
      break;
    case FSDP_DTYPE_INT32:
      sum_u32(destination, pieces, num_pieces, numel, 1);
      break;
    case FSDP_DTYPE_INT64:
      sum_u64(destination, pieces, num_pieces, numel, 1);
      break;
    case FSDP_DTYPE_FLOAT16:
      sum_fp16(destination, pieces, num_pieces, numel, (float)scale);
      break;
    case FSDP_DTYPE_BFLOAT16:
      sum_bf16(destination, pieces, num_pieces, numel, (float)scale);
      break;
    case FSDP_DTYPE_FLOAT32:
      sum_f32(destination, pieces, num_pieces, numel, (float)scale);
      break;
    case FSDP_DTYPE_FLOAT64:
      sum_f64(destination, pieces, num_pieces, numel, scale);
      break;
    default:
      break; /* fsdp_shm_priv_check_sum refuses it */
  }
}
