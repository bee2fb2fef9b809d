/*
 * Owners: deals whole parameters out to ranks, for optimizers that need whole
 * ones.
 *
 *   2 owners, rounds of 10 bytes
 *   parameter   0   1   2   3   4
 *   cost        4   9   5   4   4
 *   nbytes      4   9   5   4   4
 *   owner       1   0   1   0   1     13 bytes each
 *   round       0   0   0   0   0     owner 1: 5, 4 and, from byte 9 on, 4
 *
 * The costliest first, each to the owner that then has the smallest share of
 * all work or, where that is larger, of all bytes. An owner steps its
 * parameters in this order, in *rounds*: a round ends with the parameter that
 * brings it to `round_nbytes`. As all owners have about the same work at each
 * place of the order, they come to a round's end at about the same time.
 *
 * A parameter that is whole in a shard has its owner there, or in a replica of
 * the shard: owners are `num_shards` to a replica, one replica after the other.
 * These are dealt out before the others. Without replicas they go nowhere, and
 * need no room in a round.
 *
 * Depends on its arguments only: all ranks that pass the same get the same.
 */
#ifndef FSDP_LAYOUT_OWNERS_H
#define FSDP_LAYOUT_OWNERS_H

#include <stdint.h>

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fsdp_owned_param {
  int64_t cost;   /* of its step, in any unit; >= 0 */
  int64_t nbytes; /* of the whole; >= 0 */
} fsdp_owned_param;

/* Where an owner can be: see above. */
typedef struct fsdp_owners {
  int64_t num_owners;    /* >= 1 */
  int64_t num_shards;    /* >= 1, a divisor of num_owners */
  const int64_t *shards; /* per parameter: the shard that has the whole, or -1;
                            NULL: none has */
} fsdp_owners;

typedef struct fsdp_deal {
  int64_t owner; /* in [0, num_owners) */
  int64_t round; /* in [0, number of rounds) */
} fsdp_deal;

/*
 * params        `num_params` of them.
 * round_nbytes  >= 1.
 * deals         [out] one for each parameter, in their order.
 *
 * FSDP_INVALID_ARGUMENT  A value is out of its range, or a sum of them is.
 * FSDP_OUT_OF_MEMORY
 */
FSDP_NODISCARD fsdp_status fsdp_deal_out(const fsdp_owned_param *params,
                                         int64_t num_params, fsdp_owners owners,
                                         int64_t round_nbytes, fsdp_deal *deals,
                                         fsdp_error *error);

#ifdef __cplusplus
}
#endif
#endif /* FSDP_LAYOUT_OWNERS_H */
