/*
 * The hierarchical transport: a queue of the calls in flight, and what each
 * kind of call does on the two levels.
 */
#include "transports/hierarchical.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"

enum { LABEL_NBYTES = 128 };

typedef enum op_kind {
  ALL_GATHER,
  BROADCAST,
  REDUCE_SCATTER,
  ALL_REDUCE
} op_kind;

typedef struct op {
  op_kind kind;
  fsdp_channel channel;
  fsdp_dtype dtype;
  char *buffer;
  char *scratch;
  int64_t numel;
  int64_t root;
  uint64_t peers_ticket; /* of what it started there */
  char label[LABEL_NBYTES];
} op;

typedef struct hierarchical {
  fsdp_transport base;
  fsdp_transport_ops ops;
  fsdp_hierarchical_parts parts;
  fsdp_host_layout layout;
  int64_t host;  /* this rank's place */
  int64_t local; /* and its place in the host */
  op *queue;     /* calls [first, end) of it are in flight */
  size_t capacity;
  size_t first;
  size_t end;
  uint64_t num_started;
  uint64_t num_ended;
  uint64_t last_tickets[FSDP_NUM_CHANNELS]; /* of the peers */
  fsdp_error failure;                       /* the first one */
} hierarchical;

static hierarchical *self_of(fsdp_transport *transport) {
  return (hierarchical *)transport;
}

static void destroy(fsdp_transport *transport) {
  hierarchical *self = self_of(transport);
  if (self == NULL) return;
  fsdp_free(self->queue);
  fsdp_free(self);
}

static fsdp_status group_edge(fsdp_transport *transport, const fsdp_call *call,
                              fsdp_error *error) {
  (void)transport, (void)call, (void)error;
  return FSDP_OK;
}

/* Failures ----------------------------------------------------------------- */

static void give_up_parts(hierarchical *self, const char *cause) {
  fsdp_transport *const parts[] = {self->parts.local,
                                   self->parts.peers[FSDP_CHANNEL_GATHER],
                                   self->parts.peers[FSDP_CHANNEL_REDUCE]};
  for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
    if (parts[i]->ops->give_up != NULL) parts[i]->ops->give_up(parts[i], cause);
  }
}

static fsdp_status first_failure(const hierarchical *self, fsdp_error *error) {
  if (self->failure.status != FSDP_OK && error != NULL) *error = self->failure;
  return self->failure.status;
}

/* Fails on all ranks because a call failed on one level. */
static fsdp_status fail(hierarchical *self, const op *failed, const char *level,
                        const fsdp_error *cause, fsdp_error *error) {
  if (self->failure.status == FSDP_OK) {
    (void)FSDP_FAIL_WITH(cause->remedy, &self->failure, cause->status,
                         "%s%s%s: %.700s", failed->label,
                         failed->label[0] == '\0' ? "" : ", ", level,
                         cause->message);
    give_up_parts(self, self->failure.message);
  }
  return first_failure(self, error);
}

/* The levels --------------------------------------------------------------- */

static fsdp_call call_of(const op *running, fsdp_channel channel,
                         void *scratch) {
  return (fsdp_call){.channel = channel,
                     .label = running->label[0] == '\0' ? NULL : running->label,
                     .scratch = scratch};
}

static fsdp_status wait_for_local(hierarchical *self, const op *running,
                                  uint64_t ticket, fsdp_error *error) {
  fsdp_transport *local = self->parts.local;
  return local->ops->wait(local, running->channel, ticket, error);
}

/* Where gathers, or reductions, go between hosts. */
static fsdp_channel peers_channel(const op *running) {
  return running->kind == ALL_GATHER || running->kind == BROADCAST
             ? FSDP_CHANNEL_GATHER
             : FSDP_CHANNEL_REDUCE;
}

static fsdp_status wait_for_peers(hierarchical *self, const op *running,
                                  uint64_t ticket, fsdp_error *error) {
  const fsdp_channel channel = peers_channel(running);
  fsdp_transport *peers = self->parts.peers[channel];
  return peers->ops->wait(peers, channel, ticket, error);
}

/* Sends this rank's shard, or the root's buffer, to the peers. */
static fsdp_status start_gather(hierarchical *self, op *started,
                                fsdp_error *error) {
  fsdp_transport *peers = self->parts.peers[FSDP_CHANNEL_GATHER];
  const fsdp_call call = call_of(started, FSDP_CHANNEL_GATHER, NULL);
  const int64_t nbytes = started->numel * started->dtype.itemsize;
  const int64_t num_local = self->layout.num_local;
  fsdp_status status = FSDP_OK;
  if (started->kind == BROADCAST) {
    if (started->root % num_local != self->local) return FSDP_OK;
    FSDP_TRY(peers->ops->broadcast(peers, &call, started->buffer,
                                   started->numel, started->root / num_local,
                                   started->dtype, &started->peers_ticket,
                                   error));
  } else {
    for (int64_t host = 0; host < self->layout.num_hosts; host++) {
      char *slot = started->buffer + (host * num_local + self->local) * nbytes;
      FSDP_TRY(peers->ops->broadcast(peers, &call, slot, started->numel, host,
                                     started->dtype, &started->peers_ticket,
                                     error));
    }
  }
done:
  if (started->peers_ticket > 0) {
    self->last_tickets[FSDP_CHANNEL_GATHER] = started->peers_ticket;
  }
  return status;
}

/* Starts to gather, in this host, the slots of the ranks of `host`. */
static fsdp_status spread(hierarchical *self, const op *ending, int64_t host,
                          uint64_t *ticket, fsdp_error *error) {
  fsdp_transport *local = self->parts.local;
  const fsdp_call call = call_of(ending, ending->channel, NULL);
  const int64_t nbytes = ending->numel * ending->dtype.itemsize;
  char *block = ending->buffer + host * self->layout.num_local * nbytes;
  return local->ops->all_gather(local, &call, block,
                                block + self->local * nbytes, ending->numel,
                                ending->dtype, ticket, error);
}

static fsdp_status end_all_gather(hierarchical *self, const op *ending,
                                  const char **level, fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  uint64_t ticket = 0;
  FSDP_TRY(spread(self, ending, self->host, &ticket, error));
  *level = "between hosts";
  FSDP_TRY(wait_for_peers(self, ending, ending->peers_ticket, error));
  *level = "in this host";
  for (int64_t host = 0; host < self->layout.num_hosts; host++) {
    if (host == self->host) continue;
    FSDP_TRY(spread(self, ending, host, &ticket, error));
  }
  FSDP_TRY(wait_for_local(self, ending, ticket, error));
done:
  return status;
}

static fsdp_status end_broadcast(hierarchical *self, const op *ending,
                                 const char **level, fsdp_error *error) {
  fsdp_transport *local = self->parts.local;
  const fsdp_call call = call_of(ending, ending->channel, NULL);
  const int64_t root = ending->root % self->layout.num_local;
  fsdp_status status = FSDP_OK;
  uint64_t ticket = 0;
  if (root == self->local) {
    *level = "between hosts";
    FSDP_TRY(wait_for_peers(self, ending, ending->peers_ticket, error));
    *level = "in this host";
  }
  FSDP_TRY(local->ops->broadcast(local, &call, ending->buffer, ending->numel,
                                 root, ending->dtype, &ticket, error));
  FSDP_TRY(wait_for_local(self, ending, ticket, error));
done:
  return status;
}

/* Sums, in this host, what it has for each host. */
static fsdp_status sum_in_host(hierarchical *self, const op *ending,
                               fsdp_error *error) {
  fsdp_transport *local = self->parts.local;
  const fsdp_call call = call_of(ending, ending->channel, NULL);
  const int64_t block_nbytes =
      self->layout.num_local * ending->numel * ending->dtype.itemsize;
  fsdp_status status = FSDP_OK;
  uint64_t ticket = 0;
  for (int64_t host = 0; host < self->layout.num_hosts; host++) {
    FSDP_TRY(local->ops->reduce_scatter(
        local, &call, ending->buffer + host * block_nbytes, ending->numel,
        ending->dtype, &ticket, error));
  }
  FSDP_TRY(wait_for_local(self, ending, ticket, error));
done:
  return status;
}

/* Peers sum what lies apart in the buffer, so it goes through scratch memory:
 * a shard for each host, and behind them the peers' own scratch. */
static fsdp_status end_reduce_scatter(hierarchical *self, const op *ending,
                                      const char **level, fsdp_error *error) {
  fsdp_transport *peers = self->parts.peers[FSDP_CHANNEL_REDUCE];
  const int64_t nbytes = ending->numel * ending->dtype.itemsize;
  const int64_t num_hosts = self->layout.num_hosts;
  const int64_t block_nbytes = self->layout.num_local * nbytes;
  char *own = ending->buffer + self->local * nbytes;
  const fsdp_call call = call_of(
      ending, FSDP_CHANNEL_REDUCE,
      peers->ops->wants_scratch ? ending->scratch + num_hosts * nbytes : NULL);
  fsdp_status status = FSDP_OK;
  uint64_t ticket = 0;
  if (nbytes == 0) return FSDP_OK;
  FSDP_TRY(sum_in_host(self, ending, error));
  for (int64_t host = 0; host < num_hosts; host++) {
    memcpy(ending->scratch + host * nbytes, own + host * block_nbytes,
           (size_t)nbytes);
  }
  *level = "between hosts";
  FSDP_TRY(peers->ops->reduce_scatter(peers, &call, ending->scratch,
                                      ending->numel, ending->dtype, &ticket,
                                      error));
  self->last_tickets[FSDP_CHANNEL_REDUCE] = ticket;
  FSDP_TRY(wait_for_peers(self, ending, ticket, error));
  memcpy(own + self->host * block_nbytes, ending->scratch + self->host * nbytes,
         (size_t)nbytes);
done:
  return status;
}

/* The first `part` elements for each rank of the host are summed by their rank,
 * the `rest` by all. */
typedef struct shares {
  int64_t part;
  int64_t rest;
  char *own; /* this rank's part */
  char *rest_at;
} shares;

static shares shares_of(const hierarchical *self, const op *ending) {
  const int64_t itemsize = ending->dtype.itemsize;
  const int64_t num_local = self->layout.num_local;
  const bool is_small =
      ending->numel <= FSDP_HIERARCHICAL_SMALL_NBYTES / itemsize;
  const int64_t part = is_small ? 0 : ending->numel / num_local;
  return (shares){.part = part,
                  .rest = ending->numel - part * num_local,
                  .own = ending->buffer + self->local * part * itemsize,
                  .rest_at = ending->buffer + part * num_local * itemsize};
}

static fsdp_status sum_shares_in_host(hierarchical *self, const op *ending,
                                      const shares *share, fsdp_error *error) {
  fsdp_transport *local = self->parts.local;
  const fsdp_call call = call_of(ending, ending->channel, NULL);
  fsdp_status status = FSDP_OK;
  uint64_t ticket = 0;
  if (share->part > 0) {
    FSDP_TRY(local->ops->reduce_scatter(local, &call, ending->buffer,
                                        share->part, ending->dtype, &ticket,
                                        error));
  }
  if (share->rest > 0) {
    FSDP_TRY(local->ops->all_reduce(local, &call, share->rest_at, share->rest,
                                    ending->dtype, &ticket, error));
  }
  FSDP_TRY(wait_for_local(self, ending, ticket, error));
done:
  return status;
}

static fsdp_status sum_shares_of_hosts(hierarchical *self, const op *ending,
                                       const shares *share, fsdp_error *error) {
  fsdp_transport *peers = self->parts.peers[FSDP_CHANNEL_REDUCE];
  const fsdp_call call = call_of(ending, FSDP_CHANNEL_REDUCE, NULL);
  uint64_t *ticket = &self->last_tickets[FSDP_CHANNEL_REDUCE];
  fsdp_status status = FSDP_OK;
  if (share->part > 0) {
    FSDP_TRY(peers->ops->all_reduce(peers, &call, share->own, share->part,
                                    ending->dtype, ticket, error));
  }
  if (share->rest > 0) {
    FSDP_TRY(peers->ops->all_reduce(peers, &call, share->rest_at, share->rest,
                                    ending->dtype, ticket, error));
  }
  FSDP_TRY(wait_for_peers(self, ending, *ticket, error));
done:
  return status;
}

static fsdp_status end_all_reduce(hierarchical *self, const op *ending,
                                  const char **level, fsdp_error *error) {
  fsdp_transport *local = self->parts.local;
  const fsdp_call call = call_of(ending, ending->channel, NULL);
  const shares share = shares_of(self, ending);
  fsdp_status status = FSDP_OK;
  uint64_t ticket = 0;
  FSDP_TRY(sum_shares_in_host(self, ending, &share, error));
  *level = "between hosts";
  FSDP_TRY(sum_shares_of_hosts(self, ending, &share, error));
  *level = "in this host";
  if (share.part > 0) {
    FSDP_TRY(local->ops->all_gather(local, &call, ending->buffer, share.own,
                                    share.part, ending->dtype, &ticket, error));
    FSDP_TRY(wait_for_local(self, ending, ticket, error));
  }
done:
  return status;
}

static fsdp_status end_op(hierarchical *self, const op *ending,
                          fsdp_error *error) {
  const char *level = "in this host";
  fsdp_error cause;
  fsdp_status status = FSDP_OK;
  switch (ending->kind) {
    case ALL_GATHER:
      status = end_all_gather(self, ending, &level, &cause);
      break;
    case BROADCAST:
      status = end_broadcast(self, ending, &level, &cause);
      break;
    case REDUCE_SCATTER:
      status = end_reduce_scatter(self, ending, &level, &cause);
      break;
    case ALL_REDUCE:
      status = end_all_reduce(self, ending, &level, &cause);
      break;
  }
  if (status == FSDP_OK) return FSDP_OK;
  return fail(self, ending, level, &cause, error);
}

/* The queue ---------------------------------------------------------------- */

static fsdp_status append(hierarchical *self, op **added, fsdp_error *error) {
  if (self->end == self->capacity && self->first > 0) {
    memmove(self->queue, self->queue + self->first,
            (self->end - self->first) * sizeof *self->queue);
    self->end -= self->first;
    self->first = 0;
  }
  if (!fsdp_grow((void **)&self->queue, &self->capacity, self->end + 1,
                 sizeof *self->queue)) {
    return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY,
                     "out of host memory for %zu collectives in flight",
                     self->end + 1);
  }
  *added = &self->queue[self->end];
  return FSDP_OK;
}

/* After a failure nothing may write into the memory of calls any more. */
static void drain(hierarchical *self) {
  for (int i = 0; i < FSDP_NUM_CHANNELS; i++) {
    fsdp_transport *peers = self->parts.peers[i];
    /* The first failure is the one to report. */
    (void)peers->ops->wait(peers, (fsdp_channel)i, self->last_tickets[i], NULL);
  }
  self->first = self->end;
  self->num_ended = self->num_started;
}

static fsdp_status start(hierarchical *self, const fsdp_call *call,
                         const op *made, uint64_t *ticket, fsdp_error *error) {
  op *added = NULL;
  fsdp_error cause;
  if (self->failure.status != FSDP_OK) return first_failure(self, error);
  fsdp_status status = append(self, &added, error);
  if (status != FSDP_OK) return status;
  *added = *made;
  added->channel = call->channel;
  added->scratch = call->scratch;
  if (call->label != NULL) {
    (void)snprintf(added->label, sizeof added->label, "%s", call->label);
  }
  if (peers_channel(added) == FSDP_CHANNEL_GATHER && added->numel > 0) {
    status = start_gather(self, added, &cause);
    if (status != FSDP_OK) {
      status = fail(self, added, "between hosts", &cause, error);
      drain(self);
      return status;
    }
  }
  self->end++;
  *ticket = ++self->num_started;
  return FSDP_OK;
}

static fsdp_status wait_for(fsdp_transport *transport, fsdp_channel channel,
                            uint64_t ticket, fsdp_error *error) {
  hierarchical *self = self_of(transport);
  fsdp_status status = first_failure(self, error);
  (void)channel; /* Note [Order of the levels] */
  while (status == FSDP_OK && self->num_ended < ticket &&
         self->first < self->end) {
    status = end_op(self, &self->queue[self->first], error);
    self->first++;
    self->num_ended++;
  }
  if (status != FSDP_OK) drain(self);
  return status;
}

/* The table ---------------------------------------------------------------- */

static fsdp_status all_gather(fsdp_transport *transport, const fsdp_call *call,
                              void *output, const void *input,
                              int64_t shard_numel, fsdp_dtype dtype,
                              uint64_t *ticket, fsdp_error *error) {
  hierarchical *self = self_of(transport);
  const int64_t nbytes = shard_numel * dtype.itemsize;
  const int64_t rank = self->host * self->layout.num_local + self->local;
  const op made = {.kind = ALL_GATHER,
                   .dtype = dtype,
                   .buffer = output,
                   .numel = shard_numel};
  if (nbytes > 0 && made.buffer + rank * nbytes != input) {
    memcpy(made.buffer + rank * nbytes, input, (size_t)nbytes);
  }
  return start(self, call, &made, ticket, error);
}

static fsdp_status broadcast(fsdp_transport *transport, const fsdp_call *call,
                             void *buffer, int64_t numel, int64_t root,
                             fsdp_dtype dtype, uint64_t *ticket,
                             fsdp_error *error) {
  const op made = {.kind = BROADCAST,
                   .dtype = dtype,
                   .buffer = buffer,
                   .numel = numel,
                   .root = root};
  return start(self_of(transport), call, &made, ticket, error);
}

static fsdp_status reduce_scatter(fsdp_transport *transport,
                                  const fsdp_call *call, void *buffer,
                                  int64_t shard_numel, fsdp_dtype dtype,
                                  uint64_t *ticket, fsdp_error *error) {
  const op made = {.kind = REDUCE_SCATTER,
                   .dtype = dtype,
                   .buffer = buffer,
                   .numel = shard_numel};
  if (call->scratch == NULL && shard_numel > 0) {
    return FSDP_FAIL(
        error, FSDP_INVALID_ARGUMENT,
        "reduce_scatter (%s) of %" PRId64 " elements has no scratch memory",
        call->label == NULL ? "no label" : call->label, shard_numel);
  }
  return start(self_of(transport), call, &made, ticket, error);
}

static fsdp_status all_reduce(fsdp_transport *transport, const fsdp_call *call,
                              void *buffer, int64_t numel, fsdp_dtype dtype,
                              uint64_t *ticket, fsdp_error *error) {
  const op made = {
      .kind = ALL_REDUCE, .dtype = dtype, .buffer = buffer, .numel = numel};
  return start(self_of(transport), call, &made, ticket, error);
}

static bool is_done(fsdp_transport *transport, fsdp_channel channel,
                    uint64_t ticket) {
  (void)channel;
  return ticket <= self_of(transport)->num_ended;
}

static fsdp_status check(fsdp_transport *transport, fsdp_error *error) {
  hierarchical *self = self_of(transport);
  fsdp_transport *local = self->parts.local;
  if (self->failure.status != FSDP_OK) return first_failure(self, error);
  return local->ops->check(local, error);
}

static int64_t reserved_nbytes(const fsdp_transport *transport) {
  const fsdp_transport *local = ((const hierarchical *)transport)->parts.local;
  return local->ops->reserved_nbytes == NULL
             ? 0
             : local->ops->reserved_nbytes(local);
}

static void give_up(fsdp_transport *transport, const char *cause) {
  hierarchical *self = self_of(transport);
  if (self->failure.status != FSDP_OK) return;
  (void)FSDP_FAIL(&self->failure, FSDP_BACKEND, "this rank gave up: %.700s",
                  cause);
  give_up_parts(self, cause);
}

fsdp_status fsdp_hierarchical_create(const fsdp_hierarchical_parts *parts,
                                     fsdp_host_layout layout, int64_t rank,
                                     fsdp_transport **transport,
                                     fsdp_error *error) {
  if (layout.num_hosts < 2 || layout.num_local < 2 || rank < 0 ||
      rank / layout.num_local >= layout.num_hosts) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "rank %" PRId64 " of %" PRId64 " hosts of %" PRId64
                     " ranks: need 2 or more of each",
                     rank, layout.num_hosts, layout.num_local);
  }
  hierarchical *self = fsdp_calloc(1, sizeof *self);
  if (self == NULL) {
    return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY,
                     "out of host memory for a hierarchical transport");
  }
  self->ops = (fsdp_transport_ops){
      .name = FSDP_HIERARCHICAL_NAME,
      .is_host = true,
      .reads_labels = true,
      .wants_scratch = true,
      .destroy = destroy,
      .group_begin = group_edge,
      .group_end = group_edge,
      .all_gather = all_gather,
      .broadcast = broadcast,
      .reduce_scatter = reduce_scatter,
      .all_reduce = all_reduce,
      .wait = wait_for,
      .is_done = is_done,
      .check = check,
      .reserved_nbytes = reserved_nbytes,
      .give_up = give_up,
  };
  self->base.ops = &self->ops;
  self->parts = *parts;
  self->layout = layout;
  self->host = rank / layout.num_local;
  self->local = rank % layout.num_local;
  *transport = &self->base;
  return FSDP_OK;
}
