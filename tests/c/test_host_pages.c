/* Tests of host/pages: memory for large buffers, which leaves the process. */
#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.h"
#include "host/pages.h"

enum { KIB = 1 << 10, MIB = 1 << 20 };

static bool is_mapped(void *page) {
  unsigned char is_resident = 0;
  return mincore(page, 1, &is_resident) == 0;
}

TEST(test_pages_of_every_size) {
  const int64_t sizes[] = {1,       63,          256 * KIB - 1, 256 * KIB,
                           2 * MIB, 2 * MIB + 1, 5 * MIB - 1,   12600 * KIB};
  for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
    char *memory = fsdp_host_pages_alloc(sizes[i]);
    char *other = fsdp_host_pages_alloc(sizes[i]);
    CHECK(memory != NULL && other != NULL);
    CHECK((uintptr_t)memory % 64 == 0);
    CHECK(sizes[i] < 2 * MIB || (uintptr_t)memory % (2 * MIB) == 0);
    memset(memory, 1, (size_t)sizes[i]);
    memset(other, 2, (size_t)sizes[i]);
    CHECK(memory[0] == 1 && memory[sizes[i] - 1] == 1);
    fsdp_host_pages_free(memory, sizes[i]);
    CHECK(other[0] == 2 && other[sizes[i] - 1] == 2);
    fsdp_host_pages_free(other, sizes[i]);
  }
}

TEST(test_large_pages_are_unmapped_to_the_end) {
  const int64_t nbytes = 5 * MIB + 1;
  char *memory = fsdp_host_pages_alloc(nbytes);
  CHECK(memory != NULL);
  CHECK(is_mapped(memory) && is_mapped(memory + 5 * MIB));
  /* No more than the pages that the bytes need. */
  CHECK(!is_mapped(memory + 5 * MIB + sysconf(_SC_PAGESIZE)));
  fsdp_host_pages_free(memory, nbytes);
  CHECK(!is_mapped(memory) && !is_mapped(memory + 5 * MIB));
}

TEST(test_no_memory) {
  CHECK(fsdp_host_pages_alloc(INT64_MAX / 4) == NULL);
}

/* Pages of a size come back for that size, the last ones first. */
TEST(test_kept_pages) {
  char *first = fsdp_host_pages_alloc(MIB);
  char *second = fsdp_host_pages_alloc(MIB);
  char *large = fsdp_host_pages_alloc(2 * MIB);
  memset(first, 1, MIB);
  fsdp_host_pages_keep(large, 2 * MIB);
  fsdp_host_pages_keep(first, MIB);
  fsdp_host_pages_keep(second, MIB);
  CHECK_I64(fsdp_host_pages_kept_nbytes(), 4 * MIB);
  CHECK(fsdp_host_pages_alloc(MIB - 100) == second); /* of as many pages */
  CHECK(fsdp_host_pages_alloc(MIB) == first);
  memset(first, 2, MIB);
  CHECK_I64(fsdp_host_pages_kept_nbytes(), 2 * MIB);
  char *fresh = fsdp_host_pages_alloc(3 * MIB); /* the oldest goes for it */
  CHECK_I64(fsdp_host_pages_kept_nbytes(), 0);
  fsdp_host_pages_free(fresh, 3 * MIB);
  fsdp_host_pages_free(second, MIB - 100);
  CHECK(first[0] == 2 && first[MIB - 1] == 2);
  fsdp_host_pages_free(first, MIB);
  CHECK(!is_mapped(first));
}

TEST(test_small_memory_is_not_kept) {
  fsdp_host_pages_keep(fsdp_host_pages_alloc(1000), 1000);
  CHECK_I64(fsdp_host_pages_kept_nbytes(), 0);
}

/* No more than so many: then the oldest go. */
TEST(test_kept_pages_are_bounded) {
  enum { MANY = 100, MOST = 64 };
  char *memories[MANY];
  for (int i = 0; i < MANY; i++) {
    memories[i] = fsdp_host_pages_alloc(256 * KIB);
    CHECK(memories[i] != NULL);
  }
  for (int i = 0; i < MANY; i++) fsdp_host_pages_keep(memories[i], 256 * KIB);
  CHECK_I64(fsdp_host_pages_kept_nbytes(), MOST * 256 * KIB);
  CHECK(!is_mapped(memories[0]) && is_mapped(memories[MANY - 1]));
  for (int i = 0; i < MOST; i++) {
    fsdp_host_pages_free(fsdp_host_pages_alloc(256 * KIB), 256 * KIB);
  }
  CHECK_I64(fsdp_host_pages_kept_nbytes(), 0);
}
