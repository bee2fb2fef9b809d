/*
 * Unit state: the transition table that unit/state.h draws, as data.
 */
#include "unit/state.h"

#include <assert.h>

static const char *const state_names[FSDP_NUM_UNIT_STATES] = {
    [FSDP_UNIT_SHARDED] = "SHARDED",     [FSDP_UNIT_UNSHARDING] = "UNSHARDING",
    [FSDP_UNIT_UNSHARDED] = "UNSHARDED", [FSDP_UNIT_REDUCING] = "REDUCING",
    [FSDP_UNIT_FAILED] = "FAILED",
};

static const char *const event_names[FSDP_NUM_UNIT_EVENTS] = {
    [FSDP_EVENT_UNSHARD] = "UNSHARD", [FSDP_EVENT_WAIT] = "WAIT",
    [FSDP_EVENT_HIDE] = "HIDE",       [FSDP_EVENT_RESHARD] = "RESHARD",
    [FSDP_EVENT_REDUCE] = "REDUCE",   [FSDP_EVENT_FINISH] = "FINISH",
    [FSDP_EVENT_FAIL] = "FAIL",       [FSDP_EVENT_RESET] = "RESET",
};

/* TO(X) is the state X plus one, so that an absent cell, 0, means "none". */
#define TO(state) (FSDP_UNIT_##state + 1)
static const unsigned char
    transitions[FSDP_NUM_UNIT_EVENTS][FSDP_NUM_UNIT_STATES] = {
        [FSDP_EVENT_UNSHARD] = {[FSDP_UNIT_SHARDED] = TO(UNSHARDING),
                                [FSDP_UNIT_REDUCING] = TO(UNSHARDING)},
        [FSDP_EVENT_WAIT] = {[FSDP_UNIT_UNSHARDING] = TO(UNSHARDED)},
        [FSDP_EVENT_HIDE] = {[FSDP_UNIT_UNSHARDED] = TO(UNSHARDING)},
        [FSDP_EVENT_RESHARD] = {[FSDP_UNIT_UNSHARDING] = TO(SHARDED),
                                [FSDP_UNIT_UNSHARDED] = TO(SHARDED)},
        [FSDP_EVENT_REDUCE] = {[FSDP_UNIT_SHARDED] = TO(REDUCING),
                               [FSDP_UNIT_UNSHARDING] = TO(REDUCING),
                               [FSDP_UNIT_UNSHARDED] = TO(REDUCING),
                               [FSDP_UNIT_REDUCING] = TO(REDUCING)},
        [FSDP_EVENT_FINISH] = {[FSDP_UNIT_REDUCING] = TO(SHARDED),
                               [FSDP_UNIT_SHARDED] = TO(SHARDED),
                               [FSDP_UNIT_UNSHARDING] = TO(UNSHARDING),
                               [FSDP_UNIT_UNSHARDED] = TO(UNSHARDED)},
        [FSDP_EVENT_FAIL] = {[FSDP_UNIT_SHARDED] = TO(FAILED),
                             [FSDP_UNIT_UNSHARDING] = TO(FAILED),
                             [FSDP_UNIT_UNSHARDED] = TO(FAILED),
                             [FSDP_UNIT_REDUCING] = TO(FAILED),
                             [FSDP_UNIT_FAILED] = TO(FAILED)},
        [FSDP_EVENT_RESET] = {[FSDP_UNIT_SHARDED] = TO(SHARDED),
                              [FSDP_UNIT_UNSHARDING] = TO(SHARDED),
                              [FSDP_UNIT_UNSHARDED] = TO(SHARDED),
                              [FSDP_UNIT_REDUCING] = TO(SHARDED),
                              [FSDP_UNIT_FAILED] = TO(SHARDED)},
};
#undef TO

const char *fsdp_unit_state_name(fsdp_unit_state state) {
  if ((unsigned)state >= FSDP_NUM_UNIT_STATES) return "UNKNOWN";
  return state_names[state];
}

const char *fsdp_unit_event_name(fsdp_unit_event event) {
  if ((unsigned)event >= FSDP_NUM_UNIT_EVENTS) return "UNKNOWN";
  return event_names[event];
}

fsdp_status fsdp_unit_state_advance(fsdp_unit_state *state,
                                    fsdp_unit_event event, fsdp_error *error) {
  assert((unsigned)*state < FSDP_NUM_UNIT_STATES);
  assert((unsigned)event < FSDP_NUM_UNIT_EVENTS);
  const unsigned char next = transitions[event][*state];
  if (next == 0) {
    return FSDP_FAIL(error, FSDP_INVALID_STATE, "no event %s in state %s",
                     fsdp_unit_event_name(event), fsdp_unit_state_name(*state));
  }
  *state = (fsdp_unit_state)(next - 1);
  return FSDP_OK;
}
