/*
 * Tests of runtime/memory.c: where the device runs out of memory, blocks of the
 * arena that nobody holds go first.
 */
#include "engine_failures.h"

static model m; /* each test makes and frees it */

static void train(int num_steps) {
  for (int i = 0; i < num_steps; i++) {
    model_zero_grad(&m);
    model_optimizer_step(&m);
    model_step(&m);
    model_check_grads(&m);
  }
}

/* Between steps all of the arena is idle. A summon that does not fit beside it
 * takes its place, and the next step allocates anew. */
static void test_a_summon_takes_the_place_of_idle_blocks(void) {
  model_start_tree(&m, NULL, 2);
  train(3);
  const int64_t held = recorder_live_nbytes(m.device);
  CHECK(model_stats(&m).arena.nbytes > 0);
  recorder_clear(m.device);
  recorder_limit_memory(m.device, held);
  CHECK_I64(fsdp_unit_summon(m.units[0].unit, NULL, NULL), FSDP_OK);
  CHECK_I64(model_stats(&m).arena.nbytes, 0);
  CHECK(strstr(recorder_tape(m.device), "release_memory\n") != NULL);
  CHECK_I64(fsdp_unit_dismiss(m.units[0].unit, false, NULL), FSDP_OK);
  train(2);
  CHECK_I64(recorder_live_nbytes(m.device), held);
  recorder_clear(m.device);
  train(1);
  CHECK(strstr(recorder_tape(m.device), "alloc") == NULL);
  model_fini(&m);
}

/* Without idle blocks there is nothing to give, and the error stands. */
static void test_out_of_memory_is_reported(void) {
  fsdp_error error = {FSDP_OK, 0, NULL, ""};
  model_start_tree(&m, NULL, 1);
  recorder_limit_memory(m.device, 1);
  CHECK_I64(fsdp_unit_summon(m.units[0].unit, NULL, &error),
            FSDP_OUT_OF_MEMORY);
  CHECK(strstr(error.message, "bytes are left") != NULL);
  recorder_limit_memory(m.device, 0);
  fsdp_engine_reset(m.engine);
  train(2);
  model_fini(&m);
}

/* A block in use is not given: its data is still read. Scratch and partial
 * gradients come in the middle of a backward. */
static void test_blocks_in_use_stay(void) {
  model_options options = model_default_options();
  options.wants_scratch = true;
  for (int is_partial = 0; is_partial < 2; is_partial++) {
    model_start_tree(&m, &options, 2);
    fsdp_engine_set_sync(m.engine,
                         is_partial ? FSDP_SYNC_SHARD : FSDP_SYNC_REDUCE);
    recorder_clear(m.device);
    int64_t num_recovered = 0;
    const int64_t num_calls = recorder_num_calls(m.device);
    CHECK_I64(model_forward(&m, true, NULL), FSDP_OK);
    /* Each call of the first backward, one after the other in fresh models. */
    const int64_t first = recorder_num_calls(m.device) - num_calls;
    model_fini(&m);
    for (int64_t i = first;; i++) {
      fsdp_error error = {FSDP_OK, 0, NULL, ""};
      model_start_tree(&m, &options, 2);
      fsdp_engine_set_sync(m.engine,
                           is_partial ? FSDP_SYNC_SHARD : FSDP_SYNC_REDUCE);
      const int64_t before = recorder_num_calls(m.device);
      recorder_fail_at(m.device, i);
      CHECK_I64(model_forward(&m, true, NULL), FSDP_OK);
      const fsdp_status status = model_backward(&m, &error);
      recorder_fail_at(m.device, -1);
      const bool has_failed = recorder_num_calls(m.device) - before > i;
      CHECK_TEXT(recorder_race(m.device), "");
      if (has_failed && status == FSDP_OK) {
        num_recovered++;
        model_check_grads(&m);
      }
      fsdp_engine_reset(m.engine);
      model_fini(&m);
      if (!has_failed) break;
    }
    CHECK(num_recovered > 0);
  }
}

int main(void) {
  static const check_test tests[] = {
      CHECK_TEST(test_a_summon_takes_the_place_of_idle_blocks),
      CHECK_TEST(test_out_of_memory_is_reported),
      CHECK_TEST(test_blocks_in_use_stay),
  };
  return CHECK_RUN(tests);
}
