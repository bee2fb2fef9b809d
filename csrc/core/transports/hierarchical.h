/*
 * A hierarchical transport: the collectives of a group on several hosts, made
 * of two transports. `local` connects the ranks of one host, `peers` the ranks
 * with the same place in each host. So every byte comes to a host once, and all
 * ranks of a host take part in the exchange with the others, each over
 * connections of its own.
 *
 *            host 0                   host 1
 *   local    rank 0 - rank 1          rank 2 - rank 3
 *   peers    rank 0 - rank 2,  rank 1 - rank 3
 *
 *   all_gather      each rank's shard goes to its peers; then the ranks of a
 *                   host gather what came from each host
 *   reduce_scatter  each host sums what it has for each host; then peers sum
 *                   what their hosts have for them
 *   all_reduce      the ranks of a host reduce_scatter; peers sum their parts;
 *                   the ranks of a host all_gather. Small ones: summed in each
 *                   host, then over the peers
 *   broadcast       from the root to its peers, then in each host
 *
 * Sums are made as `local` makes them in a host, and then as `peers` does
 * between hosts.
 *
 * Note [Order of the levels]
 * Each transport below needs its calls in the same order on all of its ranks,
 * but ranks may wait for the calls of the two channels at different moments.
 * Hence a gather goes to its peers when it starts, so that the network works
 * while the rank computes, and a reduction when it ends, each over peers of
 * their own; `local` is used only when a call ends; and `wait` ends all calls
 * that were started before, on both channels, in that order. Ranks start the
 * calls of both channels in one order, as c10d demands too, and so from one
 * thread at a time. A rank that has
 * started a call must come to `wait` before it waits for the others by other
 * means.
 */
#ifndef FSDP_TRANSPORTS_HIERARCHICAL_H
#define FSDP_TRANSPORTS_HIERARCHICAL_H

#include "port/transport.h"
#include "transports/host_layout.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Name of the transport. */
#define FSDP_HIERARCHICAL_NAME "hierarchical"

/* all_reduces of up to this many bytes are summed in two steps, not three. */
enum { FSDP_HIERARCHICAL_SMALL_NBYTES = 4096 };

/* All are of a host, borrowed, and outlive the transport. */
typedef struct fsdp_hierarchical_parts {
  fsdp_transport *local;                    /* of layout.num_local ranks */
  fsdp_transport *peers[FSDP_NUM_CHANNELS]; /* of layout.num_hosts ranks: one
                                               for gathers, one for sums */
} fsdp_hierarchical_parts;

/*
 * transport   [out] new; release with its `destroy`. Its reductions need
 *             scratch memory.
 *
 * FSDP_INVALID_ARGUMENT  fewer than 2 hosts or ranks of a host, or a rank that
 *                        is not among them
 * FSDP_OUT_OF_MEMORY
 */
FSDP_NODISCARD fsdp_status fsdp_hierarchical_create(
    const fsdp_hierarchical_parts *parts, fsdp_host_layout layout, int64_t rank,
    fsdp_transport **transport, fsdp_error *error);

#ifdef __cplusplus
}
#endif
#endif /* FSDP_TRANSPORTS_HIERARCHICAL_H */
