/*
 * The list of this process's transports, for whoever waits in one of them.
 */
#include <pthread.h>

#include "shm/registry_priv.h"

/* A list, newest first, and what guards it. Order of locks: a transport's own
 * mutex may be taken with it held, never the other way round. */
static pthread_mutex_t g_mutex = PTHREAD_MUTEX_INITIALIZER;
static fsdp_shm *g_first;
static pthread_once_t g_once = PTHREAD_ONCE_INIT;

/* In a forked child: the transports are the parent's, and another of its
 * threads may have held the mutex. */
static void forget_all(void) {
  (void)pthread_mutex_init(&g_mutex, NULL);
  g_first = NULL;
}

static void watch_forks(void) {
  (void)pthread_atfork(NULL, NULL, forget_all);
}

void fsdp_shm_priv_registry_add(fsdp_shm *shm) {
  (void)pthread_once(&g_once, watch_forks);
  (void)pthread_mutex_lock(&g_mutex);
  shm->next = g_first;
  g_first = shm;
  (void)pthread_mutex_unlock(&g_mutex);
}

void fsdp_shm_priv_registry_remove(fsdp_shm *shm) {
  (void)pthread_mutex_lock(&g_mutex);
  fsdp_shm **link = &g_first;
  while (*link != NULL && *link != shm) link = &(*link)->next;
  if (*link == shm) *link = shm->next;
  (void)pthread_mutex_unlock(&g_mutex);
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
    /* A failure is kept for whoever uses that transport. */
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
