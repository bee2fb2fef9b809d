/*
 * Time for the NCCL transport: a steady clock, short sleeps, timed waits.
 */
#define _POSIX_C_SOURCE 200809L /* clock_gettime, nanosleep */
#include <time.h>

#include "nccl/nccl_priv.h"

enum { NS_PER_MS = 1000000, MS_PER_S = 1000, MAX_PAUSE_US = 1000 };

int64_t fsdp_nccl_priv_now_ms(void) {
  struct timespec now = {0};
  (void)clock_gettime(CLOCK_MONOTONIC, &now); /* cannot fail for this clock */
  return (int64_t)now.tv_sec * MS_PER_S + now.tv_nsec / NS_PER_MS;
}

void fsdp_nccl_priv_pause(int64_t *pause_us) {
  *pause_us = *pause_us == 0 ? 1 : *pause_us * 2;
  if (*pause_us > MAX_PAUSE_US) *pause_us = MAX_PAUSE_US;
  const struct timespec time = {.tv_nsec = (long)*pause_us * 1000};
  (void)nanosleep(&time, NULL); /* a signal only makes it shorter */
}

void fsdp_nccl_priv_sleep_ms(int64_t time_ms) {
  const struct timespec time = {
      .tv_sec = (time_t)(time_ms / MS_PER_S),
      .tv_nsec = (long)(time_ms % MS_PER_S) * NS_PER_MS,
  };
  (void)nanosleep(&time, NULL); /* no signal reaches an errand */
}

bool fsdp_nccl_priv_cond_init(pthread_cond_t *cond) {
  pthread_condattr_t attributes;
  if (pthread_condattr_init(&attributes) != 0) return false;
  const bool is_made =
      pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC) == 0 &&
      pthread_cond_init(cond, &attributes) == 0;
  (void)pthread_condattr_destroy(&attributes);
  return is_made;
}

void fsdp_nccl_priv_cond_wait(pthread_cond_t *cond, pthread_mutex_t *lock,
                              int64_t deadline_ms) {
  const struct timespec time = {
      .tv_sec = (time_t)(deadline_ms / MS_PER_S),
      .tv_nsec = (long)(deadline_ms % MS_PER_S) * NS_PER_MS,
  };
  /* The caller checks its condition and the clock again. */
  (void)pthread_cond_timedwait(cond, lock, &time);
}
