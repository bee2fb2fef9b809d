/*
 * The calls of shm_transport.h that send and receive messages.
 */
#include <inttypes.h>
#include <stdio.h>

#include "shm/shm_priv.h"
#include "shm/shm_transport.h"

static fsdp_status check_message(const fsdp_shm *shm,
                                 const fsdp_shm_message *message,
                                 fsdp_error *error) {
  if (message->peer >= 0 && message->peer < shm->world_size &&
      message->peer != shm->rank && message->nbytes >= 0) {
    return FSDP_OK;
  }
  return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                   "message of %" PRId64 " bytes between rank %" PRId64
                   " and rank %" PRId64 " of %" PRId64 " ranks",
                   message->nbytes, shm->rank, message->peer, shm->world_size);
}

static fsdp_status start(fsdp_transport *transport, fsdp_shm_message *message,
                         const char *label, fsdp_error *error) {
  fsdp_shm *shm = (fsdp_shm *)transport;
  fsdp_status status = check_message(shm, message, error);
  if (status != FSDP_OK) return status;
  (void)snprintf(message->label, sizeof message->label, "%.*s",
                 (int)sizeof message->label - 1,
                 label == NULL ? "no label" : label);
  status = fsdp_shm_priv_lock(shm, error);
  if (status != FSDP_OK) return status;
  if (shm->failure.status != FSDP_OK) {
    status = fsdp_shm_priv_check(shm, error);
  } else {
    status = fsdp_shm_priv_messages_start(shm, message, error);
  }
  if (status == FSDP_OK) status = fsdp_shm_priv_progress(shm, error);
  (void)pthread_mutex_unlock(&shm->mutex);
  return status;
}

fsdp_status fsdp_shm_send(fsdp_transport *transport, int64_t receiver,
                          const void *data, int64_t nbytes, const char *label,
                          fsdp_error *error) {
  union {
    const void *source;
    char *data; /* of a send it is only read */
  } memory = {.source = data};
  fsdp_shm_message message = {
      .is_send = true, .peer = receiver, .data = memory.data, .nbytes = nbytes};
  return start(transport, &message, label, error);
}

fsdp_status fsdp_shm_recv(fsdp_transport *transport, int64_t sender, void *data,
                          int64_t nbytes, const char *label,
                          fsdp_error *error) {
  fsdp_shm_message message = {.peer = sender, .data = data, .nbytes = nbytes};
  return start(transport, &message, label, error);
}

bool fsdp_shm_has_writers(fsdp_transport *transport) {
  fsdp_shm *shm = (fsdp_shm *)transport;
  if (fsdp_shm_priv_lock(shm, NULL) != FSDP_OK) return false;
  const bool has_writers = shm->has_writers;
  (void)pthread_mutex_unlock(&shm->mutex);
  return has_writers;
}

fsdp_status fsdp_shm_move_messages(fsdp_transport *transport,
                                   fsdp_error *error) {
  fsdp_shm *shm = (fsdp_shm *)transport;
  fsdp_status status = fsdp_shm_priv_lock(shm, error);
  if (status != FSDP_OK) return status;
  status = fsdp_shm_priv_check(shm, error);
  if (status == FSDP_OK) status = fsdp_shm_priv_progress(shm, error);
  (void)pthread_mutex_unlock(&shm->mutex);
  return status;
}

fsdp_status fsdp_shm_wait_messages(fsdp_transport *transport,
                                   fsdp_error *error) {
  fsdp_shm *shm = (fsdp_shm *)transport;
  const fsdp_shm_goal goal = {.is_messages = true};
  fsdp_status status = fsdp_shm_priv_lock(shm, error);
  if (status != FSDP_OK) return status;
  status = fsdp_shm_priv_check(shm, error);
  if (status == FSDP_OK) status = fsdp_shm_priv_wait(shm, &goal, error);
  (void)pthread_mutex_unlock(&shm->mutex);
  return status;
}
