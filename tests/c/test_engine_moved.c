/*
 * Tests of runtime/: shards that the port moves, and memory that goes while
 * the user sees gradients in it.
 */
#include <stdlib.h>

#include "engine_fixture.h"

/* Puts the shard elsewhere, with other values; what reads the old memory is
 * seen by ASan. take_params says what the bridge's says then. */
static void *move_shard(int64_t index, int64_t segment) {
  static int64_t num_moves;
  model_unit *unit = &m.units[index];
  const int64_t numel = unit->shard_nbytes[segment] / (int64_t)sizeof(float);
  float *moved = malloc((size_t)unit->shard_nbytes[segment]);
  if (moved == NULL) abort();
  for (int64_t i = 0; i < numel; i++) {
    moved[i] = (float)(32 * (num_moves % 4) + 8 * index + i % 5);
  }
  num_moves++;
  if (m.options.offloads) {
    recorder_name_host_memory(m.device, moved, unit->shard_nbytes[segment],
                              "moved");
  }
  CHECK(fsdp_unit_shard(unit->unit, segment) == unit->shards[segment]);
  fsdp_unit_move_shard(unit->unit, segment, moved);
  CHECK(fsdp_unit_shard(unit->unit, segment) == moved);
  model_touch_shard(&m, unit->shards[segment], unit->shard_nbytes[segment],
                    true);
  recorder_unname_memory(m.device, unit->shards[segment]);
  free(unit->shards[segment]);
  unit->shards[segment] = moved;
  recorder_set_params_copied(m.device, true);
  return moved;
}

static void move_all(void) {
  for (int64_t i = 0; i < m.num_units; i++) (void)move_shard(i, 0);
}

/* The values are checked where parameters are shown. */
TEST(test_moved_shards_are_gathered) {
  for (int bits = 0; bits < 2 * 2 * 2; bits++) {
    model_options options = {.offloads = (bits & 1) != 0,
                             .keeps_after_forward = (bits & 2) != 0};
    if ((bits & 4) != 0) options.param_dtype = RECORDER_BF16;
    model_start_tree(&m, &options, 2);
    PLAY("step; zero_grad; optimizer");
    move_all();
    PLAY("step; check_grads; check_sharded; optimizer; zero_grad");
    move_all(); /* again */
    PLAY("params_copied 1; eval; summon a");
    model_check_params(&m, 1);
    PLAY("drop a; step; check_grads");
  }
}

/* Between a forward and its backward: what was kept is as it was. */
TEST(test_moved_before_backward) {
  model_start_tree(&m, NULL, 2);
  PLAY("step; zero_grad; forward");
  (void)move_shard(1, 0);
  PLAY("backward; check_grads; zero_grad; step");
}

/* One rank: the shard is the whole, and replicas get what lies there now. */
TEST(test_a_moved_shard_of_one_rank) {
  model_open(WITH(.world_size = 1, .num_replicas = 2), "u 4");
  PLAY("show_memory; step; zero_grad");
  const void *moved = move_shard(0, 0);
  recorder_name_memory(m.device, moved, 16, "moved");
  PLAY("step; clear; summon u first_only; dismiss u");
  CHECK_TAPE_HAS("broadcast unshard g0 4 f32 from 0 moved");
}

/* --- Gradients that the user sees ---------------------------------------- */

/* Those of micro-batches without a reduction, until the reduction. The recorder
 * ends the test where such memory is freed before. */
TEST(test_unsharded_gradients_are_kept) {
  model_start_tree(&m, NULL, 1);
  PLAY("sync none; step; grad_view a unsharded; sync reduce; forward; clear");
  PLAY("backward");
  CHECK_TAPE_HAS("keep_grads a unsharded");
  CHECK_TAPE_HAS("keep_grads root unsharded");
  CHECK_TAPE_LACKS("keep_grads a partial");
  PLAY("zero_grad; step; clear; zero_grad; step");
  CHECK_TAPE_LACKS("keep_grads a unsharded"); /* nobody saw any */
}

/* The reduction takes them in, and their memory goes. The user thaws a segment:
 * the next ones are larger. */
TEST(test_partial_gradients_are_kept) {
  model_open(NULL, "u mixed");
  PLAY("sync shard; step; grad_view u partial; sync reduce; clear; step");
  CHECK_TAPE_HAS("keep_grads u partial; free ");
  PLAY("unfreeze u 1");
  PLAY("zero_grad; sync shard; step; sync reduce; step; check_grads");
}

TEST(test_gradients_of_destroyed_units_are_kept) {
  model_start_tree(&m, NULL, 2);
  PLAY("sync shard; step; clear; destroy b");
  CHECK_TAPE_HAS("keep_grads b partial");
  PLAY("sync none");
}

/* --- Gradients of frozen parameters --------------------------------------- */

/* Other ranks reduce nothing for them: not dropped, an error. */
TEST(test_a_gradient_of_a_frozen_segment) {
  fsdp_error error = {0};
  model_open(NULL, "root 4; u mixed");
  PLAY("forward; pre_backward u");
  CHECK_I64(model_give_grad(&m, 1, 1, false, &error), FSDP_INVALID_STATE);
  CHECK_TEXT(error.message,
             "unit 'u': parameter 1 got a gradient, but it and all parameters "
             "of its kind were frozen in the unit's last forward");
  CHECK_I64(error.remedy, FSDP_REMEDY_TRAIN_SOONER);
  CHECK_I64(m.grads[0].num_releases, 1);
  PLAY("state u FAILED; reset; check_sharded; zero_grad; unfreeze u 1");
  PLAY("step; check_grads");
}
