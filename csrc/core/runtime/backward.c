/* Backward: from the first output's gradient to the end of backward. */
#include <inttypes.h>

#include "runtime/engine_priv.h"

void fsdp_engine_open_backward(fsdp_engine *engine) {
  if (engine->in_backward) return;
  engine->in_backward = true;
  engine->shows_kept = false;
  engine->has_entered = false;
  engine->leaves_kept = false;
  fsdp_order_begin_backward(engine->order);
}

/* The unit's first event in this backward. */
static fsdp_status enter_backward(fsdp_unit *unit, fsdp_error *error) {
  fsdp_status status = FSDP_OK;

  fsdp_engine_open_backward(unit->engine);
  if (unit->step.entered_backward) return FSDP_OK;
  FSDP_TRY(fsdp_unit_priv_take_writes(unit, true, error));
  FSDP_TRY(fsdp_unit_priv_take_user_grads(unit, error));
  unit->step.entered_backward = true;
  unit->step.reduces_parts = fsdp_unit_priv_can_reduce_parts(unit);
done:
  return status;
}

fsdp_status fsdp_unit_enter_backward(fsdp_unit *unit, fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  FSDP_LOCAL_ERROR(local);
  FSDP_TRY(fsdp_unit_priv_check(unit, &local));
  FSDP_TRY(enter_backward(unit, &local));
done:
  if (status != FSDP_OK) fsdp_unit_priv_fail(unit, &local, error);
  return status;
}

/* Prefetches the unit whose backward comes next. */
static fsdp_status prefetch_backward(fsdp_engine *engine, fsdp_error *error) {
  /* Walk past units that need nothing: kept, or reduced already (those must
   * not come back before the optimizer's step). One in flight ends the walk. */
  for (int64_t distance = 1;; distance++) {
    const int64_t index = fsdp_order_next_backward(engine->order, distance);
    if (index < 0) return FSDP_OK;
    const fsdp_unit *unit = engine->units[index];
    if (fsdp_unit_state_is_at_rest(unit->state) &&
        fsdp_unit_priv_is_needed_in_backward(unit)) {
      return fsdp_engine_priv_prefetch(engine, index, error);
    }
    if (fsdp_unit_state_is_in_flight(unit->state)) return FSDP_OK;
  }
}

/* Note [Least memory in backward]
 * A gradient block is taken when all gradients of the unit are there, and takes
 * the place of its parameters; until then autograd's gradients wait. On a host
 * a prefetched block, or a gradient block that is being reduced, is memory that
 * activations could have, too. There, a unit prefetches the next one when its
 * own gradients are reduced. So backward holds the outermost unit and
 * either a unit's parameters and the gradients that it has, or its gradients
 * and their block. The root, if its backward comes first, prefetches early: the
 * unit that runs next.
 * A unit that is read in place has no block that its gradients could follow
 * into. If its reductions need one (Note [Gradients in parts]), they go into it
 * one by one, instead of waiting beside it, but in the first unit, where
 * activations are largest. */
static bool prefetches_late(const fsdp_unit *unit) {
  const fsdp_engine *engine = unit->engine;
  const bool is_ahead = unit->main == engine->root && !engine->has_entered;
  return fsdp_engine_priv_is_host(engine) && !is_ahead;
}

static bool packs_early(const fsdp_unit *unit) {
  return unit->is_in_place && fsdp_engine_priv_is_host(unit->engine) &&
         unit->engine->num_issued_reduces > 0 &&
         !fsdp_unit_priv_leaves_grads(unit);
}

/* What the unit holds is of use in any case. */
static fsdp_status begin_unshard(fsdp_unit *unit, fsdp_error *error) {
  const bool holds_none = fsdp_unit_state_is_at_rest(unit->state) ||
                          unit->state == FSDP_UNIT_REDUCING;
  return holds_none && !unit->settings.unshards_in_backward
             ? fsdp_unit_priv_show_shapes(unit, error)
             : fsdp_unit_priv_unshard(unit, error);
}

/* Whether all gradients of the unit have come, and only inputs have not. */
static bool has_settled(const fsdp_unit *unit) {
  return unit->step.expected_grads == 0 && unit->step.expected_inputs > 0;
}

fsdp_status fsdp_unit_pre_backward(fsdp_unit *unit, fsdp_error *error) {
  fsdp_engine *engine = unit->engine;
  fsdp_status status = FSDP_OK;
  FSDP_LOCAL_ERROR(local);

  if (engine == NULL || unit->is_summoned) {
    return FSDP_FAIL_WITH(
        engine == NULL ? FSDP_REMEDY_NONE : FSDP_REMEDY_DISMISS, error,
        FSDP_INVALID_STATE, "backward reached unit '%s' %s", unit->name,
        engine == NULL ? "after its engine was destroyed"
                       : "while its parameters are summoned");
  }
  FSDP_TRY(fsdp_unit_priv_check(unit, &local));
  const bool is_first = !unit->step.entered_backward;
  FSDP_TRY(enter_backward(unit, &local));
  if (unit->main != engine->root) engine->has_entered = true;
  if (!is_first && unit->state == FSDP_UNIT_UNSHARDED) return FSDP_OK;
  /* Nothing uses its parameters any more. A rank that uses other ones has not
   * resharded it yet, and would not gather it with this one. */
  if (has_settled(unit)) return FSDP_OK;

  fsdp_order_pre_backward(engine->order, unit->index);
  FSDP_TRY(begin_unshard(unit, &local));
  if (fsdp_unit_priv_has_prefetches(unit, FSDP_PASS_BACKWARD)) {
    FSDP_TRY(fsdp_unit_priv_prefetch_listed(unit, FSDP_PASS_BACKWARD, &local));
  } else if (unit->options.backward_prefetch == FSDP_PREFETCH_PRE &&
             !prefetches_late(unit)) {
    FSDP_TRY(prefetch_backward(engine, &local));
  }
  FSDP_TRY(fsdp_unit_priv_wait_unshard(unit, &local));
done:
  if (status != FSDP_OK) {
    /* Also if only the prefetch failed: this backward cannot go on. */
    if (unit->state != FSDP_UNIT_SHARDED)
      fsdp_unit_priv_fail(unit, &local, NULL);
    if (error != NULL) *error = local;
  }
  return status;
}

void fsdp_unit_expect_grads(fsdp_unit *unit, int64_t num_grads,
                            int64_t num_inputs) {
  unit->step.expected_grads += num_grads;
  unit->step.expected_inputs += num_inputs;
}

/* Reshards, unless the unit keeps its block between micro-batches, or for the
 * rest of a forward that ran this backward (torch.autograd.grad()). */
static fsdp_status reshard_after_backward(fsdp_unit *unit, fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  if (unit->num_forwards > 0) return FSDP_OK;
  FSDP_TRY(fsdp_unit_priv_hide_shapes(unit, error));
  if (unit->settings.sync == FSDP_SYNC_NONE &&
      !unit->settings.reshard_after_backward_without_sync) {
    return FSDP_OK;
  }
  FSDP_TRY(fsdp_unit_priv_reshard(unit, error));
done:
  return status;
}

/* What this backward does with the unit's gradients. */
static bool is_to_reduce(const fsdp_unit *unit) {
  return unit->settings.sync != FSDP_SYNC_NONE && !unit->engine->leaves_kept &&
         fsdp_unit_priv_has_unreduced(unit);
}

/* All gradients of the unit have come, or no more will: packs, where they must
 * be, and reshards. */
static fsdp_status settle_grads(fsdp_unit *unit, fsdp_error *error) {
  fsdp_status status = FSDP_OK;

  FSDP_TRY(reshard_after_backward(unit, error)); /* first the free memory */
  if (!is_to_reduce(unit)) {
    FSDP_TRY(fsdp_unit_priv_pack_grads(unit, error));
  } else if (!fsdp_unit_priv_leaves_grads(unit)) {
    FSDP_TRY(fsdp_unit_priv_fill_grads(unit, error));
  }
done:
  return status;
}

/* Backward has left the unit, on all ranks at this place. */
static fsdp_status complete_grads(fsdp_unit *unit, fsdp_error *error) {
  const bool owes_zeros =
      !unit->engine->leaves_kept && fsdp_unit_priv_owes_zeros(unit);
  const bool reduces = is_to_reduce(unit) || owes_zeros;
  fsdp_status status = FSDP_OK;

  FSDP_TRY(settle_grads(unit, error));
  if (owes_zeros) FSDP_TRY(fsdp_unit_priv_fill_grads(unit, error));
  if (reduces) FSDP_TRY(fsdp_unit_priv_submit_reduce(unit, error));
done:
  return status;
}

/* A gradient of the unit, or of its inputs, has come. */
static fsdp_status go_on(fsdp_unit *unit, fsdp_error *error) {
  const fsdp_prefetch prefetch = unit->options.backward_prefetch;
  fsdp_status status = FSDP_OK;
  if (unit->step.expected_grads > 0) return FSDP_OK;
  if (has_settled(unit)) {
    return unit->options.is_apart ? reshard_after_backward(unit, error)
                                  : settle_grads(unit, error);
  }
  const bool is_late = prefetch == FSDP_PREFETCH_PRE && prefetches_late(unit);
  FSDP_TRY(complete_grads(unit, error));
  if (fsdp_unit_priv_has_prefetches(unit, FSDP_PASS_BACKWARD)) return FSDP_OK;
  if (prefetch == FSDP_PREFETCH_POST || is_late) {
    FSDP_TRY(prefetch_backward(unit->engine, error));
  }
done:
  return status;
}

/* Other ranks do not reduce a segment that is frozen here. */
static fsdp_status check_is_trainable(const fsdp_unit *unit, int64_t param,
                                      fsdp_error *error) {
  const int64_t segment =
      fsdp_flat_layout_slot(unit->options.layout, param)->segment;
  if (unit->segments[segment].is_trainable) return FSDP_OK;
  return FSDP_FAIL_WITH(
      FSDP_REMEDY_TRAIN_SOONER, error, FSDP_INVALID_STATE,
      "unit '%s': parameter %" PRId64
      " got a gradient, but it and all parameters of its kind "
      "were frozen in the unit's last forward",
      unit->name, param);
}

fsdp_status fsdp_unit_grad_ready(fsdp_unit *unit, const fsdp_grad *grad,
                                 fsdp_error *error) {
  fsdp_engine *engine = unit->engine;
  fsdp_status status = FSDP_OK;
  FSDP_LOCAL_ERROR(local);
  bool is_taken = false;

  FSDP_TRY(fsdp_unit_priv_check(unit, &local));
  FSDP_TRY(check_is_trainable(unit, grad->param, &local));
  FSDP_TRY(enter_backward(unit, &local));
  is_taken = true;
  if (packs_early(unit)) FSDP_TRY(fsdp_unit_priv_open_grads(unit, &local));
  FSDP_TRY(fsdp_unit_priv_add_grad(unit, grad, &local));
  if (grad->is_expected && unit->step.expected_grads > 0) {
    unit->step.expected_grads--;
    FSDP_TRY(go_on(unit, &local));
  }
  if (unit->pending_nbytes >= FSDP_PACK_THRESHOLD_NBYTES &&
      fsdp_unit_priv_has_grads(unit, FSDP_GRADS_UNSHARDED)) {
    FSDP_TRY(fsdp_unit_priv_pack_grads(unit, &local));
  }
done:
  if (status != FSDP_OK) {
    if (!is_taken)
      engine->views.grad_release(engine->views.context, grad->token);
    fsdp_unit_priv_fail(unit, &local, error);
  }
  return status;
}

fsdp_status fsdp_unit_inputs_ready(fsdp_unit *unit, fsdp_error *error) {
  fsdp_unit_step *step = &unit->step;
  fsdp_status status = FSDP_OK;
  FSDP_LOCAL_ERROR(local);

  if (fsdp_unit_pending_grads(unit) == 0) return FSDP_OK;
  FSDP_TRY(fsdp_unit_priv_check(unit, &local));
  if (step->expected_inputs > 0) {
    step->expected_inputs--;
  } else { /* they count as gradients */
    step->expected_grads--;
  }
  FSDP_TRY(go_on(unit, &local));
done:
  if (status != FSDP_OK) fsdp_unit_priv_fail(unit, &local, error);
  return status;
}

/* Whether it takes part without a gradient, at the user's request. */
static bool fills_unused(const fsdp_unit *unit) {
  return unit->settings.fills_unused && unit->step.ran_forward &&
         unit->grad_nbytes > 0 && unit->settings.sync == FSDP_SYNC_REDUCE &&
         !unit->step.was_reduced;
}

/* A unit that this backward does not reach holds what earlier ones summed.
 * Where parameters may be unused, all ranks show its gradients, and the marks
 * of the ranks that used them travel with the zeros. */
static fsdp_status complete_partial(fsdp_unit *unit, fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  if (!fsdp_unit_priv_has_grads(unit, FSDP_GRADS_PARTIAL)) return FSDP_OK;
  FSDP_TRY(fsdp_unit_priv_open_grads(unit, error));
  if (unit->options.finds_unused) {
    FSDP_TRY(complete_grads(unit, error));
  } else {
    unit->step.reduces_parts = false;
    FSDP_TRY(settle_grads(unit, error));
    FSDP_TRY(fsdp_unit_priv_reduce_partial(unit, error));
  }
done:
  return status;
}

/* Completes the units whose expected gradients did not all come: parameters
 * outside this graph, or gradients kept by an earlier no_sync. Last units of
 * the module tree first, as backward goes. */
static fsdp_status complete_leftovers(fsdp_engine *engine, fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  for (size_t i = engine->num_units; i-- > 0;) {
    fsdp_unit *unit = engine->units[i];
    if (unit->state == FSDP_UNIT_FAILED) {
      FSDP_TRY(fsdp_unit_priv_check(unit, error));
    }
    if (engine->leaves_kept) continue;
    const bool is_partial =
        fsdp_unit_priv_has_grads(unit, FSDP_GRADS_PARTIAL) &&
        unit->settings.sync == FSDP_SYNC_REDUCE && !unit->step.was_reduced;
    const bool is_filled =
        fills_unused(unit) || fsdp_unit_priv_owes_zeros(unit);
    if (unit->step.is_reduce_ready) continue;
    if (!fsdp_unit_priv_has_unreduced(unit) && !is_partial && !is_filled) {
      continue;
    }
    if (unit->settings.sync != FSDP_SYNC_REDUCE &&
        !unit->step.entered_backward) {
      continue;
    }
    /* Kept by an earlier no_sync; the user may have cleared them since. */
    FSDP_TRY(enter_backward(unit, error));
    if (!is_filled && !fsdp_unit_priv_has_unreduced(unit)) {
      FSDP_TRY(complete_partial(unit, error));
      continue;
    }
    if (is_filled || fsdp_unit_priv_has_grads(unit, FSDP_GRADS_PARTIAL)) {
      FSDP_TRY(fsdp_unit_priv_open_grads(unit, error));
    }
    FSDP_TRY(complete_grads(unit, error));
  }
done:
  return status;
}

/* Brings one unit to rest and lets the user see its gradients. */
static fsdp_status finish_unit(fsdp_unit *unit, fsdp_error *error) {
  fsdp_status status = FSDP_OK;

  /* A prefetch in flight is always dropped: it may hold old weights. */
  if (fsdp_unit_state_is_in_flight(unit->state)) {
    FSDP_TRY(fsdp_unit_priv_reshard(unit, error));
  }
  if (unit->state == FSDP_UNIT_PARTED) {
    FSDP_TRY(fsdp_unit_priv_reshard(unit, error));
  }
  FSDP_TRY(reshard_after_backward(unit, error));
  if (unit->num_forwards == 0) { /* else the rest of one reads what it shows */
    if (unit->options.stays_shown) {
      fsdp_unit_priv_pin(unit); /* if its block is kept, the user sees it */
    } else {
      FSDP_TRY(fsdp_unit_priv_hide(unit, error));
    }
  }
  if (unit->step.entered_backward || unit->state == FSDP_UNIT_REDUCING) {
    if (fsdp_unit_priv_has_grads(unit, FSDP_GRADS_UNSHARDED)) {
      FSDP_TRY(fsdp_unit_priv_fill_grads(unit, error));
    }
    FSDP_TRY(fsdp_unit_priv_show_grads(unit, error));
  }
  if (!fsdp_unit_priv_has_grads(unit, FSDP_GRADS_PARTIAL) &&
      !unit->engine->has_open_reduces) {
    fsdp_unit_priv_free_partial(unit); /* they are in the sharded gradient */
  }
  FSDP_TRY(fsdp_unit_priv_advance(unit, FSDP_EVENT_FINISH, error));
  unit->is_for_inference = false;
  unit->step = (fsdp_unit_step){.ran_forward = unit->num_forwards > 0};
done:
  return status;
}

/* After a backward that did not end: fails all units that took part in it and
 * are not at rest. */
static void fail_open_units(fsdp_engine *engine, const fsdp_error *error) {
  for (size_t i = 0; i < engine->num_units; i++) {
    fsdp_unit *unit = engine->units[i];
    if (unit->step.entered_backward || unit->state != FSDP_UNIT_SHARDED) {
      fsdp_unit_priv_fail(unit, error, NULL);
    }
  }
}

fsdp_status fsdp_engine_finish_backward(fsdp_engine *engine,
                                        fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  FSDP_LOCAL_ERROR(local);

  if (!engine->in_backward) return FSDP_OK;
  FSDP_TRY(complete_leftovers(engine, &local));
  FSDP_TRY(fsdp_engine_priv_end_phase(engine, &local));
  FSDP_TRY(fsdp_engine_priv_flush_reduces(engine, &local));
  FSDP_TRY(fsdp_engine_priv_finish_reduces(engine, &local));
  /* The user reads gradients and writes shards on the host now. */
  FSDP_TRY(fsdp_engine_join_host(engine, &local));
  for (size_t i = 0; i < engine->num_units; i++) {
    FSDP_TRY(fsdp_unit_await_unused(engine->units[i], &local));
    FSDP_TRY(finish_unit(engine->units[i], &local));
  }
  engine->in_backward = false;
  engine->ran_forward = engine->depth > 0;
  FSDP_TRY(fsdp_engine_priv_await_readers(engine, &local));
  if (!engine->has_open_reduces || fsdp_engine_priv_is_host(engine)) {
    FSDP_TRY(fsdp_arena_settle(engine->arena, &local));
  }
done:
  if (status != FSDP_OK) {
    if (engine->in_backward) fail_open_units(engine, &local);
    if (error != NULL) *error = local;
  }
  return status;
}

void fsdp_engine_leave_kept(fsdp_engine *engine) {
  engine->leaves_kept = true;
}

fsdp_status fsdp_engine_reduce_kept(fsdp_engine *engine, fsdp_error *error) {
  if (engine->in_backward || engine->depth > 0) {
    return FSDP_FAIL(error, FSDP_INVALID_STATE,
                     "kept gradients cannot be reduced inside a %s",
                     engine->in_backward ? "backward" : "forward");
  }
  fsdp_engine_open_backward(engine);
  return fsdp_engine_finish_backward(engine, error);
}

bool fsdp_engine_in_backward(const fsdp_engine *engine) {
  return engine->in_backward;
}
