/*
 * Flat layout: sorts a unit's parameters into segments, places them one after
 * the other and cuts each segment into equal shards.
 */
#include "layout/flat_layout.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>

#include "base/alloc.h"
#include "base/arith.h"
#include "layout/blocks.h"

/* Padding of more than one element in so many is worth further segments. */
enum { MUCH_PADDING = 100 };

/* How a layout is made; all NULL: one parameter after the other. */
typedef struct layout_rule {
  const int64_t *row_numels;   /* per param: by rows */
  const int64_t *block_numels; /* per param: in whole blocks */
  bool is_apart;               /* blocks of each size in their own segment */
  const int64_t *segments;     /* per param: placed already */
  const int64_t *offsets;      /* likewise */
  const int64_t *shard_numels; /* likewise, per segment */
  int64_t num_segments;        /* of them */
} layout_rule;

typedef struct placed_segment {
  fsdp_segment info;
  int64_t param_align;  /* elements: a parameter starts at a multiple */
  int64_t shard_align;  /* elements: a shard starts at a multiple */
  int64_t kind;         /* what else its parameters have in common */
  int64_t end;          /* elements placed so far, gaps included */
  int64_t params_begin; /* into segment_params */
} placed_segment;

struct fsdp_flat_layout {
  int64_t world_size;
  fsdp_alignment alignment;
  bool is_placed;
  int64_t num_params;
  int64_t num_segments;
  size_t segments_capacity;
  placed_segment *segments;
  fsdp_param_slot *slots;  /* per param */
  int64_t *segment_params; /* all params, grouped by segment */
};

static int64_t min_i64(int64_t a, int64_t b) {
  return a < b ? a : b;
}
static int64_t max_i64(int64_t a, int64_t b) {
  return a > b ? a : b;
}

/* Fewest elements (a power of two) that fill whole alignment units. */
static int64_t alignment_numel(int64_t itemsize) {
  int64_t numel = 1;
  while (numel * itemsize % FSDP_ALIGNMENT_NBYTES != 0) numel *= 2;
  return numel;
}

/* A new segment for `spec`; -1 when out of memory. */
static int64_t add_segment(fsdp_flat_layout *self, const fsdp_param_spec *spec,
                           int64_t kind, int64_t param_align,
                           int64_t shard_align) {
  void *segments = self->segments;
  if (!fsdp_grow(&segments, &self->segments_capacity,
                 (size_t)self->num_segments + 1, sizeof *self->segments)) {
    return -1;
  }
  self->segments = segments;
  self->segments[self->num_segments] = (placed_segment){
      .info = {.dtype = spec->dtype, .requires_grad = spec->requires_grad},
      .kind = kind,
      .param_align = param_align,
      .shard_align = shard_align};
  return self->num_segments++;
}

/* The segment for `spec` of a kind, added if there is none yet; -1 when out of
 * memory. */
static int64_t find_or_add_segment(fsdp_flat_layout *self,
                                   const fsdp_param_spec *spec, int64_t kind) {
  const fsdp_alignment alignment = self->alignment;
  for (int64_t i = 0; i < self->num_segments; i++) {
    const fsdp_segment *info = &self->segments[i].info;
    if (self->segments[i].kind == kind &&
        fsdp_dtype_equal(info->dtype, spec->dtype) &&
        info->dtype.itemsize == spec->dtype.itemsize &&
        info->requires_grad == spec->requires_grad) {
      return i;
    }
  }
  const int64_t numel =
      alignment_numel(min_i64(alignment.itemsize, spec->dtype.itemsize));
  return add_segment(self, spec, kind, alignment.params ? numel : 1,
                     alignment.shards ? numel : 1);
}

/* Places `param` at the end of its segment. */
static fsdp_status place_param(placed_segment *target, int64_t numel,
                               int64_t param, fsdp_param_slot *slot,
                               fsdp_error *error) {
  int64_t offset;
  if (!fsdp_round_up_i64(target->end, target->param_align, &offset) ||
      !fsdp_add_i64(offset, numel, &target->end)) {
    return FSDP_FAIL(
        error, FSDP_OVERFLOW,
        "segment up to parameter %" PRId64 " does not fit in int64", param);
  }
  slot->offset = offset;
  slot->numel = numel;
  target->info.num_params++;
  target->info.unsharded_numel += numel; /* at most `end`, which fits */
  return FSDP_OK;
}

/* Cuts a filled segment into world_size shards of `per_rank` at least. */
static fsdp_status cut_segment(placed_segment *target, int64_t index,
                               int64_t per_rank, int64_t world_size,
                               fsdp_error *error) {
  fsdp_segment *info = &target->info;
  int64_t nbytes;
  if (!fsdp_round_up_i64(per_rank, target->shard_align, &info->shard_numel) ||
      !fsdp_mul_i64(info->shard_numel, world_size, &info->padded_numel) ||
      !fsdp_mul_i64(info->padded_numel, info->dtype.itemsize, &nbytes)) {
    return FSDP_FAIL(error, FSDP_OVERFLOW,
                     "segment %" PRId64 " of %" PRId64
                     " elements, padded to %" PRId64
                     " ranks, does not fit in int64 bytes",
                     index, target->end, world_size);
  }
  info->padding_numel = info->padded_numel - info->unsharded_numel;
  return FSDP_OK;
}

/* What the parameters of a segment have in common beside what is in `info`. */
static int64_t kind_of(const layout_rule *rule, int64_t param, int64_t numel) {
  if (rule->segments != NULL) return rule->segments[param];
  if (!rule->is_apart || rule->block_numels[param] >= numel) return 0;
  return rule->block_numels[param];
}

static fsdp_status place_params(fsdp_flat_layout *self,
                                const fsdp_param_table *table,
                                const layout_rule *rule, fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  for (int64_t param = 0; param < self->num_params; param++) {
    const fsdp_param_spec *spec = fsdp_param_table_spec(table, param);
    const int64_t index =
        rule->row_numels == NULL
            ? find_or_add_segment(self, spec, kind_of(rule, param, spec->numel))
            : add_segment(self, spec, 0, 1,
                          max_i64(rule->row_numels[param], 1));
    if (index < 0) {
      return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY,
                       "out of host memory while adding segment %" PRId64,
                       self->num_segments);
    }
    self->slots[param].segment = index;
    FSDP_TRY(place_param(&self->segments[index], spec->numel, param,
                         &self->slots[param], error));
  }
done:
  return status;
}

/* Places the filled segment anew, in whole blocks. */
static fsdp_status place_blocks(fsdp_flat_layout *self, int64_t segment,
                                const int64_t *block_numels,
                                int64_t *shard_numel, fsdp_error *error) {
  const placed_segment *target = &self->segments[segment];
  const int64_t num_params = target->info.num_params;
  const int64_t *params = self->segment_params + target->params_begin;
  fsdp_status status = FSDP_OK;
  fsdp_blocks *blocks = fsdp_calloc((size_t)num_params, sizeof *blocks);
  if (blocks == NULL) {
    return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY,
                     "out of host memory for the blocks of segment %" PRId64,
                     segment);
  }
  for (int64_t i = 0; i < num_params; i++) {
    blocks[i].numel = self->slots[params[i]].numel;
    blocks[i].block_numel = block_numels[params[i]];
  }
  FSDP_TRY(fsdp_blocks_place(blocks, num_params, self->world_size,
                             max_i64(target->param_align, target->shard_align),
                             shard_numel, error));
  for (int64_t i = 0; i < num_params; i++) {
    self->slots[params[i]].offset = blocks[i].offset;
  }
done:
  fsdp_free(blocks);
  return status;
}

/* The parameters of a segment, to sort. */
typedef struct placed_param {
  fsdp_param_slot slot;
  int64_t param;
} placed_param;

/* What has no elements stands before what has some, so that ends
 * ascend, too. */
static int lowest_first(const void *a, const void *b) {
  const placed_param *first = a, *second = b;
  if (first->slot.offset != second->slot.offset) {
    return first->slot.offset < second->slot.offset ? -1 : 1;
  }
  if (first->slot.numel != second->slot.numel) {
    return first->slot.numel < second->slot.numel ? -1 : 1;
  }
  return first->param < second->param ? -1 : 1; /* qsort is not stable */
}

/* Sorts the params of a segment by offset. */
static fsdp_status sort_params(fsdp_flat_layout *self, int64_t segment,
                               fsdp_error *error) {
  const int64_t num_params = self->segments[segment].info.num_params;
  int64_t *params = self->segment_params + self->segments[segment].params_begin;
  placed_param *sorted = fsdp_calloc((size_t)num_params, sizeof *sorted);
  if (sorted == NULL) {
    return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY,
                     "out of host memory for the order of segment %" PRId64,
                     segment);
  }
  for (int64_t i = 0; i < num_params; i++) {
    sorted[i] = (placed_param){self->slots[params[i]], params[i]};
  }
  qsort(sorted, (size_t)num_params, sizeof *sorted, lowest_first);
  for (int64_t i = 0; i < num_params; i++) params[i] = sorted[i].param;
  fsdp_free(sorted);
  return FSDP_OK;
}

/* Takes over where the params of a segment lie. */
static fsdp_status take_offsets(fsdp_flat_layout *self, int64_t segment,
                                const layout_rule *rule, int64_t *shard_numel,
                                fsdp_error *error) {
  const placed_segment *target = &self->segments[segment];
  const int64_t *params = self->segment_params + target->params_begin;
  const int64_t numel = rule->shard_numels[segment];
  int64_t padded_numel;
  int64_t end = 0;
  fsdp_status status = FSDP_OK;

  for (int64_t i = 0; i < target->info.num_params; i++) {
    self->slots[params[i]].offset = rule->offsets[params[i]];
  }
  FSDP_TRY(sort_params(self, segment, error));
  if (!fsdp_mul_i64(numel, self->world_size, &padded_numel)) padded_numel = -1;
  for (int64_t i = 0; i < target->info.num_params; i++) {
    const fsdp_param_slot *slot = &self->slots[params[i]];
    if (slot->offset < end || slot->offset > padded_numel ||
        slot->numel > padded_numel - slot->offset) {
      return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                       "parameter %" PRId64 " of %" PRId64
                       " elements cannot lie at offset %" PRId64 " of %" PRId64
                       " shards of %" PRId64,
                       params[i], slot->numel, slot->offset, self->world_size,
                       numel);
    }
    end = slot->offset + slot->numel;
  }
  *shard_numel = numel;
done:
  return status;
}

static bool has_blocks(const fsdp_flat_layout *self, int64_t segment,
                       const int64_t *block_numels) {
  const placed_segment *target = &self->segments[segment];
  const int64_t *params = self->segment_params + target->params_begin;
  for (int64_t i = 0; i < target->info.num_params; i++) {
    if (block_numels[params[i]] > 0) return true;
  }
  return false;
}

/* Segments without any blocks stay as they are. */
static fsdp_status cut_segments(fsdp_flat_layout *self, const layout_rule *rule,
                                fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  if (rule->offsets != NULL && rule->num_segments != self->num_segments) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "the parameters have %" PRId64 " segments, got %" PRId64,
                     self->num_segments, rule->num_segments);
  }
  for (int64_t i = 0; i < self->num_segments; i++) {
    placed_segment *target = &self->segments[i];
    int64_t per_rank =
        target->end / self->world_size + (target->end % self->world_size != 0);
    if (rule->offsets != NULL) {
      FSDP_TRY(take_offsets(self, i, rule, &per_rank, error));
    } else if (rule->block_numels != NULL &&
               has_blocks(self, i, rule->block_numels)) {
      FSDP_TRY(place_blocks(self, i, rule->block_numels, &per_rank, error));
      FSDP_TRY(sort_params(self, i, error));
    }
    FSDP_TRY(cut_segment(target, i, per_rank, self->world_size, error));
  }
done:
  return status;
}

/* Groups the params by segment, in the table's order. */
static void group_params(fsdp_flat_layout *self) {
  int64_t begin = 0;
  for (int64_t i = 0; i < self->num_segments; i++) {
    self->segments[i].params_begin = begin;
    begin += self->segments[i].info.num_params;
  }
  for (int64_t param = 0; param < self->num_params; param++) {
    placed_segment *target = &self->segments[self->slots[param].segment];
    self->segment_params[target->params_begin++] = param;
  }
  for (int64_t i = 0; i < self->num_segments; i++) { /* moved to its end */
    self->segments[i].params_begin -= self->segments[i].info.num_params;
  }
}

static fsdp_status create_layout(const fsdp_param_table *table,
                                 layout_rule rule, int64_t world_size,
                                 fsdp_alignment alignment,
                                 fsdp_flat_layout **layout, fsdp_error *error) {
  const int64_t num_params = fsdp_param_table_num_params(table);
  fsdp_flat_layout *self = NULL;
  fsdp_status status = FSDP_OK;

  if (world_size < 1 || alignment.itemsize < 1) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "need world_size >= 1 and itemsize >= 1, got "
                     "%" PRId64 " and %" PRId32,
                     world_size, alignment.itemsize);
  }

  self = fsdp_calloc(1, sizeof *self);
  if (self == NULL) goto no_memory;
  self->world_size = world_size;
  self->alignment = alignment;
  self->is_placed = rule.offsets != NULL || rule.block_numels != NULL;
  self->num_params = num_params;
  self->slots = fsdp_calloc((size_t)num_params, sizeof *self->slots);
  if (self->slots == NULL) goto no_memory;
  self->segment_params =
      fsdp_calloc((size_t)num_params, sizeof *self->segment_params);
  if (self->segment_params == NULL) goto no_memory;

  FSDP_TRY(place_params(self, table, &rule, error));
  group_params(self);
  FSDP_TRY(cut_segments(self, &rule, error));

  *layout = self;
  self = NULL;
  goto done;

no_memory:
  status = FSDP_FAIL(error, FSDP_OUT_OF_MEMORY,
                     "out of host memory for a flat layout of %" PRId64
                     " parameters",
                     num_params);
done:
  fsdp_flat_layout_destroy(self);
  return status;
}

fsdp_status fsdp_flat_layout_create(const fsdp_param_table *table,
                                    int64_t world_size,
                                    fsdp_alignment alignment,
                                    fsdp_flat_layout **layout,
                                    fsdp_error *error) {
  return create_layout(table, (layout_rule){0}, world_size, alignment, layout,
                       error);
}

static int64_t padding(const fsdp_flat_layout *self) {
  int64_t numel = 0;
  for (int64_t i = 0; i < self->num_segments; i++) {
    numel += self->segments[i].info.padding_numel;
  }
  return numel;
}

/* Whether blocks pad a segment by much. */
static bool has_much_padding(const fsdp_flat_layout *self,
                             const int64_t *block_numels) {
  for (int64_t i = 0; i < self->num_segments; i++) {
    const fsdp_segment *info = &self->segments[i].info;
    if (info->padding_numel > info->unsharded_numel / MUCH_PADDING &&
        has_blocks(self, i, block_numels)) {
      return true;
    }
  }
  return false;
}

fsdp_status fsdp_flat_layout_create_in_blocks(const fsdp_param_table *table,
                                              const int64_t *block_numels,
                                              int64_t world_size,
                                              fsdp_alignment alignment,
                                              fsdp_flat_layout **layout,
                                              fsdp_error *error) {
  for (int64_t i = 0; i < fsdp_param_table_num_params(table); i++) {
    if (block_numels[i] >= 0) continue;
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "parameter %" PRId64 " has blocks of %" PRId64
                     " elements, need >= 0",
                     i, block_numels[i]);
  }
  fsdp_flat_layout *together = NULL, *apart = NULL;
  fsdp_status status = FSDP_OK;
  layout_rule rule = {.block_numels = block_numels};
  FSDP_TRY(create_layout(table, rule, world_size, alignment, &together, error));
  if (has_much_padding(together, block_numels)) {
    rule.is_apart = true;
    FSDP_TRY(create_layout(table, rule, world_size, alignment, &apart, error));
  }
  fsdp_flat_layout **best =
      apart != NULL && padding(apart) < padding(together) ? &apart : &together;
  *layout = *best;
  *best = NULL;
done:
  fsdp_flat_layout_destroy(apart);
  fsdp_flat_layout_destroy(together);
  return status;
}

fsdp_status fsdp_flat_layout_create_by_rows(const fsdp_param_table *table,
                                            const int64_t *row_numels,
                                            int64_t world_size,
                                            fsdp_flat_layout **layout,
                                            fsdp_error *error) {
  const fsdp_alignment alignment = {.itemsize = 1}; /* nothing is aligned */
  for (int64_t i = 0; i < fsdp_param_table_num_params(table); i++) {
    const int64_t numel = fsdp_param_table_spec(table, i)->numel;
    if (row_numels[i] >= 0 && numel % max_i64(row_numels[i], 1) == 0) continue;
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "parameter %" PRId64 " of %" PRId64
                     " elements cannot have rows of %" PRId64,
                     i, numel, row_numels[i]);
  }
  const layout_rule rule = {.row_numels = row_numels};
  return create_layout(table, rule, world_size, alignment, layout, error);
}

fsdp_status fsdp_flat_layout_create_placed(
    const fsdp_param_table *table, const int64_t *segments,
    const int64_t *offsets, const int64_t *shard_numels, int64_t num_segments,
    int64_t world_size, fsdp_flat_layout **layout, fsdp_error *error) {
  const fsdp_alignment alignment = {.itemsize = 1}; /* nothing is aligned */
  const layout_rule rule = {.segments = segments,
                            .offsets = offsets,
                            .shard_numels = shard_numels,
                            .num_segments = num_segments};
  return create_layout(table, rule, world_size, alignment, layout, error);
}

void fsdp_flat_layout_destroy(fsdp_flat_layout *layout) {
  if (layout == NULL) return;
  fsdp_free(layout->segment_params);
  fsdp_free(layout->slots);
  fsdp_free(layout->segments);
  fsdp_free(layout);
}

int64_t fsdp_flat_layout_world_size(const fsdp_flat_layout *layout) {
  return layout->world_size;
}

int64_t fsdp_flat_layout_num_params(const fsdp_flat_layout *layout) {
  return layout->num_params;
}

int64_t fsdp_flat_layout_num_segments(const fsdp_flat_layout *layout) {
  return layout->num_segments;
}

fsdp_alignment fsdp_flat_layout_alignment(const fsdp_flat_layout *layout) {
  return layout->alignment;
}

bool fsdp_flat_layout_is_placed(const fsdp_flat_layout *layout) {
  return layout->is_placed;
}

const fsdp_segment *fsdp_flat_layout_segment(const fsdp_flat_layout *layout,
                                             int64_t segment) {
  assert(segment >= 0 && segment < layout->num_segments);
  return &layout->segments[segment].info;
}

const fsdp_param_slot *fsdp_flat_layout_slot(const fsdp_flat_layout *layout,
                                             int64_t param) {
  assert(param >= 0 && param < layout->num_params);
  return &layout->slots[param];
}

const int64_t *fsdp_flat_layout_segment_params(const fsdp_flat_layout *layout,
                                               int64_t segment) {
  assert(segment >= 0 && segment < layout->num_segments);
  return layout->segment_params + layout->segments[segment].params_begin;
}

void fsdp_flat_layout_intersect(const fsdp_flat_layout *layout, int64_t rank,
                                int64_t param, fsdp_range *in_param,
                                fsdp_range *in_shard) {
  assert(rank >= 0 && rank < layout->world_size);
  const fsdp_param_slot *slot = fsdp_flat_layout_slot(layout, param);
  const int64_t shard_numel =
      fsdp_flat_layout_segment(layout, slot->segment)->shard_numel;
  const int64_t shard_begin = rank * shard_numel; /* <= padded_numel */
  const int64_t begin = max_i64(slot->offset, shard_begin);
  const int64_t end =
      min_i64(slot->offset + slot->numel, shard_begin + shard_numel);
  if (begin >= end) {
    *in_param = (fsdp_range){0, 0};
    *in_shard = (fsdp_range){0, 0};
    return;
  }
  *in_param = (fsdp_range){begin - slot->offset, end - slot->offset};
  *in_shard = (fsdp_range){begin - shard_begin, end - shard_begin};
}
