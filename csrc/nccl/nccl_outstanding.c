/*
 * Outstanding operations: NCCL has them, and the device has not finished them.
 * An event behind each tells when it has.
 */
#include "nccl/nccl_priv.h"

static fsdp_nccl_outstanding *at(fsdp_nccl_channel *channel, int64_t index) {
  return &channel->outstanding[(channel->first_outstanding + index) %
                               FSDP_NCCL_MAX_OUTSTANDING];
}

fsdp_status fsdp_nccl_priv_track(fsdp_nccl_transport *transport,
                                 fsdp_channel index,
                                 const fsdp_nccl_operation *operation,
                                 void *stream, fsdp_error *error) {
  enum { RETIRED_PER_CALL = 4 }; /* more than one, so that the ring empties */
  fsdp_nccl_channel *channel = &transport->channels[index];
  const fsdp_nccl_events *events = transport->options.events;
  fsdp_status status = FSDP_OK;
  if (events == NULL) return FSDP_OK;
  FSDP_TRY(fsdp_nccl_priv_retire(transport, index, RETIRED_PER_CALL, error));

  (void)pthread_mutex_lock(&transport->lock);
  /* When the ring is full, the newest event is recorded again, behind this
   * operation. */
  const bool is_full = channel->num_outstanding == FSDP_NCCL_MAX_OUTSTANDING;
  fsdp_nccl_outstanding *place =
      at(channel,
         is_full ? channel->num_outstanding - 1 : channel->num_outstanding);
  (void)pthread_mutex_unlock(&transport->lock);

  /* No other thread uses a free place, or frees another one than the oldest. */
  if (place->event == NULL) {
    FSDP_TRY(events->create(events->context, &place->event, error));
  }
  FSDP_TRY(events->record(events->context, place->event, stream, error));

  (void)pthread_mutex_lock(&transport->lock);
  place->last_sequence = operation->sequence;
  if (!is_full) {
    place->operation = *operation;
    if (transport->phase == FSDP_NCCL_HEALTHY) channel->num_outstanding++;
  }
  (void)pthread_mutex_unlock(&transport->lock);
done:
  return status;
}

void *fsdp_nccl_priv_event_behind(fsdp_nccl_transport *transport,
                                  fsdp_channel index, int64_t sequence) {
  fsdp_nccl_channel *channel = &transport->channels[index];
  void *event = NULL;
  (void)pthread_mutex_lock(&transport->lock);
  for (int64_t i = channel->num_outstanding - 1; i >= 0; i--) {
    const fsdp_nccl_outstanding *place = at(channel, i);
    if (place->operation.sequence > sequence) continue;
    if (place->last_sequence >= sequence) event = place->event;
    break;
  }
  (void)pthread_mutex_unlock(&transport->lock);
  return event;
}

/* Whether the operation is done, or its event can never tell. Under
 * the lock. */
static fsdp_status query(const fsdp_nccl_events *events, void *event,
                         bool *is_done, fsdp_error *error) {
  FSDP_LOCAL_ERROR(cause);
  const fsdp_status status =
      events->query(events->context, event, is_done, &cause);
  if (status == FSDP_OK) return FSDP_OK;
  switch (fsdp_nccl_priv_capture_error(&cause)) {
    case FSDP_NCCL_CAPTURE_RUNS:
      *is_done = false;
      return FSDP_OK;
    case FSDP_NCCL_EVENT_CAPTURED:
      *is_done = true;
      return FSDP_OK;
    default:
      if (error != NULL) *error = cause;
      return status;
  }
}

fsdp_status fsdp_nccl_priv_retire(fsdp_nccl_transport *transport,
                                  fsdp_channel index, int64_t max,
                                  fsdp_error *error) {
  fsdp_nccl_channel *channel = &transport->channels[index];
  const fsdp_nccl_events *events = transport->options.events;
  fsdp_status status = FSDP_OK;
  if (events == NULL) return FSDP_OK;
  (void)pthread_mutex_lock(&transport->lock);
  for (int64_t i = 0; i < max && channel->num_outstanding > 0; i++) {
    bool is_done = false;
    FSDP_TRY(query(events, at(channel, 0)->event, &is_done, error));
    if (!is_done) break;
    channel->first_outstanding =
        (channel->first_outstanding + 1) % FSDP_NCCL_MAX_OUTSTANDING;
    channel->num_outstanding--;
  }
done:
  (void)pthread_mutex_unlock(&transport->lock);
  return status;
}

bool fsdp_nccl_priv_oldest(fsdp_nccl_transport *transport, fsdp_channel index,
                           fsdp_nccl_operation *operation) {
  fsdp_nccl_channel *channel = &transport->channels[index];
  (void)pthread_mutex_lock(&transport->lock);
  const bool is_any = channel->num_outstanding > 0;
  if (is_any) *operation = at(channel, 0)->operation;
  (void)pthread_mutex_unlock(&transport->lock);
  return is_any;
}

/* Whether the communicators are being aborted, and nothing in flight counts. */
static bool is_aborting(fsdp_nccl_transport *transport) {
  (void)pthread_mutex_lock(&transport->lock);
  const bool is_over =
      transport->is_aborting || transport->phase == FSDP_NCCL_FAILING;
  (void)pthread_mutex_unlock(&transport->lock);
  return is_over;
}

void fsdp_nccl_priv_note_progress(fsdp_nccl_transport *transport) {
  (void)pthread_mutex_lock(&transport->lock);
  transport->progressed_ms = fsdp_nccl_priv_now_ms();
  (void)pthread_mutex_unlock(&transport->lock);
}

int64_t fsdp_nccl_priv_progressed_ms(fsdp_nccl_transport *transport) {
  (void)pthread_mutex_lock(&transport->lock);
  const int64_t progressed_ms = transport->progressed_ms;
  (void)pthread_mutex_unlock(&transport->lock);
  return progressed_ms;
}

bool fsdp_nccl_priv_drain(fsdp_nccl_transport *transport, fsdp_channel index,
                          int64_t limit_ms) {
  fsdp_nccl_operation oldest;
  int64_t awaited = -1; /* the sequence of an operation */
  int64_t pause_us = 0;
  for (;;) {
    if (fsdp_nccl_priv_retire(transport, index, FSDP_NCCL_MAX_OUTSTANDING,
                              NULL) != FSDP_OK) {
      return false;
    }
    if (is_aborting(transport)) return false;
    if (!fsdp_nccl_priv_oldest(transport, index, &oldest)) return true;
    if (oldest.sequence != awaited) {
      if (awaited >= 0) fsdp_nccl_priv_note_progress(transport);
      awaited = oldest.sequence;
    }
    if (fsdp_nccl_priv_now_ms() - fsdp_nccl_priv_progressed_ms(transport) >=
        limit_ms) {
      return false;
    }
    fsdp_nccl_priv_pause(&pause_us);
  }
}

void fsdp_nccl_priv_free_events(fsdp_nccl_transport *transport) {
  const fsdp_nccl_events *events = transport->options.events;
  if (events == NULL) return;
  for (int i = 0; i < FSDP_NUM_CHANNELS; i++) {
    fsdp_nccl_channel *channel = &transport->channels[i];
    for (int j = 0; j < FSDP_NCCL_MAX_OUTSTANDING; j++) {
      void *event = channel->outstanding[j].event;
      channel->outstanding[j].event = NULL;
      if (event != NULL) events->destroy(events->context, event);
    }
  }
}
