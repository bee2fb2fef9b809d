/*
 * Check: the whole C test framework. A test is a static function that states
 * facts with CHECK; a test binary lists its tests and calls check_run.
 */
#ifndef FSDP_TESTS_CHECK_H
#define FSDP_TESTS_CHECK_H

#include <inttypes.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef struct check_test {
  const char *name;
  void (*run)(void);
} check_test;

/* Of the running binary, whichever of its files the CHECK stands in. */
extern int64_t check_num_failures;

static inline bool check_that(bool fact, const char *text, const char *file,
                              int line) {
  if (fact) return true;
  check_num_failures++;
  printf("%s:%d: failed: %s\n", file, line, text);
  return false;
}

static inline bool check_i64(int64_t actual, int64_t expected, const char *text,
                             const char *file, int line) {
  if (check_that(actual == expected, text, file, line)) return true;
  printf("  is %" PRId64 ", expected %" PRId64 "\n", actual, expected);
  return false;
}

static inline bool check_text(const char *actual, const char *expected,
                              const char *text, const char *file, int line) {
  if (check_that(strcmp(actual, expected) == 0, text, file, line)) return true;
  printf("--- is\n%s--- expected\n%s---\n", actual, expected);
  return false;
}

/* Each is true when the fact holds: `if (!CHECK(x)) return;` stops a test. */
#define CHECK(fact) check_that((fact), #fact, __FILE__, __LINE__)
#define CHECK_I64(actual, expected) \
  check_i64((actual), (expected), #actual, __FILE__, __LINE__)
#define CHECK_TEXT(actual, expected) \
  check_text((actual), (expected), #actual, __FILE__, __LINE__)

#define CHECK_TEST(function) {#function, function}
#define CHECK_RUN(tests) check_run((tests), sizeof(tests) / sizeof((tests)[0]))

/* Runs every test; the exit code for main. */
static inline int check_run(const check_test *tests, size_t num_tests) {
  size_t num_failed = 0;
  for (size_t i = 0; i < num_tests; i++) {
    const int64_t before = check_num_failures;
    tests[i].run();
    if (check_num_failures == before) continue;
    num_failed++;
    printf("FAILED %s\n", tests[i].name);
  }
  printf("%zu passed, %zu failed\n", num_tests - num_failed, num_failed);
  return num_failed == 0 ? 0 : 1;
}

/* A seeded random number in [0, bound), bound >= 1 (xorshift64*). A test
 * prints its seed when it fails. `*seed` is never 0. */
static inline int64_t check_random(uint64_t *seed, int64_t bound) {
  *seed ^= *seed >> 12;
  *seed ^= *seed << 25;
  *seed ^= *seed >> 27;
  return (int64_t)((*seed * UINT64_C(0x2545F4914F6CDD1D) >> 33) %
                   (uint64_t)bound);
}

#endif /* FSDP_TESTS_CHECK_H */
