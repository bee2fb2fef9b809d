/*
 * A program of the fake runtime alone, for sanitizers: work of many streams
 * over shared memory, ordered by events only, and a graph of it. Says "ok" at
 * the end, or what was read instead.
 *
 *   check_streams [rounds] [forget]   forget: leave one wait out, to see it
 * fail
 */
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fake.h"

enum { NUM_LANES = 4, NUMEL = 256, NUM_REPLAYS = 5 };

typedef struct step {
  const int *source; /* NULL: zeros */
  int *target;
  int expected; /* of the source */
} step;

static int num_wrong; /* written by tasks, read after a synchronisation */

#define CHECK(call)                                        \
  do {                                                     \
    const cudaError_t code = (call);                       \
    if (code != cudaSuccess) {                             \
      printf("%s: %s\n", #call, cudaGetErrorString(code)); \
      exit(1);                                             \
    }                                                      \
  } while (0)

static void run_step(void *argument) {
  const step *self = argument;
  for (int i = 0; i < NUMEL; i++) {
    const int value = self->source == NULL ? 0 : self->source[i];
    if (value != self->expected) {
      __atomic_fetch_add(&num_wrong, 1, __ATOMIC_RELAXED);
    }
    self->target[i] = value + 1;
  }
}

static void push(cudaStream_t stream, const int *source, int *target,
                 int expected) {
  step *self = malloc(sizeof *self);
  if (self == NULL) abort();
  *self = (step){source, target, expected};
  if (fakecuda_push(stream, run_step, free, self, NULL) != 0) abort();
}

static void wait_for(cudaStream_t waiter, cudaStream_t recorder) {
  cudaEvent_t event;
  CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  CHECK(cudaEventRecord(event, recorder));
  CHECK(cudaStreamWaitEvent(waiter, event, 0));
  CHECK(cudaEventDestroy(event));
}

/* A chain over all lanes: each adds one to what the one before wrote. */
static void push_chain(cudaStream_t *lanes, int **blocks, bool forgets) {
  push(lanes[0], NULL, blocks[0], 0);
  for (int i = 1; i < NUM_LANES; i++) {
    if (!(forgets && i == 2)) wait_for(lanes[i], lanes[i - 1]);
    push(lanes[i], blocks[i - 1], blocks[i], i);
  }
}

/* Over memory in the order of its stream, which its reader gives back. */
static void run_chain(cudaStream_t *lanes, bool forgets) {
  int *blocks[NUM_LANES];
  for (int i = 0; i < NUM_LANES; i++) {
    CHECK(cudaMallocAsync((void **)&blocks[i], NUMEL * sizeof(int), lanes[i]));
  }
  push_chain(lanes, blocks, forgets);
  for (int i = 0; i + 1 < NUM_LANES; i++) {
    CHECK(cudaFreeAsync(blocks[i], lanes[i + 1]));
  }
  CHECK(cudaFreeAsync(blocks[NUM_LANES - 1], lanes[NUM_LANES - 1]));
}

/* The same chain, captured and replayed, over memory of its own. */
static void replay_chain(cudaStream_t *lanes) {
  static int memory[NUM_LANES][NUMEL];
  int *blocks[NUM_LANES];
  for (int i = 0; i < NUM_LANES; i++) blocks[i] = memory[i];
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  CHECK(cudaStreamBeginCapture(lanes[0], cudaStreamCaptureModeThreadLocal));
  push_chain(lanes, blocks, false);
  wait_for(lanes[0], lanes[NUM_LANES - 1]);
  CHECK(cudaStreamEndCapture(lanes[0], &graph));
  CHECK(cudaGraphInstantiateWithFlags(&executable, graph, 0));
  for (int i = 0; i < NUM_REPLAYS; i++) {
    CHECK(cudaGraphLaunch(executable, lanes[i % 2]));
    wait_for(lanes[1 - i % 2], lanes[i % 2]);
  }
  CHECK(cudaDeviceSynchronize());
  CHECK(cudaGraphExecDestroy(executable));
  CHECK(cudaGraphDestroy(graph));
  num_wrong += blocks[NUM_LANES - 1][0] != NUM_LANES;
}

int main(int argc, char **argv) {
  const int num_rounds = argc > 1 ? atoi(argv[1]) : 200;
  const bool forgets = argc > 2 && strcmp(argv[2], "forget") == 0;
  cudaStream_t lanes[NUM_LANES];
  for (int i = 0; i < NUM_LANES; i++) {
    CHECK(cudaStreamCreateWithFlags(&lanes[i], cudaStreamNonBlocking));
  }
  for (int seed = 0; seed < num_rounds; seed++) {
    if (seed % 16 == 0) fakecuda_set_schedule((uint64_t)seed, 0.2);
    run_chain(lanes, forgets);
    if (seed % 8 == 7) CHECK(cudaStreamSynchronize(lanes[0]));
  }
  replay_chain(lanes);
  for (int i = 0; i < NUM_LANES; i++) CHECK(cudaStreamDestroy(lanes[i]));
  CHECK(cudaDeviceSynchronize());
  if (num_wrong != 0) {
    printf("%d elements were read too early\n", num_wrong);
    return 1;
  }
  printf("ok\n");
  return 0;
}
