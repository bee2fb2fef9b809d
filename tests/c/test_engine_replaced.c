/*
 * Tests of runtime/: parameters whose memory the user replaced. They are copied
 * into the shards on COMPUTE, so the lanes that read shards wait for it.
 */
#include "engine_failures.h"

static void step(void) {
  PLAY("zero_grad; step; check_grads");
}

/* --- Waits --------------------------------------------------------------- */

TEST(test_forward_and_backward) {
  model_start_tree(&m, NULL, 1);
  PLAY("params_copied 1; step");
  CHECK_TAPE_HAS(
      "take_params root sharded; record e1 compute; wait unshard e1;");
  CHECK_TAPE_HAS("take_params a sharded; record e1 compute; wait unshard e1;");
  PLAY("params_copied 0; clear");
  step();
  CHECK_TAPE_LACKS("take_params root sharded; record e1 compute;");
  PLAY("check_grads");
}

/* The copy of one unit's parameters is not ordered by the wait of another. */
TEST(test_each_unit_waits) {
  model_options options = {.forward_prefetch = true};
  for (int with_casts = 0; with_casts < 2; with_casts++) {
    if (with_casts) options.param_dtype = RECORDER_BF16;
    for (int prefetch = 0; prefetch < 3; prefetch++) {
      options.backward_prefetch = (model_prefetch)prefetch;
      model_start_tree(&m, &options, 3);
      step();
      for (int where = 0; where < 2; where++) {
        PLAY("zero_grad");
        recorder_set_params_copied(m.device, where == 0);
        PLAY("forward");
        /* between forward and backward */
        recorder_set_params_copied(m.device, where == 1);
        PLAY("backward; params_copied 0; check_grads");
      }
      model_fini(&m); /* finds races */
    }
  }
}

/* A bridge that copies and does not say so: the all-gathers read too early. It
 * is what the tests above would find without the waits. */
static fsdp_status take_params_silently(void *context, void *owner,
                                        fsdp_view view, void *const *segments,
                                        bool *any_copied, fsdp_error *error) {
  const model_unit *unit = owner;
  const fsdp_status status = recorder_views(context)->take_params(
      context, owner, view, segments, any_copied, error);
  if (status != FSDP_OK || !*any_copied) return status;
  recorder_touch(context, FSDP_LANE_COMPUTE, unit->shards[0],
                 unit->shard_nbytes[0], true);
  *any_copied = false;
  return FSDP_OK;
}

TEST(test_without_the_wait) {
  model_init(&m, NULL);
  model_plan_simple(&m, "root", 4);
  model_plan_simple(&m, "a", 8);
  recorder_name_memory(m.device, m.units[1].shards[0], 32, "shard");
  m.views.take_params = take_params_silently;
  model_start(&m);
  PLAY("step; enter root; params_copied 1; check_races; enter a");
  PLAY("params_copied 0");
  CHECK_TEXT(recorder_race(m.device),
             "read by unshard, not after write of shard by compute (all_gather "
             "unshard g0 8 f32)");
  recorder_clear_race(m.device);
  PLAY("leave a; leave root; backward");
}

/* The host copies what is in host memory; the upload needs no more. */
TEST(test_in_host_memory) {
  model_options options = {.offloads = true};
  for (int with_casts = 0; with_casts < 2; with_casts++) {
    if (with_casts) options.param_dtype = RECORDER_BF16;
    model_start_tree(&m, &options, 2);
    step();
    PLAY("params_copied 1");
    step();
    PLAY("params_copied 0");
    step();
  }
}

/* Nothing is gathered: the shard is what the module reads, on COMPUTE. */
TEST(test_one_rank) {
  model_options options = {.world_size = 1};
  for (int with_casts = 0; with_casts < 2; with_casts++) {
    if (with_casts) options.param_dtype = RECORDER_BF16;
    model_start_tree(&m, &options, 2);
    PLAY("params_copied 1");
    for (int i = 0; i < 2; i++) step();
  }
}

/* --- Summon -------------------------------------------------------------- */

/* Replaced before or inside a summon, in a forward's wake: the backward that
 * follows finds nothing replaced any more, and must not read too early. */
static void check_summon(const model_options *options,
                         const fsdp_summon_options *how) {
  for (int when = 0; when < 2; when++) {
    for (int writeback = 0; writeback < 2; writeback++) {
      model_start_tree(&m, options, 1);
      step();
      PLAY("zero_grad; forward");
      for (int64_t i = 0; i < 2; i++) {
        recorder_set_params_copied(m.device, when == 0);
        CHECK_OK(fsdp_unit_summon(m.units[i].unit, how, NULL));
        recorder_set_params_copied(m.device, when == 1);
        CHECK_OK(fsdp_unit_dismiss(m.units[i].unit, writeback != 0, NULL));
        PLAY("params_copied 0");
      }
      PLAY("backward; check_grads");
      step();
    }
  }
}

TEST(test_summon) {
  for (int bits = 0; bits < 2 * 2 * 2; bits++) {
    const fsdp_summon_options how = {.on_host = (bits & 1) != 0};
    model_options options = {.world_size = (bits & 2) != 0 ? 1 : 2};
    if ((bits & 4) != 0) options.param_dtype = RECORDER_BF16;
    check_summon(&options, &how);
    options.offloads = true;
    check_summon(&options, &how);
  }
}

/* --- Failures ------------------------------------------------------------ */

static void prepare(void) {
  PLAY("params_copied 1");
}

TEST(test_every_call_can_fail) {
  model_options options = {.forward_prefetch = true};
  failures_every_call_of_steps(&options, prepare, failures_train);
  options.param_dtype = RECORDER_BF16;
  options.offloads = true;
  failures_every_call_of_steps(&options, prepare, failures_train);
}
