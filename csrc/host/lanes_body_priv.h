/*
 * The loops of lanes_priv.h, without an include guard: lanes.c includes this
 * file once per kind of processor. LANES(name) names a function, TARGET gives
 * its attributes. VECTOR_NUMEL is the number of fp16 that the processor
 * converts at a time (0: it cannot); the V_ macros work on that many.
 *
 * Note [Same memory]
 * IVDEP tells the compiler that no iteration reads what an earlier one wrote.
 * That holds for disjoint arguments and for arguments that are the same memory.
 * Without it, the compiler's check at run time would choose the slow loop for
 * the same memory.
 */

/* ---- Casts, and scaled copies and sums, that the compiler vectorises ----- */

#define CAST(to_, from_)                                                 \
  TARGET static void LANES(cast_##to_##_##from_)(void *t, const void *f, \
                                                 int64_t numel) {        \
    type_##to_ *to = t;                                                  \
    const type_##from_ *from = f;                                        \
    IVDEP for (int64_t i = 0; i < numel; i++) {                          \
      to[i] = put_##to_(get_##from_(from[i]));                           \
    }                                                                    \
  }

/* `value` is computed from to[i], from[i] and scale. */
#define LOOP(name, to_, from_, scale_type, value)                       \
  TARGET static void LANES(name##_##to_##_##from_)(                     \
      void *t, const void *f, int64_t numel, double scale_) {           \
    const scale_type scale = (scale_type)scale_;                        \
    type_##to_ *to = t;                                                 \
    const type_##from_ *from = f;                                       \
    IVDEP for (int64_t i = 0; i < numel; i++) to[i] = put_##to_(value); \
  }

#define SUM(dtype)                                                             \
  TARGET static void LANES(sum_##dtype)(void *t, const void *x, const void *y, \
                                        int64_t numel) {                       \
    type_##dtype *to = t;                                                      \
    const type_##dtype *a = x;                                                 \
    const type_##dtype *b = y;                                                 \
    IVDEP for (int64_t i = 0; i < numel; i++) {                                \
      to[i] = put_##dtype(get_##dtype(a[i]) + get_##dtype(b[i]));              \
    }                                                                          \
  }

CAST(f32, bf16)
CAST(bf16, f32)
CAST(f32, f64)
CAST(f64, f32)

LOOP(scale, f32, f32, float, scale *from[i])
LOOP(scale, f64, f64, double, scale *from[i])
LOOP(scale, bf16, bf16, float, scale *get_bf16(from[i]))
LOOP(scale, f32, bf16, float, scale *get_bf16(from[i]))
LOOP(scale, bf16, f32, float, scale *get_bf16(put_bf16(from[i])))
LOOP(scale, f32, f64, float, scale *(float)from[i])
LOOP(scale, f64, f32, double, scale *(double)from[i])

LOOP(add, f32, f32, float, to[i] + scale * from[i])
LOOP(add, f64, f64, double, to[i] + scale * from[i])
LOOP(add, f64, f32, double, to[i] + scale * (double)from[i])
LOOP(add, f32, bf16, float, to[i] + scale * get_bf16(from[i]))
LOOP(add, bf16, f32, float, get_bf16(to[i]) + scale * from[i])
LOOP(add, bf16, bf16, float, get_bf16(to[i]) + scale * get_bf16(from[i]))

SUM(f32)
SUM(f64)
SUM(bf16)

#undef CAST
#undef LOOP
#undef SUM

/* ---- The same with fp16, by the processor's conversions ------------------ */

#if VECTOR_NUMEL
#define VECTORS(to_, vector)                             \
  for (; i + VECTOR_NUMEL <= numel; i += VECTOR_NUMEL) { \
    V_PUT_##to_(to + i, vector);                         \
  }
#else
#define VECTORS(to_, vector)
#endif

#define CAST(to_, from_)                                                  \
  TARGET static void LANES(cast_##to_##_##from_)(void *t, const void *f,  \
                                                 int64_t numel) {         \
    type_##to_ *to = t;                                                   \
    const type_##from_ *from = f;                                         \
    int64_t i = 0;                                                        \
    VECTORS(to_, V_GET_##from_(from + i))                                 \
    IVDEP for (; i < numel; i++) to[i] = put_##to_(get_##from_(from[i])); \
  }

#define LOOP(name, to_, from_, value, vector)                 \
  TARGET static void LANES(name##_##to_##_##from_)(           \
      void *t, const void *f, int64_t numel, double scale_) { \
    const float scale = (float)scale_;                        \
    type_##to_ *to = t;                                       \
    const type_##from_ *from = f;                             \
    int64_t i = 0;                                            \
    VECTORS(to_, vector)                                      \
    IVDEP for (; i < numel; i++) to[i] = put_##to_(value);    \
  }

CAST(f32, f16)
CAST(f16, f32)

LOOP(scale, f16, f16, scale *get_f16(from[i]),
     V_MUL(V_SET(scale), V_GET_f16(from + i)))
LOOP(scale, f32, f16, scale *get_f16(from[i]),
     V_MUL(V_SET(scale), V_GET_f16(from + i)))
LOOP(scale, f16, f32, scale *get_f16(put_f16(from[i])),
     V_MUL(V_SET(scale), V_ROUND_f16(V_GET_f32(from + i))))
LOOP(add, f16, f16, get_f16(to[i]) + scale * get_f16(from[i]),
     V_ADD(V_GET_f16(to + i), V_MUL(V_SET(scale), V_GET_f16(from + i))))
LOOP(add, f32, f16, to[i] + scale * get_f16(from[i]),
     V_ADD(V_GET_f32(to + i), V_MUL(V_SET(scale), V_GET_f16(from + i))))
LOOP(add, f16, f32, get_f16(to[i]) + scale * from[i],
     V_ADD(V_GET_f16(to + i), V_MUL(V_SET(scale), V_GET_f32(from + i))))

TARGET static void LANES(sum_f16)(void *t, const void *x, const void *y,
                                  int64_t numel) {
  uint16_t *to = t;
  const uint16_t *a = x;
  const uint16_t *b = y;
  int64_t i = 0;
  VECTORS(f16, V_ADD(V_GET_f16(a + i), V_GET_f16(b + i)))
  IVDEP for (; i < numel; i++) {
    to[i] = put_f16(get_f16(a[i]) + get_f16(b[i]));
  }
}

#undef CAST
#undef LOOP
#undef VECTORS

/* clang-format off */
static const fsdp_host_lanes LANES(table) = {
    .name = LANES_NAME,
    .cast = {
        [FSDP_HOST_F16][FSDP_HOST_F32] = LANES(cast_f16_f32),
        [FSDP_HOST_BF16][FSDP_HOST_F32] = LANES(cast_bf16_f32),
        [FSDP_HOST_F32][FSDP_HOST_F16] = LANES(cast_f32_f16),
        [FSDP_HOST_F32][FSDP_HOST_BF16] = LANES(cast_f32_bf16),
        [FSDP_HOST_F32][FSDP_HOST_F64] = LANES(cast_f32_f64),
        [FSDP_HOST_F64][FSDP_HOST_F32] = LANES(cast_f64_f32),
    },
    .scale = {
        [FSDP_HOST_F16][FSDP_HOST_F16] = LANES(scale_f16_f16),
        [FSDP_HOST_F16][FSDP_HOST_F32] = LANES(scale_f16_f32),
        [FSDP_HOST_BF16][FSDP_HOST_BF16] = LANES(scale_bf16_bf16),
        [FSDP_HOST_BF16][FSDP_HOST_F32] = LANES(scale_bf16_f32),
        [FSDP_HOST_F32][FSDP_HOST_F16] = LANES(scale_f32_f16),
        [FSDP_HOST_F32][FSDP_HOST_BF16] = LANES(scale_f32_bf16),
        [FSDP_HOST_F32][FSDP_HOST_F32] = LANES(scale_f32_f32),
        [FSDP_HOST_F32][FSDP_HOST_F64] = LANES(scale_f32_f64),
        [FSDP_HOST_F64][FSDP_HOST_F32] = LANES(scale_f64_f32),
        [FSDP_HOST_F64][FSDP_HOST_F64] = LANES(scale_f64_f64),
    },
    .add = {
        [FSDP_HOST_F16][FSDP_HOST_F16] = LANES(add_f16_f16),
        [FSDP_HOST_F16][FSDP_HOST_F32] = LANES(add_f16_f32),
        [FSDP_HOST_BF16][FSDP_HOST_BF16] = LANES(add_bf16_bf16),
        [FSDP_HOST_BF16][FSDP_HOST_F32] = LANES(add_bf16_f32),
        [FSDP_HOST_F32][FSDP_HOST_F16] = LANES(add_f32_f16),
        [FSDP_HOST_F32][FSDP_HOST_BF16] = LANES(add_f32_bf16),
        [FSDP_HOST_F32][FSDP_HOST_F32] = LANES(add_f32_f32),
        [FSDP_HOST_F64][FSDP_HOST_F32] = LANES(add_f64_f32),
        [FSDP_HOST_F64][FSDP_HOST_F64] = LANES(add_f64_f64),
    },
    .sum = {LANES(sum_f16), LANES(sum_bf16), LANES(sum_f32), LANES(sum_f64)},
};
/* clang-format on */
