/*
 * What /proc and /sys tell: the identity of a rank's process, whether it still
 * runs, and how much memory it may take.
 */
#ifndef FSDP_SHM_PROCESS_PRIV_H
#define FSDP_SHM_PROCESS_PRIV_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/* Identifies a process for good: pids are used again, start times are not. */
typedef struct fsdp_shm_process {
  int64_t pid;
  uint64_t start_time; /* clock ticks since the machine's start */
  uint64_t pid_namespace;
  int64_t user;
  char boot[48]; /* id of the machine's last start */
} fsdp_shm_process;

typedef enum fsdp_shm_process_state {
  FSDP_SHM_PROCESS_RUNNING = 0,
  FSDP_SHM_PROCESS_STOPPED, /* by a signal or a debugger */
  FSDP_SHM_PROCESS_DEAD,
  FSDP_SHM_PROCESS_UNKNOWN /* /proc cannot be read */
} fsdp_shm_process_state;

/* The calling process. FSDP_BACKEND where /proc is closed. */
FSDP_NODISCARD fsdp_status fsdp_shm_priv_process_get(fsdp_shm_process *process,
                                                     fsdp_error *error);

/* Whether memory can be shared with `other`; why_not is a static text. */
FSDP_NODISCARD bool fsdp_shm_priv_process_is_near(const fsdp_shm_process *self,
                                                  const fsdp_shm_process *other,
                                                  const char **why_not);

/* Does not wait. Cannot fail. */
fsdp_shm_process_state fsdp_shm_priv_process_look(
    const fsdp_shm_process *process);

/* "running", "stopped", "dead" or "in an unknown state". */
const char *fsdp_shm_priv_process_state_name(fsdp_shm_process_state state);

/* Reads as much of a file of /proc or /sys as fits. Returns 0, or errno. */
int fsdp_shm_priv_read_file(const char *path, char *text, size_t text_nbytes);

/* memory.c: the smaller of the bytes that the machine has available and those
 * that the control groups (v2) of this process allow in all. INT64_MAX when
 * neither can be read. Cannot fail. */
int64_t fsdp_shm_priv_available_nbytes(void);

#endif /* FSDP_SHM_PROCESS_PRIV_H */
