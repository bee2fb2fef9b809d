/*
 * NCCL transport: the collectives of one process group of GPUs, over two
 * communicators of its own, one for gathers and one for reductions, so that
 * they overlap. Implements port/transport.h; `call->stream` is a cudaStream_t.
 *
 * A communicator is made by the first call on its channel. All ranks make the
 * same calls in the same order, per channel, so all of them come to it; a group
 * that is never gathered from has no communicator, and no device memory, for
 * gathers.
 *
 * A call enqueues on its stream and returns. The host waits for NCCL's own
 * host-side work alone (making a communicator, connections at the first
 * collectives), never for the device, and never longer than the time limit.
 *
 * Note [NCCL failures]
 * Whatever fails first - a result of NCCL, an error that it reports later, an
 * operation that takes longer than `timeout_ms`, another rank that says in the
 * store that it failed - ends the transport, once: both communicators are
 * aborted (a host that waits for a stream then returns), this rank says in the
 * store where it is, the others' last words are collected for up to `grace_ms`,
 * and from then on every call returns that first error. It names the rank, the
 * call's label, its sequence number and the time limit. Aborts that do not end
 * within 3 seconds are left to their threads.
 *
 * Note [NCCL threads]
 * The first transport starts one thread, the watchdog; the last one to go joins
 * it. It polls errors, the events of outstanding operations and threads that do
 * not come out of NCCL, and waits for nothing. What may block - making a
 * communicator, aborting, the store - runs as an errand, on a thread of its own
 * (nccl_errand.c). After a fork the child has neither threads nor
 * communicators: there every call fails and destroy only gives host memory
 * back.
 * Locks, in this order: the list of transports (nccl_watchdog.c), one
 * transport's state. Neither is held while NCCL or the store may block; a
 * channel in use is marked as such instead. The launch lock (nccl_order.c) is
 * held during a launch, and takes the transport's lock.
 *
 * Note [One thread in a communicator]
 * No NCCL function may run on a communicator while another one does, not even
 * ncclCommGetAsyncError: from NCCL 2.26 on it joins a thread of the
 * communicator and frees its memory. A thread that calls NCCL marks the channel
 * as in use first. The one exception is in Note [Aborting under a call].
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

/* Events over the caller's streams, by which the watchdog knows which
 * operations are outstanding. Called by the watchdog's thread too. */
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
  /* Threads of the transport call it before anything else, so that the device
   * is the transport's, and no capture of a graph is in their way
   * (fsdp_nccl_relax_capture). May be NULL. */
  void (*enter_thread)(void *context);
} fsdp_nccl_events;

/* As in ncclConfig_t; FSDP_NCCL_CONFIG_UNDEFINED, or NULL: NCCL decides. */
typedef struct fsdp_nccl_tuning {
  int cga_cluster_size;
  int min_ctas;
  int max_ctas;
  int split_share;
  const char *net_name; /* copied */
} fsdp_nccl_tuning;

typedef struct fsdp_nccl_options {
  /* Of all keys in the store; no two transports over one store share it, not
   * even one after the other. */
  const char *prefix;
  int64_t init_timeout_ms; /* for meeting the other ranks; at least 1 */
  int64_t timeout_ms;      /* of an operation; 0: none */
  int64_t grace_ms;        /* for the others' last words after a failure */
  int64_t leave_ms;        /* destroy waits this long for what is in flight */
  int64_t poll_ms;         /* how often the watchdog looks */
  /* Copied. NULL: only NCCL's own errors are watched, not operations. */
  const fsdp_nccl_events *events;
  fsdp_nccl_tuning tuning; /* the same on all ranks */
  /* Called with `owner` when nothing of the transport uses the store and the
   * events any more: at the end of destroy, or after it when a thread is stuck
   * in the store or in NCCL. Not if the transport could not be made. May be
   * NULL. */
  void (*release)(void *owner);
  void *owner;
} fsdp_nccl_options;

/* 10 minutes for meeting and for operations (as c10d), 2 seconds of grace, 2
 * to leave, a look every 200 ms, NCCL's own tuning; no prefix, no events, no
 * owner. Cannot fail. */
void fsdp_nccl_options_init(fsdp_nccl_options *options);

/*
 * Makes this rank's part of the group. Waits for nobody: the ranks meet in
 * their first calls.
 *
 * store      copied; its context must last until `release`. Used by several
 *            threads, also while other users of the group's store may be inside
 *            a wait: give a connection that nobody else uses.
 * transport  [out] new; ends with transport->ops->destroy().
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

/*
 * Note [NCCL scales]
 * A sum can be scaled on its way, without a pass of its own, where the result
 * is as exact as scaling afterwards in fp32: fp32 and fp64 by anything, fp16
 * and bf16 by numbers that they hold exactly (1/2, 1/8, not 1/3: NCCL rounds
 * the factor to the dtype first), integers not at all. 1/world_size becomes
 * ncclAvg, another number a pre-multiplied sum.
 *
 * Whether the transport's reductions take `scale` for this dtype. Cannot fail.
 */
bool fsdp_nccl_can_scale(const fsdp_transport *transport, fsdp_dtype dtype,
                         double scale);

/*
 * Registers memory of the device that collectives will use, so that NCCL can
 * reach it without copies; does nothing where NCCL has no such thing. A failure
 * leaves the transport as it was: collectives on this memory work, copying.
 *
 * FSDP_INVALID_STATE  the buffer is registered already.
 * FSDP_OUT_OF_MEMORY
 * FSDP_BACKEND
 */
FSDP_NODISCARD fsdp_status fsdp_nccl_register(fsdp_transport *transport,
                                              void *buffer, int64_t nbytes,
                                              fsdp_error *error);

/* Before the memory is freed, when no operation uses it. Does nothing for a
 * buffer that is not registered. Cannot fail. */
void fsdp_nccl_deregister(fsdp_transport *transport, void *buffer);

/* Whether the watchdog's thread runs in this process. Cannot fail. */
bool fsdp_nccl_has_watchdog(void);

/* For the end of the process, before the device goes: stops the watchdog and
 * leaves all groups, whoever still holds their transports. A later call on them
 * returns FSDP_INVALID_STATE, and none can be created; destroy gives the memory
 * back as ever. Takes a little longer than the transports' leave_ms at most.
 * Cannot fail. */
void fsdp_nccl_leave_all(void);

/*
 * Lets this thread ask for events while another one captures a CUDA graph:
 * otherwise the question is an error, and spoils the capture. Does nothing the
 * second time. False when no CUDA is loaded, or it refuses. Cannot fail.
 */
bool fsdp_nccl_relax_capture(void);

/*
 * Lets the ranks of a group find out whether all of them can use NCCL, with a
 * number of requests to the store that does not depend on the number of ranks.
 * `arrive` does not wait; `conclude` waits for the last rank to arrive, or for
 * the first one that refuses.
 *
 * store        `add` must be there.
 * key          of this meeting; no other one over the store has it.
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
