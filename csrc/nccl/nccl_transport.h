/*
 * NCCL transport: the collectives of one process group of GPUs. It has two
 * communicators of its own, one for gathers and one for reductions, so that
 * they overlap. Implements port/transport.h; `call->stream` is a cudaStream_t.
 *
 * The first call on a channel makes its communicator. All ranks make the same
 * calls in the same order, per channel, so all of them come to it. A group that
 * never gathers has no communicator, and no device memory, for gathers.
 *
 * A call enqueues on its stream and returns. The host waits only for NCCL's own
 * work on the host (making a communicator, the connections of the first
 * collectives), never for the device, and never longer than the time limit.
 *
 * Note [NCCL failures]
 * The first failure ends the transport: a result of NCCL, an error that NCCL
 * reports later, an operation that takes longer than `timeout_ms`, or another
 * rank's failure, which it has written to the store. Then, in this order: both
 * communicators are aborted, so that a host that waits for a stream returns;
 * this rank writes its position to the store; the positions of the other ranks
 * are collected for up to `grace_ms`. From then on every call returns the first
 * error. It names the rank, the call's label, its sequence number and the time
 * limit. Aborts that do not return within 3 seconds are left to their threads.
 *
 * Note [NCCL threads]
 * The first transport starts one thread, the watchdog; the last one joins it.
 * The watchdog checks for NCCL's errors, for the events of outstanding
 * operations and for threads that do not return from NCCL. It never blocks.
 * Work that may block (making a communicator, aborting, the store) runs as an
 * errand, on a thread of its own (nccl_errand.c). A forked child has neither
 * threads nor communicators: every call fails there, and destroy only frees
 * host memory.
 *
 * Locks, in this order: the list of transports (nccl_watchdog.c), one
 * transport's state. Neither is held while NCCL or the store may block; a
 * channel is marked as in use instead. The launch lock (nccl_order.c) is held
 * during a launch; the transport's lock may be taken under it.
 *
 * Note [One thread in a communicator]
 * No NCCL function may run on a communicator while another one does, not even
 * ncclCommGetAsyncError: from NCCL 2.26 on it joins a thread of the
 * communicator and frees its memory. A thread marks the channel as in use
 * before it calls NCCL. The one exception is in Note [Aborting under a call].
 */
#ifndef FSDP_NCCL_TRANSPORT_H
#define FSDP_NCCL_TRANSPORT_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "base/types.h"
#include "nccl/nccl_library.h"
#include "port/transport.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Events on the caller's streams. They tell the watchdog which operations are
 * outstanding. Also called by the watchdog's thread. */
typedef struct fsdp_nccl_events {
  void *context; /* first argument of every call */
  fsdp_status (*create)(void *context, void **event, fsdp_error *error);
  void (*destroy)(void *context, void *event);
  /* Happens when all work now on `stream` is done. Replaces the last record. */
  fsdp_status (*record)(void *context, void *event, void *stream,
                        fsdp_error *error);
  /* is_done [out] whether the recorded work is done. Does not wait. */
  fsdp_status (*query)(void *context, void *event, bool *is_done,
                       fsdp_error *error);
  /* Each thread of the transport calls it first. It selects the transport's
   * device and the relaxed mode of captures (fsdp_nccl_relax_capture). May be
   * NULL. */
  void (*enter_thread)(void *context);
} fsdp_nccl_events;

/* As in ncclConfig_t. With FSDP_NCCL_CONFIG_UNDEFINED, or NULL,
 * NCCL decides. */
typedef struct fsdp_nccl_tuning {
  int cga_cluster_size;
  int min_ctas;
  int max_ctas;
  int split_share;
  const char *net_name; /* copied */
} fsdp_nccl_tuning;

typedef struct fsdp_nccl_options {
  /* Of all keys in the store. No two transports over one store may share it,
   * not even one after the other. */
  const char *prefix;
  int64_t init_timeout_ms; /* for meeting the other ranks; at least 1 */
  int64_t timeout_ms;      /* of an operation; 0: none */
  int64_t grace_ms;        /* for the positions of the others after a failure */
  int64_t leave_ms; /* destroy waits as long as operations in flight end, and
                       never this long for the next one */
  int64_t poll_ms;  /* the watchdog's period */
  /* Copied. NULL: only NCCL's own errors are watched, not operations. */
  const fsdp_nccl_events *events;
  fsdp_nccl_tuning tuning; /* the same on all ranks */
  /* Whether reductions have a communicator of their own beside the gathers'.
   * The same on all ranks. */
  bool splits_channels;
  /* Called with `owner` when the transport uses neither the store nor the
   * events any more: at the end of destroy, or later, when a thread is stuck in
   * the store or in NCCL. Not called if fsdp_nccl_create fails. May be NULL. */
  void (*release)(void *owner);
  void *owner;
} fsdp_nccl_options;

/* 10 minutes for meeting and for operations (as c10d), 2 seconds of grace, 2
 * seconds to leave, a period of 200 ms, NCCL's own tuning, one communicator;
 * no prefix, no events, no owner. Cannot fail. */
void fsdp_nccl_options_init(fsdp_nccl_options *options);

/*
 * Makes this rank's transport. Does not wait: the ranks meet in their first
 * calls.
 *
 * store      copied; its context must last until `release`. Several threads
 *            use it, while other users of the group's store may wait inside
 *            theirs: give it a connection of its own.
 * transport  [out] new; transport->ops->destroy() ends it.
 *
 * FSDP_INVALID_ARGUMENT  a rank or world size out of range, no prefix, a
 *                        negative time, no time to join.
 * FSDP_OUT_OF_MEMORY
 * FSDP_BACKEND           the watchdog cannot be started.
 */
FSDP_NODISCARD fsdp_status fsdp_nccl_create(const fsdp_nccl_library *library,
                                            const fsdp_nccl_options *options,
                                            const fsdp_store *store,
                                            int64_t rank, int64_t world_size,
                                            fsdp_transport **transport,
                                            fsdp_error *error);

/* For the end of the process, before the device is shut down: stops the
 * watchdog and leaves all groups, also where their transports are still held.
 * Later calls on these return FSDP_INVALID_STATE, and no transport can be
 * created; destroy still frees memory. Takes little longer than leave_ms where
 * nothing in flight ends.
 * Cannot fail. */
void fsdp_nccl_leave_all(void);

/*
 * Lets this thread query events while another thread captures a CUDA graph.
 * Otherwise the query fails and invalidates the capture. Does nothing the
 * second time. False when no CUDA is loaded, or CUDA refuses. Cannot fail.
 */
bool fsdp_nccl_relax_capture(void);

/*
 * A graph with captured collectives was launched on `stream`: from now on the
 * watchdog looks whether that ends, as it does for a collective. The same call
 * on all ranks.
 *
 * The first error of the transport, or FSDP_BACKEND.
 */
FSDP_NODISCARD fsdp_status fsdp_nccl_watch_replay(fsdp_transport *transport,
                                                  void *stream,
                                                  fsdp_error *error);

/*
 * Finds out whether all ranks of a group can use NCCL. The number of requests
 * to the store per rank does not depend on the number of ranks. `arrive` does
 * not wait; `conclude` waits for the last rank to arrive, or for the first one
 * that refuses.
 *
 * store        needs `add`.
 * key          of this meeting; no other meeting over the store has it.
 * refusal      why this rank cannot; NULL or "": it can.
 * is_possible  [out] the same on all ranks.
 * reason       [out] one refusal, or "".
 *
 * FSDP_BACKEND  the store failed, or not all ranks came within the time limit.
 */
FSDP_NODISCARD fsdp_status fsdp_nccl_meeting_arrive(
    const fsdp_store *store, const char *key, int64_t rank, int64_t world_size,
    const char *refusal, fsdp_error *error);
FSDP_NODISCARD fsdp_status fsdp_nccl_meeting_conclude(
    const fsdp_store *store, const char *key, int64_t world_size,
    int64_t timeout_ms, bool *is_possible, char *reason, size_t reason_nbytes,
    fsdp_error *error);

#ifdef __cplusplus
}
#endif
#endif /* FSDP_NCCL_TRANSPORT_H */
