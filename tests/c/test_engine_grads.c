/*
 * Tests of runtime/: gradients. What they are after several backwards, with and
 * without sync, and what a step costs in memory once it is known.
 */
#include "base/alloc.h"
#include "engine_fixture.h"

/* --- Gradients ----------------------------------------------------------- */

TEST(test_accumulates_over_backwards) {
  model_start_tree(&m, NULL, 1);
  PLAY("step; step; step; check_grads"); /* the sum of three */
  PLAY("zero_grad; step; check_grads");  /* of the last one alone */
}

/* Gradients that the user set before the first backward are added to. */
TEST(test_users_own_gradient_is_added_to) {
  model_start_tree(&m, NULL, 0);
  float *grad = m.units[0].grad_shards[0];
  for (int64_t i = 0; i < 4; i++) {
    grad[i] = 10;
    m.units[0].expected[0][i] = 10;
  }
  PLAY("grads_live 1; step; check_grads");
}

/* Two micro-batches without sync, a third with it. */
static void check_no_sync(const model_options *options) {
  const bool keeps = options->keeps_without_sync;
  model_open(options, "root 8; mixed mixed; b 16");
  for (int step = 0; step < 3; step++) {
    PLAY("zero_grad; sync none");
    for (int i = 0; i < 2; i++) {
      PLAY("clear; step");
      CHECK_TAPE_LACKS("reduce ");
      PLAY("grad_view root unsharded; check_grads");
      model_check_states(&m, keeps ? FSDP_UNIT_KEPT : FSDP_UNIT_SHARDED);
    }
    PLAY("sync reduce");
    const int64_t num_all_gathers = model_stats(&m).num_all_gathers;
    PLAY("step");
    if (keeps) CHECK_I64(model_stats(&m).num_all_gathers, num_all_gathers);
    PLAY("grad_view root sharded; check_grads; check_sharded; check_idle");
    PLAY("optimizer");
  }
}

TEST(test_no_sync_then_sync) {
  model_options options = {.rank = 1};
  check_no_sync(&options);
  options.forward_prefetch = true;
  options.num_replicas = 2;
  options.reduce_dtype = RECORDER_F32;
  options.param_dtype = RECORDER_BF16;
  options.prescale = 0.25;
  options.wants_scratch = true;
  check_no_sync(&options);
  options.keeps_after_forward = true;
  options.keeps_without_sync = true;
  check_no_sync(&options);
  options.held_dtype = RECORDER_BF16;
  check_no_sync(&options);
  options.offloads = true;
  check_no_sync(&options);
}

/* Gradients kept in another dtype than they are reduced in take as much memory
 * as that dtype needs; a block for the reduction is there while it runs. */
TEST(test_held_dtype) {
  model_open(WITH(.param_dtype = RECORDER_BF16, .reduce_dtype = RECORDER_F32,
                  .held_dtype = RECORDER_BF16),
             "root 64; a 128");
  for (int i = 0; i < 2; i++) {
    PLAY("sync none; step; step; check_grads; clear");
    CHECK_I64(model_stats(&m).arena.held_nbytes, 2 * (64 + 128) * 2);
    PLAY("sync reduce; step; check_grads; check_sharded; check_idle");
    PLAY("zero_grad");
  }
}

/* Parameters kept between micro-batches are hidden in between, and gathered
 * again if the user changed them there. */
TEST(test_kept_parameters) {
  model_start_tree(&m, WITH(.keeps_without_sync = true), 1);
  PLAY("sync none; step; view a sharded; state a KEPT");
  const int64_t num_all_gathers = model_stats(&m).num_all_gathers;
  PLAY("clear; step"); /* on what was kept: a reshards after its forward */
  CHECK_SCHEDULE(
      "show root unsharded; show a unsharded; show a sharded; "
      "hide root; all_gather a; show root unsharded; "
      "show a unsharded; hide root; show_grads root unsharded; "
      "hide a; show_grads a unsharded");
  PLAY("optimizer");
  const int64_t num_before = model_stats(&m).num_all_gathers;
  CHECK_I64(num_before, num_all_gathers + 1);
  PLAY("step"); /* with the new values */
  CHECK_I64(model_stats(&m).num_all_gathers, num_before + 3);
  /* One that does not run stays: the next forward may need it. */
  PLAY("enter root; state a KEPT; leave root; state a KEPT; reset; zero_grad");
  PLAY("step; check_grads");
  /* Kept, and destroyed, or summoned, or moved. */
  PLAY("summon a; dismiss a; step; sync reduce; step; check_grads");
  PLAY("check_sharded; check_idle");
}

TEST(test_sync_then_no_sync_then_sync) {
  model_start_tree(&m, NULL, 1);
  PLAY("step");                           /* sharded */
  PLAY("sync none; step");                /* unsharded, beside it */
  PLAY("sync reduce; step; check_grads"); /* all three */
}

/* Gradients kept without sync that the user cleared do not come back. */
TEST(test_cleared_unsharded_gradients_stay_cleared) {
  model_start_tree(&m, NULL, 2);
  /* b takes no part in this step */
  PLAY("sync none; step; sync reduce; zero_grad; enter root; enter a; leave a");
  PLAY("leave root; pre_backward root; pre_backward a; grads a; grads root");
  PLAY("finish; has_grads root; has_grads a; no_grads b; check_idle");
  PLAY("zero_grad; step; check_grads");
}

/* A unit whose gradients were kept by no_sync and that takes no part in the
 * backward that reduces: reduced at its end. */
TEST(test_kept_gradients_are_reduced_at_the_end) {
  model_start_tree(&m, NULL, 1);
  PLAY("sync none; step; sync reduce; enter root; leave root");
  PLAY("pre_backward root; grads root; finish; check_grads; check_sharded");
  PLAY("num_reduces 2");
}

/* What got no gradient is zero: while kept, and when reduced. */
TEST(test_unused_parameters_are_zero) {
  model_open(NULL, "u (5,7,3)");
  PLAY("show_memory");
  for (int i = 0; i < 2; i++) {
    PLAY(i == 1 ? "sync reduce" : "sync none");
    PLAY("zero_grad; forward; pre_backward u; expect u 3; grad u 1");
    PLAY("pending u 2; clear; finish"); /* the other two do not come */
    CHECK_TAPE_HAS(i == 0 ? "pack compute x1 zero 8 f32 b2, zero 9 f32 b2+60;"
                          : "pack compute x1 7 f32->f32 b4+32 <- ?, "
                            "zero 8 f32 b4, zero 9 f32 b4+60;");
    PLAY("pending u 0; check_grads");
  }
}

/* A second gradient of a parameter, and one that nobody announced. */
TEST(test_gradients_of_one_parameter_add_up) {
  model_open(NULL, "u (8,8)");
  PLAY("show_memory; forward; pre_backward u; expect u 3; clear");
  PLAY("grad u 0; grad u 0; grad u 1");
  CHECK_TAPE_HAS("pack compute x1 8 f32->f32 b2 <- ?;");
  CHECK_TAPE_HAS(
      "pack compute x1 8 f32->f32 add b2 <- ?, 8 f32->f32 b2+32 <- ?;");
  PLAY("finish; check_grads");
  /* No forward, no pre_backward: a gradient of the parameters themselves. */
  PLAY("unexpected u 1");
  CHECK(fsdp_engine_in_backward(m.engine));
  PLAY("finish; check_grads");
  /* One that nobody announced does not stand in for one that is to come. */
  PLAY("forward; pre_backward u; expect u 1; unexpected u 1");
  PLAY("state u UNSHARDED; grad u 0; state u REDUCING; finish; check_grads");
}

/* Gradients wait until all have come. If the unit's block is there before, they
 * are packed and released as they come, from 1 MiB on. */
TEST(test_large_gradients_are_packed_early) {
  model_open(NULL, "u (16,262144,16)");
  PLAY("sync none; forward; pre_backward u; expect u 3; grad u 2; grad u 1");
  CHECK_I64(m.grads[0].num_releases, 0);
  CHECK_I64(m.grads[1].num_releases, 0);
  PLAY("grad u 0; finish");
  CHECK_I64(m.grads[0].num_releases, 1);
  PLAY("sync reduce; forward; pre_backward u; expect u 3; grad u 2");
  CHECK_I64(m.grads[3].num_releases, 0);
  PLAY("grad u 1");
  CHECK_I64(m.grads[3].num_releases, 1);
  CHECK_I64(m.grads[4].num_releases, 1);
  PLAY("grad u 0; finish; check_grads");
}

TEST(test_forward_inside_an_open_backward_is_refused) {
  fsdp_error error;
  model_start_tree(&m, NULL, 1);
  CHECK_OK(fsdp_engine_finish_backward(m.engine, NULL)); /* nothing */
  PLAY("forward; pre_backward root");
  CHECK_FAILS(
      fsdp_unit_pre_forward(m.units[0].unit, false, &error), FSDP_INVALID_STATE,
      error.message,
      "unit 'root' ran forward while a backward that raised is still open");
  CHECK_I64(error.remedy, FSDP_REMEDY_RESET);
  PLAY("reset; check_sharded; step; check_grads");
}

/* A reset gives back what is open, and keeps what earlier micro-batches left
 * in units that the broken backward did not reach. */
TEST(test_reset_in_the_middle) {
  model_start_tree(&m, NULL, 2);
  PLAY("sync none; step; forward; pre_backward root; pre_backward b");
  PLAY("expect b 2; grad b 0"); /* waits to be packed */
  PLAY("reset; check_sharded");
  CHECK_I64(m.grads[m.num_grads - 1].num_releases, 1);
  CHECK(!fsdp_engine_in_backward(m.engine));
  memset(m.units[0].expected[0], 0, 8 * sizeof(double));
  memset(m.units[2].expected[0], 0, 24 * sizeof(double));
  PLAY("sync reduce; step; check_grads");
}

/* --- Steady state -------------------------------------------------------- */

static void check_steady_state(const model_options *options) {
  model_open(options, "root 8; mixed mixed; b 16; c 16");
  PLAY("step; step; clear");
  const fsdp_engine_stats before = model_stats(&m);
  const int64_t num_live = fsdp_alloc_live();
  for (int i = 0; i < 3; i++) {
    PLAY("zero_grad; optimizer");
    fsdp_alloc_fail_at(0);
    PLAY("step");
    CHECK(fsdp_calloc(1, 1) == NULL); /* the injected failure is unused */
    fsdp_alloc_fail_at(-1);
    PLAY("check_grads");
  }
  const fsdp_engine_stats after = model_stats(&m);
  CHECK_I64(fsdp_alloc_live(), num_live);
  CHECK_TAPE_LACKS("event");
  CHECK_I64(after.arena.peak_nbytes, before.arena.peak_nbytes);
  CHECK_I64(after.arena.nbytes, 0);
  CHECK_I64(recorder_live_nbytes(m.device), 0);
}

/* On the host; blocks come and go, and are as many as before. */
TEST(test_third_step_allocates_nothing) {
  model_options options = {0};
  check_steady_state(&options);
  options.forward_prefetch = true;
  check_steady_state(&options);
  options.backward_prefetch = PREFETCH_AFTER;
  check_steady_state(&options);
  options.backward_prefetch = NO_PREFETCH;
  options.num_replicas = 2;
  check_steady_state(&options);
  options.keeps_after_forward = true;
  options.param_dtype = RECORDER_BF16;
  check_steady_state(&options);
  options.world_size = 1;
  check_steady_state(&options);
  options.param_dtype = (fsdp_dtype){0, 0};
  check_steady_state(&options);
}

/* Memory is arithmetic. One unit: its gradients, in fp32, take the place of its
 * parameters, in bf16. */
TEST(test_memory_of_one_unit) {
  model_open(WITH(.param_dtype = RECORDER_BF16, .reduce_dtype = RECORDER_F32),
             "u 64");
  PLAY("step; step; step");
  CHECK_I64(model_stats(&m).arena.peak_nbytes, 128 * 4);
  CHECK_I64(recorder_live_nbytes(m.device), 0);
  CHECK_I64(model_stats(&m).shard_nbytes, 64 * 4);
  CHECK_I64(model_stats(&m).grad_shard_nbytes, 64 * 4);
}

/* Equal units, however many there are: the root, the unit that runs, the next
 * one, and the gradients that are reduced. */
TEST(test_memory_does_not_grow_with_depth) {
  static const char *const units[] = {
      "root 64; a 64; b 64; c 64; d 64",
      "root 64; a 64; b 64; c 64; d 64; e 64; f 64"};
  for (int round = 0; round < 2; round++) {
    model_open(NULL, units[round]);
    PLAY("zero_grad; step; check_grads; zero_grad; step; check_grads");
    PLAY("zero_grad; step; check_grads");
    CHECK_I64(model_stats(&m).arena.peak_nbytes, 4 * 128 * 4);
    CHECK_I64(recorder_live_nbytes(m.device), 0);
  }
}

/* --- Mean ---------------------------------------------------------------- */

/* The reduce_scatter's piece is the sharded gradient: nothing adds or scales,
 * and a second backward does. */
TEST(test_reduces_to_the_mean) {
  model_open(WITH(.rank = 1, .has_mean = true), "u 8");
  PLAY("show_memory; step");
  CHECK_TAPE_HAS("reduce_scatter_mean reduce g0 8 f32 ? <- b2");
  CHECK_TAPE_LACKS("accumulate");
  PLAY(
      "check_grads; clear; step"); /* the same collective: others may not add */
  CHECK_TAPE_HAS("reduce_scatter_mean reduce g0 8 f32 b4+32 <- b4");
  CHECK_TAPE_HAS("accumulate reduce x1 8 f32->f32 add ");
  PLAY("check_grads; zero_grad; clear; step; check_grads");
  CHECK_TAPE_HAS("reduce_scatter_mean");
}

/* In the slot, from which the host's copy comes. */
TEST(test_offloads_the_mean) {
  model_open(WITH(.rank = 1, .has_mean = true, .offloads = true), "u 8");
  PLAY("show_memory; step");
  CHECK_TAPE_HAS("reduce_scatter_mean reduce g0 8 f32 b2+32 <- b2");
  CHECK_TAPE_HAS("copy_to_host download 32 u.grad0 <- b2+32");
  CHECK_TAPE_LACKS("accumulate");
  PLAY("check_grads; step; check_grads");
}

/* All that the reduce_scatter's mean would leave out. */
TEST(test_not_to_the_mean) {
  for (int i = 0; i < 3; i++) {
    model_options options = {.has_mean = true, .reduce_dtype = RECORDER_F32};
    if (i == 0) options.num_replicas = 2;
    if (i == 1) options.prescale = 0.25;
    if (i == 2) options.reduce_dtype = RECORDER_BF16;
    model_open(&options, "u 8");
    PLAY("step; check_grads");
    CHECK_TAPE_LACKS("reduce_scatter_mean");
  }
}

/* A partial gradient is a sum. */
TEST(test_adds_a_partial_gradient_to_the_mean) {
  model_open(WITH(.rank = 1, .has_mean = true), "u 8");
  PLAY("sync shard; step; step; sync reduce; clear; step; check_grads");
  CHECK_TAPE_HAS("reduce_scatter_mean");
  CHECK_TAPE_HAS("accumulate reduce x0.5 8 f32->f32 add");
  PLAY("step; check_grads");
}

/* Of parameters that no rank used the sums are read as before. */
TEST(test_marks_beside_the_mean) {
  model_open(WITH(.has_mean = true, .finds_unused = true), "u 8");
  PLAY("step; check_grads");
  CHECK_TAPE_HAS("reduce_scatter_mean reduce g0 8 f32");
  CHECK_TAPE_HAS("reduce_scatter reduce g0 ");
}
