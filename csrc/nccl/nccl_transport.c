/*
 * Life of the NCCL transport: joined, checked, left.
 */
#include "nccl/nccl_transport.h"

#include <inttypes.h>
#include <limits.h>
#include <string.h>

#include "base/alloc.h"
#include "nccl/nccl_priv.h"

void fsdp_nccl_options_init(fsdp_nccl_options *options) {
  enum { TEN_MINUTES_MS = 600000 };
  *options = (fsdp_nccl_options){
      .init_timeout_ms = TEN_MINUTES_MS,
      .timeout_ms = TEN_MINUTES_MS,
      .grace_ms = 2000,
      .leave_ms = 2000,
      .poll_ms = 200,
  };
}

static void free_host_memory(fsdp_nccl_transport *transport) {
  for (int i = 0; i < FSDP_NUM_CHANNELS; i++) {
    fsdp_free(transport->channels[i].collectives);
    fsdp_free(transport->channels[i].scaled_sums);
  }
  fsdp_free(transport->registrations);
  fsdp_free(transport->prefix);
  fsdp_free(transport);
}

static void destroy(fsdp_transport *base) {
  fsdp_nccl_transport *transport;
  if (base == NULL) return;
  transport = fsdp_nccl_priv_of(base);
  if (transport->num_forks == fsdp_nccl_priv_num_forks()) {
    fsdp_nccl_priv_unwatch(transport);
    fsdp_nccl_priv_leave(transport);
    fsdp_nccl_priv_free_events(transport);
    (void)pthread_cond_destroy(&transport->changed);
    (void)pthread_mutex_destroy(&transport->lock);
  }
  free_host_memory(transport);
}

static fsdp_status check(fsdp_transport *base, fsdp_error *error) {
  fsdp_nccl_transport *transport = fsdp_nccl_priv_of(base);
  if (transport->num_forks != fsdp_nccl_priv_num_forks()) return FSDP_OK;
  for (int i = 0; i < FSDP_NUM_CHANNELS; i++) {
    int state = FSDP_NCCL_SUCCESS;
    int result = FSDP_NCCL_SUCCESS;
    (void)pthread_mutex_lock(&transport->lock);
    fsdp_nccl_comm *comm = transport->channels[i].comm;
    if (transport->phase == FSDP_NCCL_HEALTHY && comm != NULL) {
      result = transport->api.comm_get_async_error(comm, &state);
      if (result == FSDP_NCCL_SUCCESS) result = state;
    }
    (void)pthread_mutex_unlock(&transport->lock);
    if (result != FSDP_NCCL_SUCCESS && result != FSDP_NCCL_IN_PROGRESS) {
      return fsdp_nccl_priv_fail_result(transport, (fsdp_channel)i,
                                        FSDP_NCCL_NO_CHANNEL,
                                        "the communicator", result, error);
    }
  }
  return fsdp_nccl_priv_first_error(transport, false, error);
}

static const fsdp_transport_ops OPS = {
    .name = "nccl",
    .is_host = false,
    .destroy = destroy,
    .group_begin = fsdp_nccl_priv_group_begin,
    .group_end = fsdp_nccl_priv_group_end,
    .all_gather = fsdp_nccl_priv_all_gather,
    .broadcast = fsdp_nccl_priv_broadcast,
    .reduce_scatter = fsdp_nccl_priv_reduce_scatter,
    .all_reduce = fsdp_nccl_priv_all_reduce,
    .wait = NULL,
    .check = check,
};

static fsdp_status check_arguments(const fsdp_nccl_options *options,
                                   int64_t rank, int64_t world_size,
                                   fsdp_error *error) {
  if (world_size < 1 || world_size > INT_MAX || rank < 0 ||
      rank >= world_size) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "need 0 <= rank < world_size, got rank %" PRId64
                     " and world_size %" PRId64,
                     rank, world_size);
  }
  enum { KEY_ROOM = 64 }; /* for what comes after the prefix */
  if (options->prefix == NULL ||
      strlen(options->prefix) > FSDP_NCCL_KEY_NBYTES - KEY_ROOM) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "need a prefix for the store of at most %d bytes",
                     FSDP_NCCL_KEY_NBYTES - KEY_ROOM);
  }
  if (options->init_timeout_ms < 1 || options->timeout_ms < 0 ||
      options->grace_ms < 0 || options->leave_ms < 0 || options->poll_ms < 0) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "times of the NCCL transport must not be negative, nor 0 "
                     "to join: init %" PRId64 ", operation %" PRId64
                     ", grace %" PRId64 ", leave %" PRId64 ", poll %" PRId64
                     " ms",
                     options->init_timeout_ms, options->timeout_ms,
                     options->grace_ms, options->leave_ms, options->poll_ms);
  }
  return FSDP_OK;
}

/* The transport, without communicators; NULL when memory is out. */
static fsdp_nccl_transport *make(const fsdp_nccl_library *library,
                                 const fsdp_nccl_options *options,
                                 const fsdp_store *store, int64_t rank,
                                 int64_t world_size) {
  fsdp_nccl_transport *transport = fsdp_calloc(1, sizeof *transport);
  if (transport == NULL) return NULL;
  transport->base.ops = &OPS;
  transport->api = library->api;
  transport->options = *options;
  transport->prefix = fsdp_strdup(options->prefix);
  transport->options.prefix = transport->prefix;
  if (options->events != NULL) {
    transport->events = *options->events;
    transport->options.events = &transport->events;
  }
  transport->store = *store;
  transport->rank = rank;
  transport->world_size = world_size;
  transport->num_forks = fsdp_nccl_priv_num_forks();
  if (transport->prefix == NULL ||
      pthread_mutex_init(&transport->lock, NULL) != 0) {
    free_host_memory(transport);
    return NULL;
  }
  if (!fsdp_nccl_priv_cond_init(&transport->changed)) {
    (void)pthread_mutex_destroy(&transport->lock);
    free_host_memory(transport);
    return NULL;
  }
  return transport;
}

fsdp_status fsdp_nccl_create(const fsdp_nccl_library *library,
                             const fsdp_nccl_options *options,
                             const fsdp_store *store, int64_t rank,
                             int64_t world_size, fsdp_transport **transport,
                             fsdp_error *error) {
  fsdp_nccl_transport *self = NULL;
  fsdp_status status = FSDP_OK;

  FSDP_TRY(check_arguments(options, rank, world_size, error));
  self = make(library, options, store, rank, world_size);
  if (self == NULL) {
    return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY,
                     "NCCL transport of rank %" PRId64, rank);
  }
  for (int i = 0; i < FSDP_NUM_CHANNELS; i++) {
    FSDP_TRY(fsdp_nccl_priv_connect(self, (fsdp_channel)i, error));
  }
  FSDP_TRY(fsdp_nccl_priv_watch(self, error));
  *transport = &self->base;
  self = NULL;
done:
  destroy(self == NULL ? NULL : &self->base);
  return status;
}
