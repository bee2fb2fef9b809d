/*
 * Tests of arena/: which block a client gets, what the plan costs in bytes,
 * that no two holders ever share memory, and every failure of a step.
 */
#include "arena/arena.h"
#include "base/alloc.h"
#include "check.h"
#include "recorder.h"

static fsdp_arena *create_arena(recorder *device, const int64_t *nbytes,
                                int64_t num_clients) {
  fsdp_arena *arena = NULL;
  CHECK_I64(fsdp_arena_create(recorder_ops(device), &arena, NULL), FSDP_OK);
  for (int64_t i = 0; i < num_clients; i++) {
    int64_t client = -1;
    CHECK_I64(fsdp_arena_add_client(arena, nbytes[i], &client, NULL), FSDP_OK);
    CHECK_I64(client, i);
  }
  return arena;
}

static void destroy_both(fsdp_arena *arena, recorder *device) {
  fsdp_arena_destroy(arena);
  CHECK_I64(recorder_live_blocks(device), 0);
  CHECK_I64(recorder_live_events(device), 0);
  CHECK_I64(fsdp_alloc_live(), 0);
  recorder_destroy(device);
}

static void *take(fsdp_arena *arena, int64_t client) {
  void *data = NULL;
  CHECK_I64(fsdp_arena_take(arena, client, FSDP_LANE_UNSHARD, &data, NULL),
            FSDP_OK);
  CHECK(data != NULL && data == fsdp_arena_data(arena, client));
  return data;
}

static void give(fsdp_arena *arena, int64_t client) {
  CHECK_I64(fsdp_arena_give(arena, client, FSDP_LANE_COMPUTE, NULL), FSDP_OK);
  CHECK(fsdp_arena_data(arena, client) == NULL);
}

static void plan(fsdp_arena *arena) {
  CHECK_I64(fsdp_arena_plan(arena, NULL), FSDP_OK);
}

static fsdp_arena_stats stats_of(const fsdp_arena *arena) {
  fsdp_arena_stats stats;
  fsdp_arena_get_stats(arena, &stats);
  return stats;
}

/* --- One block ----------------------------------------------------------- */

static void test_take_waits_for_the_free_event(void) {
  recorder *device = recorder_create();
  recorder_show_memory(device, true);
  const int64_t nbytes[] = {64, 32};
  fsdp_arena *arena = create_arena(device, nbytes, 2);
  void *first = take(arena, 0);
  CHECK_I64(stats_of(arena).held_nbytes, 64);
  give(arena, 0);
  CHECK(take(arena, 1) == first); /* it fits, so it is used again */
  CHECK_I64(stats_of(arena).held_nbytes, 64);
  give(arena, 1);
  fsdp_arena_trim(arena);
  CHECK_TEXT(recorder_tape(device),
             "event e1\n"
             "alloc 64 b1\n" /* new: nothing to wait for */
             "record e1 compute\n"
             "wait unshard e1\n"
             "record e1 compute\n"
             "free 64 b1 after e1\n"
             "destroy e1\n");
  destroy_both(arena, device);
  fsdp_arena_destroy(NULL);
}

static void test_wrong_moments(void) {
  recorder *device = recorder_create();
  const int64_t nbytes[] = {64};
  fsdp_arena *arena = create_arena(device, nbytes, 1);
  fsdp_error error;
  void *data = NULL;
  int64_t client = -7;
  CHECK_I64(fsdp_arena_add_client(arena, 0, &client, &error),
            FSDP_INVALID_ARGUMENT);
  CHECK_TEXT(error.message, "client 1 needs 0 bytes, must be >= 1");
  CHECK_I64(client, -7);
  CHECK_I64(fsdp_arena_give(arena, 0, FSDP_LANE_COMPUTE, &error),
            FSDP_INVALID_STATE);
  CHECK_TEXT(error.message, "client 0 holds no block");
  (void)take(arena, 0);
  CHECK_I64(fsdp_arena_take(arena, 0, FSDP_LANE_UNSHARD, &data, &error),
            FSDP_INVALID_STATE);
  CHECK_TEXT(error.message, "client 0 holds a block already");
  CHECK(data == NULL);
  CHECK_I64(stats_of(arena).num_clients, 1);
  destroy_both(arena, device); /* the block that is still held, too */
}

/* --- Before a plan ------------------------------------------------------- */

static void test_block_given_back_longest_ago_is_taken(void) {
  recorder *device = recorder_create();
  const int64_t nbytes[] = {64, 64, 64, 64};
  fsdp_arena *arena = create_arena(device, nbytes, 4);
  (void)take(arena, 0);
  void *second = take(arena, 1);
  (void)take(arena, 2);
  give(arena, 1);
  give(arena, 0);
  give(arena, 2);
  CHECK(take(arena, 3) == second);
  destroy_both(arena, device);
}

static void test_too_small_blocks_are_freed_first(void) {
  recorder *device = recorder_create();
  const int64_t nbytes[] = {16, 16, 64, 32};
  fsdp_arena *arena = create_arena(device, nbytes, 4);
  (void)take(arena, 0);
  (void)take(arena, 1);
  give(arena, 0);
  recorder_clear(device);
  (void)take(arena, 2); /* frees the block of 0; that of 1 is held */
  CHECK_TEXT(recorder_tape(device), "free 16 after e1\n"
                                    "destroy e1\n"
                                    "event e3\n"
                                    "alloc 64\n");
  fsdp_arena_stats stats = stats_of(arena);
  CHECK_I64(stats.num_blocks, 2);
  CHECK_I64(stats.nbytes, 16 + 64);
  CHECK_I64(stats.held_nbytes, 16 + 64);
  CHECK_I64(stats.num_allocs, 3);
  CHECK_I64(stats.num_frees, 1);
  give(arena, 2);
  (void)take(arena, 3); /* 32 fits in 64 */
  CHECK_I64(stats_of(arena).num_allocs, 3);
  CHECK_I64(stats_of(arena).peak_nbytes, 16 + 64);
  destroy_both(arena, device);
}

/* --- The plan ------------------------------------------------------------ */

/* Layers that run one after the other: neighbours do not share, so two blocks
 * serve any number of layers. */
static void test_chain_needs_two_blocks(void) {
  recorder *device = recorder_create();
  const int64_t nbytes[] = {64, 64, 64, 64, 64};
  fsdp_arena *arena = create_arena(device, nbytes, 5);
  for (int64_t i = 0; i < 5; i++) {
    (void)take(arena, i);
    give(arena, i);
  }
  CHECK_I64(stats_of(arena).num_blocks, 1); /* the first rule reuses */
  plan(arena);
  CHECK_I64(stats_of(arena).nbytes, 2 * 64);
  void *even = take(arena, 0);
  give(arena, 0);
  void *odd = take(arena, 1);
  give(arena, 1);
  CHECK(even != odd);
  for (int64_t i = 2; i < 5; i++) {
    CHECK(take(arena, i) == (i % 2 == 0 ? even : odd));
    give(arena, i);
  }
  destroy_both(arena, device);
}

/* A root that stays, layers in forward with one prefetched, largest first. */
static void test_plan_in_bytes(void) {
  recorder *device = recorder_create();
  const int64_t nbytes[] = {100, 30, 50, 40, 20};
  fsdp_arena *arena = create_arena(device, nbytes, 5);
  (void)take(arena, 0);
  (void)take(arena, 1);
  for (int64_t i = 1; i <= 4; i++) {
    if (i < 4)
      (void)take(arena, i + 1); /* prefetch */
    give(arena, i);
  }
  give(arena, 0);
  plan(arena);
  /* Takes and gives are 0 1 2 -1 3 -2 4 -3 -4 -0: 2 meets 1, 3 meets 2, 4
   * meets 3; each follows one that gave back behind a newer gather. So
   * 0 | 2 with 4 | 3 with 1. */
  CHECK_I64(stats_of(arena).nbytes, 100 + 50 + 40);
  CHECK_I64(recorder_live_nbytes(device), 190);
  destroy_both(arena, device);
}

/* A client that gave back behind a collective keeps its block to itself until
 * another one has done so. */
static void test_reductions_do_not_share_with_their_followers(void) {
  recorder *device = recorder_create();
  const int64_t nbytes[] = {64, 64, 64};
  fsdp_arena *arena = create_arena(device, nbytes, 3);
  fsdp_error error = {0};
  void *data = NULL;
  for (int64_t i = 0; i < 3; i++) {
    CHECK(fsdp_arena_take(arena, i, FSDP_LANE_COMPUTE, &data, &error) ==
          FSDP_OK);
    CHECK(fsdp_arena_give(arena, i, FSDP_LANE_REDUCE, &error) == FSDP_OK);
  }
  plan(arena);
  CHECK_I64(stats_of(arena).num_blocks, 2); /* 0 with 2, 1 */
  destroy_both(arena, device);
}

static void test_client_that_never_took_is_not_planned(void) {
  recorder *device = recorder_create();
  const int64_t nbytes[] = {64, 1 << 20, 64};
  fsdp_arena *arena = create_arena(device, nbytes, 3);
  (void)take(arena, 0);
  (void)take(arena, 2);
  give(arena, 0);
  give(arena, 2);
  plan(arena);
  CHECK_I64(stats_of(arena).nbytes, 128);
  (void)take(arena, 1); /* late: the first rule, and a new plan */
  give(arena, 1);
  plan(arena);
  CHECK_I64(stats_of(arena).nbytes, (1 << 20) + 64);
  destroy_both(arena, device);
}

static void test_plan_is_idempotent_and_waits_for_holders(void) {
  recorder *device = recorder_create();
  const int64_t nbytes[] = {64, 128};
  fsdp_arena *arena = create_arena(device, nbytes, 2);
  plan(arena); /* nothing known: nothing to do */
  (void)take(arena, 0);
  give(arena, 0);
  (void)take(arena, 1);
  recorder_clear(device);
  fsdp_alloc_fail_at(0);
  plan(arena); /* skipped: a block is held */
  fsdp_alloc_fail_at(-1);
  CHECK_TEXT(recorder_tape(device), "");
  give(arena, 1);
  plan(arena);
  CHECK_I64(stats_of(arena).nbytes, 64 + 128);
  recorder_clear(device);
  fsdp_alloc_fail_at(0);
  plan(arena);
  fsdp_alloc_fail_at(-1);
  CHECK_TEXT(recorder_tape(device), "");
  destroy_both(arena, device);
}

static void test_changed_order_falls_back_and_is_learnt(void) {
  recorder *device = recorder_create();
  const int64_t nbytes[] = {64, 64, 64};
  fsdp_arena *arena = create_arena(device, nbytes, 3);
  for (int64_t i = 0; i < 3; i++) {
    (void)take(arena, i);
    give(arena, i);
  }
  plan(arena);
  CHECK_I64(stats_of(arena).num_blocks, 2); /* 0 and 2 share */
  void *shared = take(arena, 0);
  CHECK(take(arena, 2) != shared);
  give(arena, 0);
  give(arena, 2);
  plan(arena);
  CHECK_I64(stats_of(arena).num_blocks, 3);
  const int64_t num_allocs = stats_of(arena).num_allocs;
  (void)take(arena, 0);
  (void)take(arena, 2);
  give(arena, 0);
  give(arena, 2);
  CHECK_I64(stats_of(arena).num_allocs, num_allocs);
  destroy_both(arena, device);
}

/* A neighbour that is new in a later step makes a new plan; the end of a step,
 * where the lanes join, makes no neighbours. */
static void test_new_neighbours_make_the_plan_dirty(void) {
  recorder *device = recorder_create();
  const int64_t nbytes[] = {64, 64, 64};
  fsdp_arena *arena = create_arena(device, nbytes, 3);
  for (int64_t i = 0; i < 3; i++) {
    (void)take(arena, i);
    give(arena, i);
  }
  plan(arena);
  CHECK_I64(stats_of(arena).num_blocks, 2);
  (void)take(arena, 2);
  give(arena, 2);
  plan(arena);
  CHECK_I64(stats_of(arena).num_blocks, 2);
  (void)take(arena, 2);
  give(arena, 2);
  (void)take(arena, 0); /* follows 2, with which it shares */
  give(arena, 0);
  plan(arena);
  CHECK_I64(stats_of(arena).num_blocks, 3);
  destroy_both(arena, device);
}

static void test_trim_frees_what_is_not_held(void) {
  recorder *device = recorder_create();
  const int64_t nbytes[] = {64, 32};
  fsdp_arena *arena = create_arena(device, nbytes, 2);
  (void)take(arena, 0);
  (void)take(arena, 1);
  give(arena, 0);
  give(arena, 1);
  plan(arena);
  void *kept = take(arena, 0);
  fsdp_arena_trim(arena);
  CHECK(fsdp_arena_data(arena, 0) == kept);
  CHECK_I64(stats_of(arena).nbytes, 64);
  (void)take(arena, 1);
  CHECK_I64(stats_of(arena).nbytes, 64 + 32);
  give(arena, 0);
  give(arena, 1);
  fsdp_arena_trim(arena);
  CHECK_I64(stats_of(arena).num_blocks, 0);
  CHECK_I64(recorder_live_nbytes(device), 0);
  plan(arena);
  CHECK_I64(stats_of(arena).nbytes, 64 + 32);
  CHECK_I64(stats_of(arena).peak_nbytes, 64 + 32);
  destroy_both(arena, device);
}

/* --- Random schedules against an oracle ---------------------------------- */

enum { MAX_CLIENTS = 150, MAX_STEPS = 400, MAX_NBYTES = 40 };

/* A schedule: client c is taken by the entry c, given back by -1 - c. */
typedef struct schedule {
  int64_t num_clients;
  int64_t nbytes[MAX_CLIENTS];
  int64_t num_steps;
  int64_t steps[MAX_STEPS + MAX_CLIENTS];
} schedule;

static void make_clients(schedule *self, uint64_t *seed) {
  static const int64_t bounds[] = {3, 10, MAX_CLIENTS};
  const int64_t bound = bounds[check_random(seed, 3)];
  self->num_clients = 1 + check_random(seed, bound);
  const int64_t num_sizes = 1 + check_random(seed, MAX_NBYTES / 8);
  for (int64_t i = 0; i < self->num_clients; i++) {
    self->nbytes[i] = 8 * (1 + check_random(seed, num_sizes));
  }
}

static void make_steps(schedule *self, uint64_t *seed) {
  bool is_held[MAX_CLIENTS] = {false};
  self->num_steps = 0;
  const int64_t num_steps = 1 + check_random(seed, MAX_STEPS);
  for (int64_t i = 0; i < num_steps; i++) {
    const int64_t client = check_random(seed, self->num_clients);
    self->steps[self->num_steps++] = is_held[client] ? -1 - client : client;
    is_held[client] = !is_held[client];
  }
  for (int64_t i = 0; i < self->num_clients; i++) {
    if (is_held[i])
      self->steps[self->num_steps++] = -1 - i;
  }
}

/* What the oracle knows: who conflicts, by looking at every pair. */
typedef struct oracle {
  bool conflicts[MAX_CLIENTS][MAX_CLIENTS];
  bool ever_took[MAX_CLIENTS];
  unsigned char *data[MAX_CLIENTS]; /* NULL: not held */
  int64_t last_giver;
  int64_t last_taker;
} oracle;

static void oracle_take(oracle *self, const schedule *run, int64_t client) {
  for (int64_t i = 0; i < run->num_clients; i++) {
    const bool is_neighbour = i == self->last_giver && i == self->last_taker;
    if (i == client || (self->data[i] == NULL && !is_neighbour))
      continue;
    self->conflicts[i][client] = self->conflicts[client][i] = true;
  }
  self->ever_took[client] = true;
  self->last_taker = client;
}

/* Bytes of a plan: the largest uncoloured client opens a block and takes in,
 * from large to small, all that conflict with none inside. */
static int64_t oracle_nbytes(const oracle *self, const schedule *run) {
  bool is_done[MAX_CLIENTS];
  int64_t total = 0;
  for (int64_t i = 0; i < run->num_clients; i++) {
    is_done[i] = !self->ever_took[i];
  }
  for (;;) {
    int64_t members[MAX_CLIENTS];
    int64_t num_members = 0;
    for (int64_t nbytes = MAX_NBYTES; nbytes >= 8; nbytes -= 8) {
      for (int64_t i = 0; i < run->num_clients; i++) {
        bool fits = !is_done[i] && run->nbytes[i] == nbytes;
        for (int64_t j = 0; j < num_members; j++) {
          fits = fits && !self->conflicts[i][members[j]];
        }
        if (fits)
          members[num_members++] = i;
      }
    }
    if (num_members == 0)
      return total;
    total += run->nbytes[members[0]];
    for (int64_t j = 0; j < num_members; j++)
      is_done[members[j]] = true;
  }
}

/* Runs the schedule once; every holder finds what it wrote. */
static bool run_schedule(fsdp_arena *arena, const schedule *run,
                         oracle *known) {
  bool ok = true;
  known->last_giver = -1;
  known->last_taker = -1;
  for (int64_t i = 0; i < run->num_steps; i++) {
    const bool is_take = run->steps[i] >= 0;
    const int64_t client = is_take ? run->steps[i] : -1 - run->steps[i];
    const size_t nbytes = (size_t)run->nbytes[client];
    if (is_take) {
      oracle_take(known, run, client);
      unsigned char *data = take(arena, client);
      for (int64_t j = 0; j < run->num_clients; j++) {
        const unsigned char *other = known->data[j];
        if (other == NULL)
          continue;
        ok &= CHECK(data + nbytes <= other || other + run->nbytes[j] <= data);
      }
      memset(data, (int)client, nbytes);
      known->data[client] = data;
    } else {
      for (size_t j = 0; j < nbytes; j++) {
        ok &= CHECK(known->data[client][j] == (unsigned char)client);
      }
      give(arena, client);
      known->data[client] = NULL;
      known->last_giver = client;
    }
  }
  return ok;
}

static bool check_schedule(const schedule *run) {
  static oracle known;
  bool ok = true;
  recorder *device = recorder_create();
  fsdp_arena *arena = create_arena(device, run->nbytes, run->num_clients);
  known = (oracle){.last_giver = -1, .last_taker = -1};

  /* The first two iterations learn: the second one has a last giver. */
  for (int iteration = 0; iteration < 2; iteration++) {
    ok &= run_schedule(arena, run, &known);
    plan(arena);
    ok &= CHECK_I64(stats_of(arena).nbytes, oracle_nbytes(&known, run));
    ok &= CHECK_I64(recorder_live_nbytes(device), stats_of(arena).nbytes);
  }
  /* From then on nothing is allocated, on the host or on the device. */
  const fsdp_arena_stats before = stats_of(arena);
  const int64_t num_live = fsdp_alloc_live();
  fsdp_alloc_fail_at(0);
  ok &= run_schedule(arena, run, &known);
  plan(arena);
  ok &= CHECK(fsdp_calloc(1, 1) == NULL); /* the injected failure is unused */
  fsdp_alloc_fail_at(-1);
  ok &= CHECK_I64(fsdp_alloc_live(), num_live);
  ok &= CHECK_I64(stats_of(arena).num_allocs, before.num_allocs);
  ok &= CHECK_I64(stats_of(arena).num_frees, before.num_frees);
  ok &= CHECK_I64(stats_of(arena).held_nbytes, 0);
  ok &= CHECK(stats_of(arena).peak_nbytes >= stats_of(arena).nbytes);
  destroy_both(arena, device);
  return ok;
}

static void test_random_schedules(void) {
  static schedule run;
  uint64_t seed = 314159265;
  for (int round = 0; round < 300; round++) {
    const uint64_t seed_of_round = seed;
    make_clients(&run, &seed);
    make_steps(&run, &seed);
    if (!check_schedule(&run)) {
      printf("  seed %" PRIu64 "\n", seed_of_round);
      return;
    }
  }
}

/* The order changes from run to run, plans and trims come now and then: holders
 * never share, and a plan costs what the oracle says. */
static void test_random_schedules_that_change(void) {
  static schedule run;
  static oracle known;
  uint64_t seed = 271828;
  for (int round = 0; round < 60; round++) {
    const uint64_t seed_of_round = seed;
    bool ok = true;
    make_clients(&run, &seed);
    recorder *device = recorder_create();
    fsdp_arena *arena = create_arena(device, run.nbytes, run.num_clients);
    known = (oracle){.last_giver = -1, .last_taker = -1};
    for (int iteration = 0; iteration < 6; iteration++) {
      make_steps(&run, &seed);
      ok &= run_schedule(arena, &run, &known);
      if (check_random(&seed, 4) == 0)
        fsdp_arena_trim(arena);
      if (check_random(&seed, 4) == 0)
        continue;
      plan(arena);
      ok &= CHECK_I64(stats_of(arena).nbytes, oracle_nbytes(&known, &run));
      ok &= CHECK_I64(recorder_live_nbytes(device), stats_of(arena).nbytes);
    }
    destroy_both(arena, device);
    if (!ok) {
      printf("  seed %" PRIu64 "\n", seed_of_round);
      return;
    }
  }
}

/* --- Failures ------------------------------------------------------------ */

/* A short life of an arena: the first rule with a free, a plan that keeps,
 * allocates and frees, a planned step, a fallback. Stops at the first failure
 * and checks that the refused call left no trace. */
static fsdp_status live(const fsdp_device_ops *ops, fsdp_arena **arena,
                        fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  int64_t client = -1;
  void *data = NULL;

  FSDP_TRY(fsdp_arena_create(ops, arena, error));
  for (int64_t i = 0; i < 5; i++) {
    client = -1;
    status = fsdp_arena_add_client(*arena, 16 * (i + 1), &client, error);
    if (status != FSDP_OK)
      CHECK_I64(client, -1);
    FSDP_TRY(status);
  }
  for (int iteration = 0; iteration < 3; iteration++) {
    for (int64_t i = 0; i < 5; i++) {
      data = NULL;
      status = fsdp_arena_take(*arena, i, FSDP_LANE_UNSHARD, &data, error);
      if (status != FSDP_OK) {
        CHECK(data == NULL);
        CHECK(fsdp_arena_data(*arena, i) == NULL);
      }
      FSDP_TRY(status);
      if (iteration < 2) { /* a chain; in the third run all hold at once */
        FSDP_TRY(fsdp_arena_give(*arena, i, FSDP_LANE_COMPUTE, error));
      }
    }
    for (int64_t i = 0; iteration == 2 && i < 5; i++) {
      status = fsdp_arena_give(*arena, i, FSDP_LANE_COMPUTE, error);
      /* Given back, failure or not. */
      CHECK(fsdp_arena_data(*arena, i) == NULL);
      FSDP_TRY(status);
    }
    const fsdp_arena_stats before = stats_of(*arena);
    status = fsdp_arena_plan(*arena, error);
    if (status != FSDP_OK) {
      const fsdp_arena_stats after = stats_of(*arena);
      CHECK_I64(after.num_blocks, before.num_blocks);
      CHECK_I64(after.nbytes, before.nbytes);
      /* The next try succeeds. */
      CHECK_I64(fsdp_arena_plan(*arena, NULL), FSDP_OK);
    }
    FSDP_TRY(status);
  }
done:
  return status;
}

static void test_every_port_call_can_fail(void) {
  int64_t num_calls = 0;
  for (int64_t i = 0;; i++) {
    recorder *device = recorder_create();
    fsdp_arena *arena = NULL;
    fsdp_error error = {FSDP_OK, 0, NULL, ""};
    recorder_fail_at(device, i);
    const fsdp_status status = live(recorder_ops(device), &arena, &error);
    recorder_fail_at(device, -1);
    num_calls = recorder_num_calls(device);
    if (status != FSDP_OK) {
      CHECK(status == FSDP_OUT_OF_MEMORY || status == FSDP_BACKEND);
      CHECK_I64(error.status, status);
      CHECK(strncmp(error.message, "injected at ", 12) == 0);
      /* The arena goes on: a full step works after it. */
      for (int64_t client = 0; client < 5; client++) {
        if (fsdp_arena_data(arena, client) != NULL)
          give(arena, client);
      }
      for (int64_t client = 0; client < 5; client++) {
        (void)take(arena, client);
        give(arena, client);
      }
      plan(arena);
    }
    destroy_both(arena, device);
    if (status == FSDP_OK) {
      CHECK_I64(i, num_calls); /* each call of a whole life has failed once */
      break;
    }
  }
}

static void test_every_allocation_can_fail(void) {
  for (int64_t i = 0;; i++) {
    recorder *device = recorder_create();
    fsdp_arena *arena = NULL;
    fsdp_error error = {FSDP_OK, 0, NULL, ""};
    fsdp_alloc_fail_at(i);
    const fsdp_status status = live(recorder_ops(device), &arena, &error);
    fsdp_alloc_fail_at(-1);
    if (status != FSDP_OK) {
      CHECK_I64(status, FSDP_OUT_OF_MEMORY);
      CHECK_I64(error.status, FSDP_OUT_OF_MEMORY);
    }
    destroy_both(arena, device);
    if (status == FSDP_OK) {
      /* The arena, clients, two of conflicts, blocks; two in each plan that
       * is made: after the first run and after the third. */
      CHECK_I64(i, 5 + 2 * 2);
      break;
    }
  }
}

/* Growing the conflict matrix keeps what it holds, also while blocks are
 * held, and leaves it alone when memory is out. */
static void test_clients_added_later_keep_conflicts(void) {
  recorder *device = recorder_create();
  const int64_t nbytes[] = {8, 8};
  fsdp_arena *arena = create_arena(device, nbytes, 2);
  (void)take(arena, 0);
  (void)take(arena, 1); /* 0 and 1 conflict; 0 stays held */
  give(arena, 1);
  int64_t client = -1;
  for (int64_t i = 2; i < 64; i++) {
    CHECK_I64(fsdp_arena_add_client(arena, 8, &client, NULL), FSDP_OK);
  }
  /* Client 64 grows three arrays: the clients, which then stay grown, the
   * conflicts and the holders. */
  static const int64_t failing[] = {0, 1, 1};
  for (int i = 0; i < 3; i++) {
    client = -1;
    fsdp_alloc_fail_at(failing[i]);
    CHECK_I64(fsdp_arena_add_client(arena, 8, &client, NULL),
              FSDP_OUT_OF_MEMORY);
    fsdp_alloc_fail_at(-1);
    CHECK_I64(client, -1);
    CHECK_I64(stats_of(arena).num_clients, 64);
  }
  for (int64_t i = 64; i < 200; i++) {
    CHECK_I64(fsdp_arena_add_client(arena, 8, &client, NULL), FSDP_OK);
    CHECK_I64(client, i);
  }
  (void)take(arena, 199); /* conflicts with the holder 0 and the giver 1 */
  give(arena, 199);
  give(arena, 0);
  plan(arena);
  CHECK_I64(stats_of(arena).num_blocks, 3);
  destroy_both(arena, device);
}

int main(void) {
  static const check_test tests[] = {
      CHECK_TEST(test_take_waits_for_the_free_event),
      CHECK_TEST(test_wrong_moments),
      CHECK_TEST(test_block_given_back_longest_ago_is_taken),
      CHECK_TEST(test_too_small_blocks_are_freed_first),
      CHECK_TEST(test_chain_needs_two_blocks),
      CHECK_TEST(test_plan_in_bytes),
      CHECK_TEST(test_client_that_never_took_is_not_planned),
      CHECK_TEST(test_plan_is_idempotent_and_waits_for_holders),
      CHECK_TEST(test_changed_order_falls_back_and_is_learnt),
      CHECK_TEST(test_new_neighbours_make_the_plan_dirty),
      CHECK_TEST(test_reductions_do_not_share_with_their_followers),
      CHECK_TEST(test_trim_frees_what_is_not_held),
      CHECK_TEST(test_random_schedules),
      CHECK_TEST(test_random_schedules_that_change),
      CHECK_TEST(test_every_port_call_can_fail),
      CHECK_TEST(test_every_allocation_can_fail),
      CHECK_TEST(test_clients_added_later_keep_conflicts),
  };
  return CHECK_RUN(tests);
}
