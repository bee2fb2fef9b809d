/*
 * The state of a transport: its memory, the process that owns it, and whether
 * it has failed.
 */
#include <stdatomic.h>

#include "base/alloc.h"
#include "nccl/nccl_priv.h"

/* How often this process, and those that it was forked from, were forked since
 * the first transport. */
static _Atomic unsigned g_num_forks = 0;
static bool g_is_counting = false;
static pthread_once_t g_once = PTHREAD_ONCE_INIT;

static void count_fork(void) {
  atomic_fetch_add(&g_num_forks, 1);
}

static void watch_forks(void) {
  g_is_counting = pthread_atfork(NULL, NULL, count_fork) == 0;
}

bool fsdp_nccl_priv_is_forked(const fsdp_nccl_transport *transport) {
  return transport->num_forks != atomic_load(&g_num_forks);
}

void fsdp_nccl_priv_free(fsdp_nccl_transport *transport) {
  const fsdp_nccl_options options = transport->options;
  const bool is_forked = fsdp_nccl_priv_is_forked(transport);
  if (!is_forked) {
    fsdp_nccl_priv_free_events(transport);
    (void)pthread_cond_destroy(&transport->changed);
    (void)pthread_mutex_destroy(&transport->lock);
  }
  for (int i = 0; i < FSDP_NUM_CHANNELS; i++) {
    fsdp_free(transport->channels[i].collectives);
  }
  fsdp_free(transport->prefix);
  fsdp_free(transport->net_name);
  fsdp_free(transport);
  if (!is_forked && options.release != NULL) options.release(options.owner);
}

/* A transport that is all zeros, but for its lock. */
static fsdp_nccl_transport *make_empty(void) {
  (void)pthread_once(&g_once, watch_forks);
  if (!g_is_counting) return NULL;
  fsdp_nccl_transport *transport = fsdp_calloc(1, sizeof *transport);
  if (transport == NULL) return NULL;
  transport->num_forks = atomic_load(&g_num_forks);
  if (pthread_mutex_init(&transport->lock, NULL) == 0) {
    if (fsdp_nccl_priv_cond_init(&transport->changed)) return transport;
    (void)pthread_mutex_destroy(&transport->lock);
  }
  fsdp_free(transport);
  return NULL;
}

fsdp_nccl_transport *fsdp_nccl_priv_make(const fsdp_nccl_library *library,
                                         const fsdp_nccl_options *options,
                                         const fsdp_store *store, int64_t rank,
                                         int64_t world_size) {
  const char *net_name = options->tuning.net_name;
  fsdp_nccl_transport *transport = make_empty();
  if (transport == NULL) return NULL;
  transport->api = library->api;
  transport->version = library->version;
  transport->store = *store;
  transport->rank = rank;
  transport->world_size = world_size;
  transport->prefix = fsdp_strdup(options->prefix);
  if (net_name != NULL) transport->net_name = fsdp_strdup(net_name);
  if (transport->prefix == NULL ||
      (net_name != NULL && transport->net_name == NULL)) {
    fsdp_nccl_priv_free(transport);
    return NULL;
  }
  transport->options = *options;
  transport->options.prefix = transport->prefix;
  transport->options.tuning.net_name = transport->net_name;
  if (options->events != NULL) {
    transport->events = *options->events;
    transport->options.events = &transport->events;
  }
  return transport;
}

bool fsdp_nccl_priv_is_healthy(fsdp_nccl_transport *transport) {
  (void)pthread_mutex_lock(&transport->lock);
  const bool is_healthy = transport->phase == FSDP_NCCL_HEALTHY;
  (void)pthread_mutex_unlock(&transport->lock);
  return is_healthy;
}

fsdp_status fsdp_nccl_priv_first_error(fsdp_nccl_transport *transport,
                                       bool waits, fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  (void)pthread_mutex_lock(&transport->lock);
  while (waits && transport->phase == FSDP_NCCL_FAILING &&
         fsdp_nccl_priv_now_ms() < transport->words_deadline_ms) {
    fsdp_nccl_priv_cond_wait(&transport->changed, &transport->lock,
                             transport->words_deadline_ms);
  }
  if (transport->phase != FSDP_NCCL_HEALTHY) {
    status = transport->error.status;
    if (error != NULL) *error = transport->error;
  }
  (void)pthread_mutex_unlock(&transport->lock);
  return status;
}
