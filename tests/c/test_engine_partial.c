/*
 * Tests of runtime/: partial gradients (FSDP_SYNC_SHARD), which are summed over
 * the shard group in every micro-batch, and over the replicas in the last one.
 */
#include "base/alloc.h"
#include "engine_failures.h"

static int64_t count_lines(const char *word) {
  const char *line = recorder_tape(m.device);
  int64_t num_lines = 0;
  while ((line = strstr(line, word)) != NULL) {
    num_lines++;
    line++;
  }
  return num_lines;
}

/* Rank 1 of two, four replicas: the first micro-batch, a second, the last. */
TEST(test_window) {
  model_open(WITH(.rank = 1, .num_replicas = 4), "u 4");
  PLAY("show_memory");
  recorder_name_memory(m.device, m.units[0].grad_shards[0], 16, "grad");
  PLAY("sync shard; forward; clear; backward");
  CHECK_TAPE(
      "take_grads u; wait compute e6; show u unsharded; show u sharded; "
      "free 32 b1; alloc 32 b2; pack compute x1 8 f32->f32 b2 <- ?; release "
      "t1; "
      "alloc 16 b3; record e1 compute; wait reduce e1; group_begin reduce g0; "
      "reduce_scatter reduce g0 4 f32 b2; group_end reduce g0; "
      "accumulate reduce x1 4 f32->f32 b3 <- b2+16; record e7 reduce; "
      "record e2 reduce; wait compute e2; record e3 replicate; "
      "wait compute e3; wait compute e7; free 32 b2; show_grads u partial");
  PLAY("check_grads; grad_view u partial");
  CHECK_I64(model_stats(&m).partial_grad_nbytes, 16);
  CHECK_I64(model_stats(&m).grad_shard_nbytes, 0);

  PLAY("forward; clear; backward");
  CHECK_TAPE(
      "take_grads u; wait compute e6; show u unsharded; show u sharded; "
      "free 32 b4; alloc 32 b5; pack compute x1 8 f32->f32 b5 <- ?; release "
      "t2; "
      "record e1 compute; wait reduce e1; group_begin reduce g0; "
      "reduce_scatter reduce g0 4 f32 b5; group_end reduce g0; "
      "accumulate reduce x1 4 f32->f32 add b3 <- b5+16; record e7 reduce; "
      "record e2 reduce; wait compute e2; record e3 replicate; "
      "wait compute e3; wait compute e7; free 32 b5; show_grads u partial");
  PLAY("check_grads");

  PLAY("sync reduce; forward; clear; backward");
  CHECK_TAPE(
      "take_grads u; wait compute e6; show u unsharded; show u sharded; "
      "free 32 b6; alloc 32 b7; pack compute x1 8 f32->f32 b7 <- ?; release "
      "t3; "
      "grad_shard u 0; record e1 compute; wait reduce e1; "
      "group_begin reduce g0; reduce_scatter reduce g0 4 f32 b7; "
      "group_end reduce g0; accumulate reduce x1 4 f32->f32 add b7+16 <- b3; "
      "record e2 reduce; wait replicate e2; group_begin replicate g1; "
      "all_reduce replicate g1 4 f32 b7+16; group_end replicate g1; "
      "accumulate replicate x0.125 4 f32->f32 grad <- b7+16; "
      "record e7 replicate; record e2 reduce; wait compute e2; "
      "record e3 replicate; wait compute e3; wait compute e7; free 32 b7; "
      "show_grads u sharded; keep_grads u partial; free 16 b3");
  PLAY("check_grads; grad_view u sharded");
  CHECK_I64(model_stats(&m).partial_grad_nbytes, 0);
}

/* --- Numbers ------------------------------------------------------------- */

/* Windows of three micro-batches. Nothing is allocated on the host from the
 * third on, and all that is allocated on the device goes. */
static void check_windows(const model_options *options) {
  int64_t num_live = 0;
  model_open(options, "root 8; mixed mixed; b 16");
  for (int window = 0; window < 4; window++) {
    PLAY("zero_grad; clear");
    if (window == 2) num_live = fsdp_alloc_live();
    for (int i = 0; i < 2; i++) {
      PLAY("sync shard; step; check_sharded; grad_view b partial");
      PLAY("check_grads");
    }
    CHECK_I64(count_lines("all_reduce"), 0);
    PLAY("sync reduce; step; check_grads; grad_view b sharded");
    CHECK_I64(count_lines("all_reduce"), m.options.num_replicas > 1 ? 4 : 0);
    CHECK_I64(count_lines("reduce_scatter"),
              m.options.world_size > 1 ? 3 * 4 : 0);
    PLAY("check_idle");
    if (window >= 2) {
      CHECK_I64(count_lines("\nalloc "), count_lines("\nfree "));
    }
    PLAY("optimizer");
  }
  CHECK_I64(fsdp_alloc_live(), num_live);
}

TEST(test_windows) {
  for (int64_t world_size = 1; world_size < 3; world_size++) {
    for (int64_t replicas = 1; replicas < 3; replicas++) {
      model_options options = {.world_size = world_size,
                               .rank = world_size - 1,
                               .num_replicas = replicas};
      check_windows(&options);
      options.param_dtype = RECORDER_BF16;
      options.reduce_dtype = RECORDER_F32;
      options.grad_dtype = RECORDER_F32;
      options.prescale = 0.25;
      options.wants_scratch = true;
      check_windows(&options);
      options.offloads = true;
      check_windows(&options);
    }
  }
}

/* Every order of two kinds of micro-batch before the reduction. */
TEST(test_mixed_with_no_sync) {
  for (int kinds = 0; kinds < 16; kinds++) {
    model_start_tree(&m,
                     WITH(.num_replicas = 2, .prescale = 0.5,
                          .keeps_without_sync = kinds % 3 == 0),
                     2);
    for (int window = 0; window < 2; window++) {
      for (int i = 0; i < 4; i++) {
        const bool is_partial = (kinds >> i & 1) != 0;
        if (is_partial) {
          PLAY("sync shard; step; grad_view a partial; check_grads");
        } else {
          PLAY("sync none; step; grad_view a unsharded");
        }
      }
      PLAY("sync reduce; step; check_grads; check_idle");
      if (window == 0) continue;
      PLAY("sync shard; step; check_grads"); /* beside a sharded gradient */
      PLAY("sync reduce; step; check_grads");
    }
  }
}

/* --- Units that are missing ---------------------------------------------- */

/* A backward of the root and of unit a; b runs forward if `is_entered`. */
static void step_without_b(fsdp_sync sync, bool is_entered) {
  fsdp_engine_set_sync(m.engine, sync);
  PLAY("enter root");
  for (int64_t i = 1; i < (is_entered ? 3 : 2); i++) {
    CHECK_OK(model_enter(&m, i, NULL));
    CHECK_OK(model_leave(&m, i, true, NULL));
  }
  PLAY("leave root; pre_backward root");
  if (is_entered) PLAY("pre_backward b");
  PLAY("pre_backward a; grads a; grads root; finish; check_sharded");
}

/* What b kept is reduced at the end of the last backward all the same. */
TEST(test_unit_without_gradients_in_the_last) {
  for (int is_entered = 0; is_entered < 2; is_entered++) {
    for (int64_t world_size = 1; world_size < 3; world_size++) {
      model_start_tree(&m, WITH(.world_size = world_size, .num_replicas = 2),
                       2);
      PLAY("sync shard; step");
      step_without_b(FSDP_SYNC_SHARD, is_entered != 0);
      PLAY("num_reduces 5; check_grads");
      step_without_b(FSDP_SYNC_REDUCE, is_entered != 0);
      PLAY("num_reduces 8; check_grads; grad_view b sharded; zero_grad");
      step_without_b(FSDP_SYNC_REDUCE, is_entered != 0); /* no more of b */
      PLAY("num_reduces 10; no_grads b");
    }
  }
}

/* Cleared in between, it does not come back. */
TEST(test_cleared_in_between) {
  model_start_tree(&m, NULL, 2);
  PLAY("sync shard; step; zero_grad");
  PLAY("step; check_grads; zero_grad"); /* starts anew */
  PLAY("sync reduce; step; check_grads; zero_grad");
  PLAY("sync shard; step; zero_grad");
  const int64_t num_reduces = model_stats(&m).num_reduces;
  step_without_b(FSDP_SYNC_REDUCE, false);
  CHECK_I64(model_stats(&m).num_reduces, num_reduces + 2);
  PLAY("has_grads a; no_grads b; check_idle");
}

/* A window that a failure cut: what took part in the broken backward is gone,
 * the others keep what they had. */
TEST(test_reset_in_between) {
  model_start_tree(&m, NULL, 2);
  PLAY("sync shard; step");
  PLAY("forward; pre_backward root; pre_backward b; grads b; reset");
  PLAY("check_sharded");
  memset(m.units[0].expected[0], 0, 8 * sizeof(double));
  memset(m.units[2].expected[0], 0, 24 * sizeof(double));
  PLAY("sync reduce; step; check_grads");
}

/* --- Moving and going ---------------------------------------------------- */

TEST(test_partial_gradient_holds_the_unit) {
  fsdp_engine *other = NULL;
  model_start_tree(&m, NULL, 1);
  CHECK_OK(fsdp_engine_create(&m.ops, &m.views, &other, NULL));
  PLAY("sync shard; step");
  CHECK_I64(fsdp_engine_add_unit(other, m.units[1].unit, NULL),
            FSDP_INVALID_STATE);
  PLAY("sync reduce; step");
  CHECK_OK(fsdp_engine_add_unit(other, m.units[1].unit, NULL));
  CHECK_I64(model_stats(&m).partial_grad_nbytes, 0);
  CHECK_OK(fsdp_engine_add_unit(m.engine, m.units[1].unit, NULL));
  fsdp_engine_destroy(other);
  PLAY("zero_grad; sync shard; step; sync reduce; step; check_grads");
}

/* A unit that goes while its partial gradient is still being written. */
TEST(test_unit_goes_inside_backward) {
  model_start_tree(&m, NULL, 1);
  PLAY("sync shard; forward; pre_backward root; pre_backward a; grads a");
  PLAY("clear; destroy a");
  CHECK_TAPE_HAS("record e1 reduce; wait compute e1;");
  CHECK_TAPE_HAS("free 32;");
  PLAY("reset");
}

/* --- Failures ------------------------------------------------------------ */

static fsdp_status train(fsdp_error *error) {
  return model_try("sync shard; step; step; sync reduce; step", error);
}

TEST(test_every_call_can_fail) {
  model_options options = {.num_replicas = 2};
  failures_every_call_of_steps(&options, NULL, train);
  options.world_size = 1;
  options.param_dtype = RECORDER_BF16;
  failures_every_call(&options, NULL, train, 0);
  options.offloads = true;
  failures_every_call(&options, NULL, train, 0);
}

TEST(test_every_allocation_can_fail) {
  failures_every_allocation(NULL, NULL, train);
}
