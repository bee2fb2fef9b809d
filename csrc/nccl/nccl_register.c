/*
 * Registration of memory with both communicators, since a block of the arena
 * holds parameters at one time and gradients at another.
 */
#include <inttypes.h>

#include "base/alloc.h"
#include "nccl/nccl_priv.h"

/* The index of `buffer`, or -1. Under the lock. */
static int64_t find(const fsdp_nccl_transport *transport, const void *buffer) {
  for (size_t i = 0; i < transport->num_registrations; i++) {
    if (transport->registrations[i].buffer == buffer) return (int64_t)i;
  }
  return -1;
}

/* Removes and returns the registration of `buffer`; zeros if there is none. */
static fsdp_nccl_registration drop(fsdp_nccl_transport *transport,
                                   const void *buffer) {
  fsdp_nccl_registration found = {0};
  (void)pthread_mutex_lock(&transport->lock);
  const int64_t index = find(transport, buffer);
  if (index >= 0) {
    found = transport->registrations[index];
    transport->registrations[index] =
        transport->registrations[--transport->num_registrations];
  }
  (void)pthread_mutex_unlock(&transport->lock);
  return found;
}

/* Deregisters with the communicator of a channel that this thread uses. */
static void deregister_locked(const fsdp_nccl_transport *transport,
                              fsdp_channel channel, void *handle) {
  fsdp_nccl_comm *comm = transport->channels[channel].comm_in_use;
  if (handle == NULL || comm == NULL) return;
  if (transport->api.comm_deregister == NULL) return;
  /* The memory is freed, whatever NCCL returns. */
  (void)transport->api.comm_deregister(comm, handle);
}

static void deregister_handle(fsdp_nccl_transport *transport,
                              fsdp_channel channel, void *handle) {
  if (handle == NULL) return;
  /* A transport that failed has no communicator, so nothing is registered. */
  if (fsdp_nccl_priv_lock_channel(transport, channel, NULL) != FSDP_OK) return;
  deregister_locked(transport, channel, handle);
  fsdp_nccl_priv_unlock_channel(transport, channel);
}

/* Stores the handle in the registration, which may have been removed meanwhile.
 */
static void keep_handle(fsdp_nccl_transport *transport, fsdp_channel channel,
                        const void *buffer, void *handle) {
  (void)pthread_mutex_lock(&transport->lock);
  const int64_t index = find(transport, buffer);
  if (index >= 0) transport->registrations[index].handles[channel] = handle;
  (void)pthread_mutex_unlock(&transport->lock);
  if (index < 0) deregister_locked(transport, channel, handle);
}

/* On a channel that this thread uses. A channel without a communicator
 * registers when it gets one. */
static fsdp_status register_locked(fsdp_nccl_transport *transport,
                                   fsdp_channel channel, void *buffer,
                                   int64_t nbytes, fsdp_error *error) {
  const fsdp_nccl_api *api = &transport->api;
  fsdp_nccl_comm *comm = transport->channels[channel].comm_in_use;
  void *handle = NULL;
  if (comm == NULL) return FSDP_OK;
  const int result = api->comm_register(comm, buffer, (size_t)nbytes, &handle);
  if (result == FSDP_NCCL_SUCCESS) {
    keep_handle(transport, channel, buffer, handle);
    return FSDP_OK;
  }
  const char *name = api->get_error_string(result);
  return FSDP_FAIL(error, FSDP_BACKEND,
                   "rank %" PRId64 ": NCCL does not register %" PRId64
                   " bytes, result %d (%s); collectives on them work, slower",
                   transport->rank, nbytes, result,
                   name == NULL ? "unknown" : name);
}

/* Adds the buffer, without handles. */
static fsdp_status enter(fsdp_nccl_transport *transport, void *buffer,
                         int64_t nbytes, fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  (void)pthread_mutex_lock(&transport->lock);
  if (find(transport, buffer) >= 0) {
    status = FSDP_FAIL(error, FSDP_INVALID_STATE,
                       "rank %" PRId64
                       ": the buffer %p is registered already, deregister it "
                       "before its memory is used anew",
                       transport->rank, buffer);
    goto done;
  }
  void *registrations = transport->registrations;
  const bool has_room = fsdp_grow(
      &registrations, &transport->registration_capacity,
      transport->num_registrations + 1, sizeof *transport->registrations);
  transport->registrations = registrations;
  if (!has_room) {
    status = FSDP_FAIL(error, FSDP_OUT_OF_MEMORY,
                       "registration of %" PRId64 " bytes with NCCL", nbytes);
    goto done;
  }
  transport->registrations[transport->num_registrations++] =
      (fsdp_nccl_registration){.buffer = buffer, .nbytes = nbytes};
done:
  (void)pthread_mutex_unlock(&transport->lock);
  return status;
}

fsdp_status fsdp_nccl_register(fsdp_transport *base, void *buffer,
                               int64_t nbytes, fsdp_error *error) {
  fsdp_nccl_transport *transport = fsdp_nccl_priv_of(base);
  if (fsdp_nccl_priv_is_forked(transport)) return FSDP_OK;
  if (transport->api.comm_register == NULL || nbytes <= 0) return FSDP_OK;

  fsdp_status status = enter(transport, buffer, nbytes, error);
  if (status != FSDP_OK) return status;
  for (int i = 0; i < FSDP_NUM_CHANNELS && status == FSDP_OK; i++) {
    status = fsdp_nccl_priv_lock_channel(transport, (fsdp_channel)i, error);
    if (status != FSDP_OK) break;
    status = register_locked(transport, (fsdp_channel)i, buffer, nbytes, error);
    fsdp_nccl_priv_unlock_channel(transport, (fsdp_channel)i);
  }
  if (status != FSDP_OK) fsdp_nccl_deregister(base, buffer);
  return status;
}

void fsdp_nccl_deregister(fsdp_transport *base, void *buffer) {
  fsdp_nccl_transport *transport = fsdp_nccl_priv_of(base);
  if (fsdp_nccl_priv_is_forked(transport)) return;
  const fsdp_nccl_registration found = drop(transport, buffer);
  for (int i = 0; i < FSDP_NUM_CHANNELS; i++) {
    deregister_handle(transport, (fsdp_channel)i, found.handles[i]);
  }
}

/* Copies registration number `index`. False behind the last one. */
static bool get(fsdp_nccl_transport *transport, size_t index,
                fsdp_nccl_registration *out) {
  (void)pthread_mutex_lock(&transport->lock);
  const bool is_there = index < transport->num_registrations;
  if (is_there) *out = transport->registrations[index];
  (void)pthread_mutex_unlock(&transport->lock);
  return is_there;
}

void fsdp_nccl_priv_register_all(fsdp_nccl_transport *transport,
                                 fsdp_channel channel) {
  fsdp_nccl_registration each;
  for (size_t i = 0; get(transport, i, &each); i++) {
    if (each.handles[channel] != NULL) continue;
    /* Without registration collectives work, with a copy. */
    (void)!register_locked(transport, channel, each.buffer, each.nbytes, NULL);
  }
}

void fsdp_nccl_priv_deregister_all(fsdp_nccl_transport *transport,
                                   fsdp_channel channel) {
  fsdp_nccl_registration each;
  for (size_t i = 0; get(transport, i, &each); i++) {
    deregister_locked(transport, channel, each.handles[channel]);
  }
}
