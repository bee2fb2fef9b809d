/*
 * Check: the program of all tests; see check.h. Its arguments name files
 * (test_arena) whose tests run, in the order in which they stand; without any
 * all tests run.
 */
#define _POSIX_C_SOURCE 200809L /* fork, nanosleep */
#include "check.h"

#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/alloc.h"

typedef struct test {
  char file[64]; /* without folder and ending */
  int line;
  const char *name;
  void (*run)(void);
} test;

enum { MAX_TESTS = 1024 };

int64_t check_num_failures = 0;

static test g_tests[MAX_TESTS];
static size_t g_num_tests;
static void (*g_at_end)(void);

void check_add(const char *file, int line, const char *name,
               void (*run)(void)) {
  const char *base = strrchr(file, '/');
  if (g_num_tests == MAX_TESTS) abort();
  test *added = &g_tests[g_num_tests++];
  *added = (test){.line = line, .name = name, .run = run};
  base = base == NULL ? file : base + 1;
  (void)snprintf(added->file, sizeof added->file, "%.*s",
                 (int)strcspn(base, "."), base);
}

void check_at_end(void (*run)(void)) {
  g_at_end = run;
}

/* `lines` with ends of lines; the caller frees it. */
static char *text_of(const char *lines) {
  char *text = malloc(strlen(lines) + 2);
  size_t length = 0;
  if (text == NULL) abort();
  for (const char *at = lines; *at != '\0'; at++) {
    const bool is_end = *at == ';' && (at[1] == ' ' || at[1] == '\0');
    text[length++] = is_end ? '\n' : *at;
    if (is_end && at[1] == ' ') at++;
  }
  text[length] = '\0';
  return text;
}

bool check_lines(const char *actual, const char *lines, const char *file,
                 int line) {
  char *text = text_of(lines);
  const size_t length = strlen(text);
  if (length > 0 && text[length - 1] != '\n') memcpy(text + length, "\n", 2);
  const bool is_equal = check_text(actual, text, "lines", file, line);
  free(text);
  return is_equal;
}

bool check_has_lines(const char *actual, const char *lines, bool has_them,
                     const char *file, int line) {
  char *text = text_of(lines);
  const bool is_right = (strstr(actual, text) != NULL) == has_them;
  free(text);
  if (check_that(is_right, lines, file, line)) return true;
  printf("--- is %s\n%s---\n", has_them ? "not in" : "in", actual);
  return false;
}

void check_in_child(void (*body)(void *context), void *context) {
  int state = -1;
  (void)fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    const int64_t before = check_num_failures;
    body(context);
    (void)fflush(stdout);
    _exit(check_num_failures == before ? 0 : 1);
  }
  CHECK(child > 0 && waitpid(child, &state, 0) == child);
  CHECK_I64(state, 0);
}

void check_sleep_ms(int64_t ms) {
  const struct timespec time = {.tv_sec = (time_t)(ms / 1000),
                                .tv_nsec = (long)(ms % 1000) * 1000000};
  (void)nanosleep(&time, NULL);
}

static int compare(const void *left, const void *right) {
  const test *a = left;
  const test *b = right;
  const int order = strcmp(a->file, b->file);
  return order != 0 ? order : a->line - b->line;
}

int main(int argc, char **argv) {
  int num_run = 0;
  int num_failed = 0;
  qsort(g_tests, g_num_tests, sizeof *g_tests, compare);
  for (size_t i = 0; i < g_num_tests; i++) {
    bool is_chosen = argc == 1;
    for (int j = 1; j < argc; j++) {
      is_chosen = is_chosen || strcmp(argv[j], g_tests[i].file) == 0;
    }
    if (!is_chosen) continue;
    const int64_t before = check_num_failures;
    const int64_t live = fsdp_alloc_live();
    g_tests[i].run();
    if (g_at_end != NULL) g_at_end();
    g_at_end = NULL;
    CHECK_I64(fsdp_alloc_live(), live);
    num_run++;
    if (check_num_failures == before) continue;
    num_failed++;
    printf("FAILED %s\n", g_tests[i].name);
  }
  printf("%d passed, %d failed\n", num_run - num_failed, num_failed);
  return num_failed == 0 && num_run > 0 ? 0 : 1;
}
