/*
 * Errands: work of a transport that may block, in NCCL or in the store. It runs
 * on a thread of its own, so that the watchdog never waits and a caller only as
 * long as it chooses.
 */
#define _POSIX_C_SOURCE 200809L /* pthread_sigmask */
#include <signal.h>

#include "nccl/nccl_priv.h"

void fsdp_nccl_priv_enter_thread(const fsdp_nccl_transport *transport) {
  const fsdp_nccl_events *events = transport->options.events;
  if (events != NULL && events->enter_thread != NULL) {
    events->enter_thread(events->context);
  }
}

static void *run(void *argument) {
  fsdp_nccl_errand *errand = argument;
  fsdp_nccl_transport *transport = errand->transport;
  /* NCCL restores the device that was current. That must not be another rank's,
   * where this process would then use memory. */
  fsdp_nccl_priv_enter_thread(transport);
  errand->body(transport, errand->channel);
  (void)pthread_mutex_lock(&transport->lock);
  errand->is_done = true;
  transport->num_errands--;
  const bool is_heir = transport->is_orphan && transport->num_errands == 0;
  (void)pthread_cond_broadcast(&transport->changed);
  (void)pthread_mutex_unlock(&transport->lock);
  /* Any other errand is joined before the transport is freed, or is not the
   * last. */
  if (is_heir) fsdp_nccl_priv_free(transport);
  return NULL;
}

/* Under the lock. The thread blocks all signals: they are for the threads of
 * the program. */
static bool start(fsdp_nccl_errand *errand) {
  sigset_t all;
  sigset_t before;
  (void)sigfillset(&all);
  if (pthread_sigmask(SIG_SETMASK, &all, &before) != 0) return false;
  const bool is_started =
      pthread_create(&errand->thread, NULL, run, errand) == 0;
  (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
  return is_started;
}

bool fsdp_nccl_priv_errand_start(fsdp_nccl_transport *transport,
                                 fsdp_nccl_errand_kind kind,
                                 fsdp_nccl_errand_body body,
                                 fsdp_channel channel) {
  fsdp_nccl_errand *errand = &transport->errands[kind];
  (void)pthread_mutex_lock(&transport->lock);
  bool is_free = !errand->is_started;
  if (errand->is_started && errand->is_done) {
    (void)pthread_join(errand->thread, NULL); /* it takes no lock any more */
    is_free = true;
  }
  if (is_free) {
    *errand = (fsdp_nccl_errand){
        .transport = transport, .body = body, .channel = channel};
    transport->num_errands++;
    errand->is_started = start(errand);
    if (!errand->is_started) transport->num_errands--;
    if (errand->is_started && transport->is_orphan) {
      (void)pthread_detach(errand->thread);
    }
  }
  const bool is_started = is_free && errand->is_started;
  (void)pthread_mutex_unlock(&transport->lock);
  return is_started;
}

/* Under the lock. */
static bool wait_until_done(fsdp_nccl_transport *transport,
                            const fsdp_nccl_errand *errand,
                            int64_t deadline_ms) {
  while (errand->is_started && !errand->is_done &&
         fsdp_nccl_priv_now_ms() < deadline_ms) {
    fsdp_nccl_priv_cond_wait(&transport->changed, &transport->lock,
                             deadline_ms);
  }
  return !errand->is_started || errand->is_done;
}

bool fsdp_nccl_priv_errand_wait(fsdp_nccl_transport *transport,
                                fsdp_nccl_errand_kind kind,
                                int64_t deadline_ms) {
  (void)pthread_mutex_lock(&transport->lock);
  const bool is_done =
      wait_until_done(transport, &transport->errands[kind], deadline_ms);
  (void)pthread_mutex_unlock(&transport->lock);
  return is_done;
}

bool fsdp_nccl_priv_errands_end(fsdp_nccl_transport *transport,
                                int64_t deadline_ms) {
  (void)pthread_mutex_lock(&transport->lock);
  while (transport->num_errands > 0 && fsdp_nccl_priv_now_ms() < deadline_ms) {
    fsdp_nccl_priv_cond_wait(&transport->changed, &transport->lock,
                             deadline_ms);
  }
  for (int i = 0; i < FSDP_NCCL_NUM_ERRANDS; i++) {
    fsdp_nccl_errand *errand = &transport->errands[i];
    if (!errand->is_started) continue;
    if (errand->is_done) {
      (void)pthread_join(errand->thread, NULL);
    } else {
      (void)pthread_detach(errand->thread);
    }
    errand->is_started = false;
  }
  transport->is_orphan = transport->num_errands > 0;
  const bool is_done = !transport->is_orphan;
  (void)pthread_mutex_unlock(&transport->lock);
  return is_done;
}
