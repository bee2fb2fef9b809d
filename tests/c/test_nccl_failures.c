/*
 * NCCL transport: failures. Each call of NCCL, of the store and of the events
 * fails once; the first error stays, and each communicator ends once.
 */
#include <stdatomic.h>

#include "nccl/nccl_priv.h"
#include "nccl_fixture.h"

/* What a rank does: joins, runs a unit twice. */
static fsdp_status run_script(const fsdp_nccl_options *options,
                              fsdp_transport **transport, fsdp_error *error) {
  const fsdp_nccl_library library = nccl_fake_library();
  const fsdp_store store = nccl_fake_store();
  const fsdp_call call =
      nccl_fixture_call(FSDP_CHANNEL_REDUCE, 1, "all_reduce of unit 'b'");
  fsdp_status status = FSDP_OK;
  FSDP_TRY(fsdp_nccl_create(&library, options, &store, 0, 2, transport, error));
  FSDP_TRY(nccl_fixture_unit(*transport, true, error));
  FSDP_TRY((*transport)
               ->ops->all_reduce(*transport, &call, nccl_fixture_memory, 1,
                                 NCCL_F32, NULL, error));
  FSDP_TRY(nccl_fixture_gather(*transport, "broadcast of 'b'", error));
done:
  return status;
}

/* A transport that failed says so again and again, and touches NCCL no more. */
static void check_stays_failed(fsdp_transport *transport,
                               const fsdp_error *first) {
  fsdp_error error = {0};
  nccl_fake_clear_tape();
  CHECK(nccl_fixture_unit(transport, true, &error) == first->status);
  CHECK_TEXT(error.message, first->message);
  CHECK(nccl_fixture_gather(transport, "another", &error) == first->status);
  CHECK_TEXT(error.message, first->message);
  CHECK(transport->ops->check(transport, &error) == first->status);
  CHECK_TEXT(error.message, first->message);
  CHECK_TEXT(nccl_fake_tape(), "");
}

TEST(test_every_nccl_call_can_fail) {
  const fsdp_nccl_options options = nccl_fixture_options();
  int64_t i = 0;
  for (;; i++) {
    fsdp_transport *transport = NULL;
    fsdp_error error = {0};
    nccl_fake_reset();
    nccl_fake_fail_at(i, FSDP_NCCL_SYSTEM_ERROR, false);
    const fsdp_status status = run_script(&options, &transport, &error);
    if (status == FSDP_OK) {
      nccl_fake_fail_at(-1, 0, false);
      nccl_fixture_leave(transport);
      break;
    }
    CHECK(nccl_fake_has_failed());
    CHECK(status == FSDP_BACKEND && error.status == status);
    CHECK(strstr(error.message, "rank 0 of 2: ") == error.message);
    CHECK(strstr(error.message,
                 "with NCCL result 2 (some error: the wire is cut)") != NULL);
    CHECK_I64(nccl_fake_num_live(), 0); /* aborted, and not only at the end */
    check_stays_failed(transport, &error);
    nccl_fixture_leave(transport);
    CHECK_TEXT(nccl_fake_tape(), "");
  }
  CHECK_I64(i, 14); /* 2 ids, 2 communicators, 2 groups of 4, 2 collectives */
}

/* The question for errors fails, on either communicator; that work is in
 * progress is no error. */
TEST(test_every_poll_can_fail) {
  for (int64_t i = 0; i < FSDP_NUM_CHANNELS; i++) {
    fsdp_transport *transport = nccl_fixture_open(0, 2);
    fsdp_error error = {0};
    nccl_fake_set(NCCL_FAKE_ASYNC_ERROR, FSDP_NCCL_IN_PROGRESS);
    CHECK_OK(transport->ops->check(transport, &error));
    nccl_fake_set(NCCL_FAKE_ASYNC_ERROR, FSDP_NCCL_SUCCESS);
    nccl_fake_fail_at(i, FSDP_NCCL_SYSTEM_ERROR, true);
    CHECK_FAILS(transport->ops->check(transport, &error), FSDP_BACKEND,
                error.message, "..NCCL result 2 (some error");
    CHECK(nccl_fake_has_failed());
    nccl_fixture_leave(transport);
  }
}

TEST(test_what_an_error_says) {
  fsdp_transport *transport = nccl_fixture_open(1, 2);
  fsdp_error error = {0};
  CHECK_OK(nccl_fixture_unit(transport, true, &error));
  nccl_fake_fail_at(6, FSDP_NCCL_REMOTE_ERROR, false);
  CHECK_FAILS(
      nccl_fixture_unit(transport, true, &error), FSDP_BACKEND, error.message,
      "rank 1 of 2: reduce_scatter failed at operation 2 of the reductions "
      "(reduce_scatter of unit 'a') with NCCL result 6 (remote error: the wire "
      "is cut). This rank is at operation 2 of the gathers (all_gather of unit "
      "'a'), operation 2 of the reductions (reduce_scatter of unit 'a'). No "
      "answer from rank 0 within 300 ms.");
  CHECK_TEXT(
      nccl_fake_store_text("p/words/1"),
      "at operation 2 of the gathers (all_gather of unit 'a'), operation "
      "2 of the reductions (reduce_scatter of unit 'a')");
  CHECK(strstr(nccl_fake_store_text("p/failed"), "rank 1 of 2: reduce_sc") !=
        NULL);
  nccl_fixture_leave(transport);
}

/* The check finds the failure; the next call tells what was collected. */
static void fail_fully(fsdp_transport *transport, fsdp_error *error) {
  CHECK(transport->ops->check(transport, error) == FSDP_BACKEND);
  CHECK(nccl_fixture_gather(transport, "late", error) == FSDP_BACKEND);
}

/* The ranks say where they were. */
TEST(test_last_words) {
  const fsdp_nccl_options options = nccl_fixture_options();
  fsdp_transport *ranks[4];
  fsdp_error error = {0};
  nccl_fake_reset();
  for (int64_t i = 0; i < 4; i++) {
    ranks[i] = nccl_fixture_join_next(&options, i, 4);
    CHECK_OK(nccl_fixture_gather(ranks[i], "unit 'a'", &error));
  }
  CHECK_OK(nccl_fixture_gather(ranks[3], "unit 'c'", &error));
  CHECK_OK(nccl_fixture_gather(ranks[0], "unit 'b'", &error));
  CHECK_OK(nccl_fixture_gather(ranks[1], "unit 'b'", &error));
  nccl_fake_set(NCCL_FAKE_ASYNC_ERROR, FSDP_NCCL_REMOTE_ERROR);
  fail_fully(ranks[3], &error);
  CHECK(strstr(error.message, "No answer from rank 0, 1, 2 within 300 ms.") !=
        NULL);
  fail_fully(ranks[0], &error);
  fail_fully(ranks[1], &error);
  CHECK_TEXT(
      error.message,
      "rank 1 of 4: the communicator failed at operation 2 of the gathers "
      "(unit 'b') with NCCL result 6 (remote error: the wire is cut). Rank 3 "
      "is at operation 2 of the gathers (unit 'c'), the start of the "
      "reductions. This rank is at operation 2 of the gathers (unit 'b'), the "
      "start of the reductions, as is 1 other. No answer from rank 2 within "
      "300 ms.");
  CHECK(strstr(nccl_fake_store_text("p/failed"), "rank 3 of 4") != NULL);
  for (int i = 0; i < 3; i++) ranks[i]->ops->destroy(ranks[i]);
  nccl_fixture_leave(ranks[3]);
}

TEST(test_every_store_call_can_fail) {
  const fsdp_nccl_options options = nccl_fixture_options();
  for (int64_t rank = 0; rank < 2; rank++) {
    for (int64_t i = 0; i < 2; i++) {
      fsdp_transport *transport = NULL;
      fsdp_error error = {0};
      nccl_fake_reset();
      nccl_fixture_write_ids();
      nccl_fake_store_fail_at(i);
      transport = nccl_fixture_create(&options, rank, 2);
      CHECK(nccl_fixture_unit(transport, true, &error) == FSDP_BACKEND);
      CHECK(strstr(error.message, rank == 0
                                      ? "rank 0 of 2 cannot write the id"
                                      : "rank 1 of 2 cannot read the id") ==
            error.message);
      CHECK(strstr(error.message, i == 0 ? "'p/id/gather'" : "'p/id/reduce'") !=
            NULL);
      CHECK(strstr(error.message, "injected at store") != NULL);
      check_stays_failed(transport, &error);
      nccl_fixture_leave(transport);
    }
  }
  /* The words after a failure are not essential. */
  for (int64_t i = 0; i < 4; i++) {
    fsdp_error error = {0};
    fsdp_transport *transport = nccl_fixture_join(&options, 0, 2);
    nccl_fake_set(NCCL_FAKE_ASYNC_ERROR, FSDP_NCCL_REMOTE_ERROR);
    nccl_fake_store_fail_at(i);
    CHECK_FAILS(nccl_fixture_gather(transport, NULL, &error), FSDP_BACKEND,
                error.message, "..with NCCL result 6");
    CHECK((strstr(error.message, "does not answer") != NULL) ==
          (i == 0 || i == 2));
    CHECK_I64(nccl_fake_num(NCCL_FAKE_ABORTS), 2);
    nccl_fixture_leave(transport);
  }
}

TEST(test_ids_that_do_not_come) {
  fsdp_nccl_options options = nccl_fixture_options();
  const fsdp_store store = nccl_fake_store();
  fsdp_transport *transport = NULL;
  fsdp_error error = {0};
  options.init_timeout_ms = 100;
  nccl_fake_reset();
  transport = nccl_fixture_create(&options, 1, 2);
  CHECK_FAILS(nccl_fixture_gather(transport, NULL, &error), FSDP_BACKEND,
              error.message,
              "..rank 1 of 2 cannot read the id of a NCCL communicator, key "
              "'p/id/gather' of the group's store, within 100 ms (no key "
              "p/id/gather after ");
  CHECK(strstr(error.message, " ms). Did rank 0") != NULL);
  transport->ops->destroy(transport);
  CHECK_OK(store.set(store.context, "p/id/gather", "short", 5, NULL));
  transport = nccl_fixture_create(&options, 1, 2);
  CHECK_FAILS(nccl_fixture_gather(transport, NULL, &error), FSDP_BACKEND,
              error.message, "..it has 5 bytes instead of 128");
  nccl_fixture_leave(transport);
}

TEST(test_every_event_call_can_fail) {
  const fsdp_nccl_options options = nccl_fixture_options();
  for (int64_t i = 0;; i++) {
    fsdp_transport *transport = NULL;
    fsdp_error error = {0};
    nccl_fake_reset();
    nccl_fake_event_fail_at(i);
    const fsdp_status status = run_script(&options, &transport, &error);
    nccl_fake_event_fail_at(-1);
    if (status == FSDP_OK) {
      CHECK_I64(i, 10); /* 4 launches: created, recorded; 2 asked of before */
      nccl_fixture_leave(transport);
      break;
    }
    CHECK(status == FSDP_BACKEND);
    CHECK(strstr(error.message, "injected at event") == error.message);
    CHECK_I64(nccl_fake_num_live(), 0);
    check_stays_failed(transport, &error);
    nccl_fixture_leave(transport);
  }
}

/* An error that NCCL reports between calls: seen by the next call. */
TEST(test_errors_that_come_later) {
  fsdp_transport *transport = nccl_fixture_open(0, 1);
  fsdp_error error = {0};
  fsdp_error again = {0};
  CHECK_OK(nccl_fixture_gather(transport, "unit 'a'", &error));
  nccl_fake_set(NCCL_FAKE_ASYNC_ERROR, FSDP_NCCL_REMOTE_ERROR);
  CHECK_FAILS(nccl_fixture_gather(transport, "unit 'b'", &error), FSDP_BACKEND,
              error.message,
              "rank 0 of 1: all_gather failed at operation 2 of the gathers "
              "(unit 'b') with NCCL result 6 (remote error: the wire is cut)");
  CHECK(transport->ops->check(transport, &again) == FSDP_BACKEND);
  CHECK_TEXT(again.message, error.message);
  check_stays_failed(transport, &error);
  nccl_fixture_leave(transport);
}

/* A rank that failed ends the others' wait for it; what was being made when
 * they gave up is aborted when NCCL comes out with it. */
TEST(test_another_rank_fails_to_join) {
  const fsdp_store store = nccl_fake_store();
  fsdp_nccl_options options = nccl_fixture_options();
  fsdp_transport *transport = NULL;
  fsdp_error error = {0};
  nccl_fake_reset();
  options.init_timeout_ms = 600000;
  options.poll_ms = 1;
  nccl_fake_set(NCCL_FAKE_INITS_WAIT, true);
  CHECK_OK(
      store.set(store.context, "p/failed", "rank 1 of 2: no memory", 22, NULL));
  transport = nccl_fixture_create(&options, 0, 2);
  CHECK_FAILS(nccl_fixture_gather(transport, NULL, &error), FSDP_BACKEND,
              error.message,
              "..rank 0 of 2 ends because another rank failed: rank 1 of 2: no "
              "memory.");
  CHECK_I64(nccl_fake_num_live(), 1); /* NCCL still has it */
  nccl_fake_set(NCCL_FAKE_INITS_WAIT, false);
  transport->ops->destroy(transport);
  CHECK_I64(nccl_fake_num(NCCL_FAKE_ABORTS), 1);
}

static void release(void *owner) {
  atomic_store((_Atomic bool *)owner, true);
}

/* The same when nobody ever comes; what the stuck thread uses is kept. */
TEST(test_nobody_joins) {
  fsdp_nccl_options options = nccl_fixture_options();
  fsdp_transport *transport = NULL;
  fsdp_error error = {0};
  _Atomic bool is_released = false;
  nccl_fake_reset();
  options.init_timeout_ms = 100;
  options.grace_ms = 0;
  options.release = release;
  options.owner = &is_released;
  nccl_fake_set(NCCL_FAKE_INITS_WAIT, true);
  transport = nccl_fixture_create(&options, 0, 2);
  CHECK_FAILS(nccl_fixture_gather(transport, NULL, &error), FSDP_BACKEND,
              error.message,
              "..rank 0 of 2: ncclCommInitRankConfig on the host is still in "
              "progress after 100 ms, at the start of the gathers: another "
              "rank does not take part");
  transport->ops->destroy(transport);
  CHECK(!atomic_load(&is_released));
  CHECK_I64(nccl_fake_num_live(), 1);
  nccl_fake_set(NCCL_FAKE_INITS_WAIT, false);
  for (int i = 0; i < 10000 && !atomic_load(&is_released); i++) {
    check_sleep_ms(1);
  }
  CHECK(atomic_load(&is_released));
  CHECK_I64(nccl_fake_num(NCCL_FAKE_ABORTS), 1);
}
