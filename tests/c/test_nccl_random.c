/*
 * NCCL transport: random programs on several ranks, each a process, in which
 * something goes wrong. Every rank that can must end, with the right result and
 * within the limits.
 *
 *   FSDP_C_RANDOM_CASES=500 FSDP_C_RANDOM_FIRST=0  more or other programs
 */
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/dtypes.h"
#include "check.h"
#include "nccl/nccl_priv.h"
#include "nccl_world.h"

enum {
  NUM_CASES = 25,
  NUM_AT_ONCE = 8, /* they mostly wait */
  MAX_STEPS = 16,
  TIMEOUT_MS = 400,
  /* Two limits, of joining or of an operation; revoking and aborting; a loaded
   * machine, which is most of it. */
  HARD_LIMIT_MS = 30000
};

typedef enum fate {
  FINE = 0,
  LATE,   /* comes to its step late, but within the limit */
  ABSENT, /* comes to it after the limit */
  DIES,
  STOPS, /* its process is stopped */
  FAILS, /* its launch fails */
  NUM_FATES
} fate;

typedef struct program {
  uint64_t seed;
  int64_t world_size;
  int64_t num_steps;
  bool is_reduce[MAX_STEPS];
  bool is_group[MAX_STEPS];
  fate fates[NCCL_WORLD_MAX_RANKS];
  int64_t fate_step[NCCL_WORLD_MAX_RANKS];
  nccl_world_store_mode store_mode; /* from the step on */
  int64_t store_step;
  bool is_death_noticed;
} program;

/* ThreadSanitizer's: some programs leave without destroying anything. */
__attribute__((visibility("default"))) const char *__tsan_default_options(void);
const char *__tsan_default_options(void) {
  return "report_thread_leaks=0";
}

static program make_program(uint64_t number) {
  uint64_t seed = (number + 1) * UINT64_C(0x9E3779B97F4A7C15);
  program p = {.seed = number};
  (void)check_random(&seed, 2);
  p.world_size = 2 + check_random(&seed, NCCL_WORLD_MAX_RANKS - 1);
  p.num_steps = 2 + check_random(&seed, MAX_STEPS - 1);
  for (int64_t i = 0; i < p.num_steps; i++) {
    p.is_reduce[i] = check_random(&seed, 2) == 1;
    p.is_group[i] = check_random(&seed, 2) == 1;
  }
  /* One rank's fate most of the time, two now and then, none at times. */
  const int64_t num_fates = check_random(&seed, 8);
  for (int64_t i = 0; i < (num_fates > 6 ? 2 : num_fates > 0); i++) {
    const int64_t rank = check_random(&seed, p.world_size);
    p.fates[rank] = (fate)(1 + check_random(&seed, NUM_FATES - 1));
    p.fate_step[rank] = check_random(&seed, p.num_steps + 1);
  }
  if (check_random(&seed, 4) == 0) {
    p.store_mode = (nccl_world_store_mode)(1 + check_random(&seed, 2));
    p.store_step = check_random(&seed, p.num_steps + 1);
  }
  p.is_death_noticed = check_random(&seed, 3) > 0;
  return p;
}

/* ---- A rank ---------------------------------------------------------------*/

/* What the rank meets before step `step`, or before it leaves. */
static void meet_fate(const program *p, nccl_world *world, int64_t rank,
                      int64_t step) {
  if (rank == 0 && p->store_mode != NCCL_WORLD_STORE_WORKS &&
      p->store_step == step) {
    atomic_store(&world->store_mode, (int)p->store_mode);
  }
  if (p->fate_step[rank] != step) return;
  switch (p->fates[rank]) {
    case LATE:
      check_sleep_ms(TIMEOUT_MS / 10);
      break;
    case ABSENT:
      check_sleep_ms(3 * TIMEOUT_MS);
      break;
    case DIES:
      nccl_world_be_silent();
      atomic_store(&world->is_dead[rank], true);
      _exit(0);
    case STOPS:
      nccl_world_be_silent();
      (void)raise(SIGSTOP); /* until it is killed */
      break;
    default:
      break;
  }
}

static fsdp_status run_step(fsdp_transport *transport, bool is_reduce,
                            bool is_group, fsdp_error *error) {
  static float memory[64];
  const fsdp_dtype dtype = {FSDP_DTYPE_FLOAT32, 4};
  const fsdp_transport_ops *ops = transport->ops;
  const fsdp_call call = {
      .channel = is_reduce ? FSDP_CHANNEL_REDUCE : FSDP_CHANNEL_GATHER,
      .label = "a step"};
  fsdp_status status = FSDP_OK;
  if (is_group) FSDP_TRY(ops->group_begin(transport, &call, error));
  for (int i = 0; i < (is_group ? 2 : 1); i++) {
    if (is_reduce) {
      FSDP_TRY(
          ops->all_reduce(transport, &call, memory, 4, dtype, NULL, error));
    } else {
      FSDP_TRY(ops->all_gather(transport, &call, memory, memory, 4, dtype, NULL,
                               error));
    }
  }
  if (is_group) FSDP_TRY(ops->group_end(transport, &call, error));
done:
  return status;
}

/* As a host that waits for its streams. */
static void synchronize(fsdp_transport *transport) {
  fsdp_nccl_transport *self = fsdp_nccl_priv_of(transport);
  fsdp_nccl_operation oldest;
  for (int i = 0; i < FSDP_NUM_CHANNELS; i++) {
    for (;;) {
      FSDP_IGNORE(fsdp_nccl_priv_retire(self, (fsdp_channel)i,
                                        FSDP_NCCL_MAX_OUTSTANDING, NULL));
      if (!fsdp_nccl_priv_oldest(self, (fsdp_channel)i, &oldest)) break;
      check_sleep_ms(1);
    }
  }
}

static fsdp_status run_steps(const program *p, nccl_world *world, int64_t rank,
                             fsdp_transport *transport, fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  for (int64_t i = 0; i < p->num_steps; i++) {
    meet_fate(p, world, rank, i);
    FSDP_TRY(run_step(transport, p->is_reduce[i], p->is_group[i], error));
    if (i % 4 == 3) synchronize(transport);
  }
  meet_fate(p, world, rank, p->num_steps);
  synchronize(transport);
  status = transport->ops->check(transport, error);
done:
  return status;
}

/* Whether nothing in the program is a reason for an error. */
static bool is_harmless(const program *p) {
  for (int64_t i = 0; i < p->world_size; i++) {
    if (p->fates[i] != FINE && p->fates[i] != LATE) return false;
  }
  return p->store_mode == NCCL_WORLD_STORE_WORKS;
}

/* The process of a rank; its exit code. */
static int run_rank(const program *p, nccl_world *world, int64_t rank) {
  const bool fails = p->fates[rank] == FAILS;
  const fsdp_nccl_events events = nccl_world_events();
  const fsdp_nccl_library library = nccl_world_library();
  const fsdp_store store = nccl_world_store();
  fsdp_nccl_options options;
  fsdp_transport *transport = NULL;
  fsdp_error error = {0};
  fsdp_error again = {0};
  nccl_world_enter(world, rank, fails ? p->fate_step[rank] : -1);
  fsdp_nccl_options_init(&options);
  options.prefix = "p";
  options.init_timeout_ms = TIMEOUT_MS;
  options.timeout_ms = TIMEOUT_MS;
  options.grace_ms = 100;
  options.leave_ms = 200;
  options.poll_ms = 5;
  options.events = &events;
  /* A loaded machine is no reason to fail. */
  if (is_harmless(p)) {
    options.init_timeout_ms = options.timeout_ms = options.leave_ms = 20000;
  }
  fsdp_status status = fsdp_nccl_create(&library, &options, &store, rank,
                                        p->world_size, &transport, &error);
  if (status != FSDP_OK) return 1;
  status = run_steps(p, world, rank, transport, &error);
  bool is_right = status == FSDP_OK || status == FSDP_BACKEND;
  if (status == FSDP_BACKEND) {
    /* It stays so. */
    is_right = run_step(transport, false, false, &again) == FSDP_BACKEND;
  }
  if (status != FSDP_OK && is_harmless(p)) is_right = false;
  if (!is_right) printf("rank %d: %s\n", (int)rank, error.message);
  if (p->seed % 3 == 0) fsdp_nccl_leave_all();
  if (p->seed % 3 != 1) transport->ops->destroy(transport);
  (void)fflush(stdout);
  return is_right ? 0 : 1;
}

/* ---- All ranks ------------------------------------------------------------*/

typedef struct running {
  program program;
  nccl_world *world; /* NULL: this place is free */
  pid_t pids[NCCL_WORLD_MAX_RANKS];
  int64_t begin_ms;
  bool is_right;
} running;

static void start_program(running *self, uint64_t number) {
  self->program = make_program(number);
  self->world = mmap(NULL, sizeof *self->world, PROT_READ | PROT_WRITE,
                     MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (self->world == MAP_FAILED) abort();
  nccl_world_init(self->world, self->program.world_size);
  self->world->is_death_noticed = self->program.is_death_noticed;
  self->begin_ms = fsdp_nccl_priv_now_ms();
  self->is_right = true;
  (void)fflush(stdout);
  for (int64_t rank = 0; rank < self->program.world_size; rank++) {
    self->pids[rank] = fork();
    if (self->pids[rank] == 0) {
      _exit(run_rank(&self->program, self->world, rank));
    }
    if (self->pids[rank] < 0) abort();
  }
}

/* Whether the process of `rank` has ended, or is one that never does. */
static bool is_over(running *self, int64_t rank) {
  int status = 0;
  if (self->pids[rank] == 0) return true;
  if (waitpid(self->pids[rank], &status, WNOHANG) != self->pids[rank]) {
    return false;
  }
  self->pids[rank] = 0;
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
    printf("rank %d ended with status %d\n", (int)rank, status);
    self->is_right = false;
  }
  return true;
}

static void finish(running *self) {
  for (int64_t rank = 0; rank < self->program.world_size; rank++) {
    if (self->pids[rank] == 0) continue;
    (void)kill(self->pids[rank], SIGKILL);
    (void)waitpid(self->pids[rank], NULL, 0);
  }
  if (atomic_load(&self->world->num_wrong) > 0) self->is_right = false;
  if (!CHECK(self->is_right)) {
    printf("program %d of FSDP_C_RANDOM_FIRST\n", (int)self->program.seed);
  }
  (void)munmap(self->world, sizeof *self->world);
  self->world = NULL;
}

/* Ends the program when all its ranks did that can, or the time is over. */
static void look_at(running *self) {
  const int64_t age_ms = fsdp_nccl_priv_now_ms() - self->begin_ms;
  bool is_done = true;
  for (int64_t rank = 0; rank < self->program.world_size; rank++) {
    const bool may_stop = self->program.fates[rank] == STOPS;
    if (is_over(self, rank) || may_stop) continue;
    is_done = false;
    if (age_ms < HARD_LIMIT_MS) continue;
    printf("rank %d has not ended after %d ms\n", (int)rank, HARD_LIMIT_MS);
    self->is_right = false;
  }
  if (is_done || age_ms >= HARD_LIMIT_MS) finish(self);
}

static int64_t number_from(const char *name, int64_t otherwise) {
  const char *text = getenv(name);
  return text == NULL ? otherwise : strtoll(text, NULL, 10);
}

TEST(test_random_failures) {
  const int64_t first = number_from("FSDP_C_RANDOM_FIRST", 0);
  const int64_t end = first + number_from("FSDP_C_RANDOM_CASES", NUM_CASES);
  running all[NUM_AT_ONCE] = {0};
  int64_t next = first;
  for (bool is_busy = true; is_busy;) {
    is_busy = false;
    for (int i = 0; i < NUM_AT_ONCE; i++) {
      if (all[i].world == NULL && next < end) {
        start_program(&all[i], (uint64_t)next++);
      }
      if (all[i].world == NULL) continue;
      is_busy = true;
      look_at(&all[i]);
    }
    check_sleep_ms(2);
  }
  CHECK_I64(next, end);
}
