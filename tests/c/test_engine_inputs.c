/*
 * Tests of runtime/: units with frozen parameters, whose backward ends when the
 * gradients of their inputs have come.
 */
#include "engine_failures.h"

/* root, then "frozen" with nothing but frozen parameters, then "mixed". */
static void start(const model_options *options) {
  model_open(options, "root 4; frozen 12 frozen; mixed mixed");
  PLAY("forward; pre_backward root");
}

static void finish(void) {
  PLAY("grads root; finish; check_sharded; check_idle");
}

TEST(test_frozen_unit_reshards) {
  start(NULL);
  PLAY("pre_backward frozen; expect frozen 1; state frozen UNSHARDED; clear");
  PLAY("inputs frozen");
  CHECK_TAPE("show frozen sharded; free 96");
  PLAY("state frozen SHARDED");
  finish();
  PLAY("no_grads frozen; num_reduces 1");
}

/* The weights are used until the gradients of the inputs have come, in
 * whatever order. */
TEST(test_mixed_unit_waits) {
  for (int is_first = 0; is_first < 2; is_first++) {
    start(NULL);
    PLAY("pre_backward mixed; expect mixed 4");
    if (is_first) PLAY("inputs mixed");
    PLAY("grad mixed 4; grad mixed 2; state mixed UNSHARDED");
    CHECK_I64(fsdp_unit_pending_grads(m.units[2].unit), 2 - is_first);
    PLAY("clear; grad mixed 0");
    if (!is_first) {
      CHECK_TAPE("");
      PLAY("state mixed UNSHARDED; inputs mixed");
    }
    PLAY("state mixed REDUCING");
    CHECK_SCHEDULE(
        "show mixed sharded; reduce_scatter mixed; reduce_scatter mixed");
    finish();
    PLAY("check_grads");
  }
}

/* The inputs need no gradient: the end of backward does what is left. */
TEST(test_inputs_that_never_come) {
  start(NULL);
  for (int64_t unit = 2; unit >= 1; unit--) {
    CHECK_OK(model_pre_backward(&m, unit, NULL));
    fsdp_unit_expect_grads(m.units[unit].unit, unit == 2 ? 3 + 1 : 1, 0);
  }
  PLAY("grad mixed 4; grad mixed 2; grad mixed 0; state mixed UNSHARDED");
  PLAY("state frozen UNSHARDED");
  finish();
  PLAY("check_grads; pending frozen 0; pending mixed 0");
  /* Too late: nothing is expected any more. */
  PLAY("clear; inputs frozen; inputs mixed");
  CHECK_TAPE("");
  CHECK(!fsdp_engine_in_backward(m.engine));
  PLAY("zero_grad; step; check_grads");
}

/* Only the inputs' gradients come: there is nothing to reduce. */
TEST(test_mixed_unit_without_gradients) {
  start(NULL);
  PLAY("pre_backward mixed; expect mixed 1; clear; inputs mixed");
  CHECK_SCHEDULE("show mixed sharded");
  PLAY("state mixed SHARDED");
  finish();
  PLAY("no_grads mixed");
}

/* What an earlier no_sync kept is reduced with them. */
TEST(test_kept_gradients) {
  start(NULL);
  PLAY("sync none; pre_backward mixed; grads mixed; state mixed SHARDED");
  PLAY("grads root; finish; grad_view mixed unsharded; sync reduce; forward");
  PLAY("pre_backward root; pre_backward mixed; expect mixed 1; inputs mixed");
  PLAY("state mixed REDUCING");
  finish();
  PLAY("check_grads");
}

TEST(test_prefetch_after_them) {
  start(WITH(.backward_prefetch = PREFETCH_AFTER));
  PLAY("pre_backward mixed; expect mixed 4; grad mixed 4; grad mixed 2");
  PLAY("grad mixed 0; state frozen SHARDED; inputs mixed");
  PLAY("state frozen PREFETCHED; pre_backward frozen; expect frozen 1");
  PLAY("inputs frozen");
  finish();
  PLAY("check_grads");
}

/* A unit that failed says so. */
TEST(test_failed_unit) {
  fsdp_error error;
  start(NULL);
  PLAY("pre_backward mixed; expect mixed 5; grad mixed 0");
  recorder_fail_at(m.device, 0);
  PLAY("inputs mixed"); /* not the last: calls nothing */
  PLAY("grad mixed 4; grad mixed 2");
  CHECK_I64(model_give_inputs(&m, 2, &error), FSDP_BACKEND);
  CHECK(strncmp(error.message, "injected at show mixed", 22) == 0);
  PLAY("state mixed FAILED; expect mixed 1");
  CHECK_FAILS(model_give_inputs(&m, 2, &error), FSDP_BACKEND, error.message,
              "..unit 'mixed' failed earlier (");
  failures_check_recovers();
}
