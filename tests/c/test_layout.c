/*
 * Tests of layout/: literal cases, every failure, and random cases against the
 * stupid oracle, which writes the flat arrays out and slices them.
 */
#include "check.h"
#include "every_allocation.h"
#include "layout/flat_layout.h"
#include "layout/param_table.h"
#include "placement_fixture.h"

static const fsdp_dtype f32 = {1, 4};
static const fsdp_dtype bf16 = {2, 2};
static const fsdp_dtype u8 = {3, 1};

/* Everything aligned. */
static fsdp_alignment aligned(int32_t itemsize) {
  return (fsdp_alignment){itemsize, true, true};
}

/* --- Parameter table ----------------------------------------------------- */

TEST(test_shared_parameters_count_once) {
  const fsdp_param_spec uses[] = {
      {17, 12, f32, true}, {23, 3, f32, true}, {17, 12, f32, true}};
  fsdp_param_table *table = placement_table(uses, 3);
  CHECK_I64(fsdp_param_table_num_params(table), 2);
  CHECK_I64(fsdp_param_table_param_of_use(table, 0), 0);
  CHECK_I64(fsdp_param_table_param_of_use(table, 1), 1);
  CHECK_I64(fsdp_param_table_param_of_use(table, 2), 0);
  CHECK_I64(fsdp_param_table_first_use(table, 0), 0);
  CHECK_I64(fsdp_param_table_first_use(table, 1), 1);
  CHECK_I64(fsdp_param_table_spec(table, 1)->numel, 3);
  fsdp_param_table_destroy(table);
  fsdp_param_table_destroy(NULL);
}

TEST(test_table_of_nothing) {
  fsdp_param_table *table = placement_table(NULL, 0);
  CHECK_I64(fsdp_param_table_num_params(table), 0);
  fsdp_flat_layout *layout = NULL;
  CHECK_OK(fsdp_flat_layout_create(table, 2, aligned(4), &layout, NULL));
  CHECK_I64(fsdp_flat_layout_num_segments(layout), 0);
  fsdp_flat_layout_destroy(layout);
  fsdp_param_table_destroy(table);
}

static void check_table_refused(const fsdp_param_spec *uses, int64_t num_uses,
                                const char *message) {
  fsdp_param_table *table = NULL;
  fsdp_error error;
  CHECK_I64(fsdp_param_table_create(uses, num_uses, &table, &error),
            FSDP_INVALID_ARGUMENT);
  CHECK_TEXT(error.message, message);
  CHECK(table == NULL);
}

TEST(test_table_refuses_wrong_arguments) {
  const fsdp_param_spec negative[] = {{1, 4, f32, true}, {2, -1, f32, true}};
  const fsdp_param_spec no_size[] = {{1, 4, {1, 0}, true}};
  check_table_refused(NULL, -1, "num_uses is -1, need >= 0");
  check_table_refused(negative, 2, "parameter use 1 has numel -1, need >= 0");
  check_table_refused(no_size, 1, "parameter use 0 has itemsize 0, need >= 1");
}

TEST(test_table_refuses_uses_that_disagree) {
  const fsdp_param_spec same = {9, 4, f32, true};
  fsdp_param_spec others[] = {same, same, same, same};
  others[0].numel = 5;
  others[1].dtype.code = 7;
  others[2].dtype.itemsize = 2;
  others[3].requires_grad = false;
  for (int i = 0; i < 4; i++) {
    const fsdp_param_spec uses[] = {{1, 1, f32, true}, same, others[i]};
    check_table_refused(uses, 3,
                        "parameter uses 1 and 2 share key 9 but disagree in "
                        "numel, dtype or in whether they train");
  }
}

/* Keys that are few, many, dense or spread like addresses. */
TEST(test_table_matches_quadratic_search) {
  enum { MAX_USES = 300 };
  static fsdp_param_spec uses[MAX_USES];
  uint64_t seed = 20240601;
  for (int round = 0; round < 200; round++) {
    const int64_t num_uses = check_random(&seed, MAX_USES + 1);
    const int64_t num_keys = 1 + check_random(&seed, 2 * MAX_USES);
    const uint64_t stride = UINT64_C(1) << check_random(&seed, 40);
    for (int64_t i = 0; i < num_uses; i++) {
      const int64_t key = check_random(&seed, num_keys);
      uses[i] = (fsdp_param_spec){(uint64_t)key * stride, key % 7, f32, true};
    }
    fsdp_param_table *table = placement_table(uses, num_uses);
    int64_t num_params = 0;
    for (int64_t i = 0; i < num_uses; i++) {
      int64_t first = 0;
      while (uses[first].key != uses[i].key) first++;
      if (first == i) {
        CHECK_I64(fsdp_param_table_first_use(table, num_params), i);
        CHECK(fsdp_param_table_spec(table, num_params)->key == uses[i].key);
        num_params++;
      }
      CHECK_I64(fsdp_param_table_first_use(
                    table, fsdp_param_table_param_of_use(table, i)),
                first);
    }
    CHECK_I64(fsdp_param_table_num_params(table), num_params);
    fsdp_param_table_destroy(table);
  }
}

/* --- Flat layout --------------------------------------------------------- */

/* The picture in the header. */
TEST(test_header_picture) {
  const fsdp_param_spec uses[] = {{1, 5, f32, true}, {2, 3, f32, true}};
  fsdp_flat_layout *layout = placement_layout(uses, 2, 2, aligned(4));
  CHECK_I64(fsdp_flat_layout_world_size(layout), 2);
  CHECK_I64(fsdp_flat_layout_num_params(layout), 2);
  CHECK_I64(fsdp_flat_layout_num_segments(layout), 1);
  const fsdp_segment *segment = fsdp_flat_layout_segment(layout, 0);
  CHECK_I64(segment->num_params, 2);
  CHECK_I64(segment->unsharded_numel, 8);
  CHECK_I64(segment->padding_numel, 8);
  CHECK_I64(segment->shard_numel, 8);
  CHECK_I64(segment->padded_numel, 16);
  CHECK_I64(fsdp_flat_layout_slot(layout, 1)->offset, 8);
  fsdp_range in_param;
  fsdp_range in_shard;
  fsdp_flat_layout_intersect(layout, 1, 1, &in_param, &in_shard);
  CHECK(in_param.begin == 0 && in_param.end == 3);
  CHECK(in_shard.begin == 0 && in_shard.end == 3);
  fsdp_flat_layout_intersect(layout, 0, 1, &in_param, &in_shard);
  CHECK(in_param.begin == 0 && in_param.end == 0);
  CHECK(in_shard.begin == 0 && in_shard.end == 0);
  fsdp_flat_layout_destroy(layout);
  fsdp_flat_layout_destroy(NULL);
}

TEST(test_segments_in_order_of_appearance) {
  const fsdp_param_spec uses[] = {{1, 2, bf16, true},
                                  {2, 2, f32, false},
                                  {3, 2, bf16, false},
                                  {4, 2, bf16, true},
                                  {5, 2, f32, false}};
  fsdp_flat_layout *layout = placement_layout(uses, 5, 1, aligned(4));
  CHECK_I64(fsdp_flat_layout_num_segments(layout), 3);
  const int64_t segments[] = {0, 1, 2, 0, 1};
  /* bf16 is aligned to 8 elements, f32 to 4. */
  const int64_t offsets[] = {0, 0, 0, 8, 4};
  for (int64_t i = 0; i < 5; i++) {
    CHECK_I64(fsdp_flat_layout_slot(layout, i)->segment, segments[i]);
    CHECK_I64(fsdp_flat_layout_slot(layout, i)->offset, offsets[i]);
  }
  CHECK_I64(fsdp_flat_layout_segment_params(layout, 0)[1], 3);
  CHECK_I64(fsdp_flat_layout_segment_params(layout, 1)[0], 1);
  CHECK_I64(fsdp_flat_layout_segment_params(layout, 1)[1], 4);
  CHECK_I64(fsdp_flat_layout_segment_params(layout, 2)[0], 2);
  fsdp_flat_layout_destroy(layout);
}

TEST(test_layout_refuses_wrong_arguments) {
  fsdp_param_table *table = placement_table(NULL, 0);
  fsdp_flat_layout *layout = NULL;
  fsdp_error error;
  CHECK_FAILS(fsdp_flat_layout_create(table, 0, aligned(4), &layout, &error),
              FSDP_INVALID_ARGUMENT, error.message,
              "need world_size >= 1 and itemsize >= 1, got 0 and 4");
  CHECK_I64(fsdp_flat_layout_create(table, 2, aligned(0), &layout, &error),
            FSDP_INVALID_ARGUMENT);
  CHECK(layout == NULL);
  fsdp_param_table_destroy(table);
}

/* Each row overflows at one place: gap, sum, shard, padding, bytes. */
TEST(test_layout_detects_overflow) {
  static const struct {
    int64_t first;
    int64_t second;
    int64_t world_size;
  } cases[] = {
      {INT64_MAX - 1, 1, 1},      {INT64_MAX / 2, INT64_MAX / 2 + 9, 1},
      {INT64_MAX, 0, 1},          {INT64_MAX / 4, 0, INT64_MAX / 2},
      {INT64_MAX / 4 + 16, 0, 1},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    const fsdp_param_spec uses[] = {{1, cases[i].first, f32, true},
                                    {2, cases[i].second, f32, true}};
    fsdp_param_table *table =
        placement_table(uses, cases[i].second > 0 ? 2 : 1);
    fsdp_flat_layout *layout = NULL;
    fsdp_error error = {0};
    CHECK_I64(fsdp_flat_layout_create(table, cases[i].world_size, aligned(4),
                                      &layout, &error),
              FSDP_OVERFLOW);
    CHECK_I64(error.status, FSDP_OVERFLOW);
    CHECK(layout == NULL);
    fsdp_param_table_destroy(table);
  }
}

/* The largest segment that fits: 2^61 - 4 elements of 4 bytes. */
TEST(test_largest_segment_fits) {
  const fsdp_param_spec uses[] = {{1, INT64_MAX / 4 - 3, f32, true}};
  fsdp_flat_layout *layout = placement_layout(uses, 1, 1, aligned(4));
  CHECK_I64(fsdp_flat_layout_segment(layout, 0)->padding_numel, 0);
  fsdp_flat_layout_destroy(layout);
}

/* --- The oracle ---------------------------------------------------------- */

enum { MAX_PARAMS = 12, MAX_FLAT = 20000, PADDING = -1 };

typedef struct element {
  int64_t param; /* or PADDING */
  int64_t index; /* in the parameter */
} element;

/* Appends elements one at a time, padding as the header says. Returns how
 * many there are. */
static int64_t write_flat(const fsdp_flat_layout *layout,
                          const fsdp_param_table *table, int64_t segment,
                          int64_t world_size, fsdp_alignment alignment,
                          element *flat) {
  const fsdp_segment *info = fsdp_flat_layout_segment(layout, segment);
  const int32_t itemsize = info->dtype.itemsize < alignment.itemsize
                               ? info->dtype.itemsize
                               : alignment.itemsize;
  int64_t numel = 1;
  while (numel * itemsize % FSDP_ALIGNMENT_NBYTES != 0) numel++;
  int64_t num = 0;
  for (int64_t i = 0; i < fsdp_param_table_num_params(table); i++) {
    const fsdp_param_spec *spec = fsdp_param_table_spec(table, i);
    if (spec->dtype.code != info->dtype.code ||
        spec->requires_grad != info->requires_grad) {
      continue;
    }
    while (alignment.params && num % numel != 0) {
      flat[num++] = (element){PADDING, 0};
    }
    for (int64_t j = 0; j < spec->numel; j++) flat[num++] = (element){i, j};
  }
  while (num % ((alignment.shards ? numel : 1) * world_size) != 0) {
    flat[num++] = (element){PADDING, 0};
  }
  return num;
}

/* The range that `rank`'s slice of `flat` holds of `param`. */
static void slice_flat(const element *flat, int64_t shard_numel, int64_t rank,
                       int64_t param, fsdp_range *in_param,
                       fsdp_range *in_shard) {
  *in_param = (fsdp_range){0, 0};
  *in_shard = (fsdp_range){0, 0};
  bool found = false;
  for (int64_t i = 0; i < shard_numel; i++) {
    const element *here = &flat[rank * shard_numel + i];
    if (here->param != param) continue;
    if (!found) {
      *in_param = (fsdp_range){here->index, here->index};
      *in_shard = (fsdp_range){i, i};
      found = true;
    }
    in_param->end = here->index + 1;
    in_shard->end = i + 1;
  }
}

static bool ranges_equal(fsdp_range a, fsdp_range b) {
  return a.begin == b.begin && a.end == b.end;
}

static bool check_segment(const fsdp_flat_layout *layout,
                          const fsdp_param_table *table, int64_t segment,
                          fsdp_alignment alignment) {
  static element flat[MAX_FLAT];
  const fsdp_segment *info = fsdp_flat_layout_segment(layout, segment);
  const int64_t world_size = fsdp_flat_layout_world_size(layout);
  const int64_t num =
      write_flat(layout, table, segment, world_size, alignment, flat);
  int64_t num_real = 0;
  int64_t num_params = 0;
  bool ok = true;
  for (int64_t i = 0; i < num; i++) num_real += flat[i].param != PADDING;

  ok &= CHECK_I64(info->padded_numel, num);
  ok &= CHECK_I64(info->shard_numel * world_size, num);
  ok &= CHECK_I64(info->unsharded_numel, num_real);
  ok &= CHECK_I64(info->padding_numel, num - num_real);
  const int64_t *params = fsdp_flat_layout_segment_params(layout, segment);
  for (int64_t param = 0; param < fsdp_flat_layout_num_params(layout);
       param++) {
    const fsdp_param_slot *slot = fsdp_flat_layout_slot(layout, param);
    if (slot->segment != segment) continue;
    ok &= CHECK_I64(params[num_params++], param);
    for (int64_t i = 0; i < slot->numel; i++) {
      ok &= CHECK(flat[slot->offset + i].param == param &&
                  flat[slot->offset + i].index == i);
    }
    for (int64_t rank = 0; rank < world_size; rank++) {
      fsdp_range actual[2];
      fsdp_range expected[2];
      fsdp_flat_layout_intersect(layout, rank, param, &actual[0], &actual[1]);
      slice_flat(flat, info->shard_numel, rank, param, &expected[0],
                 &expected[1]);
      ok &= CHECK(ranges_equal(actual[0], expected[0]));
      ok &= CHECK(ranges_equal(actual[1], expected[1]));
    }
  }
  ok &= CHECK_I64(info->num_params, num_params);
  return ok;
}

TEST(test_layout_matches_written_out_flat_array) {
  uint64_t seed = 987654321;
  for (int round = 0; round < 3000; round++) {
    const uint64_t seed_of_round = seed;
    const fsdp_dtype dtypes[] = {f32, bf16, u8};
    const int64_t num_params = check_random(&seed, MAX_PARAMS + 1);
    const int64_t world_size = 1 + check_random(&seed, 9);
    const fsdp_alignment alignment = {1 << check_random(&seed, 4),
                                      check_random(&seed, 2) == 0,
                                      check_random(&seed, 2) == 0};
    const int64_t max_numel = 1 + check_random(&seed, 100);
    fsdp_param_spec uses[MAX_PARAMS];
    for (int64_t i = 0; i < num_params; i++) {
      uses[i] = (fsdp_param_spec){(uint64_t)i, check_random(&seed, max_numel),
                                  dtypes[check_random(&seed, 3)],
                                  check_random(&seed, 2) == 0};
    }
    fsdp_param_table *table = placement_table(uses, num_params);
    fsdp_flat_layout *layout = NULL;
    bool ok = CHECK_OK(
        fsdp_flat_layout_create(table, world_size, alignment, &layout, NULL));
    for (int64_t i = 0; i < fsdp_flat_layout_num_segments(layout); i++) {
      ok &= check_segment(layout, table, i, alignment);
    }
    fsdp_flat_layout_destroy(layout);
    fsdp_param_table_destroy(table);
    if (!ok) {
      printf("  seed %" PRIu64 "\n", seed_of_round);
      return;
    }
  }
}

/* --- Rows ----------------------------------------------------------------- */

/* What torch.chunk does: pieces of ceil(rows / ranks) rows, until none is left.
 * The rows [begin, end) of `rank`. */
static fsdp_range chunk(int64_t num_rows, int64_t world_size, int64_t rank) {
  int64_t taken = 0;
  for (int64_t i = 0;; i++) {
    int64_t rows = 0;
    while (rows * world_size < num_rows && rows < num_rows - taken) rows++;
    if (i == rank) return (fsdp_range){taken, taken + rows};
    taken += rows;
  }
}

/* Three parameters, each cut by itself: rows of row_numel, a vector, rows of
 * another length. */
static bool check_rows(int64_t num_rows, int64_t row_numel,
                       int64_t world_size) {
  const int64_t rows[] = {num_rows, num_rows + 1, 2};
  const int64_t row_numels[] = {row_numel, 1, 2 * row_numel};
  fsdp_param_spec uses[3];
  for (int i = 0; i < 3; i++) {
    uses[i] =
        (fsdp_param_spec){(uint64_t)i, rows[i] * row_numels[i], f32, true};
  }
  fsdp_param_table *table = placement_table(uses, 3);
  fsdp_flat_layout *layout = NULL;
  bool ok = CHECK_OK(fsdp_flat_layout_create_by_rows(
      table, row_numels, world_size, &layout, NULL));
  ok &= CHECK_I64(fsdp_flat_layout_num_segments(layout), 3);
  for (int64_t i = 0; i < 3; i++) {
    const int64_t numel = row_numels[i];
    const fsdp_segment *info = fsdp_flat_layout_segment(layout, i);
    const fsdp_range first = chunk(rows[i], world_size, 0);
    ok &= CHECK_I64(fsdp_flat_layout_slot(layout, i)->segment, i);
    ok &= CHECK_I64(fsdp_flat_layout_slot(layout, i)->offset, 0);
    ok &= CHECK_I64(fsdp_flat_layout_segment_params(layout, i)[0], i);
    ok &= CHECK_I64(info->shard_numel, first.end * numel);
    ok &= CHECK_I64(info->padded_numel, first.end * numel * world_size);
    for (int64_t rank = 0; rank < world_size; rank++) {
      const fsdp_range expected = chunk(rows[i], world_size, rank);
      const int64_t held = (expected.end - expected.begin) * numel;
      fsdp_range in_param, in_shard;
      fsdp_flat_layout_intersect(layout, rank, i, &in_param, &in_shard);
      ok &= CHECK_I64(in_shard.begin, 0);
      ok &= CHECK_I64(in_shard.end, held);
      ok &= CHECK_I64(in_param.end - in_param.begin, held);
      if (held > 0) ok &= CHECK_I64(in_param.begin, expected.begin * numel);
    }
  }
  fsdp_flat_layout_destroy(layout);
  fsdp_param_table_destroy(table);
  return ok;
}

TEST(test_rows_are_cut_as_chunk_does) {
  for (int64_t num_rows = 0; num_rows < 10; num_rows++) {
    for (int64_t world_size = 1; world_size <= 8; world_size++) {
      for (int64_t row_numel = 1; row_numel < 6; row_numel += 2) {
        if (check_rows(num_rows, row_numel, world_size)) continue;
        printf("  %" PRId64 " rows of %" PRId64 " on %" PRId64 " ranks\n",
               num_rows, row_numel, world_size);
        return;
      }
    }
  }
}

TEST(test_rows_of_nothing_and_of_a_scalar) {
  const fsdp_param_spec uses[] = {{1, 0, f32, true}, {2, 1, f32, true}};
  const int64_t row_numels[] = {0, 0}; /* shape [3, 0], and a scalar */
  fsdp_param_table *table = placement_table(uses, 2);
  fsdp_flat_layout *layout = NULL;
  CHECK_OK(
      fsdp_flat_layout_create_by_rows(table, row_numels, 3, &layout, NULL));
  CHECK_I64(fsdp_flat_layout_segment(layout, 0)->padded_numel, 0);
  CHECK_I64(fsdp_flat_layout_segment(layout, 1)->shard_numel, 1);
  CHECK_I64(fsdp_flat_layout_segment(layout, 1)->padding_numel, 2);
  fsdp_flat_layout_destroy(layout);
  fsdp_param_table_destroy(table);
}

TEST(test_rows_refuse_wrong_arguments) {
  const fsdp_param_spec uses[] = {{1, 6, f32, true}, {2, 8, f32, true}};
  const int64_t wrong[][2] = {{2, 3}, {2, -1}};
  fsdp_param_table *table = placement_table(uses, 2);
  fsdp_flat_layout *layout = NULL;
  fsdp_error error;
  for (int i = 0; i < 2; i++) {
    CHECK_I64(
        fsdp_flat_layout_create_by_rows(table, wrong[i], 2, &layout, &error),
        FSDP_INVALID_ARGUMENT);
    CHECK(layout == NULL);
  }
  CHECK_TEXT(error.message, "parameter 1 of 8 elements cannot have rows of -1");
  fsdp_param_table_destroy(table);
}

/* --- Allocation failures ------------------------------------------------- */

static fsdp_status create_both(void *context, fsdp_error *error) {
  const fsdp_param_spec uses[] = {{1, 5, f32, true}, {2, 3, bf16, true}};
  fsdp_param_table *table = NULL;
  fsdp_flat_layout *layout = NULL;
  fsdp_status status = fsdp_param_table_create(uses, 2, &table, error);
  (void)context;
  CHECK((table != NULL) == (status == FSDP_OK));
  if (status == FSDP_OK) {
    status = fsdp_flat_layout_create(table, 2, aligned(2), &layout, error);
  }
  CHECK((layout != NULL) == (status == FSDP_OK));
  fsdp_flat_layout_destroy(layout);
  fsdp_param_table_destroy(table);
  return status;
}

TEST(test_every_allocation_can_fail) {
  /* Five of the table, four of the layout. */
  CHECK_I64(every_allocation(create_both, NULL), 9);
}
