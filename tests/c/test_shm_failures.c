/*
 * Tests of shm/: ranks that die, stop, leave or make other calls than the
 * others, and meetings that do not succeed.
 */
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/dtypes.h"
#include "check.h"
#include "shm_fixture.h"

enum { NUMEL = 3000 }; /* more than a ring holds */

static const fsdp_dtype g_float = {FSDP_DTYPE_FLOAT32, 4};

typedef enum what { GATHER, SCATTER, REDUCE, BROADCAST } what;

static float g_buffer[4 * NUMEL];

static fsdp_status start_call(fsdp_transport *transport, what kind,
                              const char *label, uint64_t *ticket,
                              fsdp_error *error) {
  const fsdp_call call = {.channel = kind == GATHER || kind == BROADCAST
                                         ? FSDP_CHANNEL_GATHER
                                         : FSDP_CHANNEL_REDUCE,
                          .label = label};
  static float input[NUMEL];
  switch (kind) {
    case GATHER:
      return transport->ops->all_gather(transport, &call, g_buffer, input,
                                        NUMEL, g_float, ticket, error);
    case SCATTER:
      return transport->ops->reduce_scatter(transport, &call, g_buffer, NUMEL,
                                            g_float, 1, ticket, error);
    case REDUCE:
      return transport->ops->all_reduce(transport, &call, g_buffer, NUMEL,
                                        g_float, 1, ticket, error);
    case BROADCAST:
      break;
  }
  return transport->ops->broadcast(transport, &call, g_buffer, NUMEL, 0,
                                   g_float, ticket, error);
}

/* Start and wait. */
static fsdp_status run_call(fsdp_transport *transport, what kind,
                            const char *label, fsdp_error *error) {
  uint64_t ticket = 0;
  const fsdp_status status = start_call(transport, kind, label, &ticket, error);
  if (status != FSDP_OK) return status;
  return transport->ops->wait(transport,
                              kind == GATHER || kind == BROADCAST
                                  ? FSDP_CHANNEL_GATHER
                                  : FSDP_CHANNEL_REDUCE,
                              ticket, error);
}

static void check_says(const fsdp_error *error, const char *text) {
  if (CHECK(strstr(error->message, text) != NULL)) return;
  printf("  no \"%s\" in: %s\n", text, error->message);
}

/* ---- Ranks that go ---------------------------------------------------------
 */

enum { VICTIM = 1 };

static void kill_one(const shm_rank *self) {
  const fsdp_shm_options options = shm_options("kill");
  fsdp_transport *transport = shm_create(self, &options);
  const what kind = *(const what *)self->context;
  fsdp_error error = {0};
  CHECK_I64(run_call(transport, kind, "first", &error), FSDP_OK);
  if (self->rank == VICTIM) (void)kill(getpid(), SIGKILL);
  CHECK_I64(run_call(transport, kind, "unit 'b'", &error), FSDP_BACKEND);
  check_says(&error, "rank 1");
  check_says(&error, "dead");
  check_says(&error, "#2 ");
  check_says(&error, "unit 'b'");
  check_says(&error, "ended #1 ");
  const fsdp_error first = error;
  /* And so does everything after it. */
  CHECK_I64(run_call(transport, kind, "later", &error), FSDP_BACKEND);
  CHECK_TEXT(error.message, first.message);
  CHECK_I64(transport->ops->check(transport, &error), FSDP_BACKEND);
  CHECK_TEXT(error.message, first.message);
  transport->ops->destroy(transport);
}

static void test_a_killed_rank_is_named(void) {
  for (what kind = GATHER; kind <= BROADCAST; kind++) {
    for (int64_t world_size = 2; world_size <= 4; world_size++) {
      shm_run_without(world_size, VICTIM, kill_one, &kind);
    }
  }
}

static void stop_one(const shm_rank *self) {
  fsdp_shm_options options = shm_options("stop");
  options.timeout_ms = 700;
  fsdp_transport *transport = shm_create(self, &options);
  _Atomic int32_t *num_failed = self->context;
  fsdp_error error = {0};
  CHECK_I64(run_call(transport, GATHER, "first", &error), FSDP_OK);
  if (self->rank == VICTIM) {
    (void)raise(SIGSTOP); /* until the last of the others lets it go on */
    CHECK_I64(run_call(transport, SCATTER, "unit 'c'", &error), FSDP_BACKEND);
    check_says(&error, "failed: rank ");
  } else {
    CHECK_I64(run_call(transport, SCATTER, "unit 'c'", &error), FSDP_BACKEND);
    check_says(&error, "rank 1");
    check_says(&error, "stopped");
    check_says(&error, "unit 'c'");
    if (atomic_fetch_add(num_failed, 1) + 1 == self->world_size - 1) {
      (void)kill(shm_pid(VICTIM), SIGCONT);
    }
  }
  transport->ops->destroy(transport);
}

static void test_a_stopped_rank_is_named_after_the_time_limit(void) {
  for (int64_t world_size = 2; world_size <= 3; world_size++) {
    shm_run(world_size, stop_one, shm_shared(sizeof(int32_t)));
  }
}

/* The others also wait for each other, and blame the one that has not come. */
static void come_late(const shm_rank *self) {
  const int64_t late = self->world_size - 1;
  fsdp_shm_options options = shm_options("late");
  options.timeout_ms = 300;
  fsdp_transport *transport = shm_create(self, &options);
  _Atomic int32_t *num_failed = self->context;
  fsdp_error error = {0};
  char name[32];
  (void)snprintf(name, sizeof name, "for rank %" PRId64 ",", late);
  if (self->rank == late) CHECK(shm_await(num_failed, (int32_t)late));
  CHECK_I64(run_call(transport, REDUCE, "unit 'l'", &error), FSDP_BACKEND);
  check_says(&error, name);
  atomic_fetch_add(num_failed, 1);
  transport->ops->destroy(transport);
}

static void test_a_rank_that_does_not_come_is_named(void) {
  shm_run(2, come_late, shm_shared(sizeof(int32_t)));
  shm_run(4, come_late, shm_shared(sizeof(int32_t)));
}

static void leave(const shm_rank *self) {
  const fsdp_shm_options options = shm_options("leave");
  fsdp_transport *transport = shm_create(self, &options);
  fsdp_error error = {0};
  uint64_t ticket = 0;
  _Atomic int32_t *is_started = self->context;
  CHECK_I64(run_call(transport, REDUCE, "first", &error), FSDP_OK);
  if (self->rank == VICTIM) {
    /* In flight: its memory is the caller's again. */
    CHECK_I64(start_call(transport, REDUCE, "unit 'd'", &ticket, &error),
              FSDP_OK);
    atomic_store(is_started, 1);
  } else {
    CHECK(shm_await(is_started, 1));
    CHECK_I64(run_call(transport, REDUCE, "unit 'd'", &error), FSDP_BACKEND);
    check_says(&error, "rank 1");
    if (self->world_size == 2) check_says(&error, "has left the group");
  }
  transport->ops->destroy(transport);
}

static void test_a_rank_that_leaves_is_named(void) {
  shm_run(2, leave, shm_shared(sizeof(int32_t)));
  shm_run(3, leave, shm_shared(sizeof(int32_t)));
}

/* What a rank has written before it goes still reaches the others. */
static void leave_after(const shm_rank *self) {
  fsdp_shm_options options = shm_options("after");
  options.ring_nbytes = 1 << 20;
  fsdp_transport *transport = shm_create(self, &options);
  fsdp_error error = {0};
  uint64_t ticket = 0;
  CHECK_I64(start_call(transport, GATHER, "last", &ticket, &error), FSDP_OK);
  if (self->rank != VICTIM) {
    shm_sleep_ms(150);
    CHECK_I64(
        transport->ops->wait(transport, FSDP_CHANNEL_GATHER, ticket, &error),
        FSDP_OK);
  }
  transport->ops->destroy(transport);
}

static void test_what_was_written_before_leaving_counts(void) {
  shm_run(2, leave_after, NULL);
}

/* ---- Ranks that differ -----------------------------------------------------
 */

typedef struct difference {
  const char *says; /* of the call that rank 0 alone makes */
  int64_t numel;
  fsdp_dtype dtype;
  double scale;
  const char *label;
  bool is_scatter;
} difference;

static fsdp_status reduce(fsdp_transport *transport, const difference *call,
                          fsdp_error *error) {
  const fsdp_call how = {.channel = FSDP_CHANNEL_REDUCE, .label = call->label};
  uint64_t ticket = 0;
  fsdp_status status = call->is_scatter
                           ? transport->ops->reduce_scatter(
                                 transport, &how, g_buffer, call->numel,
                                 call->dtype, call->scale, &ticket, error)
                           : transport->ops->all_reduce(
                                 transport, &how, g_buffer, call->numel,
                                 call->dtype, call->scale, &ticket, error);
  if (status != FSDP_OK) return status;
  return transport->ops->wait(transport, FSDP_CHANNEL_REDUCE, ticket, error);
}

static void differ(const shm_rank *self) {
  const fsdp_shm_options options = shm_options("differ");
  fsdp_transport *transport = shm_create(self, &options);
  const difference *other = self->context;
  const difference usual = {NULL, 500, g_float, 1, "unit 'e'", false};
  fsdp_error error = {0};
  CHECK_I64(reduce(transport, &usual, &error), FSDP_OK);
  CHECK_I64(reduce(transport, self->rank == 0 ? other : &usual, &error),
            FSDP_BACKEND);
  check_says(&error, "different calls");
  check_says(&error, "rank 0");
  check_says(&error, "#2 all_reduce (unit 'e') of 500 elements");
  check_says(&error, other->says);
  transport->ops->destroy(transport);
}

static void test_different_calls_are_told(void) {
  const difference differences[] = {
      {"of 501 elements", 501, g_float, 1, "unit 'e'", false},
      {"dtype 3", 500, {FSDP_DTYPE_INT32, 4}, 1, "unit 'e'", false},
      {"reduce_scatter", 500, g_float, 1, "unit 'e'", true},
      {"unit 'f'", 500, g_float, 1, "unit 'f'", false},
      {"rank 0", 500, g_float, 0.5, "unit 'e'", false},
  };
  for (size_t i = 0; i < sizeof differences / sizeof differences[0]; i++) {
    difference each = differences[i];
    shm_run(2, differ, &each);
    shm_run(4, differ, &each);
  }
}

static void differ_in_root(const shm_rank *self) {
  const fsdp_shm_options options = shm_options("root");
  const fsdp_call how = {.channel = FSDP_CHANNEL_GATHER, .label = "states"};
  fsdp_transport *transport = shm_create(self, &options);
  fsdp_error error = {0};
  uint64_t ticket = 0;
  fsdp_status status = transport->ops->broadcast(
      transport, &how, g_buffer, NUMEL, self->rank, g_float, &ticket, &error);
  if (status == FSDP_OK) {
    status =
        transport->ops->wait(transport, FSDP_CHANNEL_GATHER, ticket, &error);
  }
  CHECK_I64(status, FSDP_BACKEND);
  check_says(&error, "different calls");
  transport->ops->destroy(transport);
}

static void test_different_roots_are_told(void) {
  shm_run(2, differ_in_root, NULL);
}

/* Rank 0 gathers where the other reduces: neither comes, but for the time. */
static void diverge(const shm_rank *self) {
  fsdp_shm_options options = shm_options("diverge");
  options.timeout_ms = 300;
  fsdp_transport *transport = shm_create(self, &options);
  fsdp_error error = {0};
  CHECK_I64(run_call(transport, self->rank == 0 ? GATHER : REDUCE, "unit 'g'",
                     &error),
            FSDP_BACKEND);
  if (strstr(error.message, "failed:") == NULL) {
    check_says(&error, "has made no call there");
    check_says(&error, self->rank == 0 ? "on the reduce channel is in #1"
                                       : "on the gather channel is in #1");
    check_says(&error, "running");
  }
  transport->ops->destroy(transport);
}

static void test_ranks_in_different_channels_end_too(void) {
  shm_run(2, diverge, NULL);
}

/* ---- Meetings --------------------------------------------------------------
 */

typedef struct meeting {
  char reasons[8][FSDP_SHM_REASON_NBYTES];
} meeting;

static fsdp_status try_create(const shm_rank *self,
                              const fsdp_shm_options *options,
                              fsdp_shm_verdict *verdict, fsdp_error *error) {
  fsdp_transport *transport = NULL;
  const fsdp_status status =
      fsdp_shm_create(&self->store, options, self->rank, self->world_size,
                      &transport, verdict, error);
  CHECK((transport != NULL) == (status == FSDP_OK && verdict->is_possible));
  if (transport != NULL) transport->ops->destroy(transport);
  return status;
}

static void note(const shm_rank *self, const fsdp_shm_verdict *verdict) {
  meeting *all = self->context;
  CHECK(!verdict->is_possible);
  memcpy(all->reasons[self->rank], verdict->reason, sizeof verdict->reason);
}

static void check_reasons(const meeting *all, int64_t world_size,
                          const char *text) {
  for (int64_t rank = 0; rank < world_size; rank++) {
    CHECK_TEXT(all->reasons[rank], all->reasons[0]);
  }
  if (!CHECK(strstr(all->reasons[0], text) != NULL)) {
    printf("  no \"%s\" in: %s\n", text, all->reasons[0]);
  }
}

static void meet_with_little_memory(const shm_rank *self) {
  const fsdp_shm_options options = shm_options("little");
  fsdp_shm_verdict verdict = {0};
  fsdp_error error = {0};
  if (self->rank == 1) {
    const struct rlimit limit = {.rlim_cur = 4096, .rlim_max = 4096};
    (void)setrlimit(RLIMIT_FSIZE, &limit);
  }
  CHECK_I64(try_create(self, &options, &verdict, &error), FSDP_OK);
  note(self, &verdict);
}

static void test_without_memory_there_is_none_for_anybody(void) {
  meeting *all = shm_shared(sizeof *all);
  shm_run(3, meet_with_little_memory, all);
  check_reasons(all, 3, "rank 1: ");
  check_reasons(all, 3, "ulimit -f");
}

static void meet_without_address_space(const shm_rank *self) {
  fsdp_shm_options options = shm_options("much");
  options.ring_nbytes = INT64_C(1) << 52; /* more than any machine has */
  /* Should it be tried all the same, then not at the cost of the machine. */
  const struct rlimit limit = {.rlim_cur = 1 << 20, .rlim_max = 1 << 20};
  CHECK_I64(setrlimit(RLIMIT_FSIZE, &limit), 0);
  fsdp_shm_verdict verdict = {0};
  fsdp_error error = {0};
  CHECK_I64(try_create(self, &options, &verdict, &error), FSDP_OK);
  note(self, &verdict);
}

static void test_too_much_memory_is_no_signal(void) {
  meeting *all = shm_shared(sizeof *all);
  shm_run(2, meet_without_address_space, all);
  check_reasons(all, 2, "more than half of the");
}

static void meet_with_other_options(const shm_rank *self) {
  fsdp_shm_options options = shm_options("other");
  fsdp_shm_verdict verdict = {0};
  fsdp_error error = {0};
  if (self->rank == 2) options.ring_nbytes *= 2;
  CHECK_I64(try_create(self, &options, &verdict, &error), FSDP_OK);
  note(self, &verdict);
}

static void test_ranks_with_other_options_do_not_meet(void) {
  meeting *all = shm_shared(sizeof *all);
  shm_run(3, meet_with_other_options, all);
  check_reasons(all, 3, "other options");
}

static void meet_alone(const shm_rank *self) {
  fsdp_shm_options options = shm_options("alone");
  options.meeting_timeout_ms = 100;
  fsdp_shm_verdict verdict = {0};
  fsdp_error error = {0};
  if (self->rank == 1) return;
  CHECK_I64(try_create(self, &options, &verdict, &error), FSDP_BACKEND);
}

static void test_a_rank_that_does_not_come_is_an_error(void) {
  shm_run(2, meet_alone, NULL);
}

/* A store whose answers take a while, and the limits that it was asked with. */
enum { SLOW_MS = 20, SLOW_RANKS = 4, SLOW_GETS = 2 * (SLOW_RANKS - 1) };

typedef struct slow_store {
  int64_t limits_ms[SLOW_GETS];
  int64_t num_gets;
} slow_store;

static fsdp_status slow_set(void *context, const char *key, const void *value,
                            int64_t nbytes, fsdp_error *error) {
  (void)context, (void)key, (void)value, (void)nbytes, (void)error;
  return FSDP_OK;
}

static fsdp_status slow_get(void *context, const char *key, int64_t timeout_ms,
                            void *value, int64_t capacity, int64_t *nbytes,
                            fsdp_error *error) {
  slow_store *self = context;
  (void)key, (void)error;
  if (CHECK(self->num_gets < SLOW_GETS)) {
    self->limits_ms[self->num_gets++] = timeout_ms;
  }
  shm_sleep_ms(SLOW_MS);
  memset(value, 0,
         (size_t)capacity); /* of another version: nothing is mapped */
  *nbytes = capacity;
  return FSDP_OK;
}

/* One limit for all waits: what one takes is gone for the next. */
static void test_a_meeting_has_one_time_limit(void) {
  slow_store slow = {0};
  const fsdp_store store = {.context = &slow, .set = slow_set, .get = slow_get};
  fsdp_shm_options options = shm_options("slow");
  options.meeting_timeout_ms = 3 * SLOW_MS;
  fsdp_transport *transport = NULL;
  fsdp_shm_verdict verdict = {0};
  CHECK_I64(fsdp_shm_create(&store, &options, 0, SLOW_RANKS, &transport,
                            &verdict, NULL),
            FSDP_OK);
  CHECK(!verdict.is_possible && transport == NULL);
  CHECK_I64(slow.num_gets, SLOW_GETS);
  CHECK(slow.limits_ms[0] <= 3 * SLOW_MS);
  for (int64_t i = 1; i < SLOW_GETS; i++) {
    const int64_t most = slow.limits_ms[i - 1] - SLOW_MS;
    CHECK(slow.limits_ms[i] >= 1);
    CHECK(slow.limits_ms[i] <= (most > 1 ? most : 1) + 1);
  }
}

/* Rank 0's allocation i fails: nobody gets a transport, nothing is lost. */
static void meet_with_failing_allocations(const shm_rank *self) {
  char key[32];
  for (int64_t i = 0;; i++) {
    fsdp_shm_verdict verdict = {0};
    fsdp_error error = {0};
    (void)snprintf(key, sizeof key, "memory%" PRId64, i);
    const fsdp_shm_options options = shm_options(key);
    if (self->rank == 0) fsdp_alloc_fail_at(i);
    CHECK_I64(try_create(self, &options, &verdict, &error), FSDP_OK);
    fsdp_alloc_fail_at(-1);
    CHECK_I64(fsdp_alloc_live(), 0);
    CHECK_I64(shm_num_segments(), 0);
    if (verdict.is_possible) {
      CHECK_I64(i, 5); /* another allocation needs another look */
      break;
    }
    CHECK(strstr(verdict.reason, "rank 0: no host memory") != NULL);
  }
}

static void test_every_allocation_of_a_meeting_can_fail(void) {
  shm_run(2, meet_with_failing_allocations, NULL);
}

/* Lists of calls and of messages grow; a call that finds no memory has not
 * begun, and may be made again. */
static void call_with_failing_allocations(const shm_rank *self) {
  const fsdp_shm_options options = shm_options("calls");
  fsdp_transport *transport = shm_create(self, &options);
  const int64_t other = 1 - self->rank;
  fsdp_error error = {0};
  uint64_t ticket = 77;
  int32_t out = 1;
  int32_t in = 0;
  fsdp_alloc_fail_at(0);
  CHECK_I64(start_call(transport, GATHER, "calls", &ticket, &error),
            FSDP_OUT_OF_MEMORY);
  CHECK_I64((int64_t)ticket, 77);
  fsdp_alloc_fail_at(0);
  CHECK_I64(fsdp_shm_send(transport, other, &out, sizeof out, "m", &error),
            FSDP_OUT_OF_MEMORY);
  fsdp_alloc_fail_at(-1);
  CHECK_I64(run_call(transport, GATHER, "calls", &error), FSDP_OK);
  CHECK_I64(fsdp_shm_send(transport, other, &out, sizeof out, "m", &error),
            FSDP_OK);
  CHECK_I64(fsdp_shm_recv(transport, other, &in, sizeof in, "m", &error),
            FSDP_OK);
  CHECK_I64(fsdp_shm_wait_messages(transport, &error), FSDP_OK);
  CHECK_I64(in, 1);
  transport->ops->destroy(transport);
}

static void test_every_allocation_of_a_call_can_fail(void) {
  shm_run(2, call_with_failing_allocations, NULL);
}

/* ---- Arguments -------------------------------------------------------------
 */

static void pass_bad_arguments(const shm_rank *self) {
  const fsdp_shm_options options = shm_options("bad");
  fsdp_transport *transport = shm_create(self, &options);
  const fsdp_transport_ops *ops = transport->ops;
  const fsdp_call call = {.channel = FSDP_CHANNEL_REDUCE};
  const fsdp_call nowhere = {.channel = FSDP_NUM_CHANNELS};
  const fsdp_dtype boolean = {FSDP_DTYPE_BOOL, 1};
  const fsdp_dtype integer = {FSDP_DTYPE_INT64, 8};
  const int64_t huge = INT64_MAX / 8;
  fsdp_error error = {0};
  uint64_t ticket = 5;
  CHECK_I64(ops->all_reduce(transport, &call, g_buffer, 4, boolean, 1, &ticket,
                            &error),
            FSDP_INVALID_ARGUMENT);
  check_says(&error, "dtype 11");
  CHECK_I64(ops->all_reduce(transport, &call, g_buffer, 4, integer, 0.5,
                            &ticket, &error),
            FSDP_INVALID_ARGUMENT);
  CHECK_I64(ops->all_reduce(transport, &call, g_buffer, -1, g_float, 1, &ticket,
                            &error),
            FSDP_INVALID_ARGUMENT);
  CHECK_I64(ops->reduce_scatter(transport, &call, g_buffer, huge, g_float, 1,
                                &ticket, &error),
            FSDP_OVERFLOW);
  CHECK_I64(ops->broadcast(transport, &call, g_buffer, 4, 2, g_float, &ticket,
                           &error),
            FSDP_INVALID_ARGUMENT);
  CHECK_I64(ops->broadcast(transport, &nowhere, g_buffer, 4, 0, g_float,
                           &ticket, &error),
            FSDP_INVALID_ARGUMENT);
  CHECK_I64(ops->wait(transport, FSDP_CHANNEL_REDUCE, 1, &error),
            FSDP_INVALID_ARGUMENT);
  CHECK_I64(ops->wait(transport, FSDP_NUM_CHANNELS, 0, &error),
            FSDP_INVALID_ARGUMENT);
  CHECK_I64(fsdp_shm_send(transport, self->rank, NULL, 0, NULL, &error),
            FSDP_INVALID_ARGUMENT);
  CHECK_I64(fsdp_shm_recv(transport, 2, NULL, 0, NULL, &error),
            FSDP_INVALID_ARGUMENT);
  CHECK_I64((int64_t)ticket, 5);
  /* None of it has begun or broken anything. */
  CHECK_I64(ops->check(transport, &error), FSDP_OK);
  CHECK_I64(run_call(transport, REDUCE, NULL, &error), FSDP_OK);
  ops->destroy(transport);
  ops->destroy(NULL);
}

static void test_bad_arguments_change_nothing(void) {
  shm_run(2, pass_bad_arguments, NULL);
}

static void test_bad_options_are_refused(void) {
  const shm_rank self = {.rank = 0, .world_size = 2, .store = shm_store()};
  fsdp_shm_verdict verdict;
  fsdp_error error;
  for (int i = 0; i < 6; i++) {
    fsdp_shm_options options = shm_options("options");
    fsdp_status expected = FSDP_INVALID_ARGUMENT;
    if (i == 0) options.nbytes = 8;
    if (i == 1) options.slot_nbytes = 100;
    if (i == 2) options.slot_nbytes = 64;
    if (i == 3) options.timeout_ms = -1;
    if (i == 4) options.key_prefix = NULL;
    if (i == 5) {
      options.ring_nbytes = INT64_MAX;
      expected = FSDP_OVERFLOW;
    }
    CHECK_I64(try_create(&self, &options, &verdict, &error), expected);
  }
  const fsdp_shm_options options = shm_options("options");
  const shm_rank nobody = {.rank = 2, .world_size = 2, .store = self.store};
  CHECK_I64(try_create(&nobody, &options, &verdict, &error),
            FSDP_INVALID_ARGUMENT);
}

/* ---- Forks -----------------------------------------------------------------
 */

static void fork_one(const shm_rank *self) {
  const fsdp_shm_options options = shm_options("fork");
  fsdp_transport *transport = shm_create(self, &options);
  fsdp_error error = {0};
  CHECK_I64(run_call(transport, GATHER, "before", &error), FSDP_OK);
  uint64_t ticket = 0; /* in flight: more than a ring holds */
  CHECK_I64(start_call(transport, GATHER, "during", &ticket, &error), FSDP_OK);
  (void)fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    CHECK_I64(shm_num_segments(), 0);
    CHECK_I64(run_call(transport, GATHER, "in the child", &error),
              FSDP_INVALID_STATE);
    CHECK_I64(transport->ops->check(transport, &error), FSDP_INVALID_STATE);
    transport->ops->give_up(transport, "not its own");
    CHECK_I64(fsdp_shm_wait_messages(transport, &error), FSDP_INVALID_STATE);
    transport->ops->destroy(transport);
    /* It may have one of its own, which knows nothing of its parent's. */
    const fsdp_shm_options others = shm_options("children");
    transport = shm_create(self, &others);
    CHECK_I64(run_call(transport, GATHER, "children", &error), FSDP_OK);
    CHECK_I64(shm_barrier(transport, "children", &error), FSDP_OK);
    transport->ops->destroy(transport);
    CHECK_I64(fsdp_alloc_live(), 0);
    exit(check_num_failures == 0 ? 0 : 1);
  }
  int state = -1;
  CHECK(waitpid(child, &state, 0) == child && state == 0);
  CHECK_I64(
      transport->ops->wait(transport, FSDP_CHANNEL_GATHER, ticket, &error),
      FSDP_OK);
  CHECK_I64(run_call(transport, REDUCE, "after", &error), FSDP_OK);
  transport->ops->destroy(transport);
}

static void test_a_forked_child_has_no_part_in_it(void) {
  shm_run(2, fork_one, NULL);
}

int main(void) {
  static const check_test tests[] = {
      CHECK_TEST(test_a_killed_rank_is_named),
      CHECK_TEST(test_a_stopped_rank_is_named_after_the_time_limit),
      CHECK_TEST(test_a_rank_that_does_not_come_is_named),
      CHECK_TEST(test_a_rank_that_leaves_is_named),
      CHECK_TEST(test_what_was_written_before_leaving_counts),
      CHECK_TEST(test_different_calls_are_told),
      CHECK_TEST(test_different_roots_are_told),
      CHECK_TEST(test_ranks_in_different_channels_end_too),
      CHECK_TEST(test_without_memory_there_is_none_for_anybody),
      CHECK_TEST(test_too_much_memory_is_no_signal),
      CHECK_TEST(test_ranks_with_other_options_do_not_meet),
      CHECK_TEST(test_a_rank_that_does_not_come_is_an_error),
      CHECK_TEST(test_a_meeting_has_one_time_limit),
      CHECK_TEST(test_every_allocation_of_a_meeting_can_fail),
      CHECK_TEST(test_every_allocation_of_a_call_can_fail),
      CHECK_TEST(test_bad_arguments_change_nothing),
      CHECK_TEST(test_bad_options_are_refused),
      CHECK_TEST(test_a_forked_child_has_no_part_in_it),
  };
  return CHECK_RUN(tests);
}
