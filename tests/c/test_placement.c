/*
 * Tests of state/placement: literal placements, every failure, and random ones
 * against the layout's own intersect.
 */
#include "base/alloc.h"
#include "check.h"
#include "every_allocation.h"
#include "placement_fixture.h"

static const fsdp_dtype f32 = {1, 4};
static const fsdp_dtype i64 = {2, 8};

static const char *text_of(const fsdp_placement *placement) {
  static char text[4096];
  size_t used = 0;
  text[0] = '\0';
  for (int64_t i = 0; i < fsdp_placement_num_pieces(placement); i++) {
    const fsdp_piece *piece = &fsdp_placement_pieces(placement)[i];
    used += (size_t)snprintf(text + used, sizeof text - used,
                             "%" PRId64 " [%" PRId64 ", %" PRId64 ") %" PRId64
                             " %" PRId64 "\n",
                             piece->param, piece->in_param.begin,
                             piece->in_param.end, piece->buffer, piece->offset);
  }
  return text;
}

/* Takes the placement. */
static void check_pieces(fsdp_placement *placement, const char *expected) {
  CHECK_TEXT(text_of(placement), expected);
  fsdp_placement_destroy(placement);
}

static fsdp_placement *place_rows(const fsdp_param_rows *params,
                                  int64_t num_params, int64_t num_ranks,
                                  int64_t begin, int64_t end) {
  fsdp_placement *placement = NULL;
  CHECK_OK(fsdp_placement_create_rows(params, num_params, num_ranks,
                                      (fsdp_range){begin, end}, &placement,
                                      NULL));
  return placement;
}

/* --- Placements ---------------------------------------------------------- */

TEST(test_pieces_are_sorted_and_empty_ones_left_out) {
  const fsdp_piece pieces[] = {{1, {2, 4}, 0, 9}, {0, {5, 8}, 1, 1},
                               {0, {0, 5}, 2, 0}, {0, {5, 6}, 0, 7},
                               {1, {2, 2}, 5, 5}, {1, {2, 3}, 4, 4}};
  check_pieces(place(pieces, 6),
               "0 [0, 5) 2 0\n0 [5, 8) 1 1\n0 [5, 6) 0 7\n"
               "1 [2, 4) 0 9\n1 [2, 3) 4 4\n");
  check_pieces(place(NULL, 0), "");
  fsdp_placement_destroy(NULL);
}

/* In their segment, b comes before a. */
TEST(test_shards_of_whole_blocks) {
  const fsdp_param_spec uses[] = {{1, 2, f32, true}, {2, 4, f32, true}};
  const int64_t block_numels[] = {0, 4};
  const fsdp_alignment alignment = {.itemsize = 4};
  fsdp_param_table *table = NULL;
  fsdp_flat_layout *layout = NULL;
  CHECK_OK(fsdp_param_table_create(uses, 2, &table, NULL));
  CHECK_OK(fsdp_flat_layout_create_in_blocks(table, block_numels, 2, alignment,
                                             &layout, NULL));
  check_pieces(place_flat(layout, 0, 0, 2), "0 [0, 2) 1 0\n1 [0, 4) 0 0\n");
  fsdp_flat_layout_destroy(layout);
  fsdp_param_table_destroy(table);
}

TEST(test_shards_of_a_segment) {
  fsdp_flat_layout *layout = placement_picture();
  check_pieces(place_flat(layout, 0, 0, 2),
               "0 [0, 4) 0 0\n0 [4, 5) 1 0\n2 [0, 3) 1 1\n");
  check_pieces(place_flat(layout, 0, 1, 2), "0 [4, 5) 1 0\n2 [0, 3) 1 1\n");
  check_pieces(place_flat(layout, 0, 1, 1), "");
  check_pieces(place_flat(layout, 1, 0, 2), "1 [0, 4) 0 0\n1 [4, 7) 1 0\n");

  const fsdp_param_range ranges[] = {{2, {1, 2}}, {0, {3, 5}}, {0, {0, 0}}};
  fsdp_placement *range = NULL;
  CHECK_OK(
      fsdp_placement_create_flat_range(layout, 0, ranges, 3, &range, NULL));
  check_pieces(range, "0 [3, 4) 0 3\n0 [4, 5) 1 0\n2 [1, 2) 1 2\n");
  fsdp_flat_layout_destroy(layout);
}

/* A shard with padding, one with padding only, and params without elements. */
TEST(test_shards_with_padding) {
  const fsdp_param_spec uses[] = {{1, 0, f32, true},
                                  {2, 5, f32, true},
                                  {3, 0, f32, true},
                                  {4, 1, f32, true}};
  fsdp_flat_layout *layout =
      placement_layout(uses, 4, 4, (fsdp_alignment){16, true, true});
  CHECK_I64(fsdp_flat_layout_segment(layout, 0)->shard_numel, 4);
  check_pieces(place_flat(layout, 0, 0, 4),
               "1 [0, 4) 0 0\n1 [4, 5) 1 0\n3 [0, 1) 2 0\n");
  check_pieces(place_flat(layout, 0, 3, 4), "");
  fsdp_flat_layout_destroy(layout);

  layout = placement_layout(uses, 1, 2, (fsdp_alignment){16, true, true});
  check_pieces(place_flat(layout, 0, 0, 2), ""); /* shard_numel is 0 */
  fsdp_flat_layout_destroy(layout);
}

TEST(test_layout_keeps_its_alignment) {
  const fsdp_param_spec uses[] = {{1, 5, f32, true}};
  fsdp_flat_layout *layout =
      placement_layout(uses, 1, 2, (fsdp_alignment){2, true, false});
  const fsdp_alignment alignment = fsdp_flat_layout_alignment(layout);
  CHECK_I64(alignment.itemsize, 2);
  CHECK(alignment.params && !alignment.shards);
  fsdp_flat_layout_destroy(layout);
}

TEST(test_whole_params_on_ranks) {
  const int64_t numels[] = {5, 0, 3};
  fsdp_placement *placement = NULL;
  CHECK_OK(fsdp_placement_create_on_ranks(numels, 3, (fsdp_range){1, 3},
                                          &placement, NULL));
  int64_t num_pieces = -1;
  CHECK(fsdp_placement_pieces_of(placement, 1, &num_pieces) == NULL);
  CHECK_I64(num_pieces, 0);
  CHECK(fsdp_placement_pieces_of(placement, 3, &num_pieces) == NULL);
  CHECK_I64(num_pieces, 0);
  CHECK_I64(fsdp_placement_pieces_of(placement, 2, &num_pieces)->param, 2);
  CHECK_I64(num_pieces, 2);
  check_pieces(placement,
               "0 [0, 5) 1 0\n0 [0, 5) 2 0\n2 [0, 3) 1 0\n2 [0, 3) 2 0\n");
}

/* 5 rows in chunks of 2, a scalar, nothing in two ways, 2 rows of 3. */
TEST(test_rows) {
  const fsdp_param_rows params[] = {{5, 2}, {1, 1}, {0, 4}, {4, 0}, {2, 3}};
  check_pieces(place_rows(params, 5, 4, 0, 4),
               "0 [0, 4) 0 0\n0 [4, 8) 1 0\n0 [8, 10) 2 0\n"
               "1 [0, 1) 0 4\n4 [0, 3) 0 5\n4 [3, 6) 1 4\n");
  check_pieces(place_rows(params, 5, 4, 1, 2), "0 [4, 8) 1 0\n4 [3, 6) 1 4\n");
  check_pieces(place_rows(params, 5, 4, 3, 4), "");
  check_pieces(place_rows(params, 1, 1, 0, 1), "0 [0, 10) 0 0\n");
}

TEST(test_largest_rows_fit) {
  const fsdp_param_rows params[] = {{INT64_MAX, 1}};
  check_pieces(place_rows(params, 1, 2, 1, 2),
               "0 [4611686018427387904, 9223372036854775807) 1 0\n");
  check_pieces(place_rows(params, 1, INT64_MAX, INT64_MAX - 1, INT64_MAX),
               "0 [9223372036854775806, 9223372036854775807) "
               "9223372036854775806 0\n");
}

/* --- Placements that are refused ----------------------------------------- */

static void check_refused(fsdp_status status, const fsdp_placement *placement,
                          const fsdp_error *error, fsdp_status expected,
                          const char *message) {
  CHECK_I64(status, expected);
  CHECK_I64(error->status, expected);
  CHECK_TEXT(error->message, message);
  CHECK(placement == NULL);
}

static void check_piece_refused(fsdp_piece piece, fsdp_status expected,
                                const char *message) {
  const fsdp_piece pieces[] = {{0, {0, 1}, 0, 0}, piece};
  fsdp_placement *placement = NULL;
  fsdp_error error;
  const fsdp_status status =
      fsdp_placement_create(pieces, 2, &placement, &error);
  check_refused(status, placement, &error, expected, message);
}

TEST(test_wrong_pieces_are_refused) {
  check_piece_refused((fsdp_piece){-1, {0, 1}, 0, 0}, FSDP_INVALID_ARGUMENT,
                      "piece 1 has param -1, buffer 0 and offset 0, need >= 0");
  check_piece_refused((fsdp_piece){0, {0, 1}, -2, 0}, FSDP_INVALID_ARGUMENT,
                      "piece 1 has param 0, buffer -2 and offset 0, need >= 0");
  check_piece_refused((fsdp_piece){0, {0, 1}, 0, -3}, FSDP_INVALID_ARGUMENT,
                      "piece 1 has param 0, buffer 0 and offset -3, need >= 0");
  check_piece_refused((fsdp_piece){0, {-1, 1}, 0, 0}, FSDP_INVALID_ARGUMENT,
                      "piece 1 holds elements [-1, 1), need 0 <= begin <= end");
  check_piece_refused((fsdp_piece){0, {3, 2}, 0, 0}, FSDP_INVALID_ARGUMENT,
                      "piece 1 holds elements [3, 2), need 0 <= begin <= end");
  check_piece_refused((fsdp_piece){0, {3, 5}, 0, INT64_MAX - 1}, FSDP_OVERFLOW,
                      "piece 1 of 2 elements from offset 9223372036854775806 "
                      "does not fit in int64");
}

static void check_range_refused(const fsdp_flat_layout *layout, int64_t segment,
                                fsdp_param_range range, const char *message) {
  fsdp_placement *placement = NULL;
  fsdp_error error;
  const fsdp_status status = fsdp_placement_create_flat_range(
      layout, segment, &range, 1, &placement, &error);
  check_refused(status, placement, &error, FSDP_INVALID_ARGUMENT, message);
}

TEST(test_wrong_parts_of_a_layout_are_refused) {
  fsdp_flat_layout *layout = placement_picture();
  const int64_t live = fsdp_alloc_live();
  fsdp_placement *placement = NULL;
  fsdp_error error;
  fsdp_status status = fsdp_placement_create_flat(layout, 2, (fsdp_range){0, 2},
                                                  &placement, &error);
  check_refused(status, placement, &error, FSDP_INVALID_ARGUMENT,
                "segment is 2, the layout has 2");
  status = fsdp_placement_create_flat(layout, -1, (fsdp_range){0, 2},
                                      &placement, &error);
  check_refused(status, placement, &error, FSDP_INVALID_ARGUMENT,
                "segment is -1, the layout has 2");
  const fsdp_range ranks[] = {{0, 3}, {-1, 1}, {2, 1}};
  for (size_t i = 0; i < 3; i++) {
    status =
        fsdp_placement_create_flat(layout, 0, ranks[i], &placement, &error);
    CHECK_I64(status, FSDP_INVALID_ARGUMENT);
    CHECK(strstr(error.message, "must be within [0, 2)") != NULL);
  }
  check_range_refused(layout, 2, (fsdp_param_range){0, {0, 1}},
                      "segment is 2, the layout has 2");
  check_range_refused(layout, 0, (fsdp_param_range){3, {0, 1}},
                      "param is 3, the layout has 3");
  check_range_refused(layout, 0, (fsdp_param_range){-1, {0, 1}},
                      "param is -1, the layout has 3");
  check_range_refused(layout, 0, (fsdp_param_range){1, {0, 1}},
                      "parameter 1 is in segment 1, not in 0");
  check_range_refused(layout, 0, (fsdp_param_range){2, {0, 4}},
                      "elements [0, 4) are not in parameter 2 of 3 elements");
  check_range_refused(layout, 0, (fsdp_param_range){2, {-1, 2}},
                      "elements [-1, 2) are not in parameter 2 of 3 elements");
  check_range_refused(layout, 0, (fsdp_param_range){2, {2, 1}},
                      "elements [2, 1) are not in parameter 2 of 3 elements");
  CHECK_I64(fsdp_alloc_live(), live);
  fsdp_flat_layout_destroy(layout);
}

static void check_rows_refused(const fsdp_param_rows *params,
                               int64_t num_params, int64_t num_ranks,
                               fsdp_range ranks, fsdp_status expected,
                               const char *message) {
  fsdp_placement *placement = NULL;
  fsdp_error error;
  const fsdp_status status = fsdp_placement_create_rows(
      params, num_params, num_ranks, ranks, &placement, &error);
  check_refused(status, placement, &error, expected, message);
}

TEST(test_wrong_tensors_are_refused) {
  const int64_t numels[] = {3, -1};
  fsdp_placement *placement = NULL;
  fsdp_error error;
  fsdp_status status = fsdp_placement_create_on_ranks(
      numels, 2, (fsdp_range){0, 2}, &placement, &error);
  check_refused(status, placement, &error, FSDP_INVALID_ARGUMENT,
                "parameter 1 has numel -1, need >= 0");
  status = fsdp_placement_create_on_ranks(numels, 1, (fsdp_range){2, 1},
                                          &placement, &error);
  CHECK_I64(status, FSDP_INVALID_ARGUMENT);

  const fsdp_range one = {0, 1};
  const fsdp_param_rows negative[] = {{-1, 2}, {2, -1}};
  check_rows_refused(negative, 1, 0, one, FSDP_INVALID_ARGUMENT,
                     "num_ranks is 0, need >= 1");
  check_rows_refused(negative, 1, 1, (fsdp_range){0, 2}, FSDP_INVALID_ARGUMENT,
                     "ranks [0, 2) must be within [0, 1)");
  check_rows_refused(negative, 1, 1, one, FSDP_INVALID_ARGUMENT,
                     "parameter 0 has -1 rows of 2 elements, need >= 0");
  check_rows_refused(&negative[1], 1, 1, one, FSDP_INVALID_ARGUMENT,
                     "parameter 0 has 2 rows of -1 elements, need >= 0");
  const fsdp_param_rows big[] = {{INT64_MAX, 1}, {1, 1}, {INT64_MAX, 2}};
  check_rows_refused(&big[2], 1, 1, one, FSDP_OVERFLOW,
                     "parameter 0 of 9223372036854775807 rows of 2 elements "
                     "does not fit in int64");
  check_rows_refused(big, 2, 1, one, FSDP_OVERFLOW,
                     "rows up to parameter 1 on rank 0 do not fit in int64");
  check_rows_refused(NULL, 0, INT64_MAX, (fsdp_range){0, INT64_MAX},
                     FSDP_OUT_OF_MEMORY, "rows on 9223372036854775807 ranks");
}

/* --- The oracle ---------------------------------------------------------- */

/* Every placement of a random layout says what the layout's intersect says. */
TEST(test_shards_match_intersect) {
  uint64_t seed = 424242;
  for (int round = 0; round < 2000; round++) {
    const uint64_t seed_of_round = seed;
    fsdp_param_spec uses[6];
    const int64_t num_params = check_random(&seed, 7);
    for (int64_t i = 0; i < num_params; i++) {
      uses[i] =
          (fsdp_param_spec){(uint64_t)i, check_random(&seed, 30),
                            check_random(&seed, 2) == 0 ? f32 : i64, true};
    }
    const int64_t world_size = 1 + check_random(&seed, 6);
    fsdp_flat_layout *layout =
        placement_layout(uses, num_params, world_size,
                         (fsdp_alignment){16, check_random(&seed, 2) == 0,
                                          check_random(&seed, 2) == 0});
    bool ok = true;
    for (int64_t s = 0; s < fsdp_flat_layout_num_segments(layout); s++) {
      const int64_t begin = check_random(&seed, world_size + 1);
      const int64_t end = begin + check_random(&seed, world_size - begin + 1);
      fsdp_placement *flat = place_flat(layout, s, begin, end);
      int64_t num = 0;
      for (int64_t p = 0; p < num_params; p++) {
        if (fsdp_flat_layout_slot(layout, p)->segment != s) continue;
        for (int64_t rank = begin; rank < end; rank++) {
          fsdp_range in_param;
          fsdp_range in_shard;
          fsdp_flat_layout_intersect(layout, rank, p, &in_param, &in_shard);
          if (in_param.begin == in_param.end) continue;
          ok &= CHECK(num < fsdp_placement_num_pieces(flat));
          if (!ok) break;
          const fsdp_piece *piece = &fsdp_placement_pieces(flat)[num++];
          ok &= CHECK(piece->param == p && piece->buffer == rank &&
                      piece->in_param.begin == in_param.begin &&
                      piece->in_param.end == in_param.end &&
                      piece->offset == in_shard.begin);
        }
      }
      ok &= CHECK_I64(fsdp_placement_num_pieces(flat), num);
      fsdp_placement_destroy(flat);
    }
    fsdp_flat_layout_destroy(layout);
    if (!ok) {
      printf("  seed %" PRIu64 "\n", seed_of_round);
      return;
    }
  }
}

/* --- Allocation failures ------------------------------------------------- */

typedef struct creation {
  const fsdp_flat_layout *layout;
  int how;
} creation;

static fsdp_status create(void *context, fsdp_error *error) {
  const creation *self = context;
  const fsdp_range both = {0, 2};
  const fsdp_piece unsorted[] = {{1, {0, 1}, 0, 0}, {0, {0, 1}, 0, 0}};
  const fsdp_param_range ranges[] = {{2, {0, 1}}, {0, {0, 1}}};
  const int64_t numels[] = {1, 2};
  const fsdp_param_rows rows[] = {{4, 3}};
  fsdp_placement *made = NULL;
  fsdp_status status = FSDP_OK;
  switch (self->how) {
    case 0:
      status = fsdp_placement_create(unsorted, 2, &made, error);
      break;
    case 1:
      status = fsdp_placement_create_flat(self->layout, 0, both, &made, error);
      break;
    case 2:
      status = fsdp_placement_create_flat_range(self->layout, 0, ranges, 2,
                                                &made, error);
      break;
    case 3:
      status = fsdp_placement_create_on_ranks(numels, 2, both, &made, error);
      break;
    default:
      status = fsdp_placement_create_rows(rows, 1, 2, both, &made, error);
      break;
  }
  CHECK((made != NULL) == (status == FSDP_OK));
  fsdp_placement_destroy(made);
  return status;
}

TEST(test_every_allocation_of_a_placement_can_fail) {
  static const int64_t num_allocations[] = {3, 2, 3, 2, 3};
  fsdp_flat_layout *layout = placement_picture();
  for (int how = 0; how < 5; how++) {
    creation self = {layout, how};
    CHECK_I64(every_allocation(create, &self), num_allocations[how]);
  }
  fsdp_flat_layout_destroy(layout);
}
