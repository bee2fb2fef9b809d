/*
 * Tests of runtime/: which parameters no rank has a gradient of, found in the
 * reduction itself (Note [Unused parameters] in runtime/unused.c).
 */
#include <string.h>

#include "engine_failures.h"
#include "runtime/engine_priv.h"

static void init(const model_options *options) {
  model_init(&m, options);
  m.options.finds_unused = true;
}

static void start_with(const model_options *options, bool is_host) {
  init(options);
  m.ops.is_host = is_host;
  model_plan_units("u (4,8)");
  model_start(&m);
}

static bool is_unused(int64_t param) {
  const fsdp_unit *unit = m.units[0].unit;
  if (unit->marks != NULL) { /* as the answer reads it */
    recorder_touch(m.device, RECORDER_HOST_LANE, unit->marks, 8, false);
  }
  return fsdp_unit_is_unused(unit, param);
}

/* A rank that has all gradients reads nothing. */
TEST(test_tape) {
  start_with(WITH(.rank = 1), false);
  PLAY("forward; pre_backward u; expect u 2; grad u 0; clear; grad u 1");
  CHECK_TAPE_HAS(
      "pack compute x1 4 f32->f32, 8 f32->f32, zero 4 f32, one 4 f32; ");
  CHECK_TAPE_HAS(
      "reduce_scatter reduce g0 8 f32; reduce_scatter reduce g0 2 f32; "
      "group_end reduce g0");
  PLAY("clear; finish; check_grads");
  CHECK_TAPE_LACKS("copy_to_host");
  CHECK_TAPE_LACKS("synchronize");
  CHECK(!is_unused(0) && !is_unused(1));

  PLAY("zero_grad; forward; pre_backward u; expect u 1; clear; grad u 0");
  CHECK_TAPE_HAS(
      "pack compute x1 4 f32->f32, zero 12 f32, one 1 f32, zero 1 f32; "
      "pack compute x1 2 f32->f32; release");
  CHECK_TAPE_HAS("copy_to_host reduce 8; accumulate reduce x0.5 8 f32->f32");
  PLAY("clear; finish; check_grads");
  CHECK_TAPE_HAS("synchronize");
  CHECK(!is_unused(0) && is_unused(1));

  PLAY("zero_grad; step; check_grads"); /* the answer is of the last one */
  CHECK(!is_unused(0) && !is_unused(1));
}

/* Sums to which other ranks have added. */
static fsdp_status copy_from_others(void *context, fsdp_lane lane, void *host,
                                    const void *device, int64_t nbytes,
                                    fsdp_error *error) {
  const fsdp_status status = recorder_ops(context)->copy_to_host(
      context, lane, host, device, nbytes, error);
  ((float *)host)[1] += 1;
  return status;
}

TEST(test_what_another_rank_uses_is_used) {
  init(NULL);
  m.ops.copy_to_host = copy_from_others;
  model_plan_units("u (4,8,8)");
  model_start(&m);
  PLAY("forward; pre_backward u; expect u 1; grad u 0; finish; check_grads");
  CHECK(!is_unused(0) && !is_unused(1) && is_unused(2));
}

/* Sums that are all 0. */
static fsdp_status copy_zeros(void *context, fsdp_lane lane, void *host,
                              const void *device, int64_t nbytes,
                              fsdp_error *error) {
  const fsdp_status status = recorder_ops(context)->copy_to_host(
      context, lane, host, device, nbytes, error);
  memset(host, 0, (size_t)nbytes);
  return status;
}

/* It needs no sum for what it has itself. */
TEST(test_what_this_rank_uses_is_used) {
  init(NULL);
  m.ops.copy_to_host = copy_zeros;
  model_plan_units("u (4,8)");
  model_start(&m);
  PLAY("forward; pre_backward u; expect u 1; grad u 0; finish; check_grads");
  CHECK(!is_unused(0) && is_unused(1));
}

/* A gradient of an earlier micro-batch counts, held whole or as a partial one.
 * The first needs no answer, as this rank has it. */
static void check_micro_batches(const model_options *options, bool is_host) {
  start_with(options, is_host);
  PLAY("forward; pre_backward u; expect u 1; grad u 0; finish; check_grads");
  CHECK(is_unused(1));
  PLAY("zero_grad; sync none");
  PLAY("forward; pre_backward u; expect u 1; grad u 1; finish");
  PLAY("sync reduce; forward; pre_backward u; expect u 1; grad u 0");
  PLAY("finish; check_grads");
  CHECK(!m.units[0].unit->reads_marks);
  CHECK(!is_unused(0) && !is_unused(1));

  PLAY("zero_grad; sync shard");
  PLAY("forward; pre_backward u; expect u 1; grad u 1; finish");
  PLAY("sync reduce; forward; pre_backward u; expect u 1; grad u 0");
  PLAY("finish; check_grads");
  CHECK(!is_unused(0) && !is_unused(1));

  PLAY("zero_grad; sync shard");
  PLAY("forward; pre_backward u; expect u 1; grad u 0; finish");
  PLAY("sync reduce; forward; pre_backward u; expect u 1; grad u 0");
  PLAY("finish; check_grads");
  CHECK(!is_unused(0) && is_unused(1));
}

TEST(test_micro_batches) {
  for (int64_t world_size = 1; world_size < 4; world_size++) {
    for (int64_t replicas = 1; replicas < 3; replicas++) {
      model_options options = {.world_size = world_size,
                               .rank = world_size - 1,
                               .num_replicas = replicas};
      check_micro_batches(&options, false);
      check_micro_batches(&options, true);
      options.wants_scratch = true;
      options.offloads = true;
      check_micro_batches(&options, false);
    }
  }
}

/* However many units ask, the host waits once. */
TEST(test_one_wait_for_all) {
  init(NULL);
  model_plan_units("u (4,8); v (4,8)");
  model_start(&m);
  PLAY("forward; pre_backward v; expect v 1; grad v 0");
  PLAY("pre_backward u; expect u 1; grad u 1; clear; finish; check_grads");
  const char *wait = strstr(recorder_tape(m.device), "synchronize");
  CHECK(wait != NULL && strstr(wait + 1, "synchronize") == NULL);
  CHECK(is_unused(0));
  CHECK(fsdp_unit_is_unused(m.units[1].unit, 1));
}

/* Nested backwards reduce a unit twice: what the first one had is used. */
TEST(test_two_reductions_in_one_backward) {
  start_with(NULL, false);
  PLAY("forward; pre_backward u; expect u 1; grad u 0");
  PLAY("pre_backward u; expect u 1; grad u 1; finish; check_grads");
  CHECK(!is_unused(0) && !is_unused(1));
  PLAY("zero_grad; forward; pre_backward u; expect u 1; grad u 0; finish");
  CHECK(!is_unused(0) && is_unused(1)); /* of the next backward */
}

/* Zeros take part for what this rank did not use, also for all of a unit. */
TEST(test_filled) {
  start_with(NULL, false);
  fsdp_unit_get_settings(m.units[0].unit)->fills_unused = true;
  PLAY("forward; pre_backward u; expect u 1; grad u 0; finish; check_grads");
  CHECK(!is_unused(0) && !is_unused(1));
  PLAY("zero_grad; forward; clear; pre_backward u; finish; check_grads");
  CHECK_TAPE_HAS("reduce_scatter");
  PLAY("grad_view u sharded; zero_grad; clear; eval; finish");
  CHECK_TAPE_LACKS("reduce_scatter"); /* no backward */
  fsdp_unit_get_settings(m.units[0].unit)->fills_unused = false;
  PLAY("zero_grad; forward; clear; pre_backward u; finish; no_grads u");
  CHECK_TAPE_LACKS("reduce_scatter");
}

/* Frozen parameters are not missed; the marks come with the first that is
 * trained. */
TEST(test_frozen) {
  start_with(WITH(.rank = 1), false);
  PLAY("freeze u 0; step; no_grads u; zero_grad; unfreeze u 0");
  PLAY("forward; pre_backward u; expect u 1; grad u 1; finish; check_grads");
  CHECK(is_unused(0) && !is_unused(1));

  init(NULL);
  model_plan_mixed(&m, "u");
  model_start(&m);
  PLAY("step; check_grads");
  for (int64_t i = 0; i < 5; i++) CHECK(!is_unused(i));
  PLAY("unfreeze u 1");
  PLAY("zero_grad; forward; pre_backward u; expect u 2; grad u 4; grad u 2");
  PLAY("finish; check_grads");
  CHECK(is_unused(0) && is_unused(1) && !is_unused(2) && !is_unused(4));
}

/* A unit whose parameters were all frozen when it was made. */
TEST(test_thawed) {
  init(NULL);
  model_plan_units("u (4,8) frozen");
  model_start(&m);
  PLAY("step; no_grads u; zero_grad; unfreeze u 0");
  PLAY("forward; pre_backward u; expect u 1; grad u 1; finish; check_grads");
  CHECK(is_unused(0) && !is_unused(1));
}

static fsdp_status train(fsdp_error *error) {
  return model_try(
      "zero_grad; forward; pre_backward root; pre_backward c; grads c; "
      "pre_backward mixed; expect mixed 2; grad mixed 4; grad mixed 0; "
      "grads root; finish",
      error);
}

TEST(test_every_call_fails) {
  model_options options = {.finds_unused = true, .num_replicas = 2};
  failures_every_call_of_steps(&options, NULL, train);
  options.offloads = true;
  failures_every_call(&options, NULL, train, 1);
  failures_every_allocation(&options, NULL, train);
}

/* The host would have to ask in each replay. */
TEST(test_a_capture_is_refused) {
  fsdp_error error = {0};
  start_with(WITH(.rank = 1), false);
  PLAY("step; zero_grad");
  CHECK_OK(fsdp_engine_begin_capture(m.engine, NULL));
  CHECK_OK(fsdp_engine_fork_lanes(m.engine, NULL));
  PLAY("step; zero_grad; forward; pre_backward u; expect u 1");
  CHECK_FAILS(model_give_grad(&m, 0, 0, true, &error), FSDP_INVALID_STATE,
              error.message, "..all trainable parameters can be captured");
  fsdp_engine_end_capture(m.engine);
  PLAY("reset; step; check_grads");
}
