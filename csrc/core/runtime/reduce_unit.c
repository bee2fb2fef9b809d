/*
 * One unit's reduction: from a complete gradient block to the sharded gradient.
 *
 *   lane REDUCE      reduce_scatter; + the partial gradient, if there is one
 *   lane REPLICATE   all_reduce of this rank's slot, if there are replicas
 *   the last of them accumulate into the sharded gradient, scaled to the mean
 *   lane DOWNLOAD    the same through the device, if the unit offloads
 *
 * Where there is nothing to add and nothing else to do, the reduce_scatter
 * writes the mean into the sharded gradient itself, if the transport can.
 *
 * With FSDP_SYNC_SHARD it ends after the first line: the slot is added to the
 * partial gradient, which the next FSDP_SYNC_REDUCE takes in. A communication
 * hook stands for all collectives and the scaling. Note [Gradients in parts] is
 * another way.
 */
#include "base/dtypes.h"
#include "runtime/engine_priv.h"

/* This rank's piece of segment `index`'s gradient. */
static void *own_slot(const fsdp_unit *unit, int64_t index) {
  const fsdp_unit_segment *segment = &unit->segments[index];
  return fsdp_priv_slot(unit->grad_data[index], unit->options.shard_group.rank,
                        segment->layout->shard_numel,
                        segment->options.reduce_dtype);
}

/* What this rank gets from a reduce_scatter, and where. */
typedef enum reduced_form {
  FORM_SUM = 0, /* the sum, in its slot */
  FORM_MEAN,    /* the mean, in its slot */
  FORM_SHARD    /* the mean, as the sharded gradient */
} reduced_form;

/* Where the device has segment `index`'s sharded gradient, or writes it. */
static void *grad_target(const fsdp_unit *unit, int64_t index,
                         reduced_form form) {
  if (!unit->options.offloads) return unit->segments[index].grad_shard;
  return form == FORM_SHARD ? own_slot(unit, index) : unit->stage_data[index];
}

/* Sum or mean: the same on all ranks, so it depends on no gradient that only
 * this rank may have. */
static bool reduces_to_mean(const fsdp_unit *unit) {
  const fsdp_group *group = &unit->options.shard_group;
  if (fsdp_engine_priv_is_host(unit->engine) || group->world_size < 2 ||
      group->transport->ops->reduce_scatter_mean == NULL ||
      unit->options.replica_group.world_size > 1 ||
      unit->settings.has_reduce_hook || unit->settings.custom != 0 ||
      unit->settings.sync != FSDP_SYNC_REDUCE ||
      fsdp_unit_priv_mean_scale(unit) != 1.0 / (double)group->world_size) {
    return false;
  }
  for (int64_t i = 0; i < unit->num_segments; i++) {
    const fsdp_segment_options *options = &unit->segments[i].options;
    if (unit->grad_data[i] != NULL &&
        !fsdp_dtype_equal(options->reduce_dtype, options->grad_dtype)) {
      return false;
    }
  }
  return true;
}

static reduced_form choose_form(const fsdp_unit *unit) {
  if (!reduces_to_mean(unit)) return FORM_SUM;
  return fsdp_unit_priv_adds_to_grads(unit) ||
                 fsdp_unit_priv_has_grads(unit, FSDP_GRADS_PARTIAL)
             ? FORM_MEAN
             : FORM_SHARD;
}

/* Hands over segment `index`'s gradient and this rank's piece of it. */
static fsdp_status add_custom(fsdp_unit *unit, int64_t index,
                              fsdp_error *error) {
  const fsdp_view_ops *views = &unit->engine->views;
  const fsdp_segment *layout = unit->segments[index].layout;
  return views->custom_add(views->context, unit->options.owner,
                           unit->grad_data[index], layout->padded_numel,
                           own_slot(unit, index), layout->shard_numel,
                           unit->segments[index].options.reduce_dtype, error);
}

static fsdp_status run_custom(fsdp_unit *unit, fsdp_lane lane, fsdp_custom kind,
                              double scale, fsdp_error *error) {
  const fsdp_view_ops *views = &unit->engine->views;
  return views->custom_run(views->context, unit->options.owner, lane, kind,
                           &unit->options.shard_group, scale, error);
}

/* Of marks the sum. */
static fsdp_status reduce_scatter(fsdp_unit *unit, int64_t index,
                                  reduced_form form, fsdp_priv_launch *launch,
                                  int64_t *nbytes, fsdp_error *error) {
  const fsdp_group *group = &unit->options.shard_group;
  const fsdp_transport_ops *ops = group->transport->ops;
  int64_t numel = unit->segments[index].layout->shard_numel;
  const fsdp_dtype dtype =
      fsdp_dtype_of_sum(unit->segments[index].options.reduce_dtype, &numel);
  *nbytes += numel * group->world_size * dtype.itemsize;
  if (form != FORM_SUM && index < unit->num_segments) {
    void *output = form == FORM_SHARD ? grad_target(unit, index, form)
                                      : own_slot(unit, index);
    return ops->reduce_scatter_mean(group->transport, &launch->call, output,
                                    unit->grad_data[index], numel, dtype,
                                    &launch->ticket, error);
  }
  return ops->reduce_scatter(group->transport, &launch->call,
                             unit->grad_data[index], numel, dtype,
                             &launch->ticket, error);
}

static fsdp_status reduce_scatter_segments(fsdp_unit *unit, reduced_form form,
                                           fsdp_error *error) {
  fsdp_engine *engine = unit->engine;
  const fsdp_group *group = &unit->options.shard_group;
  fsdp_priv_launch launch;
  fsdp_status status = FSDP_OK;
  void *scratch = NULL;
  int64_t nbytes = 0;

  fsdp_op_log_add(&engine->log, "reduce_scatter", unit->name);
  if (unit->scratch_nbytes > 0 && group->transport->ops->wants_scratch) {
    FSDP_TRY(fsdp_engine_priv_take_scratch(engine, unit->scratch_nbytes,
                                           &scratch, error));
  }
  const fsdp_priv_span span =
      fsdp_engine_priv_begin(engine, FSDP_TIMELINE_REDUCE_SCATTER);
  status = fsdp_engine_priv_open_launch(engine, FSDP_LANE_REDUCE, group,
                                        &launch, error);
  const int64_t num_segments = fsdp_unit_priv_num_reduced(unit);
  for (int64_t i = 0; status == FSDP_OK && i < num_segments; i++) {
    const fsdp_unit_segment *segment = &unit->segments[i];
    if (unit->grad_data[i] == NULL || segment->layout->shard_numel == 0) {
      continue;
    }
    if ((unit->settings.custom & FSDP_CUSTOM_REDUCE_SCATTER) != 0) {
      status = add_custom(unit, i, error);
      continue;
    }
    launch.call.scratch =
        scratch == NULL ? NULL : (char *)scratch + segment->scratch_offset;
    status = reduce_scatter(unit, i, form, &launch, &nbytes, error);
  }
  FSDP_TRY(fsdp_engine_priv_close_launch(engine, &launch, status, error));
  if ((unit->settings.custom & FSDP_CUSTOM_REDUCE_SCATTER) != 0) {
    FSDP_TRY(run_custom(unit, FSDP_LANE_REDUCE, FSDP_CUSTOM_REDUCE_SCATTER, 1.0,
                        error));
  }
  fsdp_engine_priv_end(engine, unit, span, nbytes, 0);
done:
  if (scratch != NULL) { /* also after a failure: REDUCE may be writing it */
    const bool is_first = status == FSDP_OK;
    const fsdp_status given =
        fsdp_engine_priv_give_scratch(engine, is_first ? error : NULL);
    if (is_first) status = given;
  }
  return status;
}

static fsdp_status all_reduce_segments(fsdp_unit *unit, fsdp_error *error) {
  fsdp_engine *engine = unit->engine;
  const fsdp_group *group = &unit->options.replica_group;
  fsdp_priv_launch launch;

  fsdp_op_log_add(&engine->log, "all_reduce", unit->name);
  const fsdp_priv_span span =
      fsdp_engine_priv_begin(engine, FSDP_TIMELINE_ALL_REDUCE);
  int64_t nbytes = 0;
  fsdp_status status = fsdp_engine_priv_open_launch(engine, FSDP_LANE_REPLICATE,
                                                    group, &launch, error);
  const int64_t num_segments = fsdp_unit_priv_num_reduced(unit);
  for (int64_t i = 0; status == FSDP_OK && i < num_segments; i++) {
    int64_t shard_numel = unit->segments[i].layout->shard_numel;
    if (unit->grad_data[i] == NULL || shard_numel == 0) continue;
    const fsdp_dtype dtype =
        fsdp_dtype_of_sum(unit->segments[i].options.reduce_dtype, &shard_numel);
    status = group->transport->ops->all_reduce(group->transport, &launch.call,
                                               own_slot(unit, i), shard_numel,
                                               dtype, &launch.ticket, error);
    nbytes += shard_numel * dtype.itemsize;
  }
  FSDP_TRY(fsdp_engine_priv_close_launch(engine, &launch, status, error));
  fsdp_engine_priv_end(engine, unit, span, nbytes, 0);
done:
  return status;
}

static fsdp_status run_hook(fsdp_unit *unit, fsdp_error *error) {
  fsdp_engine *engine = unit->engine;
  const fsdp_view_ops *views = &engine->views;
  fsdp_status status = FSDP_OK;

  fsdp_op_log_add(&engine->log, "reduce_hook", unit->name);
  const fsdp_priv_span span =
      fsdp_engine_priv_begin(engine, FSDP_TIMELINE_REDUCE_HOOK);
  int64_t nbytes = 0;
  for (int64_t i = 0; i < unit->num_segments; i++) {
    if (unit->grad_data[i] == NULL) continue;
    FSDP_TRY(views->reduce_hook(views->context, unit->options.owner,
                                FSDP_LANE_REDUCE, i, unit->grad_data[i],
                                error));
    nbytes += unit->segments[i].layout->padded_numel *
              unit->segments[i].options.reduce_dtype.itemsize;
  }
  fsdp_engine_priv_end(engine, unit, span, nbytes, 0);
done:
  return status;
}

/* Partial gradient --------------------------------------------------------- */

/* partial (+)= slot, or the other way round, `scale` times. */
static fsdp_status add_partial(fsdp_unit *unit, fsdp_lane lane, bool to_slot,
                               double scale, fsdp_error *error) {
  const bool has_partial = fsdp_unit_priv_has_grads(unit, FSDP_GRADS_PARTIAL);
  int64_t num_items = 0;

  for (int64_t i = 0; i < fsdp_unit_priv_num_reduced(unit); i++) {
    const fsdp_unit_segment *segment = &unit->segments[i];
    const fsdp_dtype dtype = segment->options.reduce_dtype;
    if (unit->grad_data[i] == NULL) continue;
    void *slot = own_slot(unit, i);
    void *partial = unit->partial_data[i];
    unit->items[num_items++] =
        (fsdp_pack_item){.to = to_slot ? slot : partial,
                         .to_dtype = dtype,
                         .from_dtype = dtype,
                         .from = to_slot ? partial : slot,
                         .numel = segment->layout->shard_numel,
                         .add = to_slot || has_partial};
  }
  return fsdp_unit_priv_accumulate_items(unit, lane, num_items, scale, error);
}

/* Sharded gradient --------------------------------------------------------- */

/* The event of `lane`. It can be recorded: its last record was waited for at
 * once. */
static fsdp_event *lane_event(const fsdp_engine *engine, fsdp_lane lane) {
  return lane == FSDP_LANE_REDUCE ? engine->reduce_done
                                  : engine->replicate_done;
}

/* Scales the reduced pieces and shows them to the user. */
static fsdp_status show_reduced(fsdp_unit *unit, fsdp_lane lane,
                                fsdp_error *error) {
  fsdp_status status = FSDP_OK;

  fsdp_op_log_add(&unit->engine->log, "all_reduce_hook", unit->name);
  for (int64_t i = 0; i < unit->num_segments; i++) {
    if (unit->grad_data[i] == NULL) continue;
    FSDP_TRY(add_custom(unit, i, error));
  }
  FSDP_TRY(run_custom(unit, lane, FSDP_CUSTOM_REDUCED,
                      fsdp_unit_priv_mean_scale(unit), error));
done:
  return status;
}

/* Copies the sharded gradient to the device, or back. */
static fsdp_status copy_grads(fsdp_unit *unit, bool to_device,
                              reduced_form form, fsdp_error *error) {
  const fsdp_device_ops *ops = &unit->engine->ops;
  fsdp_status status = FSDP_OK;

  for (int64_t i = 0; i < unit->num_segments; i++) {
    const fsdp_unit_segment *segment = &unit->segments[i];
    const int64_t nbytes =
        segment->layout->shard_numel * segment->options.grad_dtype.itemsize;
    if (unit->grad_data[i] == NULL) continue;
    void *stage = grad_target(unit, i, form);
    FSDP_TRY(to_device
                 ? ops->copy_to_device(ops->context, FSDP_LANE_DOWNLOAD, stage,
                                       segment->grad_shard, nbytes, error)
                 : ops->copy_to_host(ops->context, FSDP_LANE_DOWNLOAD,
                                     segment->grad_shard, stage, nbytes,
                                     error));
  }
done:
  return status;
}

/* Brings the earlier sum to the device: `lane` waits for it. */
static fsdp_status bring_grads(fsdp_unit *unit, fsdp_lane lane,
                               fsdp_error *error) {
  fsdp_engine *engine = unit->engine;
  fsdp_status status = FSDP_OK;
  FSDP_TRY(fsdp_engine_priv_wait_lane(engine, FSDP_LANE_DOWNLOAD, lane,
                                      lane_event(engine, lane), error));
  FSDP_TRY(copy_grads(unit, true, FORM_SUM, error));
  FSDP_TRY(fsdp_engine_priv_wait_lane(engine, lane, FSDP_LANE_DOWNLOAD,
                                      engine->download_done, error));
done:
  return status;
}

/* Adds the reduced pieces to the sharded gradient, scaled to the mean over all
 * ranks. */
static fsdp_status accumulate_segments(fsdp_unit *unit, fsdp_lane lane,
                                       reduced_form form, fsdp_error *error) {
  const bool is_scaled =
      form == FORM_MEAN || (unit->settings.custom & FSDP_CUSTOM_REDUCED) != 0;
  const double scale = is_scaled ? 1.0 : fsdp_unit_priv_mean_scale(unit);
  const bool adds = fsdp_unit_priv_adds_to_grads(unit);
  fsdp_status status = FSDP_OK;
  int64_t num_items = 0;

  if (unit->options.offloads && adds) {
    FSDP_TRY(bring_grads(unit, lane, error));
  }
  for (int64_t i = 0; i < unit->num_segments; i++) {
    const fsdp_unit_segment *segment = &unit->segments[i];
    if (unit->grad_data[i] == NULL) continue;
    unit->items[num_items++] =
        (fsdp_pack_item){.to = grad_target(unit, i, form),
                         .to_dtype = segment->options.grad_dtype,
                         .from_dtype = segment->options.reduce_dtype,
                         .from = own_slot(unit, i),
                         .numel = segment->layout->shard_numel,
                         .add = adds,
                         .scales_first = true};
  }
  FSDP_TRY(
      fsdp_unit_priv_accumulate_items(unit, lane, num_items, scale, error));
done:
  return status;
}

/* Sums over the ranks. lane [in, out] where the result is ready. */
static fsdp_status reduce_over_replicas(fsdp_unit *unit, fsdp_lane *lane,
                                        fsdp_error *error) {
  fsdp_engine *engine = unit->engine;
  fsdp_status status = FSDP_OK;

  if (*lane == FSDP_LANE_REDUCE) {
    FSDP_TRY(fsdp_engine_priv_wait_lane(engine, FSDP_LANE_REPLICATE,
                                        FSDP_LANE_REDUCE, engine->reduce_done,
                                        error));
    *lane = FSDP_LANE_REPLICATE;
  }
  FSDP_TRY(all_reduce_segments(unit, error));
done:
  return status;
}

/* Adds the partial gradient, a sum, to the slots, which then hold all of it. */
static fsdp_status use_partial(fsdp_unit *unit, fsdp_lane lane,
                               reduced_form form, fsdp_error *error) {
  const double scale = form == FORM_SUM ? 1.0 : fsdp_unit_priv_mean_scale(unit);
  fsdp_status status = FSDP_OK;
  if (!fsdp_unit_priv_has_grads(unit, FSDP_GRADS_PARTIAL)) return FSDP_OK;
  FSDP_TRY(add_partial(unit, lane, true, scale, error));
  fsdp_unit_priv_set_grads(unit, FSDP_GRADS_PARTIAL, false);
done:
  return status;
}

/* Adds the reduced slots to the partial gradient; the block is then free. */
static fsdp_status end_partial(fsdp_unit *unit, fsdp_lane lane,
                               fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  FSDP_TRY(fsdp_unit_priv_take_partial(unit, error));
  FSDP_TRY(add_partial(unit, lane, false, 1.0, error));
  fsdp_unit_priv_set_grads(unit, FSDP_GRADS_PARTIAL, true);
  FSDP_TRY(fsdp_unit_priv_drop_grads(unit, lane, error));
done:
  return status;
}

/* After the collectives, whose result is on `lane`. */
static fsdp_status end_reduce(fsdp_unit *unit, fsdp_lane lane,
                              reduced_form form, fsdp_error *error) {
  fsdp_engine *engine = unit->engine;
  fsdp_lane last_use = lane; /* of the gradient block */
  fsdp_status status = FSDP_OK;

  if ((unit->settings.custom & FSDP_CUSTOM_REDUCED) != 0) {
    FSDP_TRY(show_reduced(unit, lane, error));
  }
  if (unit->options.finds_unused) {
    FSDP_TRY(fsdp_unit_priv_read_marks(
        unit, lane, own_slot(unit, unit->num_segments), error));
  }
  if (form != FORM_SHARD) {
    FSDP_TRY(accumulate_segments(unit, lane, form, error));
  }
  if (unit->options.offloads) {
    last_use = FSDP_LANE_DOWNLOAD;
    FSDP_TRY(fsdp_engine_priv_wait_lane(engine, FSDP_LANE_DOWNLOAD, lane,
                                        lane_event(engine, lane), error));
    FSDP_TRY(copy_grads(unit, false, form, error));
  }
  fsdp_unit_priv_set_grads(unit, FSDP_GRADS_SHARDED, true);
  FSDP_TRY(fsdp_unit_priv_drop_grads(unit, last_use, error));
  FSDP_TRY(fsdp_unit_priv_tell_followers(unit, last_use, error));
done:
  return status;
}

fsdp_status fsdp_unit_priv_end_reduce(fsdp_unit *unit, fsdp_error *error) {
  fsdp_status status = FSDP_OK;

  if (unit->step.reduces_parts) return fsdp_unit_priv_end_parts(unit, error);
  fsdp_engine_priv_end_scratch(unit->engine);
  if (!fsdp_unit_priv_has_grads(unit, FSDP_GRADS_UNSHARDED)) return FSDP_OK;
  if (unit->settings.sync == FSDP_SYNC_SHARD) {
    return end_partial(unit, FSDP_LANE_COMPUTE, error);
  }
  FSDP_TRY(use_partial(unit, FSDP_LANE_COMPUTE, FORM_SUM,
                       error)); /* unless it did */
  fsdp_unit_priv_free_partial(unit);
  FSDP_TRY(fsdp_unit_priv_make_grad_shards(unit, error));
  FSDP_TRY(end_reduce(unit, FSDP_LANE_COMPUTE, FORM_SUM, error));
done:
  return status;
}

fsdp_status fsdp_unit_priv_enqueue_reduce(fsdp_unit *unit, fsdp_error *error) {
  fsdp_engine *engine = unit->engine;
  const bool is_host = fsdp_engine_priv_is_host(engine);
  const bool is_reached = !unit->step.is_unreached;
  const bool has_hook = unit->settings.has_reduce_hook && is_reached;
  const bool has_shards =
      unit->options.shard_group.world_size > 1 && is_reached;
  const bool has_replicas = unit->options.replica_group.world_size > 1 &&
                            !unit->settings.has_reduce_hook;
  const bool is_partial = unit->settings.sync == FSDP_SYNC_SHARD;
  /* Without anything to reduce one lane is as good as another. */
  fsdp_lane lane = has_shards || has_hook || !has_replicas
                       ? FSDP_LANE_REDUCE
                       : FSDP_LANE_REPLICATE;
  /* An all_reduce may follow at once: the sum must be there when it starts. */
  const fsdp_lane partial_lane =
      has_shards || has_hook ? FSDP_LANE_REDUCE : FSDP_LANE_COMPUTE;
  const reduced_form form = choose_form(unit);
  fsdp_status status = FSDP_OK;

  if (unit->step.reduces_parts) return fsdp_unit_priv_start_parts(unit, error);
  FSDP_TRY(fsdp_unit_priv_cast_held(unit, error));
  if (is_partial && partial_lane == FSDP_LANE_COMPUTE) {
    return end_partial(unit, partial_lane, error);
  }
  if (!is_host) { /* there, when it has ended */
    FSDP_TRY(is_partial ? fsdp_unit_priv_take_partial(unit, error)
                        : fsdp_unit_priv_make_grad_shards(unit, error));
  }
  if (partial_lane == FSDP_LANE_COMPUTE) {
    FSDP_TRY(use_partial(unit, partial_lane, form, error));
  }
  FSDP_TRY(fsdp_engine_priv_wait_lane(engine, lane, FSDP_LANE_COMPUTE,
                                      engine->compute_done, error));
  if (has_hook) {
    FSDP_TRY(run_hook(unit, error));
  } else if (has_shards) {
    FSDP_TRY(reduce_scatter_segments(unit, form, error));
  }
  if (is_partial && !is_host) return end_partial(unit, partial_lane, error);
  if (!is_partial) {
    if (has_replicas || !is_host) { /* else when it has ended */
      FSDP_TRY(
          use_partial(unit, partial_lane, form, error)); /* unless it did */
    }
    if (has_replicas) FSDP_TRY(reduce_over_replicas(unit, &lane, error));
  }
  if (!is_host) FSDP_TRY(end_reduce(unit, lane, form, error));
done:
  return status;
}
