/*
 * Exchange: what one rank of a group passes to the others, and gets from them,
 * so that every rank has what it needs of some items.
 *
 *   item 0, 4 bytes an element   held      needed
 *     rank 0                     [0, 3)    [0, 5)
 *     rank 1                     [3, 5)    [3, 5)
 *
 *   on rank 0: bytes [0, 12) of what it holds are copied to 0 of its result,
 *              8 bytes from rank 1 go to 12
 *   on rank 1: bytes [0, 8) are copied to 0, and sent to rank 0
 *
 * An item is a 1-D tensor that lies in ranges over the ranks. All ranks plan
 * with the same ranges, so both ends of a message know its pieces and no sizes
 * are passed. Small pieces for one peer go as one message, large ones each in a
 * message of their own, straight from their place into their place. Immutable
 * once created, needs no lock.
 */
#ifndef FSDP_STATE_EXCHANGE_H
#define FSDP_STATE_EXCHANGE_H

#include <stdint.h>

#include "base/status.h"
#include "base/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Arrays of world_size ranges, of elements. An element that a rank needs is
 * held by one rank at most; what nobody holds stays as it is in the result. */
typedef struct fsdp_exchange_item {
  int64_t itemsize; /* bytes, >= 1 */
  const fsdp_range *held;
  const fsdp_range *needed;
} fsdp_exchange_item;

typedef struct fsdp_exchange_spec {
  const fsdp_exchange_item *items;
  int64_t num_items;
  int64_t rank; /* in [0, world_size) */
  int64_t world_size;
  int64_t direct_nbytes; /* pieces of at least so much are messages alone */
} fsdp_exchange_spec;

/* What the rank needs and holds itself. Offsets in bytes. */
typedef struct fsdp_exchange_copy {
  int64_t item;
  int64_t source_offset; /* in what it holds of the item */
  int64_t target_offset; /* in what it needs of the item */
  int64_t nbytes;        /* >= 1 */
} fsdp_exchange_copy;

/* A part of a message: of what the rank holds of the item when the message goes
 * out, of what it needs when it comes in. */
typedef struct fsdp_exchange_piece {
  int64_t item;
  int64_t offset; /* bytes */
  int64_t nbytes; /* >= 1 */
} fsdp_exchange_piece;

/* Its pieces lie in it side by side, in their order. */
typedef struct fsdp_exchange_message {
  int64_t peer;
  const fsdp_exchange_piece *pieces;
  int64_t num_pieces; /* >= 1 */
  int64_t nbytes;
  /* The first outgoing message that has the same bytes; itself if none. */
  int64_t same_as;
} fsdp_exchange_message;

typedef struct fsdp_exchange fsdp_exchange;

/*
 * Plans for one rank; `spec` is not referred to afterwards. Time and memory are
 * linear in items times ranks.
 *
 * exchange  [out] new reference; release with fsdp_exchange_destroy().
 *
 * FSDP_INVALID_ARGUMENT  no such rank, an itemsize below 1, or a range that
 *                        begins below 0 or ends before it begins; the message
 *                        names item and rank.
 * FSDP_OVERFLOW          a range ends past INT64_MAX bytes.
 * FSDP_OUT_OF_MEMORY
 */
FSDP_NODISCARD fsdp_status fsdp_exchange_create(const fsdp_exchange_spec *spec,
                                                fsdp_exchange **exchange,
                                                fsdp_error *error);

/* Accepts NULL. Cannot fail. */
void fsdp_exchange_destroy(fsdp_exchange *exchange);

int64_t fsdp_exchange_num_items(const fsdp_exchange *exchange);
/* Bytes that the rank holds and needs of an item. */
int64_t fsdp_exchange_held_nbytes(const fsdp_exchange *exchange, int64_t item);
int64_t fsdp_exchange_needed_nbytes(const fsdp_exchange *exchange,
                                    int64_t item);

/* By item. Borrowed. */
const fsdp_exchange_copy *fsdp_exchange_copies(const fsdp_exchange *exchange,
                                               int64_t *num_copies);

/* By peer; those between two ranks are in the same order on both. Borrowed. */
const fsdp_exchange_message *fsdp_exchange_outgoing(
    const fsdp_exchange *exchange, int64_t *num_messages);
const fsdp_exchange_message *fsdp_exchange_incoming(
    const fsdp_exchange *exchange, int64_t *num_messages);

#ifdef __cplusplus
}
#endif
#endif /* FSDP_STATE_EXCHANGE_H */
