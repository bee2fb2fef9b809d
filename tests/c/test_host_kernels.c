/*
 * Tests of host/: every loop against arithmetic in fp64, on every kind of
 * processor that this one can play, and the kernels over them.
 */
#include <math.h>
#include <stdlib.h>

#include "base/dtypes.h"
#include "check.h"
#include "host/elements.h"
#include "host/kernels.h"
#include "host/lanes_priv.h"

enum { MAX_NUMEL = 2100, NUM_FLOATS = FSDP_HOST_NUM_FLOATS };

static const fsdp_dtype dtypes[NUM_FLOATS] = {{FSDP_DTYPE_FLOAT16, 2},
                                              {FSDP_DTYPE_BFLOAT16, 2},
                                              {FSDP_DTYPE_FLOAT32, 4},
                                              {FSDP_DTYPE_FLOAT64, 8}};
static const fsdp_dtype int_dtype = {FSDP_DTYPE_INT32, 4};
static const int64_t numels[] = {0,  1,  7,   8,   9,   15,  16,   17,
                                 31, 33, 100, 511, 512, 513, 1025, 2051};
enum { NUM_NUMELS = sizeof numels / sizeof numels[0] };

/* ---- The oracle: one element at a time, by arithmetic alone -------------- */

/* `value` with `bits` of fraction, the least exponent `least`, at most `max`:
 * to nearest, ties to even, which is what nearbyint does. */
static double rounded(double value, int bits, int least, double max) {
  if (isnan(value) || isinf(value) || value == 0) return value;
  int exponent = ilogb(value);
  if (exponent < least) exponent = least;
  const double unit = ldexp(1, exponent - bits);
  const double result = nearbyint(value / unit) * unit;
  if (fabs(result) > max) return copysign(INFINITY, value);
  return copysign(result, value);
}

static double round_to(int dtype, double value) {
  const double as_f32 = (double)(float)value; /* halves are made of fp32 */
  switch (dtype) {
    case FSDP_HOST_F16:
      return rounded(as_f32, 10, -14, 65504);
    case FSDP_HOST_BF16:
      return rounded(as_f32, 7, -126, 0x1.FEp127);
    case FSDP_HOST_F32:
      return as_f32;
    default:
      return value;
  }
}

static double decoded_f16(uint16_t half) {
  const int exponent = half >> 10 & 31;
  const int fraction = half & 1023;
  double value = exponent == 0 ? ldexp(fraction, -24)
                               : ldexp(1024 + fraction, exponent - 25);
  if (exponent == 31) value = fraction != 0 ? NAN : INFINITY;
  return (half & 0x8000) != 0 ? -value : value;
}

static double read_at(const void *data, int dtype, int64_t i) {
  switch (dtype) {
    case FSDP_HOST_F16:
      return decoded_f16(((const uint16_t *)data)[i]);
    case FSDP_HOST_BF16:
      return (double)f32_of_bits((uint32_t)((const uint16_t *)data)[i] << 16);
    case FSDP_HOST_F32:
      return (double)((const float *)data)[i];
    default:
      return ((const double *)data)[i];
  }
}

static bool same(double a, double b) {
  if (isnan(a) || isnan(b)) return isnan(a) && isnan(b);
  return a == b && signbit(a) == signbit(b);
}

/* ---- Values -------------------------------------------------------------- */

static uint32_t random_bits(uint64_t *seed) {
  return (uint32_t)check_random(seed, INT64_C(1) << 16) << 16 |
         (uint32_t)check_random(seed, INT64_C(1) << 16);
}

/* Finite, of many magnitudes; some tiny, zero, infinite or NaN if `any`. */
static float random_f32(uint64_t *seed, bool any) {
  const double sign = check_random(seed, 2) == 0 ? -1 : 1;
  const double fraction = (double)check_random(seed, 1 << 20) / (1 << 20);
  if (any && check_random(seed, 4) == 0) {
    return f32_of_bits(random_bits(seed));
  }
  return (float)(sign * ldexp(1 + fraction, (int)check_random(seed, 20) - 10));
}

static void fill(void *data, int dtype, int64_t numel, bool any,
                 uint64_t *seed) {
  for (int64_t i = 0; i < numel; i++) {
    const float value = random_f32(seed, any);
    if (dtype == FSDP_HOST_F16) ((uint16_t *)data)[i] = f16_of_f32(value);
    if (dtype == FSDP_HOST_BF16) ((uint16_t *)data)[i] = bf16_of_f32(value);
    if (dtype == FSDP_HOST_F32) ((float *)data)[i] = value;
    if (dtype == FSDP_HOST_F64) {
      ((double *)data)[i] =
          (double)value * (1 + ldexp((double)random_bits(seed), -60));
    }
  }
}

/* Memory with a border of 0xA5 around it, aligned to its itemsize only. */
typedef struct bordered {
  unsigned char *memory;
  void *data;
  size_t nbytes;
} bordered;

static bordered bordered_new(int dtype, int64_t numel, int64_t shift) {
  const size_t itemsize = (size_t)dtypes[dtype].itemsize;
  bordered self = {.nbytes = (size_t)numel * itemsize};
  self.memory = malloc(self.nbytes + 256);
  if (self.memory == NULL) abort();
  memset(self.memory, 0xA5, self.nbytes + 256);
  self.data = self.memory + 64 + (size_t)shift * itemsize;
  return self;
}

static bool bordered_free(bordered *self) {
  const size_t begin = (size_t)((unsigned char *)self->data - self->memory);
  bool intact = true;
  for (size_t i = 0; i < self->nbytes + 256; i++) {
    if (i < begin || i >= begin + self->nbytes) {
      intact = intact && self->memory[i] == 0xA5;
    }
  }
  free(self->memory);
  return intact;
}

/* ---- Loops, on each kind of processor ------------------------------------ */

TEST(test_every_half_is_decoded) {
  static uint16_t halves[1 << 16];
  static float values[1 << 16];
  for (int i = 0; i < 1 << 16; i++) halves[i] = (uint16_t)i;
  const fsdp_host_lanes *lanes;
  for (int k = 0; (lanes = fsdp_host_priv_lanes_at(k)) != NULL; k++) {
    for (int dtype = FSDP_HOST_F16; dtype <= FSDP_HOST_BF16; dtype++) {
      int64_t num_wrong = 0;
      lanes->cast[FSDP_HOST_F32][dtype](values, halves, 1 << 16);
      for (int i = 0; i < 1 << 16; i++) {
        num_wrong += !same((double)values[i], read_at(halves, dtype, i));
      }
      if (!CHECK_I64(num_wrong, 0)) printf("  lanes %s\n", lanes->name);
    }
  }
}

/* Every half, the middles between neighbours, and the floats next to both. */
TEST(test_rounding_to_halves) {
  enum { NUM = 6 * (1 << 16) };
  static float values[NUM];
  static uint16_t halves[NUM];
  const fsdp_host_lanes *lanes;
  for (int dtype = FSDP_HOST_F16; dtype <= FSDP_HOST_BF16; dtype++) {
    for (int i = 0; i < 1 << 16; i++) {
      const uint32_t step = dtype == FSDP_HOST_F16 ? 1 << 12 : 1 << 15;
      const uint16_t half = (uint16_t)i;
      const uint32_t bits = bits_of_f32((float)read_at(&half, dtype, 0));
      const uint32_t at[6] = {bits,        bits - 1,        bits + 1,
                              bits + step, bits + step - 1, bits + step + 1};
      for (int j = 0; j < 6; j++) values[6 * i + j] = f32_of_bits(at[j]);
    }
    for (int k = 0; (lanes = fsdp_host_priv_lanes_at(k)) != NULL; k++) {
      int64_t num_wrong = 0;
      lanes->cast[dtype][FSDP_HOST_F32](halves, values, NUM);
      for (int i = 0; i < NUM; i++) {
        const double expected = round_to(dtype, (double)values[i]);
        num_wrong += !same(read_at(halves, dtype, i), expected);
      }
      if (!CHECK_I64(num_wrong, 0)) printf("  lanes %s\n", lanes->name);
    }
  }
}

typedef enum operation { CAST, SCALE, SCALE_FIRST, ADD } operation;

/* The product and the sum are each rounded to the dtype of the arithmetic;
 * fp64 holds both of fp32 exactly, or rounds them as fp32 would. */
static double expected_of(operation what, int to, int from, double old,
                          double value, double scale) {
  const int wide = to == FSDP_HOST_F64 || from == FSDP_HOST_F64 ? FSDP_HOST_F64
                                                                : FSDP_HOST_F32;
  switch (what) {
    case CAST:
      return round_to(to, value);
    case SCALE: /* cast first */
      return round_to(
          to, to == FSDP_HOST_F64
                  ? scale * value
                  : round_to(FSDP_HOST_F32,
                             (double)(float)scale * round_to(to, value)));
    default: {
      const double factor =
          wide == FSDP_HOST_F64 ? scale : (double)(float)scale;
      const double product = round_to(wide, factor * value);
      if (what == SCALE_FIRST) return round_to(to, product);
      return round_to(to, round_to(wide, old + product));
    }
  }
}

static void check_loop(const fsdp_host_lanes *lanes, operation what, int to,
                       int from, int64_t numel, uint64_t *seed) {
  static double old[MAX_NUMEL];
  const double scale = check_random(seed, 2) == 0 ? 1.0 / 3 : 0.25;
  bordered target = bordered_new(to, numel, check_random(seed, 9));
  bordered source = bordered_new(from, numel, check_random(seed, 9));
  int64_t num_wrong = 0;
  fill(target.data, to, numel, true, seed);
  fill(source.data, from, numel, true, seed);
  for (int64_t i = 0; i < numel; i++) old[i] = read_at(target.data, to, i);
  if (what == CAST) lanes->cast[to][from](target.data, source.data, numel);
  if (what == SCALE) {
    lanes->scale[to][from](target.data, source.data, numel, scale);
  }
  if (what == ADD) {
    lanes->add[to][from](target.data, source.data, numel, scale);
  }
  for (int64_t i = 0; i < numel; i++) {
    const double expected = expected_of(what, to, from, old[i],
                                        read_at(source.data, from, i), scale);
    num_wrong += !same(read_at(target.data, to, i), expected);
  }
  if (!CHECK_I64(num_wrong, 0)) {
    printf("  lanes %s operation %d to %d from %d numel %" PRId64 "\n",
           lanes->name, (int)what, to, from, numel);
  }
  CHECK(bordered_free(&target));
  CHECK(bordered_free(&source));
}

TEST(test_loops) {
  uint64_t seed = 20;
  const fsdp_host_lanes *lanes;
  for (int k = 0; (lanes = fsdp_host_priv_lanes_at(k)) != NULL; k++) {
    for (int to = 0; to < NUM_FLOATS; to++) {
      for (int from = 0; from < NUM_FLOATS; from++) {
        for (int j = 0; j < NUM_NUMELS; j++) {
          if (lanes->cast[to][from] != NULL) {
            check_loop(lanes, CAST, to, from, numels[j], &seed);
          }
          if (lanes->scale[to][from] != NULL) {
            check_loop(lanes, SCALE, to, from, numels[j], &seed);
          }
          if (lanes->add[to][from] != NULL) {
            check_loop(lanes, ADD, to, from, numels[j], &seed);
          }
        }
      }
    }
  }
  printf("lanes: %s\n", fsdp_host_priv_lanes()->name);
}

/* ---- Kernels ------------------------------------------------------------- */

/* All pairs, those through blocks too, and the same memory on both sides. */
static void check_accumulate(int to, int from, int64_t numel, double scale,
                             operation what, bool is_same, uint64_t *seed) {
  static double old[MAX_NUMEL];
  static double values[MAX_NUMEL];
  bordered target = bordered_new(to, numel, check_random(seed, 9));
  bordered source = bordered_new(from, numel, check_random(seed, 9));
  int64_t num_wrong = 0;
  fill(target.data, to, numel, true, seed);
  fill(source.data, from, numel, true, seed);
  const void *data = is_same ? target.data : source.data;
  for (int64_t i = 0; i < numel; i++) {
    old[i] = read_at(target.data, to, i);
    values[i] = read_at(data, from, i);
  }
  const fsdp_pack_item item = {.to = target.data,
                               .to_dtype = dtypes[to],
                               .from_dtype = dtypes[from],
                               .from = data,
                               .numel = numel,
                               .add = what == ADD,
                               .scales_first = what == SCALE_FIRST};
  CHECK_OK(fsdp_host_pack(&item, 1, scale, NULL));
  for (int64_t i = 0; i < numel; i++) {
    const double expected =
        expected_of(what, to, from, old[i], values[i], scale);
    num_wrong += !same(read_at(target.data, to, i), expected);
  }
  if (!CHECK_I64(num_wrong, 0)) {
    printf("  operation %d to %d from %d numel %" PRId64 " scale %g same %d\n",
           (int)what, to, from, numel, scale, is_same);
  }
  CHECK(bordered_free(&target));
  CHECK(bordered_free(&source));
}

TEST(test_accumulate) {
  static const double scales[] = {1, 0.5, 1.0 / 3};
  uint64_t seed = 22;
  for (int to = 0; to < NUM_FLOATS; to++) {
    for (int from = 0; from < NUM_FLOATS; from++) {
      for (int j = 0; j < NUM_NUMELS; j++) {
        for (int k = 0; k < 9; k++) {
          const operation what = (operation)(SCALE + k % 3);
          check_accumulate(to, from, numels[j], scales[k / 3], what, false,
                           &seed);
          if (to != from) continue;
          check_accumulate(to, from, numels[j], scales[k / 3], what, true,
                           &seed);
        }
      }
    }
  }
}

TEST(test_pack) {
  const fsdp_dtype f32 = dtypes[FSDP_HOST_F32];
  const float a[2] = {2, 4};
  const uint16_t b[2] = {0x3F80, 0x4000}; /* bf16: 1, 2 */
  float destination[12] = {9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9};
  const fsdp_dtype bf16 = dtypes[FSDP_HOST_BF16];
  uint16_t other[3] = {9, 9, 9};
  const fsdp_pack_item items[] = {
      {destination, f32, f32, a, 2, false, false, false},
      {destination + 2, f32, f32, NULL, 2, false, false, false},
      {destination + 4, f32, bf16, b, 2, true, false, false},
      /* As usual: no data writes zeros; */
      {destination + 6, f32, f32, NULL, 1, true, false, false},
      {destination + 8, f32, f32, a, 0, false, false, false},
      /* or ones, which are not scaled. */
      {destination + 9, f32, f32, NULL, 2, false, true, false},
      /* Elsewhere, in another dtype. */
      {other, bf16, f32, a, 2, false, false, false},
  };
  static const float expected[12] = {1, 2, 0, 0, 9.5F, 10, 0, 9, 9, 1, 1, 9};
  CHECK_OK(fsdp_host_pack(items, 7, 0.5, NULL));
  for (int i = 0; i < 12; i++) CHECK(destination[i] == expected[i]);
  CHECK(other[0] == 0x3F80 && other[1] == 0x4000 && other[2] == 9);
}

TEST(test_refused_items_write_nothing) {
  const fsdp_dtype f32 = dtypes[FSDP_HOST_F32];
  int32_t integers[2] = {5, 6};
  float target[2] = {5, 6};
  const struct {
    fsdp_pack_item item;
    const char *message;
  } cases[] = {
      {{target + 1, f32, int_dtype, integers, 1, false, false, false},
       "pack: no host kernel from dtype 3 to dtype 6 (scale 1), use fp16, "
       "bf16, fp32 or fp64, or torch's own"},
      {{integers, int_dtype, int_dtype, integers, 1, true, false, false},
       "pack: no host kernel from dtype 3 to dtype 3 (scale 1, adding), use "
       "fp16, bf16, fp32 or fp64, or torch's own"},
      {{integers, int_dtype, int_dtype, NULL, 1, false, true, false},
       "pack: no host kernel from dtype 3 to dtype 3 (scale 1), use fp16, "
       "bf16, fp32 or fp64, or torch's own"},
      {{target, f32, f32, target, -1, false, false, false},
       "pack: numel -1, it must be >= 0"},
      {{NULL, f32, f32, target, 1, false, false, false},
       "pack: the destination of 1 elements is NULL"},
  };
  fsdp_error error;
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const fsdp_pack_item items[] = {
        {target, f32, f32, target + 1, 1, false, false, false}, cases[i].item};
    CHECK_FAILS(fsdp_host_pack(items, 2, 1.0, &error), FSDP_INVALID_ARGUMENT,
                error.message, cases[i].message);
    CHECK(target[0] == 5 && target[1] == 6 && integers[0] == 5);
  }
  /* Integers are copied, to themselves too. */
  const fsdp_pack_item copies[] = {
      {integers + 1, int_dtype, int_dtype, integers + 1, 1, false, false,
       false},
      {integers, int_dtype, int_dtype, integers + 1, 1, false, false, false}};
  CHECK_OK(fsdp_host_pack(copies, 2, 1, NULL));
  CHECK(integers[0] == 6 && integers[1] == 6);
}

/* ---- Sums ---------------------------------------------------------------- */

/* destination: -1 apart, else the piece that it is. */
static void check_sum(int dtype, int64_t num_pieces, int64_t numel,
                      int64_t destination, uint64_t *seed) {
  static double expected[MAX_NUMEL];
  bordered memory[5];
  bordered apart = bordered_new(dtype, numel, check_random(seed, 9));
  const void *pieces[5];
  int64_t num_wrong = 0;
  for (int64_t j = 0; j < num_pieces; j++) {
    memory[j] = bordered_new(dtype, numel, check_random(seed, 9));
    fill(memory[j].data, dtype, numel, false, seed);
    pieces[j] = memory[j].data;
  }
  for (int64_t i = 0; i < numel; i++) {
    double sum = read_at(pieces[0], dtype, i);
    for (int64_t j = 1; j < num_pieces; j++) {
      sum = round_to(dtype, sum + read_at(pieces[j], dtype, i));
    }
    expected[i] = sum;
  }
  void *result = destination < 0 ? apart.data : memory[destination].data;
  CHECK_OK(
      fsdp_host_sum(result, dtypes[dtype], pieces, num_pieces, numel, NULL));
  for (int64_t i = 0; i < numel; i++) {
    num_wrong += !same(read_at(result, dtype, i), expected[i]);
  }
  if (!CHECK_I64(num_wrong, 0)) {
    printf("  dtype %d, %" PRId64 " pieces of %" PRId64 ", into %" PRId64 "\n",
           dtype, num_pieces, numel, destination);
  }
  for (int64_t j = 0; j < num_pieces; j++) CHECK(bordered_free(&memory[j]));
  CHECK(bordered_free(&apart));
}

TEST(test_sum) {
  uint64_t seed = 23;
  for (int dtype = 0; dtype < NUM_FLOATS; dtype++) {
    for (int64_t num_pieces = 1; num_pieces <= 5; num_pieces++) {
      for (int j = 0; j < NUM_NUMELS; j++) {
        for (int64_t to = -1; to < num_pieces; to++) {
          check_sum(dtype, num_pieces, numels[j], to, &seed);
        }
      }
    }
  }
}

TEST(test_sum_of_integers) {
  static const struct {
    fsdp_dtype dtype;
    int64_t pieces[3];
    int64_t sum; /* wraps around */
  } cases[] = {
      {{FSDP_DTYPE_INT32, 4}, {INT32_MAX, 1, 1}, (int64_t)INT32_MIN + 1},
      {{FSDP_DTYPE_INT32, 4}, {1, 2, 3}, 6},
      {{FSDP_DTYPE_INT8, 1}, {127, 127, 0}, -2},
      {{FSDP_DTYPE_INT8, 1}, {-1, -1, 0}, -2},
      {{FSDP_DTYPE_INT16, 2}, {300, -905, 0}, -605},
      {{FSDP_DTYPE_INT64, 8}, {INT64_MAX, INT64_MAX, 0}, -2},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const int64_t *from = cases[i].pieces; /* the low bytes are the number */
    const void *pieces[3] = {&from[0], &from[1], &from[2]};
    const size_t nbytes = (size_t)cases[i].dtype.itemsize;
    int64_t sum = cases[i].sum < 0 ? -1 : 0;
    CHECK_OK(fsdp_host_sum(&sum, cases[i].dtype, pieces, 3, 1, NULL));
    if (!CHECK_I64(memcmp(&sum, &cases[i].sum, nbytes), 0)) {
      printf("  case %zu\n", i);
    }
  }
}

TEST(test_sum_refuses) {
  const fsdp_dtype f32 = dtypes[FSDP_HOST_F32];
  const fsdp_dtype boolean = {FSDP_DTYPE_BOOL, 1};
  int32_t sum[1] = {4};
  const void *const pieces[1] = {sum};
  fsdp_error error;
  CHECK_FAILS(fsdp_host_sum(sum, boolean, pieces, 1, 1, &error),
              FSDP_INVALID_ARGUMENT, error.message,
              "sum: no host kernel for dtype 11, use a floating dtype or "
              "integers (not bool)");
  CHECK_FAILS(fsdp_host_sum(sum, f32, pieces, 0, 1, &error),
              FSDP_INVALID_ARGUMENT, error.message,
              "sum: 0 pieces of 1 elements, there must be >= 1 of >= 0");
  CHECK_I64(fsdp_host_sum(sum, f32, pieces, 1, -1, NULL),
            FSDP_INVALID_ARGUMENT);
  CHECK_I64(sum[0], 4);
}
