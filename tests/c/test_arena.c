/*
 * Tests of arena/: which memory a client gets, what waits for it, when it goes,
 * and every failure of a step.
 */
#include <stdlib.h>

#include "arena/arena.h"
#include "base/alloc.h"
#include "check.h"
#include "every_allocation.h"
#include "recorder.h"

/* Of the running test. */
static recorder *device;
static fsdp_arena *arena;

static void end(void) {
  if (device == NULL) return;
  CHECK_TEXT(recorder_race(device), "");
  fsdp_arena_destroy(arena);
  CHECK_I64(recorder_live_blocks(device), 0);
  CHECK_I64(recorder_live_events(device), 0);
  CHECK_I64(fsdp_alloc_live(), 0);
  recorder_destroy(device);
  arena = NULL;
  device = NULL;
}

/* A device that has no arena yet; the next one, or the end of the test, ends
 * both. */
static void open_device(bool is_host) {
  end();
  check_at_end(end);
  device = recorder_create();
  recorder_set_host(device, is_host);
}

/* Clients that need so many bytes: "64 32". */
static void arena_open(const char *nbytes, bool is_host) {
  open_device(is_host);
  CHECK_OK(fsdp_arena_create(recorder_ops(device), &arena, NULL));
  int64_t num_clients = 0;
  for (char *at = NULL; *nbytes != '\0'; nbytes = at) {
    int64_t client = -1;
    CHECK_OK(
        fsdp_arena_add_client(arena, strtoll(nbytes, &at, 10), &client, NULL));
    CHECK_I64(client, num_clients++);
  }
}

static void *take(int64_t client) {
  void *data = NULL;
  CHECK_OK(fsdp_arena_take(arena, client, FSDP_LANE_UNSHARD, &data, NULL));
  CHECK(data != NULL && data == fsdp_arena_data(arena, client));
  return data;
}

static void give(int64_t client) {
  CHECK_OK(fsdp_arena_give(arena, client, FSDP_LANE_COMPUTE, NULL));
  CHECK(fsdp_arena_data(arena, client) == NULL);
}

static fsdp_arena_stats get_stats(void) {
  fsdp_arena_stats stats;
  fsdp_arena_get_stats(arena, &stats);
  return stats;
}

static void play_word(const char *word, int64_t number) {
  const fsdp_arena_stats stats = get_stats();
  void *data = NULL;
  const struct {
    const char *word;
    int64_t count;
  } counts[] = {
      {"num_clients", stats.num_clients}, {"num_blocks", stats.num_blocks},
      {"nbytes", stats.nbytes},           {"held_nbytes", stats.held_nbytes},
      {"peak_nbytes", stats.peak_nbytes}, {"num_allocs", stats.num_allocs},
      {"num_frees", stats.num_frees}};
  if (strcmp(word, "take") == 0) {
    (void)take(number);
  } else if (strcmp(word, "pack") == 0) { /* a take on COMPUTE */
    CHECK_OK(fsdp_arena_take(arena, number, FSDP_LANE_COMPUTE, &data, NULL));
  } else if (strcmp(word, "give") == 0) {
    give(number);
  } else if (strcmp(word, "reduce") == 0) { /* a give on REDUCE */
    CHECK_OK(fsdp_arena_give(arena, number, FSDP_LANE_REDUCE, NULL));
  } else if (strcmp(word, "reserve") == 0) {
    CHECK_OK(fsdp_arena_reserve(arena, number, NULL));
  } else if (strcmp(word, "unreserve") == 0) {
    fsdp_arena_unreserve(arena);
  } else if (strcmp(word, "settle") == 0) {
    CHECK_OK(fsdp_arena_settle(arena, NULL));
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

/* "take 0; give 0; settle; num_blocks 1": calls with clients that must succeed,
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

/* --- Any device ---------------------------------------------------------- */

TEST(test_wrong_moments) {
  arena_open("64", false);
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
  CHECK_FAILS(fsdp_arena_resize_client(arena, 0, 128, &error),
              FSDP_INVALID_STATE, error.message,
              "arena client 0 cannot be resized: it holds a block");
  ARENA("num_clients 1"); /* the block that is still held, too */
  fsdp_arena_destroy(NULL);
}

TEST(test_resized_client) {
  arena_open("32", false);
  CHECK_OK(fsdp_arena_resize_client(arena, 0, 128, NULL));
  memset(take(0), 1, 128); /* ASan sees whether it fits */
  ARENA("nbytes 128; give 0");
}

/* --- A device with streams ----------------------------------------------- */

/* The lane waits for COMPUTE, which may still use the memory; then the block is
 * COMPUTE's again at once. */
TEST(test_a_gather) {
  arena_open("64", false);
  recorder_show_memory(device, true);
  ARENA("take 0; held_nbytes 64; give 0; held_nbytes 0; nbytes 0");
  CHECK_LINES(recorder_tape(device),
              "event e1; alloc 64 b1; record e1 compute; wait unshard e1; "
              "free 64 b1");
}

/* Allocated a unit ahead: the gather waits for what COMPUTE had then. Another
 * size is of no use; the slots' events are used again. */
TEST(test_a_reserved_block) {
  arena_open("64 32", false);
  ARENA("take 0; reserve 32; num_blocks 2; held_nbytes 64; reserve 32; give 0");
  ARENA("num_allocs 2; clear; take 1");
  CHECK_LINES(recorder_tape(device), "wait unshard e2");
  ARENA("num_blocks 1; clear; reserve 32; take 0");
  CHECK_LINES(recorder_tape(device),
              "alloc 32; record e1 compute; free 32; alloc 64; "
              "record e1 compute; wait unshard e1");
  ARENA("reserve 32; reserve 64; nbytes 160; unreserve; nbytes 96; clear");
  ARENA("give 0; give 1; unreserve; num_blocks 0");
  CHECK_LINES(recorder_tape(device), "free 64; free 32");
}

/* One reduction runs beside the backward of the next unit, whose gradients take
 * its memory. A gather between them does not wait for it. */
TEST(test_a_reduction) {
  arena_open("64 64 64", false);
  ARENA("pack 0; reduce 0; nbytes 64; held_nbytes 0; clear; take 2");
  CHECK_LACKS(recorder_tape(device), "compute e1");
  ARENA("clear; pack 1; nbytes 128; give 2");
  CHECK_LINES(recorder_tape(device),
              "wait compute e1; free 64; alloc 64; free 64");
  ARENA("reduce 1; clear; settle; nbytes 0");
  CHECK_LINES(recorder_tape(device), "wait compute e1; free 64");
  ARENA("peak_nbytes 128");
}

/* A unit that is reduced twice takes a block while the first one leaves. */
TEST(test_two_blocks_of_a_client_leave) {
  arena_open("64 64", false);
  ARENA("take 0; reduce 0; take 0; reduce 0; num_blocks 2; pack 1");
  ARENA("num_blocks 1; give 1; num_blocks 0");
}

/* Memory that is short: what leaves and what is reserved goes, and then the
 * call is made again. Nothing is reserved of the last memory. */
TEST(test_little_memory) {
  fsdp_error error;
  void *data = NULL;
  arena_open("64 64 96", false);
  ARENA("pack 0; reduce 0; reserve 32");
  recorder_limit_memory(device, 128);
  ARENA("take 2; num_blocks 1; nbytes 96; clear; reserve 64; num_blocks 1");
  CHECK_FAILS(fsdp_arena_take(arena, 1, FSDP_LANE_UNSHARD, &data, &error),
              FSDP_OUT_OF_MEMORY, error.message, "32 of 128 bytes are left");
  CHECK(fsdp_arena_data(arena, 1) == NULL);
  CHECK(!fsdp_arena_trim(arena));
  recorder_limit_memory(device, 0);
  ARENA("take 1");
}

/* --- A host -------------------------------------------------------------- */

TEST(test_a_host_keeps_one_block_of_a_size) {
  arena_open("64 64 64 32", true);
  void *first = take(0);
  void *second = take(1);
  ARENA("give 0; give 1; num_blocks 1"); /* the second: it is in the caches */
  CHECK(take(2) == second);
  ARENA("give 2; take 3; num_blocks 1; nbytes 32"); /* 64 is of no use */
  ARENA("give 3; nbytes 32; settle; nbytes 0; held_nbytes 0");
  ARENA("num_allocs 3; num_frees 3; reserve 64; num_blocks 0");
  (void)first;
}

/* Whoever takes a free block, or frees it, waits for its last use. */
TEST(test_a_host_waits) {
  arena_open("64 64", true);
  ARENA("take 0; reduce 0; clear; take 1");
  CHECK_LINES(recorder_tape(device), "wait unshard e1");
  ARENA("reduce 1; clear; trim");
  CHECK_LINES(recorder_tape(device), "wait compute e1; free 64");
}

/* --- Failures ------------------------------------------------------------ */

/* Two steps of three units: reserved, gathered, packed and reduced. Stops at
 * the first failure and checks that the refused call left no trace. */
static fsdp_status live(fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  int64_t client = -1;
  void *data = NULL;

  FSDP_TRY(fsdp_arena_create(recorder_ops(device), &arena, error));
  for (int64_t i = 0; i < 6; i++) {
    client = -1;
    status = fsdp_arena_add_client(arena, 16 * (i / 2 + 1), &client, error);
    if (status != FSDP_OK) CHECK_I64(client, -1);
    FSDP_TRY(status);
  }
  for (int64_t i = 0; i < 6; i++) {
    const bool is_grad = i % 2 != 0;
    data = NULL;
    status = fsdp_arena_take(arena, i,
                             is_grad ? FSDP_LANE_COMPUTE : FSDP_LANE_UNSHARD,
                             &data, error);
    if (status != FSDP_OK) {
      CHECK(data == NULL);
      CHECK(fsdp_arena_data(arena, i) == NULL);
    }
    FSDP_TRY(status);
    FSDP_TRY(fsdp_arena_reserve(arena, 16 * (i / 2 + 2), error));
    status = fsdp_arena_give(
        arena, i, is_grad ? FSDP_LANE_REDUCE : FSDP_LANE_COMPUTE, error);
    CHECK(fsdp_arena_data(arena, i) == NULL); /* given, failure or not */
    FSDP_TRY(status);
  }
  FSDP_TRY(fsdp_arena_settle(arena, error));
done:
  return status;
}

static void live_with_failures(bool is_host) {
  for (int64_t i = 0;; i++) {
    open_device(is_host);
    fsdp_error error = {0};
    recorder_fail_at(device, i);
    const fsdp_status status = live(&error);
    recorder_fail_at(device, -1);
    const bool has_failed = recorder_num_calls(device) > i;
    if (status != FSDP_OK) {
      CHECK(status == FSDP_OUT_OF_MEMORY || status == FSDP_BACKEND);
      CHECK_I64(error.status, status);
      CHECK(strncmp(error.message, "injected at ", 12) == 0);
      /* The arena goes on: a full step works after it. */
      const int64_t num_clients = arena == NULL ? 0 : get_stats().num_clients;
      for (int64_t client = 0; client < num_clients; client++) {
        if (fsdp_arena_data(arena, client) != NULL) give(client);
        (void)take(client);
        give(client);
      }
      ARENA("unreserve; settle; num_blocks 0");
    }
    recorder_clear_race(device); /* after a wait that failed */
    if (!has_failed) {
      CHECK_OK(status);
      break;
    }
  }
}

TEST(test_every_port_call_can_fail) {
  live_with_failures(false);
  live_with_failures(true);
}

static fsdp_status live_and_end(void *context, fsdp_error *error) {
  (void)context;
  open_device(false);
  const fsdp_status status = live(error);
  end();
  return status;
}

TEST(test_every_allocation_can_fail) {
  /* The arena, clients, blocks. */
  CHECK_I64(every_allocation(live_and_end, NULL), 3);
}
