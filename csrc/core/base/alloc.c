/*
 * Host allocation: calloc and free with a count of live blocks and a switch
 * that makes one chosen allocation fail.
 */
#include "base/alloc.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* Relaxed order is enough: these globals guard no data. */
static _Atomic int64_t g_live = 0;
static _Atomic int64_t g_fail_at = -1;

static bool should_fail(void) {
  const int64_t index = atomic_load_explicit(&g_fail_at, memory_order_relaxed);
  if (index < 0) return false;
  atomic_store_explicit(&g_fail_at, index - 1, memory_order_relaxed);
  return index == 0;
}

void *fsdp_calloc(size_t num, size_t nbytes) {
  size_t total;
  if (should_fail()) return NULL;
  if (__builtin_mul_overflow(num, nbytes, &total)) return NULL;
  void *memory = calloc(1, total == 0 ? 1 : total);
  if (memory != NULL) {
    atomic_fetch_add_explicit(&g_live, 1, memory_order_relaxed);
  }
  return memory;
}

bool fsdp_grow(void **items, size_t *capacity, size_t num, size_t item_nbytes) {
  enum { FIRST_CAPACITY = 8 };
  if (num <= *capacity) return true;

  /* Cannot wrap: an array of `capacity` items exists in memory. */
  size_t grown = *capacity * 2;
  if (grown < FIRST_CAPACITY) grown = FIRST_CAPACITY;
  if (grown < num) grown = num;
  void *memory = fsdp_calloc(grown, item_nbytes);
  if (memory == NULL) return false;
  if (*capacity > 0) memcpy(memory, *items, *capacity * item_nbytes);
  fsdp_free(*items);
  *items = memory;
  *capacity = grown;
  return true;
}

char *fsdp_strdup(const char *text) {
  const size_t nbytes = strlen(text) + 1;
  char *copy = fsdp_calloc(nbytes, 1);
  if (copy != NULL) memcpy(copy, text, nbytes);
  return copy;
}

void fsdp_free(void *memory) {
  if (memory == NULL) return;
  atomic_fetch_sub_explicit(&g_live, 1, memory_order_relaxed);
  free(memory);
}

void fsdp_alloc_fail_at(int64_t index) {
  atomic_store_explicit(&g_fail_at, index, memory_order_relaxed);
}

int64_t fsdp_alloc_live(void) {
  return atomic_load_explicit(&g_live, memory_order_relaxed);
}
