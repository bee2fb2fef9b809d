/*
 * What a NCCL transport consists of: its channels, what they have in flight,
 * and its errands.
 */
#ifndef FSDP_NCCL_STATE_PRIV_H
#define FSDP_NCCL_STATE_PRIV_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "nccl/nccl_transport.h"

struct fsdp_nccl_transport;

enum {
  FSDP_NCCL_LABEL_NBYTES = 96,
  FSDP_NCCL_MAX_OUTSTANDING = 128, /* launches per channel with an event each */
  FSDP_NCCL_WORDS_NBYTES = 512,    /* of a rank's position in the store */
  FSDP_NCCL_KEY_NBYTES = 256,
  FSDP_NCCL_REASON_NBYTES = 256
};

typedef enum fsdp_nccl_kind {
  FSDP_NCCL_ALL_GATHER = 0,
  FSDP_NCCL_BROADCAST,
  FSDP_NCCL_REDUCE_SCATTER,
  FSDP_NCCL_ALL_REDUCE
} fsdp_nccl_kind;

/* A collective that a caller asked for and NCCL did not get yet. */
typedef struct fsdp_nccl_collective {
  fsdp_nccl_kind kind;
  const void *send;
  void *receive;
  size_t numel; /* per rank for all_gather and reduce_scatter */
  int dtype;    /* NCCL's; gathers and broadcasts go as bytes */
  int op;       /* of a reduction */
  int root;
} fsdp_nccl_collective;

/* One launch that the channel gave to NCCL, of one or several collectives. */
typedef struct fsdp_nccl_operation {
  int64_t sequence;   /* 1, 2, ... per channel; the same on all ranks */
  int64_t started_ms; /* of the clock in fsdp_nccl_priv_now_ms */
  const char *name;   /* "all_gather", of the first collective */
  char label[FSDP_NCCL_LABEL_NBYTES]; /* empty: the call had none */
} fsdp_nccl_operation;

typedef struct fsdp_nccl_outstanding {
  fsdp_nccl_operation operation;
  int64_t last_sequence; /* of the operations that its event stands behind */
  void *event;           /* owned; kept for the next operation in this place */
} fsdp_nccl_outstanding;

typedef struct fsdp_nccl_channel {
  /* Guarded by the transport's lock. */
  fsdp_nccl_comm *comm; /* NULL until it is needed, and after its end */
  bool is_busy;         /* a thread is inside NCCL with `comm` */
  bool is_finalizing;   /* likewise, in ncclCommFinalize */
  bool is_meeting; /* that thread waits for the other ranks to make `comm`, with
                      a limit of its own */
  int64_t busy_since_ms; /* of is_busy */
  fsdp_nccl_operation last;

  /* How the making of the communicator ended; written by its errand, under the
   * lock. */
  const char *making_stage; /* static */
  bool is_made;
  int made_result;

  /* For the busy thread only, or for the one between group_begin
   * and group_end. */
  fsdp_nccl_comm *comm_in_use; /* `comm` when the channel was locked */
  bool is_group_open;
  void *stream;                       /* of the collectives */
  bool is_captured;                   /* so are they, into a graph */
  char label[FSDP_NCCL_LABEL_NBYTES]; /* of the first collective */
  fsdp_nccl_collective *collectives;
  size_t num_collectives;
  size_t collective_capacity;

  /* A ring, guarded by the lock; the oldest is at first_outstanding. */
  fsdp_nccl_outstanding outstanding[FSDP_NCCL_MAX_OUTSTANDING];
  int64_t first_outstanding;
  int64_t num_outstanding;
} fsdp_nccl_channel;

/* What runs on a thread of its own because it may block: one of each kind at a
 * time. Those from CONNECTING on are per channel. */
typedef enum fsdp_nccl_errand_kind {
  FSDP_NCCL_LOOKING = 0, /* for another rank's failure in the store */
  FSDP_NCCL_ENDING,      /* aborts, then exchanges positions */
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

/* FAILING: the first error is known, the communicators are being aborted, and
 * the positions of the other ranks collected. A transport that was left is
 * FAILED. */
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
  bool is_aborting;          /* idle communicators are no longer flushed */
  int64_t progressed_ms;     /* while it is left: when it last went on */
  int64_t words_deadline_ms; /* calls wait for FAILED until then */
  fsdp_nccl_errand errands[FSDP_NCCL_NUM_ERRANDS];
  int64_t num_errands; /* not done */
  bool is_orphan;      /* destroyed: the last errand frees the transport */
  fsdp_nccl_channel channels[FSDP_NUM_CHANNELS];

  /* For the watchdog's list, under its lock. */
  struct fsdp_nccl_transport *next;
  bool is_listed;
  bool is_pinned;       /* the watchdog, or the exit, uses it */
  int64_t last_look_ms; /* for another rank's failure */
} fsdp_nccl_transport;

#endif /* FSDP_NCCL_STATE_PRIV_H */
