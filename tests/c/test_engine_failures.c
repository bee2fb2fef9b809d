/*
 * Tests of runtime/: failures. Every call of the port and every allocation
 * of a training step fails once. The unit whose call failed is SHARDED or
 * FAILED then, a reset brings all of them back, and the next step is right.
 */
#include "base/alloc.h"
#include "engine_fixture.h"

static model m; /* each round makes and frees it */

static void plan_model(const model_options *options) {
  const fsdp_param_spec frozen = {0, 24, RECORDER_F32, false};
  model_init(&m, options);
  model_plan_simple(&m, "root", 8);
  model_plan_mixed(&m, "mixed");
  model_plan(&m, "frozen", &frozen, 1);
  model_plan_simple(&m, "c", 16);
}

/* One micro-batch without sync and one with it. Stops at the first failure. */
static fsdp_status train(fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  fsdp_engine_set_sync(m.engine, false);
  FSDP_TRY(model_forward(&m, true, error));
  FSDP_TRY(model_backward(&m, error));
  fsdp_engine_set_sync(m.engine, true);
  FSDP_TRY(model_forward(&m, true, error));
  FSDP_TRY(model_backward(&m, error));
done:
  return status;
}

/* What must hold after any failure inside a step. */
static void check_after_failure(fsdp_status status) {
  const bool in_backward = fsdp_engine_in_backward(m.engine);
  CHECK(!fsdp_engine_in_forward(m.engine));
  for (int64_t i = 0; i < m.num_units; i++) {
    fsdp_error again = {FSDP_OK, 0, NULL, ""};
    const fsdp_unit_state state = model_state(&m, i);
    /* Never between. In a backward that raised this holds for the unit whose
     * call failed, or, if the engine's own did, for all; the others wait for
     * the reset. Outside of one it holds for all, but for those that are kept
     * unsharded on purpose. */
    const bool is_kept = !in_backward && !m.options.reshard_after_forward &&
                         state == FSDP_UNIT_UNSHARDED;
    if (!in_backward || i == m.current || m.current == -1) {
      CHECK(is_kept || state == FSDP_UNIT_SHARDED || state == FSDP_UNIT_FAILED);
    }
    if (state != FSDP_UNIT_FAILED) continue;
    /* It keeps the first error, and says so at every call. */
    CHECK_I64(fsdp_unit_pre_forward(m.units[i].unit, false, &again), status);
    CHECK(strstr(again.message, "failed earlier (injected at ") != NULL);
    CHECK_I64(fsdp_unit_pre_backward(m.units[i].unit, NULL), status);
    CHECK_I64(fsdp_unit_summon(m.units[i].unit, NULL),
              in_backward ? FSDP_INVALID_STATE : status);
    CHECK(fsdp_engine_add_unit(m.engine, m.units[i].unit, NULL) != FSDP_OK);
  }
  for (int64_t i = 0; i < m.num_grads; i++) {
    CHECK(m.grads[i].num_releases <= 1);
  }
}

static void check_recovers(void) {
  fsdp_engine_reset(m.engine);
  model_check_states(&m, FSDP_UNIT_SHARDED);
  CHECK(!fsdp_engine_in_backward(m.engine));
  CHECK(!fsdp_engine_in_forward(m.engine));
  for (int64_t i = 0; i < m.num_units; i++) {
    CHECK_I64(m.units[i].view, FSDP_VIEW_SHARDED);
    CHECK_I64(fsdp_unit_pending_grads(m.units[i].unit), 0);
  }
  for (int64_t i = 0; i < m.num_grads; i++) {
    CHECK_I64(m.grads[i].num_releases, 1);
  }
  fsdp_engine_set_sync(m.engine, true);
  for (int i = 0; i < 2; i++) {
    model_zero_grad(&m);
    model_optimizer_step(&m);
    model_step(&m);
    model_check_grads(&m);
    model_check_states(&m, FSDP_UNIT_SHARDED);
    CHECK_I64(model_stats(&m).arena.held_nbytes, 0);
  }
}

/* Step number `num_steps_before` meets every failure once. */
static void fail_every_call(const model_options *options,
                            int num_steps_before) {
  for (int64_t i = 0;; i++) {
    const int64_t num_failures = check_num_failures;
    fsdp_error error = {FSDP_OK, 0, NULL, ""};
    plan_model(options);
    model_start(&m);
    for (int step = 0; step < num_steps_before; step++) {
      CHECK_I64(train(NULL), FSDP_OK);
      model_zero_grad(&m);
    }
    const int64_t num_calls_before = recorder_num_calls(m.device);
    recorder_clear(m.device);
    recorder_fail_at(m.device, i);
    const fsdp_status status = train(&error);
    recorder_fail_at(m.device, -1);
    const int64_t num_calls = recorder_num_calls(m.device) - num_calls_before;
    if (status == FSDP_OK) {
      CHECK_I64(num_calls, i); /* each call has failed once */
      model_check_grads(&m);
    } else {
      CHECK(status == FSDP_OUT_OF_MEMORY || status == FSDP_BACKEND);
      CHECK_I64(error.status, status);
      CHECK(strncmp(error.message, "injected at ", 12) == 0);
      check_after_failure(status);
    }
    check_recovers();
    model_fini(&m);
    if (check_num_failures > num_failures) {
      printf("  call %" PRId64 " of step %d: %s\n", i, num_steps_before,
             error.message);
    }
    if (status == FSDP_OK) return;
  }
}

static void fail_every_call_of_steps(const model_options *options) {
  fail_every_call(options, 0); /* nothing is known: blocks are allocated */
  fail_every_call(options, 2); /* prefetches, recorded orders, a plan */
}

static void test_every_call_of_full_shard_can_fail(void) {
  model_options options = model_default_options();
  options.forward_prefetch = true;
  fail_every_call_of_steps(&options);
  options.backward_prefetch = FSDP_PREFETCH_POST;
  fail_every_call_of_steps(&options);
}

static void test_every_call_of_shard_grad_op_can_fail(void) {
  model_options options = model_default_options();
  options.reshard_after_forward = false;
  options.reshard_after_backward_without_sync = false;
  options.param_dtype = RECORDER_BF16;
  options.reduce_dtype = RECORDER_F32;
  options.needs_reduce_scratch = true;
  fail_every_call_of_steps(&options);
}

static void test_every_call_of_hybrid_can_fail(void) {
  model_options options = model_default_options();
  options.rank = 1;
  options.num_replicas = 2;
  options.prescale = 0.5;
  fail_every_call_of_steps(&options);
}

static void test_every_call_of_no_shard_can_fail(void) {
  model_options options = model_default_options();
  options.world_size = 1;
  options.num_replicas = 2;
  fail_every_call_of_steps(&options);
  options.param_dtype = RECORDER_BF16;
  fail_every_call_of_steps(&options);
}

/* A reset whose own calls fail brings the units back all the same. */
static void test_every_call_of_a_reset_can_fail(void) {
  for (int64_t i = 0;; i++) {
    plan_model(NULL);
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
    check_recovers();
    model_fini(&m);
    if (num_calls <= i) break;
  }
}

/* Leaving a forward that raised cannot fail, whatever the port says. */
static void test_every_call_of_an_abandoned_forward_can_fail(void) {
  model_options options = model_default_options();
  options.forward_prefetch = true;
  for (int64_t i = 0;; i++) {
    plan_model(&options);
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
    check_recovers();
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
  CHECK_I64(model_state(&m, 0), FSDP_UNIT_UNSHARDED);
  fsdp_engine_reset(m.engine);
  model_check_states(&m, FSDP_UNIT_SHARDED);
  model_fini(&m);
}

/* --- Between steps ------------------------------------------------------- */

static void fail_every_call_of_summon(const model_options *options) {
  for (int64_t i = 0;; i++) {
    fsdp_error error = {FSDP_OK, 0, NULL, ""};
    plan_model(options);
    model_start(&m);
    /* Kept for a backward, so that it is resharded first. */
    CHECK_I64(model_forward(&m, true, NULL), FSDP_OK);
    fsdp_unit *unit = m.units[0].unit;
    const int64_t num_blocks = recorder_live_blocks(m.device);
    recorder_fail_at(m.device, i);
    fsdp_status status = fsdp_unit_summon(unit, &error);
    if (status == FSDP_OK) {
      status = fsdp_unit_dismiss(unit, true, &error);
      if (status != FSDP_OK) { /* still open: the next try ends it */
        recorder_fail_at(m.device, -1);
        CHECK(fsdp_unit_is_summoned(unit));
        CHECK_I64(fsdp_unit_dismiss(unit, true, NULL), FSDP_OK);
      }
    }
    recorder_fail_at(m.device, -1);
    CHECK(!fsdp_unit_is_summoned(unit));
    CHECK_I64(recorder_live_blocks(m.device), num_blocks);
    CHECK(model_state(&m, 0) == FSDP_UNIT_SHARDED ||
          model_state(&m, 0) == FSDP_UNIT_FAILED);
    if (status != FSDP_OK) {
      CHECK(strncmp(error.message, "injected at ", 12) == 0);
    }
    if (strstr(error.message, "all_gather ") != NULL) {
      CHECK_I64(model_state(&m, 0), FSDP_UNIT_FAILED); /* maybe enqueued */
    }
    check_recovers();
    /* The same with a unit that goes while it is summoned. */
    recorder_fail_at(m.device, i);
    (void)!fsdp_unit_summon(unit, NULL);
    fsdp_unit_destroy(unit);
    m.units[0].unit = NULL;
    const bool is_over = status == FSDP_OK;
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
    plan_model(NULL);
    model_start(&m);
    CHECK_I64(model_forward(&m, true, NULL), FSDP_OK);
    CHECK_I64(fsdp_engine_create(&m.ops, &other, NULL), FSDP_OK);
    recorder_fail_at(m.device, i);
    const fsdp_status status =
        fsdp_engine_add_unit(other, m.units[0].unit, NULL);
    recorder_fail_at(m.device, -1);
    if (status != FSDP_OK) {
      CHECK(fsdp_unit_engine(m.units[0].unit) == m.engine);
      CHECK_I64(model_stats(&m).num_units, 4);
      check_recovers();
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
    plan_model(NULL);
    recorder_fail_at(m.device, i);
    const fsdp_status status = model_build(&m, &error);
    recorder_fail_at(m.device, -1);
    CHECK_I64(error.status, status);
    model_fini(&m);
    if (status != FSDP_OK) continue;
    CHECK_I64(i, 3 + 4); /* events: three of the engine, one of each unit */
    break;
  }
}

static void test_every_allocation_can_fail(void) {
  model_options options = model_default_options();
  options.forward_prefetch = true;
  for (int64_t i = 0;; i++) {
    fsdp_error error = {FSDP_OK, 0, NULL, ""};
    const int64_t num_failures = check_num_failures;
    plan_model(&options);
    fsdp_alloc_fail_at(i);
    fsdp_status status = model_build(&m, &error);
    const bool is_built = status == FSDP_OK;
    for (int step = 0; step < 2 && status == FSDP_OK; step++) {
      status = train(&error);
    }
    fsdp_alloc_fail_at(-1);
    if (status != FSDP_OK) {
      CHECK_I64(status, FSDP_OUT_OF_MEMORY);
      CHECK_I64(error.status, FSDP_OUT_OF_MEMORY);
    }
    if (is_built) {
      CHECK(!fsdp_engine_in_forward(m.engine));
      check_recovers();
    } else {
      const int64_t last = m.num_units - 1;
      CHECK(m.units[last].unit == NULL ||
            fsdp_unit_engine(m.units[last].unit) == NULL);
    }
    model_fini(&m);
    if (check_num_failures > num_failures) {
      printf("  allocation %" PRId64 ": %s\n", i, error.message);
    }
    if (status == FSDP_OK) break;
  }
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
