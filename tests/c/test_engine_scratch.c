/*
 * Tests of runtime/: the scratch blocks of reductions. Two of them take turns,
 * whatever the number of units.
 */
#include "base/alloc.h"
#include "engine_failures.h"

/* The scratch block of each reduction on the tape, in order: "b3 b4 ". */
static const char *turns(void) {
  static char text[512];
  const char *line = recorder_tape(m.device);
  text[0] = '\0';
  while ((line = strstr(line, " scratch ")) != NULL) {
    line += strlen(" scratch ");
    strncat(text, line, strcspn(line, "+\n"));
    strcat(text, " ");
  }
  PLAY("clear");
  return text;
}

static void step(void) {
  PLAY("zero_grad; optimizer; step; check_grads");
}

static int64_t scratch_nbytes(void) {
  return model_stats(&m).scratch_nbytes;
}

/* --- Turns --------------------------------------------------------------- */

/* c, b, a and the root are reduced, in this order; c has the largest need. */
TEST(test_two_blocks_take_turns) {
  model_start_tree(&m, WITH(.rank = 1, .wants_scratch = true), 3);
  PLAY("show_memory");
  CHECK_I64(scratch_nbytes(), 0);
  step();
  CHECK_TEXT(turns(), "b11 b14 b11 b14 ");
  CHECK_I64(scratch_nbytes(), 2 * 16 * 4);
  for (int i = 0; i < 3; i++) step();
  CHECK_TEXT(turns(), "b11 b14 b11 b14 b11 b14 b11 b14 b11 b14 b11 b14 ");
  CHECK_I64(scratch_nbytes(), 2 * 16 * 4);
  CHECK_I64(recorder_live_nbytes(m.device),
            model_stats(&m).arena.nbytes + scratch_nbytes());
}

/* Of one unit the second step uses the second block. Each use waits for the
 * one before it, and says when it is over. */
TEST(test_one_unit) {
  model_start_tree(&m, WITH(.wants_scratch = true), 0);
  PLAY("show_memory");
  step();
  CHECK_TEXT(turns(), "b3 ");
  CHECK_I64(scratch_nbytes(), 16);
  step();
  CHECK_TEXT(turns(), "b6 ");
  CHECK_I64(scratch_nbytes(), 2 * 16);
  step();
  CHECK_TAPE_HAS(
      "wait reduce e1; wait reduce e8; group_begin reduce g0; "
      "reduce_scatter reduce g0 4 f32 b8 scratch b3; group_end reduce g0; "
      "record e8 reduce; accumulate");
  CHECK_TEXT(turns(), "b3 ");
  step();
  CHECK_TEXT(turns(), "b6 ");
  CHECK_I64(scratch_nbytes(), 2 * 16);
}

/* However many equal layers: two blocks, each as large as one layer. */
TEST(test_does_not_grow_with_depth) {
  static const char *const names[] = {"root", "a", "b", "c", "d", "e", "f"};
  for (int64_t num_units = 2; num_units < 8; num_units++) {
    model_init(&m, WITH(.wants_scratch = true));
    for (int64_t i = 0; i < num_units; i++) {
      model_plan_simple(&m, names[i], 64);
    }
    model_start(&m);
    for (int i = 0; i < 3; i++) {
      step();
      CHECK_I64(scratch_nbytes(), 2 * 64 * 4);
    }
  }
}

/* Segments lie at multiples of 256 bytes, as in the gradient block. */
TEST(test_segments_of_one_unit) {
  model_open(WITH(.rank = 1, .wants_scratch = true), "u mixed");
  PLAY("show_memory");
  step();
  CHECK_I64(scratch_nbytes(), 256 + 8 * 2);
  CHECK_TAPE_HAS(
      "reduce_scatter reduce g0 8 f32 b2 scratch b3; "
      "reduce_scatter reduce g0 8 bf16 b2+256 scratch b3+256;");
}

/* --- How large ----------------------------------------------------------- */

/* The root is reduced last and needs the most: the others' blocks are large
 * enough for it at once. */
TEST(test_as_large_as_the_largest_need) {
  model_open(WITH(.wants_scratch = true), "root 64; a 4");
  step();
  CHECK_I64(scratch_nbytes(), 2 * 64 * 4);
  CHECK_I64(recorder_live_nbytes(m.device),
            model_stats(&m).arena.nbytes + scratch_nbytes());
}

/* A larger unit joins: a block that is too small for it is replaced. */
TEST(test_grows) {
  fsdp_segment_options segments[MODEL_MAX_SEGMENTS];
  model_init(&m, WITH(.rank = 1, .wants_scratch = true));
  model_plan_simple(&m, "root", 4);
  model_plan_simple(&m, "a", 64);
  m.num_units = 1;
  model_start(&m);
  for (int i = 0; i < 2; i++) step();
  CHECK_I64(scratch_nbytes(), 2 * 16);
  m.num_units = 2;
  const fsdp_unit_options joining = model_unit_options(&m, 1, segments);
  CHECK_OK(fsdp_unit_create(&joining, &m.units[1].unit, NULL));
  CHECK_OK(fsdp_engine_add_unit(m.engine, m.units[1].unit, NULL));
  PLAY("show_memory; clear");
  step(); /* a, root */
  CHECK_TAPE_HAS(
      "wait compute e8; free 16 b3; alloc 256 b12; "
      "record e1 compute; wait reduce e1;");
  CHECK_TEXT(turns(), "b12 b6 ");
  CHECK_I64(scratch_nbytes(), 256 + 16);
  PLAY("sync reduce; enter root"); /* the root alone */
  PLAY("leave root; pre_backward root; grads root; finish");
  step(); /* now a meets the other one */
  CHECK_TEXT(turns(), "b12 b22 b12 ");
  CHECK_I64(scratch_nbytes(), 2 * 256);
  CHECK_I64(recorder_live_nbytes(m.device),
            model_stats(&m).arena.nbytes + scratch_nbytes());
  /* They outlive the unit that needed them, and go with the engine. */
  PLAY("destroy a");
  CHECK_I64(scratch_nbytes(), 2 * 256);
}

/* Nothing of it where nothing is reduce-scattered. */
TEST(test_nobody_needs_it) {
  for (int i = 0; i < 3; i++) {
    model_options options = {.wants_scratch = true};
    if (i == 0) options.wants_scratch = false;
    if (i == 1) options.world_size = 1;
    if (i == 1) options.num_replicas = 2;
    model_start_tree(&m, &options, 1);
    for (int64_t unit = 0; i == 2 && unit < 2; unit++) {
      fsdp_unit_get_settings(m.units[unit].unit)->has_reduce_hook = true;
    }
    for (int j = 0; j < 2; j++) step();
    CHECK_I64(scratch_nbytes(), 0);
  }
}

/* A unit that cannot be unfrozen needs no more than before. The arena's book of
 * clients grows with one of the numbers of units. */
TEST(test_unfreezing_fails) {
  static const char *const names[] = {"root", "a", "b", "c", "d", "e", "f"};
  int64_t num_refused = 0;
  for (int64_t num_units = 1; num_units < 6; num_units++) {
    model_init(&m, WITH(.wants_scratch = true));
    for (int64_t i = 0; i < num_units; i++) model_plan_simple(&m, names[i], 4);
    model_plan_units("frozen (128) frozen; too (128) frozen");
    model_start(&m);
    fsdp_unit *unit = m.units[num_units].unit;
    for (int i = 0; i < 3; i++) {
      fsdp_alloc_fail_at(0);
      const fsdp_status status = fsdp_unit_set_trainable(unit, 0, true, NULL);
      fsdp_alloc_fail_at(-1);
      if (status == FSDP_OK) break;
      CHECK_I64(status, FSDP_OUT_OF_MEMORY);
      num_refused++;
    }
    CHECK_OK(fsdp_unit_set_trainable(unit, 0, true, NULL));
    step();
    CHECK_I64(scratch_nbytes(), 2 * 64 * 4);
  }
  CHECK(num_refused > 0);
}

/* --- Failures ------------------------------------------------------------ */

TEST(test_every_call_can_fail) {
  model_options options = {.wants_scratch = true};
  failures_every_call_of_steps(&options, NULL, failures_train);
  options.num_replicas = 2;
  options.offloads = true;
  failures_every_call_of_steps(&options, NULL, failures_train);
}

/* Nobody resets: the engine goes, with a reduction that was not complete. */
TEST(test_every_call_can_fail_before_the_end) {
  for (int num_before = 0; num_before < 2; num_before++) {
    for (int64_t i = 0;; i++) {
      const int64_t num_failures = check_num_failures;
      fsdp_error error = {0};
      failures_plan(WITH(.rank = 1, .wants_scratch = true));
      model_start(&m);
      for (int j = 0; j < num_before; j++) step();
      recorder_fail_at(m.device, i);
      const fsdp_status status = model_try("step", &error);
      recorder_fail_at(m.device, -1);
      model_fini(&m); /* finds races, too */
      if (check_num_failures > num_failures) {
        printf("  call %" PRId64 " after %d steps: %s\n", i, num_before,
               error.message);
      }
      if (status == FSDP_OK) break;
    }
  }
}
