/*
 * Tests of runtime/: gradients. What they are after several backwards, with and
 * without sync, and what a step costs in memory once it is known.
 */
#include "base/alloc.h"
#include "engine_fixture.h"

static model m; /* each test makes and frees it */

static void forward(void) {
  CHECK_I64(model_forward(&m, true, NULL), FSDP_OK);
}

static void enter(int64_t unit) {
  CHECK_I64(model_enter(&m, unit, NULL), FSDP_OK);
}

static void leave(int64_t unit) {
  CHECK_I64(model_leave(&m, unit, true, NULL), FSDP_OK);
}

static void pre_backward(int64_t unit) {
  CHECK_I64(model_pre_backward(&m, unit, NULL), FSDP_OK);
}

static void give_grads(int64_t unit) {
  CHECK_I64(model_give_grads(&m, unit, NULL), FSDP_OK);
}

static void finish(void) {
  CHECK_I64(model_finish(&m, NULL), FSDP_OK);
  CHECK(!fsdp_engine_in_backward(m.engine));
}

/* --- Gradients ----------------------------------------------------------- */

static void test_accumulates_over_backwards(void) {
  model_start_tree(&m, NULL, 1);
  for (int i = 0; i < 3; i++) model_step(&m);
  model_check_grads(&m); /* the sum of three */
  model_zero_grad(&m);
  model_step(&m);
  model_check_grads(&m); /* of the last one alone */
  model_fini(&m);
}

/* Gradients that the user set before the first backward are added to. */
static void test_users_own_gradient_is_added_to(void) {
  model_start_tree(&m, NULL, 0);
  float *grad = m.units[0].grad_shards[0];
  for (int64_t i = 0; i < 4; i++) {
    grad[i] = 10;
    m.units[0].expected[0][i] = 10;
  }
  recorder_set_grads_live(m.device, true);
  model_step(&m);
  model_check_grads(&m);
  model_fini(&m);
}

/* Two micro-batches without sync, a third with it. */
static void check_no_sync(const model_options *options) {
  const bool keeps = !options->reshard_after_backward_without_sync;
  model_init(&m, options);
  model_plan_simple(&m, "root", 8);
  model_plan_mixed(&m, "mixed");
  model_plan_simple(&m, "b", 16);
  model_start(&m);
  for (int step = 0; step < 3; step++) {
    model_zero_grad(&m);
    fsdp_engine_set_sync(m.engine, FSDP_SYNC_NONE);
    for (int i = 0; i < 2; i++) {
      recorder_clear(m.device);
      model_step(&m);
      CHECK(strstr(recorder_tape(m.device), "reduce ") == NULL);
      CHECK_I64(m.units[0].grad_view, FSDP_VIEW_UNSHARDED);
      model_check_grads(&m);
      model_check_states(&m, keeps ? FSDP_UNIT_KEPT : FSDP_UNIT_SHARDED);
    }
    fsdp_engine_set_sync(m.engine, FSDP_SYNC_REDUCE);
    const int64_t num_all_gathers = model_stats(&m).num_all_gathers;
    model_step(&m);
    if (keeps) CHECK_I64(model_stats(&m).num_all_gathers, num_all_gathers);
    CHECK_I64(m.units[0].grad_view, FSDP_VIEW_SHARDED);
    model_check_grads(&m);
    model_check_states(&m, FSDP_UNIT_SHARDED);
    CHECK_I64(model_stats(&m).arena.held_nbytes, 0);
    model_optimizer_step(&m);
  }
  model_fini(&m);
}

static void test_no_sync_then_sync(void) {
  model_options options = model_default_options();
  options.rank = 1;
  check_no_sync(&options);
  options.forward_prefetch = true;
  options.num_replicas = 2;
  options.reduce_dtype = RECORDER_F32;
  options.param_dtype = RECORDER_BF16;
  options.prescale = 0.25;
  options.wants_scratch = true;
  check_no_sync(&options);
  options.reshard_after_forward = false;
  options.reshard_after_backward_without_sync = false;
  check_no_sync(&options);
}

/* Parameters kept between micro-batches are hidden in between, and gathered
 * again if the user changed them there. */
static void test_kept_parameters(void) {
  model_options options = model_default_options();
  options.reshard_after_backward_without_sync = false;
  model_start_tree(&m, &options, 1);
  fsdp_engine_set_sync(m.engine, FSDP_SYNC_NONE);
  model_step(&m);
  CHECK_I64(m.units[1].view, FSDP_VIEW_SHARDED);
  CHECK_I64(model_state(&m, 1), FSDP_UNIT_KEPT);
  const int64_t num_all_gathers = model_stats(&m).num_all_gathers;
  recorder_clear(m.device);
  model_step(&m); /* on what was kept: a reshards after its forward */
  CHECK_TEXT(model_schedule(&m),
             "show root unsharded\n"
             "show a unsharded\n"
             "show a sharded\n"
             "show root sharded\n"
             "all_gather a\n"
             "show root unsharded\n"
             "show a unsharded\n"
             "show root sharded\n"
             "show_grads root unsharded\n"
             "show a sharded\n"
             "show_grads a unsharded\n");
  model_optimizer_step(&m);
  const int64_t num_before = model_stats(&m).num_all_gathers;
  CHECK_I64(num_before, num_all_gathers + 1);
  model_step(&m); /* with the new values */
  CHECK_I64(model_stats(&m).num_all_gathers, num_before + 3);
  /* One that does not run stays: the next forward may need it. */
  enter(0);
  CHECK_I64(model_state(&m, 1), FSDP_UNIT_KEPT);
  leave(0);
  CHECK_I64(model_state(&m, 1), FSDP_UNIT_KEPT);
  fsdp_engine_reset(m.engine);
  model_zero_grad(&m);
  model_step(&m);
  model_check_grads(&m);
  /* Kept, and destroyed, or summoned, or moved. */
  CHECK_I64(fsdp_unit_summon(m.units[1].unit, NULL, NULL), FSDP_OK);
  CHECK_I64(fsdp_unit_dismiss(m.units[1].unit, true, NULL), FSDP_OK);
  model_step(&m);
  fsdp_engine_set_sync(m.engine, FSDP_SYNC_REDUCE);
  model_step(&m);
  model_check_grads(&m);
  model_check_states(&m, FSDP_UNIT_SHARDED);
  CHECK_I64(model_stats(&m).arena.held_nbytes, 0);
  model_fini(&m);
}

static void test_sync_then_no_sync_then_sync(void) {
  model_start_tree(&m, NULL, 1);
  model_step(&m); /* sharded */
  fsdp_engine_set_sync(m.engine, FSDP_SYNC_NONE);
  model_step(&m); /* unsharded, beside it */
  fsdp_engine_set_sync(m.engine, FSDP_SYNC_REDUCE);
  model_step(&m);
  model_check_grads(&m); /* all three */
  model_fini(&m);
}

/* Gradients kept without sync that the user cleared do not come back. */
static void test_cleared_unsharded_gradients_stay_cleared(void) {
  model_start_tree(&m, NULL, 2);
  fsdp_engine_set_sync(m.engine, FSDP_SYNC_NONE);
  model_step(&m);
  fsdp_engine_set_sync(m.engine, FSDP_SYNC_REDUCE);
  model_zero_grad(&m);
  enter(0); /* b takes no part in this step */
  enter(1);
  leave(1);
  leave(0);
  pre_backward(0);
  pre_backward(1);
  give_grads(1);
  give_grads(0);
  finish();
  CHECK(m.units[0].has_grads);
  CHECK(m.units[1].has_grads);
  CHECK(!m.units[2].has_grads);
  CHECK_I64(model_stats(&m).arena.held_nbytes, 0);
  model_zero_grad(&m);
  model_step(&m);
  model_check_grads(&m);
  model_fini(&m);
}

/* A unit whose gradients were kept by no_sync and that takes no part in the
 * backward that reduces: reduced at its end. */
static void test_kept_gradients_are_reduced_at_the_end(void) {
  model_start_tree(&m, NULL, 1);
  fsdp_engine_set_sync(m.engine, FSDP_SYNC_NONE);
  model_step(&m);
  fsdp_engine_set_sync(m.engine, FSDP_SYNC_REDUCE);
  enter(0);
  leave(0);
  pre_backward(0);
  give_grads(0);
  finish();
  model_check_grads(&m);
  model_check_states(&m, FSDP_UNIT_SHARDED);
  CHECK_I64(model_stats(&m).num_reduces, 2);
  model_fini(&m);
}

/* What got no gradient is zero: while kept, and when reduced. */
static void test_unused_parameters_are_zero(void) {
  const fsdp_param_spec specs[] = {{0, 5, RECORDER_F32, true},
                                   {0, 7, RECORDER_F32, true},
                                   {0, 3, RECORDER_F32, true}};
  model_init(&m, NULL);
  model_plan(&m, "u", specs, 3);
  model_start(&m);
  for (int i = 0; i < 2; i++) {
    fsdp_engine_set_sync(m.engine, i == 1 ? FSDP_SYNC_REDUCE : FSDP_SYNC_NONE);
    model_zero_grad(&m);
    forward();
    pre_backward(0);
    fsdp_unit_expect_grads(m.units[0].unit, 3);
    CHECK_I64(model_give_grad(&m, 0, 1, true, NULL), FSDP_OK);
    CHECK_I64(fsdp_unit_pending_grads(m.units[0].unit), 2);
    recorder_clear(m.device);
    finish(); /* the other two do not come */
    CHECK(strstr(recorder_tape(m.device),
                 i == 0
                     ? "pack compute f32 x1 zero8@0 zero9@15\n"
                     : "pack compute f32 x1 7@8 zero8@0 zero9@15\n") != NULL);
    CHECK_I64(fsdp_unit_pending_grads(m.units[0].unit), 0);
    model_check_grads(&m);
  }
  model_fini(&m);
}

/* A second gradient of a parameter, and one that nobody announced. */
static void test_gradients_of_one_parameter_add_up(void) {
  const fsdp_param_spec specs[] = {{0, 8, RECORDER_F32, true},
                                   {0, 8, RECORDER_F32, true}};
  model_init(&m, NULL);
  model_plan(&m, "u", specs, 2);
  model_start(&m);
  forward();
  pre_backward(0);
  fsdp_unit_expect_grads(m.units[0].unit, 3);
  recorder_clear(m.device);
  for (int i = 0; i < 2; i++) {
    CHECK_I64(model_give_grad(&m, 0, 0, true, NULL), FSDP_OK);
  }
  CHECK_I64(model_give_grad(&m, 0, 1, true, NULL), FSDP_OK);
  CHECK(strstr(recorder_tape(m.device), "pack compute f32 x1 8@0\n") != NULL);
  CHECK(strstr(recorder_tape(m.device), "pack compute f32 x1 8@0+ 8@8\n") !=
        NULL);
  finish();
  model_check_grads(&m);
  /* No forward, no pre_backward: a gradient of the parameters themselves. */
  CHECK_I64(model_give_grad(&m, 0, 1, false, NULL), FSDP_OK);
  CHECK(fsdp_engine_in_backward(m.engine));
  finish();
  model_check_grads(&m);
  /* One that nobody announced does not stand in for one that is to come. */
  forward();
  pre_backward(0);
  fsdp_unit_expect_grads(m.units[0].unit, 1);
  CHECK_I64(model_give_grad(&m, 0, 1, false, NULL), FSDP_OK);
  CHECK_I64(model_state(&m, 0), FSDP_UNIT_UNSHARDED);
  CHECK_I64(model_give_grad(&m, 0, 0, true, NULL), FSDP_OK);
  CHECK_I64(model_state(&m, 0), FSDP_UNIT_REDUCING);
  finish();
  model_check_grads(&m);
  model_fini(&m);
}

/* From 1 MiB on, gradients are packed and released as they come. */
static void test_large_gradients_are_packed_early(void) {
  const fsdp_param_spec specs[] = {{0, 16, RECORDER_F32, true},
                                   {0, 1 << 18, RECORDER_F32, true},
                                   {0, 16, RECORDER_F32, true}};
  model_init(&m, NULL);
  model_plan(&m, "u", specs, 3);
  model_start(&m);
  forward();
  pre_backward(0);
  fsdp_unit_expect_grads(m.units[0].unit, 3);
  CHECK_I64(model_give_grad(&m, 0, 2, true, NULL), FSDP_OK);
  CHECK_I64(m.grads[0].num_releases, 0);
  CHECK_I64(model_give_grad(&m, 0, 1, true, NULL), FSDP_OK);
  CHECK_I64(m.grads[0].num_releases, 1);
  CHECK_I64(m.grads[1].num_releases, 1);
  CHECK_I64(model_give_grad(&m, 0, 0, true, NULL), FSDP_OK);
  finish();
  model_check_grads(&m);
  model_fini(&m);
}

static void test_forward_inside_an_open_backward_is_refused(void) {
  fsdp_error error;
  model_start_tree(&m, NULL, 1);
  CHECK_I64(fsdp_engine_finish_backward(m.engine, NULL), FSDP_OK); /* nothing */
  forward();
  pre_backward(0);
  CHECK_I64(fsdp_unit_pre_forward(m.units[0].unit, false, &error),
            FSDP_INVALID_STATE);
  CHECK_TEXT(error.message,
             "unit 'root' ran forward while a backward that raised is still "
             "open; call fsdp_c.reset(model) first");
  fsdp_engine_reset(m.engine);
  CHECK(!fsdp_engine_in_backward(m.engine));
  model_check_states(&m, FSDP_UNIT_SHARDED);
  model_step(&m);
  model_check_grads(&m);
  model_fini(&m);
}

/* A reset gives back what is open, and keeps what earlier micro-batches left
 * in units that the broken backward did not reach. */
static void test_reset_in_the_middle(void) {
  model_start_tree(&m, NULL, 2);
  fsdp_engine_set_sync(m.engine, FSDP_SYNC_NONE);
  model_step(&m);
  forward();
  pre_backward(0);
  pre_backward(2);
  fsdp_unit_expect_grads(m.units[2].unit, 2);
  CHECK_I64(model_give_grad(&m, 2, 0, true, NULL),
            FSDP_OK); /* waits to be packed */
  fsdp_engine_reset(m.engine);
  model_check_states(&m, FSDP_UNIT_SHARDED);
  CHECK_I64(m.grads[m.num_grads - 1].num_releases, 1);
  CHECK(!fsdp_engine_in_backward(m.engine));
  memset(m.units[0].expected[0], 0, 8 * sizeof(double));
  memset(m.units[2].expected[0], 0, 24 * sizeof(double));
  fsdp_engine_set_sync(m.engine, FSDP_SYNC_REDUCE);
  model_step(&m);
  model_check_grads(&m);
  model_fini(&m);
}

/* --- Steady state -------------------------------------------------------- */

static void check_steady_state(const model_options *options) {
  model_init(&m, options);
  model_plan_simple(&m, "root", 8);
  model_plan_mixed(&m, "mixed");
  model_plan_simple(&m, "b", 16);
  model_plan_simple(&m, "c", 16);
  model_start(&m);
  for (int i = 0; i < 2; i++) model_step(&m);
  recorder_clear(m.device);
  const fsdp_engine_stats before = model_stats(&m);
  const int64_t num_live = fsdp_alloc_live();
  for (int i = 0; i < 3; i++) {
    model_zero_grad(&m);
    model_optimizer_step(&m);
    fsdp_alloc_fail_at(0);
    model_step(&m);
    CHECK(fsdp_calloc(1, 1) == NULL); /* the injected failure is unused */
    fsdp_alloc_fail_at(-1);
    model_check_grads(&m);
  }
  const fsdp_engine_stats after = model_stats(&m);
  CHECK_I64(fsdp_alloc_live(), num_live);
  CHECK(strstr(recorder_tape(m.device), "alloc") == NULL);
  CHECK(strstr(recorder_tape(m.device), "\nfree ") == NULL);
  CHECK(strstr(recorder_tape(m.device), "event") == NULL);
  CHECK_I64(after.arena.num_allocs, before.arena.num_allocs);
  CHECK_I64(after.arena.nbytes, before.arena.nbytes);
  CHECK_I64(after.arena.held_nbytes, 0);
  CHECK_I64(recorder_live_nbytes(m.device), after.arena.nbytes);
  model_fini(&m);
}

static void test_third_step_allocates_nothing(void) {
  model_options options = model_default_options();
  check_steady_state(&options);
  options.forward_prefetch = true;
  check_steady_state(&options);
  options.backward_prefetch = FSDP_PREFETCH_POST;
  check_steady_state(&options);
  options.backward_prefetch = FSDP_PREFETCH_NONE;
  options.num_replicas = 2;
  check_steady_state(&options);
  options.reshard_after_forward = false;
  options.param_dtype = RECORDER_BF16;
  check_steady_state(&options);
  options.world_size = 1;
  check_steady_state(&options);
  options.param_dtype = (fsdp_dtype){0, 0};
  check_steady_state(&options);
}

/* Memory is arithmetic. One unit: its parameters and its gradients are held
 * together once, in bf16 and in fp32. */
static void test_memory_of_one_unit(void) {
  model_options options = model_default_options();
  options.param_dtype = RECORDER_BF16;
  options.reduce_dtype = RECORDER_F32;
  model_init(&m, &options);
  model_plan_simple(&m, "u", 64);
  model_start(&m);
  for (int i = 0; i < 3; i++) model_step(&m);
  CHECK_I64(model_stats(&m).arena.nbytes, 128 * 2 + 128 * 4);
  CHECK_I64(model_stats(&m).arena.peak_nbytes, 128 * 2 + 128 * 4);
  CHECK_I64(recorder_live_nbytes(m.device), 128 * 2 + 128 * 4);
  CHECK_I64(model_stats(&m).shard_nbytes, 64 * 4);
  CHECK_I64(model_stats(&m).grad_shard_nbytes, 64 * 4);
  model_fini(&m);
}

/* Equal layers: however many there are, the memory is the same number of
 * blocks, each as large as one layer. */
static void test_memory_does_not_grow_with_depth(void) {
  static const char *const names[] = {"root", "a", "b", "c", "d", "e", "f"};
  int64_t nbytes[2] = {0, 0};
  for (int round = 0; round < 2; round++) {
    model_init(&m, NULL);
    for (int64_t i = 0; i < (round == 0 ? 5 : 7); i++) {
      model_plan_simple(&m, names[i], 64);
    }
    model_start(&m);
    for (int i = 0; i < 3; i++) {
      model_zero_grad(&m);
      model_step(&m);
      model_check_grads(&m);
    }
    nbytes[round] = model_stats(&m).arena.nbytes;
    CHECK_I64(nbytes[round] % (128 * 4), 0);
    CHECK_I64(recorder_live_nbytes(m.device), nbytes[round]);
    model_fini(&m);
  }
  CHECK_I64(nbytes[0], nbytes[1]);
}

int main(void) {
  static const check_test tests[] = {
      CHECK_TEST(test_accumulates_over_backwards),
      CHECK_TEST(test_users_own_gradient_is_added_to),
      CHECK_TEST(test_no_sync_then_sync),
      CHECK_TEST(test_kept_parameters),
      CHECK_TEST(test_sync_then_no_sync_then_sync),
      CHECK_TEST(test_cleared_unsharded_gradients_stay_cleared),
      CHECK_TEST(test_kept_gradients_are_reduced_at_the_end),
      CHECK_TEST(test_unused_parameters_are_zero),
      CHECK_TEST(test_gradients_of_one_parameter_add_up),
      CHECK_TEST(test_large_gradients_are_packed_early),
      CHECK_TEST(test_forward_inside_an_open_backward_is_refused),
      CHECK_TEST(test_reset_in_the_middle),
      CHECK_TEST(test_third_step_allocates_nothing),
      CHECK_TEST(test_memory_of_one_unit),
      CHECK_TEST(test_memory_does_not_grow_with_depth),
  };
  return CHECK_RUN(tests);
}
