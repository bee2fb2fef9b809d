/*
 * Blocks: first fit, and a search for the size of a shard.
 */
#include "layout/blocks.h"

#include <assert.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/arith.h"
#include "base/types.h"

/* A size is sought up to this part of it. */
enum { PRECISION = 1024 };

/* A parameter in the order of placement. */
typedef struct item {
  int64_t numel;
  int64_t block; /* 1 .. numel; 1: it may be cut anywhere */
  int64_t index; /* in the caller's array */
  int64_t offset;
} item;

/* So many elements are in parameters of blocks of `numel`. */
typedef struct block_size {
  int64_t numel;
  int64_t total;
} block_size;

typedef struct placing {
  int64_t world_size;
  int64_t align;
  int64_t num_items; /* without those that have no elements */
  item *items;
  fsdp_range *gaps; /* what is free, in ascending order; num_items + 1 fit */
  int64_t num_gaps;
  block_size *sizes; /* of blocks that are no whole parameters */
  int64_t num_sizes;
  int64_t smallest; /* numel of an item */
} placing;

static int64_t min_i64(int64_t a, int64_t b) {
  return a < b ? a : b;
}
static int64_t max_i64(int64_t a, int64_t b) {
  return a > b ? a : b;
}

/* Of numbers that are far from INT64_MAX: fsdp_blocks_place() checks it. */
static int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

static int64_t greatest_divisor(int64_t a, int64_t b) {
  while (b != 0) {
    const int64_t rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

static int coarsest_first(const void *a, const void *b) {
  const item *first = a, *second = b;
  if (first->block != second->block) {
    return first->block > second->block ? -1 : 1;
  }
  if (first->numel != second->numel) {
    return first->numel > second->numel ? -1 : 1;
  }
  return first->index < second->index ? -1 : 1; /* qsort is not stable */
}

static int most_common_first(const void *a, const void *b) {
  const block_size *first = a, *second = b;
  if (first->total != second->total) {
    return first->total > second->total ? -1 : 1;
  }
  return first->numel > second->numel ? -1 : 1;
}

/* Placement in shards of one size ------------------------------------------ */

/* The first offset >= `begin` from which blocks end at `boundary`, or -1. */
static int64_t aligned_start(const placing *self, int64_t begin, int64_t block,
                             int64_t boundary) {
  int64_t offset = begin + (boundary - begin) % block;
  for (int64_t i = 0; i < self->align && offset < boundary; i++) {
    if (offset % self->align == 0) return offset;
    offset += block;
  }
  return -1;
}

/* Where `each` fits in [begin, end), of which `begin` lies in the shard that
 * ends at `boundary`; -1: not with its first element in that shard. */
static int64_t find_in_shard(const placing *self, const item *each,
                             int64_t begin, int64_t end, int64_t boundary,
                             int64_t shard_numel) {
  const int64_t stop = min_i64(end, boundary);
  int64_t offset = round_up(begin, self->align);
  if (each->numel <= stop - offset) {
    const bool is_mirrored = boundary / shard_numel % 2 == 0;
    if (!is_mirrored || 2 * each->block <= each->numel) return offset;
    const int64_t last = stop - each->numel;
    return last - last % self->align;
  }
  if (each->block == each->numel || stop == end) return -1;
  offset = aligned_start(self, begin, each->block, boundary);
  if (offset < 0 || each->numel > end - offset) return -1;
  const bool has_next = offset + each->numel > boundary + shard_numel;
  return has_next && shard_numel % each->block != 0 ? -1 : offset;
}

/* Where `each` fits in a gap, or -1. */
static int64_t find_in_gap(const placing *self, const item *each,
                           fsdp_range gap, int64_t shard_numel) {
  if (each->numel > gap.end - gap.begin) return -1;
  const int64_t boundary = round_up(gap.begin + 1, shard_numel);
  const int64_t offset =
      find_in_shard(self, each, gap.begin, gap.end, boundary, shard_numel);
  if (offset >= 0 || boundary >= gap.end) return offset;
  /* What does not fit from a shard's start on fits in no later one. */
  return find_in_shard(self, each, boundary, gap.end, boundary + shard_numel,
                       shard_numel);
}

/* Takes [begin, end) from gap `index`. Pieces in which nothing fits go. */
static void take_from_gap(placing *self, int64_t index, int64_t begin,
                          int64_t end) {
  const fsdp_range gap = self->gaps[index];
  const fsdp_range left[] = {{gap.begin, begin}, {end, gap.end}};
  fsdp_range kept[2];
  int64_t num_kept = 0;
  for (int i = 0; i < 2; i++) {
    if (left[i].end - left[i].begin >= self->smallest) {
      kept[num_kept++] = left[i];
    }
  }
  memmove(self->gaps + index + num_kept, self->gaps + index + 1,
          (size_t)(self->num_gaps - index - 1) * sizeof *self->gaps);
  memcpy(self->gaps + index, kept, (size_t)num_kept * sizeof *kept);
  self->num_gaps += num_kept - 1;
}

/* Whether all items fit in shards of `shard_numel`; then they have offsets. */
static bool place_items(placing *self, int64_t shard_numel) {
  self->gaps[0] = (fsdp_range){0, shard_numel * self->world_size};
  self->num_gaps = 1;
  for (int64_t i = 0; i < self->num_items; i++) {
    item *each = &self->items[i];
    int64_t offset = -1;
    for (int64_t gap = 0; offset < 0 && gap < self->num_gaps; gap++) {
      offset = find_in_gap(self, each, self->gaps[gap], shard_numel);
      if (offset < 0) continue;
      take_from_gap(self, gap, offset, offset + each->numel);
    }
    if (offset < 0) return false;
    each->offset = offset;
  }
  return true;
}

/* The search --------------------------------------------------------------- */

/* The least size that can do. */
static int64_t lower_bound(const placing *self) {
  int64_t total = 0;
  int64_t largest = 0; /* block */
  for (int64_t i = 0; i < self->num_items; i++) {
    total += self->items[i].numel;
    largest = max_i64(largest, self->items[i].block);
  }
  const int64_t share = round_up(total, self->world_size) / self->world_size;
  return max_i64(share, largest);
}

/* The smallest multiple of `unit` that is found to do, or `best`, if none below
 * it does. Sizes that do are not all sizes from some one on: halving finds one
 * of them. */
static int64_t smallest_size(placing *self, int64_t lowest, int64_t unit,
                             int64_t best) {
  int64_t bad = (lowest + unit - 1) / unit;
  if (bad >= (best + unit - 1) / unit) return best;
  if (place_items(self, bad * unit)) return bad * unit;
  const int64_t precision = max_i64(bad / PRECISION, 1);
  const int64_t end = (best - 1) / unit; /* the last one that is of use */
  int64_t good = bad;
  for (int64_t step = precision; good == bad; step *= 2) {
    if (good == end) return best;
    good = step < end - bad ? bad + step : end;
    if (place_items(self, good * unit)) break;
    bad = good;
  }
  while (good - bad > precision) {
    const int64_t middle = bad + (good - bad) / 2;
    if (place_items(self, middle * unit)) {
      good = middle;
    } else {
      bad = middle;
    }
  }
  return good * unit;
}

static int64_t search_size(placing *self, int64_t largest) {
  const int64_t lowest = lower_bound(self);
  int64_t unit = self->align;
  int64_t best = smallest_size(self, lowest, unit, largest);
  for (int64_t i = 0; i < self->num_sizes; i++) {
    const int64_t block = self->sizes[i].numel;
    const int64_t factor = block / greatest_divisor(unit, block);
    if (factor == 1) continue;
    if (factor > best / unit) break; /* each further one is larger still */
    unit *= factor;
    best = smallest_size(self, lowest, unit, best);
  }
  return best;
}

/* A size with which everything fits in the first shard. */
static fsdp_status largest_size(const placing *self, const fsdp_blocks *params,
                                int64_t num_params, int64_t *largest,
                                fsdp_error *error) {
  int64_t end = 0;
  int64_t total;
  bool fits = true;
  for (int64_t i = 0; i < num_params; i++) {
    int64_t numel;
    fits = fits && fsdp_round_up_i64(params[i].numel, self->align, &numel) &&
           fsdp_add_i64(end, numel, &end);
  }
  fits = fits && fsdp_mul_i64(end, self->world_size, &total) &&
         total <= INT64_MAX / 4; /* room for sums of two offsets and a size */
  if (!fits) {
    return FSDP_FAIL(error, FSDP_OVERFLOW,
                     "parameters in whole blocks on %" PRId64
                     " ranks do not fit in int64",
                     self->world_size);
  }
  *largest = end;
  return FSDP_OK;
}

/* Fills `items` and `sizes`. */
static void list_items(placing *self, const fsdp_blocks *params,
                       int64_t num_params) {
  for (int64_t i = 0; i < num_params; i++) {
    const int64_t numel = params[i].numel;
    if (numel == 0) continue;
    const int64_t block = min_i64(max_i64(params[i].block_numel, 1), numel);
    self->items[self->num_items++] = (item){numel, block, i, 0};
    self->smallest =
        self->num_items == 1 ? numel : min_i64(self->smallest, numel);
  }
  if (self->num_items == 0) return;
  qsort(self->items, (size_t)self->num_items, sizeof *self->items,
        coarsest_first);
  for (int64_t i = 0; i < self->num_items; i++) {
    const item each = self->items[i];
    if (each.block == 1 || each.block == each.numel) continue;
    const bool is_known = self->num_sizes > 0 &&
                          self->sizes[self->num_sizes - 1].numel == each.block;
    if (!is_known) self->sizes[self->num_sizes++] = (block_size){each.block, 0};
    self->sizes[self->num_sizes - 1].total += each.numel;
  }
  if (self->num_sizes == 0) return;
  qsort(self->sizes, (size_t)self->num_sizes, sizeof *self->sizes,
        most_common_first);
}

fsdp_status fsdp_blocks_place(fsdp_blocks *params, int64_t num_params,
                              int64_t world_size, int64_t align,
                              int64_t *shard_numel, fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  int64_t largest;
  placing self = {.world_size = world_size, .align = align};

  self.items = fsdp_calloc((size_t)num_params, sizeof *self.items);
  self.gaps = fsdp_calloc((size_t)num_params + 1, sizeof *self.gaps);
  self.sizes = fsdp_calloc((size_t)num_params, sizeof *self.sizes);
  if (self.items == NULL || self.gaps == NULL || self.sizes == NULL) {
    status =
        FSDP_FAIL(error, FSDP_OUT_OF_MEMORY,
                  "out of host memory for the blocks of %" PRId64 " parameters",
                  num_params);
    goto done;
  }
  FSDP_TRY(largest_size(&self, params, num_params, &largest, error));
  list_items(&self, params, num_params);
  if (self.num_items > 0) {
    const int64_t best = search_size(&self, largest);
    const bool fits = place_items(&self, best);
    assert(fits);
    (void)fits;
    largest = best;
  }
  for (int64_t i = 0; i < num_params; i++) params[i].offset = 0;
  for (int64_t i = 0; i < self.num_items; i++) {
    params[self.items[i].index].offset = self.items[i].offset;
  }
  *shard_numel = largest;
done:
  fsdp_free(self.sizes);
  fsdp_free(self.gaps);
  fsdp_free(self.items);
  return status;
}
