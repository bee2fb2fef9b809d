/*
 * Memory limits, from /proc/meminfo and the control groups. Reserving more than
 * there is would not return an error: the kernel would kill some process.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "shm/process_priv.h"

enum { TEXT_NBYTES = 4096 };

static int64_t min_i64(int64_t a, int64_t b) {
  return a < b ? a : b;
}

static int64_t machine_nbytes(void) {
  static const char name[] = "MemAvailable:";
  char text[TEXT_NBYTES];
  if (fsdp_shm_priv_read_file("/proc/meminfo", text, sizeof text) != 0) {
    return INT64_MAX;
  }
  const char *line = strstr(text, name);
  if (line == NULL) return INT64_MAX;
  const long long kib = strtoll(line + sizeof name - 1, NULL, 10);
  return kib < 0 || kib > INT64_MAX / 1024 ? INT64_MAX : (int64_t)kib * 1024;
}

/* The limit of one control group; "max" in the file means none. */
static int64_t group_nbytes(const char *group) {
  char path[TEXT_NBYTES + 64];
  char text[64];
  (void)snprintf(path, sizeof path, "/sys/fs/cgroup%s/memory.max", group);
  if (fsdp_shm_priv_read_file(path, text, sizeof text) != 0) return INT64_MAX;
  char *end = text;
  const long long nbytes = strtoll(text, &end, 10);
  return end == text || nbytes < 0 ? INT64_MAX : (int64_t)nbytes;
}

int64_t fsdp_shm_priv_available_nbytes(void) {
  char text[TEXT_NBYTES];
  int64_t nbytes = min_i64(machine_nbytes(), group_nbytes(""));
  if (fsdp_shm_priv_read_file("/proc/self/cgroup", text, sizeof text) != 0) {
    return nbytes;
  }
  char *group = strstr(text, "0::/");
  if (group == NULL) return nbytes;
  group += sizeof "0::" - 1;
  group[strcspn(group, "\n")] = '\0';
  /* The group and its ancestors. */
  for (char *slash; (slash = strrchr(group, '/')) != NULL; *slash = '\0') {
    nbytes = min_i64(nbytes, group_nbytes(group));
  }
  return nbytes;
}
