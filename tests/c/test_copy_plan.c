/*
 * Tests of state/copy_plan: literal plans, every failure, and random ones
 * against the stupid oracle, which moves one element at a time.
 */
#include "base/alloc.h"
#include "check.h"
#include "placement_fixture.h"
#include "state/copy_plan.h"

/* --- Plans --------------------------------------------------------------- */

static const char *text_of_plan(const fsdp_copy_plan *plan) {
  static char text[4096];
  size_t used = 0;
  text[0] = '\0';
  for (int64_t i = 0; i < fsdp_copy_plan_num_copies(plan); i++) {
    const fsdp_copy *copy = &fsdp_copy_plan_copies(plan)[i];
    used += (size_t)snprintf(
        text + used, sizeof text - used,
        "%" PRId64 " %" PRId64 " -> %" PRId64 " %" PRId64 " x %" PRId64 "\n",
        copy->source_buffer, copy->source_offset, copy->target_buffer,
        copy->target_offset, copy->numel);
  }
  for (int64_t i = 0; i < fsdp_copy_plan_num_missing(plan); i++) {
    const fsdp_param_range *range = &fsdp_copy_plan_missing(plan)[i];
    used += (size_t)snprintf(text + used, sizeof text - used,
                             "missing %" PRId64 " [%" PRId64 ", %" PRId64 ")\n",
                             range->param, range->in_param.begin,
                             range->in_param.end);
  }
  return text;
}

/* Takes the placements. */
static void check_plan(fsdp_placement *source, fsdp_placement *target,
                       int64_t numel, const char *expected) {
  fsdp_copy_plan *plan = NULL;
  CHECK_I64(fsdp_copy_plan_create(source, target, &plan, NULL), FSDP_OK);
  fsdp_placement_destroy(target);
  fsdp_placement_destroy(source);
  CHECK_TEXT(text_of_plan(plan), expected);
  CHECK_I64(fsdp_copy_plan_numel(plan), numel);
  fsdp_copy_plan_destroy(plan);
}

static void test_header_picture(void) {
  fsdp_flat_layout *layout = placement_picture();
  const fsdp_piece whole[] = {{0, {0, 5}, 0, 0}, {2, {0, 3}, 2, 0}};
  check_plan(place_flat(layout, 0, 0, 2), place(whole, 2), 8,
             "0 0 -> 0 0 x 4\n1 0 -> 0 4 x 1\n1 1 -> 2 0 x 3\n");
  check_plan(place(whole, 2), place_flat(layout, 0, 0, 2), 8,
             "0 0 -> 0 0 x 4\n0 4 -> 1 0 x 1\n2 0 -> 1 1 x 3\n");
  /* The same on both sides: one copy per shard. */
  check_plan(place_flat(layout, 0, 0, 2), place_flat(layout, 0, 0, 2), 8,
             "0 0 -> 0 0 x 4\n1 0 -> 1 0 x 4\n");
  fsdp_flat_layout_destroy(layout);
  fsdp_copy_plan_destroy(NULL);
  CHECK_I64(fsdp_alloc_live(), 0);
}

static void test_missing_ranges(void) {
  const fsdp_piece source[] = {{1, {2, 4}, 0, 0}, {1, {6, 7}, 0, 2}};
  const fsdp_piece target[] = {{0, {1, 3}, 0, 0},  {0, {3, 5}, 1, 0},
                               {1, {0, 10}, 2, 0}, {1, {1, 9}, 3, 0},
                               {1, {5, 12}, 4, 0}, {2, {0, 1}, 5, 0}};
  check_plan(place(source, 2), place(target, 6), 7,
             "0 0 -> 2 2 x 2\n0 2 -> 2 6 x 1\n0 0 -> 3 1 x 2\n"
             "0 2 -> 3 5 x 1\n0 2 -> 4 1 x 1\n"
             "missing 0 [1, 5)\nmissing 1 [0, 2)\nmissing 1 [4, 6)\n"
             "missing 1 [7, 12)\nmissing 2 [0, 1)\n");
  check_plan(place(NULL, 0), place(target, 1), 0, "missing 0 [1, 3)\n");
  check_plan(place(source, 2), place(NULL, 0), 0, "");
}

static void test_first_replica_wins(void) {
  const fsdp_piece source[] = {{0, {0, 4}, 7, 0},
                               {0, {0, 4}, 8, 0},
                               {0, {2, 6}, 9, 0},
                               {0, {1, 3}, 9, 50}};
  const fsdp_piece target[] = {{0, {0, 6}, 0, 0}};
  check_plan(place(source, 4), place(target, 1), 6,
             "7 0 -> 0 0 x 4\n9 2 -> 0 4 x 2\n");
}

/* Elements wanted twice: in two places, and in one. */
static void test_target_replicas(void) {
  const fsdp_piece source[] = {{0, {0, 8}, 0, 0}};
  const fsdp_piece target[] = {{0, {0, 4}, 1, 0},
                               {0, {2, 6}, 0, 0},
                               {0, {1, 6}, 1, 1},
                               {0, {2, 3}, 1, 2}};
  check_plan(place(source, 1), place(target, 4), 10,
             "0 2 -> 0 0 x 4\n0 0 -> 1 0 x 6\n");
}

static void test_two_elements_in_one_place_are_refused(void) {
  const fsdp_piece source[] = {{0, {0, 9}, 0, 0}, {1, {0, 9}, 1, 0}};
  const fsdp_piece targets[][2] = {{{0, {0, 4}, 2, 5}, {1, {0, 4}, 2, 8}},
                                   {{0, {0, 4}, 2, 8}, {1, {0, 1}, 2, 8}},
                                   {{0, {0, 4}, 2, 5}, {0, {0, 4}, 2, 8}}};
  for (size_t i = 0; i < 3; i++) {
    fsdp_placement *from = place(source, 2);
    fsdp_placement *to = place(targets[i], 2);
    fsdp_copy_plan *plan = NULL;
    fsdp_error error;
    CHECK_I64(fsdp_copy_plan_create(from, to, &plan, &error),
              FSDP_INVALID_ARGUMENT);
    CHECK_TEXT(error.message,
               "target buffer 2 gets different elements at offset 8");
    CHECK(plan == NULL);
    fsdp_placement_destroy(to);
    fsdp_placement_destroy(from);
    CHECK_I64(fsdp_alloc_live(), 0);
  }
}

static void test_too_many_elements_are_refused(void) {
  const fsdp_piece pieces[] = {{0, {0, INT64_MAX}, 0, 0},
                               {1, {0, INT64_MAX}, 1, 0}};
  fsdp_placement *placement = place(pieces, 2);
  fsdp_copy_plan *plan = NULL;
  fsdp_error error;
  CHECK_I64(fsdp_copy_plan_create(placement, placement, &plan, &error),
            FSDP_OVERFLOW);
  CHECK_TEXT(error.message, "elements of 2 copies do not fit in int64");
  CHECK(plan == NULL);
  fsdp_placement_destroy(placement);
}

/* --- Running ------------------------------------------------------------- */

static void check_buffers(const fsdp_copy_plan *plan, const int64_t *sources,
                          int64_t num_sources, const int64_t *targets,
                          int64_t num_targets, const char *message) {
  fsdp_error error = {FSDP_OK, 0, NULL, ""};
  const fsdp_status status =
      fsdp_copy_plan_check(plan, (fsdp_buffer_numels){sources, num_sources},
                           (fsdp_buffer_numels){targets, num_targets}, &error);
  CHECK_I64(status, message[0] == '\0' ? FSDP_OK : FSDP_INVALID_ARGUMENT);
  CHECK_TEXT(error.message, message);
}

static void test_buffers_are_checked(void) {
  const fsdp_piece source[] = {{0, {0, 5}, 1, 2}, {1, {0, 2}, 0, 0}};
  const fsdp_piece target[] = {
      {0, {0, 3}, 0, 1}, {1, {0, 2}, 2, 0}, {0, {3, 5}, 0, 9}};
  fsdp_placement *from = place(source, 2);
  fsdp_placement *to = place(target, 3);
  fsdp_copy_plan *plan = NULL;
  CHECK_I64(fsdp_copy_plan_create(from, to, &plan, NULL), FSDP_OK);
  check_buffers(plan, (int64_t[]){2, 7}, 2, (int64_t[]){11, 0, 2}, 3, "");
  check_buffers(plan, (int64_t[]){2, 4}, 2, (int64_t[]){11, 0, 2}, 3,
                "source buffer 1 has 4 elements, the plan needs 7");
  check_buffers(plan, (int64_t[]){2, 6}, 2, (int64_t[]){11, 0, 2}, 3,
                "source buffer 1 has 6 elements, the plan needs 7");
  check_buffers(plan, (int64_t[]){2, 7}, 2, (int64_t[]){3, 0, 2}, 3,
                "target buffer 0 has 3 elements, the plan needs 11");
  check_buffers(plan, (int64_t[]){2, 7}, 2, (int64_t[]){11, 0, 1}, 3,
                "target buffer 2 has 1 elements, the plan needs 2");
  check_buffers(plan, (int64_t[]){2}, 1, (int64_t[]){11, 0, 2}, 3,
                "the plan has a source buffer 1, given are 1 (an absent one "
                "counts)");
  check_buffers(plan, (int64_t[]){2, 7}, 2, (int64_t[]){11, 0}, 2,
                "the plan has a target buffer 2, given are 2 (an absent one "
                "counts)");
  check_buffers(plan, (int64_t[]){0, -1}, 2, (int64_t[]){0, 0, -1}, 3, "");

  const int16_t long_source[] = {0, 0, 1, 2, 3, 4, 5};
  const int16_t short_source[] = {6, 7};
  int16_t long_target[11] = {0};
  int16_t short_target[2] = {0};
  const void *const sources[] = {short_source, long_source};
  void *const targets[] = {long_target, NULL, short_target};
  void *const absent[] = {NULL, NULL, short_target};
  fsdp_copy_plan_run(plan, sources, absent, sizeof *long_source);
  CHECK(short_target[0] == 6 && short_target[1] == 7);
  fsdp_copy_plan_run(plan, (const void *const[]){NULL, long_source}, targets,
                     sizeof *long_source);
  const int16_t expected[11] = {0, 1, 2, 3, 0, 0, 0, 0, 0, 4, 5};
  CHECK(memcmp(long_target, expected, sizeof expected) == 0);
  fsdp_copy_plan_destroy(plan);
  fsdp_placement_destroy(to);
  fsdp_placement_destroy(from);
  CHECK_I64(fsdp_alloc_live(), 0);
}

/* --- The oracle ---------------------------------------------------------- */

enum { MAX_PIECES = 8, PARAMS = 3, BUFFERS = 3, NUMEL = 24, MAX_OFFSET = 40 };

/* The pieces in random order; targets do not overlap in a buffer. */
static int64_t draw_pieces(uint64_t *seed, bool is_target, fsdp_piece *pieces) {
  const int64_t num = check_random(seed, MAX_PIECES + 1);
  int64_t ends[BUFFERS] = {0};
  for (int64_t i = 0; i < num; i++) {
    const int64_t begin = check_random(seed, NUMEL / 2);
    const int64_t numel = check_random(seed, 6);
    const int64_t buffer = check_random(seed, BUFFERS);
    const int64_t offset =
        is_target ? ends[buffer] : check_random(seed, MAX_OFFSET - 6);
    pieces[i] = (fsdp_piece){
        check_random(seed, PARAMS), {begin, begin + numel}, buffer, offset};
    ends[buffer] += numel; /* at most 8 * 5 */
  }
  return num;
}

/* Where element `index` of `param` counts, or NULL: looks at all pieces. */
static const fsdp_piece *find_piece(const fsdp_piece *pieces, int64_t num,
                                    int64_t param, int64_t index) {
  const fsdp_piece *found = NULL;
  for (int64_t i = 0; i < num; i++) {
    if (pieces[i].param != param || pieces[i].in_param.begin > index ||
        pieces[i].in_param.end <= index) {
      continue;
    }
    if (found == NULL || pieces[i].in_param.begin < found->in_param.begin) {
      found = &pieces[i];
    }
  }
  return found;
}

static bool is_missing(const fsdp_copy_plan *plan, int64_t param,
                       int64_t index) {
  for (int64_t i = 0; i < fsdp_copy_plan_num_missing(plan); i++) {
    const fsdp_param_range *range = &fsdp_copy_plan_missing(plan)[i];
    if (range->param == param && range->in_param.begin <= index &&
        index < range->in_param.end) {
      return true;
    }
  }
  return false;
}

/* Sorted, and nothing that could be one is two. */
static bool check_joined(const fsdp_copy_plan *plan) {
  bool ok = true;
  const fsdp_copy *copies = fsdp_copy_plan_copies(plan);
  for (int64_t i = 1; i < fsdp_copy_plan_num_copies(plan); i++) {
    const fsdp_copy *a = &copies[i - 1];
    const fsdp_copy *b = &copies[i];
    ok &= CHECK(a->target_buffer < b->target_buffer ||
                (a->target_buffer == b->target_buffer &&
                 a->target_offset + a->numel <= b->target_offset));
    ok &= CHECK(!(a->target_buffer == b->target_buffer &&
                  a->target_offset + a->numel == b->target_offset &&
                  a->source_buffer == b->source_buffer &&
                  a->source_offset + a->numel == b->source_offset));
  }
  const fsdp_param_range *missing = fsdp_copy_plan_missing(plan);
  for (int64_t i = 1; i < fsdp_copy_plan_num_missing(plan); i++) {
    ok &= CHECK(missing[i - 1].param < missing[i].param ||
                (missing[i - 1].param == missing[i].param &&
                 missing[i - 1].in_param.end < missing[i].in_param.begin));
  }
  return ok;
}

/* Runs the plan and compares with moving one element at a time. */
static bool check_against_oracle(const fsdp_piece *source, int64_t num_source,
                                 const fsdp_piece *target, int64_t num_target,
                                 const fsdp_copy_plan *plan) {
  static int32_t memory[BUFFERS][MAX_OFFSET];
  static int32_t actual[BUFFERS][MAX_OFFSET];
  static int32_t expected[BUFFERS][MAX_OFFSET];
  const void *sources[BUFFERS];
  void *targets[BUFFERS];
  bool wanted[PARAMS][NUMEL] = {{false}};
  bool ok = check_joined(plan);
  int64_t numel = 0;
  for (int b = 0; b < BUFFERS; b++) {
    sources[b] = memory[b];
    targets[b] = actual[b];
    for (int i = 0; i < MAX_OFFSET; i++) {
      memory[b][i] = 1000 * b + i;
      actual[b][i] = expected[b][i] = -1;
    }
  }
  for (int64_t i = 0; i < num_target; i++) {
    for (int64_t j = target[i].in_param.begin; j < target[i].in_param.end;
         j++) {
      wanted[target[i].param][j] = true;
      const fsdp_piece *from =
          find_piece(source, num_source, target[i].param, j);
      if (from == NULL) continue;
      numel++;
      expected[target[i].buffer]
              [target[i].offset + j - target[i].in_param.begin] =
                  memory[from->buffer][from->offset + j - from->in_param.begin];
    }
  }
  const int64_t numels[BUFFERS] = {MAX_OFFSET, MAX_OFFSET, MAX_OFFSET};
  const fsdp_buffer_numels all = {numels, BUFFERS};
  ok &= CHECK_I64(fsdp_copy_plan_check(plan, all, all, NULL), FSDP_OK);
  fsdp_copy_plan_run(plan, sources, targets, sizeof(int32_t));
  ok &= CHECK(memcmp(actual, expected, sizeof actual) == 0);
  ok &= CHECK_I64(fsdp_copy_plan_numel(plan), numel);
  for (int64_t p = 0; p < PARAMS; p++) {
    for (int64_t j = 0; j < NUMEL; j++) {
      ok &=
          CHECK(is_missing(plan, p, j) ==
                (wanted[p][j] && find_piece(source, num_source, p, j) == NULL));
    }
  }
  return ok;
}

static void test_plans_match_moving_one_element_at_a_time(void) {
  uint64_t seed = 20260101;
  for (int round = 0; round < 20000; round++) {
    const uint64_t seed_of_round = seed;
    fsdp_piece source[MAX_PIECES];
    fsdp_piece target[MAX_PIECES];
    const int64_t num_source = draw_pieces(&seed, false, source);
    const int64_t num_target = draw_pieces(&seed, true, target);
    fsdp_placement *from = place(source, num_source);
    fsdp_placement *to = place(target, num_target);
    fsdp_copy_plan *plan = NULL;
    bool ok = CHECK_I64(fsdp_copy_plan_create(from, to, &plan, NULL), FSDP_OK);
    ok = ok &&
         check_against_oracle(source, num_source, target, num_target, plan);
    fsdp_copy_plan_destroy(plan);
    fsdp_placement_destroy(to);
    fsdp_placement_destroy(from);
    if (!ok) {
      printf("  seed %" PRIu64 "\n", seed_of_round);
      return;
    }
  }
  CHECK_I64(fsdp_alloc_live(), 0);
}

/* --- Allocation failures ------------------------------------------------- */

static void test_every_allocation_of_a_plan_can_fail(void) {
  const fsdp_piece source[] = {{0, {0, 4}, 0, 0}};
  const fsdp_piece target[] = {{0, {0, 5}, 0, 0}};
  fsdp_placement *from = place(source, 1);
  fsdp_placement *to = place(target, 1);
  const int64_t live = fsdp_alloc_live();
  for (int64_t i = 0;; i++) {
    fsdp_copy_plan *plan = NULL;
    fsdp_error error = {FSDP_OK, 0, NULL, ""};
    fsdp_alloc_fail_at(i);
    const fsdp_status status = fsdp_copy_plan_create(from, to, &plan, &error);
    fsdp_alloc_fail_at(-1);
    CHECK((plan != NULL) == (status == FSDP_OK));
    fsdp_copy_plan_destroy(plan);
    CHECK_I64(fsdp_alloc_live(), live);
    if (status == FSDP_OK) {
      CHECK_I64(i, 4); /* the plan, the source, a copy, a missing range */
      break;
    }
    CHECK_I64(status, FSDP_OUT_OF_MEMORY);
    CHECK_I64(error.status, FSDP_OUT_OF_MEMORY);
  }
  fsdp_placement_destroy(to);
  fsdp_placement_destroy(from);
}

int main(void) {
  static const check_test tests[] = {
      CHECK_TEST(test_header_picture),
      CHECK_TEST(test_missing_ranges),
      CHECK_TEST(test_first_replica_wins),
      CHECK_TEST(test_target_replicas),
      CHECK_TEST(test_two_elements_in_one_place_are_refused),
      CHECK_TEST(test_too_many_elements_are_refused),
      CHECK_TEST(test_buffers_are_checked),
      CHECK_TEST(test_plans_match_moving_one_element_at_a_time),
      CHECK_TEST(test_every_allocation_of_a_plan_can_fail),
  };
  return CHECK_RUN(tests);
}
