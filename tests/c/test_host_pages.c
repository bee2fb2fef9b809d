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
