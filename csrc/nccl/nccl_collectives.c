/*
 * Collectives: checked, collected between group_begin and group_end, and given
 * to NCCL in one launch.
 *
 * A group of NCCL belongs to a thread, which must close it. Since the
 * collectives are collected here, no group is open in NCCL between two calls,
 * and a caller that stops half-way leaves nothing behind.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "base/arith.h"
#include "base/dtypes.h"
#include "nccl/nccl_priv.h"

static const char *kind_name(fsdp_nccl_kind kind) {
  static const char *const names[] = {"all_gather", "broadcast",
                                      "reduce_scatter", "all_reduce"};
  return names[kind];
}

/* What every call checks: the channel exists, and this is no forked child. */
static fsdp_status check_call(const fsdp_nccl_transport *transport,
                              const fsdp_call *call, fsdp_error *error) {
  if ((unsigned)call->channel >= (unsigned)FSDP_NUM_CHANNELS) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT, "there is no channel %d",
                     (int)call->channel);
  }
  if (fsdp_nccl_priv_is_forked(transport)) {
    return FSDP_FAIL(error, FSDP_INVALID_STATE,
                     "rank %" PRId64
                     ": this process was forked from the one that joined the "
                     "NCCL group and cannot use it; start it anew, or spawn",
                     transport->rank);
  }
  return FSDP_OK;
}

/* The channel that has the call's communicator. */
static fsdp_channel channel_of(const fsdp_nccl_transport *transport,
                               const fsdp_call *call) {
  return transport->options.splits_channels ? call->channel
                                            : FSDP_CHANNEL_GATHER;
}

/* Gives one collective to NCCL, on the channel's communicator and stream. */
static int enqueue(const fsdp_nccl_transport *transport,
                   const fsdp_nccl_channel *channel,
                   const fsdp_nccl_collective *c) {
  const fsdp_nccl_api *api = &transport->api;
  fsdp_nccl_comm *comm = channel->comm_in_use;
  switch (c->kind) {
    case FSDP_NCCL_ALL_GATHER:
      return api->all_gather(c->send, c->receive, c->numel, c->dtype, comm,
                             channel->stream);
    case FSDP_NCCL_BROADCAST:
      return api->broadcast(c->send, c->receive, c->numel, c->dtype, c->root,
                            comm, channel->stream);
    case FSDP_NCCL_REDUCE_SCATTER:
      return api->reduce_scatter(c->send, c->receive, c->numel, c->dtype, c->op,
                                 comm, channel->stream);
    case FSDP_NCCL_ALL_REDUCE:
    default:
      return api->all_reduce(c->send, c->receive, c->numel, c->dtype, c->op,
                             comm, channel->stream);
  }
}

/* Gives NCCL all collectives of the channel, in one group if there are several.
 * Returns the first result that is a failure. */
static int launch(const fsdp_nccl_transport *transport,
                  const fsdp_nccl_channel *channel) {
  const bool is_group = channel->num_collectives > 1;
  int first = FSDP_NCCL_SUCCESS;
  if (is_group) {
    first = transport->api.group_start();
    if (first != FSDP_NCCL_SUCCESS) return first;
  }
  for (size_t i = 0; i < channel->num_collectives; i++) {
    first = enqueue(transport, channel, &channel->collectives[i]);
    if (first != FSDP_NCCL_SUCCESS) break;
  }
  if (!is_group) return first;
  /* After a failure too: the thread must close its group. */
  const int result = transport->api.group_end();
  return first == FSDP_NCCL_SUCCESS ? result : first;
}

/* The next operation of the channel. From now on it is this rank's position. */
static fsdp_nccl_operation begin_operation(fsdp_nccl_transport *transport,
                                           fsdp_nccl_channel *channel,
                                           const char *name,
                                           const char *label) {
  fsdp_nccl_operation operation = {.started_ms = fsdp_nccl_priv_now_ms(),
                                   .name = name};
  (void)pthread_mutex_lock(&transport->lock);
  operation.sequence = channel->last.sequence + 1;
  (void)snprintf(operation.label, sizeof operation.label, "%s", label);
  channel->last = operation;
  (void)pthread_mutex_unlock(&transport->lock);
  return operation;
}

/* Launches in the order of all launches of the process. FSDP_OK when NCCL was
 * called; result [out] what NCCL returned. */
static fsdp_status launch_in_order(fsdp_nccl_transport *transport,
                                   const fsdp_nccl_channel *channel,
                                   int *result, fsdp_error *error) {
  fsdp_nccl_priv_begin_launch(transport);
  /* The transport may have failed while another thread's launch hung. */
  const fsdp_status status =
      fsdp_nccl_priv_first_error(transport, false, error);
  if (status == FSDP_OK) *result = launch(transport, channel);
  fsdp_nccl_priv_end_launch(transport);
  return status;
}

/* Gives the collectives to NCCL, on a channel that this thread uses. */
static fsdp_status issue_locked(fsdp_nccl_transport *transport,
                                fsdp_channel index, fsdp_error *error) {
  fsdp_nccl_channel *channel = &transport->channels[index];
  int result = FSDP_NCCL_SUCCESS;
  fsdp_error cause;
  fsdp_status status = FSDP_OK;

  if (channel->comm_in_use == NULL) {
    FSDP_TRY(fsdp_nccl_priv_connect(transport, index, error));
  }
  const fsdp_nccl_operation operation =
      begin_operation(transport, channel,
                      kind_name(channel->collectives[0].kind), channel->label);
  FSDP_TRY(launch_in_order(transport, channel, &result, error));
  if (result != FSDP_NCCL_SUCCESS) {
    return fsdp_nccl_priv_fail_result(transport, index, operation.name, result,
                                      error);
  }
  /* What is captured has no end to ask for: not even its event may be asked. */
  if (channel->is_captured) return FSDP_OK;
  status = fsdp_nccl_priv_track(transport, index, &operation, channel->stream,
                                &cause);
  if (status != FSDP_OK) status = fsdp_nccl_priv_fail(transport, &cause, error);
done:
  return status;
}

static fsdp_status issue(fsdp_nccl_transport *transport, fsdp_channel index,
                         fsdp_error *error) {
  fsdp_nccl_channel *channel = &transport->channels[index];
  fsdp_status status = fsdp_nccl_priv_lock_channel(transport, index, error);
  if (status == FSDP_OK) {
    if (channel->num_collectives > 0) {
      status = issue_locked(transport, index, error);
    }
    fsdp_nccl_priv_unlock_channel(transport, index);
    /* The complete error, with the other ranks' positions; also when this call
     * succeeded on a communicator that was being aborted. */
    const fsdp_status first =
        fsdp_nccl_priv_first_error(transport, true, error);
    if (first != FSDP_OK) status = first;
  }
  channel->num_collectives = 0;
  channel->is_group_open = false;
  return status;
}

fsdp_status fsdp_nccl_priv_group_begin(fsdp_transport *base,
                                       const fsdp_call *call,
                                       fsdp_error *error) {
  fsdp_nccl_transport *transport = fsdp_nccl_priv_of(base);
  fsdp_status status = check_call(transport, call, error);
  if (status != FSDP_OK) return status;
  status = fsdp_nccl_priv_first_error(transport, true, error);
  if (status != FSDP_OK) return status;
  fsdp_nccl_channel *channel =
      &transport->channels[channel_of(transport, call)];
  /* Drop what a caller left behind that stopped half-way. */
  channel->num_collectives = 0;
  channel->is_group_open = true;
  return FSDP_OK;
}

fsdp_status fsdp_nccl_priv_group_end(fsdp_transport *base,
                                     const fsdp_call *call, fsdp_error *error) {
  fsdp_nccl_transport *transport = fsdp_nccl_priv_of(base);
  const fsdp_status status = check_call(transport, call, error);
  if (status != FSDP_OK) return status;
  const fsdp_channel index = channel_of(transport, call);
  if (!transport->channels[index].is_group_open) {
    return FSDP_FAIL(error, FSDP_INVALID_STATE,
                     "group_end without group_begin on channel %d",
                     (int)call->channel);
  }
  return issue(transport, index, error);
}

/* Names the operation that the collectives of the channel will be; 0 where
 * nobody can tell when it has ended. */
static uint64_t next_ticket(const fsdp_nccl_transport *transport,
                            const fsdp_nccl_channel *channel) {
  if (transport->options.events == NULL || channel->is_captured) return 0;
  return (uint64_t)channel->last.sequence + 1;
}

/* Issues a checked collective now, or with its group. */
static fsdp_status add(fsdp_nccl_transport *transport, const fsdp_call *call,
                       const fsdp_nccl_collective *collective, uint64_t *ticket,
                       fsdp_error *error) {
  const fsdp_channel index = channel_of(transport, call);
  fsdp_nccl_channel *channel = &transport->channels[index];
  fsdp_status status = FSDP_OK;
  if (collective->numel > 0) {
    void *collectives = channel->collectives;
    const bool has_room =
        fsdp_grow(&collectives, &channel->collective_capacity,
                  channel->num_collectives + 1, sizeof *channel->collectives);
    channel->collectives = collectives;
    if (!has_room) {
      status = FSDP_FAIL(error, FSDP_OUT_OF_MEMORY, "%s of a group",
                         kind_name(collective->kind));
    } else if (channel->num_collectives > 0 &&
               channel->stream != call->stream) {
      status = FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                         "%s: the collectives of a group go to one stream",
                         kind_name(collective->kind));
    }
    if (status != FSDP_OK) {
      channel->num_collectives = 0;
      channel->is_group_open = false;
      return status;
    }
    if (channel->num_collectives == 0) {
      channel->stream = call->stream;
      channel->is_captured = call->is_captured;
      (void)snprintf(channel->label, sizeof channel->label, "%s",
                     call->label == NULL ? "" : call->label);
    }
    channel->collectives[channel->num_collectives++] = *collective;
  }
  if (ticket != NULL) {
    *ticket =
        channel->num_collectives > 0 ? next_ticket(transport, channel) : 0;
  }
  return channel->is_group_open ? FSDP_OK : issue(transport, index, error);
}

void *fsdp_nccl_priv_end_of(fsdp_transport *base, fsdp_channel channel,
                            uint64_t ticket) {
  fsdp_nccl_transport *transport = fsdp_nccl_priv_of(base);
  const fsdp_call call = {.channel = channel};
  return fsdp_nccl_priv_event_behind(transport, channel_of(transport, &call),
                                     (int64_t)ticket);
}

fsdp_status fsdp_nccl_watch_replay(fsdp_transport *base, void *stream,
                                   fsdp_error *error) {
  fsdp_nccl_transport *transport = fsdp_nccl_priv_of(base);
  fsdp_nccl_channel *channel = &transport->channels[FSDP_CHANNEL_GATHER];
  fsdp_error cause;
  fsdp_status status =
      fsdp_nccl_priv_lock_channel(transport, FSDP_CHANNEL_GATHER, error);
  if (status != FSDP_OK) return status;
  const fsdp_nccl_operation operation =
      begin_operation(transport, channel, "replay of a captured step", "");
  status = fsdp_nccl_priv_track(transport, FSDP_CHANNEL_GATHER, &operation,
                                stream, &cause);
  fsdp_nccl_priv_unlock_channel(transport, FSDP_CHANNEL_GATHER);
  if (status == FSDP_OK) return FSDP_OK;
  return fsdp_nccl_priv_fail(transport, &cause, error);
}

/* Checks a call of `numel` elements on each of `num_ranks` ranks. nbytes [out]
 * of one rank's elements. */
static fsdp_status check(const fsdp_nccl_transport *transport,
                         const fsdp_call *call, fsdp_nccl_kind kind,
                         int64_t numel, fsdp_dtype dtype, int64_t num_ranks,
                         int64_t *nbytes, fsdp_error *error) {
  int64_t all;
  const fsdp_status status = check_call(transport, call, error);
  if (status != FSDP_OK) return status;
  if (numel < 0 || dtype.itemsize < 1) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "%s of %" PRId64 " elements of %d bytes", kind_name(kind),
                     numel, (int)dtype.itemsize);
  }
  if (!fsdp_mul_i64(numel, dtype.itemsize, nbytes) ||
      !fsdp_mul_i64(*nbytes, num_ranks, &all)) {
    return FSDP_FAIL(error, FSDP_OVERFLOW,
                     "%s of %" PRId64 " elements of %d bytes on %" PRId64
                     " ranks does not fit in int64",
                     kind_name(kind), numel, (int)dtype.itemsize, num_ranks);
  }
  return FSDP_OK;
}

fsdp_status fsdp_nccl_priv_all_gather(fsdp_transport *base,
                                      const fsdp_call *call, void *output,
                                      const void *input, int64_t shard_numel,
                                      fsdp_dtype dtype, uint64_t *ticket,
                                      fsdp_error *error) {
  fsdp_nccl_transport *transport = fsdp_nccl_priv_of(base);
  int64_t nbytes = 0;
  const fsdp_status status =
      check(transport, call, FSDP_NCCL_ALL_GATHER, shard_numel, dtype,
            transport->world_size, &nbytes, error);
  if (status != FSDP_OK) return status;
  /* As bytes, so that any dtype works; NCCL does the same internally. */
  const fsdp_nccl_collective collective = {
      .kind = FSDP_NCCL_ALL_GATHER,
      .send = input,
      .receive = output,
      .numel = (size_t)nbytes,
      .dtype = FSDP_NCCL_UINT8,
  };
  return add(transport, call, &collective, ticket, error);
}

fsdp_status fsdp_nccl_priv_broadcast(fsdp_transport *base,
                                     const fsdp_call *call, void *buffer,
                                     int64_t numel, int64_t root,
                                     fsdp_dtype dtype, uint64_t *ticket,
                                     fsdp_error *error) {
  fsdp_nccl_transport *transport = fsdp_nccl_priv_of(base);
  int64_t nbytes = 0;
  const fsdp_status status = check(transport, call, FSDP_NCCL_BROADCAST, numel,
                                   dtype, 1, &nbytes, error);
  if (status != FSDP_OK) return status;
  if (root < 0 || root >= transport->world_size) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "broadcast from rank %" PRId64 " of %" PRId64, root,
                     transport->world_size);
  }
  const fsdp_nccl_collective collective = {
      .kind = FSDP_NCCL_BROADCAST,
      .send = buffer,
      .receive = buffer,
      .numel = (size_t)nbytes,
      .dtype = FSDP_NCCL_UINT8,
      .root = (int)root,
  };
  return add(transport, call, &collective, ticket, error);
}

/* NCCL's number of a dtype; -1: it cannot sum that. */
static int nccl_dtype(fsdp_dtype dtype) {
  switch (dtype.code) {
    case FSDP_DTYPE_UINT8:
      return FSDP_NCCL_UINT8;
    case FSDP_DTYPE_INT8:
      return FSDP_NCCL_INT8;
    case FSDP_DTYPE_INT32:
      return FSDP_NCCL_INT32;
    case FSDP_DTYPE_INT64:
      return FSDP_NCCL_INT64;
    case FSDP_DTYPE_FLOAT16:
      return FSDP_NCCL_FLOAT16;
    case FSDP_DTYPE_FLOAT32:
      return FSDP_NCCL_FLOAT32;
    case FSDP_DTYPE_FLOAT64:
      return FSDP_NCCL_FLOAT64;
    case FSDP_DTYPE_BFLOAT16:
      return FSDP_NCCL_BFLOAT16;
    default:
      return -1;
  }
}

/* Common to all reductions. output NULL: in place. */
static fsdp_status reduce(fsdp_transport *base, const fsdp_call *call,
                          fsdp_nccl_kind kind, int op, void *output,
                          void *buffer, int64_t numel, fsdp_dtype dtype,
                          uint64_t *ticket, fsdp_error *error) {
  fsdp_nccl_transport *transport = fsdp_nccl_priv_of(base);
  const bool is_scatter = kind == FSDP_NCCL_REDUCE_SCATTER;
  int64_t nbytes = 0;
  const fsdp_status status =
      check(transport, call, kind, numel, dtype,
            is_scatter ? transport->world_size : 1, &nbytes, error);
  if (status != FSDP_OK) return status;
  if (nccl_dtype(dtype) < 0) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "%s: NCCL cannot sum dtype %d, reduce in another dtype",
                     kind_name(kind), (int)dtype.code);
  }
  const fsdp_nccl_collective collective = {
      .kind = kind,
      .send = buffer,
      .receive =
          output == NULL
              ? (char *)buffer + (is_scatter ? nbytes * transport->rank : 0)
              : output,
      .numel = (size_t)numel,
      .dtype = nccl_dtype(dtype),
      .op = op,
  };
  return add(transport, call, &collective, ticket, error);
}

fsdp_status fsdp_nccl_priv_reduce_scatter(fsdp_transport *base,
                                          const fsdp_call *call, void *buffer,
                                          int64_t shard_numel, fsdp_dtype dtype,
                                          uint64_t *ticket, fsdp_error *error) {
  return reduce(base, call, FSDP_NCCL_REDUCE_SCATTER, FSDP_NCCL_SUM, NULL,
                buffer, shard_numel, dtype, ticket, error);
}

fsdp_status fsdp_nccl_priv_reduce_scatter_mean(
    fsdp_transport *base, const fsdp_call *call, void *output, void *buffer,
    int64_t shard_numel, fsdp_dtype dtype, uint64_t *ticket,
    fsdp_error *error) {
  return reduce(base, call, FSDP_NCCL_REDUCE_SCATTER, FSDP_NCCL_AVG, output,
                buffer, shard_numel, dtype, ticket, error);
}

fsdp_status fsdp_nccl_priv_all_reduce(fsdp_transport *base,
                                      const fsdp_call *call, void *buffer,
                                      int64_t numel, fsdp_dtype dtype,
                                      uint64_t *ticket, fsdp_error *error) {
  return reduce(base, call, FSDP_NCCL_ALL_REDUCE, FSDP_NCCL_SUM, NULL, buffer,
                numel, dtype, ticket, error);
}
