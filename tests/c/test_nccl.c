/*
 * NCCL transport: what it gives to NCCL, as text.
 */
#include "every_allocation.h"
#include "nccl/nccl_priv.h"
#include "nccl_fixture.h"

TEST(test_two_communicators) {
  const fsdp_nccl_options options = nccl_fixture_options();
  fsdp_transport *first = nccl_fixture_join(&options, 0, 2);
  CHECK_TEXT(nccl_fake_store_text("p/id/gather"), "id0");
  CHECK_TEXT(nccl_fake_store_text("p/id/reduce"), "id1");
  fsdp_transport *second = nccl_fixture_join_next(&options, 1, 2);
  CHECK_LINES(nccl_fake_tape(),
              "init 0 id0 rank 0/2; init 1 id1 rank 0/2; init 2 id0 rank 1/2; "
              "init 3 id1 rank 1/2");
  CHECK_OK(first->ops->check(first, NULL));
  CHECK(!first->ops->is_host && first->ops->wait == NULL);
  CHECK(strcmp(first->ops->name, "nccl") == 0);

  nccl_fake_clear_tape();
  first->ops->destroy(first);
  CHECK_LINES(nccl_fake_tape(), "finalize 0; destroy 0; finalize 1; destroy 1");
  nccl_fixture_leave(second);
}

/* By default gathers and reductions share one; NCCL runs them in the order of
 * the calls, also from two streams. */
TEST(test_one_communicator) {
  fsdp_nccl_options options = nccl_fixture_options();
  options.splits_channels = false;
  fsdp_transport *transport = nccl_fixture_join(&options, 0, 2);
  CHECK_TEXT(nccl_fake_store_text("p/id/gather"), "id0");
  CHECK_LINES(nccl_fake_tape(), "init 0 id0 rank 0/2");
  nccl_fake_clear_tape();
  CHECK_OK(nccl_fixture_unit(transport, true, NULL));
  CHECK_LINES(nccl_fake_tape(),
              "group_start; all_gather 0 u8 16 +16 +0 s1; "
              "all_gather 0 u8 8 +512 +64 s1; group_end; group_start; "
              "reduce_scatter 0 f32 4 +0 +0 op0 s2; "
              "reduce_scatter 0 f32 2 +64 +64 op0 s2; group_end");
  nccl_fixture_leave(transport);
}

TEST(test_a_position_on_one_communicator) {
  fsdp_nccl_options options = nccl_fixture_quick_options();
  options.splits_channels = false;
  options.timeout_ms = 100;
  options.grace_ms = 0;
  fsdp_transport *transport = nccl_fixture_join(&options, 0, 1);
  fsdp_error error = {0};
  nccl_fake_set(NCCL_FAKE_EVENTS_HELD, true);
  CHECK_OK(nccl_fixture_unit(transport, true, NULL));
  nccl_fixture_wait_for_aborts(1);
  CHECK_FAILS(nccl_fixture_gather(transport, "late", &error), FSDP_BACKEND,
              error.message,
              "rank 0 of 1: operation 1 of the collectives (all_gather of unit "
              "'a') did not end within 100 ms: another rank has not come to "
              "it, or the network does not answer");
  nccl_fixture_leave(transport);
}

/* One launch per unit in forward, two in backward. */
TEST(test_tape_of_a_unit) {
  fsdp_transport *transport = nccl_fixture_open(1, 4);
  fsdp_error error = {0};
  nccl_fake_clear_tape();
  CHECK_OK(nccl_fixture_unit(transport, false, &error));
  CHECK_LINES(nccl_fake_tape(),
              "group_start; all_gather 0 u8 16 +16 +0 s1; "
              "all_gather 0 u8 8 +512 +64 s1; group_end");
  nccl_fake_clear_tape();
  CHECK_OK(nccl_fixture_unit(transport, true, &error));
  CHECK_LINES(nccl_fake_tape(),
              "group_start; all_gather 0 u8 16 +16 +0 s1; "
              "all_gather 0 u8 8 +512 +64 s1; group_end; group_start; "
              "reduce_scatter 1 f32 4 +0 +16 op0 s2; "
              "reduce_scatter 1 f32 2 +64 +72 op0 s2; group_end");
  CHECK_I64(nccl_fake_num_events(), 3); /* one for each launch */
  for (int i = 0; i < 300; i++) {
    CHECK_OK(nccl_fixture_unit(transport, true, &error));
  }
  CHECK_I64(nccl_fake_num_events(), 256); /* used again and again */
  nccl_fixture_leave(transport);
}

TEST(test_single_collectives_need_no_group) {
  fsdp_transport *transport = nccl_fixture_open(1, 2);
  const fsdp_transport_ops *ops = transport->ops;
  const fsdp_call gather = nccl_fixture_call(FSDP_CHANNEL_GATHER, 3, NULL);
  const fsdp_call reduce = nccl_fixture_call(FSDP_CHANNEL_REDUCE, 4, NULL);
  char *memory = nccl_fixture_memory;
  uint64_t ticket = 7;
  nccl_fake_clear_tape();
  /* A dtype that NCCL has no name for, of 2 bytes. */
  const fsdp_dtype int16 = {FSDP_DTYPE_INT16, 2};
  CHECK_OK(ops->all_gather(transport, &gather, memory, memory + 10, 5, int16,
                           &ticket, NULL));
  CHECK_I64((int64_t)ticket, 1);
  CHECK_OK(ops->broadcast(transport, &gather, memory + 8, 3, 1, NCCL_BF16, NULL,
                          NULL));
  CHECK_OK(ops->all_reduce(transport, &reduce, memory + 32, 3, NCCL_BF16, NULL,
                           NULL));
  /* A group of one is no group of NCCL's. */
  CHECK_OK(ops->group_begin(transport, &reduce, NULL));
  CHECK_OK(ops->reduce_scatter(transport, &reduce, memory, 3, NCCL_BF16, NULL,
                               NULL));
  CHECK_OK(ops->group_end(transport, &reduce, NULL));
  CHECK_LINES(nccl_fake_tape(),
              "all_gather 0 u8 10 +10 +0 s3; broadcast 0 u8 6 +8 +8 root1 s3; "
              "all_reduce 1 bf16 3 +32 +32 op0 s4; "
              "reduce_scatter 1 bf16 3 +0 +6 op0 s4");
  nccl_fixture_leave(transport);
}

/* The transport's own events serve whoever waits for a call, while it runs. */
TEST(test_the_end_of_a_call) {
  fsdp_transport *transport = nccl_fixture_open(0, 1);
  const fsdp_transport_ops *ops = transport->ops;
  const fsdp_call call = nccl_fixture_call(FSDP_CHANNEL_GATHER, 1, NULL);
  fsdp_error error = {0};
  uint64_t tickets[300] = {0};
  nccl_fake_set(NCCL_FAKE_EVENTS_HELD, true);
  for (int i = 0; i < 300; i++) {
    CHECK_OK(ops->all_gather(transport, &call, nccl_fixture_memory,
                             nccl_fixture_memory, 1, NCCL_F32, &tickets[i],
                             &error));
  }
  void *newest = ops->end_of(transport, FSDP_CHANNEL_GATHER, tickets[299]);
  CHECK(ops->end_of(transport, FSDP_CHANNEL_GATHER, tickets[0]) != NULL);
  CHECK(ops->end_of(transport, FSDP_CHANNEL_GATHER, tickets[0]) !=
        ops->end_of(transport, FSDP_CHANNEL_GATHER, tickets[1]));
  /* Of the last place, which stands for all that came when it was full. */
  CHECK(newest != NULL);
  CHECK(ops->end_of(transport, FSDP_CHANNEL_GATHER, tickets[126]) != newest);
  CHECK(ops->end_of(transport, FSDP_CHANNEL_GATHER, tickets[127]) == newest);
  CHECK(ops->end_of(transport, FSDP_CHANNEL_GATHER, tickets[200]) == newest);
  /* The oldest one is done, the others not. */
  nccl_fake_set(NCCL_FAKE_EVENTS_HELD, false);
  CHECK_OK(fsdp_nccl_priv_retire(fsdp_nccl_priv_of(transport),
                                 FSDP_CHANNEL_GATHER, 1, &error));
  CHECK(ops->end_of(transport, FSDP_CHANNEL_GATHER, tickets[0]) == NULL);
  CHECK(ops->end_of(transport, FSDP_CHANNEL_GATHER, tickets[1]) != NULL);
  CHECK_OK(fsdp_nccl_priv_retire(fsdp_nccl_priv_of(transport),
                                 FSDP_CHANNEL_GATHER, FSDP_NCCL_MAX_OUTSTANDING,
                                 &error));
  CHECK(ops->end_of(transport, FSDP_CHANNEL_GATHER, tickets[299]) == NULL);
  nccl_fixture_leave(transport);
}

/* Nobody knows the end of a captured call, or without events; one without
 * elements has none. */
TEST(test_calls_without_an_end) {
  fsdp_nccl_options options = nccl_fixture_options();
  fsdp_call call = nccl_fixture_call(FSDP_CHANNEL_GATHER, 1, NULL);
  uint64_t ticket = 7;
  fsdp_transport *transport = nccl_fixture_join(&options, 0, 1);
  CHECK_OK(transport->ops->all_gather(transport, &call, nccl_fixture_memory,
                                      nccl_fixture_memory, 0, NCCL_F32, &ticket,
                                      NULL));
  CHECK_I64((int64_t)ticket, 0);
  call.is_captured = true;
  CHECK_OK(transport->ops->all_gather(transport, &call, nccl_fixture_memory,
                                      nccl_fixture_memory, 8, NCCL_F32, &ticket,
                                      NULL));
  CHECK_I64((int64_t)ticket, 0);
  nccl_fixture_leave(transport);
  options.events = NULL;
  transport = nccl_fixture_join(&options, 0, 1);
  call.is_captured = false;
  CHECK_OK(transport->ops->all_gather(transport, &call, nccl_fixture_memory,
                                      nccl_fixture_memory, 8, NCCL_F32, &ticket,
                                      NULL));
  CHECK_I64((int64_t)ticket, 0);
  nccl_fixture_leave(transport);
}

/* The mean, into the rank's own slot or elsewhere. */
TEST(test_reduce_scatter_to_the_mean) {
  fsdp_transport *transport = nccl_fixture_open(1, 2);
  const fsdp_transport_ops *ops = transport->ops;
  const fsdp_call call = nccl_fixture_call(FSDP_CHANNEL_REDUCE, 4, NULL);
  char *memory = nccl_fixture_memory;
  fsdp_error error = {0};
  nccl_fake_clear_tape();
  CHECK_OK(ops->reduce_scatter_mean(transport, &call, memory + 64, memory, 3,
                                    NCCL_BF16, NULL, &error));
  CHECK_OK(ops->reduce_scatter_mean(transport, &call, memory + 12, memory, 3,
                                    NCCL_F32, NULL, &error));
  CHECK_LINES(nccl_fake_tape(),
              "reduce_scatter 1 bf16 3 +0 +64 op4 s4; "
              "reduce_scatter 1 f32 3 +0 +12 op4 s4");
  nccl_fixture_leave(transport);
}

TEST(test_nothing_to_move) {
  fsdp_transport *transport = nccl_fixture_open(0, 2);
  const fsdp_transport_ops *ops = transport->ops;
  const fsdp_call call = nccl_fixture_call(FSDP_CHANNEL_GATHER, 1, NULL);
  char *memory = nccl_fixture_memory;
  nccl_fake_clear_tape();
  CHECK_OK(ops->all_gather(transport, &call, memory, memory, 0, NCCL_F32, NULL,
                           NULL));
  CHECK_OK(ops->group_begin(transport, &call, NULL));
  CHECK_OK(ops->group_end(transport, &call, NULL));
  CHECK_OK(ops->group_begin(transport, &call, NULL));
  CHECK_OK(ops->all_gather(transport, &call, memory, memory, 0, NCCL_F32, NULL,
                           NULL));
  CHECK_OK(ops->all_gather(transport, &call, memory, memory, 1, NCCL_F32, NULL,
                           NULL));
  CHECK_OK(ops->group_end(transport, &call, NULL));
  CHECK_LINES(nccl_fake_tape(), "all_gather 0 u8 4 +0 +0 s1");
  nccl_fixture_leave(transport);
}

/* NCCL's names of the dtypes that it sums. */
TEST(test_dtypes_of_sums) {
  fsdp_transport *transport = nccl_fixture_open(0, 2);
  const fsdp_call call = nccl_fixture_call(FSDP_CHANNEL_REDUCE, 1, NULL);
  const fsdp_dtype dtypes[] = {
      {FSDP_DTYPE_UINT8, 1},   {FSDP_DTYPE_INT8, 1},    {FSDP_DTYPE_INT32, 4},
      {FSDP_DTYPE_INT64, 8},   {FSDP_DTYPE_FLOAT16, 2}, {FSDP_DTYPE_FLOAT32, 4},
      {FSDP_DTYPE_FLOAT64, 8}, {FSDP_DTYPE_BFLOAT16, 2}};
  nccl_fake_clear_tape();
  for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++) {
    CHECK_OK(transport->ops->reduce_scatter(
        transport, &call, nccl_fixture_memory, 1, dtypes[i], NULL, NULL));
  }
  CHECK_LINES(nccl_fake_tape(),
              "reduce_scatter 1 u8 1 +0 +0 op0 s1; "
              "reduce_scatter 1 i8 1 +0 +0 op0 s1; "
              "reduce_scatter 1 i32 1 +0 +0 op0 s1; "
              "reduce_scatter 1 i64 1 +0 +0 op0 s1; "
              "reduce_scatter 1 f16 1 +0 +0 op0 s1; "
              "reduce_scatter 1 f32 1 +0 +0 op0 s1; "
              "reduce_scatter 1 f64 1 +0 +0 op0 s1; "
              "reduce_scatter 1 bf16 1 +0 +0 op0 s1");
  nccl_fixture_leave(transport);
}

/* A library without what is optional. */
TEST(test_old_library) {
  const fsdp_nccl_options options = nccl_fixture_options();
  fsdp_nccl_library library = nccl_fake_library();
  const fsdp_store store = nccl_fake_store();
  fsdp_transport *transport = NULL;
  fsdp_error error = {0};
  library.api.comm_revoke = NULL;
  library.api.get_last_error = NULL;
  nccl_fake_reset();
  CHECK_OK(
      fsdp_nccl_create(&library, &options, &store, 0, 2, &transport, &error));
  nccl_fixture_connect(transport);
  nccl_fake_set(NCCL_FAKE_ASYNC_ERROR, FSDP_NCCL_REMOTE_ERROR);
  CHECK_FAILS(transport->ops->check(transport, &error), FSDP_BACKEND,
              error.message, "..NCCL result 6 (remote error)");
  nccl_fixture_leave(transport);
}

TEST(test_wrong_arguments) {
  fsdp_transport *transport = nccl_fixture_open(0, 2);
  const fsdp_transport_ops *ops = transport->ops;
  const fsdp_call call = nccl_fixture_call(FSDP_CHANNEL_REDUCE, 1, NULL);
  const fsdp_call other = nccl_fixture_call(FSDP_CHANNEL_REDUCE, 2, NULL);
  const fsdp_call nowhere = nccl_fixture_call(FSDP_NUM_CHANNELS, 1, NULL);
  const fsdp_dtype int16 = {FSDP_DTYPE_INT16, 2};
  char *memory = nccl_fixture_memory;
  fsdp_error error = {0};
  nccl_fake_clear_tape();

  CHECK_FAILS(ops->all_reduce(transport, &call, memory, 1, int16, NULL, &error),
              FSDP_INVALID_ARGUMENT, error.message, "..cannot sum dtype 2");
  CHECK(ops->reduce_scatter(transport, &call, memory, -1, NCCL_F32, NULL,
                            &error) == FSDP_INVALID_ARGUMENT);
  CHECK(ops->all_gather(transport, &call, memory, memory, INT64_MAX / 4,
                        NCCL_F32, NULL, &error) == FSDP_OVERFLOW);
  CHECK(ops->broadcast(transport, &call, memory, 1, 2, NCCL_F32, NULL,
                       &error) == FSDP_INVALID_ARGUMENT);
  CHECK(ops->broadcast(transport, &call, memory, 1, -1, NCCL_F32, NULL,
                       &error) == FSDP_INVALID_ARGUMENT);
  CHECK(ops->group_begin(transport, &nowhere, &error) == FSDP_INVALID_ARGUMENT);
  CHECK(ops->group_end(transport, &call, &error) == FSDP_INVALID_STATE);

  CHECK_OK(ops->group_begin(transport, &call, NULL));
  CHECK_OK(ops->all_reduce(transport, &call, memory, 1, NCCL_F32, NULL, NULL));
  CHECK(ops->all_reduce(transport, &other, memory, 1, NCCL_F32, NULL, &error) ==
        FSDP_INVALID_ARGUMENT);
  CHECK(ops->group_end(transport, &call, &error) == FSDP_INVALID_STATE);
  CHECK_TEXT(nccl_fake_tape(), ""); /* none of it reached NCCL */
  CHECK_OK(ops->check(transport, NULL));
  nccl_fixture_leave(transport);
}

/* Whoever gives up inside a group leaves nothing behind. */
TEST(test_abandoned_group) {
  fsdp_transport *transport = nccl_fixture_open(0, 2);
  const fsdp_transport_ops *ops = transport->ops;
  const fsdp_call call = nccl_fixture_call(FSDP_CHANNEL_GATHER, 1, NULL);
  nccl_fake_clear_tape();
  CHECK_OK(ops->group_begin(transport, &call, NULL));
  CHECK_OK(nccl_fixture_gather(transport, "given up", NULL));
  CHECK_OK(nccl_fixture_unit(transport, false, NULL));
  CHECK_LINES(nccl_fake_tape(),
              "group_start; all_gather 0 u8 16 +16 +0 s1; "
              "all_gather 0 u8 8 +512 +64 s1; group_end");
  nccl_fixture_leave(transport);
}

/* NCCL_COMM_BLOCKING=0 overrides what the transport asks for. */
TEST(test_non_blocking_communicators_are_refused) {
  const fsdp_nccl_options options = nccl_fixture_options();
  nccl_fake_reset();
  nccl_fake_set(NCCL_FAKE_NON_BLOCKING, 1);
  fsdp_transport *transport = nccl_fixture_create(&options, 0, 2);
  fsdp_error error = {0};
  CHECK_FAILS(nccl_fixture_unit(transport, false, &error), FSDP_BACKEND,
              error.message,
              "..NCCL makes communicators that do not block, because of "
              "NCCL_COMM_BLOCKING=0, in the environment or in nccl.conf: "
              "unset it on all ranks.");
  CHECK_I64(nccl_fake_num(NCCL_FAKE_ABORTS), 1);
  CHECK_I64(nccl_fake_num_live(), 0);
  nccl_fixture_leave(transport);
}

/* The tape is `text`, then both aborts, which come side by side. */
static void check_tape_and_aborts(const char *text) {
  char expected[256];
  const char *tape = nccl_fake_tape();
  const bool is_swapped = strstr(tape, "abort 1\nabort 0\n") != NULL;
  (void)snprintf(expected, sizeof expected, "%s%s", text,
                 is_swapped ? "abort 1\nabort 0\n" : "abort 0\nabort 1\n");
  CHECK_TEXT(tape, expected);
}

/* Never hangs, whatever is in flight. */
TEST(test_leaving) {
  fsdp_nccl_options options = nccl_fixture_options();
  options.leave_ms = 20;
  fsdp_transport *transport = nccl_fixture_join(&options, 0, 2);
  CHECK_OK(nccl_fixture_gather(transport, NULL, NULL));
  nccl_fake_set(NCCL_FAKE_EVENTS_HELD, true); /* the device does not end */
  nccl_fake_clear_tape();
  nccl_fixture_leave(transport);
  check_tape_and_aborts("");

  transport = nccl_fixture_join(&options, 0, 2);
  CHECK_OK(nccl_fixture_gather(transport, NULL, NULL));
  nccl_fake_event_fail_at(0); /* nobody knows whether it ends */
  nccl_fake_clear_tape();
  nccl_fixture_leave(transport);
  check_tape_and_aborts("");

  options.leave_ms = 60000;
  transport = nccl_fixture_join(&options, 0, 2);
  nccl_fake_clear_tape();
  nccl_fake_fail_at(0, FSDP_NCCL_SYSTEM_ERROR, false);
  nccl_fixture_leave(transport);
  CHECK_LINES(nccl_fake_tape(), "finalize 0; finalize 1; destroy 1; abort 0");
}

static fsdp_status join_and_run(void *context, fsdp_error *error) {
  const fsdp_nccl_options options = nccl_fixture_options();
  const fsdp_nccl_library library = nccl_fake_library();
  const fsdp_store store = nccl_fake_store();
  const fsdp_call call = nccl_fixture_call(FSDP_CHANNEL_REDUCE, 1, NULL);
  fsdp_transport *transport = NULL;
  (void)context;
  nccl_fake_reset();
  fsdp_status status =
      fsdp_nccl_create(&library, &options, &store, 0, 2, &transport, error);
  CHECK((status == FSDP_OK) == (transport != NULL));
  FSDP_TRY(status);
  FSDP_TRY(nccl_fixture_unit(transport, true, error));
  FSDP_TRY(transport->ops->all_reduce(transport, &call, nccl_fixture_memory, 1,
                                      NCCL_F32, NULL, error));
done:
  if (transport != NULL) {
    CHECK_OK(transport->ops->check(transport, NULL));
    transport->ops->destroy(transport);
  }
  CHECK_I64(nccl_fake_num_live(), 0);
  CHECK_I64(nccl_fake_num_events(), 0);
  CHECK_LACKS(nccl_fake_tape(), "WRONG");
  return status;
}

TEST(test_every_allocation_can_fail) {
  /* The transport, its prefix, 2 groups. */
  CHECK_I64(every_allocation(join_and_run, NULL), 4);
}

TEST(test_options_are_checked) {
  const fsdp_nccl_library library = nccl_fake_library();
  const fsdp_store store = nccl_fake_store();
  fsdp_nccl_options options = nccl_fixture_options();
  fsdp_transport *transport = NULL;
  fsdp_error error = {0};
  char prefix[400];
  nccl_fake_reset();
  CHECK(fsdp_nccl_create(&library, &options, &store, 2, 2, &transport,
                         &error) == FSDP_INVALID_ARGUMENT);
  CHECK(fsdp_nccl_create(&library, &options, &store, 0, 0, &transport,
                         &error) == FSDP_INVALID_ARGUMENT);
  options.timeout_ms = -1;
  CHECK_FAILS(
      fsdp_nccl_create(&library, &options, &store, 0, 2, &transport, &error),
      FSDP_INVALID_ARGUMENT, error.message, "..operation -1");
  options.timeout_ms = 0;
  options.init_timeout_ms = 0;
  CHECK(fsdp_nccl_create(&library, &options, &store, 0, 2, &transport,
                         &error) == FSDP_INVALID_ARGUMENT);
  options.init_timeout_ms = 1;
  memset(prefix, 'x', sizeof prefix);
  prefix[sizeof prefix - 1] = 0;
  options.prefix = prefix;
  CHECK(fsdp_nccl_create(&library, &options, &store, 0, 2, &transport,
                         &error) == FSDP_INVALID_ARGUMENT);
  options.prefix = NULL;
  CHECK(fsdp_nccl_create(&library, &options, &store, 0, 2, &transport,
                         &error) == FSDP_INVALID_ARGUMENT);
  CHECK(transport == NULL);
  CHECK_TEXT(nccl_fake_tape(), "");
}
