/*
 * Tests of base/timeline and of what the engine writes into one.
 */
#include "base/alloc.h"
#include "base/timeline.h"
#include "engine_fixture.h"
#include "every_allocation.h"

static int64_t now_ns; /* of the clock of these tests: one more at each look */

static int64_t tick(void) {
  return ++now_ns;
}

static fsdp_timeline *make(int64_t capacity, int64_t max_steps) {
  fsdp_timeline *timeline = NULL;
  now_ns = 0;
  CHECK_OK(fsdp_timeline_create(capacity, max_steps, tick, &timeline, NULL));
  return timeline;
}

/* --- The ring ------------------------------------------------------------ */

TEST(test_the_oldest_are_overwritten) {
  fsdp_timeline *timeline = make(3, 1);
  CHECK_I64(fsdp_timeline_num_entries(timeline), 0);
  for (int64_t i = 0; i < 5; i++) {
    const fsdp_timeline_entry entry = {.begin_ns = i, .end_ns = i};
    fsdp_timeline_add(timeline, &entry);
    CHECK_I64(fsdp_timeline_num_entries(timeline), i < 3 ? i + 1 : 3);
  }
  CHECK_I64(fsdp_timeline_num_lost(timeline), 2);
  for (int64_t i = 0; i < 3; i++) {
    CHECK_I64(fsdp_timeline_get(timeline, i)->begin_ns, i + 2);
  }
  fsdp_timeline_destroy(timeline);
}

TEST(test_full_after_its_steps) {
  fsdp_timeline *timeline = make(8, 2);
  CHECK(fsdp_timeline_begin_step(timeline));
  CHECK(fsdp_timeline_begin_step(timeline));
  CHECK_I64(fsdp_timeline_full_ns(timeline), 0);
  CHECK(!fsdp_timeline_begin_step(timeline));
  CHECK_I64(fsdp_timeline_full_ns(timeline), 3);
  CHECK(!fsdp_timeline_begin_step(timeline)); /* stays so */
  CHECK_I64(fsdp_timeline_full_ns(timeline), 3);
  CHECK_I64(fsdp_timeline_num_steps(timeline), 2);
  CHECK_I64(fsdp_timeline_num_entries(timeline), 2);
  const fsdp_timeline_entry *entry = fsdp_timeline_get(timeline, 1);
  CHECK_I64(entry->kind, FSDP_TIMELINE_STEP);
  CHECK_I64(entry->begin_ns, 2);
  CHECK_I64(entry->end_ns, 2);
  CHECK_I64(entry->unit, -1);
  CHECK_I64(entry->mark_end, -1);
  fsdp_timeline_destroy(timeline);
}

TEST(test_bad_sizes) {
  fsdp_timeline *timeline = NULL;
  fsdp_error error = {0};
  CHECK_FAILS(fsdp_timeline_create(0, 1, tick, &timeline, &error),
              FSDP_INVALID_ARGUMENT, error.message, "..0 entries");
  CHECK_FAILS(fsdp_timeline_create(1, 0, tick, &timeline, &error),
              FSDP_INVALID_ARGUMENT, error.message, "..0 steps");
  CHECK(timeline == NULL);
  fsdp_timeline_destroy(NULL);
}

static fsdp_status create(void *context, fsdp_error *error) {
  fsdp_timeline *timeline = NULL;
  const fsdp_status status = fsdp_timeline_create(4, 1, tick, &timeline, error);
  (void)context;
  CHECK((timeline != NULL) == (status == FSDP_OK));
  fsdp_timeline_destroy(timeline);
  return status;
}

TEST(test_every_allocation_can_fail) {
  CHECK_I64(every_allocation(create, NULL), 2);
}

TEST(test_every_kind_has_a_name) {
  for (int i = 0; i < FSDP_NUM_TIMELINE_KINDS; i++) {
    CHECK(fsdp_timeline_kind_name(i) != NULL);
    for (int j = 0; j < i; j++) {
      CHECK(strcmp(fsdp_timeline_kind_name(i), fsdp_timeline_kind_name(j)) !=
            0);
    }
  }
  CHECK(fsdp_timeline_kind_name(-1) == NULL);
  CHECK(fsdp_timeline_kind_name(FSDP_NUM_TIMELINE_KINDS) == NULL);
}

/* --- What an engine writes ----------------------------------------------- */

static fsdp_timeline *ring; /* each test makes and frees it */

static void start(int64_t max_steps) {
  ring = make(256, max_steps);
  CHECK_OK(fsdp_engine_set_timeline(m.engine, ring, NULL));
}

static void end(void) {
  CHECK_OK(fsdp_engine_set_timeline(m.engine, NULL, NULL));
  fsdp_timeline_destroy(ring);
}

/* One line an entry: kind, unit, flags. Steps are left out. */
static const char *text_of(const fsdp_timeline *timeline) {
  static char text[1 << 14];
  size_t used = 0;
  text[0] = '\0';
  for (int64_t i = 0; i < fsdp_timeline_num_entries(timeline); i++) {
    const fsdp_timeline_entry *entry = fsdp_timeline_get(timeline, i);
    if (entry->kind == FSDP_TIMELINE_STEP) continue;
    used += (size_t)snprintf(
        text + used, sizeof text - used, "%s %s%s%s%s\n",
        fsdp_timeline_kind_name(entry->kind),
        entry->unit < 0 ? "-" : m.units[entry->unit].name,
        (entry->flags & FSDP_TIMELINE_IS_AHEAD) != 0 ? " ahead" : "",
        (entry->flags & FSDP_TIMELINE_IS_KEPT) != 0 ? " kept" : "",
        (entry->flags & FSDP_TIMELINE_IS_UNUSED) != 0 ? " unused" : "");
  }
  return text;
}

/* Inner spans stand before the ones around them: they end first. */
TEST(test_a_step) {
  model_start_tree(&m, NULL, 2);
  start(1);
  PLAY("forward; backward");
  CHECK_LINES(
      text_of(ring),
      "all_gather root; unshard root; wait_unshard root; all_gather a; "
      "unshard a; wait_unshard a; reshard a; all_gather b; unshard b; "
      "wait_unshard b; reshard b; all_gather b; "
      /* root's backward begins: b is next */
      "unshard b ahead; wait_unshard root kept; all_gather a; "
      "unshard a ahead; wait_unshard b ahead; reshard b; reduce_scatter b; "
      "reduce b; wait_unshard a ahead; reshard a; reduce_scatter a; reduce a; "
      "reshard root; reduce_scatter root; reduce root; wait_reduces -");
  CHECK_I64(fsdp_timeline_num_steps(ring), 1);
  end();
}

TEST(test_spans_have_times_and_sizes) {
  model_start_tree(&m, NULL, 1);
  start(1);
  PLAY("eval");
  int64_t last_ns = 0;
  for (int64_t i = 0; i < fsdp_timeline_num_entries(ring); i++) {
    const fsdp_timeline_entry *entry = fsdp_timeline_get(ring, i);
    CHECK(entry->begin_ns > 0 && entry->begin_ns <= entry->end_ns);
    CHECK(entry->end_ns > last_ns); /* in the order of their ends */
    last_ns = entry->end_ns;
    if (entry->kind == FSDP_TIMELINE_ALL_GATHER) {
      /* Shards of 4 (root) and 8 (a) floats, two ranks. */
      CHECK_I64(entry->nbytes, entry->unit == 0 ? 32 : 64);
      CHECK_I64(entry->sequence, entry->unit);
    } else if (entry->kind == FSDP_TIMELINE_RESHARD) {
      CHECK_I64(entry->sequence, -1);
      /* What is still held, in blocks of 256 bytes or more. */
      CHECK((entry->nbytes > 0) == (entry->unit == 1));
    }
    CHECK_I64(entry->mark_begin, -1); /* the recorder has no marks */
  }
  end();
}

TEST(test_an_unused_prefetch) {
  model_start_tree(&m, WITH(.forward_prefetch = true), 2);
  PLAY("eval"); /* learns the order */
  start(2);
  PLAY("enter root; leave_eval root"); /* a does not run */
  CHECK_LINES(text_of(ring),
              "all_gather root; unshard root; all_gather a; unshard a ahead; "
              "wait_unshard root; reshard root; reshard a unused");
  end();
}

TEST(test_replicas) {
  model_start_tree(&m, WITH(.num_replicas = 2), 0);
  start(1);
  PLAY("step");
  CHECK(strstr(text_of(ring),
               "reduce_scatter root\nall_reduce root\nreduce root\n") != NULL);
  end();
}

TEST(test_a_hook) {
  model_start_tree(&m, NULL, 0);
  fsdp_unit_get_settings(m.units[0].unit)->has_reduce_hook = true;
  start(1);
  PLAY("step");
  CHECK(strstr(text_of(ring), "reduce_hook root\nreduce root\n") != NULL);
  end();
}

TEST(test_nothing_after_the_last_step) {
  model_start_tree(&m, NULL, 1);
  start(1);
  PLAY("step");
  CHECK(fsdp_engine_timeline(m.engine) == ring);
  const int64_t num_entries = fsdp_timeline_num_entries(ring);
  PLAY("zero_grad; step");
  CHECK(fsdp_engine_timeline(m.engine) == NULL);
  CHECK_I64(fsdp_timeline_num_entries(ring), num_entries);
  CHECK(fsdp_timeline_full_ns(ring) > 0);
  end();
}

TEST(test_not_in_the_middle_of_a_step) {
  fsdp_error error = {0};
  model_start_tree(&m, NULL, 1);
  ring = make(8, 1);
  PLAY("enter root");
  CHECK_FAILS(fsdp_engine_set_timeline(m.engine, ring, &error),
              FSDP_INVALID_STATE, error.message, "..before forward");
  CHECK(fsdp_engine_timeline(m.engine) == NULL);
  PLAY("leave_eval root");
  end();
}

/* Indices would mean other units. */
TEST(test_a_unit_that_leaves_ends_it) {
  model_start_tree(&m, NULL, 1);
  start(4);
  PLAY("step; zero_grad; destroy a");
  CHECK(fsdp_engine_timeline(m.engine) == NULL);
  end();
}

/* --- Marks --------------------------------------------------------------- */

static char marked_lanes[256]; /* a letter each */
static int32_t num_marks;

static int32_t mark(void *context, fsdp_lane lane) {
  (void)context;
  marked_lanes[num_marks] = "CURPH"[lane];
  return num_marks++;
}

/* A unit on a device that marks its lanes. */
static void start_marked(void) {
  model_init(&m, NULL);
  m.ops.mark = mark;
  num_marks = 0;
  memset(marked_lanes, 0, sizeof marked_lanes);
  model_plan_simple(&m, "root", 4);
  model_start(&m);
}

TEST(test_marks_are_on_the_lane_that_works) {
  start_marked();
  CHECK_I64(num_marks, 0); /* nothing is recorded */
  start(1);
  PLAY("step");
  CHECK_TEXT(marked_lanes,
             "UU"   /* all_gather */
             "CC"   /* COMPUTE waits for it */
             "CC"   /* backward: kept */
             "CC"   /* reshard */
             "RR"   /* reduce_scatter */
             "CC"); /* COMPUTE waits for it */
  for (int64_t i = 0; i < fsdp_timeline_num_entries(ring); i++) {
    const fsdp_timeline_entry *entry = fsdp_timeline_get(ring, i);
    const bool has_marks = entry->kind != FSDP_TIMELINE_STEP &&
                           entry->kind != FSDP_TIMELINE_UNSHARD &&
                           entry->kind != FSDP_TIMELINE_REDUCE;
    CHECK((entry->mark_begin >= 0) == has_marks);
    CHECK((entry->mark_end > entry->mark_begin) == has_marks);
  }
  end();
}

/* They have the bytes that they are given, and marks on COMPUTE. */
TEST(test_rounds_of_whole_parameters) {
  int32_t before = 0;
  start_marked();
  const fsdp_timeline_kind kind = FSDP_TIMELINE_STEP_WHOLES;
  CHECK_I64(fsdp_engine_begin_wholes(m.engine, kind, &before), 0);
  CHECK_I64(before, -1); /* nothing is recorded */
  fsdp_engine_end_wholes(m.engine, kind, 0, before, 64);
  start(1);
  const int64_t begin_ns = fsdp_engine_begin_wholes(m.engine, kind, &before);
  fsdp_engine_end_wholes(m.engine, kind, begin_ns, before, 64);
  CHECK_I64(fsdp_timeline_num_entries(ring), 1);
  CHECK_LINES(text_of(ring), "step_wholes -");
  CHECK_TEXT(marked_lanes, "CC");
  const fsdp_timeline_entry *entry = fsdp_timeline_get(ring, 0);
  CHECK_I64(entry->nbytes, 64);
  CHECK_I64(entry->sequence, -1);
  CHECK_I64(entry->begin_ns, begin_ns);
  CHECK(entry->mark_end > entry->mark_begin);
  end();
}
