/*
 * The doorbell of each rank: a rank with nothing to do sleeps until another one
 * rings.
 *
 * Note [Sleeping]
 * A rank that goes to sleep counts itself in num_sleepers, checks all counters
 * once more, then sleeps on its doorbell. A rank that moves one of its own
 * counters reads num_sleepers afterwards, and rings if it is not 0. All these
 * accesses are sequentially consistent, so one of the two sees the other.
 */
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "shm/shm_priv.h"

int64_t fsdp_shm_priv_now(void) {
  struct timespec now;
  (void)clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000 * FSDP_SHM_NS_PER_MS + now.tv_nsec;
}

void fsdp_shm_priv_ring(const fsdp_shm *shm, int64_t rank) {
  fsdp_shm_header *header = shm->peers[rank].segment.header;
  if (atomic_load(&header->num_sleepers) <= 0) return;
  atomic_fetch_add(&header->doorbell, 1);
  (void)syscall(SYS_futex, &header->doorbell, FUTEX_WAKE, INT32_MAX, NULL, NULL,
                0);
}

void fsdp_shm_priv_ring_all(const fsdp_shm *shm) {
  for (int64_t rank = 0; rank < shm->world_size; rank++) {
    fsdp_shm_priv_ring(shm, rank);
  }
}

uint32_t fsdp_shm_priv_listen(const fsdp_shm *shm) {
  fsdp_shm_header *header = shm->peers[shm->rank].segment.header;
  atomic_fetch_add(&header->num_sleepers, 1);
  return atomic_load(&header->doorbell);
}

void fsdp_shm_priv_sleep(const fsdp_shm *shm, uint32_t heard, int64_t ms) {
  fsdp_shm_header *header = shm->peers[shm->rank].segment.header;
  const struct timespec limit = {.tv_nsec = (long)ms * FSDP_SHM_NS_PER_MS};
  (void)syscall(SYS_futex, &header->doorbell, FUTEX_WAIT, heard, &limit, NULL,
                0);
}

void fsdp_shm_priv_unlisten(const fsdp_shm *shm) {
  atomic_fetch_sub(&shm->peers[shm->rank].segment.header->num_sleepers, 1);
}
