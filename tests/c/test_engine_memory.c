/*
 * Tests of memory on a device with streams: which blocks a step holds, and what
 * goes first where there is no more.
 */
#include "engine_failures.h"

static void train(int num_steps) {
  for (int i = 0; i < num_steps; i++) {
    PLAY("zero_grad; optimizer; step; check_grads");
  }
}

/* Forward holds the root, the unit that runs and the next one; its end the root
 * alone. Backward holds the gradients of one unit more. */
TEST(test_blocks_of_a_step) {
  enum { ROOT = 2 * 4 * 4, A = 2 * 8 * 4, B = 2 * 12 * 4, C = 2 * 16 * 4 };
  model_start_tree(&m, NULL, 3);
  train(2);
  PLAY("zero_grad; enter root");
  CHECK_I64(recorder_live_nbytes(m.device), ROOT + A);
  PLAY("enter a");
  CHECK_I64(recorder_live_nbytes(m.device), ROOT + A + B);
  PLAY("leave a; enter b; leave b");
  CHECK_I64(recorder_live_nbytes(m.device), ROOT + C);
  PLAY("enter c; leave c; leave root");
  CHECK_I64(recorder_live_nbytes(m.device), ROOT);
  PLAY("pre_backward root; pre_backward c");
  CHECK_I64(recorder_live_nbytes(m.device), ROOT + C + B);
  PLAY("grads c"); /* in the place of its parameters */
  CHECK_I64(recorder_live_nbytes(m.device), ROOT + C + B);
  PLAY("pre_backward b");
  CHECK_I64(recorder_live_nbytes(m.device), ROOT + C + B + A);
  PLAY("grads b");
  CHECK_I64(recorder_live_nbytes(m.device), ROOT + B + A);
  PLAY("pre_backward a; grads a; grads root");
  CHECK_I64(recorder_live_nbytes(m.device), ROOT);
  PLAY("finish; check_grads");
  CHECK_I64(recorder_live_nbytes(m.device), 0);
}

/* Units that are not where the order says: a reserved block of another size is
 * dropped; without an order the size of the unit before is reserved. */
TEST(test_another_order) {
  enum { ROOT = 2 * 4 * 4, A = 2 * 8 * 4, B = 2 * 12 * 4 };
  model_start_tree(&m, NULL, 2);
  train(2);
  PLAY("zero_grad; enter root"); /* a is next */
  CHECK_I64(recorder_live_nbytes(m.device), ROOT + A);
  PLAY("enter b");
  CHECK_I64(recorder_live_nbytes(m.device), ROOT + B + B);
  PLAY("leave b; enter a");
  CHECK_I64(recorder_live_nbytes(m.device), ROOT + A + A);
  PLAY("leave a; leave root");
  CHECK_I64(recorder_live_nbytes(m.device), ROOT);
  PLAY("backward; check_grads");
}

/* Without blocks that leave there is nothing to give, and the error stands. */
TEST(test_out_of_memory_is_reported) {
  fsdp_error error = {0};
  model_start_tree(&m, NULL, 1);
  recorder_limit_memory(m.device, 1);
  CHECK_FAILS(fsdp_unit_summon(m.units[0].unit, NULL, &error),
              FSDP_OUT_OF_MEMORY, error.message, "..bytes are left");
  recorder_limit_memory(m.device, 0);
  PLAY("reset");
  train(2);
}

/* A block in use is not given: its data is still read. One that is reduced
 * goes. Scratch and partial gradients come in the middle of a backward. */
TEST(test_blocks_in_use_stay) {
  model_options options = {.wants_scratch = true};
  for (int is_partial = 0; is_partial < 2; is_partial++) {
    model_start_tree(&m, &options, 3);
    fsdp_engine_set_sync(m.engine,
                         is_partial ? FSDP_SYNC_SHARD : FSDP_SYNC_REDUCE);
    PLAY("clear");
    int64_t num_recovered = 0;
    const int64_t num_calls = recorder_num_calls(m.device);
    PLAY("forward");
    /* Each call of the first backward, one after the other in fresh models. */
    const int64_t first = recorder_num_calls(m.device) - num_calls;
    for (int64_t i = first;; i++) {
      fsdp_error error = {0};
      model_start_tree(&m, &options, 3);
      fsdp_engine_set_sync(m.engine,
                           is_partial ? FSDP_SYNC_SHARD : FSDP_SYNC_REDUCE);
      const int64_t before = recorder_num_calls(m.device);
      recorder_fail_at(m.device, i);
      PLAY("forward");
      const fsdp_status status = model_backward(&m, &error);
      recorder_fail_at(m.device, -1);
      const bool has_failed = recorder_num_calls(m.device) - before > i;
      PLAY("check_races");
      if (has_failed && status == FSDP_OK) {
        num_recovered++;
        PLAY("check_grads");
      }
      PLAY("reset");
      if (!has_failed) break;
    }
    CHECK(num_recovered > 0);
  }
}
