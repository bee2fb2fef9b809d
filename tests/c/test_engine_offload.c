/*
 * Tests of runtime/: units whose shards and sharded gradients are in host
 * memory. The recorder knows which lane waited for which: each test also finds
 * out about copies that nobody waited for.
 */
#include "engine_failures.h"

/* One unit of eight elements a rank. */
static void start(const model_options *options) {
  model_open(options, "u 8");
  PLAY("show_memory");
}

/* The shard goes into its slot, which is gathered in place; the gradient comes
 * back from the other rank's slot of the unsharded one. */
TEST(test_step) {
  start(WITH(.rank = 1, .offloads = true));
  PLAY("step");
  CHECK_TAPE(
      "record e1 compute; wait unshard e1; take_params u sharded; event e7; "
      "alloc 64 b1; record e7 compute; wait upload e7; "
      "copy_to_device upload 32 b1+32 <- u.shard0; record e4 upload; "
      "wait unshard e4; group_begin unshard g0; "
      "all_gather unshard g0 8 f32 b1 <- b1+32; group_end unshard g0; "
      "record e6 unshard; wait compute e6; show u unsharded; hide u; "
      "mark_params u; take_grads u; wait compute e6; show u unsharded; "
      "show u sharded; free 64 b1; alloc 64 b2; pack compute x1 16 f32->f32 "
      "b2 <- ?; "
      "release t1; grad_shard u 0; record e1 compute; wait reduce e1; "
      "group_begin reduce g0; reduce_scatter reduce g0 8 f32 b2; "
      "group_end reduce g0; accumulate reduce x0.5 8 f32->f32 b2 <- b2+32; "
      "record e2 reduce; wait download e2; "
      "copy_to_host download 32 u.grad0 <- b2; record e7 download; "
      "record e2 reduce; wait compute e2; record e3 replicate; "
      "wait compute e3; wait compute e7; free 64 b2; record e4 upload; "
      "wait download e4; record e5 download; synchronize e5; "
      "show_grads u sharded");
  PLAY("check_grads");
}

/* A second backward brings the sharded gradient to the device first. */
TEST(test_second_backward) {
  start(WITH(.rank = 1, .offloads = true));
  PLAY("step; forward; clear; backward");
  CHECK_TAPE(
      "take_grads u; wait compute e6; show u unsharded; show u sharded; "
      "free 64 b3; alloc 64 b4; pack compute x1 16 f32->f32 b4 <- ?; release "
      "t2; "
      "grad_shard u 0; record e1 compute; wait reduce e1; "
      "group_begin reduce g0; reduce_scatter reduce g0 8 f32 b4; "
      "group_end reduce g0; record e2 reduce; wait download e2; "
      "copy_to_device download 32 b4 <- u.grad0; record e5 download; "
      "wait reduce e5; accumulate reduce x0.5 8 f32->f32 add b4 <- b4+32; "
      "record e2 reduce; wait download e2; "
      "copy_to_host download 32 u.grad0 <- b4; record e7 download; "
      "record e2 reduce; wait compute e2; record e3 replicate; "
      "wait compute e3; wait compute e7; free 64 b4; record e4 upload; "
      "wait download e4; record e5 download; synchronize e5; "
      "show_grads u sharded");
  PLAY("check_grads");
}

/* With a cast the shard comes in its own dtype to where the other rank's slot
 * is (at 16), a half in each turn, since it is twice as large; replicas reduce
 * on their own lane. */
TEST(test_casts_and_replicas) {
  start(WITH(.offloads = true, .num_replicas = 2, .param_dtype = RECORDER_BF16,
             .reduce_dtype = RECORDER_F32, .wants_scratch = true));
  PLAY("step");
  CHECK_TAPE(
      "record e1 compute; wait unshard e1; take_params u sharded; event e7; "
      "alloc 32 b1; record e7 compute; wait upload e7; "
      "copy_to_device upload 16 b1+16 <- u.shard0; record e4 upload; "
      "wait unshard e4; pack unshard x1 4 f32->bf16 b1 <- b1+16; "
      "record e4 unshard; wait upload e4; "
      "copy_to_device upload 16 b1+16 <- u.shard0+16; record e4 upload; "
      "wait unshard e4; pack unshard x1 4 f32->bf16 b1+8 <- b1+16; "
      "group_begin unshard g0; all_gather unshard g0 8 bf16 b1 <- b1; "
      "group_end unshard g0; record e6 unshard; wait compute e6; "
      "show u unsharded; hide u; mark_params u; take_grads u; wait compute e6; "
      "show u unsharded; show u sharded; free 32 b1; alloc 64 b2; "
      "pack compute x1 16 bf16->f32 b2 <- ?; release t1; grad_shard u 0; "
      "record e1 compute; wait reduce e1; event e8; alloc 32 b3; "
      "record e1 compute; wait reduce e1; group_begin reduce g0; "
      "reduce_scatter reduce g0 8 f32 b2 scratch b3; group_end reduce g0; "
      "record e8 reduce; record e2 reduce; wait replicate e2; "
      "group_begin replicate g1; all_reduce replicate g1 8 f32 b2; "
      "group_end replicate g1; "
      "accumulate replicate x0.25 8 f32->f32 b2+32 <- b2; "
      "record e3 replicate; wait download e3; "
      "copy_to_host download 32 u.grad0 <- b2+32; record e7 download; "
      "record e2 reduce; wait compute e2; record e3 replicate; "
      "wait compute e3; wait compute e7; free 64 b2; record e4 upload; "
      "wait download e4; record e5 download; synchronize e5; "
      "show_grads u sharded");
  PLAY("check_grads");
}

/* One rank is not resident: the device has nothing until the copy. */
TEST(test_one_rank) {
  model_options options = {.world_size = 1, .offloads = true};
  start(&options);
  PLAY("step");
  CHECK_TAPE(
      "record e1 compute; wait unshard e1; take_params u sharded; event e7; "
      "alloc 32 b1; record e7 compute; wait upload e7; "
      "copy_to_device upload 32 b1 <- u.shard0; record e4 upload; "
      "wait unshard e4; record e6 unshard; wait compute e6; show u unsharded; "
      "hide u; mark_params u; take_grads u; wait compute e6; show u unsharded; "
      "show u sharded; free 32 b1; alloc 64 b2; pack compute x1 8 f32->f32 b2 "
      "<- ?; "
      "release t1; grad_shard u 0; record e1 compute; wait reduce e1; "
      "accumulate reduce x1 8 f32->f32 b2+32 <- b2; record e2 reduce; "
      "wait download e2; copy_to_host download 32 u.grad0 <- b2+32; "
      "record e7 download; record e2 reduce; wait compute e2; "
      "record e3 replicate; wait compute e3; wait compute e7; free 64 b2; "
      "record e4 upload; wait download e4; record e5 download; synchronize e5; "
      "show_grads u sharded");
  PLAY("check_grads");
  options.param_dtype = RECORDER_BF16;
  start(&options);
  PLAY("eval");
  CHECK_TAPE(
      "record e1 compute; wait unshard e1; take_params u sharded; event e7; "
      "alloc 48 b1; record e7 compute; wait upload e7; "
      "copy_to_device upload 32 b1+16 <- u.shard0; record e4 upload; "
      "wait unshard e4; pack unshard x1 8 f32->bf16 b1 <- b1+16; "
      "record e6 unshard; wait compute e6; show u unsharded; show u sharded; "
      "free 48 b1; record e4 upload; wait download e4; record e5 download; "
      "synchronize e5");
  PLAY("step; check_grads");
}

/* Accumulated outside of no_sync, inside it, and both. */
static void check_accumulates(const model_options *options) {
  model_open(options, "root 8; mixed mixed; b 16");
  for (int step = 0; step < 3; step++) {
    /* writes on the host */
    PLAY("zero_grad; step; check_grads; sync none; step; sync reduce; step");
    PLAY("check_grads; grad_view root sharded; check_idle; optimizer");
  }
}

TEST(test_accumulates) {
  for (int64_t rank = 0; rank < 2; rank++) {
    model_options options = {.rank = rank, .offloads = true};
    check_accumulates(&options);
    options.forward_prefetch = true;
    options.num_replicas = 2;
    options.param_dtype = RECORDER_BF16;
    options.reduce_dtype = RECORDER_F32;
    options.grad_dtype = RECORDER_F32;
    options.prescale = 0.5;
    check_accumulates(&options);
    options.backward_prefetch = PREFETCH_AFTER;
    options.keeps_after_forward = true;
    options.keeps_without_sync = true;
    check_accumulates(&options);
  }
  model_options options = {.world_size = 1, .offloads = true};
  check_accumulates(&options);
  options.num_replicas = 2;
  options.param_dtype = RECORDER_BF16;
  check_accumulates(&options);
}

/* The host may write the shards after a forward without backward, and after a
 * backward that reduced nothing. */
TEST(test_host_is_joined) {
  static const char joined[] =
      "record e4 upload\nwait download e4\nrecord e5 download\n"
      "synchronize e5\n";
  model_start_tree(&m, WITH(.offloads = true, .forward_prefetch = true), 2);
  for (int i = 0; i < 2; i++) {
    PLAY("clear; eval");
    const char *tape = recorder_tape(m.device);
    CHECK_TEXT(tape + strlen(tape) - strlen(joined), joined);
    PLAY("optimizer");
  }
  PLAY("sync none");
  for (int i = 0; i < 2; i++) {
    PLAY("forward; clear; backward");
    CHECK(strstr(recorder_tape(m.device), joined) != NULL);
    PLAY("optimizer");
  }
  /* A forward that raises with a prefetch in flight. */
  PLAY("enter root; abandon root; optimizer");
  /* A backward that is given up, and a unit that goes in the middle of one. */
  PLAY("sync reduce; forward; pre_backward root; reset; optimizer; forward");
  PLAY("pre_backward root; pre_backward b; grads b; destroy b; optimizer");
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
TEST(test_uploads_do_not_wait_for_downloads) {
  model_start_tree(&m, WITH(.offloads = true), 3);
  PLAY("step; optimizer; step; optimizer; step; optimizer; clear; step");
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
}

/* The host goes on after a forward that a backward follows, and may not write
 * the shards before that. */
TEST(test_forward_does_not_wait) {
  model_start_tree(&m, WITH(.offloads = true, .forward_prefetch = true), 2);
  for (int i = 0; i < 2; i++) {
    PLAY("clear; forward");
    CHECK_TAPE_LACKS("synchronize");
    CHECK_TAPE_HAS("copy_to_device upload");
    PLAY("backward; optimizer");
  }
  PLAY("forward; check_races; optimizer");
  CHECK(strstr(recorder_race(m.device), "write by host, not after read of") !=
        NULL);
  recorder_clear_race(m.device);
  /* Unless it asks: for a load, or memory that the user put in a
   * shard's place. */
  PLAY("forward");
  CHECK_OK(fsdp_engine_join_host(m.engine, NULL));
  PLAY("optimizer; check_races; reset");
}

/* In master dtype no shard has to be cast. */
TEST(test_full_precision) {
  start(WITH(.rank = 1, .offloads = true, .param_dtype = RECORDER_BF16));
  fsdp_unit_get_settings(m.units[0].unit)->wants_full = true;
  PLAY("eval");
  CHECK_TAPE_HAS("copy_to_device upload 32 b1+32 <- u.shard0;");
  CHECK_TAPE_LACKS("cast");
  fsdp_unit_get_settings(m.units[0].unit)->wants_full = false;
  PLAY("step; check_grads");
}

/* Four ranks have room for it beside this one, on either side. */
TEST(test_stage_in_the_slots) {
  for (int64_t rank = 0; rank < 4; rank++) {
    start(WITH(.world_size = 4, .rank = rank, .offloads = true,
               .param_dtype = RECORDER_BF16, .reduce_dtype = RECORDER_F32));
    PLAY("step; optimizer; step; check_grads");
    CHECK_TAPE_HAS("alloc 64 b1"); /* 32 elements of bf16 */
    CHECK_I64(model_stats(&m).arena.peak_nbytes, 32 * 4);
  }
}

/* Behind a slot of 6 bytes fp32 elements of the shard lie at 8, one a turn. */
TEST(test_stage_is_aligned) {
  model_open(WITH(.offloads = true, .param_dtype = RECORDER_BF16,
                  .is_unaligned = true),
             "u 3");
  PLAY("show_memory; step; optimizer; step; check_grads");
  CHECK_TAPE_HAS("copy_to_device upload 4 b1+8 <- u.shard0+8;");
}

/* Everything on the device is blocks. The largest holds fp32 gradients, and in
 * the other rank's slot the sharded one. */
TEST(test_memory) {
  model_open(WITH(.offloads = true, .param_dtype = RECORDER_BF16,
                  .reduce_dtype = RECORDER_F32),
             "u 128");
  PLAY("step; step");
  CHECK_I64(model_stats(&m).arena.peak_nbytes, 256 * 4);
  PLAY("clear; step; step");
  CHECK_TAPE_LACKS("host_alloc");
  CHECK_I64(recorder_live_nbytes(m.device), 0);
  CHECK_I64(model_stats(&m).grad_shard_nbytes, 128 * 4);
}

TEST(test_every_call_can_fail) {
  model_options options = {.rank = 1, .offloads = true};
  options.forward_prefetch = true;
  failures_every_call_of_steps(&options, NULL, failures_train);
  options.num_replicas = 2;
  options.param_dtype = RECORDER_BF16;
  options.backward_prefetch = PREFETCH_AFTER;
  failures_every_call_of_steps(&options, NULL, failures_train);
  options = (model_options){.offloads = true};
  options.has_mean = true;
  failures_every_call_of_steps(&options, NULL, failures_train);
  options = (model_options){.world_size = 1, .offloads = true};
  failures_every_call(&options, NULL, failures_train, 0);
}

TEST(test_every_allocation_can_fail) {
  failures_every_allocation(WITH(.offloads = true), NULL, failures_train);
}
