/*
 * Where a unit's segments lie in its blocks: unsharded parameters, gradients
 * with staging memory, whole parameters and gradients of a summon, partial
 * gradients, scratch.
 */
#include <inttypes.h>

#include "base/arith.h"
#include "runtime/engine_priv.h"

/* Appends `numel` elements to a block of `*nbytes`. offset [out]. */
static bool place_in_block(int64_t numel, int32_t itemsize, int64_t *nbytes,
                           int64_t *offset) {
  int64_t begin;
  int64_t length;
  return fsdp_round_up_i64(*nbytes, FSDP_SEGMENT_ALIGNMENT_NBYTES, &begin) &&
         fsdp_mul_i64(numel, itemsize, &length) &&
         fsdp_add_i64(begin, length, nbytes) && ((void)(*offset = begin), true);
}

/* A place for this rank's sharded gradient, on its way between the host and its
 * slot in the segment at `segment_offset`. Other ranks' slots hold nothing
 * then: it lies there, as far as they reach. */
static bool place_stage(const fsdp_unit *self, const fsdp_segment *layout,
                        int64_t segment_offset, int32_t slot_itemsize,
                        int32_t itemsize, int64_t *nbytes, int64_t *offset) {
  const int64_t rank = self->options.shard_group.rank;
  const int64_t slot_nbytes = layout->shard_numel * slot_itemsize;
  int64_t stage_nbytes;
  int64_t end;
  if (!fsdp_mul_i64(layout->shard_numel, itemsize, &stage_nbytes)) return false;
  if (stage_nbytes <= rank * slot_nbytes) {
    *offset = segment_offset;
    return true;
  }
  /* In the block. Slots of a unit by rows may end anywhere. */
  if (!fsdp_round_up_i64(segment_offset + (rank + 1) * slot_nbytes, itemsize,
                         offset)) {
    return false;
  }
  if (!fsdp_add_i64(*offset, stage_nbytes, &end)) return false;
  if (end > *nbytes) *nbytes = end;
  return true;
}

/* A place for this rank's shard before its cast, in the slots of other ranks,
 * which hold nothing then. Where they are too small for it, they take a piece
 * at a time: a larger block would stay for as long as the unit is unsharded. */
static bool place_uploads(const fsdp_unit *self, fsdp_unit_segment *segment,
                          int64_t *nbytes) {
  const fsdp_group *group = &self->options.shard_group;
  const int64_t numel = segment->layout->shard_numel;
  const int32_t itemsize = segment->layout->dtype.itemsize;
  const int64_t slot_nbytes = numel * segment->options.param_dtype.itemsize;
  const int64_t before = group->rank * slot_nbytes;
  const int64_t end = group->world_size * slot_nbytes;
  int64_t after; /* where slots begin that come later; they may end anywhere */

  if (!fsdp_round_up_i64(before + slot_nbytes, itemsize, &after)) return false;
  const bool is_before = before >= numel * itemsize || before >= end - after;
  const int64_t room = (is_before ? before : end - after) / itemsize;
  segment->param_stage_numel = room < numel ? room : numel;
  segment->param_stage_offset = segment->param_offset + (is_before ? 0 : after);
  if (room > 0 || numel == 0) return true;
  segment->param_stage_numel = numel;
  segment->param_stage_offset = segment->param_offset + after;
  int64_t stage_nbytes;
  int64_t stage_end;
  if (!fsdp_mul_i64(numel, itemsize, &stage_nbytes) ||
      !fsdp_add_i64(segment->param_stage_offset, stage_nbytes, &stage_end)) {
    return false;
  }
  if (stage_end > *nbytes) *nbytes = stage_end;
  return true;
}

/* Places of one segment in the parameter blocks. */
static bool place_params(fsdp_unit *self, fsdp_unit_segment *segment) {
  const fsdp_segment *layout = segment->layout;
  const fsdp_dtype dtype = segment->options.param_dtype;
  const bool has_cast = !fsdp_dtype_equal(dtype, layout->dtype);
  const bool is_alone = self->options.shard_group.world_size == 1;

  segment->is_resident = layout->padded_numel == 0 ||
                         (is_alone && !has_cast && !self->options.offloads);
  self->has_cast = self->has_cast || has_cast;
  if (!place_in_block(layout->padded_numel, layout->dtype.itemsize,
                      &self->full_nbytes, &segment->full_offset)) {
    return false;
  }
  if (segment->options.is_extended) { /* the block orders the gathers */
    segment->is_resident = true;
    self->is_resident = false;
    self->is_extended = true;
    return place_in_block(1, 1, &self->param_nbytes, &segment->param_offset);
  }
  if (segment->is_resident && !has_cast) return true;
  self->is_resident = false;
  if (segment->is_resident) { /* no elements, and shown in another dtype */
    return place_in_block(1, 1, &self->full_nbytes, &segment->full_offset) &&
           place_in_block(1, 1, &self->param_nbytes, &segment->param_offset);
  }
  int64_t numel;
  if (!fsdp_add_i64(layout->padded_numel, segment->options.spare_numel,
                    &numel) ||
      !place_in_block(numel, dtype.itemsize, &self->param_nbytes,
                      &segment->param_offset)) {
    return false;
  }
  if (!place_in_block(segment->options.part_numel, dtype.itemsize,
                      &self->part_nbytes, &segment->part_offset)) {
    return false;
  }
  return !self->options.offloads || !has_cast ||
         place_uploads(self, segment, &self->param_nbytes);
}

/* Places of the marks in the blocks of a reduction, once. */
static bool place_marks(fsdp_unit *self, fsdp_dtype reduce_dtype) {
  fsdp_unit_segment *marks = fsdp_unit_priv_add_marks(self, reduce_dtype);
  if (marks == NULL) return true;
  const int32_t itemsize = marks->layout->dtype.itemsize;
  const int64_t shard_numel = marks->layout->shard_numel;
  const int64_t scratch_numel =
      fsdp_scratch_numel(self->options.shard_group.world_size, shard_numel);
  return place_in_block(marks->layout->padded_numel, itemsize,
                        &self->grad_nbytes, &marks->grad_offset) &&
         place_in_block(scratch_numel, itemsize, &self->scratch_nbytes,
                        &marks->scratch_offset) &&
         place_in_block(shard_numel, itemsize, &self->partial_nbytes,
                        &marks->partial_offset);
}

/* Places of one trainable segment in the gradient blocks. */
static bool place_grads(fsdp_unit *self, fsdp_unit_segment *segment) {
  const fsdp_segment *layout = segment->layout;
  const int32_t reduce_itemsize = segment->options.reduce_dtype.itemsize;
  const int32_t grad_itemsize = segment->options.grad_dtype.itemsize;

  segment->has_grad_place = true;
  if (!fsdp_dtype_equal(segment->options.held_dtype,
                        segment->options.reduce_dtype)) {
    self->has_held = true;
  }
  if (!place_in_block(layout->padded_numel, reduce_itemsize, &self->grad_nbytes,
                      &segment->grad_offset) ||
      !place_in_block(layout->padded_numel,
                      segment->options.held_dtype.itemsize, &self->held_nbytes,
                      &segment->held_offset)) {
    return false;
  }
  if (!place_in_block(fsdp_scratch_numel(self->options.shard_group.world_size,
                                         layout->shard_numel),
                      reduce_itemsize, &self->scratch_nbytes,
                      &segment->scratch_offset)) {
    return false;
  }
  if (self->options.offloads &&
      !place_stage(self, layout, segment->grad_offset, reduce_itemsize,
                   grad_itemsize, &self->grad_nbytes,
                   &segment->grad_stage_offset)) {
    return false;
  }
  /* Parameters without elements have gradients, too. */
  if (self->grad_nbytes == 0) self->grad_nbytes = 1;
  if (self->held_nbytes == 0) self->held_nbytes = 1;
  return place_in_block(layout->shard_numel, reduce_itemsize,
                        &self->partial_nbytes, &segment->partial_offset) &&
         place_in_block(layout->padded_numel, grad_itemsize,
                        &self->full_grad_nbytes, &segment->full_grad_offset) &&
         place_marks(self, segment->options.reduce_dtype);
}

static fsdp_status does_not_fit(const fsdp_unit *self, int64_t segment,
                                fsdp_error *error) {
  return FSDP_FAIL(error, FSDP_OVERFLOW,
                   "unit '%s': segment %" PRId64 " of %" PRId64
                   " elements does not fit in int64 bytes",
                   self->name, segment,
                   self->segments[segment].layout->padded_numel);
}

/* Lays the segments out in the unit's kinds of block. */
fsdp_status fsdp_unit_priv_place_segments(fsdp_unit *self, fsdp_error *error) {
  self->is_resident = true;
  for (int64_t i = 0; i < self->num_segments; i++) {
    fsdp_unit_segment *segment = &self->segments[i];
    if (!place_params(self, segment) ||
        (segment->layout->requires_grad && !place_grads(self, segment))) {
      return does_not_fit(self, i, error);
    }
    segment->is_trainable = segment->layout->requires_grad;
  }
  return FSDP_OK;
}

/* Gives a segment that was frozen so far its place at the end of the gradient
 * blocks. A unit without an engine gets its arena client when it joins one. */
static fsdp_status add_grad_place(fsdp_unit *unit, int64_t segment,
                                  fsdp_error *error) {
  fsdp_engine *engine = unit->engine;
  fsdp_unit_segment *self = &unit->segments[segment];
  const fsdp_unit_segment segment_before = *self;
  const fsdp_unit_segment marks_before = unit->segments[unit->num_segments];
  fsdp_status status = FSDP_OK;

  if (engine != NULL) {
    fsdp_unit_priv_free_partial(unit); /* too small soon; it holds no value */
  }
  const fsdp_unit before = *unit;
  if (!place_grads(unit, self)) {
    status = does_not_fit(unit, segment, error);
    goto done;
  }
  if (engine == NULL || unit->grad_nbytes == 0) return FSDP_OK;
  if (unit->grad_client >= 0) {
    FSDP_TRY(fsdp_arena_resize_client(engine->arena, unit->grad_client,
                                      unit->grad_nbytes, error));
  } else {
    FSDP_TRY(fsdp_arena_add_client(engine->arena, unit->grad_nbytes,
                                   &unit->grad_client, error));
  }
  if (unit->held_client >= 0) {
    FSDP_TRY(fsdp_arena_resize_client(engine->arena, unit->held_client,
                                      unit->held_nbytes, error));
  }
done:
  if (status != FSDP_OK) { /* the unit is as it was */
    *unit = before;
    *self = segment_before;
    unit->segments[unit->num_segments] = marks_before;
  }
  return status;
}

fsdp_status fsdp_unit_priv_train(fsdp_unit *unit, int64_t segment,
                                 bool is_trainable, fsdp_error *error) {
  fsdp_unit_segment *self = &unit->segments[segment];
  fsdp_status status = FSDP_OK;
  if (is_trainable && !self->has_grad_place) {
    FSDP_TRY(add_grad_place(unit, segment, error));
  }
  self->is_trainable = is_trainable;
done:
  return status;
}

fsdp_status fsdp_unit_set_trainable(fsdp_unit *unit, int64_t segment,
                                    bool is_trainable, fsdp_error *error) {
  const fsdp_unit_segment *self = &unit->segments[segment];

  if (self->is_trainable == is_trainable) return FSDP_OK;
  if (unit->engine != NULL &&
      (unit->engine->in_backward || fsdp_unit_holds_grads(unit))) {
    if (!is_trainable) return FSDP_OK; /* not yet */
    return FSDP_FAIL_WITH(FSDP_REMEDY_TRAIN_LATER, error, FSDP_INVALID_STATE,
                          "parameters of unit '%s' were unfrozen in the middle "
                          "of a gradient accumulation",
                          unit->name);
  }
  return fsdp_unit_priv_train(unit, segment, is_trainable, error);
}

bool fsdp_unit_is_trainable(const fsdp_unit *unit, int64_t segment) {
  return unit->segments[segment].is_trainable;
}
