/*
 * Tests of runtime/: sharded gradients that the user cleared. Their memory goes
 * at the start of the next iteration, or when a backward enters the unit, and
 * is made anew, as zeros, for the next reduction.
 */
#include "engine_failures.h"

static model m; /* each test makes and frees it */

static void forward(void) {
  CHECK_I64(model_forward(&m, true, NULL), FSDP_OK);
}

static void backward(void) {
  CHECK_I64(model_backward(&m, NULL), FSDP_OK);
}

static int64_t grad_nbytes(void) {
  return model_stats(&m).grad_shard_nbytes;
}

static bool has_line(const char *lines) {
  return strstr(recorder_tape(m.device), lines) != NULL;
}

static void check_frees(int64_t num_frees) {
  for (int64_t i = 0; i < m.num_units; i++) {
    CHECK_I64(m.units[i].num_frees, num_frees);
  }
}

/* --- When ---------------------------------------------------------------- */

static void test_freed_when_the_next_iteration_begins(void) {
  model_start_tree(&m, NULL, 1);
  CHECK_I64(grad_nbytes(), 0);
  model_step(&m);
  CHECK(!has_line("grads_"));
  CHECK_I64(grad_nbytes(), (4 + 8) * 4);
  for (int i = 1; i < 4; i++) {
    model_zero_grad(&m);
    recorder_clear(m.device);
    CHECK_I64(grad_nbytes(), (4 + 8) * 4); /* until somebody looks */
    CHECK_I64(model_enter(&m, 0, NULL), FSDP_OK);
    CHECK(
        has_line("grads_live root\n"
                 "grads_free root\n"
                 "grads_live a\n"
                 "grads_free a\n"
                 "record e1 compute\n"));
    CHECK_I64(grad_nbytes(), 0);
    CHECK_I64(model_enter(&m, 1, NULL), FSDP_OK);
    CHECK_I64(model_leave(&m, 1, true, NULL), FSDP_OK);
    CHECK_I64(model_leave(&m, 0, true, NULL), FSDP_OK);
    recorder_clear(m.device);
    CHECK_I64(model_pre_backward(&m, 0, NULL), FSDP_OK);
    CHECK_I64(model_pre_backward(&m, 1, NULL), FSDP_OK);
    CHECK_I64(model_give_grads(&m, 1, NULL), FSDP_OK);
    CHECK_I64(grad_nbytes(), 8 * 4);
    CHECK(
        has_line("grad_shard a 0\n"
                 "record e1 compute\n"
                 "wait reduce e1\n"));
    CHECK_I64(model_give_grads(&m, 0, NULL), FSDP_OK);
    CHECK_I64(model_finish(&m, NULL), FSDP_OK);
    CHECK(!has_line("grads_free"));
    CHECK(has_line("accumulate reduce 4 f32->f32 x0.5\n")); /* not added */
    check_frees(i);
    model_check_grads(&m);
    CHECK_I64(grad_nbytes(), (4 + 8) * 4);
  }
  model_fini(&m);
}

static void test_kept_while_the_user_holds_one(void) {
  model_start_tree(&m, NULL, 1);
  for (int i = 0; i < 3; i++) {
    recorder_clear(m.device);
    model_step(&m);
    CHECK(has_line("grads_live root\ngrads_live a\n") == (i > 0));
  }
  check_frees(0);
  model_check_grads(&m);
  model_fini(&m);
}

/* Between forward and backward, as in "loss = f(); zero_grad(); backward()". */
static void test_freed_on_entering_backward(void) {
  for (int64_t rank = 0; rank < 2; rank++) {
    model_options options = model_default_options();
    options.rank = rank;
    options.offloads = rank == 1;
    model_start_tree(&m, &options, 1);
    model_step(&m);
    for (int i = 1; i < 3; i++) {
      forward();
      model_zero_grad(&m);
      recorder_clear(m.device);
      CHECK_I64(model_pre_backward(&m, 0, NULL), FSDP_OK);
      CHECK(has_line("take_grads root\ngrads_free root\n"));
      CHECK(!has_line("grads_free a\n"));
      CHECK_I64(grad_nbytes(), 8 * 4);
      CHECK_I64(model_pre_backward(&m, 1, NULL), FSDP_OK);
      CHECK(has_line("take_grads a\ngrads_free a\n"));
      CHECK_I64(grad_nbytes(), 0);
      CHECK_I64(model_give_grads(&m, 1, NULL), FSDP_OK);
      CHECK_I64(model_give_grads(&m, 0, NULL), FSDP_OK);
      CHECK_I64(model_finish(&m, NULL), FSDP_OK);
      check_frees(i);
      model_check_grads(&m);
    }
    model_fini(&m);
  }
}

/* b takes no part in the next iterations: its memory goes all the same, once;
 * it has no gradients then. */
static void test_of_a_unit_that_does_not_run(void) {
  model_start_tree(&m, NULL, 2);
  model_step(&m);
  model_zero_grad(&m);
  for (int i = 0; i < 2; i++) {
    CHECK_I64(model_enter(&m, 0, NULL), FSDP_OK);
    CHECK_I64(model_enter(&m, 1, NULL), FSDP_OK);
    CHECK_I64(model_leave(&m, 1, true, NULL), FSDP_OK);
    CHECK_I64(model_leave(&m, 0, true, NULL), FSDP_OK);
    CHECK_I64(model_pre_backward(&m, 0, NULL), FSDP_OK);
    CHECK_I64(model_pre_backward(&m, 1, NULL), FSDP_OK);
    CHECK_I64(model_give_grads(&m, 1, NULL), FSDP_OK);
    CHECK_I64(model_give_grads(&m, 0, NULL), FSDP_OK);
    CHECK_I64(model_finish(&m, NULL), FSDP_OK);
    CHECK_I64(grad_nbytes(), (4 + 8) * 4);
    CHECK(!m.units[2].has_grads);
  }
  check_frees(1);
  model_zero_grad(&m);
  model_step(&m);
  model_check_grads(&m);
  CHECK_I64(grad_nbytes(), (4 + 8 + 12) * 4);
  model_fini(&m);
}

/* The user cleared the whole ones of a unit that stays summoned while its root
 * runs. Without a write-back the sharded ones come back. */
static void test_of_a_summoned_unit(void) {
  const fsdp_summon_options with_grads = {.with_grads = true};
  model_start_tree(&m, NULL, 2);
  model_step(&m);
  recorder_set_grads_live(m.device, true);
  CHECK_I64(fsdp_unit_summon(m.units[1].unit, &with_grads, NULL), FSDP_OK);
  recorder_set_grads_live(m.device, false);
  m.units[0].has_grads = false;
  m.units[2].has_grads = false;
  CHECK_I64(model_enter(&m, 0, NULL), FSDP_OK);
  CHECK_I64(model_leave(&m, 0, false, NULL), FSDP_OK);
  CHECK_I64(m.units[0].num_frees, 1);
  CHECK_I64(m.units[1].num_frees, 0);
  CHECK_I64(fsdp_unit_dismiss(m.units[1].unit, false, NULL), FSDP_OK);
  CHECK_I64(m.units[1].grad_view, FSDP_VIEW_SHARDED);
  const float *grad = m.units[1].grad_shards[0];
  for (int64_t i = 0; i < 8; i++) {
    CHECK((double)grad[i] == m.units[1].expected[0][i]);
  }
  model_zero_grad(&m);
  model_step(&m);
  model_check_grads(&m);
  model_fini(&m);
}

/* --- Accumulation -------------------------------------------------------- */

enum { KEEPS, CLEARS_BEFORE_FORWARD, CLEARS_BEFORE_BACKWARD, NUM_CLEARS };

static void micro_batch(fsdp_sync sync, int clears) {
  fsdp_engine_set_sync(m.engine, sync);
  if (clears == CLEARS_BEFORE_FORWARD) model_zero_grad(&m);
  forward();
  if (clears == CLEARS_BEFORE_BACKWARD) model_zero_grad(&m);
  backward();
  if (sync == FSDP_SYNC_REDUCE) model_check_grads(&m); /* sharded: all of it */
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
    model_init(&m, options);
    model_plan_simple(&m, "root", 8);
    model_plan_mixed(&m, "mixed");
    model_start(&m);
    for (int i = 0; i < 3; i++) {
      const fsdp_sync sync = kinds[rest % 3];
      rest /= 3;
      micro_batch(sync, i == 0 ? KEEPS : rest % NUM_CLEARS);
      if (i > 0) rest /= NUM_CLEARS;
    }
    micro_batch(FSDP_SYNC_REDUCE, KEEPS);
    const int64_t nbytes = 8 * 4 + 8 * 4 + 8 * 2;
    CHECK_I64(grad_nbytes(), nbytes);
    model_zero_grad(&m);
    forward();
    CHECK_I64(grad_nbytes(), 0);
    backward();
    model_check_grads(&m);
    CHECK_I64(grad_nbytes(), nbytes);
    CHECK_I64(model_stats(&m).arena.held_nbytes, 0);
    model_fini(&m);
    if (check_num_failures > num_failures) printf("  pattern %d\n", pattern);
  }
}

static void test_accumulation_patterns(void) {
  model_options options = model_default_options();
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
static void test_not_freed_while_unsharded_ones_are_held(void) {
  static const fsdp_sync kinds[] = {FSDP_SYNC_NONE, FSDP_SYNC_SHARD};
  for (int i = 0; i < 2; i++) {
    model_start_tree(&m, NULL, 0);
    micro_batch(FSDP_SYNC_REDUCE, KEEPS);
    CHECK(!fsdp_unit_holds_grads(m.units[0].unit));
    micro_batch(kinds[i], KEEPS);
    CHECK(fsdp_unit_holds_grads(m.units[0].unit));
    model_zero_grad(&m);
    recorder_clear(m.device);
    forward();
    CHECK(!has_line("grads_"));
    CHECK_I64(grad_nbytes(), 4 * 4);
    CHECK_I64(model_pre_backward(&m, 0, NULL), FSDP_OK);
    CHECK(has_line(i == 0 ? "take_grads root unsharded\ngrads_free root\n"
                          : "take_grads root\ngrads_free root\n"));
    CHECK_I64(grad_nbytes(), 0);
    fsdp_engine_set_sync(m.engine, FSDP_SYNC_REDUCE);
    CHECK_I64(model_give_grads(&m, 0, NULL), FSDP_OK);
    CHECK_I64(model_finish(&m, NULL), FSDP_OK);
    model_check_grads(&m);
    model_fini(&m);
  }
}

/* --- Made anew ----------------------------------------------------------- */

/* A segment that takes part for the first time while the others are added to:
 * what it is added to must be zero. */
static void test_zeros_for_a_segment_that_is_unfrozen(void) {
  for (int offloads = 0; offloads < 2; offloads++) {
    model_options options = model_default_options();
    options.offloads = offloads != 0;
    model_init(&m, &options);
    model_plan_mixed(&m, "u");
    model_start(&m);
    fsdp_unit *unit = m.units[0].unit;
    CHECK_I64(fsdp_unit_set_trainable(unit, 1, true, NULL), FSDP_OK);
    model_step(&m);
    CHECK_I64(fsdp_unit_set_trainable(unit, 1, false, NULL), FSDP_OK);
    model_zero_grad(&m);
    model_step(&m); /* freed, and made without segment 1 */
    CHECK_I64(grad_nbytes(), 8 * 4 + 8 * 2);
    CHECK_I64(fsdp_unit_set_trainable(unit, 1, true, NULL), FSDP_OK);
    recorder_clear(m.device);
    model_step(&m);
    CHECK(has_line("grad_shard u 1\ngrad_shard u 2\nrecord e1 compute\n"));
    CHECK(has_line("accumulate reduce 4 f32->f32 x0.5 add"));
    CHECK_I64(grad_nbytes(), 8 * 4 + 4 * 4 + 8 * 2);
    model_check_grads(&m);
    check_frees(1);
    model_fini(&m);
  }
}

/* The same, but a summon asks for the gradients before any reduction. */
static void test_zeros_for_a_summon(void) {
  const fsdp_summon_options with_grads = {.with_grads = true};
  model_init(&m, NULL);
  model_plan_mixed(&m, "u");
  model_start(&m);
  fsdp_unit *unit = m.units[0].unit;
  model_step(&m);
  CHECK_I64(fsdp_unit_set_trainable(unit, 1, true, NULL), FSDP_OK);
  CHECK_I64(fsdp_unit_summon(unit, &with_grads, NULL), FSDP_OK);
  const float *whole = m.units[0].grads[1];
  for (int64_t i = 0; i < 8; i++) CHECK(whole[i] == 0);
  CHECK_I64(fsdp_unit_dismiss(unit, true, NULL), FSDP_OK);
  model_step(&m);
  model_check_grads(&m);
  model_fini(&m);
}

static void other_rank_has_some(void *context, int64_t rank, const void *mine,
                                int64_t nbytes, void *theirs) {
  (void)context;
  (void)rank;
  (void)mine;
  memset(theirs, 1, (size_t)nbytes);
}

/* A summon that could not make one: the next reduction does, in time. */
static void test_summon_that_fails_to_make_one(void) {
  const fsdp_summon_options with_grads = {.with_grads = true};
  bool was_refused = false;
  for (int64_t i = 0;; i++) {
    fsdp_error error = {FSDP_OK, 0, NULL, ""};
    model_start_tree(&m, NULL, 0);
    fsdp_unit *unit = m.units[0].unit;
    recorder_set_answer(m.device, other_rank_has_some, NULL);
    CHECK_I64(fsdp_unit_summon(unit, &with_grads, NULL), FSDP_OK);
    recorder_set_grads_live(m.device, true); /* the user sets some */
    memset(m.units[0].grads[0], 0, 8 * sizeof(float));
    recorder_fail_at(m.device, i);
    const fsdp_status status = fsdp_unit_dismiss(unit, true, &error);
    recorder_fail_at(m.device, -1);
    if (status != FSDP_OK) {
      CHECK_I64(fsdp_unit_dismiss(unit, false, NULL), FSDP_OK);
    }
    if (strstr(error.message, "grad_shard") != NULL) {
      was_refused = true;
      CHECK_I64(grad_nbytes(), 0);
    }
    model_zero_grad(&m);
    model_step(&m);
    model_check_grads(&m);
    model_fini(&m);
    if (status == FSDP_OK) break;
  }
  CHECK(was_refused);
}

/* --- Failures ------------------------------------------------------------ */

static fsdp_status clear_and_train(model *self, fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  for (int i = 0; i < 2; i++) {
    FSDP_TRY(failures_step(self, FSDP_SYNC_REDUCE, error));
    if (i == 0) model_zero_grad(self);
  }
done:
  return status;
}

static void test_every_call_can_fail(void) {
  model_options options = model_default_options();
  failures_every_call_of_steps(&m, &options, NULL, clear_and_train);
  options.offloads = true;
  failures_every_call_of_steps(&m, &options, NULL, clear_and_train);
}

int main(void) {
  static const check_test tests[] = {
      CHECK_TEST(test_freed_when_the_next_iteration_begins),
      CHECK_TEST(test_kept_while_the_user_holds_one),
      CHECK_TEST(test_freed_on_entering_backward),
      CHECK_TEST(test_of_a_unit_that_does_not_run),
      CHECK_TEST(test_of_a_summoned_unit),
      CHECK_TEST(test_accumulation_patterns),
      CHECK_TEST(test_not_freed_while_unsharded_ones_are_held),
      CHECK_TEST(test_zeros_for_a_segment_that_is_unfrozen),
      CHECK_TEST(test_zeros_for_a_summon),
      CHECK_TEST(test_summon_that_fails_to_make_one),
      CHECK_TEST(test_every_call_can_fail),
  };
  return CHECK_RUN(tests);
}
