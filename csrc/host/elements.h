/*
 * Converts one element by its bits. The code is branch-free, so that the
 * compiler can vectorise it, and independent of the flush-to-zero modes that
 * torch.set_flush_denormal turns on. C++ and CUDA may include it; use the
 * processor's own instructions there if it has them.
 */
#ifndef FSDP_HOST_ELEMENTS_H
#define FSDP_HOST_ELEMENTS_H

#include <stdint.h>
#include <string.h>

#if defined(__CUDACC__)
#define FSDP_ELEMENT static inline __host__ __device__
#elif defined(__GNUC__)
#define FSDP_ELEMENT static inline __attribute__((always_inline, unused))
#else
#define FSDP_ELEMENT static inline
#endif

FSDP_ELEMENT uint32_t bits_of_f32(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

FSDP_ELEMENT float f32_of_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

FSDP_ELEMENT float f32_of_bf16(uint16_t half) {
  return f32_of_bits((uint32_t)half << 16);
}

/* Adding just under half of the last place, and one more if the kept part is
 * odd, carries exactly when rounding to nearest even goes up. */
FSDP_ELEMENT uint16_t bf16_of_f32(float value) {
  const uint32_t bits = bits_of_f32(value);
  const uint32_t rounded = (bits + UINT32_C(0x7FFF) + (bits >> 16 & 1)) >> 16;
  const uint32_t magnitude = bits & UINT32_C(0x7FFFFFFF);
  return (uint16_t)(magnitude > UINT32_C(0x7F800000) ? UINT32_C(0x7FC0)
                                                     : rounded);
}

/* fp16 has 5 bits of exponent, biased by 15 instead of 127, and 10 of
 * fraction; its subnormals are multiples of 2^-24. */
FSDP_ELEMENT float f32_of_f16(uint16_t half) {
  const uint32_t magnitude = half & UINT32_C(0x7FFF);
  const uint32_t sign = (uint32_t)(half & UINT32_C(0x8000)) << 16;
  const uint32_t normal = (magnitude << 13) + (UINT32_C(112) << 23);
  const uint32_t special = (magnitude << 13) | UINT32_C(0x7F800000);
  const uint32_t subnormal = bits_of_f32((float)(int32_t)magnitude * 0x1p-24F);
  uint32_t bits = magnitude >= UINT32_C(0x7C00) ? special : normal;
  bits = magnitude < UINT32_C(0x0400) ? subnormal : bits;
  return f32_of_bits(sign | bits);
}

/* Below 2^-14 the sum with 0.5, whose last place is 2^-24, rounds. */
FSDP_ELEMENT uint16_t f16_of_f32(float value) {
  const uint32_t bits = bits_of_f32(value);
  const uint32_t magnitude = bits & UINT32_C(0x7FFFFFFF);
  const uint32_t sign = bits >> 16 & UINT32_C(0x8000);
  const uint32_t normal = (magnitude + UINT32_C(0x0FFF) +
                           (magnitude >> 13 & 1) - (UINT32_C(112) << 23)) >>
                          13;
  const uint32_t subnormal =
      bits_of_f32(f32_of_bits(magnitude) + 0.5F) - UINT32_C(0x3F000000);
  const uint32_t special =
      magnitude > UINT32_C(0x7F800000) ? UINT32_C(0x7E00) : UINT32_C(0x7C00);
  uint32_t half = magnitude >= UINT32_C(0x477FF000) ? special : normal;
  half = magnitude < UINT32_C(0x38800000) ? subnormal : half;
  return (uint16_t)(sign | half);
}

#endif /* FSDP_HOST_ELEMENTS_H */
