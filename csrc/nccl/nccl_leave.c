/*
 * Leaving a group: communicators are flushed and destroyed, or aborted.
 */
#include "nccl/nccl_priv.h"

enum { CLAIM_MS = 200, ABORT_MS = 3000 };

/* Whether NCCL finalized `comm`. Blocks, unless NCCL_COMM_BLOCKING=0. */
static bool flush(const fsdp_nccl_transport *transport, fsdp_nccl_comm *comm,
                  int64_t deadline_ms) {
  const fsdp_nccl_api *api = &transport->api;
  int64_t pause_us = 0;
  int result = api->comm_finalize(comm);
  while (result == FSDP_NCCL_IN_PROGRESS) {
    int state = FSDP_NCCL_SUCCESS;
    result = api->comm_get_async_error(comm, &state);
    if (result == FSDP_NCCL_SUCCESS) result = state;
    if (result != FSDP_NCCL_IN_PROGRESS) break;
    if (fsdp_nccl_priv_now_ms() >= deadline_ms) return false;
    fsdp_nccl_priv_pause(&pause_us);
  }
  return result == FSDP_NCCL_SUCCESS;
}

/* Takes the communicator: only this thread may end it now. NULL when another
 * one ends it. */
static fsdp_nccl_comm *take_comm(fsdp_nccl_transport *transport,
                                 fsdp_nccl_channel *channel) {
  (void)pthread_mutex_lock(&transport->lock);
  fsdp_nccl_comm *comm = channel->comm;
  channel->comm = NULL;
  (void)pthread_mutex_unlock(&transport->lock);
  return comm;
}

/* Flushes and destroys an idle communicator. Any other one is aborted later. */
static void leave_channel(fsdp_nccl_transport *transport, fsdp_channel index,
                          int64_t deadline_ms) {
  fsdp_nccl_channel *channel = &transport->channels[index];
  if (!fsdp_nccl_priv_lock_to_leave(transport, index, CLAIM_MS)) return;
  fsdp_nccl_comm *comm = channel->comm_in_use;
  if (comm != NULL) {
    fsdp_nccl_priv_deregister_all(transport, index);
    fsdp_nccl_priv_close_windows(transport, index);
    /* The results do not matter any more. */
    if (flush(transport, comm, deadline_ms) &&
        take_comm(transport, channel) == comm) {
      (void)transport->api.comm_destroy(comm);
    }
  }
  fsdp_nccl_priv_unlock_channel(transport, index);
}

/*
 * Note [Leaving NCCL]
 * ncclCommDestroy waits for the ranks of the same host unless the communicator
 * was finalized first. So a rank with nothing in flight finalizes first, which
 * lets its network threads send what peers still need. Destroying is then
 * local. Finalizing blocks, so an errand does it. A rank that is not done after
 * leave_ms, has failed, or has a thread inside NCCL, aborts.
 */
static void leave_idle(fsdp_nccl_transport *transport, fsdp_channel unused) {
  const int64_t deadline_ms =
      fsdp_nccl_priv_now_ms() + transport->options.leave_ms;
  (void)unused;
  for (int i = 0; i < FSDP_NUM_CHANNELS; i++) {
    if (!fsdp_nccl_priv_drain(transport, (fsdp_channel)i, deadline_ms)) return;
  }
  for (int i = 0; i < FSDP_NUM_CHANNELS; i++) {
    leave_channel(transport, (fsdp_channel)i, deadline_ms);
  }
}

void fsdp_nccl_priv_leave(fsdp_nccl_transport *transport,
                          const fsdp_error *reason, int64_t deadline_ms) {
  (void)pthread_mutex_lock(&transport->lock);
  const bool is_healthy = transport->phase == FSDP_NCCL_HEALTHY;
  if (is_healthy) {
    transport->phase = FSDP_NCCL_FAILED;
    transport->error = *reason;
    (void)pthread_cond_broadcast(&transport->changed);
  }
  (void)pthread_mutex_unlock(&transport->lock);
  if (is_healthy &&
      fsdp_nccl_priv_errand_start(transport, FSDP_NCCL_LEAVING, leave_idle,
                                  FSDP_CHANNEL_GATHER)) {
    (void)fsdp_nccl_priv_errand_wait(transport, FSDP_NCCL_LEAVING, deadline_ms);
  }
  /* After a failure, the ENDING errand aborts. */
  if (!fsdp_nccl_priv_errand_wait(transport, FSDP_NCCL_ENDING,
                                  fsdp_nccl_priv_now_ms() + ABORT_MS)) {
    return;
  }
  (void)fsdp_nccl_priv_abort_all(transport, fsdp_nccl_priv_now_ms() + ABORT_MS);
}
