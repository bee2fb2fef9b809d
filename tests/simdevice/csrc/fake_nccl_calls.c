/* The collectives of the fake libnccl, registration. */
#include <stdlib.h>
#include <string.h>

#include "base/dtypes.h"
#include "fake_nccl.h"

typedef enum kind { ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, BROADCAST } kind;

typedef struct operation {
  kind kind;
  const void *send;
  void *receive;
  int64_t numel;
  fsdp_dtype dtype;
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
                             op->dtype, ticket, error);
    default: {
      char *whole = (char *)op->receive - (size_t)comm->rank * nbytes;
      if (whole != op->send) {
        return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                         "the fake NCCL scatters in place only");
      }
      return ops->reduce_scatter(transport, &call, whole, op->numel, op->dtype,
                                 ticket, error);
    }
  }
}

static void run_launch(void *argument) {
  launch *self = argument;
  struct comm *comm = self->comm;
  fsdp_error error = {0};
  uint64_t ticket = 0;
  fsdp_status status = FSDP_OK;
  if (fake_is_aborted(comm)) goto done; /* the stream goes on without it */
  for (int i = 0; i < self->num_operations; i++) {
    FSDP_TRY(start(comm, &self->operations[i], &ticket, &error));
  }
  FSDP_TRY(comm->transport->ops->wait(comm->transport, FSDP_CHANNEL_GATHER,
                                      ticket, &error));
done:
  if (status != FSDP_OK) fake_fail(comm, REMOTE_ERROR, error.message);
}

static void drop_launch(void *argument) {
  launch *self = argument;
  fake_release(self->comm);
  free(self);
}

static long long num_launches;
static long long num_registered;

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
  /* Between a capture and the rest the order is the caller's. */
  const bool is_first =
      comm->last_stream == NULL || comm->last_graph != sim_graph_of(stream);
  comm->last_graph = sim_graph_of(stream);
  if (!is_first && comm->last_stream != stream) {
    sim_stream_wait(stream, comm->last_stream, comm->last_ticket);
  }
  comm->last_stream = stream;
  comm->last_ticket = sim_stream_push(stream, run_launch, drop_launch, self);
  pthread_mutex_unlock(&comm->mutex);
  fake_count(&num_launches, 1);
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
  fake_enter(comm, "a collective");
  fake_note_place(comm, op->kind == ALL_GATHER ? op->receive : op->send);
  const int result = collect(comm, op, stream);
  fake_leave(comm);
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
  if (red_op != SUM) return INVALID_ARGUMENT;
  return add(comm, &op, stream);
}

int ncclAllReduce(const void *send, void *receive, size_t numel, int dtype,
                  int red_op, ncclComm_t comm, void *stream) {
  operation op = {.kind = ALL_REDUCE,
                  .send = send,
                  .receive = receive,
                  .numel = (int64_t)numel};
  if (!find_dtype(dtype, &op.dtype)) return INVALID_ARGUMENT;
  if (red_op != SUM) return INVALID_ARGUMENT;
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

/* ---- Registration, counters ---- */

int ncclCommRegister(ncclComm_t comm, void *buffer, size_t nbytes,
                     void **handle) {
  if (comm == NULL || nbytes == 0) return INVALID_ARGUMENT;
  *handle = buffer;
  fake_count(&num_registered, 1);
  return SUCCESS;
}

int ncclCommDeregister(ncclComm_t comm, void *handle) {
  if (comm == NULL || handle == NULL) return INVALID_ARGUMENT;
  fake_count(&num_registered, -1);
  return SUCCESS;
}

long long fake_nccl_num_launches(void) {
  return fake_read_counter(&num_launches);
}

long long fake_nccl_num_registered(void) {
  return fake_read_counter(&num_registered);
}
