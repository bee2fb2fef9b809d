/*
 * Tests of runtime/: backward. In which order units gather and reduce.
 */
#include "engine_fixture.h"

/* --- Order of gathers ---------------------------------------------------- */

/* In a backward of root and a, b, c. */
TEST(test_prefetch) {
  static const struct {
    model_options options;
    int64_t num_prefetches;
    const char *schedule; /* until the gradients are shown */
  } cases[] = {
      {{.backward_prefetch = PREFETCH_BEFORE},
       3, /* c by the root, which was kept */
       "all_gather c; show root unsharded; all_gather b; show c unsharded; "
       "show c sharded; reduce_scatter c; all_gather a; show b unsharded; "
       "show b sharded; reduce_scatter b; show a unsharded; show a sharded; "},
      {{.backward_prefetch = PREFETCH_AFTER},
       2, /* c is gathered by its own pre-backward */
       "show root unsharded; all_gather c; show c unsharded; show c sharded; "
       "reduce_scatter c; all_gather b; show b unsharded; show b sharded; "
       "reduce_scatter b; all_gather a; show a unsharded; show a sharded; "},
      {{.backward_prefetch = NO_PREFETCH},
       0,
       "show root unsharded; all_gather c; show c unsharded; show c sharded; "
       "reduce_scatter c; all_gather b; show b unsharded; show b sharded; "
       "reduce_scatter b; all_gather a; show a unsharded; show a sharded; "},
      {{.keeps_after_forward = true},
       0,
       "show root unsharded; show c unsharded; show c sharded; "
       "reduce_scatter c; show b unsharded; show b sharded; "
       "reduce_scatter b; show a unsharded; show a sharded; "},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    char schedule[1024];
    model_start_tree(&m, &cases[i].options, 3);
    PLAY("forward; clear; backward; check_grads; check_sharded");
    (void)snprintf(schedule, sizeof schedule, "%s%s", cases[i].schedule,
                   "reduce_scatter a; show root sharded; reduce_scatter root; "
                   "show_grads root sharded; show_grads a sharded; "
                   "show_grads b sharded; show_grads c sharded");
    CHECK_SCHEDULE(schedule);
    CHECK_I64(model_stats(&m).num_prefetches, cases[i].num_prefetches);
    CHECK_I64(model_stats(&m).num_all_gathers,
              cases[i].options.keeps_after_forward ? 4 : 7);
  }
}

/* a was reduced already when b comes: gathering it again would bring weights
 * from before the optimizer's step into the next forward. */
TEST(test_reduced_unit_is_not_prefetched) {
  model_start_tree(&m, NULL, 2);
  PLAY("forward; pre_backward a; grads a; state a REDUCING; clear");
  PLAY("pre_backward b; grads b; pre_backward root");
  CHECK_SCHEDULE(
      "all_gather b; show b unsharded; show b sharded; reduce_scatter b; "
      "show root unsharded");
  PLAY("grads root; finish; check_grads; check_sharded");
}

/* Nor is one whose reduction waits for its turn. */
TEST(test_waiting_unit_is_not_prefetched) {
  model_open(NULL, "root 4; a 12; frozen 8 frozen; c 16");
  PLAY("step"); /* reduces c, a, root */
  /* of the parameters themselves; its turn is after c */
  PLAY("forward; grads a; state a SHARDED; clear; pre_backward frozen");
  PLAY("grads frozen");
  CHECK_SCHEDULE(
      "all_gather frozen; show frozen unsharded; show frozen sharded");
  PLAY("pre_backward c; grads c; pre_backward root; grads root; finish");
  PLAY("check_grads");
}

/* A nested backward comes back to a while a's reduction waits for its turn: a
 * keeps the block until the end of backward, and no longer. */
TEST(test_unsharded_again_before_its_reduction) {
  model_start_tree(&m, NULL, 2);
  PLAY("step"); /* reduces b, a, root */
  /* waits for b */
  PLAY("zero_grad; forward; pre_backward a; grads a; state a SHARDED");
  PLAY("pre_backward a; pre_backward b; grads b; num_reduces 5");
  PLAY("state a UNSHARDED; pre_backward root; grads root; finish; check_grads");
  PLAY("check_sharded; check_idle; zero_grad; step; check_grads");
}

/* b is prefetched for a backward that ends without it. */
TEST(test_prefetch_in_flight_is_dropped_at_the_end) {
  model_start_tree(&m, NULL, 2);
  PLAY("forward; pre_backward root; state b PREFETCHED; grads root; clear");
  PLAY("finish");
  CHECK_SCHEDULE("show_grads root sharded");
  CHECK_TAPE_HAS("wait compute e8; free 96;");
  /* with the new values */
  PLAY("check_sharded; check_idle; optimizer; zero_grad; step; check_grads");
}

/* Activation checkpointing: the recomputed unit stays until its backward. */
TEST(test_recompute_gathers_once) {
  model_start_tree(&m, NULL, 2);
  PLAY("forward; pre_backward root"); /* b in flight */
  PLAY("clear");
  CHECK_OK(fsdp_unit_pre_forward(m.units[2].unit, true, NULL));
  CHECK_OK(fsdp_unit_post_forward(m.units[2].unit, true, true, NULL));
  PLAY("pre_backward b; grads b");
  CHECK_OK(fsdp_unit_pre_forward(m.units[1].unit, true, NULL));
  fsdp_unit_abandon_forward(m.units[1].unit, true); /* stopped early */
  PLAY("pre_backward a; grads a");
  CHECK_SCHEDULE(
      "show b unsharded; all_gather a; "
      /* prefetched by b */
      "show b sharded; reduce_scatter b; show a unsharded; show a sharded; "
      "reduce_scatter a");
  PLAY("grads root; finish; check_grads; num_iterations 1; num_all_gathers 5");
}

/* The second call's backward comes first; gradients come with the first. */
TEST(test_unit_called_twice) {
  model_start_tree(&m, NULL, 1);
  PLAY("enter root; enter a; leave a; enter a; leave a; leave root; clear");
  PLAY("pre_backward root; pre_backward a; pre_backward a; grads a");
  PLAY("grads root; finish");
  CHECK_SCHEDULE(
      "all_gather a; show root unsharded; show a unsharded; show a sharded; "
      "reduce_scatter a; show root sharded; reduce_scatter root; "
      "show_grads root sharded; show_grads a sharded");
  PLAY("check_grads");
}

/* Gradients of each call come on their own: reduced twice, summed up. */
TEST(test_unit_reduced_twice) {
  model_start_tree(&m, NULL, 1);
  for (int step = 0; step < 2; step++) {
    PLAY("zero_grad; enter root; enter a; leave a; enter a; leave a");
    PLAY("leave root; pre_backward root");
    for (int i = 0; i < 2; i++) {
      PLAY("pre_backward a"); /* the second time from REDUCING */
      PLAY("grads a");
    }
    PLAY("grads root; finish; check_grads; check_sharded");
  }
  PLAY("num_reduces 6");
}

TEST(test_frozen_unit) {
  model_open(WITH(.backward_prefetch = PREFETCH_AFTER),
             "root 4; a 12; frozen 8 frozen");
  PLAY("forward");
  PLAY("inputs frozen"); /* not in a backward */
  PLAY("clear; backward");
  CHECK_SCHEDULE(
      "show root unsharded; all_gather frozen; show frozen unsharded; "
      "show frozen sharded; all_gather a; show a unsharded; show a sharded; "
      "reduce_scatter a; show root sharded; reduce_scatter root; "
      "show_grads root sharded; show_grads a sharded");
  PLAY("check_grads; check_sharded");
  CHECK_I64(model_stats(&m).arena.num_clients, 5); /* no gradient memory */
}

/* --- Order of reductions ------------------------------------------------- */

/* The gradients of `first`, `second`, `third`, then of the root. */
static void backward_in_order(int64_t first, int64_t second, int64_t third) {
  const int64_t order[] = {first, second, third};
  PLAY("pre_backward root");
  for (int i = 0; i < 3; i++) {
    CHECK_OK(model_pre_backward(&m, order[i], NULL));
    CHECK_OK(model_give_grads(&m, order[i], NULL));
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
  PLAY("finish; check_grads; check_sharded");
}

/* Who ran no forward is not waited for; who got no gradients delays the
 * others until the end of the backward. */
TEST(test_reductions_with_units_that_are_missing) {
  model_start_tree(&m, NULL, 3);
  PLAY("step");
  (void)reductions();
  PLAY("zero_grad; enter root"); /* without c */
  for (int64_t i = 1; i < 3; i++) {
    CHECK_OK(model_enter(&m, i, NULL));
    CHECK_OK(model_leave(&m, i, true, NULL));
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
  PLAY("finish; check_grads");
}

/* A second backward of one graph, which no forward announces, keeps the order,
 * too: units may become ready in another one on each rank. */
TEST(test_reductions_of_a_retained_graph) {
  model_start_tree(&m, NULL, 3);
  PLAY("step");
  (void)reductions();
  PLAY("pre_backward root; pre_backward a; grads a");
  CHECK_TEXT(reductions(), "");
  PLAY("pre_backward c; grads c; pre_backward b; grads b");
  CHECK_TEXT(reductions(), "c b a ");
  PLAY("grads root; finish; check_sharded");
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
}

/* A unit that goes in the middle of a backward: its end waits for the
 * reductions of the others. */
TEST(test_unit_goes_inside_backward) {
  model_start_tree(&m, NULL, 2);
  PLAY("forward; pre_backward root; pre_backward b; grads b; destroy a; clear");
  PLAY("finish");
  CHECK_TAPE_HAS("record e2 reduce; wait compute e2;");
  PLAY("state b SHARDED");
}

/* A unit that does not reduce, or was frozen since, holds nobody up. */
TEST(test_who_is_not_waited_for) {
  FSDP_LOCAL_ERROR(error);
  model_open(WITH(.rank = 0), "root 4; a 8; b 12; c 16");
  PLAY("step; num_reduces 4"); /* c b a root */
  fsdp_unit_get_settings(m.units[2].unit)->sync = FSDP_SYNC_NONE;
  PLAY("zero_grad; forward; pre_backward root; pre_backward c; grads c");
  PLAY("num_reduces 5; pre_backward b; grads b; pre_backward a; grads a");
  PLAY("num_reduces 6; grads root; finish; num_reduces 7");
  fsdp_unit_get_settings(m.units[2].unit)->sync = FSDP_SYNC_REDUCE;
  PLAY("step; check_grads; num_reduces 11");

  PLAY("freeze c 0; zero_grad; forward; pre_backward root; pre_backward c");
  PLAY("pre_backward b; grads b; num_reduces 12; pre_backward a; grads a");
  PLAY("num_reduces 13; grads root; finish; num_reduces 14; check_grads");
}
