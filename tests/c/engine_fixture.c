/*
 * Engine fixture: see engine_fixture.h.
 */
#include "engine_fixture.h"

#include <stdlib.h>

#include "base/alloc.h"
#include "elements.h"
#include "runtime/engine_priv.h"

static void *must_calloc(int64_t num, int64_t nbytes) {
  void *memory = calloc((size_t)num + 1, (size_t)nbytes);
  if (memory == NULL) abort();
  return memory;
}

fsdp_engine *model_engine_of(const fsdp_unit *unit) {
  return unit->engine;
}

/* --- Operations that the fixture listens to ------------------------------ */

static fsdp_status show_params(void *context, void *owner, fsdp_view view,
                               void *const *segments, fsdp_error *error) {
  model_unit *unit = owner;
  const fsdp_status status = recorder_views(context)->show_params(
      context, owner, view, segments, error);
  if (status != FSDP_OK) return status;
  unit->view = view;
  for (int64_t i = 0; view == FSDP_VIEW_PART && i < unit->num_segments; i++) {
    const int64_t nbytes = unit->part_nbytes[i];
    if (nbytes == 0 || unit->params[i] == segments[i]) continue;
    recorder_touch(context, FSDP_LANE_COMPUTE, unit->params[i],
                   nbytes * unit->world_size / 2, false);
    recorder_touch(context, FSDP_LANE_COMPUTE, segments[i], nbytes, true);
    memcpy(segments[i], (char *)unit->params[i] + unit->part_rank * nbytes,
           (size_t)nbytes);
  }
  for (int64_t i = 0; i < unit->num_segments; i++) {
    unit->params[i] = segments == NULL ? NULL : segments[i];
  }
  return FSDP_OK;
}

/* Parameters that the user replaced are copied by the host where one of the
 * two is in host memory. */
static fsdp_status take_params(void *context, void *owner, fsdp_view view,
                               void *const *segments, bool *any_copied,
                               fsdp_error *error) {
  const model_unit *unit = owner;
  fsdp_status status = recorder_views(context)->take_params(
      context, owner, view, segments, any_copied, error);
  if (status != FSDP_OK || !*any_copied) return status;
  if (unit->offloads && view == FSDP_VIEW_SHARDED) { /* as the bridge does */
    status = fsdp_engine_join_host(model_engine_of(unit->unit), error);
    if (status != FSDP_OK) return status;
  }
  for (int64_t i = 0; i < unit->num_segments; i++) {
    if (view == FSDP_VIEW_SHARDED) {
      recorder_touch(context,
                     unit->offloads ? RECORDER_HOST_LANE : FSDP_LANE_COMPUTE,
                     unit->shards[i], unit->shard_nbytes[i], true);
    } else {
      recorder_touch(context,
                     view == FSDP_VIEW_FULL_ON_HOST ? RECORDER_HOST_LANE
                                                    : FSDP_LANE_COMPUTE,
                     segments[i], unit->full_nbytes[i], true);
    }
  }
  return FSDP_OK;
}

/* Nobody may read what was freed. */
static void grads_free(void *context, void *owner) {
  model_unit *unit = owner;
  recorder_views(context)->grads_free(context, owner);
  CHECK(!unit->has_grads);
  for (int64_t i = 0; i < unit->num_segments; i++) {
    memset(unit->grad_shards[i], 0xCD, (size_t)unit->grad_shard_nbytes[i]);
  }
  unit->num_frees++;
}

/* Leaves the mean over the ranks, which is the gradient, in this
 * rank's slot. */
static fsdp_status reduce_hook(void *context, void *owner, fsdp_lane lane,
                               int64_t segment, void *buffer,
                               fsdp_error *error) {
  model_unit *unit = owner;
  const fsdp_segment *layout = fsdp_flat_layout_segment(unit->layout, segment);
  const int64_t nbytes = layout->shard_numel * unit->reduce_itemsize[segment];
  const fsdp_status status = recorder_views(context)->reduce_hook(
      context, owner, lane, segment, buffer, error);
  if (status != FSDP_OK) return status;
  recorder_touch(context, (int)lane, buffer, nbytes * unit->world_size, true);
  for (int64_t rank = 0; rank < unit->world_size; rank++) {
    if (rank == unit->rank) continue;
    memset((char *)buffer + rank * nbytes, 0xCD, (size_t)nbytes);
  }
  return FSDP_OK;
}

static fsdp_status show_grads(void *context, void *owner, fsdp_view view,
                              void *const *segments, fsdp_error *error) {
  model_unit *unit = owner;
  const fsdp_status status = recorder_views(context)->show_grads(
      context, owner, view, segments, error);
  if (status != FSDP_OK) return status;
  unit->has_grads = true;
  unit->grad_view = view;
  unit->has_reduced = unit->has_reduced || view == FSDP_VIEW_SHARDED;
  for (int64_t i = 0; i < unit->num_segments; i++) {
    unit->grads[i] = segments == NULL ? NULL : segments[i];
    const bool is_lent =
        view == FSDP_VIEW_UNSHARDED || view == FSDP_VIEW_PARTIAL;
    if (is_lent && unit->grads[i] != NULL) {
      recorder_lend(context, owner, view, unit->grads[i]);
    }
  }
  return FSDP_OK;
}

static void grad_release(void *context, void *token) {
  model_grad *grad = token;
  recorder_views(context)->grad_release(context, token);
  grad->num_releases++;
  if (grad->data != NULL) {
    recorder_forget(context, grad->data, grad->nbytes, FSDP_LANE_COMPUTE);
  }
  free(grad->data);
  grad->data = NULL;
}

/* --- Making and freeing -------------------------------------------------- */

static void end_model(void) {
  if (m.device != NULL) model_fini(&m);
}

void model_init(model *self, const model_options *options) {
  end_model();
  check_at_end(end_model);
  memset(self, 0, sizeof *self);
  if (options != NULL) self->options = *options;
  if (self->options.world_size == 0) self->options.world_size = 2;
  if (self->options.num_replicas == 0) self->options.num_replicas = 1;
  if (self->options.prescale == 0) self->options.prescale = 1;
  self->device = recorder_create();
  self->ops = *recorder_ops(self->device);
  self->views = *recorder_views(self->device);
  self->shard_group =
      recorder_group(self->device, self->options.rank, self->options.world_size,
                     self->options.wants_scratch);
  if (self->options.has_mean) recorder_reduce_to_mean(&self->shard_group);
  self->replica_group =
      recorder_group(self->device, 0, self->options.num_replicas, false);
  if (self->options.part_world_size > 0) {
    self->part_group = recorder_group(
        self->device, self->options.rank % self->options.part_world_size,
        self->options.part_world_size, false);
  }
  self->views.show_params = show_params;
  self->views.take_params = take_params;
  self->views.grads_free = grads_free;
  self->views.show_grads = show_grads;
  self->views.reduce_hook = reduce_hook;
  self->views.grad_release = grad_release;
}

static fsdp_dtype grad_dtype(const model *self, const fsdp_segment *segment) {
  return self->options.grad_dtype.code != 0 ? self->options.grad_dtype
                                            : segment->dtype;
}

/* `numel` elements of a unit's shard or sharded gradient. */
static void *make_shard(model *self, const model_unit *unit, const char *what,
                        int64_t segment, int64_t numel, fsdp_dtype dtype) {
  char name[32];
  void *data = must_calloc(numel, dtype.itemsize);
  snprintf(name, sizeof name, "%.8s.%s%" PRId64, unit->name, what, segment);
  if (self->options.offloads) {
    recorder_name_host_memory(self->device, data, numel * dtype.itemsize, name);
  }
  return data;
}

/* Fills the shards with numbers that tell units and places apart. */
static void plan_segments(model *self, int64_t index) {
  model_unit *unit = &self->units[index];
  unit->num_segments = fsdp_flat_layout_num_segments(unit->layout);
  for (int64_t i = 0; i < unit->num_segments; i++) {
    const fsdp_segment *segment = fsdp_flat_layout_segment(unit->layout, i);
    const int64_t numel = segment->shard_numel;
    unit->shards[i] = make_shard(self, unit, "shard", i, numel, segment->dtype);
    for (int64_t j = 0; j < numel; j++) {
      elements_write(unit->shards[i], segment->dtype, j,
                     (double)(8 * index + 4 * i + j % 4));
    }
    unit->grad_shards[i] =
        make_shard(self, unit, "grad", i, numel, grad_dtype(self, segment));
    unit->expected[i] = must_calloc(segment->padded_numel, sizeof(double));
    unit->shard_nbytes[i] = numel * segment->dtype.itemsize;
    unit->full_nbytes[i] = segment->padded_numel * segment->dtype.itemsize;
    unit->grad_shard_nbytes[i] = numel * grad_dtype(self, segment).itemsize;
    recorder_set_grad_shard(self->device, unit, i, unit->grad_shards[i],
                            unit->grad_shard_nbytes[i]);
  }
}

void model_plan(model *self, const char *name, const fsdp_param_spec *specs,
                int64_t num_specs) {
  enum { MAX_SPECS = 8 };
  fsdp_param_spec keyed[MAX_SPECS];
  fsdp_alignment alignment = {4, !self->options.is_unaligned,
                              !self->options.is_unaligned};
  model_unit *unit = &self->units[self->num_units];
  if (num_specs > MAX_SPECS || self->num_units == MODEL_MAX_UNITS) abort();

  unit->name = name;
  unit->offloads = self->options.offloads;
  for (int64_t i = 0; i < num_specs; i++) {
    keyed[i] = specs[i];
    keyed[i].key = (uint64_t)i;
  }
  if (self->options.param_dtype.code != 0) {
    alignment.itemsize = self->options.param_dtype.itemsize;
  }
  CHECK_OK(fsdp_param_table_create(keyed, num_specs, &unit->table, NULL));
  CHECK_OK(fsdp_flat_layout_create(unit->table, self->options.world_size,
                                   alignment, &unit->layout, NULL));
  plan_segments(self, self->num_units);
  recorder_name_owner(self->device, unit, name);
  self->num_units++;
}

void model_plan_simple(model *self, const char *name, int64_t shard_numel) {
  const fsdp_param_spec spec = {0, shard_numel * self->options.world_size,
                                RECORDER_F32, true};
  model_plan(self, name, &spec, 1);
}

void model_plan_mixed(model *self, const char *name) {
  const fsdp_param_spec specs[] = {
      {0, 6, RECORDER_F32, true},  {0, 4, RECORDER_F32, false},
      {0, 3, RECORDER_BF16, true}, {0, 5, RECORDER_U8, false},
      {0, 2, RECORDER_F32, true},
  };
  model_plan(self, name, specs, 5);
}

fsdp_unit_options model_unit_options(model *self, int64_t index,
                                     fsdp_segment_options *segments) {
  static const fsdp_prefetch prefetches[] = {
      FSDP_PREFETCH_PRE, FSDP_PREFETCH_POST, FSDP_PREFETCH_NONE};
  const model_options *options = &self->options;
  model_unit *unit = &self->units[index];
  for (int64_t i = 0; i < unit->num_segments; i++) {
    const fsdp_segment *segment = fsdp_flat_layout_segment(unit->layout, i);
    const fsdp_dtype master = segment->dtype;
    const bool is_cast =
        options->param_dtype.code != 0 && master.code != RECORDER_U8.code;
    const fsdp_dtype param_dtype = is_cast ? options->param_dtype : master;
    segments[i] = (fsdp_segment_options){
        .param_dtype = param_dtype,
        .reduce_dtype = options->reduce_dtype.code != 0 ? options->reduce_dtype
                                                        : param_dtype,
        .held_dtype = options->held_dtype,
        .grad_dtype = grad_dtype(self, segment),
        .shard = unit->shards[i]};
    if (options->part_world_size > 0) {
      segments[i].part_numel = segment->padded_numel / options->part_world_size;
    }
    unit->part_nbytes[i] = segments[i].part_numel * param_dtype.itemsize;
    unit->reduce_itemsize[i] = segments[i].reduce_dtype.itemsize;
  }
  unit->rank = options->rank;
  unit->world_size = options->world_size;
  unit->part_rank = self->part_group.rank;
  return (fsdp_unit_options){
      .name = unit->name,
      .owner = unit,
      .layout = unit->layout,
      .segments = segments,
      .shard_group = self->shard_group,
      .replica_group = self->replica_group,
      .part_group = self->part_group,
      .settings = {.reshard_after_forward = !options->keeps_after_forward,
                   .reshard_after_backward_without_sync =
                       !options->keeps_without_sync,
                   .keeps_for_inference = options->keeps_for_inference,
                   .keeps_part = true,
                   .unshards_in_backward = true},
      .shows_kept = options->shows_kept,
      .finds_unused = options->finds_unused,
      .is_apart = unit->is_apart,
      .backward_prefetch = prefetches[options->backward_prefetch],
      .forward_prefetch = options->forward_prefetch,
      .prescale = options->prescale,
      .offloads = options->offloads};
}

fsdp_status model_build(model *self, fsdp_error *error) {
  fsdp_segment_options segments[MODEL_MAX_SEGMENTS];
  fsdp_status status = FSDP_OK;

  recorder_set_host(self->device, self->ops.is_host);
  FSDP_TRY(fsdp_engine_create(&self->ops, &self->views, &self->engine, error));
  for (int64_t i = 0; i < self->num_units; i++) {
    const fsdp_unit_options options = model_unit_options(self, i, segments);
    FSDP_TRY(fsdp_unit_create(&options, &self->units[i].unit, error));
    FSDP_TRY(fsdp_engine_add_unit(self->engine, self->units[i].unit, error));
  }
done:
  return status;
}

void model_start(model *self) {
  CHECK_OK(model_build(self, NULL));
  recorder_clear(self->device);
}

void model_join_new_engine(model *self) {
  CHECK_OK(fsdp_engine_create(&self->ops, &self->views, &self->engine, NULL));
  for (int64_t i = 0; i < self->num_units; i++) {
    CHECK_OK(fsdp_engine_add_unit(self->engine, self->units[i].unit, NULL));
  }
}

void model_start_tree(model *self, const model_options *options,
                      int64_t num_children) {
  static const char *const names[] = {"root", "a", "b", "c"};
  model_init(self, options);
  for (int64_t i = 0; i <= num_children; i++) {
    model_plan_simple(self, names[i], 4 * (i + 1));
  }
  model_start(self);
}

/* Nobody may be reading a shard in host memory when its unit is gone. */
static void free_shards(model *self, model_unit *unit) {
  for (int64_t i = 0; i < unit->num_segments; i++) {
    const fsdp_segment *segment = fsdp_flat_layout_segment(unit->layout, i);
    model_touch_shard(self, unit->shards[i],
                      segment->shard_numel * segment->dtype.itemsize, true);
    free(unit->shards[i]);
    free(unit->expected[i]);
    model_touch_shard(self, unit->grad_shards[i],
                      segment->shard_numel * grad_dtype(self, segment).itemsize,
                      true);
    free(unit->grad_shards[i]);
  }
}

void model_fini(model *self) {
  for (int64_t i = self->num_units; i-- > 0;) {
    fsdp_unit_destroy(self->units[i].unit);
  }
  fsdp_engine_destroy(self->engine);
  for (int64_t i = self->num_units; i-- > 0;) {
    model_unit *unit = &self->units[i];
    free_shards(self, unit);
    fsdp_flat_layout_destroy(unit->layout);
    fsdp_param_table_destroy(unit->table);
  }
  for (int64_t i = 0; i < self->num_grads; i++) {
    CHECK_I64(self->grads[i].num_releases, 1);
  }
  CHECK_I64(recorder_live_blocks(self->device), 0);
  CHECK_I64(recorder_live_events(self->device), 0);
  CHECK_I64(fsdp_alloc_live(), 0);
  CHECK_TEXT(recorder_race(self->device), "");
  recorder_destroy(self->device);
  self->device = NULL;
}

/* --- Calls of the engine ------------------------------------------------- */

fsdp_status model_enter(model *self, int64_t unit, fsdp_error *error) {
  self->current = unit;
  const fsdp_status status =
      fsdp_unit_pre_forward(self->units[unit].unit, false, error);
  if (status != FSDP_OK) {
    CHECK(!fsdp_unit_state_is_in_flight(model_state(self, unit)));
    return status;
  }
  if (!fsdp_unit_is_summoned(self->units[unit].unit)) {
    model_check_unsharded(self, unit);
  }
  return FSDP_OK;
}

fsdp_status model_leave(model *self, int64_t unit, bool expects_backward,
                        fsdp_error *error) {
  self->current = unit;
  return fsdp_unit_post_forward(self->units[unit].unit, false, expects_backward,
                                error);
}

fsdp_status model_pre_backward(model *self, int64_t unit, fsdp_error *error) {
  self->current = unit;
  const fsdp_status status =
      fsdp_unit_pre_backward(self->units[unit].unit, error);
  if (status == FSDP_OK) model_check_unsharded(self, unit);
  return status;
}

fsdp_status model_give_grad(model *self, int64_t index, int64_t param,
                            bool is_expected, fsdp_error *error) {
  fsdp_segment_options options[MODEL_MAX_SEGMENTS];
  model_unit *unit = &self->units[index];
  const fsdp_param_slot *slot = fsdp_flat_layout_slot(unit->layout, param);
  (void)model_unit_options(self, index, options);
  if (self->num_grads == MODEL_MAX_GRADS) abort();

  self->current = index;
  const fsdp_dtype dtype = options[slot->segment].param_dtype;
  model_grad *grad = &self->grads[self->num_grads++];
  grad->nbytes = slot->numel * dtype.itemsize;
  grad->data = must_calloc(slot->numel, dtype.itemsize);
  recorder_touch(self->device, FSDP_LANE_COMPUTE, grad->data, grad->nbytes,
                 true);
  for (int64_t i = 0; i < slot->numel; i++) {
    const double value =
        (double)(param + self->salt % 3 + 1) + 0.25 * (double)(i % 4);
    elements_write(grad->data, dtype, i, value);
    unit->expected[slot->segment][slot->offset + i] += value;
  }
  const fsdp_grad handed = {.param = param,
                            .data = grad->data,
                            .dtype = dtype,
                            .is_expected = is_expected,
                            .token = grad};
  return fsdp_unit_grad_ready(unit->unit, &handed, error);
}

static bool is_trainable(const model_unit *unit, int64_t param) {
  return fsdp_unit_is_trainable(
      unit->unit, fsdp_flat_layout_slot(unit->layout, param)->segment);
}

fsdp_status model_give_grads(model *self, int64_t index, fsdp_error *error) {
  model_unit *unit = &self->units[index];
  const int64_t num_params = fsdp_flat_layout_num_params(unit->layout);
  int64_t num_trainable = 0;
  fsdp_status status = FSDP_OK;

  for (int64_t i = 0; i < num_params; i++) {
    num_trainable += is_trainable(unit, i);
  }
  const bool has_frozen = num_trainable < num_params;
  fsdp_unit_expect_grads(unit->unit, num_trainable + has_frozen, 0);
  for (int64_t i = num_params; i-- > 0;) {
    if (!is_trainable(unit, i)) continue;
    FSDP_TRY(model_give_grad(self, index, i, true, error));
  }
  if (has_frozen) FSDP_TRY(model_give_inputs(self, index, error));
done:
  return status;
}

fsdp_status model_give_inputs(model *self, int64_t index, fsdp_error *error) {
  self->current = index;
  return fsdp_unit_inputs_ready(self->units[index].unit, error);
}

fsdp_status model_finish(model *self, fsdp_error *error) {
  self->current = -1;
  const fsdp_status status = fsdp_engine_finish_backward(self->engine, error);
  if (status == FSDP_OK) {
    self->salt++;
    recorder_set_grads_live(self->device, true);
    recorder_set_params_changed(self->device, false);
  }
  return status;
}

/* --- Steps --------------------------------------------------------------- */

fsdp_status model_forward(model *self, bool expects_backward,
                          fsdp_error *error) {
  fsdp_status status = model_enter(self, 0, error);
  if (status != FSDP_OK) return status; /* not entered: nothing to leave */

  for (int64_t i = 1; i < self->num_units; i++) {
    FSDP_TRY(model_enter(self, i, error));
    status = model_leave(self, i, expects_backward, error);
    if (status != FSDP_OK)
      fsdp_unit_abandon_forward(self->units[i].unit, false);
    FSDP_TRY(status);
  }
  FSDP_TRY(model_leave(self, 0, expects_backward, error));
done:
  if (status != FSDP_OK) fsdp_unit_abandon_forward(self->units[0].unit, false);
  return status;
}

fsdp_status model_backward(model *self, fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  FSDP_TRY(model_pre_backward(self, 0, error));
  for (int64_t i = self->num_units; i-- > 1;) {
    FSDP_TRY(model_pre_backward(self, i, error));
    FSDP_TRY(model_give_grads(self, i, error));
  }
  FSDP_TRY(model_give_grads(self, 0, error));
  FSDP_TRY(model_finish(self, error));
done:
  return status;
}

void model_step(model *self) {
  fsdp_error error = {0};
  CHECK_OK(model_forward(self, true, &error));
  CHECK_OK(model_backward(self, &error));
  CHECK_TEXT(error.message, "");
}

fsdp_summon_options model_summon_options(int bits) {
  return (fsdp_summon_options){.on_first_rank_only = (bits & FIRST_ONLY) != 0,
                               .on_host = (bits & ON_HOST) != 0,
                               .with_grads = (bits & WITH_GRADS) != 0};
}

void model_zero_grad(model *self) {
  recorder_set_grads_live(self->device, false);
  for (int64_t i = 0; i < self->num_units; i++) {
    model_unit *unit = &self->units[i];
    unit->has_grads = false;
    unit->has_reduced = false;
    for (int64_t j = 0; j < unit->num_segments; j++) {
      const int64_t numel =
          fsdp_flat_layout_segment(unit->layout, j)->padded_numel;
      memset(unit->expected[j], 0, (size_t)numel * sizeof(double));
    }
  }
}

void model_optimizer_step(model *self) {
  recorder_set_params_changed(self->device, true);
  for (int64_t i = 0; i < self->num_units; i++) {
    model_unit *unit = &self->units[i];
    for (int64_t j = 0; j < unit->num_segments; j++) {
      const fsdp_segment *segment = fsdp_flat_layout_segment(unit->layout, j);
      model_touch_shard(self, unit->shards[j],
                        segment->shard_numel * segment->dtype.itemsize, true);
      for (int64_t k = 0; k < segment->shard_numel; k++) {
        const double value = elements_read(unit->shards[j], segment->dtype, k);
        elements_write(unit->shards[j], segment->dtype, k,
                       value < 96 ? value + 1 : 1);
      }
    }
  }
}
