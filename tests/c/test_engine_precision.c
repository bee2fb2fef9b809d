/*
 * Tests of runtime/: the dtypes of parameters and gradients. Sharded gradients
 * in another dtype than their parameters; units that are unsharded in master
 * dtype for a while.
 */
#include "engine_failures.h"

static model m; /* each test makes and frees it */

static void set_full(int64_t unit, bool is_full) {
  fsdp_unit_set_full_precision(m.units[unit].unit, is_full);
}

static void set_all_full(model *self) {
  for (int64_t i = 0; i < self->num_units; i++) {
    fsdp_unit_set_full_precision(self->units[i].unit, true);
  }
}

static void forward(bool expects_backward) {
  CHECK_I64(model_forward(&m, expects_backward, NULL), FSDP_OK);
}

static model_options low_options(void) {
  model_options options = model_default_options();
  options.param_dtype = RECORDER_BF16;
  return options;
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
static void test_low_precision_gradients(void) {
  model_options options = low_options();
  options.grad_dtype = RECORDER_BF16;
  start_tree(&options, 1);
  for (int i = 0; i < 2; i++) {
    recorder_clear(m.device);
    model_step(&m);
    model_check_grads(&m);
    const char *tape = recorder_tape(m.device);
    CHECK(strstr(tape, "f32 x") == NULL);
    CHECK(strstr(tape, i == 0 ? "accumulate reduce 8 bf16->bf16 x0.5\n"
                              : "accumulate reduce 8 bf16->bf16 x0.5 add\n"));
  }
  CHECK_I64(model_stats(&m).shard_nbytes, (8 + 16) * 4);
  CHECK_I64(model_stats(&m).grad_shard_nbytes, (8 + 16) * 2);
  model_fini(&m);
}

/* Wider than the parameters, reduced in fp32, with everything else that can
 * stand between. */
static void test_wide_gradients(void) {
  for (int offloads = 0; offloads < 2; offloads++) {
    model_options options = low_options();
    options.rank = 1;
    options.num_replicas = 2;
    options.reduce_dtype = RECORDER_F32;
    options.grad_dtype = RECORDER_F64;
    options.offloads = offloads != 0;
    model_init(&m, &options);
    model_plan_simple(&m, "root", 8);
    model_plan_mixed(&m, "mixed");
    model_start(&m);
    for (int i = 0; i < 3; i++) {
      model_step(&m);
      model_check_grads(&m);
    }
    CHECK(strstr(recorder_tape(m.device), "8 f32->f64 x0.25 add\n") != NULL);
    CHECK_I64(model_stats(&m).grad_shard_nbytes, (8 + 8 + 8) * 8);
    model_fini(&m);
  }
}

static void test_every_call_with_low_gradients_can_fail(void) {
  model_options options = low_options();
  options.grad_dtype = RECORDER_BF16;
  failures_every_call(&m, &options, NULL, failures_train, 0);
}

/* --- Full precision ------------------------------------------------------ */

/* Gathers the shard as it is, into a block of another size; and back. */
static void test_switch(void) {
  const model_options options = low_options();
  model_init(&m, &options);
  model_plan_simple(&m, "u", 8);
  recorder_show_memory(m.device, true);
  recorder_name_memory(m.device, m.units[0].shards[0], 32, "shard");
  model_start(&m);
  CHECK(!fsdp_unit_full_precision(m.units[0].unit));
  set_full(0, true);
  CHECK(fsdp_unit_full_precision(m.units[0].unit));
  forward(false);
  CHECK_TEXT(recorder_tape(m.device),
             "record e1 compute\n"
             "wait unshard e1\n"
             "take_params u sharded\n"
             "event e7\n"
             "alloc 64 b1\n"
             "group_begin unshard g0\n"
             "all_gather unshard g0 8 f32 b1 <- shard\n"
             "group_end unshard g0\n"
             "record e6 unshard\n"
             "wait compute e6\n"
             "show u full\n"
             "show u sharded\n"
             "record e7 compute\n");
  recorder_clear(m.device);
  set_full(0, false);
  forward(false);
  CHECK_TEXT(recorder_tape(m.device),
             "record e1 compute\n"
             "wait unshard e1\n"
             "take_params u sharded\n"
             "wait unshard e7\n"
             "cast unshard 8 f32->bf16 b1 <- shard\n"
             "group_begin unshard g0\n"
             "all_gather unshard g0 8 bf16 b1 <- b1\n"
             "group_end unshard g0\n"
             "record e6 unshard\n"
             "wait compute e6\n"
             "show u unsharded\n"
             "show u sharded\n"
             "record e7 compute\n");
  set_full(0, true);
  forward(false); /* the client is there already */
  CHECK_I64(model_stats(&m).arena.num_clients, 3);
  CHECK_I64(model_stats(&m).arena.held_nbytes, 0);
  model_fini(&m);
}

/* What was kept in the other dtype is gathered again. */
static void test_switch_of_a_kept_unit(void) {
  model_options options = low_options();
  options.reshard_after_forward = false;
  start_tree(&options, 1);
  forward(true);
  CHECK_I64(m.units[1].view, FSDP_VIEW_SHARDED); /* kept, but hidden */
  set_full(1, true);
  recorder_clear(m.device);
  CHECK_I64(model_enter(&m, 0, NULL), FSDP_OK);
  CHECK_I64(model_enter(&m, 1, NULL), FSDP_OK);
  CHECK_I64(m.units[1].view, FSDP_VIEW_FULL);
  CHECK_I64(model_leave(&m, 1, true, NULL), FSDP_OK);
  CHECK_I64(model_enter(&m, 1, NULL), FSDP_OK); /* kept: nothing to do */
  set_full(1, false);
  CHECK_I64(model_leave(&m, 1, true, NULL), FSDP_OK);
  CHECK_I64(model_enter(&m, 1, NULL), FSDP_OK); /* kept, in the wrong one */
  CHECK_I64(model_leave(&m, 1, true, NULL), FSDP_OK);
  CHECK_I64(model_leave(&m, 0, true, NULL), FSDP_OK);
  CHECK_TEXT(model_schedule(&m),
             "all_gather root\n"
             "show root unsharded\n"
             "all_gather a\n"
             "show a full\n"
             "show a sharded\n"
             "all_gather a\n"
             "show a unsharded\n"
             "show root sharded\n"
             "show a sharded\n");
  CHECK_I64(model_backward(&m, NULL), FSDP_OK);
  model_check_grads(&m);
  /* Kept between micro-batches. */
  options.reshard_after_backward_without_sync = false;
  model_fini(&m);
  start_tree(&options, 1);
  fsdp_engine_set_sync(m.engine, FSDP_SYNC_NONE);
  model_step(&m);
  set_full(1, true);
  const int64_t num_all_gathers = model_stats(&m).num_all_gathers;
  model_step(&m);
  CHECK_I64(model_stats(&m).num_all_gathers, num_all_gathers + 1);
  fsdp_engine_set_sync(m.engine, FSDP_SYNC_REDUCE);
  model_step(&m);
  model_check_grads(&m);
  model_check_states(&m, FSDP_UNIT_SHARDED);
  model_fini(&m);
}

/* A prefetch in the wrong dtype is dropped, by the user as by the end. */
static void test_prefetch_in_the_wrong_precision(void) {
  model_options options = low_options();
  options.forward_prefetch = true;
  start_tree(&options, 2);
  forward(false);
  recorder_clear(m.device);
  CHECK_I64(model_enter(&m, 0, NULL), FSDP_OK);
  CHECK_I64(model_state(&m, 1), FSDP_UNIT_PREFETCHED);
  set_full(1, true);
  CHECK_I64(model_enter(&m, 1, NULL), FSDP_OK);
  CHECK_I64(m.units[1].view, FSDP_VIEW_FULL);
  CHECK_I64(model_leave(&m, 1, false, NULL), FSDP_OK);
  set_full(2, true); /* in flight, and never used */
  CHECK_I64(model_leave(&m, 0, false, NULL), FSDP_OK);
  CHECK_TEXT(model_schedule(&m),
             "all_gather root\n"
             "all_gather a\n"
             "show root unsharded\n"
             "all_gather a\n"
             "all_gather b\n"
             "show a full\n"
             "show a sharded\n"
             "show root sharded\n");
  CHECK_I64(model_stats(&m).arena.held_nbytes, 0);
  forward(false);
  forward(false); /* prefetched in the right one */
  CHECK_I64(model_stats(&m).arena.held_nbytes, 0);
  model_fini(&m);
}

/* One rank that casts copies instead. */
static void test_one_rank(void) {
  model_options options = low_options();
  options.world_size = 1;
  start_tree(&options, 1);
  set_full(0, true);
  set_full(1, true);
  forward(false);
  CHECK(strstr(recorder_tape(m.device), "cast unshard 8 f32->f32\n") != NULL);
  CHECK(strstr(recorder_tape(m.device), "show a full\n") != NULL);
  set_full(1, false);
  model_step(&m);
  model_check_grads(&m);
  model_fini(&m);
}

/* Without a cast there is no other precision: nothing happens. */
static void test_units_without_a_cast(void) {
  for (int64_t world_size = 1; world_size < 3; world_size++) {
    model_options options = model_default_options();
    options.world_size = world_size;
    start_tree(&options, 0);
    set_full(0, true);
    CHECK(fsdp_unit_full_precision(m.units[0].unit));
    forward(false);
    CHECK(strstr(recorder_tape(m.device), " full\n") == NULL);
    CHECK_I64(model_stats(&m).arena.num_clients, world_size);
    model_fini(&m);
  }
  /* A cast of nothing is one, but there is no block. */
  const fsdp_param_spec empty = {0, 0, RECORDER_F32, true};
  const model_options options = low_options();
  model_init(&m, &options);
  model_plan(&m, "u", &empty, 1);
  model_start(&m);
  set_full(0, true);
  model_step(&m);
  CHECK_TEXT(model_schedule(&m), "");
  model_fini(&m);
}

/* Segments of all kinds, in forward and backward, offloaded or not. */
static void test_steps(void) {
  for (int kinds = 0; kinds < 8; kinds++) {
    model_options options = low_options();
    options.reduce_dtype = RECORDER_F32;
    options.world_size = (kinds & 1) != 0 ? 1 : 2;
    options.offloads = (kinds & 2) != 0;
    options.forward_prefetch = (kinds & 4) != 0;
    failures_plan(&m, &options);
    model_start(&m);
    for (int i = 0; i < 6; i++) {
      for (int64_t j = 0; j < m.num_units; j++) set_full(j, i % 3 != 2);
      model_zero_grad(&m);
      model_step(&m);
      model_check_grads(&m);
      model_check_states(&m, FSDP_UNIT_SHARDED);
      model_optimizer_step(&m);
      CHECK_I64(model_stats(&m).arena.held_nbytes, 0);
    }
    model_fini(&m);
  }
}

/* The new engine's arena does not know the unit yet. */
static void test_move(void) {
  const model_options options = low_options();
  fsdp_engine *other = NULL;
  start_tree(&options, 0);
  set_full(0, true);
  forward(true);
  CHECK_I64(fsdp_engine_create(&m.ops, &m.views, &other, NULL), FSDP_OK);
  CHECK_I64(fsdp_engine_add_unit(other, m.units[0].unit, NULL), FSDP_OK);
  fsdp_engine_destroy(m.engine);
  m.engine = other;
  model_step(&m);
  model_check_grads(&m);
  /* A reset gives back either block. */
  forward(true);
  set_full(0, false);
  fsdp_engine_reset(m.engine);
  CHECK_I64(model_stats(&m).arena.held_nbytes, 0);
  model_step(&m);
  model_fini(&m);
}

static fsdp_status switch_and_train(model *self, fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  set_all_full(self);
  FSDP_TRY(model_forward(self, false, error));
  for (int64_t i = 0; i < self->num_units; i++) {
    fsdp_unit_set_full_precision(self->units[i].unit, false);
  }
  FSDP_TRY(failures_train(self, error));
done:
  return status;
}

static void test_every_call_can_fail(void) {
  model_options options = low_options();
  options.forward_prefetch = true;
  failures_every_call_of_steps(&m, &options, NULL, switch_and_train);
  options.offloads = true;
  failures_every_call(&m, &options, set_all_full, failures_train, 0);
}

static void test_every_allocation_can_fail(void) {
  const model_options options = low_options();
  failures_every_allocation(&m, &options, NULL, switch_and_train);
}

int main(void) {
  static const check_test tests[] = {
      CHECK_TEST(test_low_precision_gradients),
      CHECK_TEST(test_wide_gradients),
      CHECK_TEST(test_every_call_with_low_gradients_can_fail),
      CHECK_TEST(test_switch),
      CHECK_TEST(test_switch_of_a_kept_unit),
      CHECK_TEST(test_prefetch_in_the_wrong_precision),
      CHECK_TEST(test_one_rank),
      CHECK_TEST(test_units_without_a_cast),
      CHECK_TEST(test_steps),
      CHECK_TEST(test_move),
      CHECK_TEST(test_every_call_can_fail),
      CHECK_TEST(test_every_allocation_can_fail),
  };
  return CHECK_RUN(tests);
}
