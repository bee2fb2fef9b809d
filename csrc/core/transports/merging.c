/*
 * Merging: collects the small calls of a group, makes one of them, and copies
 * its result to where they wanted it when that is waited for.
 */
#include "transports/merging.h"

#include <string.h>

#include "base/alloc.h"

typedef enum call_kind { ALL_GATHER = 0, REDUCE_SCATTER, ALL_REDUCE } call_kind;

/* A call of the caller, or the merged one. */
typedef struct small_call {
  char *buffer;      /* what is gathered into, or summed */
  const char *input; /* of an all_gather */
  int64_t nbytes;    /* of a rank's piece; of an all_reduce, all of it */
  uint64_t *ticket;  /* where the caller wants it; valid until group_end */
  void *scratch;     /* of a reduce_scatter */
} small_call;

/* One merged call, from its group_begin until it was waited for. */
typedef struct flight {
  bool is_flying; /* it was made and not waited for */
  call_kind kind; /* of `calls` */
  fsdp_dtype dtype;
  small_call *calls;
  size_t num_calls;
  size_t capacity;
  uint64_t ticket; /* while it is flying */
  int64_t nbytes;  /* of a rank's pieces side by side */
  char *memory;    /* used again */
  size_t memory_nbytes;
} flight;

/* What is merged must not depend on what was waited for, which differs between
 * ranks: there is always a flight for the open group. */
typedef struct merging_channel {
  bool is_open; /* between group_begin and group_end */
  size_t open;  /* index of the group's flight */
  flight *flights;
  size_t num_flights;
  size_t capacity;
} merging_channel;

typedef struct merging {
  fsdp_transport base;
  fsdp_transport_ops ops;
  fsdp_transport *inner;
  int64_t rank;
  int64_t world_size;
  merging_channel channels[FSDP_NUM_CHANNELS];
} merging;

static merging *merging_of(fsdp_transport *transport) {
  return (merging *)transport;
}

static void destroy(fsdp_transport *transport) {
  merging *self = merging_of(transport);
  if (self == NULL) return;
  for (int i = 0; i < FSDP_NUM_CHANNELS; i++) {
    merging_channel *channel = &self->channels[i];
    for (size_t j = 0; j < channel->num_flights; j++) {
      fsdp_free(channel->flights[j].calls);
      fsdp_free(channel->flights[j].memory);
    }
    fsdp_free(channel->flights);
  }
  fsdp_free(self);
}

/* Places of a merged call's memory ----------------------------------------- */

/* Of an all_reduce there is one piece, and every rank has it. */
static int64_t num_slots(const merging *self, const flight *channel) {
  return channel->kind == ALL_REDUCE ? 1 : self->world_size;
}

static int64_t own_slot(const merging *self, const flight *channel) {
  return channel->kind == ALL_REDUCE ? 0 : self->rank;
}

/* Copies between the slots [begin, end) of the calls' buffers and
 * of `memory`. */
static void copy_slots(flight *channel, int64_t begin, int64_t end,
                       bool is_packing) {
  for (int64_t slot = begin; slot < end; slot++) {
    char *packed = channel->memory + slot * channel->nbytes;
    for (size_t i = 0; i < channel->num_calls; i++) {
      const small_call *call = &channel->calls[i];
      char *piece = call->buffer + slot * call->nbytes;
      memcpy(is_packing ? packed : piece, is_packing ? piece : packed,
             (size_t)call->nbytes);
      packed += call->nbytes;
    }
  }
}

static void pack(const merging *self, flight *channel) {
  if (channel->kind != ALL_GATHER) {
    copy_slots(channel, 0, num_slots(self, channel), true);
    return;
  }
  char *packed = channel->memory + self->rank * channel->nbytes;
  for (size_t i = 0; i < channel->num_calls; i++) {
    const small_call *call = &channel->calls[i];
    memcpy(packed, call->input, (size_t)call->nbytes);
    packed += call->nbytes;
  }
}

static void unpack(const merging *self, flight *channel) {
  if (channel->kind == ALL_GATHER) {
    copy_slots(channel, 0, self->world_size, false);
  } else {
    const int64_t slot = own_slot(self, channel);
    copy_slots(channel, slot, slot + 1, false);
  }
}

/* Calls -------------------------------------------------------------------- */

static fsdp_status make_call(merging *self, call_kind kind, fsdp_dtype dtype,
                             const fsdp_call *call, const small_call *what,
                             fsdp_error *error) {
  const fsdp_transport_ops *ops = self->inner->ops;
  const int64_t numel = what->nbytes / dtype.itemsize;
  fsdp_call with_scratch = *call;
  with_scratch.scratch = what->scratch;
  switch (kind) {
    case ALL_GATHER:
      return ops->all_gather(self->inner, call, what->buffer, what->input,
                             numel, dtype, what->ticket, error);
    case REDUCE_SCATTER:
      return ops->reduce_scatter(self->inner, &with_scratch, what->buffer,
                                 numel, dtype, what->ticket, error);
    default:
      return ops->all_reduce(self->inner, call, what->buffer, numel, dtype,
                             what->ticket, error);
  }
}

/* Makes one call of what was collected. */
static fsdp_status make_merged(merging *self, flight *channel,
                               const fsdp_call *call, fsdp_error *error) {
  const size_t nbytes = (size_t)(channel->nbytes * num_slots(self, channel));
  const bool needs_scratch =
      channel->kind == REDUCE_SCATTER && self->inner->ops->wants_scratch;
  fsdp_status status = FSDP_OK;

  if (!fsdp_grow((void **)&channel->memory, &channel->memory_nbytes,
                 needs_scratch ? 2 * nbytes : nbytes, 1)) {
    return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY,
                     "out of host memory for %zu bytes of a merged collective",
                     nbytes);
  }
  const small_call merged = {
      channel->memory,
      channel->memory + own_slot(self, channel) * channel->nbytes,
      channel->nbytes, &channel->ticket,
      needs_scratch ? channel->memory + nbytes : NULL};
  pack(self, channel);
  FSDP_TRY(
      make_call(self, channel->kind, channel->dtype, call, &merged, error));
  for (size_t i = 0; i < channel->num_calls; i++) {
    *channel->calls[i].ticket = channel->ticket;
  }
  channel->is_flying = true;
done:
  return status;
}

static fsdp_status flush(merging *self, flight *channel, const fsdp_call *call,
                         fsdp_error *error) {
  if (channel->num_calls > 1) return make_merged(self, channel, call, error);
  if (channel->num_calls == 0) return FSDP_OK;
  return make_call(self, channel->kind, channel->dtype, call, channel->calls,
                   error);
}

/* Collects the call if it is a small one like those before in an open group.
 * is_collected [out]. */
static fsdp_status collect(merging_channel *channel, call_kind kind,
                           fsdp_dtype dtype, const small_call *call,
                           bool *is_collected, fsdp_error *error) {
  *is_collected = false;
  if (!channel->is_open || call->nbytes > FSDP_MERGED_PIECE_NBYTES) {
    return FSDP_OK;
  }
  flight *open = &channel->flights[channel->open];
  if (open->num_calls == 0) {
    open->kind = kind;
    open->dtype = dtype;
    open->nbytes = 0;
  } else if (open->kind != kind || !fsdp_dtype_equal(open->dtype, dtype)) {
    return FSDP_OK;
  }
  if (!fsdp_grow((void **)&open->calls, &open->capacity, open->num_calls + 1,
                 sizeof *open->calls)) {
    return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY,
                     "out of host memory for %zu calls of a merged collective",
                     open->num_calls + 1);
  }
  open->calls[open->num_calls++] = *call;
  open->nbytes += call->nbytes;
  *is_collected = true;
  return FSDP_OK;
}

/* Finds a flight that is not flying, or adds one. */
static fsdp_status open_flight(merging_channel *channel, fsdp_error *error) {
  size_t free_one = 0;
  while (free_one < channel->num_flights &&
         channel->flights[free_one].is_flying) {
    free_one++;
  }
  if (free_one == channel->num_flights) {
    if (!fsdp_grow((void **)&channel->flights, &channel->capacity, free_one + 1,
                   sizeof *channel->flights)) {
      return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY,
                       "out of host memory for %zu merged collectives",
                       free_one + 1);
    }
    channel->num_flights++;
  }
  channel->open = free_one;
  channel->flights[free_one].num_calls = 0;
  channel->is_open = true;
  return FSDP_OK;
}

/* The table ---------------------------------------------------------------- */

static fsdp_status group_begin(fsdp_transport *transport, const fsdp_call *call,
                               fsdp_error *error) {
  merging *self = merging_of(transport);
  fsdp_status status = FSDP_OK;
  FSDP_TRY(open_flight(&self->channels[call->channel], error));
  FSDP_TRY(self->inner->ops->group_begin(self->inner, call, error));
done:
  return status;
}

static fsdp_status group_end(fsdp_transport *transport, const fsdp_call *call,
                             fsdp_error *error) {
  merging *self = merging_of(transport);
  merging_channel *channel = &self->channels[call->channel];
  fsdp_status status = FSDP_OK;
  if (channel->is_open) {
    channel->is_open = false;
    FSDP_TRY(flush(self, &channel->flights[channel->open], call, error));
  }
  FSDP_TRY(self->inner->ops->group_end(self->inner, call, error));
done:
  return status;
}

/* Collects the call, or makes it. */
static fsdp_status take_call(fsdp_transport *transport, call_kind kind,
                             fsdp_dtype dtype, const fsdp_call *call,
                             const small_call *what, fsdp_error *error) {
  merging *self = merging_of(transport);
  bool is_collected = false;
  const fsdp_status status = collect(&self->channels[call->channel], kind,
                                     dtype, what, &is_collected, error);
  if (status != FSDP_OK || is_collected) return status;
  return make_call(self, kind, dtype, call, what, error);
}

static fsdp_status all_gather(fsdp_transport *transport, const fsdp_call *call,
                              void *output, const void *input,
                              int64_t shard_numel, fsdp_dtype dtype,
                              uint64_t *ticket, fsdp_error *error) {
  const small_call what = {output, input, shard_numel * dtype.itemsize, ticket,
                           NULL};
  return take_call(transport, ALL_GATHER, dtype, call, &what, error);
}

static fsdp_status broadcast(fsdp_transport *transport, const fsdp_call *call,
                             void *buffer, int64_t numel, int64_t root,
                             fsdp_dtype dtype, uint64_t *ticket,
                             fsdp_error *error) {
  fsdp_transport *inner = merging_of(transport)->inner;
  return inner->ops->broadcast(inner, call, buffer, numel, root, dtype, ticket,
                               error);
}

static fsdp_status reduce_scatter(fsdp_transport *transport,
                                  const fsdp_call *call, void *buffer,
                                  int64_t shard_numel, fsdp_dtype dtype,
                                  uint64_t *ticket, fsdp_error *error) {
  const small_call what = {buffer, NULL, shard_numel * dtype.itemsize, ticket,
                           call->scratch};
  return take_call(transport, REDUCE_SCATTER, dtype, call, &what, error);
}

static fsdp_status all_reduce(fsdp_transport *transport, const fsdp_call *call,
                              void *buffer, int64_t numel, fsdp_dtype dtype,
                              uint64_t *ticket, fsdp_error *error) {
  const small_call what = {buffer, NULL, numel * dtype.itemsize, ticket, NULL};
  return take_call(transport, ALL_REDUCE, dtype, call, &what, error);
}

/* A call for many places at once needs no merging. */
static bool can_reduce_parts(fsdp_transport *transport) {
  fsdp_transport *inner = merging_of(transport)->inner;
  return inner->ops->can_reduce_parts(inner);
}

static fsdp_status reduce_parts(fsdp_transport *transport,
                                const fsdp_call *call, const fsdp_parts *parts,
                                uint64_t *ticket, fsdp_error *error) {
  fsdp_transport *inner = merging_of(transport)->inner;
  return inner->ops->reduce_parts(inner, call, parts, ticket, error);
}

static fsdp_status wait_for(fsdp_transport *transport, fsdp_channel index,
                            uint64_t ticket, fsdp_error *error) {
  merging *self = merging_of(transport);
  merging_channel *channel = &self->channels[index];
  fsdp_status status = FSDP_OK;
  FSDP_TRY(self->inner->ops->wait(self->inner, index, ticket, error));
done:
  for (size_t i = 0; i < channel->num_flights; i++) {
    flight *each = &channel->flights[i];
    if (!each->is_flying || each->ticket > ticket) continue;
    each->is_flying = false; /* after a failure its calls end, too */
    if (status == FSDP_OK) unpack(self, each);
  }
  return status;
}

static bool is_done(fsdp_transport *transport, fsdp_channel channel,
                    uint64_t ticket) {
  fsdp_transport *inner = merging_of(transport)->inner;
  return inner->ops->is_done(inner, channel, ticket);
}

static fsdp_status check(fsdp_transport *transport, fsdp_error *error) {
  fsdp_transport *inner = merging_of(transport)->inner;
  return inner->ops->check(inner, error);
}

static void give_up(fsdp_transport *transport, const char *cause) {
  fsdp_transport *inner = merging_of(transport)->inner;
  inner->ops->give_up(inner, cause);
}

static int64_t reserved_nbytes(const fsdp_transport *transport) {
  const merging *self = (const merging *)transport;
  int64_t nbytes = 0;
  for (int i = 0; i < FSDP_NUM_CHANNELS; i++) {
    for (size_t j = 0; j < self->channels[i].num_flights; j++) {
      nbytes += (int64_t)self->channels[i].flights[j].memory_nbytes;
    }
  }
  if (self->inner->ops->reserved_nbytes == NULL) return nbytes;
  return nbytes + self->inner->ops->reserved_nbytes(self->inner);
}

static fsdp_transport *sharer(fsdp_transport *transport) {
  fsdp_transport *inner = ((merging *)transport)->inner;
  return inner->ops->sharer(inner);
}

fsdp_status fsdp_merging_create(fsdp_transport *inner, int64_t rank,
                                int64_t world_size, fsdp_transport **transport,
                                fsdp_error *error) {
  merging *self = fsdp_calloc(1, sizeof *self);
  if (self == NULL) {
    return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY,
                     "out of host memory for a merging transport");
  }
  self->ops = *inner->ops;
  self->ops.destroy = destroy;
  self->ops.group_begin = group_begin;
  self->ops.group_end = group_end;
  self->ops.all_gather = all_gather;
  self->ops.broadcast = broadcast;
  self->ops.reduce_scatter = reduce_scatter;
  self->ops.all_reduce = all_reduce;
  if (inner->ops->can_reduce_parts != NULL) {
    self->ops.can_reduce_parts = can_reduce_parts;
    self->ops.reduce_parts = reduce_parts;
  }
  self->ops.wait = wait_for;
  self->ops.is_done = inner->ops->is_done == NULL ? NULL : is_done;
  self->ops.check = check;
  self->ops.reserved_nbytes = reserved_nbytes;
  self->ops.sharer = inner->ops->sharer == NULL ? NULL : sharer;
  self->ops.give_up = inner->ops->give_up == NULL ? NULL : give_up;
  self->base.ops = &self->ops;
  self->inner = inner;
  self->rank = rank;
  self->world_size = world_size;
  *transport = &self->base;
  return FSDP_OK;
}
