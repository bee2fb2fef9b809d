/*
 * Exchange: intersects what one rank holds with what another needs, item by
 * item, and groups the pieces into messages.
 */
#include "state/exchange.h"

#include <inttypes.h>
#include <string.h>

#include "base/alloc.h"
#include "base/arith.h"

/* Messages of one direction. While they are made, `pieces` may move, so the
 * messages point into it only when all are there. */
typedef struct message_list {
  fsdp_exchange_piece *pieces;
  size_t num_pieces;
  size_t pieces_capacity;
  fsdp_exchange_message *messages;
  size_t num_messages;
  size_t messages_capacity;
} message_list;

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
  message_list outgoing;
  message_list incoming;
};

/* Checking ----------------------------------------------------------------- */

static fsdp_status check_range(fsdp_range range, int64_t item, int64_t rank,
                               int64_t itemsize, const char *what,
                               fsdp_error *error) {
  int64_t nbytes;
  if (range.begin < 0 || range.end < range.begin) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "rank %" PRId64 " %s elements [%" PRId64 ", %" PRId64
                     ") of item %" PRId64 ", need 0 <= begin <= end",
                     rank, what, range.begin, range.end, item);
  }
  if (!fsdp_mul_i64(range.end, itemsize, &nbytes)) {
    return FSDP_FAIL(error, FSDP_OVERFLOW,
                     "rank %" PRId64 " %s elements up to %" PRId64
                     " of item %" PRId64 ", %" PRId64 " bytes each: too many",
                     rank, what, range.end, item, itemsize);
  }
  return FSDP_OK;
}

static fsdp_status check_spec(const fsdp_exchange_spec *spec,
                              fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  if (spec->rank < 0 || spec->rank >= spec->world_size) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "rank %" PRId64 " of %" PRId64 " ranks", spec->rank,
                     spec->world_size);
  }
  for (int64_t i = 0; i < spec->num_items; i++) {
    const fsdp_exchange_item *item = &spec->items[i];
    if (item->itemsize < 1) {
      return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                       "item %" PRId64 " has %" PRId64 " bytes an element", i,
                       item->itemsize);
    }
    for (int64_t rank = 0; rank < spec->world_size; rank++) {
      FSDP_TRY(check_range(item->held[rank], i, rank, item->itemsize, "holds",
                           error));
      FSDP_TRY(check_range(item->needed[rank], i, rank, item->itemsize, "needs",
                           error));
    }
  }
done:
  return status;
}

/* Messages ----------------------------------------------------------------- */

static fsdp_range intersect(fsdp_range a, fsdp_range b) {
  return (fsdp_range){a.begin > b.begin ? a.begin : b.begin,
                      a.end < b.end ? a.end : b.end};
}

static fsdp_status add_piece(message_list *list, fsdp_exchange_piece piece,
                             fsdp_error *error) {
  void *pieces = list->pieces;
  if (!fsdp_grow(&pieces, &list->pieces_capacity, list->num_pieces + 1,
                 sizeof *list->pieces)) {
    return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY, "exchange of over %zu pieces",
                     list->num_pieces);
  }
  list->pieces = pieces;
  list->pieces[list->num_pieces++] = piece;
  return FSDP_OK;
}

/* A message of the last `num_pieces` pieces. */
static fsdp_status add_message(message_list *list, int64_t peer,
                               size_t num_pieces, fsdp_error *error) {
  void *messages = list->messages;
  int64_t nbytes = 0;
  if (!fsdp_grow(&messages, &list->messages_capacity, list->num_messages + 1,
                 sizeof *list->messages)) {
    return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY, "exchange of over %zu messages",
                     list->num_messages);
  }
  list->messages = messages;
  for (size_t i = list->num_pieces - num_pieces; i < list->num_pieces; i++) {
    if (!fsdp_add_i64(nbytes, list->pieces[i].nbytes, &nbytes)) {
      return FSDP_FAIL(error, FSDP_OVERFLOW,
                       "the messages for rank %" PRId64 " have too many bytes",
                       peer);
    }
  }
  list->messages[list->num_messages] = (fsdp_exchange_message){
      .peer = peer,
      .num_pieces = (int64_t)num_pieces,
      .nbytes = nbytes,
      .same_as = (int64_t)list->num_messages,
  };
  list->num_messages++;
  return FSDP_OK;
}

/* Whether an item's piece between two ranks is what is looked for, and where it
 * begins in what this rank has of it. */
static bool find_piece(const fsdp_exchange_spec *spec, int64_t index,
                       int64_t peer, bool is_outgoing, bool is_direct,
                       fsdp_exchange_piece *piece) {
  const fsdp_exchange_item *item = &spec->items[index];
  const fsdp_range held = item->held[is_outgoing ? spec->rank : peer];
  const fsdp_range needed = item->needed[is_outgoing ? peer : spec->rank];
  const fsdp_range common = intersect(held, needed);
  if (common.begin >= common.end) return false;
  const int64_t base = is_outgoing ? held.begin : needed.begin;
  *piece = (fsdp_exchange_piece){
      .item = index,
      .offset = (common.begin - base) * item->itemsize,
      .nbytes = (common.end - common.begin) * item->itemsize,
  };
  return (piece->nbytes >= spec->direct_nbytes) == is_direct;
}

/* The messages to or from `peer`: first the large pieces, then the others in
 * one. */
static fsdp_status add_peer(message_list *list, const fsdp_exchange_spec *spec,
                            int64_t peer, bool is_outgoing, fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  fsdp_exchange_piece piece;
  size_t num_small = 0;
  for (int64_t i = 0; i < spec->num_items; i++) {
    if (!find_piece(spec, i, peer, is_outgoing, true, &piece)) continue;
    FSDP_TRY(add_piece(list, piece, error));
    FSDP_TRY(add_message(list, peer, 1, error));
  }
  for (int64_t i = 0; i < spec->num_items; i++) {
    if (!find_piece(spec, i, peer, is_outgoing, false, &piece)) continue;
    FSDP_TRY(add_piece(list, piece, error));
    num_small++;
  }
  if (num_small > 0) FSDP_TRY(add_message(list, peer, num_small, error));
done:
  return status;
}

static void point_to_pieces(message_list *list) {
  const fsdp_exchange_piece *pieces = list->pieces;
  for (size_t i = 0; i < list->num_messages; i++) {
    list->messages[i].pieces = pieces;
    pieces += list->messages[i].num_pieces;
  }
}

static bool have_same_pieces(const fsdp_exchange_message *a,
                             const fsdp_exchange_message *b) {
  return a->num_pieces == b->num_pieces && a->nbytes == b->nbytes &&
         memcmp(a->pieces, b->pieces,
                (size_t)a->num_pieces * sizeof *a->pieces) == 0;
}

/* Several peers often need the same: then it is packed once. */
static void find_same(message_list *list) {
  for (size_t i = 0; i < list->num_messages; i++) {
    fsdp_exchange_message *message = &list->messages[i];
    if (message->num_pieces == 1) continue; /* not packed */
    for (size_t j = 0; j < i; j++) {
      const fsdp_exchange_message *earlier = &list->messages[j];
      if (earlier->same_as != (int64_t)j) continue;
      if (!have_same_pieces(earlier, message)) continue;
      message->same_as = (int64_t)j;
      break;
    }
  }
}

/* The exchange ------------------------------------------------------------- */

static fsdp_status add_own(fsdp_exchange *self, const fsdp_exchange_spec *spec,
                           fsdp_error *error) {
  const size_t num_items = (size_t)spec->num_items;
  self->items = fsdp_calloc(num_items, sizeof *self->items);
  self->copies = fsdp_calloc(num_items, sizeof *self->copies);
  if (self->items == NULL || self->copies == NULL) {
    return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY, "exchange of %zu items",
                     num_items);
  }
  self->num_items = spec->num_items;
  for (int64_t i = 0; i < spec->num_items; i++) {
    const fsdp_exchange_item *item = &spec->items[i];
    const fsdp_range held = item->held[spec->rank];
    const fsdp_range needed = item->needed[spec->rank];
    const fsdp_range common = intersect(held, needed);
    self->items[i] =
        (item_nbytes){.held = (held.end - held.begin) * item->itemsize,
                      .needed = (needed.end - needed.begin) * item->itemsize};
    if (common.begin >= common.end) continue;
    self->copies[self->num_copies++] = (fsdp_exchange_copy){
        .item = i,
        .source_offset = (common.begin - held.begin) * item->itemsize,
        .target_offset = (common.begin - needed.begin) * item->itemsize,
        .nbytes = (common.end - common.begin) * item->itemsize,
    };
  }
  return FSDP_OK;
}

fsdp_status fsdp_exchange_create(const fsdp_exchange_spec *spec,
                                 fsdp_exchange **exchange, fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  fsdp_exchange *self = NULL;
  FSDP_TRY(check_spec(spec, error));
  self = fsdp_calloc(1, sizeof *self);
  if (self == NULL) {
    return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY, "exchange");
  }
  FSDP_TRY(add_own(self, spec, error));
  for (int64_t peer = 0; peer < spec->world_size; peer++) {
    if (peer == spec->rank) continue;
    FSDP_TRY(add_peer(&self->outgoing, spec, peer, true, error));
    FSDP_TRY(add_peer(&self->incoming, spec, peer, false, error));
  }
  point_to_pieces(&self->outgoing);
  point_to_pieces(&self->incoming);
  find_same(&self->outgoing);
  *exchange = self;
  self = NULL;
done:
  fsdp_exchange_destroy(self);
  return status;
}

void fsdp_exchange_destroy(fsdp_exchange *exchange) {
  if (exchange == NULL) return;
  fsdp_free(exchange->items);
  fsdp_free(exchange->copies);
  fsdp_free(exchange->outgoing.pieces);
  fsdp_free(exchange->outgoing.messages);
  fsdp_free(exchange->incoming.pieces);
  fsdp_free(exchange->incoming.messages);
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

static const fsdp_exchange_message *messages_of(const message_list *list,
                                                int64_t *num_messages) {
  *num_messages = (int64_t)list->num_messages;
  return list->messages;
}

const fsdp_exchange_message *fsdp_exchange_outgoing(
    const fsdp_exchange *exchange, int64_t *num_messages) {
  return messages_of(&exchange->outgoing, num_messages);
}

const fsdp_exchange_message *fsdp_exchange_incoming(
    const fsdp_exchange *exchange, int64_t *num_messages) {
  return messages_of(&exchange->incoming, num_messages);
}
