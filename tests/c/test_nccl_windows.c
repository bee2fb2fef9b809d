/*
 * NCCL transport: symmetric windows of rank 0. What its peer writes to the
 * store is there already.
 */
#include "every_allocation.h"
#include "nccl/nccl_priv.h"
#include "nccl_fixture.h"

static fsdp_nccl_options symmetric_options(void) {
  fsdp_nccl_options options = nccl_fixture_options();
  options.is_symmetric = true;
  return options;
}

/* Rank 1 has come to the meeting already, so that rank 0 is the last. */
static void let_peer_meet(const char *key) {
  const fsdp_store store = nccl_fake_store();
  int64_t sum;
  CHECK_OK(store.add(store.context, key, 1, &sum, NULL));
}

/* The same to the first two meetings of the gathers and of the reductions. */
static void let_peer_agree(void) {
  let_peer_meet("p/windows/gathers/1/places/met");
  let_peer_meet("p/windows/gathers/1/registered/met");
  let_peer_meet("p/windows/reductions/1/places/met");
  let_peer_meet("p/windows/reductions/1/registered/met");
}

static void check_windows(fsdp_transport *transport, const char *expected) {
  char text[1024];
  fsdp_nccl_describe_windows(transport, text, sizeof text);
  CHECK_TEXT(text, expected);
}

/* One unit, `num` times. Its gathers use both blocks, its reductions the first.
 */
static fsdp_status run(fsdp_transport *transport, int num, bool has_reduce,
                       fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  for (int i = 0; i < num; i++) {
    FSDP_TRY(nccl_fixture_unit(transport, has_reduce, error));
  }
done:
  return status;
}

static fsdp_transport *join_for(int64_t init_timeout_ms) {
  fsdp_nccl_options options = symmetric_options();
  options.init_timeout_ms = init_timeout_ms;
  fsdp_transport *transport = nccl_fixture_join(&options, 0, 2);
  CHECK_OK(fsdp_nccl_offer(transport, nccl_fixture_memory, 256, NULL));
  CHECK_OK(fsdp_nccl_offer(transport, nccl_fixture_memory + 512, 64, NULL));
  return transport;
}

static fsdp_transport *join_symmetric(void) {
  return join_for(10000);
}

TEST(test_windows_open_after_some_steps) {
  fsdp_transport *transport = join_symmetric();
  let_peer_agree();
  check_windows(
      transport,
      "gathers: no symmetric windows, the first steps are watched; "
      "reductions: no symmetric windows, the first steps are watched");
  /* The first launch has another one before it than the rest. */
  CHECK_OK(run(transport, 8, true, NULL));
  CHECK_I64(nccl_fake_num_windows(), 0);
  CHECK_I64(nccl_fake_store_text("p/windows/gathers/1/plan")[0], 0);
  nccl_fake_clear_tape();
  CHECK_OK(run(transport, 1, true, NULL));
  CHECK_LINES(nccl_fake_tape(),
              "window 0 +0 256; window 0 +512 64; group_start; "
              "all_gather 0 u8 16 +16 +0 s1; all_gather 0 u8 8 +512 +64 s1; "
              "group_end; window 1 +0 256; group_start; "
              "reduce_scatter 1 f32 4 +0 +0 op0 s2; "
              "reduce_scatter 1 f32 2 +64 +64 op0 s2; group_end");
  check_windows(transport,
                "gathers: symmetric windows of 320 bytes; reductions: "
                "symmetric windows of 256 bytes");
  /* Nothing more is asked of the store or of NCCL. */
  const int64_t num_calls = nccl_fake_num_store_calls();
  nccl_fake_clear_tape();
  CHECK_OK(run(transport, 20, true, NULL));
  CHECK_LACKS(nccl_fake_tape(), "window 0 +0 256");
  CHECK_I64(nccl_fake_num_store_calls(), num_calls);

  nccl_fake_clear_tape();
  nccl_fixture_leave(transport);
  CHECK_LINES(nccl_fake_tape(),
              "window_end 0 +0; window_end 0 +512; finalize 0; destroy 0; "
              "window_end 1 +0; finalize 1; destroy 1");
}

/* Neither asked for, nor wanted by rank 0, nor with a rank alone. */
TEST(test_no_windows_where_nobody_wants_them) {
  const fsdp_nccl_options plain = nccl_fixture_options();
  const fsdp_nccl_options symmetric = symmetric_options();
  fsdp_transport *transport = nccl_fixture_join(&plain, 0, 2);
  CHECK_OK(fsdp_nccl_offer(transport, nccl_fixture_memory, 256, NULL));
  const int64_t num_calls = nccl_fake_num_store_calls();
  CHECK_OK(run(transport, 20, true, NULL));
  CHECK_I64(nccl_fake_num_store_calls(), num_calls);
  check_windows(transport, "");
  CHECK_I64((int64_t)nccl_fake_config().nbytes,
            (int64_t)offsetof(fsdp_nccl_config, comm_name));
  nccl_fixture_leave(transport);

  transport = nccl_fixture_join(&symmetric, 1, 2); /* a plain rank 0 */
  CHECK_OK(run(transport, 20, true, NULL));
  check_windows(transport, "");
  nccl_fixture_leave(transport);

  transport = nccl_fixture_join(&symmetric, 0, 1);
  CHECK_OK(run(transport, 20, true, NULL));
  check_windows(transport, "");
  nccl_fixture_leave(transport);
}

/* Rank 0 does not ask; a library without windows cannot be asked. */
TEST(test_old_library_has_no_windows) {
  const fsdp_nccl_options options = symmetric_options();
  const fsdp_store store = nccl_fake_store();
  for (int i = 0; i < 5; i++) {
    fsdp_nccl_library library = nccl_fake_library();
    fsdp_transport *transport = NULL;
    nccl_fake_reset();
    if (i == 0) library.version = FSDP_NCCL_WINDOWS_VERSION - 1;
    if (i == 1) library.api.mem_alloc = NULL;
    if (i == 2) library.api.mem_free = NULL;
    if (i == 3) library.api.comm_window_register = NULL;
    if (i == 4) library.api.comm_window_deregister = NULL;
    CHECK(!fsdp_nccl_library_has_windows(&library));
    CHECK_OK(
        fsdp_nccl_create(&library, &options, &store, 0, 2, &transport, NULL));
    CHECK_OK(fsdp_nccl_offer(transport, nccl_fixture_memory, 256, NULL));
    CHECK_OK(run(transport, 20, true, NULL));
    CHECK_I64(nccl_fake_num_windows(), 0);
    check_windows(transport, "");
    nccl_fixture_leave(transport);
  }
}

/* From 2.28 on gathers in windows need no CTAs. */
TEST(test_policy_of_no_ctas) {
  const fsdp_nccl_options options = symmetric_options();
  const fsdp_store store = nccl_fake_store();
  fsdp_nccl_library library = nccl_fake_library();
  for (int i = 0; i < 2; i++) {
    fsdp_transport *transport = NULL;
    nccl_fake_reset();
    library.version = FSDP_NCCL_CTA_ZERO_VERSION - 1 + i;
    CHECK_OK(
        fsdp_nccl_create(&library, &options, &store, 0, 2, &transport, NULL));
    nccl_fixture_connect(transport);
    const fsdp_nccl_config config = nccl_fake_config();
    CHECK_I64((int64_t)config.version,
              i == 0 ? FSDP_NCCL_OLDEST_VERSION : FSDP_NCCL_CTA_ZERO_VERSION);
    CHECK_I64((int64_t)config.nbytes,
              (int64_t)(i == 0 ? offsetof(fsdp_nccl_config, comm_name)
                               : sizeof config));
    CHECK_I64(config.cta_policy, FSDP_NCCL_CTA_ZERO);
    nccl_fixture_leave(transport);
  }
}

/* A rank's registration that fails, or makes no window: no rank has any. */
TEST(test_registration_that_fails) {
  for (int i = 0; i < 3; i++) {
    fsdp_transport *transport = join_symmetric();
    let_peer_agree();
    CHECK_OK(run(transport, 8, false, NULL));
    nccl_fake_clear_tape();
    if (i < 2) {
      nccl_fake_fail_at(i, FSDP_NCCL_SYSTEM_ERROR, false);
    } else {
      nccl_fake_set(NCCL_FAKE_NO_WINDOWS, 1);
    }
    CHECK_OK(run(transport, 1, false, NULL));
    /* The other one is registered all the same, as the other ranks do. */
    CHECK_HAS(nccl_fake_tape(), "window 0 +0 256; window 0 +512 64");
    CHECK_I64(nccl_fake_num_windows(), 0);
    const char *const expected =
        i == 0   ? "gathers: no symmetric windows, rank 0: "
                   "ncclCommWindowRegister of 256 bytes failed with result 2 "
                   "(some error); reductions: no symmetric windows, the first "
                   "steps are watched"
        : i == 1 ? "gathers: no symmetric windows, rank 0: "
                   "ncclCommWindowRegister of 64 bytes failed with result 2 "
                   "(some error); reductions: no symmetric windows, the first "
                   "steps are watched"
                 : "gathers: no symmetric windows, rank 0: NCCL has no "
                   "symmetric memory between these devices; reductions: no "
                   "symmetric windows, the first steps are watched";
    check_windows(transport, expected);
    CHECK_OK(run(transport, 2, true, NULL)); /* as before */
    nccl_fixture_leave(transport);
  }
}

/* Refused three times, the ranks ask no more. */
TEST(test_places_that_move) {
  fsdp_transport *transport = join_symmetric();
  char key[64];
  char *memory = nccl_fixture_memory;
  const fsdp_call call = nccl_fixture_call(FSDP_CHANNEL_GATHER, 1, "moves");
  for (int i = 1; i <= 4; i++) {
    (void)snprintf(key, sizeof key, "p/windows/gathers/%d/places/met", i);
    let_peer_meet(key);
  }
  for (int i = 0; i < 2000; i++) {
    CHECK_OK(transport->ops->all_gather(transport, &call, memory + i % 3 * 64,
                                        memory + i % 3 * 64, 4, NCCL_F32, NULL,
                                        NULL));
  }
  CHECK(nccl_fake_store_text("p/windows/gathers/3/plan") != NULL);
  CHECK_TEXT(nccl_fake_store_text("p/windows/gathers/3/places/verdict"),
             "nrank 0: 1 of 1 collectives used other memory lately");
  CHECK_TEXT(nccl_fake_store_text("p/windows/gathers/4/places/verdict"), "");
  nccl_fixture_leave(transport);
}

TEST(test_memory_that_is_no_block) {
  const fsdp_nccl_options options = symmetric_options();
  fsdp_transport *transport = nccl_fixture_join(&options, 0, 2);
  let_peer_agree();
  CHECK_OK(run(transport, 9, false, NULL));
  CHECK_TEXT(nccl_fake_store_text("p/windows/gathers/1/places/verdict"),
             "nrank 0: no collective uses memory from ncclMemAlloc");
  nccl_fixture_leave(transport);
}

/* A program that does not repeat itself is not watched for ever. */
TEST(test_calls_without_end) {
  fsdp_transport *transport = join_symmetric();
  char *memory = nccl_fixture_memory;
  char label[32];
  for (int i = 0; i < 4200; i++) {
    (void)snprintf(label, sizeof label, "call %d", i);
    const fsdp_call call = nccl_fixture_call(FSDP_CHANNEL_GATHER, 1, label);
    CHECK_OK(transport->ops->all_gather(transport, &call, memory, memory, 4,
                                        NCCL_F32, NULL, NULL));
  }
  check_windows(transport,
                "gathers: no symmetric windows, the collectives do not repeat "
                "themselves; reductions: no symmetric windows, the first steps "
                "are watched");
  nccl_fixture_leave(transport);
}

/* In another order, on all ranks alike: the windows close before the launch and
 * open again later. */
TEST(test_new_order_closes_windows) {
  fsdp_transport *transport = join_symmetric();
  let_peer_agree();
  CHECK_OK(run(transport, 9, false, NULL));
  CHECK_I64(nccl_fake_num_windows(), 2);
  nccl_fake_clear_tape();
  CHECK_OK(nccl_fixture_gather(transport, "summon", NULL));
  CHECK_LINES(nccl_fake_tape(),
              "window_end 0 +0; window_end 0 +512; "
              "all_gather 0 u8 16 +0 +0 s1");
  check_windows(transport,
                "gathers: no symmetric windows, the order or memory of "
                "the collectives has changed, they are watched anew; "
                "reductions: no symmetric "
                "windows, the first steps are watched");
  let_peer_meet("p/windows/gathers/2/places/met");
  let_peer_meet("p/windows/gathers/2/registered/met");
  CHECK_OK(run(transport, 17, false, NULL)); /* twice as many uses */
  CHECK_I64(nccl_fake_num_windows(), 2);
  nccl_fixture_leave(transport);
}

/* What is in flight ends before its window does. */
TEST(test_closing_waits_for_the_device) {
  fsdp_nccl_options options = nccl_fixture_quick_options();
  options.is_symmetric = true;
  options.timeout_ms = 200;
  fsdp_transport *transport = nccl_fixture_join(&options, 0, 2);
  fsdp_error error = {0};
  CHECK_OK(fsdp_nccl_offer(transport, nccl_fixture_memory, 256, NULL));
  let_peer_agree();
  nccl_fake_hold_watchdog(true);
  CHECK_OK(run(transport, 9, false, NULL));
  nccl_fake_hold_events(true);
  CHECK_OK(run(transport, 1, false, NULL));
  nccl_fake_clear_tape();
  nccl_fake_hold_watchdog(false);
  CHECK_FAILS(nccl_fixture_gather(transport, "summon", &error), FSDP_BACKEND,
              error.message, "..did not end within 200 ms");
  CHECK_LACKS(nccl_fake_tape(), "window_end 0 +0");
  nccl_fixture_leave(transport);
}

/* A known collective on other memory, on this rank alone: it must not launch.
 */
TEST(test_other_memory_ends_the_transport) {
  fsdp_transport *transport = join_for(100);
  const fsdp_call call =
      nccl_fixture_call(FSDP_CHANNEL_GATHER, 1, "all_gather of unit 'b'");
  char *memory = nccl_fixture_memory;
  fsdp_error error = {0};
  let_peer_agree();
  for (int i = 0; i < 9; i++) {
    CHECK_OK(transport->ops->all_gather(transport, &call, memory, memory, 4,
                                        NCCL_F32, NULL, NULL));
  }
  CHECK_I64(nccl_fake_num_windows(), 1);
  nccl_fake_clear_tape();
  CHECK_FAILS(
      transport->ops->all_gather(transport, &call, memory + 512, memory + 512,
                                 4, NCCL_F32, NULL, &error),
      FSDP_BACKEND, error.message,
      "..'all_gather of unit 'b'' uses other memory than the ranks agreed on "
      "for the symmetric windows of the gathers");
  CHECK_LACKS(nccl_fake_tape(), "all_gather 0 u8 16 +512 +512 s1");
  nccl_fixture_leave(transport);
}

/* On all ranks: the windows close, and open later. */
TEST(test_other_memory_of_all_ranks) {
  fsdp_transport *transport = join_symmetric();
  const fsdp_call call = nccl_fixture_call(FSDP_CHANNEL_GATHER, 1, "b");
  char *memory = nccl_fixture_memory;
  let_peer_agree();
  let_peer_meet("p/windows/gathers/2/moved/9/met"); /* after 9 launches */
  let_peer_meet("p/windows/gathers/3/places/met");
  let_peer_meet("p/windows/gathers/3/registered/met");
  for (int i = 0; i < 9 + 16; i++) {
    char *data = memory + (i < 9 ? 0 : 512);
    if (i == 9) CHECK_I64(nccl_fake_num_windows(), 1);
    if (i == 9) nccl_fake_clear_tape();
    CHECK_OK(transport->ops->all_gather(transport, &call, data, data, 4,
                                        NCCL_F32, NULL, NULL));
    if (i == 9) {
      CHECK_LINES(nccl_fake_tape(),
                  "window_end 0 +0; all_gather 0 u8 16 +512 +512 s1");
    }
  }
  CHECK_I64(nccl_fake_num_windows(), 1);
  CHECK_HAS(nccl_fake_tape(), "window 0 +512 64");
  nccl_fixture_leave(transport);
}

/* Units of one name: their numbers tell them apart. */
TEST(test_units_of_one_name) {
  fsdp_transport *transport = join_symmetric();
  fsdp_call call = nccl_fixture_call(FSDP_CHANNEL_GATHER, 1, "of unit 'Block'");
  char *memory = nccl_fixture_memory;
  let_peer_agree();
  for (int i = 0; i < 3 * 9; i++) {
    call.unit = 1 + i % 3;
    char *data = memory + i % 3 * 16;
    CHECK_OK(transport->ops->all_gather(transport, &call, data, data, 4,
                                        NCCL_F32, NULL, NULL));
  }
  CHECK_I64(nccl_fake_num_windows(), 1);
  nccl_fixture_leave(transport);
}

/* Also where the input alone has moved. */
TEST(test_other_input_ends_the_transport) {
  fsdp_transport *transport = join_for(100);
  const fsdp_call call = nccl_fixture_call(FSDP_CHANNEL_GATHER, 1, "b");
  char *memory = nccl_fixture_memory;
  let_peer_agree();
  for (int i = 0; i < 9; i++) {
    CHECK_OK(transport->ops->all_gather(transport, &call, memory, memory + 512,
                                        4, NCCL_F32, NULL, NULL));
  }
  CHECK_I64(nccl_fake_num_windows(), 2);
  CHECK(transport->ops->all_gather(transport, &call, memory, memory + 528, 4,
                                   NCCL_F32, NULL, NULL) == FSDP_BACKEND);
  nccl_fixture_leave(transport);
}

/* A block that is freed takes its windows with it, and only these. */
TEST(test_withdrawn_block) {
  fsdp_transport *transport = join_for(100);
  let_peer_agree();
  CHECK_OK(run(transport, 9, true, NULL));
  CHECK_I64(nccl_fake_num_windows(), 3);
  nccl_fake_clear_tape();
  fsdp_nccl_withdraw(transport, nccl_fixture_memory);
  fsdp_nccl_withdraw(transport, nccl_fixture_memory);
  CHECK_LINES(nccl_fake_tape(), "window_end 0 +0; window_end 1 +0");
  /* The same addresses are other memory now. */
  CHECK_OK(fsdp_nccl_offer(transport, nccl_fixture_memory, 256, NULL));
  CHECK(run(transport, 1, true, NULL) == FSDP_BACKEND);
  nccl_fixture_leave(transport);
}

/* Nor do the ranks open windows over what was withdrawn just before. */
TEST(test_withdrawn_while_learning) {
  fsdp_transport *transport = join_symmetric();
  let_peer_agree();
  CHECK_OK(run(transport, 7, false, NULL));
  fsdp_nccl_withdraw(transport, nccl_fixture_memory);
  CHECK_OK(fsdp_nccl_offer(transport, nccl_fixture_memory, 128, NULL));
  CHECK_OK(run(transport, 2, false, NULL));
  CHECK_TEXT(nccl_fake_store_text("p/windows/gathers/1/places/verdict"),
             "nrank 0: 2 of 2 collectives used other memory lately");
  nccl_fixture_leave(transport);
}

/* An abort leaves no window to deregister. */
TEST(test_aborted_communicator_has_no_windows) {
  fsdp_transport *transport = join_symmetric();
  let_peer_agree();
  CHECK_OK(run(transport, 9, true, NULL));
  nccl_fake_clear_tape();
  nccl_fake_fail_at(0, FSDP_NCCL_REMOTE_ERROR, false);
  CHECK(run(transport, 1, true, NULL) == FSDP_BACKEND);
  fsdp_nccl_withdraw(transport, nccl_fixture_memory);
  CHECK_LACKS(nccl_fake_tape(), "window_end 0 +0");
  nccl_fixture_leave(transport);
}

/* A store that fails ends the transport, wherever it fails. */
TEST(test_store_fails_in_a_meeting) {
  for (int64_t i = 0;; i++) {
    fsdp_transport *transport = join_symmetric();
    fsdp_error error = {0};
    let_peer_agree();
    CHECK_OK(run(transport, 8, false, NULL));
    const int64_t num_calls = nccl_fake_num_store_calls();
    nccl_fake_store_fail_at(i);
    const fsdp_status status = run(transport, 1, false, &error);
    const bool is_over = nccl_fake_num_store_calls() - num_calls <= i;
    if (!is_over) {
      CHECK_FAILS(status, FSDP_BACKEND, error.message,
                  "..of the symmetric windows of the gathers failed");
    } else {
      CHECK_OK(status);
      CHECK_I64(i, 9); /* a plan, and two meetings of 4 requests */
    }
    nccl_fixture_leave(transport);
    if (is_over) break;
  }
}

static fsdp_status open_once(void *context, fsdp_error *error) {
  const fsdp_nccl_options options = symmetric_options();
  const fsdp_nccl_library library = nccl_fake_library();
  const fsdp_store store = nccl_fake_store();
  fsdp_transport *transport = NULL;
  fsdp_status status = FSDP_OK;
  (void)context;
  nccl_fake_reset();
  let_peer_agree();
  FSDP_TRY(
      fsdp_nccl_create(&library, &options, &store, 0, 2, &transport, error));
  FSDP_TRY(fsdp_nccl_offer(transport, nccl_fixture_memory, 256, error));
  FSDP_TRY(run(transport, 9, true, error));
  /* A plan without memory is a refusal. */
  if (nccl_fake_num_windows() != 2) {
    status = FSDP_FAIL(error, FSDP_OUT_OF_MEMORY, "no windows");
  }
done:
  if (transport != NULL) transport->ops->destroy(transport);
  return status;
}

TEST(test_every_allocation_of_windows) {
  CHECK_I64(every_allocation(open_once, NULL), 9);
}
