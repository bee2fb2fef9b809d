/*
 * Symmetric windows: NCCL's collectives on memory that all ranks have
 * registered together.
 *
 * Note [Symmetric windows]
 * From NCCL 2.27 on, ncclCommWindowRegister makes a block a window that all
 * ranks can reach. Collectives on windows need fewer SMs; with the policy of no
 * CTAs (2.28) copy engines gather within an NVLink domain. NCCL asks for much:
 * registration is collective (the same order and sizes on all ranks), and a
 * collective must use the same offset of the same window on all ranks, or no
 * window on any. NCCL checks neither; a rank that differs hangs, or others
 * write to the wrong place in its memory.
 *
 * The arena does not promise that. It gives a unit the same block in each step
 * once it has a plan, but the plan may depend on the rank: gradients become
 * ready in another order, a device runs out of memory. So the transport watches
 * before it asks for windows:
 *
 * 1. It learns which memory each collective uses. A collective is known by what
 *    ranks have in common: its unit, its arguments, the launch before it.
 * 2. When the first of them was used `uses_needed` times, on all ranks at the
 *    same launch, the ranks meet in the store. A rank refuses if a collective
 *    used other memory lately, or if blocks and offsets are not rank 0's.
 * 3. If none refuses, all register the blocks in the order of their first use
 *    and meet again, since a registration may fail on one rank only. Then all
 *    deregister.
 * 4. While windows are open, each launch is compared with what was agreed. A
 *    collective that is new (the order has changed, on all ranks alike) makes
 *    every rank close its windows before the launch, and learn anew. So does a
 *    known one that uses other memory (the arena has a new plan), if it does on
 *    all ranks: they meet before the launch. A rank that does not come has
 *    launched in its window, so that the time limit ends the transport.
 *
 * Registration and the meetings are on the channel that the thread uses, so no
 * other call can come between. A rank that hangs there, or dies, ends the
 * transport as elsewhere (Note [NCCL failures]).
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "nccl/nccl_priv.h"

enum {
  FIRST_USES_NEEDED = 8,
  MAX_REFUSED = 3,       /* meetings without success */
  MAX_PLACES = 4096,     /* a program that does not repeat itself */
  REGISTERING_MS = 30000 /* how much longer than this rank others may take */
};

static const char REMEDY[] = "Set FSDP_C_NCCL_SYMMETRIC=0";

void fsdp_nccl_priv_want_windows(fsdp_nccl_transport *transport,
                                 fsdp_channel index) {
  fsdp_nccl_windows *windows = &transport->channels[index].windows;
  (void)pthread_mutex_lock(&transport->lock);
  windows->phase = FSDP_NCCL_WINDOWS_LEARNING;
  windows->uses_needed = FIRST_USES_NEEDED;
  (void)snprintf(windows->reason, sizeof windows->reason, "%s",
                 "the first steps are watched");
  (void)pthread_mutex_unlock(&transport->lock);
}

static void set_phase(fsdp_nccl_transport *transport,
                      fsdp_nccl_windows *windows, fsdp_nccl_windows_phase phase,
                      int64_t nbytes, const char *reason) {
  (void)pthread_mutex_lock(&transport->lock);
  windows->phase = phase;
  windows->nbytes = nbytes;
  (void)snprintf(windows->reason, sizeof windows->reason, "%s", reason);
  (void)pthread_mutex_unlock(&transport->lock);
}

static const char *channel_name(fsdp_channel index) {
  return index == FSDP_CHANNEL_GATHER ? "gathers" : "reductions";
}

/* ---- Registration ---------------------------------------------------------*/

static void deregister(const fsdp_nccl_transport *transport, fsdp_channel index,
                       fsdp_nccl_open_window *open) {
  fsdp_nccl_comm *comm = transport->channels[index].comm_in_use;
  if (open->window == NULL || comm == NULL) return;
  /* Local; the window is gone, whatever NCCL returns. */
  (void)transport->api.comm_window_deregister(comm, open->window);
  open->window = NULL;
}

void fsdp_nccl_priv_close_windows(fsdp_nccl_transport *transport,
                                  fsdp_channel index) {
  fsdp_nccl_windows *windows = &transport->channels[index].windows;
  for (size_t i = 0; i < windows->num_open; i++) {
    deregister(transport, index, &windows->open[i]);
  }
  windows->num_open = 0;
}

/* Registers all windows, even after one that fails: the other ranks do. Writes
 * the first failure to `refusal`, which is "" otherwise. */
static void register_windows(fsdp_nccl_transport *transport, fsdp_channel index,
                             char *refusal, size_t refusal_nbytes) {
  fsdp_nccl_channel *channel = &transport->channels[index];
  const fsdp_nccl_api *api = &transport->api;
  refusal[0] = 0;
  for (size_t i = 0; i < channel->windows.num_open; i++) {
    fsdp_nccl_open_window *open = &channel->windows.open[i];
    /* A communicator that was aborted must not be used again. */
    if (!fsdp_nccl_priv_is_healthy(transport)) return;
    const int result = api->comm_window_register(
        channel->comm_in_use, open->block.data, (size_t)open->block.nbytes,
        &open->window, FSDP_NCCL_WINDOW_SYMMETRIC);
    if (result == FSDP_NCCL_SUCCESS && open->window != NULL) continue;
    if (refusal[0] != 0) continue;
    if (result == FSDP_NCCL_SUCCESS) {
      (void)snprintf(refusal, refusal_nbytes,
                     "NCCL has no symmetric memory between these devices");
      continue;
    }
    const char *name = api->get_error_string(result);
    (void)snprintf(refusal, refusal_nbytes,
                   "ncclCommWindowRegister of %" PRId64
                   " bytes failed with result %d (%s)",
                   open->block.nbytes, result, name == NULL ? "unknown" : name);
  }
}

/* ---- Meetings -------------------------------------------------------------*/

static void format_key(const fsdp_nccl_transport *transport, fsdp_channel index,
                       const char *name, char *key) {
  (void)snprintf(key, FSDP_NCCL_KEY_NBYTES, "%s/windows/%s/%" PRId64 "/%s",
                 transport->options.prefix, channel_name(index),
                 transport->channels[index].windows.num_meetings, name);
}

/* Rank 0's plan, which it writes and the others read. */
static fsdp_status share_plan(fsdp_nccl_transport *transport,
                              fsdp_channel index,
                              const fsdp_nccl_places_plan *mine,
                              fsdp_nccl_places_plan *first, fsdp_error *error) {
  const fsdp_store store = fsdp_nccl_priv_store_of(transport);
  char key[FSDP_NCCL_KEY_NBYTES];
  int64_t nbytes = 0;
  format_key(transport, index, "plan", key);
  *first = *mine;
  if (transport->rank == 0) {
    return store.set(store.context, key, first, sizeof *first, error);
  }
  const fsdp_status status =
      store.get(store.context, key, transport->options.init_timeout_ms, first,
                sizeof *first, &nbytes, error);
  if (status != FSDP_OK || nbytes == (int64_t)sizeof *first) return status;
  return FSDP_FAIL(error, FSDP_BACKEND,
                   "key '%s' has %" PRId64 " bytes instead of %zu", key, nbytes,
                   sizeof *first);
}

/* Whether no rank refuses; reason [out] of one that does. */
static fsdp_status vote(fsdp_nccl_transport *transport, fsdp_channel index,
                        const char *name, const char *refusal, bool *is_agreed,
                        char *reason, fsdp_error *error) {
  const fsdp_store store = fsdp_nccl_priv_store_of(transport);
  char key[FSDP_NCCL_KEY_NBYTES];
  format_key(transport, index, name, key);
  const fsdp_status status = fsdp_nccl_meeting_arrive(
      &store, key, transport->rank, transport->world_size, refusal, error);
  if (status != FSDP_OK) return status;
  return fsdp_nccl_meeting_conclude(
      &store, key, transport->world_size, transport->options.init_timeout_ms,
      is_agreed, reason, FSDP_NCCL_REASON_NBYTES, error);
}

/* After a registration that failed: waits until every rank has come back from
 * NCCL. It may keep ranks whose peer failed. */
static fsdp_status wait_for_all(fsdp_nccl_transport *transport,
                                fsdp_channel index, const char *reason,
                                fsdp_error *error) {
  const fsdp_store store = fsdp_nccl_priv_store_of(transport);
  const int64_t deadline_ms = fsdp_nccl_priv_now_ms() + REGISTERING_MS;
  char key[FSDP_NCCL_KEY_NBYTES];
  int64_t num_met = 0;
  int64_t pause_us = 0;
  format_key(transport, index, "registered/met", key);
  for (;;) {
    const fsdp_status status =
        store.add(store.context, key, 0, &num_met, error);
    if (status != FSDP_OK || num_met >= transport->world_size) return status;
    if (fsdp_nccl_priv_now_ms() >= deadline_ms ||
        !fsdp_nccl_priv_is_healthy(transport)) {
      return FSDP_FAIL(error, FSDP_BACKEND,
                       "%s; %" PRId64
                       " ranks do not return from "
                       "ncclCommWindowRegister",
                       reason, transport->world_size - num_met);
    }
    fsdp_nccl_priv_pause(&pause_us);
  }
}

/* Why this rank cannot have windows over its own places; "" if it can. */
static void refuse_plan(const fsdp_nccl_transport *transport,
                        const fsdp_nccl_places_plan *plan, char *refusal) {
  if (!transport->can_have_windows) {
    (void)snprintf(refusal, FSDP_NCCL_REASON_NBYTES,
                   "it asks for no windows, or its NCCL has none");
  } else if (plan->num_moved > 0) {
    (void)snprintf(refusal, FSDP_NCCL_REASON_NBYTES,
                   "%" PRId64 " of %" PRId64
                   " collectives used other memory lately",
                   plan->num_moved, plan->num_known);
  } else if (plan->num_blocks == 0) {
    (void)snprintf(refusal, FSDP_NCCL_REASON_NBYTES,
                   "no collective uses memory from ncclMemAlloc");
  }
}

/* The same of places that rank 0 does not have. */
static void refuse_difference(const fsdp_nccl_places_plan *mine,
                              const fsdp_nccl_places_plan *first,
                              char *refusal) {
  if (refusal[0] != 0 || memcmp(mine, first, sizeof *mine) == 0) return;
  (void)snprintf(
      refusal, FSDP_NCCL_REASON_NBYTES,
      "its collectives use memory unlike those of rank 0: %" PRId64
      " of %" PRId64 " lie in %" PRId64 " blocks (%" PRId64
      " bytes), there %" PRId64 " of %" PRId64 " in %" PRId64 " (%" PRId64 ")",
      mine->num_in_blocks, mine->num_known, mine->num_blocks, mine->nbytes,
      first->num_in_blocks, first->num_known, first->num_blocks, first->nbytes);
}

/* The first meeting: whether all ranks use the same places. */
static fsdp_status agree_on_places(fsdp_nccl_transport *transport,
                                   fsdp_channel index,
                                   fsdp_nccl_places_plan *plan, bool *is_agreed,
                                   char *reason, fsdp_error *error) {
  char refusal[FSDP_NCCL_REASON_NBYTES] = "";
  fsdp_nccl_places_plan first;
  FSDP_LOCAL_ERROR(no_plan);
  if (fsdp_nccl_priv_plan_places(transport, index, plan, &no_plan) != FSDP_OK) {
    (void)snprintf(refusal, sizeof refusal, "%.200s", no_plan.message);
  }
  refuse_plan(transport, plan, refusal);
  const fsdp_status status = share_plan(transport, index, plan, &first, error);
  if (status != FSDP_OK) return status;
  refuse_difference(plan, &first, refusal);
  return vote(transport, index, "places", refusal, is_agreed, reason, error);
}

/* The second meeting: whether all ranks have registered. */
static fsdp_status agree_on_windows(fsdp_nccl_transport *transport,
                                    fsdp_channel index, bool *is_agreed,
                                    char *reason, fsdp_error *error) {
  char refusal[FSDP_NCCL_REASON_NBYTES];
  /* Meanwhile the limit of a thread that is inside NCCL holds. */
  fsdp_nccl_priv_set_meeting(transport, index, false);
  register_windows(transport, index, refusal, sizeof refusal);
  fsdp_nccl_priv_set_meeting(transport, index, true);
  fsdp_status status = fsdp_nccl_priv_first_error(transport, false, error);
  if (status != FSDP_OK) return status;
  status =
      vote(transport, index, "registered", refusal, is_agreed, reason, error);
  if (status != FSDP_OK || *is_agreed) return status;
  return wait_for_all(transport, index, reason, error);
}

/* Fails the transport with `cause`, unless it has failed. */
static fsdp_status fail(fsdp_nccl_transport *transport, fsdp_channel index,
                        const char *what, fsdp_error *cause,
                        fsdp_error *error) {
  char reason[FSDP_ERROR_MESSAGE_NBYTES];
  (void)snprintf(reason, sizeof reason, "%s", cause->message);
  (void)FSDP_FAIL(cause, FSDP_BACKEND,
                  "rank %" PRId64 " of %" PRId64
                  ": %s of the symmetric windows of the %s failed (%.300s). %s",
                  transport->rank, transport->world_size, what,
                  channel_name(index), reason, REMEDY);
  return fsdp_nccl_priv_fail(transport, cause, error);
}

/* All ranks open the windows of their places, or none does. */
static fsdp_status open_windows(fsdp_nccl_transport *transport,
                                fsdp_channel index, fsdp_error *error) {
  fsdp_nccl_windows *windows = &transport->channels[index].windows;
  char reason[FSDP_NCCL_REASON_NBYTES] = "";
  fsdp_nccl_places_plan plan;
  bool is_agreed = false;
  FSDP_LOCAL_ERROR(cause);
  windows->num_meetings++;
  fsdp_nccl_priv_set_meeting(transport, index, true);
  fsdp_status status =
      agree_on_places(transport, index, &plan, &is_agreed, reason, &cause);
  if (status == FSDP_OK && is_agreed) {
    status = agree_on_windows(transport, index, &is_agreed, reason, &cause);
  }
  fsdp_nccl_priv_set_meeting(transport, index, false);
  if (status != FSDP_OK) {
    return fail(transport, index, "the meeting", &cause, error);
  }
  if (is_agreed) {
    windows->num_refused = 0;
    set_phase(transport, windows, FSDP_NCCL_WINDOWS_OPEN, plan.nbytes, "");
    return FSDP_OK;
  }
  fsdp_nccl_priv_close_windows(transport, index);
  fsdp_nccl_priv_forget_places(transport, index);
  const bool is_last = ++windows->num_refused == MAX_REFUSED;
  set_phase(transport, windows,
            is_last ? FSDP_NCCL_WINDOWS_OFF : FSDP_NCCL_WINDOWS_LEARNING, 0,
            reason);
  return FSDP_OK;
}

/* Closes the windows of all ranks, which come here at the same launch. */
static fsdp_status close_and_learn(fsdp_nccl_transport *transport,
                                   fsdp_channel index, fsdp_error *error) {
  fsdp_nccl_windows *windows = &transport->channels[index].windows;
  if (!fsdp_nccl_priv_drain(transport, index, INT64_MAX)) {
    FSDP_LOCAL_ERROR(cause);
    (void)FSDP_FAIL(&cause, FSDP_BACKEND, "the device cannot be waited for");
    return fail(transport, index, "the end", &cause, error);
  }
  fsdp_nccl_priv_close_windows(transport, index);
  fsdp_nccl_priv_forget_places(transport, index);
  set_phase(transport, windows, FSDP_NCCL_WINDOWS_LEARNING, 0,
            "the order or memory of the collectives has changed, they are "
            "watched anew");
  return FSDP_OK;
}

/* A known collective uses other memory. If it does so on all ranks, they meet
 * here; where one does not come, it has launched in its window. */
static fsdp_status meet_moved(fsdp_nccl_transport *transport,
                              fsdp_channel index, fsdp_error *error) {
  fsdp_nccl_channel *channel = &transport->channels[index];
  char reason[FSDP_NCCL_REASON_NBYTES];
  bool is_agreed = false;
  char name[40];
  FSDP_LOCAL_ERROR(cause);
  FSDP_LOCAL_ERROR(moved);
  /* Ranks that moved at different launches must not meet. */
  (void)snprintf(name, sizeof name, "moved/%" PRId64, channel->last.sequence);
  channel->windows.num_meetings++;
  fsdp_nccl_priv_set_meeting(transport, index, true);
  const fsdp_status status =
      vote(transport, index, name, NULL, &is_agreed, reason, &cause);
  fsdp_nccl_priv_set_meeting(transport, index, false);
  if (status == FSDP_OK) return FSDP_OK;
  (void)FSDP_FAIL(&moved, FSDP_BACKEND,
                  "rank %" PRId64 " of %" PRId64
                  ": '%s' uses other memory than the ranks agreed on for the "
                  "symmetric windows of the %s, and not on all ranks: this one "
                  "computes in another order, or ran out of memory (%.200s). "
                  "%s",
                  transport->rank, transport->world_size, channel->label,
                  channel_name(index), cause.message, REMEDY);
  return fsdp_nccl_priv_fail(transport, &moved, error);
}

fsdp_status fsdp_nccl_priv_follow(fsdp_nccl_transport *transport,
                                  fsdp_channel index, fsdp_error *error) {
  fsdp_nccl_windows *windows = &transport->channels[index].windows;
  fsdp_status status = FSDP_OK;
  bool is_due = false;
  if (windows->phase == FSDP_NCCL_WINDOWS_OFF) return FSDP_OK;
  if (windows->phase == FSDP_NCCL_WINDOWS_OPEN) {
    switch (fsdp_nccl_priv_compare(transport, index)) {
      case FSDP_NCCL_AS_AGREED:
        return FSDP_OK;
      case FSDP_NCCL_OTHER_MEMORY:
        FSDP_TRY(meet_moved(transport, index, error));
        break;
      case FSDP_NCCL_NEW_CALL:
      default:
        break;
    }
    FSDP_TRY(close_and_learn(transport, index, error));
  }
  FSDP_TRY(fsdp_nccl_priv_learn(transport, index, &is_due, error));
  if (windows->num_places > MAX_PLACES) {
    set_phase(transport, windows, FSDP_NCCL_WINDOWS_OFF, 0,
              "the collectives do not repeat themselves");
  } else if (is_due) {
    FSDP_TRY(open_windows(transport, index, error));
  }
done:
  return status;
}

/* A replay makes launches that nobody compares with the windows. */
bool fsdp_nccl_priv_can_capture(fsdp_transport *base) {
  fsdp_nccl_transport *transport = fsdp_nccl_priv_of(base);
  bool is_watched = false;
  (void)pthread_mutex_lock(&transport->lock);
  for (int i = 0; i < FSDP_NUM_CHANNELS; i++) {
    const fsdp_nccl_windows *windows = &transport->channels[i].windows;
    is_watched = is_watched || windows->phase != FSDP_NCCL_WINDOWS_OFF;
  }
  (void)pthread_mutex_unlock(&transport->lock);
  return !is_watched;
}

/* ---- Blocks ---------------------------------------------------------------*/

bool fsdp_nccl_wants_blocks(fsdp_transport *base) {
  const fsdp_nccl_transport *transport = fsdp_nccl_priv_of(base);
  return !fsdp_nccl_priv_is_forked(transport) && transport->can_have_windows;
}

fsdp_status fsdp_nccl_offer(fsdp_transport *base, void *block, int64_t nbytes,
                            fsdp_error *error) {
  fsdp_nccl_transport *transport = fsdp_nccl_priv_of(base);
  if (!fsdp_nccl_wants_blocks(base)) return FSDP_OK;
  (void)pthread_mutex_lock(&transport->lock);
  void *blocks = transport->blocks;
  const bool has_room =
      fsdp_grow(&blocks, &transport->block_capacity, transport->num_blocks + 1,
                sizeof *transport->blocks);
  transport->blocks = blocks;
  if (has_room) {
    transport->blocks[transport->num_blocks++] =
        (fsdp_nccl_block){.data = block, .nbytes = nbytes};
  }
  (void)pthread_mutex_unlock(&transport->lock);
  if (has_room) return FSDP_OK;
  return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY,
                   "out of host memory for a block of %" PRId64 " bytes",
                   nbytes);
}

/* Ends the window over the block, and what was learned of it, in one channel,
 * which this thread uses. */
static void forget_block(fsdp_nccl_transport *transport, fsdp_channel index,
                         const fsdp_nccl_block *block) {
  fsdp_nccl_windows *windows = &transport->channels[index].windows;
  for (size_t i = 0; i < windows->num_open; i++) {
    fsdp_nccl_open_window *each = &windows->open[i];
    if (each->block.data == block->data) deregister(transport, index, each);
  }
  for (size_t i = 0; i < windows->num_places; i++) {
    fsdp_nccl_place *each = &windows->places[i];
    const char *const end = block->data + block->nbytes;
    if ((each->buffer >= block->data && each->buffer < end) ||
        (each->input >= block->data && each->input < end)) {
      each->num_same = 0; /* its next use is of other memory */
    }
  }
}

void fsdp_nccl_withdraw(fsdp_transport *base, void *block) {
  fsdp_nccl_transport *transport = fsdp_nccl_priv_of(base);
  fsdp_nccl_block found = {0};
  if (fsdp_nccl_priv_is_forked(transport)) return;
  (void)pthread_mutex_lock(&transport->lock);
  for (size_t i = 0; i < transport->num_blocks; i++) {
    if (transport->blocks[i].data != block) continue;
    found = transport->blocks[i];
    transport->blocks[i] = transport->blocks[--transport->num_blocks];
  }
  (void)pthread_mutex_unlock(&transport->lock);
  if (found.data == NULL) return;
  for (int i = 0; i < FSDP_NUM_CHANNELS; i++) {
    const fsdp_channel index = (fsdp_channel)i;
    /* A transport that failed has no communicator, so no window either. */
    if (fsdp_nccl_priv_lock_channel(transport, index, NULL) != FSDP_OK) return;
    forget_block(transport, index, &found);
    fsdp_nccl_priv_unlock_channel(transport, index);
  }
}

void fsdp_nccl_describe_windows(fsdp_transport *base, char *text,
                                size_t text_nbytes) {
  fsdp_nccl_transport *transport = fsdp_nccl_priv_of(base);
  text[0] = 0;
  if (fsdp_nccl_priv_is_forked(transport)) return;
  (void)pthread_mutex_lock(&transport->lock);
  for (int i = 0; i < FSDP_NUM_CHANNELS; i++) {
    const fsdp_nccl_windows *windows = &transport->channels[i].windows;
    const size_t used = strlen(text);
    if (windows->phase == FSDP_NCCL_WINDOWS_OFF && windows->reason[0] == 0) {
      continue;
    }
    (void)snprintf(text + used, text_nbytes - used,
                   "%s%s: ", used == 0 ? "" : "; ",
                   channel_name((fsdp_channel)i));
    const size_t begun = strlen(text);
    if (windows->phase == FSDP_NCCL_WINDOWS_OPEN) {
      (void)snprintf(text + begun, text_nbytes - begun,
                     "symmetric windows of %" PRId64 " bytes", windows->nbytes);
    } else {
      (void)snprintf(text + begun, text_nbytes - begun,
                     "no symmetric windows, %s", windows->reason);
    }
  }
  (void)pthread_mutex_unlock(&transport->lock);
}
