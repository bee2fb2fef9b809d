/*
 * Exchange: leads from where the ranks of a group hold items to where they need
 * them. It says what one rank sends to the others, gets from them, and copies
 * itself.
 *
 *   item 0, 4 bytes an element   held      needed
 *     rank 0                     [0, 3)    [0, 5)
 *     rank 1                     [3, 5)    [3, 5)
 *
 *   on rank 0: bytes [0, 12) of what it holds are copied to 0 of its result,
 *              8 bytes from rank 1 go to 12
 *   on rank 1: bytes [0, 8) are copied to 0, and sent to rank 0
 *
 * All ranks plan with the same placements, so both ends of a message know its
 * pieces and no sizes are sent. Small pieces for one peer go as one message.
 * Large pieces are messages of their own, from their place into their place. A
 * rank that sends to a peer also hears from it, with a message of 0 bytes if
 * there is nothing else: no rank ends an exchange before its peers have begun
 * it. Immutable once created, needs no lock.
 */
#ifndef FSDP_STATE_EXCHANGE_H
#define FSDP_STATE_EXCHANGE_H

#include <stdint.h>

#include "base/status.h"
#include "base/types.h"
#include "state/placement.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One parameter's elements, or one of its states'. The buffers of the
 * placements are ranks. A rank holds, and needs, at most one range of an item;
 * it is a tensor of its own, so the pieces' offsets do not matter.
 *
 * A rank that holds all that it needs copies it. Otherwise each element that it
 * needs is held by one rank at most; what no rank holds stays as it is. */
typedef struct fsdp_exchange_item {
  int64_t itemsize; /* bytes of an element, >= 1 */
  int64_t param;    /* in both placements */
  const fsdp_placement *held;
  const fsdp_placement *needed;
} fsdp_exchange_item;

typedef struct fsdp_exchange_spec {
  const fsdp_exchange_item *items;
  int64_t num_items;
  int64_t rank; /* in [0, world_size) */
  int64_t world_size;
  int64_t direct_nbytes; /* pieces of at least so many bytes go alone */
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
  int64_t num_pieces; /* 0 in a message of 0 bytes */
  int64_t nbytes;
  /* The first outgoing message that has the same bytes; itself if none. */
  int64_t same_as;
} fsdp_exchange_message;

typedef struct fsdp_exchange fsdp_exchange;

/* What an item has in bytes, replicas counted once; INT64_MAX stands
 * for more. */
typedef struct fsdp_exchange_size {
  int64_t nbytes;        /* of all that is held */
  int64_t packed_nbytes; /* of that, what goes in pieces of fewer bytes than
                            direct_nbytes, on all ranks together */
} fsdp_exchange_size;

/* All ranks get the same. Cannot fail. */
fsdp_exchange_size fsdp_exchange_item_size(const fsdp_exchange_item *item,
                                           int64_t direct_nbytes);

/*
 * Plans for one rank; `spec` is not referred to afterwards. Time and memory are
 * linear in the pieces of the items, plus the number of ranks.
 *
 * exchange  [out] new reference; release with fsdp_exchange_destroy().
 *
 * FSDP_INVALID_ARGUMENT  no such rank, an itemsize below 1, or a rank that has
 *                        two pieces of an item; the message names item and
 *                        rank.
 * FSDP_OVERFLOW          an item or a message passes INT64_MAX bytes.
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
