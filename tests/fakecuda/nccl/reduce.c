/* The arithmetic of the fake libnccl: as a ring's, each sum is rounded. */
#include <string.h>

#include "fake_nccl.h"

size_t size_of(ncclDataType_t dtype) {
  switch (dtype) {
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
      return 8;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    default:
      return 1;
  }
}

const char *dtype_name(ncclDataType_t dtype) {
  static const char *const names[ncclNumTypes] = {
      "int8",    "uint8",   "int32",   "uint32",   "int64",      "uint64",
      "float16", "float32", "float64", "bfloat16", "float8e4m3", "float8e5m2"};
  return dtype >= 0 && dtype < ncclNumTypes ? names[dtype] : "unknown";
}

static float from_bfloat16(uint16_t bits) {
  const uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}

static uint16_t to_bfloat16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  if (value != value) return (uint16_t)(bits >> 16 | 64);
  return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

#define SAME(value) (value)
#define COMBINE(a, b)                                      \
  (op == ncclProd  ? (a) * (b)                             \
   : op == ncclMax ? ((b) > (a) || (b) != (b) ? (b) : (a)) \
   : op == ncclMin ? ((b) < (a) || (b) != (b) ? (b) : (a)) \
                   : (a) + (b))
#define REDUCE(type, wide, get, put)                                   \
  do {                                                                 \
    type *result = into;                                               \
    for (size_t i = 0; i < numel; i++) {                               \
      type sum = ((const type *)(void *)operands[0])[i];               \
      for (int rank = 1; rank < num_operands; rank++) {                \
        const wide a = get(sum);                                       \
        const wide b = get(((const type *)(void *)operands[rank])[i]); \
        sum = (type)put((wide)COMBINE(a, b));                          \
      }                                                                \
      result[i] = sum;                                                 \
    }                                                                  \
  } while (0)

bool reduce(void *into, char *const *operands, int num_operands, size_t numel,
            ncclDataType_t dtype, ncclRedOp_t op) {
  switch (dtype) {
    case ncclFloat32:
      REDUCE(float, float, SAME, SAME);
      return true;
    case ncclFloat64:
      REDUCE(double, double, SAME, SAME);
      return true;
    case ncclFloat16:
      REDUCE(_Float16, float, SAME, SAME);
      return true;
    case ncclBfloat16:
      REDUCE(uint16_t, float, from_bfloat16, to_bfloat16);
      return true;
    case ncclInt64:
      REDUCE(int64_t, int64_t, SAME, SAME);
      return true;
    case ncclUint64:
      REDUCE(uint64_t, uint64_t, SAME, SAME);
      return true;
    case ncclInt32:
      REDUCE(int32_t, int64_t, SAME, SAME);
      return true;
    case ncclUint32:
      REDUCE(uint32_t, int64_t, SAME, SAME);
      return true;
    case ncclInt8:
      REDUCE(int8_t, int, SAME, SAME);
      return true;
    case ncclUint8:
      REDUCE(uint8_t, int, SAME, SAME);
      return true;
    default:
      return false;
  }
}

#define MULTIPLY(type, get, put)                               \
  do {                                                         \
    type *values = data;                                       \
    for (size_t i = 0; i < numel; i++) {                       \
      values[i] = (type)put((float)(get(values[i]) * factor)); \
    }                                                          \
  } while (0)

bool multiply(void *data, size_t numel, ncclDataType_t dtype, double factor) {
  switch (dtype) {
    case ncclFloat32:
      MULTIPLY(float, SAME, SAME);
      return true;
    case ncclFloat64:
      for (size_t i = 0; i < numel; i++) ((double *)data)[i] *= factor;
      return true;
    case ncclFloat16:
      MULTIPLY(_Float16, (float), SAME);
      return true;
    case ncclBfloat16:
      MULTIPLY(uint16_t, from_bfloat16, to_bfloat16);
      return true;
    default:
      return false;
  }
}

double read_scalar(const void *data, ncclDataType_t dtype) {
  switch (dtype) {
    case ncclFloat32:
      return (double)*(const float *)data;
    case ncclFloat64:
      return *(const double *)data;
    case ncclFloat16:
      return (double)(float)*(const _Float16 *)data;
    case ncclBfloat16:
      return (double)from_bfloat16(*(const uint16_t *)data);
    default:
      return 0.0;
  }
}
