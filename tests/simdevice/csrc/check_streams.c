/*
 * A program of the streams and the allocator alone, for ThreadSanitizer: work
 * of many streams over shared memory, ordered by tickets only. Says "ok" at the
 * end, or what was read instead.
 *
 *   check_streams [rounds] [forget]   forget: leave one wait out, to see it
 * fail
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim_graph.h"
#include "sim_memory.h"
#include "sim_streams.h"

enum { NUM_LANES = 4, NUMEL = 256 };

typedef struct step {
  const int *source;
  int *target;
  int added;
  int expected; /* of the source; -1: any */
} step;

static int num_wrong; /* written by tasks, read after a synchronisation */

static void run_step(void *argument) {
  step *self = argument;
  for (int i = 0; i < NUMEL; i++) {
    const int value = self->source == NULL ? 0 : self->source[i];
    if (self->source != NULL && value != self->expected) {
      __atomic_fetch_add(&num_wrong, 1, __ATOMIC_RELAXED);
    }
    self->target[i] = value + self->added;
  }
}

static uint64_t push(sim_stream *stream, const int *source, int *target,
                     int added, int expected) {
  step *self = malloc(sizeof *self);
  if (self == NULL) abort();
  *self = (step){source, target, added, expected};
  return sim_stream_push(stream, run_step, free, self);
}

/* A chain over all lanes: each adds one to what the one before wrote; the
 * blocks go back to the lane that allocated them once the last one is done. */
static void run_chain(sim_stream **lanes, bool forgets) {
  int *blocks[NUM_LANES];
  for (int i = 0; i < NUM_LANES; i++) {
    blocks[i] = sim_memory_alloc(lanes[i], NUMEL * sizeof(int));
    if (blocks[i] == NULL) abort();
  }
  uint64_t ticket = push(lanes[0], NULL, blocks[0], 1, 0);
  for (int i = 1; i < NUM_LANES; i++) {
    if (!(forgets && i == 2)) sim_stream_wait(lanes[i], lanes[i - 1], ticket);
    ticket = push(lanes[i], blocks[i - 1], blocks[i], 1, i);
  }
  /* Each block was read by the next lane: its own must wait, or be told. */
  for (int i = 0; i + 1 < NUM_LANES; i++) {
    if (i % 2 == 0) {
      sim_stream_wait(lanes[i], lanes[i + 1], sim_stream_last(lanes[i + 1]));
    } else {
      sim_memory_record_stream(blocks[i], lanes[i + 1]);
    }
    sim_memory_free(blocks[i]);
  }
  sim_memory_free(blocks[NUM_LANES - 1]);
}

/* The same chain, captured and replayed, over memory of its own. */
static void replay_chain(sim_stream **lanes, int num_replays) {
  static int blocks[NUM_LANES][NUMEL];
  char reason[256];
  sim_graph *graph = sim_graph_begin(lanes[0]);
  uint64_t ticket = push(lanes[0], NULL, blocks[0], 1, 0);
  for (int i = 1; i < NUM_LANES; i++) {
    sim_stream_wait(lanes[i], lanes[i - 1], ticket);
    ticket = push(lanes[i], blocks[i - 1], blocks[i], 1, i);
  }
  sim_stream_wait(lanes[0], lanes[NUM_LANES - 1], ticket);
  if (!sim_graph_end(graph, reason, sizeof reason)) {
    printf("%s\n", reason);
    num_wrong++;
  }
  for (int i = 0; i < num_replays; i++) {
    sim_graph_replay(graph, lanes[i % 2]);
    sim_stream_wait(lanes[1 - i % 2], lanes[i % 2],
                    sim_stream_last(lanes[i % 2]));
  }
  sim_graph_destroy(graph);
  num_wrong += blocks[NUM_LANES - 1][0] != NUM_LANES;
}

int main(int argc, char **argv) {
  const int num_rounds = argc > 1 ? atoi(argv[1]) : 200;
  const bool forgets = argc > 2 && strcmp(argv[2], "forget") == 0;
  sim_stream *lanes[NUM_LANES];
  for (int i = 0; i < NUM_LANES; i++) lanes[i] = sim_stream_create();
  for (int seed = 0; seed < num_rounds; seed++) {
    if (seed % 16 == 0) sim_set_schedule((uint64_t)seed, 0.2);
    run_chain(lanes, forgets);
    if (seed % 8 == 7) {
      sim_stream_synchronize(lanes[0], sim_stream_last(lanes[0]));
    }
    if (seed % 50 == 49) sim_memory_empty_cache();
  }
  replay_chain(lanes, 5);
  sim_synchronize();
  const sim_memory_stats stats = sim_memory_get_stats();
  if (stats.live_blocks != 0 || stats.live_nbytes != 0) {
    printf("%lld blocks are alive\n", (long long)stats.live_blocks);
    return 1;
  }
  if (num_wrong != 0) {
    printf("%d elements were read too early\n", num_wrong);
    return 1;
  }
  printf("ok, %lld allocations, %lld of them cached\n",
         (long long)stats.num_allocs, (long long)stats.num_cached);
  return 0;
}
