/*
 * Placement: where the elements of parameters lie, as pieces of numbered
 * buffers.
 *
 *   flat shards of a[5] b[3] on 2 ranks     the same, whole on rank 0
 *
 *     param  in_param  buffer  offset         param  in_param  buffer  offset
 *     a      [0, 4)    rank 0  0              a      [0, 5)    rank 0  0
 *     a      [4, 5)    rank 1  0              b      [0, 3)    rank 0  0
 *     b      [0, 3)    rank 1  1
 *
 * The caller decides what a buffer is: a rank, or a part of a file. An exchange
 * (exchange.h) leads from one placement over ranks to another. All counts are
 * elements. Immutable once created, needs no lock.
 */
#ifndef FSDP_STATE_PLACEMENT_H
#define FSDP_STATE_PLACEMENT_H

#include <stdint.h>

#include "base/status.h"
#include "base/types.h"
#include "layout/flat_layout.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Elements `in_param` of `param` lie in `buffer`, from element `offset` on. */
typedef struct fsdp_piece {
  int64_t param;       /* >= 0 */
  fsdp_range in_param; /* of the flattened parameter */
  int64_t buffer;      /* >= 0 */
  int64_t offset;      /* >= 0 */
} fsdp_piece;

/* Elements `in_param` of `param`. */
typedef struct fsdp_param_range {
  int64_t param;
  fsdp_range in_param;
} fsdp_param_range;

/* A parameter as rows: dimension 0, and the elements behind one index of it.
 * A scalar is one row of one element. */
typedef struct fsdp_param_rows {
  int64_t num_rows;
  int64_t row_numel;
} fsdp_param_rows;

typedef struct fsdp_placement fsdp_placement;

/*
 * From pieces in any order. Copied; empty pieces are left out. Several pieces
 * may hold one element (replicas).
 *
 * placement  [out] new reference; release with fsdp_placement_destroy().
 *
 * FSDP_INVALID_ARGUMENT  a negative number, or a range that ends before it
 *                        begins; the message names the piece by index.
 * FSDP_OVERFLOW          a piece ends past INT64_MAX in its buffer.
 * FSDP_OUT_OF_MEMORY
 */
FSDP_NODISCARD fsdp_status fsdp_placement_create(const fsdp_piece *pieces,
                                                 int64_t num_pieces,
                                                 fsdp_placement **placement,
                                                 fsdp_error *error);

/*
 * The shards of `segment` on the ranks in `ranks`: buffer = rank, offset = in
 * that rank's shard, param = as the layout counts, over all segments. Time and
 * memory are linear in the result, plus the logarithm of the parameters.
 *
 * FSDP_INVALID_ARGUMENT  no such segment, or ranks outside [0, world_size).
 * FSDP_OUT_OF_MEMORY
 */
FSDP_NODISCARD fsdp_status fsdp_placement_create_flat(
    const fsdp_flat_layout *layout, int64_t segment, fsdp_range ranks,
    fsdp_placement **placement, fsdp_error *error);

/*
 * Of the shards of `segment`, only what holds the given ranges, cut to them.
 * Time and memory are linear in `num_ranges` and the result (times the
 * logarithm, to sort): neither ranks nor parameters beside them matter.
 *
 * FSDP_INVALID_ARGUMENT  no such segment, a parameter that is not in it, or a
 *                        range outside the parameter.
 * FSDP_OUT_OF_MEMORY
 */
FSDP_NODISCARD fsdp_status fsdp_placement_create_flat_range(
    const fsdp_flat_layout *layout, int64_t segment,
    const fsdp_param_range *ranges, int64_t num_ranges,
    fsdp_placement **placement, fsdp_error *error);

/*
 * Whole parameters on each of `ranks`: buffer = rank, offset = 0. A numel of 0
 * leaves the parameter out.
 *
 * FSDP_INVALID_ARGUMENT  a negative numel or rank.
 * FSDP_OUT_OF_MEMORY
 */
FSDP_NODISCARD fsdp_status fsdp_placement_create_on_ranks(
    const int64_t *numels, int64_t num_params, fsdp_range ranks,
    fsdp_placement **placement, fsdp_error *error);

/*
 * Every parameter cut along dimension 0 as torch.chunk(num_ranks) cuts it, for
 * the ranks in `ranks`: buffer = rank; in a rank's buffer its parts lie one
 * behind the other, in the order of the parameters. A rank that torch.chunk
 * gives nothing has no piece. A scalar goes to rank 0.
 *
 * FSDP_INVALID_ARGUMENT  a negative number, num_ranks < 1, or ranks outside
 *                        [0, num_ranks).
 * FSDP_OVERFLOW          a parameter or a rank's buffer passes INT64_MAX.
 * FSDP_OUT_OF_MEMORY
 */
FSDP_NODISCARD fsdp_status fsdp_placement_create_rows(
    const fsdp_param_rows *params, int64_t num_params, int64_t num_ranks,
    fsdp_range ranks, fsdp_placement **placement, fsdp_error *error);

/* Accepts NULL. Cannot fail. */
void fsdp_placement_destroy(fsdp_placement *placement);

int64_t fsdp_placement_num_pieces(const fsdp_placement *placement);

/* num_pieces pieces, none empty, by (param, begin) and then as given.
 * Borrowed. */
const fsdp_piece *fsdp_placement_pieces(const fsdp_placement *placement);

/* Those of one param: num_pieces, which may be 0. Takes logarithmic time.
 * Borrowed. */
const fsdp_piece *fsdp_placement_pieces_of(const fsdp_placement *placement,
                                           int64_t param, int64_t *num_pieces);

#ifdef __cplusplus
}
#endif
#endif /* FSDP_STATE_PLACEMENT_H */
