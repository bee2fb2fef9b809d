/*
 * Tests of unit/: every cell of the transition table, against a literal copy
 * of the table in the header.
 */
#include "check.h"
#include "unit/state.h"

/* One row per event; columns SHARDED, UNSHARDING, UNSHARDED, REDUCING,
 * FAILED. The letter of the next state (S, G = UNSHARDING, U, R, F), or '.'. */
static const char *const table[FSDP_NUM_UNIT_EVENTS] = {
    [FSDP_EVENT_UNSHARD] = "G..G.", [FSDP_EVENT_WAIT] = ".U...",
    [FSDP_EVENT_HIDE] = "..G..",    [FSDP_EVENT_RESHARD] = ".SS..",
    [FSDP_EVENT_REDUCE] = "RRRR.",  [FSDP_EVENT_FINISH] = "SGUS.",
    [FSDP_EVENT_FAIL] = "FFFFF",    [FSDP_EVENT_RESET] = "SSSSS",
};

static void test_every_transition(void) {
  static const char letters[] = "SGURF";
  for (int event = 0; event < FSDP_NUM_UNIT_EVENTS; event++) {
    for (int from = 0; from < FSDP_NUM_UNIT_STATES; from++) {
      fsdp_unit_state state = (fsdp_unit_state)from;
      fsdp_error error = {FSDP_OK, 0, NULL, ""};
      const fsdp_status status =
          fsdp_unit_state_advance(&state, (fsdp_unit_event)event, &error);
      const char expected = table[event][from];
      if (expected == '.') {
        char message[64];
        snprintf(message, sizeof message, "no event %s in state %s",
                 fsdp_unit_event_name((fsdp_unit_event)event),
                 fsdp_unit_state_name((fsdp_unit_state)from));
        CHECK_I64(status, FSDP_INVALID_STATE);
        CHECK_I64(error.status, FSDP_INVALID_STATE);
        CHECK_TEXT(error.message, message);
        CHECK_I64(state, from);
      } else {
        CHECK_I64(status, FSDP_OK);
        CHECK_I64(error.status, FSDP_OK);
        CHECK(letters[state] == expected);
      }
    }
  }
}

static void test_names(void) {
  static const char *const states[] = {"SHARDED",  "UNSHARDING", "UNSHARDED",
                                       "REDUCING", "FAILED",     "UNKNOWN"};
  static const char *const events[] = {"UNSHARD", "WAIT",   "HIDE",
                                       "RESHARD", "REDUCE", "FINISH",
                                       "FAIL",    "RESET",  "UNKNOWN"};
  for (int i = 0; i <= FSDP_NUM_UNIT_STATES; i++) {
    CHECK_TEXT(fsdp_unit_state_name((fsdp_unit_state)i), states[i]);
  }
  for (int i = 0; i <= FSDP_NUM_UNIT_EVENTS; i++) {
    CHECK_TEXT(fsdp_unit_event_name((fsdp_unit_event)i), events[i]);
  }
}

int main(void) {
  static const check_test tests[] = {
      CHECK_TEST(test_every_transition),
      CHECK_TEST(test_names),
  };
  return CHECK_RUN(tests);
}
