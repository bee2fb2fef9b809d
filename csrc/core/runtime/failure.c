/* What every sequence uses: a unit's state, failing, waiting between lanes. */
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

fsdp_status fsdp_engine_priv_wait_lane(fsdp_engine *engine, fsdp_lane waiter,
                                       fsdp_lane recorder, fsdp_event *event,
                                       fsdp_error *error) {
  const fsdp_device_ops *ops = &engine->ops;
  fsdp_status status = FSDP_OK;
  FSDP_TRY(ops->event_record(ops->context, event, recorder, error));
  FSDP_TRY(ops->event_wait(ops->context, waiter, event, error));
done:
  return status;
}

fsdp_status fsdp_engine_join_host(fsdp_engine *engine, fsdp_error *error) {
  const fsdp_device_ops *ops = &engine->ops;
  fsdp_status status = FSDP_OK;
  if (!engine->offloads) return FSDP_OK;
  FSDP_TRY(fsdp_engine_priv_wait_lane(engine, FSDP_LANE_DOWNLOAD,
                                      FSDP_LANE_UPLOAD, engine->upload_done,
                                      error));
  FSDP_TRY(ops->event_record(ops->context, engine->download_done,
                             FSDP_LANE_DOWNLOAD, error));
  FSDP_TRY(ops->event_synchronize(ops->context, engine->download_done, error));
done:
  return status;
}
