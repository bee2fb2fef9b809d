/*
 * A transport that fails: keeps the first error, aborts the communicators, then
 * exchanges positions with the other ranks. See Note [NCCL failures].
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "nccl/nccl_priv.h"

enum {
  BUSY_MS = 200,          /* for a thread inside NCCL to return */
  REVOKED_BUSY_MS = 2000, /* the same after a revoke */
  ABORT_MS = 3000,        /* for both of these and the aborts */
  MORE_MS = 1000          /* for the store, beyond grace_ms */
};

/*
 * Note [Aborting under a call]
 * No two threads are in one communicator, except here. A thread can be stuck
 * inside a launch: NCCL connects to peers that do not come, or the device's
 * queue is full behind the collective that hangs. The thread returns when that
 * collective is stopped. Where ncclCommRevoke exists, it does that without
 * freeing anything. Elsewhere, or if that does not help, the communicator is
 * aborted while the thread is inside, as c10d does: the alternative is a
 * process that never ends.
 *
 * Revoking and aborting may wait for the device's streams, and so for a kernel
 * of another communicator that hangs too. So each communicator is aborted by a
 * thread of its own, also across transports. (NCCL runs aborts inside one
 * ncclGroupStart/End side by side only from 2.22 on.)
 */
static void abort_channel(fsdp_nccl_transport *transport, fsdp_channel index) {
  fsdp_nccl_channel *channel = &transport->channels[index];
  (void)pthread_mutex_lock(&transport->lock);
  const bool is_free =
      fsdp_nccl_priv_wait_until_free(transport, index, BUSY_MS);
  if (!is_free && channel->is_finalizing) {
    (void)pthread_mutex_unlock(&transport->lock);
    return; /* Note [Leaving NCCL] */
  }
  if (!is_free && transport->api.comm_revoke != NULL && channel->comm != NULL) {
    fsdp_nccl_comm *stuck = channel->comm;
    (void)pthread_mutex_unlock(&transport->lock);
    (void)transport->api.comm_revoke(stuck,
                                     0); /* the abort below reports enough */
    (void)pthread_mutex_lock(&transport->lock);
    (void)fsdp_nccl_priv_wait_until_free(transport, index, REVOKED_BUSY_MS);
  }
  fsdp_nccl_comm *comm = channel->comm;
  channel->comm = NULL;
  (void)pthread_mutex_unlock(&transport->lock);
  if (comm != NULL)
    (void)transport->api.comm_abort(comm); /* the first error is kept */
}

/* Drops the operations in flight. Whether there is a communicator to abort. */
static bool has_comm(fsdp_nccl_transport *transport,
                     fsdp_nccl_channel *channel) {
  (void)pthread_mutex_lock(&transport->lock);
  const bool has = channel->comm != NULL;
  transport->is_aborting = true;
  channel->num_outstanding = 0; /* nobody waits for them any more */
  (void)pthread_mutex_unlock(&transport->lock);
  return has;
}

bool fsdp_nccl_priv_abort_all(fsdp_nccl_transport *transport,
                              int64_t deadline_ms) {
  bool is_done = true;
  for (int i = 0; i < FSDP_NUM_CHANNELS; i++) {
    const int kind = FSDP_NCCL_ABORTING + i;
    if (!has_comm(transport, &transport->channels[i])) continue;
    if (!fsdp_nccl_priv_errand_start(transport, (fsdp_nccl_errand_kind)kind,
                                     abort_channel, (fsdp_channel)i)) {
      abort_channel(transport, (fsdp_channel)i); /* no more threads */
    }
  }
  for (int i = 0; i < FSDP_NUM_CHANNELS; i++) {
    const int kind = FSDP_NCCL_ABORTING + i;
    if (!fsdp_nccl_priv_errand_wait(transport, (fsdp_nccl_errand_kind)kind,
                                    deadline_ms)) {
      is_done = false;
    }
  }
  return is_done;
}

/* An errand: what follows the first error. */
static void end(fsdp_nccl_transport *transport, fsdp_channel unused) {
  char position[FSDP_NCCL_WORDS_NBYTES];
  fsdp_error final;
  (void)unused;
  (void)pthread_mutex_lock(&transport->lock);
  final = transport->error;
  (void)pthread_mutex_unlock(&transport->lock);
  fsdp_nccl_priv_format_position(transport, position, sizeof position);
  /* An abort that does not return in time is left to its thread. */
  (void)fsdp_nccl_priv_abort_all(transport, fsdp_nccl_priv_now_ms() + ABORT_MS);

  if (transport->world_size > 1) {
    if (fsdp_nccl_priv_publish(transport, position, final.message)) {
      fsdp_nccl_priv_collect(transport, position, &final);
    } else {
      const size_t length = strlen(final.message);
      (void)snprintf(final.message + length, sizeof final.message - length,
                     ". What the other ranks did is not known: the group's "
                     "store does not answer. This rank is %s.",
                     position);
    }
  }
  (void)pthread_mutex_lock(&transport->lock);
  transport->error = final;
  transport->phase = FSDP_NCCL_FAILED;
  (void)pthread_cond_broadcast(&transport->changed);
  (void)pthread_mutex_unlock(&transport->lock);
}

fsdp_status fsdp_nccl_priv_fail(fsdp_nccl_transport *transport,
                                const fsdp_error *cause, fsdp_error *error) {
  (void)pthread_mutex_lock(&transport->lock);
  const bool is_first = transport->phase == FSDP_NCCL_HEALTHY;
  if (is_first) {
    transport->phase = FSDP_NCCL_FAILING;
    transport->error = *cause;
    transport->words_deadline_ms = fsdp_nccl_priv_now_ms() + ABORT_MS +
                                   transport->options.grace_ms + MORE_MS;
    (void)pthread_cond_broadcast(&transport->changed);
  }
  (void)pthread_mutex_unlock(&transport->lock);
  if (is_first && !fsdp_nccl_priv_errand_start(transport, FSDP_NCCL_ENDING, end,
                                               FSDP_CHANNEL_GATHER)) {
    end(transport, FSDP_CHANNEL_GATHER); /* the system has no more threads */
  }
  return fsdp_nccl_priv_first_error(transport, false, error);
}

fsdp_status fsdp_nccl_priv_fail_result(fsdp_nccl_transport *transport,
                                       fsdp_channel index, const char *what,
                                       int result, fsdp_error *error) {
  const fsdp_nccl_api *api = &transport->api;
  fsdp_error cause;
  char operation[FSDP_NCCL_LABEL_NBYTES + 64];
  char said[320] = "";
  const char *name = api->get_error_string(result);
  (void)pthread_mutex_lock(&transport->lock);
  const fsdp_nccl_operation issued = transport->channels[index].last;
  const bool is_healthy = transport->phase == FSDP_NCCL_HEALTHY;
  (void)pthread_mutex_unlock(&transport->lock);
  if (api->get_last_error != NULL && is_healthy) {
    /* NCCL keeps one text for the whole process. */
    const char *last = api->get_last_error(NULL);
    if (last != NULL) (void)snprintf(said, sizeof said, "%s", last);
  }

  fsdp_nccl_priv_format_operation(transport, index, &issued, operation,
                                  sizeof operation);
  (void)FSDP_FAIL(&cause, FSDP_BACKEND,
                  "rank %" PRId64 " of %" PRId64
                  ": %s failed at %s with NCCL result %d (%s%s%s)",
                  transport->rank, transport->world_size, what, operation,
                  result, name == NULL ? "unknown" : name,
                  said[0] == 0 ? "" : ": ", said);
  return fsdp_nccl_priv_fail(transport, &cause, error);
}

fsdp_status fsdp_nccl_priv_fail_slow(fsdp_nccl_transport *transport,
                                     fsdp_channel channel, const char *what,
                                     int64_t timeout_ms, fsdp_error *error) {
  fsdp_error cause;
  char operation[FSDP_NCCL_LABEL_NBYTES + 64];
  (void)pthread_mutex_lock(&transport->lock);
  const fsdp_nccl_operation last = transport->channels[channel].last;
  (void)pthread_mutex_unlock(&transport->lock);
  fsdp_nccl_priv_format_operation(transport, channel, &last, operation,
                                  sizeof operation);
  (void)FSDP_FAIL(&cause, FSDP_BACKEND,
                  "rank %" PRId64 " of %" PRId64
                  ": %s on the host is still in progress after %" PRId64
                  " ms, at %s: another rank does not take part",
                  transport->rank, transport->world_size, what, timeout_ms,
                  operation);
  return fsdp_nccl_priv_fail(transport, &cause, error);
}
