/*
 * Unused parameters: which parameters of a unit no rank has a gradient of.
 *
 * Note [Unused parameters]
 * An optimizer must not step a parameter that took no part in a backward:
 * weight decay and momentum would change it. But a rank cannot leave one out of
 * a reduction, as it does not know what the others have. So each of its slots
 * of the gradient block ends with one more element per parameter, its marks:
 * ones where this rank has a gradient, zeros elsewhere. They are a segment of
 * their own, which is reduced with the others, in the same launch. Where the
 * sum is 0 no rank has one.
 *
 * What a rank has itself it knows without the sums, and one with all gradients
 * does not ask. Another one reads them: on a device the host then waits for the
 * reductions, once, at the end of backward. It has to: whether `.grad` is None
 * is for the host to know when backward returns, and depends on what the hosts
 * of other ranks did, which only the reduction brings here. With `fills_unused`
 * nobody asks. Frozen parameters are marked. Nested backwards may reduce a unit
 * twice in one: then a rank marks what it had in either.
 */
#include <string.h>

#include "base/dtypes.h"
#include "runtime/engine_priv.h"

static const fsdp_unit_segment *marks_of(const fsdp_unit *unit) {
  return &unit->segments[unit->num_segments];
}

fsdp_unit_segment *fsdp_unit_priv_add_marks(fsdp_unit *unit, fsdp_dtype dtype) {
  fsdp_unit_segment *marks = &unit->segments[unit->num_segments];
  if (!unit->options.finds_unused || marks->has_grad_place) return NULL;
  const int64_t world_size = unit->options.shard_group.world_size;
  const int64_t num_params = fsdp_flat_layout_num_params(unit->options.layout);
  int64_t numel = num_params;
  dtype = fsdp_dtype_of_sum(dtype, &numel); /* no complex ones */
  /* The product fits: both are counts of objects that exist. */
  unit->marks_layout =
      (fsdp_segment){.dtype = dtype,
                     .requires_grad = true,
                     .unsharded_numel = num_params * world_size,
                     .shard_numel = num_params,
                     .padded_numel = num_params * world_size};
  *marks = (fsdp_unit_segment){.options = {.param_dtype = dtype,
                                           .reduce_dtype = dtype,
                                           .held_dtype = dtype,
                                           .grad_dtype = dtype},
                               .layout = &unit->marks_layout,
                               .is_trainable = true,
                               .has_grad_place = true};
  return marks;
}

static bool is_used(const fsdp_unit *unit, int64_t param) {
  const int64_t segment =
      fsdp_flat_layout_slot(unit->options.layout, param)->segment;
  const bool is_packed = fsdp_unit_priv_has_grads(unit, FSDP_GRADS_UNSHARDED) &&
                         unit->is_filled[param] != 0;
  return unit->settings.fills_unused || is_packed ||
         unit->pending[param].dtype.itemsize > 0 ||
         !unit->segments[segment].is_trainable;
}

/* Items that write the marks of the first slot; equal ones side by side are
 * one. */
static int64_t first_slot_items(const fsdp_unit *unit, fsdp_pack_item *items) {
  const fsdp_segment *layout = marks_of(unit)->layout;
  char *marks = unit->grad_data[unit->num_segments];
  int64_t num_items = 0;
  int64_t begin = 0;

  for (int64_t end = 1; end <= layout->shard_numel; end++) {
    const bool is_one = unit->was_used[begin] != 0;
    if (end < layout->shard_numel && (unit->was_used[end] != 0) == is_one) {
      continue;
    }
    items[num_items++] =
        (fsdp_pack_item){.to = marks + begin * layout->dtype.itemsize,
                         .to_dtype = layout->dtype,
                         .numel = end - begin,
                         .is_one = is_one};
    begin = end;
  }
  return num_items;
}

/* Notes of which parameters this rank has a gradient. */
static void note_used(fsdp_unit *unit) {
  const size_t num_params = (size_t)marks_of(unit)->layout->shard_numel;
  if (!unit->step.was_marked) memset(unit->was_used, 0, num_params);
  unit->step.was_marked = true;
  unit->has_missed = false;
  unit->reads_marks = false;
  for (size_t i = 0; i < num_params; i++) {
    if (is_used(unit, (int64_t)i)) unit->was_used[i] = 1;
    if (!unit->was_used[i]) unit->has_missed = true;
  }
}

int64_t fsdp_unit_priv_mark_items(fsdp_unit *unit, fsdp_pack_item *items) {
  if (!unit->options.finds_unused) return 0;
  const fsdp_segment *layout = marks_of(unit)->layout;
  note_used(unit);
  if (unit->has_missed) return first_slot_items(unit, items);
  items[0] = (fsdp_pack_item){.to = unit->grad_data[unit->num_segments],
                              .to_dtype = layout->dtype,
                              .numel = layout->padded_numel,
                              .is_one = true};
  return 1;
}

/* Each copy doubles how many slots are there, so launches hardly grow with the
 * ranks. */
fsdp_status fsdp_unit_priv_spread_marks(fsdp_unit *unit, fsdp_error *error) {
  if (!unit->options.finds_unused || !unit->has_missed) return FSDP_OK;
  const fsdp_segment *layout = marks_of(unit)->layout;
  char *marks = unit->grad_data[unit->num_segments];
  fsdp_status status = FSDP_OK;
  int64_t there = layout->shard_numel;

  while (there < layout->padded_numel) {
    const int64_t rest = layout->padded_numel - there;
    const int64_t numel = there < rest ? there : rest;
    unit->items[0] =
        (fsdp_pack_item){.to = marks + there * layout->dtype.itemsize,
                         .to_dtype = layout->dtype,
                         .from_dtype = layout->dtype,
                         .from = marks,
                         .numel = numel};
    FSDP_TRY(fsdp_unit_priv_pack_items(unit, FSDP_LANE_COMPUTE, 1, 1.0, error));
    there += numel;
  }
done:
  return status;
}

int64_t fsdp_unit_priv_list_marks(fsdp_unit *unit, int64_t offset,
                                  fsdp_part *parts) {
  const fsdp_segment *layout = marks_of(unit)->layout;
  const int64_t itemsize = layout->dtype.itemsize;
  int64_t num_parts = 0;
  note_used(unit);
  for (int64_t i = 0; i < layout->padded_numel; i++) {
    if (unit->was_used[i % layout->shard_numel] == 0) continue;
    const int64_t at = offset + i * itemsize;
    fsdp_part *last = num_parts == 0 ? NULL : &parts[num_parts - 1];
    if (last != NULL && last->offset + last->nbytes == at) {
      last->nbytes += itemsize;
    } else {
      parts[num_parts++] = (fsdp_part){.offset = at, .nbytes = itemsize};
    }
  }
  return num_parts;
}

static fsdp_status make_marks(fsdp_unit *unit, fsdp_error *error) {
  const fsdp_device_ops *ops = &unit->engine->ops;
  const fsdp_segment *layout = marks_of(unit)->layout;
  if (unit->marks != NULL) return FSDP_OK;
  return ops->host_alloc(ops->context,
                         layout->shard_numel * layout->dtype.itemsize,
                         &unit->marks, error);
}

fsdp_status fsdp_unit_priv_expect_marks(fsdp_unit *unit, void **sums,
                                        fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  *sums = NULL;
  if (!unit->has_missed) return FSDP_OK;
  FSDP_TRY(make_marks(unit, error));
  unit->reads_marks = true;
  *sums = unit->marks;
done:
  return status;
}

fsdp_status fsdp_unit_priv_read_marks(fsdp_unit *unit, fsdp_lane lane,
                                      const void *sums, fsdp_error *error) {
  const fsdp_device_ops *ops = &unit->engine->ops;
  fsdp_status status = FSDP_OK;
  if (!unit->options.finds_unused || !unit->has_missed ||
      unit->settings.has_reduce_hook) {
    return FSDP_OK;
  }
  if (fsdp_engine_is_capturing(unit->engine)) {
    return FSDP_FAIL(error, FSDP_INVALID_STATE,
                     "unit '%s': some of its parameters got no gradient, and "
                     "the host asks in each step whether other ranks have one; "
                     "a step that uses all trainable parameters can be "
                     "captured in a graph",
                     unit->name);
  }
  const fsdp_segment *layout = marks_of(unit)->layout;
  const int64_t nbytes = layout->shard_numel * layout->dtype.itemsize;
  FSDP_TRY(make_marks(unit, error));
  FSDP_TRY(
      ops->copy_to_host(ops->context, lane, unit->marks, sums, nbytes, error));
  unit->reads_marks = true;
  unit->awaits_marks = true;
done:
  return status;
}

fsdp_status fsdp_unit_await_unused(fsdp_unit *unit, fsdp_error *error) {
  fsdp_engine *engine = unit->engine;
  const fsdp_device_ops *ops = &engine->ops;
  fsdp_status status = FSDP_OK;
  if (!unit->awaits_marks) return FSDP_OK;
  FSDP_TRY(fsdp_engine_join_reduces(engine, error));
  FSDP_TRY(ops->event_record(ops->context, engine->compute_done,
                             FSDP_LANE_COMPUTE, error));
  FSDP_TRY(ops->event_synchronize(ops->context, engine->compute_done, error));
  /* All that were copied so far are there: a backward waits once. */
  for (size_t i = 0; i < engine->num_units; i++) {
    engine->units[i]->awaits_marks = false;
  }
done:
  return status;
}

bool fsdp_unit_is_unused(const fsdp_unit *unit, int64_t param) {
  if (!unit->reads_marks || unit->was_used[param] != 0) return false;
  const int32_t itemsize = marks_of(unit)->layout->dtype.itemsize;
  const char *mark = (const char *)unit->marks + param * itemsize;
  for (int32_t i = 0; i < itemsize; i++) {
    if (mark[i] != 0) return false; /* sums of ones are not -0 */
  }
  return true;
}

void fsdp_unit_priv_free_marks(fsdp_unit *unit) {
  const fsdp_device_ops *ops = &unit->engine->ops;
  FSDP_IGNORE(fsdp_unit_await_unused(unit, NULL)); /* a copy may write it */
  if (unit->marks != NULL) ops->host_free(ops->context, unit->marks);
  unit->marks = NULL;
  unit->reads_marks = false;
}
