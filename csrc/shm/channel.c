/*
 * One channel: fills this rank's slots, and copies or sums the slots of the
 * others, as far as both go without waiting. See Note [Slots] in shm_priv.h.
 */
#include <inttypes.h>
#include <string.h>

#include "base/alloc.h"
#include "shm/shm_priv.h"

/* With so many ranks and bytes or more, an all_reduce is cheaper as a
 * reduce_scatter and an all_gather in turns. */
enum { SPLIT_WORLD_SIZE = 4, SPLIT_NBYTES = 32768 };

static int64_t min_i64(int64_t a, int64_t b) {
  return a < b ? a : b;
}

static int64_t num_parts(int64_t nbytes, int64_t part_nbytes) {
  return nbytes <= part_nbytes ? 1 : (nbytes - 1) / part_nbytes + 1;
}

/* Bytes [begin, end) of a buffer. */
typedef struct span {
  int64_t begin;
  int64_t end;
} span;

static span part_of(int64_t nbytes, int64_t part_nbytes, int64_t i) {
  const int64_t begin = min_i64(i * part_nbytes, nbytes);
  return (span){begin, min_i64(begin + part_nbytes, nbytes)};
}

/* The memory may be NULL when nbytes is 0. */
static void copy(char *to, const char *from, int64_t nbytes) {
  if (nbytes > 0) memcpy(to, from, (size_t)nbytes);
}

/* Whether slot i holds parts of the sum: in the second half of a split
 * all_reduce. */
static bool holds_sum(const fsdp_shm_op *op, int64_t i) {
  return op->is_split && i >= op->num_slots / 2;
}

/* The part of rank `rank` in slot i of a split all_reduce. Both halves have the
 * same turns; in every turn but the last each rank has a whole piece. */
static span turn_part(const fsdp_shm *shm, const fsdp_shm_op *op, int64_t i,
                      int64_t rank) {
  const int64_t turn = i % (op->num_slots / 2);
  const int64_t piece = shm->geometry.piece_nbytes;
  const int64_t line = FSDP_SHM_LINE_NBYTES;
  const span all = part_of(op->nbytes, piece * shm->world_size, turn);
  const int64_t nbytes = all.end - all.begin;
  int64_t each = num_parts(nbytes, shm->world_size);
  each = min_i64((each + line - 1) / line * line, piece);
  const span part = part_of(nbytes, each, rank);
  return (span){all.begin + part.begin, all.begin + part.end};
}

/* Where rank `receiver` finds its piece in a slot of `writer`. */
static int64_t piece_offset(const fsdp_shm *shm, int64_t writer,
                            int64_t receiver) {
  const int64_t i = receiver < writer ? receiver : receiver - 1;
  return i * shm->geometry.piece_nbytes;
}

static int64_t num_slots_of(const fsdp_shm *shm, const fsdp_shm_op *op,
                            int64_t rank) {
  const fsdp_shm_geometry *g = &shm->geometry;
  if (op->is_direct) return op->is_split ? 2 : 1;
  switch (op->descriptor.kind) {
    case FSDP_SHM_BROADCAST:
      if (rank != op->descriptor.root) return 1;
      return num_parts(op->nbytes, g->slot_nbytes);
    case FSDP_SHM_REDUCE_SCATTER:
      return num_parts(op->nbytes, g->piece_nbytes);
    case FSDP_SHM_ALL_REDUCE:
      if (!op->is_split) return num_parts(op->nbytes, g->slot_nbytes);
      return 2 * num_parts(op->nbytes, g->piece_nbytes * shm->world_size);
    default:
      return num_parts(op->nbytes, g->slot_nbytes);
  }
}

/* Whether the call is direct whatever its size. */
static bool is_always_direct(const fsdp_shm_op *op) {
  return op->descriptor.kind == FSDP_SHM_OPEN ||
         op->descriptor.kind == FSDP_SHM_REDUCE_PARTS;
}

/* ---- Starting ------------------------------------------------------------ */

/* Makes room for one more call at the end of the list. */
static bool reserve_op(fsdp_shm_channel *channel) {
  if (channel->end == channel->capacity && channel->first > 0) {
    const size_t num = channel->end - channel->first;
    memmove(channel->ops, channel->ops + channel->first,
            num * sizeof *channel->ops);
    channel->writing -= channel->first;
    channel->first = 0;
    channel->end = num;
  }
  void *ops = channel->ops;
  const bool is_grown = fsdp_grow(&ops, &channel->capacity, channel->end + 1,
                                  sizeof(fsdp_shm_op));
  channel->ops = ops;
  return is_grown;
}

fsdp_status fsdp_shm_priv_channel_start(fsdp_shm *shm, fsdp_channel channel,
                                        const fsdp_shm_op *op, uint64_t *ticket,
                                        fsdp_error *error) {
  fsdp_shm_channel *self = &shm->channels[channel];
  if (!reserve_op(self)) {
    return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY, "list of %zu calls in flight",
                     self->end - self->first + 1);
  }
  const uint64_t sequence = ++self->num_started;
  if (self->first == self->end) self->progress_ns = fsdp_shm_priv_now();
  fsdp_shm_op *added = &self->ops[self->end++];
  *added = *op;
  added->descriptor.sequence = sequence;
  added->is_direct =
      is_always_direct(op) ||
      (shm->reads_peers && op->nbytes >= shm->geometry.direct_call_nbytes);
  added->is_split = op->descriptor.kind == FSDP_SHM_ALL_REDUCE &&
                    (added->is_direct || (shm->world_size >= SPLIT_WORLD_SIZE &&
                                          op->nbytes >= SPLIT_NBYTES));
  added->num_slots = num_slots_of(shm, added, shm->rank);

  fsdp_shm_channel_header *header =
      fsdp_shm_priv_channel_of(shm, shm->rank, channel);
  header->started[sequence % 2] = added->descriptor;
  atomic_store_explicit(&header->num_started, sequence, memory_order_release);
  *ticket = sequence;
  return FSDP_OK;
}

/* ---- Writing ------------------------------------------------------------- */

static bool has_room(const fsdp_shm *shm, fsdp_channel channel) {
  const fsdp_shm_channel *self = &shm->channels[channel];
  return self->head - self->min_tail < shm->geometry.num_slots;
}

/* Whether all ranks have read the slot that the next one overwrites. */
static bool find_room(fsdp_shm *shm, fsdp_channel channel) {
  if (has_room(shm, channel)) return true;
  int64_t min_tail = INT64_MAX;
  for (int64_t rank = 0; rank < shm->world_size; rank++) {
    if (rank == shm->rank) continue;
    const _Atomic int64_t *tail =
        fsdp_shm_priv_tail(shm, channel, rank, shm->rank);
    /* Sequentially consistent, as all counters: Note [Sleeping]. */
    min_tail = min_i64(min_tail, atomic_load(tail));
  }
  shm->channels[channel].min_tail = min_tail;
  return has_room(shm, channel);
}

/* Copies the pieces that the other ranks will sum. */
static void fill_pieces(const fsdp_shm *shm, const fsdp_shm_op *op, int64_t i,
                        char *slot) {
  for (int64_t rank = 0; rank < shm->world_size; rank++) {
    if (rank == shm->rank) continue;
    const char *from = op->output;
    span bytes;
    if (op->is_split) {
      bytes = turn_part(shm, op, i, rank);
    } else {
      from += rank * op->nbytes;
      bytes = part_of(op->nbytes, shm->geometry.piece_nbytes, i);
    }
    copy(slot + piece_offset(shm, shm->rank, rank), from + bytes.begin,
         bytes.end - bytes.begin);
  }
}

/* Copies bytes of an all_gather's input into this rank's place. */
static void place_own_input(const fsdp_shm *shm, const fsdp_shm_op *op,
                            span bytes) {
  if (op->input == NULL) return;
  copy(op->output + shm->rank * op->nbytes + bytes.begin,
       op->input + bytes.begin, bytes.end - bytes.begin);
}

static void fill_slot(const fsdp_shm *shm, const fsdp_shm_op *op, int64_t i,
                      char *slot) {
  span bytes = part_of(op->nbytes, shm->geometry.slot_nbytes, i);
  const int32_t kind = op->descriptor.kind;
  if (op->nbytes == 0) return; /* there may be no memory either */
  if (kind == FSDP_SHM_BROADCAST && op->descriptor.root != shm->rank) return;
  const char *from = op->output;
  if (kind == FSDP_SHM_ALL_GATHER) {
    from += shm->rank * op->nbytes;
    place_own_input(shm, op, bytes);
  } else if (kind == FSDP_SHM_REDUCE_SCATTER ||
             (op->is_split && !holds_sum(op, i))) {
    fill_pieces(shm, op, i, slot);
    return;
  } else if (op->is_split) {
    bytes = turn_part(shm, op, i, shm->rank);
  }
  copy(slot, from + bytes.begin, bytes.end - bytes.begin);
}

/* Fills one slot. False when there is none to fill, or no room. */
static bool write_slot(fsdp_shm *shm, fsdp_channel channel) {
  fsdp_shm_channel *self = &shm->channels[channel];
  if (self->writing == self->end) return false;
  fsdp_shm_op *op = &self->ops[self->writing];
  const int64_t i = op->num_written;
  if (holds_sum(op, i) && op->num_reduced <= i - op->num_slots / 2) {
    return false; /* that sum is not made yet */
  }
  if (!find_room(shm, channel)) return false;

  if (op->is_direct) {
    place_own_input(shm, op, (span){0, op->nbytes});
    op->descriptor.address = fsdp_shm_priv_direct_address(shm, op);
  } else {
    fill_slot(shm, op, i,
              fsdp_shm_priv_slot(shm, shm->rank, channel, self->head));
  }
  if (i == 0) {
    *fsdp_shm_priv_descriptor(shm, shm->rank, channel, self->head) =
        op->descriptor;
  }
  self->head++;
  op->end_slot = self->head;
  atomic_store(&fsdp_shm_priv_channel_of(shm, shm->rank, channel)->head,
               self->head);
  fsdp_shm_priv_ring_all(shm);
  op->num_written++;
  if (op->num_written == op->num_slots) self->writing++;
  return true;
}

/* ---- Reading ------------------------------------------------------------- */

static bool is_filled(const fsdp_shm *shm, fsdp_channel channel, int64_t rank,
                      int64_t slot) {
  return atomic_load(&fsdp_shm_priv_channel_of(shm, rank, channel)->head) >
         slot;
}

/* Tells `rank` that this rank needs `num` more of its slots no longer. */
static void release(fsdp_shm *shm, fsdp_channel channel, int64_t rank,
                    int64_t num) {
  fsdp_shm_reader *reader = &shm->channels[channel].readers[rank];
  reader->num_read += num;
  atomic_store(fsdp_shm_priv_tail(shm, channel, shm->rank, rank),
               reader->begin + reader->num_read);
  fsdp_shm_priv_ring(shm, rank);
}

static bool is_same_call(const fsdp_shm_descriptor *a,
                         const fsdp_shm_descriptor *b) {
  return a->sequence == b->sequence && a->kind == b->kind &&
         a->dtype_code == b->dtype_code && a->itemsize == b->itemsize &&
         a->numel == b->numel && a->root == b->root &&
         (a->label_hash == b->label_hash || a->label_hash == 0 ||
          b->label_hash == 0);
}

/* Compares the oldest call with that of `rank`, once `rank` has come to it. */
static fsdp_status meet(fsdp_shm *shm, fsdp_channel channel, int64_t rank,
                        fsdp_error *error) {
  fsdp_shm_channel *self = &shm->channels[channel];
  fsdp_shm_reader *reader = &self->readers[rank];
  const fsdp_shm_op *op = &self->ops[self->first];
  if (reader->num_slots > 0) return FSDP_OK;
  if (!is_filled(shm, channel, rank, reader->begin)) return FSDP_OK;

  const fsdp_shm_descriptor theirs =
      *fsdp_shm_priv_descriptor(shm, rank, channel, reader->begin);
  if (is_same_call(&op->descriptor, &theirs)) {
    reader->num_slots = num_slots_of(shm, op, rank);
    reader->address = theirs.address;
    reader->num_parts = theirs.num_parts;
    return FSDP_OK;
  }
  char mine[384];
  char other[384];
  fsdp_shm_priv_describe_call(&op->descriptor, mine, sizeof mine);
  fsdp_shm_priv_describe_call(&theirs, other, sizeof other);
  return FSDP_FAIL(error, FSDP_BACKEND,
                   "ranks make different calls: rank %" PRId64
                   " is in %s, rank %" PRId64
                   " in %s; all ranks must run the same units in the same "
                   "order, with the same sizes and dtypes",
                   shm->rank, mine, rank, other);
}

/* Copies what `rank` has written so far of an all_gather or a broadcast. */
static bool copy_from(fsdp_shm *shm, fsdp_channel channel, int64_t rank) {
  fsdp_shm_channel *self = &shm->channels[channel];
  fsdp_shm_reader *reader = &self->readers[rank];
  const fsdp_shm_op *op = &self->ops[self->first];
  const bool is_gather = op->descriptor.kind == FSDP_SHM_ALL_GATHER;
  const bool has_data =
      op->nbytes > 0 && (is_gather || rank == op->descriptor.root);
  bool any = false;
  while (reader->num_read < reader->num_slots &&
         is_filled(shm, channel, rank, reader->begin + reader->num_read)) {
    const span bytes =
        part_of(op->nbytes, shm->geometry.slot_nbytes, reader->num_read);
    if (has_data) {
      copy(op->output + (is_gather ? rank * op->nbytes : 0) + bytes.begin,
           fsdp_shm_priv_slot(shm, rank, channel,
                              reader->begin + reader->num_read),
           bytes.end - bytes.begin);
    }
    release(shm, channel, rank, 1);
    any = true;
  }
  return any;
}

/* Copies what `rank` gives in a direct call, once it is ready. */
static fsdp_status copy_direct_from(fsdp_shm *shm, fsdp_channel channel,
                                    int64_t rank, bool *any,
                                    fsdp_error *error) {
  const fsdp_shm_channel *self = &shm->channels[channel];
  const fsdp_shm_reader *reader = &self->readers[rank];
  bool is_read = false;
  if (reader->num_slots == 0 || reader->num_read == reader->num_slots) {
    return FSDP_OK;
  }
  const fsdp_status status = fsdp_shm_priv_copy_direct(
      shm, &self->ops[self->first], rank, reader->address, &is_read, error);
  if (status != FSDP_OK || !is_read) return status;
  release(shm, channel, rank, 1);
  *any = true;
  return FSDP_OK;
}

static void sum_slot(fsdp_shm *shm, fsdp_channel channel, const fsdp_shm_op *op,
                     int64_t i) {
  const fsdp_shm_channel *self = &shm->channels[channel];
  const bool is_scatter = op->descriptor.kind == FSDP_SHM_REDUCE_SCATTER;
  char *own = op->output;
  span bytes;
  if (op->nbytes == 0) return;
  if (op->is_split) {
    bytes = turn_part(shm, op, i, shm->rank);
  } else if (is_scatter) {
    bytes = part_of(op->nbytes, shm->geometry.piece_nbytes, i);
    own += shm->rank * op->nbytes;
  } else {
    bytes = part_of(op->nbytes, shm->geometry.slot_nbytes, i);
  }
  own += bytes.begin;
  for (int64_t rank = 0; rank < shm->world_size; rank++) {
    const void **piece = is_scatter
                             ? &shm->pieces[fsdp_shm_priv_turn(shm, rank)]
                             : &shm->pieces[rank];
    if (rank == shm->rank) {
      *piece = own;
      continue;
    }
    const char *slot =
        fsdp_shm_priv_slot(shm, rank, channel, self->readers[rank].begin + i);
    if (is_scatter || op->is_split) slot += piece_offset(shm, rank, shm->rank);
    *piece = slot;
  }
  fsdp_shm_priv_sum(own, op->dtype, shm->pieces, shm->world_size,
                    (bytes.end - bytes.begin) / op->dtype.itemsize);
}

/* Copies the parts of the sum that the others made. */
static void copy_sums(const fsdp_shm *shm, fsdp_channel channel,
                      const fsdp_shm_op *op, int64_t i) {
  const fsdp_shm_channel *self = &shm->channels[channel];
  for (int64_t rank = 0; rank < shm->world_size; rank++) {
    if (rank == shm->rank) continue;
    const span bytes = turn_part(shm, op, i, rank);
    copy(op->output + bytes.begin,
         fsdp_shm_priv_slot(shm, rank, channel, self->readers[rank].begin + i),
         bytes.end - bytes.begin);
  }
}

static bool is_filled_by_all(const fsdp_shm *shm, fsdp_channel channel,
                             int64_t i) {
  const fsdp_shm_channel *self = &shm->channels[channel];
  for (int64_t rank = 0; rank < shm->world_size; rank++) {
    const fsdp_shm_reader *reader = &self->readers[rank];
    if (rank == shm->rank) continue;
    if (reader->num_slots == 0) return false;
    if (!is_filled(shm, channel, rank, reader->begin + i)) return false;
  }
  return true;
}

/* Sums one slot of all ranks, once all have filled it. */
static fsdp_status reduce_slot(fsdp_shm *shm, fsdp_channel channel, bool *any,
                               fsdp_error *error) {
  fsdp_shm_channel *self = &shm->channels[channel];
  fsdp_shm_op *op = &self->ops[self->first];
  const int64_t i = op->num_reduced;
  if (i == op->num_slots || op->num_written <= i) return FSDP_OK;
  if (!is_filled_by_all(shm, channel, i)) return FSDP_OK;
  if (op->is_direct) {
    bool is_read = false;
    const fsdp_status status = fsdp_shm_priv_reduce_direct(
        shm, op, self->readers, holds_sum(op, i), &is_read, error);
    if (status != FSDP_OK || !is_read) return status;
  } else if (holds_sum(op, i)) {
    copy_sums(shm, channel, op, i);
  } else {
    sum_slot(shm, channel, op, i);
  }
  op->num_reduced++;
  for (int64_t rank = 0; rank < shm->world_size; rank++) {
    if (rank != shm->rank) release(shm, channel, rank, 1);
  }
  *any = true;
  return FSDP_OK;
}

static bool is_reduction(const fsdp_shm_op *op) {
  return op->descriptor.kind == FSDP_SHM_REDUCE_SCATTER ||
         op->descriptor.kind == FSDP_SHM_ALL_REDUCE ||
         op->descriptor.kind == FSDP_SHM_REDUCE_PARTS;
}

/* Reads the slots that have come of the oldest call. any [out] whether there
 * were some. */
static fsdp_status read_slots(fsdp_shm *shm, fsdp_channel channel, bool *any,
                              fsdp_error *error) {
  const fsdp_shm_channel *self = &shm->channels[channel];
  const fsdp_shm_op *op = &self->ops[self->first];
  fsdp_status status = FSDP_OK;
  bool found = false;
  for (int64_t rank = 0; rank < shm->world_size; rank++) {
    if (rank == shm->rank) continue;
    FSDP_TRY(meet(shm, channel, rank, error));
    if (is_reduction(op)) continue;
    if (op->is_direct) {
      FSDP_TRY(copy_direct_from(shm, channel, rank, &found, error));
    } else {
      found = copy_from(shm, channel, rank) || found;
    }
  }
  if (is_reduction(op)) FSDP_TRY(reduce_slot(shm, channel, &found, error));
  *any = found;
done:
  return status;
}

/* Whether rank `peer` may still read the memory of a direct call. */
static bool is_read_by(const fsdp_shm *shm, fsdp_channel channel,
                       const fsdp_shm_op *op, int64_t peer) {
  return op->is_direct && atomic_load(fsdp_shm_priv_tail(
                              shm, channel, peer, shm->rank)) < op->end_slot;
}

/* Takes the oldest call off the list if it has ended. */
static bool end_op(fsdp_shm *shm, fsdp_channel channel) {
  fsdp_shm_channel *self = &shm->channels[channel];
  const fsdp_shm_op *op = &self->ops[self->first];
  if (op->num_written < op->num_slots) return false;
  if (is_reduction(op) && op->num_reduced < op->num_slots) return false;
  for (int64_t rank = 0; rank < shm->world_size; rank++) {
    const fsdp_shm_reader *reader = &self->readers[rank];
    if (rank == shm->rank) continue;
    if (reader->num_slots == 0 || reader->num_read < reader->num_slots ||
        is_read_by(shm, channel, op, rank)) {
      return false;
    }
  }
  for (int64_t rank = 0; rank < shm->world_size; rank++) {
    fsdp_shm_reader *reader = &self->readers[rank];
    reader->begin += reader->num_slots;
    reader->num_slots = reader->num_read = 0;
  }
  self->num_ended++;
  atomic_store_explicit(
      &fsdp_shm_priv_channel_of(shm, shm->rank, channel)->num_ended,
      self->num_ended, memory_order_release);
  self->first++;
  if (self->first == self->end) self->first = self->end = self->writing = 0;
  /* Another thread of this rank may sleep until this call has ended. */
  fsdp_shm_priv_ring(shm, shm->rank);
  return true;
}

fsdp_status fsdp_shm_priv_channel_progress(fsdp_shm *shm, fsdp_channel channel,
                                           fsdp_error *error) {
  fsdp_shm_channel *self = &shm->channels[channel];
  fsdp_status status = FSDP_OK;
  bool any_ever = false;
  for (bool any = true; any && self->first < self->end;) {
    any = false;
    bool is_read = false;
    while (write_slot(shm, channel)) any = true;
    FSDP_TRY(read_slots(shm, channel, &is_read, error));
    any = end_op(shm, channel) || is_read || any;
    any_ever = any_ever || any;
  }
done:
  if (any_ever) self->progress_ns = fsdp_shm_priv_now();
  return status;
}

bool fsdp_shm_priv_channel_waits_for(const fsdp_shm *shm, fsdp_channel channel,
                                     int64_t peer) {
  const fsdp_shm_channel *self = &shm->channels[channel];
  if (self->first == self->end || peer == shm->rank) return false;
  const fsdp_shm_op *op = &self->ops[self->first];
  const fsdp_shm_reader *reader = &self->readers[peer];
  const bool is_unread =
      reader->num_slots == 0 || reader->num_read < reader->num_slots;
  /* What a direct call reads is gone with its owner. */
  if (is_unread &&
      (op->is_direct ||
       !is_filled(shm, channel, peer, reader->begin + reader->num_read))) {
    return true;
  }
  if (op->num_written == op->num_slots && is_read_by(shm, channel, op, peer)) {
    return true;
  }
  return op->num_written < op->num_slots &&
         self->head - atomic_load(
                          fsdp_shm_priv_tail(shm, channel, peer, shm->rank)) >=
             shm->geometry.num_slots;
}
