/*
 * Execution order: the order in which units ran forward in this and the
 * previous iteration, and the prefetches that follow from it.
 *
 *   pre-forward order   root a b c     (parents before children)
 *   post-forward order  a b c root     (children before parents)
 *
 * Forward prefetch follows the pre-forward order of the previous iteration;
 * backward prefetch walks this iteration's post-forward order backwards.
 * A unit that runs twice is recorded twice. Units are ids 0 .. num_units-1.
 * Nothing is allocated once a record has reached its length.
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

/* Whether this iteration still follows the previous one. */
bool fsdp_order_is_known(const fsdp_order *order);

/*
 * The unit that entered forward `distance` (>= 1) entries after the current one
 * in the previous iteration; -1 if the record ends there. Also -1 once this
 * iteration has left the recorded order: nothing is prefetched for the rest of
 * it, and the next iteration follows the new order.
 */
int64_t fsdp_order_next_forward(const fsdp_order *order, int64_t distance);

/* Starts a backward pass over this iteration's post-forward record. */
void fsdp_order_begin_backward(fsdp_order *order);

/*
 * Records that the backward of `unit` begins: moves the backward cursor to the
 * unit's last entry at or before it. Without such an entry the cursor stays.
 */
void fsdp_order_pre_backward(fsdp_order *order, int64_t unit);

/* The `distance`-th (>= 1) entry before the backward cursor, or -1. */
int64_t fsdp_order_next_backward(const fsdp_order *order, int64_t distance);

/* A fingerprint (FNV-1a) of what a rank did: start with FSDP_ORDER_FINGERPRINT
 * and fold in the name of each step. Ranks have equal fingerprints exactly if
 * they did the same in the same order, collisions aside. */
#define FSDP_ORDER_FINGERPRINT UINT64_C(0xcbf29ce484222325)
uint64_t fsdp_order_fold(uint64_t fingerprint, const char *text);

#ifdef __cplusplus
}
#endif
#endif /* FSDP_ORDER_ORDER_H */
