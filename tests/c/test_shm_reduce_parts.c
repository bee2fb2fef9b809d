/*
 * Tests of shm/: sums of what lies in many places of the ranks' memory. Each
 * rank makes up the arrays of all, and compares with the plain sum.
 */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/dtypes.h"
#include "check.h"
#include "shm_fixture.h"
#include "transports/merging.h"

enum { MAX_PARTS = 4096 };

static const fsdp_dtype g_f32 = {FSDP_DTYPE_FLOAT32, 4};
static const fsdp_dtype g_f64 = {FSDP_DTYPE_FLOAT64, 8};
static const fsdp_dtype g_bf16 = {FSDP_DTYPE_BFLOAT16, 2};

static uint64_t g_state; /* of the random numbers */

static int64_t draw(int64_t below) {
  g_state = g_state * UINT64_C(6364136223846793005) + 1442695040888963407U;
  return (int64_t)(g_state >> 33) % below;
}

/* A rank's array: `numel` floats, then `numel` doubles, for each rank. */
typedef struct array {
  int64_t numel; /* of the floats, and of the doubles; of all ranks */
  double *elements;
  fsdp_part parts[MAX_PARTS];
  int64_t num_parts;
} array;

static fsdp_dtype dtype_at(const array *self, int64_t i) {
  return i < self->numel ? g_f32 : g_f64;
}

static int64_t offset_of(const array *self, int64_t i) {
  const int64_t of_floats = self->numel * g_f32.itemsize;
  return i < self->numel ? i * g_f32.itemsize
                         : of_floats + (i - self->numel) * g_f64.itemsize;
}

/* Elements [begin, begin + numel) get values, in memory of their own. */
static void add_part(array *self, int64_t begin, int64_t numel, bool is_one) {
  const fsdp_dtype dtype = dtype_at(self, begin);
  char *data = is_one ? NULL : malloc((size_t)(numel * dtype.itemsize));
  for (int64_t i = 0; i < numel; i++) {
    const float small = (float)(draw(200001) - 100000) / 7.0F;
    const double value = is_one                     ? 1.0
                         : dtype.code == g_f64.code ? (double)small / 3.0
                                                    : (double)small;
    self->elements[begin + i] = value;
    if (is_one) continue;
    if (dtype.code == g_f32.code) {
      memcpy(data + i * 4, &small, 4);
    } else {
      memcpy(data + i * 8, &value, 8);
    }
  }
  CHECK(self->num_parts < MAX_PARTS);
  self->parts[self->num_parts++] =
      (fsdp_part){.data = data,
                  .offset = offset_of(self, begin),
                  .nbytes = numel * dtype.itemsize};
}

/* Gaps, ones and values in turn, of up to `longest` elements. */
static array *make_array(int64_t rank, int64_t numel, int64_t longest) {
  array *self = calloc(1, sizeof *self);
  if (self == NULL) abort();
  self->numel = numel;
  self->elements = calloc((size_t)(2 * numel), sizeof(double));
  if (self->elements == NULL) abort();
  g_state = (uint64_t)(rank * 7919 + numel * 31 + longest);
  for (int64_t i = 0; i < 2 * numel;) {
    const int64_t end = i < numel ? numel : 2 * numel;
    const int64_t wanted = 1 + draw(longest);
    const int64_t length = wanted < end - i ? wanted : end - i;
    const int64_t kind = draw(5); /* a gap, ones, or values */
    if (kind > 0) add_part(self, i, length, kind == 1);
    i += length;
  }
  return self;
}

/* Whether the parts hold what they held. */
static bool is_unchanged(const array *self) {
  int64_t at = 0; /* an element */
  for (int64_t i = 0; i < self->num_parts; i++) {
    const fsdp_part *part = &self->parts[i];
    while (offset_of(self, at) < part->offset) at++;
    const int32_t itemsize = dtype_at(self, at).itemsize;
    for (int64_t j = 0; part->data != NULL && j < part->nbytes / itemsize;
         j++) {
      float narrow = 0;
      double value = 0;
      memcpy(&value, (const char *)part->data + j * itemsize, (size_t)itemsize);
      memcpy(&narrow, &value, sizeof narrow);
      if (itemsize == 4) value = (double)narrow;
      if (value != self->elements[at + j]) return false;
    }
  }
  return true;
}

static void free_array(array *self) {
  for (int64_t i = 0; i < self->num_parts; i++) {
    free((void *)(uintptr_t)self->parts[i].data);
  }
  free(self->elements);
  free(self);
}

/* Element i, summed from the rank before `owner` downwards, the owner last. */
static double sum_of(array *const *arrays, int64_t world_size, int64_t owner,
                     int64_t i) {
  const bool is_float = dtype_at(arrays[0], i).code == g_f32.code;
  double sum = 0;
  for (int64_t turn = 0; turn < world_size; turn++) {
    const int64_t rank = (owner + world_size - 1 - turn) % world_size;
    const double value = arrays[rank]->elements[i];
    sum = turn == 0 ? value : sum + value;
    if (is_float) sum = (double)(float)sum;
  }
  return sum;
}

static fsdp_status reduce(fsdp_transport *transport, const fsdp_parts *parts,
                          fsdp_error *error) {
  const fsdp_call call = {.channel = FSDP_CHANNEL_REDUCE, .label = "unit 'a'"};
  uint64_t ticket = 0;
  fsdp_status status = FSDP_OK;
  FSDP_TRY(
      transport->ops->reduce_parts(transport, &call, parts, &ticket, error));
  FSDP_TRY(transport->ops->wait(transport, FSDP_CHANNEL_REDUCE, ticket, error));
done:
  return status;
}

/* Each rank takes its part of the floats, halved and added, and its part of the
 * doubles as floats. */
static void sum_once(const shm_rank *self, fsdp_transport *transport,
                     int64_t shard_numel, int64_t longest) {
  const int64_t world_size = self->world_size;
  const int64_t numel = shard_numel * world_size;
  const int64_t begin = self->rank * shard_numel;
  array *arrays[8];
  for (int64_t rank = 0; rank < world_size; rank++) {
    arrays[rank] = make_array(rank, numel, longest);
  }
  const array *own = arrays[self->rank];
  float *added = malloc((size_t)shard_numel * sizeof *added);
  float *narrowed = malloc((size_t)shard_numel * sizeof *narrowed);
  if (added == NULL || narrowed == NULL) abort();
  for (int64_t i = 0; i < shard_numel; i++) added[i] = (float)i;
  const fsdp_place places[] = {{.offset = offset_of(own, begin),
                                .numel = shard_numel,
                                .sum_dtype = g_f32,
                                .data = added,
                                .dtype = g_f32,
                                .scale = 0.5,
                                .adds = true},
                               {.offset = offset_of(own, numel + begin),
                                .numel = shard_numel,
                                .sum_dtype = g_f64,
                                .data = narrowed,
                                .dtype = g_f32,
                                .scale = 1.0}};
  const fsdp_parts parts = {.nbytes = offset_of(own, numel) + numel * 8,
                            .parts = own->parts,
                            .num_parts = own->num_parts,
                            .places = places,
                            .num_places = 2};
  CHECK_OK(reduce(transport, &parts, NULL));
  CHECK(is_unchanged(own));
  int64_t num_wrong = 0;
  for (int64_t i = 0; i < shard_numel; i++) {
    const float half =
        (float)(0.5 * sum_of(arrays, world_size, self->rank, begin + i));
    const double wide =
        sum_of(arrays, world_size, self->rank, numel + begin + i);
    num_wrong += added[i] != (float)i + half || narrowed[i] != (float)wide;
  }
  CHECK_I64(num_wrong, 0);
  for (int64_t rank = 0; rank < world_size; rank++) free_array(arrays[rank]);
  free(added);
  free(narrowed);
}

static void sum_all(const shm_rank *self) {
  shm_direct_call_nbytes = 1;
  fsdp_transport *transport = shm_join(self, "sums");
  CHECK(transport->ops->can_reduce_parts(transport));
  sum_once(self, transport, 1, 1);
  sum_once(self, transport, 100, 7);
  sum_once(self, transport, 300, 1); /* more parts than one read takes */
  sum_once(self, transport, 3000, 5000);
  sum_once(self, transport, 40000, 30000); /* more than the scratch holds */
  transport->ops->destroy(transport);
}

TEST(test_sums) {
  for (int64_t world_size = 2; world_size <= 5; world_size++) {
    shm_run(world_size, sum_all, NULL);
  }
}

/* A rank without parts, and one without places, take part all the same. */
static void give_or_take(const shm_rank *self) {
  shm_direct_call_nbytes = 1;
  fsdp_transport *transport = shm_join(self, "give");
  const float given[] = {1, 2, 3};
  float taken[] = {9, 9, 9};
  const fsdp_part part = {.data = given, .offset = 4, .nbytes = sizeof given};
  const fsdp_place place = {.offset = 0,
                            .numel = 3,
                            .sum_dtype = g_f32,
                            .data = taken,
                            .dtype = g_f32,
                            .scale = 2.0};
  const bool gives = self->rank == 1;
  const fsdp_parts parts = {.nbytes = 16,
                            .parts = gives ? &part : NULL,
                            .num_parts = gives ? 1 : 0,
                            .places = gives ? NULL : &place,
                            .num_places = gives ? 0 : 1};
  CHECK_OK(reduce(transport, &parts, NULL));
  if (!gives) CHECK(taken[0] == 0 && taken[1] == 2 && taken[2] == 4);
  transport->ops->destroy(transport);
}

TEST(test_no_parts_or_no_places) {
  shm_run(3, give_or_take, NULL);
}

/* bf16: rounded after each addition, before it is scaled. */
static void sum_halves(const shm_rank *self) {
  shm_direct_call_nbytes = 1;
  fsdp_transport *transport = shm_join(self, "halves");
  const uint16_t given = self->rank == 0 ? 0x4380 : 0x3F80; /* 256, or 1 */
  float taken = 0;
  const fsdp_part part = {.data = &given, .nbytes = 2};
  const fsdp_place place = {.numel = 1,
                            .sum_dtype = g_bf16,
                            .data = &taken,
                            .dtype = g_f32,
                            .scale = 0.5};
  const fsdp_parts parts = {.nbytes = 2,
                            .parts = &part,
                            .num_parts = 1,
                            .places = &place,
                            .num_places = 1};
  CHECK_OK(reduce(transport, &parts, NULL));
  CHECK(taken == 128); /* 257 is no bf16 */
  transport->ops->destroy(transport);
}

TEST(test_sixteen_bits) {
  shm_run(2, sum_halves, NULL);
}

static void refuse(const shm_rank *self) {
  fsdp_error error = {0};
  float taken = 0;
  fsdp_place place = {.numel = 1,
                      .sum_dtype = {FSDP_DTYPE_BOOL, 1},
                      .data = &taken,
                      .dtype = g_f32};
  const fsdp_parts parts = {.nbytes = 4, .places = &place, .num_places = 1};
  shm_direct_call_nbytes = 1;
  fsdp_transport *transport = shm_join(self, "refuse");
  CHECK_I64(reduce(transport, &parts, &error), FSDP_INVALID_ARGUMENT);
  SHM_CHECK_SAYS(&error, "dtype 11");
  CHECK_OK(shm_barrier(transport, NULL, NULL));
  transport->ops->destroy(transport);
  shm_direct_call_nbytes = -1; /* the ranks do not read each other's memory */
  fsdp_transport *rings = shm_join(self, "rings");
  CHECK(!rings->ops->can_reduce_parts(rings));
  place.sum_dtype = g_f32;
  CHECK_I64(reduce(rings, &parts, &error), FSDP_INVALID_STATE);
  rings->ops->destroy(rings);
}

TEST(test_refusals) {
  shm_run(2, refuse, NULL);
}

/* Arrays of other lengths are other calls. */
static void differ(const shm_rank *self) {
  fsdp_error error = {0};
  shm_direct_call_nbytes = 1;
  fsdp_transport *transport = shm_join(self, "differ");
  const fsdp_parts parts = {.nbytes = 8 + self->rank};
  CHECK_I64(reduce(transport, &parts, &error), FSDP_BACKEND);
  SHM_CHECK_SAYS(&error, "reduce_scatter of parts", "unit 'a'");
  transport->ops->destroy(transport);
}

TEST(test_other_lengths) {
  shm_run(2, differ, NULL);
}

/* A rank that is gone took its memory along. */
static void die(const shm_rank *self) {
  fsdp_error error = {0};
  shm_direct_call_nbytes = 1;
  fsdp_transport *transport = shm_join(self, "die");
  CHECK_OK(shm_barrier(transport, NULL, NULL));
  if (self->rank == 1) _exit(0);
  const fsdp_parts parts = {.nbytes = 8};
  CHECK_I64(reduce(transport, &parts, &error), FSDP_BACKEND);
  SHM_CHECK_SAYS(&error, "rank 1", "its process has ended");
  transport->ops->destroy(transport);
}

TEST(test_a_rank_dies) {
  shm_run_without(3, 1, die, NULL);
}

/* The list of another rank needs memory, once. */
static void lack_memory(const shm_rank *self) {
  fsdp_error error = {0};
  shm_direct_call_nbytes = 1;
  fsdp_transport *transport = shm_join(self, "lack");
  const float given = 1;
  const fsdp_part part = {.data = &given, .nbytes = 4};
  const fsdp_parts parts = {.nbytes = 4, .parts = &part, .num_parts = 1};
  CHECK_OK(shm_barrier(transport, NULL, NULL));
  if (self->rank == 0) fsdp_alloc_fail_at(1); /* 0: the list of calls */
  const fsdp_status status = reduce(transport, &parts, &error);
  fsdp_alloc_fail_at(-1);
  CHECK_I64(status, self->rank == 0 ? FSDP_OUT_OF_MEMORY : FSDP_BACKEND);
  SHM_CHECK_SAYS(&error, "out of host memory");
  transport->ops->destroy(transport);
}

TEST(test_no_memory) {
  shm_run(2, lack_memory, NULL);
}

static void merge(const shm_rank *self) {
  shm_direct_call_nbytes = 1;
  fsdp_transport *inner = shm_join(self, "merge");
  fsdp_transport *merging = NULL;
  CHECK_OK(
      fsdp_merging_create(inner, self->rank, self->world_size, &merging, NULL));
  CHECK(merging->ops->can_reduce_parts(merging));
  sum_once(self, merging, 50, 9);
  merging->ops->destroy(merging);
  inner->ops->destroy(inner);
}

TEST(test_merging_passes_them_on) {
  shm_run(2, merge, NULL);
}
