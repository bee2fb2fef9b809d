/*
 * Unit state: the transition table that unit/state.h draws, as data.
 */
#include "unit/state.h"

#include <assert.h>

static const char *const state_names[FSDP_NUM_UNIT_STATES] = {
    [FSDP_UNIT_SHARDED] = "SHARDED",
    [FSDP_UNIT_PREFETCHED] = "PREFETCHED",
    [FSDP_UNIT_UNSHARDING] = "UNSHARDING",
    [FSDP_UNIT_UNSHARDED] = "UNSHARDED",
    [FSDP_UNIT_HIDDEN] = "HIDDEN",
    [FSDP_UNIT_KEPT] = "KEPT",
    [FSDP_UNIT_PARTED] = "PARTED",
    [FSDP_UNIT_REDUCING] = "REDUCING",
    [FSDP_UNIT_FAILED] = "FAILED",
};

static const char *const event_names[FSDP_NUM_UNIT_EVENTS] = {
    [FSDP_EVENT_PREFETCH] = "PREFETCH", [FSDP_EVENT_UNSHARD] = "UNSHARD",
    [FSDP_EVENT_WAIT] = "WAIT",         [FSDP_EVENT_HIDE] = "HIDE",
    [FSDP_EVENT_RESHARD] = "RESHARD",   [FSDP_EVENT_PART] = "PART",
    [FSDP_EVENT_REDUCE] = "REDUCE",     [FSDP_EVENT_FINISH] = "FINISH",
    [FSDP_EVENT_FAIL] = "FAIL",         [FSDP_EVENT_RESET] = "RESET",
};

/* States plus one, so that 0 means "not allowed". The columns below are in the
 * order of this list. */
enum {
  S = FSDP_UNIT_SHARDED + 1,
  P = FSDP_UNIT_PREFETCHED + 1,
  G = FSDP_UNIT_UNSHARDING + 1,
  U = FSDP_UNIT_UNSHARDED + 1,
  H = FSDP_UNIT_HIDDEN + 1,
  K = FSDP_UNIT_KEPT + 1,
  T = FSDP_UNIT_PARTED + 1,
  R = FSDP_UNIT_REDUCING + 1,
  F = FSDP_UNIT_FAILED + 1
};

static const unsigned char
    transitions[FSDP_NUM_UNIT_EVENTS][FSDP_NUM_UNIT_STATES] = {
        [FSDP_EVENT_PREFETCH] = {P, 0, 0, 0, 0, 0, P, 0, 0},
        [FSDP_EVENT_UNSHARD] = {G, 0, 0, 0, 0, 0, G, G, 0},
        [FSDP_EVENT_WAIT] = {0, U, U, 0, U, U, 0, 0, 0},
        [FSDP_EVENT_HIDE] = {0, 0, 0, H, 0, 0, 0, 0, 0},
        [FSDP_EVENT_RESHARD] = {0, S, S, S, S, S, S, 0, 0},
        [FSDP_EVENT_PART] = {0, 0, 0, T, 0, 0, 0, 0, 0},
        [FSDP_EVENT_REDUCE] = {R, 0, 0, U, 0, 0, 0, R, 0},
        [FSDP_EVENT_FINISH] = {S, 0, 0, U, K, K, 0, S, 0},
        [FSDP_EVENT_FAIL] = {F, F, F, F, F, F, F, F, F},
        [FSDP_EVENT_RESET] = {S, S, S, S, S, S, S, S, S},
};

const char *fsdp_unit_state_name(fsdp_unit_state state) {
  if ((unsigned)state >= FSDP_NUM_UNIT_STATES) return "UNKNOWN";
  return state_names[state];
}

const char *fsdp_unit_event_name(fsdp_unit_event event) {
  if ((unsigned)event >= FSDP_NUM_UNIT_EVENTS) return "UNKNOWN";
  return event_names[event];
}

fsdp_status fsdp_unit_state_advance(fsdp_unit_state *state,
                                    fsdp_unit_event event, const char *name,
                                    fsdp_error *error) {
  assert((unsigned)*state < FSDP_NUM_UNIT_STATES);
  assert((unsigned)event < FSDP_NUM_UNIT_EVENTS);
  const unsigned char next = transitions[event][*state];
  if (next == 0) {
    return FSDP_FAIL(error, FSDP_INVALID_STATE,
                     "unit '%s': %s is not allowed while %s", name,
                     fsdp_unit_event_name(event), fsdp_unit_state_name(*state));
  }
  *state = (fsdp_unit_state)(next - 1);
  return FSDP_OK;
}
