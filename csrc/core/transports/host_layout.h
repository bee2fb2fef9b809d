/*
 * Host layout: how the ranks of a group lie on hosts, and whether collectives
 * can go by hosts.
 */
#ifndef FSDP_TRANSPORTS_HOST_LAYOUT_H
#define FSDP_TRANSPORTS_HOST_LAYOUT_H

#include <stdint.h>

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Rank `host * num_local + local` is rank `local` of host `host`. */
typedef struct fsdp_host_layout {
  int64_t num_hosts; /* 1: all ranks share a host */
  int64_t num_local; /* ranks of each host; 0: the hosts hold different numbers,
                        or ranks that do not follow each other */
} fsdp_host_layout;

/* hosts: the name of each rank's host, `world_size` >= 1 of them.
 * Cannot fail. */
fsdp_host_layout fsdp_host_layout_of(const char *const *hosts,
                                     int64_t world_size);

#ifdef __cplusplus
}
#endif
#endif /* FSDP_TRANSPORTS_HOST_LAYOUT_H */
