/*
 * Tests of runtime/: the dtypes of parameters and gradients. Sharded gradients
 * in another dtype than their parameters; units that are unsharded in master
 * dtype for a while.
 */
#include "engine_failures.h"

static void set_full(int64_t unit, bool is_full) {
  fsdp_unit_get_settings(m.units[unit].unit)->wants_full = is_full;
}

static void set_all_full(void) {
  for (int64_t i = 0; i < m.num_units; i++) set_full(i, true);
}

/* Root and children with shards of 8, 16, 24 elements: bf16 ones are rounded up
 * to as many. */
static void start_tree(const model_options *options, int64_t num_children) {
  static const char *const names[] = {"root", "a", "b"};
  model_init(&m, options);
  for (int64_t i = 0; i <= num_children; i++) {
    model_plan_simple(&m, names[i], 8 * (i + 1));
  }
  model_start(&m);
}

/* --- Gradients ----------------------------------------------------------- */

/* keep_low_precision_grads: bf16 all the way, beside an fp32 parameter. */
TEST(test_low_precision_gradients) {
  start_tree(WITH(.param_dtype = RECORDER_BF16, .grad_dtype = RECORDER_BF16),
             1);
  for (int i = 0; i < 2; i++) {
    PLAY("clear; step; check_grads");
    CHECK_TAPE_LACKS("->f32");
    CHECK_TAPE_HAS(i == 0 ? "accumulate reduce x0.5 8 bf16->bf16;"
                          : "accumulate reduce x0.5 8 bf16->bf16 add;");
  }
  CHECK_I64(model_stats(&m).shard_nbytes, (8 + 16) * 4);
  CHECK_I64(model_stats(&m).grad_shard_nbytes, (8 + 16) * 2);
}

/* Wider than the parameters, reduced in fp32, with everything else that can
 * stand between. */
TEST(test_wide_gradients) {
  for (int offloads = 0; offloads < 2; offloads++) {
    model_open(WITH(.param_dtype = RECORDER_BF16, .rank = 1, .num_replicas = 2,
                    .reduce_dtype = RECORDER_F32, .grad_dtype = RECORDER_F64,
                    .offloads = offloads != 0),
               "root 8; mixed mixed");
    PLAY("step; check_grads; step; check_grads; step; check_grads");
    CHECK_TAPE_HAS("x0.25 8 f32->f64 add, 8 f32->f64 add;");
    CHECK_I64(model_stats(&m).grad_shard_nbytes, (8 + 8 + 8) * 8);
  }
}

TEST(test_every_call_with_low_gradients_can_fail) {
  failures_every_call(
      WITH(.param_dtype = RECORDER_BF16, .grad_dtype = RECORDER_BF16), NULL,
      failures_train, 0);
}

/* --- Full precision ------------------------------------------------------ */

/* Gathers the shard as it is, into a block of another size; and back. */
TEST(test_switch) {
  model_open(WITH(.param_dtype = RECORDER_BF16), "u 8");
  PLAY("show_memory");
  recorder_name_memory(m.device, m.units[0].shards[0], 32, "shard");
  CHECK(!fsdp_unit_get_settings(m.units[0].unit)->wants_full);
  PLAY("full u 1");
  CHECK(fsdp_unit_get_settings(m.units[0].unit)->wants_full);
  PLAY("eval");
  CHECK_TAPE(
      "record e1 compute; wait unshard e1; take_params u sharded; event e7; "
      "alloc 64 b1; record e7 compute; wait unshard e7; "
      "group_begin unshard g0; all_gather unshard g0 8 f32 b1 <- shard; "
      "group_end unshard g0; record e6 unshard; wait compute e6; show u full; "
      "show u sharded; free 64 b1");
  PLAY("clear; full u 0; eval");
  CHECK_TAPE(
      "record e1 compute; wait unshard e1; take_params u sharded; alloc 32 b2; "
      "record e7 compute; wait unshard e7; "
      "pack unshard x1 8 f32->bf16 b2 <- shard; group_begin unshard g0; "
      "all_gather unshard g0 8 bf16 b2 <- b2; group_end unshard g0; "
      "record e6 unshard; wait compute e6; show u unsharded; show u sharded; "
      "free 32 b2");
  PLAY("full u 1; eval"); /* the client is there already */
  CHECK_I64(model_stats(&m).arena.num_clients, 3);
  PLAY("check_idle");
}

/* What was kept in the other dtype is gathered again. */
TEST(test_switch_of_a_kept_unit) {
  model_options options = {.param_dtype = RECORDER_BF16};
  options.keeps_after_forward = true;
  start_tree(&options, 1);
  PLAY("forward; view a sharded"); /* kept, but hidden */
  PLAY("full a 1");
  /* kept: nothing to do */
  PLAY("clear; enter root; enter a; view a full; leave a; enter a; full a 0");
  PLAY("leave a; enter a"); /* kept, in the wrong one */
  PLAY("leave a; leave root");
  CHECK_SCHEDULE(
      "show root unsharded; all_gather a; show a full; "
      "show a sharded; all_gather a; show a unsharded; hide root; hide a");
  PLAY("backward; check_grads");
  /* Kept between micro-batches. */
  options.keeps_without_sync = true;
  start_tree(&options, 1);
  PLAY("sync none; step; full a 1");
  const int64_t num_all_gathers = model_stats(&m).num_all_gathers;
  PLAY("step");
  CHECK_I64(model_stats(&m).num_all_gathers, num_all_gathers + 1);
  PLAY("sync reduce; step; check_grads; check_sharded");
}

/* A prefetch in the wrong dtype is dropped, by the user as by the end. */
TEST(test_prefetch_in_the_wrong_precision) {
  start_tree(WITH(.param_dtype = RECORDER_BF16, .forward_prefetch = true), 2);
  PLAY("eval; clear; enter root; state a PREFETCHED; full a 1");
  PLAY("enter a; view a full; leave_eval a");
  PLAY("full b 1"); /* in flight, and never used */
  PLAY("leave_eval root");
  CHECK_SCHEDULE(
      "all_gather root; all_gather a; show root unsharded; all_gather a; "
      "all_gather b; show a full; show a sharded; show root sharded");
  PLAY("check_idle; eval; eval"); /* prefetched in the right one */
  PLAY("check_idle");
}

/* One rank that casts copies instead. */
TEST(test_one_rank) {
  start_tree(WITH(.param_dtype = RECORDER_BF16, .world_size = 1), 1);
  PLAY("full root 1; full a 1; eval");
  CHECK_TAPE_HAS("pack unshard x1 8 f32->f32;");
  CHECK_TAPE_HAS("show a full;");
  PLAY("full a 0; step; check_grads");
}

/* Without a cast there is no other precision: nothing happens. */
TEST(test_units_without_a_cast) {
  for (int64_t world_size = 1; world_size < 3; world_size++) {
    start_tree(WITH(.world_size = world_size), 0);
    PLAY("full root 1");
    CHECK(fsdp_unit_get_settings(m.units[0].unit)->wants_full);
    PLAY("eval");
    CHECK_TAPE_LACKS(" full;");
    CHECK_I64(model_stats(&m).arena.num_clients, world_size);
  }
  /* A cast of nothing is shown, but no parameters are gathered. */
  model_open(WITH(.param_dtype = RECORDER_BF16), "u (0)");
  PLAY("full u 1; step");
  CHECK_SCHEDULE(
      "show u full; hide u; show u full; show u sharded; "
      "show_grads u sharded");
}

/* Segments of all kinds, in forward and backward, offloaded or not. */
TEST(test_steps) {
  for (int kinds = 0; kinds < 8; kinds++) {
    failures_plan(WITH(.param_dtype = RECORDER_BF16,
                       .reduce_dtype = RECORDER_F32,
                       .world_size = (kinds & 1) != 0 ? 1 : 2,
                       .offloads = (kinds & 2) != 0,
                       .forward_prefetch = (kinds & 4) != 0));
    model_start(&m);
    for (int i = 0; i < 6; i++) {
      for (int64_t j = 0; j < m.num_units; j++) set_full(j, i % 3 != 2);
      PLAY("zero_grad; step; check_grads; check_sharded; optimizer");
      PLAY("check_idle");
    }
  }
}

/* The new engine's arena does not know the unit yet. */
TEST(test_move) {
  start_tree(WITH(.param_dtype = RECORDER_BF16), 0);
  PLAY("full root 1; forward");
  fsdp_engine *const before = m.engine;
  model_join_new_engine(&m);
  fsdp_engine_destroy(before);
  PLAY("step; check_grads");
  /* A reset gives back either block. */
  PLAY("forward; full root 0; reset; check_idle; step");
}

static fsdp_status switch_and_train(fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  set_all_full();
  FSDP_TRY(model_forward(&m, false, error));
  for (int64_t i = 0; i < m.num_units; i++) set_full(i, false);
  FSDP_TRY(failures_train(error));
done:
  return status;
}

TEST(test_every_call_can_fail) {
  model_options options = {.param_dtype = RECORDER_BF16};
  options.forward_prefetch = true;
  failures_every_call_of_steps(&options, NULL, switch_and_train);
  options.offloads = true;
  failures_every_call(&options, set_all_full, failures_train, 0);
}

TEST(test_every_allocation_can_fail) {
  failures_every_allocation(WITH(.param_dtype = RECORDER_BF16), NULL,
                            switch_and_train);
}
