/* Calls with known elements, and what they should give. */
#include "shm_calls.h"

#include <math.h>
#include <stdlib.h>

#include "base/dtypes.h"
#include "check.h"
#include "transports/hierarchical.h"

enum { GUARD = 64 };

const shm_dtype shm_dtypes[SHM_NUM_DTYPES] = {
    {{FSDP_DTYPE_FLOAT32, 4}, true},
    {{FSDP_DTYPE_FLOAT64, 8}, true},
    {{FSDP_DTYPE_BFLOAT16, 2}, true},
    {{FSDP_DTYPE_FLOAT16, 2}, true},
    {{FSDP_DTYPE_UINT8, 1}, true},
    {{FSDP_DTYPE_INT8, 1}, true},
    {{FSDP_DTYPE_INT16, 2}, true},
    {{FSDP_DTYPE_INT32, 4}, true},
    {{FSDP_DTYPE_INT64, 8}, true},
    {{FSDP_DTYPE_BOOL, 1}, false},
    {{25, 3}, false}, /* nobody's dtype: bytes all the same */
};

/* ---- Elements of each rank, known to all --------------------------------- */

static uint64_t mix(uint64_t rank, uint64_t salt, uint64_t i) {
  uint64_t x = rank * UINT64_C(0x9E3779B97F4A7C15) + salt * 1315423911 + i;
  x ^= x >> 31;
  x *= UINT64_C(0xD6E8FEB86659FD93);
  return x ^ x >> 29;
}

static float float_of(uint32_t bits) {
  float number;
  memcpy(&number, &bits, sizeof number);
  return number;
}

static float read_bf16(const void *data) {
  uint16_t bits;
  memcpy(&bits, data, sizeof bits);
  return float_of((uint32_t)bits << 16);
}

/* By libm, not by bits as in the code that is tested. */
static float read_fp16(const void *data) {
  uint16_t bits;
  memcpy(&bits, data, sizeof bits);
  const int exponent = bits >> 10 & 31;
  const float fraction = (float)(bits & 1023);
  const float size = exponent == 0 ? ldexpf(fraction, -24)
                                   : ldexpf(1024 + fraction, exponent - 25);
  return (bits & 0x8000) != 0 ? -size : size;
}

/* The 16-bit number that is nearest: all of them are tried around. */
static uint16_t nearest(float number, float (*read)(const void *)) {
  uint16_t low = 0;
  uint16_t high = 0x7BFF; /* finite in both; sums stay far below */
  const float size = fabsf(number);
  while (high - low > 1) {
    const uint16_t middle = (uint16_t)((low + high) / 2);
    if (read(&middle) <= size) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const float below = size - read(&low);
  const float above = read(&high) - size;
  uint16_t bits =
      below < above || (below == above && low % 2 == 0) ? low : high;
  if (signbit(number)) bits |= 0x8000;
  return bits;
}

/* Element i of a rank's contribution. */
static void make_element(void *to, fsdp_dtype dtype, int64_t rank, int64_t salt,
                         int64_t i) {
  const uint64_t bits = mix((uint64_t)rank, (uint64_t)salt, (uint64_t)i);
  const float small = (float)(int64_t)(bits % 20001 - 10000) / 64.0F + 0.1F;
  const double large = (double)(int64_t)(bits % 2000001) / 7.0 - 1e5;
  uint16_t half;
  switch (dtype.code) {
    case FSDP_DTYPE_FLOAT32:
      memcpy(to, &small, sizeof small);
      break;
    case FSDP_DTYPE_FLOAT64:
      memcpy(to, &large, sizeof large);
      break;
    case FSDP_DTYPE_BFLOAT16:
      half = nearest(small, read_bf16);
      memcpy(to, &half, sizeof half);
      break;
    case FSDP_DTYPE_FLOAT16:
      half = nearest(small, read_fp16);
      memcpy(to, &half, sizeof half);
      break;
    default:
      memcpy(to, &bits, (size_t)dtype.itemsize);
  }
}

static void make(char *to, fsdp_dtype dtype, int64_t rank, int64_t salt,
                 int64_t begin, int64_t numel) {
  for (int64_t i = 0; i < numel; i++) {
    make_element(to + i * dtype.itemsize, dtype, rank, salt, begin + i);
  }
}

static float rounded(float number, float (*read)(const void *)) {
  const uint16_t half = nearest(number, read);
  return read(&half);
}

/* A sum, kept as each kind of dtype needs it. */
typedef struct sum {
  float sum32;
  double sum64;
  uint64_t integer;
  bool is_begun;
} sum;

static void add(sum *total, fsdp_dtype dtype, const char *element) {
  float number32 = 0;
  double number64 = 0;
  uint64_t bits = 0;
  if (dtype.code == FSDP_DTYPE_FLOAT32) memcpy(&number32, element, 4);
  if (dtype.code == FSDP_DTYPE_BFLOAT16) number32 = read_bf16(element);
  if (dtype.code == FSDP_DTYPE_FLOAT16) number32 = read_fp16(element);
  memcpy(&number64, element, 8);
  memcpy(&bits, element, 8);
  total->sum32 = total->is_begun ? total->sum32 + number32 : number32;
  if (dtype.code == FSDP_DTYPE_BFLOAT16) {
    total->sum32 = rounded(total->sum32, read_bf16);
  } else if (dtype.code == FSDP_DTYPE_FLOAT16) {
    total->sum32 = rounded(total->sum32, read_fp16);
  }
  total->sum64 = total->is_begun ? total->sum64 + number64 : number64;
  total->integer += bits;
  total->is_begun = true;
}

static void write_sum(void *to, fsdp_dtype dtype, const sum *total) {
  uint16_t half;
  switch (dtype.code) {
    case FSDP_DTYPE_FLOAT32:
      memcpy(to, &total->sum32, sizeof total->sum32);
      break;
    case FSDP_DTYPE_FLOAT64:
      memcpy(to, &total->sum64, sizeof total->sum64);
      break;
    case FSDP_DTYPE_BFLOAT16:
      half = nearest(total->sum32, read_bf16);
      memcpy(to, &half, sizeof half);
      break;
    case FSDP_DTYPE_FLOAT16:
      half = nearest(total->sum32, read_fp16);
      memcpy(to, &half, sizeof half);
      break;
    default:
      memcpy(to, &total->integer, (size_t)dtype.itemsize);
  }
}

/* The rank of `num_ranks` that is added as number `turn`: those before `owner`
 * downwards, then on from the last one, and the owner at the end. owner -1: in
 * rank order. */
static int64_t rank_at(int64_t turn, int64_t owner, int64_t num_ranks) {
  return owner < 0 ? turn : (owner + num_ranks - 1 - turn) % num_ranks;
}

/* Element i of the sum over the ranks, one by one: over those of each host, and
 * then over the hosts. */
static void sum_element(void *to, const shm_rank *self, const shm_call *call,
                        int64_t i) {
  const fsdp_dtype dtype = call->dtype;
  const int64_t num_local =
      self->num_local == 0 ? self->world_size : self->num_local;
  const int64_t num_hosts = self->world_size / num_local;
  int64_t local_owner = -1;
  int64_t host_owner = -1;
  sum total = {0};
  if (call->what == SCATTER) {
    local_owner = i / call->numel % num_local;
    host_owner = i / call->numel / num_local;
  } else if (self->num_local > 0 &&
             call->numel > FSDP_HIERARCHICAL_SMALL_NBYTES / dtype.itemsize) {
    const int64_t part = call->numel / num_local;
    if (i < part * num_local) local_owner = i / part;
  }
  for (int64_t j = 0; j < num_hosts; j++) {
    const int64_t host = rank_at(j, host_owner, num_hosts);
    sum of_host = {0};
    char element[8] = {0};
    for (int64_t turn = 0; turn < num_local; turn++) {
      const int64_t local = rank_at(turn, local_owner, num_local);
      make_element(element, dtype, host * num_local + local, call->salt, i);
      add(&of_host, dtype, element);
    }
    write_sum(element, dtype, &of_host);
    add(&total, dtype, element);
  }
  write_sum(to, dtype, &total);
}

/* ---- One call of any kind ------------------------------------------------ */

bool shm_is_sum(shm_kind what) {
  return what == SCATTER || what == REDUCE;
}

static int64_t buffer_numel(const shm_call *call, int64_t world_size) {
  const bool is_whole = call->what == BROADCAST || call->what == REDUCE;
  return call->numel * (is_whole ? 1 : world_size);
}

fsdp_channel shm_channel_of(shm_kind what) {
  return shm_is_sum(what) ? FSDP_CHANNEL_REDUCE : FSDP_CHANNEL_GATHER;
}

/* Of the root, and `input` of gathers, only some kinds know. */
static fsdp_status start(fsdp_transport *transport, shm_kind what,
                         const fsdp_call *how, void *buffer, const void *input,
                         int64_t numel, int64_t root, fsdp_dtype dtype,
                         uint64_t *ticket, fsdp_error *error) {
  const fsdp_transport_ops *ops = transport->ops;
  switch (what) {
    case BROADCAST:
      return ops->broadcast(transport, how, buffer, numel, root, dtype, ticket,
                            error);
    case SCATTER:
      return ops->reduce_scatter(transport, how, buffer, numel, dtype, ticket,
                                 error);
    case REDUCE:
      return ops->all_reduce(transport, how, buffer, numel, dtype, ticket,
                             error);
    default:
      return ops->all_gather(transport, how, buffer, input, numel, dtype,
                             ticket, error);
  }
}

fsdp_status shm_start_plain(fsdp_transport *transport, shm_kind what,
                            int64_t root, const char *label, uint64_t *ticket,
                            fsdp_error *error) {
  static float buffer[8 * SHM_PLAIN_NUMEL];
  static float scratch[8 * SHM_PLAIN_NUMEL];
  static const float input[SHM_PLAIN_NUMEL];
  const fsdp_dtype dtype = {FSDP_DTYPE_FLOAT32, 4};
  const fsdp_call how = {
      .channel = shm_channel_of(what), .label = label, .scratch = scratch};
  return start(transport, what, &how, buffer, input, SHM_PLAIN_NUMEL, root,
               dtype, ticket, error);
}

void shm_check_stays_failed(fsdp_transport *transport, shm_kind what,
                            const fsdp_error *first) {
  fsdp_error error = {0};
  uint64_t ticket = 0;
  CHECK_FAILS(shm_start_plain(transport, what, 0, "later", &ticket, &error),
              first->status, error.message, first->message);
  CHECK_FAILS(transport->ops->check(transport, &error), first->status,
              error.message, first->message);
}

void shm_start(const shm_rank *self, fsdp_transport *transport,
               shm_call *call) {
  const fsdp_dtype dtype = call->dtype;
  const int64_t numel = buffer_numel(call, self->world_size);
  const int64_t nbytes = numel * dtype.itemsize;
  const int64_t shard_nbytes = call->numel * dtype.itemsize;
  call->memory = malloc((size_t)(nbytes + 2 * GUARD));
  call->input = malloc((size_t)(shard_nbytes + 1));
  call->scratch = malloc((size_t)(self->world_size * shard_nbytes + 1));
  if (call->memory == NULL || call->input == NULL || call->scratch == NULL) {
    abort();
  }
  memset(call->memory, 0x5A, (size_t)(nbytes + 2 * GUARD));
  call->buffer = call->memory + GUARD;
  char *own = call->buffer + self->rank * shard_nbytes;
  const fsdp_call how = {.channel = shm_channel_of(call->what),
                         .label = "a call",
                         .scratch = call->scratch};
  const bool is_in_place = call->what == GATHER_IN_PLACE;
  const bool has_whole = shm_is_sum(call->what) || call->what == BROADCAST;
  char *input = is_in_place ? own : call->input;
  if (!has_whole) {
    make(input, dtype, self->rank, call->salt, 0, call->numel);
  } else if (call->what != BROADCAST || self->rank == call->root) {
    make(call->buffer, dtype, self->rank, call->salt, 0, numel);
  }
  fsdp_error error = {0};
  const fsdp_status status =
      start(transport, call->what, &how, call->buffer, input, call->numel,
            call->root, dtype, &call->ticket, &error);
  if (!CHECK_OK(status)) printf("%s\n", error.message);
}

static bool is_guarded(const shm_call *call, int64_t nbytes) {
  for (int64_t i = 0; i < GUARD; i++) {
    if (call->memory[i] != 0x5A) return false;
    if (call->memory[GUARD + nbytes + i] != 0x5A) return false;
  }
  return true;
}

static bool is_right(const shm_rank *self, const shm_call *call) {
  const fsdp_dtype dtype = call->dtype;
  const size_t itemsize = (size_t)dtype.itemsize;
  int64_t begin = 0;
  int64_t end = buffer_numel(call, self->world_size);
  if (!is_guarded(call, end * dtype.itemsize)) return false;
  if (call->what == SCATTER) { /* the rest is undefined */
    begin = self->rank * call->numel;
    end = begin + call->numel;
  }
  for (int64_t i = begin; i < end; i++) {
    char expected[8];
    if (shm_is_sum(call->what)) {
      sum_element(expected, self, call, i);
    } else if (call->what == BROADCAST) {
      make_element(expected, dtype, call->root, call->salt, i);
    } else {
      make_element(expected, dtype, i / call->numel, call->salt,
                   i % call->numel);
    }
    if (memcmp(call->buffer + (size_t)i * itemsize, expected, itemsize) != 0) {
      printf("element %" PRId64 "\n", i);
      return false;
    }
  }
  return true;
}

void shm_finish(const shm_rank *self, fsdp_transport *transport,
                shm_call *call) {
  fsdp_error error = {0};
  if (!CHECK_OK(transport->ops->wait(transport, shm_channel_of(call->what),
                                     call->ticket, &error))) {
    printf("%s\n", error.message);
  } else if (!CHECK(is_right(self, call))) {
    printf("  rank %" PRId64 " of %" PRId64
           ", kind %d, dtype %d, numel %" PRId64 ", root %" PRId64 "\n",
           self->rank, self->world_size, (int)call->what, (int)call->dtype.code,
           call->numel, call->root);
  }
  free(call->memory);
  free(call->input);
  free(call->scratch);
}
