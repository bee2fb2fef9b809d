/*
 * The norm of all elements of many spans of host memory.
 */
#include <math.h>
#include <string.h>

#include "host/convert_priv.h"
#include "host/kernels.h"
#include "host/lanes_priv.h"

/* The sum of powers, or the largest magnitude, of values in fp64. */
static double term_of_f64(const double *values, int64_t numel, double power) {
  double sum = 0;
  for (int64_t i = 0; i < numel; i++) {
    const double value = fabs(values[i]);
    if (isinf(power)) {
      sum = value > sum || isnan(value) ? value : sum;
      if (isnan(sum)) return sum;
    } else if (power == 2) {
      sum += value * value;
    } else {
      sum += power == 1 ? value : pow(value, power);
    }
  }
  return sum;
}

/* The same of values in fp32. */
static double term_of_f32(const fsdp_host_lanes *lanes, const float *values,
                          int64_t numel, double power) {
  if (power == 2) return lanes->sum_of_squares_f32(values, numel);
  if (power == 1) return lanes->sum_of_f32(values, numel);
  if (isinf(power)) {
    const uint32_t bits = lanes->max_bits_f32(values, numel);
    float most;
    memcpy(&most, &bits, sizeof most);
    return (double)most;
  }
  double sum = 0;
  for (int64_t i = 0; i < numel; i++) {
    sum += pow(fabs((double)values[i]), power);
  }
  return sum;
}

static double joined(double total, double term, double power) {
  if (!isinf(power)) return total + term;
  return isnan(total) || total > term ? total : term;
}

/* Through a block of fp32 for the 16-bit dtypes. */
static double term_of_span(const fsdp_host_lanes *lanes,
                           const fsdp_host_span *span, fsdp_host_float index,
                           double power) {
  float values[FSDP_HOST_BLOCK_NUMEL];
  const char *data = span->data;
  double total = 0;
  if (index == FSDP_HOST_F64) {
    return term_of_f64(span->data, span->numel, power);
  }
  if (index == FSDP_HOST_F32) {
    return term_of_f32(lanes, span->data, span->numel, power);
  }
  for (int64_t begin = 0; begin < span->numel; begin += FSDP_HOST_BLOCK_NUMEL) {
    const int64_t block = fsdp_host_priv_block(span->numel - begin);
    lanes->cast[FSDP_HOST_F32][index](values, data + 2 * begin, block);
    total = joined(total, term_of_f32(lanes, values, block, power), power);
  }
  return total;
}

fsdp_status fsdp_host_norm(const fsdp_host_span *spans, int64_t num_spans,
                           double power, double *norm, fsdp_error *error) {
  const fsdp_host_lanes *lanes = fsdp_host_priv_lanes();
  fsdp_host_float index = FSDP_HOST_F32;
  double total = 0;
  if (!(power > 0)) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "norm: the power is %g, it must be > 0 or infinity",
                     power);
  }
  for (int64_t i = 0; i < num_spans; i++) {
    if (!fsdp_host_priv_float_of(spans[i].dtype, &index) ||
        spans[i].numel < 0) {
      return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                       "norm: span %lld has %lld elements of dtype %d, there "
                       "must be >= 0, of fp16, bf16, fp32 or fp64",
                       (long long)i, (long long)spans[i].numel,
                       (int)spans[i].dtype.code);
    }
  }
  for (int64_t i = 0; i < num_spans; i++) {
    if (spans[i].numel == 0) continue;
    (void)fsdp_host_priv_float_of(spans[i].dtype, &index); /* checked above */
    total = joined(total, term_of_span(lanes, &spans[i], index, power), power);
  }
  *norm = isinf(power) ? total
          : power == 2 ? sqrt(total)
                       : pow(total, 1 / power);
  return FSDP_OK;
}
