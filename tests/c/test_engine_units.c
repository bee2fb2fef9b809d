/*
 * Tests of runtime/: making engines and units, moving and destroying them, and
 * summoned parameters.
 */
#include "engine_fixture.h"
#include "placement_fixture.h"

/* --- Making and moving --------------------------------------------------- */

static void check_unit_refused(const fsdp_unit_options *options,
                               fsdp_status status, const char *message) {
  fsdp_unit *unit = NULL;
  fsdp_error error;
  CHECK_I64(fsdp_unit_create(options, &unit, &error), status);
  CHECK_TEXT(error.message, message);
  CHECK(unit == NULL);
}

TEST(test_unit_refuses_wrong_groups) {
  fsdp_segment_options segments[MODEL_MAX_SEGMENTS];
  model_init(&m, NULL);
  model_plan_simple(&m, "u", 4);
  fsdp_unit_options options = model_unit_options(&m, 0, segments);
  options.shard_group.rank = 2;
  check_unit_refused(&options, FSDP_INVALID_ARGUMENT,
                     "unit 'u': rank 2 is outside the shard group of 2 ranks");
  options.shard_group = (fsdp_group){.rank = 0, .world_size = 3};
  check_unit_refused(&options, FSDP_INVALID_ARGUMENT,
                     "unit 'u': its layout is for 2 ranks, but its shard group "
                     "has 3");
  options.replica_group.world_size = 0;
  check_unit_refused(
      &options, FSDP_INVALID_ARGUMENT,
      "unit 'u': rank 0 is outside the replica group of 0 ranks");
}

/* bf16 elements that fit in int64 bytes do not fit as fp64 gradients. */
TEST(test_unit_refuses_what_does_not_fit) {
  const fsdp_param_spec spec = {1, INT64_MAX / 8, RECORDER_U8, true};
  fsdp_flat_layout *layout =
      placement_layout(&spec, 1, 2, (fsdp_alignment){1, true, true});
  const fsdp_segment_options segment = {
      .param_dtype = RECORDER_U8, .reduce_dtype = {9, 16}, .shard = NULL};
  fsdp_unit_options options = {.name = "huge",
                               .layout = layout,
                               .segments = &segment,
                               .shard_group = {.world_size = 2},
                               .replica_group = {.world_size = 1},
                               .prescale = 1};
  check_unit_refused(&options, FSDP_OVERFLOW,
                     "unit 'huge': segment 0 of 1152921504606846976 elements "
                     "does not fit in int64 bytes");
  fsdp_flat_layout_destroy(layout);
}

TEST(test_names_and_engine_of_a_unit) {
  model_start_tree(&m, NULL, 1);
  fsdp_unit *unit = m.units[1].unit;
  CHECK_TEXT(fsdp_unit_name(unit), "a");
  CHECK(model_engine_of(unit) == m.engine);
  CHECK_I64(fsdp_unit_pending_grads(unit), 0);
  fsdp_unit_expect_grads(unit, 3, 0);
  CHECK_I64(fsdp_unit_pending_grads(unit), 3);
  CHECK(fsdp_engine_get_sync(m.engine) == FSDP_SYNC_REDUCE);
  CHECK(!fsdp_engine_in_forward(m.engine));
  PLAY("enter root");
  CHECK(fsdp_engine_in_forward(m.engine));
  PLAY("leave_eval root");
  CHECK(!fsdp_engine_in_forward(m.engine));
  CHECK(fsdp_op_log_last(fsdp_engine_log(m.engine))->unit ==
        fsdp_unit_name(m.units[0].unit));
  fsdp_unit_destroy(NULL);
  fsdp_engine_destroy(NULL);
}

/* Sums of bytes: 4 + 8 fp32 elements on each of two ranks. */
TEST(test_stats_are_sums) {
  model_start_tree(&m, NULL, 1);
  PLAY("step");
  const fsdp_engine_stats stats = model_stats(&m);
  CHECK_I64(stats.num_units, 2);
  CHECK_I64(stats.shard_nbytes, (4 + 8) * 4);
  CHECK_I64(stats.grad_shard_nbytes, (4 + 8) * 4);
  CHECK_I64(stats.num_iterations, 1);
  CHECK_I64(stats.num_all_gathers, 3); /* a twice: it reshards in between */
  CHECK_I64(stats.num_reduces, 2);
  CHECK_I64(stats.num_prefetches, 1);
  CHECK_I64(stats.arena.num_clients, 4);
  CHECK_I64(stats.arena.nbytes, recorder_live_nbytes(m.device));
  CHECK_I64(stats.arena.held_nbytes, 0);
}

TEST(test_units_move_to_another_engine) {
  fsdp_engine *other = NULL;
  fsdp_error error;
  model_start_tree(&m, NULL, 2);
  PLAY("forward"); /* keeps the root unsharded: it is resharded by the move */
  CHECK_OK(fsdp_engine_create(&m.ops, &m.views, &other, NULL));
  CHECK_OK(fsdp_engine_add_unit(other, m.units[0].unit, NULL));
  PLAY("state root SHARDED; num_units 2; check_idle");
  /* The others still work on their own, also after the first one went. */
  PLAY("enter a");
  CHECK_FAILS(fsdp_engine_add_unit(other, m.units[2].unit, &error),
              FSDP_INVALID_STATE, error.message,
              "unit 'b' cannot join another FSDP root now: its own is in the "
              "middle of a step");
  CHECK_I64(error.remedy, FSDP_REMEDY_END_STEP);
  PLAY("leave_eval a");
  for (int64_t i = 1; i < 3; i++) {
    CHECK_OK(fsdp_engine_add_unit(other, m.units[i].unit, NULL));
  }
  PLAY("num_units 0");
  fsdp_engine_destroy(m.engine);
  m.engine = other;
  PLAY("step; check_grads; optimizer; step; check_grads");
}

TEST(test_units_cannot_be_added_inside_a_step) {
  fsdp_engine *other = NULL;
  fsdp_error error;
  model_start_tree(&m, NULL, 1);
  CHECK_OK(fsdp_engine_create(&m.ops, &m.views, &other, NULL));
  CHECK_OK(fsdp_engine_add_unit(other, m.units[1].unit, NULL));
  PLAY("enter root");
  CHECK_FAILS(fsdp_engine_add_unit(m.engine, m.units[1].unit, &error),
              FSDP_INVALID_STATE, error.message,
              "unit 'a' cannot be added in the middle of a step");
  CHECK(model_engine_of(m.units[1].unit) == other);
  PLAY("leave_eval root");
  CHECK_OK(fsdp_engine_add_unit(m.engine, m.units[1].unit, NULL));
  fsdp_engine_destroy(other);
  PLAY("step");
}

/* A unit that is destroyed leaves the engine able to go on, and nothing of
 * its name in the log. */
TEST(test_destroyed_units_leave_no_trace) {
  char text[4096];
  model_start_tree(&m, NULL, 3);
  PLAY("step; destroy b");
  (void)fsdp_op_log_format(fsdp_engine_log(m.engine), FSDP_OP_LOG_CAPACITY,
                           text, sizeof text);
  CHECK(strstr(text, " b\n") == NULL);
  CHECK(strstr(text, " all_gather root\n") != NULL);
}

TEST(test_engine_may_go_before_its_units) {
  fsdp_error error;
  model_start_tree(&m, NULL, 2);
  /* in the middle of a step; unit b is summoned below */
  PLAY("enter root; enter a; reset; summon b");
  fsdp_engine_destroy(m.engine);
  m.engine = NULL;
  PLAY("check_sharded");
  CHECK_I64(recorder_live_blocks(m.device), 0);
  CHECK(!fsdp_unit_is_summoned(m.units[2].unit));
  CHECK(model_engine_of(m.units[0].unit) == NULL);
  CHECK_FAILS(fsdp_unit_pre_forward(m.units[0].unit, false, &error),
              FSDP_INVALID_STATE, error.message,
              "unit 'root' ran forward before it was added to an engine");
  CHECK_FAILS(fsdp_unit_pre_backward(m.units[0].unit, &error),
              FSDP_INVALID_STATE, error.message,
              "backward reached unit 'root' after its engine was destroyed");
  CHECK_OK(fsdp_unit_inputs_ready(m.units[0].unit, NULL));
  CHECK_FAILS(fsdp_unit_summon(m.units[0].unit, NULL, &error),
              FSDP_INVALID_STATE, error.message,
              "the parameters of unit 'root' cannot be summoned "
              "before it was added to an engine");
  PLAY("abandon root");
}

/* Unsharded gradients go with the engine whose block they are in: in another
 * one no parameter counts as filled. */
TEST(test_unsharded_gradients_go_with_the_engine) {
  model_start_tree(&m, NULL, 1);
  PLAY("sync none; step");
  CHECK(fsdp_unit_holds_grads(m.units[1].unit));
  fsdp_engine_destroy(m.engine);
  CHECK(!fsdp_unit_holds_grads(m.units[1].unit));
  model_join_new_engine(&m);
  PLAY("zero_grad; step; check_grads");
}

/* A gather that is still in flight ends before its block is used again. */
TEST(test_destroyed_while_in_flight) {
  model_start_tree(&m, WITH(.forward_prefetch = true), 1);
  PLAY("eval; enter root; state a PREFETCHED; clear; destroy a");
  CHECK_TAPE_HAS(" unshard;");
  CHECK_TAPE_LACKS(" compute;");
  PLAY("leave_eval root");
}

/* --- Summon -------------------------------------------------------------- */

TEST(test_summon_and_write_back) {
  model_options options = {.rank = 1};
  options.param_dtype =
      RECORDER_BF16; /* summoned in master dtype all the same */
  model_open(&options, "u 8");
  fsdp_unit *unit = m.units[0].unit;
  PLAY("summon u");
  CHECK(fsdp_unit_is_summoned(unit));
  PLAY("view u full");
  float *full = m.units[0].params[0];
  for (int64_t i = 0; i < 16; i++) {
    CHECK(full[i] == ((float *)m.units[0].shards[0])[i % 8]);
    full[i] = (float)(100 + i);
  }
  PLAY("dismiss u");
  CHECK(!fsdp_unit_is_summoned(unit));
  for (int64_t i = 0; i < 8; i++) { /* the half of rank 1 */
    CHECK(((float *)m.units[0].shards[0])[i] == (float)(100 + 8 + i));
  }
  CHECK_TAPE(
      "take_params u sharded; alloc 64; record e1 compute; wait unshard e1; "
      "group_begin unshard g0; all_gather unshard g0 8 f32; "
      "group_end unshard g0; record e6 unshard; wait compute e6; show u full; "
      "take_params u full; show u sharded; pack compute x1 8 f32->f32; "
      "record e1 compute; wait unshard e1; free 64");
  CHECK_I64(model_stats(&m).arena.num_allocs, 0);
}

TEST(test_dismiss_without_writeback) {
  model_start_tree(&m, NULL, 0);
  PLAY("summon root");
  ((float *)m.units[0].params[0])[0] = 77;
  PLAY("clear; drop root");
  CHECK(((float *)m.units[0].shards[0])[0] == 0);
  CHECK_TAPE("show root sharded; free 32");
}

/* One rank: a copy when the parameters are cast; the shard itself when not. */
TEST(test_summon_on_one_rank) {
  model_options options = {.world_size = 1};
  model_start_tree(&m, &options, 0);
  PLAY("summon root; dismiss root");
  CHECK_TAPE(
      "take_params root sharded; take_params root sharded"); /* the user may
                                                                write to it */

  options.param_dtype = RECORDER_BF16;
  model_open(&options, "root 8");
  PLAY("summon root");
  ((float *)m.units[0].params[0])[3] = 55;
  PLAY("dismiss root");
  CHECK(((float *)m.units[0].shards[0])[3] == 55);
  CHECK_TAPE_HAS("pack compute x1 8 f32->f32;");
  CHECK_TAPE_LACKS("all_gather");
}

/* A summoned unit runs on the whole parameters; the others as always. */
TEST(test_forward_of_a_summoned_unit) {
  model_start_tree(&m, NULL, 1);
  PLAY("summon a; clear; eval");
  CHECK_SCHEDULE("all_gather root; show root unsharded; show root sharded");
  PLAY("enter a; abandon a; view a full; reset"); /* summoned it stays */
  PLAY("view a full; drop a; step; summon a");
  fsdp_unit_destroy(m.units[1].unit); /* dismisses it */
  m.units[1].unit = NULL;
  PLAY("view a sharded");
}

static void check_summon_refused(int64_t unit, const char *message) {
  fsdp_error error;
  CHECK_I64(fsdp_unit_summon(m.units[unit].unit, NULL, &error),
            FSDP_INVALID_STATE);
  CHECK_TEXT(error.message, message);
}

TEST(test_summon_at_the_wrong_moment) {
  fsdp_error error;
  model_start_tree(&m, NULL, 1);
  CHECK_FAILS(fsdp_unit_dismiss(m.units[0].unit, true, &error),
              FSDP_INVALID_STATE, error.message,
              "the parameters of unit 'root' are not summoned");
  PLAY("enter root");
  check_summon_refused(
      1, "the parameters of unit 'a' cannot be summoned inside forward");
  PLAY("enter a; leave a; leave root; pre_backward root");
  check_summon_refused(
      1, "the parameters of unit 'a' cannot be summoned inside backward");
  /* the root is kept for its backward: a summon reshards it */
  PLAY("reset; forward; summon root; state root SHARDED");
  check_summon_refused(
      0, "the parameters of unit 'root' cannot be summoned twice");
  CHECK_FAILS(fsdp_unit_pre_backward(m.units[0].unit, &error),
              FSDP_INVALID_STATE, error.message,
              "backward reached unit 'root' while its parameters are "
              "summoned");
  CHECK_I64(error.remedy, FSDP_REMEDY_DISMISS);
  PLAY("dismiss root; backward"); /* gathers the root again */
  PLAY("check_grads");
}
