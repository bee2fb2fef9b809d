/*
 * Tests of base/: status names, the error record, host allocation with
 * injected failures, checked arithmetic and the log ring.
 */
#include "base/alloc.h"
#include "base/arith.h"
#include "base/op_log.h"
#include "base/status.h"
#include "base/types.h"
#include "check.h"

TEST(test_error_says_what_and_where) {
  fsdp_error error;
  memset(&error, 0xAB, sizeof error);
  const fsdp_status status =
      FSDP_FAIL(&error, FSDP_OVERFLOW, "parameter %d has numel %d", 1, -1);
  CHECK_I64(status, FSDP_OVERFLOW);
  CHECK_I64(error.status, FSDP_OVERFLOW);
  CHECK_I64(error.line, __LINE__ - 3);
  CHECK_TEXT(error.file, __FILE__);
  CHECK_TEXT(error.message, "parameter 1 has numel -1");
}

TEST(test_error_may_be_null) {
  CHECK_I64(FSDP_FAIL(NULL, FSDP_BACKEND, "%d", 1), FSDP_BACKEND);
}

TEST(test_long_message_is_cut) {
  fsdp_error error;
  (void)FSDP_FAIL(&error, FSDP_INTERNAL, "%2000d", 7);
  CHECK_I64((int64_t)strlen(error.message), FSDP_ERROR_MESSAGE_NBYTES - 1);
}

/* A caller may put its own words around the message that it was given. */
TEST(test_message_may_quote_itself) {
  fsdp_error error;
  (void)FSDP_FAIL(&error, FSDP_BACKEND, "no device");
  (void)FSDP_FAIL(&error, error.status, "unit fc1: %s", error.message);
  CHECK_TEXT(error.message, "unit fc1: no device");
  CHECK_I64(error.status, FSDP_BACKEND);
}

static fsdp_status try_twice(fsdp_status first, fsdp_status second,
                             int *num_calls) {
  fsdp_status status = FSDP_OK;
  FSDP_TRY((++*num_calls, first));
  FSDP_TRY((++*num_calls, second));
done:
  return status;
}

TEST(test_try_leaves_at_the_first_failure) {
  int num_calls = 0;
  CHECK_OK(try_twice(FSDP_OK, FSDP_OK, &num_calls));
  CHECK_I64(num_calls, 2);
  num_calls = 0;
  CHECK_I64(try_twice(FSDP_BACKEND, FSDP_OK, &num_calls), FSDP_BACKEND);
  CHECK_I64(num_calls, 1);
}

TEST(test_calloc_zeroes_and_counts) {
  const int64_t before = fsdp_alloc_live();
  char *memory = fsdp_calloc(3, 5);
  if (!CHECK(memory != NULL)) return;
  for (int i = 0; i < 15; i++) CHECK(memory[i] == 0);
  CHECK_I64(fsdp_alloc_live(), before + 1);
  fsdp_free(memory);
  fsdp_free(NULL);
  CHECK_I64(fsdp_alloc_live(), before);
}

TEST(test_calloc_of_nothing_is_not_null) {
  void *a = fsdp_calloc(0, 8);
  void *b = fsdp_calloc(8, 0);
  CHECK(a != NULL && b != NULL);
  fsdp_free(a);
  fsdp_free(b);
}

TEST(test_calloc_checks_overflow) {
  CHECK(fsdp_calloc(SIZE_MAX, 2) == NULL);
  CHECK_I64(fsdp_alloc_live(), 0);
}

TEST(test_chosen_allocation_fails_once) {
  fsdp_alloc_fail_at(1);
  void *a = fsdp_calloc(1, 1);
  void *b = fsdp_calloc(1, 1);
  void *c = fsdp_calloc(1, 1);
  CHECK(a != NULL && b == NULL && c != NULL);
  fsdp_alloc_fail_at(0);
  CHECK(fsdp_strdup("x") == NULL);
  fsdp_alloc_fail_at(0);
  fsdp_alloc_fail_at(-1);
  char *text = fsdp_strdup("");
  CHECK(text != NULL && text[0] == '\0');
  fsdp_free(text);
  fsdp_free(a);
  fsdp_free(c);
  CHECK_I64(fsdp_alloc_live(), 0);
}

TEST(test_grow_keeps_items_and_zeroes_new_ones) {
  void *items = NULL;
  size_t capacity = 0;
  CHECK(fsdp_grow(&items, &capacity, 0, sizeof(int64_t)));
  CHECK(items == NULL && capacity == 0);
  for (size_t num = 1; num <= 100; num++) {
    CHECK(fsdp_grow(&items, &capacity, num, sizeof(int64_t)));
    CHECK(capacity >= num);
    int64_t *numbers = items;
    CHECK_I64(numbers[capacity - 1], 0);
    numbers[num - 1] = (int64_t)num;
    for (size_t i = 0; i < num; i++) CHECK_I64(numbers[i], (int64_t)i + 1);
  }
  CHECK_I64((int64_t)capacity, 128); /* doubled: 100 appends, 5 allocations */
  CHECK(fsdp_grow(&items, &capacity, 1000, sizeof(int64_t)));
  CHECK_I64((int64_t)capacity, 1000);
  fsdp_free(items);
}

TEST(test_grow_that_fails_changes_nothing) {
  void *items = NULL;
  size_t capacity = 0;
  CHECK(fsdp_grow(&items, &capacity, 1, 1));
  void *const before = items;
  const size_t capacity_before = capacity;
  fsdp_alloc_fail_at(0);
  CHECK(!fsdp_grow(&items, &capacity, capacity + 1, 1));
  fsdp_alloc_fail_at(-1);
  CHECK(items == before && capacity == capacity_before);
  CHECK(!fsdp_grow(&items, &capacity, SIZE_MAX, 16));
  CHECK(items == before && capacity == capacity_before);
  fsdp_free(items);
  CHECK_I64(fsdp_alloc_live(), 0);
}

TEST(test_arithmetic_detects_overflow) {
  int64_t out = 42;
  CHECK(!fsdp_add_i64(INT64_MAX, 1, &out));
  CHECK(!fsdp_mul_i64(INT64_MAX / 2 + 1, 2, &out));
  CHECK(!fsdp_round_up_i64(INT64_MAX - 2, 8, &out));
  CHECK_I64(out, 42);
  CHECK(fsdp_add_i64(INT64_MAX - 1, 1, &out));
  CHECK_I64(out, INT64_MAX);
  CHECK(fsdp_mul_i64(3, -4, &out));
  CHECK_I64(out, -12);
}

TEST(test_round_up_matches_counting) {
  for (int64_t multiple = 1; multiple <= 9; multiple++) {
    for (int64_t value = 0; value <= 40; value++) {
      int64_t expected = value;
      while (expected % multiple != 0) expected++;
      int64_t out = -1;
      CHECK(fsdp_round_up_i64(value, multiple, &out));
      CHECK_I64(out, expected);
    }
  }
}

TEST(test_dtype_equal_compares_codes) {
  CHECK(fsdp_dtype_equal((fsdp_dtype){1, 4}, (fsdp_dtype){1, 4}));
  CHECK(!fsdp_dtype_equal((fsdp_dtype){1, 4}, (fsdp_dtype){2, 4}));
}

TEST(test_op_log_prints_newest_oldest_first) {
  fsdp_op_log log = {.num_recorded = 0};
  char text[64];
  CHECK(fsdp_op_log_last(&log) == NULL);
  CHECK_I64((int64_t)fsdp_op_log_format(&log, 3, text, sizeof text), 0);
  CHECK_TEXT(text, "");
  fsdp_op_log_add(&log, "all_gather", "fc1");
  fsdp_op_log_add(&log, "reset", NULL);
  fsdp_op_log_add(&log, "wait", "fc2");
  CHECK_TEXT(fsdp_op_log_last(&log)->operation, "wait");
  CHECK_I64(fsdp_op_log_last(&log)->sequence, 2);
  const size_t length = fsdp_op_log_format(&log, 2, text, sizeof text);
  CHECK_LINES(text, "1 reset -; 2 wait fc2");
  CHECK_I64((int64_t)length, (int64_t)strlen(text));
  (void)fsdp_op_log_format(&log, 99, text, sizeof text);
  CHECK_LINES(text, "0 all_gather fc1; 1 reset -; 2 wait fc2");
}

TEST(test_op_log_cuts_and_terminates) {
  fsdp_op_log log = {.num_recorded = 0};
  fsdp_op_log_add(&log, "abc", "u");
  fsdp_op_log_add(&log, "def", "v");
  const char *const whole = "0 abc u\n1 def v\n";
  for (size_t room = 1; room <= 20; room++) {
    char text[20];
    memset(text, 'x', sizeof text);
    const size_t length = fsdp_op_log_format(&log, 2, text, room);
    const size_t expected = room - 1 < strlen(whole) ? room - 1 : strlen(whole);
    CHECK_I64((int64_t)length, (int64_t)expected);
    CHECK(memcmp(text, whole, expected) == 0 && text[expected] == '\0');
  }
  char untouched = 'x';
  CHECK_I64((int64_t)fsdp_op_log_format(&log, 2, &untouched, 0), 0);
  CHECK(untouched == 'x');
}

TEST(test_op_log_overwrites_the_oldest) {
  static const char *const units[] = {"a", "b", "c"};
  static char text[FSDP_OP_LOG_CAPACITY * 16];
  fsdp_op_log log = {.num_recorded = 0};
  for (int64_t i = 0; i < 1000; i++) {
    fsdp_op_log_add(&log, "op", units[i % 3]);
    CHECK_I64(fsdp_op_log_last(&log)->sequence, i);
  }
  (void)fsdp_op_log_format(&log, 1000, text, sizeof text);
  const char *line = text;
  for (int64_t i = 1000 - FSDP_OP_LOG_CAPACITY; i < 1000; i++) {
    char expected[32];
    const int length = snprintf(expected, sizeof expected,
                                "%" PRId64 " op %s\n", i, units[i % 3]);
    CHECK(strncmp(line, expected, (size_t)length) == 0);
    line += length;
  }
  CHECK(*line == '\0');
}
