/*
 * Tests of shm/: ranks that die, stop, leave or make other calls than the
 * others.
 */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/dtypes.h"
#include "check.h"
#include "shm/process_priv.h"
#include "shm_calls.h"

enum { NUMEL = SHM_PLAIN_NUMEL };

static const fsdp_dtype g_float = {FSDP_DTYPE_FLOAT32, 4};

/* do { ... } while (has_other_way()): with rings, and with calls that read the
 * other ranks' memory. */
static bool has_other_way(void) {
  shm_direct_call_nbytes = shm_direct_call_nbytes < 0 ? 1 : -1;
  return shm_direct_call_nbytes > 0;
}

static float g_buffer[NUMEL];

static fsdp_status start_call(fsdp_transport *transport, shm_kind kind,
                              const char *label, uint64_t *ticket,
                              fsdp_error *error) {
  return shm_start_plain(transport, kind, 0, label, ticket, error);
}

static fsdp_status wait_call(fsdp_transport *transport, shm_kind kind,
                             uint64_t ticket, fsdp_error *error) {
  return transport->ops->wait(transport, shm_channel_of(kind), ticket, error);
}

/* Start and wait. */
static fsdp_status run_call(fsdp_transport *transport, shm_kind kind,
                            const char *label, fsdp_error *error) {
  uint64_t ticket = 0;
  const fsdp_status status = start_call(transport, kind, label, &ticket, error);
  if (status != FSDP_OK) return status;
  return wait_call(transport, kind, ticket, error);
}

/* The same, once `num` ranks have started: a slow machine delays no rank so
 * long that the others blame it. */
static fsdp_status run_call_together(fsdp_transport *transport, shm_kind kind,
                                     const char *label,
                                     _Atomic int32_t *num_started, int32_t num,
                                     fsdp_error *error) {
  uint64_t ticket = 0;
  const fsdp_status status = start_call(transport, kind, label, &ticket, error);
  if (status != FSDP_OK) return status;
  atomic_fetch_add(num_started, 1);
  CHECK(shm_await(num_started, num));
  return wait_call(transport, kind, ticket, error);
}

/* ---- Ranks that go ------------------------------------------------------- */

enum { VICTIM = 1 };

static void kill_one(const shm_rank *self) {
  fsdp_transport *transport = shm_join(self, "kill");
  const shm_kind kind = *(const shm_kind *)self->context;
  fsdp_error error = {0};
  CHECK_OK(run_call(transport, kind, "first", &error));
  if (self->rank == VICTIM) (void)kill(getpid(), SIGKILL);
  CHECK_I64(run_call(transport, kind, "unit 'b'", &error), FSDP_BACKEND);
  SHM_CHECK_SAYS(&error, "rank 1", "dead", "#2 ", "unit 'b'", "ended #1 ");
  shm_check_stays_failed(transport, kind, &error);
  transport->ops->destroy(transport);
}

TEST(test_a_killed_rank_is_named) {
  do {
    shm_kind kinds[] = {GATHER, BROADCAST, SCATTER, REDUCE};
    for (int i = 0; i < 4; i++) {
      for (int64_t world_size = 2; world_size <= 4; world_size++) {
        shm_run_without(world_size, VICTIM, kill_one, &kinds[i]);
      }
    }
  } while (has_other_way());
}

/* Waits until the process is stopped by a signal. */
static void await_stop(pid_t pid) {
  char path[64];
  char text[256] = "";
  (void)snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
  while (strstr(text, ") T ") == NULL) {
    if (!CHECK(fsdp_shm_priv_read_file(path, text, sizeof text) == 0)) return;
    check_sleep_ms(1);
  }
}

static void stop_one(const shm_rank *self) {
  fsdp_shm_options options = shm_options("stop");
  options.timeout_ms = 700;
  fsdp_transport *transport = shm_create(self, &options);
  _Atomic int32_t *num_failed = self->context;
  fsdp_error error = {0};
  CHECK_OK(run_call(transport, GATHER, "first", &error));
  if (self->rank == VICTIM) {
    (void)raise(SIGSTOP); /* until the last of the others lets it go on */
    CHECK_I64(run_call(transport, SCATTER, "unit 'c'", &error), FSDP_BACKEND);
    SHM_CHECK_SAYS(&error, "failed: rank ");
  } else {
    await_stop(shm_pid(VICTIM));
    CHECK_I64(run_call(transport, SCATTER, "unit 'c'", &error), FSDP_BACKEND);
    SHM_CHECK_SAYS(&error, "rank 1", "stopped", "unit 'c'");
    if (atomic_fetch_add(num_failed, 1) + 1 == self->world_size - 1) {
      (void)kill(shm_pid(VICTIM), SIGCONT);
    }
  }
  transport->ops->destroy(transport);
}

TEST(test_a_stopped_rank_is_named_after_the_time_limit) {
  do {
    for (int64_t world_size = 2; world_size <= 3; world_size++) {
      shm_run(world_size, stop_one, shm_shared(sizeof(int32_t)));
    }
  } while (has_other_way());
}

/* The others also wait for each other, and blame the one that has not come. */
static void come_late(const shm_rank *self) {
  const int64_t late = self->world_size - 1;
  fsdp_shm_options options = shm_options("late");
  options.timeout_ms = 300;
  fsdp_transport *transport = shm_create(self, &options);
  _Atomic int32_t *num_started = self->context;
  _Atomic int32_t *num_failed = num_started + 1;
  fsdp_error error = {0};
  char name[32];
  (void)snprintf(name, sizeof name, "for rank %" PRId64 ",", late);
  if (self->rank == late) CHECK(shm_await(num_failed, (int32_t)late));
  CHECK_I64(run_call_together(transport, REDUCE, "unit 'l'", num_started,
                              (int32_t)late, &error),
            FSDP_BACKEND);
  SHM_CHECK_SAYS(&error, name);
  atomic_fetch_add(num_failed, 1);
  transport->ops->destroy(transport);
}

TEST(test_a_rank_that_does_not_come_is_named) {
  do {
    shm_run(2, come_late, shm_shared(2 * sizeof(int32_t)));
    shm_run(4, come_late, shm_shared(2 * sizeof(int32_t)));
  } while (has_other_way());
}

static void leave(const shm_rank *self) {
  fsdp_transport *transport = shm_join(self, "leave");
  fsdp_error error = {0};
  uint64_t ticket = 0;
  _Atomic int32_t *is_started = self->context;
  CHECK_OK(run_call(transport, REDUCE, "first", &error));
  if (self->rank == VICTIM) {
    /* In flight: its memory is the caller's again. */
    CHECK_OK(start_call(transport, REDUCE, "unit 'd'", &ticket, &error));
    atomic_store(is_started, 1);
  } else {
    CHECK(shm_await(is_started, 1));
    CHECK_I64(run_call(transport, REDUCE, "unit 'd'", &error), FSDP_BACKEND);
    SHM_CHECK_SAYS(&error, "rank 1");
    if (self->world_size == 2) SHM_CHECK_SAYS(&error, "has left the group");
  }
  transport->ops->destroy(transport);
}

TEST(test_a_rank_that_leaves_is_named) {
  do {
    shm_run(2, leave, shm_shared(sizeof(int32_t)));
    shm_run(3, leave, shm_shared(sizeof(int32_t)));
  } while (has_other_way());
}

/* What a rank has written before it goes still reaches the others. */
static void leave_after(const shm_rank *self) {
  fsdp_shm_options options = shm_options("after");
  options.ring_nbytes = 1 << 20;
  fsdp_transport *transport = shm_create(self, &options);
  fsdp_error error = {0};
  uint64_t ticket = 0;
  CHECK_OK(start_call(transport, GATHER, "last", &ticket, &error));
  if (self->rank != VICTIM) {
    check_sleep_ms(150);
    CHECK_OK(
        transport->ops->wait(transport, FSDP_CHANNEL_GATHER, ticket, &error));
  }
  transport->ops->destroy(transport);
}

TEST(test_what_was_written_before_leaving_counts) {
  shm_run(2, leave_after, NULL);
}

/* ---- Ranks that differ --------------------------------------------------- */

typedef struct difference {
  const char *says; /* of the call that rank 0 alone makes */
  int64_t numel;
  fsdp_dtype dtype;
  const char *label;
  bool is_scatter;
} difference;

static fsdp_status reduce(fsdp_transport *transport, const difference *call,
                          fsdp_error *error) {
  const fsdp_call how = {.channel = FSDP_CHANNEL_REDUCE, .label = call->label};
  uint64_t ticket = 0;
  fsdp_status status =
      call->is_scatter
          ? transport->ops->reduce_scatter(transport, &how, g_buffer,
                                           call->numel, call->dtype, &ticket,
                                           error)
          : transport->ops->all_reduce(transport, &how, g_buffer, call->numel,
                                       call->dtype, &ticket, error);
  if (status != FSDP_OK) return status;
  return transport->ops->wait(transport, FSDP_CHANNEL_REDUCE, ticket, error);
}

static void differ(const shm_rank *self) {
  fsdp_transport *transport = shm_join(self, "differ");
  const difference *other = self->context;
  const difference usual = {NULL, 500, g_float, "unit 'e'", false};
  fsdp_error error = {0};
  CHECK_OK(reduce(transport, &usual, &error));
  CHECK_I64(reduce(transport, self->rank == 0 ? other : &usual, &error),
            FSDP_BACKEND);
  SHM_CHECK_SAYS(&error, "different calls", "rank 0",
                 "#2 all_reduce (unit 'e') of 500 elements", other->says);
  transport->ops->destroy(transport);
}

TEST(test_different_calls_are_told) {
  const difference differences[] = {
      {"of 501 elements", 501, g_float, "unit 'e'", false},
      {"dtype 3", 500, {FSDP_DTYPE_INT32, 4}, "unit 'e'", false},
      {"reduce_scatter", 500, g_float, "unit 'e'", true},
      {"unit 'f'", 500, g_float, "unit 'f'", false},
  };
  for (size_t i = 0; i < sizeof differences / sizeof differences[0]; i++) {
    difference each = differences[i];
    shm_run(2, differ, &each);
    shm_run(4, differ, &each);
  }
}

static void differ_in_root(const shm_rank *self) {
  const fsdp_call how = {.channel = FSDP_CHANNEL_GATHER, .label = "states"};
  fsdp_transport *transport = shm_join(self, "root");
  fsdp_error error = {0};
  uint64_t ticket = 0;
  fsdp_status status = transport->ops->broadcast(
      transport, &how, g_buffer, NUMEL, self->rank, g_float, &ticket, &error);
  if (status == FSDP_OK) {
    status =
        transport->ops->wait(transport, FSDP_CHANNEL_GATHER, ticket, &error);
  }
  CHECK_I64(status, FSDP_BACKEND);
  SHM_CHECK_SAYS(&error, "different calls");
  transport->ops->destroy(transport);
}

TEST(test_different_roots_are_told) {
  do {
    shm_run(2, differ_in_root, NULL);
  } while (has_other_way());
}

/* Rank 0 gathers where the other reduces: neither comes. */
static void diverge(const shm_rank *self, fsdp_transport *transport,
                    fsdp_error *error) {
  CHECK_I64(run_call_together(transport, self->rank == 0 ? GATHER : REDUCE,
                              "unit 'g'", self->context, 2, error),
            FSDP_BACKEND);
  if (strstr(error->message, "failed:") == NULL) {
    SHM_CHECK_SAYS(error,
                   self->rank == 0 ? "on the reduce channel is in #"
                                   : "on the gather channel is in #",
                   "running");
  }
}

/* It is told at once: the time limit is 20 s, and ends with other words. */
static void diverge_alone(const shm_rank *self) {
  fsdp_transport *transport = shm_join(self, "diverge");
  fsdp_error error = {0};
  diverge(self, transport, &error);
  SHM_CHECK_SAYS(&error, "each waits for a call that the other has not made");
  transport->ops->destroy(transport);
}

static void *call_once(void *transport) {
  fsdp_transport *self = transport;
  return self->ops->check(self, NULL) == FSDP_OK ? transport : NULL;
}

/* Another thread of a rank might still make the call, so it gets its time. */
static void diverge_with_threads(const shm_rank *self) {
  fsdp_shm_options options = shm_options("threads");
  options.timeout_ms = 300;
  fsdp_transport *transport = shm_create(self, &options);
  fsdp_error error = {0};
  pthread_t thread;
  void *result = NULL;
  CHECK_OK(run_call(transport, SCATTER, "first", &error));
  if (self->rank == 0) {
    CHECK(pthread_create(&thread, NULL, call_once, transport) == 0);
    CHECK(pthread_join(thread, &result) == 0);
    CHECK(result == transport);
  }
  CHECK_OK(run_call(transport, GATHER, "second", &error));
  diverge(self, transport, &error);
  SHM_CHECK_SAYS(&error, "or raise the time limit");
  transport->ops->destroy(transport);
}

TEST(test_ranks_in_different_channels_end_too) {
  shm_run(2, diverge_alone, shm_shared(sizeof(int32_t)));
  shm_run(2, diverge_with_threads, shm_shared(sizeof(int32_t)));
}

/* Lists of calls and of messages grow; a call that finds no memory has not
 * begun, and may be made again. */
static void call_with_failing_allocations(const shm_rank *self) {
  fsdp_transport *transport = shm_join(self, "calls");
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
  CHECK_OK(run_call(transport, GATHER, "calls", &error));
  CHECK_OK(fsdp_shm_send(transport, other, &out, sizeof out, "m", &error));
  CHECK_OK(fsdp_shm_recv(transport, other, &in, sizeof in, "m", &error));
  CHECK_OK(fsdp_shm_wait_messages(transport, &error));
  CHECK_I64(in, 1);
  transport->ops->destroy(transport);
}

TEST(test_every_allocation_of_a_call_can_fail) {
  shm_run(2, call_with_failing_allocations, NULL);
}

/* ---- Arguments ----------------------------------------------------------- */

static void pass_bad_arguments(const shm_rank *self) {
  fsdp_transport *transport = shm_join(self, "bad");
  const fsdp_transport_ops *ops = transport->ops;
  const fsdp_call call = {.channel = FSDP_CHANNEL_REDUCE};
  const fsdp_call nowhere = {.channel = FSDP_NUM_CHANNELS};
  const fsdp_dtype boolean = {FSDP_DTYPE_BOOL, 1};
  const int64_t huge = INT64_MAX / 8;
  fsdp_error error = {0};
  uint64_t ticket = 5;
  CHECK_I64(
      ops->all_reduce(transport, &call, g_buffer, 4, boolean, &ticket, &error),
      FSDP_INVALID_ARGUMENT);
  SHM_CHECK_SAYS(&error, "dtype 11");
  CHECK_I64(
      ops->all_reduce(transport, &call, g_buffer, -1, g_float, &ticket, &error),
      FSDP_INVALID_ARGUMENT);
  CHECK_I64(ops->reduce_scatter(transport, &call, g_buffer, huge, g_float,
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
  CHECK_OK(ops->check(transport, &error));
  CHECK_OK(run_call(transport, REDUCE, NULL, &error));
  ops->destroy(transport);
  ops->destroy(NULL);
}

TEST(test_bad_arguments_change_nothing) {
  shm_run(2, pass_bad_arguments, NULL);
}

/* ---- Forks --------------------------------------------------------------- */

static void fork_one(const shm_rank *self) {
  fsdp_transport *transport = shm_join(self, "fork");
  fsdp_error error = {0};
  CHECK_OK(run_call(transport, GATHER, "before", &error));
  uint64_t ticket = 0; /* in flight: more than a ring holds */
  CHECK_OK(start_call(transport, GATHER, "during", &ticket, &error));
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
    CHECK_OK(run_call(transport, GATHER, "children", &error));
    CHECK_OK(shm_barrier(transport, "children", &error));
    transport->ops->destroy(transport);
    CHECK_I64(fsdp_alloc_live(), 0);
    exit(check_num_failures == 0 ? 0 : 1);
  }
  int state = -1;
  CHECK(waitpid(child, &state, 0) == child && state == 0);
  CHECK_OK(
      transport->ops->wait(transport, FSDP_CHANNEL_GATHER, ticket, &error));
  CHECK_OK(run_call(transport, REDUCE, "after", &error));
  transport->ops->destroy(transport);
}

TEST(test_a_forked_child_has_no_part_in_it) {
  shm_run(2, fork_one, NULL);
}
