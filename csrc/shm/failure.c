/*
 * Why a rank makes no calls any more: the transport has failed, here or on
 * another rank, or belongs to another process.
 */
#include <inttypes.h>
#include <stdio.h>
#include <unistd.h>

#include "shm/shm_priv.h"

fsdp_status fsdp_shm_priv_fail(fsdp_shm *shm, const fsdp_error *failure,
                               const char *cause, fsdp_error *error) {
  fsdp_shm_header *header = shm->peers[shm->rank].segment.header;
  if (shm->failure.status == FSDP_OK) {
    shm->failure = *failure;
    (void)snprintf(header->failure, sizeof header->failure, "%s", cause);
    atomic_store(&header->presence, FSDP_SHM_FAILED);
    for (int i = 0; i < FSDP_NUM_CHANNELS; i++) {
      fsdp_shm_channel *channel = &shm->channels[i];
      channel->first = channel->end = channel->writing = 0;
    }
    fsdp_shm_priv_withdraw_offers(shm);
    shm->num_messages = 0;
    fsdp_shm_priv_ring_all(shm);
  }
  if (error != NULL) *error = shm->failure;
  return shm->failure.status;
}

fsdp_status fsdp_shm_priv_fail_as(fsdp_shm *shm, int64_t peer,
                                  const char *doing, fsdp_error *error) {
  fsdp_error failure;
  char cause[640];
  (void)snprintf(cause, sizeof cause, "%.639s",
                 shm->peers[peer].segment.header->failure);
  (void)FSDP_FAIL(&failure, FSDP_BACKEND,
                  "rank %" PRId64 " was in %.383s when rank %" PRId64
                  " failed: %s",
                  shm->rank, doing, peer, cause);
  return fsdp_shm_priv_fail(shm, &failure, cause, error);
}

fsdp_status fsdp_shm_priv_check(fsdp_shm *shm, fsdp_error *error) {
  if (shm->failure.status != FSDP_OK) {
    if (error != NULL) *error = shm->failure;
    return shm->failure.status;
  }
  for (int64_t rank = 0; rank < shm->world_size; rank++) {
    if (atomic_load(&shm->peers[rank].segment.header->presence) ==
        FSDP_SHM_FAILED) {
      return fsdp_shm_priv_fail_as(shm, rank, "no call", error);
    }
  }
  return FSDP_OK;
}

fsdp_status fsdp_shm_priv_lock(fsdp_shm *shm, fsdp_error *error) {
  if (shm->owner != getpid()) {
    return FSDP_FAIL(
        error, FSDP_INVALID_STATE,
        "process %" PRId64 " is a fork of rank %" PRId64 " (process %" PRId64
        "), which owns the transport; only that process can use it",
        (int64_t)getpid(), shm->rank, shm->owner);
  }
  (void)pthread_mutex_lock(&shm->mutex);
  if (!shm->has_user) {
    shm->user = pthread_self();
    shm->has_user = true;
  } else if (pthread_equal(shm->user, pthread_self()) == 0) {
    atomic_store(&shm->peers[shm->rank].segment.header->has_threads, true);
  }
  return FSDP_OK;
}
