/*
 * Tests of runtime/: a communication hook in place of a unit's reductions.
 */
#include "engine_failures.h"

static void set_hooks(void) {
  for (int64_t i = 0; i < m.num_units; i++) {
    fsdp_unit_get_settings(m.units[i].unit)->has_reduce_hook = true;
  }
}

/* No collective, no scale before it or after it, and no prescale. */
TEST(test_step) {
  model_start_tree(&m, WITH(.rank = 1, .num_replicas = 2, .prescale = 0.5), 0);
  set_hooks();
  PLAY("forward; show_memory; clear; backward");
  CHECK_TAPE(
      "take_grads root; wait compute e6; show root unsharded; "
      "show root sharded; free 32 b1; alloc 32 b2; pack compute x1 8 f32->f32 "
      "b2 <- ?; "
      "release t1; grad_shard root 0; record e1 compute; wait reduce e1; "
      "reduce_hook root reduce 0 b2; "
      "accumulate reduce x1 4 f32->f32 ? <- b2+16; record e7 reduce; "
      "record e2 reduce; wait compute e2; record e3 replicate; "
      "wait compute e3; wait compute e7; free 32 b2; show_grads root sharded");
  PLAY("check_grads");
}

/* Once for each trainable segment. */
TEST(test_mixed_segments) {
  model_open(NULL, "u mixed");
  set_hooks();
  PLAY("step");
  const char *tape = recorder_tape(m.device);
  CHECK_HAS(tape, "reduce_hook u reduce 0; reduce_hook u reduce 2;");
  CHECK_LACKS(tape, "reduce_scatter");
  PLAY("check_grads");
}

static void set_custom(unsigned kinds) {
  for (int64_t i = 0; i < m.num_units; i++) {
    fsdp_unit_get_settings(m.units[i].unit)->custom = kinds;
  }
}

/* The user's own reduce-scatter, and the hook on what it reduced: the mean, so
 * the accumulation does not scale. */
TEST(test_custom_reductions) {
  model_start_tree(&m, WITH(.rank = 1, .num_replicas = 2, .prescale = 0.5), 0);
  set_custom(FSDP_CUSTOM_REDUCE_SCATTER | FSDP_CUSTOM_REDUCED);
  PLAY("forward; clear; backward");
  const char *tape = recorder_tape(m.device);
  CHECK_HAS(tape,
            "custom_add root 4; group_end reduce g0; "
            "custom_run root reduce 2;");
  CHECK_HAS(tape,
            "custom_add root 4; custom_run root replicate 4; "
            "accumulate replicate x1 4 f32->f32;");
  CHECK_HAS(tape, "all_reduce");
  CHECK_LACKS(tape, "reduce_scatter");
}

/* The user's own all-gather, one call for the segments of a unit. */
TEST(test_custom_gather) {
  model_open(NULL, "u mixed");
  set_custom(FSDP_CUSTOM_ALL_GATHER);
  PLAY("clear; forward");
  const char *tape = recorder_tape(m.device);
  CHECK_HAS(tape, "custom_run u unshard 1;");
  CHECK_LACKS(tape, "all_gather");
  PLAY("backward");
}

/* In micro-batches of every kind. */
static void check_numbers(model_options options) {
  model_start_tree(&m, &options, 2);
  set_hooks();
  for (int step = 0; step < 3; step++) {
    PLAY("zero_grad; step; check_grads; sync none; step; sync shard; step");
    PLAY("grad_view a partial; sync reduce; clear; step; check_grads");
    CHECK_TAPE_LACKS("all_reduce");
    PLAY("optimizer");
  }
  /* Taken away, the usual reductions are back. */
  for (int64_t i = 0; i < m.num_units; i++) {
    fsdp_unit_get_settings(m.units[i].unit)->has_reduce_hook = false;
  }
  PLAY("clear; zero_grad; step; check_grads");
  CHECK_TAPE_LACKS("reduce_hook");
}

TEST(test_numbers) {
  for (int64_t world_size = 1; world_size < 3; world_size++) {
    for (int64_t replicas = 1; replicas < 3; replicas++) {
      model_options options = {.world_size = world_size,
                               .rank = world_size - 1,
                               .num_replicas = replicas};
      check_numbers(options);
      options.param_dtype = RECORDER_BF16;
      options.reduce_dtype = RECORDER_F32;
      options.wants_scratch = true;
      options.offloads = true;
      check_numbers(options);
    }
  }
}

TEST(test_every_call_can_fail) {
  failures_every_call_of_steps(WITH(.num_replicas = 2), set_hooks,
                               failures_train);
}
