/*
 * Tests of runtime/ and arena/ on a host: blocks come and go, a reduction ends
 * where it is waited for, and only then are sharded gradients made (Note
 * [Memory on a host] in arena.h).
 */
#include "engine_failures.h"

/* The recorder with `defer`: the step runs when its lane is waited for. */
static struct {
  fsdp_device_ops base;
  fsdp_status (*step)(void *argument, fsdp_error *error); /* NULL: none */
  void *argument;
  fsdp_lane lane;
  fsdp_event *last[FSDP_NUM_LANES]; /* recorded on each */
  int64_t num_deferred;
} host;

static fsdp_status defer(void *context, fsdp_lane lane,
                         fsdp_status (*step)(void *argument, fsdp_error *error),
                         void *argument, fsdp_error *error) {
  (void)context, (void)error;
  CHECK(host.step == NULL); /* one reduction in flight at a time */
  host.step = step;
  host.argument = argument;
  host.lane = lane;
  host.num_deferred++;
  return FSDP_OK;
}

static fsdp_status event_record(void *context, fsdp_event *event,
                                fsdp_lane lane, fsdp_error *error) {
  host.last[lane] = event;
  return host.base.event_record(context, event, lane, error);
}

static fsdp_status event_wait(void *context, fsdp_lane lane, fsdp_event *event,
                              fsdp_error *error) {
  fsdp_status (*const step)(void *, fsdp_error *) = host.step;
  fsdp_status status = FSDP_OK;
  FSDP_TRY(host.base.event_wait(context, lane, event, error));
  if (step != NULL && event == host.last[host.lane]) {
    host.step = NULL;
    FSDP_TRY(step(host.argument, error));
  }
done:
  return status;
}

/* A root and `num_children` units, all of the same size. */
static void start(const model_options *options, int64_t num_children) {
  static const char *const names[] = {"root", "a", "b", "c", "d", "e"};
  model_init(&m, options);
  host.base = m.ops;
  host.step = NULL;
  host.num_deferred = 0;
  m.ops.defer = defer;
  m.ops.event_record = event_record;
  m.ops.event_wait = event_wait;
  for (int64_t i = 0; i <= num_children; i++) {
    model_plan_simple(&m, names[i], 16);
  }
  model_start(&m);
}

enum { BLOCK = 2 * 16 * 4 }; /* two ranks, fp32 */

static void step(void) {
  model_zero_grad(&m);
  model_optimizer_step(&m);
  model_step(&m);
  model_check_grads(&m);
  CHECK(host.step == NULL);
  CHECK_TEXT(recorder_race(m.device), "");
}

/* The root's parameters; those of the unit that computes and of the next one;
 * one gradient block, which takes the place of the parameters. */
TEST(test_blocks_of_a_step) {
  start(NULL, 5);
  for (int i = 0; i < 3; i++) {
    step();
    CHECK_I64(model_stats(&m).arena.nbytes, 0);
    CHECK_I64(recorder_live_nbytes(m.device), 0);
  }
  CHECK_I64(model_stats(&m).arena.peak_nbytes, 4 * BLOCK);
  CHECK_I64(host.num_deferred, 3 * 6);
  model_fini(&m);
}

/* At the end of forward and in the first unit's backward there are the root and
 * that unit. */
TEST(test_where_activations_are_largest) {
  start(NULL, 5);
  for (int i = 0; i < 3; i++) step();
  model_zero_grad(&m);
  CHECK_OK(model_forward(&m, true, NULL));
  CHECK_I64(model_stats(&m).arena.nbytes, 2 * BLOCK);
  CHECK_OK(model_pre_backward(&m, 0, NULL));
  CHECK_OK(model_pre_backward(&m, 5, NULL));
  CHECK_I64(model_stats(&m).arena.nbytes, 2 * BLOCK);
  CHECK_I64(model_state(&m, 4), FSDP_UNIT_SHARDED);
  /* Its gradients are complete: their block is where its parameters were. */
  CHECK_OK(model_give_grads(&m, 5, NULL));
  CHECK_I64(model_stats(&m).arena.nbytes, 3 * BLOCK);
  CHECK_I64(model_state(&m, 4), FSDP_UNIT_PREFETCHED);
  for (int64_t i = 4; i >= 1; i--) {
    CHECK_OK(model_pre_backward(&m, i, NULL));
    /* From the fourth unit on the next one is prefetched at the begin. */
    if (i > 1) {
      CHECK_I64(model_state(&m, i - 1),
                i >= 3 ? FSDP_UNIT_SHARDED : FSDP_UNIT_PREFETCHED);
    }
    CHECK_OK(model_give_grads(&m, i, NULL));
  }
  CHECK_OK(model_give_grads(&m, 0, NULL));
  CHECK_OK(model_finish(&m, NULL));
  model_check_grads(&m);
  model_fini(&m);
}

/* A unit's sharded gradient is made when its reduction has ended, which is
 * waited for when the next unit's gradients are complete. */
TEST(test_sharded_gradients_come_late) {
  start(NULL, 2);
  step();
  model_zero_grad(&m);
  CHECK_OK(model_forward(&m, true, NULL));
  CHECK_OK(model_pre_backward(&m, 0, NULL));
  CHECK_OK(model_pre_backward(&m, 2, NULL));
  recorder_clear(m.device);
  CHECK_OK(model_give_grads(&m, 2, NULL));
  CHECK_TAPE_HAS("reduce_scatter");
  CHECK_OK(model_pre_backward(&m, 1, NULL));
  CHECK_TAPE_LACKS("grad_shard");
  CHECK_OK(model_give_grads(&m, 1, NULL));
  const char *made = strstr(recorder_tape(m.device), "grad_shard");
  CHECK(made != NULL && strstr(made + 1, "grad_shard") == NULL);
  CHECK_OK(model_give_grads(&m, 0, NULL));
  CHECK_OK(model_finish(&m, NULL));
  model_check_grads(&m);
  model_fini(&m);
}

/* Scratch ends with its reduction, a partial gradient with its addition. */
TEST(test_scratch_and_partial_gradients_end) {
  model_options options = {0};
  options.wants_scratch = true;
  start(&options, 3);
  for (int i = 0; i < 2; i++) {
    model_zero_grad(&m);
    fsdp_engine_set_sync(m.engine, FSDP_SYNC_SHARD);
    model_step(&m);
    CHECK_I64(model_stats(&m).partial_grad_nbytes, 4 * BLOCK / 2);
    CHECK_I64(recorder_live_nbytes(m.device), 4 * BLOCK / 2);
    fsdp_engine_set_sync(m.engine, FSDP_SYNC_REDUCE);
    model_step(&m);
    model_check_grads(&m);
    CHECK_I64(recorder_live_nbytes(m.device), 0);
    CHECK_I64(model_stats(&m).scratch_nbytes, BLOCK / 2); /* the most */
  }
  model_fini(&m);
}

/* A gradient that comes when the unit's reduction is in flight has a block and
 * a reduction of its own. */
TEST(test_a_gradient_after_the_last) {
  start(NULL, 2);
  for (int i = 0; i < 2; i++) {
    model_zero_grad(&m);
    CHECK_OK(model_forward(&m, true, NULL));
    CHECK_OK(model_pre_backward(&m, 0, NULL));
    CHECK_OK(model_pre_backward(&m, 2, NULL));
    CHECK_OK(model_give_grads(&m, 2, NULL));
    CHECK(host.step != NULL);
    CHECK_OK(model_give_grad(&m, 2, 0, false, NULL));
    CHECK(host.step == NULL);
    CHECK_OK(model_pre_backward(&m, 1, NULL));
    CHECK_OK(model_give_grads(&m, 1, NULL));
    CHECK_OK(model_give_grads(&m, 0, NULL));
    CHECK_OK(model_finish(&m, NULL));
    model_check_grads(&m);
    CHECK_TEXT(recorder_race(m.device), "");
  }
  model_fini(&m);
}

/* Without a reduction a unit keeps its gradient block between backwards. */
TEST(test_unsharded_gradients_stay) {
  start(NULL, 3);
  for (int i = 0; i < 2; i++) {
    model_zero_grad(&m);
    fsdp_engine_set_sync(m.engine, FSDP_SYNC_NONE);
    model_step(&m);
    CHECK_I64(recorder_live_nbytes(m.device), 4 * BLOCK);
    fsdp_engine_set_sync(m.engine, FSDP_SYNC_REDUCE);
    model_step(&m);
    model_check_grads(&m);
    CHECK_I64(recorder_live_nbytes(m.device), 0);
  }
  model_fini(&m);
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
    model_fini(&m);
  }
}

/* Each call of a step fails once; the reset leaves nothing in flight. */
TEST(test_every_call_can_fail) {
  model_options options = {0};
  options.wants_scratch = true;
  options.num_replicas = 2;
  for (int64_t i = 0;; i++) {
    fsdp_error error = {FSDP_OK, 0, NULL, ""};
    start(&options, 2);
    const int64_t before = recorder_num_calls(m.device);
    recorder_fail_at(m.device, i);
    fsdp_status status = model_forward(&m, true, &error);
    if (status == FSDP_OK) status = model_backward(&m, &error);
    recorder_fail_at(m.device, -1);
    const bool has_failed = recorder_num_calls(m.device) - before > i;
    host.step = has_failed ? NULL : host.step; /* the lane drops it */
    fsdp_engine_reset(m.engine);
    step();
    CHECK_I64(recorder_live_nbytes(m.device), 0);
    model_fini(&m);
    if (!has_failed) break;
  }
}
