/*
 * Units apart: large parameters of a module beside its others.
 *
 * Note [Units apart]
 * The gradients of one module's own parameters may come a whole backward apart:
 * that of a head first, that of an embedding last. In one unit they would also
 * share one block, in reduce dtype, the largest of the model. So large
 * parameters of a module that has other units inside are units of their own,
 * apart from the module's, their main one. They run with it: their forward and
 * backward begin and end with the module's. Each gives its parameters back when
 * its gradients are there; these wait as autograd made them until backward has
 * left the module. Then they are packed and reduced one unit after the other,
 * through one block as large as a parameter. If one of them is reduced, all
 * are, on every rank, with zeros where this rank has no gradient.
 *
 * They are not reduced when their gradients come: all ranks must issue gathers
 * and reductions in one order, and where a parameter's gradient comes may
 * differ between ranks (Note [Where a unit is reduced]).
 */
#include "runtime/engine_priv.h"

/* Whether the unit is reduced in this backward, or has what is to be. */
static bool is_reduced(const fsdp_unit *unit) {
  return unit->step.is_reduce_ready || unit->step.was_reduced ||
         fsdp_unit_priv_has_unreduced(unit);
}

bool fsdp_unit_priv_owes_zeros(const fsdp_unit *unit) {
  const fsdp_engine *engine = unit->engine;
  if (unit->settings.sync == FSDP_SYNC_NONE || is_reduced(unit) ||
      !fsdp_unit_priv_is_trained(unit)) {
    return false;
  }
  for (size_t i = 0; i < engine->num_units; i++) {
    const fsdp_unit *other = engine->units[i];
    if (other->main == unit->main && is_reduced(other)) return true;
  }
  return false;
}
