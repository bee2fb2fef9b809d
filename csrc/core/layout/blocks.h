/*
 * Blocks: places parameters in equal shards so that no shard's boundary lies
 * within a block of theirs.
 *
 *   2 shards, a[6] whole, b[4] in blocks of 2, c[2] cut anywhere
 *
 *     element  0 1 2 3 4 5 | 6 7 8 9 10 11
 *     param    a a a a a a | b b b b c  c
 *
 * A parameter stays contiguous; blocks count from its first element, and its
 * last one may be short. The coarsest blocks come first, then the largest
 * parameters, each to the first place where it fits: so what may be cut
 * anywhere fills the gaps. Of few blocks, they lie at the end of every other
 * shard, so that two gaps make one. The smallest shard is sought in which all
 * of this succeeds: of any size, and of multiples of the most common blocks.
 * (Where blocks go on over two boundaries, a shard is a multiple of them.)
 *
 * Depends on its arguments only: all ranks that pass the same get the same.
 */
#ifndef FSDP_LAYOUT_BLOCKS_H
#define FSDP_LAYOUT_BLOCKS_H

#include <stdint.h>

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fsdp_blocks {
  int64_t numel;       /* of the parameter, >= 0 */
  int64_t block_numel; /* >= 0; 0: it may be cut anywhere; numel or more: it is
                          whole */
  int64_t offset;      /* [out] elements from the start of the first shard */
} fsdp_blocks;

/*
 * params       `num_params` >= 0 of them.
 * world_size   shards, >= 1.
 * align        elements, >= 1: parameters and shards start at multiples.
 * shard_numel  [out]
 *
 * FSDP_OVERFLOW  the shards together do not fit in int64_t elements.
 * FSDP_OUT_OF_MEMORY
 */
FSDP_NODISCARD fsdp_status fsdp_blocks_place(fsdp_blocks *params,
                                             int64_t num_params,
                                             int64_t world_size, int64_t align,
                                             int64_t *shard_numel,
                                             fsdp_error *error);

#ifdef __cplusplus
}
#endif
#endif /* FSDP_LAYOUT_BLOCKS_H */
