/*
 * Tests of arena/: which block a client gets, what the plan costs in bytes,
 * that no two holders ever share memory, and every failure of a step.
 */
#include <stdlib.h>

#include "arena/arena.h"
#include "arena/arena_priv.h"
#include "arena_fixture.h"
#include "base/alloc.h"
#include "check.h"
#include "recorder.h"

/* Of the running test, which opens and ends them. */
static recorder *device;
static fsdp_arena *arena;

/* Clients that need so many bytes: "64 32". */
static void arena_open(const char *nbytes) {
  int64_t needs[8];
  int64_t num_clients = 0;
  for (char *at = NULL; *nbytes != '\0'; nbytes = at) {
    needs[num_clients++] = strtoll(nbytes, &at, 10);
  }
  device = recorder_create();
  arena = arena_fixture_create(device, needs, num_clients);
}

static void play_word(const char *word, int64_t number) {
  if (strcmp(word, "end") == 0) { /* there may be no arena */
    arena_fixture_destroy(arena, device);
    return;
  }
  const fsdp_arena_stats stats = arena_fixture_stats(arena);
  const struct {
    const char *word;
    int64_t count;
  } counts[] = {
      {"num_clients", stats.num_clients}, {"num_blocks", stats.num_blocks},
      {"nbytes", stats.nbytes},           {"held_nbytes", stats.held_nbytes},
      {"peak_nbytes", stats.peak_nbytes}, {"num_allocs", stats.num_allocs},
      {"num_frees", stats.num_frees}};
  if (strcmp(word, "take") == 0) {
    (void)arena_fixture_take(arena, number);
  } else if (strcmp(word, "give") == 0) {
    arena_fixture_give(arena, number);
  } else if (strcmp(word, "plan") == 0) {
    arena_fixture_plan(arena);
  } else if (strcmp(word, "trim") == 0) {
    (void)fsdp_arena_trim(arena);
  } else if (strcmp(word, "clear") == 0) {
    recorder_clear(device);
  } else {
    size_t i = 0;
    while (strcmp(word, counts[i].word) != 0) i++;
    CHECK_I64(counts[i].count, number);
  }
}

/* "take 0; give 0; plan; num_blocks 1": calls with clients that must succeed,
 * and what the stats must be. */
static void play(const char *script, int line) {
  while (*script != '\0') {
    char word[16] = "";
    int number = 0;
    const int64_t num_failures = check_num_failures;
    (void)sscanf(script, "%15[^; ] %d", word, &number);
    play_word(word, number);
    if (check_num_failures > num_failures) {
      printf("  '%s %d' at line %d\n", word, number, line);
    }
    script += strcspn(script, ";");
    script += strspn(script, "; ");
  }
}

#define ARENA(script) play((script), __LINE__)

/* --- One block ----------------------------------------------------------- */

TEST(test_take_waits_for_the_free_event) {
  arena_open("64 32");
  recorder_show_memory(device, true);
  void *first = arena_fixture_take(arena, 0);
  ARENA("held_nbytes 64; give 0");
  CHECK(arena_fixture_take(arena, 1) ==
        first); /* it fits, so it is used again */
  ARENA("held_nbytes 64; give 1; trim");
  CHECK_LINES(recorder_tape(device),
              "event e1; alloc 64 b1; "
              /* new: nothing to wait for */
              "record e1 compute; wait unshard e1; record e1 compute; "
              "free 64 b1 after e1; destroy e1; release_memory");
  ARENA("end");
  fsdp_arena_destroy(NULL);
}

TEST(test_wrong_moments) {
  arena_open("64");
  fsdp_error error;
  void *data = NULL;
  int64_t client = -7;
  CHECK_FAILS(fsdp_arena_add_client(arena, 0, &client, &error),
              FSDP_INVALID_ARGUMENT, error.message,
              "arena client 1 needs 0 bytes, must be >= 1");
  CHECK_I64(client, -7);
  CHECK_FAILS(fsdp_arena_give(arena, 0, FSDP_LANE_COMPUTE, &error),
              FSDP_INVALID_STATE, error.message,
              "arena client 0 holds no block to give back");
  ARENA("take 0");
  CHECK_FAILS(fsdp_arena_take(arena, 0, FSDP_LANE_UNSHARD, &data, &error),
              FSDP_INVALID_STATE, error.message,
              "arena client 0 already holds a block");
  CHECK(data == NULL);
  ARENA("num_clients 1; end"); /* the block that is still held, too */
}

/* --- Before a plan ------------------------------------------------------- */

TEST(test_block_given_back_longest_ago_is_taken) {
  arena_open("64 64 64 64");
  ARENA("take 0");
  void *second = arena_fixture_take(arena, 1);
  ARENA("take 2; give 1; give 0; give 2");
  CHECK(arena_fixture_take(arena, 3) == second);
  ARENA("end");
}

TEST(test_too_small_blocks_are_freed_first) {
  arena_open("16 16 64 32");
  ARENA("take 0; take 1; give 0; clear; take 2"); /* frees the block of 0; that
                                                     of 1 is held */
  CHECK_LINES(recorder_tape(device),
              "free 16 after e1; destroy e1; event e3; alloc 64");
  fsdp_arena_stats stats = arena_fixture_stats(arena);
  CHECK_I64(stats.num_blocks, 2);
  CHECK_I64(stats.nbytes, 16 + 64);
  CHECK_I64(stats.held_nbytes, 16 + 64);
  CHECK_I64(stats.num_allocs, 3);
  CHECK_I64(stats.num_frees, 1);
  ARENA("give 2; take 3"); /* 32 fits in 64 */
  ARENA("num_allocs 3; peak_nbytes 80; end");
}

/* --- The plan ------------------------------------------------------------ */

/* Layers that run one after the other: neighbours do not share, so two blocks
 * serve any number of layers. */
TEST(test_chain_needs_two_blocks) {
  arena_open("64 64 64 64 64");
  ARENA("take 0; give 0; take 1; give 1; take 2; give 2; take 3; give 3");
  ARENA("take 4; give 4; num_blocks 1"); /* the first rule reuses */
  ARENA("plan; nbytes 128");
  void *even = arena_fixture_take(arena, 0);
  ARENA("give 0");
  void *odd = arena_fixture_take(arena, 1);
  ARENA("give 1");
  CHECK(even != odd);
  for (int64_t i = 2; i < 5; i++) {
    CHECK(arena_fixture_take(arena, i) == (i % 2 == 0 ? even : odd));
    arena_fixture_give(arena, i);
  }
  ARENA("end");
}

/* A root that stays, layers in forward with one prefetched, largest first. */
TEST(test_plan_in_bytes) {
  arena_open("100 30 50 40 20");
  ARENA("take 0; take 1");
  for (int64_t i = 1; i <= 4; i++) {
    if (i < 4) (void)arena_fixture_take(arena, i + 1); /* prefetch */
    arena_fixture_give(arena, i);
  }
  ARENA("give 0; plan");
  /* Takes and gives are 0 1 2 -1 3 -2 4 -3 -4 -0: 2 meets 1, 3 meets 2, 4
   * meets 3; each follows one that gave back behind a newer gather. So
   * 0 | 2 with 4 | 3 with 1. */
  ARENA("nbytes 190");
  CHECK_I64(recorder_live_nbytes(device), 190);
  ARENA("end");
}

/* A client that gave back behind a collective keeps its block to itself until
 * another one has done so. */
TEST(test_reductions_do_not_share_with_their_followers) {
  arena_open("64 64 64");
  fsdp_error error = {0};
  void *data = NULL;
  for (int64_t i = 0; i < 3; i++) {
    CHECK_OK(fsdp_arena_take(arena, i, FSDP_LANE_COMPUTE, &data, &error));
    CHECK_OK(fsdp_arena_give(arena, i, FSDP_LANE_REDUCE, &error));
  }
  ARENA("plan; num_blocks 2"); /* 0 with 2, 1 */
  ARENA("end");
}

TEST(test_client_that_never_took_is_not_planned) {
  arena_open("64 1048576 64");
  ARENA("take 0; take 2; give 0; give 2; plan; nbytes 128; take 1"); /* late:
                                                                      the first
                                                                      rule, and
                                                                      a new plan
                                                                    */
  ARENA("give 1; plan; nbytes 1048640; end");
}

TEST(test_plan_is_idempotent_and_waits_for_holders) {
  arena_open("64 128");
  ARENA("plan"); /* nothing known: nothing to do */
  ARENA("take 0; give 0; take 1; clear");
  fsdp_alloc_fail_at(0);
  ARENA("plan"); /* skipped: a block is held */
  fsdp_alloc_fail_at(-1);
  CHECK_TEXT(recorder_tape(device), "");
  ARENA("give 1; plan; nbytes 192; clear");
  fsdp_alloc_fail_at(0);
  ARENA("plan");
  fsdp_alloc_fail_at(-1);
  CHECK_TEXT(recorder_tape(device), "");
  ARENA("end");
}

TEST(test_changed_order_falls_back_and_is_learnt) {
  arena_open("64 64 64");
  ARENA(
      "take 0; give 0; take 1; give 1; take 2; give 2; plan; num_blocks 2"); /* 0 and 2 share */
  void *shared = arena_fixture_take(arena, 0);
  CHECK(arena_fixture_take(arena, 2) != shared);
  ARENA("give 0; give 2; plan; num_blocks 3");
  const int64_t num_allocs = arena_fixture_stats(arena).num_allocs;
  ARENA("take 0; take 2; give 0; give 2");
  CHECK_I64(arena_fixture_stats(arena).num_allocs, num_allocs);
  ARENA("end");
}

/* A neighbour that is new in a later step makes a new plan; the end of a step,
 * where the lanes join, makes no neighbours. */
TEST(test_new_neighbours_make_the_plan_dirty) {
  arena_open("64 64 64");
  ARENA("take 0; give 0; take 1; give 1; take 2; give 2; plan; num_blocks 2");
  ARENA(
      "take 2; give 2; plan; num_blocks 2; take 2; give 2; take 0"); /* follows
                                                                      2, with
                                                                      which it
                                                                      shares
                                                                    */
  ARENA("give 0; plan; num_blocks 3; end");
}

TEST(test_trim_frees_what_is_not_held) {
  arena_open("64 32");
  ARENA("take 0; take 1; give 0; give 1; plan");
  void *kept = arena_fixture_take(arena, 0);
  ARENA("trim");
  CHECK(fsdp_arena_data(arena, 0) == kept);
  ARENA("nbytes 64; take 1; nbytes 96; give 0; give 1; trim; num_blocks 0");
  CHECK_I64(recorder_live_nbytes(device), 0);
  ARENA("plan; nbytes 96; peak_nbytes 96; end");
}

/* --- Memory of freed blocks ---------------------------------------------- */

/* A chain of growing clients, so that the first rule frees and the plan too. */
static void take_a_chain(int64_t num_clients) {
  for (int64_t i = 0; i < num_clients; i++) {
    (void)arena_fixture_take(arena, i);
    arena_fixture_give(arena, i);
  }
  ARENA("plan");
}

TEST(test_a_plan_gives_memory_back_once) {
  static const char release[] = "release_memory\n";
  arena_open("16 32 64");
  take_a_chain(3);
  const char *tape = recorder_tape(device);
  CHECK(arena_fixture_stats(arena).num_frees > 0);
  /* After the last free, which only the plan knows. */
  CHECK_TEXT(tape + strlen(tape) - strlen(release), release);
  for (int step = 0; step < 2; step++) {
    ARENA("clear");
    take_a_chain(3);
    CHECK_LACKS(recorder_tape(device), "release_memory");
  }
  CHECK(fsdp_arena_trim(arena));
  CHECK(strstr(recorder_tape(device), release) != NULL);
  ARENA("clear");
  CHECK(!fsdp_arena_trim(arena)); /* nothing was left */
  CHECK_TEXT(recorder_tape(device), "");
  ARENA("end");
}

/* No memory for the plan's blocks beside the old ones: those go first. */
TEST(test_a_plan_in_little_memory) {
  fsdp_error error = {FSDP_OK, 0, NULL, ""};
  arena_open("64 32");
  ARENA("take 0; give 0; take 1"); /* in the block of 64 bytes */
  ARENA("take 0");                 /* a second one */
  ARENA("nbytes 128; give 0; give 1");
  recorder_limit_memory(device, 64 + 64);
  CHECK_OK(fsdp_arena_plan(arena, &error));
  ARENA("nbytes 96");
  /* Not even that: the arena says so, and goes on later. */
  CHECK(fsdp_arena_trim(arena));
  recorder_limit_memory(device, 64 + 31);
  CHECK_I64(fsdp_arena_plan(arena, &error), FSDP_OUT_OF_MEMORY);
  recorder_limit_memory(device, 0);
  ARENA("plan; nbytes 96; end");
}

/* --- Failures ------------------------------------------------------------ */

/* A short life of an arena: the first rule with a free, a plan that keeps,
 * allocates and frees, a planned step, a fallback. Stops at the first failure
 * and checks that the refused call left no trace. */
static fsdp_status live(fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  int64_t client = -1;
  void *data = NULL;

  FSDP_TRY(fsdp_arena_create(recorder_ops(device), &arena, error));
  for (int64_t i = 0; i < 5; i++) {
    client = -1;
    status = fsdp_arena_add_client(arena, 16 * (i + 1), &client, error);
    if (status != FSDP_OK) CHECK_I64(client, -1);
    FSDP_TRY(status);
  }
  for (int iteration = 0; iteration < 3; iteration++) {
    for (int64_t i = 0; i < 5; i++) {
      data = NULL;
      status = fsdp_arena_take(arena, i, FSDP_LANE_UNSHARD, &data, error);
      if (status != FSDP_OK) {
        CHECK(data == NULL);
        CHECK(fsdp_arena_data(arena, i) == NULL);
      }
      FSDP_TRY(status);
      if (iteration < 2) { /* a chain; in the third run all hold at once */
        FSDP_TRY(fsdp_arena_give(arena, i, FSDP_LANE_COMPUTE, error));
      }
    }
    for (int64_t i = 0; iteration == 2 && i < 5; i++) {
      status = fsdp_arena_give(arena, i, FSDP_LANE_COMPUTE, error);
      /* Given back, failure or not. */
      CHECK(fsdp_arena_data(arena, i) == NULL);
      FSDP_TRY(status);
    }
    const fsdp_arena_stats before = arena_fixture_stats(arena);
    status = fsdp_arena_plan(arena, error);
    if (status != FSDP_OK) {
      const fsdp_arena_stats after = arena_fixture_stats(arena);
      CHECK_I64(after.num_blocks, before.num_blocks);
      CHECK_I64(after.nbytes, before.nbytes);
      /* The next try succeeds. */
      CHECK_OK(fsdp_arena_plan(arena, NULL));
    }
    FSDP_TRY(status);
  }
done:
  return status;
}

TEST(test_every_port_call_can_fail) {
  int64_t num_calls = 0;
  for (int64_t i = 0;; i++) {
    device = recorder_create();
    arena = NULL;
    fsdp_error error = {FSDP_OK, 0, NULL, ""};
    recorder_fail_at(device, i);
    const fsdp_status status = live(&error);
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
      ARENA("plan");
    }
    ARENA("end");
    if (i >= num_calls) { /* each call of a whole life has failed once */
      CHECK_OK(status);
      break;
    }
  }
}

TEST(test_every_allocation_can_fail) {
  for (int64_t i = 0;; i++) {
    device = recorder_create();
    arena = NULL;
    fsdp_error error = {FSDP_OK, 0, NULL, ""};
    fsdp_alloc_fail_at(i);
    const fsdp_status status = live(&error);
    fsdp_alloc_fail_at(-1);
    if (status != FSDP_OK) {
      CHECK_I64(status, FSDP_OUT_OF_MEMORY);
      CHECK_I64(error.status, FSDP_OUT_OF_MEMORY);
    }
    ARENA("end");
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
  arena_open("8 8");
  ARENA("take 0; take 1"); /* 0 and 1 conflict; 0 stays held */
  ARENA("give 1");
  int64_t client = -1;
  for (int64_t i = 2; i < 64; i++) {
    CHECK_OK(fsdp_arena_add_client(arena, 8, &client, NULL));
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
    ARENA("num_clients 64");
  }
  for (int64_t i = 64; i < 200; i++) {
    CHECK_OK(fsdp_arena_add_client(arena, 8, &client, NULL));
    CHECK_I64(client, i);
  }
  ARENA("take 199"); /* conflicts with the holder 0 and the giver 1 */
  ARENA("give 199; give 0; plan; num_blocks 3; end");
}

/* Plans units of one size that run in a row, each taken before the one before
 * it is given back, or all of them kept. Returns what the plan looked at. */
static int64_t plan_of_many(int64_t num_clients, bool are_kept) {
  device = recorder_create();
  int64_t *nbytes = fsdp_calloc((size_t)num_clients, sizeof *nbytes);
  CHECK(nbytes != NULL);
  for (int64_t i = 0; i < num_clients; i++) nbytes[i] = 64;
  arena = arena_fixture_create(device, nbytes, num_clients);
  for (int64_t i = 0; i < num_clients; i++) {
    (void)arena_fixture_take(arena, i);
    if (i > 0 && !are_kept) arena_fixture_give(arena, i - 1);
  }
  for (int64_t i = are_kept ? 0 : num_clients - 1; i < num_clients; i++) {
    arena_fixture_give(arena, i);
  }
  ARENA("plan");
  CHECK_I64(arena_fixture_stats(arena).num_blocks, are_kept ? num_clients : 2);
  const int64_t num_steps = fsdp_arena_priv_plan_steps(arena);
  fsdp_free(nbytes);
  ARENA("end");
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
  arena_open("64 32");
  fsdp_error error;
  ARENA("take 0; give 0; take 1; give 1");
  CHECK_OK(fsdp_arena_plan(arena, NULL));
  void *held = arena_fixture_take(arena, 1);
  CHECK_FAILS(fsdp_arena_resize_client(arena, 1, 128, &error),
              FSDP_INVALID_STATE, error.message,
              "arena client 1 cannot be resized: it holds a block");
  CHECK(fsdp_arena_data(arena, 1) == held);
  ARENA("give 1");
  CHECK_OK(fsdp_arena_resize_client(arena, 1, 128, NULL));
  char *larger = arena_fixture_take(arena, 1);
  memset(larger, 1, 128); /* ASan sees whether it is there */
  ARENA("give 1");
  CHECK_OK(fsdp_arena_plan(arena, NULL));
  ARENA("clear");
  memset(arena_fixture_take(arena, 1), 1, 128);
  ARENA("give 1");
  CHECK_LACKS(recorder_tape(device), "alloc");
  ARENA("end");
}

/* What a graph has stays, whatever a plan would do; its free events are told
 * anew. */
TEST(test_pinned) {
  arena_open("64 32");
  ARENA("take 0; take 1; give 0; give 1; plan; num_blocks 2");
  fsdp_arena_pin(arena);
  CHECK_OK(fsdp_arena_resize_client(arena, 0, 128, NULL));
  ARENA("take 0; give 0; plan; trim; num_blocks 3; num_frees 0; take 1; clear");
  CHECK_OK(fsdp_arena_renew_events(arena, FSDP_LANE_COMPUTE, NULL));
  CHECK_LINES(recorder_tape(device), "record e1 compute; record e3 compute");
  ARENA("give 1");
  fsdp_arena_unpin(arena);
  ARENA("plan; num_blocks 2; num_frees 1; end");
}
