/*
 * NCCL transport: the watchdog, which sees what fails or hangs while the host
 * makes no calls. Run under ThreadSanitizer, too (make tsan).
 */
#include <pthread.h>

#include "base/alloc.h"
#include "nccl/nccl_priv.h"
#include "nccl_fixture.h"

TEST(test_one_thread_for_all) {
  const fsdp_nccl_options options = nccl_fixture_quick_options();
  CHECK(!fsdp_nccl_priv_has_watchdog());
  for (int i = 0; i < 20; i++) { /* stops and starts */
    fsdp_transport *first = nccl_fixture_join(&options, 0, 2);
    CHECK(fsdp_nccl_priv_has_watchdog());
    fsdp_transport *second = nccl_fixture_join_next(&options, 1, 2);
    first->ops->destroy(first);
    CHECK(fsdp_nccl_priv_has_watchdog());
    nccl_fixture_leave(second);
    CHECK(!fsdp_nccl_priv_has_watchdog());
  }
}

TEST(test_hang) {
  fsdp_nccl_options options = nccl_fixture_quick_options();
  options.timeout_ms = 100;
  options.grace_ms = 60000; /* until rank 0 has answered */
  fsdp_transport *transport = nccl_fixture_join(&options, 1, 2);
  const fsdp_store store = nccl_fake_store();
  fsdp_error error = {0};
  nccl_fake_hold_watchdog(true);
  CHECK_OK(nccl_fixture_unit(transport, true, &error));
  nccl_fake_hold_watchdog(false);
  check_sleep_ms(150); /* done: no reason to end */
  nccl_fake_hold_watchdog(true);
  CHECK_OK(transport->ops->check(transport, &error));

  CHECK_OK(store.set(store.context, "p/words/0", "asleep", 6, NULL));
  nccl_fake_set(NCCL_FAKE_EVENTS_HELD, true);
  CHECK_OK(nccl_fixture_unit(transport, false, &error));
  CHECK_OK(nccl_fixture_gather(transport, "unit 'b'", &error));
  nccl_fake_hold_watchdog(false);
  CHECK(nccl_fixture_wait_for_failure(transport, &error) == FSDP_BACKEND);
  /* The full text, once it is put together. */
  CHECK_FAILS(
      nccl_fixture_gather(transport, "late", &error), FSDP_BACKEND,
      error.message,
      "rank 1 of 2: operation 2 of the gathers (all_gather of unit 'a') did "
      "not end within 100 ms: another rank has not come to it, or the network "
      "does not answer. Rank 0 is asleep. This rank is at operation 3 of the "
      "gathers (unit 'b'), operation 1 of the reductions (reduce_scatter of "
      "unit 'a').");
  CHECK_I64(nccl_fake_num(NCCL_FAKE_ABORTS), 2);
  nccl_fixture_leave(transport);
  CHECK_I64(nccl_fake_num(NCCL_FAKE_ABORTS), 2);
}

/* Seen while the host makes no call at all: the tape tells, not `check`. */
TEST(test_error_while_the_host_waits) {
  const fsdp_nccl_options options = nccl_fixture_quick_options();
  fsdp_transport *transport = nccl_fixture_join(&options, 0, 1);
  fsdp_error error = {0};
  CHECK_OK(nccl_fixture_gather(transport, "unit 'a'", &error));
  nccl_fake_set(NCCL_FAKE_ASYNC_ERROR, FSDP_NCCL_REMOTE_ERROR);
  nccl_fixture_wait_for_aborts(2);
  CHECK_FAILS(transport->ops->check(transport, &error), FSDP_BACKEND,
              error.message, "..rank 0 of 1: the communicator failed at ");
  nccl_fixture_leave(transport);
}

TEST(test_event_that_cannot_be_asked) {
  const fsdp_nccl_options options = nccl_fixture_quick_options();
  fsdp_transport *transport = nccl_fixture_join(&options, 0, 1);
  fsdp_error error = {0};
  nccl_fake_set(NCCL_FAKE_EVENTS_HELD, true);
  CHECK_OK(nccl_fixture_gather(transport, "unit 'a'", &error));
  nccl_fake_event_fail_at(0);
  CHECK_FAILS(nccl_fixture_wait_for_failure(transport, &error), FSDP_BACKEND,
              error.message, "injected at event query");
  nccl_fixture_leave(transport);
}

/* More launches than places: the newest place stands for the rest. */
TEST(test_more_operations_than_places) {
  fsdp_nccl_options options = nccl_fixture_quick_options();
  options.timeout_ms = 0;
  fsdp_transport *transport = nccl_fixture_join(&options, 0, 1);
  fsdp_error error = {0};
  nccl_fake_set(NCCL_FAKE_EVENTS_HELD, true);
  for (int i = 0; i < 300; i++) {
    CHECK_OK(nccl_fixture_gather(transport, "unit 'a'", &error));
  }
  CHECK_I64(nccl_fake_num_events(), 128);
  check_sleep_ms(20); /* without a limit there is none */
  CHECK_OK(transport->ops->check(transport, &error));
  nccl_fake_set(NCCL_FAKE_EVENTS_HELD, false);
  CHECK_OK(nccl_fixture_gather(transport, "unit 'a'", &error));
  CHECK_OK(transport->ops->check(transport, &error));
  nccl_fake_clear_tape();
  nccl_fixture_leave(transport);
  CHECK_LINES(nccl_fake_tape(), "finalize 0; destroy 0; finalize 1; destroy 1");
}

/* A thread inside NCCL behind a hanging operation comes out of it. */
static void be_stuck(bool has_revoke, const char *tape) {
  fsdp_nccl_options options = nccl_fixture_quick_options();
  options.timeout_ms = 100;
  fsdp_nccl_library library = nccl_fake_library();
  const fsdp_store store = nccl_fake_store();
  nccl_fixture_gather_thread call = {0};
  nccl_fake_reset();
  if (!has_revoke) library.api.comm_revoke = NULL;
  CHECK_OK(fsdp_nccl_create(&library, &options, &store, 0, 1, &call.transport,
                            &call.error));
  nccl_fake_set(NCCL_FAKE_EVENTS_HELD, true);
  nccl_fake_hold_watchdog(true);
  CHECK_OK(nccl_fixture_gather(call.transport, "unit 'a'", NULL));
  nccl_fake_clear_tape();
  nccl_fake_set_base(nccl_fixture_memory);
  nccl_fake_set(NCCL_FAKE_BLOCKING, true);
  nccl_fixture_start_gather(&call, "all_gather");
  nccl_fake_hold_watchdog(false);
  nccl_fixture_join_gather(&call, FSDP_BACKEND);
  CHECK(strstr(call.error.message,
               "rank 0 of 1: operation 1 of the gathers (unit 'a') did not end "
               "within 100 ms") == call.error.message);
  CHECK_TEXT(nccl_fake_tape(), tape);
  nccl_fixture_leave(call.transport);
}

TEST(test_host_inside_nccl) {
  be_stuck(true,
           "all_gather 0 u8 16 +0 +0 s1\n"
           "revoke 0\nabort 0\n");
  be_stuck(false,
           "all_gather 0 u8 16 +0 +0 s1\n"
           "abort 0\n");
}

/* Long before this rank's own limit. */
TEST(test_another_rank_failed) {
  fsdp_nccl_options options = nccl_fixture_quick_options();
  options.timeout_ms = 600000;
  fsdp_transport *first = nccl_fixture_join(&options, 0, 2);
  fsdp_transport *second = nccl_fixture_join_next(&options, 1, 2);
  fsdp_error error = {0};
  nccl_fake_set(NCCL_FAKE_EVENTS_HELD, true);
  CHECK_OK(nccl_fixture_gather(first, "unit 'a'", &error));
  CHECK_OK(nccl_fixture_gather(second, "unit 'a'", &error));
  nccl_fake_fail_at(0, FSDP_NCCL_SYSTEM_ERROR, false);
  CHECK(nccl_fixture_gather(second, "unit 'b'", &error) == FSDP_BACKEND);
  CHECK_FAILS(nccl_fixture_wait_for_failure(first, &error), FSDP_BACKEND,
              error.message,
              "..rank 0 of 2 ends because another rank failed: rank 1 of 2: "
              "all_gather failed at operation 2 of the gathers (unit 'b') "
              "with NCCL result 2");
  first->ops->destroy(first);
  nccl_fixture_leave(second);
}

static void use_after_fork(void *context) {
  fsdp_transport *transport = context;
  fsdp_error error = {0};
  CHECK(!fsdp_nccl_priv_has_watchdog());
  CHECK_FAILS(nccl_fixture_gather(transport, "x", &error), FSDP_INVALID_STATE,
              error.message, "..was forked from the one that");
  CHECK_OK(transport->ops->check(transport, &error));
  transport->ops->destroy(transport);
  CHECK_I64(fsdp_alloc_live(), 0);
  CHECK_TEXT(nccl_fake_tape(), "");
#ifndef __SANITIZE_THREAD__ /* which cannot start threads in such a child */
  /* A group of its own works, with a watchdog of its own. */
  const fsdp_nccl_options options = nccl_fixture_quick_options();
  transport = nccl_fixture_join(&options, 0, 2);
  CHECK(fsdp_nccl_priv_has_watchdog());
  CHECK_OK(nccl_fixture_unit(transport, true, &error));
  transport->ops->destroy(transport);
#endif
}

TEST(test_fork) {
  const fsdp_nccl_options options = nccl_fixture_quick_options();
  fsdp_transport *transport = nccl_fixture_join(&options, 0, 2);
  CHECK_OK(nccl_fixture_unit(transport, true, NULL));
  nccl_fake_clear_tape();
  check_in_child(use_after_fork, transport);
  CHECK_OK(nccl_fixture_unit(transport, true, NULL));
  nccl_fixture_leave(transport);
}

typedef struct worker {
  fsdp_transport *transport;
  bool is_reduce;
  fsdp_status status;
} worker;

static void *work(void *argument) {
  worker *self = argument;
  const fsdp_call call = nccl_fixture_call(FSDP_CHANNEL_REDUCE, 2, "sum");
  for (int i = 0; i < 2000 && self->status == FSDP_OK; i++) {
    self->status = self->is_reduce
                       ? self->transport->ops->all_reduce(
                             self->transport, &call, nccl_fixture_memory, 4,
                             NCCL_F32, NULL, NULL)
                       : nccl_fixture_gather(self->transport, "gather", NULL);
  }
  return NULL;
}

/* Gathers and reductions from two threads, the watchdog beside them. */
static void run_threads(bool fails) {
  const fsdp_nccl_options options = nccl_fixture_quick_options();
  fsdp_transport *transport = nccl_fixture_join(&options, 0, 2);
  worker workers[2] = {{transport, false, FSDP_OK}, {transport, true, FSDP_OK}};
  pthread_t threads[2];
  for (int i = 0; i < 2; i++) {
    CHECK(pthread_create(&threads[i], NULL, work, &workers[i]) == 0);
  }
  check_sleep_ms(3);
  if (fails) nccl_fake_set(NCCL_FAKE_ASYNC_ERROR, FSDP_NCCL_REMOTE_ERROR);
  for (int i = 0; i < 2; i++) CHECK(pthread_join(threads[i], NULL) == 0);
  for (int i = 0; i < 2 && !fails; i++) CHECK(workers[i].status == FSDP_OK);
  if (fails) {
    CHECK(nccl_fixture_wait_for_failure(transport, NULL) == FSDP_BACKEND);
  }
  nccl_fixture_leave(transport);
  CHECK_I64(nccl_fake_num(NCCL_FAKE_ABORTS), fails ? 2 : 0);
}

TEST(test_threads) {
  run_threads(false);
  for (int i = 0; i < 5; i++) run_threads(true);
}
