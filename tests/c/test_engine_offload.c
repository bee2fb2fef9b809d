/*
 * Tests of runtime/: units whose shards and sharded gradients are in host
 * memory. The recorder knows which lane waited for which: each test also finds
 * out about copies that nobody waited for.
 */
#include "engine_failures.h"

static model m; /* each test makes and frees it */

static model_options offload_options(int64_t world_size, int64_t rank) {
  model_options options = model_default_options();
  options.world_size = world_size;
  options.rank = rank;
  options.offloads = true;
  return options;
}

/* One unit of eight elements a rank. */
static void start(const model_options *options) {
  model_init(&m, options);
  model_plan_simple(&m, "u", 8);
  model_start(&m);
  recorder_show_memory(m.device, true);
}

/* The shard goes into its slot, which is gathered in place; the gradient comes
 * back from behind the unsharded one (at 256). */
static void test_step(void) {
  const model_options options = offload_options(2, 1);
  start(&options);
  model_step(&m);
  CHECK_TEXT(recorder_tape(m.device),
             "record e1 compute\n"
             "wait unshard e1\n"
             "take_params u sharded\n"
             "event e7\n"
             "alloc 64 b1\n"
             "copy_to_device upload 32 b1+32 <- u.shard0\n"
             "record e4 upload\n"
             "wait unshard e4\n"
             "group_begin unshard g0\n"
             "all_gather unshard g0 8 f32 b1 <- b1+32\n"
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
             "alloc 288 b2\n"
             "pack compute f32 x1 16@0 b2\n"
             "release t1\n"
             "show u sharded\n"
             "record e7 compute\n"
             "grad_shard u 0\n"
             "record e1 compute\n"
             "wait reduce e1\n"
             "group_begin reduce g0\n"
             "reduce_scatter reduce g0 8 f32 b2\n"
             "group_end reduce g0\n"
             "accumulate reduce 8 f32->f32 x0.5 b2+256 <- b2+32\n"
             "record e2 reduce\n"
             "wait download e2\n"
             "copy_to_host download 32 u.grad0 <- b2+256\n"
             "record e8 download\n"
             "record e2 reduce\n"
             "wait compute e2\n"
             "record e3 replicate\n"
             "wait compute e3\n"
             "record e4 upload\n"
             "wait download e4\n"
             "record e5 download\n"
             "synchronize e5\n"
             "show_grads u sharded\n");
  model_check_grads(&m);
  model_fini(&m);
}

/* A second backward brings the sharded gradient to the device first. */
static void test_second_backward(void) {
  const model_options options = offload_options(2, 1);
  start(&options);
  model_step(&m);
  CHECK_I64(model_forward(&m, true, NULL), FSDP_OK);
  recorder_clear(m.device);
  CHECK_I64(model_backward(&m, NULL), FSDP_OK);
  CHECK_TEXT(recorder_tape(m.device),
             "take_grads u\n"
             "wait compute e6\n"
             "show u unsharded\n"
             "wait compute e8\n"
             "pack compute f32 x1 16@0 b2\n"
             "release t2\n"
             "show u sharded\n"
             "record e7 compute\n"
             "grad_shard u 0\n"
             "record e1 compute\n"
             "wait reduce e1\n"
             "group_begin reduce g0\n"
             "reduce_scatter reduce g0 8 f32 b2\n"
             "group_end reduce g0\n"
             "record e2 reduce\n"
             "wait download e2\n"
             "copy_to_device download 32 b2+256 <- u.grad0\n"
             "record e5 download\n"
             "wait reduce e5\n"
             "accumulate reduce 8 f32->f32 x0.5 add b2+256 <- b2+32\n"
             "record e2 reduce\n"
             "wait download e2\n"
             "copy_to_host download 32 u.grad0 <- b2+256\n"
             "record e8 download\n"
             "record e2 reduce\n"
             "wait compute e2\n"
             "record e3 replicate\n"
             "wait compute e3\n"
             "record e4 upload\n"
             "wait download e4\n"
             "record e5 download\n"
             "synchronize e5\n"
             "show_grads u sharded\n");
  model_check_grads(&m);
  model_fini(&m);
}

/* With a cast the shard comes beside the parameters (at 256), in its own dtype;
 * replicas reduce on their own lane. */
static void test_casts_and_replicas(void) {
  model_options options = offload_options(2, 0);
  options.num_replicas = 2;
  options.param_dtype = RECORDER_BF16;
  options.reduce_dtype = RECORDER_F32;
  options.wants_scratch = true;
  start(&options);
  model_step(&m);
  CHECK_TEXT(recorder_tape(m.device),
             "record e1 compute\n"
             "wait unshard e1\n"
             "take_params u sharded\n"
             "event e7\n"
             "alloc 288 b1\n"
             "copy_to_device upload 32 b1+256 <- u.shard0\n"
             "record e4 upload\n"
             "wait unshard e4\n"
             "cast unshard 8 f32->bf16 b1 <- b1+256\n"
             "group_begin unshard g0\n"
             "all_gather unshard g0 8 bf16 b1 <- b1\n"
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
             "alloc 288 b2\n"
             "pack compute f32 x1 16@0 b2\n"
             "release t1\n"
             "show u sharded\n"
             "record e7 compute\n"
             "grad_shard u 0\n"
             "record e1 compute\n"
             "wait reduce e1\n"
             "event e9\n"
             "alloc 64 b3\n"
             "group_begin reduce g0\n"
             "reduce_scatter reduce g0 8 f32 b2 scratch b3\n"
             "group_end reduce g0\n"
             "record e9 reduce\n"
             "record e2 reduce\n"
             "wait replicate e2\n"
             "group_begin replicate g1\n"
             "all_reduce replicate g1 8 f32 b2\n"
             "group_end replicate g1\n"
             "accumulate replicate 8 f32->f32 x0.25 b2+256 <- b2\n"
             "record e3 replicate\n"
             "wait download e3\n"
             "copy_to_host download 32 u.grad0 <- b2+256\n"
             "record e8 download\n"
             "record e2 reduce\n"
             "wait compute e2\n"
             "record e3 replicate\n"
             "wait compute e3\n"
             "record e4 upload\n"
             "wait download e4\n"
             "record e5 download\n"
             "synchronize e5\n"
             "show_grads u sharded\n");
  model_check_grads(&m);
  model_fini(&m);
}

/* One rank is not resident: the device has nothing until the copy. */
static void test_one_rank(void) {
  model_options options = offload_options(1, 0);
  start(&options);
  model_step(&m);
  CHECK_TEXT(recorder_tape(m.device),
             "record e1 compute\n"
             "wait unshard e1\n"
             "take_params u sharded\n"
             "event e7\n"
             "alloc 32 b1\n"
             "copy_to_device upload 32 b1 <- u.shard0\n"
             "record e4 upload\n"
             "wait unshard e4\n"
             "record e6 unshard\n"
             "wait compute e6\n"
             "show u unsharded\n"
             "show u sharded\n"
             "mark_params u\n"
             "take_grads u\n"
             "wait compute e6\n"
             "show u unsharded\n"
             "event e8\n"
             "alloc 288 b2\n"
             "pack compute f32 x1 8@0 b2\n"
             "release t1\n"
             "show u sharded\n"
             "record e7 compute\n"
             "grad_shard u 0\n"
             "record e1 compute\n"
             "wait reduce e1\n"
             "accumulate reduce 8 f32->f32 x1 b2+256 <- b2\n"
             "record e2 reduce\n"
             "wait download e2\n"
             "copy_to_host download 32 u.grad0 <- b2+256\n"
             "record e8 download\n"
             "record e2 reduce\n"
             "wait compute e2\n"
             "record e3 replicate\n"
             "wait compute e3\n"
             "record e4 upload\n"
             "wait download e4\n"
             "record e5 download\n"
             "synchronize e5\n"
             "show_grads u sharded\n");
  model_check_grads(&m);
  model_fini(&m);
  options.param_dtype = RECORDER_BF16;
  start(&options);
  CHECK_I64(model_forward(&m, false, NULL), FSDP_OK);
  CHECK_TEXT(recorder_tape(m.device),
             "record e1 compute\n"
             "wait unshard e1\n"
             "take_params u sharded\n"
             "event e7\n"
             "alloc 288 b1\n"
             "copy_to_device upload 32 b1+256 <- u.shard0\n"
             "record e4 upload\n"
             "wait unshard e4\n"
             "cast unshard 8 f32->bf16 b1 <- b1+256\n"
             "record e6 unshard\n"
             "wait compute e6\n"
             "show u unsharded\n"
             "show u sharded\n"
             "record e7 compute\n"
             "record e4 upload\n"
             "wait download e4\n"
             "record e5 download\n"
             "synchronize e5\n");
  model_step(&m);
  model_check_grads(&m);
  model_fini(&m);
}

/* Accumulated outside of no_sync, inside it, and both. */
static void check_accumulates(const model_options *options) {
  model_init(&m, options);
  model_plan_simple(&m, "root", 8);
  model_plan_mixed(&m, "mixed");
  model_plan_simple(&m, "b", 16);
  model_start(&m);
  for (int step = 0; step < 3; step++) {
    model_zero_grad(&m);
    model_step(&m);
    model_check_grads(&m);
    fsdp_engine_set_sync(m.engine, FSDP_SYNC_NONE);
    model_step(&m);
    fsdp_engine_set_sync(m.engine, FSDP_SYNC_REDUCE);
    model_step(&m);
    model_check_grads(&m);
    CHECK_I64(m.units[0].grad_view, FSDP_VIEW_SHARDED);
    CHECK_I64(model_stats(&m).arena.held_nbytes, 0);
    model_optimizer_step(&m); /* writes on the host */
  }
  model_fini(&m);
}

static void test_accumulates(void) {
  for (int64_t rank = 0; rank < 2; rank++) {
    model_options options = offload_options(2, rank);
    check_accumulates(&options);
    options.forward_prefetch = true;
    options.num_replicas = 2;
    options.param_dtype = RECORDER_BF16;
    options.reduce_dtype = RECORDER_F32;
    options.grad_dtype = RECORDER_F32;
    options.prescale = 0.5;
    check_accumulates(&options);
    options.backward_prefetch = FSDP_PREFETCH_POST;
    options.reshard_after_forward = false;
    options.reshard_after_backward_without_sync = false;
    check_accumulates(&options);
  }
  model_options options = offload_options(1, 0);
  check_accumulates(&options);
  options.num_replicas = 2;
  options.param_dtype = RECORDER_BF16;
  check_accumulates(&options);
}

/* The host may write the shards after a forward without backward, and after a
 * backward that reduced nothing. */
static void test_host_is_joined(void) {
  static const char joined[] =
      "record e4 upload\nwait download e4\nrecord e5 download\n"
      "synchronize e5\n";
  model_options options = offload_options(2, 0);
  options.forward_prefetch = true;
  model_start_tree(&m, &options, 2);
  for (int i = 0; i < 2; i++) {
    recorder_clear(m.device);
    CHECK_I64(model_forward(&m, false, NULL), FSDP_OK);
    const char *tape = recorder_tape(m.device);
    CHECK_TEXT(tape + strlen(tape) - strlen(joined), joined);
    model_optimizer_step(&m);
  }
  fsdp_engine_set_sync(m.engine, FSDP_SYNC_NONE);
  for (int i = 0; i < 2; i++) {
    CHECK_I64(model_forward(&m, true, NULL), FSDP_OK);
    recorder_clear(m.device);
    CHECK_I64(model_backward(&m, NULL), FSDP_OK);
    CHECK(strstr(recorder_tape(m.device), joined) != NULL);
    model_optimizer_step(&m);
  }
  /* A forward that raises with a prefetch in flight. */
  CHECK_I64(model_enter(&m, 0, NULL), FSDP_OK);
  fsdp_unit_abandon_forward(m.units[0].unit, false);
  model_optimizer_step(&m);
  /* A backward that is given up, and a unit that goes in the middle of one. */
  fsdp_engine_set_sync(m.engine, FSDP_SYNC_REDUCE);
  CHECK_I64(model_forward(&m, true, NULL), FSDP_OK);
  CHECK_I64(model_pre_backward(&m, 0, NULL), FSDP_OK);
  fsdp_engine_reset(m.engine);
  model_optimizer_step(&m);
  CHECK_I64(model_forward(&m, true, NULL), FSDP_OK);
  CHECK_I64(model_pre_backward(&m, 0, NULL), FSDP_OK);
  CHECK_I64(model_pre_backward(&m, 2, NULL), FSDP_OK);
  CHECK_I64(model_give_grads(&m, 2, NULL), FSDP_OK);
  fsdp_unit_destroy(m.units[2].unit);
  m.units[2].unit = NULL;
  model_optimizer_step(&m);
  model_fini(&m);
}

/* The lane on which event `name` was recorded last before `end`. */
static void last_record(const char *tape, const char *end, const char *name,
                        char *lane) {
  char pattern[32];
  snprintf(pattern, sizeof pattern, "record %s ", name);
  lane[0] = '\0';
  for (const char *at = strstr(tape, pattern); at != NULL && at < end;
       at = strstr(at + 1, pattern)) {
    (void)sscanf(at + strlen(pattern), "%15s", lane);
  }
}

/* A unit's shard comes while the gradient of the one before is still being
 * reduced and downloaded: uploads wait for memory alone, and that was
 * compute's.
 */
static void test_uploads_do_not_wait_for_downloads(void) {
  model_options options = offload_options(2, 0);
  model_start_tree(&m, &options, 3);
  for (int i = 0; i < 3; i++) {
    model_step(&m);
    model_optimizer_step(&m);
  }
  recorder_clear(m.device);
  model_step(&m);
  const char *tape = recorder_tape(m.device);
  const char *first_download = strstr(tape, "copy_to_host download");
  CHECK(first_download != NULL);
  CHECK(strstr(first_download, "copy_to_device upload") != NULL);
  int num_waits = 0;
  for (const char *at = strstr(tape, "wait upload "); at != NULL;
       at = strstr(at + 1, "wait upload ")) {
    char name[16] = "";
    char lane[16] = "";
    (void)sscanf(at, "wait upload %15s", name);
    last_record(tape, at, name, lane);
    if (lane[0] == '\0') continue; /* of the step before */
    num_waits++;
    CHECK_TEXT(lane, "compute");
  }
  CHECK(num_waits > 0);
  model_fini(&m);
}

/* The host goes on after a forward that a backward follows, and may not write
 * the shards before that. */
static void test_forward_does_not_wait(void) {
  model_options options = offload_options(2, 0);
  options.forward_prefetch = true;
  model_start_tree(&m, &options, 2);
  for (int i = 0; i < 2; i++) {
    recorder_clear(m.device);
    CHECK_I64(model_forward(&m, true, NULL), FSDP_OK);
    CHECK(strstr(recorder_tape(m.device), "synchronize") == NULL);
    CHECK(strstr(recorder_tape(m.device), "copy_to_device upload") != NULL);
    CHECK_I64(model_backward(&m, NULL), FSDP_OK);
    model_optimizer_step(&m);
  }
  CHECK_I64(model_forward(&m, true, NULL), FSDP_OK);
  CHECK_TEXT(recorder_race(m.device), "");
  model_optimizer_step(&m);
  CHECK(strstr(recorder_race(m.device), "write by host, not after read of") !=
        NULL);
  recorder_clear_race(m.device);
  /* Unless it asks: for a load, or memory that the user put in a shard's place.
   */
  CHECK_I64(model_forward(&m, true, NULL), FSDP_OK);
  CHECK_I64(fsdp_engine_join_host(m.engine, NULL), FSDP_OK);
  model_optimizer_step(&m);
  CHECK_TEXT(recorder_race(m.device), "");
  fsdp_engine_reset(m.engine);
  model_fini(&m);
}

/* In master dtype no shard has to be cast. */
static void test_full_precision(void) {
  model_options options = offload_options(2, 1);
  options.param_dtype = RECORDER_BF16;
  start(&options);
  fsdp_unit_set_full_precision(m.units[0].unit, true);
  CHECK_I64(model_forward(&m, false, NULL), FSDP_OK);
  CHECK(strstr(recorder_tape(m.device),
               "copy_to_device upload 32 b1+32 <- u.shard0\n") != NULL);
  CHECK(strstr(recorder_tape(m.device), "cast") == NULL);
  fsdp_unit_set_full_precision(m.units[0].unit, false);
  model_step(&m);
  model_check_grads(&m);
  model_fini(&m);
}

/* Everything on the device is blocks: bf16 parameters and the fp32 shard beside
 * them; fp32 gradients and the sharded one. */
static void test_memory(void) {
  model_options options = offload_options(2, 0);
  options.param_dtype = RECORDER_BF16;
  options.reduce_dtype = RECORDER_F32;
  model_init(&m, &options);
  model_plan_simple(&m, "u", 128);
  model_start(&m);
  for (int i = 0; i < 2; i++) model_step(&m);
  CHECK_I64(model_stats(&m).arena.nbytes,
            (256 * 2 + 128 * 4) + (256 * 4 + 128 * 4));
  recorder_clear(m.device);
  for (int i = 0; i < 2; i++) model_step(&m);
  CHECK(strstr(recorder_tape(m.device), "alloc") == NULL);
  CHECK_I64(recorder_live_nbytes(m.device), model_stats(&m).arena.nbytes);
  CHECK_I64(model_stats(&m).grad_shard_nbytes, 128 * 4);
  model_fini(&m);
}

static void test_every_call_can_fail(void) {
  model_options options = offload_options(2, 1);
  options.forward_prefetch = true;
  failures_every_call_of_steps(&m, &options, NULL, failures_train);
  options.num_replicas = 2;
  options.param_dtype = RECORDER_BF16;
  options.backward_prefetch = FSDP_PREFETCH_POST;
  failures_every_call_of_steps(&m, &options, NULL, failures_train);
  options = offload_options(1, 0);
  failures_every_call(&m, &options, NULL, failures_train, 0);
}

static void test_every_allocation_can_fail(void) {
  const model_options options = offload_options(2, 0);
  failures_every_allocation(&m, &options, NULL, failures_train);
}

int main(void) {
  static const check_test tests[] = {
      CHECK_TEST(test_step),
      CHECK_TEST(test_second_backward),
      CHECK_TEST(test_casts_and_replicas),
      CHECK_TEST(test_one_rank),
      CHECK_TEST(test_accumulates),
      CHECK_TEST(test_host_is_joined),
      CHECK_TEST(test_uploads_do_not_wait_for_downloads),
      CHECK_TEST(test_forward_does_not_wait),
      CHECK_TEST(test_full_precision),
      CHECK_TEST(test_memory),
      CHECK_TEST(test_every_call_can_fail),
      CHECK_TEST(test_every_allocation_can_fail),
  };
  return CHECK_RUN(tests);
}
