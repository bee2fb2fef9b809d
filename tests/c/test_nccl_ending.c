/*
 * NCCL transport: how it ends when something else is stuck too - another
 * communicator's abort, the store, a thread inside NCCL, a leaked model. Run
 * under ThreadSanitizer, too (make tsan).
 */
#include <pthread.h>
#include <stdlib.h>

#include "base/alloc.h"
#include "nccl/nccl_priv.h"
#include "nccl_fixture.h"

static fsdp_nccl_options quick_options(void) {
  fsdp_nccl_options options = nccl_fixture_quick_options();
  options.timeout_ms = 100;
  return options;
}

/* Each abort waits for the other one's kernel to end. */
TEST(test_aborts_that_wait_for_each_other) {
  const fsdp_nccl_options options = quick_options();
  fsdp_transport *transport = nccl_fixture_join(&options, 0, 1);
  fsdp_error error = {0};
  nccl_fake_set(NCCL_FAKE_ABORTS_AWAITED, 2);
  nccl_fake_set(NCCL_FAKE_EVENTS_HELD, true);
  nccl_fake_hold_watchdog(true);
  CHECK_OK(nccl_fixture_unit(transport, true, &error));
  nccl_fake_hold_watchdog(false);
  nccl_fixture_wait_for_aborts(2);
  CHECK_FAILS(nccl_fixture_gather(transport, "late", &error), FSDP_BACKEND,
              error.message, "..did not end within 100 ms");
  nccl_fixture_leave(transport);
}

/* Also where nothing but a graph launches collectives. */
TEST(test_a_replay_that_hangs) {
  const fsdp_nccl_options options = quick_options();
  fsdp_transport *transport = nccl_fixture_join(&options, 0, 1);
  fsdp_error error = {0};
  nccl_fake_set(NCCL_FAKE_EVENTS_HELD, true);
  CHECK_OK(fsdp_nccl_watch_replay(transport, NULL, &error));
  nccl_fixture_wait_for_aborts(2);
  CHECK_FAILS(nccl_fixture_gather(transport, "late", &error), FSDP_BACKEND,
              error.message,
              "..(replay of a captured step) did not end within 100 ms");
  nccl_fixture_leave(transport);
}

/* Of several groups, as shards and replicas are: the watchdog does not wait in
 * the one for the other. */
TEST(test_two_groups_that_hang) {
  const fsdp_nccl_options options = quick_options();
  fsdp_nccl_options other_options = quick_options();
  other_options.timeout_ms = 400;
  other_options.prefix = "q";
  fsdp_transport *first = nccl_fixture_join(&options, 0, 1);
  fsdp_transport *second = nccl_fixture_join_next(&other_options, 0, 1);
  fsdp_error error = {0};
  nccl_fake_set(NCCL_FAKE_ABORTS_AWAITED, 4);
  nccl_fake_set(NCCL_FAKE_EVENTS_HELD, true);
  nccl_fake_hold_watchdog(true);
  CHECK_OK(nccl_fixture_gather(first, "unit 'a'", &error));
  CHECK_OK(nccl_fixture_gather(second, "unit 'b'", &error));
  nccl_fake_hold_watchdog(false);
  nccl_fixture_wait_for_aborts(4);
  CHECK_FAILS(nccl_fixture_gather(second, "late", &error), FSDP_BACKEND,
              error.message, "..(unit 'b') did not end within 400 ms");
  first->ops->destroy(first);
  nccl_fixture_leave(second);
}

/* A store that does not answer keeps nobody from ending: aborts come first, and
 * other groups are watched as usual. */
TEST(test_store_that_hangs) {
  const fsdp_nccl_options options = quick_options();
  fsdp_nccl_options other_options = quick_options();
  other_options.timeout_ms = 1500; /* after it looked at others */
  fsdp_transport *first = nccl_fixture_join(&options, 0, 2);
  fsdp_transport *second = nccl_fixture_join_next(&other_options, 1, 2);
  fsdp_error error = {0};
  nccl_fake_set(NCCL_FAKE_STORE_HELD, true);
  nccl_fake_set(NCCL_FAKE_EVENTS_HELD, true);
  nccl_fake_hold_watchdog(true);
  CHECK_OK(nccl_fixture_gather(first, "unit 'a'", &error));
  CHECK_OK(nccl_fixture_gather(second, "unit 'a'", &error));
  nccl_fake_hold_watchdog(false);
  nccl_fixture_wait_for_aborts(4);
  CHECK_FAILS(nccl_fixture_gather(first, "late", &error), FSDP_BACKEND,
              error.message, "..did not end within 100 ms");
  nccl_fake_set(NCCL_FAKE_STORE_HELD, false);
  first->ops->destroy(first);
  nccl_fixture_leave(second);
}

/* Nor does one that hangs while a communicator is made. */
TEST(test_store_that_hangs_at_the_start) {
  fsdp_nccl_options options = quick_options();
  options.init_timeout_ms = 100;
  options.grace_ms = 0;
  for (int64_t rank = 0; rank < 2; rank++) {
    fsdp_transport *transport = NULL;
    fsdp_error error = {0};
    nccl_fake_reset();
    nccl_fake_set(NCCL_FAKE_STORE_HELD, true);
    transport = nccl_fixture_create(&options, rank, 2);
    CHECK_FAILS(nccl_fixture_gather(transport, "unit 'a'", &error),
                FSDP_BACKEND, error.message,
                "..: the exchange of a communicator's id on the host is still "
                "in progress after 100 ms");
    transport->ops->destroy(transport);
    nccl_fake_set(NCCL_FAKE_STORE_HELD, false);
    nccl_fixture_check_nothing_lives();
  }
}

/* The transport may go while its threads are stuck in the store. */
TEST(test_destroyed_while_the_store_hangs) {
  fsdp_nccl_options options = quick_options();
  options.grace_ms = 0;
  fsdp_transport *transport = nccl_fixture_join(&options, 0, 2);
  nccl_fake_set(NCCL_FAKE_STORE_HELD, true);
  nccl_fake_set(NCCL_FAKE_ASYNC_ERROR, FSDP_NCCL_REMOTE_ERROR);
  nccl_fixture_wait_for_aborts(2);
  transport->ops->destroy(transport);
  nccl_fake_set(NCCL_FAKE_STORE_HELD, false);
  nccl_fixture_check_nothing_lives();
}

/* As many questions about 4096 ranks as about 65, and all in the grace. */
TEST(test_last_words_of_many_ranks) {
  const int64_t world_sizes[] = {65, 4096};
  for (int i = 0; i < 2; i++) {
    const fsdp_nccl_options options = quick_options();
    fsdp_transport *transport = nccl_fixture_join(&options, 0, world_sizes[i]);
    fsdp_error error = {0};
    const int64_t before = nccl_fake_num(NCCL_FAKE_STORE_CALLS);
    const int64_t begin_ms = fsdp_nccl_priv_now_ms();
    nccl_fake_set(NCCL_FAKE_ASYNC_ERROR, FSDP_NCCL_REMOTE_ERROR);
    CHECK_FAILS(nccl_fixture_gather(transport, "unit 'a'", &error),
                FSDP_BACKEND, error.message,
                "..No answer from rank 1, 2, 3, 4, 5, 6, 7, 8 and more within "
                "300 ms. Ranks from 64 on were not asked.");
    /* 3 to publish; rounds of 63 after 0, 5, 15, 35, 75, 155, 300 ms. */
    CHECK(nccl_fake_num(NCCL_FAKE_STORE_CALLS) - before <= 3 + 7 * 63);
    CHECK(fsdp_nccl_priv_now_ms() - begin_ms < 300 + 4000);
    nccl_fixture_leave(transport);
  }
}

/* A thread that NCCL does not let go, with nothing else in flight: the host
 * waits for a peer's connection. */
TEST(test_launch_that_hangs) {
  const fsdp_nccl_options options = quick_options();
  nccl_fixture_gather_thread call = {0};
  call.transport = nccl_fixture_join(&options, 0, 1);
  nccl_fake_set(NCCL_FAKE_BLOCKING, true);
  nccl_fake_hold_watchdog(true);
  nccl_fixture_start_gather(&call, "all_gather");
  nccl_fake_hold_watchdog(false);
  nccl_fixture_join_gather(&call, FSDP_BACKEND);
  CHECK_TEXT(call.error.message,
             "rank 0 of 1: all_gather on the host is still in progress after "
             "100 ms, at operation 1 of the gathers (unit 'b'): another rank "
             "does not take part");
  nccl_fixture_leave(call.transport);
}

/* NCCL refuses a launch beside another thread's, so it waits until the one that
 * hangs is ended. */
TEST(test_launch_beside_one_that_hangs) {
  const fsdp_nccl_options options = quick_options();
  fsdp_nccl_options next_options = nccl_fixture_quick_options();
  next_options.prefix = "q";
  nccl_fixture_gather_thread call = {0};
  fsdp_error error = {0};
  call.transport = nccl_fixture_join(&options, 0, 1);
  fsdp_transport *next = nccl_fixture_join_next(&next_options, 0, 1);
  nccl_fake_set(NCCL_FAKE_BLOCKING, true);
  nccl_fixture_start_gather(&call, "all_gather");
  nccl_fake_set(NCCL_FAKE_BLOCKING, false); /* for the next one */
  CHECK_OK(nccl_fixture_gather(next, "unit 'c'", &error));
  nccl_fixture_join_gather(&call, FSDP_BACKEND);
  call.transport->ops->destroy(call.transport);
  nccl_fixture_leave(next);
}

/* ---- The end of the process -----------------------------------------------*/

static void leave_all_with_leaks(void *context) {
  (void)context;
  fsdp_nccl_options options = nccl_fixture_options();
  options.poll_ms = 1;
  fsdp_nccl_options other_options = options;
  other_options.prefix = "q";
  const fsdp_nccl_library library = nccl_fake_library();
  const fsdp_store store = nccl_fake_store();
  fsdp_transport *idle = nccl_fixture_join(&options, 0, 1);
  fsdp_transport *hanging = nccl_fixture_join_next(&other_options, 0, 1);
  fsdp_transport *late = NULL;
  fsdp_error error = {0};
  CHECK_OK(nccl_fixture_unit(idle, true, &error));
  fsdp_nccl_leave_all();
  CHECK(!fsdp_nccl_priv_has_watchdog());
  CHECK_I64(nccl_fake_num_live(), 0);
  CHECK_I64(nccl_fake_num(NCCL_FAKE_ABORTS), 0);
  CHECK_FAILS(nccl_fixture_gather(idle, "late", &error), FSDP_INVALID_STATE,
              error.message,
              "rank 0 of 1: the process ends and has left its NCCL groups, "
              "nothing can be gathered or reduced any more");
  CHECK(idle->ops->check(idle, &error) == FSDP_INVALID_STATE);
  CHECK_FAILS(fsdp_nccl_create(&library, &options, &store, 0, 1, &late, &error),
              FSDP_BACKEND, error.message, "..the process ends");
  fsdp_nccl_leave_all();
  idle->ops->destroy(idle); /* a model that goes later still */
  nccl_fixture_leave(hanging);
  CHECK_I64(fsdp_alloc_live(), 0);
}

static void leave_all_that_hang(void *context) {
  (void)context;
  fsdp_nccl_options options = nccl_fixture_options();
  options.leave_ms = 50;
  nccl_fixture_gather_thread call = {0};
  call.transport = nccl_fixture_join(&options, 0, 1);
  nccl_fake_set(NCCL_FAKE_BLOCKING, true);
  nccl_fixture_start_gather(&call, "all_gather");
  fsdp_nccl_leave_all(); /* under the call */
  CHECK_I64(nccl_fake_num_live(), 0);
  nccl_fixture_join_gather(&call, FSDP_INVALID_STATE);
  nccl_fixture_leave(call.transport);

  nccl_fake_set(NCCL_FAKE_BLOCKING, false);
}

/* ncclCommInitRankConfig does not return: the caller has its error, the next
 * group works, and the process ends. */
static void leave_all_that_never_joined(void *context) {
  (void)context;
  fsdp_nccl_options options = nccl_fixture_options();
  fsdp_nccl_options next_options = options;
  fsdp_error error = {0};
  nccl_fake_reset();
  options.init_timeout_ms = 100;
  options.grace_ms = 0;
  next_options.prefix = "q";
  nccl_fake_set(NCCL_FAKE_INITS_WAIT, 1);
  fsdp_transport *stuck = nccl_fixture_create(&options, 0, 2);
  CHECK_FAILS(nccl_fixture_gather(stuck, NULL, &error), FSDP_BACKEND,
              error.message,
              "..ncclCommInitRankConfig on the host is still in progress after "
              "100 ms");
  fsdp_transport *next = nccl_fixture_create(&next_options, 0, 2);
  CHECK_OK(nccl_fixture_unit(next, true, &error));
  stuck->ops->destroy(stuck);
  CHECK_OK(nccl_fixture_unit(next, true, &error));
  CHECK_I64(nccl_fake_num_live(), 3);
  fsdp_nccl_leave_all();
  CHECK(!fsdp_nccl_priv_has_watchdog());
  CHECK_I64(nccl_fake_num_live(), 1); /* NCCL still has it */
  CHECK_LACKS(nccl_fake_tape(), "WRONG");
  next->ops->destroy(next);
}

/* The same while the caller still waits, in another thread. */
static void leave_all_that_joins(void *context) {
  (void)context;
  const fsdp_nccl_options options = nccl_fixture_options();
  nccl_fixture_gather_thread call = {0};
  nccl_fake_reset();
  nccl_fake_set(NCCL_FAKE_INITS_WAIT, 1);
  call.transport = nccl_fixture_create(&options, 0, 2);
  nccl_fixture_start_gather(&call, "init 0");
  fsdp_nccl_leave_all();
  nccl_fixture_join_gather(&call, FSDP_INVALID_STATE);
  nccl_fake_set(NCCL_FAKE_INITS_WAIT, 0);
  nccl_fixture_leave(call.transport); /* aborted: nobody wants it any more */
  CHECK_I64(nccl_fake_num(NCCL_FAKE_ABORTS), 1);
}

static void leave_all_in_flight(void *context) {
  (void)context;
  fsdp_nccl_options options = nccl_fixture_options();
  options.leave_ms = 50;
  fsdp_transport *transport = nccl_fixture_join(&options, 0, 1);
  nccl_fake_set(NCCL_FAKE_EVENTS_HELD, true);
  CHECK_OK(nccl_fixture_unit(transport, true, NULL));
  fsdp_nccl_leave_all();
  CHECK_I64(nccl_fake_num(NCCL_FAKE_ABORTS), 2);
  nccl_fixture_leave(transport);
}

/* ---- Operations that end one after another ------------------------------- */

enum { PACE_MS = 300, NUM_PACED = 5 };

static int64_t g_last_end_ms;

static fsdp_status make_paced(void *context, void **event, fsdp_error *error) {
  (void)context;
  *event = calloc(1, sizeof(int64_t));
  return *event == NULL ? FSDP_FAIL(error, FSDP_OUT_OF_MEMORY, "event")
                        : FSDP_OK;
}

static void free_paced(void *context, void *event) {
  (void)context;
  free(event);
}

static fsdp_status record_paced(void *context, void *event, void *stream,
                                fsdp_error *error) {
  (void)context;
  (void)stream;
  (void)error;
  const int64_t now_ms = fsdp_nccl_priv_now_ms();
  if (g_last_end_ms < now_ms) g_last_end_ms = now_ms;
  g_last_end_ms += PACE_MS;
  *(int64_t *)event = g_last_end_ms;
  return FSDP_OK;
}

static fsdp_status query_paced(void *context, void *event, bool *is_done,
                               fsdp_error *error) {
  (void)context;
  (void)error;
  *is_done = fsdp_nccl_priv_now_ms() >= *(int64_t *)event;
  return FSDP_OK;
}

/* They take longer than leave_ms in total, none of them does. */
TEST(test_leaving_waits_for_what_goes_on) {
  const fsdp_nccl_events events = {.create = make_paced,
                                   .destroy = free_paced,
                                   .record = record_paced,
                                   .query = query_paced};
  fsdp_nccl_options options = nccl_fixture_options();
  nccl_fake_reset();
  options.events = &events;
  options.leave_ms = PACE_MS * (NUM_PACED - 1);
  fsdp_transport *transport = nccl_fixture_join(&options, 0, 2);
  for (int i = 0; i < NUM_PACED; i++) {
    CHECK_OK(nccl_fixture_gather(transport, NULL, NULL));
  }
  nccl_fixture_leave(transport);
  CHECK(fsdp_nccl_priv_now_ms() >= g_last_end_ms);
  CHECK_I64(nccl_fake_num(NCCL_FAKE_ABORTS), 0);
}

/* A thread that waits for them in NCCL keeps its communicator. */
TEST(test_leaving_with_live_graphs) {
  fsdp_nccl_options options = nccl_fixture_options();
  nccl_fake_reset();
  options.leave_ms = 50;
  options.grace_ms = 0;
  fsdp_transport *transport = nccl_fixture_join(&options, 0, 2);
  nccl_fake_set(NCCL_FAKE_GRAPHS_LIVE, 1);
  transport->ops->destroy(transport);
  CHECK_LACKS(nccl_fake_tape(), "abort 0");
  nccl_fake_set(NCCL_FAKE_GRAPHS_LIVE, 0);
  nccl_fixture_wait_for_tape("destroy 0");
  nccl_fixture_check_nothing_lives();
  CHECK_LACKS(nccl_fake_tape(), "WRONG");
}

/* Each in a child: it is the last act of a process. */
TEST(test_end_of_the_process) {
  check_in_child(leave_all_with_leaks, NULL);
  check_in_child(leave_all_that_hang, NULL);
  check_in_child(leave_all_in_flight, NULL);
  check_in_child(leave_all_that_never_joined, NULL);
  check_in_child(leave_all_that_joins, NULL);
}
