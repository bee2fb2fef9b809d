/*
 * Waiting for other ranks: spins, then sleeps, and looks now and then whether
 * they still live; and the one failure that ends everything.
 *
 * Note [Sleeping]
 * A sleeper counts itself in num_sleepers, then looks at all counters once
 * more, then sleeps on its doorbell. A rank that moves a counter of its own
 * looks at num_sleepers after that and rings. All these accesses are
 * sequentially consistent, so one of the two sees the other.
 */
#include <errno.h>
#include <inttypes.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "shm/registry_priv.h"
#include "shm/shm_priv.h"

enum { NS_PER_MS = 1000000, LOOK_MS = 100, BUSY_MS = 1 };

int64_t fsdp_shm_priv_now(void) {
  struct timespec now;
  (void)clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000 * NS_PER_MS + now.tv_nsec;
}

void fsdp_shm_priv_ring(const fsdp_shm *shm, int64_t rank) {
  fsdp_shm_header *header = shm->peers[rank].segment.header;
  if (atomic_load(&header->num_sleepers) <= 0) return;
  atomic_fetch_add(&header->doorbell, 1);
  (void)syscall(SYS_futex, &header->doorbell, FUTEX_WAKE, INT32_MAX, NULL, NULL,
                0);
}

void fsdp_shm_priv_ring_all(const fsdp_shm *shm) {
  for (int64_t rank = 0; rank < shm->world_size; rank++) {
    fsdp_shm_priv_ring(shm, rank);
  }
}

/* ---- Failing ---------------------------------------------------------------
 */

/* Keeps the first failure; the others read `cause`. Nothing that is in flight
 * touches the caller's memory after it (see fsdp_shm_has_writers). */
static fsdp_status fail(fsdp_shm *shm, const fsdp_error *failure,
                        const char *cause, fsdp_error *error) {
  fsdp_shm_header *header = shm->peers[shm->rank].segment.header;
  if (shm->failure.status == FSDP_OK) {
    shm->failure = *failure;
    (void)snprintf(header->failure, sizeof header->failure, "%s", cause);
    atomic_store(&header->presence, FSDP_SHM_FAILED);
    for (int i = 0; i < FSDP_NUM_CHANNELS; i++) {
      fsdp_shm_channel *channel = &shm->channels[i];
      channel->first = channel->end = channel->writing = 0;
    }
    fsdp_shm_priv_withdraw_offers(shm);
    shm->num_messages = 0;
    fsdp_shm_priv_ring_all(shm);
  }
  if (error != NULL) *error = shm->failure;
  return shm->failure.status;
}

/* What this rank does: "#17 all_gather (blocks.3)", "messages". */
static void describe_goal(const fsdp_shm *shm, const fsdp_shm_goal *goal,
                          char *text, size_t text_nbytes) {
  if (goal == NULL) {
    (void)snprintf(text, text_nbytes, "no call");
  } else if (goal->is_messages) {
    const char *label = shm->num_messages > 0 ? shm->messages[0].label : "";
    (void)snprintf(text, text_nbytes, "%zu message(s) (%s)", shm->num_messages,
                   label);
  } else {
    const fsdp_shm_channel *channel = &shm->channels[goal->channel];
    fsdp_shm_priv_describe_call(&channel->ops[channel->first].descriptor, text,
                                text_nbytes);
  }
}

/* Takes over the failure of rank `peer`. */
static fsdp_status fail_as(fsdp_shm *shm, int64_t peer,
                           const fsdp_shm_goal *goal, fsdp_error *error) {
  fsdp_error failure;
  char doing[384];
  char cause[640];
  describe_goal(shm, goal, doing, sizeof doing);
  (void)snprintf(cause, sizeof cause, "%.639s",
                 shm->peers[peer].segment.header->failure);
  (void)FSDP_FAIL(&failure, FSDP_BACKEND,
                  "rank %" PRId64 " was in %s when rank %" PRId64 " failed: %s",
                  shm->rank, doing, peer, cause);
  return fail(shm, &failure, cause, error);
}

/* Fails because rank `peer` did not come; `why` is said of it. */
static fsdp_status fail_without(fsdp_shm *shm, int64_t peer,
                                const fsdp_shm_goal *goal, int64_t waited_ns,
                                const char *why, fsdp_error *error) {
  fsdp_error failure;
  char doing[320];
  char other[512];
  describe_goal(shm, goal, doing, sizeof doing);
  fsdp_shm_priv_describe_peer(shm, peer, goal->channel, other, sizeof other);
  (void)FSDP_FAIL(&failure, FSDP_BACKEND,
                  "rank %" PRId64 " waited %.1f s in %s for %s; %s", shm->rank,
                  (double)waited_ns / 1e9, doing, other, why);
  return fail(shm, &failure, failure.message, error);
}

fsdp_status fsdp_shm_priv_check(fsdp_shm *shm, fsdp_error *error) {
  if (shm->failure.status != FSDP_OK) {
    if (error != NULL) *error = shm->failure;
    return shm->failure.status;
  }
  for (int64_t rank = 0; rank < shm->world_size; rank++) {
    if (atomic_load(&shm->peers[rank].segment.header->presence) ==
        FSDP_SHM_FAILED) {
      return fail_as(shm, rank, NULL, error);
    }
  }
  return FSDP_OK;
}

void fsdp_shm_priv_give_up(fsdp_shm *shm, const char *cause) {
  fsdp_error failure;
  (void)FSDP_FAIL(&failure, FSDP_BACKEND, "rank %" PRId64 " gave up: %.600s",
                  shm->rank, cause);
  (void)fail(shm, &failure, failure.message, NULL);
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
  return fail(shm, &failure, failure.message, error);
}

/* ---- Looking at the others -------------------------------------------------
 */

static bool waits_for(const fsdp_shm *shm, const fsdp_shm_goal *goal,
                      int64_t peer) {
  if (goal->is_messages) return fsdp_shm_priv_messages_wait_for(shm, peer);
  return fsdp_shm_priv_channel_waits_for(shm, goal->channel, peer);
}

static bool is_reached(const fsdp_shm *shm, const fsdp_shm_goal *goal) {
  if (goal->is_messages) return shm->num_messages == 0;
  return shm->channels[goal->channel].num_ended >= goal->ticket;
}

static int64_t progress_ns(const fsdp_shm *shm, const fsdp_shm_goal *goal) {
  if (goal->is_messages) return shm->message_progress_ns;
  return shm->channels[goal->channel].progress_ns;
}

/* Why rank `peer` will never come; NULL: it may. */
static const char *why_gone(const fsdp_shm *shm, int64_t peer) {
  const fsdp_shm_peer *other = &shm->peers[peer];
  if (atomic_load(&other->segment.header->presence) == FSDP_SHM_LEFT) {
    return "it has left the group";
  }
  if (fsdp_shm_priv_process_look(&other->process) == FSDP_SHM_PROCESS_DEAD) {
    return "its process has ended, see its own error";
  }
  return NULL;
}

/* How likely it is that rank `peer` holds up all others: they may wait for each
 * other because of it. */
static int suspicion(const fsdp_shm *shm, int64_t peer,
                     const fsdp_shm_goal *goal) {
  const fsdp_shm_process_state state =
      fsdp_shm_priv_process_look(&shm->peers[peer].process);
  if (state == FSDP_SHM_PROCESS_STOPPED) return 3;
  if (goal->is_messages) return 1;
  const fsdp_shm_channel_header *header =
      fsdp_shm_priv_channel_of(shm, peer, goal->channel);
  const uint64_t num_ended = shm->channels[goal->channel].num_ended;
  return atomic_load(&header->num_started) <= num_ended ? 2 : 1;
}

/* Of the ranks that are waited for, the one to name; -1: none. */
static int64_t find_suspect(const fsdp_shm *shm, const fsdp_shm_goal *goal) {
  int64_t suspect = -1;
  int most = 0;
  for (int64_t rank = 0; rank < shm->world_size; rank++) {
    if (rank == shm->rank || !waits_for(shm, goal, rank)) continue;
    const int likely = suspicion(shm, rank, goal);
    if (likely <= most) continue;
    most = likely;
    suspect = rank;
  }
  return suspect;
}

/* Fails when a rank that is waited for failed, left, died or is too late. */
static fsdp_status look_at_others(fsdp_shm *shm, const fsdp_shm_goal *goal,
                                  int64_t begin_ns, fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  for (int64_t rank = 0; rank < shm->world_size; rank++) {
    const fsdp_shm_header *header = shm->peers[rank].segment.header;
    if (rank == shm->rank) continue;
    const uint32_t presence = atomic_load(&header->presence);
    if (presence == FSDP_SHM_FAILED) return fail_as(shm, rank, goal, error);
    if (!waits_for(shm, goal, rank)) continue;
    const char *why = why_gone(shm, rank);
    if (why != NULL) {
      /* What it wrote before it went still counts. */
      FSDP_TRY(fsdp_shm_priv_progress(shm, error));
      if (is_reached(shm, goal)) return FSDP_OK;
      if (waits_for(shm, goal, rank)) {
        return fail_without(shm, rank, goal, fsdp_shm_priv_now() - begin_ns,
                            why, error);
      }
    }
  }
  const int64_t last_ns = progress_ns(shm, goal);
  const int64_t since = last_ns > begin_ns ? last_ns : begin_ns;
  const int64_t waited_ns = fsdp_shm_priv_now() - since;
  if (waited_ns / NS_PER_MS < shm->timeout_ms) return FSDP_OK;
  const int64_t suspect = find_suspect(shm, goal);
  if (suspect >= 0) {
    return fail_without(shm, suspect, goal, waited_ns,
                        "see what it does, or raise the time limit if it is "
                        "only slow",
                        error);
  }
done:
  return status;
}

/* ---- Waiting ---------------------------------------------------------------
 */

static void relax(const fsdp_shm *shm) {
  if (shm->is_crowded) {
    (void)sched_yield();
    return;
  }
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("yield");
#endif
}

/* Sleeps until something may have come, at most LOOK_MS; shortly while other
 * transports are busy (Note [Progress of other transports]). */
static fsdp_status sleep_once(fsdp_shm *shm, const fsdp_shm_goal *goal,
                              fsdp_error *error) {
  fsdp_shm_header *header = shm->peers[shm->rank].segment.header;
  atomic_fetch_add(&header->num_sleepers, 1);
  const uint32_t doorbell = atomic_load(&header->doorbell);
  const fsdp_status status = fsdp_shm_priv_progress(shm, error);
  if (status == FSDP_OK && !is_reached(shm, goal)) {
    (void)pthread_mutex_unlock(&shm->mutex);
    const long ms = fsdp_shm_priv_progress_others(shm) ? BUSY_MS : LOOK_MS;
    const struct timespec limit = {.tv_nsec = ms * NS_PER_MS};
    (void)syscall(SYS_futex, &header->doorbell, FUTEX_WAIT, doorbell, &limit,
                  NULL, 0);
    (void)pthread_mutex_lock(&shm->mutex);
  }
  atomic_fetch_sub(&header->num_sleepers, 1);
  return status;
}

fsdp_status fsdp_shm_priv_wait(fsdp_shm *shm, const fsdp_shm_goal *goal,
                               fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  int64_t begin_ns = 0;
  int64_t looked_ns = 0;
  for (;;) {
    /* Another thread's wait may have failed while this one slept. */
    if (shm->failure.status != FSDP_OK) {
      return fsdp_shm_priv_check(shm, error);
    }
    FSDP_TRY(fsdp_shm_priv_progress(shm, error));
    if (is_reached(shm, goal)) return FSDP_OK;

    const int64_t now_ns = fsdp_shm_priv_now();
    if (begin_ns == 0) begin_ns = looked_ns = now_ns;
    const int64_t last_ns = progress_ns(shm, goal);
    const int64_t since = last_ns > begin_ns ? last_ns : begin_ns;
    if (now_ns - since < shm->spin_ns) {
      (void)pthread_mutex_unlock(&shm->mutex);
      (void)fsdp_shm_priv_progress_others(shm);
      relax(shm);
      (void)pthread_mutex_lock(&shm->mutex);
      continue;
    }
    if (now_ns - looked_ns >= (int64_t)LOOK_MS * NS_PER_MS) {
      looked_ns = now_ns;
      FSDP_TRY(look_at_others(shm, goal, begin_ns, error));
    }
    FSDP_TRY(sleep_once(shm, goal, error));
  }
done:
  return status;
}
