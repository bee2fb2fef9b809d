/*
 * Exchange: intersects what one rank holds with what another needs, item by
 * item, and groups the pieces into messages.
 */
#include "state/exchange.h"

#include <inttypes.h>
#include <string.h>

#include "base/alloc.h"
#include "base/arith.h"

/* A piece on its way to, or from, a peer. */
typedef struct passed_piece {
  int64_t peer;
  fsdp_exchange_piece piece;
} passed_piece;

/* One direction: its pieces in the order of the items, then grouped. */
typedef struct direction {
  passed_piece *passed;
  size_t num_passed;
  size_t capacity;
  fsdp_exchange_piece *pieces;
  fsdp_exchange_message *messages;
  int64_t num_messages;
} direction;

/* Bytes of one item. */
typedef struct item_nbytes {
  int64_t held;
  int64_t needed;
} item_nbytes;

struct fsdp_exchange {
  int64_t num_items;
  item_nbytes *items;
  fsdp_exchange_copy *copies;
  int64_t num_copies;
  direction outgoing;
  direction incoming;
};

/* Items -------------------------------------------------------------------- */

/* One side of an item: its pieces, and what each rank has of it. */
typedef struct side {
  const fsdp_piece *pieces;
  int64_t num_pieces;
  fsdp_range *of_rank; /* world_size; empty between items */
} side;

typedef struct planner {
  const fsdp_exchange_spec *spec;
  fsdp_exchange *exchange;
  side held;
  side needed;
} planner;

static fsdp_range intersect(fsdp_range a, fsdp_range b) {
  return (fsdp_range){a.begin > b.begin ? a.begin : b.begin,
                      a.end < b.end ? a.end : b.end};
}

static bool is_empty(fsdp_range range) {
  return range.begin >= range.end;
}

static bool covers(fsdp_range outer, fsdp_range inner) {
  return outer.begin <= inner.begin && inner.end <= outer.end;
}

/* Looks up the pieces of an item, and which rank has which. */
static fsdp_status open_side(side *self, const fsdp_placement *placement,
                             const fsdp_exchange_spec *spec, int64_t index,
                             fsdp_error *error) {
  const fsdp_exchange_item *item = &spec->items[index];
  int64_t nbytes;
  self->pieces =
      fsdp_placement_pieces_of(placement, item->param, &self->num_pieces);
  for (int64_t i = 0; i < self->num_pieces; i++) {
    const fsdp_piece *piece = &self->pieces[i];
    if (piece->buffer >= spec->world_size) {
      return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                       "item %" PRId64 " lies on rank %" PRId64 " of %" PRId64
                       " ranks",
                       index, piece->buffer, spec->world_size);
    }
    if (!is_empty(self->of_rank[piece->buffer])) {
      return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                       "rank %" PRId64 " has two pieces of item %" PRId64
                       ", need at most one",
                       piece->buffer, index);
    }
    if (!fsdp_mul_i64(piece->in_param.end, item->itemsize, &nbytes)) {
      return FSDP_FAIL(error, FSDP_OVERFLOW,
                       "rank %" PRId64 " has elements up to %" PRId64
                       " of item %" PRId64 ", %" PRId64 " bytes each: too many",
                       piece->buffer, piece->in_param.end, index,
                       item->itemsize);
    }
    self->of_rank[piece->buffer] = piece->in_param;
  }
  return FSDP_OK;
}

static void close_side(side *self) {
  for (int64_t i = 0; i < self->num_pieces; i++) {
    self->of_rank[self->pieces[i].buffer] = (fsdp_range){0, 0};
  }
  self->num_pieces = 0;
}

/* Adds `common`, elements of an item of which this rank has those from `base`
 * on, unless it is empty. */
static fsdp_status pass_piece(direction *way, int64_t peer, int64_t index,
                              int64_t itemsize, int64_t base, fsdp_range common,
                              fsdp_error *error) {
  if (is_empty(common)) return FSDP_OK;
  void *passed = way->passed;
  if (!fsdp_grow(&passed, &way->capacity, way->num_passed + 1,
                 sizeof *way->passed)) {
    return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY,
                     "out of host memory for an exchange of more than %zu "
                     "pieces",
                     way->num_passed);
  }
  way->passed = passed;
  way->passed[way->num_passed++] = (passed_piece){
      .peer = peer,
      .piece = {.item = index,
                .offset = (common.begin - base) * itemsize,
                .nbytes = (common.end - common.begin) * itemsize},
  };
  return FSDP_OK;
}

static void add_copy(fsdp_exchange *self, int64_t index, int64_t itemsize,
                     fsdp_range held, fsdp_range needed) {
  const fsdp_range common = intersect(held, needed);
  self->items[index] =
      (item_nbytes){.held = (held.end - held.begin) * itemsize,
                    .needed = (needed.end - needed.begin) * itemsize};
  if (is_empty(common)) return;
  self->copies[self->num_copies++] = (fsdp_exchange_copy){
      .item = index,
      .source_offset = (common.begin - held.begin) * itemsize,
      .target_offset = (common.begin - needed.begin) * itemsize,
      .nbytes = (common.end - common.begin) * itemsize,
  };
}

/* What passes of an item whose sides are open. */
static fsdp_status plan_open_item(planner *self, int64_t index,
                                  fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  const int64_t rank = self->spec->rank;
  const int64_t itemsize = self->spec->items[index].itemsize;
  const fsdp_range held = self->held.of_rank[rank];
  const fsdp_range needed = self->needed.of_rank[rank];
  add_copy(self->exchange, index, itemsize, held, needed);
  for (int64_t i = 0; i < self->needed.num_pieces; i++) {
    const fsdp_piece *piece = &self->needed.pieces[i];
    if (piece->buffer == rank) continue;
    if (covers(self->held.of_rank[piece->buffer], piece->in_param)) continue;
    FSDP_TRY(pass_piece(&self->exchange->outgoing, piece->buffer, index,
                        itemsize, held.begin, intersect(held, piece->in_param),
                        error));
  }
  if (covers(held, needed)) goto done;
  for (int64_t i = 0; i < self->held.num_pieces; i++) {
    const fsdp_piece *piece = &self->held.pieces[i];
    if (piece->buffer == rank) continue;
    FSDP_TRY(pass_piece(&self->exchange->incoming, piece->buffer, index,
                        itemsize, needed.begin,
                        intersect(needed, piece->in_param), error));
  }
done:
  return status;
}

static fsdp_status plan_item(planner *self, int64_t index, fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  const fsdp_exchange_item *item = &self->spec->items[index];
  if (item->itemsize < 1) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "item %" PRId64 " has %" PRId64 " bytes an element", index,
                     item->itemsize);
  }
  FSDP_TRY(open_side(&self->held, item->held, self->spec, index, error));
  FSDP_TRY(open_side(&self->needed, item->needed, self->spec, index, error));
  FSDP_TRY(plan_open_item(self, index, error));
  close_side(&self->held);
  close_side(&self->needed);
done:
  return status;
}

static fsdp_status plan_items(fsdp_exchange *exchange,
                              const fsdp_exchange_spec *spec,
                              fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  const size_t num_items = (size_t)spec->num_items;
  const size_t num_ranks = (size_t)spec->world_size;
  planner self = {.spec = spec, .exchange = exchange};
  self.held.of_rank = fsdp_calloc(num_ranks, sizeof(fsdp_range));
  self.needed.of_rank = fsdp_calloc(num_ranks, sizeof(fsdp_range));
  exchange->items = fsdp_calloc(num_items, sizeof *exchange->items);
  exchange->copies = fsdp_calloc(num_items, sizeof *exchange->copies);
  if (self.held.of_rank == NULL || self.needed.of_rank == NULL ||
      exchange->items == NULL || exchange->copies == NULL) {
    status = FSDP_FAIL(error, FSDP_OUT_OF_MEMORY, "exchange of %zu items",
                       num_items);
    goto done;
  }
  exchange->num_items = spec->num_items;
  for (int64_t i = 0; i < spec->num_items; i++) {
    FSDP_TRY(plan_item(&self, i, error));
  }
done:
  fsdp_free(self.held.of_rank);
  fsdp_free(self.needed.of_rank);
  return status;
}

/* Messages ----------------------------------------------------------------- */

/* The pieces of a direction by peer: large ones first, then small ones. */
static size_t bucket_of(const passed_piece *passed, int64_t direct_nbytes) {
  return 2 * (size_t)passed->peer + (passed->piece.nbytes < direct_nbytes);
}

/* Sorts the pieces into their buckets. `ends`: of buckets, zeros before. */
static fsdp_status sort_pieces(direction *way, int64_t direct_nbytes,
                               size_t num_buckets, size_t *ends,
                               fsdp_error *error) {
  way->pieces = fsdp_calloc(way->num_passed, sizeof *way->pieces);
  if (way->pieces == NULL) {
    return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY, "exchange of %zu pieces",
                     way->num_passed);
  }
  for (size_t i = 0; i < way->num_passed; i++) {
    ends[bucket_of(&way->passed[i], direct_nbytes)]++;
  }
  size_t begin = 0;
  for (size_t i = 0; i < num_buckets; i++) {
    const size_t num_pieces = ends[i];
    ends[i] = begin;
    begin += num_pieces;
  }
  for (size_t i = 0; i < way->num_passed; i++) {
    const size_t bucket = bucket_of(&way->passed[i], direct_nbytes);
    way->pieces[ends[bucket]++] = way->passed[i].piece;
  }
  return FSDP_OK;
}

/* A message of the pieces [begin, end). */
static fsdp_status add_message(direction *way, int64_t peer, size_t begin,
                               size_t end, fsdp_error *error) {
  int64_t nbytes = 0;
  for (size_t i = begin; i < end; i++) {
    if (!fsdp_add_i64(nbytes, way->pieces[i].nbytes, &nbytes)) {
      return FSDP_FAIL(error, FSDP_OVERFLOW,
                       "the messages for rank %" PRId64 " have too many bytes",
                       peer);
    }
  }
  way->messages[way->num_messages] = (fsdp_exchange_message){
      .peer = peer,
      .pieces = way->pieces + begin,
      .num_pieces = (int64_t)(end - begin),
      .nbytes = nbytes,
      .same_as = way->num_messages,
  };
  way->num_messages++;
  return FSDP_OK;
}

/* Groups the pieces. `ends`: of its buckets, `other_ends` of the other
 * direction's. A peer of which only the other direction has pieces gets a
 * message without bytes. */
static fsdp_status add_messages(direction *way, int64_t world_size,
                                const size_t *ends, const size_t *other_ends,
                                fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  size_t begin = 0;
  size_t other_begin = 0;
  way->messages =
      fsdp_calloc(way->num_passed + (size_t)world_size, sizeof *way->messages);
  if (way->messages == NULL) {
    return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY, "exchange of %zu messages",
                     way->num_passed);
  }
  for (int64_t peer = 0; peer < world_size; peer++) {
    const size_t direct_end = ends[2 * peer];
    const size_t end = ends[2 * peer + 1];
    const bool is_heard = other_ends[2 * peer + 1] > other_begin;
    if (is_heard && begin == end) {
      FSDP_TRY(add_message(way, peer, begin, begin, error));
    }
    for (; begin < direct_end; begin++) {
      FSDP_TRY(add_message(way, peer, begin, begin + 1, error));
    }
    if (begin < end) FSDP_TRY(add_message(way, peer, begin, end, error));
    begin = end;
    other_begin = other_ends[2 * peer + 1];
  }
done:
  return status;
}

static bool have_same_pieces(const fsdp_exchange_message *a,
                             const fsdp_exchange_message *b) {
  return a->num_pieces == b->num_pieces && a->nbytes == b->nbytes &&
         memcmp(a->pieces, b->pieces,
                (size_t)a->num_pieces * sizeof *a->pieces) == 0;
}

/* Several peers often need the same: then it is packed once. */
static void find_same(direction *way) {
  for (int64_t i = 0; i < way->num_messages; i++) {
    fsdp_exchange_message *message = &way->messages[i];
    if (message->num_pieces <= 1) continue; /* not packed */
    for (int64_t j = 0; j < i; j++) {
      const fsdp_exchange_message *earlier = &way->messages[j];
      if (earlier->same_as != j) continue;
      if (!have_same_pieces(earlier, message)) continue;
      message->same_as = j;
      break;
    }
  }
}

static void forget_passed(direction *way) {
  fsdp_free(way->passed);
  way->passed = NULL;
}

static fsdp_status group_pieces(fsdp_exchange *self,
                                const fsdp_exchange_spec *spec,
                                fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  const size_t num_buckets = 2 * (size_t)spec->world_size;
  size_t *out_ends = fsdp_calloc(num_buckets, sizeof *out_ends);
  size_t *in_ends = fsdp_calloc(num_buckets, sizeof *in_ends);
  if (out_ends == NULL || in_ends == NULL) {
    status = FSDP_FAIL(error, FSDP_OUT_OF_MEMORY,
                       "exchange of %" PRId64 " ranks", spec->world_size);
    goto done;
  }
  FSDP_TRY(sort_pieces(&self->outgoing, spec->direct_nbytes, num_buckets,
                       out_ends, error));
  FSDP_TRY(sort_pieces(&self->incoming, spec->direct_nbytes, num_buckets,
                       in_ends, error));
  FSDP_TRY(add_messages(&self->outgoing, spec->world_size, out_ends, in_ends,
                        error));
  FSDP_TRY(add_messages(&self->incoming, spec->world_size, in_ends, out_ends,
                        error));
  find_same(&self->outgoing);
  forget_passed(&self->outgoing);
  forget_passed(&self->incoming);
done:
  fsdp_free(out_ends);
  fsdp_free(in_ends);
  return status;
}

/* Size --------------------------------------------------------------------- */

static bool is_same(fsdp_range a, fsdp_range b) {
  return a.begin == b.begin && a.end == b.end;
}

static int64_t nbytes_of(fsdp_range range, int64_t itemsize) {
  int64_t nbytes;
  const bool fits = fsdp_mul_i64(range.end - range.begin, itemsize, &nbytes);
  return fits ? nbytes : INT64_MAX;
}

static void add_nbytes(int64_t *total, int64_t nbytes) {
  if (!fsdp_add_i64(*total, nbytes, total)) *total = INT64_MAX;
}

fsdp_exchange_size fsdp_exchange_item_size(const fsdp_exchange_item *item,
                                           int64_t direct_nbytes) {
  fsdp_exchange_size size = {0, 0};
  int64_t num_held, num_needed;
  const fsdp_piece *held =
      fsdp_placement_pieces_of(item->held, item->param, &num_held);
  const fsdp_piece *needed =
      fsdp_placement_pieces_of(item->needed, item->param, &num_needed);
  for (int64_t i = 0; i < num_held; i++) {
    if (i > 0 && is_same(held[i - 1].in_param, held[i].in_param)) continue;
    add_nbytes(&size.nbytes, nbytes_of(held[i].in_param, item->itemsize));
    fsdp_range last = {0, 0};
    for (int64_t j = 0; j < num_needed; j++) {
      const fsdp_range common = intersect(held[i].in_param, needed[j].in_param);
      if (needed[j].buffer == held[i].buffer || is_empty(common)) continue;
      const int64_t nbytes = nbytes_of(common, item->itemsize);
      if (nbytes >= direct_nbytes || is_same(common, last)) continue;
      add_nbytes(&size.packed_nbytes, nbytes);
      last = common;
    }
  }
  return size;
}

/* The exchange ------------------------------------------------------------- */

fsdp_status fsdp_exchange_create(const fsdp_exchange_spec *spec,
                                 fsdp_exchange **exchange, fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  fsdp_exchange *self = NULL;
  if (spec->rank < 0 || spec->rank >= spec->world_size) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "rank %" PRId64 " of %" PRId64 " ranks", spec->rank,
                     spec->world_size);
  }
  self = fsdp_calloc(1, sizeof *self);
  if (self == NULL) {
    return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY, "exchange");
  }
  FSDP_TRY(plan_items(self, spec, error));
  FSDP_TRY(group_pieces(self, spec, error));
  *exchange = self;
  self = NULL;
done:
  fsdp_exchange_destroy(self);
  return status;
}

static void release_direction(direction *way) {
  fsdp_free(way->passed);
  fsdp_free(way->pieces);
  fsdp_free(way->messages);
}

void fsdp_exchange_destroy(fsdp_exchange *exchange) {
  if (exchange == NULL) return;
  fsdp_free(exchange->items);
  fsdp_free(exchange->copies);
  release_direction(&exchange->outgoing);
  release_direction(&exchange->incoming);
  fsdp_free(exchange);
}

int64_t fsdp_exchange_num_items(const fsdp_exchange *exchange) {
  return exchange->num_items;
}

int64_t fsdp_exchange_held_nbytes(const fsdp_exchange *exchange, int64_t item) {
  return exchange->items[item].held;
}

int64_t fsdp_exchange_needed_nbytes(const fsdp_exchange *exchange,
                                    int64_t item) {
  return exchange->items[item].needed;
}

const fsdp_exchange_copy *fsdp_exchange_copies(const fsdp_exchange *exchange,
                                               int64_t *num_copies) {
  *num_copies = exchange->num_copies;
  return exchange->copies;
}

const fsdp_exchange_message *fsdp_exchange_outgoing(
    const fsdp_exchange *exchange, int64_t *num_messages) {
  *num_messages = exchange->outgoing.num_messages;
  return exchange->outgoing.messages;
}

const fsdp_exchange_message *fsdp_exchange_incoming(
    const fsdp_exchange *exchange, int64_t *num_messages) {
  *num_messages = exchange->incoming.num_messages;
  return exchange->incoming.messages;
}
