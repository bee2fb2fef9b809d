/*
 * Tests of runtime/: failures. Every call of the port and every allocation
 * of a training step fails once. The unit whose call failed is SHARDED or
 * FAILED then, a reset brings all of them back, and the next step is right.
 */
#include "engine_failures.h"

static model m; /* each round makes and frees it */

static void test_every_call_of_full_shard_can_fail(void) {
  model_options options = model_default_options();
  options.forward_prefetch = true;
  failures_every_call_of_steps(&m, &options, NULL, failures_train);
  options.backward_prefetch = FSDP_PREFETCH_POST;
  failures_every_call_of_steps(&m, &options, NULL, failures_train);
}

static void test_every_call_of_shard_grad_op_can_fail(void) {
  model_options options = model_default_options();
  options.reshard_after_forward = false;
  options.reshard_after_backward_without_sync = false;
  options.param_dtype = RECORDER_BF16;
  options.reduce_dtype = RECORDER_F32;
  options.wants_scratch = true;
  failures_every_call_of_steps(&m, &options, NULL, failures_train);
}

static void test_every_call_of_hybrid_can_fail(void) {
  model_options options = model_default_options();
  options.rank = 1;
  options.num_replicas = 2;
  options.prescale = 0.5;
  failures_every_call_of_steps(&m, &options, NULL, failures_train);
}

static void test_every_call_of_no_shard_can_fail(void) {
  model_options options = model_default_options();
  options.world_size = 1;
  options.num_replicas = 2;
  failures_every_call_of_steps(&m, &options, NULL, failures_train);
  options.param_dtype = RECORDER_BF16;
  failures_every_call_of_steps(&m, &options, NULL, failures_train);
}

/* A reset whose own calls fail brings the units back all the same. */
static void test_every_call_of_a_reset_can_fail(void) {
  for (int64_t i = 0;; i++) {
    failures_plan(&m, NULL);
    model_start(&m);
    CHECK_I64(model_forward(&m, true, NULL), FSDP_OK);
    CHECK_I64(model_pre_backward(&m, 0, NULL), FSDP_OK);
    CHECK_I64(model_pre_backward(&m, 3, NULL), FSDP_OK);
    fsdp_unit_expect_grads(m.units[3].unit, 2);
    CHECK_I64(model_give_grad(&m, 3, 0, true, NULL), FSDP_OK);
    const int64_t num_calls_before = recorder_num_calls(m.device);
    recorder_fail_at(m.device, i);
    fsdp_engine_reset(m.engine);
    recorder_fail_at(m.device, -1);
    const int64_t num_calls = recorder_num_calls(m.device) - num_calls_before;
    model_check_states(&m, FSDP_UNIT_SHARDED);
    failures_check_recovers(&m);
    model_fini(&m);
    if (num_calls <= i) break;
  }
}

/* Leaving a forward that raised cannot fail, whatever the port says. */
static void test_every_call_of_an_abandoned_forward_can_fail(void) {
  model_options options = model_default_options();
  options.forward_prefetch = true;
  for (int64_t i = 0;; i++) {
    failures_plan(&m, &options);
    model_start(&m);
    CHECK_I64(model_forward(&m, false, NULL), FSDP_OK);
    CHECK_I64(model_enter(&m, 0, NULL), FSDP_OK);
    CHECK_I64(model_enter(&m, 1, NULL), FSDP_OK); /* "frozen" in flight */
    const int64_t num_calls_before = recorder_num_calls(m.device);
    recorder_fail_at(m.device, i);
    fsdp_unit_abandon_forward(m.units[1].unit, false);
    fsdp_unit_abandon_forward(m.units[0].unit, false);
    recorder_fail_at(m.device, -1);
    const int64_t num_calls = recorder_num_calls(m.device) - num_calls_before;
    CHECK(!fsdp_engine_in_forward(m.engine));
    for (int64_t j = 0; j < m.num_units; j++) {
      CHECK(model_state(&m, j) == FSDP_UNIT_SHARDED ||
            model_state(&m, j) == FSDP_UNIT_FAILED);
    }
    failures_check_recovers(&m);
    model_fini(&m);
    if (num_calls <= i) break;
  }
}

/* The root's module catches what its child raised when it left forward: the
 * root is still inside, no new iteration starts. */
static void test_failed_child_leaves_once(void) {
  model_start_tree(&m, NULL, 2);
  CHECK_I64(model_enter(&m, 0, NULL), FSDP_OK);
  CHECK_I64(model_enter(&m, 1, NULL), FSDP_OK);
  recorder_fail_at(m.device, 0);
  CHECK_I64(model_leave(&m, 1, true, NULL), FSDP_BACKEND);
  fsdp_unit_abandon_forward(m.units[1].unit, false);
  CHECK(fsdp_engine_in_forward(m.engine));
  CHECK_I64(model_enter(&m, 2, NULL), FSDP_OK);
  CHECK_I64(model_leave(&m, 2, true, NULL), FSDP_OK);
  CHECK_I64(model_leave(&m, 0, true, NULL), FSDP_OK);
  CHECK(!fsdp_engine_in_forward(m.engine));
  CHECK_I64(model_stats(&m).num_iterations, 1);
  CHECK_I64(model_state(&m, 0), FSDP_UNIT_HIDDEN); /* kept */
  fsdp_engine_reset(m.engine);
  model_check_states(&m, FSDP_UNIT_SHARDED);
  model_fini(&m);
}

/* --- Between steps ------------------------------------------------------- */

static int64_t num_blocks_besides_the_arena(void) {
  return recorder_live_blocks(m.device) - model_stats(&m).arena.num_blocks;
}

static void fail_every_call_of_summon(const model_options *options) {
  for (int64_t i = 0;; i++) {
    fsdp_error error = {FSDP_OK, 0, NULL, ""};
    failures_plan(&m, options);
    model_start(&m);
    /* Kept for a backward, so that it is resharded first. */
    CHECK_I64(model_forward(&m, true, NULL), FSDP_OK);
    fsdp_unit *unit = m.units[0].unit;
    const int64_t num_blocks = num_blocks_besides_the_arena();
    const int64_t num_calls = recorder_num_calls(m.device);
    recorder_fail_at(m.device, i);
    fsdp_status status = fsdp_unit_summon(unit, NULL, &error);
    if (status == FSDP_OK) {
      status = fsdp_unit_dismiss(unit, true, &error);
      if (status != FSDP_OK) { /* still open: the next try ends it */
        recorder_fail_at(m.device, -1);
        CHECK(fsdp_unit_is_summoned(unit));
        CHECK_I64(fsdp_unit_dismiss(unit, true, NULL), FSDP_OK);
      }
    }
    recorder_fail_at(m.device, -1);
    const bool is_over = recorder_num_calls(m.device) - num_calls <= i;
    CHECK(!is_over || status == FSDP_OK);
    CHECK(!fsdp_unit_is_summoned(unit));
    CHECK_I64(num_blocks_besides_the_arena(), num_blocks);
    CHECK(model_state(&m, 0) == FSDP_UNIT_SHARDED ||
          model_state(&m, 0) == FSDP_UNIT_FAILED);
    if (status != FSDP_OK) {
      CHECK(strncmp(error.message, "injected at ", 12) == 0);
    }
    if (strstr(error.message, "all_gather ") != NULL) {
      CHECK_I64(model_state(&m, 0), FSDP_UNIT_FAILED); /* maybe enqueued */
    }
    failures_check_recovers(&m);
    /* The same with a unit that goes while it is summoned. */
    recorder_fail_at(m.device, i);
    (void)!fsdp_unit_summon(unit, NULL, NULL);
    fsdp_unit_destroy(unit);
    m.units[0].unit = NULL;
    recorder_fail_at(m.device, -1);
    model_fini(&m);
    if (is_over) break;
  }
}

static void test_every_call_of_a_summon_can_fail(void) {
  model_options options = model_default_options();
  fail_every_call_of_summon(&options);
  options.world_size = 1;
  options.param_dtype = RECORDER_BF16;
  fail_every_call_of_summon(&options);
}

/* A unit whose move fails stays in its engine, and works there. */
static void test_every_call_of_a_move_can_fail(void) {
  for (int64_t i = 0;; i++) {
    fsdp_engine *other = NULL;
    failures_plan(&m, NULL);
    model_start(&m);
    CHECK_I64(model_forward(&m, true, NULL), FSDP_OK);
    CHECK_I64(fsdp_engine_create(&m.ops, &m.views, &other, NULL), FSDP_OK);
    recorder_fail_at(m.device, i);
    const fsdp_status status =
        fsdp_engine_add_unit(other, m.units[0].unit, NULL);
    recorder_fail_at(m.device, -1);
    if (status != FSDP_OK) {
      CHECK(model_engine_of(m.units[0].unit) == m.engine);
      CHECK_I64(model_stats(&m).num_units, 4);
      failures_check_recovers(&m);
    }
    fsdp_engine_destroy(other);
    model_fini(&m);
    if (status == FSDP_OK) break;
  }
}

/* --- Making -------------------------------------------------------------- */

static void test_every_call_of_making_can_fail(void) {
  for (int64_t i = 0;; i++) {
    fsdp_error error = {FSDP_OK, 0, NULL, ""};
    failures_plan(&m, NULL);
    recorder_fail_at(m.device, i);
    const fsdp_status status = model_build(&m, &error);
    recorder_fail_at(m.device, -1);
    CHECK_I64(error.status, status);
    model_fini(&m);
    if (status != FSDP_OK) continue;
    CHECK_I64(i, 5 + 4); /* events: five of the engine, one of each unit */
    break;
  }
}

static void test_every_allocation_can_fail(void) {
  model_options options = model_default_options();
  options.forward_prefetch = true;
  failures_every_allocation(&m, &options, NULL, failures_train);
}

int main(void) {
  static const check_test tests[] = {
      CHECK_TEST(test_every_call_of_full_shard_can_fail),
      CHECK_TEST(test_every_call_of_shard_grad_op_can_fail),
      CHECK_TEST(test_every_call_of_hybrid_can_fail),
      CHECK_TEST(test_every_call_of_no_shard_can_fail),
      CHECK_TEST(test_every_call_of_a_reset_can_fail),
      CHECK_TEST(test_every_call_of_an_abandoned_forward_can_fail),
      CHECK_TEST(test_failed_child_leaves_once),
      CHECK_TEST(test_every_call_of_a_summon_can_fail),
      CHECK_TEST(test_every_call_of_a_move_can_fail),
      CHECK_TEST(test_every_call_of_making_can_fail),
      CHECK_TEST(test_every_allocation_can_fail),
  };
  return CHECK_RUN(tests);
}
