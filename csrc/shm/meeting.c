/*
 * The meeting: the ranks announce their segments in the store, map those of all
 * others, and report whether it worked. There is a transport only if it worked
 * on all ranks.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "shm/meeting_priv.h"

/* What a rank tells the others; copied as bytes. */
typedef struct hello {
  int64_t version;
  int64_t is_ready; /* 0: `reason` says why not */
  int64_t descriptor;
  uint64_t token;
  uint64_t address; /* of the segment, in this rank's process */
  fsdp_shm_process process;
  fsdp_shm_geometry geometry;
  char reason[FSDP_SHM_REASON_NBYTES];
} hello;

typedef struct verdict {
  int64_t is_possible;
  int64_t is_direct; /* this rank can read the memory of all others */
  char reason[FSDP_SHM_REASON_NBYTES];
} verdict;

typedef struct key {
  char text[FSDP_SHM_KEY_NBYTES];
} key;

static key key_of(const fsdp_shm_meeting *meeting, int64_t rank,
                  const char *what) {
  key name;
  (void)snprintf(name.text, sizeof name.text, "%s/shm/%s/%" PRId64 "/%s",
                 meeting->key_prefix, meeting->name, rank, what);
  return name;
}

/* Notes the first reason why this rank cannot: "rank 3: no memory". */
static void refuse(const fsdp_shm_meeting *meeting, verdict *mine,
                   const char *why) {
  if (!mine->is_possible) return;
  mine->is_possible = 0;
  (void)snprintf(mine->reason, sizeof mine->reason, "rank %" PRId64 ": %.200s",
                 meeting->rank, why);
}

static uint64_t make_token(const fsdp_shm_process *process) {
  uint64_t token = 0;
  if (getrandom(&token, sizeof token, GRND_NONBLOCK) != sizeof token) {
    token = (uint64_t)fsdp_shm_priv_now() * UINT64_C(0x9E3779B97F4A7C15) ^
            (uint64_t)process->pid;
  }
  return token;
}

static int64_t now_ms(void) {
  enum { NS_PER_MS = 1000000 };
  return fsdp_shm_priv_now() / NS_PER_MS;
}

/* What is left of the time limit, which holds for all waits together. At least
 * 1, for a last request. */
static int64_t left_ms(const fsdp_shm_meeting *meeting, int64_t begin_ms) {
  const int64_t left = meeting->timeout_ms - (now_ms() - begin_ms);
  return left < 1 ? 1 : left;
}

/* Makes this rank's own segment, or notes in `mine` why it cannot. */
static void prepare(const fsdp_shm_meeting *meeting, fsdp_shm *shm,
                    hello *greeting, int *descriptor, verdict *mine) {
  fsdp_error error;
  if (shm == NULL) {
    refuse(meeting, mine, "no host memory");
    return;
  }
  if (meeting->refusal != NULL) {
    refuse(meeting, mine, meeting->refusal);
    return;
  }
  fsdp_shm_peer *self = &shm->peers[shm->rank];
  if (fsdp_shm_priv_process_get(&self->process, &error) != FSDP_OK ||
      fsdp_shm_priv_segment_create(&shm->geometry, &self->segment, descriptor,
                                   &error) != FSDP_OK) {
    refuse(meeting, mine, error.message);
    return;
  }
  greeting->process = self->process;
  greeting->geometry = shm->geometry;
  greeting->descriptor = *descriptor;
  greeting->token = make_token(&self->process);
  greeting->address = (uint64_t)(uintptr_t)self->segment.header;
  self->segment.header->token = greeting->token;
}

/* Maps the segment that `theirs` announces, or notes why not. */
static void accept_hello(const fsdp_shm_meeting *meeting, fsdp_shm *shm,
                         int64_t rank, const hello *theirs, verdict *mine) {
  if (!mine->is_possible) return;
  if (!theirs->is_ready) {
    *mine = (verdict){0};
    (void)snprintf(mine->reason, sizeof mine->reason, "%.*s",
                   (int)sizeof theirs->reason - 1, theirs->reason);
    return;
  }
  fsdp_shm_peer *peer = &shm->peers[rank];
  char why[FSDP_SHM_REASON_NBYTES];
  const char *why_not = NULL;
  if (!fsdp_shm_priv_process_is_near(&shm->peers[shm->rank].process,
                                     &theirs->process, &why_not)) {
    /* why_not says it */
  } else if (memcmp(&theirs->geometry, &shm->geometry, sizeof shm->geometry) !=
             0) {
    why_not = "has other options for shared memory";
  }
  if (why_not != NULL) {
    (void)snprintf(why, sizeof why, "rank %" PRId64 " %s", rank, why_not);
    refuse(meeting, mine, why);
    return;
  }
  peer->process = theirs->process;
  fsdp_error error;
  if (fsdp_shm_priv_segment_open(theirs->process.pid, theirs->descriptor,
                                 theirs->geometry.nbytes, theirs->token,
                                 &peer->segment, &error) != FSDP_OK) {
    (void)snprintf(why, sizeof why, "the memory of rank %" PRId64 ": %.160s",
                   rank, error.message);
    refuse(meeting, mine, why);
    return;
  }
  uint64_t token = 0;
  bool is_read = false;
  if (fsdp_shm_priv_read_peer(shm, rank, theirs->address, &token, sizeof token,
                              &is_read, NULL) != FSDP_OK ||
      !is_read || token != theirs->token) {
    mine->is_direct = 0;
  }
}

static fsdp_status get_hellos(const fsdp_shm_meeting *meeting, int64_t begin_ms,
                              fsdp_shm *shm, verdict *mine, fsdp_error *error) {
  const fsdp_store *store = meeting->store;
  fsdp_status status = FSDP_OK;
  for (int64_t rank = 0; rank < meeting->world_size; rank++) {
    if (rank == meeting->rank) continue;
    hello theirs = {0};
    int64_t nbytes = 0;
    FSDP_TRY(store->get(store->context, key_of(meeting, rank, "hello").text,
                        left_ms(meeting, begin_ms), &theirs, sizeof theirs,
                        &nbytes, error));
    if (nbytes != sizeof theirs || theirs.version != FSDP_SHM_VERSION) {
      refuse(meeting, mine, "another rank runs another version of fsdp_c");
      continue;
    }
    accept_hello(meeting, shm, rank, &theirs, mine);
  }
done:
  return status;
}

/* The verdict for all ranks: that of the first rank that could not. */
static fsdp_status get_verdicts(const fsdp_shm_meeting *meeting,
                                int64_t begin_ms, const verdict *mine,
                                verdict *all, fsdp_error *error) {
  const fsdp_store *store = meeting->store;
  fsdp_status status = FSDP_OK;
  verdict first = {.is_possible = 1, .is_direct = 1};
  for (int64_t rank = 0; rank < meeting->world_size; rank++) {
    verdict theirs = *mine;
    int64_t nbytes = sizeof theirs;
    if (rank != meeting->rank) {
      FSDP_TRY(store->get(store->context, key_of(meeting, rank, "verdict").text,
                          left_ms(meeting, begin_ms), &theirs, sizeof theirs,
                          &nbytes, error));
    }
    if (nbytes != sizeof theirs) {
      theirs = (verdict){.reason = "ranks run different versions of fsdp_c"};
    }
    if (first.is_possible && !theirs.is_possible) first = theirs;
    if (!theirs.is_direct) first.is_direct = 0;
  }
  *all = first;
done:
  return status;
}

fsdp_status fsdp_shm_priv_meet(const fsdp_shm_meeting *meeting, fsdp_shm *shm,
                               fsdp_shm_verdict *outcome, fsdp_error *error) {
  const fsdp_store *store = meeting->store;
  const int64_t begin_ms = now_ms();
  fsdp_status status = FSDP_OK;
  int descriptor = -1;
  verdict mine = {.is_possible = 1, .is_direct = 1};
  verdict all;
  hello greeting;
  memset(&greeting, 0, sizeof greeting); /* padding too: it is sent as bytes */
  prepare(meeting, shm, &greeting, &descriptor, &mine);
  greeting.version = FSDP_SHM_VERSION;
  greeting.is_ready = mine.is_possible;
  memcpy(greeting.reason, mine.reason, sizeof greeting.reason);

  FSDP_TRY(store->set(store->context,
                      key_of(meeting, meeting->rank, "hello").text, &greeting,
                      sizeof greeting, error));
  FSDP_TRY(get_hellos(meeting, begin_ms, shm, &mine, error));
  FSDP_TRY(store->set(store->context,
                      key_of(meeting, meeting->rank, "verdict").text, &mine,
                      sizeof mine, error));
  FSDP_TRY(get_verdicts(meeting, begin_ms, &mine, &all, error));

  outcome->is_possible = all.is_possible != 0;
  outcome->is_direct = all.is_direct != 0;
  memcpy(outcome->reason, all.reason, sizeof outcome->reason);
  outcome->reason[sizeof outcome->reason - 1] = '\0';
done:
  /* All ranks have mapped the file, or there is no transport. */
  if (descriptor >= 0) close(descriptor);
  return status;
}
