/*
 * Tests of runtime/: forward. In which order units gather and reshard.
 */
#include "engine_fixture.h"

static model m; /* each test makes and frees it */

static void forward(bool expects_backward) {
  CHECK_I64(model_forward(&m, expects_backward, NULL), FSDP_OK);
}

static void enter(int64_t unit) {
  CHECK_I64(model_enter(&m, unit, NULL), FSDP_OK);
}

static void leave(int64_t unit, bool expects_backward) {
  CHECK_I64(model_leave(&m, unit, expects_backward, NULL), FSDP_OK);
}

/* --- Forward ------------------------------------------------------------- */

static void test_tree_gathers_unit_by_unit(void) {
  model_start_tree(&m, NULL, 2);
  forward(true);
  CHECK_TEXT(model_schedule(&m),
             "all_gather root\n"
             "show root unsharded\n"
             "all_gather a\n"
             "show a unsharded\n"
             "show a sharded\n"
             "all_gather b\n"
             "show b unsharded\n"
             "show b sharded\n"
             "show root sharded\n"); /* hidden, kept for its backward */
  CHECK_I64(model_state(&m, 0), FSDP_UNIT_HIDDEN);
  CHECK_I64(model_state(&m, 1), FSDP_UNIT_SHARDED);
  model_fini(&m);
}

static void test_forward_without_backward_keeps_nothing(void) {
  model_options options = model_default_options();
  options.reshard_after_forward = false;
  model_start_tree(&m, &options, 1);
  forward(false);
  CHECK_TEXT(model_schedule(&m),
             "all_gather root\n"
             "show root unsharded\n"
             "all_gather a\n"
             "show a unsharded\n"
             "show a sharded\n"
             "show root sharded\n");
  model_check_states(&m, FSDP_UNIT_SHARDED);
  model_fini(&m);
}

static void test_forward_prefetch_from_the_second_iteration(void) {
  model_options options = model_default_options();
  options.forward_prefetch = true;
  model_start_tree(&m, &options, 3);
  forward(false);
  CHECK_I64(model_stats(&m).num_prefetches, 0);
  model_optimizer_step(&m);
  recorder_clear(m.device);
  forward(false);
  CHECK_TEXT(model_schedule(&m),
             "all_gather root\n"
             "all_gather a\n"
             "show root unsharded\n"
             "all_gather b\n"
             "show a unsharded\n"
             "show a sharded\n"
             "all_gather c\n"
             "show b unsharded\n"
             "show b sharded\n"
             "show c unsharded\n"
             "show c sharded\n"
             "show root sharded\n");
  CHECK_I64(model_stats(&m).num_prefetches, 3);
  CHECK_I64(model_stats(&m).num_all_gathers, 8);
  model_fini(&m);
}

/* b was prefetched but the forward ends without it: never shown, dropped. */
static void test_unused_forward_prefetch_is_dropped(void) {
  model_options options = model_default_options();
  options.forward_prefetch = true;
  model_start_tree(&m, &options, 2);
  forward(false);
  recorder_clear(m.device);
  enter(0);
  enter(1);
  CHECK_I64(model_state(&m, 2), FSDP_UNIT_PREFETCHED);
  leave(1, false);
  leave(0, false);
  CHECK_TEXT(model_schedule(&m),
             "all_gather root\n"
             "all_gather a\n"
             "show root unsharded\n"
             "all_gather b\n"
             "show a unsharded\n"
             "show a sharded\n"
             "show root sharded\n");
  model_check_states(&m, FSDP_UNIT_SHARDED);
  CHECK_I64(model_stats(&m).arena.held_nbytes, 0);
  /* Another order: what is in flight is used when its turn comes, nothing more
   * is prefetched. */
  forward(false);
  forward(false);
  recorder_clear(m.device);
  enter(0); /* prefetches a */
  enter(2);
  leave(2, false);
  enter(1);
  leave(1, false);
  leave(0, false);
  CHECK_TEXT(model_schedule(&m),
             "all_gather root\n"
             "all_gather a\n"
             "show root unsharded\n"
             "all_gather b\n"
             "show b unsharded\n"
             "show b sharded\n"
             "show a unsharded\n"
             "show a sharded\n"
             "show root sharded\n");
  model_fini(&m);
}

/* Parameters kept for a backward that never came are from before the
 * optimizer's step: the next forward gathers them again. */
static void test_stale_params_are_dropped(void) {
  model_options options = model_default_options();
  options.reshard_after_forward = false;
  model_start_tree(&m, &options, 1);
  forward(true);
  model_check_states(&m, FSDP_UNIT_HIDDEN);
  model_optimizer_step(&m);
  recorder_clear(m.device);
  forward(true); /* checks the values */
  CHECK_TEXT(model_schedule(&m),
             "all_gather root\n"
             "show root unsharded\n"
             "all_gather a\n"
             "show a unsharded\n"
             "show root sharded\n"
             "show a sharded\n");
  model_fini(&m);
}

static void test_unit_called_twice_in_forward(void) {
  model_start_tree(&m, NULL, 1);
  enter(0);
  for (int i = 0; i < 2; i++) {
    enter(1);
    leave(1, true);
  }
  leave(0, true);
  CHECK_TEXT(model_schedule(&m),
             "all_gather root\n"
             "show root unsharded\n"
             "all_gather a\n"
             "show a unsharded\n"
             "show a sharded\n"
             "all_gather a\n"
             "show a unsharded\n"
             "show a sharded\n"
             "show root sharded\n");
  model_fini(&m);
}

static void test_forward_that_raises(void) {
  model_options options = model_default_options();
  options.forward_prefetch = true;
  model_start_tree(&m, &options, 2);
  forward(false);
  enter(0);
  enter(1); /* b is in flight */
  fsdp_unit_abandon_forward(m.units[1].unit, false);
  CHECK(fsdp_engine_in_forward(m.engine));
  CHECK_I64(model_state(&m, 1), FSDP_UNIT_SHARDED);
  fsdp_unit_abandon_forward(m.units[0].unit, false);
  CHECK(!fsdp_engine_in_forward(m.engine));
  model_check_states(&m, FSDP_UNIT_SHARDED);
  CHECK_I64(model_stats(&m).arena.held_nbytes, 0);
  model_step(&m);
  model_check_grads(&m);
  model_fini(&m);
}

/* A child is run on its own: it is the root of that iteration. */
static void test_outermost_unit_is_the_root(void) {
  model_start_tree(&m, NULL, 2);
  enter(1);
  leave(1, true);
  CHECK_I64(model_state(&m, 1), FSDP_UNIT_HIDDEN);
  CHECK_I64(model_pre_backward(&m, 1, NULL), FSDP_OK);
  CHECK_I64(model_give_grads(&m, 1, NULL), FSDP_OK);
  CHECK_I64(model_finish(&m, NULL), FSDP_OK);
  CHECK_I64(model_stats(&m).num_iterations, 1);
  CHECK_I64(model_stats(&m).num_all_gathers, 1);
  model_check_states(&m, FSDP_UNIT_SHARDED);
  model_fini(&m);
}

static void test_unit_without_parameters(void) {
  model_init(&m, NULL);
  model_plan(&m, "root", NULL, 0);
  model_plan_simple(&m, "a", 4);
  model_start(&m);
  model_step(&m);
  CHECK_TEXT(model_schedule(&m),
             "all_gather a\n"
             "show a unsharded\n"
             "show a sharded\n"
             "all_gather a\n"
             "show a unsharded\n"
             "show a sharded\n"
             "reduce_scatter a\n"
             "show_grads a sharded\n");
  model_check_grads(&m);
  model_check_states(&m, FSDP_UNIT_SHARDED);
  CHECK_I64(fsdp_unit_summon(m.units[0].unit, NULL, NULL), FSDP_OK);
  CHECK_I64(fsdp_unit_dismiss(m.units[0].unit, true, NULL), FSDP_OK);
  model_step(&m);
  CHECK_I64(model_stats(&m).num_units, 2);
  CHECK_I64(model_stats(&m).arena.num_clients, 2);
  model_fini(&m);
}

/* Parameters of zero elements get gradients too; there is nothing to do. */
static void test_unit_of_empty_parameters(void) {
  const fsdp_param_spec specs[] = {{0, 0, RECORDER_F32, true},
                                   {0, 0, RECORDER_F32, true}};
  model_init(&m, NULL);
  model_plan(&m, "root", specs, 2);
  model_start(&m);
  model_step(&m);
  CHECK_TEXT(model_schedule(&m), "");
  CHECK_I64(model_stats(&m).arena.num_allocs, 0);
  CHECK_I64(model_stats(&m).num_reduces, 0);
  model_fini(&m);
}

int main(void) {
  static const check_test tests[] = {
      CHECK_TEST(test_tree_gathers_unit_by_unit),
      CHECK_TEST(test_forward_without_backward_keeps_nothing),
      CHECK_TEST(test_forward_prefetch_from_the_second_iteration),
      CHECK_TEST(test_unused_forward_prefetch_is_dropped),
      CHECK_TEST(test_stale_params_are_dropped),
      CHECK_TEST(test_unit_called_twice_in_forward),
      CHECK_TEST(test_forward_that_raises),
      CHECK_TEST(test_outermost_unit_is_the_root),
      CHECK_TEST(test_unit_without_parameters),
      CHECK_TEST(test_unit_of_empty_parameters),
  };
  return CHECK_RUN(tests);
}
