/* Host layout: compares the names of hosts. */
#include "transports/host_layout.h"

#include <string.h>

/* Whether an earlier rank has the host of `rank`. */
static int is_seen(const char *const *hosts, int64_t rank) {
  for (int64_t earlier = 0; earlier < rank; earlier++) {
    if (strcmp(hosts[earlier], hosts[rank]) == 0) return 1;
  }
  return 0;
}

fsdp_host_layout fsdp_host_layout_of(const char *const *hosts,
                                     int64_t world_size) {
  fsdp_host_layout layout = {.num_hosts = 0, .num_local = 0};
  for (int64_t rank = 0; rank < world_size; rank++) {
    if (!is_seen(hosts, rank)) layout.num_hosts++;
  }
  if (layout.num_hosts == 0 || world_size % layout.num_hosts != 0)
    return layout;
  const int64_t num_local = world_size / layout.num_hosts;
  for (int64_t rank = 0; rank < world_size; rank++) {
    const int64_t first = rank - rank % num_local;
    /* With as many blocks as hosts, blocks of one host each are all of it. */
    if (strcmp(hosts[rank], hosts[first]) != 0) return layout;
  }
  layout.num_local = num_local;
  return layout;
}
