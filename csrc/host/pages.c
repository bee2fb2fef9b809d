/* Pages: mapped memory for large buffers. See Note [Fresh memory]. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* madvise */
#endif
#include "host/pages.h"

#include <stddef.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE /* of Linux 5.14; older ones refuse it */
#define MADV_POPULATE_WRITE 23
#endif

enum {
  LARGE_PAGE_NBYTES = 2 << 20,
  MIN_MAPPED_NBYTES = 256 << 10, /* worth the calls of the kernel */
  ALIGNMENT = 64
};

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
  memory = map_aligned(mapped);
  if (memory == NULL) return NULL;
  /* Both are advice: without them everything works all the same. */
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
