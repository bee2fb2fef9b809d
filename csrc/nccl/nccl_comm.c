/*
 * Communicators: made over the store, settled, left.
 */
#include <inttypes.h>
#include <stdio.h>

#include "nccl/nccl_priv.h"

static const char *channel_key(fsdp_channel channel) {
  return channel == FSDP_CHANNEL_GATHER ? "gather" : "reduce";
}

static fsdp_status fail_id(fsdp_nccl_transport *transport, fsdp_error *cause,
                           const char *key, fsdp_error *error) {
  char reason[FSDP_ERROR_MESSAGE_NBYTES];
  (void)snprintf(reason, sizeof reason, "%s", cause->message);
  (void)FSDP_FAIL(cause, FSDP_BACKEND,
                  "rank %" PRId64 " of %" PRId64
                  " cannot %s the id of a NCCL communicator, key '%s' of the "
                  "group's store, within %" PRId64
                  " ms (%.300s). Did rank 0 get as far as creating it?",
                  transport->rank, transport->world_size,
                  transport->rank == 0 ? "write" : "read", key,
                  transport->options.init_timeout_ms, reason);
  return fsdp_nccl_priv_fail(transport, FSDP_NCCL_NO_CHANNEL, cause, error);
}

/* The channel's id: rank 0 makes it, the store carries it. */
static fsdp_status agree_on_id(fsdp_nccl_transport *transport,
                               fsdp_channel channel, fsdp_nccl_id *id,
                               fsdp_error *error) {
  const fsdp_store *store = &transport->store;
  char key[FSDP_NCCL_KEY_NBYTES];
  fsdp_error cause = {0};
  int64_t nbytes = sizeof id->internal;
  fsdp_status status;

  (void)snprintf(key, sizeof key, "%s/id/%s", transport->options.prefix,
                 channel_key(channel));
  if (transport->rank == 0) {
    const int result = transport->api.get_unique_id(id);
    if (result != FSDP_NCCL_SUCCESS) {
      return fsdp_nccl_priv_fail_result(transport, channel,
                                        FSDP_NCCL_NO_CHANNEL, "ncclGetUniqueId",
                                        result, error);
    }
    status = store->set(store->context, key, id->internal, sizeof id->internal,
                        &cause);
  } else {
    status = store->get(store->context, key, transport->options.init_timeout_ms,
                        id->internal, sizeof id->internal, &nbytes, &cause);
  }
  if (status == FSDP_OK && nbytes != (int64_t)sizeof id->internal) {
    status = FSDP_FAIL(&cause, FSDP_BACKEND,
                       "it has %" PRId64 " bytes instead of %d", nbytes,
                       FSDP_NCCL_ID_NBYTES);
  }
  if (status != FSDP_OK) return fail_id(transport, &cause, key, error);
  return FSDP_OK;
}

fsdp_status fsdp_nccl_priv_connect(fsdp_nccl_transport *transport,
                                   fsdp_channel index, fsdp_error *error) {
  fsdp_nccl_channel *channel = &transport->channels[index];
  fsdp_nccl_id id = {{0}};
  fsdp_nccl_comm *comm = NULL;
  fsdp_nccl_config config = {
      .nbytes = sizeof config,
      .magic = FSDP_NCCL_CONFIG_MAGIC,
      .version = FSDP_NCCL_OLDEST_VERSION,
      .blocking = 0,
      .cga_cluster_size = FSDP_NCCL_CONFIG_UNDEFINED,
      .min_ctas = FSDP_NCCL_CONFIG_UNDEFINED,
      .max_ctas = FSDP_NCCL_CONFIG_UNDEFINED,
      .net_name = NULL,
      .split_share = FSDP_NCCL_CONFIG_UNDEFINED,
  };

  fsdp_status status = agree_on_id(transport, index, &id, error);
  if (status != FSDP_OK) return status;
  const int result = transport->api.comm_init_rank_config(
      &comm, (int)transport->world_size, id, (int)transport->rank, &config);
  (void)pthread_mutex_lock(&transport->lock);
  channel->comm = comm;
  channel->comm_in_use = comm;
  (void)pthread_mutex_unlock(&transport->lock);
  if (result != FSDP_NCCL_SUCCESS && result != FSDP_NCCL_IN_PROGRESS) {
    return fsdp_nccl_priv_fail_result(transport, index, (int)index,
                                      "ncclCommInitRankConfig", result, error);
  }
  status = fsdp_nccl_priv_settle(transport, index, "ncclCommInitRankConfig",
                                 transport->options.init_timeout_ms, error);
  if (status == FSDP_OK) return FSDP_OK;
  return fsdp_nccl_priv_first_error(transport, true, error);
}

fsdp_status fsdp_nccl_priv_lock_channel(fsdp_nccl_transport *transport,
                                        fsdp_channel index, fsdp_error *error) {
  fsdp_nccl_channel *channel = &transport->channels[index];
  (void)pthread_mutex_lock(&transport->lock);
  while (channel->is_busy && transport->phase == FSDP_NCCL_HEALTHY) {
    (void)pthread_cond_wait(&transport->changed, &transport->lock);
  }
  const bool is_healthy = transport->phase == FSDP_NCCL_HEALTHY;
  if (is_healthy) {
    channel->is_busy = true;
    channel->comm_in_use = channel->comm;
  }
  (void)pthread_mutex_unlock(&transport->lock);
  if (is_healthy) return FSDP_OK;
  return fsdp_nccl_priv_first_error(transport, true, error);
}

void fsdp_nccl_priv_unlock_channel(fsdp_nccl_transport *transport,
                                   fsdp_channel index) {
  (void)pthread_mutex_lock(&transport->lock);
  transport->channels[index].is_busy = false;
  (void)pthread_cond_broadcast(&transport->changed);
  (void)pthread_mutex_unlock(&transport->lock);
}

static fsdp_status fail_slow(fsdp_nccl_transport *transport,
                             fsdp_channel channel, const char *what,
                             int64_t timeout_ms, fsdp_error *error) {
  fsdp_error cause;
  char operation[FSDP_NCCL_LABEL_NBYTES + 64];
  fsdp_nccl_priv_format_operation(channel, &transport->channels[channel].last,
                                  operation, sizeof operation);
  (void)FSDP_FAIL(&cause, FSDP_BACKEND,
                  "rank %" PRId64 " of %" PRId64
                  ": %s on the host is still in progress after %" PRId64
                  " ms, at %s: another rank does not take part",
                  transport->rank, transport->world_size, what, timeout_ms,
                  operation);
  return fsdp_nccl_priv_fail(transport, (int)channel, &cause, error);
}

fsdp_status fsdp_nccl_priv_settle(fsdp_nccl_transport *transport,
                                  fsdp_channel index, const char *what,
                                  int64_t timeout_ms, fsdp_error *error) {
  fsdp_nccl_comm *comm = transport->channels[index].comm_in_use;
  int64_t started_ms = 0;
  int64_t pause_us = 0;
  for (;;) {
    int state = FSDP_NCCL_SUCCESS;
    int result = transport->api.comm_get_async_error(comm, &state);
    if (result == FSDP_NCCL_SUCCESS) result = state;
    if (result == FSDP_NCCL_SUCCESS) return FSDP_OK;
    if (result != FSDP_NCCL_IN_PROGRESS) {
      return fsdp_nccl_priv_fail_result(transport, index, (int)index, what,
                                        result, error);
    }

    if (started_ms == 0) started_ms = fsdp_nccl_priv_now_ms();
    if (timeout_ms > 0 && fsdp_nccl_priv_now_ms() - started_ms >= timeout_ms) {
      return fail_slow(transport, index, what, timeout_ms, error);
    }
    fsdp_nccl_priv_look_at_others(transport, (int)index);
    fsdp_nccl_priv_pause(&pause_us);
    /* Not waiting: who aborts waits for this thread to leave the channel. */
    const fsdp_status status =
        fsdp_nccl_priv_first_error(transport, false, error);
    if (status != FSDP_OK) return status;
  }
}

/* Whether everything in flight on the channel was done by `deadline_ms`. */
static bool drain(fsdp_nccl_transport *transport, fsdp_channel channel,
                  int64_t deadline_ms) {
  fsdp_nccl_operation oldest;
  int64_t pause_us = 0;
  for (;;) {
    if (fsdp_nccl_priv_retire(transport, channel, FSDP_NCCL_MAX_OUTSTANDING,
                              NULL) != FSDP_OK) {
      return false;
    }
    if (!fsdp_nccl_priv_oldest(transport, channel, &oldest)) return true;
    if (fsdp_nccl_priv_now_ms() >= deadline_ms) return false;
    fsdp_nccl_priv_pause(&pause_us);
  }
}

/* Whether NCCL finalized `comm` by `deadline_ms`. */
static bool flush(const fsdp_nccl_transport *transport, fsdp_nccl_comm *comm,
                  int64_t deadline_ms) {
  const fsdp_nccl_api *api = &transport->api;
  int64_t pause_us = 0;
  int result = api->comm_finalize(comm);
  if (result == FSDP_NCCL_SUCCESS) result = FSDP_NCCL_IN_PROGRESS;
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

/*
 * Note [Leaving NCCL]
 * ncclCommDestroy waits for the ranks of the same host unless the communicator
 * was finalized first, and finalizing is not blocking. So a rank that has
 * nothing in flight finalizes, which lets its network threads send what peers
 * still need, for up to leave_ms, and then destroys, which is local. Whoever
 * has not come that far by then, or has failed, aborts.
 */
void fsdp_nccl_priv_leave(fsdp_nccl_transport *transport) {
  const int64_t deadline_ms =
      fsdp_nccl_priv_now_ms() + transport->options.leave_ms;
  bool is_idle = true;
  for (int i = 0; i < FSDP_NUM_CHANNELS; i++) {
    is_idle = is_idle && drain(transport, (fsdp_channel)i, deadline_ms);
  }
  /* Else aborting gives memory and operators back, too. */
  if (is_idle) fsdp_nccl_priv_deregister_all(transport);
  for (int i = 0; i < FSDP_NUM_CHANNELS; i++) {
    fsdp_nccl_channel *channel = &transport->channels[i];
    fsdp_nccl_comm *comm = channel->comm;
    if (comm == NULL) continue;
    channel->comm = NULL;
    channel->comm_in_use = comm;
    if (is_idle) fsdp_nccl_priv_free_sums(transport, (fsdp_channel)i);
    /* Results are of no use any more. */
    if (is_idle && flush(transport, comm, deadline_ms)) {
      (void)transport->api.comm_destroy(comm);
    } else {
      (void)transport->api.comm_abort(comm);
    }
  }
}
