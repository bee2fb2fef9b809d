/*
 * The loops of lanes_priv.h for each kind of processor, and the choice between
 * them. AVX2 with F16C gains most; AVX-512 makes rounding to bf16 a third
 * faster while the elements are in a cache.
 */
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

#include "host/elements.h"
#include "host/lanes_priv.h"

#if defined(__GNUC__) && defined(__x86_64__)
#define IS_X86 1
#include <cpuid.h>
#include <immintrin.h>
#else
#define IS_X86 0
#endif

#if defined(__clang__)
#define IVDEP _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define IVDEP _Pragma("GCC ivdep")
#else
#define IVDEP
#endif

/* Never fused, see Note [Rounding]; gcc does not with -std=c11. */
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#endif

/* The macros that the loops of all processors use. */
typedef uint16_t type_f16;
typedef uint16_t type_bf16;
typedef float type_f32;
typedef double type_f64;
#define get_f16 f32_of_f16
#define get_bf16 f32_of_bf16
#define get_f32(value) (value)
#define get_f64(value) (value)
#define put_f16(value) f16_of_f32(value)
#define put_bf16(value) bf16_of_f32(value)
#define put_f32(value) ((float)(value))
#define put_f64(value) ((double)(value))

#define LANES(name) name##_any
#define LANES_NAME "any"
#define TARGET
#define VECTOR_NUMEL 0
#include "host/lanes_body_priv.h"
#undef LANES
#undef LANES_NAME
#undef TARGET
#undef VECTOR_NUMEL

#if IS_X86

#define LANES(name) name##_avx2
#define LANES_NAME "avx2"
#define TARGET __attribute__((target("avx2,f16c")))
#define VECTOR_NUMEL 8
#define V_HALVES_(v) _mm256_cvtps_ph((v), _MM_FROUND_TO_NEAREST_INT)
#define V_GET_f16(p) \
  _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(p)))
#define V_GET_f32(p) _mm256_loadu_ps(p)
#define V_PUT_f16(p, v) _mm_storeu_si128((__m128i *)(void *)(p), V_HALVES_(v))
#define V_PUT_f32(p, v) _mm256_storeu_ps((p), (v))
#define V_ROUND_f16(v) _mm256_cvtph_ps(V_HALVES_(v))
#define V_SET(x) _mm256_set1_ps(x)
#define V_ADD(a, b) _mm256_add_ps((a), (b))
#define V_MUL(a, b) _mm256_mul_ps((a), (b))
#include "host/lanes_body_priv.h"
#undef LANES
#undef LANES_NAME
#undef TARGET
#undef VECTOR_NUMEL
#undef V_HALVES_
#undef V_GET_f16
#undef V_GET_f32
#undef V_PUT_f16
#undef V_PUT_f32
#undef V_ROUND_f16
#undef V_SET
#undef V_ADD
#undef V_MUL

#define LANES(name) name##_avx512
#define LANES_NAME "avx512"
#if defined(__clang__)
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))
#else
#define TARGET                                     \
  __attribute__((                                  \
      target("avx512f,avx512bw,avx512vl,avx512dq," \
             "prefer-vector-width=512")))
#endif
#define VECTOR_NUMEL 16
#define V_HALVES_(v) _mm512_cvtps_ph((v), _MM_FROUND_TO_NEAREST_INT)
#define V_GET_f16(p) \
  _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)(p)))
#define V_GET_f32(p) _mm512_loadu_ps(p)
#define V_PUT_f16(p, v) \
  _mm256_storeu_si256((__m256i *)(void *)(p), V_HALVES_(v))
#define V_PUT_f32(p, v) _mm512_storeu_ps((p), (v))
#define V_ROUND_f16(v) _mm512_cvtph_ps(V_HALVES_(v))
#define V_SET(x) _mm512_set1_ps(x)
#define V_ADD(a, b) _mm512_add_ps((a), (b))
#define V_MUL(a, b) _mm512_mul_ps((a), (b))
#include "host/lanes_body_priv.h"

#endif /* IS_X86 */

#if IS_X86
/* Not every clang knows "f16c" as a feature. */
static bool has_f16c(void) {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
#endif

const fsdp_host_lanes *fsdp_host_priv_lanes_at(int index) {
  if (index == 0) return &table_any;
#if IS_X86
  if (index == 1 && __builtin_cpu_supports("avx2") && has_f16c()) {
    return &table_avx2;
  }
  if (index == 2 && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    return &table_avx512;
  }
#endif
  return NULL;
}

const fsdp_host_lanes *fsdp_host_priv_lanes(void) {
  /* Looked for once: cpuid costs a virtual machine tens of microseconds. */
  static const fsdp_host_lanes *_Atomic found;
  const fsdp_host_lanes *best =
      atomic_load_explicit(&found, memory_order_relaxed);
  if (best != NULL) return best;
  best = &table_any;
  for (int index = 1; index < 3; index++) {
    const fsdp_host_lanes *lanes = fsdp_host_priv_lanes_at(index);
    if (lanes != NULL) best = lanes;
  }
  atomic_store_explicit(&found, best, memory_order_relaxed);
  return best;
}
