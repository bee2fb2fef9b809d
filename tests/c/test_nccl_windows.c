/*
 * NCCL transport: symmetric windows. Alone, as rank 0 whose peers' words are in
 * the store already, and with ranks that are processes.
 */
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/alloc.h"
#include "every_allocation.h"
#include "nccl/nccl_priv.h"
#include "nccl_fixture.h"
#include "nccl_world.h"

/* ---- Alone ----------------------------------------------------------------*/

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

static fsdp_transport *join_symmetric(void) {
  const fsdp_nccl_options options = symmetric_options();
  fsdp_transport *transport = nccl_fixture_join(&options, 0, 2);
  CHECK_OK(fsdp_nccl_offer(transport, nccl_fixture_memory, 256, NULL));
  CHECK_OK(fsdp_nccl_offer(transport, nccl_fixture_memory + 512, 64, NULL));
  return transport;
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
                "gathers: no symmetric windows, the order of the collectives "
                "has changed, it is watched anew; reductions: no symmetric "
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

/* A known collective on other memory: this rank alone knows, so it must not
 * launch. */
TEST(test_other_memory_ends_the_transport) {
  fsdp_transport *transport = join_symmetric();
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
  fsdp_transport *transport = join_symmetric();
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
  fsdp_transport *transport = join_symmetric();
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

/* ---- Ranks that are processes ---------------------------------------------*/

typedef enum trouble {
  NONE = 0,
  OTHER_BLOCKS,    /* rank 1's collectives share a block */
  ORDINARY_MEMORY, /* rank 1 has no block */
  FAILING,         /* rank 1's second registration fails; the others return */
  FAILING_ALONE,   /* ... and the others wait in NCCL for good */
  MOVES,           /* rank 1 uses other memory once windows are open */
  NUM_TROUBLES
} trouble;

enum { NUM_RANKS = 3, BLOCK_NBYTES = 4096, NUM_STEPS = 14 };

typedef struct rank_result {
  fsdp_status status;
  int64_t num_windows; /* before the end */
  char windows[512];
  char message[512];
} rank_result;

typedef struct shared {
  nccl_world world;
  rank_result results[NUM_RANKS];
} shared;

/* Forwards through two units, in steps; the second one also at their end. */
static fsdp_status run_steps(fsdp_transport *transport, char *blocks,
                             trouble what, int64_t rank, fsdp_error *error) {
  static const char *const labels[] = {"unit a", "unit b", "unit b"};
  const bool is_odd = rank == 1;
  fsdp_status status = FSDP_OK;
  for (int step = 0; step < NUM_STEPS; step++) {
    for (int i = 0; i < 3; i++) {
      const fsdp_call call = {.channel = FSDP_CHANNEL_GATHER,
                              .label = labels[i]};
      const fsdp_call sum = {.channel = FSDP_CHANNEL_REDUCE,
                             .label = labels[i]};
      int block = i == 0 ? 0 : 1;
      if (what == OTHER_BLOCKS && is_odd) block = 0;
      if (what == MOVES && is_odd && step == NUM_STEPS - 2) block = 2;
      char *data = blocks + block * BLOCK_NBYTES;
      FSDP_TRY(transport->ops->all_gather(
          transport, &call, data, data + rank * 64, 16, NCCL_F32, NULL, error));
      FSDP_TRY(transport->ops->reduce_scatter(transport, &sum, data, 16,
                                              NCCL_F32, NULL, error));
    }
  }
  /* As a host that waits for its streams. */
  for (int i = 0; i < FSDP_NUM_CHANNELS; i++) {
    (void)fsdp_nccl_priv_drain(fsdp_nccl_priv_of(transport), (fsdp_channel)i,
                               INT64_MAX);
  }
  status =
      fsdp_nccl_priv_first_error(fsdp_nccl_priv_of(transport), true, error);
done:
  return status;
}

static void run_rank(shared *all, int64_t rank, trouble what) {
  static char blocks[3 * BLOCK_NBYTES];
  const fsdp_nccl_events events = nccl_world_events();
  const fsdp_nccl_library library = nccl_world_library();
  const fsdp_store store = nccl_world_store();
  rank_result *result = &all->results[rank];
  fsdp_nccl_options options;
  fsdp_transport *transport = NULL;
  fsdp_error error = {0};
  nccl_world_enter(&all->world, rank, -1);
  if (rank == 1 && (what == FAILING || what == FAILING_ALONE)) {
    nccl_world_fail_window(1);
  }
  fsdp_nccl_options_init(&options);
  options.prefix = "p";
  options.timeout_ms = what == FAILING_ALONE ? 1000 : 60000;
  options.grace_ms = 500;
  options.poll_ms = 5;
  options.events = &events;
  options.is_symmetric = true;
  result->status = fsdp_nccl_create(&library, &options, &store, rank, NUM_RANKS,
                                    &transport, &error);
  for (int i = 0; i < (what == ORDINARY_MEMORY && rank == 1 ? 0 : 3); i++) {
    result->status |= fsdp_nccl_offer(transport, blocks + i * BLOCK_NBYTES,
                                      BLOCK_NBYTES, &error);
  }
  if (result->status == FSDP_OK) {
    result->status = run_steps(transport, blocks, what, rank, &error);
  }
  result->num_windows = nccl_world_num_windows();
  fsdp_nccl_describe_windows(transport, result->windows,
                             sizeof result->windows);
  (void)snprintf(result->message, sizeof result->message, "%.511s",
                 error.message);
  transport->ops->destroy(transport);
}

/* Runs the ranks. Whether all ended well, and none called what it may not. */
static shared *run_ranks(trouble what) {
  shared *all = mmap(NULL, sizeof *all, PROT_READ | PROT_WRITE,
                     MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  pid_t pids[NUM_RANKS];
  if (all == MAP_FAILED) abort();
  nccl_world_init(&all->world, NUM_RANKS);
  all->world.is_window_left = what == FAILING_ALONE;
  (void)fflush(stdout);
  for (int64_t rank = 0; rank < NUM_RANKS; rank++) {
    pids[rank] = fork();
    if (pids[rank] < 0) abort();
    if (pids[rank] > 0) continue;
    run_rank(all, rank, what);
    (void)fflush(stdout);
    _exit(0);
  }
  for (int64_t rank = 0; rank < NUM_RANKS; rank++) {
    int status = 0;
    CHECK(waitpid(pids[rank], &status, 0) == pids[rank]);
    CHECK_I64(status, 0);
  }
  CHECK_I64(atomic_load(&all->world.num_wrong), 0);
  return all;
}

static int64_t num_in_windows(const shared *all) {
  int64_t num = 0;
  for (int i = 0; i < NCCL_WORLD_MAX_GROUPS; i++) {
    num += atomic_load(&all->world.groups[i].num_in_windows);
  }
  return num;
}

static void check_all(const shared *all, int64_t num_windows,
                      const char *windows) {
  for (int rank = 0; rank < NUM_RANKS; rank++) {
    const rank_result *result = &all->results[rank];
    if (!CHECK(result->status == FSDP_OK)) printf("%s\n", result->message);
    CHECK_I64(result->num_windows, num_windows);
    CHECK_TEXT(result->windows, windows);
  }
  CHECK(num_windows > 0 || num_in_windows(all) == 0);
}

TEST(test_ranks_open_windows) {
  shared *all = run_ranks(NONE);
  check_all(all, 4,
            "gathers: symmetric windows of 8192 bytes; reductions: symmetric "
            "windows of 8192 bytes");
  CHECK(num_in_windows(all) > NUM_RANKS * NUM_STEPS);
  (void)munmap(all, sizeof *all);
}

TEST(test_ranks_with_other_blocks) {
  shared *all = run_ranks(OTHER_BLOCKS);
  check_all(all, 0,
            "gathers: no symmetric windows, rank 1: its collectives use memory "
            "unlike those of rank 0: 3 of 3 lie in 1 blocks (4096 bytes), "
            "there 3 of 3 in 2 (8192); reductions: no symmetric windows, rank "
            "1: its collectives use memory unlike those of rank 0: 3 of 3 lie "
            "in 1 blocks (4096 bytes), there 3 of 3 in 2 (8192)");
  (void)munmap(all, sizeof *all);
}

/* As where ncclMemAlloc failed. */
TEST(test_rank_with_ordinary_memory) {
  shared *all = run_ranks(ORDINARY_MEMORY);
  check_all(all, 0,
            "gathers: no symmetric windows, rank 1: no collective uses memory "
            "from ncclMemAlloc; reductions: no symmetric windows, rank 1: no "
            "collective uses memory from ncclMemAlloc");
  (void)munmap(all, sizeof *all);
}

TEST(test_rank_whose_registration_fails) {
  shared *all = run_ranks(FAILING);
  check_all(all, 0,
            "gathers: no symmetric windows, rank 1: ncclCommWindowRegister of "
            "4096 bytes failed with result 2 (some error); reductions: no "
            "symmetric windows, rank 1: ncclCommWindowRegister of 4096 bytes "
            "failed with result 2 (some error)");
  (void)munmap(all, sizeof *all);
}

/* NCCL keeps the other ranks: nothing can be agreed, but nobody hangs. */
TEST(test_rank_whose_registration_fails_alone) {
  shared *all = run_ranks(FAILING_ALONE);
  for (int rank = 0; rank < NUM_RANKS; rank++) {
    CHECK(all->results[rank].status == FSDP_BACKEND);
  }
  (void)munmap(all, sizeof *all);
}

TEST(test_rank_that_moves) {
  shared *all = run_ranks(MOVES);
  for (int rank = 0; rank < NUM_RANKS; rank++) {
    const rank_result *result = &all->results[rank];
    CHECK(result->status == FSDP_BACKEND);
    if (!CHECK(strstr(result->message,
                      "'unit a' uses other memory than the ranks agreed on") !=
               NULL)) {
      printf("%s\n", result->message);
    }
  }
  (void)munmap(all, sizeof *all);
}
