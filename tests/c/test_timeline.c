/*
 * Tests of base/timeline and of what the engine writes into one.
 */
#include "base/alloc.h"
#include "base/timeline.h"
#include "engine_fixture.h"

static int64_t now_ns; /* of the clock of these tests: one more at each look */

static int64_t tick(void) {
  return ++now_ns;
}

static fsdp_timeline *make(int64_t capacity, int64_t max_steps) {
  fsdp_timeline *timeline = NULL;
  now_ns = 0;
  CHECK_I64(fsdp_timeline_create(capacity, max_steps, tick, &timeline, NULL),
            FSDP_OK);
  return timeline;
}

/* --- The ring ------------------------------------------------------------ */

static void test_the_oldest_are_overwritten(void) {
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

static void test_full_after_its_steps(void) {
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

static void test_bad_sizes(void) {
  fsdp_timeline *timeline = NULL;
  fsdp_error error = {0};
  CHECK_I64(fsdp_timeline_create(0, 1, tick, &timeline, &error),
            FSDP_INVALID_ARGUMENT);
  CHECK(strstr(error.message, "0 entries") != NULL);
  CHECK_I64(fsdp_timeline_create(1, 0, tick, &timeline, &error),
            FSDP_INVALID_ARGUMENT);
  CHECK(strstr(error.message, "0 steps") != NULL);
  CHECK(timeline == NULL);
  fsdp_timeline_destroy(NULL);
}

static void test_every_allocation_can_fail(void) {
  for (int64_t i = 0;; i++) {
    fsdp_timeline *timeline = NULL;
    fsdp_error error = {0};
    fsdp_alloc_fail_at(i);
    const fsdp_status status =
        fsdp_timeline_create(4, 1, tick, &timeline, &error);
    fsdp_alloc_fail_at(-1);
    if (status == FSDP_OK) {
      fsdp_timeline_destroy(timeline);
      CHECK_I64(i, 2);
      return;
    }
    CHECK_I64(status, FSDP_OUT_OF_MEMORY);
    CHECK(timeline == NULL);
    CHECK_I64(fsdp_alloc_live(), 0);
  }
}

static void test_every_kind_has_a_name(void) {
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

static model m;             /* each test makes and frees it */
static fsdp_timeline *ring; /* likewise */

static void start(int64_t max_steps) {
  ring = make(256, max_steps);
  CHECK_I64(fsdp_engine_set_timeline(m.engine, ring, NULL), FSDP_OK);
}

static void end(void) {
  CHECK_I64(fsdp_engine_set_timeline(m.engine, NULL, NULL), FSDP_OK);
  fsdp_timeline_destroy(ring);
  model_fini(&m);
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
static void test_a_step(void) {
  model_start_tree(&m, NULL, 2);
  start(1);
  CHECK_I64(model_forward(&m, true, NULL), FSDP_OK);
  CHECK_I64(model_backward(&m, NULL), FSDP_OK);
  CHECK_TEXT(text_of(ring),
             "all_gather root\n"
             "unshard root\n"
             "wait_unshard root\n"
             "all_gather a\n"
             "unshard a\n"
             "wait_unshard a\n"
             "reshard a\n"
             "all_gather b\n"
             "unshard b\n"
             "wait_unshard b\n"
             "reshard b\n"
             "all_gather b\n" /* root's backward begins: b is next */
             "unshard b ahead\n"
             "wait_unshard root kept\n"
             "all_gather a\n"
             "unshard a ahead\n"
             "wait_unshard b ahead\n"
             "reshard b\n"
             "reduce_scatter b\n"
             "reduce b\n"
             "wait_unshard a ahead\n"
             "reshard a\n"
             "reduce_scatter a\n"
             "reduce a\n"
             "reshard root\n"
             "reduce_scatter root\n"
             "reduce root\n"
             "wait_reduces -\n");
  CHECK_I64(fsdp_timeline_num_steps(ring), 1);
  end();
}

static void test_spans_have_times_and_sizes(void) {
  model_start_tree(&m, NULL, 1);
  start(1);
  CHECK_I64(model_forward(&m, false, NULL), FSDP_OK);
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

static void test_an_unused_prefetch(void) {
  model_options options = model_default_options();
  options.forward_prefetch = true;
  model_start_tree(&m, &options, 2);
  CHECK_I64(model_forward(&m, false, NULL), FSDP_OK); /* learns the order */
  start(2);
  CHECK_I64(model_enter(&m, 0, NULL), FSDP_OK);
  CHECK_I64(model_leave(&m, 0, false, NULL), FSDP_OK); /* a does not run */
  CHECK_TEXT(text_of(ring),
             "all_gather root\n"
             "unshard root\n"
             "all_gather a\n"
             "unshard a ahead\n"
             "wait_unshard root\n"
             "reshard root\n"
             "reshard a unused\n");
  end();
}

static void test_replicas(void) {
  model_options options = model_default_options();
  options.num_replicas = 2;
  model_start_tree(&m, &options, 0);
  start(1);
  model_step(&m);
  CHECK(strstr(text_of(ring),
               "reduce_scatter root\nall_reduce root\nreduce root\n") != NULL);
  end();
}

static void test_a_hook(void) {
  model_start_tree(&m, NULL, 0);
  fsdp_unit_set_reduce_hook(m.units[0].unit, true);
  start(1);
  model_step(&m);
  CHECK(strstr(text_of(ring), "reduce_hook root\nreduce root\n") != NULL);
  end();
}

static void test_nothing_after_the_last_step(void) {
  model_start_tree(&m, NULL, 1);
  start(1);
  model_step(&m);
  CHECK(fsdp_engine_timeline(m.engine) == ring);
  const int64_t num_entries = fsdp_timeline_num_entries(ring);
  model_zero_grad(&m);
  model_step(&m);
  CHECK(fsdp_engine_timeline(m.engine) == NULL);
  CHECK_I64(fsdp_timeline_num_entries(ring), num_entries);
  CHECK(fsdp_timeline_full_ns(ring) > 0);
  end();
}

static void test_not_in_the_middle_of_a_step(void) {
  fsdp_error error = {0};
  model_start_tree(&m, NULL, 1);
  ring = make(8, 1);
  CHECK_I64(model_enter(&m, 0, NULL), FSDP_OK);
  CHECK_I64(fsdp_engine_set_timeline(m.engine, ring, &error),
            FSDP_INVALID_STATE);
  CHECK(strstr(error.message, "before forward") != NULL);
  CHECK(fsdp_engine_timeline(m.engine) == NULL);
  CHECK_I64(model_leave(&m, 0, false, NULL), FSDP_OK);
  end();
}

/* Indices would mean other units. */
static void test_a_unit_that_leaves_ends_it(void) {
  model_start_tree(&m, NULL, 1);
  start(4);
  model_step(&m);
  model_zero_grad(&m);
  fsdp_unit_destroy(m.units[1].unit);
  m.units[1].unit = NULL;
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

static void test_marks_are_on_the_lane_that_works(void) {
  model_init(&m, NULL);
  m.ops.mark = mark;
  num_marks = 0;
  memset(marked_lanes, 0, sizeof marked_lanes);
  model_plan_simple(&m, "root", 4);
  model_start(&m);
  CHECK_I64(num_marks, 0); /* nothing is recorded */
  start(1);
  model_step(&m);
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

int main(void) {
  static const check_test tests[] = {
      CHECK_TEST(test_the_oldest_are_overwritten),
      CHECK_TEST(test_full_after_its_steps),
      CHECK_TEST(test_bad_sizes),
      CHECK_TEST(test_every_allocation_can_fail),
      CHECK_TEST(test_every_kind_has_a_name),
      CHECK_TEST(test_a_step),
      CHECK_TEST(test_spans_have_times_and_sizes),
      CHECK_TEST(test_an_unused_prefetch),
      CHECK_TEST(test_replicas),
      CHECK_TEST(test_a_hook),
      CHECK_TEST(test_nothing_after_the_last_step),
      CHECK_TEST(test_not_in_the_middle_of_a_step),
      CHECK_TEST(test_a_unit_that_leaves_ends_it),
      CHECK_TEST(test_marks_are_on_the_lane_that_works),
  };
  return CHECK_RUN(tests);
}
