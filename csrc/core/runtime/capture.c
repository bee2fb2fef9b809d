/*
 * Captures: what lets a device record a step into a graph, and replay it.
 *
 * Note [Captured steps]
 * A graph holds addresses and an order of work, no host. So
 * - no block is held where a capture begins or ends, so those of the step are
 *   allocated inside, and their memory is the graph's (Note [Blocks of a step]
 *   in arena.h);
 * - inside a capture no lane may wait for an event from outside it, nor later
 *   outside for one from inside. All lanes follow COMPUTE at its start and are
 *   followed by it at its end. No event outlives a step;
 * - a replay is work of COMPUTE, of which the engine knows nothing. It finds
 *   every unit at rest, as the capture did, and leaves it so, without
 *   gradients. What comes next waits for COMPUTE, as after an optimizer.
 */
#include "runtime/engine_priv.h"

static fsdp_status refuse(const fsdp_unit *unit, const char *why,
                          fsdp_remedy remedy, fsdp_error *error) {
  return FSDP_FAIL_WITH(remedy, error, FSDP_INVALID_STATE,
                        "unit '%s': a step cannot be captured or replayed: %s",
                        unit->name, why);
}

static bool can_capture(const fsdp_group *group) {
  const fsdp_transport *transport = group->transport;
  if (group->world_size < 2) return true;
  return transport != NULL && transport->ops->can_capture;
}

/* What runs Python, or frees memory in its own way, has never been captured. */
static bool has_foreign_parts(const fsdp_unit *unit) {
  if (unit->settings.custom != 0 || unit->settings.has_reduce_hook) return true;
  for (int64_t i = 0; i < unit->num_segments; i++) {
    if (unit->segments[i].options.is_extended) return true;
  }
  return false;
}

static fsdp_status check_unit(const fsdp_unit *unit, fsdp_error *error) {
  if (unit->options.offloads) {
    return refuse(unit, "its shards are in host memory", FSDP_REMEDY_NO_OFFLOAD,
                  error);
  }
  if (unit->settings.sync != FSDP_SYNC_REDUCE) {
    return refuse(unit, "it accumulates gradients", FSDP_REMEDY_SYNC, error);
  }
  if (has_foreign_parts(unit)) {
    return refuse(unit,
                  "it has communication hooks, custom collectives or "
                  "parameters with a gather of their own",
                  FSDP_REMEDY_NO_CAPTURE, error);
  }
  if (!can_capture(&unit->options.shard_group) ||
      !can_capture(&unit->options.replica_group) ||
      !can_capture(&unit->options.part_group)) {
    return refuse(unit, "its collectives do not go through NCCL from C",
                  FSDP_REMEDY_TRANSPORT, error);
  }
  return FSDP_OK;
}

/* Gives back what forwards kept; refuses what only the user can end. */
static fsdp_status bring_to_rest(fsdp_engine *engine, fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  if (engine->depth > 0 || engine->in_backward) {
    return FSDP_FAIL(error, FSDP_INVALID_STATE,
                     "a captured step begins and ends between steps, not "
                     "inside a %s",
                     engine->in_backward ? "backward" : "forward");
  }
  FSDP_TRY(fsdp_engine_join_reduces(engine, error));
  for (size_t i = 0; i < engine->num_units; i++) {
    fsdp_unit *unit = engine->units[i];
    FSDP_TRY(fsdp_unit_priv_check(unit, error));
    if (unit->is_summoned) {
      status = refuse(unit, "its parameters are summoned", FSDP_REMEDY_DISMISS,
                      error);
      goto done;
    }
    if (fsdp_unit_holds_grads(unit)) {
      status = refuse(unit, "it holds gradients that are not reduced",
                      FSDP_REMEDY_REDUCE, error);
      goto done;
    }
    if (fsdp_unit_priv_is_pinned(unit)) {
      status = refuse(unit, "it was unsharded on demand", FSDP_REMEDY_RESHARD,
                      error);
      goto done;
    }
    FSDP_TRY(fsdp_unit_priv_reshard(unit, error));
    fsdp_unit_priv_drop_cleared_grads(unit);
  }
done:
  return status;
}

fsdp_status fsdp_engine_begin_capture(fsdp_engine *engine, fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  if (fsdp_engine_priv_is_host(engine) || engine->num_units == 0) {
    return FSDP_FAIL(error, FSDP_INVALID_STATE,
                     "a step on the CPU cannot be captured in a graph: train "
                     "on a CUDA device");
  }
  if (engine->is_capturing) {
    return FSDP_FAIL(error, FSDP_INVALID_STATE,
                     "a step cannot be captured in a graph while another one "
                     "is");
  }
  if (engine->checks_order) {
    return FSDP_FAIL_WITH(FSDP_REMEDY_NO_ORDER_CHECK, error, FSDP_INVALID_STATE,
                          "a step cannot be captured in a graph while the "
                          "ranks compare what they do on the host");
  }
  if (engine->timeline != NULL) {
    return FSDP_FAIL_WITH(FSDP_REMEDY_NO_RECORDING, error, FSDP_INVALID_STATE,
                          "a step cannot be captured in a graph while it is "
                          "recorded");
  }
  for (size_t i = 0; i < engine->num_units; i++) {
    FSDP_TRY(check_unit(engine->units[i], error));
  }
  FSDP_TRY(bring_to_rest(engine, error));
  engine->is_capturing = true;
  engine->num_captured_units = engine->num_units;
done:
  return status;
}

void fsdp_engine_end_capture(fsdp_engine *engine) {
  engine->is_capturing = false;
}

bool fsdp_engine_is_capturing(const fsdp_engine *engine) {
  return engine->is_capturing;
}

fsdp_status fsdp_engine_fork_lanes(fsdp_engine *engine, fsdp_error *error) {
  const fsdp_device_ops *ops = &engine->ops;
  fsdp_status status = FSDP_OK;
  FSDP_TRY(ops->event_record(ops->context, engine->compute_done,
                             FSDP_LANE_COMPUTE, error));
  for (int lane = FSDP_LANE_UNSHARD; lane < FSDP_NUM_LANES; lane++) {
    FSDP_TRY(ops->event_wait(ops->context, (fsdp_lane)lane,
                             engine->compute_done, error));
  }
done:
  return status;
}

fsdp_status fsdp_engine_join_lanes(fsdp_engine *engine, fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  FSDP_TRY(bring_to_rest(engine, error));
  for (int lane = FSDP_LANE_UNSHARD; lane < FSDP_NUM_LANES; lane++) {
    FSDP_TRY(fsdp_engine_priv_wait_lane(engine, FSDP_LANE_COMPUTE,
                                        (fsdp_lane)lane, engine->compute_done,
                                        error));
  }
done:
  return status;
}

fsdp_status fsdp_engine_begin_replay(fsdp_engine *engine, fsdp_error *error) {
  if (engine->num_units != engine->num_captured_units) {
    return FSDP_FAIL(error, FSDP_INVALID_STATE,
                     "a step was captured with %zu units, of which %zu are "
                     "left: the model was wrapped or used in another root "
                     "since; capture it anew",
                     engine->num_captured_units, engine->num_units);
  }
  return bring_to_rest(engine, error);
}
