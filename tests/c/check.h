/*
 * Check: the whole C test framework. A test is a function that states facts
 * with CHECK and frees what it allocates; the program of all tests finds it by
 * itself.
 *
 *   TEST(test_that_one_is_odd) {
 *     CHECK_I64(1 % 2, 1);
 *   }
 */
#ifndef FSDP_TESTS_CHECK_H
#define FSDP_TESTS_CHECK_H

#include <inttypes.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

/* Of the running program, whichever of its files the CHECK stands in. */
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

static inline bool check_fails(int64_t actual, int64_t status,
                               const char *message, const char *expected,
                               const char *text, const char *file, int line) {
  const bool is_part = strncmp(expected, "..", 2) == 0;
  if (!check_i64(actual, status, text, file, line)) return false;
  if (is_part && strstr(message, expected + 2) != NULL) return true;
  return check_text(message, expected, text, file, line);
}

/* In `lines` "; ", or ";" at the end, stands for the end of a line. */
bool check_lines(const char *actual, const char *lines, const char *file,
                 int line);
bool check_has_lines(const char *actual, const char *lines, bool has_them,
                     const char *file, int line);

/* Each is true when the fact holds: `if (!CHECK(x)) return;` stops a test. */
#define CHECK(fact) check_that((fact), #fact, __FILE__, __LINE__)
#define CHECK_I64(actual, expected) \
  check_i64((actual), (expected), #actual, __FILE__, __LINE__)
/* A call that must return FSDP_OK, which is 0. */
#define CHECK_OK(call) check_i64((call), 0, #call, __FILE__, __LINE__)
#define CHECK_TEXT(actual, expected) \
  check_text((actual), (expected), #actual, __FILE__, __LINE__)

/* A call that must fail with `status`; its error record's message is
 * `expected`, or holds it where that begins with "..". */
#define CHECK_FAILS(call, status, message, expected)                    \
  check_fails((call), (status), (message), (expected), #call, __FILE__, \
              __LINE__)

/* The lines of a tape: all of them; some that follow each other; none of that
 * kind. The end of a line is written as ";": "alloc 64; free 64". */
#define CHECK_LINES(actual, lines) \
  check_lines((actual), (lines), __FILE__, __LINE__)
#define CHECK_HAS(actual, lines) \
  check_has_lines((actual), (lines), true, __FILE__, __LINE__)
#define CHECK_LACKS(actual, lines) \
  check_has_lines((actual), (lines), false, __FILE__, __LINE__)

#define TEST(name)                                                 \
  static void name(void);                                          \
  __attribute__((constructor)) static void register_##name(void) { \
    check_add(__FILE__, __LINE__, #name, name);                    \
  }                                                                \
  static void name(void)

void check_add(const char *file, int line, const char *name, void (*run)(void));

/* Runs `run` once, behind the test that runs now: frees what the test leaves,
 * and checks that nothing else is left. One a test. */
void check_at_end(void (*run)(void));

/* Runs `body` in a forked child, whose failures are the test's. */
void check_in_child(void (*body)(void *context), void *context);

void check_sleep_ms(int64_t ms);

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
