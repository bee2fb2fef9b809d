/* Unsharding and showing parameters apart from the unit's own forward: at the
 * user's request, and before a backward. */
#include "runtime/engine_priv.h"

static fsdp_status check_on_demand(const fsdp_unit *unit, fsdp_error *error) {
  if (unit->engine == NULL || unit->is_summoned) {
    return FSDP_FAIL_WITH(
        unit->engine == NULL ? FSDP_REMEDY_NONE : FSDP_REMEDY_DISMISS, error,
        FSDP_INVALID_STATE, "unit '%s' cannot be unsharded or resharded %s",
        unit->name,
        unit->engine == NULL ? "before it was added to an engine"
                             : "while its parameters are summoned");
  }
  return fsdp_unit_priv_check(unit, error);
}

bool fsdp_unit_priv_is_stale(const fsdp_unit *unit) {
  const fsdp_view_ops *views = &unit->engine->views;
  return unit->may_be_stale ||
         views->params_changed(views->context, unit->options.owner);
}

bool fsdp_unit_priv_is_pinned(fsdp_unit *unit) {
  unit->is_pinned = unit->is_pinned && unit->state != FSDP_UNIT_SHARDED &&
                    !fsdp_unit_priv_is_stale(unit);
  return unit->is_pinned;
}

void fsdp_unit_priv_pin(fsdp_unit *unit) {
  const fsdp_view_ops *views = &unit->engine->views;
  if (unit->state != FSDP_UNIT_UNSHARDED || unit->is_pinned) return;
  views->mark_params(views->context, unit->options.owner);
  unit->is_pinned = true;
}

void fsdp_unit_priv_unpin(fsdp_unit *unit) {
  unit->is_pinned = false;
}

fsdp_status fsdp_unit_unshard(fsdp_unit *unit, fsdp_error *error) {
  fsdp_engine *engine = unit->engine;
  fsdp_status status = FSDP_OK;

  FSDP_TRY(check_on_demand(unit, error));
  if (engine->depth == 0 && !engine->in_backward) {
    /* What an earlier forward kept, or a request before a write. */
    if (!fsdp_unit_priv_is_pinned(unit)) {
      FSDP_TRY(fsdp_unit_priv_reshard(unit, error));
    }
    /* The optimizer wrote the shards on the compute lane. */
    FSDP_TRY(fsdp_engine_priv_wait_lane(engine, FSDP_LANE_UNSHARD,
                                        FSDP_LANE_COMPUTE, engine->compute_done,
                                        error));
  }
  FSDP_TRY(fsdp_unit_priv_unshard_on_demand(unit, error));
  engine->views.mark_params(engine->views.context, unit->options.owner);
  unit->is_pinned = true;
done:
  return status;
}

fsdp_status fsdp_unit_wait_unshard(fsdp_unit *unit, fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  FSDP_TRY(check_on_demand(unit, error));
  FSDP_TRY(fsdp_unit_priv_wait_unshard(unit, error));
done:
  return status;
}

fsdp_status fsdp_unit_reshard(fsdp_unit *unit, fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  FSDP_TRY(check_on_demand(unit, error));
  fsdp_unit_priv_unpin(unit);
  FSDP_TRY(fsdp_unit_priv_reshard(unit, error));
  if (unit->engine->depth == 0 && !unit->engine->in_backward) {
    fsdp_unit_priv_drop_cleared_grads(unit);
  }
done:
  return status;
}

bool fsdp_unit_is_requested(fsdp_unit *unit) {
  return unit->engine != NULL && fsdp_unit_priv_is_pinned(unit);
}

fsdp_status fsdp_engine_show_kept(fsdp_engine *engine, bool shows,
                                  fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  if (engine->depth > 0 || engine->in_backward) return FSDP_OK;
  engine->shows_kept = false;
  for (size_t i = 0; i < engine->num_units; i++) {
    fsdp_unit *unit = engine->units[i];
    if (!shows && unit->is_left_shown) {
      FSDP_TRY(fsdp_unit_priv_hide(unit, error));
    } else if (shows && unit->options.shows_kept &&
               unit->state == FSDP_UNIT_HIDDEN) {
      FSDP_TRY(fsdp_unit_priv_wait_unshard(unit, error));
      fsdp_unit_priv_leave_shown(unit);
    }
  }
done:
  return status;
}

bool fsdp_unit_is_left_shown(const fsdp_unit *unit) {
  return unit->is_left_shown;
}

bool fsdp_engine_shows_kept(const fsdp_engine *engine) {
  return engine->shows_kept && !engine->in_backward;
}

/* Whether it keeps parameters that are hidden, or are shown for a call of
 * autograd only: of the outermost module, or those that a forward without
 * gradients hid from an earlier one's backward. */
static bool is_kept_hidden(const fsdp_unit *unit) {
  return (unit->main == unit->engine->root || unit->step.is_awaited) &&
         !unit->is_left_shown && !unit->is_resident && !unit->is_pinned &&
         (unit->state == FSDP_UNIT_HIDDEN ||
          unit->state == FSDP_UNIT_UNSHARDED);
}

bool fsdp_engine_keeps_hidden(const fsdp_engine *engine) {
  if (engine->depth > 0 || engine->in_backward) return false;
  for (size_t i = 0; i < engine->num_units; i++) {
    if (is_kept_hidden(engine->units[i])) return true;
  }
  return false;
}

fsdp_status fsdp_engine_show_hidden(fsdp_engine *engine, bool shows,
                                    fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  if (!fsdp_engine_keeps_hidden(engine)) return FSDP_OK;
  for (size_t i = 0; i < engine->num_units; i++) {
    fsdp_unit *unit = engine->units[i];
    if (!is_kept_hidden(unit)) continue;
    FSDP_TRY(shows ? fsdp_unit_priv_wait_unshard(unit, error)
                   : fsdp_unit_priv_hide(unit, error));
  }
done:
  return status;
}
