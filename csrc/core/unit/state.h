/*
 * The state of a unit: one variable, and the table of its transitions.
 *
 *                block  parameters are  meaning
 *   SHARDED      none   the shard       at rest
 *   PREFETCHED   held   the shard       an all-gather was issued ahead of use
 *   UNSHARDING   held   the shard       an all-gather was issued for use now
 *   UNSHARDED    held   the block       the module may run; or kept after
 *                                       forward, for backward
 *   HIDDEN       held   the shard       likewise kept
 *   KEPT         held   the shard       kept after a backward without sync, for
 *                                       the next micro-batch; or after a
 *                                       forward without gradients, for the next
 *   PARTED       none   the shard       a part of the block is kept for
 *                                       backward; see Note [Parts of a unit]
 *   REDUCING     none   the shard       this backward's gradients are on the
 *                                       reduce lane; the optimizer is about to
 *                                       step, so the unit is not prefetched
 *                                       before the end of backward
 *   FAILED       -      undefined       a sequence failed half-way
 *
 * A summon is not a state: it uses memory of its own, and a reduction may run
 * beside it.
 */
#ifndef FSDP_UNIT_STATE_H
#define FSDP_UNIT_STATE_H

#include <stdbool.h>

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum fsdp_unit_state {
  FSDP_UNIT_SHARDED = 0,
  FSDP_UNIT_PREFETCHED,
  FSDP_UNIT_UNSHARDING,
  FSDP_UNIT_UNSHARDED,
  FSDP_UNIT_HIDDEN,
  FSDP_UNIT_KEPT,
  FSDP_UNIT_PARTED,
  FSDP_UNIT_REDUCING,
  FSDP_UNIT_FAILED,
  FSDP_NUM_UNIT_STATES
} fsdp_unit_state;

typedef enum fsdp_unit_event {
  FSDP_EVENT_PREFETCH = 0, /* an all-gather was issued, ahead of use */
  FSDP_EVENT_UNSHARD,      /* an all-gather was issued, for use now */
  FSDP_EVENT_WAIT,         /* the compute lane waits for it; views are set */
  FSDP_EVENT_HIDE,         /* views are of the shard again; the block stays */
  FSDP_EVENT_RESHARD,      /* the block was given back */
  FSDP_EVENT_PART,         /* likewise, and a part of it was kept */
  FSDP_EVENT_REDUCE,       /* a reduction was issued */
  FSDP_EVENT_FINISH,       /* end of backward, or of such a forward */
  FSDP_EVENT_FAIL,
  FSDP_EVENT_RESET,
  FSDP_NUM_UNIT_EVENTS
} fsdp_unit_event;

/* "SHARDED" for FSDP_UNIT_SHARDED. Cannot fail. */
const char *fsdp_unit_state_name(fsdp_unit_state state);
const char *fsdp_unit_event_name(fsdp_unit_event event);

/* Whether a block is held that nobody has used since its all-gather was
 * issued. */
static inline bool fsdp_unit_state_is_in_flight(fsdp_unit_state state) {
  return state == FSDP_UNIT_PREFETCHED || state == FSDP_UNIT_UNSHARDING;
}

/* Whether a block is held that was used, while the user sees the shard. */
static inline bool fsdp_unit_state_is_hidden(fsdp_unit_state state) {
  return state == FSDP_UNIT_HIDDEN || state == FSDP_UNIT_KEPT;
}

/* Whether an all-gather is needed before use. */
static inline bool fsdp_unit_state_is_at_rest(fsdp_unit_state state) {
  return state == FSDP_UNIT_SHARDED || state == FSDP_UNIT_PARTED;
}

/*
 * Moves `*state` along the table; untouched on failure. `name` is the unit's.
 *
 *   event     from -> to
 *   PREFETCH  SHARDED | PARTED -> PREFETCHED
 *   UNSHARD   SHARDED | PARTED | REDUCING -> UNSHARDING
 *   WAIT      PREFETCHED | UNSHARDING | HIDDEN | KEPT -> UNSHARDED
 *   HIDE      UNSHARDED -> HIDDEN
 *   RESHARD   PREFETCHED | UNSHARDING | UNSHARDED | HIDDEN | KEPT | PARTED
 *             -> SHARDED
 *   PART      UNSHARDED -> PARTED
 *   REDUCE    SHARDED | REDUCING -> REDUCING; UNSHARDED stays: a nested
 *             backward still uses the block
 *   FINISH    REDUCING -> SHARDED; HIDDEN -> KEPT;
 *             SHARDED, UNSHARDED, KEPT stay
 *   FAIL      any -> FAILED
 *   RESET     any -> SHARDED
 *
 * FSDP_INVALID_STATE  no such transition; the message names unit, event and
 *                     state.
 */
FSDP_NODISCARD fsdp_status fsdp_unit_state_advance(fsdp_unit_state *state,
                                                   fsdp_unit_event event,
                                                   const char *name,
                                                   fsdp_error *error);

#ifdef __cplusplus
}
#endif
#endif /* FSDP_UNIT_STATE_H */
