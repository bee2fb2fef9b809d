/*
 * The shared-memory transport: makes and destroys it, checks the arguments of
 * its calls, and fills the table of port/transport.h.
 */
#include <inttypes.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/arith.h"
#include "base/dtypes.h"
#include "shm/meeting_priv.h"
#include "shm/shm_priv.h"
#include "shm/shm_transport.h"

enum {
  DEFAULT_RING_NBYTES = 8 << 20,
  DEFAULT_SLOT_NBYTES = 256 << 10,
  DEFAULT_MESSAGE_NBYTES = 1 << 20,
  DEFAULT_DIRECT_NBYTES = 256 << 10,
  DEFAULT_DIRECT_CALL_NBYTES = 8 << 10,
  MAX_SCRATCH_NBYTES = 512 << 10,
  SMALL_SLOTS = 8,                 /* of a ring for calls that are not direct */
  SMALL_MESSAGE_NBYTES = 16 << 10, /* likewise; larger ones are direct */
  DEFAULT_TIMEOUT_MS = 1800000,
  DEFAULT_MEETING_TIMEOUT_MS = 300000,
  DEFAULT_SPIN_US = 50
};

static const fsdp_transport_ops g_ops;

static fsdp_shm *shm_of(fsdp_transport *transport) {
  return (fsdp_shm *)transport;
}

static int64_t min_i64(int64_t a, int64_t b) {
  return a < b ? a : b;
}

static int64_t or_default(int64_t option, int64_t value) {
  return option == 0 ? value : option;
}

/* ---- Life ---------------------------------------------------------------- */

static void destroy_memory(fsdp_shm *shm) {
  if (shm == NULL) return;
  for (int i = 0; i < FSDP_NUM_CHANNELS; i++) {
    fsdp_free(shm->channels[i].readers);
    fsdp_free(shm->channels[i].ops);
  }
  if (shm->page_map >= 0) close(shm->page_map);
  fsdp_free(shm->messages);
  fsdp_free(shm->pieces);
  fsdp_free(shm->scratch);
  for (int64_t i = 0; shm->part_lists != NULL && i < shm->world_size; i++) {
    fsdp_free(shm->part_lists[i].parts);
  }
  fsdp_free(shm->part_lists);
  fsdp_free(shm->peers);
  fsdp_free(shm);
}

static void close_segments(fsdp_shm *shm) {
  for (int64_t rank = 0; rank < shm->world_size; rank++) {
    fsdp_shm_priv_segment_close(&shm->peers[rank].segment);
  }
}

static void destroy(fsdp_transport *transport) {
  fsdp_shm *shm = shm_of(transport);
  if (shm == NULL) return;
  /* A forked child has the struct, but not the segments. */
  if (shm->owner == getpid()) {
    fsdp_shm_priv_unlist(shm);
    fsdp_shm_header *header = shm->peers[shm->rank].segment.header;
    uint32_t here = FSDP_SHM_HERE;
    (void)atomic_compare_exchange_strong(&header->presence, &here,
                                         FSDP_SHM_LEFT);
    fsdp_shm_priv_withdraw_offers(shm);
    fsdp_shm_priv_ring_all(shm);
    close_segments(shm);
    (void)pthread_mutex_destroy(&shm->mutex);
  }
  destroy_memory(shm);
}

/* NULL when memory is out. */
static fsdp_shm *create_memory(int64_t rank, int64_t world_size,
                               bool is_direct) {
  const size_t num = (size_t)world_size;
  fsdp_shm *shm = fsdp_calloc(1, sizeof *shm);
  if (shm == NULL) return NULL;
  shm->base.ops = &g_ops;
  shm->rank = rank;
  shm->world_size = world_size;
  shm->owner = getpid();
  shm->page_map = -1;
  shm->peers = fsdp_calloc(num, sizeof *shm->peers);
  shm->pieces = fsdp_calloc(num, sizeof *shm->pieces);
  bool is_whole = shm->peers != NULL && shm->pieces != NULL;
  if (is_direct) {
    const int64_t least = world_size * FSDP_SHM_LINE_NBYTES;
    shm->scratch_nbytes =
        min_i64(world_size * FSDP_SHM_SCRATCH_NBYTES, MAX_SCRATCH_NBYTES);
    if (shm->scratch_nbytes < least) shm->scratch_nbytes = least;
    shm->scratch = fsdp_calloc(1, (size_t)shm->scratch_nbytes);
    shm->part_lists = fsdp_calloc(num, sizeof *shm->part_lists);
    is_whole = is_whole && shm->scratch != NULL && shm->part_lists != NULL;
  }
  for (int i = 0; i < FSDP_NUM_CHANNELS; i++) {
    fsdp_shm_channel *channel = &shm->channels[i];
    channel->readers = fsdp_calloc(num, sizeof *channel->readers);
    is_whole = is_whole && channel->readers != NULL;
  }
  if (is_whole) return shm;
  destroy_memory(shm);
  return NULL;
}

static fsdp_status check_options(const fsdp_store *store,
                                 const fsdp_shm_options *options, int64_t rank,
                                 int64_t world_size, fsdp_error *error) {
  if (options == NULL || options->nbytes != (int64_t)sizeof *options) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "options of %" PRId64 " bytes, this version has %zu",
                     options == NULL ? 0 : options->nbytes, sizeof *options);
  }
  if (world_size < 1 || rank < 0 || rank >= world_size) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "rank %" PRId64 " of %" PRId64 " ranks", rank, world_size);
  }
  if (store == NULL || options->key_prefix == NULL ||
      strlen(options->key_prefix) >= FSDP_SHM_PREFIX_NBYTES) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "need a store and a key prefix shorter than %d",
                     FSDP_SHM_PREFIX_NBYTES);
  }
  const int64_t slot = or_default(options->slot_nbytes, DEFAULT_SLOT_NBYTES);
  if (slot < 0 || slot % FSDP_SHM_LINE_NBYTES != 0 ||
      slot / FSDP_SHM_LINE_NBYTES < world_size) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "slot_nbytes %" PRId64
                     " is no multiple of 64, or less than 64 for each of the "
                     "%" PRId64 " ranks",
                     slot, world_size);
  }
  if (options->ring_nbytes < 0 || options->message_nbytes < 0 ||
      options->timeout_ms < 0 || options->meeting_timeout_ms < 0) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "ring_nbytes %" PRId64 ", message_nbytes %" PRId64
                     ", timeout_ms %" PRId64 ", meeting_timeout_ms %" PRId64
                     ": none may be negative",
                     options->ring_nbytes, options->message_nbytes,
                     options->timeout_ms, options->meeting_timeout_ms);
  }
  return FSDP_OK;
}

static bool is_crowded(int64_t world_size) {
  cpu_set_t processors;
  CPU_ZERO(&processors);
  if (sched_getaffinity(0, sizeof processors, &processors) != 0) return true;
  return CPU_COUNT(&processors) < world_size;
}

/* Sets sizes, time limits and the way to wait. */
static void configure(fsdp_shm *shm, const fsdp_shm_geometry *geometry,
                      const fsdp_shm_options *options) {
  enum { NS_PER_US = 1000, MAX_SPIN_US = 1000000 };
  int64_t spin_us = or_default(options->spin_us, DEFAULT_SPIN_US);
  if (spin_us < 0) spin_us = 0;
  if (spin_us > MAX_SPIN_US) spin_us = MAX_SPIN_US;
  shm->geometry = *geometry;
  shm->timeout_ms = or_default(options->timeout_ms, DEFAULT_TIMEOUT_MS);
  shm->spin_ns = spin_us * NS_PER_US;
  shm->is_crowded = is_crowded(shm->world_size);
}

/* Lays out the segments: rings for all calls, or for those that are
 * not direct. */
static fsdp_status lay_out(const fsdp_shm_options *options, int64_t world_size,
                           bool is_direct, fsdp_shm_geometry *geometry,
                           fsdp_error *error) {
  const int64_t line = FSDP_SHM_LINE_NBYTES * world_size;
  const int64_t direct_call_nbytes =
      or_default(options->direct_call_nbytes, DEFAULT_DIRECT_CALL_NBYTES);
  int64_t direct_nbytes =
      or_default(options->direct_nbytes, DEFAULT_DIRECT_NBYTES);
  int64_t message = or_default(options->message_nbytes, DEFAULT_MESSAGE_NBYTES);
  int64_t slot = or_default(options->slot_nbytes, DEFAULT_SLOT_NBYTES);
  int64_t ring = or_default(options->ring_nbytes, DEFAULT_RING_NBYTES);
  if (is_direct) {
    const int64_t wanted = 2 * direct_call_nbytes / SMALL_SLOTS;
    slot = min_i64(slot, (wanted / line + 1) * line);
    ring = min_i64(ring, slot * SMALL_SLOTS);
    if (direct_nbytes > 0) {
      direct_nbytes = min_i64(direct_nbytes, SMALL_MESSAGE_NBYTES);
      message = min_i64(message, SMALL_MESSAGE_NBYTES);
    }
  }
  if (!fsdp_shm_priv_layout(world_size, ring, slot, message,
                            direct_nbytes < 0 ? 0 : direct_nbytes, geometry)) {
    return FSDP_FAIL(error, FSDP_OVERFLOW,
                     "the segment of %" PRId64
                     " ranks with ring_nbytes %" PRId64
                     " does not fit in int64",
                     world_size, options->ring_nbytes);
  }
  geometry->direct_call_nbytes = is_direct ? direct_call_nbytes : 0;
  return FSDP_OK;
}

/* Makes a transport and takes it to a meeting. shm [out] NULL if the ranks
 * cannot share memory. */
static fsdp_status meet(const fsdp_shm_meeting *meeting,
                        const fsdp_shm_options *options, bool is_direct,
                        fsdp_shm **shm, fsdp_shm_verdict *verdict,
                        fsdp_error *error) {
  fsdp_shm_geometry geometry;
  fsdp_status status =
      lay_out(options, meeting->world_size, is_direct, &geometry, error);
  if (status != FSDP_OK) return status;
  fsdp_shm_verdict outcome = {0};
  /* With NULL the meeting tells the others that memory is out. */
  fsdp_shm *made = create_memory(meeting->rank, meeting->world_size, is_direct);
  if (made != NULL) configure(made, &geometry, options);
  FSDP_TRY(fsdp_shm_priv_meet(meeting, made, &outcome, error));
  outcome.is_direct = outcome.is_direct && is_direct;
  *verdict = outcome;
  if (made != NULL && outcome.is_possible) {
    made->reads_peers = outcome.is_direct;
    *shm = made;
    made = NULL;
  }
done:
  if (made != NULL) close_segments(made);
  destroy_memory(made);
  return status;
}

fsdp_status fsdp_shm_create(const fsdp_store *store,
                            const fsdp_shm_options *options, int64_t rank,
                            int64_t world_size, fsdp_transport **transport,
                            fsdp_shm_verdict *verdict, fsdp_error *error) {
  fsdp_status status = check_options(store, options, rank, world_size, error);
  if (status != FSDP_OK) return status;
  const bool wants_direct = options->direct_call_nbytes >= 0 && world_size > 1;
  fsdp_shm_meeting meeting = {
      .store = store,
      .key_prefix = options->key_prefix,
      .name = "first",
      .refusal = options->refusal,
      .timeout_ms =
          or_default(options->meeting_timeout_ms, DEFAULT_MEETING_TIMEOUT_MS),
      .rank = rank,
      .world_size = world_size,
  };
  fsdp_shm_verdict outcome = {0};
  fsdp_shm *shm = NULL;
  FSDP_TRY(meet(&meeting, options, wants_direct, &shm, &outcome, error));
  if (shm != NULL && wants_direct && !shm->reads_peers) {
    /* The system refuses: all ranks know, and meet again with large rings. */
    close_segments(shm);
    destroy_memory(shm);
    shm = NULL;
    meeting.name = "second";
    FSDP_TRY(meet(&meeting, options, false, &shm, &outcome, error));
  }
  *verdict = outcome;
  if (shm == NULL) goto done;
  (void)pthread_mutex_init(&shm->mutex, NULL);
  fsdp_shm_priv_list(shm);
  *transport = &shm->base;
done:
  return status;
}

/* ---- Calls --------------------------------------------------------------- */

static uint64_t hash_of(const char *text) {
  uint64_t hash = UINT64_C(0xCBF29CE484222325); /* FNV-1a */
  for (; *text != '\0'; text++) {
    hash = (hash ^ (unsigned char)*text) * UINT64_C(0x100000001B3);
  }
  return hash == 0 ? 1 : hash;
}

static void set_label(fsdp_shm_descriptor *descriptor, const char *label) {
  if (label == NULL) return;
  descriptor->label_hash = hash_of(label);
  (void)snprintf(descriptor->label, sizeof descriptor->label, "%.*s",
                 (int)sizeof descriptor->label - 1, label);
}

static bool has_room_for(int64_t world_size, int64_t nbytes) {
  int64_t total;
  /* Twice, since sizes are rounded up and split into turns. */
  return fsdp_mul_i64(nbytes, 2 * world_size, &total);
}

/* Fills in the call, except for its memory. */
static fsdp_status make_op(const fsdp_shm *shm, fsdp_shm_kind kind,
                           const char *label, int64_t numel, fsdp_dtype dtype,
                           fsdp_shm_op *op, fsdp_error *error) {
  int64_t nbytes;
  if (numel < 0 || dtype.itemsize < 1) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "%s (%s) of %" PRId64 " elements of %d bytes",
                     fsdp_shm_priv_kind_name((int32_t)kind),
                     label == NULL ? "no label" : label, numel, dtype.itemsize);
  }
  if (!fsdp_mul_i64(numel, dtype.itemsize, &nbytes) ||
      !has_room_for(shm->world_size, nbytes)) {
    return FSDP_FAIL(error, FSDP_OVERFLOW,
                     "%s (%s) of %" PRId64 " elements on %" PRId64
                     " ranks does not fit in int64",
                     fsdp_shm_priv_kind_name((int32_t)kind),
                     label == NULL ? "no label" : label, numel,
                     shm->world_size);
  }
  fsdp_shm_op made;
  memset(&made, 0, sizeof made); /* padding too: other ranks read it */
  made.descriptor.kind = (int32_t)kind;
  made.descriptor.dtype_code = dtype.code;
  made.descriptor.itemsize = dtype.itemsize;
  made.descriptor.numel = numel;
  set_label(&made.descriptor, label);
  made.dtype = dtype;
  made.nbytes = nbytes;
  *op = made;
  return FSDP_OK;
}

/* Does the whole call where there is no other rank. */
static void run_alone(fsdp_shm *shm, const fsdp_shm_op *op) {
  const int32_t kind = op->descriptor.kind;
  if (op->nbytes == 0) return;
  if (kind == FSDP_SHM_ALL_GATHER && op->input != NULL) {
    memcpy(op->output, op->input, (size_t)op->nbytes);
  } else if (kind == FSDP_SHM_REDUCE_SCATTER || kind == FSDP_SHM_ALL_REDUCE) {
    shm->pieces[0] = op->output;
    fsdp_shm_priv_sum(op->output, op->dtype, shm->pieces, 1,
                      op->descriptor.numel);
  }
}

/* With the mutex held. */
static fsdp_status start_locked(fsdp_shm *shm, fsdp_channel channel,
                                const fsdp_shm_op *op, uint64_t *ticket,
                                fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  uint64_t number = 0;
  if (shm->failure.status != FSDP_OK) return fsdp_shm_priv_check(shm, error);
  if (shm->world_size == 1) {
    fsdp_shm_channel *self = &shm->channels[channel];
    run_alone(shm, op);
    self->num_ended = ++self->num_started;
    *ticket = self->num_ended;
    return FSDP_OK;
  }
  FSDP_TRY(fsdp_shm_priv_channel_start(shm, channel, op, &number, error));
  FSDP_TRY(fsdp_shm_priv_progress(shm, error));
  *ticket = number;
done:
  return status;
}

static fsdp_status start(fsdp_shm *shm, fsdp_channel channel,
                         const fsdp_shm_op *op, uint64_t *ticket,
                         fsdp_error *error) {
  if ((unsigned)channel >= FSDP_NUM_CHANNELS) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT, "no channel %d",
                     (int)channel);
  }
  fsdp_status status = fsdp_shm_priv_lock(shm, error);
  if (status != FSDP_OK) return status;
  status = start_locked(shm, channel, op, ticket, error);
  (void)pthread_mutex_unlock(&shm->mutex);
  return status;
}

/* Groups merge nothing here. */
static fsdp_status begin_or_end_group(fsdp_transport *transport,
                                      const fsdp_call *call,
                                      fsdp_error *error) {
  (void)transport, (void)call, (void)error;
  return FSDP_OK;
}

static fsdp_status all_gather(fsdp_transport *transport, const fsdp_call *call,
                              void *output, const void *input,
                              int64_t shard_numel, fsdp_dtype dtype,
                              uint64_t *ticket, fsdp_error *error) {
  fsdp_shm *shm = shm_of(transport);
  fsdp_shm_op op;
  fsdp_status status = make_op(shm, FSDP_SHM_ALL_GATHER, call->label,
                               shard_numel, dtype, &op, error);
  if (status != FSDP_OK) return status;
  op.output = output;
  op.input = input;
  if (op.nbytes == 0 || op.input == op.output + shm->rank * op.nbytes) {
    op.input = NULL;
  }
  return start(shm, call->channel, &op, ticket, error);
}

static fsdp_status broadcast(fsdp_transport *transport, const fsdp_call *call,
                             void *buffer, int64_t numel, int64_t root,
                             fsdp_dtype dtype, uint64_t *ticket,
                             fsdp_error *error) {
  fsdp_shm *shm = shm_of(transport);
  fsdp_shm_op op;
  if (root < 0 || root >= shm->world_size) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "root %" PRId64 " of %" PRId64 " ranks", root,
                     shm->world_size);
  }
  fsdp_status status =
      make_op(shm, FSDP_SHM_BROADCAST, call->label, numel, dtype, &op, error);
  if (status != FSDP_OK) return status;
  op.output = buffer;
  op.descriptor.root = root;
  return start(shm, call->channel, &op, ticket, error);
}

static fsdp_status reduce(fsdp_shm *shm, fsdp_shm_kind kind,
                          const fsdp_call *call, void *buffer, int64_t numel,
                          fsdp_dtype dtype, uint64_t *ticket,
                          fsdp_error *error) {
  fsdp_shm_op op;
  fsdp_status status = fsdp_shm_priv_check_sum(dtype, error);
  if (status != FSDP_OK) return status;
  status = make_op(shm, kind, call->label, numel, dtype, &op, error);
  if (status != FSDP_OK) return status;
  op.output = buffer;
  return start(shm, call->channel, &op, ticket, error);
}

static fsdp_status reduce_scatter(fsdp_transport *transport,
                                  const fsdp_call *call, void *buffer,
                                  int64_t shard_numel, fsdp_dtype dtype,
                                  uint64_t *ticket, fsdp_error *error) {
  return reduce(shm_of(transport), FSDP_SHM_REDUCE_SCATTER, call, buffer,
                shard_numel, dtype, ticket, error);
}

static fsdp_status all_reduce(fsdp_transport *transport, const fsdp_call *call,
                              void *buffer, int64_t numel, fsdp_dtype dtype,
                              uint64_t *ticket, fsdp_error *error) {
  return reduce(shm_of(transport), FSDP_SHM_ALL_REDUCE, call, buffer, numel,
                dtype, ticket, error);
}

static bool can_reduce_parts(fsdp_transport *transport) {
  return shm_of(transport)->reads_peers;
}

static fsdp_status reduce_parts(fsdp_transport *transport,
                                const fsdp_call *call, const fsdp_parts *parts,
                                uint64_t *ticket, fsdp_error *error) {
  static const fsdp_dtype bytes = {.code = FSDP_DTYPE_UINT8, .itemsize = 1};
  fsdp_shm *shm = shm_of(transport);
  fsdp_shm_op op;
  fsdp_status status = FSDP_OK;
  if (!shm->reads_peers) {
    return FSDP_FAIL(error, FSDP_INVALID_STATE,
                     "ranks that cannot read each other's memory cannot reduce "
                     "parts of it");
  }
  for (int64_t i = 0; i < parts->num_places; i++) {
    FSDP_TRY(fsdp_shm_priv_check_sum(parts->places[i].sum_dtype, error));
  }
  FSDP_TRY(make_op(shm, FSDP_SHM_REDUCE_PARTS, call->label, parts->nbytes,
                   bytes, &op, error));
  op.parts = *parts;
  op.descriptor.num_parts = parts->num_parts;
  FSDP_TRY(start(shm, call->channel, &op, ticket, error));
done:
  return status;
}

static fsdp_transport *sharer(fsdp_transport *transport) {
  return shm_of(transport)->world_size > 1 ? transport : NULL;
}

static fsdp_status open_shared(fsdp_transport *transport, const fsdp_call *call,
                               fsdp_shared *shared, uint64_t *ticket,
                               fsdp_error *error) {
  static const fsdp_dtype bytes = {.code = FSDP_DTYPE_UINT8, .itemsize = 1};
  fsdp_shm *shm = shm_of(transport);
  fsdp_shm_op op;
  fsdp_status status = make_op(shm, FSDP_SHM_OPEN, call->label, shared->nbytes,
                               bytes, &op, error);
  if (status != FSDP_OK) return status;
  fsdp_shm_priv_open(shm, shared);
  return start(shm, call->channel, &op, ticket, error);
}

static void close_shared(fsdp_transport *transport, fsdp_shared *shared) {
  fsdp_shm_priv_close(shm_of(transport), shared);
}

/* ---- Waiting ------------------------------------------------------------- */

/* With the mutex held. */
static fsdp_status wait_locked(fsdp_shm *shm, fsdp_channel channel,
                               uint64_t ticket, fsdp_error *error) {
  const fsdp_shm_goal goal = {.channel = channel, .ticket = ticket};
  if (ticket > shm->channels[channel].num_started) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "ticket %" PRIu64 " of %" PRIu64 " calls", ticket,
                     shm->channels[channel].num_started);
  }
  if (ticket <= shm->channels[channel].num_ended) return FSDP_OK;
  return fsdp_shm_priv_wait(shm, &goal, error);
}

static fsdp_status wait_for(fsdp_transport *transport, fsdp_channel channel,
                            uint64_t ticket, fsdp_error *error) {
  fsdp_shm *shm = shm_of(transport);
  if ((unsigned)channel >= FSDP_NUM_CHANNELS) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT, "no channel %d",
                     (int)channel);
  }
  fsdp_status status = fsdp_shm_priv_lock(shm, error);
  if (status != FSDP_OK) return status;
  status = wait_locked(shm, channel, ticket, error);
  (void)pthread_mutex_unlock(&shm->mutex);
  return status;
}

static fsdp_status await_closed(fsdp_transport *transport, fsdp_shared *shared,
                                fsdp_error *error) {
  fsdp_shm *shm = shm_of(transport);
  const fsdp_shm_goal goal = {.shared = shared};
  fsdp_status status = fsdp_shm_priv_lock(shm, error);
  if (status != FSDP_OK) return status;
  status = fsdp_shm_priv_wait(shm, &goal, error);
  (void)pthread_mutex_unlock(&shm->mutex);
  return status;
}

static fsdp_status check(fsdp_transport *transport, fsdp_error *error) {
  fsdp_shm *shm = shm_of(transport);
  fsdp_status status = fsdp_shm_priv_lock(shm, error);
  if (status != FSDP_OK) return status;
  status = fsdp_shm_priv_check(shm, error);
  (void)pthread_mutex_unlock(&shm->mutex);
  return status;
}

static void give_up(fsdp_transport *transport, const char *cause) {
  fsdp_shm *shm = shm_of(transport);
  fsdp_error failure;
  if (fsdp_shm_priv_lock(shm, NULL) != FSDP_OK) return;
  (void)FSDP_FAIL(&failure, FSDP_BACKEND, "rank %" PRId64 " gave up: %.600s",
                  shm->rank, cause);
  (void)fsdp_shm_priv_fail(shm, &failure, failure.message, NULL);
  (void)pthread_mutex_unlock(&shm->mutex);
}

static int64_t reserved_nbytes(const fsdp_transport *transport) {
  const fsdp_shm *shm = (const fsdp_shm *)transport;
  return shm->geometry.nbytes + shm->scratch_nbytes;
}

static const fsdp_transport_ops g_ops = {
    .name = "shm",
    .is_host = true,
    .reads_labels = true,
    .destroy = destroy,
    .group_begin = begin_or_end_group,
    .group_end = begin_or_end_group,
    .all_gather = all_gather,
    .broadcast = broadcast,
    .reduce_scatter = reduce_scatter,
    .all_reduce = all_reduce,
    .can_reduce_parts = can_reduce_parts,
    .reduce_parts = reduce_parts,
    .wait = wait_for,
    .check = check,
    .reserved_nbytes = reserved_nbytes,
    .sharer = sharer,
    .share = fsdp_shm_priv_share,
    .unshare = fsdp_shm_priv_unshare,
    .open = open_shared,
    .close = close_shared,
    .await_closed = await_closed,
    .give_up = give_up,
};
