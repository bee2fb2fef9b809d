/*
 * Summon: a unit's whole parameters in master dtype, between steps, in memory
 * of their own.
 */
#include "runtime/engine_priv.h"

static char *own_slot(const fsdp_unit *unit, int64_t index) {
  const fsdp_segment *segment = unit->segments[index].layout;
  return (char *)unit->full_data[index] + unit->options.shard_group.rank *
                                              segment->shard_numel *
                                              segment->dtype.itemsize;
}

static fsdp_status gather_full(fsdp_unit *unit, fsdp_error *error) {
  fsdp_engine *engine = unit->engine;
  const fsdp_device_ops *ops = &engine->ops;
  const fsdp_group *group = &unit->options.shard_group;
  fsdp_status status = FSDP_OK;

  if (group->world_size == 1) {
    for (int64_t i = 0; i < unit->num_segments; i++) {
      const fsdp_segment *segment = unit->segments[i].layout;
      FSDP_TRY(ops->cast(ops->context, FSDP_LANE_UNSHARD, unit->full_data[i],
                         segment->dtype, unit->segments[i].options.shard,
                         segment->dtype, segment->shard_numel, error));
    }
    return FSDP_OK;
  }
  fsdp_trace_add(&engine->trace, "all_gather (summon)", unit->name);
  FSDP_TRY(ops->group_begin(ops->context, FSDP_LANE_UNSHARD, group, error));
  for (int64_t i = 0; i < unit->num_segments; i++) {
    const fsdp_segment *segment = unit->segments[i].layout;
    FSDP_TRY(ops->all_gather(ops->context, FSDP_LANE_UNSHARD, group,
                             unit->full_data[i],
                             unit->segments[i].options.shard,
                             segment->shard_numel, segment->dtype, error));
  }
  FSDP_TRY(ops->group_end(ops->context, FSDP_LANE_UNSHARD, group, error));
  engine->num_all_gathers++;
done:
  return status;
}

/* Frees the block after the work now on `lane`. */
static void free_full_block(fsdp_unit *unit, fsdp_lane lane) {
  fsdp_engine *engine = unit->engine;
  const fsdp_device_ops *ops = &engine->ops;
  if (unit->full_block == NULL) return;
  /* If the record fails, the older event is what is left to wait for. */
  (void)!ops->event_record(ops->context, unit->unsharded, lane, NULL);
  ops->block_free(ops->context, unit->full_block, unit->full_nbytes,
                  unit->unsharded);
  unit->full_block = NULL;
}

fsdp_status fsdp_unit_summon(fsdp_unit *unit, fsdp_error *error) {
  fsdp_engine *engine = unit->engine;
  const fsdp_device_ops *ops = engine == NULL ? NULL : &engine->ops;
  fsdp_status status = FSDP_OK;
  fsdp_error local = {0};
  bool is_enqueued = false;

  if (engine == NULL || unit->is_summoned || engine->depth > 0 ||
      engine->in_backward) {
    return FSDP_FAIL(
        error, FSDP_INVALID_STATE,
        "the parameters of unit '%s' cannot be summoned %s", unit->name,
        engine == NULL        ? "before it was added to an engine"
        : unit->is_summoned   ? "twice: summon_full_params is open for it"
        : engine->in_backward ? "inside backward"
                              : "inside forward");
  }
  FSDP_TRY(fsdp_unit_priv_reshard(unit, &local)); /* kept for a backward */
  if (unit->num_segments > 0 && !unit->is_resident) {
    FSDP_TRY(ops->take_params(ops->context, unit->options.owner,
                              FSDP_VIEW_SHARDED, NULL, &local));
    FSDP_TRY(ops->block_alloc(ops->context, unit->full_nbytes,
                              &unit->full_block, &local));
    for (int64_t i = 0; i < unit->num_segments; i++) {
      unit->full_data[i] =
          (char *)unit->full_block + unit->segments[i].full_offset;
    }
    FSDP_TRY(fsdp_engine_priv_wait_lane(engine, FSDP_LANE_UNSHARD,
                                        FSDP_LANE_COMPUTE, engine->compute_done,
                                        &local));
    is_enqueued = true;
    FSDP_TRY(gather_full(unit, &local));
    FSDP_TRY(fsdp_engine_priv_wait_lane(
        engine, FSDP_LANE_COMPUTE, FSDP_LANE_UNSHARD, unit->unsharded, &local));
    FSDP_TRY(ops->show_params(ops->context, unit->options.owner, FSDP_VIEW_FULL,
                              unit->full_data, &local));
  }
  unit->is_summoned = true;
done:
  if (status != FSDP_OK) {
    /* The gather may still be writing; nothing on COMPUTE has read it. */
    free_full_block(unit, FSDP_LANE_UNSHARD);
    if (is_enqueued) fsdp_unit_priv_fail(unit, &local);
    if (error != NULL) *error = local;
  }
  return status;
}

fsdp_status fsdp_unit_dismiss(fsdp_unit *unit, bool writeback,
                              fsdp_error *error) {
  fsdp_status status = FSDP_OK;

  if (!unit->is_summoned) {
    return FSDP_FAIL(error, FSDP_INVALID_STATE,
                     "the parameters of unit '%s' are not summoned",
                     unit->name);
  }
  if (unit->full_block != NULL) {
    const fsdp_device_ops *ops = &unit->engine->ops;
    if (writeback) {
      FSDP_TRY(ops->take_params(ops->context, unit->options.owner,
                                FSDP_VIEW_FULL, unit->full_data, error));
    }
    for (int64_t i = 0; writeback && i < unit->num_segments; i++) {
      const fsdp_segment *segment = unit->segments[i].layout;
      FSDP_TRY(ops->cast(ops->context, FSDP_LANE_COMPUTE,
                         unit->segments[i].options.shard, segment->dtype,
                         own_slot(unit, i), segment->dtype,
                         segment->shard_numel, error));
    }
    FSDP_TRY(ops->show_params(ops->context, unit->options.owner,
                              FSDP_VIEW_SHARDED, NULL, error));
  } else if (writeback && unit->num_segments > 0) {
    const fsdp_device_ops *ops = &unit->engine->ops;
    FSDP_TRY(ops->take_params(ops->context, unit->options.owner,
                              FSDP_VIEW_SHARDED, NULL, error));
  }
  free_full_block(unit, FSDP_LANE_COMPUTE);
  unit->is_summoned = false;
done:
  return status;
}

void fsdp_unit_priv_end_summon(fsdp_unit *unit) {
  if (!unit->is_summoned) return;
  if (fsdp_unit_dismiss(unit, false, NULL) == FSDP_OK) return;
  free_full_block(unit, FSDP_LANE_COMPUTE);
  unit->is_summoned = false;
}

bool fsdp_unit_is_summoned(const fsdp_unit *unit) {
  return unit->is_summoned;
}
