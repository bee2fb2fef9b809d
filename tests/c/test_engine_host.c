/*
 * Tests of runtime/ and arena/ on a host: blocks come and go, a reduction is
 * waited for at once, and only then are sharded gradients made (Note [Memory on
 * a host] in arena.h).
 */
#include "engine_failures.h"

/* A root and `num_children` units, all of the same size. */
static void start(const model_options *options, int64_t num_children) {
  static const char *const names[] = {"root", "a", "b", "c", "d", "e"};
  model_init(&m, options);
  m.ops.is_host = true;
  for (int64_t i = 0; i <= num_children; i++) {
    model_plan_simple(&m, names[i], 16);
  }
  model_start(&m);
}

enum { BLOCK = 2 * 16 * 4 }; /* two ranks, fp32 */

static void step(void) {
  PLAY("zero_grad; optimizer; step; check_grads; check_races");
}

/* The root's parameters, and those of the unit that computes, which its
 * gradient block takes the place of. */
TEST(test_blocks_of_a_step) {
  start(NULL, 5);
  for (int i = 0; i < 3; i++) {
    step();
    CHECK_I64(model_stats(&m).arena.nbytes, 0);
    CHECK_I64(recorder_live_nbytes(m.device), 0);
  }
  CHECK_I64(model_stats(&m).arena.peak_nbytes, 2 * BLOCK);
}

/* At the end of forward and in a unit's backward there are the root and that
 * unit. Its gradients take its place, and are reduced before the next one is
 * prefetched. */
TEST(test_where_activations_are_largest) {
  start(NULL, 5);
  for (int i = 0; i < 3; i++) step();
  PLAY("zero_grad; forward");
  CHECK_I64(model_stats(&m).arena.nbytes, 2 * BLOCK);
  CHECK_OK(model_pre_backward(&m, 0, NULL));
  CHECK_OK(model_pre_backward(&m, 5, NULL));
  CHECK_I64(model_stats(&m).arena.nbytes, 2 * BLOCK);
  for (int64_t i = 5; i >= 1; i--) {
    CHECK_OK(model_pre_backward(&m, i, NULL));
    CHECK_I64(model_stats(&m).arena.nbytes, 2 * BLOCK);
    CHECK(i == 1 || model_state(&m, i - 1) == FSDP_UNIT_SHARDED);
    CHECK_OK(model_give_grads(&m, i, NULL));
    CHECK_I64(model_stats(&m).arena.nbytes, 2 * BLOCK);
    CHECK(i == 1 || model_state(&m, i - 1) == FSDP_UNIT_PREFETCHED);
  }
  CHECK_OK(model_give_grads(&m, 0, NULL));
  PLAY("finish; check_grads");
}

/* A unit's sharded gradient is made when its reduction has ended, which is
 * waited for at once. */
TEST(test_sharded_gradients_come_late) {
  start(NULL, 2);
  step();
  PLAY("zero_grad; forward; pre_backward root; pre_backward b; clear; grads b");
  const char *reduced = strstr(recorder_tape(m.device), "reduce_scatter");
  CHECK(reduced != NULL && strstr(reduced, "grad_shard") != NULL);
  CHECK(strstr(recorder_tape(m.device), "grad_shard") > reduced);
  PLAY("pre_backward a; grads a; grads root; finish; check_grads");
}

/* Scratch ends with its reduction, a partial gradient with its addition. */
TEST(test_scratch_and_partial_gradients_end) {
  start(WITH(.wants_scratch = true), 3);
  for (int i = 0; i < 2; i++) {
    PLAY("zero_grad; sync shard; step");
    CHECK_I64(model_stats(&m).partial_grad_nbytes, 4 * BLOCK / 2);
    CHECK_I64(recorder_live_nbytes(m.device), 4 * BLOCK / 2);
    PLAY("sync reduce; step; check_grads");
    CHECK_I64(recorder_live_nbytes(m.device), 0);
    CHECK_I64(model_stats(&m).scratch_nbytes, BLOCK / 2); /* the most */
  }
}

/* A gradient that comes after the unit's reduction has a block and a reduction
 * of its own. */
TEST(test_a_gradient_after_the_last) {
  start(NULL, 2);
  for (int i = 0; i < 2; i++) {
    PLAY("zero_grad; forward; pre_backward root; pre_backward b; grads b");
    PLAY("unexpected b 0; pre_backward a; grads a; grads root; finish");
    PLAY("check_grads; check_races");
  }
}

/* Without a reduction a unit keeps its gradient block between backwards. */
TEST(test_unsharded_gradients_stay) {
  start(NULL, 3);
  for (int i = 0; i < 2; i++) {
    PLAY("zero_grad; sync none; step");
    CHECK_I64(recorder_live_nbytes(m.device), 4 * BLOCK);
    PLAY("sync reduce; step; check_grads");
    CHECK_I64(recorder_live_nbytes(m.device), 0);
  }
}

/* The last backward of an accumulation needs less from unit to unit: the root's
 * parameters, the gradients that are left, and one block. */
TEST(test_accumulated_gradients_leave_one_by_one) {
  start(NULL, 5);
  for (int step = 0; step < 2; step++) {
    PLAY("zero_grad; sync none; step");
    PLAY("sync reduce; forward; pre_backward root");
    for (int64_t i = 5; i >= 1; i--) {
      CHECK_OK(model_pre_backward(&m, i, NULL));
      CHECK_OK(model_give_grads(&m, i, NULL));
      CHECK_I64(model_stats(&m).arena.nbytes, (i + 2) * BLOCK);
    }
    PLAY("grads root; finish; check_races");
    CHECK_I64(recorder_live_nbytes(m.device), 0);
  }
}

/* Replicas, and every precision of what is reduced. */
TEST(test_values) {
  for (int i = 0; i < 8; i++) {
    model_options options = {0};
    options.num_replicas = i & 1 ? 2 : 1;
    options.wants_scratch = (i & 2) != 0;
    if (i & 4) options.param_dtype = RECORDER_BF16;
    start(&options, 3);
    for (int j = 0; j < 3; j++) step();
    CHECK_I64(recorder_live_nbytes(m.device), 0);
  }
}

/* Each call of a step fails once; the reset leaves nothing in flight. */
TEST(test_every_call_can_fail) {
  for (int64_t i = 0;; i++) {
    fsdp_error error = {0};
    start(WITH(.wants_scratch = true, .num_replicas = 2), 2);
    const int64_t before = recorder_num_calls(m.device);
    recorder_fail_at(m.device, i);
    fsdp_status status = model_forward(&m, true, &error);
    if (status == FSDP_OK) status = model_backward(&m, &error);
    recorder_fail_at(m.device, -1);
    const bool has_failed = recorder_num_calls(m.device) - before > i;
    fsdp_engine_reset(m.engine);
    step();
    CHECK_I64(recorder_live_nbytes(m.device), 0);
    if (!has_failed) break;
  }
}
