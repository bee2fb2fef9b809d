/*
 * Note [Gradients in parts]
 * Ranks of one host can read each other's gradients where autograd left them
 * (Note [Parts] in port/transport.h). Then a reduction needs no gradient block:
 * the parts of the array are the gradients that have come, parameters without
 * one and padding lie between them, and this rank's slots go into the sharded
 * gradient at once. Nothing is packed, and a unit's gradients exist once.
 *
 * Whether a unit reduces in parts depends on what is equal on all ranks. Each
 * rank decides for itself whether its gradients stay where they are: a block is
 * a part like others. It packs those of another dtype, and what an accumulation
 * without sync kept.
 *
 * With FSDP_SYNC_SHARD the slots go into the partial gradient. If there is one,
 * they go there with FSDP_SYNC_REDUCE, too; it is then scaled to the mean and
 * added to the sharded gradient.
 */
#include "base/alloc.h"
#include "base/dtypes.h"
#include "runtime/engine_priv.h"

/* Sums of them need no other dtype, and no scale before. */
static bool is_summed_as_is(fsdp_dtype dtype) {
  return dtype.code == FSDP_DTYPE_FLOAT32 || dtype.code == FSDP_DTYPE_FLOAT64 ||
         dtype.code == FSDP_DTYPE_BFLOAT16;
}

bool fsdp_unit_priv_can_reduce_parts(const fsdp_unit *unit) {
  const unsigned custom = FSDP_CUSTOM_REDUCE_SCATTER | FSDP_CUSTOM_REDUCED;
  const fsdp_group *group = &unit->options.shard_group;
  if (!fsdp_engine_priv_is_host(unit->engine) || group->world_size == 1 ||
      unit->options.replica_group.world_size > 1 || unit->options.offloads ||
      unit->settings.has_reduce_hook || (unit->settings.custom & custom) != 0 ||
      unit->options.prescale != 1.0 || unit->engine->checks_order ||
      unit->grad_nbytes < FSDP_MIN_REGION_NBYTES) {
    return false;
  }
  for (int64_t i = 0; i < unit->num_segments; i++) {
    const fsdp_unit_segment *segment = &unit->segments[i];
    if (!segment->is_trainable) continue;
    if (!is_summed_as_is(segment->options.reduce_dtype)) return false;
  }
  const fsdp_transport_ops *ops = group->transport->ops;
  return ops->can_reduce_parts != NULL &&
         ops->can_reduce_parts(group->transport);
}

bool fsdp_unit_priv_leaves_grads(const fsdp_unit *unit) {
  return unit->step.reduces_parts && unit->settings.sync != FSDP_SYNC_NONE &&
         unit->num_unlike == 0 &&
         !fsdp_unit_priv_has_grads(unit, FSDP_GRADS_UNSHARDED);
}

/* Whether the slots go into the partial gradient. */
static bool uses_partial(const fsdp_unit *unit) {
  return unit->settings.sync == FSDP_SYNC_SHARD ||
         fsdp_unit_priv_has_grads(unit, FSDP_GRADS_PARTIAL);
}

/* Lists ------------------------------------------------------------------ */

static fsdp_status reserve_lists(const fsdp_unit *unit, fsdp_part_lists *lists,
                                 fsdp_error *error) {
  const int64_t num_params = fsdp_flat_layout_num_params(unit->options.layout);
  const int64_t world_size = unit->options.shard_group.world_size;
  const int64_t num_marks =
      unit->options.finds_unused ? world_size * num_params / 2 + 1 : 0;
  const size_t num_parts =
      (size_t)(num_params + unit->num_segments + num_marks);
  const size_t num_places = (size_t)fsdp_unit_priv_num_reduced(unit);
  lists->num_parts = lists->num_places = 0;
  if (!fsdp_grow((void **)&lists->parts, &lists->part_capacity, num_parts,
                 sizeof *lists->parts) ||
      !fsdp_grow((void **)&lists->places, &lists->place_capacity, num_places,
                 sizeof *lists->places)) {
    return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY,
                     "unit '%s': out of host memory for a list of %zu "
                     "gradients",
                     unit->name, num_parts);
  }
  return FSDP_OK;
}

/* The whole segment, in the unit's block. */
static void list_packed(const fsdp_unit *unit, int64_t index, int64_t offset,
                        int64_t nbytes, fsdp_part_lists *lists) {
  if (nbytes == 0) return;
  lists->parts[lists->num_parts++] = (fsdp_part){
      .data = unit->grad_data[index], .offset = offset, .nbytes = nbytes};
}

/* The segment's gradients where they are. */
static void list_pending(const fsdp_unit *unit, int64_t index, int64_t offset,
                         fsdp_part_lists *lists) {
  const fsdp_flat_layout *layout = unit->options.layout;
  const fsdp_segment *info = unit->segments[index].layout;
  const int64_t *params = fsdp_flat_layout_segment_params(layout, index);
  for (int64_t i = 0; i < info->num_params; i++) {
    const fsdp_grad grad = unit->pending[params[i]];
    const fsdp_param_slot *slot = fsdp_flat_layout_slot(layout, params[i]);
    const int64_t itemsize = grad.dtype.itemsize; /* 0: none has come */
    if (itemsize == 0 || slot->numel == 0) continue;
    lists->parts[lists->num_parts++] =
        (fsdp_part){.data = grad.data,
                    .offset = offset + slot->offset * itemsize,
                    .nbytes = slot->numel * itemsize};
  }
}

/* Where this rank's slot of segment `index` goes, unless it has no elements. */
static void list_place(const fsdp_unit *unit, int64_t index, int64_t offset,
                       fsdp_part_lists *lists) {
  const fsdp_unit_segment *segment = &unit->segments[index];
  const fsdp_dtype dtype = segment->options.reduce_dtype;
  const int64_t numel = segment->layout->shard_numel;
  fsdp_place place = {
      .offset =
          offset + unit->options.shard_group.rank * numel * dtype.itemsize,
      .numel = numel,
      .sum_dtype = dtype,
      .data = unit->partial_data[index],
      .dtype = dtype,
      .scale = 1.0,
      .adds = fsdp_unit_priv_has_grads(unit, FSDP_GRADS_PARTIAL),
  };
  if (numel == 0) return;
  if (!uses_partial(unit)) {
    place.data = segment->grad_shard;
    place.dtype = segment->options.grad_dtype;
    place.scale = fsdp_unit_priv_mean_scale(unit);
    place.adds = fsdp_unit_priv_adds_to_grads(unit);
  }
  lists->places[lists->num_places++] = place;
}

static fsdp_status list_marks(fsdp_unit *unit, int64_t offset,
                              fsdp_part_lists *lists, fsdp_error *error) {
  const int64_t index = unit->num_segments;
  const fsdp_segment *layout = unit->segments[index].layout;
  const int64_t itemsize = layout->dtype.itemsize;
  fsdp_status status = FSDP_OK;
  if (fsdp_unit_priv_has_grads(unit, FSDP_GRADS_UNSHARDED)) {
    list_packed(unit, index, offset, layout->padded_numel * itemsize, lists);
  } else {
    lists->num_parts += (size_t)fsdp_unit_priv_list_marks(
        unit, offset, lists->parts + lists->num_parts);
  }
  if (uses_partial(unit)) {
    list_place(unit, index, offset, lists);
    return FSDP_OK;
  }
  void *sums = NULL;
  FSDP_TRY(fsdp_unit_priv_expect_marks(unit, &sums, error));
  if (sums == NULL) return FSDP_OK;
  lists->places[lists->num_places++] =
      (fsdp_place){.offset = offset + unit->options.shard_group.rank *
                                          layout->shard_numel * itemsize,
                   .numel = layout->shard_numel,
                   .sum_dtype = layout->dtype,
                   .data = sums,
                   .dtype = layout->dtype,
                   .scale = 1.0};
done:
  return status;
}

/* nbytes [out] of the array. */
static fsdp_status make_lists(fsdp_unit *unit, fsdp_part_lists *lists,
                              int64_t *nbytes, fsdp_error *error) {
  const bool is_packed = fsdp_unit_priv_has_grads(unit, FSDP_GRADS_UNSHARDED);
  fsdp_status status = FSDP_OK;
  int64_t offset = 0;

  FSDP_TRY(reserve_lists(unit, lists, error));
  for (int64_t i = 0; i < unit->num_segments; i++) {
    const fsdp_unit_segment *segment = &unit->segments[i];
    const int64_t segment_nbytes =
        segment->layout->padded_numel * segment->options.reduce_dtype.itemsize;
    if (!segment->is_trainable) continue;
    if (is_packed) {
      list_packed(unit, i, offset, segment_nbytes, lists);
    } else {
      list_pending(unit, i, offset, lists);
    }
    list_place(unit, i, offset, lists);
    offset += segment_nbytes;
  }
  if (unit->options.finds_unused) {
    const fsdp_segment *marks = unit->segments[unit->num_segments].layout;
    FSDP_TRY(list_marks(unit, offset, lists, error));
    offset += marks->padded_numel * marks->dtype.itemsize;
  }
  *nbytes = offset;
done:
  return status;
}

/* The reduction ---------------------------------------------------------- */

fsdp_status fsdp_unit_priv_start_parts(fsdp_unit *unit, fsdp_error *error) {
  fsdp_engine *engine = unit->engine;
  fsdp_part_lists *lists = &engine->part_lists;
  const fsdp_group *group = &unit->options.shard_group;
  fsdp_priv_launch launch;
  fsdp_status status = FSDP_OK;
  int64_t nbytes = 0;

  if (!fsdp_unit_priv_leaves_grads(unit)) {
    FSDP_TRY(fsdp_unit_priv_fill_grads(unit, error));
    FSDP_TRY(fsdp_unit_priv_cast_held(unit, error));
  }
  FSDP_TRY(uses_partial(unit) ? fsdp_unit_priv_take_partial(unit, error)
                              : fsdp_unit_priv_make_grad_shards(unit, error));
  FSDP_TRY(make_lists(unit, lists, &nbytes, error));
  const fsdp_parts parts = {.nbytes = nbytes,
                            .parts = lists->parts,
                            .num_parts = (int64_t)lists->num_parts,
                            .places = lists->places,
                            .num_places = (int64_t)lists->num_places};
  FSDP_TRY(fsdp_engine_priv_wait_lane(engine, FSDP_LANE_REDUCE,
                                      FSDP_LANE_COMPUTE, engine->compute_done,
                                      error));
  fsdp_op_log_add(&engine->log, "reduce_scatter", unit->name);
  const fsdp_priv_span span =
      fsdp_engine_priv_begin(engine, FSDP_TIMELINE_REDUCE_SCATTER);
  status = fsdp_engine_priv_open_launch(engine, FSDP_LANE_REDUCE, group,
                                        &launch, error);
  if (status == FSDP_OK) {
    status = group->transport->ops->reduce_parts(group->transport, &launch.call,
                                                 &parts, &launch.ticket, error);
  }
  FSDP_TRY(fsdp_engine_priv_close_launch(engine, &launch, status, error));
  fsdp_engine_priv_end(engine, unit, span, nbytes, 0);
done:
  return status;
}

/* Adds the partial gradient to the sharded one. */
static fsdp_status add_partial_to_grads(fsdp_unit *unit, fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  int64_t num_items = 0;

  FSDP_TRY(fsdp_unit_priv_make_grad_shards(unit, error));
  for (int64_t i = 0; i < unit->num_segments; i++) {
    const fsdp_unit_segment *segment = &unit->segments[i];
    if (!segment->is_trainable) continue;
    unit->items[num_items++] =
        (fsdp_pack_item){.to = segment->grad_shard,
                         .to_dtype = segment->options.grad_dtype,
                         .from_dtype = segment->options.reduce_dtype,
                         .from = unit->partial_data[i],
                         .numel = segment->layout->shard_numel,
                         .add = fsdp_unit_priv_adds_to_grads(unit),
                         .scales_first = true};
  }
  FSDP_TRY(fsdp_unit_priv_accumulate_items(unit, FSDP_LANE_COMPUTE, num_items,
                                           fsdp_unit_priv_mean_scale(unit),
                                           error));
  if (unit->options.finds_unused) {
    FSDP_TRY(fsdp_unit_priv_read_marks(unit, FSDP_LANE_COMPUTE,
                                       unit->partial_data[unit->num_segments],
                                       error));
  }
  fsdp_unit_priv_free_partial(unit);
done:
  return status;
}

fsdp_status fsdp_unit_priv_end_parts(fsdp_unit *unit, fsdp_error *error) {
  fsdp_status status = FSDP_OK;

  fsdp_unit_priv_release_pending(unit);
  FSDP_TRY(fsdp_unit_priv_drop_grads(unit, FSDP_LANE_COMPUTE, error));
  if (unit->settings.sync == FSDP_SYNC_SHARD) {
    fsdp_unit_priv_set_grads(unit, FSDP_GRADS_PARTIAL, true);
    return FSDP_OK;
  }
  if (uses_partial(unit)) FSDP_TRY(add_partial_to_grads(unit, error));
  fsdp_unit_priv_set_grads(unit, FSDP_GRADS_SHARDED, true);
  FSDP_TRY(fsdp_unit_priv_tell_followers(unit, FSDP_LANE_COMPUTE, error));
done:
  return status;
}

void fsdp_engine_priv_free_part_lists(fsdp_engine *engine) {
  fsdp_free(engine->part_lists.parts);
  fsdp_free(engine->part_lists.places);
}
