/*
 * Waiting for other ranks: makes progress, spins, then sleeps, and checks now
 * and then that the ranks it waits for are still alive.
 */
#include <inttypes.h>
#include <sched.h>
#include <stdio.h>

#include "shm/shm_priv.h"

enum { LOOK_MS = 100, BUSY_MS = 1 };

/* What this rank is doing: "#17 all_gather (blocks.3)", "2 message(s) (a)". */
static void describe_goal(const fsdp_shm *shm, const fsdp_shm_goal *goal,
                          char *text, size_t text_nbytes) {
  if (goal->shared != NULL) {
    (void)snprintf(text, text_nbytes, "the wait for readers of its shards (%s)",
                   goal->shared->label);
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

/* Fails because rank `peer` did not come; `why` ends the message. */
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
  return fsdp_shm_priv_fail(shm, &failure, failure.message, error);
}

/* ---- Looking at the others ----------------------------------------------- */

static bool waits_for(const fsdp_shm *shm, const fsdp_shm_goal *goal,
                      int64_t peer) {
  if (goal->shared != NULL) return fsdp_shm_priv_is_reading(goal->shared, peer);
  if (goal->is_messages) return fsdp_shm_priv_messages_wait_for(shm, peer);
  return fsdp_shm_priv_channel_waits_for(shm, goal->channel, peer);
}

/* Whether another rank reads. */
static bool is_read(const fsdp_shm *shm, const fsdp_shared *shared) {
  for (int64_t rank = 0; rank < shm->world_size; rank++) {
    if (rank != shm->rank && fsdp_shm_priv_is_reading(shared, rank)) {
      return true;
    }
  }
  return false;
}

static bool is_reached(const fsdp_shm *shm, const fsdp_shm_goal *goal) {
  if (goal->shared != NULL) return !is_read(shm, goal->shared);
  if (goal->is_messages) return shm->num_messages == 0;
  return shm->channels[goal->channel].num_ended >= goal->ticket;
}

static int64_t progress_ns(const fsdp_shm *shm, const fsdp_shm_goal *goal) {
  if (goal->is_messages) return shm->message_progress_ns;
  return shm->channels[goal->channel].progress_ns;
}

/* Why rank `peer` will never come; NULL: it still may. */
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

/* How likely it is that rank `peer` holds up all others: those may wait for
 * each other because of it. */
static int suspicion(const fsdp_shm *shm, int64_t peer,
                     const fsdp_shm_goal *goal) {
  const fsdp_shm_process_state state =
      fsdp_shm_priv_process_look(&shm->peers[peer].process);
  if (state == FSDP_SHM_PROCESS_STOPPED) return 3;
  if (goal->is_messages || goal->shared != NULL) return 1;
  const fsdp_shm_channel_header *header =
      fsdp_shm_priv_channel_of(shm, peer, goal->channel);
  const uint64_t num_ended = shm->channels[goal->channel].num_ended;
  return atomic_load(&header->num_started) <= num_ended ? 2 : 1;
}

/* Which of the ranks that are waited for the error names; -1: none. */
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

/*
 * Note [Ranks that wait for each other]
 * A rank whose only thread waits for a call makes no other one. If it has not
 * made the call that this rank waits for, and itself waits for one that this
 * rank has not made, neither ever ends: two calls on different channels, such
 * as a gather and a reduction, which nobody compares.
 */
static bool waits_for_this(const fsdp_shm *shm, const fsdp_shm_goal *goal,
                           int64_t peer) {
  const fsdp_shm_header *mine = shm->peers[shm->rank].segment.header;
  const fsdp_shm_header *theirs = shm->peers[peer].segment.header;
  if (goal->is_messages || goal->shared != NULL ||
      atomic_load(&mine->has_threads) || atomic_load(&theirs->has_threads)) {
    return false;
  }
  for (int i = 0; i < FSDP_NUM_CHANNELS; i++) {
    const uint64_t awaited = atomic_load(&theirs->channels[i].awaited);
    if (awaited <= shm->channels[i].num_started) continue;
    /* Read after `awaited`: from then on it starts none. */
    return atomic_load(&theirs->channels[goal->channel].num_started) <=
           shm->channels[goal->channel].num_ended;
  }
  return false;
}

/* Fails when a rank that is waited for failed, left, died or is too late. */
static fsdp_status look_at_others(fsdp_shm *shm, const fsdp_shm_goal *goal,
                                  int64_t begin_ns, fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  for (int64_t rank = 0; rank < shm->world_size; rank++) {
    const fsdp_shm_header *header = shm->peers[rank].segment.header;
    if (rank == shm->rank) continue;
    const char *why = NULL;
    if (waits_for(shm, goal, rank)) why = why_gone(shm, rank);
    /* Read after why_gone: the rank may have failed, then ended. */
    if (atomic_load(&header->presence) == FSDP_SHM_FAILED) {
      char doing[384];
      describe_goal(shm, goal, doing, sizeof doing);
      return fsdp_shm_priv_fail_as(shm, rank, doing, error);
    }
    if (why == NULL) {
      if (!waits_for_this(shm, goal, rank)) continue;
      return fail_without(shm, rank, goal, fsdp_shm_priv_now() - begin_ns,
                          "each waits for a call that the other has not made: "
                          "all ranks must run the same units, and all of them "
                          "must matter to the loss",
                          error);
    }
    /* What it wrote before its end still counts. */
    FSDP_TRY(fsdp_shm_priv_progress(shm, error));
    if (is_reached(shm, goal)) return FSDP_OK;
    if (waits_for(shm, goal, rank)) {
      return fail_without(shm, rank, goal, fsdp_shm_priv_now() - begin_ns, why,
                          error);
    }
  }
  const int64_t last_ns = progress_ns(shm, goal);
  const int64_t since = last_ns > begin_ns ? last_ns : begin_ns;
  const int64_t waited_ns = fsdp_shm_priv_now() - since;
  if (waited_ns / FSDP_SHM_NS_PER_MS < shm->timeout_ms) return FSDP_OK;
  const int64_t suspect = find_suspect(shm, goal);
  if (suspect >= 0) {
    return fail_without(shm, suspect, goal, waited_ns,
                        "find out what it is doing, or raise the time limit "
                        "if it is only slow",
                        error);
  }
done:
  return status;
}

/* ---- Waiting ------------------------------------------------------------- */

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

/* Sleeps until another rank rings, at most LOOK_MS; at most BUSY_MS while other
 * transports have calls in flight (Note [Progress of other transports]). */
static fsdp_status sleep_once(fsdp_shm *shm, const fsdp_shm_goal *goal,
                              fsdp_error *error) {
  const uint32_t heard = fsdp_shm_priv_listen(shm);
  const fsdp_status status = fsdp_shm_priv_progress(shm, error);
  if (status == FSDP_OK && !is_reached(shm, goal)) {
    (void)pthread_mutex_unlock(&shm->mutex);
    fsdp_shm_priv_sleep(shm, heard,
                        fsdp_shm_priv_progress_others(shm) ? BUSY_MS : LOOK_MS);
    (void)pthread_mutex_lock(&shm->mutex);
  }
  fsdp_shm_priv_unlisten(shm);
  return status;
}

/* With the mutex held, which it releases in between. */
static fsdp_status wait(fsdp_shm *shm, const fsdp_shm_goal *goal,
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
    if (now_ns - looked_ns >= (int64_t)LOOK_MS * FSDP_SHM_NS_PER_MS) {
      looked_ns = now_ns;
      FSDP_TRY(look_at_others(shm, goal, begin_ns, error));
    }
    FSDP_TRY(sleep_once(shm, goal, error));
  }
done:
  return status;
}

fsdp_status fsdp_shm_priv_wait(fsdp_shm *shm, const fsdp_shm_goal *goal,
                               fsdp_error *error) {
  _Atomic uint64_t *awaited =
      &fsdp_shm_priv_channel_of(shm, shm->rank, goal->channel)->awaited;
  const bool is_call = !goal->is_messages && goal->shared == NULL;
  if (is_call) atomic_store(awaited, goal->ticket);
  const fsdp_status status = wait(shm, goal, error);
  if (is_call) atomic_store(awaited, 0);
  return status;
}
