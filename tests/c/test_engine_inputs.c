/*
 * Tests of runtime/: units with frozen parameters, whose backward ends when the
 * gradients of their inputs have come.
 */
#include "engine_failures.h"

static model m; /* each test makes and frees it */

/* root, then "frozen" with nothing but frozen parameters, then "mixed". */
static void start(const model_options *options) {
  const fsdp_param_spec frozen = {0, 24, RECORDER_F32, false};
  model_init(&m, options);
  model_plan_simple(&m, "root", 4);
  model_plan(&m, "frozen", &frozen, 1);
  model_plan_mixed(&m, "mixed");
  model_start(&m);
  CHECK_I64(model_forward(&m, true, NULL), FSDP_OK);
  CHECK_I64(model_pre_backward(&m, 0, NULL), FSDP_OK);
}

static void pre_backward(int64_t unit) {
  CHECK_I64(model_pre_backward(&m, unit, NULL), FSDP_OK);
}

static void give_grad(int64_t unit, int64_t param) {
  CHECK_I64(model_give_grad(&m, unit, param, true, NULL), FSDP_OK);
}

static void give_inputs(int64_t unit) {
  CHECK_I64(model_give_inputs(&m, unit, NULL), FSDP_OK);
}

static void finish(void) {
  CHECK_I64(model_give_grads(&m, 0, NULL), FSDP_OK);
  CHECK_I64(model_finish(&m, NULL), FSDP_OK);
  model_check_states(&m, FSDP_UNIT_SHARDED);
  CHECK_I64(model_stats(&m).arena.held_nbytes, 0);
}

static void test_frozen_unit_reshards(void) {
  start(NULL);
  pre_backward(1);
  fsdp_unit_expect_grads(m.units[1].unit, 1);
  CHECK_I64(model_state(&m, 1), FSDP_UNIT_UNSHARDED);
  recorder_clear(m.device);
  give_inputs(1);
  CHECK_TEXT(recorder_tape(m.device),
             "show frozen sharded\n"
             "record e12 compute\n");
  CHECK_I64(model_state(&m, 1), FSDP_UNIT_SHARDED);
  finish();
  CHECK(!m.units[1].has_grads);
  CHECK_I64(model_stats(&m).num_reduces, 1);
  model_fini(&m);
}

/* The weights are used until the gradients of the inputs have come, in
 * whatever order. */
static void test_mixed_unit_waits(void) {
  for (int is_first = 0; is_first < 2; is_first++) {
    start(NULL);
    pre_backward(2);
    fsdp_unit_expect_grads(m.units[2].unit, 3 + 1);
    if (is_first) give_inputs(2);
    give_grad(2, 4);
    give_grad(2, 2);
    CHECK_I64(model_state(&m, 2), FSDP_UNIT_UNSHARDED);
    CHECK_I64(fsdp_unit_pending_grads(m.units[2].unit), 2 - is_first);
    recorder_clear(m.device);
    give_grad(2, 0);
    if (!is_first) {
      CHECK_TEXT(recorder_tape(m.device), "");
      CHECK_I64(model_state(&m, 2), FSDP_UNIT_UNSHARDED);
      give_inputs(2);
    }
    CHECK_I64(model_state(&m, 2), FSDP_UNIT_REDUCING);
    CHECK_TEXT(model_schedule(&m),
               "show mixed sharded\n"
               "reduce_scatter mixed\n"
               "reduce_scatter mixed\n");
    finish();
    model_check_grads(&m);
    model_fini(&m);
  }
}

/* The inputs need no gradient: the end of backward does what is left. */
static void test_inputs_that_never_come(void) {
  start(NULL);
  for (int64_t unit = 2; unit >= 1; unit--) {
    pre_backward(unit);
    fsdp_unit_expect_grads(m.units[unit].unit, unit == 2 ? 3 + 1 : 1);
  }
  for (int64_t param = 4; param >= 0; param -= 2) give_grad(2, param);
  CHECK_I64(model_state(&m, 2), FSDP_UNIT_UNSHARDED);
  CHECK_I64(model_state(&m, 1), FSDP_UNIT_UNSHARDED);
  finish();
  model_check_grads(&m);
  CHECK_I64(fsdp_unit_pending_grads(m.units[1].unit), 0);
  CHECK_I64(fsdp_unit_pending_grads(m.units[2].unit), 0);
  /* Too late: nothing is expected any more. */
  recorder_clear(m.device);
  give_inputs(1);
  give_inputs(2);
  CHECK_TEXT(recorder_tape(m.device), "");
  CHECK(!fsdp_engine_in_backward(m.engine));
  model_zero_grad(&m);
  model_step(&m);
  model_check_grads(&m);
  model_fini(&m);
}

/* Only the inputs' gradients come: there is nothing to reduce. */
static void test_mixed_unit_without_gradients(void) {
  start(NULL);
  pre_backward(2);
  fsdp_unit_expect_grads(m.units[2].unit, 1);
  recorder_clear(m.device);
  give_inputs(2);
  CHECK_TEXT(model_schedule(&m), "show mixed sharded\n");
  CHECK_I64(model_state(&m, 2), FSDP_UNIT_SHARDED);
  finish();
  CHECK(!m.units[2].has_grads);
  model_fini(&m);
}

/* What an earlier no_sync kept is reduced with them. */
static void test_kept_gradients(void) {
  start(NULL);
  fsdp_engine_set_sync(m.engine, FSDP_SYNC_NONE);
  pre_backward(2);
  CHECK_I64(model_give_grads(&m, 2, NULL), FSDP_OK);
  CHECK_I64(model_state(&m, 2), FSDP_UNIT_SHARDED);
  CHECK_I64(model_give_grads(&m, 0, NULL), FSDP_OK);
  CHECK_I64(model_finish(&m, NULL), FSDP_OK);
  CHECK_I64(m.units[2].grad_view, FSDP_VIEW_UNSHARDED);
  fsdp_engine_set_sync(m.engine, FSDP_SYNC_REDUCE);
  CHECK_I64(model_forward(&m, true, NULL), FSDP_OK);
  pre_backward(0);
  pre_backward(2);
  fsdp_unit_expect_grads(m.units[2].unit, 1);
  give_inputs(2);
  CHECK_I64(model_state(&m, 2), FSDP_UNIT_REDUCING);
  finish();
  model_check_grads(&m);
  model_fini(&m);
}

static void test_prefetch_after_them(void) {
  model_options options = model_default_options();
  options.backward_prefetch = FSDP_PREFETCH_POST;
  start(&options);
  pre_backward(2);
  fsdp_unit_expect_grads(m.units[2].unit, 3 + 1);
  for (int64_t param = 4; param >= 0; param -= 2) give_grad(2, param);
  CHECK_I64(model_state(&m, 1), FSDP_UNIT_SHARDED);
  give_inputs(2);
  CHECK_I64(model_state(&m, 1), FSDP_UNIT_PREFETCHED);
  pre_backward(1);
  fsdp_unit_expect_grads(m.units[1].unit, 1);
  give_inputs(1);
  finish();
  model_check_grads(&m);
  model_fini(&m);
}

/* A unit that failed says so. */
static void test_failed_unit(void) {
  fsdp_error error;
  start(NULL);
  pre_backward(2);
  fsdp_unit_expect_grads(m.units[2].unit, 3 + 2);
  give_grad(2, 0);
  recorder_fail_at(m.device, 0);
  give_inputs(2); /* not the last: calls nothing */
  for (int64_t param = 4; param > 0; param -= 2) give_grad(2, param);
  CHECK_I64(model_give_inputs(&m, 2, &error), FSDP_BACKEND);
  CHECK(strncmp(error.message, "injected at pack ", 17) == 0);
  CHECK_I64(model_state(&m, 2), FSDP_UNIT_FAILED);
  fsdp_unit_expect_grads(m.units[2].unit, 1);
  CHECK_I64(model_give_inputs(&m, 2, &error), FSDP_BACKEND);
  CHECK(strstr(error.message, "unit 'mixed' failed earlier (") != NULL);
  failures_check_recovers(&m);
  model_fini(&m);
}

int main(void) {
  static const check_test tests[] = {
      CHECK_TEST(test_frozen_unit_reshards),
      CHECK_TEST(test_mixed_unit_waits),
      CHECK_TEST(test_inputs_that_never_come),
      CHECK_TEST(test_mixed_unit_without_gradients),
      CHECK_TEST(test_kept_gradients),
      CHECK_TEST(test_prefetch_after_them),
      CHECK_TEST(test_failed_unit),
  };
  return CHECK_RUN(tests);
}
