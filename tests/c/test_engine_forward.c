/*
 * Tests of runtime/: forward. In which order units gather and reshard.
 */
#include "engine_fixture.h"

/* --- Forward ------------------------------------------------------------- */

TEST(test_tree_gathers_unit_by_unit) {
  model_start_tree(&m, NULL, 2);
  PLAY("forward");
  CHECK_SCHEDULE(
      "all_gather root; show root unsharded; all_gather a; show a unsharded; "
      "show a sharded; all_gather b; show b unsharded; show b sharded; "
      "hide root"); /* hidden, kept for its backward */
  PLAY("state root HIDDEN; state a SHARDED");
}

TEST(test_forward_without_backward_keeps_nothing) {
  model_start_tree(&m, WITH(.keeps_after_forward = true), 1);
  PLAY("eval");
  CHECK_SCHEDULE(
      "all_gather root; show root unsharded; all_gather a; show a unsharded; "
      "show a sharded; show root sharded");
  PLAY("check_sharded");
}

/* Unless asked to, for the next one, if the parameters stay as they are. */
TEST(test_forward_without_graph_keeps_for_the_next_one) {
  model_start_tree(
      &m, WITH(.keeps_after_forward = true, .keeps_for_inference = true), 1);
  PLAY("infer; state root KEPT; state a KEPT; view a sharded; clear; infer");
  CHECK_SCHEDULE("show root unsharded; show a unsharded; hide root; hide a");
  PLAY("num_all_gathers 2; optimizer; infer; num_all_gathers 4");
  PLAY("params_changed 0"); /* since it kept them */
  PLAY("infer; num_all_gathers 4; expect_writes; check_sharded; check_idle");
  PLAY("infer; num_all_gathers 6");
  /* A training step gathers for itself, and leaves nothing. */
  PLAY("step; num_all_gathers 8; check_grads; check_sharded; check_idle");
  /* What an earlier forward's backward awaits is that graph's. */
  PLAY("zero_grad; forward; infer; state root HIDDEN; expect_writes");
  PLAY("state a HIDDEN; backward; check_grads; check_sharded; check_idle");
  /* A backward of nothing ends it, too. */
  PLAY("infer; state a KEPT; open; finish; check_sharded; check_idle");
}

/* So is what a forward kept for its backward. */
TEST(test_forwards_of_one_backward_gather_once) {
  model_start_tree(&m, WITH(.keeps_after_forward = true, .shows_kept = true),
                   1);
  PLAY("forward; infer; num_all_gathers 2; clear; forward; num_all_gathers 2");
  PLAY("backward; check_grads; check_sharded; check_idle; zero_grad");
  /* Not if somebody is to write in between, or has. */
  PLAY("forward; num_all_gathers 4; expect_writes; state a UNSHARDED");
  PLAY("forward; num_all_gathers 6; forward; num_all_gathers 6; optimizer");
  PLAY("forward; num_all_gathers 8; backward; check_sharded; check_idle");
}

TEST(test_forward_without_graph_keeps_nothing_unasked) {
  model_start_tree(&m, WITH(.keeps_after_forward = true), 1);
  PLAY("infer; check_sharded; check_idle; infer; num_all_gathers 4");
}

TEST(test_forward_prefetch_from_the_second_iteration) {
  model_start_tree(&m, WITH(.forward_prefetch = true), 3);
  PLAY("eval; num_prefetches 0; optimizer; clear; eval");
  CHECK_SCHEDULE(
      "all_gather root; all_gather a; show root unsharded; all_gather b; "
      "show a unsharded; show a sharded; all_gather c; show b unsharded; "
      "show b sharded; show c unsharded; show c sharded; show root sharded");
  PLAY("num_prefetches 3; num_all_gathers 8");
}

/* b was prefetched but the forward ends without it: never shown, dropped. */
TEST(test_unused_forward_prefetch_is_dropped) {
  model_start_tree(&m, WITH(.forward_prefetch = true), 2);
  PLAY("eval; clear; enter root; enter a; state b PREFETCHED; leave_eval a");
  PLAY("leave_eval root");
  CHECK_SCHEDULE(
      "all_gather root; all_gather a; show root unsharded; all_gather b; "
      "show a unsharded; show a sharded; show root sharded");
  PLAY("check_sharded; check_idle");
  /* Another order: what is in flight is used when its turn comes, nothing more
   * is prefetched. */
  PLAY("eval; eval; clear; enter root"); /* prefetches a */
  PLAY("enter b; leave_eval b; enter a; leave_eval a; leave_eval root");
  CHECK_SCHEDULE(
      "all_gather root; all_gather a; show root unsharded; all_gather b; "
      "show b unsharded; show b sharded; show a unsharded; show a sharded; "
      "show root sharded");
}

/* Parameters kept for a backward that never came are from before the
 * optimizer's step: the next forward gathers them again. */
TEST(test_stale_params_are_dropped) {
  model_start_tree(&m, WITH(.keeps_after_forward = true), 1);
  PLAY("forward");
  model_check_states(&m, FSDP_UNIT_HIDDEN);
  PLAY("optimizer; clear; forward"); /* checks the values */
  CHECK_SCHEDULE(
      "all_gather root; show root unsharded; all_gather a; show a unsharded; "
      "hide root; hide a");
}

/* What is kept stays shown until backward. What the user writes there is taken
 * once: by backward, by the next forward, or when it is hidden. */
TEST(test_shown_until_backward) {
  fsdp_engine *engine;
  model_start_tree(&m, WITH(.keeps_after_forward = true, .shows_kept = true),
                   1);
  engine = m.engine;
  PLAY("forward");
  CHECK_SCHEDULE(
      "all_gather root; show root unsharded; all_gather a; show a unsharded");
  CHECK_TAPE_HAS("mark_params root;");
  CHECK_TAPE_HAS("mark_params a;");
  model_check_states(&m, FSDP_UNIT_UNSHARDED);
  CHECK(fsdp_engine_shows_kept(engine));
  CHECK(fsdp_unit_is_left_shown(m.units[1].unit));
  PLAY("clear; backward");
  CHECK_TAPE_HAS("take_writes root in backward;");
  CHECK_TAPE_HAS("take_writes a in backward;");
  CHECK_TAPE_LACKS("show a unsharded");
  CHECK(!fsdp_engine_shows_kept(engine));
  CHECK(!fsdp_unit_is_left_shown(m.units[1].unit));
  PLAY("check_grads; forward"); /* its loss is dropped */
  PLAY("params_changed 1; clear; forward");
  CHECK_TAPE_HAS("take_writes a; show a sharded;");
  PLAY("params_changed 0; clear");
  CHECK_OK(fsdp_engine_show_kept(engine, false, NULL));
  CHECK_TAPE_HAS("take_writes a; hide a; mark_params a");
  PLAY("state a HIDDEN; clear");
  CHECK_OK(fsdp_engine_show_kept(engine, true, NULL));
  CHECK_TAPE_HAS("show a unsharded; mark_params a");
  PLAY("state a UNSHARDED; clear; backward");
  CHECK_TAPE_HAS("take_writes a in backward;");
  CHECK_TAPE_LACKS("all_gather");
  PLAY("check_grads; check_idle");
}

TEST(test_unit_called_twice_in_forward) {
  model_start_tree(&m, NULL, 1);
  PLAY("enter root; enter a; leave a; enter a; leave a; leave root");
  CHECK_SCHEDULE(
      "all_gather root; show root unsharded; all_gather a; show a unsharded; "
      "show a sharded; all_gather a; show a unsharded; show a sharded; "
      "hide root");
}

TEST(test_forward_that_raises) {
  model_start_tree(&m, WITH(.forward_prefetch = true), 2);
  PLAY("eval; enter root; enter a"); /* b is in flight */
  PLAY("abandon a");
  CHECK(fsdp_engine_in_forward(m.engine));
  PLAY("state a SHARDED; abandon root");
  CHECK(!fsdp_engine_in_forward(m.engine));
  PLAY("check_sharded; check_idle; step; check_grads");
}

/* torch.autograd.grad() in the root's forward: that backward ends before the
 * forward does, which still reads the root's parameters, and those of a unit
 * whose forward runs. */
TEST(test_backward_inside_a_forward) {
  for (int i = 0; i < 2; i++) {
    model_start_tree(&m, i == 0 ? NULL : WITH(.keeps_after_forward = true), 2);
    for (int step = 0; step < 2; step++) {
      PLAY("zero_grad; enter root; enter a; leave a; enter b");
      PLAY("pre_backward a; grads a; finish");
      PLAY("state root UNSHARDED; view root unsharded");
      PLAY("state b UNSHARDED; view b unsharded; state a SHARDED");
      /* root and b have none */
      PLAY("leave b; leave root; has_grads a; grads_live 0");
      PLAY("pre_backward root; pre_backward b; grads b; grads root; finish");
      PLAY("check_grads; check_sharded; optimizer");
    }
    PLAY("step");
  }
}

/* For inputs alone: what an earlier no_sync kept is of the backward that comes,
 * though this one enters the unit, in a forward or behind it. */
TEST(test_backward_that_leaves_what_was_kept) {
  model_start_tree(&m, NULL, 2);
  PLAY("sync none; step; sync reduce; enter root; enter a; leave a; enter b");
  PLAY("pre_backward a; leave_kept; finish; num_reduces 0");
  PLAY("state root UNSHARDED; leave b; leave root");
  PLAY("pre_backward root; leave_kept; pre_backward b; expect b 1; inputs b");
  PLAY("finish; num_reduces 0");
  PLAY("backward; num_reduces 3; check_grads; check_sharded; optimizer");
  PLAY("zero_grad; step; num_reduces 6; check_grads");
}

/* For inputs or weights inside a unit: the first event is a recomputation.
 * Units that are kept whole stay so, though it leaves one by an exception. */
TEST(test_backward_that_begins_with_a_recomputation) {
  model_start_tree(
      &m, WITH(.keeps_after_forward = true, .keeps_without_sync = true), 2);
  PLAY("sync none; forward; num_all_gathers 3");
  PLAY("open; leave_kept");
  for (size_t i = 1; i < 3; i++) {
    CHECK_OK(fsdp_unit_pre_forward(m.units[i].unit, true, NULL));
    fsdp_unit_abandon_forward(m.units[i].unit, true);
  }
  PLAY("finish; num_iterations 1; num_reduces 0");
  PLAY("sync reduce; backward; num_all_gathers 3; num_reduces 3");
  PLAY("check_grads; check_sharded; optimizer");
}

/* A child is run on its own: it is the root of that iteration. */
TEST(test_outermost_unit_is_the_root) {
  model_start_tree(&m, NULL, 2);
  PLAY("enter a; leave a; state a HIDDEN; pre_backward a; grads a; finish");
  PLAY("num_iterations 1; num_all_gathers 1; check_sharded");
}

TEST(test_unit_without_parameters) {
  model_open(NULL, "root (); a 4");
  PLAY("step");
  CHECK_SCHEDULE(
      "all_gather a; show a unsharded; show a sharded; all_gather a; "
      "show a unsharded; show a sharded; reduce_scatter a; "
      "show_grads a sharded");
  PLAY("check_grads; check_sharded; summon root; dismiss root; step");
  PLAY("num_units 2");
  CHECK_I64(model_stats(&m).arena.num_clients, 2);
}

/* Parameters of zero elements get gradients too, without a collective. */
TEST(test_unit_of_empty_parameters) {
  model_open(NULL, "root (0,0)");
  PLAY("step");
  CHECK_SCHEDULE("show_grads root sharded");
  CHECK_I64(model_stats(&m).arena.num_allocs, 1);
  PLAY("num_reduces 1");
}
