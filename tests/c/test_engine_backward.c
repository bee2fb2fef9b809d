/*
 * Tests of runtime/: backward. In which order units gather and reduce.
 */
#include "engine_fixture.h"

/* --- Order of gathers ---------------------------------------------------- */

/* The schedule of a backward of root and a, b, c. */
static const char *backward_schedule(const model_options *options) {
  model_start_tree(&m, options, 3);
  PLAY("forward; clear; backward; check_grads; check_sharded");
  return model_schedule(&m);
}

#define SHOW_ALL_GRADS        \
  "show_grads root sharded\n" \
  "show_grads a sharded\n"    \
  "show_grads b sharded\n"    \
  "show_grads c sharded\n"

TEST(test_prefetch_before_the_gradients) {
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
  PLAY("num_prefetches 3; end");
}

TEST(test_prefetch_after_the_gradients) {
  model_options options = {.backward_prefetch = PREFETCH_AFTER};
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
  PLAY("num_prefetches 2; end");
}

TEST(test_no_prefetch) {
  model_options options = {.backward_prefetch = NO_PREFETCH};
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
  PLAY("num_prefetches 0; end");
}

TEST(test_shard_grad_op_gathers_once) {
  model_options options = {.keeps_after_forward = true};
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
  PLAY("num_all_gathers 4; end");
}

/* a was reduced already when b comes: gathering it again would bring weights
 * from before the optimizer's step into the next forward. */
TEST(test_reduced_unit_is_not_prefetched) {
  model_start_tree(&m, NULL, 2);
  PLAY(
      "forward; pre_backward a; grads a; state a REDUCING; clear; "
      "pre_backward b; grads b; pre_backward root");
  CHECK_SCHEDULE(
      "all_gather b; show b unsharded; show b sharded; reduce_scatter b; "
      "show root unsharded");
  PLAY("grads root; finish; check_grads; check_sharded; end");
}

/* Nor is one whose reduction waits for its turn. */
TEST(test_waiting_unit_is_not_prefetched) {
  const fsdp_param_spec frozen = {0, 16, RECORDER_F32, false};
  model_init(&m, NULL);
  model_plan_simple(&m, "root", 4);
  model_plan_simple(&m, "a", 12);
  model_plan(&m, "frozen", &frozen, 1);
  model_plan_simple(&m, "c", 16);
  model_start(&m);
  PLAY("step"); /* reduces c, a, root */
  /* of the parameters themselves; its turn is after c */
  PLAY(
      "forward; grads a; state a SHARDED; clear; pre_backward frozen; "
      "grads frozen");
  CHECK_SCHEDULE(
      "all_gather frozen; show frozen unsharded; show frozen sharded");
  PLAY(
      "pre_backward c; grads c; pre_backward root; grads root; finish; "
      "check_grads; end");
}

/* A nested backward comes back to a while a's reduction waits for its turn: a
 * keeps the block until the end of backward, and no longer. */
TEST(test_unsharded_again_before_its_reduction) {
  model_start_tree(&m, NULL, 2);
  PLAY("step"); /* reduces b, a, root */
  PLAY("zero_grad; forward; pre_backward a; grads a; state a SHARDED"); /* waits
                                                                           for b
                                                                         */
  PLAY(
      "pre_backward a; pre_backward b; grads b; num_reduces 5; "
      "state a UNSHARDED; pre_backward root; grads root; finish; "
      "check_grads; check_sharded; check_idle; zero_grad; step; check_grads; "
      "end");
}

/* b is prefetched for a backward that ends without it. */
TEST(test_prefetch_in_flight_is_dropped_at_the_end) {
  model_start_tree(&m, NULL, 2);
  PLAY(
      "forward; pre_backward root; state b PREFETCHED; grads root; clear; "
      "finish");
  CHECK_SCHEDULE("show_grads root sharded");
  CHECK_TAPE_HAS(" unshard;");
  /* with the new values */
  PLAY(
      "check_sharded; check_idle; optimizer; zero_grad; step; check_grads; "
      "end");
}

/* Activation checkpointing: the recomputed unit stays until its backward. */
TEST(test_recompute_gathers_once) {
  model_start_tree(&m, NULL, 2);
  PLAY("forward; pre_backward root"); /* b in flight */
  PLAY("clear");
  CHECK_I64(fsdp_unit_pre_forward(m.units[2].unit, true, NULL), FSDP_OK);
  CHECK_I64(fsdp_unit_post_forward(m.units[2].unit, true, true, NULL), FSDP_OK);
  PLAY("pre_backward b; grads b");
  CHECK_I64(fsdp_unit_pre_forward(m.units[1].unit, true, NULL), FSDP_OK);
  fsdp_unit_abandon_forward(m.units[1].unit, true); /* stopped early */
  PLAY("pre_backward a; grads a");
  CHECK_SCHEDULE(
      "show b unsharded; all_gather a; "
      /* prefetched by b */
      "show b sharded; reduce_scatter b; show a unsharded; show a sharded; "
      "reduce_scatter a");
  PLAY(
      "grads root; finish; check_grads; num_iterations 1; num_all_gathers 5; "
      "end");
}

/* The second call's backward comes first; gradients come with the first. */
TEST(test_unit_called_twice) {
  model_start_tree(&m, NULL, 1);
  PLAY(
      "enter root; enter a; leave a; enter a; leave a; leave root; clear; "
      "pre_backward root; pre_backward a; pre_backward a; grads a; "
      "grads root; finish");
  CHECK_SCHEDULE(
      "all_gather a; show root unsharded; show a unsharded; show a sharded; "
      "reduce_scatter a; show root sharded; reduce_scatter root; "
      "show_grads root sharded; show_grads a sharded");
  PLAY("check_grads; end");
}

/* Gradients of each call come on their own: reduced twice, summed up. */
TEST(test_unit_reduced_twice) {
  model_start_tree(&m, NULL, 1);
  for (int step = 0; step < 2; step++) {
    PLAY(
        "zero_grad; enter root; enter a; leave a; enter a; leave a; "
        "leave root; pre_backward root");
    for (int i = 0; i < 2; i++) {
      PLAY("pre_backward a"); /* the second time from REDUCING */
      PLAY("grads a");
    }
    PLAY("grads root; finish; check_grads; check_sharded");
  }
  PLAY("num_reduces 6; end");
}

TEST(test_frozen_unit) {
  const fsdp_param_spec frozen = {0, 16, RECORDER_F32, false};
  model_options options = {.backward_prefetch = PREFETCH_AFTER};
  model_init(&m, &options);
  model_plan_simple(&m, "root", 4);
  model_plan_simple(&m, "a", 12);
  model_plan(&m, "frozen", &frozen, 1);
  model_start(&m);
  PLAY("forward");
  CHECK_I64(fsdp_unit_inputs_ready(m.units[2].unit, NULL), FSDP_OK); /* not in
                                                                a backward */
  PLAY("clear; backward");
  CHECK_SCHEDULE(
      "show root unsharded; all_gather frozen; show frozen unsharded; "
      "show frozen sharded; all_gather a; show a unsharded; show a sharded; "
      "reduce_scatter a; show root sharded; reduce_scatter root; "
      "show_grads root sharded; show_grads a sharded");
  PLAY("check_grads; check_sharded");
  CHECK_I64(model_stats(&m).arena.num_clients, 5); /* no gradient memory */
  PLAY("end");
}

/* --- Order of reductions ------------------------------------------------- */

/* The gradients of `first`, `second`, `third`, then of the root. */
static void backward_in_order(int64_t first, int64_t second, int64_t third) {
  const int64_t order[] = {first, second, third};
  PLAY("pre_backward root");
  for (int i = 0; i < 3; i++) {
    CHECK_I64(model_pre_backward(&m, order[i], NULL), FSDP_OK);
    CHECK_I64(model_give_grads(&m, order[i], NULL), FSDP_OK);
  }
  PLAY("grads root");
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
  PLAY("clear");
  return text;
}

TEST(test_reductions_keep_their_order) {
  model_start_tree(&m, NULL, 3);
  PLAY("step");
  CHECK_TEXT(reductions(), "c b a root ");
  /* a is ready first, but its turn is after c and b */
  PLAY("zero_grad; forward; pre_backward root; pre_backward a; grads a");
  CHECK_TEXT(reductions(), "");
  PLAY("state a SHARDED; pre_backward c; grads c");
  CHECK_TEXT(reductions(), "c ");
  PLAY("pre_backward b; grads b");
  CHECK_TEXT(reductions(), "b a ");
  PLAY("grads root");
  CHECK_TEXT(reductions(), "root ");
  PLAY("finish; check_grads; check_sharded; end");
}

/* Who ran no forward is not waited for; who got no gradients delays the
 * others until the end of the backward. */
TEST(test_reductions_with_units_that_are_missing) {
  model_start_tree(&m, NULL, 3);
  PLAY("step");
  (void)reductions();
  PLAY("zero_grad; enter root"); /* without c */
  for (int64_t i = 1; i < 3; i++) {
    CHECK_I64(model_enter(&m, i, NULL), FSDP_OK);
    CHECK_I64(model_leave(&m, i, true, NULL), FSDP_OK);
  }
  PLAY("leave root; pre_backward root; pre_backward b; grads b");
  CHECK_TEXT(reductions(), "b ");
  PLAY("grads root"); /* a ran forward and never comes */
  CHECK_TEXT(reductions(), "");
  PLAY("finish");
  CHECK_TEXT(reductions(), "root ");
  PLAY("check_sharded");

  /* a and c do not stand in the record any more: reduced when ready. */
  PLAY("zero_grad; forward");
  backward_in_order(1, 3, 2);
  CHECK_TEXT(reductions(), "a c b root ");
  PLAY("finish; check_grads; end");
}

/* Without a record, after a unit went, nothing waits for its turn. */
TEST(test_reductions_after_a_unit_went) {
  model_start_tree(&m, NULL, 3);
  PLAY("step; destroy c");
  m.num_units--;
  (void)reductions();
  PLAY("zero_grad; forward; pre_backward root; pre_backward a; grads a");
  CHECK_TEXT(reductions(), "a ");
  PLAY("pre_backward b; grads b");
  CHECK_TEXT(reductions(), "b ");
  PLAY("grads root; finish; check_grads");
  m.num_units++;
  PLAY("end");
}

/* A unit that goes in the middle of a backward: its end waits for the
 * reductions of the others. */
TEST(test_unit_goes_inside_backward) {
  model_start_tree(&m, NULL, 2);
  PLAY(
      "forward; pre_backward root; pre_backward b; grads b; destroy a; "
      "clear; finish");
  CHECK_TAPE_HAS("record e2 reduce; wait compute e2;");
  PLAY("state b SHARDED; end");
}
