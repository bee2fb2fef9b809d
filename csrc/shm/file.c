/*
 * Memory files: without a name, they end with the last process that maps them.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "shm/process_priv.h"
#include "shm/segment_priv.h"

/* The ranks of this host reserve so many such files; half of the available
 * memory is left. */
static fsdp_status check_memory(int64_t num_files, int64_t nbytes,
                                fsdp_error *error) {
  const int64_t available = fsdp_shm_priv_available_nbytes();
  if (nbytes <= available / 2 / num_files) return FSDP_OK;
  return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY,
                   "%" PRId64 " times %" PRId64
                   " bytes of shared memory would take more than half of "
                   "the %" PRId64 " bytes available",
                   num_files, nbytes, available);
}

/* Reserves all memory of the file, so that no later write fails on a full
 * machine (SIGBUS), and fixes its size. */
static fsdp_status reserve(int descriptor, int64_t nbytes, fsdp_error *error) {
  struct rlimit limit;
  /* Beyond it the kernel would send SIGXFSZ. */
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
      limit.rlim_cur < (rlim_t)nbytes) {
    return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY,
                     "%" PRId64
                     " bytes of shared memory are above the limit of a file's "
                     "size, raise `ulimit -f`",
                     nbytes);
  }
  int code = 0;
  if (ftruncate(descriptor, (off_t)nbytes) != 0) code = errno;
  if (code == 0) code = posix_fallocate(descriptor, 0, (off_t)nbytes);
  if (code != 0) {
    return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY,
                     "no %" PRId64 " bytes of shared memory (%s)", nbytes,
                     strerror(code));
  }
  (void)fcntl(descriptor, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW);
  return FSDP_OK;
}

fsdp_status fsdp_shm_priv_file_create(const char *name, int64_t nbytes,
                                      int64_t num_files, int *descriptor,
                                      fsdp_error *error) {
  fsdp_status status = check_memory(num_files, nbytes, error);
  if (status != FSDP_OK) return status;
  int file = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (file < 0) {
    return FSDP_FAIL(error, FSDP_BACKEND, "memfd_create failed (%s)",
                     strerror(errno));
  }
  FSDP_TRY(reserve(file, nbytes, error));
  *descriptor = file;
  file = -1;
done:
  if (file >= 0) close(file);
  return status;
}

fsdp_status fsdp_shm_priv_file_open(int64_t pid, int64_t descriptor,
                                    int64_t nbytes, int *opened,
                                    fsdp_error *error) {
  char path[64];
  (void)snprintf(path, sizeof path, "/proc/%" PRId64 "/fd/%" PRId64, pid,
                 descriptor);
  const int file = open(path, O_RDWR | O_CLOEXEC);
  if (file < 0) {
    return FSDP_FAIL(error, FSDP_BACKEND, "%s cannot be opened (%s)", path,
                     strerror(errno));
  }
  struct stat about;
  if (fstat(file, &about) != 0 || about.st_size != (off_t)nbytes) {
    close(file);
    return FSDP_FAIL(error, FSDP_BACKEND,
                     "%s is not a memory file of %" PRId64 " bytes", path,
                     nbytes);
  }
  *opened = file;
  return FSDP_OK;
}
