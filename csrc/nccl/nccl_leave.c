/*
 * Leaving a group: communicators are flushed and destroyed, or aborted.
 */
#include "nccl/nccl_priv.h"

enum { CLAIM_MS = 200, ABORT_MS = 3000 };

static void set_finalizing(fsdp_nccl_transport *transport,
                           fsdp_nccl_channel *channel, bool value) {
  (void)pthread_mutex_lock(&transport->lock);
  channel->is_finalizing = value;
  (void)pthread_mutex_unlock(&transport->lock);
}

/* Whether NCCL finalized the communicator. Blocks. */
static bool flush(fsdp_nccl_transport *transport, fsdp_nccl_channel *channel) {
  set_finalizing(transport, channel, true);
  const int result = transport->api.comm_finalize(channel->comm_in_use);
  set_finalizing(transport, channel, false);
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
static void leave_channel(fsdp_nccl_transport *transport, fsdp_channel index) {
  fsdp_nccl_channel *channel = &transport->channels[index];
  if (!fsdp_nccl_priv_lock_to_leave(transport, index, CLAIM_MS)) return;
  fsdp_nccl_comm *comm = channel->comm_in_use;
  if (comm != NULL) {
    fsdp_nccl_priv_note_progress(transport);
    /* The results do not matter any more. */
    if (flush(transport, channel) && take_comm(transport, channel) == comm) {
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
 * local. Finalizing blocks, so an errand does it. A rank of which no operation
 * ends for leave_ms, that has failed, or has a thread inside NCCL, aborts.
 *
 * Finalizing also waits for the graphs that captured a collective. A
 * communicator in which a thread waits for them is not aborted: nothing of it
 * is in flight, and the thread would go on in freed memory.
 */
static void leave_idle(fsdp_nccl_transport *transport, fsdp_channel unused) {
  (void)unused;
  for (int i = 0; i < FSDP_NUM_CHANNELS; i++) {
    if (!fsdp_nccl_priv_drain(transport, (fsdp_channel)i,
                              transport->options.leave_ms)) {
      return;
    }
  }
  for (int i = 0; i < FSDP_NUM_CHANNELS; i++) {
    leave_channel(transport, (fsdp_channel)i);
  }
}

static int64_t deadline_of(fsdp_nccl_transport *transport) {
  return fsdp_nccl_priv_progressed_ms(transport) + transport->options.leave_ms;
}

/* Waits for the errand as long as it goes on. */
static void wait_for_leaving(fsdp_nccl_transport *transport) {
  while (!fsdp_nccl_priv_errand_wait(transport, FSDP_NCCL_LEAVING,
                                     deadline_of(transport))) {
    if (fsdp_nccl_priv_now_ms() >= deadline_of(transport)) return;
  }
}

void fsdp_nccl_priv_leave(fsdp_nccl_transport *transport,
                          const fsdp_error *reason, int64_t *deadline_ms) {
  (void)pthread_mutex_lock(&transport->lock);
  transport->progressed_ms = *deadline_ms - transport->options.leave_ms;
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
    wait_for_leaving(transport);
  }
  if (deadline_of(transport) > *deadline_ms) {
    *deadline_ms = deadline_of(transport);
  }
  /* After a failure, the ENDING errand aborts. */
  if (!fsdp_nccl_priv_errand_wait(transport, FSDP_NCCL_ENDING,
                                  fsdp_nccl_priv_now_ms() + ABORT_MS)) {
    return;
  }
  (void)fsdp_nccl_priv_abort_all(transport, fsdp_nccl_priv_now_ms() + ABORT_MS);
}
