/*
 * Tests of runtime/: everything that one step enqueues, for each strategy.
 */
#include "engine_fixture.h"

static model m; /* each test makes and frees it */

static void forward(void) {
  CHECK_I64(model_forward(&m, true, NULL), FSDP_OK);
}

static void backward(void) {
  CHECK_I64(model_backward(&m, NULL), FSDP_OK);
}

static void test_full_shard(void) {
  model_start_tree(&m, NULL, 0);
  model_step(&m);
  CHECK_TEXT(recorder_tape(m.device),
             "record e1 compute\n" /* the optimizer's writes */
             "wait unshard e1\n"
             "take_params root sharded\n"
             "event e7\n"
             "alloc 32\n"
             "group_begin unshard g0\n"
             "all_gather unshard g0 4 f32\n"
             "group_end unshard g0\n"
             "record e6 unshard\n"
             "wait compute e6\n"
             "show root unsharded\n"
             "show root sharded\n"
             "mark_params root\n"
             "take_grads root\n"
             "wait compute e6\n"
             "show root unsharded\n"
             "event e8\n"
             "alloc 32\n"
             "pack compute f32 x1 8@0\n"
             "release t1\n"
             "show root sharded\n"
             "record e7 compute\n"
             "grad_shard root 0\n"
             "record e1 compute\n"
             "wait reduce e1\n"
             "group_begin reduce g0\n"
             "reduce_scatter reduce g0 4 f32\n"
             "group_end reduce g0\n"
             "accumulate reduce 4 f32->f32 x0.5\n"
             "record e8 reduce\n"
             "record e2 reduce\n"
             "wait compute e2\n"
             "record e3 replicate\n"
             "wait compute e3\n"
             "show_grads root sharded\n");
  model_check_grads(&m);
  model_check_states(&m, FSDP_UNIT_SHARDED);
  model_fini(&m);
}

/* One rank in the shard group: the shard is the parameter. */
static void test_no_shard(void) {
  model_options options = model_default_options();
  options.world_size = 1;
  options.num_replicas = 4;
  model_init(&m, &options);
  model_plan_simple(&m, "root", 8);
  model_start(&m);
  model_step(&m);
  CHECK_TEXT(recorder_tape(m.device),
             "record e1 compute\n"
             "wait unshard e1\n"
             "take_params root sharded\n"
             "take_grads root\n"
             "event e7\n"
             "alloc 32\n"
             "pack compute f32 x1 8@0\n"
             "release t1\n"
             "grad_shard root 0\n"
             "record e1 compute\n"
             "wait replicate e1\n"
             "group_begin replicate g0\n"
             "all_reduce replicate g0 8 f32\n"
             "group_end replicate g0\n"
             "accumulate replicate 8 f32->f32 x0.25\n"
             "record e7 replicate\n"
             "record e2 reduce\n"
             "wait compute e2\n"
             "record e3 replicate\n"
             "wait compute e3\n"
             "show_grads root sharded\n");
  model_check_grads(&m);
  CHECK_I64(model_stats(&m).num_all_gathers, 0);
  model_fini(&m);
}

/* The all-reduce of the pieces follows the reduce-scatter on its own lane. */
static void test_hybrid(void) {
  model_options options = model_default_options();
  options.rank = 1;
  options.num_replicas = 4;
  model_start_tree(&m, &options, 0);
  forward();
  recorder_show_memory(m.device, true);
  recorder_clear(m.device);
  backward();
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
             "group_begin reduce g0\n"
             "reduce_scatter reduce g0 4 f32 b2\n"
             "group_end reduce g0\n"
             "record e2 reduce\n"
             "wait replicate e2\n"
             "group_begin replicate g1\n"
             "all_reduce replicate g1 4 f32 b2+16\n" /* the slot of rank 1 */
             "group_end replicate g1\n"
             "accumulate replicate 4 f32->f32 x0.125 ? <- b2+16\n"
             "record e8 replicate\n"
             "record e2 reduce\n"
             "wait compute e2\n"
             "record e3 replicate\n"
             "wait compute e3\n"
             "show_grads root sharded\n");
  model_check_grads(&m);
  model_fini(&m);
}

/* The cast writes into the rank's slot of the block, which is gathered in
 * place; gradients come in bf16 and are reduced in fp32, prescaled. */
static void test_casts(void) {
  model_options options = model_default_options();
  options.rank = 1;
  options.param_dtype = RECORDER_BF16;
  options.reduce_dtype = RECORDER_F32;
  options.prescale = 0.5;
  options.wants_scratch = true;
  model_init(&m, &options);
  model_plan_simple(&m, "u", 8);
  recorder_show_memory(m.device, true);
  recorder_name_memory(m.device, m.units[0].shards[0], 32, "shard");
  recorder_name_memory(m.device, m.units[0].grad_shards[0], 32, "grad");
  model_start(&m);
  model_step(&m);
  CHECK_TEXT(recorder_tape(m.device),
             "record e1 compute\n"
             "wait unshard e1\n"
             "take_params u sharded\n"
             "event e7\n"
             "alloc 32 b1\n"
             "cast unshard 8 f32->bf16 b1+16 <- shard\n"
             "group_begin unshard g0\n"
             "all_gather unshard g0 8 bf16 b1 <- b1+16\n"
             "group_end unshard g0\n"
             "record e6 unshard\n"
             "wait compute e6\n"
             "show u unsharded\n"
             "show u sharded\n"
             "mark_params u\n"
             "take_grads u\n"
             "wait compute e6\n"
             "show u unsharded\n"
             "event e8\n"
             "alloc 64 b2\n"
             "pack compute f32 x0.5 16@0 b2\n"
             "release t1\n"
             "show u sharded\n"
             "record e7 compute\n"
             "grad_shard u 0\n"
             "record e1 compute\n"
             "wait reduce e1\n"
             "event e9\n"
             "alloc 64 b3\n" /* scratch */
             "group_begin reduce g0\n"
             "reduce_scatter reduce g0 8 f32 b2 scratch b3\n"
             "group_end reduce g0\n"
             "record e9 reduce\n"
             "accumulate reduce 8 f32->f32 x1 grad <- b2+32\n"
             "record e8 reduce\n"
             "record e2 reduce\n"
             "wait compute e2\n"
             "record e3 replicate\n"
             "wait compute e3\n"
             "show_grads u sharded\n");
  model_check_grads(&m);
  model_fini(&m);
}

/* One rank that casts has a block of its own, but nobody to gather from. */
static void test_one_rank_with_casts(void) {
  model_options options = model_default_options();
  options.world_size = 1;
  options.param_dtype = RECORDER_BF16;
  model_init(&m, &options);
  model_plan_simple(&m, "u", 8);
  model_start(&m);
  model_step(&m);
  CHECK_TEXT(recorder_tape(m.device),
             "record e1 compute\n"
             "wait unshard e1\n"
             "take_params u sharded\n"
             "event e7\n"
             "alloc 16\n"
             "cast unshard 8 f32->bf16\n"
             "record e6 unshard\n"
             "wait compute e6\n"
             "show u unsharded\n"
             "show u sharded\n"
             "mark_params u\n"
             "take_grads u\n"
             "wait compute e6\n"
             "show u unsharded\n"
             "event e8\n"
             "alloc 16\n"
             "pack compute bf16 x1 8@0\n"
             "release t1\n"
             "show u sharded\n"
             "record e7 compute\n"
             "grad_shard u 0\n"
             "record e1 compute\n"
             "wait reduce e1\n"
             "accumulate reduce 8 bf16->f32 x1\n"
             "record e8 reduce\n"
             "record e2 reduce\n"
             "wait compute e2\n"
             "record e3 replicate\n"
             "wait compute e3\n"
             "show_grads u sharded\n");
  model_check_grads(&m);
  model_fini(&m);
}

/* Four segments: one grouped all-gather; the frozen two have no gradient. See
 * model_plan_mixed(). */
static void test_mixed_segments(void) {
  model_init(&m, NULL);
  model_plan_mixed(&m, "u");
  model_start(&m);
  forward();
  CHECK_TEXT(recorder_tape(m.device),
             "record e1 compute\n"
             "wait unshard e1\n"
             "take_params u sharded\n"
             "event e7\n"
             "alloc 800\n" /* 64, 32, 32 and 32 bytes at multiples of 256 */
             "group_begin unshard g0\n"
             "all_gather unshard g0 8 f32\n"
             "all_gather unshard g0 4 f32\n"
             "all_gather unshard g0 8 bf16\n"
             "all_gather unshard g0 16 u8\n"
             "group_end unshard g0\n"
             "record e6 unshard\n"
             "wait compute e6\n"
             "show u unsharded\n"
             "show u sharded\n"
             "mark_params u\n");
  recorder_clear(m.device);
  backward();
  CHECK_TEXT(recorder_tape(m.device),
             "take_grads u\n"
             "wait compute e6\n"
             "show u unsharded\n"
             "event e8\n"
             "alloc 288\n" /* 64 and 32 bytes */
             "pack compute f32 x1 2@8 6@0 zero2@6 zero6@10\n"
             "pack compute bf16 x1 3@0 zero13@3\n"
             "release t1\n"
             "release t2\n"
             "release t3\n"
             "show u sharded\n"
             "record e7 compute\n"
             "grad_shard u 0\n"
             "grad_shard u 2\n"
             "record e1 compute\n"
             "wait reduce e1\n"
             "group_begin reduce g0\n"
             "reduce_scatter reduce g0 8 f32\n"
             "reduce_scatter reduce g0 8 bf16\n"
             "group_end reduce g0\n"
             "accumulate reduce 8 f32->f32 x0.5\n"
             "accumulate reduce 8 bf16->bf16 x0.5\n"
             "record e8 reduce\n"
             "record e2 reduce\n"
             "wait compute e2\n"
             "record e3 replicate\n"
             "wait compute e3\n"
             "show_grads u sharded\n");
  model_check_grads(&m);
  const fsdp_engine_stats stats = model_stats(&m);
  CHECK_I64(stats.shard_nbytes, 8 * 4 + 4 * 4 + 8 * 2 + 16);
  CHECK_I64(stats.grad_shard_nbytes, 8 * 4 + 8 * 2);
  model_fini(&m);
}

int main(void) {
  static const check_test tests[] = {
      CHECK_TEST(test_full_shard),
      CHECK_TEST(test_no_shard),
      CHECK_TEST(test_hybrid),
      CHECK_TEST(test_casts),
      CHECK_TEST(test_one_rank_with_casts),
      CHECK_TEST(test_mixed_segments),
  };
  return CHECK_RUN(tests);
}
