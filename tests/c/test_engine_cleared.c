/*
 * Tests of runtime/: sharded gradients that the user cleared. Their memory goes
 * at the start of the next iteration, or when a backward enters the unit, and
 * is made anew, as zeros, for the next reduction.
 */
#include "engine_failures.h"

static int64_t grad_nbytes(void) {
  return model_stats(&m).grad_shard_nbytes;
}

static void check_frees(int64_t num_frees) {
  for (int64_t i = 0; i < m.num_units; i++) {
    CHECK_I64(m.units[i].num_frees, num_frees);
  }
}

/* --- When ---------------------------------------------------------------- */

TEST(test_freed_when_the_next_iteration_begins) {
  model_start_tree(&m, NULL, 1);
  CHECK_I64(grad_nbytes(), 0);
  PLAY("step");
  CHECK_TAPE_LACKS("grads_");
  CHECK_I64(grad_nbytes(), (4 + 8) * 4);
  for (int i = 1; i < 4; i++) {
    PLAY("zero_grad; clear");
    CHECK_I64(grad_nbytes(), (4 + 8) * 4); /* until somebody looks */
    PLAY("enter root");
    CHECK_TAPE_HAS(
        "grads_live root; grads_free root; grads_live a; grads_free a; "
        "record e1 compute;");
    CHECK_I64(grad_nbytes(), 0);
    PLAY("enter a; leave a; leave root; clear; pre_backward root");
    PLAY("pre_backward a; grads a");
    CHECK_I64(grad_nbytes(), 8 * 4);
    CHECK_TAPE_HAS("grad_shard a 0; record e1 compute; wait reduce e1;");
    PLAY("grads root; finish");
    CHECK_TAPE_LACKS("grads_free");
    CHECK_TAPE_HAS("accumulate reduce x0.5 4 f32->f32;"); /* not added */
    check_frees(i);
    PLAY("check_grads");
    CHECK_I64(grad_nbytes(), (4 + 8) * 4);
  }
}

TEST(test_kept_while_the_user_holds_one) {
  model_start_tree(&m, NULL, 1);
  for (int i = 0; i < 3; i++) {
    PLAY("clear; step");
    if (i == 0) CHECK_TAPE_LACKS("grads_live root");
    if (i > 0) CHECK_TAPE_HAS("grads_live root; grads_live a;");
  }
  check_frees(0);
  PLAY("check_grads");
}

/* Between forward and backward, as in "loss = f(); zero_grad(); backward()". */
TEST(test_freed_on_entering_backward) {
  for (int64_t rank = 0; rank < 2; rank++) {
    model_start_tree(&m, WITH(.rank = rank, .offloads = rank == 1), 1);
    PLAY("step");
    for (int i = 1; i < 3; i++) {
      PLAY("forward; zero_grad; clear; pre_backward root");
      CHECK_TAPE_HAS("take_grads root; grads_free root;");
      CHECK_TAPE_LACKS("grads_free a;");
      CHECK_I64(grad_nbytes(), 8 * 4);
      PLAY("pre_backward a");
      CHECK_TAPE_HAS("take_grads a; grads_free a;");
      CHECK_I64(grad_nbytes(), 0);
      PLAY("grads a; grads root; finish");
      check_frees(i);
      PLAY("check_grads");
    }
  }
}

/* b takes no part in the next iterations: its memory goes all the same, once;
 * it has no gradients then. */
TEST(test_of_a_unit_that_does_not_run) {
  model_start_tree(&m, NULL, 2);
  PLAY("step; zero_grad");
  for (int i = 0; i < 2; i++) {
    PLAY("enter root; enter a; leave a; leave root; pre_backward root");
    PLAY("pre_backward a; grads a; grads root; finish");
    CHECK_I64(grad_nbytes(), (4 + 8) * 4);
    PLAY("no_grads b");
  }
  check_frees(1);
  PLAY("zero_grad; step; check_grads");
  CHECK_I64(grad_nbytes(), (4 + 8 + 12) * 4);
}

/* The user cleared the whole ones of a unit that stays summoned while its root
 * runs. Without a write-back the sharded ones come back. */
TEST(test_of_a_summoned_unit) {
  model_start_tree(&m, NULL, 2);
  PLAY("step; grads_live 1; summon a with_grads; grads_live 0");
  m.units[0].has_grads = false;
  m.units[2].has_grads = false;
  PLAY("enter root; leave_eval root");
  CHECK_I64(m.units[0].num_frees, 1);
  CHECK_I64(m.units[1].num_frees, 0);
  PLAY("drop a; grad_view a sharded");
  const float *grad = m.units[1].grad_shards[0];
  for (int64_t i = 0; i < 8; i++) {
    CHECK((double)grad[i] == m.units[1].expected[0][i]);
  }
  PLAY("zero_grad; step; check_grads");
}

/* --- Accumulation -------------------------------------------------------- */

enum { KEEPS, CLEARS_BEFORE_FORWARD, CLEARS_BEFORE_BACKWARD, NUM_CLEARS };

static void micro_batch(fsdp_sync sync, int clears) {
  fsdp_engine_set_sync(m.engine, sync);
  if (clears == CLEARS_BEFORE_FORWARD) PLAY("zero_grad");
  PLAY("forward");
  if (clears == CLEARS_BEFORE_BACKWARD) PLAY("zero_grad");
  PLAY("backward");
  if (sync == FSDP_SYNC_REDUCE) PLAY("check_grads"); /* sharded: all of it */
}

/* Every way to end three micro-batches, and to clear before each of the last
 * two; then a step as usual. */
static void check_patterns(const model_options *options) {
  static const fsdp_sync kinds[] = {FSDP_SYNC_NONE, FSDP_SYNC_SHARD,
                                    FSDP_SYNC_REDUCE};
  const int num_patterns = 3 * 3 * 3 * NUM_CLEARS * NUM_CLEARS;
  for (int pattern = 0; pattern < num_patterns; pattern++) {
    const int64_t num_failures = check_num_failures;
    int rest = pattern;
    model_open(options, "root 8; mixed mixed");
    for (int i = 0; i < 3; i++) {
      const fsdp_sync sync = kinds[rest % 3];
      rest /= 3;
      micro_batch(sync, i == 0 ? KEEPS : rest % NUM_CLEARS);
      if (i > 0) rest /= NUM_CLEARS;
    }
    micro_batch(FSDP_SYNC_REDUCE, KEEPS);
    const int64_t nbytes = 8 * 4 + 8 * 4 + 8 * 2;
    CHECK_I64(grad_nbytes(), nbytes);
    PLAY("zero_grad; forward");
    CHECK_I64(grad_nbytes(), 0);
    PLAY("backward; check_grads");
    CHECK_I64(grad_nbytes(), nbytes);
    PLAY("check_idle");
    if (check_num_failures > num_failures) printf("  pattern %d\n", pattern);
  }
}

TEST(test_accumulation_patterns) {
  model_options options = {0};
  check_patterns(&options);
  options.rank = 1;
  options.num_replicas = 2;
  options.param_dtype = RECORDER_BF16;
  options.reduce_dtype = RECORDER_F32;
  options.wants_scratch = true;
  check_patterns(&options);
  options.offloads = true;
  check_patterns(&options);
}

/* Held unsharded: only a backward can tell that the sharded one, beside it, was
 * cleared, too. */
TEST(test_not_freed_while_unsharded_ones_are_held) {
  static const fsdp_sync kinds[] = {FSDP_SYNC_NONE, FSDP_SYNC_SHARD};
  for (int i = 0; i < 2; i++) {
    model_start_tree(&m, NULL, 0);
    micro_batch(FSDP_SYNC_REDUCE, KEEPS);
    CHECK(!fsdp_unit_holds_grads(m.units[0].unit));
    micro_batch(kinds[i], KEEPS);
    CHECK(fsdp_unit_holds_grads(m.units[0].unit));
    PLAY("zero_grad; clear; forward");
    CHECK_TAPE_LACKS("grads_");
    CHECK_I64(grad_nbytes(), 4 * 4);
    PLAY("pre_backward root");
    CHECK_TAPE_HAS(i == 0 ? "take_grads root unsharded; grads_free root;"
                          : "take_grads root; grads_free root;");
    CHECK_I64(grad_nbytes(), 0);
    PLAY("sync reduce; grads root; finish; check_grads");
  }
}

/* --- Made anew ----------------------------------------------------------- */

/* A segment that takes part for the first time while the others are added to:
 * what it is added to must be zero. */
TEST(test_zeros_for_a_segment_that_is_unfrozen) {
  for (int offloads = 0; offloads < 2; offloads++) {
    model_open(WITH(.offloads = offloads != 0), "u mixed");
    PLAY("unfreeze u 1; step; freeze u 1");
    PLAY("zero_grad; step"); /* freed, and made without segment 1 */
    CHECK_I64(grad_nbytes(), 8 * 4 + 8 * 2);
    PLAY("unfreeze u 1; clear; step");
    CHECK_TAPE_HAS("grad_shard u 1; grad_shard u 2; record e1 compute;");
    CHECK_TAPE_HAS(
        "accumulate reduce x0.5 8 f32->f32 add, 4 f32->f32 add, "
        "8 bf16->bf16 add");
    CHECK_I64(grad_nbytes(), 8 * 4 + 4 * 4 + 8 * 2);
    PLAY("check_grads");
    check_frees(1);
  }
}

/* The same, but a summon asks for the gradients before any reduction. */
TEST(test_zeros_for_a_summon) {
  model_open(NULL, "u mixed");
  PLAY("step; unfreeze u 1; summon u with_grads");
  const float *whole = m.units[0].grads[1];
  for (int64_t i = 0; i < 8; i++) CHECK(whole[i] == 0);
  PLAY("dismiss u; step; check_grads");
}

/* A summon that could not make one: the next reduction does, in time. */
TEST(test_summon_that_fails_to_make_one) {
  bool was_refused = false;
  for (int64_t i = 0;; i++) {
    fsdp_error error = {0};
    model_start_tree(&m, NULL, 0);
    fsdp_unit *unit = m.units[0].unit;
    recorder_set_answer_byte(m.device, true);
    PLAY("summon root with_grads; grads_live 1"); /* the user sets some */
    memset(m.units[0].grads[0], 0, 8 * sizeof(float));
    recorder_fail_at(m.device, i);
    const fsdp_status status = fsdp_unit_dismiss(unit, true, &error);
    recorder_fail_at(m.device, -1);
    if (status != FSDP_OK) {
      PLAY("drop root");
    }
    if (strstr(error.message, "grad_shard") != NULL) {
      was_refused = true;
      CHECK_I64(grad_nbytes(), 0);
    }
    PLAY("zero_grad; step; check_grads");
    if (status == FSDP_OK) break;
  }
  CHECK(was_refused);
}

/* --- Failures ------------------------------------------------------------ */

static fsdp_status clear_and_train(fsdp_error *error) {
  return model_try("step; zero_grad; step", error);
}

TEST(test_every_call_can_fail) {
  model_options options = {0};
  failures_every_call_of_steps(&options, NULL, clear_and_train);
  options.offloads = true;
  failures_every_call_of_steps(&options, NULL, clear_and_train);
}
