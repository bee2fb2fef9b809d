/*
 * Registration of memory with both communicators: blocks of the arena take
 * turns between parameters and gradients.
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

static void deregister_handle(fsdp_nccl_transport *transport,
                              fsdp_channel channel, void *handle) {
  if (handle == NULL || transport->api.comm_deregister == NULL) return;
  /* A transport that failed has no communicator, and no registrations. */
  if (fsdp_nccl_priv_lock_channel(transport, channel, NULL) != FSDP_OK) return;
  fsdp_nccl_comm *comm = transport->channels[channel].comm_in_use;
  /* The memory is going, whatever NCCL says. */
  if (comm != NULL) (void)transport->api.comm_deregister(comm, handle);
  fsdp_nccl_priv_unlock_channel(transport, channel);
}

static fsdp_status register_with(fsdp_nccl_transport *transport,
                                 fsdp_channel channel, void *buffer,
                                 int64_t nbytes, void **handle,
                                 fsdp_error *error) {
  const fsdp_nccl_api *api = &transport->api;
  fsdp_status status = fsdp_nccl_priv_lock_channel(transport, channel, error);
  if (status != FSDP_OK) return status;
  const int result = api->comm_register(
      transport->channels[channel].comm_in_use, buffer, (size_t)nbytes, handle);
  fsdp_nccl_priv_unlock_channel(transport, channel);
  if (result == FSDP_NCCL_SUCCESS) return FSDP_OK;
  const char *name = api->get_error_string(result);
  return FSDP_FAIL(error, FSDP_BACKEND,
                   "rank %" PRId64 ": NCCL does not register %" PRId64
                   " bytes, result %d (%s); collectives on them work, slower",
                   transport->rank, nbytes, result,
                   name == NULL ? "unknown" : name);
}

fsdp_status fsdp_nccl_register(fsdp_transport *base, void *buffer,
                               int64_t nbytes, fsdp_error *error) {
  fsdp_nccl_transport *transport = fsdp_nccl_priv_of(base);
  fsdp_nccl_registration made = {.buffer = buffer};
  fsdp_status status = FSDP_OK;
  if (transport->num_forks != fsdp_nccl_priv_num_forks()) return FSDP_OK;
  if (transport->api.comm_register == NULL || nbytes <= 0) return FSDP_OK;

  (void)pthread_mutex_lock(&transport->lock);
  const bool is_there = find(transport, buffer) >= 0;
  (void)pthread_mutex_unlock(&transport->lock);
  if (is_there) {
    return FSDP_FAIL(error, FSDP_INVALID_STATE,
                     "rank %" PRId64
                     ": the buffer %p is registered already, deregister it "
                     "before its memory is used anew",
                     transport->rank, buffer);
  }
  for (int i = 0; i < FSDP_NUM_CHANNELS; i++) {
    FSDP_TRY(register_with(transport, (fsdp_channel)i, buffer, nbytes,
                           &made.handles[i], error));
  }

  (void)pthread_mutex_lock(&transport->lock);
  void *registrations = transport->registrations;
  const bool has_room = fsdp_grow(
      &registrations, &transport->registration_capacity,
      transport->num_registrations + 1, sizeof *transport->registrations);
  transport->registrations = registrations;
  if (has_room) {
    transport->registrations[transport->num_registrations++] = made;
  }
  (void)pthread_mutex_unlock(&transport->lock);
  if (!has_room) {
    status = FSDP_FAIL(error, FSDP_OUT_OF_MEMORY,
                       "registration of %" PRId64 " bytes with NCCL", nbytes);
  }
done:
  for (int i = 0; i < FSDP_NUM_CHANNELS && status != FSDP_OK; i++) {
    deregister_handle(transport, (fsdp_channel)i, made.handles[i]);
  }
  return status;
}

void fsdp_nccl_deregister(fsdp_transport *base, void *buffer) {
  fsdp_nccl_transport *transport = fsdp_nccl_priv_of(base);
  fsdp_nccl_registration found = {0};
  if (transport->num_forks != fsdp_nccl_priv_num_forks()) return;
  (void)pthread_mutex_lock(&transport->lock);
  const int64_t index = find(transport, buffer);
  if (index >= 0) {
    found = transport->registrations[index];
    transport->registrations[index] =
        transport->registrations[--transport->num_registrations];
  }
  (void)pthread_mutex_unlock(&transport->lock);
  for (int i = 0; i < FSDP_NUM_CHANNELS; i++) {
    deregister_handle(transport, (fsdp_channel)i, found.handles[i]);
  }
}

void fsdp_nccl_priv_deregister_all(fsdp_nccl_transport *transport) {
  while (transport->num_registrations > 0) {
    fsdp_nccl_deregister(&transport->base, transport->registrations[0].buffer);
  }
}
