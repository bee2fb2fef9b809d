/*
 * Communicators: made when they are first needed, with an id from the store,
 * and asked for errors.
 */
#include <inttypes.h>
#include <stdio.h>

#include "nccl/nccl_priv.h"

enum { MORE_MS = 1000 /* so that the errand's own error comes first */ };

static const char ID_STAGE[] = "the exchange of a communicator's id";
static const char INIT_STAGE[] = "ncclCommInitRankConfig";

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
  return fsdp_nccl_priv_fail(transport, cause, error);
}

/* Waits for the id, as long as the transport is healthy. */
static fsdp_status read_id(fsdp_nccl_transport *transport, const char *key,
                           fsdp_nccl_id *id, fsdp_error *cause) {
  const fsdp_store store = fsdp_nccl_priv_store_of(transport);
  int64_t nbytes = 0;
  const fsdp_status status =
      store.get(store.context, key, transport->options.init_timeout_ms, id,
                sizeof *id, &nbytes, cause);
  if (status != FSDP_OK || nbytes == (int64_t)sizeof *id) return status;
  return FSDP_FAIL(cause, FSDP_BACKEND,
                   "it has %" PRId64 " bytes instead of %zu", nbytes,
                   sizeof *id);
}

/* The id of the channel's communicator: rank 0 makes it, the others read it
 * from the store. */
static fsdp_status agree_on_id(fsdp_nccl_transport *transport,
                               fsdp_channel channel, fsdp_nccl_id *id,
                               fsdp_error *error) {
  const fsdp_store *store = &transport->store;
  char key[FSDP_NCCL_KEY_NBYTES];
  fsdp_error cause = {0};
  fsdp_status status;

  (void)snprintf(key, sizeof key, "%s/id/%s", transport->options.prefix,
                 channel_key(channel));
  if (transport->rank == 0) {
    const int result = transport->api.get_unique_id(id);
    if (result != FSDP_NCCL_SUCCESS) {
      return fsdp_nccl_priv_fail_result(transport, channel, "ncclGetUniqueId",
                                        result, error);
    }
    status = store->set(store->context, key, id, sizeof *id, &cause);
  } else {
    status = read_id(transport, key, id, &cause);
  }
  if (status == FSDP_OK) return FSDP_OK;
  return fail_id(transport, &cause, key, error);
}

/* Blocks until all ranks have come. Returns NCCL's result. */
static int make_comm(fsdp_nccl_transport *transport, fsdp_nccl_id id,
                     fsdp_nccl_comm **comm) {
  const fsdp_nccl_api *api = &transport->api;
  const fsdp_nccl_tuning *tuning = &transport->options.tuning;
  fsdp_nccl_config config = {
      .nbytes = sizeof config,
      .magic = FSDP_NCCL_CONFIG_MAGIC,
      .version = FSDP_NCCL_OLDEST_VERSION,
      .blocking = 1,
      .cga_cluster_size = tuning->cga_cluster_size,
      .min_ctas = tuning->min_ctas,
      .max_ctas = tuning->max_ctas,
      .net_name = tuning->net_name,
      .split_share = tuning->split_share,
  };
  return api->comm_init_rank_config(comm, (int)transport->world_size, id,
                                    (int)transport->rank, &config);
}

static void set_stage(fsdp_nccl_transport *transport, fsdp_channel index,
                      const char *stage) {
  (void)pthread_mutex_lock(&transport->lock);
  transport->channels[index].making_stage = stage;
  (void)pthread_mutex_unlock(&transport->lock);
}

/* Ends the wait for the communicator; `comm` may be NULL. Whether the transport
 * took it. */
static bool hand_over(fsdp_nccl_transport *transport,
                      fsdp_nccl_channel *channel, fsdp_nccl_comm *comm,
                      int result) {
  (void)pthread_mutex_lock(&transport->lock);
  const bool is_wanted = transport->phase == FSDP_NCCL_HEALTHY;
  channel->made_result = result;
  channel->is_made = true;
  if (is_wanted) channel->comm = comm;
  (void)pthread_cond_broadcast(&transport->changed);
  (void)pthread_mutex_unlock(&transport->lock);
  return is_wanted;
}

/*
 * An errand, since the store and NCCL may hang. NCCL has no way to end a
 * blocking ncclCommInitRankConfig from another thread without freeing what the
 * call uses. So the caller stops waiting at its time limit, and this thread
 * aborts the communicator when NCCL returns: when the last rank has come, or
 * when the ranks that are there end.
 */
static void connect_channel(fsdp_nccl_transport *transport,
                            fsdp_channel index) {
  fsdp_nccl_channel *channel = &transport->channels[index];
  fsdp_nccl_id id = {.internal = ""};
  fsdp_nccl_comm *comm = NULL;
  if (agree_on_id(transport, index, &id, NULL) != FSDP_OK) {
    return; /* the transport has failed: the caller returns */
  }
  set_stage(transport, index, INIT_STAGE);
  const int result = make_comm(transport, id, &comm);
  if (result != FSDP_NCCL_SUCCESS && comm != NULL) {
    (void)transport->api.comm_abort(comm); /* the first result is the error */
    comm = NULL;
  }
  if (!hand_over(transport, channel, comm, result) && comm != NULL) {
    (void)transport->api.comm_abort(comm); /* too late */
  }
}

/* Waits for the errand until `deadline_ms`. Whether NCCL has returned; stage
 * [out] what the errand does. */
static bool wait_until_made(fsdp_nccl_transport *transport,
                            fsdp_nccl_channel *channel, int64_t deadline_ms,
                            const char **stage, int *result) {
  (void)pthread_mutex_lock(&transport->lock);
  while (!channel->is_made && transport->phase == FSDP_NCCL_HEALTHY &&
         fsdp_nccl_priv_now_ms() < deadline_ms) {
    fsdp_nccl_priv_cond_wait(&transport->changed, &transport->lock,
                             deadline_ms);
  }
  const bool is_made = channel->is_made;
  *stage = channel->making_stage;
  *result = channel->made_result;
  channel->comm_in_use = channel->comm;
  (void)pthread_mutex_unlock(&transport->lock);
  return is_made;
}

static fsdp_status connect_until(fsdp_nccl_transport *transport,
                                 fsdp_channel index, int64_t deadline_ms,
                                 fsdp_error *error) {
  fsdp_nccl_channel *channel = &transport->channels[index];
  const int kind = FSDP_NCCL_CONNECTING + (int)index;
  int result = FSDP_NCCL_SUCCESS;
  const char *stage = ID_STAGE;
  fsdp_error cause;
  set_stage(transport, index, stage);
  if (!fsdp_nccl_priv_errand_start(transport, (fsdp_nccl_errand_kind)kind,
                                   connect_channel, index)) {
    (void)FSDP_FAIL(&cause, FSDP_BACKEND,
                    "rank %" PRId64 " of %" PRId64
                    ": the thread that makes a NCCL communicator cannot be "
                    "started, the system has no more threads",
                    transport->rank, transport->world_size);
    return fsdp_nccl_priv_fail(transport, &cause, error);
  }
  const bool is_made =
      wait_until_made(transport, channel, deadline_ms, &stage, &result);
  const fsdp_status status =
      fsdp_nccl_priv_first_error(transport, false, error);
  if (status != FSDP_OK) return status;
  if (!is_made) {
    return fsdp_nccl_priv_fail_slow(transport, index, stage,
                                    transport->options.init_timeout_ms, error);
  }
  if (result == FSDP_NCCL_SUCCESS) return FSDP_OK;
  if (result == FSDP_NCCL_IN_PROGRESS) {
    (void)FSDP_FAIL(&cause, FSDP_BACKEND,
                    "rank %" PRId64 " of %" PRId64
                    ": NCCL makes communicators that do not block, because of "
                    "NCCL_COMM_BLOCKING=0, in the environment or in nccl.conf: "
                    "unset it on all ranks",
                    transport->rank, transport->world_size);
    return fsdp_nccl_priv_fail(transport, &cause, error);
  }
  return fsdp_nccl_priv_fail_result(transport, index, stage, result, error);
}

fsdp_status fsdp_nccl_priv_connect(fsdp_nccl_transport *transport,
                                   fsdp_channel index, fsdp_error *error) {
  const int64_t deadline_ms =
      fsdp_nccl_priv_now_ms() + transport->options.init_timeout_ms + MORE_MS;
  fsdp_nccl_priv_set_meeting(transport, index, true);
  const fsdp_status status =
      connect_until(transport, index, deadline_ms, error);
  fsdp_nccl_priv_set_meeting(transport, index, false);
  return status;
}

void fsdp_nccl_priv_poll(fsdp_nccl_transport *transport, fsdp_channel index) {
  int state = FSDP_NCCL_SUCCESS;
  if (!fsdp_nccl_priv_trylock_comm(transport, index)) return;
  int result = transport->api.comm_get_async_error(
      transport->channels[index].comm_in_use, &state);
  if (result == FSDP_NCCL_SUCCESS) result = state;
  fsdp_nccl_priv_unlock_channel(transport, index);
  if (result == FSDP_NCCL_SUCCESS || result == FSDP_NCCL_IN_PROGRESS) return;
  (void)fsdp_nccl_priv_fail_result(transport, index, "the communicator", result,
                                   NULL); /* the transport keeps it */
}
