/*
 * One thread at a time on a channel: a thread marks it as in use before it
 * calls NCCL. See Note [One thread in a communicator].
 */
#include "nccl/nccl_priv.h"

/* Under the lock. */
static void take(fsdp_nccl_channel *channel) {
  channel->is_busy = true;
  channel->busy_since_ms = fsdp_nccl_priv_now_ms();
  channel->comm_in_use = channel->comm;
}

fsdp_status fsdp_nccl_priv_lock_channel(fsdp_nccl_transport *transport,
                                        fsdp_channel index, fsdp_error *error) {
  fsdp_nccl_channel *channel = &transport->channels[index];
  (void)pthread_mutex_lock(&transport->lock);
  while (channel->is_busy && transport->phase == FSDP_NCCL_HEALTHY) {
    (void)pthread_cond_wait(&transport->changed, &transport->lock);
  }
  const bool is_healthy = transport->phase == FSDP_NCCL_HEALTHY;
  if (is_healthy) take(channel);
  (void)pthread_mutex_unlock(&transport->lock);
  if (is_healthy) return FSDP_OK;
  return fsdp_nccl_priv_first_error(transport, true, error);
}

bool fsdp_nccl_priv_trylock_comm(fsdp_nccl_transport *transport,
                                 fsdp_channel index) {
  fsdp_nccl_channel *channel = &transport->channels[index];
  (void)pthread_mutex_lock(&transport->lock);
  const bool is_free = transport->phase == FSDP_NCCL_HEALTHY &&
                       !channel->is_busy && channel->comm != NULL;
  if (is_free) take(channel);
  (void)pthread_mutex_unlock(&transport->lock);
  return is_free;
}

bool fsdp_nccl_priv_lock_to_leave(fsdp_nccl_transport *transport,
                                  fsdp_channel index, int64_t time_ms) {
  (void)pthread_mutex_lock(&transport->lock);
  const bool is_free =
      fsdp_nccl_priv_wait_until_free(transport, index, time_ms) &&
      !transport->is_aborting;
  if (is_free) take(&transport->channels[index]);
  (void)pthread_mutex_unlock(&transport->lock);
  return is_free;
}

void fsdp_nccl_priv_set_meeting(fsdp_nccl_transport *transport,
                                fsdp_channel index, bool is_meeting) {
  fsdp_nccl_channel *channel = &transport->channels[index];
  (void)pthread_mutex_lock(&transport->lock);
  channel->is_meeting = is_meeting;
  channel->busy_since_ms = fsdp_nccl_priv_now_ms();
  (void)pthread_mutex_unlock(&transport->lock);
}

void fsdp_nccl_priv_unlock_channel(fsdp_nccl_transport *transport,
                                   fsdp_channel index) {
  (void)pthread_mutex_lock(&transport->lock);
  transport->channels[index].is_busy = false;
  (void)pthread_cond_broadcast(&transport->changed);
  (void)pthread_mutex_unlock(&transport->lock);
}

bool fsdp_nccl_priv_wait_until_free(fsdp_nccl_transport *transport,
                                    fsdp_channel index, int64_t time_ms) {
  const fsdp_nccl_channel *channel = &transport->channels[index];
  const int64_t deadline_ms = fsdp_nccl_priv_now_ms() + time_ms;
  while (channel->is_busy && fsdp_nccl_priv_now_ms() < deadline_ms) {
    fsdp_nccl_priv_cond_wait(&transport->changed, &transport->lock,
                             deadline_ms);
  }
  return !channel->is_busy;
}
