/*
 * NCCL transport: what it gives to NCCL, as text.
 */
#include "base/alloc.h"
#include "nccl_fixture.h"

static void leave(fsdp_transport *transport) {
  transport->ops->destroy(transport);
  CHECK_I64(nccl_fake_num_live(), 0);
  CHECK_I64(nccl_fake_num_events(), 0);
  CHECK_I64(fsdp_alloc_live(), 0);
  CHECK(strstr(nccl_fake_tape(), "WRONG") == NULL);
}

TEST(test_two_communicators) {
  const fsdp_nccl_options options = nccl_fixture_options();
  fsdp_transport *first = nccl_fixture_join(&options, 0, 2);
  CHECK_TEXT(nccl_fake_store_text("p/id/gather"), "id0");
  CHECK_TEXT(nccl_fake_store_text("p/id/reduce"), "id1");
  fsdp_transport *second = nccl_fixture_join_next(&options, 1, 2);
  CHECK_TEXT(nccl_fake_tape(),
             "init 0 id0 rank 0/2\n"
             "init 1 id1 rank 0/2\n"
             "init 2 id0 rank 1/2\n"
             "init 3 id1 rank 1/2\n");
  CHECK(first->ops->check(first, NULL) == FSDP_OK);
  CHECK(!first->ops->is_host && first->ops->wait == NULL);
  CHECK(strcmp(first->ops->name, "nccl") == 0);

  nccl_fake_clear_tape();
  first->ops->destroy(first);
  CHECK_TEXT(nccl_fake_tape(),
             "finalize 0\ndestroy 0\nfinalize 1\ndestroy 1\n");
  leave(second);
}

/* One launch per unit in forward, two in backward. */
TEST(test_tape_of_a_unit) {
  const fsdp_nccl_options options = nccl_fixture_options();
  fsdp_transport *transport = nccl_fixture_join(&options, 1, 4);
  fsdp_error error = {0};
  nccl_fake_clear_tape();
  CHECK(nccl_fixture_unit(transport, false, &error) == FSDP_OK);
  CHECK_TEXT(nccl_fake_tape(),
             "group_start\n"
             "all_gather 0 u8 16 +16 +0 s1\n"
             "all_gather 0 u8 8 +512 +64 s1\n"
             "group_end\n");
  nccl_fake_clear_tape();
  CHECK(nccl_fixture_unit(transport, true, &error) == FSDP_OK);
  CHECK_TEXT(nccl_fake_tape(),
             "group_start\n"
             "all_gather 0 u8 16 +16 +0 s1\n"
             "all_gather 0 u8 8 +512 +64 s1\n"
             "group_end\n"
             "group_start\n"
             "reduce_scatter 1 f32 4 +0 +16 op0 s2\n"
             "reduce_scatter 1 f32 2 +64 +72 op4 s2\n"
             "group_end\n");
  CHECK_I64(nccl_fake_num_events(), 3); /* one for each launch */
  for (int i = 0; i < 300; i++) {
    CHECK(nccl_fixture_unit(transport, true, &error) == FSDP_OK);
  }
  CHECK_I64(nccl_fake_num_events(), 256); /* used again and again */
  leave(transport);
}

TEST(test_single_collectives_need_no_group) {
  const fsdp_nccl_options options = nccl_fixture_options();
  fsdp_transport *transport = nccl_fixture_join(&options, 1, 2);
  const fsdp_transport_ops *ops = transport->ops;
  const fsdp_call gather = nccl_fixture_call(FSDP_CHANNEL_GATHER, 3, NULL);
  const fsdp_call reduce = nccl_fixture_call(FSDP_CHANNEL_REDUCE, 4, NULL);
  char *memory = nccl_fixture_memory;
  uint64_t ticket = 7;
  nccl_fake_clear_tape();
  /* A dtype that NCCL has no name for, of 2 bytes. */
  const fsdp_dtype int16 = {FSDP_DTYPE_INT16, 2};
  CHECK(ops->all_gather(transport, &gather, memory, memory + 10, 5, int16,
                        &ticket, NULL) == FSDP_OK);
  CHECK_I64((int64_t)ticket, 0);
  CHECK(ops->broadcast(transport, &gather, memory + 8, 3, 1, NCCL_BF16, NULL,
                       NULL) == FSDP_OK);
  CHECK(ops->all_reduce(transport, &reduce, memory + 32, 3, NCCL_BF16, 0.5,
                        NULL, NULL) == FSDP_OK);
  /* A group of one is no group of NCCL's. */
  CHECK(ops->group_begin(transport, &reduce, NULL) == FSDP_OK);
  CHECK(ops->reduce_scatter(transport, &reduce, memory, 3, NCCL_BF16, 1, NULL,
                            NULL) == FSDP_OK);
  CHECK(ops->group_end(transport, &reduce, NULL) == FSDP_OK);
  CHECK_TEXT(nccl_fake_tape(),
             "all_gather 0 u8 10 +10 +0 s3\n"
             "broadcast 0 u8 6 +8 +8 root1 s3\n"
             "all_reduce 1 bf16 3 +32 +32 op4 s4\n"
             "reduce_scatter 1 bf16 3 +0 +6 op0 s4\n");
  leave(transport);
}

TEST(test_nothing_to_move) {
  const fsdp_nccl_options options = nccl_fixture_options();
  fsdp_transport *transport = nccl_fixture_join(&options, 0, 2);
  const fsdp_transport_ops *ops = transport->ops;
  const fsdp_call call = nccl_fixture_call(FSDP_CHANNEL_GATHER, 1, NULL);
  char *memory = nccl_fixture_memory;
  nccl_fake_clear_tape();
  CHECK(ops->all_gather(transport, &call, memory, memory, 0, NCCL_F32, NULL,
                        NULL) == FSDP_OK);
  CHECK(ops->group_begin(transport, &call, NULL) == FSDP_OK);
  CHECK(ops->group_end(transport, &call, NULL) == FSDP_OK);
  CHECK(ops->group_begin(transport, &call, NULL) == FSDP_OK);
  CHECK(ops->all_gather(transport, &call, memory, memory, 0, NCCL_F32, NULL,
                        NULL) == FSDP_OK);
  CHECK(ops->all_gather(transport, &call, memory, memory, 1, NCCL_F32, NULL,
                        NULL) == FSDP_OK);
  CHECK(ops->group_end(transport, &call, NULL) == FSDP_OK);
  CHECK_TEXT(nccl_fake_tape(), "all_gather 0 u8 4 +0 +0 s1\n");
  leave(transport);
}

TEST(test_scaled_sums) {
  const fsdp_nccl_options options = nccl_fixture_options();
  fsdp_transport *transport = nccl_fixture_join(&options, 0, 4);
  const fsdp_transport_ops *ops = transport->ops;
  const fsdp_call call = nccl_fixture_call(FSDP_CHANNEL_REDUCE, 1, NULL);
  const fsdp_dtype f16 = {FSDP_DTYPE_FLOAT16, 2};
  char *memory = nccl_fixture_memory;
  const struct {
    fsdp_dtype dtype;
    double scale;
  } calls[] = {{NCCL_F32, 1},       {NCCL_F32, 0.25},   {NCCL_F32, 1.0 / 3},
               {NCCL_F32, 1.0 / 3}, {NCCL_BF16, 0.125}, {f16, 0.125},
               {NCCL_BF16, 0.125},  {f16, -1.5}};
  nccl_fake_clear_tape();
  for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
    CHECK(ops->all_reduce(transport, &call, memory, 1, calls[i].dtype,
                          calls[i].scale, NULL, NULL) == FSDP_OK);
  }
  CHECK_TEXT(nccl_fake_tape(),
             "all_reduce 1 f32 1 +0 +0 op0 s1\n"
             "all_reduce 1 f32 1 +0 +0 op4 s1\n"
             "red_op 1 op5 f32 3eaaaaab\n"
             "all_reduce 1 f32 1 +0 +0 op5 s1\n"
             "all_reduce 1 f32 1 +0 +0 op5 s1\n"
             "red_op 1 op6 bf16 3e00\n"
             "all_reduce 1 bf16 1 +0 +0 op6 s1\n"
             "red_op 1 op7 f16 3000\n"
             "all_reduce 1 f16 1 +0 +0 op7 s1\n"
             "all_reduce 1 bf16 1 +0 +0 op6 s1\n"
             "red_op 1 op8 f16 be00\n"
             "all_reduce 1 f16 1 +0 +0 op8 s1\n");
  nccl_fake_clear_tape();
  leave(transport);
  CHECK_TEXT(nccl_fake_tape(),
             "finalize 0\ndestroy 0\n"
             "red_op_destroy 1 op5\nred_op_destroy 1 op6\n"
             "red_op_destroy 1 op7\nred_op_destroy 1 op8\n"
             "finalize 1\ndestroy 1\n");
}

/* NCCL's names of the dtypes that it sums. */
TEST(test_dtypes_of_sums) {
  const fsdp_nccl_options options = nccl_fixture_options();
  fsdp_transport *transport = nccl_fixture_join(&options, 0, 2);
  const fsdp_call call = nccl_fixture_call(FSDP_CHANNEL_REDUCE, 1, NULL);
  const fsdp_dtype dtypes[] = {
      {FSDP_DTYPE_UINT8, 1},   {FSDP_DTYPE_INT8, 1},    {FSDP_DTYPE_INT32, 4},
      {FSDP_DTYPE_INT64, 8},   {FSDP_DTYPE_FLOAT16, 2}, {FSDP_DTYPE_FLOAT32, 4},
      {FSDP_DTYPE_FLOAT64, 8}, {FSDP_DTYPE_BFLOAT16, 2}};
  nccl_fake_clear_tape();
  for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++) {
    CHECK(transport->ops->reduce_scatter(transport, &call, nccl_fixture_memory,
                                         1, dtypes[i], 1, NULL,
                                         NULL) == FSDP_OK);
  }
  CHECK_TEXT(nccl_fake_tape(),
             "reduce_scatter 1 u8 1 +0 +0 op0 s1\n"
             "reduce_scatter 1 i8 1 +0 +0 op0 s1\n"
             "reduce_scatter 1 i32 1 +0 +0 op0 s1\n"
             "reduce_scatter 1 i64 1 +0 +0 op0 s1\n"
             "reduce_scatter 1 f16 1 +0 +0 op0 s1\n"
             "reduce_scatter 1 f32 1 +0 +0 op0 s1\n"
             "reduce_scatter 1 f64 1 +0 +0 op0 s1\n"
             "reduce_scatter 1 bf16 1 +0 +0 op0 s1\n");
  leave(transport);
}

TEST(test_scales_that_are_exact) {
  const fsdp_nccl_options options = nccl_fixture_options();
  fsdp_transport *transport = nccl_fixture_join(&options, 0, 3);
  const fsdp_dtype f16 = {FSDP_DTYPE_FLOAT16, 2};
  const fsdp_dtype f64 = {FSDP_DTYPE_FLOAT64, 8};
  const fsdp_dtype i32 = {FSDP_DTYPE_INT32, 4};
  const fsdp_dtype boolean = {FSDP_DTYPE_BOOL, 1};
  const struct {
    fsdp_dtype dtype;
    double scale;
    bool can;
  } facts[] = {
      {NCCL_F32, 1.0 / 3, true},
      {f64, 1.0 / 3, true},
      {NCCL_F32, 1.0 / 7, true},
      {NCCL_BF16, 1.0 / 3, false},
      {f16, 1.0 / 3, false},
      {NCCL_BF16, 1.0 / 1024, true},
      {f16, 1.0 / 16384, true},
      {f16, 1.0 / 32768, false},
      {f16, 1 + 1.0 / 1024, true},
      {f16, 1 + 1.0 / 2048, false},
      {NCCL_BF16, 1 + 1.0 / 128, true},
      {NCCL_BF16, 1 + 1.0 / 256, false},
      {f16, 65536, false},
      {i32, 1, true},
      {i32, 2, false},
      {i32, 1.0 / 3, false},
      {boolean, 1, false},
      {f16, 0, false},
      {NCCL_F32, 1.0 / 0.0, false},
  };
  for (size_t i = 0; i < sizeof facts / sizeof facts[0]; i++) {
    const bool can =
        fsdp_nccl_can_scale(transport, facts[i].dtype, facts[i].scale);
    if (!CHECK(can == facts[i].can)) printf("  fact %zu\n", i);
  }
  leave(transport);
}

/* A library without pre-multiplied sums: averages only. */
TEST(test_old_library) {
  const fsdp_nccl_options options = nccl_fixture_options();
  fsdp_nccl_library library = nccl_fake_library();
  const fsdp_store store = nccl_fake_store();
  fsdp_transport *transport = NULL;
  fsdp_error error = {0};
  library.api.red_op_create_pre_mul_sum = NULL;
  library.api.red_op_destroy = NULL;
  library.api.comm_register = NULL;
  library.api.comm_deregister = NULL;
  library.api.comm_revoke = NULL;
  library.api.get_last_error = NULL;
  nccl_fake_reset();
  CHECK(fsdp_nccl_create(&library, &options, &store, 0, 2, &transport,
                         &error) == FSDP_OK);
  nccl_fixture_connect(transport);
  CHECK(fsdp_nccl_can_scale(transport, NCCL_F32, 0.5));
  CHECK(!fsdp_nccl_can_scale(transport, NCCL_F32, 0.25));
  nccl_fake_clear_tape();
  CHECK(fsdp_nccl_register(transport, nccl_fixture_memory, 64, &error) ==
        FSDP_OK);
  fsdp_nccl_deregister(transport, nccl_fixture_memory);
  CHECK_TEXT(nccl_fake_tape(), "");
  nccl_fake_set_async_error(FSDP_NCCL_REMOTE_ERROR);
  CHECK(transport->ops->check(transport, &error) == FSDP_BACKEND);
  CHECK(strstr(error.message, "NCCL result 6 (remote error)") != NULL);
  leave(transport);
}

TEST(test_wrong_arguments) {
  const fsdp_nccl_options options = nccl_fixture_options();
  fsdp_transport *transport = nccl_fixture_join(&options, 0, 2);
  const fsdp_transport_ops *ops = transport->ops;
  const fsdp_call call = nccl_fixture_call(FSDP_CHANNEL_REDUCE, 1, NULL);
  const fsdp_call other = nccl_fixture_call(FSDP_CHANNEL_REDUCE, 2, NULL);
  const fsdp_call nowhere = nccl_fixture_call(FSDP_NUM_CHANNELS, 1, NULL);
  const fsdp_dtype int16 = {FSDP_DTYPE_INT16, 2};
  char *memory = nccl_fixture_memory;
  fsdp_error error = {0};
  nccl_fake_clear_tape();

  CHECK(ops->all_reduce(transport, &call, memory, 1, int16, 1, NULL, &error) ==
        FSDP_INVALID_ARGUMENT);
  CHECK(strstr(error.message, "cannot sum dtype 2") != NULL);
  CHECK(ops->reduce_scatter(transport, &call, memory, 1, NCCL_BF16, 1.0 / 3,
                            NULL, &error) == FSDP_INVALID_ARGUMENT);
  CHECK(strstr(error.message, "0.333333 exactly") != NULL);
  CHECK(ops->reduce_scatter(transport, &call, memory, -1, NCCL_F32, 1, NULL,
                            &error) == FSDP_INVALID_ARGUMENT);
  CHECK(ops->all_gather(transport, &call, memory, memory, INT64_MAX / 4,
                        NCCL_F32, NULL, &error) == FSDP_OVERFLOW);
  CHECK(ops->broadcast(transport, &call, memory, 1, 2, NCCL_F32, NULL,
                       &error) == FSDP_INVALID_ARGUMENT);
  CHECK(ops->broadcast(transport, &call, memory, 1, -1, NCCL_F32, NULL,
                       &error) == FSDP_INVALID_ARGUMENT);
  CHECK(ops->group_begin(transport, &nowhere, &error) == FSDP_INVALID_ARGUMENT);
  CHECK(ops->group_end(transport, &call, &error) == FSDP_INVALID_STATE);

  CHECK(ops->group_begin(transport, &call, NULL) == FSDP_OK);
  CHECK(ops->all_reduce(transport, &call, memory, 1, NCCL_F32, 1, NULL, NULL) ==
        FSDP_OK);
  CHECK(ops->all_reduce(transport, &other, memory, 1, NCCL_F32, 1, NULL,
                        &error) == FSDP_INVALID_ARGUMENT);
  CHECK(ops->group_end(transport, &call, &error) == FSDP_INVALID_STATE);
  CHECK_TEXT(nccl_fake_tape(), ""); /* none of it reached NCCL */
  CHECK(ops->check(transport, NULL) == FSDP_OK);
  leave(transport);
}

/* Whoever gives up inside a group leaves nothing behind. */
TEST(test_abandoned_group) {
  const fsdp_nccl_options options = nccl_fixture_options();
  fsdp_transport *transport = nccl_fixture_join(&options, 0, 2);
  const fsdp_transport_ops *ops = transport->ops;
  const fsdp_call call = nccl_fixture_call(FSDP_CHANNEL_GATHER, 1, NULL);
  nccl_fake_clear_tape();
  CHECK(ops->group_begin(transport, &call, NULL) == FSDP_OK);
  CHECK(nccl_fixture_gather(transport, "given up", NULL) == FSDP_OK);
  CHECK(nccl_fixture_unit(transport, false, NULL) == FSDP_OK);
  CHECK_TEXT(nccl_fake_tape(),
             "group_start\n"
             "all_gather 0 u8 16 +16 +0 s1\n"
             "all_gather 0 u8 8 +512 +64 s1\n"
             "group_end\n");
  leave(transport);
}

TEST(test_in_progress) {
  const fsdp_nccl_options options = nccl_fixture_options();
  fsdp_error error = {0};
  nccl_fake_reset();
  nccl_fake_set_in_progress(3);
  fsdp_transport *transport = nccl_fixture_join_next(&options, 0, 2);
  CHECK(nccl_fixture_unit(transport, true, &error) == FSDP_OK);
  CHECK(nccl_fixture_gather(transport, NULL, &error) == FSDP_OK);
  leave(transport);
  CHECK_I64(nccl_fake_num_aborts(), 0);
}

TEST(test_in_progress_for_too_long) {
  fsdp_nccl_options options = nccl_fixture_options();
  options.timeout_ms = 100;
  fsdp_transport *transport = nccl_fixture_join(&options, 0, 1);
  fsdp_error error = {0};
  nccl_fake_set_in_progress(INT64_MAX);
  CHECK(nccl_fixture_unit(transport, false, &error) == FSDP_BACKEND);
  CHECK_TEXT(error.message,
             "rank 0 of 1: all_gather on the host is still in progress after "
             "100 ms, at operation 1 of the gathers (all_gather of unit 'a'): "
             "another rank does not take part");
  CHECK_I64(nccl_fake_num_store_calls(), 2); /* the ids */
  leave(transport);
}

TEST(test_registration) {
  const fsdp_nccl_options options = nccl_fixture_options();
  fsdp_transport *transport = nccl_fixture_join(&options, 0, 2);
  char *memory = nccl_fixture_memory;
  fsdp_error error = {0};
  nccl_fake_clear_tape();
  CHECK(fsdp_nccl_register(transport, memory, 64, &error) == FSDP_OK);
  CHECK(fsdp_nccl_register(transport, memory + 64, 32, &error) == FSDP_OK);
  CHECK(fsdp_nccl_register(transport, memory, 64, &error) ==
        FSDP_INVALID_STATE);
  fsdp_nccl_deregister(transport, memory);
  fsdp_nccl_deregister(transport, memory);
  CHECK_TEXT(nccl_fake_tape(),
             "register 0 +0 64\nregister 1 +0 64\n"
             "register 0 +64 32\nregister 1 +64 32\n"
             "deregister 0 +0\nderegister 1 +0\n");

  /* A failure leaves nothing registered and the transport healthy. */
  for (int64_t i = 0; i < 2; i++) {
    nccl_fake_clear_tape();
    nccl_fake_fail_at(i, FSDP_NCCL_SYSTEM_ERROR, false);
    CHECK(fsdp_nccl_register(transport, memory, 64, &error) == FSDP_BACKEND);
    CHECK(strstr(error.message, "does not register 64 bytes") != NULL);
    CHECK_TEXT(nccl_fake_tape(),
               i == 0 ? "" : "register 0 +0 64\nderegister 0 +0\n");
  }
  CHECK(transport->ops->check(transport, NULL) == FSDP_OK);
  CHECK(fsdp_nccl_register(transport, memory, 64, &error) == FSDP_OK);

  nccl_fake_clear_tape();
  leave(transport);
  CHECK_TEXT(nccl_fake_tape(),
             "deregister 0 +64\nderegister 0 +0\n"
             "finalize 0\ndestroy 0\n"
             "deregister 1 +64\nderegister 1 +0\n"
             "finalize 1\ndestroy 1\n");
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
  nccl_fake_set_in_progress(INT64_MAX); /* finalize does not end */
  nccl_fake_clear_tape();
  leave(transport);
  CHECK(strstr(nccl_fake_tape(), "finalize 0\n") == nccl_fake_tape());
  CHECK(strstr(nccl_fake_tape(), "destroy") == NULL);
  CHECK_I64(nccl_fake_num_aborts(), 2);

  transport = nccl_fixture_join(&options, 0, 2);
  CHECK(nccl_fixture_gather(transport, NULL, NULL) == FSDP_OK);
  CHECK(fsdp_nccl_register(transport, nccl_fixture_memory, 64, NULL) ==
        FSDP_OK);
  nccl_fake_hold_events(true); /* the device does not end */
  nccl_fake_clear_tape();
  leave(transport);
  check_tape_and_aborts("");

  transport = nccl_fixture_join(&options, 0, 2);
  CHECK(nccl_fixture_gather(transport, NULL, NULL) == FSDP_OK);
  nccl_fake_event_fail_at(0); /* nobody knows whether it ends */
  nccl_fake_clear_tape();
  leave(transport);
  check_tape_and_aborts("");

  options.leave_ms = 60000;
  transport = nccl_fixture_join(&options, 0, 2);
  nccl_fake_clear_tape();
  nccl_fake_fail_at(0, FSDP_NCCL_SYSTEM_ERROR, false);
  leave(transport);
  CHECK_TEXT(nccl_fake_tape(), "finalize 0\nfinalize 1\ndestroy 1\nabort 0\n");
}

TEST(test_every_allocation_can_fail) {
  const fsdp_nccl_options options = nccl_fixture_options();
  const fsdp_nccl_library library = nccl_fake_library();
  const fsdp_store store = nccl_fake_store();
  for (int64_t i = 0;; i++) {
    fsdp_transport *transport = NULL;
    fsdp_error error = {0};
    nccl_fake_reset();
    fsdp_alloc_fail_at(i);
    fsdp_status status =
        fsdp_nccl_create(&library, &options, &store, 0, 2, &transport, &error);
    CHECK((status == FSDP_OK) == (transport != NULL));
    if (status == FSDP_OK) {
      status = nccl_fixture_unit(transport, true, &error);
    }
    if (status == FSDP_OK) {
      const fsdp_call call = nccl_fixture_call(FSDP_CHANNEL_REDUCE, 1, NULL);
      status = transport->ops->all_reduce(transport, &call, nccl_fixture_memory,
                                          1, NCCL_F32, 0.75, NULL, &error);
    }
    if (status == FSDP_OK) {
      status = fsdp_nccl_register(transport, nccl_fixture_memory, 8, &error);
    }
    fsdp_alloc_fail_at(-1);
    if (transport != NULL) {
      CHECK(transport->ops->check(transport, NULL) == FSDP_OK);
      transport->ops->destroy(transport);
    }
    CHECK_I64(fsdp_alloc_live(), 0);
    CHECK_I64(nccl_fake_num_live(), 0);
    CHECK_I64(nccl_fake_num_events(), 0);
    CHECK(strstr(nccl_fake_tape(), "WRONG") == NULL);
    if (status == FSDP_OK) {
      CHECK_I64(i, 6); /* transport, prefix, 2 groups, operator, registration */
      break;
    }
    CHECK(status == FSDP_OUT_OF_MEMORY && error.status == status);
  }
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
  CHECK(fsdp_nccl_create(&library, &options, &store, 0, 2, &transport,
                         &error) == FSDP_INVALID_ARGUMENT);
  CHECK(strstr(error.message, "operation -1") != NULL);
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
  CHECK_I64(fsdp_alloc_live(), 0);
}
