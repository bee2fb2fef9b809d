/*
 * The watchdog: one thread that looks after all transports of the process, so
 * that a failure or a hang is noticed while the host waits for the device. See
 * Note [NCCL threads].
 */
#define _POSIX_C_SOURCE 200809L /* pthread_sigmask */
#include <inttypes.h>
#include <signal.h>
#include <stdatomic.h>

#include "nccl/nccl_priv.h"

enum { OLD_MS = 1000 }; /* the age at which the others are looked at, too */

/* The process's only list; a transport is in it from watch to unwatch. */
static pthread_mutex_t g_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t g_changed;
static pthread_once_t g_once = PTHREAD_ONCE_INIT;
static fsdp_nccl_transport *g_transports = NULL;
static pthread_t g_thread;
static bool g_has_thread = false;
static bool g_is_ready = false; /* g_changed is initialised */
/* The thread of another generation ends. */
static uintptr_t g_generation = 0;
static _Atomic unsigned g_num_forks = 0;

/* In the child of a fork: no thread, no transports, whatever held the lock. */
static void forget_all(void) {
  const pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;
  g_lock = fresh;
  g_is_ready = fsdp_nccl_priv_cond_init(&g_changed);
  g_transports = NULL;
  g_has_thread = false;
  g_generation++;
  atomic_fetch_add(&g_num_forks, 1);
}

static void prepare(void) {
  g_is_ready = fsdp_nccl_priv_cond_init(&g_changed) &&
               pthread_atfork(NULL, NULL, forget_all) == 0;
}

unsigned fsdp_nccl_priv_num_forks(void) {
  return atomic_load(&g_num_forks);
}

bool fsdp_nccl_has_watchdog(void) {
  (void)pthread_mutex_lock(&g_lock);
  const bool has_thread = g_has_thread;
  (void)pthread_mutex_unlock(&g_lock);
  return has_thread;
}

/* An error that NCCL reports by itself, between calls. */
static bool look_at_comm(fsdp_nccl_transport *transport, fsdp_channel index) {
  int state = FSDP_NCCL_SUCCESS;
  int result = FSDP_NCCL_SUCCESS;
  (void)pthread_mutex_lock(&transport->lock);
  const bool is_healthy = transport->phase == FSDP_NCCL_HEALTHY;
  fsdp_nccl_comm *comm = transport->channels[index].comm;
  if (is_healthy && comm != NULL) {
    result = transport->api.comm_get_async_error(comm, &state);
    if (result == FSDP_NCCL_SUCCESS) result = state;
  }
  (void)pthread_mutex_unlock(&transport->lock);
  if (!is_healthy) return false;
  if (result == FSDP_NCCL_SUCCESS || result == FSDP_NCCL_IN_PROGRESS) {
    return true;
  }
  (void)fsdp_nccl_priv_fail_result(transport, index, FSDP_NCCL_NO_CHANNEL,
                                   "the communicator", result, NULL);
  return false; /* the error is kept in the transport */
}

static void fail_hung(fsdp_nccl_transport *transport, fsdp_channel index,
                      const fsdp_nccl_operation *oldest) {
  fsdp_error cause;
  char operation[FSDP_NCCL_LABEL_NBYTES + 64];
  fsdp_nccl_priv_format_operation(index, oldest, operation, sizeof operation);
  (void)FSDP_FAIL(&cause, FSDP_BACKEND,
                  "rank %" PRId64 " of %" PRId64
                  ": %s did not end within %" PRId64
                  " ms: another rank has not come to it, or the network does "
                  "not answer",
                  transport->rank, transport->world_size, operation,
                  transport->options.timeout_ms);
  (void)fsdp_nccl_priv_fail(transport, FSDP_NCCL_NO_CHANNEL, &cause, NULL);
}

/* Operations that should have ended. */
static bool look_at_operations(fsdp_nccl_transport *transport,
                               fsdp_channel index) {
  fsdp_nccl_operation oldest;
  fsdp_error cause;
  if (transport->options.events == NULL) return true;
  if (fsdp_nccl_priv_retire(transport, index, FSDP_NCCL_MAX_OUTSTANDING,
                            &cause) != FSDP_OK) {
    (void)fsdp_nccl_priv_fail(transport, FSDP_NCCL_NO_CHANNEL, &cause, NULL);
    return false;
  }
  if (!fsdp_nccl_priv_oldest(transport, index, &oldest)) return true;
  const int64_t age_ms = fsdp_nccl_priv_now_ms() - oldest.started_ms;
  const int64_t timeout_ms = transport->options.timeout_ms;
  if (timeout_ms > 0 && age_ms >= timeout_ms) {
    fail_hung(transport, index, &oldest);
    return false;
  }
  if (age_ms >= OLD_MS) {
    fsdp_nccl_priv_look_at_others(transport, FSDP_NCCL_NO_CHANNEL);
  }
  return true;
}

static void look_at(fsdp_nccl_transport *transport) {
  const fsdp_nccl_events *events = transport->options.events;
  if (events != NULL && events->enter_thread != NULL) {
    events->enter_thread(events->context);
  }
  for (int i = 0; i < FSDP_NUM_CHANNELS; i++) {
    if (!look_at_comm(transport, (fsdp_channel)i)) return;
  }
  for (int i = 0; i < FSDP_NUM_CHANNELS; i++) {
    if (!look_at_operations(transport, (fsdp_channel)i)) return;
  }
}

/* The shortest time between two looks that a transport asks for. */
static int64_t period_ms(void) {
  int64_t shortest = INT64_MAX;
  for (const fsdp_nccl_transport *t = g_transports; t != NULL; t = t->next) {
    if (t->options.poll_ms < shortest) shortest = t->options.poll_ms;
  }
  return shortest < 1 ? 1 : shortest;
}

static void *run(void *argument) {
  const uintptr_t generation = (uintptr_t)argument;
  (void)pthread_mutex_lock(&g_lock);
  while (g_generation == generation && g_transports != NULL) {
    fsdp_nccl_priv_cond_wait(&g_changed, &g_lock,
                             fsdp_nccl_priv_now_ms() + period_ms());
    fsdp_nccl_transport *transport = g_transports;
    while (g_generation == generation && transport != NULL) {
      transport->is_watched = true; /* it stays in the list until then */
      (void)pthread_mutex_unlock(&g_lock);
      look_at(transport);
      (void)pthread_mutex_lock(&g_lock);
      transport->is_watched = false;
      (void)pthread_cond_broadcast(&g_changed);
      transport = transport->next;
    }
  }
  (void)pthread_mutex_unlock(&g_lock);
  return NULL;
}

/* Starts the thread, with the lock held. It takes no signals: those are for
 * the threads of the program. */
static bool start(void) {
  sigset_t all;
  sigset_t before;
  void *generation = (void *)++g_generation; /* a number, nothing to free */
  (void)sigfillset(&all);
  if (pthread_sigmask(SIG_SETMASK, &all, &before) != 0) return false;
  const bool is_started = pthread_create(&g_thread, NULL, run, generation) == 0;
  (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
  return is_started;
}

fsdp_status fsdp_nccl_priv_watch(fsdp_nccl_transport *transport,
                                 fsdp_error *error) {
  bool is_watched = false;
  (void)pthread_once(&g_once, prepare);
  (void)pthread_mutex_lock(&g_lock);
  transport->next = g_transports;
  g_transports = transport;
  if (g_is_ready) {
    if (!g_has_thread) g_has_thread = start();
    is_watched = g_has_thread;
  }
  if (!is_watched) g_transports = transport->next;
  transport->is_listed = is_watched;
  (void)pthread_cond_broadcast(&g_changed); /* its period may be shorter */
  (void)pthread_mutex_unlock(&g_lock);
  if (is_watched) return FSDP_OK;
  return FSDP_FAIL(error, FSDP_BACKEND,
                   "the thread that watches NCCL cannot be started, the system "
                   "has no more threads");
}

void fsdp_nccl_priv_unwatch(fsdp_nccl_transport *transport) {
  pthread_t thread;
  bool is_last = false;
  if (!transport->is_listed) return;
  (void)pthread_mutex_lock(&g_lock);
  while (transport->is_watched) {
    (void)pthread_cond_wait(&g_changed, &g_lock);
  }
  fsdp_nccl_transport **place = &g_transports;
  while (*place != transport) place = &(*place)->next;
  *place = transport->next;
  transport->is_listed = false;
  if (g_transports == NULL) {
    is_last = true;
    thread = g_thread;
    g_has_thread = false;
    g_generation++;
    (void)pthread_cond_broadcast(&g_changed);
  }
  (void)pthread_mutex_unlock(&g_lock);
  if (is_last) (void)pthread_join(thread, NULL); /* it holds nothing */
}
