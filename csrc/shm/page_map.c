/*
 * Which pages of a private mapping were written to: those whose memory is not
 * the file's any more. /proc/self/pagemap has a word for each page.
 *
 * Note [Pages without a fault]
 * Looking at every page takes a few percent of a small step. A page gets memory
 * of its own in a page fault, and the kernel counts the faults of a process. So
 * if no fault came since all pages were the file's, they still are. Where
 * memory is kept between steps, most steps have no fault. The counter is
 * trusted if it counts a fault that fsdp_shm_priv_counts_faults() provokes.
 */
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "shm/shm_priv.h"

enum { WORDS_AT_ONCE = 512 };

#define IS_PRESENT (UINT64_C(1) << 63)
#define IS_SWAPPED (UINT64_C(1) << 62)
#define IS_OF_FILE (UINT64_C(1) << 61)

int fsdp_shm_priv_open_page_map(void) {
  return open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
}

int64_t fsdp_shm_priv_num_faults(void) {
  struct rusage usage;
  if (getrusage(RUSAGE_SELF, &usage) != 0) return -1;
  return (int64_t)usage.ru_minflt + (int64_t)usage.ru_majflt;
}

bool fsdp_shm_priv_counts_faults(void) {
  const size_t page = (size_t)sysconf(_SC_PAGESIZE);
  const int64_t before = fsdp_shm_priv_num_faults();
  char *fresh = mmap(NULL, page, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (fresh == MAP_FAILED) return false;
  *(volatile char *)fresh = 1;
  (void)munmap(fresh, page);
  return before >= 0 && fsdp_shm_priv_num_faults() > before;
}

bool fsdp_shm_priv_has_own_pages(int page_map, const void *begin,
                                 int64_t nbytes) {
  const int64_t page = (int64_t)sysconf(_SC_PAGESIZE);
  const int64_t first = (int64_t)((uintptr_t)begin / (uintptr_t)page);
  const int64_t end = first + nbytes / page;
  uint64_t words[WORDS_AT_ONCE];
  if (page_map < 0) return true;
  for (int64_t i = first; i < end;) {
    const int64_t num = end - i < WORDS_AT_ONCE ? end - i : WORDS_AT_ONCE;
    const ssize_t wanted = (ssize_t)(num * (int64_t)sizeof *words);
    const off_t offset = (off_t)(i * (int64_t)sizeof *words);
    if (pread(page_map, words, (size_t)wanted, offset) != wanted) return true;
    for (int64_t j = 0; j < num; j++) {
      const bool is_there = (words[j] & (IS_PRESENT | IS_SWAPPED)) != 0;
      if (is_there && (words[j] & IS_OF_FILE) == 0) return true;
    }
    i += num;
  }
  return false;
}
