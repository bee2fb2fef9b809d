/*
 * Execution order: the order in which units ran forward in this iteration and
 * in the one before, and what to prefetch from it.
 *
 *   pre-forward order   root a b c     (parents before children)
 *   post-forward order  a b c root     (children before parents)
 *
 * Forward prefetch follows the pre-forward order of the previous iteration;
 * backward prefetch walks this iteration's post-forward order backwards.
 * A unit that runs twice stands in the record twice. Units are small dense
 * ids, 0 .. num_units-1. No allocation once a record has reached its length.
 */
#ifndef FSDP_ORDER_ORDER_H
#define FSDP_ORDER_ORDER_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fsdp_order fsdp_order;

/* order [out] new reference. FSDP_OUT_OF_MEMORY. */
FSDP_NODISCARD fsdp_status fsdp_order_create(fsdp_order **order,
                                             fsdp_error *error);

/* Accepts NULL. Cannot fail. */
void fsdp_order_destroy(fsdp_order *order);

/* Starts a new iteration: this iteration's pre-forward record becomes the
 * previous one, both current records become empty. Cannot fail. */
void fsdp_order_begin(fsdp_order *order);

/* Records that `unit` enters / leaves forward. FSDP_OUT_OF_MEMORY. */
FSDP_NODISCARD fsdp_status fsdp_order_pre_forward(fsdp_order *order,
                                                  int64_t unit,
                                                  fsdp_error *error);
FSDP_NODISCARD fsdp_status fsdp_order_post_forward(fsdp_order *order,
                                                   int64_t unit,
                                                   fsdp_error *error);

/*
 * The unit expected to enter forward `distance` (>= 1) entries after the one
 * recorded last, by the previous iteration's record; -1 when the record ends
 * there, or when this iteration has left the recorded order: then nothing is
 * prefetched for the rest of the iteration, and the next one re-learns.
 */
int64_t fsdp_order_next_forward(const fsdp_order *order, int64_t distance);

/* Starts a backward pass over this iteration's post-forward record. */
void fsdp_order_begin_backward(fsdp_order *order);

/*
 * Says that the backward of `unit` begins. Moves the backward cursor to its
 * last entry at or before the cursor; a unit without such an entry leaves the
 * cursor alone.
 */
void fsdp_order_pre_backward(fsdp_order *order, int64_t unit);

/* The `distance`-th (>= 1) entry before the backward cursor, or -1. */
int64_t fsdp_order_next_backward(const fsdp_order *order, int64_t distance);

/* Fingerprints (FNV-1a) of what a rank did: start with FSDP_ORDER_FINGERPRINT
 * and fold the name of each step into it. Equal on all ranks exactly when (but
 * for collisions) they did the same in the same order. */
#define FSDP_ORDER_FINGERPRINT UINT64_C(0xcbf29ce484222325)
uint64_t fsdp_order_fold(uint64_t fingerprint, const char *text);

#ifdef __cplusplus
}
#endif
#endif /* FSDP_ORDER_ORDER_H */
