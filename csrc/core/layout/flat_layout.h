/*
 * Flat layout: where each parameter of a unit lands in the unit's segments,
 * and which part of it each rank holds.
 *
 *   world_size 2, alignment 4 elements, params a[5] b[3] (fp32, trainable)
 *
 *     element  0 1 2 3 4 . . . | 8 9 10 .  .  .  .  .
 *     param    a a a a a       | b b b
 *     rank     0 0 0 0 0 0 0 0 | 1 1 1  1  1  1  1  1
 *
 * A segment holds all parameters of one (dtype, requires_grad), in the order of
 * the table unless blocks are kept whole (see below). Segments are in the order
 * in which they first appear. On request, parameters, shards or both (as above)
 * start at multiples of the alignment. `padding_numel` elements belong to no
 * parameter: gaps between parameters, and the tail. Pure arithmetic, immutable
 * once created.
 *
 * Note [Layout by rows]
 * Each parameter is a segment of its own there, and a shard is a whole number
 * of rows: the elements of one index of the first dimension. So a rank holds
 * what torch.chunk gives it along that dimension, ceil(rows / world_size) rows
 * at most, and trailing ranks hold fewer or none. The whole parameter lies
 * contiguous in the gathered segment, with the padding behind it.
 *
 * Note [Layout of whole blocks]
 * Where parameters have blocks that no two ranks may share, their segment is
 * not in the order of the table, and there are gaps: see layout/blocks.h. What
 * is aligned then, parameters or shards, both are. Other segments are as ever.
 * Blocks of several sizes pad each other. If a segment is padded by more than
 * 1 %, and separate segments are padded less, each size has one of its own.
 */
#ifndef FSDP_LAYOUT_FLAT_LAYOUT_H
#define FSDP_LAYOUT_FLAT_LAYOUT_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "base/types.h"
#include "layout/param_table.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { FSDP_ALIGNMENT_NBYTES = 16 };

typedef struct fsdp_segment {
  fsdp_dtype dtype;
  bool requires_grad;
  int64_t num_params;
  int64_t unsharded_numel; /* elements of real data */
  int64_t padding_numel;   /* padded_numel - unsharded_numel */
  int64_t shard_numel;     /* per rank, padding included */
  int64_t padded_numel;    /* shard_numel * world_size */
} fsdp_segment;

/* Where one parameter lies. */
typedef struct fsdp_param_slot {
  int64_t segment;
  int64_t offset; /* elements from the start of the segment */
  int64_t numel;
} fsdp_param_slot;

/* What starts at a multiple of FSDP_ALIGNMENT_NBYTES. */
typedef struct fsdp_alignment {
  int32_t itemsize; /* bytes of the dtype in which the unit computes, >= 1 (2
                       for bf16 parameters over an fp32 shard); a segment uses
                       the smaller of this and its own itemsize */
  bool params;      /* each parameter within its segment */
  bool shards;      /* each rank's shard */
} fsdp_alignment;

typedef struct fsdp_flat_layout fsdp_flat_layout;

/*
 * world_size  ranks in the sharding group, >= 1.
 * layout      [out] new reference.
 *
 * FSDP_INVALID_ARGUMENT  world_size or alignment.itemsize < 1.
 * FSDP_OVERFLOW          a padded segment does not fit in int64_t bytes.
 * FSDP_OUT_OF_MEMORY
 */
FSDP_NODISCARD fsdp_status fsdp_flat_layout_create(
    const fsdp_param_table *table, int64_t world_size, fsdp_alignment alignment,
    fsdp_flat_layout **layout, fsdp_error *error);

/*
 * The layout by rows, see the note above. row_numels: per parameter of the
 * table, the elements of a row, >= 0; 0 is taken for 1 (an empty parameter, a
 * scalar). Otherwise as fsdp_flat_layout_create; no alignment.
 *
 * FSDP_INVALID_ARGUMENT  also: a row_numel < 0, or one of which the parameter's
 *                        numel is not a multiple.
 */
FSDP_NODISCARD fsdp_status fsdp_flat_layout_create_by_rows(
    const fsdp_param_table *table, const int64_t *row_numels,
    int64_t world_size, fsdp_flat_layout **layout, fsdp_error *error);

/*
 * The layout of whole blocks, see the note above. block_numels: per parameter
 * of the table, the elements of a block, >= 0; 0: it may be cut anywhere; its
 * numel or more: it is whole. Otherwise as fsdp_flat_layout_create.
 *
 * FSDP_INVALID_ARGUMENT  also: a block_numel < 0.
 */
FSDP_NODISCARD fsdp_status fsdp_flat_layout_create_in_blocks(
    const fsdp_param_table *table, const int64_t *block_numels,
    int64_t world_size, fsdp_alignment alignment, fsdp_flat_layout **layout,
    fsdp_error *error);

/*
 * A layout that was made once, by whatever rule: of a checkpoint, or before the
 * parameters got another dtype. segments and offsets: per parameter of the
 * table, where it lies. shard_numels: per segment. Otherwise as
 * fsdp_flat_layout_create; no alignment.
 *
 * FSDP_INVALID_ARGUMENT  also: another number of segments, or parameters that
 *                        overlap or do not lie in the shards.
 */
FSDP_NODISCARD fsdp_status fsdp_flat_layout_create_placed(
    const fsdp_param_table *table, const int64_t *segments,
    const int64_t *offsets, const int64_t *shard_numels, int64_t num_segments,
    int64_t world_size, fsdp_flat_layout **layout, fsdp_error *error);

/* Accepts NULL. Cannot fail. */
void fsdp_flat_layout_destroy(fsdp_flat_layout *layout);

int64_t fsdp_flat_layout_world_size(const fsdp_flat_layout *layout);
int64_t fsdp_flat_layout_num_params(const fsdp_flat_layout *layout);
int64_t fsdp_flat_layout_num_segments(const fsdp_flat_layout *layout);
/* As it was created. */
fsdp_alignment fsdp_flat_layout_alignment(const fsdp_flat_layout *layout);
/* Whether slots do not follow from alignment or rows: in blocks, or placed. */
bool fsdp_flat_layout_is_placed(const fsdp_flat_layout *layout);

/* Borrowed; `segment` is in [0, num_segments). */
const fsdp_segment *fsdp_flat_layout_segment(const fsdp_flat_layout *layout,
                                             int64_t segment);

/* Borrowed; `param` is in [0, num_params). */
const fsdp_param_slot *fsdp_flat_layout_slot(const fsdp_flat_layout *layout,
                                             int64_t param);

/* The params of `segment` in ascending offset: `segment_params[0 ..
 * num_params)`. Borrowed. */
const int64_t *fsdp_flat_layout_segment_params(const fsdp_flat_layout *layout,
                                               int64_t segment);

/*
 * The part of `param` that `rank` holds. Cannot fail for a param and a rank in
 * bounds.
 *
 * in_param  [out] range in the parameter's own elements.
 * in_shard  [out] the same elements, as a range in the rank's shard.
 * Both are {0, 0} when the rank holds none of it.
 */
void fsdp_flat_layout_intersect(const fsdp_flat_layout *layout, int64_t rank,
                                int64_t param, fsdp_range *in_param,
                                fsdp_range *in_shard);

#ifdef __cplusplus
}
#endif
#endif /* FSDP_LAYOUT_FLAT_LAYOUT_H */
