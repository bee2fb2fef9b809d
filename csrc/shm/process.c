/*
 * Reads a process's start, namespace and state from /proc.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "shm/process_priv.h"

int fsdp_shm_priv_read_file(const char *path, char *text, size_t text_nbytes) {
  const int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return errno;
  size_t nbytes = 0;
  int code = 0;
  while (nbytes + 1 < text_nbytes) {
    const ssize_t part = read(file, text + nbytes, text_nbytes - 1 - nbytes);
    if (part < 0 && errno == EINTR) continue;
    if (part < 0) code = errno;
    if (part <= 0) break;
    nbytes += (size_t)part;
  }
  close(file);
  text[nbytes] = '\0';
  return code;
}

/* The state letter and the start time of a process. Returns 0, or errno. */
static int read_stat(int64_t pid, char *state, uint64_t *start_time) {
  enum { STATE_FIELD = 3, START_FIELD = 22 };
  char path[64];
  char text[1024];
  (void)snprintf(path, sizeof path, "/proc/%" PRId64 "/stat", pid);
  const int code = fsdp_shm_priv_read_file(path, text, sizeof text);
  if (code != 0) return code;
  /* The second field is the program's name, which may contain any character. */
  const char *field = strrchr(text, ')');
  if (field == NULL || field[1] != ' ') return EIO;
  field += 2;
  *state = *field;
  for (int i = STATE_FIELD; i < START_FIELD; i++) {
    field = strchr(field, ' ');
    if (field == NULL) return EIO;
    field++;
  }
  *start_time = strtoull(field, NULL, 10);
  return 0;
}

fsdp_status fsdp_shm_priv_process_get(fsdp_shm_process *process,
                                      fsdp_error *error) {
  fsdp_shm_process self = {.pid = getpid(), .user = geteuid()};
  char state;
  int code = read_stat(self.pid, &state, &self.start_time);
  if (code != 0) {
    return FSDP_FAIL(error, FSDP_BACKEND, "/proc/%" PRId64 "/stat: %s",
                     self.pid, strerror(code));
  }
  struct stat about;
  if (stat("/proc/self/ns/pid", &about) != 0) {
    return FSDP_FAIL(error, FSDP_BACKEND, "/proc/self/ns/pid: %s",
                     strerror(errno));
  }
  self.pid_namespace = about.st_ino;
  code = fsdp_shm_priv_read_file("/proc/sys/kernel/random/boot_id", self.boot,
                                 sizeof self.boot);
  if (code != 0) {
    return FSDP_FAIL(error, FSDP_BACKEND, "/proc/sys/kernel/random/boot_id: %s",
                     strerror(code));
  }
  *process = self;
  return FSDP_OK;
}

bool fsdp_shm_priv_process_is_near(const fsdp_shm_process *self,
                                   const fsdp_shm_process *other,
                                   const char **why_not) {
  if (strncmp(self->boot, other->boot, sizeof self->boot) != 0) {
    *why_not = "is on another host";
  } else if (self->pid_namespace != other->pid_namespace) {
    *why_not = "is in another container (PID namespace)";
  } else if (self->user != other->user) {
    *why_not = "runs as another user";
  } else {
    return true;
  }
  return false;
}

fsdp_shm_process_state fsdp_shm_priv_process_look(
    const fsdp_shm_process *process) {
  char state;
  uint64_t start_time;
  const int code = read_stat(process->pid, &state, &start_time);
  if (code == ENOENT || code == ESRCH) return FSDP_SHM_PROCESS_DEAD;
  if (code != 0) return FSDP_SHM_PROCESS_UNKNOWN;
  if (start_time != process->start_time) return FSDP_SHM_PROCESS_DEAD;
  switch (state) {
    case 'Z':
    case 'X':
    case 'x':
      return FSDP_SHM_PROCESS_DEAD;
    case 'T':
    case 't':
      return FSDP_SHM_PROCESS_STOPPED;
    default:
      return FSDP_SHM_PROCESS_RUNNING;
  }
}

const char *fsdp_shm_priv_process_state_name(fsdp_shm_process_state state) {
  switch (state) {
    case FSDP_SHM_PROCESS_RUNNING:
      return "running";
    case FSDP_SHM_PROCESS_STOPPED:
      return "stopped";
    case FSDP_SHM_PROCESS_DEAD:
      return "dead";
    case FSDP_SHM_PROCESS_UNKNOWN:
      break;
  }
  return "in an unknown state";
}
