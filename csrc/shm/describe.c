/*
 * Descriptions of calls and ranks, for error messages.
 */
#include <inttypes.h>
#include <stdio.h>

#include "shm/shm_priv.h"

static const char *channel_name(fsdp_channel channel) {
  return channel == FSDP_CHANNEL_GATHER ? "gather" : "reduce";
}

const char *fsdp_shm_priv_kind_name(int32_t kind) {
  switch (kind) {
    case FSDP_SHM_ALL_GATHER:
      return "all_gather";
    case FSDP_SHM_BROADCAST:
      return "broadcast";
    case FSDP_SHM_REDUCE_SCATTER:
      return "reduce_scatter";
    case FSDP_SHM_ALL_REDUCE:
      return "all_reduce";
    case FSDP_SHM_OPEN:
      return "all_gather in place";
    case FSDP_SHM_REDUCE_PARTS:
      return "reduce_scatter of parts";
    default:
      return "unknown";
  }
}

void fsdp_shm_priv_describe_call(const fsdp_shm_descriptor *call, char *text,
                                 size_t text_nbytes) {
  (void)snprintf(text, text_nbytes,
                 "#%" PRIu64 " %s (%.*s) of %" PRId64 " elements of dtype %d",
                 call->sequence, fsdp_shm_priv_kind_name(call->kind),
                 (int)sizeof call->label - 1,
                 call->label_hash == 0 ? "no label" : call->label, call->numel,
                 (int)call->dtype_code);
}

/* The last call that `peer` started on the channel. False when it has started
 * none. */
static bool find_last(const fsdp_shm *shm, int64_t peer, fsdp_channel channel,
                      fsdp_shm_descriptor *call, bool *is_ended) {
  const fsdp_shm_channel_header *header =
      fsdp_shm_priv_channel_of(shm, peer, channel);
  enum { TRIES = 4 };
  for (int i = 0; i < TRIES; i++) {
    const uint64_t sequence = atomic_load(&header->num_started);
    if (sequence == 0) return false;
    *call = header->started[sequence % 2];
    *is_ended = atomic_load(&header->num_ended) >= sequence;
    if (atomic_load(&header->num_started) == sequence) return true;
  }
  return true;
}

void fsdp_shm_priv_describe_peer(const fsdp_shm *shm, int64_t peer,
                                 fsdp_channel channel, char *text,
                                 size_t text_nbytes) {
  const fsdp_channel other = channel == FSDP_CHANNEL_GATHER
                                 ? FSDP_CHANNEL_REDUCE
                                 : FSDP_CHANNEL_GATHER;
  const fsdp_shm_process *process = &shm->peers[peer].process;
  const char *state =
      fsdp_shm_priv_process_state_name(fsdp_shm_priv_process_look(process));
  fsdp_shm_descriptor call;
  bool is_ended;
  char here[256] = "has made no call there";
  char there[256] = "";
  if (find_last(shm, peer, channel, &call, &is_ended)) {
    char name[224];
    fsdp_shm_priv_describe_call(&call, name, sizeof name);
    (void)snprintf(here, sizeof here, is_ended ? "ended %s" : "is in %s", name);
  }
  if (find_last(shm, peer, other, &call, &is_ended) && !is_ended) {
    char name[192];
    fsdp_shm_priv_describe_call(&call, name, sizeof name);
    (void)snprintf(there, sizeof there, ", and on the %s channel is in %s",
                   channel_name(other), name);
  }
  (void)snprintf(text, text_nbytes,
                 "rank %" PRId64 ", which %s%s (process %" PRId64 " is %s)",
                 peer, here, there, process->pid, state);
}
