/*
 * Tests of shm/: every collective, dtype and size on 1 to 5 ranks, many calls
 * in flight, several threads, giving up.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/dtypes.h"
#include "check.h"
#include "shm_calls.h"
#include "shm_fixture.h"

/* Around the sizes of a slot (1024 bytes), a piece of it and the ring (4096),
 * odd ones too. */
static const int64_t g_numels[] = {0,   1,   3,    63,   127,  128,  255, 256,
                                   257, 341, 1023, 1024, 1025, 4097, 9999};
enum { NUM_NUMELS = sizeof g_numels / sizeof g_numels[0] };

/* ---- Tests --------------------------------------------------------------- */

static void every_case(const shm_rank *self) {
  fsdp_shm_options options = shm_options("every");
  options.ring_nbytes = *(const int64_t *)self->context;
  fsdp_transport *transport = shm_create(self, &options);
  /* With many ranks every third: the kinds and dtypes come round all
   * the same. */
  const int64_t stride = self->world_size > 3 ? 3 : 1;
  for (int64_t i = 0; i < NUM_KINDS * SHM_NUM_DTYPES * NUM_NUMELS;
       i += stride) {
    const shm_dtype *dtype = &shm_dtypes[i / NUM_KINDS % SHM_NUM_DTYPES];
    shm_call call = {
        .what = (shm_kind)(i % NUM_KINDS),
        .dtype = dtype->dtype,
        .numel = g_numels[i / NUM_KINDS / SHM_NUM_DTYPES],
        .root = i % self->world_size,
        .salt = i,
    };
    if (shm_is_sum(call.what) && !dtype->is_summed) continue;
    shm_start(self, transport, &call);
    shm_finish(self, transport, &call);
  }
  transport->ops->destroy(transport);
}

TEST(test_every_kind_dtype_and_size) {
  int64_t ring_nbytes = 4096;
  for (int64_t world_size = 1; world_size <= 5; world_size++) {
    shm_run(world_size, every_case, &ring_nbytes);
  }
  ring_nbytes = 1 << 18; /* all calls fit, and are written ahead */
  shm_run(4, every_case, &ring_nbytes);
}

TEST(test_every_kind_dtype_and_size_without_rings) {
  int64_t ring_nbytes = 4096;
  for (int64_t world_size = 2; world_size <= 5; world_size++) {
    shm_direct_call_nbytes = world_size % 2 == 0 ? 1 : 1000;
    shm_run(world_size, every_case, &ring_nbytes);
  }
  shm_direct_call_nbytes = -1;
}

/* Elements of which there are none have no memory. */
static void call_for_nothing(const shm_rank *self) {
  const fsdp_call call = {.channel = FSDP_CHANNEL_GATHER};
  const fsdp_dtype dtype = shm_dtypes[0].dtype;
  fsdp_transport *transport = shm_join(self, "nothing");
  const fsdp_transport_ops *ops = transport->ops;
  uint64_t ticket = 0;
  CHECK_OK(ops->group_begin(transport, &call, NULL));
  CHECK_OK(
      ops->all_gather(transport, &call, NULL, NULL, 0, dtype, &ticket, NULL));
  CHECK_OK(ops->broadcast(transport, &call, NULL, 0, 0, dtype, &ticket, NULL));
  CHECK_OK(
      ops->reduce_scatter(transport, &call, NULL, 0, dtype, &ticket, NULL));
  CHECK_OK(ops->all_reduce(transport, &call, NULL, 0, dtype, &ticket, NULL));
  CHECK_OK(ops->group_end(transport, &call, NULL));
  CHECK_I64((int64_t)ticket, 4);
  CHECK_OK(ops->wait(transport, FSDP_CHANNEL_GATHER, ticket, NULL));
  CHECK_OK(shm_barrier(transport, NULL, NULL));
  ops->destroy(transport);
}

TEST(test_nothing_has_no_memory) {
  for (int64_t world_size = 1; world_size <= 4; world_size++) {
    shm_run(world_size, call_for_nothing, NULL);
  }
}

/* ---- Many calls at once -------------------------------------------------- */

enum { NUM_STEPS = 300, MAX_IN_FLIGHT = 12, NUM_TRANSPORTS = 2 };

/* The step's call, the same on all ranks; big ones are rare. */
static shm_call random_call(uint64_t *seed, int64_t world_size, int64_t step) {
  const shm_dtype *dtype = &shm_dtypes[check_random(seed, SHM_NUM_DTYPES)];
  shm_call call = {
      .what = (shm_kind)check_random(seed, NUM_KINDS),
      .dtype = dtype->dtype,
      .root = check_random(seed, world_size),
      .numel = check_random(seed, check_random(seed, 8) == 0 ? 5000 : 300),
      .salt = step,
  };
  if (shm_is_sum(call.what) && !dtype->is_summed) {
    call.dtype = shm_dtypes[0].dtype;
  }
  return call;
}

static void pause_at_random(uint64_t *seed) {
  if (check_random(seed, 6) == 0) check_sleep_ms(check_random(seed, 3));
}

typedef struct in_flight {
  shm_call call;
  int64_t group;
} in_flight;

/* Steps on two groups: all ranks, and those with this one's parity. Each rank
 * waits when it likes, in its own order, and sleeps now and then. */
static void run_at_random(const shm_rank *self) {
  uint64_t shared = *(const uint64_t *)self->context;
  uint64_t own = shared * 31 + (uint64_t)self->rank + 1;
  const int64_t parity = self->rank % 2;
  const shm_rank selves[NUM_TRANSPORTS] = {
      *self,
      {.rank = self->rank / 2,
       .world_size = (self->world_size + 1 - parity) / 2,
       .store = self->store}};
  const char *keys[NUM_TRANSPORTS] = {"all", parity == 0 ? "even" : "odd"};
  fsdp_transport *transports[NUM_TRANSPORTS];
  for (int64_t i = 0; i < NUM_TRANSPORTS; i++) {
    fsdp_shm_options options = shm_options(keys[i]);
    options.spin_us = check_random(&own, 2) == 0 ? -1 : 20;
    transports[i] = shm_create(&selves[i], &options);
  }
  in_flight list[MAX_IN_FLIGHT];
  int64_t num = 0;
  for (int64_t step = 0; step < NUM_STEPS; step++) {
    const int64_t group = check_random(&shared, NUM_TRANSPORTS);
    shm_call call = random_call(&shared, 2, step);
    call.root %= selves[group].world_size;
    pause_at_random(&own);
    shm_start(&selves[group], transports[group], &call);
    list[num++] = (in_flight){call, group};
    while (num == MAX_IN_FLIGHT || (num > 0 && check_random(&own, 2) == 0)) {
      const int64_t i = check_random(&own, num);
      shm_finish(&selves[list[i].group], transports[list[i].group],
                 &list[i].call);
      list[i] = list[--num];
    }
  }
  while (num-- > 0) {
    shm_finish(&selves[list[num].group], transports[list[num].group],
               &list[num].call);
  }
  for (int64_t i = 0; i < NUM_TRANSPORTS; i++) {
    transports[i]->ops->destroy(transports[i]);
  }
}

TEST(test_random_calls_in_flight) {
  for (uint64_t seed = 1; seed <= 8; seed++) {
    const int64_t before = check_num_failures;
    uint64_t copy = seed;
    shm_direct_call_nbytes = seed % 2 == 0 ? -1 : 500;
    shm_run((int64_t)(seed % 4 + 2), run_at_random, &copy);
    shm_direct_call_nbytes = -1;
    if (check_num_failures > before) printf("  seed %" PRIu64 "\n", seed);
  }
}

/* ---- Threads ------------------------------------------------------------- */

typedef struct lane {
  const shm_rank *self;
  fsdp_transport *transport;
  shm_kind what;
} lane;

static void *run_lane(void *argument) {
  const lane *mine = argument;
  uint64_t seed = 7 + (uint64_t)mine->what;
  for (int64_t step = 0; step < 40; step++) {
    shm_call calls[3];
    for (int i = 0; i < 3; i++) {
      calls[i] = random_call(&seed, mine->self->world_size, step * 3 + i);
      calls[i].what = mine->what;
      calls[i].dtype = shm_dtypes[0].dtype;
      shm_start(mine->self, mine->transport, &calls[i]);
    }
    for (int i = 0; i < 3; i++) {
      shm_finish(mine->self, mine->transport, &calls[i]);
    }
  }
  return NULL;
}

/* One thread gathers and another one reduces, as autograd's and the user's. */
static void run_two_lanes(const shm_rank *self) {
  fsdp_transport *transport = shm_join(self, "lanes");
  lane gathers = {self, transport, GATHER};
  lane sums = {self, transport, SCATTER};
  pthread_t thread;
  CHECK_I64(pthread_create(&thread, NULL, run_lane, &sums), 0);
  (void)run_lane(&gathers);
  CHECK_I64(pthread_join(thread, NULL), 0);
  transport->ops->destroy(transport);
}

TEST(test_two_threads_of_each_rank) {
  shm_run(2, run_two_lanes, NULL);
  shm_run(3, run_two_lanes, NULL);
}

TEST(test_ranks_that_are_threads) {
  shm_run_threads(3, run_two_lanes, NULL);
  CHECK_I64(shm_num_segments(), 0);
}

/* ---- Barriers ------------------------------------------------------------ */

/* After it nobody has come less far than anybody before it. */
static void meet_at_barriers(const shm_rank *self) {
  fsdp_transport *transport = shm_join(self, "barriers");
  _Atomic int32_t *num_come = self->context;
  uint64_t seed = 99 + (uint64_t)self->rank;
  for (int32_t i = 1; i <= 50; i++) {
    pause_at_random(&seed);
    atomic_fetch_add(num_come, 1);
    CHECK_OK(shm_barrier(transport, "all", NULL));
    CHECK(atomic_load(num_come) >= i * (int32_t)self->world_size);
  }
  transport->ops->destroy(transport);
}

TEST(test_barriers) {
  shm_run(3, meet_at_barriers, shm_shared(sizeof(int32_t)));
}

/* ---- Giving up ----------------------------------------------------------- */

enum { VICTIM = 1 };

static void give_up_on_one(const shm_rank *self) {
  fsdp_transport *transport = shm_join(self, "give up");
  const fsdp_transport_ops *ops = transport->ops;
  fsdp_error error = {0};
  fsdp_error later;
  CHECK_OK(shm_barrier(transport, "first", &error));
  if (self->rank == VICTIM) {
    ops->give_up(transport, "another group failed");
    ops->give_up(transport, "and later");
  }
  CHECK_FAILS(shm_barrier(transport, "unit 'g'", &error), FSDP_BACKEND,
              error.message, "..rank 1 gave up: another group failed");
  /* The others' waits ended: they say which. */
  CHECK(self->rank == VICTIM || strstr(error.message, "unit 'g'") != NULL);
  ops->give_up(transport, "and later");
  CHECK_I64(ops->check(transport, &later), FSDP_BACKEND);
  CHECK_TEXT(later.message, error.message);
  ops->destroy(transport);
}

TEST(test_giving_up_ends_the_others_waits) {
  for (int64_t world_size = 2; world_size <= 3; world_size++) {
    shm_run(world_size, give_up_on_one, NULL);
  }
}
