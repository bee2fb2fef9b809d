/* What every sequence uses: a unit's state, and failing. */
#include "runtime/engine_priv.h"

fsdp_status fsdp_unit_priv_advance(fsdp_unit *unit, fsdp_unit_event event,
                                   fsdp_error *error) {
  return fsdp_unit_state_advance(&unit->state, event, unit->name, error);
}

fsdp_status fsdp_unit_priv_check(const fsdp_unit *unit, fsdp_error *error) {
  if (unit->state != FSDP_UNIT_FAILED) return FSDP_OK;
  return FSDP_FAIL_WITH(FSDP_REMEDY_RESET, error, unit->first_error.status,
                        "unit '%s' failed earlier (%s)", unit->name,
                        unit->first_error.message);
}

void fsdp_unit_priv_fail(fsdp_unit *unit, const fsdp_error *cause,
                         fsdp_error *error) {
  if (error != NULL) *error = *cause;
  if (unit->state == FSDP_UNIT_FAILED) return; /* the first error stays */
  unit->first_error = *cause;
  /* FAIL is allowed from every state. */
  FSDP_IGNORE(fsdp_unit_priv_advance(unit, FSDP_EVENT_FAIL, NULL));
}
