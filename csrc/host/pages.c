/* Pages: mapped memory for large buffers. See Note [Fresh memory]. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* madvise */
#endif
#include "host/pages.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE /* of Linux 5.14; older ones refuse it */
#define MADV_POPULATE_WRITE 23
#endif

enum {
  LARGE_PAGE_NBYTES = 2 << 20,
  MIN_MAPPED_NBYTES = 256 << 10, /* worth the calls of the kernel */
  ALIGNMENT = 64,
  MAX_KEPT = 64
};

typedef struct kept_pages {
  void *memory;
  size_t nbytes; /* whole pages */
} kept_pages;

/* Oldest first. A thread that finds the list in use does without it. It must
 * not wait, because a forked child lacks the thread that used it. */
static kept_pages kept[MAX_KEPT];
static size_t num_kept;
static atomic_flag is_kept_in_use = ATOMIC_FLAG_INIT;

static bool enter_kept(void) {
  return !atomic_flag_test_and_set_explicit(&is_kept_in_use,
                                            memory_order_acquire);
}

static void leave_kept(void) {
  atomic_flag_clear_explicit(&is_kept_in_use, memory_order_release);
}

/* In enter_kept. */
static kept_pages take_kept(size_t index) {
  const kept_pages taken = kept[index];
  num_kept--;
  memmove(&kept[index], &kept[index + 1], (num_kept - index) * sizeof *kept);
  return taken;
}

/* Pages of this size, the last that were kept. NULL: there are none; then the
 * oldest ones are unmapped. */
static void *find_kept(size_t nbytes) {
  kept_pages found = {NULL, 0};
  if (!enter_kept()) return NULL;
  size_t i = num_kept;
  while (i > 0 && kept[i - 1].nbytes != nbytes) i--;
  if (num_kept > 0) found = take_kept(i > 0 ? i - 1 : 0);
  leave_kept();
  if (found.nbytes == nbytes) return found.memory;
  if (found.memory != NULL) (void)munmap(found.memory, found.nbytes);
  return NULL;
}

/* In whole pages. */
static size_t mapped_nbytes(int64_t nbytes) {
  const size_t page = (size_t)sysconf(_SC_PAGESIZE);
  return ((size_t)nbytes + page - 1) / page * page;
}

/* Maps `nbytes`, whole pages, from the start of a large page on. */
static void *map_aligned(size_t nbytes) {
  const size_t more = nbytes + LARGE_PAGE_NBYTES;
  char *begin = mmap(NULL, more, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (begin == MAP_FAILED) return NULL;
  const size_t before =
      (size_t)(-(uintptr_t)begin & (uintptr_t)(LARGE_PAGE_NBYTES - 1));
  if (before > 0) (void)munmap(begin, before);
  (void)munmap(begin + before + nbytes, LARGE_PAGE_NBYTES - before);
  return begin + before;
}

void *fsdp_host_pages_alloc(int64_t nbytes) {
  void *memory = NULL;
  if (nbytes < MIN_MAPPED_NBYTES) {
    return posix_memalign(&memory, ALIGNMENT, (size_t)nbytes) == 0 ? memory
                                                                   : NULL;
  }
  const size_t mapped = mapped_nbytes(nbytes);
  /* All of these are advice: without them everything works all the same. */
  memory = find_kept(mapped);
  if (memory != NULL) { /* most pages are there */
    (void)madvise(memory, mapped, MADV_WILLNEED);
    return memory;
  }
  memory = map_aligned(mapped);
  if (memory == NULL) return NULL;
  (void)madvise(memory, mapped, MADV_HUGEPAGE);
  (void)madvise(memory, mapped, MADV_POPULATE_WRITE);
  return memory;
}

void fsdp_host_pages_free(void *memory, int64_t nbytes) {
  if (nbytes < MIN_MAPPED_NBYTES) {
    free(memory);
  } else {
    (void)munmap(memory, mapped_nbytes(nbytes));
  }
}

void fsdp_host_pages_keep(void *memory, int64_t nbytes) {
  const kept_pages last = {memory, mapped_nbytes(nbytes)};
  kept_pages oldest = {NULL, 0};
  if (nbytes < MIN_MAPPED_NBYTES ||
      madvise(memory, last.nbytes, MADV_FREE) != 0 || !enter_kept()) {
    fsdp_host_pages_free(memory, nbytes);
    return;
  }
  if (num_kept == MAX_KEPT) oldest = take_kept(0);
  kept[num_kept++] = last;
  leave_kept();
  if (oldest.memory != NULL) (void)munmap(oldest.memory, oldest.nbytes);
}

int64_t fsdp_host_pages_kept_nbytes(void) {
  size_t nbytes = 0;
  if (!enter_kept()) return -1;
  for (size_t i = 0; i < num_kept; i++) nbytes += kept[i].nbytes;
  leave_kept();
  return (int64_t)nbytes;
}

void *fsdp_host_space_alloc(int64_t nbytes) {
  void *space = mmap(NULL, mapped_nbytes(nbytes), PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return space == MAP_FAILED ? NULL : space;
}

void fsdp_host_space_free(void *space, int64_t nbytes) {
  (void)munmap(space, mapped_nbytes(nbytes));
}

int64_t fsdp_host_space_populate(void *space, int64_t begin, int64_t end,
                                 int64_t before) {
  const int64_t page = (int64_t)sysconf(_SC_PAGESIZE);
  const int64_t from = begin / page * page;
  const int64_t first = from > before ? from : before;
  const int64_t last = (end + page - 1) / page * page;
  if (first >= last) return before;
  (void)madvise((char *)space + first, (size_t)(last - first),
                MADV_POPULATE_WRITE);
  return last;
}
