/*
 * Tests of runtime/: everything that one step enqueues, for each strategy.
 */
#include "engine_fixture.h"

TEST(test_full_shard) {
  model_start_tree(&m, NULL, 0);
  PLAY("step");
  CHECK_TAPE(
      "record e1 compute; wait unshard e1; take_params root sharded; event e7; "
      "alloc 32; record e7 compute; wait unshard e7; group_begin unshard g0; "
      "all_gather unshard g0 4 f32; group_end unshard g0; record e6 unshard; "
      "wait compute e6; show root unsharded; hide root; mark_params root; "
      "take_grads root; wait compute e6; show root unsharded; "
      "show root sharded; free 32; alloc 32; pack compute x1 8 f32->f32; "
      "release t1; grad_shard root 0; record e1 compute; wait reduce e1; "
      "group_begin reduce g0; reduce_scatter reduce g0 4 f32; "
      "group_end reduce g0; accumulate reduce x0.5 4 f32->f32; "
      "record e7 reduce; record e2 reduce; wait compute e2; "
      "record e3 replicate; wait compute e3; wait compute e7; free 32; "
      "show_grads root sharded");
  PLAY("check_grads; check_sharded");
}

/* One rank in the shard group: the shard is the parameter. */
TEST(test_no_shard) {
  model_open(WITH(.world_size = 1, .num_replicas = 4), "root 8");
  PLAY("step");
  CHECK_TAPE(
      "record e1 compute; wait unshard e1; take_params root sharded; "
      "take_grads root; event e7; alloc 32; pack compute x1 8 f32->f32; "
      "release t1; grad_shard root 0; record e1 compute; wait replicate e1; "
      "group_begin replicate g0; all_reduce replicate g0 8 f32; "
      "group_end replicate g0; accumulate replicate x0.25 8 f32->f32; "
      "record e7 replicate; record e2 reduce; wait compute e2; "
      "record e3 replicate; wait compute e3; wait compute e7; free 32; "
      "show_grads root sharded");
  PLAY("check_grads; num_all_gathers 0");
}

/* The all-reduce of the pieces follows the reduce-scatter on its own lane. */
TEST(test_hybrid) {
  model_start_tree(&m, WITH(.rank = 1, .num_replicas = 4), 0);
  PLAY("forward; show_memory; clear; backward");
  CHECK_TAPE(
      "take_grads root; wait compute e6; show root unsharded; "
      "show root sharded; free 32 b1; alloc 32 b2; pack compute x1 8 f32->f32 "
      "b2 <- ?; "
      "release t1; grad_shard root 0; record e1 compute; wait reduce e1; "
      "group_begin reduce g0; reduce_scatter reduce g0 4 f32 b2; "
      "group_end reduce g0; record e2 reduce; wait replicate e2; "
      "group_begin replicate g1; all_reduce replicate g1 4 f32 b2+16; "
      "group_end replicate g1; "
      "accumulate replicate x0.125 4 f32->f32 ? <- b2+16; record e7 replicate; "
      "record e2 reduce; wait compute e2; record e3 replicate; "
      "wait compute e3; wait compute e7; free 32 b2; show_grads root sharded");
  PLAY("check_grads");
}

/* The cast writes into the rank's slot of the block, which is gathered in
 * place; gradients come in bf16 and are reduced in fp32, prescaled. */
TEST(test_casts) {
  model_open(WITH(.rank = 1, .param_dtype = RECORDER_BF16,
                  .reduce_dtype = RECORDER_F32, .prescale = 0.5,
                  .wants_scratch = true),
             "u 8");
  PLAY("show_memory");
  recorder_name_memory(m.device, m.units[0].shards[0], 32, "shard");
  recorder_name_memory(m.device, m.units[0].grad_shards[0], 32, "grad");
  PLAY("step");
  CHECK_TAPE(
      "record e1 compute; wait unshard e1; take_params u sharded; event e7; "
      "alloc 32 b1; record e7 compute; wait unshard e7; "
      "pack unshard x1 8 f32->bf16 b1+16 <- shard; group_begin unshard g0; "
      "all_gather unshard g0 8 bf16 b1 <- b1+16; group_end unshard g0; "
      "record e6 unshard; wait compute e6; show u unsharded; hide u; "
      "mark_params u; take_grads u; wait compute e6; show u unsharded; "
      "show u sharded; free 32 b1; alloc 64 b2; pack compute x0.5 16 bf16->f32 "
      "b2 <- ?; "
      "release t1; grad_shard u 0; record e1 compute; wait reduce e1; "
      "event e8; alloc 32 b3; record e1 compute; wait reduce e1; "
      "group_begin reduce g0; reduce_scatter reduce g0 8 f32 b2 scratch b3; "
      "group_end reduce g0; record e8 reduce; "
      "accumulate reduce x1 8 f32->f32 grad <- b2+32; record e7 reduce; "
      "record e2 reduce; wait compute e2; record e3 replicate; "
      "wait compute e3; wait compute e7; free 64 b2; show_grads u sharded");
  PLAY("check_grads");
}

/* One rank that casts has a block of its own, but nobody to gather from. */
TEST(test_one_rank_with_casts) {
  model_open(WITH(.world_size = 1, .param_dtype = RECORDER_BF16), "u 8");
  PLAY("step");
  CHECK_TAPE(
      "record e1 compute; wait unshard e1; take_params u sharded; event e7; "
      "alloc 16; record e7 compute; wait unshard e7; pack unshard x1 8 "
      "f32->bf16; "
      "record e6 unshard; wait compute e6; show u unsharded; hide u; "
      "mark_params u; take_grads u; wait compute e6; show u unsharded; "
      "show u sharded; free 16; alloc 16; pack compute x1 8 bf16->bf16; "
      "release t1; grad_shard u 0; record e1 compute; wait reduce e1; "
      "accumulate reduce x1 8 bf16->f32; record e7 reduce; record e2 reduce; "
      "wait compute e2; record e3 replicate; wait compute e3; wait compute e7; "
      "free 16; show_grads u sharded");
  PLAY("check_grads");
}

/* Four segments: one grouped all-gather; the frozen two have no gradient. See
 * model_plan_mixed(). */
TEST(test_mixed_segments) {
  model_open(NULL, "u mixed");
  PLAY("forward");
  CHECK_TAPE(
      "record e1 compute; wait unshard e1; take_params u sharded; event e7; "
      "alloc 800; record e7 compute; wait unshard e7; group_begin unshard g0; "
      "all_gather unshard g0 8 f32; all_gather unshard g0 4 f32; "
      "all_gather unshard g0 8 bf16; all_gather unshard g0 16 u8; "
      "group_end unshard g0; record e6 unshard; wait compute e6; "
      "show u unsharded; hide u; mark_params u");
  PLAY("clear; backward");
  CHECK_TAPE(
      "take_grads u; wait compute e6; show u unsharded; show u sharded; "
      "free 800; alloc 288; pack compute x1 6 f32->f32, 2 f32->f32, "
      "zero 2 f32, zero 6 f32, 3 bf16->bf16, zero 13 bf16; "
      "release t1; release t2; release t3; "
      "grad_shard u 0; grad_shard u 2; record e1 compute; wait reduce e1; "
      "group_begin reduce g0; reduce_scatter reduce g0 8 f32; "
      "reduce_scatter reduce g0 8 bf16; group_end reduce g0; "
      "accumulate reduce x0.5 8 f32->f32, 8 bf16->bf16; "
      "record e7 reduce; record e2 reduce; wait compute e2; "
      "record e3 replicate; wait compute e3; wait compute e7; free 288; "
      "show_grads u sharded");
  PLAY("check_grads");
  const fsdp_engine_stats stats = model_stats(&m);
  CHECK_I64(stats.shard_nbytes, 8 * 4 + 4 * 4 + 8 * 2 + 16);
  CHECK_I64(stats.grad_shard_nbytes, 8 * 4 + 8 * 2);
}
