/*
 * Scaled sums: which scale NCCL can apply to a sum of which dtype, and the
 * operators for it.
 */
#include <math.h>
#include <string.h>

#include "base/alloc.h"
#include "base/dtypes.h"
#include "nccl/nccl_priv.h"

/* The factor in its dtype, as ncclRedOpCreatePreMulSum reads it. */
typedef union scalar {
  float f32;
  double f64;
  uint16_t bits16;
} scalar;

int fsdp_nccl_priv_dtype(fsdp_dtype dtype) {
  switch (dtype.code) {
    case FSDP_DTYPE_UINT8:
      return FSDP_NCCL_UINT8;
    case FSDP_DTYPE_INT8:
      return FSDP_NCCL_INT8;
    case FSDP_DTYPE_INT32:
      return FSDP_NCCL_INT32;
    case FSDP_DTYPE_INT64:
      return FSDP_NCCL_INT64;
    case FSDP_DTYPE_FLOAT16:
      return FSDP_NCCL_FLOAT16;
    case FSDP_DTYPE_FLOAT32:
      return FSDP_NCCL_FLOAT32;
    case FSDP_DTYPE_FLOAT64:
      return FSDP_NCCL_FLOAT64;
    case FSDP_DTYPE_BFLOAT16:
      return FSDP_NCCL_BFLOAT16;
    default:
      return -1;
  }
}

/* The bits of a 16-bit float with `fraction_bits` of fraction and exponents
 * from `min_exponent` to `max_exponent`, normal numbers only. False when it
 * does not hold `value` exactly. */
static bool encode16(double value, int fraction_bits, int min_exponent,
                     int max_exponent, uint16_t *bits) {
  int exponent; /* value = mantissa * 2^exponent, mantissa in [1/2, 1) */
  const double mantissa = frexp(fabs(value), &exponent);
  const double fraction = ldexp(mantissa * 2 - 1, fraction_bits);
  exponent -= 1;
  if (!(mantissa > 0) || !isfinite(value)) return false;
  if (exponent < min_exponent || exponent > max_exponent) return false;
  if (fraction != floor(fraction)) return false;
  const unsigned biased = (unsigned)(exponent - min_exponent + 1);
  *bits = (uint16_t)((signbit(value) ? 0x8000u : 0u) |
                     (biased << fraction_bits) | (unsigned)fraction);
  return true;
}

/* `scale` in `dtype`. False where NCCL would compute less exactly than fp32
 * afterwards; see Note [NCCL scales]. */
static bool encode(int dtype, double scale, scalar *out) {
  scalar encoded = {0};
  if (!isfinite(scale)) return false;
  switch (dtype) {
    case FSDP_NCCL_FLOAT32:
      encoded.f32 = (float)scale;
      break;
    case FSDP_NCCL_FLOAT64:
      encoded.f64 = scale;
      break;
    case FSDP_NCCL_FLOAT16:
      if (!encode16(scale, 10, -14, 15, &encoded.bits16)) return false;
      break;
    case FSDP_NCCL_BFLOAT16:
      if (!encode16(scale, 7, -126, 127, &encoded.bits16)) return false;
      break;
    default:
      return false;
  }
  *out = encoded;
  return true;
}

static bool is_average(const fsdp_nccl_transport *transport, double scale) {
  return scale == 1.0 / (double)transport->world_size;
}

bool fsdp_nccl_can_scale(const fsdp_transport *base, fsdp_dtype dtype,
                         double scale) {
  const fsdp_nccl_transport *transport = (const fsdp_nccl_transport *)base;
  const int nccl_dtype = fsdp_nccl_priv_dtype(dtype);
  scalar unused;
  if (nccl_dtype < 0) return false;
  if (scale == 1) return true;
  if (!encode(nccl_dtype, scale, &unused)) return false;
  return is_average(transport, scale) ||
         transport->api.red_op_create_pre_mul_sum != NULL;
}

fsdp_status fsdp_nccl_priv_sum(fsdp_nccl_transport *transport,
                               fsdp_channel index, int dtype, double scale,
                               int *op, int *result, fsdp_error *error) {
  fsdp_nccl_channel *channel = &transport->channels[index];
  scalar value;
  int made = 0;
  *result = FSDP_NCCL_SUCCESS;
  if (scale == 1) {
    *op = FSDP_NCCL_SUM;
    return FSDP_OK;
  }
  if (is_average(transport, scale)) {
    *op = FSDP_NCCL_AVG;
    return FSDP_OK;
  }
  for (size_t i = 0; i < channel->num_scaled_sums; i++) {
    const fsdp_nccl_scaled_sum *sum = &channel->scaled_sums[i];
    if (sum->dtype == dtype && sum->scale == scale) {
      *op = sum->op;
      return FSDP_OK;
    }
  }

  void *sums = channel->scaled_sums;
  const bool has_room =
      fsdp_grow(&sums, &channel->scaled_sum_capacity,
                channel->num_scaled_sums + 1, sizeof *channel->scaled_sums);
  channel->scaled_sums = sums;
  if (!has_room || !encode(dtype, scale, &value)) {
    return FSDP_FAIL(error, has_room ? FSDP_INTERNAL : FSDP_OUT_OF_MEMORY,
                     "operator for a sum scaled by %g", scale);
  }
  *result = transport->api.red_op_create_pre_mul_sum(
      &made, &value, dtype, FSDP_NCCL_SCALAR_ON_HOST, channel->comm_in_use);
  if (*result != FSDP_NCCL_SUCCESS) return FSDP_OK;
  channel->scaled_sums[channel->num_scaled_sums++] =
      (fsdp_nccl_scaled_sum){.dtype = dtype, .scale = scale, .op = made};
  *op = made;
  return FSDP_OK;
}

void fsdp_nccl_priv_free_sums(fsdp_nccl_transport *transport,
                              fsdp_channel index) {
  fsdp_nccl_channel *channel = &transport->channels[index];
  for (size_t i = 0; i < channel->num_scaled_sums; i++) {
    if (transport->api.red_op_destroy == NULL) break;
    (void)transport->api.red_op_destroy(
        channel->scaled_sums[i].op,
        channel->comm_in_use); /* a failure does not matter when leaving */
  }
  channel->num_scaled_sums = 0;
}
