/* The collectives of the fake libnccl. */
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fake_nccl.h"

typedef enum kind {
  ALL_GATHER,
  REDUCE_SCATTER,
  ALL_REDUCE,
  BROADCAST,
  REDUCE,
  SEND,
  RECEIVE
} kind;

typedef struct operation {
  kind kind;
  const void *send;
  void *receive;
  size_t numel;
  ncclDataType_t dtype;
  ncclRedOp_t op;
  int root; /* or the peer */
  bool is_scaled;
  double scale; /* of the operand, before it is added */
  const void *scale_on_device;
  size_t done; /* bytes of a message */
} operation;

/* What a group asks of one communicator on one stream. */
typedef struct launch {
  struct launch *next;
  comm *comm;
  void *stream;
  bool is_captured;
  size_t num_operations;
  size_t capacity;
  operation *operations;
} launch;

static atomic_llong num_launches;
static pthread_once_t order_once = PTHREAD_ONCE_INIT;
static bool keeps_order;

static void read_order(void) {
  const char *said = getenv("NCCL_LAUNCH_ORDER_IMPLICIT");
  keeps_order = said != NULL && strcmp(said, "1") == 0;
}

bool fake_nccl_keeps_order(void) {
  pthread_once(&order_once, read_order);
  return keeps_order;
}

/* ---- Running, on the stream's thread ------------------------------------- */

static const char *const kind_names[] = {"an all-gather", "a reduce-scatter",
                                         "an all-reduce", "a broadcast",
                                         "a reduction"};

static bool is_same(const description *one, const description *other) {
  return one->kind == other->kind && one->dtype == other->dtype &&
         one->op == other->op && one->root == other->root &&
         one->numel == other->numel && one->number == other->number;
}

static void describe(char *text, size_t capacity, int rank,
                     const description *what) {
  snprintf(text, capacity, "rank %d launches %s of %llu %s (op %d, root %d)",
           rank, kind_names[what->kind], (unsigned long long)what->numel,
           dtype_name((ncclDataType_t)what->dtype), what->op, what->root);
}

/* All ranks must be about to do the same. */
static bool agree(comm *self, const operation *op) {
  const description mine = {.kind = (int)op->kind,
                            .dtype = (int)op->dtype,
                            .op = op->is_scaled ? -1 : (int)op->op,
                            .root = op->root,
                            .numel = op->numel,
                            .number = self->num_calls++};
  segment_slot(self->segment, self->rank)->description = mine;
  if (!comm_meet(self, segment_device_meeting(self->segment))) return false;
  for (int rank = 0; rank < self->num_ranks; rank++) {
    const description *theirs = &segment_slot(self->segment, rank)->description;
    if (is_same(theirs, &mine)) continue;
    char own[160];
    char other[160];
    char message[400];
    describe(own, sizeof own, self->rank, &mine);
    describe(other, sizeof other, rank, theirs);
    snprintf(message, sizeof message, "call %llu: %s, but %s",
             (unsigned long long)mine.number, own, other);
    comm_fail(self, ncclInvalidUsage, message);
    return false;
  }
  return true;
}

static void write_piece(comm *self, const operation *op, size_t offset,
                        size_t numel, double scale) {
  const size_t size = size_of(op->dtype);
  char *piece = segment_piece(self->segment, self->rank);
  memcpy(piece, (const char *)op->send + offset * size, numel * size);
  if (op->is_scaled) multiply(piece, numel, op->dtype, scale);
}

static void reduce_piece(comm *self, void *into, size_t skipped, size_t numel,
                         const operation *op) {
  char *operands[1024];
  for (int rank = 0; rank < self->num_ranks; rank++) {
    operands[rank] =
        segment_piece(self->segment, rank) + skipped * size_of(op->dtype);
  }
  if (!reduce(into, operands, self->num_ranks, numel, op->dtype, op->op)) {
    comm_fail(self, ncclInvalidArgument, "a reduction of another dtype");
  }
}

/* What the rank makes of the pieces that all ranks wrote for
 * [offset, + numel). */
static void read_pieces(comm *self, const operation *op, size_t offset,
                        size_t numel) {
  const size_t size = size_of(op->dtype);
  char *receive = op->receive;
  size_t begin = offset;
  size_t end = offset + numel;
  switch (op->kind) {
    case ALL_GATHER:
      for (int rank = 0; rank < self->num_ranks; rank++) {
        memcpy(receive + ((size_t)rank * op->numel + offset) * size,
               segment_piece(self->segment, rank), numel * size);
      }
      break;
    case BROADCAST:
      if (receive == op->send && self->rank == op->root) break;
      memcpy(receive + offset * size, segment_piece(self->segment, op->root),
             numel * size);
      break;
    case REDUCE_SCATTER: {
      const size_t first = (size_t)self->rank * op->numel;
      if (begin < first) begin = first;
      if (end > first + op->numel) end = first + op->numel;
      if (begin >= end) break;
      reduce_piece(self, receive + (begin - first) * size, begin - offset,
                   end - begin, op);
      break;
    }
    default:
      if (op->kind == REDUCE && self->rank != op->root) break;
      reduce_piece(self, receive + offset * size, 0, numel, op);
  }
}

static bool run_collective(comm *self, const operation *op) {
  meeting *where = segment_device_meeting(self->segment);
  if (!agree(self, op)) return false;
  const size_t at_once = PIECE / size_of(op->dtype);
  const size_t total = op->kind == REDUCE_SCATTER
                           ? op->numel * (size_t)self->num_ranks
                           : op->numel;
  const double scale = op->scale_on_device != NULL
                           ? read_scalar(op->scale_on_device, op->dtype)
                           : op->scale;
  const bool writes = op->kind != BROADCAST || self->rank == op->root;
  for (size_t offset = 0; offset < total && !fakecuda_is_noop();
       offset += at_once) {
    const size_t left = total - offset;
    const size_t numel = left < at_once ? left : at_once;
    if (writes) write_piece(self, op, offset, numel, scale);
    if (!comm_meet(self, where)) return false;
    read_pieces(self, op, offset, numel);
    if (!comm_meet(self, where)) return false;
  }
  return comm_meet(self, where); /* descriptions may be written again */
}

/* One more piece of a message, if the peer is ready; messages between two ranks
 * keep their order. */
static bool advance(launch *self, size_t index) {
  operation *op = &self->operations[index];
  comm *own = self->comm;
  const size_t total = op->numel * size_of(op->dtype);
  const bool is_send = op->kind == SEND;
  for (size_t i = 0; i < index; i++) {
    const operation *before = &self->operations[i];
    if (before->kind == op->kind && before->root == op->root &&
        before->done < before->numel * size_of(before->dtype)) {
      return false;
    }
  }
  letter *letter = is_send ? segment_letter(own->segment, own->rank, op->root)
                           : segment_letter(own->segment, op->root, own->rank);
  if ((atomic_load(&letter->is_full) != 0) == is_send) return false;
  if (is_send) {
    const size_t left = total - op->done;
    letter->nbytes = (uint32_t)(left < LETTER ? left : LETTER);
    memcpy(letter->data, (const char *)op->send + op->done, letter->nbytes);
  } else {
    if (letter->nbytes > total - op->done) {
      comm_fail(own, ncclInvalidUsage, "a message is longer than its receive");
      return true;
    }
    memcpy((char *)op->receive + op->done, letter->data, letter->nbytes);
  }
  op->done += letter->nbytes;
  atomic_store(&letter->is_full, is_send ? 1 : 0);
  return true;
}

static bool run_messages(launch *self) {
  for (;;) {
    bool is_any_left = false;
    bool is_any_done = false;
    for (size_t i = 0; i < self->num_operations; i++) {
      const operation *op = &self->operations[i];
      if (op->kind < SEND || op->done >= op->numel * size_of(op->dtype)) {
        continue;
      }
      is_any_left = true;
      is_any_done |= advance(self, i);
    }
    if (!is_any_left) return true;
    if (atomic_load(&self->comm->is_aborted)) return false;
    if (!is_any_done) sched_yield();
  }
}

static bool is_usable(comm *self) {
  pthread_mutex_lock(&self->mutex);
  const bool value = self->result == ncclSuccess;
  pthread_mutex_unlock(&self->mutex);
  return value;
}

static void run_launch(void *argument) {
  launch *self = argument;
  for (size_t i = 0; i < self->num_operations; i++) {
    operation *op = &self->operations[i];
    op->done = 0;
    if (op->kind >= SEND) continue;
    if (!is_usable(self->comm)) return; /* the stream goes on without it */
    if (!run_collective(self->comm, op)) return;
  }
  if (is_usable(self->comm)) run_messages(self);
}

/* ---- Launching ----------------------------------------------------------- */

static void drop_launch(void *argument) {
  launch *self = argument;
  if (self->is_captured) {
    pthread_mutex_lock(&self->comm->mutex);
    self->comm->num_captured--;
    pthread_cond_broadcast(&self->comm->changed);
    pthread_mutex_unlock(&self->comm->mutex);
  }
  comm_release(self->comm);
  free(self->operations);
  free(self);
}

static ncclResult_t enqueue(launch *self) {
  comm *own = self->comm;
  pthread_once(&order_once, read_order);
  pthread_mutex_lock(&own->mutex);
  const ncclResult_t result = own->result;
  if (result != ncclSuccess || fakecuda_is_alone()) {
    pthread_mutex_unlock(&own->mutex);
    if (result == ncclSuccess) atomic_fetch_add(&num_launches, 1);
    free(self->operations);
    free(self);
    return result == ncclInProgress ? ncclInvalidUsage : result;
  }
  own->num_references++;
  /* Between a capture and the rest the order is the caller's. */
  const uint64_t graph = fakecuda_graph_of(self->stream);
  const bool is_first = !own->has_launched || own->last_graph != graph;
  if (!is_first && own->last_stream != self->stream) {
    fakecuda_wait(self->stream, own->last_stream, own->last_ticket);
  }
  own->has_launched = true;
  own->last_graph = graph;
  self->is_captured = graph != 0;
  if (self->is_captured) own->num_captured++;
  own->last_stream = self->stream;
  const int code = fakecuda_push(self->stream, run_launch, drop_launch, self,
                                 &own->last_ticket);
  pthread_mutex_unlock(&own->mutex);
  atomic_fetch_add(&num_launches, 1);
  if (code == 0) return ncclSuccess;
  drop_launch(self);
  return ncclUnhandledCudaError;
}

static _Thread_local int group_depth;
static _Thread_local launch
    *grouped; /* in the order of their first operations */

ncclResult_t ncclGroupStart(void) {
  group_depth++;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void) {
  ncclResult_t result = ncclSuccess;
  if (group_depth == 0) return ncclInvalidUsage;
  if (--group_depth > 0) return ncclSuccess;
  while (grouped != NULL) {
    launch *ready = grouped;
    grouped = ready->next;
    const ncclResult_t own = enqueue(ready);
    if (result == ncclSuccess) result = own;
  }
  return result;
}

static void append(launch *self, const operation *op) {
  if (self->num_operations == self->capacity) {
    self->capacity = 2 * self->capacity + 4;
    self->operations =
        realloc(self->operations, self->capacity * sizeof *self->operations);
    if (self->operations == NULL) abort();
  }
  self->operations[self->num_operations++] = *op;
}

static ncclResult_t collect(comm *own, const operation *op, void *stream) {
  launch **link = &grouped;
  while (*link != NULL && ((*link)->comm != own || (*link)->stream != stream)) {
    link = &(*link)->next;
  }
  if (*link == NULL) {
    launch *made = calloc(1, sizeof *made);
    if (made == NULL) abort();
    made->comm = own;
    made->stream = stream;
    *link = made;
  }
  append(*link, op);
  if (group_depth > 0) return ncclSuccess;
  launch *ready = *link;
  *link = NULL;
  return enqueue(ready);
}

/* ---- Operators with a factor --------------------------------------------- */

enum { MAX_FACTORS = 1024 };
static pthread_mutex_t factors_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct {
  bool is_used;
  double value;
  const void *on_device;
} factors[MAX_FACTORS];

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar,
                                      ncclDataType_t dtype,
                                      ncclScalarResidence_t residence,
                                      ncclComm_t comm) {
  (void)comm;
  const bool is_on_device = residence == ncclScalarDevice;
  int found = 0;
  pthread_mutex_lock(&factors_mutex);
  while (found < MAX_FACTORS && factors[found].is_used) found++;
  if (found < MAX_FACTORS) {
    factors[found].is_used = true;
    factors[found].value = is_on_device ? 0.0 : read_scalar(scalar, dtype);
    factors[found].on_device = is_on_device ? scalar : NULL;
  }
  pthread_mutex_unlock(&factors_mutex);
  *op = (ncclRedOp_t)(ncclNumOps + found);
  return found < MAX_FACTORS ? ncclSuccess : ncclInternalError;
}

ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
  (void)comm;
  if ((int)op < ncclNumOps) return ncclInvalidArgument;
  pthread_mutex_lock(&factors_mutex);
  factors[(int)op - ncclNumOps].is_used = false;
  pthread_mutex_unlock(&factors_mutex);
  return ncclSuccess;
}

/* An operator is what it was when the call was made. */
static bool resolve(operation *op, int num_ranks) {
  const int factor = (int)op->op - ncclNumOps;
  if (op->op == ncclAvg) {
    op->is_scaled = true;
    op->scale = 1.0 / num_ranks;
    op->op = ncclSum;
  } else if (factor >= 0) {
    if (factor >= MAX_FACTORS || !factors[factor].is_used) return false;
    op->is_scaled = true;
    op->scale = factors[factor].value;
    op->scale_on_device = factors[factor].on_device;
    op->op = ncclSum;
  }
  return !op->is_scaled || op->dtype == ncclFloat16 ||
         op->dtype == ncclBfloat16 || op->dtype == ncclFloat32 ||
         op->dtype == ncclFloat64;
}

static size_t send_nbytes(const operation *op, int num_ranks) {
  const size_t nbytes = op->numel * size_of(op->dtype);
  return op->kind == REDUCE_SCATTER ? nbytes * (size_t)num_ranks : nbytes;
}

static size_t receive_nbytes(const operation *op, int num_ranks) {
  const size_t nbytes = op->numel * size_of(op->dtype);
  return op->kind == ALL_GATHER ? nbytes * (size_t)num_ranks : nbytes;
}

/* The real one registers the buffers of a captured collective, each by the
 * handle that it begins in, unless NCCL_GRAPH_REGISTER is 0. */
static bool can_be_captured(const operation *op, int num_ranks) {
  const char *said = getenv("NCCL_GRAPH_REGISTER");
  if (said != NULL && strcmp(said, "0") == 0) return true;
  return (op->send == NULL ||
          fakecuda_is_one_region(op->send, send_nbytes(op, num_ranks))) &&
         (op->receive == NULL ||
          fakecuda_is_one_region(op->receive, receive_nbytes(op, num_ranks)));
}

/* Where the real one would read memory that the device cannot: the process ends
 * there, or a later call fails with "an illegal memory access". */
static bool is_reached(comm *self, const operation *op) {
  const int num_ranks = self->num_ranks;
  const char *name = "the buffer to send";
  bool is_fine = op->send == NULL ||
                 fakecuda_is_reached(op->send, send_nbytes(op, num_ranks));
  if (is_fine) {
    name = "the buffer to receive";
    is_fine = op->receive == NULL ||
              fakecuda_is_reached(op->receive, receive_nbytes(op, num_ranks));
  }
  if (is_fine) return true;
  char message[160];
  snprintf(message, sizeof message,
           "illegal memory access: %s is in memory of the host", name);
  comm_fail(self, ncclUnhandledCudaError, message);
  return false;
}

/* ---- The calls ----------------------------------------------------------- */

static ncclResult_t add(comm *self, operation op, void *stream) {
  if (self == NULL || op.dtype < 0 || op.dtype >= ncclNumTypes || op.root < 0 ||
      op.root >= self->num_ranks) {
    return ncclInvalidArgument;
  }
  comm_enter(self, "a collective");
  ncclResult_t result = ncclInvalidArgument;
  if (fakecuda_graph_of(stream) != 0 &&
      !can_be_captured(&op, self->num_ranks)) {
    result = ncclUnhandledCudaError;
  } else if (!is_reached(self, &op)) {
    result = ncclUnhandledCudaError;
  } else if (resolve(&op, self->num_ranks)) {
    result = collect(self, &op, stream);
  }
  comm_leave(self);
  return result;
}

#define OPERATION(...) \
  ((operation){__VA_ARGS__, .numel = numel, .dtype = dtype})

ncclResult_t ncclAllGather(const void *send, void *receive, size_t numel,
                           ncclDataType_t dtype, ncclComm_t comm,
                           cudaStream_t stream) {
  return add(comm,
             OPERATION(.kind = ALL_GATHER, .send = send, .receive = receive),
             stream);
}

ncclResult_t ncclReduceScatter(const void *send, void *receive, size_t numel,
                               ncclDataType_t dtype, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
  return add(comm,
             OPERATION(.kind = REDUCE_SCATTER, .send = send, .receive = receive,
                       .op = op),
             stream);
}

ncclResult_t ncclAllReduce(const void *send, void *receive, size_t numel,
                           ncclDataType_t dtype, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
  return add(
      comm,
      OPERATION(.kind = ALL_REDUCE, .send = send, .receive = receive, .op = op),
      stream);
}

ncclResult_t ncclBroadcast(const void *send, void *receive, size_t numel,
                           ncclDataType_t dtype, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  return add(comm,
             OPERATION(.kind = BROADCAST, .send = send, .receive = receive,
                       .root = root),
             stream);
}

ncclResult_t ncclBcast(void *buffer, size_t numel, ncclDataType_t dtype,
                       int root, ncclComm_t comm, cudaStream_t stream) {
  return ncclBroadcast(buffer, buffer, numel, dtype, root, comm, stream);
}

ncclResult_t ncclReduce(const void *send, void *receive, size_t numel,
                        ncclDataType_t dtype, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream) {
  return add(comm,
             OPERATION(.kind = REDUCE, .send = send, .receive = receive,
                       .op = op, .root = root),
             stream);
}

ncclResult_t ncclSend(const void *send, size_t numel, ncclDataType_t dtype,
                      int peer, ncclComm_t comm, cudaStream_t stream) {
  return add(comm, OPERATION(.kind = SEND, .send = send, .root = peer), stream);
}

ncclResult_t ncclRecv(void *receive, size_t numel, ncclDataType_t dtype,
                      int peer, ncclComm_t comm, cudaStream_t stream) {
  return add(comm, OPERATION(.kind = RECEIVE, .receive = receive, .root = peer),
             stream);
}

/* ---- Made of messages ---------------------------------------------------- */

ncclResult_t ncclAlltoAll(const void *send, void *receive, size_t numel,
                          ncclDataType_t dtype, ncclComm_t comm,
                          cudaStream_t stream) {
  const size_t nbytes = numel * size_of(dtype);
  ncclResult_t result = ncclGroupStart();
  for (int rank = 0; rank < comm->num_ranks && result == ncclSuccess; rank++) {
    result = ncclSend((const char *)send + (size_t)rank * nbytes, numel, dtype,
                      rank, comm, stream);
    if (result != ncclSuccess) break;
    result = ncclRecv((char *)receive + (size_t)rank * nbytes, numel, dtype,
                      rank, comm, stream);
  }
  const ncclResult_t ended = ncclGroupEnd();
  return result == ncclSuccess ? ended : result;
}

ncclResult_t ncclGather(const void *send, void *receive, size_t numel,
                        ncclDataType_t dtype, int root, ncclComm_t comm,
                        cudaStream_t stream) {
  const size_t nbytes = numel * size_of(dtype);
  ncclResult_t result = ncclGroupStart();
  result = ncclSend(send, numel, dtype, root, comm, stream);
  for (int rank = 0; comm->rank == root && rank < comm->num_ranks; rank++) {
    result = ncclRecv((char *)receive + (size_t)rank * nbytes, numel, dtype,
                      rank, comm, stream);
  }
  const ncclResult_t ended = ncclGroupEnd();
  return result == ncclSuccess ? ended : result;
}

ncclResult_t ncclScatter(const void *send, void *receive, size_t numel,
                         ncclDataType_t dtype, int root, ncclComm_t comm,
                         cudaStream_t stream) {
  const size_t nbytes = numel * size_of(dtype);
  ncclResult_t result = ncclGroupStart();
  result = ncclRecv(receive, numel, dtype, root, comm, stream);
  for (int rank = 0; comm->rank == root && rank < comm->num_ranks; rank++) {
    result = ncclSend((const char *)send + (size_t)rank * nbytes, numel, dtype,
                      rank, comm, stream);
  }
  const ncclResult_t ended = ncclGroupEnd();
  return result == ncclSuccess ? ended : result;
}

long long fake_nccl_num_launches(void) {
  return atomic_load(&num_launches);
}
