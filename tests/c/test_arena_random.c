/*
 * Property tests of arena/: random schedules against an oracle that looks at
 * every pair of clients.
 */
#include <string.h>

#include "arena/arena.h"
#include "arena_fixture.h"
#include "base/alloc.h"
#include "check.h"
#include "recorder.h"

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
    if (is_held[i]) self->steps[self->num_steps++] = -1 - i;
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
    if (i == client || (self->data[i] == NULL && !is_neighbour)) continue;
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
        if (fits) members[num_members++] = i;
      }
    }
    if (num_members == 0) return total;
    total += run->nbytes[members[0]];
    for (int64_t j = 0; j < num_members; j++) is_done[members[j]] = true;
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
      unsigned char *data = arena_fixture_take(arena, client);
      for (int64_t j = 0; j < run->num_clients; j++) {
        const unsigned char *other = known->data[j];
        if (other == NULL) continue;
        ok &= CHECK(data + nbytes <= other || other + run->nbytes[j] <= data);
      }
      memset(data, (int)client, nbytes);
      known->data[client] = data;
    } else {
      for (size_t j = 0; j < nbytes; j++) {
        ok &= CHECK(known->data[client][j] == (unsigned char)client);
      }
      arena_fixture_give(arena, client);
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
  fsdp_arena *arena =
      arena_fixture_create(device, run->nbytes, run->num_clients);
  known = (oracle){.last_giver = -1, .last_taker = -1};

  /* The first two iterations learn: the second one has a last giver. */
  for (int iteration = 0; iteration < 2; iteration++) {
    ok &= run_schedule(arena, run, &known);
    arena_fixture_plan(arena);
    ok &= CHECK_I64(arena_fixture_stats(arena).nbytes,
                    oracle_nbytes(&known, run));
    ok &= CHECK_I64(recorder_live_nbytes(device),
                    arena_fixture_stats(arena).nbytes);
  }
  /* From then on nothing is allocated, on the host or on the device. */
  const fsdp_arena_stats before = arena_fixture_stats(arena);
  const int64_t num_live = fsdp_alloc_live();
  fsdp_alloc_fail_at(0);
  ok &= run_schedule(arena, run, &known);
  arena_fixture_plan(arena);
  ok &= CHECK(fsdp_calloc(1, 1) == NULL); /* the injected failure is unused */
  fsdp_alloc_fail_at(-1);
  ok &= CHECK_I64(fsdp_alloc_live(), num_live);
  ok &= CHECK_I64(arena_fixture_stats(arena).num_allocs, before.num_allocs);
  ok &= CHECK_I64(arena_fixture_stats(arena).num_frees, before.num_frees);
  ok &= CHECK_I64(arena_fixture_stats(arena).held_nbytes, 0);
  ok &= CHECK(arena_fixture_stats(arena).peak_nbytes >=
              arena_fixture_stats(arena).nbytes);
  arena_fixture_destroy(arena, device);
  return ok;
}

TEST(test_random_schedules) {
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
TEST(test_random_schedules_that_change) {
  static schedule run;
  static oracle known;
  uint64_t seed = 271828;
  for (int round = 0; round < 60; round++) {
    const uint64_t seed_of_round = seed;
    bool ok = true;
    make_clients(&run, &seed);
    recorder *device = recorder_create();
    fsdp_arena *arena =
        arena_fixture_create(device, run.nbytes, run.num_clients);
    known = (oracle){.last_giver = -1, .last_taker = -1};
    for (int iteration = 0; iteration < 6; iteration++) {
      make_steps(&run, &seed);
      ok &= run_schedule(arena, &run, &known);
      if (check_random(&seed, 4) == 0) fsdp_arena_trim(arena);
      if (check_random(&seed, 4) == 0) continue;
      arena_fixture_plan(arena);
      ok &= CHECK_I64(arena_fixture_stats(arena).nbytes,
                      oracle_nbytes(&known, &run));
      ok &= CHECK_I64(recorder_live_nbytes(device),
                      arena_fixture_stats(arena).nbytes);
    }
    arena_fixture_destroy(arena, device);
    if (!ok) {
      printf("  seed %" PRIu64 "\n", seed_of_round);
      return;
    }
  }
}
