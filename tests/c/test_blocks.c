/*
 * Tests of layout/blocks.h: literal cases, every failure, all small tables, and
 * random ones against the smallest shard, which a search through all placements
 * finds.
 */
#include "base/alloc.h"
#include "check.h"
#include "every_allocation.h"
#include "layout/blocks.h"
#include "layout/flat_layout.h"
#include "placement_fixture.h"

enum { MAX_PARAMS = 40, MAX_SPACE = 4096 };

typedef struct sizes {
  int64_t numel;
  int64_t block_numel;
} sizes;

static int64_t place_blocks(const sizes *given, int64_t num_params,
                            int64_t world_size, int64_t align,
                            fsdp_blocks *params) {
  int64_t shard_numel = -1;
  for (int64_t i = 0; i < num_params; i++) {
    params[i] = (fsdp_blocks){given[i].numel, given[i].block_numel, -1};
  }
  CHECK_OK(fsdp_blocks_place(params, num_params, world_size, align,
                             &shard_numel, NULL));
  return shard_numel;
}

static void check_placed(const sizes *given, int64_t num_params,
                         int64_t world_size, int64_t align, int64_t shard_numel,
                         const int64_t *offsets) {
  fsdp_blocks params[MAX_PARAMS];
  CHECK_I64(place_blocks(given, num_params, world_size, align, params),
            shard_numel);
  for (int64_t i = 0; i < num_params; i++) {
    CHECK_I64(params[i].offset, offsets[i]);
  }
}

TEST(test_blocks_of_the_picture) {
  const sizes given[] = {{6, 6}, {4, 2}, {2, 0}};
  const int64_t offsets[] = {0, 6, 10};
  check_placed(given, 3, 2, 1, 6, offsets);
}

/* Both wholes leave two elements free: side by side they hold the third. */
TEST(test_wholes_leave_one_gap_of_two_shards) {
  const sizes given[] = {{5, 5}, {5, 5}, {4, 0}};
  const int64_t offsets[] = {0, 9, 5};
  check_placed(given, 3, 2, 1, 7, offsets);
}

TEST(test_small_ones_fill_gaps) {
  const sizes given[] = {{1, 0}, {9, 3}, {2, 0}};
  const int64_t offsets[] = {11, 0, 9};
  check_placed(given, 3, 2, 1, 6, offsets);
}

TEST(test_blocks_over_many_shards_are_their_multiple) {
  const sizes given[] = {{28, 4}, {4, 0}};
  const int64_t offsets[] = {0, 28};
  check_placed(given, 2, 4, 1, 8, offsets);
  const sizes short_last[] = {{27, 4}, {5, 0}};
  const int64_t behind[] = {0, 27};
  check_placed(short_last, 2, 4, 1, 8, behind);
}

TEST(test_all_is_aligned) {
  const sizes given[] = {{3, 3}, {3, 3}, {2, 0}};
  const int64_t offsets[] = {0, 4, 8};
  check_placed(given, 3, 3, 4, 4, offsets);
}

TEST(test_nothing_and_no_elements) {
  fsdp_blocks params[2];
  CHECK_I64(place_blocks(NULL, 0, 3, 1, params), 0);
  const sizes given[] = {{0, 5}, {0, 0}};
  CHECK_I64(place_blocks(given, 2, 3, 1, params), 0);
  CHECK_I64(params[1].offset, 0);
}

TEST(test_blocks_beyond_int64_are_refused) {
  const sizes given[][2] = {{{INT64_MAX / 8, 1}, {1, 0}},
                            {{INT64_MAX, 7}, {INT64_MAX, 7}}};
  for (int i = 0; i < 2; i++) {
    fsdp_error error;
    int64_t shard_numel = -1;
    fsdp_blocks params[] = {{given[i][0].numel, given[i][0].block_numel, -1},
                            {given[i][1].numel, given[i][1].block_numel, -1}};
    CHECK_FAILS(fsdp_blocks_place(params, 2, 4, 4, &shard_numel, &error),
                FSDP_OVERFLOW, error.message,
                "parameters in whole blocks on 4 ranks do not fit in int64");
    CHECK_I64(shard_numel, -1);
    CHECK_I64(params[0].offset, -1);
  }
}

/* The checks --------------------------------------------------------------- */

/* Whether a boundary within the parameter lies at the end of a block. */
static bool is_whole_there(sizes param, int64_t offset, int64_t shard_numel) {
  for (int64_t i = 1; i < param.numel; i++) {
    if ((offset + i) % shard_numel != 0 || param.block_numel == 0) continue;
    if (i % param.block_numel != 0) return false;
  }
  return true;
}

static bool check_layout(const sizes *given, int64_t num_params,
                         int64_t world_size, int64_t align,
                         const fsdp_blocks *params, int64_t shard_numel) {
  static bool is_taken[MAX_SPACE];
  bool ok = CHECK(shard_numel * world_size <= MAX_SPACE) &&
            CHECK_I64(shard_numel % align, 0);
  if (!ok) return false;
  memset(is_taken, 0, sizeof is_taken);
  for (int64_t i = 0; i < num_params; i++) {
    const int64_t offset = params[i].offset;
    const int64_t numel = given[i].numel;
    if (numel == 0) continue;
    ok &= CHECK(offset >= 0 && offset + numel <= shard_numel * world_size);
    ok &= CHECK_I64(offset % align, 0);
    ok &= CHECK(is_whole_there(given[i], offset, shard_numel));
    for (int64_t j = 0; ok && j < numel; j++) {
      ok &= CHECK(!is_taken[offset + j]);
      is_taken[offset + j] = true;
    }
  }
  return ok;
}

static void print_case(const sizes *given, int64_t num_params,
                       int64_t world_size, int64_t align) {
  printf("  %" PRId64 " ranks, alignment %" PRId64 ":", world_size, align);
  for (int64_t i = 0; i < num_params; i++) {
    printf(" %" PRId64 "/%" PRId64, given[i].numel, given[i].block_numel);
  }
  printf("\n");
}

/* Whether params from `index` on fit beside those that are taken. */
static bool fits(const sizes *given, int64_t num_params, int64_t index,
                 int64_t world_size, int64_t shard_numel, bool *is_taken) {
  if (index == num_params) return true;
  const int64_t numel = given[index].numel;
  for (int64_t offset = 0; offset + numel <= shard_numel * world_size;
       offset++) {
    bool is_free = is_whole_there(given[index], offset, shard_numel);
    for (int64_t i = 0; i < numel; i++) is_free &= !is_taken[offset + i];
    if (!is_free) continue;
    for (int64_t i = 0; i < numel; i++) is_taken[offset + i] = true;
    const bool rest =
        fits(given, num_params, index + 1, world_size, shard_numel, is_taken);
    for (int64_t i = 0; i < numel; i++) is_taken[offset + i] = false;
    if (rest) return true;
  }
  return false;
}

static int64_t smallest_shard(const sizes *given, int64_t num_params,
                              int64_t world_size) {
  bool is_taken[256] = {false};
  int64_t total = 0;
  for (int64_t i = 0; i < num_params; i++) total += given[i].numel;
  int64_t shard_numel = (total + world_size - 1) / world_size;
  while (!fits(given, num_params, 0, world_size, shard_numel, is_taken)) {
    shard_numel++;
  }
  return shard_numel;
}

/* All tables of up to three parameters of up to five elements, and all their
 * blocks, on one to four ranks: nothing is torn. 94 of 100 are the smallest,
 * the others have an element more. */
TEST(test_all_small_tables) {
  enum { MAX_NUMEL = 5, NUM_KINDS = 20 }; /* a numel and 0 to numel of it */
  sizes kinds[NUM_KINDS];
  int64_t num_cases = 0;
  int64_t num_smallest = 0;
  int num_kinds = 0;
  for (int64_t numel = 1; numel <= MAX_NUMEL; numel++) {
    for (int64_t block = 0; block <= numel; block++) {
      if (block == 1) continue; /* as 0 */
      kinds[num_kinds++] = (sizes){numel, block};
    }
  }
  for (int i = 0; i < num_kinds * num_kinds * num_kinds; i++) {
    const sizes given[] = {kinds[i % num_kinds],
                           kinds[i / num_kinds % num_kinds],
                           kinds[i / num_kinds / num_kinds]};
    for (int64_t world_size = 1; world_size <= 4; world_size++) {
      fsdp_blocks params[3];
      const int64_t found = place_blocks(given, 3, world_size, 1, params);
      const int64_t smallest = smallest_shard(given, 3, world_size);
      bool ok = check_layout(given, 3, world_size, 1, params, found);
      ok &= CHECK(found == smallest || found == smallest + 1);
      if (!ok) {
        print_case(given, 3, world_size, 1);
        printf("  found %" PRId64 ", the smallest is %" PRId64 "\n", found,
               smallest);
        return;
      }
      num_cases++;
      num_smallest += found == smallest;
    }
  }
  CHECK(num_smallest * 100 >= num_cases * 94);
}

/* Many parameters: nothing is torn. */
TEST(test_random_tables) {
  uint64_t seed = 24681357;
  for (int round = 0; round < 3000; round++) {
    const uint64_t seed_of_round = seed;
    const int64_t num_params = 1 + check_random(&seed, MAX_PARAMS);
    const int64_t world_size = 1 + check_random(&seed, 4);
    const int64_t align = 1 << check_random(&seed, 3);
    sizes given[MAX_PARAMS];
    fsdp_blocks params[MAX_PARAMS];
    for (int64_t i = 0; i < num_params; i++) {
      given[i].numel = check_random(&seed, 20);
      given[i].block_numel =
          check_random(&seed, 2) == 0 ? 0 : check_random(&seed, 24);
    }
    const int64_t found =
        place_blocks(given, num_params, world_size, align, params);
    if (!check_layout(given, num_params, world_size, align, params, found)) {
      print_case(given, num_params, world_size, align);
      printf("  seed %" PRIu64 "\n", seed_of_round);
      return;
    }
  }
}

/* A layer of a transformer, rows whole: d = 64, and rows of 4 d once. */
TEST(test_rows_of_a_layer_pad_little) {
  const int64_t d = 64;
  const sizes given[] = {{3 * d * d, d},     {3 * d, 0}, {d * d, d}, {d, 0},
                         {4 * d * d, d},     {4 * d, 0}, {d, 0},     {d, 0},
                         {4 * d * d, 4 * d}, {d, 0},     {d, 0},     {d, 0}};
  int64_t total = 0;
  for (int i = 0; i < 12; i++) total += given[i].numel;
  for (int64_t world_size = 1; world_size <= 64; world_size *= 2) {
    fsdp_blocks params[12];
    const int64_t found = place_blocks(given, 12, world_size, 4, params);
    const int64_t padding = found * world_size - total;
    /* Less than a row of 4 d for each rank. */
    CHECK(padding >= 0 && padding < 4 * d * world_size);
  }
}

/* A whole layout ----------------------------------------------------------- */

static const fsdp_dtype f32 = {1, 4};
static const fsdp_alignment unaligned = {.itemsize = 4};

static fsdp_status create(const int64_t *block_numels,
                          fsdp_flat_layout **layout, fsdp_error *error) {
  const fsdp_param_spec uses[] = {{1, 4, f32, true},
                                  {2, 5, f32, true},
                                  {3, 0, f32, true},
                                  {4, 7, f32, false},
                                  {5, 5, f32, true}};
  fsdp_param_table *table = NULL;
  fsdp_status status = FSDP_OK;
  FSDP_TRY(fsdp_param_table_create(uses, 5, &table, error));
  FSDP_TRY(fsdp_flat_layout_create_in_blocks(table, block_numels, 2, unaligned,
                                             layout, error));
done:
  fsdp_param_table_destroy(table);
  return status;
}

TEST(test_params_of_a_segment_ascend) {
  const int64_t block_numels[] = {0, 5, 0, 0, 5};
  const int64_t order[] = {2, 1, 0, 4};
  const int64_t offsets[] = {0, 0, 5, 9};
  fsdp_flat_layout *layout = NULL;
  fsdp_range in_param, in_shard;
  CHECK_OK(create(block_numels, &layout, NULL));
  const fsdp_segment *segment = fsdp_flat_layout_segment(layout, 0);
  CHECK_I64(segment->shard_numel, 7);
  CHECK_I64(segment->padding_numel, 0);
  for (int i = 0; i < 4; i++) {
    const int64_t param = fsdp_flat_layout_segment_params(layout, 0)[i];
    CHECK_I64(param, order[i]);
    CHECK_I64(fsdp_flat_layout_slot(layout, param)->offset, offsets[i]);
  }
  fsdp_flat_layout_intersect(layout, 1, 0, &in_param, &in_shard);
  CHECK_I64(in_param.begin, 2);
  CHECK_I64(in_shard.end, 2);
  /* The frozen one has no blocks: its segment is as ever. */
  CHECK_I64(fsdp_flat_layout_segment(layout, 1)->shard_numel, 4);
  fsdp_flat_layout_destroy(layout);
}

/* Rows of 3 and of 4 elements on 4 shards, and one that may be cut. Together, a
 * shard is a multiple of 12. What a checkpoint says of it makes it again. */
TEST(test_sizes_of_blocks_apart_pad_less) {
  const fsdp_param_spec uses[] = {
      {1, 48, f32, true}, {2, 4, f32, true}, {3, 48, f32, true}};
  const int64_t block_numels[] = {3, 0, 4};
  int64_t segments[3], offsets[3], shard_numels[3];
  fsdp_param_table *table = placement_table(uses, 3);
  fsdp_flat_layout *layout = NULL;
  CHECK_OK(fsdp_flat_layout_create_in_blocks(table, block_numels, 4, unaligned,
                                             &layout, NULL));
  for (int again = 0; again < 2; again++) {
    CHECK_I64(fsdp_flat_layout_num_segments(layout), 3);
    for (int64_t i = 0; i < 3; i++) {
      const fsdp_segment *segment = fsdp_flat_layout_segment(layout, i);
      CHECK_I64(segment->num_params, 1);
      CHECK_I64(segment->padding_numel, 0);
      CHECK_I64(segment->shard_numel, uses[i].numel / 4);
      segments[i] = fsdp_flat_layout_slot(layout, i)->segment;
      offsets[i] = fsdp_flat_layout_slot(layout, i)->offset;
      shard_numels[i] = segment->shard_numel;
      CHECK_I64(segments[i], i);
    }
    fsdp_flat_layout_destroy(layout);
    layout = NULL;
    if (again == 1) break;
    CHECK_OK(fsdp_flat_layout_create_placed(table, segments, offsets,
                                            shard_numels, 3, 4, &layout, NULL));
  }
  fsdp_param_table_destroy(table);
}

/* Nothing pads: one segment. */
TEST(test_sizes_of_blocks_stay_together) {
  const fsdp_param_spec uses[] = {{1, 12, f32, true}, {2, 12, f32, true}};
  const int64_t block_numels[] = {3, 4};
  fsdp_param_table *table = placement_table(uses, 2);
  fsdp_flat_layout *layout = NULL;
  CHECK_OK(fsdp_flat_layout_create_in_blocks(table, block_numels, 2, unaligned,
                                             &layout, NULL));
  CHECK_I64(fsdp_flat_layout_num_segments(layout), 1);
  CHECK_I64(fsdp_flat_layout_segment(layout, 0)->padding_numel, 0);
  fsdp_flat_layout_destroy(layout);
  fsdp_param_table_destroy(table);
}

TEST(test_negative_blocks_are_refused) {
  const int64_t block_numels[] = {0, 5, -2, 0, 0};
  fsdp_flat_layout *layout = NULL;
  fsdp_error error;
  CHECK_FAILS(create(block_numels, &layout, &error), FSDP_INVALID_ARGUMENT,
              error.message,
              "parameter 2 has blocks of -2 elements, need >= 0");
  CHECK(layout == NULL);
}

/* What a checkpoint says of a layout makes the same again. */
static fsdp_status create_placed(const int64_t *offsets,
                                 const int64_t *shard_numels,
                                 int64_t num_segments, fsdp_error *error) {
  const int64_t segments[] = {0, 0, 1};
  const fsdp_param_spec uses[] = {
      {1, 2, f32, true}, {2, 4, f32, true}, {3, 3, f32, false}};
  fsdp_param_table *table = placement_table(uses, 3);
  fsdp_flat_layout *layout = NULL;
  const fsdp_status status = fsdp_flat_layout_create_placed(
      table, segments, offsets, shard_numels, num_segments, 2, &layout, error);
  CHECK((layout != NULL) == (status == FSDP_OK));
  if (layout != NULL) {
    CHECK_I64(fsdp_flat_layout_segment_params(layout, 0)[0], 1);
    CHECK_I64(fsdp_flat_layout_slot(layout, 0)->offset, 5);
    CHECK_I64(fsdp_flat_layout_segment(layout, 0)->padding_numel, 2);
    CHECK_I64(fsdp_flat_layout_segment(layout, 1)->shard_numel, 3);
  }
  fsdp_flat_layout_destroy(layout);
  fsdp_param_table_destroy(table);
  return status;
}

TEST(test_a_placed_layout_is_checked) {
  const int64_t offsets[][3] = {{5, 0, 1}, {3, 0, 1}, {7, 0, 1}, {5, -1, 1}};
  const int64_t shard_numels[] = {4, 3};
  const int64_t too_large[] = {INT64_MAX, 3};
  fsdp_error error;
  CHECK_OK(create_placed(offsets[0], shard_numels, 2, &error));
  CHECK_FAILS(create_placed(offsets[1], shard_numels, 2, &error),
              FSDP_INVALID_ARGUMENT, error.message,
              "parameter 0 of 2 elements cannot lie at offset 3 of 2 shards "
              "of 4");
  CHECK_FAILS(create_placed(offsets[2], shard_numels, 2, &error),
              FSDP_INVALID_ARGUMENT, error.message,
              "parameter 0 of 2 elements cannot lie at offset 7 of 2 shards "
              "of 4");
  CHECK_FAILS(create_placed(offsets[3], shard_numels, 2, &error),
              FSDP_INVALID_ARGUMENT, error.message,
              "parameter 1 of 4 elements cannot lie at offset -1 of 2 shards "
              "of 4");
  CHECK_FAILS(create_placed(offsets[0], too_large, 2, &error),
              FSDP_INVALID_ARGUMENT, error.message,
              "..of 2 shards of 9223372036854775807");
  CHECK_FAILS(create_placed(offsets[0], shard_numels, 1, &error),
              FSDP_INVALID_ARGUMENT, error.message,
              "the parameters have 2 segments, got 1");
}

static fsdp_status create_and_destroy(void *context, fsdp_error *error) {
  const int64_t block_numels[] = {0, 5, 0, 0, 5};
  fsdp_flat_layout *layout = NULL;
  const fsdp_status status = create(block_numels, &layout, error);
  (void)context;
  CHECK((layout != NULL) == (status == FSDP_OK));
  fsdp_flat_layout_destroy(layout);
  return status;
}

TEST(test_every_allocation_of_blocks_can_fail) {
  /* Five of the table, four of the layout, three of the blocks, and two
   * orders. */
  CHECK_I64(every_allocation(create_and_destroy, NULL), 14);
}
