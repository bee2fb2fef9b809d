/*
 * Tests of runtime/: unsharding at the user's request, and settings of single
 * units.
 */
#include "engine_fixture.h"

static fsdp_unit *unit_of(int64_t index) {
  return m.units[index].unit;
}

static void request(int64_t index) {
  CHECK_OK(fsdp_unit_unshard(unit_of(index), NULL));
  CHECK_OK(fsdp_unit_wait_unshard(unit_of(index), NULL));
  CHECK_I64(fsdp_unit_get_state(unit_of(index)), FSDP_UNIT_UNSHARDED);
}

/* The unit's own forward uses the block and ends the request. */
TEST(test_request_before_forward) {
  model_start_tree(&m, NULL, 2);
  request(1);
  PLAY("unshard a"); /* held already */
  PLAY("eval");
  CHECK_SCHEDULE(
      "all_gather a; show a unsharded; all_gather root; show root unsharded; "
      "show a sharded; all_gather b; show b unsharded; show b sharded; "
      "show root sharded");
  PLAY("check_sharded");
}

/* Forwards of other units leave it alone, also where it was not waited for; a
 * backward ends it, as with torch's class. */
TEST(test_request_ends_with_a_backward) {
  model_start_tree(&m, NULL, 2);
  request(1);
  PLAY("unshard b");
  CHECK(fsdp_unit_is_requested(unit_of(1)));
  CHECK(!fsdp_unit_is_requested(unit_of(0)));
  PLAY("enter root; leave root; state a UNSHARDED; state b UNSHARDING");
  PLAY("pre_backward root; grads root; finish; check_sharded; check_idle");
  CHECK(!fsdp_unit_is_requested(unit_of(1)));
  PLAY("zero_grad; step");
}

/* The block is from before the write. */
TEST(test_request_before_a_write) {
  model_start_tree(&m, NULL, 1);
  request(1);
  PLAY("optimizer; clear; eval"); /* checks the values */
  CHECK_SCHEDULE(
      "show a sharded; all_gather root; show root unsharded; all_gather a; "
      "show a unsharded; show a sharded; show root sharded");
  request(1);
  PLAY("optimizer; clear");
  request(1);
  CHECK_SCHEDULE("show a sharded; all_gather a; show a unsharded");
  PLAY("reset; check_sharded");
}

/* Also one that versions do not count. */
TEST(test_request_before_somebody_writes) {
  model_start_tree(&m, NULL, 1);
  PLAY("unshard a");
  CHECK(fsdp_unit_is_requested(m.units[1].unit));
  PLAY("expect_writes");
  CHECK(!fsdp_unit_is_requested(m.units[1].unit));
  PLAY("forward; num_all_gathers 3; backward; check_grads; check_idle");
}

/* Inside another unit's forward, as a unit whose parameters that one uses. */
TEST(test_request_inside_forward) {
  model_start_tree(&m, NULL, 1);
  PLAY("enter root");
  request(1);
  PLAY("leave root; state a UNSHARDED; pre_backward root");
  PLAY("unexpected a 0; grads root; finish; check_sharded; check_grads");
}

TEST(test_request_is_refused) {
  fsdp_error error = {0};
  model_start_tree(&m, NULL, 1);
  PLAY("summon a");
  CHECK_FAILS(fsdp_unit_unshard(unit_of(1), &error), FSDP_INVALID_STATE,
              error.message,
              "unit 'a' cannot be unsharded or resharded while its "
              "parameters are summoned");
  CHECK_I64(error.remedy, FSDP_REMEDY_DISMISS);
  PLAY("dismiss a");
}

/* --- Settings ------------------------------------------------------------ */

TEST(test_sync_of_one_unit) {
  model_start_tree(&m, NULL, 1);
  fsdp_unit_get_settings(unit_of(1))->sync = FSDP_SYNC_NONE;
  PLAY("step");
  CHECK(fsdp_unit_holds_grads(unit_of(1)));
  CHECK(!fsdp_unit_holds_grads(unit_of(0)));
  PLAY("sync reduce; step; check_grads"); /* of all units */
}

TEST(test_root_may_reshard) {
  model_open(NULL, "root 4");
  fsdp_segment_options segments[MODEL_MAX_SEGMENTS];
  fsdp_unit_options options = model_unit_options(&m, 0, segments);
  options.reshards_as_root = true;
  fsdp_unit *other = NULL;
  CHECK_OK(fsdp_unit_create(&options, &other, NULL));
  CHECK_OK(fsdp_engine_add_unit(m.engine, other, NULL));
  for (int reshards = 0; reshards < 2; reshards++) {
    fsdp_unit_get_settings(other)->reshard_after_forward = reshards != 0;
    CHECK_OK(fsdp_unit_pre_forward(other, false, NULL));
    CHECK_OK(fsdp_unit_post_forward(other, false, true, NULL));
    CHECK_I64(fsdp_unit_get_state(other),
              reshards ? FSDP_UNIT_SHARDED : FSDP_UNIT_HIDDEN);
  }
  fsdp_unit_destroy(other);
}

/* Autograd's graph may reach the root's parameters before its output. */
TEST(test_root_is_shown_before_backward) {
  model_start_tree(&m, NULL, 1);
  CHECK(!fsdp_engine_keeps_hidden(m.engine));
  PLAY("forward; view root sharded; state root HIDDEN");
  CHECK(fsdp_engine_keeps_hidden(m.engine));
  PLAY("clear");
  CHECK_OK(fsdp_engine_show_hidden(m.engine, true, NULL));
  PLAY("view root unsharded; view a sharded");
  CHECK_OK(
      fsdp_engine_show_hidden(m.engine, false, NULL)); /* not its backward */
  CHECK_SCHEDULE("show root unsharded; hide root");
  PLAY("state root HIDDEN");
  CHECK_OK(fsdp_engine_show_hidden(m.engine, true, NULL));
  PLAY("clear; backward");
  CHECK_TAPE_LACKS("show root unsharded"); /* it was */
  CHECK(!fsdp_engine_keeps_hidden(m.engine));
  CHECK_OK(fsdp_engine_show_hidden(m.engine, false, NULL));
  PLAY("check_grads; check_idle; enter root");
  CHECK(!fsdp_engine_keeps_hidden(m.engine)); /* inside forward */
  PLAY("leave root");
}

/* The block of hidden parameters goes with what autograd saved of them. */
TEST(test_hidden_parameters_are_emptied) {
  model_start_tree(&m, WITH(.keeps_after_forward = true), 1);
  /* the backward is dropped */
  PLAY("forward; params_changed 1; clear; enter root");
  CHECK_TAPE_HAS("empty root;");
  CHECK_TAPE_HAS("empty a;");
  PLAY("enter a; leave a; leave root; backward");
}

/* So it keeps its block past forwards without a backward. */
TEST(test_root_is_kept_past_an_evaluation) {
  model_start_tree(&m, NULL, 1);
  PLAY("forward; eval; eval; state root HIDDEN; state a SHARDED");
  CHECK_OK(fsdp_engine_show_hidden(m.engine, true, NULL));
  PLAY("view root unsharded; backward; check_grads; check_idle");
  PLAY("eval; check_sharded; check_idle; zero_grad"); /* of no graph now */
  PLAY("forward; reset; eval; check_sharded; check_idle");
}
