// The element types of the kernels and their arithmetic, for the device and,
// so that a test can run the same code without one, for the host.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "base/dtypes.h"
#include "host/elements.h"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define FSDP_HD __host__ __device__ __forceinline__
#else
#define FSDP_HD inline
#endif
#if defined(__CUDA_ARCH__)
#define FSDP_UNROLL _Pragma("unroll")
#else
#define FSDP_UNROLL
#endif

namespace fsdp_cuda {

// The floating dtypes, by their code.
template <int Code>
struct Dtype;

template <>
struct Dtype<FSDP_DTYPE_FLOAT64> {
  using Element = double;
  static FSDP_HD double get(double value) { return value; }
  static FSDP_HD double put(double value) { return value; }
};

template <>
struct Dtype<FSDP_DTYPE_FLOAT32> {
  using Element = float;
  static FSDP_HD float get(float value) { return value; }
  static FSDP_HD float put(double value) { return static_cast<float>(value); }
  static FSDP_HD float put(float value) { return value; }
};

template <>
struct Dtype<FSDP_DTYPE_FLOAT16> {
  using Element = uint16_t;
  static FSDP_HD float get(uint16_t bits) {
#if defined(__CUDA_ARCH__)
    return __half2float(__ushort_as_half(bits));
#else
    return f32_of_f16(bits);
#endif
  }
  static FSDP_HD uint16_t put(float value) {
#if defined(__CUDA_ARCH__)
    return __half_as_ushort(__float2half_rn(value));
#else
    return f16_of_f32(value);
#endif
  }
  // Through fp32, as torch does.
  static FSDP_HD uint16_t put(double value) {
    return put(static_cast<float>(value));
  }
};

template <>
struct Dtype<FSDP_DTYPE_BFLOAT16> {
  using Element = uint16_t;
  static FSDP_HD float get(uint16_t bits) { return f32_of_bf16(bits); }
  static FSDP_HD uint16_t put(float value) {
#if defined(__CUDA_ARCH__)
    return __bfloat16_as_ushort(__float2bfloat16_rn(value));
#else
    return bf16_of_f32(value);
#endif
  }
  static FSDP_HD uint16_t put(double value) {
    return put(static_cast<float>(value));
  }
};

template <int Code>
using element = typename Dtype<Code>::Element;

// Rounded one by one: the compiler must not fuse them.
FSDP_HD float multiply(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}
FSDP_HD double multiply(double a, double b) {
#if defined(__CUDA_ARCH__)
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}
FSDP_HD float add(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}
FSDP_HD double add(double a, double b) {
#if defined(__CUDA_ARCH__)
  return __dadd_rn(a, b);
#else
  return a + b;
#endif
}

// What two dtypes are added in: fp64 if one of them is.
template <int To, int From>
struct Wide {
  using Type = float;
};
template <int From>
struct Wide<FSDP_DTYPE_FLOAT64, From> {
  using Type = double;
};
template <int To>
struct Wide<To, FSDP_DTYPE_FLOAT64> {
  using Type = double;
};
template <>
struct Wide<FSDP_DTYPE_FLOAT64, FSDP_DTYPE_FLOAT64> {
  using Type = double;
};

// What becomes of the destination. A copy is scaled in its own dtype, kScaled
// in the one that sums are computed in.
enum class Kind : int8_t { kCopy, kScaled, kAdd, kZeros, kOnes };

// What becomes of one element of the destination.
template <int To, int From>
FSDP_HD element<To> combined(element<To> old, element<From> value, double scale,
                             Kind kind) {
  if (kind != Kind::kCopy) {
    using Type = typename Wide<To, From>::Type;
    const Type term = multiply(static_cast<Type>(scale),
                               static_cast<Type>(Dtype<From>::get(value)));
    if (kind == Kind::kScaled) return Dtype<To>::put(term);
    return Dtype<To>::put(add(static_cast<Type>(Dtype<To>::get(old)), term));
  }
  const element<To> cast = Dtype<To>::put(Dtype<From>::get(value));
  if (scale == 1.0) return cast;
  const auto wide = Dtype<To>::get(cast);
  using Type = decltype(Dtype<To>::get(cast));
  return Dtype<To>::put(multiply(static_cast<Type>(scale), wide));
}

// A norm's term of one element, and two terms together. A NaN wins.
FSDP_HD double norm_term(double value, double power) {
  const double magnitude = fabs(value);
  if (power == 2.0) return multiply(magnitude, magnitude);
  if (power == 1.0 || isinf(power)) return magnitude;
  return pow(magnitude, power);
}

FSDP_HD double norm_joined(double a, double b, double power) {
  if (!isinf(power)) return add(a, b);
  return isnan(a) || a > b ? a : b;
}

}  // namespace fsdp_cuda
