/*
 * Tests of runtime/: backward. In which order units gather and reduce.
 */
#include "engine_fixture.h"

static model m; /* each test makes and frees it */

static void forward(void) {
  CHECK_I64(model_forward(&m, true, NULL), FSDP_OK);
}

static void backward(void) {
  CHECK_I64(model_backward(&m, NULL), FSDP_OK);
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

/* --- Order of gathers ---------------------------------------------------- */

/* The schedule of a backward of root and a, b, c. */
static const char *backward_schedule(const model_options *options) {
  model_start_tree(&m, options, 3);
  forward();
  recorder_clear(m.device);
  backward();
  model_check_grads(&m);
  model_check_states(&m, FSDP_UNIT_SHARDED);
  return model_schedule(&m);
}

#define SHOW_ALL_GRADS        \
  "show_grads root sharded\n" \
  "show_grads a sharded\n"    \
  "show_grads b sharded\n"    \
  "show_grads c sharded\n"

static void test_prefetch_before_the_gradients(void) {
  CHECK_TEXT(backward_schedule(NULL),
             "all_gather c\n" /* prefetched by the root, which was kept */
             "show root unsharded\n"
             "all_gather b\n"
             "show c unsharded\n"
             "show c sharded\n"
             "reduce_scatter c\n"
             "all_gather a\n"
             "show b unsharded\n"
             "show b sharded\n"
             "reduce_scatter b\n"
             "show a unsharded\n"
             "show a sharded\n"
             "reduce_scatter a\n"
             "show root sharded\n"
             "reduce_scatter root\n" SHOW_ALL_GRADS);
  CHECK_I64(model_stats(&m).num_prefetches, 3);
  model_fini(&m);
}

static void test_prefetch_after_the_gradients(void) {
  model_options options = model_default_options();
  options.backward_prefetch = FSDP_PREFETCH_POST;
  CHECK_TEXT(backward_schedule(&options),
             "show root unsharded\n"
             "all_gather c\n" /* by its own pre-backward */
             "show c unsharded\n"
             "show c sharded\n"
             "reduce_scatter c\n"
             "all_gather b\n"
             "show b unsharded\n"
             "show b sharded\n"
             "reduce_scatter b\n"
             "all_gather a\n"
             "show a unsharded\n"
             "show a sharded\n"
             "reduce_scatter a\n"
             "show root sharded\n"
             "reduce_scatter root\n" SHOW_ALL_GRADS);
  CHECK_I64(model_stats(&m).num_prefetches, 2);
  model_fini(&m);
}

static void test_no_prefetch(void) {
  model_options options = model_default_options();
  options.backward_prefetch = FSDP_PREFETCH_NONE;
  CHECK_TEXT(backward_schedule(&options),
             "show root unsharded\n"
             "all_gather c\n"
             "show c unsharded\n"
             "show c sharded\n"
             "reduce_scatter c\n"
             "all_gather b\n"
             "show b unsharded\n"
             "show b sharded\n"
             "reduce_scatter b\n"
             "all_gather a\n"
             "show a unsharded\n"
             "show a sharded\n"
             "reduce_scatter a\n"
             "show root sharded\n"
             "reduce_scatter root\n" SHOW_ALL_GRADS);
  CHECK_I64(model_stats(&m).num_prefetches, 0);
  model_fini(&m);
}

static void test_shard_grad_op_gathers_once(void) {
  model_options options = model_default_options();
  options.reshard_after_forward = false;
  CHECK_TEXT(backward_schedule(&options),
             "show root unsharded\n"
             "show c unsharded\n"
             "show c sharded\n"
             "reduce_scatter c\n"
             "show b unsharded\n"
             "show b sharded\n"
             "reduce_scatter b\n"
             "show a unsharded\n"
             "show a sharded\n"
             "reduce_scatter a\n"
             "show root sharded\n"
             "reduce_scatter root\n" SHOW_ALL_GRADS);
  CHECK_I64(model_stats(&m).num_all_gathers, 4);
  model_fini(&m);
}

/* a was reduced already when b comes: gathering it again would bring weights
 * from before the optimizer's step into the next forward. */
static void test_reduced_unit_is_not_prefetched(void) {
  model_start_tree(&m, NULL, 2);
  forward();
  pre_backward(1);
  give_grads(1);
  CHECK_I64(model_state(&m, 1), FSDP_UNIT_REDUCING);
  recorder_clear(m.device);
  pre_backward(2);
  give_grads(2);
  pre_backward(0);
  CHECK_TEXT(model_schedule(&m),
             "all_gather b\n"
             "show b unsharded\n"
             "show b sharded\n"
             "reduce_scatter b\n"
             "show root unsharded\n");
  give_grads(0);
  finish();
  model_check_grads(&m);
  model_check_states(&m, FSDP_UNIT_SHARDED);
  model_fini(&m);
}

/* Nor is one whose reduction waits for its turn. */
static void test_waiting_unit_is_not_prefetched(void) {
  const fsdp_param_spec frozen = {0, 16, RECORDER_F32, false};
  model_init(&m, NULL);
  model_plan_simple(&m, "root", 4);
  model_plan_simple(&m, "a", 12);
  model_plan(&m, "frozen", &frozen, 1);
  model_plan_simple(&m, "c", 16);
  model_start(&m);
  model_step(&m); /* reduces c, a, root */
  forward();
  give_grads(1); /* of the parameters themselves; its turn is after c */
  CHECK_I64(model_state(&m, 1), FSDP_UNIT_SHARDED);
  recorder_clear(m.device);
  pre_backward(2);
  give_grads(2);
  CHECK_TEXT(model_schedule(&m),
             "all_gather frozen\n"
             "show frozen unsharded\n"
             "show frozen sharded\n");
  pre_backward(3);
  give_grads(3);
  pre_backward(0);
  give_grads(0);
  finish();
  model_check_grads(&m);
  model_fini(&m);
}

/* A nested backward comes back to a while a's reduction waits for its turn: a
 * keeps the block until the end of backward, and no longer. */
static void test_unsharded_again_before_its_reduction(void) {
  model_start_tree(&m, NULL, 2);
  model_step(&m); /* reduces b, a, root */
  model_zero_grad(&m);
  forward();
  pre_backward(1);
  give_grads(1);
  CHECK_I64(model_state(&m, 1), FSDP_UNIT_SHARDED); /* waits for b */
  pre_backward(1);
  pre_backward(2);
  give_grads(2);
  CHECK_I64(model_stats(&m).num_reduces, 3 + 2);
  CHECK_I64(model_state(&m, 1), FSDP_UNIT_UNSHARDED);
  pre_backward(0);
  give_grads(0);
  finish();
  model_check_grads(&m);
  model_check_states(&m, FSDP_UNIT_SHARDED);
  CHECK_I64(model_stats(&m).arena.held_nbytes, 0);
  model_zero_grad(&m);
  model_step(&m);
  model_check_grads(&m);
  model_fini(&m);
}

/* b is prefetched for a backward that ends without it. */
static void test_prefetch_in_flight_is_dropped_at_the_end(void) {
  model_start_tree(&m, NULL, 2);
  forward();
  pre_backward(0);
  CHECK_I64(model_state(&m, 2), FSDP_UNIT_PREFETCHED);
  give_grads(0);
  recorder_clear(m.device);
  finish();
  CHECK_TEXT(model_schedule(&m), "show_grads root sharded\n");
  CHECK(strstr(recorder_tape(m.device), " unshard\n") != NULL);
  model_check_states(&m, FSDP_UNIT_SHARDED);
  CHECK_I64(model_stats(&m).arena.held_nbytes, 0);
  model_optimizer_step(&m);
  model_zero_grad(&m);
  model_step(&m); /* with the new values */
  model_check_grads(&m);
  model_fini(&m);
}

/* Activation checkpointing: the recomputed unit stays until its backward. */
static void test_recompute_gathers_once(void) {
  model_start_tree(&m, NULL, 2);
  forward();
  pre_backward(0); /* b in flight */
  recorder_clear(m.device);
  CHECK_I64(fsdp_unit_pre_forward(m.units[2].unit, true, NULL), FSDP_OK);
  CHECK_I64(fsdp_unit_post_forward(m.units[2].unit, true, true, NULL), FSDP_OK);
  pre_backward(2);
  give_grads(2);
  CHECK_I64(fsdp_unit_pre_forward(m.units[1].unit, true, NULL), FSDP_OK);
  fsdp_unit_abandon_forward(m.units[1].unit, true); /* stopped early */
  pre_backward(1);
  give_grads(1);
  CHECK_TEXT(model_schedule(&m),
             "show b unsharded\n"
             "all_gather a\n" /* prefetched by b */
             "show b sharded\n"
             "reduce_scatter b\n"
             "show a unsharded\n"
             "show a sharded\n"
             "reduce_scatter a\n");
  give_grads(0);
  finish();
  model_check_grads(&m);
  CHECK_I64(model_stats(&m).num_iterations, 1);
  CHECK_I64(model_stats(&m).num_all_gathers, 5);
  model_fini(&m);
}

/* The second call's backward comes first; gradients come with the first. */
static void test_unit_called_twice(void) {
  model_start_tree(&m, NULL, 1);
  enter(0);
  for (int i = 0; i < 2; i++) {
    enter(1);
    leave(1);
  }
  leave(0);
  recorder_clear(m.device);
  pre_backward(0);
  pre_backward(1);
  pre_backward(1);
  give_grads(1);
  give_grads(0);
  finish();
  CHECK_TEXT(model_schedule(&m),
             "all_gather a\n"
             "show root unsharded\n"
             "show a unsharded\n"
             "show a sharded\n"
             "reduce_scatter a\n"
             "show root sharded\n"
             "reduce_scatter root\n"
             "show_grads root sharded\n"
             "show_grads a sharded\n");
  model_check_grads(&m);
  model_fini(&m);
}

/* Gradients of each call come on their own: reduced twice, summed up. */
static void test_unit_reduced_twice(void) {
  model_start_tree(&m, NULL, 1);
  for (int step = 0; step < 2; step++) {
    model_zero_grad(&m);
    enter(0);
    for (int i = 0; i < 2; i++) {
      enter(1);
      leave(1);
    }
    leave(0);
    pre_backward(0);
    for (int i = 0; i < 2; i++) {
      pre_backward(1); /* the second time from REDUCING */
      give_grads(1);
    }
    give_grads(0);
    finish();
    model_check_grads(&m);
    model_check_states(&m, FSDP_UNIT_SHARDED);
  }
  CHECK_I64(model_stats(&m).num_reduces, 2 * 3);
  model_fini(&m);
}

static void test_frozen_unit(void) {
  const fsdp_param_spec frozen = {0, 16, RECORDER_F32, false};
  model_options options = model_default_options();
  options.backward_prefetch = FSDP_PREFETCH_POST;
  model_init(&m, &options);
  model_plan_simple(&m, "root", 4);
  model_plan_simple(&m, "a", 12);
  model_plan(&m, "frozen", &frozen, 1);
  model_start(&m);
  forward();
  CHECK_I64(fsdp_unit_inputs_ready(m.units[2].unit, NULL), FSDP_OK); /* not in
                                                                a backward */
  recorder_clear(m.device);
  backward();
  CHECK_TEXT(model_schedule(&m),
             "show root unsharded\n"
             "all_gather frozen\n"
             "show frozen unsharded\n"
             "show frozen sharded\n"
             "all_gather a\n"
             "show a unsharded\n"
             "show a sharded\n"
             "reduce_scatter a\n"
             "show root sharded\n"
             "reduce_scatter root\n"
             "show_grads root sharded\n"
             "show_grads a sharded\n");
  model_check_grads(&m);
  model_check_states(&m, FSDP_UNIT_SHARDED);
  CHECK_I64(model_stats(&m).arena.num_clients, 5); /* no gradient memory */
  model_fini(&m);
}

/* --- Order of reductions ------------------------------------------------- */

/* The gradients of `first`, `second`, `third`, then of the root. */
static void backward_in_order(int64_t first, int64_t second, int64_t third) {
  const int64_t order[] = {first, second, third};
  pre_backward(0);
  for (int i = 0; i < 3; i++) {
    pre_backward(order[i]);
    give_grads(order[i]);
  }
  give_grads(0);
}

static const char *reductions(void) {
  static char text[256];
  const char *line = model_schedule(&m);
  text[0] = '\0';
  while ((line = strstr(line, "reduce_scatter ")) != NULL) {
    line += strlen("reduce_scatter ");
    strncat(text, line, strcspn(line, "\n"));
    strcat(text, " ");
  }
  recorder_clear(m.device);
  return text;
}

static void test_reductions_keep_their_order(void) {
  model_start_tree(&m, NULL, 3);
  model_step(&m);
  CHECK_TEXT(reductions(), "c b a root ");
  model_zero_grad(&m);
  forward();
  pre_backward(0);
  pre_backward(1);
  give_grads(1); /* a is ready first, but its turn is after c and b */
  CHECK_TEXT(reductions(), "");
  CHECK_I64(model_state(&m, 1), FSDP_UNIT_SHARDED);
  pre_backward(3);
  give_grads(3);
  CHECK_TEXT(reductions(), "c ");
  pre_backward(2);
  give_grads(2);
  CHECK_TEXT(reductions(), "b a ");
  give_grads(0);
  CHECK_TEXT(reductions(), "root ");
  finish();
  model_check_grads(&m);
  model_check_states(&m, FSDP_UNIT_SHARDED);
  model_fini(&m);
}

/* Who ran no forward is not waited for; who got no gradients delays the
 * others until the end of the backward. */
static void test_reductions_with_units_that_are_missing(void) {
  model_start_tree(&m, NULL, 3);
  model_step(&m);
  (void)reductions();
  model_zero_grad(&m);
  enter(0); /* without c */
  for (int64_t i = 1; i < 3; i++) {
    enter(i);
    leave(i);
  }
  leave(0);
  pre_backward(0);
  pre_backward(2);
  give_grads(2);
  CHECK_TEXT(reductions(), "b ");
  give_grads(0); /* a ran forward and never comes */
  CHECK_TEXT(reductions(), "");
  finish();
  CHECK_TEXT(reductions(), "root ");
  model_check_states(&m, FSDP_UNIT_SHARDED);

  /* a and c do not stand in the record any more: reduced when ready. */
  model_zero_grad(&m);
  forward();
  backward_in_order(1, 3, 2);
  CHECK_TEXT(reductions(), "a c b root ");
  finish();
  model_check_grads(&m);
  model_fini(&m);
}

/* Without a record, after a unit went, nothing waits for its turn. */
static void test_reductions_after_a_unit_went(void) {
  model_start_tree(&m, NULL, 3);
  model_step(&m);
  fsdp_unit_destroy(m.units[3].unit);
  m.units[3].unit = NULL;
  m.num_units--;
  (void)reductions();
  model_zero_grad(&m);
  forward();
  pre_backward(0);
  pre_backward(1);
  give_grads(1);
  CHECK_TEXT(reductions(), "a ");
  pre_backward(2);
  give_grads(2);
  CHECK_TEXT(reductions(), "b ");
  give_grads(0);
  finish();
  model_check_grads(&m);
  m.num_units++;
  model_fini(&m);
}

/* A unit that goes in the middle of a backward: its end waits for the
 * reductions of the others. */
static void test_unit_goes_inside_backward(void) {
  model_start_tree(&m, NULL, 2);
  forward();
  pre_backward(0);
  pre_backward(2);
  give_grads(2);
  fsdp_unit_destroy(m.units[1].unit);
  m.units[1].unit = NULL;
  recorder_clear(m.device);
  finish();
  CHECK(strstr(recorder_tape(m.device), "record e2 reduce\nwait compute e2\n"));
  CHECK_I64(model_state(&m, 2), FSDP_UNIT_SHARDED);
  model_fini(&m);
}

int main(void) {
  static const check_test tests[] = {
      CHECK_TEST(test_prefetch_before_the_gradients),
      CHECK_TEST(test_prefetch_after_the_gradients),
      CHECK_TEST(test_no_prefetch),
      CHECK_TEST(test_shard_grad_op_gathers_once),
      CHECK_TEST(test_reduced_unit_is_not_prefetched),
      CHECK_TEST(test_waiting_unit_is_not_prefetched),
      CHECK_TEST(test_unsharded_again_before_its_reduction),
      CHECK_TEST(test_prefetch_in_flight_is_dropped_at_the_end),
      CHECK_TEST(test_recompute_gathers_once),
      CHECK_TEST(test_unit_called_twice),
      CHECK_TEST(test_unit_reduced_twice),
      CHECK_TEST(test_frozen_unit),
      CHECK_TEST(test_reductions_keep_their_order),
      CHECK_TEST(test_reductions_with_units_that_are_missing),
      CHECK_TEST(test_reductions_after_a_unit_went),
      CHECK_TEST(test_unit_goes_inside_backward),
  };
  return CHECK_RUN(tests);
}
