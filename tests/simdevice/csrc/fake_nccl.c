/*
 * A libnccl for the simulated device: the entry points that csrc/nccl uses.
 *
 * A collective is a task of the stream that it is given, and moves data between
 * local processes through csrc/shm. Communicators meet in a folder whose path
 * is the unique id. One communicator runs one call at a time, in the order of
 * the calls, on whatever streams they are.
 */
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/dtypes.h"
#include "shm/shm_transport.h"
#include "sim_streams.h"

/* ---- What nccl.h declares --------------------------------------------------
 */

typedef struct comm *ncclComm_t;
typedef struct {
  char internal[128];
} ncclUniqueId;
typedef struct {
  size_t size;
  unsigned int magic;
  unsigned int version;
  int blocking;
  int cga_cluster_size;
  int min_ctas;
  int max_ctas;
  const char *net_name;
  int split_share;
} ncclConfig_t; /* its beginning */

enum {
  SUCCESS = 0,
  INTERNAL_ERROR = 3,
  INVALID_ARGUMENT = 4,
  INVALID_USAGE = 5,
  REMOTE_ERROR = 6,
  IN_PROGRESS = 7
};
enum { SUM = 0, AVG = 4, FIRST_OWN_OP = 5, MAX_OPS = 256 };
enum { VERSION = 22700, PATH_NBYTES = 128, POLL_US = 500 };

SIM_API int ncclGetVersion(int *version);
SIM_API int ncclGetUniqueId(ncclUniqueId *id);
SIM_API int ncclCommInitRankConfig(ncclComm_t *comm, int num_ranks,
                                   ncclUniqueId id, int rank,
                                   ncclConfig_t *config);
SIM_API int ncclCommGetAsyncError(ncclComm_t comm, int *async_error);
SIM_API int ncclCommFinalize(ncclComm_t comm);
SIM_API int ncclCommDestroy(ncclComm_t comm);
SIM_API int ncclCommAbort(ncclComm_t comm);
SIM_API const char *ncclGetErrorString(int result);
SIM_API const char *ncclGetLastError(ncclComm_t comm);
SIM_API int ncclGroupStart(void);
SIM_API int ncclGroupEnd(void);
SIM_API int ncclAllGather(const void *send, void *receive, size_t numel,
                          int dtype, ncclComm_t comm, void *stream);
SIM_API int ncclReduceScatter(const void *send, void *receive, size_t numel,
                              int dtype, int op, ncclComm_t comm, void *stream);
SIM_API int ncclAllReduce(const void *send, void *receive, size_t numel,
                          int dtype, int op, ncclComm_t comm, void *stream);
SIM_API int ncclBroadcast(const void *send, void *receive, size_t numel,
                          int dtype, int root, ncclComm_t comm, void *stream);
SIM_API int ncclRedOpCreatePreMulSum(int *op, void *scalar, int dtype,
                                     int residence, ncclComm_t comm);
SIM_API int ncclRedOpDestroy(int op, ncclComm_t comm);
SIM_API int ncclCommRegister(ncclComm_t comm, void *buffer, size_t nbytes,
                             void **handle);
SIM_API int ncclCommDeregister(ncclComm_t comm, void *handle);

/* For tests: launches of this process so far (a group counts once), and buffers
 * that are registered now. */
SIM_API long long sim_nccl_num_launches(void);
SIM_API long long sim_nccl_num_registered(void);
SIM_API long long sim_nccl_num_comms(void); /* ever made */
/* How the last communicator was configured, as "min_ctas=4 ...". */
SIM_API const char *sim_nccl_last_config(void);

/* ---- Communicators
 * ------------------------------------------------------------ */

struct comm {
  int rank;
  int num_ranks;
  char folder[PATH_NBYTES];
  double scales[MAX_OPS]; /* of the ops that were made; 0: free */
  pthread_mutex_t mutex;  /* over all that follows */
  pthread_cond_t changed;
  fsdp_transport *transport; /* NULL until the ranks have met */
  int result;                /* the asynchronous one */
  bool is_aborted;
  int num_references; /* the user's, the meeting thread's, each task's */
  int num_inside;     /* threads of the user in calls */
  char message[256];
  sim_stream *last_stream; /* of the last call */
  uint64_t last_ticket;
};

static pthread_mutex_t counters_mutex = PTHREAD_MUTEX_INITIALIZER;
static long long num_launches;
static long long num_registered;
static long long num_ids;
static long long num_comms;

static void count(long long *counter, long long change) {
  pthread_mutex_lock(&counters_mutex);
  *counter += change;
  pthread_mutex_unlock(&counters_mutex);
}

static long long read_counter(const long long *counter) {
  pthread_mutex_lock(&counters_mutex);
  const long long value = *counter;
  pthread_mutex_unlock(&counters_mutex);
  return value;
}

static void release(struct comm *comm) {
  pthread_mutex_lock(&comm->mutex);
  const bool is_last = --comm->num_references == 0;
  pthread_mutex_unlock(&comm->mutex);
  if (!is_last) return;
  if (comm->transport != NULL) {
    comm->transport->ops->destroy(comm->transport);
  }
  pthread_mutex_destroy(&comm->mutex);
  pthread_cond_destroy(&comm->changed);
  free(comm);
}

/* The first failure of a communicator is what it reports from then on. */
static void fail(struct comm *comm, int result, const char *message) {
  pthread_mutex_lock(&comm->mutex);
  if (comm->result == SUCCESS || comm->result == IN_PROGRESS) {
    comm->result = result;
    snprintf(comm->message, sizeof comm->message, "%.255s", message);
  }
  pthread_cond_broadcast(&comm->changed);
  pthread_mutex_unlock(&comm->mutex);
}

/* The real one corrupts its memory when two threads use a communicator, also
 * in ncclCommGetAsyncError. Only an abort may come under another call. */
static void enter(struct comm *comm, const char *call) {
  pthread_mutex_lock(&comm->mutex);
  const bool is_alone = comm->num_inside++ == 0;
  comm->num_references++; /* an abort may come before the call's end */
  pthread_mutex_unlock(&comm->mutex);
  if (is_alone) return;
  fprintf(stderr, "fake NCCL: %s on a communicator under another call\n", call);
  abort();
}

static void leave(struct comm *comm) {
  pthread_mutex_lock(&comm->mutex);
  comm->num_inside--;
  pthread_mutex_unlock(&comm->mutex);
  release(comm);
}

static bool is_aborted(struct comm *comm) {
  pthread_mutex_lock(&comm->mutex);
  const bool value = comm->is_aborted;
  pthread_mutex_unlock(&comm->mutex);
  return value;
}

/* ---- The store: files in the folder of the unique id
 * ---------------------------- */

static void path_of(const struct comm *comm, const char *key, char *path,
                    size_t capacity) {
  const int length = snprintf(path, capacity, "%s/", comm->folder);
  const size_t begin = length < 0 ? 0 : (size_t)length;
  for (size_t i = 0; key[i] != '\0' && begin + i + 1 < capacity; i++) {
    path[begin + i] = key[i] == '/' ? '_' : key[i];
    path[begin + i + 1] = '\0';
  }
}

static fsdp_status store_set(void *context, const char *key, const void *value,
                             int64_t nbytes, fsdp_error *error) {
  struct comm *comm = context;
  char path[512];
  char partial[600];
  path_of(comm, key, path, sizeof path);
  snprintf(partial, sizeof partial, "%s.%d", path, comm->rank);
  FILE *file = fopen(partial, "wb");
  if (file == NULL) {
    return FSDP_FAIL(error, FSDP_BACKEND, "%s: %s", partial, strerror(errno));
  }
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
  struct comm *comm = context;
  const struct timespec pause = {.tv_nsec = POLL_US * 1000};
  char path[512];
  path_of(comm, key, path, sizeof path);
  FILE *file = NULL;
  for (int64_t us = 0; (file = fopen(path, "rb")) == NULL; us += POLL_US) {
    if (us > timeout_ms * 1000 || is_aborted(comm)) {
      return FSDP_FAIL(error, FSDP_BACKEND, "no key %s after %lld ms", key,
                       (long long)timeout_ms);
    }
    nanosleep(&pause, NULL);
  }
  char buffer[4096];
  const size_t length = fread(buffer, 1, sizeof buffer, file);
  fclose(file);
  const size_t copied = length < (size_t)capacity ? length : (size_t)capacity;
  memcpy(value, buffer, copied);
  *nbytes = (int64_t)length;
  return FSDP_OK;
}

/* ---- Creation and the end
 * ---------------------------------------------------------- */

int ncclGetVersion(int *version) {
  *version = VERSION;
  return SUCCESS;
}

int ncclGetUniqueId(ncclUniqueId *id) {
  const char *parent = getenv("TMPDIR");
  count(&num_ids, 1);
  memset(id, 0, sizeof *id);
  snprintf(id->internal, sizeof id->internal, "%s/fake_nccl_%d_%lld_XXXXXX",
           parent == NULL ? "/tmp" : parent, (int)getpid(),
           read_counter(&num_ids));
  return mkdtemp(id->internal) == NULL ? INTERNAL_ERROR : SUCCESS;
}

/* Once all ranks have met nobody needs the folder: rank 0 removes it. */
static void remove_folder(const struct comm *comm) {
  char command[PATH_NBYTES + 16];
  if (comm->rank != 0 || strncmp(comm->folder, "/", 1) != 0) return;
  snprintf(command, sizeof command, "rm -rf '%s'", comm->folder);
  if (system(command) != 0) return; /* left for the system to clean */
}

/* Every call waits for all ranks, one without elements too. */
static bool is_met(fsdp_transport *transport) {
  const fsdp_call call = {.channel = FSDP_CHANNEL_GATHER, .label = "meeting"};
  const fsdp_dtype bytes = {.itemsize = 1};
  uint64_t ticket;
  return transport->ops->all_gather(transport, &call, NULL, NULL, 0, bytes,
                                    &ticket, NULL) == FSDP_OK &&
         transport->ops->wait(transport, call.channel, ticket, NULL) == FSDP_OK;
}

static void *meet(void *argument) {
  struct comm *comm = argument;
  const fsdp_store store = {
      .context = comm, .set = store_set, .get = store_get};
  const fsdp_shm_options options = {.nbytes = sizeof options,
                                    .key_prefix = "shm"};
  fsdp_transport *transport = NULL;
  fsdp_shm_verdict verdict = {0};
  fsdp_error error = {0};
  const fsdp_status status =
      fsdp_shm_create(&store, &options, comm->rank, comm->num_ranks, &transport,
                      &verdict, &error);
  if (status == FSDP_OK && verdict.is_possible) {
    if (is_met(transport)) remove_folder(comm);
    pthread_mutex_lock(&comm->mutex);
    comm->transport = transport;
    if (comm->result == IN_PROGRESS) comm->result = SUCCESS;
    pthread_cond_broadcast(&comm->changed);
    pthread_mutex_unlock(&comm->mutex);
  } else {
    fail(comm, INTERNAL_ERROR,
         status == FSDP_OK ? verdict.reason : error.message);
  }
  release(comm);
  return NULL;
}

static char last_config[256];

static void keep_config(const ncclConfig_t *config) {
  pthread_mutex_lock(&counters_mutex);
  snprintf(last_config, sizeof last_config,
           "blocking=%d cga_cluster_size=%d min_ctas=%d max_ctas=%d "
           "net_name=%s split_share=%d",
           config->blocking, config->cga_cluster_size, config->min_ctas,
           config->max_ctas,
           config->net_name == NULL ? "none" : config->net_name,
           config->split_share);
  pthread_mutex_unlock(&counters_mutex);
}

int ncclCommInitRankConfig(ncclComm_t *comm, int num_ranks, ncclUniqueId id,
                           int rank, ncclConfig_t *config) {
  if (rank < 0 || rank >= num_ranks) return INVALID_ARGUMENT;
  if (config != NULL) keep_config(config);
  count(&num_comms, 1);
  struct comm *made = calloc(1, sizeof *made);
  pthread_t thread;
  if (made == NULL) return INTERNAL_ERROR;
  made->rank = rank;
  made->num_ranks = num_ranks;
  made->num_references = 2;
  made->result = IN_PROGRESS;
  memcpy(made->folder, id.internal, sizeof made->folder - 1);
  pthread_mutex_init(&made->mutex, NULL);
  pthread_cond_init(&made->changed, NULL);
  if (pthread_create(&thread, NULL, meet, made) != 0) {
    free(made);
    return INTERNAL_ERROR;
  }
  pthread_detach(thread);
  *comm = made;
  if (config != NULL && config->blocking == 0) return IN_PROGRESS;
  pthread_mutex_lock(&made->mutex);
  while (made->result == IN_PROGRESS) {
    pthread_cond_wait(&made->changed, &made->mutex);
  }
  const int result = made->result;
  pthread_mutex_unlock(&made->mutex);
  return result;
}

int ncclCommGetAsyncError(ncclComm_t comm, int *async_error) {
  enter(comm, "ncclCommGetAsyncError");
  pthread_mutex_lock(&comm->mutex);
  *async_error = comm->result;
  pthread_mutex_unlock(&comm->mutex);
  sched_yield(); /* for whoever should not come */
  leave(comm);
  return SUCCESS;
}

int ncclCommFinalize(ncclComm_t comm) {
  enter(comm, "ncclCommFinalize");
  pthread_mutex_lock(&comm->mutex);
  sim_stream *stream = comm->last_stream;
  const uint64_t ticket = comm->last_ticket;
  const int result = comm->result;
  pthread_mutex_unlock(&comm->mutex);
  if (result == SUCCESS && stream != NULL) {
    sim_stream_synchronize(stream, ticket);
  }
  leave(comm);
  return result;
}

int ncclCommDestroy(ncclComm_t comm) {
  release(comm);
  return SUCCESS;
}

/* What runs or waits on a stream ends with an error; nobody waits for it. */
int ncclCommAbort(ncclComm_t comm) {
  fail(comm, INVALID_USAGE, "aborted");
  pthread_mutex_lock(&comm->mutex);
  comm->is_aborted = true;
  if (comm->transport != NULL) {
    comm->transport->ops->give_up(comm->transport, "it was aborted");
  }
  pthread_mutex_unlock(&comm->mutex);
  release(comm);
  return SUCCESS;
}

const char *ncclGetErrorString(int result) {
  switch (result) {
    case SUCCESS:
      return "no error";
    case INTERNAL_ERROR:
      return "internal error";
    case INVALID_ARGUMENT:
      return "invalid argument";
    case INVALID_USAGE:
      return "invalid usage";
    case REMOTE_ERROR:
      return "remote process exited or there was a network error";
    case IN_PROGRESS:
      return "NCCL operation in progress";
    default:
      return "unknown result code";
  }
}

const char *ncclGetLastError(ncclComm_t comm) {
  return comm == NULL ? "" : comm->message;
}

/* ---- Collectives
 * --------------------------------------------------------------------- */

typedef enum kind { ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, BROADCAST } kind;

typedef struct operation {
  kind kind;
  const void *send;
  void *receive;
  int64_t numel;
  fsdp_dtype dtype;
  double scale;
  int root;
} operation;

enum { MAX_GROUPED = 64 };

typedef struct launch {
  struct comm *comm;
  int num_operations;
  operation operations[MAX_GROUPED];
} launch;

static bool find_dtype(int dtype, fsdp_dtype *found) {
  static const fsdp_dtype dtypes[10] = {
      [0] = {FSDP_DTYPE_INT8, 1},    [1] = {FSDP_DTYPE_UINT8, 1},
      [2] = {FSDP_DTYPE_INT32, 4},   [4] = {FSDP_DTYPE_INT64, 8},
      [6] = {FSDP_DTYPE_FLOAT16, 2}, [7] = {FSDP_DTYPE_FLOAT32, 4},
      [8] = {FSDP_DTYPE_FLOAT64, 8}, [9] = {FSDP_DTYPE_BFLOAT16, 2}};
  if (dtype < 0 || dtype >= 10 || dtypes[dtype].itemsize == 0) return false;
  *found = dtypes[dtype];
  return true;
}

static bool find_scale(struct comm *comm, int op, double *scale) {
  if (op == SUM) {
    *scale = 1.0;
  } else if (op == AVG) {
    *scale = 1.0 / comm->num_ranks;
  } else if (op >= FIRST_OWN_OP && op < MAX_OPS && comm->scales[op] != 0.0) {
    *scale = comm->scales[op];
  } else {
    return false;
  }
  return true;
}

/* csrc/shm gathers and reduces in place; here the buffers may be apart. */
static fsdp_status start(const struct comm *comm, const operation *op,
                         uint64_t *ticket, fsdp_error *error) {
  fsdp_transport *transport = comm->transport;
  const fsdp_transport_ops *ops = transport->ops;
  const fsdp_call call = {.channel = FSDP_CHANNEL_GATHER};
  const size_t nbytes = (size_t)(op->numel * op->dtype.itemsize);
  switch (op->kind) {
    case ALL_GATHER:
      return ops->all_gather(transport, &call, op->receive, op->send, op->numel,
                             op->dtype, ticket, error);
    case BROADCAST:
      if (comm->rank == op->root && op->receive != op->send) {
        memcpy(op->receive, op->send, nbytes);
      }
      return ops->broadcast(transport, &call, op->receive, op->numel, op->root,
                            op->dtype, ticket, error);
    case ALL_REDUCE:
      if (op->receive != op->send) memcpy(op->receive, op->send, nbytes);
      return ops->all_reduce(transport, &call, op->receive, op->numel,
                             op->dtype, op->scale, ticket, error);
    default: {
      char *whole = (char *)op->receive - (size_t)comm->rank * nbytes;
      if (whole != op->send) {
        return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                         "the fake NCCL scatters in place only");
      }
      return ops->reduce_scatter(transport, &call, whole, op->numel, op->dtype,
                                 op->scale, ticket, error);
    }
  }
}

static void run_launch(void *argument) {
  launch *self = argument;
  struct comm *comm = self->comm;
  fsdp_error error = {0};
  uint64_t ticket = 0;
  fsdp_status status = FSDP_OK;
  if (is_aborted(comm)) goto done; /* the stream goes on without it */
  for (int i = 0; i < self->num_operations; i++) {
    FSDP_TRY(start(comm, &self->operations[i], &ticket, &error));
  }
  FSDP_TRY(comm->transport->ops->wait(comm->transport, FSDP_CHANNEL_GATHER,
                                      ticket, &error));
done:
  if (status != FSDP_OK) fail(comm, REMOTE_ERROR, error.message);
  release(comm);
  free(self);
}

static int enqueue(launch *self, sim_stream *stream) {
  struct comm *comm = self->comm;
  pthread_mutex_lock(&comm->mutex);
  if (comm->result != SUCCESS) {
    const int result = comm->result;
    pthread_mutex_unlock(&comm->mutex);
    free(self);
    return result == IN_PROGRESS ? INVALID_USAGE : result;
  }
  comm->num_references++;
  if (comm->last_stream != NULL && comm->last_stream != stream) {
    sim_stream_wait(stream, comm->last_stream, comm->last_ticket);
  }
  comm->last_stream = stream;
  comm->last_ticket = sim_stream_push(stream, run_launch, self);
  pthread_mutex_unlock(&comm->mutex);
  count(&num_launches, 1);
  return SUCCESS;
}

static _Thread_local int group_depth;
static _Thread_local launch *grouped;
static _Thread_local sim_stream *grouped_stream;

int ncclGroupStart(void) {
  group_depth++;
  return SUCCESS;
}

int ncclGroupEnd(void) {
  if (group_depth == 0) return INVALID_USAGE;
  if (--group_depth > 0 || grouped == NULL) return SUCCESS;
  launch *ready = grouped;
  grouped = NULL;
  return enqueue(ready, grouped_stream);
}

static int collect(struct comm *comm, const operation *op, void *stream) {
  if (grouped != NULL && (grouped->comm != comm || grouped_stream != stream ||
                          grouped->num_operations == MAX_GROUPED)) {
    return INVALID_USAGE; /* which the transport does not do */
  }
  launch *target = grouped;
  if (target == NULL) {
    target = calloc(1, sizeof *target);
    if (target == NULL) return INTERNAL_ERROR;
    target->comm = comm;
  }
  target->operations[target->num_operations++] = *op;
  if (group_depth == 0) return enqueue(target, stream);
  grouped = target;
  grouped_stream = stream;
  return SUCCESS;
}

static int add(struct comm *comm, const operation *op, void *stream) {
  enter(comm, "a collective");
  const int result = collect(comm, op, stream);
  leave(comm);
  return result;
}

int ncclAllGather(const void *send, void *receive, size_t numel, int dtype,
                  ncclComm_t comm, void *stream) {
  operation op = {.kind = ALL_GATHER,
                  .send = send,
                  .receive = receive,
                  .numel = (int64_t)numel};
  if (!find_dtype(dtype, &op.dtype)) return INVALID_ARGUMENT;
  return add(comm, &op, stream);
}

int ncclReduceScatter(const void *send, void *receive, size_t numel, int dtype,
                      int red_op, ncclComm_t comm, void *stream) {
  operation op = {.kind = REDUCE_SCATTER,
                  .send = send,
                  .receive = receive,
                  .numel = (int64_t)numel};
  if (!find_dtype(dtype, &op.dtype)) return INVALID_ARGUMENT;
  if (!find_scale(comm, red_op, &op.scale)) return INVALID_ARGUMENT;
  return add(comm, &op, stream);
}

int ncclAllReduce(const void *send, void *receive, size_t numel, int dtype,
                  int red_op, ncclComm_t comm, void *stream) {
  operation op = {.kind = ALL_REDUCE,
                  .send = send,
                  .receive = receive,
                  .numel = (int64_t)numel};
  if (!find_dtype(dtype, &op.dtype)) return INVALID_ARGUMENT;
  if (!find_scale(comm, red_op, &op.scale)) return INVALID_ARGUMENT;
  return add(comm, &op, stream);
}

int ncclBroadcast(const void *send, void *receive, size_t numel, int dtype,
                  int root, ncclComm_t comm, void *stream) {
  operation op = {.kind = BROADCAST,
                  .send = send,
                  .receive = receive,
                  .numel = (int64_t)numel,
                  .root = root};
  if (!find_dtype(dtype, &op.dtype)) return INVALID_ARGUMENT;
  return add(comm, &op, stream);
}

/* ---- Scaled sums, registration, counters
 * ----------------------------------------------- */

static double scalar_value(const void *scalar, int dtype) {
  float single = 0.0F;
  double wide = 0.0;
  uint16_t bits = 0;
  switch (dtype) {
    case 7:
      memcpy(&single, scalar, sizeof single);
      return (double)single;
    case 8:
      memcpy(&wide, scalar, sizeof wide);
      return wide;
    case 9: { /* the upper half of a float */
      memcpy(&bits, scalar, sizeof bits);
      const uint32_t whole = (uint32_t)bits << 16;
      memcpy(&single, &whole, sizeof single);
      return (double)single;
    }
    case 6: { /* positive and normal is what scales are */
      memcpy(&bits, scalar, sizeof bits);
      const uint32_t exponent = (uint32_t)(bits >> 10 & 0x1F) + 127 - 15;
      const uint32_t whole = exponent << 23 | (uint32_t)(bits & 0x3FF) << 13;
      memcpy(&single, &whole, sizeof single);
      return (double)single;
    }
    default:
      return 0.0;
  }
}

int ncclRedOpCreatePreMulSum(int *op, void *scalar, int dtype, int residence,
                             ncclComm_t comm) {
  const double scale = scalar_value(scalar, dtype);
  if (residence != 1 || scale == 0.0) return INVALID_ARGUMENT;
  for (int i = FIRST_OWN_OP; i < MAX_OPS; i++) {
    if (comm->scales[i] != 0.0) continue;
    comm->scales[i] = scale;
    *op = i;
    return SUCCESS;
  }
  return INTERNAL_ERROR;
}

int ncclRedOpDestroy(int op, ncclComm_t comm) {
  if (op < FIRST_OWN_OP || op >= MAX_OPS) return INVALID_ARGUMENT;
  comm->scales[op] = 0.0;
  return SUCCESS;
}

int ncclCommRegister(ncclComm_t comm, void *buffer, size_t nbytes,
                     void **handle) {
  if (comm == NULL || nbytes == 0) return INVALID_ARGUMENT;
  *handle = buffer;
  count(&num_registered, 1);
  return SUCCESS;
}

int ncclCommDeregister(ncclComm_t comm, void *handle) {
  if (comm == NULL || handle == NULL) return INVALID_ARGUMENT;
  count(&num_registered, -1);
  return SUCCESS;
}

long long sim_nccl_num_launches(void) {
  return read_counter(&num_launches);
}

long long sim_nccl_num_comms(void) {
  return read_counter(&num_comms);
}

const char *sim_nccl_last_config(void) {
  return last_config;
}

long long sim_nccl_num_registered(void) {
  return read_counter(&num_registered);
}
