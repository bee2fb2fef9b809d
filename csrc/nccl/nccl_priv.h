/*
 * What the files of this room call of each other, from the bottom up: each file
 * calls only files above it here. nccl_library.c and nccl_meeting.c call none.
 */
#ifndef FSDP_NCCL_PRIV_H
#define FSDP_NCCL_PRIV_H

#include "nccl/nccl_state_priv.h"

static inline fsdp_nccl_transport *fsdp_nccl_priv_of(fsdp_transport *base) {
  return (fsdp_nccl_transport *)base;
}

/* ---- nccl_clock.c ---------------------------------------------------------*/

/* Milliseconds of a clock that never goes back. */
int64_t fsdp_nccl_priv_now_ms(void);
/* Sleeps a little, longer with each call on the same `*pause_us` (from 0). */
void fsdp_nccl_priv_pause(int64_t *pause_us);
void fsdp_nccl_priv_sleep_ms(int64_t time_ms);
/* A condition variable on that clock. False when the system has none left. */
bool fsdp_nccl_priv_cond_init(pthread_cond_t *cond);
/* Waits for `cond` until `deadline_ms` at the latest. */
void fsdp_nccl_priv_cond_wait(pthread_cond_t *cond, pthread_mutex_t *lock,
                              int64_t deadline_ms);

/* ---- nccl_capture.c -------------------------------------------------------*/

typedef enum fsdp_nccl_capture_error {
  FSDP_NCCL_NO_CAPTURE_ERROR = 0,
  FSDP_NCCL_CAPTURE_RUNS,  /* an event cannot be queried at the moment */
  FSDP_NCCL_EVENT_CAPTURED /* an event that is part of a graph never can */
} fsdp_nccl_capture_error;

/* Which of CUDA's errors about graph capture this is, if any. */
fsdp_nccl_capture_error fsdp_nccl_priv_capture_error(const fsdp_error *error);

/* ---- nccl_order.c ---------------------------------------------------------*/

/* Around each launch: one at a time in the process. See Note [Launch order]. */
void fsdp_nccl_priv_begin_launch(const fsdp_nccl_transport *transport);
void fsdp_nccl_priv_end_launch(const fsdp_nccl_transport *transport);

/* ---- nccl_outstanding.c ---------------------------------------------------*/

/* Records an event behind `operation`, which was just given to NCCL on
 * `stream`; the channel is in use by this thread. */
FSDP_NODISCARD fsdp_status fsdp_nccl_priv_track(
    fsdp_nccl_transport *transport, fsdp_channel channel,
    const fsdp_nccl_operation *operation, void *stream, fsdp_error *error);
/* The event of the place of the operation `sequence`, which was tracked; NULL:
 * it is done. The device may be asked to wait for it, though it may be recorded
 * again by then, behind a later operation. */
void *fsdp_nccl_priv_event_behind(fsdp_nccl_transport *transport,
                                  fsdp_channel channel, int64_t sequence);
/* Drops operations that are done, oldest first, at most `max` of them.
 * FSDP_BACKEND: an event could not be queried. */
FSDP_NODISCARD fsdp_status fsdp_nccl_priv_retire(fsdp_nccl_transport *transport,
                                                 fsdp_channel channel,
                                                 int64_t max,
                                                 fsdp_error *error);
/* The oldest outstanding operation of the channel. False if there is none. */
bool fsdp_nccl_priv_oldest(fsdp_nccl_transport *transport, fsdp_channel channel,
                           fsdp_nccl_operation *operation);
/* Leaving goes on now. */
void fsdp_nccl_priv_note_progress(fsdp_nccl_transport *transport);
/* Since when it has not. */
int64_t fsdp_nccl_priv_progressed_ms(fsdp_nccl_transport *transport);
/* Whether everything in flight on the channel gets done, with never `limit_ms`
 * from one operation's end to the next one's; false also where the
 * communicators are being aborted. */
bool fsdp_nccl_priv_drain(fsdp_nccl_transport *transport, fsdp_channel channel,
                          int64_t limit_ms);
void fsdp_nccl_priv_free_events(fsdp_nccl_transport *transport);

/* ---- nccl_state.c ---------------------------------------------------------*/

/* A transport without operations and communicators. NULL when memory is out. */
fsdp_nccl_transport *fsdp_nccl_priv_make(const fsdp_nccl_library *library,
                                         const fsdp_nccl_options *options,
                                         const fsdp_store *store, int64_t rank,
                                         int64_t world_size);
/* Frees it when nobody uses it any more; in a forked child only the memory. */
void fsdp_nccl_priv_free(fsdp_nccl_transport *transport);
/* Whether this process is a fork of the one that made the transport. */
bool fsdp_nccl_priv_is_forked(const fsdp_nccl_transport *transport);
bool fsdp_nccl_priv_is_healthy(fsdp_nccl_transport *transport);
/* The first error; FSDP_OK while there is none. With `waits` it waits, within
 * limits, until the other ranks' positions are part of it. */
FSDP_NODISCARD fsdp_status fsdp_nccl_priv_first_error(
    fsdp_nccl_transport *transport, bool waits, fsdp_error *error);

/* ---- nccl_store.c ---------------------------------------------------------*/

/* The transport's store; waits in it end when the transport fails. */
fsdp_store fsdp_nccl_priv_store_of(fsdp_nccl_transport *transport);

/* ---- nccl_channel.c -------------------------------------------------------*/

/* Marks the channel as in use by this thread; the first error of a transport
 * that failed. fsdp_nccl_priv_unlock_channel ends it. */
FSDP_NODISCARD fsdp_status fsdp_nccl_priv_lock_channel(
    fsdp_nccl_transport *transport, fsdp_channel channel, fsdp_error *error);
/* The same without waiting. False when the channel is in use, has no
 * communicator, or the transport has failed. */
bool fsdp_nccl_priv_trylock_comm(fsdp_nccl_transport *transport,
                                 fsdp_channel channel);
/* The same in a transport that is being left. False when the channel is not
 * free within `time_ms`, or is being aborted. */
bool fsdp_nccl_priv_lock_to_leave(fsdp_nccl_transport *transport,
                                  fsdp_channel channel, int64_t time_ms);
void fsdp_nccl_priv_unlock_channel(fsdp_nccl_transport *transport,
                                   fsdp_channel channel);
/* Around the time in which the thread that uses the channel waits for the other
 * ranks, with a limit of its own. */
void fsdp_nccl_priv_set_meeting(fsdp_nccl_transport *transport,
                                fsdp_channel channel, bool is_meeting);
/* Under the transport's lock: waits until no thread uses the channel. */
bool fsdp_nccl_priv_wait_until_free(fsdp_nccl_transport *transport,
                                    fsdp_channel channel, int64_t time_ms);

/* ---- nccl_words.c ---------------------------------------------------------*/

/* Writes "operation 17 of the collectives (all_gather of unit 'x')"; where
 * channels are split, "of the gathers". */
void fsdp_nccl_priv_format_operation(const fsdp_nccl_transport *transport,
                                     fsdp_channel channel,
                                     const fsdp_nccl_operation *operation,
                                     char *text, size_t text_nbytes);
/* This rank's position: its last operation on each channel. */
void fsdp_nccl_priv_format_position(fsdp_nccl_transport *transport, char *out,
                                    size_t out_nbytes);
/* Writes this rank's position, and why it ended, to the store. False when the
 * store fails. */
bool fsdp_nccl_priv_publish(fsdp_nccl_transport *transport,
                            const char *position, const char *cause);
/* Appends the positions of the other ranks to `error`. */
void fsdp_nccl_priv_collect(const fsdp_nccl_transport *transport,
                            const char *position, fsdp_error *error);
/* Reads from the store why the first rank ended. False if none has, or the
 * store fails. */
bool fsdp_nccl_priv_read_failure(const fsdp_nccl_transport *transport,
                                 char *cause, size_t cause_nbytes);

/* ---- nccl_errand.c --------------------------------------------------------*/

/* Makes this thread one of the transport's device. */
void fsdp_nccl_priv_enter_thread(const fsdp_nccl_transport *transport);
/* Runs `body` on a thread of its own, on the transport's device. False when
 * there is no thread, or the last one of this kind still runs. */
bool fsdp_nccl_priv_errand_start(fsdp_nccl_transport *transport,
                                 fsdp_nccl_errand_kind kind,
                                 fsdp_nccl_errand_body body,
                                 fsdp_channel channel);
/* Whether the errand was done, or never started, by `deadline_ms`. */
bool fsdp_nccl_priv_errand_wait(fsdp_nccl_transport *transport,
                                fsdp_nccl_errand_kind kind,
                                int64_t deadline_ms);
/* Whether all errands were done by `deadline_ms`. If not, the transport belongs
 * to them: the last one frees it. */
bool fsdp_nccl_priv_errands_end(fsdp_nccl_transport *transport,
                                int64_t deadline_ms);

/* ---- nccl_failure.c -------------------------------------------------------*/

/* Ends the transport with `cause` (see Note [NCCL failures]), unless it ended
 * before. Does not wait: an errand does the rest. Returns the first error. */
fsdp_status fsdp_nccl_priv_fail(fsdp_nccl_transport *transport,
                                const fsdp_error *cause, fsdp_error *error);
/* The same for a result of NCCL: `what` failed ("ncclGetUniqueId"), after or in
 * the last operation of the channel. */
fsdp_status fsdp_nccl_priv_fail_result(fsdp_nccl_transport *transport,
                                       fsdp_channel channel, const char *what,
                                       int result, fsdp_error *error);
/* The same because `what` is still in progress on the host. */
fsdp_status fsdp_nccl_priv_fail_slow(fsdp_nccl_transport *transport,
                                     fsdp_channel channel, const char *what,
                                     int64_t timeout_ms, fsdp_error *error);
/* Aborts all communicators side by side; see Note [Aborting under a call].
 * Whether all were gone by `deadline_ms`. */
bool fsdp_nccl_priv_abort_all(fsdp_nccl_transport *transport,
                              int64_t deadline_ms);

/* ---- nccl_comm.c ----------------------------------------------------------*/

/* Makes the communicator of a channel that this thread uses; fails the
 * transport if it cannot. */
FSDP_NODISCARD fsdp_status fsdp_nccl_priv_connect(
    fsdp_nccl_transport *transport, fsdp_channel channel, fsdp_error *error);
/* Fails the transport if NCCL reports an error between calls. Does nothing
 * while a thread uses the channel. */
void fsdp_nccl_priv_poll(fsdp_nccl_transport *transport, fsdp_channel channel);

/* ---- nccl_leave.c ---------------------------------------------------------*/

/* Frees the communicators: flushed, if that is done by `*deadline_ms`, or goes
 * on until then and later; aborted otherwise. Every later call returns
 * `reason`. deadline_ms  [out] moved to where it went on. */
void fsdp_nccl_priv_leave(fsdp_nccl_transport *transport,
                          const fsdp_error *reason, int64_t *deadline_ms);

/* ---- nccl_watchdog.c ------------------------------------------------------*/

/* Lets the watchdog watch the transport; starts it for the first one. */
FSDP_NODISCARD fsdp_status fsdp_nccl_priv_watch(fsdp_nccl_transport *transport,
                                                fsdp_error *error);
/* The watchdog does not use the transport afterwards; stops with the last one.
 * Does nothing for a transport that is not watched. */
void fsdp_nccl_priv_unwatch(fsdp_nccl_transport *transport);
/* For tests: whether its thread runs in this process. */
bool fsdp_nccl_priv_has_watchdog(void);

/* ---- nccl_collectives.c ---------------------------------------------------*/

fsdp_status fsdp_nccl_priv_group_begin(fsdp_transport *base,
                                       const fsdp_call *call,
                                       fsdp_error *error);
fsdp_status fsdp_nccl_priv_group_end(fsdp_transport *base,
                                     const fsdp_call *call, fsdp_error *error);
fsdp_status fsdp_nccl_priv_all_gather(fsdp_transport *base,
                                      const fsdp_call *call, void *output,
                                      const void *input, int64_t shard_numel,
                                      fsdp_dtype dtype, uint64_t *ticket,
                                      fsdp_error *error);
fsdp_status fsdp_nccl_priv_broadcast(fsdp_transport *base,
                                     const fsdp_call *call, void *buffer,
                                     int64_t numel, int64_t root,
                                     fsdp_dtype dtype, uint64_t *ticket,
                                     fsdp_error *error);
fsdp_status fsdp_nccl_priv_reduce_scatter(fsdp_transport *base,
                                          const fsdp_call *call, void *buffer,
                                          int64_t shard_numel, fsdp_dtype dtype,
                                          uint64_t *ticket, fsdp_error *error);
fsdp_status fsdp_nccl_priv_reduce_scatter_mean(
    fsdp_transport *base, const fsdp_call *call, void *output, void *buffer,
    int64_t shard_numel, fsdp_dtype dtype, uint64_t *ticket, fsdp_error *error);
fsdp_status fsdp_nccl_priv_all_reduce(fsdp_transport *base,
                                      const fsdp_call *call, void *buffer,
                                      int64_t numel, fsdp_dtype dtype,
                                      uint64_t *ticket, fsdp_error *error);

void *fsdp_nccl_priv_end_of(fsdp_transport *base, fsdp_channel channel,
                            uint64_t ticket);

#endif /* FSDP_NCCL_PRIV_H */
