/*
 * Tests of what shm/ is made of: processes, segments, limits of memory, and
 * conversions of sums.
 */
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/dtypes.h"
#include "check.h"
#include "shm/process_priv.h"
#include "shm/segment_priv.h"
#include "shm/shm_priv.h"
#include "shm_fixture.h"

/* A write into a private mapping of a file is a fault, a second one is not. */
TEST(test_faults_are_counted) {
  const int64_t page = (int64_t)sysconf(_SC_PAGESIZE);
  const int file = memfd_create("fsdp_c_test", MFD_CLOEXEC);
  CHECK(ftruncate(file, page) == 0);
  volatile char *memory =
      mmap(NULL, (size_t)page, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
  const int page_map = fsdp_shm_priv_open_page_map();
  CHECK((void *)(uintptr_t)memory != MAP_FAILED && page_map >= 0);
  CHECK(fsdp_shm_priv_counts_faults());
  CHECK(memory[0] == 0); /* the page is mapped */
  const int64_t before = fsdp_shm_priv_num_faults();
  memory[1] = 1;
  CHECK(fsdp_shm_priv_num_faults() > before);
  CHECK(fsdp_shm_priv_has_own_pages(page_map, (const char *)(uintptr_t)memory,
                                    page));
  close(page_map);
  close(file);
  munmap((void *)(uintptr_t)memory, (size_t)page);
}

static fsdp_shm_process get_process(void) {
  fsdp_shm_process process = {0};
  CHECK_OK(fsdp_shm_priv_process_get(&process, NULL));
  return process;
}

TEST(test_processes_of_one_host_are_near) {
  const fsdp_shm_process self = get_process();
  fsdp_shm_process other = self;
  const char *why = NULL;
  other.pid++;
  CHECK(fsdp_shm_priv_process_is_near(&self, &other, &why));
  other.user++;
  CHECK(!fsdp_shm_priv_process_is_near(&self, &other, &why));
  CHECK_TEXT(why, "runs as another user");
  other.pid_namespace++;
  CHECK(!fsdp_shm_priv_process_is_near(&self, &other, &why));
  CHECK_TEXT(why, "is in another container (PID namespace)");
  other.boot[0] ^= 1;
  CHECK(!fsdp_shm_priv_process_is_near(&self, &other, &why));
  CHECK_TEXT(why, "is on another host");
}

static void check_state(const fsdp_shm_process *process, const char *name) {
  const fsdp_shm_process_state state = fsdp_shm_priv_process_look(process);
  CHECK_TEXT(fsdp_shm_priv_process_state_name(state), name);
}

TEST(test_states_of_a_process) {
  fsdp_shm_process process = get_process();
  check_state(&process, "running");
  process.start_time++; /* the pid is another's by now */
  check_state(&process, "dead");
  CHECK_TEXT(fsdp_shm_priv_process_state_name(FSDP_SHM_PROCESS_UNKNOWN),
             "in an unknown state");

  fsdp_shm_process *child = shm_shared(sizeof *child);
  (void)fflush(stdout);
  const pid_t pid = fork();
  if (pid == 0) {
    *child = get_process();
    (void)raise(SIGSTOP);
    _exit(0);
  }
  int state = 0;
  CHECK_I64(waitpid(pid, &state, WUNTRACED), pid);
  check_state(child, "stopped");
  (void)kill(pid, SIGKILL);
  siginfo_t about;
  CHECK_I64(waitid(P_PID, (id_t)pid, &about, WEXITED | WNOWAIT), 0);
  check_state(child, "dead"); /* not yet buried */
  CHECK_I64(waitpid(pid, &state, 0), pid);
  check_state(child, "dead");
}

TEST(test_a_segment_is_opened_by_who_knows_it) {
  fsdp_shm_geometry geometry;
  fsdp_shm_segment own = {0};
  fsdp_shm_segment other = {0};
  fsdp_error error = {0};
  int file = -1;
  const int64_t pid = getpid();
  CHECK(fsdp_shm_priv_layout(2, 4096, 1024, 4096, 0, &geometry));
  CHECK_I64(geometry.nbytes % 4096, 0);
  CHECK_OK(fsdp_shm_priv_segment_create(&geometry, &own, &file, NULL));
  own.header->token = 5;
  CHECK_FAILS(fsdp_shm_priv_segment_open(pid, 99999, geometry.nbytes, 5, &other,
                                         &error),
              FSDP_BACKEND, error.message, "../fd/99999 cannot be opened");
  CHECK_FAILS(fsdp_shm_priv_segment_open(pid, file, geometry.nbytes + 4096, 5,
                                         &other, &error),
              FSDP_BACKEND, error.message, "..is not a memory file of");
  CHECK_FAILS(
      fsdp_shm_priv_segment_open(pid, file, geometry.nbytes, 6, &other, &error),
      FSDP_BACKEND, error.message, "..is not the segment that was");
  CHECK(other.header == NULL);
  CHECK_OK(fsdp_shm_priv_segment_open(pid, file, geometry.nbytes, 5, &other,
                                      &error));
  /* Nobody can take the memory away again. */
  CHECK(ftruncate(file, 4096) != 0);
  atomic_store(&own.header->doorbell, 77);
  CHECK_I64(atomic_load(&other.header->doorbell), 77);
  close(file);
  fsdp_shm_priv_segment_close(&own);
  fsdp_shm_priv_segment_close(&other);
  fsdp_shm_priv_segment_close(&other);
  CHECK_I64(shm_num_segments(), 0);
}

TEST(test_memory_has_a_limit) {
  const int64_t nbytes = fsdp_shm_priv_available_nbytes();
  CHECK(nbytes > 0 && nbytes < INT64_MAX);
}

/* Each of the 65536 numbers is its own sum, but that NaN may be another. */
static void check_every_half(int32_t code, uint16_t infinity) {
  static uint16_t numbers[65536];
  static uint16_t sums[65536];
  const void *pieces[] = {numbers};
  const fsdp_dtype dtype = {code, 2};
  int64_t num_wrong = 0;
  for (int32_t i = 0; i < 65536; i++) numbers[i] = (uint16_t)i;
  fsdp_shm_priv_sum(sums, dtype, pieces, 1, 65536);
  for (int32_t i = 0; i < 65536; i++) {
    const bool is_nan = (i & 0x7FFF) > infinity;
    if (is_nan ? (sums[i] & 0x7FFF) <= infinity : sums[i] != i) num_wrong++;
  }
  CHECK_I64(num_wrong, 0);
}

TEST(test_sums_of_16_bits) {
  check_every_half(FSDP_DTYPE_FLOAT16, 0x7C00);
  check_every_half(FSDP_DTYPE_BFLOAT16, 0x7F80);
  /* Sums beyond the largest number are infinite; ties go to even. */
  const uint16_t halves[][3] = {
      {0x7BFF, 0x7BFF, 0x7C00}, {0x7BFF, 0x4C00, 0x7C00},
      {0x7BFF, 0x4BFF, 0x7BFF}, {0x6800, 0x3C00, 0x6800},
      {0x6801, 0x3C00, 0x6802}, {0x0001, 0x0001, 0x0002},
      {0xFC00, 0x7BFF, 0xFC00}};
  for (size_t i = 0; i < sizeof halves / sizeof halves[0]; i++) {
    const void *pieces[] = {&halves[i][0], &halves[i][1]};
    const fsdp_dtype dtype = {FSDP_DTYPE_FLOAT16, 2};
    uint16_t sum = 0;
    fsdp_shm_priv_sum(&sum, dtype, pieces, 2, 1);
    CHECK_I64(sum, halves[i][2]);
  }
}
