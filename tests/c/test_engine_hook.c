/*
 * Tests of runtime/: a communication hook in place of a unit's reductions.
 */
#include "engine_failures.h"

static model m; /* each test makes and frees it */

static void set_hooks(model *self) {
  for (int64_t i = 0; i < self->num_units; i++) {
    fsdp_unit_set_reduce_hook(self->units[i].unit, true);
  }
}

/* No collective, no scale before it or after it, and no prescale. */
static void test_step(void) {
  model_options options = model_default_options();
  options.rank = 1;
  options.num_replicas = 2;
  options.prescale = 0.5;
  model_start_tree(&m, &options, 0);
  set_hooks(&m);
  CHECK_I64(model_forward(&m, true, NULL), FSDP_OK);
  recorder_show_memory(m.device, true);
  recorder_clear(m.device);
  CHECK_I64(model_backward(&m, NULL), FSDP_OK);
  CHECK_TEXT(recorder_tape(m.device),
             "take_grads root\n"
             "wait compute e6\n"
             "show root unsharded\n"
             "event e8\n"
             "alloc 32 b2\n"
             "pack compute f32 x1 8@0 b2\n"
             "release t1\n"
             "show root sharded\n"
             "record e7 compute\n"
             "grad_shard root 0\n"
             "record e1 compute\n"
             "wait reduce e1\n"
             "reduce_hook root reduce 0 b2\n"
             "accumulate reduce 4 f32->f32 x1 ? <- b2+16\n"
             "record e8 reduce\n"
             "record e2 reduce\n"
             "wait compute e2\n"
             "record e3 replicate\n"
             "wait compute e3\n"
             "show_grads root sharded\n");
  model_check_grads(&m);
  model_fini(&m);
}

/* Once for each trainable segment. */
static void test_mixed_segments(void) {
  model_init(&m, NULL);
  model_plan_mixed(&m, "u");
  model_start(&m);
  set_hooks(&m);
  model_step(&m);
  const char *tape = recorder_tape(m.device);
  CHECK(strstr(tape, "reduce_hook u reduce 0\nreduce_hook u reduce 2\n"));
  CHECK(strstr(tape, "reduce_scatter") == NULL);
  model_check_grads(&m);
  model_fini(&m);
}

/* In micro-batches of every kind. */
static void check_numbers(model_options options) {
  model_start_tree(&m, &options, 2);
  set_hooks(&m);
  for (int step = 0; step < 3; step++) {
    model_zero_grad(&m);
    model_step(&m);
    model_check_grads(&m);
    fsdp_engine_set_sync(m.engine, FSDP_SYNC_NONE);
    model_step(&m);
    fsdp_engine_set_sync(m.engine, FSDP_SYNC_SHARD);
    model_step(&m);
    CHECK_I64(m.units[1].grad_view, FSDP_VIEW_PARTIAL);
    fsdp_engine_set_sync(m.engine, FSDP_SYNC_REDUCE);
    recorder_clear(m.device);
    model_step(&m);
    model_check_grads(&m);
    CHECK(strstr(recorder_tape(m.device), "all_reduce") == NULL);
    model_optimizer_step(&m);
  }
  /* Taken away, the usual reductions are back. */
  for (int64_t i = 0; i < m.num_units; i++) {
    fsdp_unit_set_reduce_hook(m.units[i].unit, false);
  }
  recorder_clear(m.device);
  model_zero_grad(&m);
  model_step(&m);
  model_check_grads(&m);
  CHECK(strstr(recorder_tape(m.device), "reduce_hook") == NULL);
  model_fini(&m);
}

static void test_numbers(void) {
  for (int64_t world_size = 1; world_size < 3; world_size++) {
    for (int64_t replicas = 1; replicas < 3; replicas++) {
      model_options options = model_default_options();
      options.world_size = world_size;
      options.rank = world_size - 1;
      options.num_replicas = replicas;
      check_numbers(options);
      options.param_dtype = RECORDER_BF16;
      options.reduce_dtype = RECORDER_F32;
      options.wants_scratch = true;
      options.offloads = true;
      check_numbers(options);
    }
  }
}

static void test_every_call_can_fail(void) {
  model_options options = model_default_options();
  options.num_replicas = 2;
  failures_every_call_of_steps(&m, &options, set_hooks, failures_train);
}

int main(void) {
  static const check_test tests[] = {
      CHECK_TEST(test_step),
      CHECK_TEST(test_mixed_segments),
      CHECK_TEST(test_numbers),
      CHECK_TEST(test_every_call_can_fail),
  };
  return CHECK_RUN(tests);
}
