/*
 * Tests of runtime/: failures. Every call of the port and every allocation
 * of a training step fails once. The unit whose call failed is SHARDED or
 * FAILED then, a reset brings all of them back, and the next step is right.
 */
#include "engine_failures.h"

TEST(test_every_call_of_full_shard_can_fail) {
  model_options options = {.forward_prefetch = true};
  failures_every_call_of_steps(&options, NULL, failures_train);
  options.backward_prefetch = PREFETCH_AFTER;
  failures_every_call_of_steps(&options, NULL, failures_train);
}

TEST(test_every_call_of_shard_grad_op_can_fail) {
  failures_every_call_of_steps(
      WITH(.keeps_after_forward = true, .keeps_without_sync = true,
           .param_dtype = RECORDER_BF16, .reduce_dtype = RECORDER_F32,
           .wants_scratch = true),
      NULL, failures_train);
}

TEST(test_every_call_of_units_that_stay_shown_can_fail) {
  failures_every_call_of_steps(
      WITH(.keeps_after_forward = true, .shows_kept = true,
           .keeps_without_sync = true, .param_dtype = RECORDER_BF16),
      NULL, failures_train);
}

TEST(test_every_call_of_units_with_parts_can_fail) {
  model_options options = {
      .world_size = 4, .part_world_size = 2, .forward_prefetch = true};
  failures_every_call_of_steps(&options, NULL, failures_train);
  options.param_dtype = RECORDER_BF16;
  options.offloads = true;
  failures_every_call_of_steps(&options, NULL, failures_train);
}

TEST(test_every_call_of_hybrid_can_fail) {
  failures_every_call_of_steps(
      WITH(.rank = 1, .num_replicas = 2, .prescale = 0.5), NULL,
      failures_train);
}

TEST(test_every_call_of_no_shard_can_fail) {
  model_options options = {.world_size = 1, .num_replicas = 2};
  failures_every_call_of_steps(&options, NULL, failures_train);
  options.param_dtype = RECORDER_BF16;
  failures_every_call_of_steps(&options, NULL, failures_train);
}

/* A reset whose own calls fail brings the units back all the same. */
TEST(test_every_call_of_a_reset_can_fail) {
  for (int64_t i = 0;; i++) {
    failures_plan(NULL);
    model_start(&m);
    PLAY("forward; pre_backward root; pre_backward c; expect c 2; grad c 0");
    const int64_t num_calls_before = recorder_num_calls(m.device);
    recorder_fail_at(m.device, i);
    PLAY("reset");
    recorder_fail_at(m.device, -1);
    const int64_t num_calls = recorder_num_calls(m.device) - num_calls_before;
    PLAY("check_sharded");
    failures_check_recovers();
    if (num_calls <= i) break;
  }
}

/* Leaving a forward that raised cannot fail, whatever the port says. */
TEST(test_every_call_of_an_abandoned_forward_can_fail) {
  for (int64_t i = 0;; i++) {
    failures_plan(WITH(.forward_prefetch = true));
    model_start(&m);
    PLAY("eval; enter root; enter mixed"); /* "frozen" in flight */
    const int64_t num_calls_before = recorder_num_calls(m.device);
    recorder_fail_at(m.device, i);
    PLAY("abandon mixed; abandon root");
    recorder_fail_at(m.device, -1);
    const int64_t num_calls = recorder_num_calls(m.device) - num_calls_before;
    CHECK(!fsdp_engine_in_forward(m.engine));
    for (int64_t j = 0; j < m.num_units; j++) {
      CHECK(model_state(&m, j) == FSDP_UNIT_SHARDED ||
            model_state(&m, j) == FSDP_UNIT_FAILED);
    }
    failures_check_recovers();
    if (num_calls <= i) break;
  }
}

/* The root's module catches what its child raised when it left forward: the
 * root is still inside, no new iteration starts. */
TEST(test_failed_child_leaves_once) {
  model_start_tree(&m, NULL, 2);
  PLAY("enter root; enter a");
  recorder_fail_at(m.device, 0);
  CHECK_I64(model_leave(&m, 1, true, NULL), FSDP_BACKEND);
  PLAY("abandon a");
  CHECK(fsdp_engine_in_forward(m.engine));
  PLAY("enter b; leave b; leave root");
  CHECK(!fsdp_engine_in_forward(m.engine));
  PLAY("num_iterations 1; state root HIDDEN"); /* kept */
  PLAY("reset; check_sharded");
}

/* --- Between steps ------------------------------------------------------- */

static void fail_every_call_of_summon(const model_options *options) {
  for (int64_t i = 0;; i++) {
    fsdp_error error = {0};
    failures_plan(options);
    model_start(&m);
    /* Kept for a backward, so that it is resharded first. */
    PLAY("forward");
    fsdp_unit *unit = m.units[0].unit;
    const int64_t num_blocks = model_blocks_besides_arena(&m);
    const int64_t num_calls = recorder_num_calls(m.device);
    recorder_fail_at(m.device, i);
    fsdp_status status = fsdp_unit_summon(unit, NULL, &error);
    if (status == FSDP_OK) {
      status = fsdp_unit_dismiss(unit, true, &error);
      if (status != FSDP_OK) { /* still open: the next try ends it */
        recorder_fail_at(m.device, -1);
        CHECK(fsdp_unit_is_summoned(unit));
        PLAY("dismiss root");
      }
    }
    recorder_fail_at(m.device, -1);
    const bool is_over = recorder_num_calls(m.device) - num_calls <= i;
    CHECK(!is_over || status == FSDP_OK);
    CHECK(!fsdp_unit_is_summoned(unit));
    CHECK_I64(model_blocks_besides_arena(&m), num_blocks);
    CHECK(model_state(&m, 0) == FSDP_UNIT_SHARDED ||
          model_state(&m, 0) == FSDP_UNIT_FAILED);
    if (status != FSDP_OK) {
      CHECK(strncmp(error.message, "injected at ", 12) == 0);
    }
    if (strstr(error.message, "all_gather ") != NULL) {
      PLAY("state root FAILED"); /* maybe enqueued */
    }
    failures_check_recovers();
    /* The same with a unit that goes while it is summoned. */
    recorder_fail_at(m.device, i);
    FSDP_IGNORE(fsdp_unit_summon(unit, NULL, NULL));
    fsdp_unit_destroy(unit);
    m.units[0].unit = NULL;
    recorder_fail_at(m.device, -1);
    if (is_over) break;
  }
}

TEST(test_every_call_of_a_summon_can_fail) {
  model_options options = {0};
  fail_every_call_of_summon(&options);
  options.world_size = 1;
  options.param_dtype = RECORDER_BF16;
  fail_every_call_of_summon(&options);
}

/* A unit whose move fails stays in its engine, and works there. */
TEST(test_every_call_of_a_move_can_fail) {
  for (int64_t i = 0;; i++) {
    fsdp_engine *other = NULL;
    failures_plan(NULL);
    model_start(&m);
    PLAY("forward");
    CHECK_OK(fsdp_engine_create(&m.ops, &m.views, &other, NULL));
    recorder_fail_at(m.device, i);
    const fsdp_status status =
        fsdp_engine_add_unit(other, m.units[0].unit, NULL);
    recorder_fail_at(m.device, -1);
    if (status != FSDP_OK) {
      CHECK(model_engine_of(m.units[0].unit) == m.engine);
      PLAY("num_units 4");
      failures_check_recovers();
    }
    fsdp_engine_destroy(other);
    if (status == FSDP_OK) break;
  }
}

/* --- Making -------------------------------------------------------------- */

TEST(test_every_call_of_making_can_fail) {
  for (int64_t i = 0;; i++) {
    fsdp_error error = {0};
    failures_plan(NULL);
    recorder_fail_at(m.device, i);
    const fsdp_status status = model_build(&m, &error);
    recorder_fail_at(m.device, -1);
    CHECK_I64(error.status, status);
    if (status != FSDP_OK) continue;
    CHECK_I64(i, 5 + 4); /* events: five of the engine, one of each unit */
    break;
  }
}

TEST(test_every_allocation_can_fail) {
  failures_every_allocation(WITH(.forward_prefetch = true), NULL,
                            failures_train);
}
