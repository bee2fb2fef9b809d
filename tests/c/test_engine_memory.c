/*
 * Tests of runtime/memory.c: where the device runs out of memory, blocks of the
 * arena that nobody holds go first.
 */
#include "engine_failures.h"

static void train(int num_steps) {
  for (int i = 0; i < num_steps; i++) {
    PLAY("zero_grad; optimizer; step; check_grads");
  }
}

/* Between steps all of the arena is idle. A summon that does not fit beside it
 * takes its place, and the next step allocates anew. */
TEST(test_a_summon_takes_the_place_of_idle_blocks) {
  model_start_tree(&m, NULL, 2);
  train(3);
  const int64_t held = recorder_live_nbytes(m.device);
  CHECK(model_stats(&m).arena.nbytes > 0);
  PLAY("clear");
  recorder_limit_memory(m.device, held);
  PLAY("summon root");
  CHECK_I64(model_stats(&m).arena.nbytes, 0);
  CHECK_TAPE_HAS("release_memory;");
  PLAY("drop root");
  train(2);
  CHECK_I64(recorder_live_nbytes(m.device), held);
  PLAY("clear");
  train(1);
  CHECK_TAPE_LACKS("alloc");
  PLAY("end");
}

/* Without idle blocks there is nothing to give, and the error stands. */
TEST(test_out_of_memory_is_reported) {
  fsdp_error error = {FSDP_OK, 0, NULL, ""};
  model_start_tree(&m, NULL, 1);
  recorder_limit_memory(m.device, 1);
  CHECK_FAILS(fsdp_unit_summon(m.units[0].unit, NULL, &error),
              FSDP_OUT_OF_MEMORY, error.message, "..bytes are left");
  recorder_limit_memory(m.device, 0);
  PLAY("reset");
  train(2);
  PLAY("end");
}

/* A block in use is not given: its data is still read. Scratch and partial
 * gradients come in the middle of a backward. */
TEST(test_blocks_in_use_stay) {
  model_options options = {.wants_scratch = true};
  for (int is_partial = 0; is_partial < 2; is_partial++) {
    model_start_tree(&m, &options, 2);
    fsdp_engine_set_sync(m.engine,
                         is_partial ? FSDP_SYNC_SHARD : FSDP_SYNC_REDUCE);
    PLAY("clear");
    int64_t num_recovered = 0;
    const int64_t num_calls = recorder_num_calls(m.device);
    PLAY("forward");
    /* Each call of the first backward, one after the other in fresh models. */
    const int64_t first = recorder_num_calls(m.device) - num_calls;
    PLAY("end");
    for (int64_t i = first;; i++) {
      fsdp_error error = {FSDP_OK, 0, NULL, ""};
      model_start_tree(&m, &options, 2);
      fsdp_engine_set_sync(m.engine,
                           is_partial ? FSDP_SYNC_SHARD : FSDP_SYNC_REDUCE);
      const int64_t before = recorder_num_calls(m.device);
      recorder_fail_at(m.device, i);
      PLAY("forward");
      const fsdp_status status = model_backward(&m, &error);
      recorder_fail_at(m.device, -1);
      const bool has_failed = recorder_num_calls(m.device) - before > i;
      CHECK_TEXT(recorder_race(m.device), "");
      if (has_failed && status == FSDP_OK) {
        num_recovered++;
        PLAY("check_grads");
      }
      PLAY("reset; end");
      if (!has_failed) break;
    }
    CHECK(num_recovered > 0);
  }
}
