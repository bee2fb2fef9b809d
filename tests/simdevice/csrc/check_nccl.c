/*
 * csrc/nccl over the fake libnccl and simulated streams: ranks are forked,
 * their transports meet through files, and collectives run on two streams with
 * random delays against what they must give. Says "ok" at the end.
 *
 *   check_nccl LIBRARY FOLDER WORLD_SIZE ROUNDS [kill]
 *
 * kill: the last rank kills itself half-way; the others must say so, and end.
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/dtypes.h"
#include "nccl/nccl_transport.h"
#include "sim_memory.h"
#include "sim_streams.h"

enum { NUMEL = 96, POLL_US = 500, NUM_SEGMENTS = 3 };

static const char *folder;

#define CHECK(what)                                                \
  do {                                                             \
    if (!(what)) {                                                 \
      printf("line %d: %s: %s\n", __LINE__, #what, error.message); \
      fflush(stdout);                                              \
      _exit(1);                                                    \
    }                                                              \
  } while (0)

/* ---- A store of files, events of tickets ------------------------------------
 */

static void path_of(const char *key, char *path, size_t capacity) {
  snprintf(path, capacity, "%s/store_%s", folder, key);
  for (char *each = path + strlen(folder) + 1; *each != '\0'; each++) {
    if (*each == '/') *each = '_';
  }
}

static fsdp_status store_set(void *context, const char *key, const void *value,
                             int64_t nbytes, fsdp_error *error) {
  char path[512];
  char partial[600];
  (void)context;
  path_of(key, path, sizeof path);
  snprintf(partial, sizeof partial, "%s.%d", path, (int)getpid());
  FILE *file = fopen(partial, "wb");
  if (file == NULL) return FSDP_FAIL(error, FSDP_BACKEND, "no file %s", path);
  const size_t written = fwrite(value, 1, (size_t)nbytes, file);
  if (fclose(file) != 0 || written != (size_t)nbytes ||
      rename(partial, path) != 0) {
    return FSDP_FAIL(error, FSDP_BACKEND, "cannot write %s", path);
  }
  return FSDP_OK;
}

static fsdp_status store_get(void *context, const char *key, int64_t timeout_ms,
                             void *value, int64_t capacity, int64_t *nbytes,
                             fsdp_error *error) {
  const struct timespec pause = {.tv_nsec = POLL_US * 1000};
  char path[512];
  char buffer[4096];
  FILE *file = NULL;
  (void)context;
  path_of(key, path, sizeof path);
  for (int64_t us = 0; (file = fopen(path, "rb")) == NULL; us += POLL_US) {
    if (us > timeout_ms * 1000) {
      return FSDP_FAIL(error, FSDP_BACKEND, "no key %s", key);
    }
    nanosleep(&pause, NULL);
  }
  const size_t length = fread(buffer, 1, sizeof buffer, file);
  fclose(file);
  memcpy(value, buffer, length < (size_t)capacity ? length : (size_t)capacity);
  *nbytes = (int64_t)length;
  return FSDP_OK;
}

typedef struct event {
  sim_stream *stream;
  uint64_t ticket;
} event;

static fsdp_status event_create(void *context, void **made, fsdp_error *error) {
  (void)context;
  *made = calloc(1, sizeof(event));
  if (*made != NULL) return FSDP_OK;
  return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY, "an event");
}

static void event_destroy(void *context, void *self) {
  (void)context;
  free(self);
}

static fsdp_status event_record(void *context, void *self, void *stream,
                                fsdp_error *error) {
  (void)context;
  (void)error;
  *(event *)self = (event){stream, sim_stream_last(stream)};
  return FSDP_OK;
}

static fsdp_status event_query(void *context, void *self, bool *is_done,
                               fsdp_error *error) {
  const event *recorded = self;
  (void)context;
  (void)error;
  *is_done = recorded->stream == NULL ||
             sim_stream_is_done(recorded->stream, recorded->ticket);
  return FSDP_OK;
}

/* ---- Tasks
 * ---------------------------------------------------------------------- */

/* The value of element i of rank's piece, in round `round`. */
static float value_of(int64_t rank, int round, int64_t i) {
  return (float)(rank * 64 + round % 7 + i % 5);
}

typedef struct fill_argument {
  float *data;
  int64_t rank;
  int round;
} fill_argument;

static void fill(void *argument) {
  fill_argument *self = argument;
  for (int64_t i = 0; i < NUMEL; i++) {
    self->data[i] = value_of(self->rank, self->round, i);
  }
  free(self);
}

static void push_fill(sim_stream *stream, float *data, int64_t rank,
                      int round) {
  fill_argument *self = malloc(sizeof *self);
  if (self == NULL) abort();
  *self = (fill_argument){data, rank, round};
  sim_stream_push(stream, fill, self);
}

/* ---- A rank
 * ------------------------------------------------------------------------ */

typedef struct rank_state {
  fsdp_transport *transport;
  int64_t rank;
  int64_t world_size;
  sim_stream *compute;
  sim_stream *gather;
  sim_stream *reduce;
  float *gathered[NUM_SEGMENTS]; /* world_size * NUMEL each */
  float *reduced;
} rank_state;

static const fsdp_dtype FLOAT = {FSDP_DTYPE_FLOAT32, 4};

/* Filled on `compute`, gathered on `gather` in one group. */
static void gather_round(rank_state *self, int round) {
  const fsdp_transport_ops *ops = self->transport->ops;
  const fsdp_call call = {FSDP_CHANNEL_GATHER, self->gather, "all_gather",
                          NULL};
  fsdp_error error = {0};
  for (int i = 0; i < NUM_SEGMENTS; i++) {
    push_fill(self->compute, self->gathered[i] + self->rank * NUMEL, self->rank,
              round + i);
  }
  sim_stream_wait(self->gather, self->compute, sim_stream_last(self->compute));
  CHECK(ops->group_begin(self->transport, &call, &error) == FSDP_OK);
  for (int i = 0; i < NUM_SEGMENTS; i++) {
    CHECK(ops->all_gather(self->transport, &call, self->gathered[i],
                          self->gathered[i] + self->rank * NUMEL, NUMEL, FLOAT,
                          NULL, &error) == FSDP_OK);
  }
  CHECK(ops->group_end(self->transport, &call, &error) == FSDP_OK);
}

/* The sum, by reduce_scatter or by all_reduce, on `reduce`. */
static void reduce_round(rank_state *self, int round) {
  const fsdp_transport_ops *ops = self->transport->ops;
  const fsdp_call call = {FSDP_CHANNEL_REDUCE, self->reduce, "reduce", NULL};
  fsdp_error error = {0};
  for (int64_t each = 0; each < self->world_size; each++) {
    push_fill(self->compute, self->reduced + each * NUMEL, self->rank,
              round + (int)each);
  }
  sim_stream_wait(self->reduce, self->compute, sim_stream_last(self->compute));
  if (round % 2 == 0) {
    CHECK(ops->reduce_scatter(self->transport, &call, self->reduced, NUMEL,
                              FLOAT, NULL, &error) == FSDP_OK);
  } else {
    CHECK(ops->all_reduce(self->transport, &call, self->reduced,
                          self->world_size * NUMEL, FLOAT, NULL,
                          &error) == FSDP_OK);
  }
}

static void check_round(rank_state *self, int round) {
  fsdp_error error = {0};
  sim_stream_synchronize(self->gather, sim_stream_last(self->gather));
  sim_stream_synchronize(self->reduce, sim_stream_last(self->reduce));
  CHECK(self->transport->ops->check(self->transport, &error) == FSDP_OK);
  for (int i = 0; i < NUM_SEGMENTS; i++) {
    for (int64_t j = 0; j < self->world_size * NUMEL; j++) {
      CHECK(self->gathered[i][j] == value_of(j / NUMEL, round + i, j % NUMEL));
    }
  }
  for (int64_t j = 0; j < NUMEL; j++) {
    double sum = 0.0;
    for (int64_t each = 0; each < self->world_size; each++) {
      sum += (double)value_of(each, round + (int)self->rank, j);
    }
    const double got = (double)self->reduced[self->rank * NUMEL + j];
    const double difference = got - sum;
    CHECK(difference < 1e-3 && difference > -1e-3);
  }
}

static void *new_memory(sim_stream *stream, int64_t numel) {
  void *data = sim_memory_alloc(stream, (size_t)numel * sizeof(float));
  if (data == NULL) abort();
  return data;
}

static void create(rank_state *self, const char *library_path) {
  const fsdp_store store = {.set = store_set, .get = store_get};
  const fsdp_nccl_events events = {.create = event_create,
                                   .destroy = event_destroy,
                                   .record = event_record,
                                   .query = event_query};
  const fsdp_nccl_search search = {.forced_path = library_path};
  fsdp_nccl_library library = {0};
  fsdp_nccl_options options;
  fsdp_error error = {0};
  fsdp_nccl_options_init(&options);
  options.prefix = "check";
  options.events = &events;
  options.timeout_ms = 20000;
  options.poll_ms = 20;
  CHECK(fsdp_nccl_library_open(&search, &library, &error) == FSDP_OK);
  CHECK(fsdp_nccl_create(&library, &options, &store, self->rank,
                         self->world_size, &self->transport,
                         &error) == FSDP_OK);
  self->compute = sim_stream_create();
  self->gather = sim_stream_create();
  self->reduce = sim_stream_create();
  for (int i = 0; i < NUM_SEGMENTS; i++) {
    self->gathered[i] = new_memory(self->compute, self->world_size * NUMEL);
  }
  self->reduced = new_memory(self->compute, self->world_size * NUMEL);
}

/* The others' part of "kill": the streams end, and the error says who is gone.
 */
static void expect_failure(rank_state *self) {
  const struct timespec pause = {.tv_nsec = 20000000};
  fsdp_error error = {0};
  fsdp_status status = FSDP_OK;
  gather_round(self, 0);
  sim_stream_synchronize(self->gather, sim_stream_last(self->gather));
  for (int i = 0; i < 500 && status == FSDP_OK; i++) {
    status = self->transport->ops->check(self->transport, &error);
    nanosleep(&pause, NULL);
  }
  CHECK(status == FSDP_BACKEND);
  CHECK(strstr(error.message, "all_gather") != NULL);
  printf("rank %d: %s\n", (int)self->rank, error.message);
}

static void run_rank(int64_t rank, int64_t world_size, const char *library_path,
                     int num_rounds, bool is_killed) {
  rank_state self = {.rank = rank, .world_size = world_size};
  create(&self, library_path);
  for (int round = 0; round < num_rounds; round++) {
    if (round % 10 == 0) sim_set_schedule((uint64_t)(round + rank), 0.5);
    gather_round(&self, round);
    reduce_round(&self, round);
    check_round(&self, round);
  }
  if (is_killed) {
    if (rank == world_size - 1) raise(SIGKILL);
    expect_failure(&self);
  }
  self.transport->ops->destroy(self.transport);
  fflush(stdout);
  _exit(0);
}

int main(int argc, char **argv) {
  if (argc < 5) return 2;
  folder = argv[2];
  const int world_size = atoi(argv[3]);
  const bool is_killed = argc > 5 && strcmp(argv[5], "kill") == 0;
  pid_t pids[16];
  bool is_right = world_size <= 16;
  for (int rank = 0; rank < world_size && is_right; rank++) {
    pids[rank] = fork();
    if (pids[rank] == 0) {
      run_rank(rank, world_size, argv[1], atoi(argv[4]), is_killed);
    }
    is_right = pids[rank] > 0;
  }
  for (int rank = 0; rank < world_size; rank++) {
    int status = 0;
    if (waitpid(pids[rank], &status, 0) < 0) return 1;
    if (is_killed && rank == world_size - 1) {
      is_right = is_right && WIFSIGNALED(status);
    } else {
      is_right = is_right && WIFEXITED(status) && WEXITSTATUS(status) == 0;
    }
  }
  if (is_right) printf("ok\n");
  return is_right ? 0 : 1;
}
