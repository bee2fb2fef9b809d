/*
 * NCCL transport: symmetric windows of ranks that are processes, over a NCCL
 * that compares what they do.
 */
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/dtypes.h"
#include "check.h"
#include "nccl/nccl_priv.h"
#include "nccl_world.h"

static const fsdp_dtype F32 = {FSDP_DTYPE_FLOAT32, 4};

typedef enum trouble {
  NONE = 0,
  OTHER_BLOCKS,    /* rank 1's collectives share a block */
  ORDINARY_MEMORY, /* rank 1 has no block */
  FAILING,         /* rank 1's second registration fails; the others return */
  FAILING_ALONE,   /* ... and the others wait in NCCL for good */
  MOVES,           /* rank 1 uses other memory once windows are open */
  ALL_MOVE,        /* all ranks do, at the same launch */
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
      if ((what == ALL_MOVE || (what == MOVES && is_odd)) &&
          step == NUM_STEPS - 2) {
        block = 2;
      }
      char *data = blocks + block * BLOCK_NBYTES;
      FSDP_TRY(transport->ops->all_gather(
          transport, &call, data, data + rank * 64, 16, F32, NULL, error));
      FSDP_TRY(transport->ops->reduce_scatter(transport, &sum, data, 16, F32,
                                              NULL, error));
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
  options.init_timeout_ms = what == MOVES ? 2000 : 10000;
  options.timeout_ms = what == FAILING_ALONE ? 1000 : 60000;
  options.grace_ms = 500;
  options.poll_ms = 5;
  options.events = &events;
  options.is_symmetric = true;
  options.splits_channels = true;
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
}

TEST(test_ranks_open_windows) {
  shared *all = run_ranks(NONE);
  check_all(all, 4,
            "gathers: symmetric windows of 8192 bytes; reductions: symmetric "
            "windows of 8192 bytes");
  CHECK(num_in_windows(all) > NUM_RANKS * NUM_STEPS);
  (void)munmap(all, sizeof *all);
}

/* The ranks agree to do without, and say why. */
static void check_refusal(trouble kind, const char *why) {
  char windows[512];
  shared *all = run_ranks(kind);
  (void)snprintf(windows, sizeof windows,
                 "gathers: no symmetric windows, rank 1: %s; reductions: no "
                 "symmetric windows, rank 1: %s",
                 why, why);
  check_all(all, 0, windows);
  (void)munmap(all, sizeof *all);
}

TEST(test_ranks_with_other_blocks) {
  check_refusal(OTHER_BLOCKS,
                "its collectives use memory unlike those of rank 0: 3 of 3 lie "
                "in 1 blocks (4096 bytes), there 3 of 3 in 2 (8192)");
}

/* As where ncclMemAlloc failed. */
TEST(test_rank_with_ordinary_memory) {
  check_refusal(ORDINARY_MEMORY, "no collective uses memory from ncclMemAlloc");
}

TEST(test_rank_whose_registration_fails) {
  check_refusal(FAILING,
                "ncclCommWindowRegister of 4096 bytes failed with result 2 "
                "(some error)");
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

TEST(test_ranks_that_all_move) {
  shared *all = run_ranks(ALL_MOVE);
  check_all(all, 0,
            "gathers: no symmetric windows, the order or memory of the "
            "collectives has changed, they are watched anew; reductions: no "
            "symmetric windows, the order or memory of the collectives has "
            "changed, they are watched anew");
  (void)munmap(all, sizeof *all);
}
