/*
 * Tests of arena/: which block a client gets, what the plan costs in bytes,
 * that no two holders ever share memory, and every failure of a step.
 */
#include "arena/arena.h"
#include "arena/arena_priv.h"
#include "arena_fixture.h"
#include "base/alloc.h"
#include "check.h"
#include "recorder.h"

/* --- One block ----------------------------------------------------------- */

TEST(test_take_waits_for_the_free_event) {
  recorder *device = recorder_create();
  recorder_show_memory(device, true);
  const int64_t nbytes[] = {64, 32};
  fsdp_arena *arena = arena_fixture_create(device, nbytes, 2);
  void *first = arena_fixture_take(arena, 0);
  CHECK_I64(arena_fixture_stats(arena).held_nbytes, 64);
  arena_fixture_give(arena, 0);
  CHECK(arena_fixture_take(arena, 1) ==
        first); /* it fits, so it is used again */
  CHECK_I64(arena_fixture_stats(arena).held_nbytes, 64);
  arena_fixture_give(arena, 1);
  fsdp_arena_trim(arena);
  CHECK_TEXT(recorder_tape(device),
             "event e1\n"
             "alloc 64 b1\n" /* new: nothing to wait for */
             "record e1 compute\n"
             "wait unshard e1\n"
             "record e1 compute\n"
             "free 64 b1 after e1\n"
             "destroy e1\n"
             "release_memory\n");
  arena_fixture_destroy(arena, device);
  fsdp_arena_destroy(NULL);
}

TEST(test_wrong_moments) {
  recorder *device = recorder_create();
  const int64_t nbytes[] = {64};
  fsdp_arena *arena = arena_fixture_create(device, nbytes, 1);
  fsdp_error error;
  void *data = NULL;
  int64_t client = -7;
  CHECK_I64(fsdp_arena_add_client(arena, 0, &client, &error),
            FSDP_INVALID_ARGUMENT);
  CHECK_TEXT(error.message, "arena client 1 needs 0 bytes, must be >= 1");
  CHECK_I64(client, -7);
  CHECK_I64(fsdp_arena_give(arena, 0, FSDP_LANE_COMPUTE, &error),
            FSDP_INVALID_STATE);
  CHECK_TEXT(error.message, "arena client 0 holds no block to give back");
  (void)arena_fixture_take(arena, 0);
  CHECK_I64(fsdp_arena_take(arena, 0, FSDP_LANE_UNSHARD, &data, &error),
            FSDP_INVALID_STATE);
  CHECK_TEXT(error.message, "arena client 0 already holds a block");
  CHECK(data == NULL);
  CHECK_I64(arena_fixture_stats(arena).num_clients, 1);
  arena_fixture_destroy(arena, device); /* the block that is still held, too */
}

/* --- Before a plan ------------------------------------------------------- */

TEST(test_block_given_back_longest_ago_is_taken) {
  recorder *device = recorder_create();
  const int64_t nbytes[] = {64, 64, 64, 64};
  fsdp_arena *arena = arena_fixture_create(device, nbytes, 4);
  (void)arena_fixture_take(arena, 0);
  void *second = arena_fixture_take(arena, 1);
  (void)arena_fixture_take(arena, 2);
  arena_fixture_give(arena, 1);
  arena_fixture_give(arena, 0);
  arena_fixture_give(arena, 2);
  CHECK(arena_fixture_take(arena, 3) == second);
  arena_fixture_destroy(arena, device);
}

TEST(test_too_small_blocks_are_freed_first) {
  recorder *device = recorder_create();
  const int64_t nbytes[] = {16, 16, 64, 32};
  fsdp_arena *arena = arena_fixture_create(device, nbytes, 4);
  (void)arena_fixture_take(arena, 0);
  (void)arena_fixture_take(arena, 1);
  arena_fixture_give(arena, 0);
  recorder_clear(device);
  (void)arena_fixture_take(arena,
                           2); /* frees the block of 0; that of 1 is held */
  CHECK_TEXT(recorder_tape(device),
             "free 16 after e1\n"
             "destroy e1\n"
             "event e3\n"
             "alloc 64\n");
  fsdp_arena_stats stats = arena_fixture_stats(arena);
  CHECK_I64(stats.num_blocks, 2);
  CHECK_I64(stats.nbytes, 16 + 64);
  CHECK_I64(stats.held_nbytes, 16 + 64);
  CHECK_I64(stats.num_allocs, 3);
  CHECK_I64(stats.num_frees, 1);
  arena_fixture_give(arena, 2);
  (void)arena_fixture_take(arena, 3); /* 32 fits in 64 */
  CHECK_I64(arena_fixture_stats(arena).num_allocs, 3);
  CHECK_I64(arena_fixture_stats(arena).peak_nbytes, 16 + 64);
  arena_fixture_destroy(arena, device);
}

/* --- The plan ------------------------------------------------------------ */

/* Layers that run one after the other: neighbours do not share, so two blocks
 * serve any number of layers. */
TEST(test_chain_needs_two_blocks) {
  recorder *device = recorder_create();
  const int64_t nbytes[] = {64, 64, 64, 64, 64};
  fsdp_arena *arena = arena_fixture_create(device, nbytes, 5);
  for (int64_t i = 0; i < 5; i++) {
    (void)arena_fixture_take(arena, i);
    arena_fixture_give(arena, i);
  }
  CHECK_I64(arena_fixture_stats(arena).num_blocks,
            1); /* the first rule reuses */
  arena_fixture_plan(arena);
  CHECK_I64(arena_fixture_stats(arena).nbytes, 2 * 64);
  void *even = arena_fixture_take(arena, 0);
  arena_fixture_give(arena, 0);
  void *odd = arena_fixture_take(arena, 1);
  arena_fixture_give(arena, 1);
  CHECK(even != odd);
  for (int64_t i = 2; i < 5; i++) {
    CHECK(arena_fixture_take(arena, i) == (i % 2 == 0 ? even : odd));
    arena_fixture_give(arena, i);
  }
  arena_fixture_destroy(arena, device);
}

/* A root that stays, layers in forward with one prefetched, largest first. */
TEST(test_plan_in_bytes) {
  recorder *device = recorder_create();
  const int64_t nbytes[] = {100, 30, 50, 40, 20};
  fsdp_arena *arena = arena_fixture_create(device, nbytes, 5);
  (void)arena_fixture_take(arena, 0);
  (void)arena_fixture_take(arena, 1);
  for (int64_t i = 1; i <= 4; i++) {
    if (i < 4) (void)arena_fixture_take(arena, i + 1); /* prefetch */
    arena_fixture_give(arena, i);
  }
  arena_fixture_give(arena, 0);
  arena_fixture_plan(arena);
  /* Takes and gives are 0 1 2 -1 3 -2 4 -3 -4 -0: 2 meets 1, 3 meets 2, 4
   * meets 3; each follows one that gave back behind a newer gather. So
   * 0 | 2 with 4 | 3 with 1. */
  CHECK_I64(arena_fixture_stats(arena).nbytes, 100 + 50 + 40);
  CHECK_I64(recorder_live_nbytes(device), 190);
  arena_fixture_destroy(arena, device);
}

/* A client that gave back behind a collective keeps its block to itself until
 * another one has done so. */
TEST(test_reductions_do_not_share_with_their_followers) {
  recorder *device = recorder_create();
  const int64_t nbytes[] = {64, 64, 64};
  fsdp_arena *arena = arena_fixture_create(device, nbytes, 3);
  fsdp_error error = {0};
  void *data = NULL;
  for (int64_t i = 0; i < 3; i++) {
    CHECK(fsdp_arena_take(arena, i, FSDP_LANE_COMPUTE, &data, &error) ==
          FSDP_OK);
    CHECK(fsdp_arena_give(arena, i, FSDP_LANE_REDUCE, &error) == FSDP_OK);
  }
  arena_fixture_plan(arena);
  CHECK_I64(arena_fixture_stats(arena).num_blocks, 2); /* 0 with 2, 1 */
  arena_fixture_destroy(arena, device);
}

TEST(test_client_that_never_took_is_not_planned) {
  recorder *device = recorder_create();
  const int64_t nbytes[] = {64, 1 << 20, 64};
  fsdp_arena *arena = arena_fixture_create(device, nbytes, 3);
  (void)arena_fixture_take(arena, 0);
  (void)arena_fixture_take(arena, 2);
  arena_fixture_give(arena, 0);
  arena_fixture_give(arena, 2);
  arena_fixture_plan(arena);
  CHECK_I64(arena_fixture_stats(arena).nbytes, 128);
  (void)arena_fixture_take(arena, 1); /* late: the first rule, and a new plan */
  arena_fixture_give(arena, 1);
  arena_fixture_plan(arena);
  CHECK_I64(arena_fixture_stats(arena).nbytes, (1 << 20) + 64);
  arena_fixture_destroy(arena, device);
}

TEST(test_plan_is_idempotent_and_waits_for_holders) {
  recorder *device = recorder_create();
  const int64_t nbytes[] = {64, 128};
  fsdp_arena *arena = arena_fixture_create(device, nbytes, 2);
  arena_fixture_plan(arena); /* nothing known: nothing to do */
  (void)arena_fixture_take(arena, 0);
  arena_fixture_give(arena, 0);
  (void)arena_fixture_take(arena, 1);
  recorder_clear(device);
  fsdp_alloc_fail_at(0);
  arena_fixture_plan(arena); /* skipped: a block is held */
  fsdp_alloc_fail_at(-1);
  CHECK_TEXT(recorder_tape(device), "");
  arena_fixture_give(arena, 1);
  arena_fixture_plan(arena);
  CHECK_I64(arena_fixture_stats(arena).nbytes, 64 + 128);
  recorder_clear(device);
  fsdp_alloc_fail_at(0);
  arena_fixture_plan(arena);
  fsdp_alloc_fail_at(-1);
  CHECK_TEXT(recorder_tape(device), "");
  arena_fixture_destroy(arena, device);
}

TEST(test_changed_order_falls_back_and_is_learnt) {
  recorder *device = recorder_create();
  const int64_t nbytes[] = {64, 64, 64};
  fsdp_arena *arena = arena_fixture_create(device, nbytes, 3);
  for (int64_t i = 0; i < 3; i++) {
    (void)arena_fixture_take(arena, i);
    arena_fixture_give(arena, i);
  }
  arena_fixture_plan(arena);
  CHECK_I64(arena_fixture_stats(arena).num_blocks, 2); /* 0 and 2 share */
  void *shared = arena_fixture_take(arena, 0);
  CHECK(arena_fixture_take(arena, 2) != shared);
  arena_fixture_give(arena, 0);
  arena_fixture_give(arena, 2);
  arena_fixture_plan(arena);
  CHECK_I64(arena_fixture_stats(arena).num_blocks, 3);
  const int64_t num_allocs = arena_fixture_stats(arena).num_allocs;
  (void)arena_fixture_take(arena, 0);
  (void)arena_fixture_take(arena, 2);
  arena_fixture_give(arena, 0);
  arena_fixture_give(arena, 2);
  CHECK_I64(arena_fixture_stats(arena).num_allocs, num_allocs);
  arena_fixture_destroy(arena, device);
}

/* A neighbour that is new in a later step makes a new plan; the end of a step,
 * where the lanes join, makes no neighbours. */
TEST(test_new_neighbours_make_the_plan_dirty) {
  recorder *device = recorder_create();
  const int64_t nbytes[] = {64, 64, 64};
  fsdp_arena *arena = arena_fixture_create(device, nbytes, 3);
  for (int64_t i = 0; i < 3; i++) {
    (void)arena_fixture_take(arena, i);
    arena_fixture_give(arena, i);
  }
  arena_fixture_plan(arena);
  CHECK_I64(arena_fixture_stats(arena).num_blocks, 2);
  (void)arena_fixture_take(arena, 2);
  arena_fixture_give(arena, 2);
  arena_fixture_plan(arena);
  CHECK_I64(arena_fixture_stats(arena).num_blocks, 2);
  (void)arena_fixture_take(arena, 2);
  arena_fixture_give(arena, 2);
  (void)arena_fixture_take(arena, 0); /* follows 2, with which it shares */
  arena_fixture_give(arena, 0);
  arena_fixture_plan(arena);
  CHECK_I64(arena_fixture_stats(arena).num_blocks, 3);
  arena_fixture_destroy(arena, device);
}

TEST(test_trim_frees_what_is_not_held) {
  recorder *device = recorder_create();
  const int64_t nbytes[] = {64, 32};
  fsdp_arena *arena = arena_fixture_create(device, nbytes, 2);
  (void)arena_fixture_take(arena, 0);
  (void)arena_fixture_take(arena, 1);
  arena_fixture_give(arena, 0);
  arena_fixture_give(arena, 1);
  arena_fixture_plan(arena);
  void *kept = arena_fixture_take(arena, 0);
  fsdp_arena_trim(arena);
  CHECK(fsdp_arena_data(arena, 0) == kept);
  CHECK_I64(arena_fixture_stats(arena).nbytes, 64);
  (void)arena_fixture_take(arena, 1);
  CHECK_I64(arena_fixture_stats(arena).nbytes, 64 + 32);
  arena_fixture_give(arena, 0);
  arena_fixture_give(arena, 1);
  fsdp_arena_trim(arena);
  CHECK_I64(arena_fixture_stats(arena).num_blocks, 0);
  CHECK_I64(recorder_live_nbytes(device), 0);
  arena_fixture_plan(arena);
  CHECK_I64(arena_fixture_stats(arena).nbytes, 64 + 32);
  CHECK_I64(arena_fixture_stats(arena).peak_nbytes, 64 + 32);
  arena_fixture_destroy(arena, device);
}

/* --- Memory of freed blocks ---------------------------------------------- */

/* A chain of growing clients, so that the first rule frees and the plan too. */
static void take_a_chain(fsdp_arena *arena, int64_t num_clients) {
  for (int64_t i = 0; i < num_clients; i++) {
    (void)arena_fixture_take(arena, i);
    arena_fixture_give(arena, i);
  }
  arena_fixture_plan(arena);
}

TEST(test_a_plan_gives_memory_back_once) {
  static const char release[] = "release_memory\n";
  recorder *device = recorder_create();
  const int64_t nbytes[] = {16, 32, 64};
  fsdp_arena *arena = arena_fixture_create(device, nbytes, 3);
  take_a_chain(arena, 3);
  const char *tape = recorder_tape(device);
  CHECK(arena_fixture_stats(arena).num_frees > 0);
  /* After the last free, which only the plan knows. */
  CHECK_TEXT(tape + strlen(tape) - strlen(release), release);
  for (int step = 0; step < 2; step++) {
    recorder_clear(device);
    take_a_chain(arena, 3);
    CHECK(strstr(recorder_tape(device), "release_memory") == NULL);
  }
  CHECK(fsdp_arena_trim(arena));
  CHECK(strstr(recorder_tape(device), release) != NULL);
  recorder_clear(device);
  CHECK(!fsdp_arena_trim(arena)); /* nothing was left */
  CHECK_TEXT(recorder_tape(device), "");
  arena_fixture_destroy(arena, device);
}

/* No memory for the plan's blocks beside the old ones: those go first. */
TEST(test_a_plan_in_little_memory) {
  recorder *device = recorder_create();
  const int64_t nbytes[] = {64, 32};
  fsdp_error error = {FSDP_OK, 0, NULL, ""};
  fsdp_arena *arena = arena_fixture_create(device, nbytes, 2);
  (void)arena_fixture_take(arena, 0);
  arena_fixture_give(arena, 0);
  (void)arena_fixture_take(arena, 1); /* in the block of 64 bytes */
  (void)arena_fixture_take(arena, 0); /* a second one */
  CHECK_I64(arena_fixture_stats(arena).nbytes, 64 + 64);
  arena_fixture_give(arena, 0);
  arena_fixture_give(arena, 1);
  recorder_limit_memory(device, 64 + 64);
  CHECK_I64(fsdp_arena_plan(arena, &error), FSDP_OK);
  CHECK_I64(arena_fixture_stats(arena).nbytes, 64 + 32);
  /* Not even that: the arena says so, and goes on later. */
  CHECK(fsdp_arena_trim(arena));
  recorder_limit_memory(device, 64 + 31);
  CHECK_I64(fsdp_arena_plan(arena, &error), FSDP_OUT_OF_MEMORY);
  recorder_limit_memory(device, 0);
  arena_fixture_plan(arena);
  CHECK_I64(arena_fixture_stats(arena).nbytes, 64 + 32);
  arena_fixture_destroy(arena, device);
}

/* --- Failures ------------------------------------------------------------ */

/* A short life of an arena: the first rule with a free, a plan that keeps,
 * allocates and frees, a planned step, a fallback. Stops at the first failure
 * and checks that the refused call left no trace. */
static fsdp_status live(const fsdp_device_ops *ops, fsdp_arena **arena,
                        fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  int64_t client = -1;
  void *data = NULL;

  FSDP_TRY(fsdp_arena_create(ops, arena, error));
  for (int64_t i = 0; i < 5; i++) {
    client = -1;
    status = fsdp_arena_add_client(*arena, 16 * (i + 1), &client, error);
    if (status != FSDP_OK) CHECK_I64(client, -1);
    FSDP_TRY(status);
  }
  for (int iteration = 0; iteration < 3; iteration++) {
    for (int64_t i = 0; i < 5; i++) {
      data = NULL;
      status = fsdp_arena_take(*arena, i, FSDP_LANE_UNSHARD, &data, error);
      if (status != FSDP_OK) {
        CHECK(data == NULL);
        CHECK(fsdp_arena_data(*arena, i) == NULL);
      }
      FSDP_TRY(status);
      if (iteration < 2) { /* a chain; in the third run all hold at once */
        FSDP_TRY(fsdp_arena_give(*arena, i, FSDP_LANE_COMPUTE, error));
      }
    }
    for (int64_t i = 0; iteration == 2 && i < 5; i++) {
      status = fsdp_arena_give(*arena, i, FSDP_LANE_COMPUTE, error);
      /* Given back, failure or not. */
      CHECK(fsdp_arena_data(*arena, i) == NULL);
      FSDP_TRY(status);
    }
    const fsdp_arena_stats before = arena_fixture_stats(*arena);
    status = fsdp_arena_plan(*arena, error);
    if (status != FSDP_OK) {
      const fsdp_arena_stats after = arena_fixture_stats(*arena);
      CHECK_I64(after.num_blocks, before.num_blocks);
      CHECK_I64(after.nbytes, before.nbytes);
      /* The next try succeeds. */
      CHECK_I64(fsdp_arena_plan(*arena, NULL), FSDP_OK);
    }
    FSDP_TRY(status);
  }
done:
  return status;
}

TEST(test_every_port_call_can_fail) {
  int64_t num_calls = 0;
  for (int64_t i = 0;; i++) {
    recorder *device = recorder_create();
    fsdp_arena *arena = NULL;
    fsdp_error error = {FSDP_OK, 0, NULL, ""};
    recorder_fail_at(device, i);
    const fsdp_status status = live(recorder_ops(device), &arena, &error);
    recorder_fail_at(device, -1);
    num_calls = recorder_num_calls(device);
    if (status != FSDP_OK) {
      CHECK(status == FSDP_OUT_OF_MEMORY || status == FSDP_BACKEND);
      CHECK_I64(error.status, status);
      CHECK(strncmp(error.message, "injected at ", 12) == 0);
      /* The arena goes on: a full step works after it. */
      for (int64_t client = 0; client < 5; client++) {
        if (fsdp_arena_data(arena, client) != NULL)
          arena_fixture_give(arena, client);
      }
      for (int64_t client = 0; client < 5; client++) {
        (void)arena_fixture_take(arena, client);
        arena_fixture_give(arena, client);
      }
      arena_fixture_plan(arena);
    }
    arena_fixture_destroy(arena, device);
    if (i >= num_calls) { /* each call of a whole life has failed once */
      CHECK_I64(status, FSDP_OK);
      break;
    }
  }
}

TEST(test_every_allocation_can_fail) {
  for (int64_t i = 0;; i++) {
    recorder *device = recorder_create();
    fsdp_arena *arena = NULL;
    fsdp_error error = {FSDP_OK, 0, NULL, ""};
    fsdp_alloc_fail_at(i);
    const fsdp_status status = live(recorder_ops(device), &arena, &error);
    fsdp_alloc_fail_at(-1);
    if (status != FSDP_OK) {
      CHECK_I64(status, FSDP_OUT_OF_MEMORY);
      CHECK_I64(error.status, FSDP_OUT_OF_MEMORY);
    }
    arena_fixture_destroy(arena, device);
    if (status == FSDP_OK) {
      /* The arena, clients, two of conflicts, blocks; two in each plan that
       * is made: after the first run and after the third. */
      CHECK_I64(i, 5 + 2 * 2);
      break;
    }
  }
}

/* Growing the conflict matrix keeps what it holds, also while blocks are
 * held, and leaves it alone when memory is out. */
TEST(test_clients_added_later_keep_conflicts) {
  recorder *device = recorder_create();
  const int64_t nbytes[] = {8, 8};
  fsdp_arena *arena = arena_fixture_create(device, nbytes, 2);
  (void)arena_fixture_take(arena, 0);
  (void)arena_fixture_take(arena, 1); /* 0 and 1 conflict; 0 stays held */
  arena_fixture_give(arena, 1);
  int64_t client = -1;
  for (int64_t i = 2; i < 64; i++) {
    CHECK_I64(fsdp_arena_add_client(arena, 8, &client, NULL), FSDP_OK);
  }
  /* Client 64 grows three arrays: the clients, which then stay grown, the
   * conflicts and the holders. */
  static const int64_t failing[] = {0, 1, 1};
  for (int i = 0; i < 3; i++) {
    client = -1;
    fsdp_alloc_fail_at(failing[i]);
    CHECK_I64(fsdp_arena_add_client(arena, 8, &client, NULL),
              FSDP_OUT_OF_MEMORY);
    fsdp_alloc_fail_at(-1);
    CHECK_I64(client, -1);
    CHECK_I64(arena_fixture_stats(arena).num_clients, 64);
  }
  for (int64_t i = 64; i < 200; i++) {
    CHECK_I64(fsdp_arena_add_client(arena, 8, &client, NULL), FSDP_OK);
    CHECK_I64(client, i);
  }
  (void)arena_fixture_take(
      arena, 199); /* conflicts with the holder 0 and the giver 1 */
  arena_fixture_give(arena, 199);
  arena_fixture_give(arena, 0);
  arena_fixture_plan(arena);
  CHECK_I64(arena_fixture_stats(arena).num_blocks, 3);
  arena_fixture_destroy(arena, device);
}

/* Plans units of one size that run in a row, each taken before the one before
 * it is given back, or all of them kept. Returns what the plan looked at. */
static int64_t plan_of_many(int64_t num_clients, bool are_kept) {
  recorder *device = recorder_create();
  int64_t *nbytes = fsdp_calloc((size_t)num_clients, sizeof *nbytes);
  CHECK(nbytes != NULL);
  for (int64_t i = 0; i < num_clients; i++) nbytes[i] = 64;
  fsdp_arena *arena = arena_fixture_create(device, nbytes, num_clients);
  for (int64_t i = 0; i < num_clients; i++) {
    (void)arena_fixture_take(arena, i);
    if (i > 0 && !are_kept) arena_fixture_give(arena, i - 1);
  }
  for (int64_t i = are_kept ? 0 : num_clients - 1; i < num_clients; i++) {
    arena_fixture_give(arena, i);
  }
  arena_fixture_plan(arena);
  CHECK_I64(arena_fixture_stats(arena).num_blocks, are_kept ? num_clients : 2);
  const int64_t num_steps = fsdp_arena_priv_plan_steps(arena);
  fsdp_free(nbytes);
  arena_fixture_destroy(arena, device);
  return num_steps;
}

/* A plan costs the conflicts that there are, and a bit for each pair: no loop
 * over colours, clients and clients. */
TEST(test_plans_of_many_clients) {
  const int64_t few = plan_of_many(256, false);
  const int64_t more = plan_of_many(512, false);
  CHECK(few <= 256 * 2 * (256 / 64 + 4));
  CHECK(more <= 512 * 2 * (512 / 64 + 4));
  const int64_t few_kept = plan_of_many(256, true);
  const int64_t more_kept = plan_of_many(512, true);
  CHECK(more_kept <= 5 * few_kept); /* conflicts grow by 4, their cube by 8 */
}

/* A client that needs more from now on gets a block of its own size; the plan
 * is made again. */
TEST(test_resized_client) {
  recorder *device = recorder_create();
  const int64_t nbytes[] = {64, 32};
  fsdp_arena *arena = arena_fixture_create(device, nbytes, 2);
  fsdp_error error;
  for (int64_t i = 0; i < 2; i++) {
    (void)arena_fixture_take(arena, i);
    arena_fixture_give(arena, i);
  }
  CHECK_I64(fsdp_arena_plan(arena, NULL), FSDP_OK);
  void *held = arena_fixture_take(arena, 1);
  CHECK_I64(fsdp_arena_resize_client(arena, 1, 128, &error),
            FSDP_INVALID_STATE);
  CHECK_TEXT(error.message,
             "arena client 1 cannot be resized: it holds a block");
  CHECK(fsdp_arena_data(arena, 1) == held);
  arena_fixture_give(arena, 1);
  CHECK_I64(fsdp_arena_resize_client(arena, 1, 128, NULL), FSDP_OK);
  char *larger = arena_fixture_take(arena, 1);
  memset(larger, 1, 128); /* ASan sees whether it is there */
  arena_fixture_give(arena, 1);
  CHECK_I64(fsdp_arena_plan(arena, NULL), FSDP_OK);
  recorder_clear(device);
  memset(arena_fixture_take(arena, 1), 1, 128);
  arena_fixture_give(arena, 1);
  CHECK(strstr(recorder_tape(device), "alloc") == NULL);
  arena_fixture_destroy(arena, device);
}
