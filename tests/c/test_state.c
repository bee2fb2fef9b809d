/*
 * Tests of unit/: every cell of the transition table, against a literal copy
 * of the table in the header.
 */
#include "check.h"
#include "unit/state.h"

/* One row per event; columns SHARDED, PREFETCHED, UNSHARDING, UNSHARDED,
 * HIDDEN, KEPT, PARTED, REDUCING, FAILED. The letter of the next state (G =
 * UNSHARDING), or '.'. */
static const char letters[] = "SPGUHKTRF";
static const char *const table[FSDP_NUM_UNIT_EVENTS] = {
    [FSDP_EVENT_PREFETCH] = "P.....P..", [FSDP_EVENT_UNSHARD] = "G.....GG.",
    [FSDP_EVENT_WAIT] = ".UU.UU...",     [FSDP_EVENT_HIDE] = "...H.....",
    [FSDP_EVENT_RESHARD] = ".SSSSSS..",  [FSDP_EVENT_PART] = "...T.....",
    [FSDP_EVENT_REDUCE] = "R..U...R.",   [FSDP_EVENT_FINISH] = "S..UKK.S.",
    [FSDP_EVENT_FAIL] = "FFFFFFFFF",     [FSDP_EVENT_RESET] = "SSSSSSSSS",
};

TEST(test_every_transition) {
  for (int event = 0; event < FSDP_NUM_UNIT_EVENTS; event++) {
    for (int from = 0; from < FSDP_NUM_UNIT_STATES; from++) {
      fsdp_unit_state state = (fsdp_unit_state)from;
      FSDP_LOCAL_ERROR(error);
      const fsdp_status status =
          fsdp_unit_state_advance(&state, (fsdp_unit_event)event, "x", &error);
      const char expected = table[event][from];
      if (expected == '.') {
        char message[64];
        snprintf(message, sizeof message,
                 "unit 'x': %s is not allowed while %s",
                 fsdp_unit_event_name((fsdp_unit_event)event),
                 fsdp_unit_state_name((fsdp_unit_state)from));
        CHECK_I64(status, FSDP_INVALID_STATE);
        CHECK_I64(error.status, FSDP_INVALID_STATE);
        CHECK_TEXT(error.message, message);
        CHECK_I64(state, from);
      } else {
        CHECK_OK(status);
        CHECK_OK(error.status);
        CHECK_TEXT(error.message, "");
        CHECK(letters[state] == expected);
      }
    }
  }
}

TEST(test_predicates) {
  for (int i = 0; i < FSDP_NUM_UNIT_STATES; i++) {
    const fsdp_unit_state state = (fsdp_unit_state)i;
    CHECK(fsdp_unit_state_is_in_flight(state) ==
          (letters[i] == 'P' || letters[i] == 'G'));
    CHECK(fsdp_unit_state_is_hidden(state) ==
          (letters[i] == 'H' || letters[i] == 'K'));
    CHECK(fsdp_unit_state_is_at_rest(state) ==
          (letters[i] == 'S' || letters[i] == 'T'));
  }
}

TEST(test_names) {
  static const char *const states[] = {
      "SHARDED", "PREFETCHED", "UNSHARDING", "UNSHARDED", "HIDDEN",
      "KEPT",    "PARTED",     "REDUCING",   "FAILED",    "UNKNOWN"};
  static const char *const events[] = {
      "PREFETCH", "UNSHARD", "WAIT", "HIDE",  "RESHARD", "PART",
      "REDUCE",   "FINISH",  "FAIL", "RESET", "UNKNOWN"};
  for (int i = 0; i <= FSDP_NUM_UNIT_STATES; i++) {
    CHECK_TEXT(fsdp_unit_state_name((fsdp_unit_state)i), states[i]);
  }
  for (int i = 0; i <= FSDP_NUM_UNIT_EVENTS; i++) {
    CHECK_TEXT(fsdp_unit_event_name((fsdp_unit_event)i), events[i]);
  }
}
