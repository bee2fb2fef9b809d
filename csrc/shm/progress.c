/*
 * Progress: moves all calls and messages that are in flight, of one transport
 * or of all transports of this process, as far as that goes without waiting.
 *
 * Note [Progress of other transports]
 * A rank that waits in one group may hold up others in another group: it has
 * started a call there that its ring could not take whole. So a rank that waits
 * also makes progress on the other transports of its process. It cannot sleep
 * on their doorbells, so it sleeps only shortly while one of them has calls in
 * flight.
 */
#include <pthread.h>

#include "shm/shm_priv.h"

/* All transports, newest first. Order of locks: a transport's own mutex may be
 * taken while this one is held, never the other way round. */
static pthread_mutex_t g_mutex = PTHREAD_MUTEX_INITIALIZER;
static fsdp_shm *g_first;
static pthread_once_t g_once = PTHREAD_ONCE_INIT;

/* In a forked child: the transports are the parent's, and another thread of the
 * parent may have held the mutex. */
static void forget_all(void) {
  (void)pthread_mutex_init(&g_mutex, NULL);
  g_first = NULL;
}

static void watch_forks(void) {
  (void)pthread_atfork(NULL, NULL, forget_all);
}

void fsdp_shm_priv_list(fsdp_shm *shm) {
  (void)pthread_once(&g_once, watch_forks);
  (void)pthread_mutex_lock(&g_mutex);
  shm->next = g_first;
  g_first = shm;
  (void)pthread_mutex_unlock(&g_mutex);
}

void fsdp_shm_priv_unlist(fsdp_shm *shm) {
  (void)pthread_mutex_lock(&g_mutex);
  fsdp_shm **link = &g_first;
  while (*link != NULL && *link != shm) link = &(*link)->next;
  if (*link != NULL) *link = shm->next;
  (void)pthread_mutex_unlock(&g_mutex);
}

fsdp_status fsdp_shm_priv_progress(fsdp_shm *shm, fsdp_error *error) {
  fsdp_error failure;
  fsdp_status status = FSDP_OK;
  for (int i = 0; i < FSDP_NUM_CHANNELS && status == FSDP_OK; i++) {
    status = fsdp_shm_priv_channel_progress(shm, (fsdp_channel)i, &failure);
  }
  if (status == FSDP_OK) {
    status = fsdp_shm_priv_messages_progress(shm, &failure);
  }
  if (status == FSDP_OK) return FSDP_OK;
  return fsdp_shm_priv_fail(shm, &failure, failure.message, error);
}

static bool is_busy(const fsdp_shm *shm) {
  for (int i = 0; i < FSDP_NUM_CHANNELS; i++) {
    if (shm->channels[i].first < shm->channels[i].end) return true;
  }
  return shm->num_messages > 0;
}

static bool progress_one(fsdp_shm *shm) {
  if (pthread_mutex_trylock(&shm->mutex) != 0) return true;
  bool is_unfinished = is_busy(shm);
  if (is_unfinished) {
    /* The transport keeps a failure for its own users. */
    is_unfinished = fsdp_shm_priv_progress(shm, NULL) == FSDP_OK;
  }
  (void)pthread_mutex_unlock(&shm->mutex);
  return is_unfinished;
}

bool fsdp_shm_priv_progress_others(const fsdp_shm *shm) {
  bool any_busy = false;
  if (pthread_mutex_trylock(&g_mutex) != 0) return true;
  for (fsdp_shm *each = g_first; each != NULL; each = each->next) {
    if (each != shm && progress_one(each)) any_busy = true;
  }
  (void)pthread_mutex_unlock(&g_mutex);
  return any_busy;
}
