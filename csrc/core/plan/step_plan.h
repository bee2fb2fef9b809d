/*
 * Step plan: what a training step of some units needs, found by running the
 * engine itself over the counting port. Nothing is allocated on a device, no
 * rank communicates; the schedule, the arena's assignment of blocks and the
 * layouts are those of training.
 *
 * A step is two lists of events, one of forward and one of backward, each in
 * the order of execution:
 *
 *   event        forward         backward
 *   ENTER unit   pre_forward     inputs_ready: its inputs have their gradients
 *   USE param    -               its gradient has come
 *   WORK         compute         compute
 *   LEAVE unit   post_forward    pre_backward: its outputs have their gradients
 *
 * WORK and USE change what activations hold: all that the model and autograd
 * have on the device beside parameters and their gradients. A parameter's
 * gradient is made in WORK; USE takes it over from the activations.
 */
#ifndef FSDP_PLAN_STEP_PLAN_H
#define FSDP_PLAN_STEP_PLAN_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "layout/flat_layout.h"
#include "offload/offload.h"
#include "plan/counting_port.h"
#include "runtime/engine.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum fsdp_step_event_kind {
  FSDP_STEP_ENTER = 0,
  FSDP_STEP_USE,
  FSDP_STEP_WORK,
  FSDP_STEP_LEAVE
} fsdp_step_event_kind;

typedef struct fsdp_step_event {
  fsdp_step_event_kind kind;
  int64_t unit;           /* unless WORK */
  int64_t param;          /* of USE: each at most once, and trainable */
  int64_t nbytes;         /* that activations hold more after the event, or less
                             (negative); 0 unless WORK or USE */
  int64_t peak_nbytes;    /* most that they hold more meanwhile; >= nbytes, 0 */
  int64_t offload_nbytes; /* of WORK: in forward, bytes saved for backward in
                             storages that may wait in host memory; in the
                             backward event that needs them first, the same
                             number; 0: none */
  int64_t saved_by;       /* of such a backward event: the forward event */
  double seconds;         /* of compute, before what the event does; >= 0 */
  bool requires_grad;     /* of LEAVE in forward: its outputs do */
} fsdp_step_event;

typedef struct fsdp_step_unit {
  const char *name;
  const fsdp_flat_layout *layout; /* its world_size is the shard group's */
  const fsdp_segment_options
      *segments;        /* one per segment; `shard` is not read */
  int64_t num_replicas; /* >= 1 */
  bool reshards;        /* after forward, as FULL_SHARD */
  /* After a backward that does not reduce, even if `reshards` is false. */
  bool reshards_after_backward;
  bool finds_unused; /* see fsdp_unit_options */
  bool is_apart;     /* likewise */
  fsdp_prefetch backward_prefetch;
  bool forward_prefetch;
  bool offloads;
} fsdp_step_unit;

/* All that it points at is borrowed for the call. */
typedef struct fsdp_step_plan_options {
  const fsdp_step_unit *units; /* parents first; the first is the root */
  int64_t num_units;           /* >= 1 */
  const fsdp_step_event *forward;
  int64_t num_forward;
  const fsdp_step_event *backward;
  int64_t num_backward;
  fsdp_link shard_link;
  fsdp_link replica_link;
  int64_t num_local;      /* ranks of the shard group on a host; 0: one host */
  fsdp_link host_link;    /* of a host, which its ranks share; with num_local */
  bool wants_scratch;     /* reductions do, as through gloo */
  bool is_host;           /* the device is one: blocks come and go */
  int64_t num_batches;    /* of a step; >= 1 */
  fsdp_sync accumulation; /* of all batches but the last */
  int64_t offload_keep_last;    /* see offload.h; 0: nothing is offloaded */
  double copy_bytes_per_second; /* to and from the host; 0: takes no time */
} fsdp_step_plan_options;

/* All of one rank. */
typedef struct fsdp_step_plan_report {
  fsdp_engine_stats stats; /* at the end of the last step; counts since the
                              first */
  int64_t peak_nbytes;     /* most that was held in the last step, without the
                              shards and the optimizer's state */
  int64_t at_peak[FSDP_NUM_COUNTED]; /* then */
  int64_t num_step_allocs;           /* of blocks in the last step */
  fsdp_collective_count collectives[FSDP_NUM_COLLECTIVES]; /* in it */
  double step_seconds;
  double compute_seconds;
  double stall_seconds;       /* of COMPUTE: exposed communication and copies */
  fsdp_offload_stats offload; /* counts since the first step */
} fsdp_step_plan_report;

/*
 * Runs three steps, after two of which the arena's blocks are assigned, and
 * reports the last one.
 *
 * report        [out]
 * unit_seconds  [out] per unit: the stalls of COMPUTE charged to it in the last
 * step.
 *
 * FSDP_INVALID_ARGUMENT  a number is out of its bounds, an event names a unit
 *                        or parameter that does not exist, ENTER and LEAVE of
 *                        forward do not match, or activations are not given
 *                        back.
 * FSDP_OVERFLOW, FSDP_OUT_OF_MEMORY
 */
FSDP_NODISCARD fsdp_status fsdp_step_plan_run(
    const fsdp_step_plan_options *options, fsdp_step_plan_report *report,
    double *unit_seconds, fsdp_error *error);

#ifdef __cplusplus
}
#endif
#endif /* FSDP_PLAN_STEP_PLAN_H */
