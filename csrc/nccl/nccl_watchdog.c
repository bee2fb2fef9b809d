/*
 * The watchdog: one thread that watches all transports of the process, so that
 * a failure or a hang is found while the host waits for the device. See Note
 * [NCCL threads].
 */
#define _POSIX_C_SOURCE 200809L /* pthread_sigmask */
#include <inttypes.h>
#include <signal.h>

#include "nccl/nccl_priv.h"

enum {
  OLD_MS = 1000, /* the age from which another rank's failure is looked for */
  LOOK_MS = 1000 /* between two such looks */
};

/* The list of all transports of the process, from watch to unwatch. */
static pthread_mutex_t g_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t g_changed;
static pthread_once_t g_once = PTHREAD_ONCE_INIT;
static fsdp_nccl_transport *g_transports = NULL;
static pthread_t g_thread;
static bool g_has_thread = false;
static bool g_is_ready = false; /* g_changed is initialised */
static bool g_is_over = false;  /* fsdp_nccl_leave_all was called */
/* A thread of an older generation ends. */
static uintptr_t g_generation = 0;

/* In a forked child: no thread and no transports, whoever held the lock. */
static void forget_all(void) {
  const pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;
  g_lock = fresh;
  g_is_ready = fsdp_nccl_priv_cond_init(&g_changed);
  g_transports = NULL;
  g_has_thread = false;
  g_is_over = false;
  g_generation++;
}

static void prepare(void) {
  g_is_ready = fsdp_nccl_priv_cond_init(&g_changed) &&
               pthread_atfork(NULL, NULL, forget_all) == 0;
}

bool fsdp_nccl_priv_has_watchdog(void) {
  (void)pthread_mutex_lock(&g_lock);
  const bool has_thread = g_has_thread;
  (void)pthread_mutex_unlock(&g_lock);
  return has_thread;
}

static void fail_hung(fsdp_nccl_transport *transport, fsdp_channel index,
                      const fsdp_nccl_operation *oldest) {
  fsdp_error cause;
  char operation[FSDP_NCCL_LABEL_NBYTES + 64];
  fsdp_nccl_priv_format_operation(transport, index, oldest, operation,
                                  sizeof operation);
  (void)FSDP_FAIL(&cause, FSDP_BACKEND,
                  "rank %" PRId64 " of %" PRId64
                  ": %s did not end within %" PRId64
                  " ms: another rank has not come to it, or the network does "
                  "not answer",
                  transport->rank, transport->world_size, operation,
                  transport->options.timeout_ms);
  (void)fsdp_nccl_priv_fail(transport, &cause, NULL);
}

/* An errand: looks in the store whether another rank has failed. */
static void look(fsdp_nccl_transport *transport, fsdp_channel unused) {
  char words[FSDP_NCCL_WORDS_NBYTES];
  fsdp_error cause;
  (void)unused;
  if (!fsdp_nccl_priv_read_failure(transport, words, sizeof words)) return;
  (void)FSDP_FAIL(&cause, FSDP_BACKEND,
                  "rank %" PRId64 " of %" PRId64
                  " ends because another rank failed: %s",
                  transport->rank, transport->world_size, words);
  (void)fsdp_nccl_priv_fail(transport, &cause,
                            NULL); /* the transport keeps it */
}

static void look_at_others(fsdp_nccl_transport *transport) {
  const int64_t now_ms = fsdp_nccl_priv_now_ms();
  if (transport->world_size == 1) return;
  if (now_ms - transport->last_look_ms < LOOK_MS) return;
  transport->last_look_ms = now_ms;
  /* While the last look hangs in the store no other one starts. */
  (void)fsdp_nccl_priv_errand_start(transport, FSDP_NCCL_LOOKING, look,
                                    FSDP_CHANNEL_GATHER);
}

/* Fails the transport if an operation is too old. */
static void look_at_operations(fsdp_nccl_transport *transport,
                               fsdp_channel index) {
  fsdp_nccl_operation oldest;
  fsdp_error cause;
  if (fsdp_nccl_priv_retire(transport, index, FSDP_NCCL_MAX_OUTSTANDING,
                            &cause) != FSDP_OK) {
    (void)fsdp_nccl_priv_fail(transport, &cause, NULL);
    return;
  }
  if (!fsdp_nccl_priv_oldest(transport, index, &oldest)) return;
  const int64_t age_ms = fsdp_nccl_priv_now_ms() - oldest.started_ms;
  const int64_t timeout_ms = transport->options.timeout_ms;
  if (timeout_ms > 0 && age_ms >= timeout_ms) {
    fail_hung(transport, index, &oldest);
  } else if (age_ms >= OLD_MS) {
    look_at_others(transport);
  }
}

/* Fails the transport if a thread is inside NCCL for too long. A thread that
 * waits for the other ranks has a limit of its own. */
static void look_at_thread(fsdp_nccl_transport *transport, fsdp_channel index) {
  const fsdp_nccl_channel *channel = &transport->channels[index];
  const int64_t timeout_ms = transport->options.timeout_ms;
  (void)pthread_mutex_lock(&transport->lock);
  const bool is_busy = channel->is_busy;
  const bool is_meeting = channel->is_meeting;
  const int64_t age_ms = fsdp_nccl_priv_now_ms() - channel->busy_since_ms;
  const char *name = channel->last.name;
  (void)pthread_mutex_unlock(&transport->lock);
  if (!is_busy) return;
  if (!is_meeting && timeout_ms > 0 && age_ms >= timeout_ms) {
    (void)fsdp_nccl_priv_fail_slow(transport, index,
                                   name == NULL ? "a call of NCCL" : name,
                                   timeout_ms, NULL);
  } else if (age_ms >= OLD_MS) {
    look_at_others(transport);
  }
}

/* Waits for no store, no other thread and no device. */
static void look_at(fsdp_nccl_transport *transport) {
  fsdp_nccl_priv_enter_thread(transport);
  for (int i = 0; i < FSDP_NUM_CHANNELS; i++) {
    const fsdp_channel index = (fsdp_channel)i;
    if (!fsdp_nccl_priv_is_healthy(transport)) return;
    fsdp_nccl_priv_poll(transport, index);
    look_at_operations(transport, index);
    look_at_thread(transport, index);
  }
}

/* The shortest period that a transport asks for. */
static int64_t period_ms(void) {
  int64_t shortest = INT64_MAX;
  for (const fsdp_nccl_transport *t = g_transports; t != NULL; t = t->next) {
    if (t->options.poll_ms < shortest) shortest = t->options.poll_ms;
  }
  return shortest < 1 ? 1 : shortest;
}

/* Under the lock, which it releases during each look. */
static void look_at_all(uintptr_t generation) {
  fsdp_nccl_transport *transport = g_transports;
  while (g_generation == generation && transport != NULL) {
    transport->is_pinned = true; /* keeps it in the list meanwhile */
    (void)pthread_mutex_unlock(&g_lock);
    look_at(transport);
    (void)pthread_mutex_lock(&g_lock);
    transport->is_pinned = false;
    (void)pthread_cond_broadcast(&g_changed);
    transport = transport->next;
  }
}

static void *run(void *argument) {
  const uintptr_t generation = (uintptr_t)argument;
  int64_t looked_ms = fsdp_nccl_priv_now_ms();
  (void)pthread_mutex_lock(&g_lock);
  while (g_generation == generation && g_transports != NULL) {
    const int64_t next_ms = looked_ms + period_ms();
    if (fsdp_nccl_priv_now_ms() < next_ms) {
      fsdp_nccl_priv_cond_wait(&g_changed, &g_lock, next_ms);
      continue;
    }
    looked_ms = fsdp_nccl_priv_now_ms();
    look_at_all(generation);
  }
  (void)pthread_mutex_unlock(&g_lock);
  return NULL;
}

/* Starts the thread, with the lock held. It blocks all signals: they are for
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

static fsdp_status refuse(const char *reason, fsdp_error *error) {
  return FSDP_FAIL(error, FSDP_BACKEND,
                   "the thread that watches NCCL cannot be started: %s",
                   reason);
}

fsdp_status fsdp_nccl_priv_watch(fsdp_nccl_transport *transport,
                                 fsdp_error *error) {
  bool is_watched = false;
  (void)pthread_once(&g_once, prepare);
  (void)pthread_mutex_lock(&g_lock);
  const bool is_over = g_is_over;
  transport->next = g_transports;
  g_transports = transport;
  if (g_is_ready && !is_over) {
    if (!g_has_thread) g_has_thread = start();
    is_watched = g_has_thread;
  }
  if (!is_watched) g_transports = transport->next;
  transport->is_listed = is_watched;
  (void)pthread_cond_broadcast(&g_changed); /* its period may be shorter */
  (void)pthread_mutex_unlock(&g_lock);
  if (is_watched) return FSDP_OK;
  return refuse(is_over ? "the process ends" : "the system has no more threads",
                error);
}

/* Under the lock, which it releases: ends the thread. */
static void stop(void) {
  const pthread_t thread = g_thread;
  const bool has_thread = g_has_thread;
  g_has_thread = false;
  g_generation++;
  (void)pthread_cond_broadcast(&g_changed);
  (void)pthread_mutex_unlock(&g_lock);
  if (has_thread) (void)pthread_join(thread, NULL); /* the lock is free */
}

/* Under the lock: removes a transport from the list. */
static void unlist(fsdp_nccl_transport *transport) {
  fsdp_nccl_transport **place = &g_transports;
  while (*place != transport) place = &(*place)->next;
  *place = transport->next;
  transport->is_listed = false;
}

void fsdp_nccl_priv_unwatch(fsdp_nccl_transport *transport) {
  (void)pthread_mutex_lock(&g_lock);
  while (transport->is_pinned) {
    (void)pthread_cond_wait(&g_changed, &g_lock);
  }
  const bool is_listed = transport->is_listed;
  if (is_listed) unlist(transport);
  if (is_listed && g_transports == NULL) {
    stop();
  } else {
    (void)pthread_mutex_unlock(&g_lock);
  }
}

void fsdp_nccl_leave_all(void) {
  fsdp_error reason;
  int64_t deadline_ms = 0;
  (void)pthread_once(&g_once, prepare);
  (void)pthread_mutex_lock(&g_lock);
  g_is_over = true;
  stop();
  (void)pthread_mutex_lock(&g_lock);
  while (g_transports != NULL) {
    fsdp_nccl_transport *transport = g_transports;
    unlist(transport);
    transport->is_pinned = true; /* a destroy waits until it is false */
    (void)pthread_mutex_unlock(&g_lock);
    /* One deadline for all of them, later where one goes on. */
    if (deadline_ms == 0) {
      deadline_ms = fsdp_nccl_priv_now_ms() + transport->options.leave_ms;
    }
    (void)FSDP_FAIL(&reason, FSDP_INVALID_STATE,
                    "rank %" PRId64 " of %" PRId64
                    ": the process ends and has left its NCCL groups, nothing "
                    "can be gathered or reduced any more",
                    transport->rank, transport->world_size);
    fsdp_nccl_priv_leave(transport, &reason, &deadline_ms);
    (void)pthread_mutex_lock(&g_lock);
    transport->is_pinned = false;
    (void)pthread_cond_broadcast(&g_changed);
  }
  (void)pthread_mutex_unlock(&g_lock);
}
