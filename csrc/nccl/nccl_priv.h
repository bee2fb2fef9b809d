/*
 * The NCCL transport's parts: its state, and what its files call of each other.
 */
#ifndef FSDP_NCCL_PRIV_H
#define FSDP_NCCL_PRIV_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "nccl/nccl_transport.h"

struct fsdp_nccl_transport;

enum {
  FSDP_NCCL_LABEL_NBYTES = 96,
  FSDP_NCCL_MAX_OUTSTANDING = 128, /* launches per channel with an event each */
  FSDP_NCCL_WORDS_NBYTES = 512,    /* of a rank's last words in the store */
  FSDP_NCCL_KEY_NBYTES = 256
};

typedef enum fsdp_nccl_kind {
  FSDP_NCCL_ALL_GATHER = 0,
  FSDP_NCCL_BROADCAST,
  FSDP_NCCL_REDUCE_SCATTER,
  FSDP_NCCL_ALL_REDUCE
} fsdp_nccl_kind;

/* A collective that was asked for and not yet given to NCCL. */
typedef struct fsdp_nccl_collective {
  fsdp_nccl_kind kind;
  const void *send;
  void *receive;
  size_t numel; /* per rank for all_gather and reduce_scatter */
  int dtype;    /* NCCL's; gathers and broadcasts go by bytes */
  int root;
  double scale;
  int op; /* NCCL's, for `scale`; known when it is given to NCCL */
} fsdp_nccl_collective;

/* An operator of ncclRedOpCreatePreMulSum. */
typedef struct fsdp_nccl_scaled_sum {
  int dtype;
  double scale;
  int op;
} fsdp_nccl_scaled_sum;

/* What the channel gave to NCCL: one launch, of one or several collectives. */
typedef struct fsdp_nccl_operation {
  int64_t sequence;   /* 1, 2, ... per channel; the same on all ranks */
  int64_t started_ms; /* of the clock in fsdp_nccl_priv_now_ms */
  const char *name;   /* "all_gather", of the first collective */
  char label[FSDP_NCCL_LABEL_NBYTES]; /* empty: the call had none */
} fsdp_nccl_operation;

typedef struct fsdp_nccl_outstanding {
  fsdp_nccl_operation operation;
  void *event; /* owned; kept for the next operation in this place */
} fsdp_nccl_outstanding;

typedef struct fsdp_nccl_channel {
  /* Guarded by the transport's lock. */
  fsdp_nccl_comm *comm;  /* NULL until it is needed, and after its end */
  bool is_busy;          /* a thread is inside NCCL with `comm` */
  bool is_connecting;    /* that thread waits for `comm` to be made */
  int64_t busy_since_ms; /* of is_busy */
  fsdp_nccl_operation last;

  /* How the making of the communicator ended; the errand's, under the lock. */
  const char *making_stage; /* static */
  bool is_made;
  int made_result;

  /* Of the busy thread, or of the one between group_begin and group_end. */
  fsdp_nccl_comm *comm_in_use; /* `comm` when the channel was locked */
  bool is_group_open;
  void *stream;                       /* of the collectives */
  char label[FSDP_NCCL_LABEL_NBYTES]; /* of the first collective */
  fsdp_nccl_collective *collectives;
  size_t num_collectives;
  size_t collective_capacity;
  fsdp_nccl_scaled_sum *scaled_sums;
  size_t num_scaled_sums;
  size_t scaled_sum_capacity;

  /* A ring, guarded by the lock; the oldest is at first_outstanding. */
  fsdp_nccl_outstanding outstanding[FSDP_NCCL_MAX_OUTSTANDING];
  int64_t first_outstanding;
  int64_t num_outstanding;
} fsdp_nccl_channel;

typedef struct fsdp_nccl_registration {
  void *buffer;
  int64_t nbytes;
  void *handles[FSDP_NUM_CHANNELS]; /* NULL: not registered there */
} fsdp_nccl_registration;

/* What a thread of its own does for a transport, because it may block: one of
 * each at a time. Those from CONNECTING on are per channel. */
typedef enum fsdp_nccl_errand_kind {
  FSDP_NCCL_LOOKING = 0, /* for another rank's failure in the store */
  FSDP_NCCL_ENDING,      /* aborts, publishes, collects */
  FSDP_NCCL_LEAVING,     /* finalizes and destroys the communicators */
  FSDP_NCCL_CONNECTING,  /* makes a communicator */
  FSDP_NCCL_ABORTING = FSDP_NCCL_CONNECTING + FSDP_NUM_CHANNELS,
  FSDP_NCCL_NUM_ERRANDS = FSDP_NCCL_ABORTING + FSDP_NUM_CHANNELS
} fsdp_nccl_errand_kind;

typedef void (*fsdp_nccl_errand_body)(struct fsdp_nccl_transport *transport,
                                      fsdp_channel channel);

typedef struct fsdp_nccl_errand {
  struct fsdp_nccl_transport *transport;
  fsdp_nccl_errand_body body;
  fsdp_channel channel;
  pthread_t thread;
  bool is_started; /* and neither joined nor detached */
  bool is_done;
} fsdp_nccl_errand;

/* FAILING: the first error is known, the communicators are being aborted and
 * the others' last words collected. A transport that was left is FAILED. */
typedef enum fsdp_nccl_phase {
  FSDP_NCCL_HEALTHY = 0,
  FSDP_NCCL_FAILING,
  FSDP_NCCL_FAILED
} fsdp_nccl_phase;

typedef struct fsdp_nccl_transport {
  fsdp_transport base; /* first */
  fsdp_nccl_api api;
  fsdp_nccl_options options;
  char *prefix;            /* owned; options.prefix points here */
  char *net_name;          /* owned; options.tuning.net_name points here */
  fsdp_nccl_events events; /* options.events points here or is NULL */
  fsdp_store store;
  int version; /* of NCCL */
  int64_t rank;
  int64_t world_size;
  unsigned num_forks; /* of the process, when the transport was made */

  pthread_mutex_t lock;
  pthread_cond_t changed; /* is_busy, is_made, phase or is_done */
  fsdp_nccl_phase phase;
  fsdp_error error;
  bool is_aborting;          /* what is idle is not flushed any more */
  int64_t words_deadline_ms; /* until then calls wait for FAILED */
  fsdp_nccl_errand errands[FSDP_NCCL_NUM_ERRANDS];
  int64_t num_errands; /* not done */
  bool is_orphan;      /* destroyed: the last errand frees the transport */
  fsdp_nccl_channel channels[FSDP_NUM_CHANNELS];
  fsdp_nccl_registration *registrations; /* guarded by the lock */
  size_t num_registrations;
  size_t registration_capacity;

  /* Of the watchdog's list, under its lock. */
  struct fsdp_nccl_transport *next;
  bool is_listed;
  bool is_pinned;       /* the watchdog, or the exit, is at it */
  int64_t last_look_ms; /* for another rank's failure; the watchdog's */
} fsdp_nccl_transport;

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

/* ---- nccl_errand.c --------------------------------------------------------*/

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

/* ---- nccl_transport.c -----------------------------------------------------*/

/* Frees what is left when nobody uses the transport any more. */
void fsdp_nccl_priv_free(fsdp_nccl_transport *transport);

/* ---- nccl_comm.c ----------------------------------------------------------*/

/* Makes the communicator of a channel that this thread uses; fails the
 * transport if it cannot. */
FSDP_NODISCARD fsdp_status fsdp_nccl_priv_connect(
    fsdp_nccl_transport *transport, fsdp_channel channel, fsdp_error *error);
/* Marks the channel as in use by this thread; the first error of a transport
 * that failed. Ends with fsdp_nccl_priv_unlock_channel. */
FSDP_NODISCARD fsdp_status fsdp_nccl_priv_lock_channel(
    fsdp_nccl_transport *transport, fsdp_channel channel, fsdp_error *error);
void fsdp_nccl_priv_unlock_channel(fsdp_nccl_transport *transport,
                                   fsdp_channel channel);
/* Under the transport's lock: waits for the channel to be out of use. */
bool fsdp_nccl_priv_wait_until_free(fsdp_nccl_transport *transport,
                                    fsdp_channel channel, int64_t time_ms);
/* Waits until NCCL's own work on the host is done for the channel, which this
 * thread uses; `what` is under way. Only a communicator that NCCL_COMM_BLOCKING
 * made non-blocking needs it. On failure the transport has failed. */
FSDP_NODISCARD fsdp_status fsdp_nccl_priv_settle(fsdp_nccl_transport *transport,
                                                 fsdp_channel channel,
                                                 const char *what,
                                                 int64_t timeout_ms,
                                                 fsdp_error *error);
/* An error that NCCL reports by itself, between calls: fails the transport.
 * Asks nothing of a channel that a thread uses. */
void fsdp_nccl_priv_poll(fsdp_nccl_transport *transport, fsdp_channel channel);
/* Fails the transport: `what` has not ended on the host. */
fsdp_status fsdp_nccl_priv_fail_slow(fsdp_nccl_transport *transport,
                                     fsdp_channel channel, const char *what,
                                     int64_t timeout_ms, fsdp_error *error);
/* Makes this thread one of the transport's device. */
void fsdp_nccl_priv_enter_thread(const fsdp_nccl_transport *transport);

/* ---- nccl_leave.c ---------------------------------------------------------*/

/* Frees the communicators: flushed, if that is done by `deadline_ms`; aborted
 * otherwise. Every later call returns `reason`. */
void fsdp_nccl_priv_leave(fsdp_nccl_transport *transport,
                          const fsdp_error *reason, int64_t deadline_ms);

/* ---- nccl_order.c ---------------------------------------------------------*/

/* After a communicator was made, before anything is launched on it: asks NCCL
 * to keep launches in order; see Note [Launch order]. */
void fsdp_nccl_priv_order_launches(const fsdp_nccl_transport *transport);
/* Around each launch. */
void fsdp_nccl_priv_begin_launch(const fsdp_nccl_transport *transport);
void fsdp_nccl_priv_end_launch(const fsdp_nccl_transport *transport);

/* ---- nccl_scale.c ---------------------------------------------------------*/

/* The operator for a scaled sum; made where it must be, on a channel that this
 * thread uses. result [out] NCCL's, not a success when the operator could not
 * be made. FSDP_OUT_OF_MEMORY. */
FSDP_NODISCARD fsdp_status fsdp_nccl_priv_sum(fsdp_nccl_transport *transport,
                                              fsdp_channel channel, int dtype,
                                              double scale, int *op,
                                              int *result, fsdp_error *error);
/* NCCL's number for a dtype that can be summed, or -1. */
int fsdp_nccl_priv_dtype(fsdp_dtype dtype);
/* Gives the operators back, on a channel that this thread uses. */
void fsdp_nccl_priv_free_sums(fsdp_nccl_transport *transport,
                              fsdp_channel channel);

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
                                          double scale, uint64_t *ticket,
                                          fsdp_error *error);
fsdp_status fsdp_nccl_priv_all_reduce(fsdp_transport *base,
                                      const fsdp_call *call, void *buffer,
                                      int64_t numel, fsdp_dtype dtype,
                                      double scale, uint64_t *ticket,
                                      fsdp_error *error);

/* ---- nccl_outstanding.c ---------------------------------------------------*/

/* Records an event behind `operation`, which was just given to NCCL on
 * `stream`; the channel is in use by this thread. */
FSDP_NODISCARD fsdp_status fsdp_nccl_priv_track(
    fsdp_nccl_transport *transport, fsdp_channel channel,
    const fsdp_nccl_operation *operation, void *stream, fsdp_error *error);
/* Forgets operations that are done, oldest first, at most `max` of them.
 * FSDP_BACKEND: an event could not be asked. */
FSDP_NODISCARD fsdp_status fsdp_nccl_priv_retire(fsdp_nccl_transport *transport,
                                                 fsdp_channel channel,
                                                 int64_t max,
                                                 fsdp_error *error);
/* The oldest outstanding operation of the channel. False if there is none. */
bool fsdp_nccl_priv_oldest(fsdp_nccl_transport *transport, fsdp_channel channel,
                           fsdp_nccl_operation *operation);
void fsdp_nccl_priv_free_events(fsdp_nccl_transport *transport);

/* ---- nccl_failure.c -------------------------------------------------------*/

/* Ends the transport with `cause` (see Note [NCCL failures]), unless it ended
 * before. Does not wait: the rest is an errand's. Returns the first error. */
fsdp_status fsdp_nccl_priv_fail(fsdp_nccl_transport *transport,
                                const fsdp_error *cause, fsdp_error *error);
/* The same for a result of NCCL: `what` failed ("ncclGetUniqueId"), after or in
 * the last operation of the channel. */
fsdp_status fsdp_nccl_priv_fail_result(fsdp_nccl_transport *transport,
                                       fsdp_channel channel, const char *what,
                                       int result, fsdp_error *error);
/* The first error; FSDP_OK while there is none. With `waits` it waits, within
 * limits, for what is being collected for it. */
FSDP_NODISCARD fsdp_status fsdp_nccl_priv_first_error(
    fsdp_nccl_transport *transport, bool waits, fsdp_error *error);
bool fsdp_nccl_priv_is_healthy(fsdp_nccl_transport *transport);
/* Aborts all communicators side by side; see Note [Aborting under a call].
 * Whether all were gone by `deadline_ms`. */
bool fsdp_nccl_priv_abort_all(fsdp_nccl_transport *transport,
                              int64_t deadline_ms);

/* ---- nccl_words.c ---------------------------------------------------------*/

/* Where this rank is: its last operation on both channels. */
void fsdp_nccl_priv_format_position(fsdp_nccl_transport *transport, char *out,
                                    size_t out_nbytes);
/* Tells the others where this rank is and why it ended. False when the store
 * does not take it. */
bool fsdp_nccl_priv_publish(fsdp_nccl_transport *transport,
                            const char *position, const char *cause);
/* Appends to `error` what the other ranks say. */
void fsdp_nccl_priv_collect(const fsdp_nccl_transport *transport,
                            const char *position, fsdp_error *error);
/* Lets an errand look whether another rank says in the store that it failed,
 * and fail the transport then; at most once a second. The watchdog's. */
void fsdp_nccl_priv_look_at_others(fsdp_nccl_transport *transport);
/* Writes "operation 17 of the gathers (all_gather of unit 'x')". */
void fsdp_nccl_priv_format_operation(fsdp_channel channel,
                                     const fsdp_nccl_operation *operation,
                                     char *text, size_t text_nbytes);

/* ---- nccl_watchdog.c ------------------------------------------------------*/

/* Lets the watchdog look after the transport; starts it if it is the first. */
FSDP_NODISCARD fsdp_status fsdp_nccl_priv_watch(fsdp_nccl_transport *transport,
                                                fsdp_error *error);
/* The watchdog does not know the transport after it; stops with the last. Does
 * nothing for a transport that is not watched. */
void fsdp_nccl_priv_unwatch(fsdp_nccl_transport *transport);
/* How often this process, and those it was forked from, were forked since the
 * first call: another number than a transport's is another process. */
unsigned fsdp_nccl_priv_num_forks(void);

/* ---- nccl_register.c ------------------------------------------------------*/

/* Registers what is registered on a channel whose communicator is new, and that
 * this thread uses. */
void fsdp_nccl_priv_register_all(fsdp_nccl_transport *transport,
                                 fsdp_channel channel);
/* Deregisters what is left, on a channel that this thread uses. */
void fsdp_nccl_priv_deregister_all(fsdp_nccl_transport *transport,
                                   fsdp_channel channel);

/* ---- nccl_capture.c -------------------------------------------------------*/

typedef enum fsdp_nccl_capture_error {
  FSDP_NCCL_NO_CAPTURE_ERROR = 0,
  FSDP_NCCL_CAPTURE_RUNS,  /* an event cannot be asked at the moment */
  FSDP_NCCL_EVENT_CAPTURED /* it is part of a graph: never */
} fsdp_nccl_capture_error;

/* Which error of CUDA's about the capture of a graph this is, if any. */
fsdp_nccl_capture_error fsdp_nccl_priv_capture_error(const fsdp_error *error);

#endif /* FSDP_NCCL_PRIV_H */
