/*
 * A merging transport: over a host transport, it makes one call of the small
 * calls between group_begin and group_end.
 *
 * A unit by rows makes a call for each of its parameters. Over shared memory
 * and c10d the cost of a small call is the call, so their data are copied side
 * by side, and apart again in `wait`. Large calls, single ones and calls
 * outside of a group pass through, before the merged one. All ranks merge the
 * same calls, since that depends on sizes, dtypes and order alone.
 */
#ifndef FSDP_TRANSPORTS_MERGING_H
#define FSDP_TRANSPORTS_MERGING_H

#include "port/transport.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Calls with larger pieces pass through. */
enum { FSDP_MERGED_PIECE_NBYTES = 32 << 10 };

/*
 * inner       of a host; borrowed, outlives `transport`, which destroys itself
 *             only.
 * transport   [out] new; release with its `destroy`.
 *
 * FSDP_OUT_OF_MEMORY
 */
FSDP_NODISCARD fsdp_status fsdp_merging_create(fsdp_transport *inner,
                                               int64_t rank, int64_t world_size,
                                               fsdp_transport **transport,
                                               fsdp_error *error);

#ifdef __cplusplus
}
#endif
#endif /* FSDP_TRANSPORTS_MERGING_H */
