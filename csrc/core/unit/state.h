/*
 * A unit's one lifecycle variable, and the table of its transitions.
 *
 *   SHARDED     only the shard is held; parameters are views of it
 *   UNSHARDING  a block is held and an all-gather into it is in flight, or was
 *               and the parameters are hidden (kept between micro-batches)
 *   UNSHARDED   parameters are views of the block
 *   REDUCING    the block is given back and this backward's gradients are on
 *               the reduce lane; weights are about to be stepped, so nothing
 *               may prefetch the unit before the end of backward
 *   FAILED      a sequence failed half-way; the first error is kept
 */
#ifndef FSDP_UNIT_STATE_H
#define FSDP_UNIT_STATE_H

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum fsdp_unit_state {
  FSDP_UNIT_SHARDED = 0,
  FSDP_UNIT_UNSHARDING,
  FSDP_UNIT_UNSHARDED,
  FSDP_UNIT_REDUCING,
  FSDP_UNIT_FAILED,
  FSDP_NUM_UNIT_STATES
} fsdp_unit_state;

typedef enum fsdp_unit_event {
  FSDP_EVENT_UNSHARD = 0, /* an all-gather was issued */
  FSDP_EVENT_WAIT,        /* the compute lane waits for it; views are set */
  FSDP_EVENT_HIDE,        /* views are of the shard again; the block is kept */
  FSDP_EVENT_RESHARD,     /* the block was given back */
  FSDP_EVENT_REDUCE,      /* a reduction was issued, the block given back */
  FSDP_EVENT_FINISH,      /* end of backward */
  FSDP_EVENT_FAIL,
  FSDP_EVENT_RESET,
  FSDP_NUM_UNIT_EVENTS
} fsdp_unit_event;

/* "SHARDED" for FSDP_UNIT_SHARDED. Cannot fail. */
const char *fsdp_unit_state_name(fsdp_unit_state state);
const char *fsdp_unit_event_name(fsdp_unit_event event);

/*
 * Moves `*state` along the table; untouched on failure.
 *
 *   event    from -> to
 *   UNSHARD  SHARDED | REDUCING -> UNSHARDING
 *   WAIT     UNSHARDING -> UNSHARDED
 *   HIDE     UNSHARDED -> UNSHARDING
 *   RESHARD  UNSHARDING | UNSHARDED -> SHARDED
 *   REDUCE   SHARDED | UNSHARDING | UNSHARDED | REDUCING -> REDUCING
 *   FINISH   REDUCING -> SHARDED; SHARDED, UNSHARDING, UNSHARDED stay
 *   FAIL     any -> FAILED
 *   RESET    any -> SHARDED
 *
 * FSDP_INVALID_STATE  no such transition; the message names state and event.
 */
FSDP_NODISCARD fsdp_status fsdp_unit_state_advance(fsdp_unit_state *state,
                                                   fsdp_unit_event event,
                                                   fsdp_error *error);

#ifdef __cplusplus
}
#endif
#endif /* FSDP_UNIT_STATE_H */
