/*
 * Placement: checks and sorts pieces, and writes down those of flat shards,
 * whole parameters and rows.
 */
#include "state/placement.h"

#include <inttypes.h>
#include <stdlib.h>

#include "base/alloc.h"
#include "base/arith.h"

struct fsdp_placement {
  int64_t num_pieces;
  size_t capacity;
  fsdp_piece *pieces;
};

static int64_t min_i64(int64_t a, int64_t b) {
  return a < b ? a : b;
}
static int64_t max_i64(int64_t a, int64_t b) {
  return a > b ? a : b;
}

/* Building ----------------------------------------------------------------- */

static fsdp_status begin_placement(fsdp_placement **self, fsdp_error *error) {
  *self = fsdp_calloc(1, sizeof **self);
  if (*self != NULL) return FSDP_OK;
  return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY, "placement");
}

/* Appends a piece that is right, unless it is empty. */
static fsdp_status add_piece(fsdp_placement *self, fsdp_piece piece,
                             fsdp_error *error) {
  if (piece.in_param.begin == piece.in_param.end) return FSDP_OK;
  void *pieces = self->pieces;
  if (!fsdp_grow(&pieces, &self->capacity, (size_t)self->num_pieces + 1,
                 sizeof *self->pieces)) {
    return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY,
                     "placement of more than %" PRId64 " pieces",
                     self->num_pieces);
  }
  self->pieces = pieces;
  self->pieces[self->num_pieces++] = piece;
  return FSDP_OK;
}

static int compare_pieces(const fsdp_piece *a, const fsdp_piece *b) {
  if (a->param != b->param) return a->param < b->param ? -1 : 1;
  if (a->in_param.begin == b->in_param.begin) return 0;
  return a->in_param.begin < b->in_param.begin ? -1 : 1;
}

/* qsort is not stable: equal pieces keep their order by their number. */
typedef struct numbered_piece {
  fsdp_piece piece;
  int64_t number;
} numbered_piece;

static int compare_numbered(const void *left, const void *right) {
  const numbered_piece *a = left;
  const numbered_piece *b = right;
  const int order = compare_pieces(&a->piece, &b->piece);
  if (order != 0) return order;
  return a->number < b->number ? -1 : 1;
}

/* Brings the pieces into order; most placements are made in it. */
static fsdp_status sort_pieces(fsdp_placement *self, fsdp_error *error) {
  int64_t num_sorted = 1;
  while (num_sorted < self->num_pieces &&
         compare_pieces(&self->pieces[num_sorted - 1],
                        &self->pieces[num_sorted]) <= 0) {
    num_sorted++;
  }
  if (num_sorted >= self->num_pieces) return FSDP_OK;

  numbered_piece *items = fsdp_calloc((size_t)self->num_pieces, sizeof *items);
  if (items == NULL) {
    return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY, "sorting %" PRId64 " pieces",
                     self->num_pieces);
  }
  for (int64_t i = 0; i < self->num_pieces; i++) {
    items[i] = (numbered_piece){self->pieces[i], i};
  }
  qsort(items, (size_t)self->num_pieces, sizeof *items, compare_numbered);
  for (int64_t i = 0; i < self->num_pieces; i++) {
    self->pieces[i] = items[i].piece;
  }
  fsdp_free(items);
  return FSDP_OK;
}

static fsdp_status check_piece(const fsdp_piece *piece, int64_t index,
                               fsdp_error *error) {
  const int64_t begin = piece->in_param.begin;
  const int64_t end = piece->in_param.end;
  int64_t end_in_buffer;
  if (piece->param < 0 || piece->buffer < 0 || piece->offset < 0) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "piece %" PRId64 " has param %" PRId64 ", buffer %" PRId64
                     " and offset %" PRId64 ", need >= 0",
                     index, piece->param, piece->buffer, piece->offset);
  }
  if (begin < 0 || end < begin) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "piece %" PRId64 " holds elements [%" PRId64 ", %" PRId64
                     "), need 0 <= begin <= end",
                     index, begin, end);
  }
  if (!fsdp_add_i64(piece->offset, end - begin, &end_in_buffer)) {
    return FSDP_FAIL(error, FSDP_OVERFLOW,
                     "piece %" PRId64 " of %" PRId64
                     " elements from offset %" PRId64 " does not fit in int64",
                     index, end - begin, piece->offset);
  }
  return FSDP_OK;
}

fsdp_status fsdp_placement_create(const fsdp_piece *pieces, int64_t num_pieces,
                                  fsdp_placement **placement,
                                  fsdp_error *error) {
  fsdp_placement *self = NULL;
  fsdp_status status = FSDP_OK;

  FSDP_TRY(begin_placement(&self, error));
  for (int64_t i = 0; i < num_pieces; i++) {
    FSDP_TRY(check_piece(&pieces[i], i, error));
    FSDP_TRY(add_piece(self, pieces[i], error));
  }
  FSDP_TRY(sort_pieces(self, error));

  *placement = self;
  self = NULL;
done:
  fsdp_placement_destroy(self);
  return status;
}

void fsdp_placement_destroy(fsdp_placement *placement) {
  if (placement == NULL) return;
  fsdp_free(placement->pieces);
  fsdp_free(placement);
}

int64_t fsdp_placement_num_pieces(const fsdp_placement *placement) {
  return placement->num_pieces;
}

const fsdp_piece *fsdp_placement_pieces(const fsdp_placement *placement) {
  return placement->pieces;
}

/* The first piece of `param`, or of one behind it. */
static int64_t find_piece(const fsdp_placement *self, int64_t param) {
  int64_t begin = 0;
  int64_t end = self->num_pieces;
  while (begin < end) {
    const int64_t middle = begin + (end - begin) / 2;
    if (self->pieces[middle].param < param) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return begin;
}

const fsdp_piece *fsdp_placement_pieces_of(const fsdp_placement *placement,
                                           int64_t param, int64_t *num_pieces) {
  const int64_t begin = find_piece(placement, param);
  int64_t end = begin;
  while (end < placement->num_pieces && placement->pieces[end].param == param) {
    end++;
  }
  *num_pieces = end - begin;
  return end == begin ? NULL : placement->pieces + begin;
}

/* Shards of a layout ------------------------------------------------------- */

static fsdp_status check_segment(const fsdp_flat_layout *layout,
                                 int64_t segment, fsdp_error *error) {
  const int64_t num_segments = fsdp_flat_layout_num_segments(layout);
  if (segment >= 0 && segment < num_segments) return FSDP_OK;
  return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                   "segment is %" PRId64 ", the layout has %" PRId64, segment,
                   num_segments);
}

static fsdp_status check_ranks(fsdp_range ranks, int64_t num_ranks,
                               fsdp_error *error) {
  if (ranks.begin >= 0 && ranks.begin <= ranks.end && ranks.end <= num_ranks) {
    return FSDP_OK;
  }
  return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                   "ranks [%" PRId64 ", %" PRId64
                   ") must be within [0, %" PRId64 ")",
                   ranks.begin, ranks.end, num_ranks);
}

/* Elements `range` of the segment that lie in `param`: one piece per shard.
 * Nothing can overflow: the padded segment fits. */
static fsdp_status add_shards(fsdp_placement *self,
                              const fsdp_flat_layout *layout, int64_t param,
                              fsdp_range range, fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  const fsdp_param_slot *slot = fsdp_flat_layout_slot(layout, param);
  const int64_t shard_numel =
      fsdp_flat_layout_segment(layout, slot->segment)->shard_numel;
  int64_t begin = max_i64(range.begin, slot->offset);
  const int64_t end = min_i64(range.end, slot->offset + slot->numel);
  while (begin < end) {
    const int64_t rank = begin / shard_numel;
    const int64_t shard_begin = rank * shard_numel;
    const int64_t stop = min_i64(end, shard_begin + shard_numel);
    const fsdp_piece piece = {
        .param = param,
        .in_param = {begin - slot->offset, stop - slot->offset},
        .buffer = rank,
        .offset = begin - shard_begin,
    };
    FSDP_TRY(add_piece(self, piece, error));
    begin = stop;
  }
done:
  return status;
}

/* The first of the segment's `num_params` params that ends behind `offset`. */
static int64_t find_param(const fsdp_flat_layout *layout, const int64_t *params,
                          int64_t num_params, int64_t offset) {
  int64_t begin = 0;
  int64_t end = num_params;
  while (begin < end) {
    const int64_t middle = begin + (end - begin) / 2;
    const fsdp_param_slot *slot = fsdp_flat_layout_slot(layout, params[middle]);
    if (slot->offset + slot->numel > offset) {
      end = middle;
    } else {
      begin = middle + 1;
    }
  }
  return begin;
}

fsdp_status fsdp_placement_create_flat(const fsdp_flat_layout *layout,
                                       int64_t segment, fsdp_range ranks,
                                       fsdp_placement **placement,
                                       fsdp_error *error) {
  fsdp_placement *self = NULL;
  fsdp_status status = FSDP_OK;

  FSDP_TRY(check_segment(layout, segment, error));
  FSDP_TRY(check_ranks(ranks, fsdp_flat_layout_world_size(layout), error));
  FSDP_TRY(begin_placement(&self, error));
  const fsdp_segment *info = fsdp_flat_layout_segment(layout, segment);
  const int64_t *params = fsdp_flat_layout_segment_params(layout, segment);
  const fsdp_range range = {ranks.begin * info->shard_numel,
                            ranks.end * info->shard_numel};
  for (int64_t i = find_param(layout, params, info->num_params, range.begin);
       i < info->num_params &&
       fsdp_flat_layout_slot(layout, params[i])->offset < range.end;
       i++) {
    FSDP_TRY(add_shards(self, layout, params[i], range, error));
  }
  FSDP_TRY(sort_pieces(self, error));

  *placement = self;
  self = NULL;
done:
  fsdp_placement_destroy(self);
  return status;
}

/* The slot of the range's param, if the range lies in that param and the param
 * in `segment`. */
static fsdp_status check_range(const fsdp_flat_layout *layout, int64_t segment,
                               const fsdp_param_range *range,
                               const fsdp_param_slot **slot,
                               fsdp_error *error) {
  const int64_t num_params = fsdp_flat_layout_num_params(layout);
  if (range->param < 0 || range->param >= num_params) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "param is %" PRId64 ", the layout has %" PRId64,
                     range->param, num_params);
  }
  *slot = fsdp_flat_layout_slot(layout, range->param);
  if ((*slot)->segment != segment) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "parameter %" PRId64 " is in segment %" PRId64
                     ", not in %" PRId64,
                     range->param, (*slot)->segment, segment);
  }
  if (range->in_param.begin < 0 ||
      range->in_param.end < range->in_param.begin ||
      range->in_param.end > (*slot)->numel) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "elements [%" PRId64 ", %" PRId64
                     ") are not in parameter %" PRId64 " of %" PRId64
                     " elements",
                     range->in_param.begin, range->in_param.end, range->param,
                     (*slot)->numel);
  }
  return FSDP_OK;
}

fsdp_status fsdp_placement_create_flat_range(const fsdp_flat_layout *layout,
                                             int64_t segment,
                                             const fsdp_param_range *ranges,
                                             int64_t num_ranges,
                                             fsdp_placement **placement,
                                             fsdp_error *error) {
  fsdp_placement *self = NULL;
  fsdp_status status = FSDP_OK;

  FSDP_TRY(check_segment(layout, segment, error));
  FSDP_TRY(begin_placement(&self, error));
  for (int64_t i = 0; i < num_ranges; i++) {
    const fsdp_param_slot *slot = NULL;
    FSDP_TRY(check_range(layout, segment, &ranges[i], &slot, error));
    const fsdp_range range = {slot->offset + ranges[i].in_param.begin,
                              slot->offset + ranges[i].in_param.end};
    FSDP_TRY(add_shards(self, layout, ranges[i].param, range, error));
  }
  FSDP_TRY(sort_pieces(self, error));

  *placement = self;
  self = NULL;
done:
  fsdp_placement_destroy(self);
  return status;
}

/* Tensors ------------------------------------------------------------------ */

static fsdp_status check_numel(int64_t numel, int64_t param,
                               fsdp_error *error) {
  if (numel >= 0) return FSDP_OK;
  return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                   "parameter %" PRId64 " has numel %" PRId64 ", need >= 0",
                   param, numel);
}

fsdp_status fsdp_placement_create_on_ranks(const int64_t *numels,
                                           int64_t num_params, fsdp_range ranks,
                                           fsdp_placement **placement,
                                           fsdp_error *error) {
  fsdp_placement *self = NULL;
  fsdp_status status = FSDP_OK;

  FSDP_TRY(check_ranks(ranks, INT64_MAX, error));
  FSDP_TRY(begin_placement(&self, error));
  for (int64_t i = 0; i < num_params; i++) {
    FSDP_TRY(check_numel(numels[i], i, error));
    for (int64_t rank = ranks.begin; rank < ranks.end; rank++) {
      const fsdp_piece piece = {
          .param = i, .in_param = {0, numels[i]}, .buffer = rank};
      FSDP_TRY(add_piece(self, piece, error));
    }
  }

  *placement = self;
  self = NULL;
done:
  fsdp_placement_destroy(self);
  return status;
}

/* Adds the rows of `param` on each rank of `ranks`. `ends`: per rank of them,
 * the elements in its buffer so far. */
static fsdp_status add_rows(fsdp_placement *self, const fsdp_param_rows *rows,
                            int64_t param, int64_t num_ranks, fsdp_range ranks,
                            int64_t *ends, fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  int64_t numel;
  if (rows->num_rows < 0 || rows->row_numel < 0) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "parameter %" PRId64 " has %" PRId64 " rows of %" PRId64
                     " elements, need >= 0",
                     param, rows->num_rows, rows->row_numel);
  }
  if (!fsdp_mul_i64(rows->num_rows, rows->row_numel, &numel)) {
    return FSDP_FAIL(error, FSDP_OVERFLOW,
                     "parameter %" PRId64 " of %" PRId64 " rows of %" PRId64
                     " elements does not fit in int64",
                     param, rows->num_rows, rows->row_numel);
  }
  if (numel == 0) return FSDP_OK;
  const int64_t per_rank =
      rows->num_rows / num_ranks + (rows->num_rows % num_ranks != 0);
  const int64_t last_rank = (rows->num_rows - 1) / per_rank;
  for (int64_t rank = ranks.begin; rank < ranks.end && rank <= last_rank;
       rank++) {
    /* Nothing below can overflow: num_rows * row_numel did not. */
    const int64_t begin = rank * per_rank;
    const int64_t num_rows = min_i64(per_rank, rows->num_rows - begin);
    int64_t *end = &ends[rank - ranks.begin];
    const fsdp_piece piece = {
        .param = param,
        .in_param = {begin * rows->row_numel,
                     (begin + num_rows) * rows->row_numel},
        .buffer = rank,
        .offset = *end,
    };
    if (!fsdp_add_i64(*end, num_rows * rows->row_numel, end)) {
      return FSDP_FAIL(error, FSDP_OVERFLOW,
                       "rows up to parameter %" PRId64 " on rank %" PRId64
                       " do not fit in int64",
                       param, rank);
    }
    FSDP_TRY(add_piece(self, piece, error));
  }
done:
  return status;
}

fsdp_status fsdp_placement_create_rows(const fsdp_param_rows *params,
                                       int64_t num_params, int64_t num_ranks,
                                       fsdp_range ranks,
                                       fsdp_placement **placement,
                                       fsdp_error *error) {
  fsdp_placement *self = NULL;
  int64_t *ends = NULL;
  fsdp_status status = FSDP_OK;

  if (num_ranks < 1) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "num_ranks is %" PRId64 ", need >= 1", num_ranks);
  }
  FSDP_TRY(check_ranks(ranks, num_ranks, error));
  FSDP_TRY(begin_placement(&self, error));
  ends = fsdp_calloc((size_t)(ranks.end - ranks.begin), sizeof *ends);
  if (ends == NULL) {
    status = FSDP_FAIL(error, FSDP_OUT_OF_MEMORY, "rows on %" PRId64 " ranks",
                       ranks.end - ranks.begin);
    goto done;
  }
  for (int64_t i = 0; i < num_params; i++) {
    FSDP_TRY(add_rows(self, &params[i], i, num_ranks, ranks, ends, error));
  }

  *placement = self;
  self = NULL;
done:
  fsdp_free(ends);
  fsdp_placement_destroy(self);
  return status;
}
