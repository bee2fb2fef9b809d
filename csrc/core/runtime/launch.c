/*
 * Launches: the collectives of a unit's segments, as calls of its group's
 * transport between group_begin and group_end.
 */
#include <stdio.h>

#include "runtime/engine_priv.h"

fsdp_status fsdp_engine_priv_open_launch(fsdp_engine *engine, fsdp_lane lane,
                                         const fsdp_group *group,
                                         fsdp_priv_launch *launch,
                                         fsdp_error *error) {
  const fsdp_device_ops *ops = &engine->ops;
  const fsdp_op_log_entry *newest = fsdp_op_log_last(&engine->log);

  launch->group = group;
  launch->lane = lane;
  launch->ticket = 0;
  launch->call = (fsdp_call){
      .channel =
          lane == FSDP_LANE_UNSHARD ? FSDP_CHANNEL_GATHER : FSDP_CHANNEL_REDUCE,
      .stream = ops->stream == NULL ? NULL : ops->stream(ops->context, lane),
      .is_captured = engine->is_capturing,
  };
  if (group->transport->ops->reads_labels) {
    launch->call.label = launch->label;
    (void)snprintf(launch->label, sizeof launch->label, "%s of unit '%s'",
                   newest == NULL ? "collective" : newest->operation,
                   newest == NULL || newest->unit == NULL ? "-" : newest->unit);
  }
  return group->transport->ops->group_begin(group->transport, &launch->call,
                                            error);
}

fsdp_status fsdp_engine_priv_close_launch(fsdp_engine *engine,
                                          const fsdp_priv_launch *launch,
                                          fsdp_status status,
                                          fsdp_error *error) {
  const fsdp_device_ops *ops = &engine->ops;
  const fsdp_group *group = launch->group;
  fsdp_transport *transport = group->transport;

  if (status == FSDP_OK) {
    status = transport->ops->group_end(transport, &launch->call, error);
  }
  /* On a host after a failure too: the calls before it are still using their
   * memory. */
  const bool is_lane_work = status == FSDP_OK || transport->ops->is_host;
  if (launch->ticket != 0 && is_lane_work) {
    const bool is_first = status == FSDP_OK;
    const fsdp_status added =
        ops->add_call(ops->context, launch->lane, group, launch->call.channel,
                      launch->ticket, is_first ? error : NULL);
    if (is_first) status = added;
  }
  if (status == FSDP_BACKEND && ops->explain_failure != NULL) {
    FSDP_IGNORE(ops->explain_failure(ops->context, group, error));
  }
  return status;
}
