/*
 * The fake NCCL's store in memory, and its events.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "nccl_fake.h"
#include "nccl_fake_priv.h"

enum {
  MAX_EVENTS = 4096,
  MAX_KEYS = 64,
  KEY_NBYTES = 256,
  VALUE_NBYTES = 1024
};

typedef struct entry {
  char key[KEY_NBYTES];
  char value[VALUE_NBYTES];
  int64_t nbytes;
} entry;

static entry g_entries[MAX_KEYS];
static int64_t g_num_entries;
static int64_t g_store_fail_at = -1;
static char g_text[VALUE_NBYTES + 1];
static int64_t g_event_fail_at = -1;
static const char *g_event_error;
static int64_t g_num_events;
static bool g_is_watchdog_held;
static bool g_is_watchdog_parked;
static pthread_cond_t g_parked_or_released = PTHREAD_COND_INITIALIZER;
/* Events are places here, so that a forked child has none to give back. */
static bool g_is_event[MAX_EVENTS];

static void lock(void) {
  (void)pthread_mutex_lock(&nccl_fake_lock);
}
static void unlock(void) {
  (void)pthread_mutex_unlock(&nccl_fake_lock);
}

static bool is_chosen(int64_t *fail_at) {
  if (*fail_at < 0) return false;
  return (*fail_at)-- == 0;
}

void nccl_fake_priv_reset_store(void) {
  lock();
  g_num_entries = 0;
  g_store_fail_at = -1;
  unlock();
}

void nccl_fake_store_fail_at(int64_t index) {
  lock();
  g_store_fail_at = index;
  unlock();
}

/* The beginning of every request. Whether it fails. */
static bool begin_request(void) {
  lock();
  nccl_fake_counts[NCCL_FAKE_STORE_CALLS]++;
  const bool fails = is_chosen(&g_store_fail_at);
  while (nccl_fake_settings[NCCL_FAKE_STORE_HELD] != 0) {
    unlock();
    check_sleep_ms(1);
    lock();
  }
  const bool is_broken = nccl_fake_settings[NCCL_FAKE_STORE_BROKEN] != 0;
  unlock();
  return fails || is_broken;
}

static entry *find(const char *key) {
  for (int64_t i = 0; i < g_num_entries; i++) {
    if (strcmp(g_entries[i].key, key) == 0) return &g_entries[i];
  }
  return NULL;
}

static fsdp_status store_set(void *context, const char *key, const void *value,
                             int64_t nbytes, fsdp_error *error) {
  (void)context;
  const bool fails = begin_request() || nbytes > VALUE_NBYTES;
  lock();
  if (!fails) {
    entry *place = find(key);
    if (place == NULL) place = &g_entries[g_num_entries++];
    (void)snprintf(place->key, sizeof place->key, "%s", key);
    memcpy(place->value, value, (size_t)nbytes);
    place->nbytes = nbytes;
  }
  unlock();
  if (!fails) return FSDP_OK;
  return FSDP_FAIL(error, FSDP_BACKEND, "injected at store set %s", key);
}

static fsdp_status store_get(void *context, const char *key, int64_t timeout_ms,
                             void *value, int64_t capacity, int64_t *nbytes,
                             fsdp_error *error) {
  (void)context;
  if (begin_request()) {
    return FSDP_FAIL(error, FSDP_BACKEND, "injected at store get %s", key);
  }
  for (int64_t waited_ms = 0;; waited_ms++) {
    lock();
    const entry *place = find(key);
    if (place != NULL) {
      const int64_t num = place->nbytes < capacity ? place->nbytes : capacity;
      memcpy(value, place->value, (size_t)num);
      *nbytes = place->nbytes;
    }
    unlock();
    if (place != NULL) return FSDP_OK;
    if (waited_ms >= timeout_ms) break;
    check_sleep_ms(1);
  }
  return FSDP_FAIL(error, FSDP_BACKEND, "no key %s after %" PRId64 " ms", key,
                   timeout_ms);
}

static fsdp_status store_add(void *context, const char *key, int64_t change,
                             int64_t *sum, fsdp_error *error) {
  int64_t value = 0;
  (void)context;
  if (begin_request()) {
    return FSDP_FAIL(error, FSDP_BACKEND, "injected at store add %s", key);
  }
  lock();
  entry *place = find(key);
  if (place == NULL) {
    place = &g_entries[g_num_entries++];
    (void)snprintf(place->key, sizeof place->key, "%s", key);
  } else {
    memcpy(&value, place->value, sizeof value);
  }
  value += change;
  memcpy(place->value, &value, sizeof value);
  place->nbytes = sizeof value;
  *sum = value;
  unlock();
  return FSDP_OK;
}

fsdp_store nccl_fake_store(void) {
  return (fsdp_store){.set = store_set, .get = store_get, .add = store_add};
}

const char *nccl_fake_store_text(const char *key) {
  lock();
  const entry *place = find(key);
  const size_t nbytes = place == NULL ? 0 : (size_t)place->nbytes;
  if (place != NULL) memcpy(g_text, place->value, nbytes);
  g_text[nbytes] = 0;
  unlock();
  return g_text;
}

/* ---- Events ---------------------------------------------------------------*/

void nccl_fake_priv_reset_events(void) {
  lock();
  g_event_fail_at = -1;
  g_event_error = NULL;
  unlock();
  nccl_fake_hold_watchdog(false);
}

void nccl_fake_hold_watchdog(bool is_held) {
  lock();
  g_is_watchdog_held = is_held;
  if (!is_held) g_is_watchdog_parked = false;
  (void)pthread_cond_broadcast(&g_parked_or_released);
  while (is_held && !g_is_watchdog_parked) {
    (void)pthread_cond_wait(&g_parked_or_released, &nccl_fake_lock);
  }
  unlock();
}

/* Parks the watchdog, which is the only thread that comes twice. */
static void enter_thread(void *context) {
  static _Thread_local bool has_entered = false;
  (void)context;
  lock();
  while (has_entered && g_is_watchdog_held) {
    g_is_watchdog_parked = true;
    (void)pthread_cond_broadcast(&g_parked_or_released);
    (void)pthread_cond_wait(&g_parked_or_released, &nccl_fake_lock);
  }
  has_entered = true;
  unlock();
}

void nccl_fake_event_set_error(const char *text) {
  lock();
  g_event_error = text;
  unlock();
}

void nccl_fake_event_fail_at(int64_t index) {
  lock();
  g_event_fail_at = index;
  unlock();
}

int64_t nccl_fake_num_events(void) {
  lock();
  const int64_t num = g_num_events;
  unlock();
  return num;
}

static fsdp_status event_call(const char *call, fsdp_error *error) {
  lock();
  const bool fails = is_chosen(&g_event_fail_at);
  unlock();
  if (!fails) return FSDP_OK;
  return FSDP_FAIL(error, FSDP_BACKEND, "injected at event %s", call);
}

/* Ends the test on an event that was destroyed. */
static void check_event(const void *event) {
  if (!*(const bool *)event) abort();
}

static fsdp_status event_create(void *context, void **event,
                                fsdp_error *error) {
  const fsdp_status status = event_call("create", error);
  (void)context;
  if (status != FSDP_OK) return status;
  lock();
  int64_t i = 0;
  while (g_is_event[i]) i++; /* no test comes near MAX_EVENTS */
  g_is_event[i] = true;
  *event = &g_is_event[i];
  g_num_events++;
  unlock();
  return FSDP_OK;
}

static void event_destroy(void *context, void *event) {
  (void)context;
  lock();
  check_event(event);
  *(bool *)event = false;
  g_num_events--;
  unlock();
}

static fsdp_status event_record(void *context, void *event, void *stream,
                                fsdp_error *error) {
  (void)context;
  (void)stream;
  lock();
  check_event(event);
  unlock();
  return event_call("record", error);
}

static fsdp_status event_query(void *context, void *event, bool *is_done,
                               fsdp_error *error) {
  const fsdp_status status = event_call("query", error);
  (void)context;
  if (status != FSDP_OK) return status;
  lock();
  check_event(event);
  *is_done = nccl_fake_settings[NCCL_FAKE_EVENTS_HELD] == 0;
  const char *text = g_event_error;
  unlock();
  if (text == NULL) return FSDP_OK;
  return FSDP_FAIL(error, FSDP_BACKEND, "%s", text);
}

fsdp_nccl_events nccl_fake_events(void) {
  return (fsdp_nccl_events){
      .create = event_create,
      .destroy = event_destroy,
      .record = event_record,
      .query = event_query,
      .enter_thread = enter_thread,
  };
}
