/*
 * The records that the runtime's files share: an engine and a unit.
 *
 * A comment that begins with names of files names the only files that write
 * the field. On a line of its own it stands for the fields up to the next blank
 * line or comment line. fsdp_unit_create() and fsdp_engine_create() may
 * initialise every field. tests/lint/test_writers.py checks this.
 */
#ifndef FSDP_RUNTIME_RECORDS_PRIV_H
#define FSDP_RUNTIME_RECORDS_PRIV_H

#include <stddef.h>

#include "order/order.h"
#include "runtime/engine.h"

/* Gradients wait to be packed together until the unit's are complete. If its
 * block is there before, only until they are this large: few launches for small
 * parameters, early release for large ones. */
enum { FSDP_PACK_THRESHOLD_NBYTES = 1 << 20 };

/* Which gradients of a unit hold a value: a set. A reduction adds what the
 * others hold to the sharded one. */
typedef enum fsdp_grads {
  FSDP_GRADS_UNSHARDED = 1 << 0, /* grad_data, in a block of the arena */
  FSDP_GRADS_PARTIAL = 1 << 1,   /* partial_data; see FSDP_SYNC_SHARD */
  FSDP_GRADS_SHARDED = 1 << 2    /* grad_shard of the segments */
} fsdp_grads;

typedef struct fsdp_unit_segment {
  fsdp_segment_options options;
  const fsdp_segment *layout; /* borrowed */

  void *shard; /* engine.c: where it lies now; the port may move it */
  void *home;  /* in_place.c: where others read it, while it is shared */

  bool is_resident;    /* place.c: one rank, no cast: the shard is all of it */
  bool is_trainable;   /* place.c, unused.c: some parameter requires grad */
  bool has_grad_place; /* place.c, unused.c: it ever was trainable */
  bool is_thawed;      /* summon.c: trainable while it lasts */

  /* gradients.c: memory of the sharded gradient; NULL: none. Ask for it again
   * in each reduction: the port may have moved it since. */
  void *grad_shard;

  /* place.c: bytes from the start of the parameter block */
  int64_t param_offset;
  int64_t param_stage_offset; /* the shard before its cast, if offloaded */
  int64_t param_stage_numel;  /* elements that are there at a time */
  int64_t part_offset;        /* of the block of its part */
  /* place.c: bytes from the start of the gradient block */
  int64_t grad_offset;
  int64_t grad_stage_offset; /* the sharded gradient on the device, likewise */
  /* place.c: bytes from the start of other blocks */
  int64_t held_offset;      /* of the gradients that are held */
  int64_t full_offset;      /* of whole parameters in master dtype */
  int64_t full_grad_offset; /* of whole gradients in grad dtype */
  int64_t partial_offset;   /* of the partial gradient */
  int64_t scratch_offset;   /* of a reduction's scratch */
} fsdp_unit_segment;

/* Whole parameters, or whole gradients, of a unit in memory of their own. */
typedef struct fsdp_summoned {
  /* summoned.c */
  void *block;      /* on the device; NULL: none */
  void *host_block; /* in host memory; NULL: none */
  void **data;      /* segments in one of them; NULL entries: not in it */

  bool is_shown; /* summon.c: the user sees it */
  bool is_live;  /* summon.c: of gradients that the user saw: any at the end */
} fsdp_summoned;

/* prefetch.c: see fsdp_unit_set_prefetches(). */
typedef struct fsdp_prefetch_list {
  fsdp_unit **units; /* borrowed, of the same engine */
  size_t num_units;
  size_t capacity;
} fsdp_prefetch_list;

/* A unit's part in the open step. */
typedef struct fsdp_unit_step {
  bool ran_forward;      /* forward.c: since the last end of backward */
  bool is_awaited;       /* likewise, and a backward was to follow */
  bool entered_backward; /* backward.c, end_phase.c: in the open backward */
  /* backward.c: still to come in the open backward */
  int64_t expected_grads;  /* until the unit is resharded */
  int64_t expected_inputs; /* and then until it is reduced */
  bool is_reduce_ready; /* reduce.c: gradient complete, reduction not issued */
  bool was_reduced;     /* reduce.c */
  bool reduces_parts;   /* backward.c: Note [Gradients in parts] */
  bool is_unreached;    /* reduce.c: fsdp_unit_priv_reduce_partial() */
  bool was_marked;      /* unused.c: in this backward, see was_used */
  bool shows_shapes;    /* unshard.c: not unshards_in_backward */
} fsdp_unit_step;

struct fsdp_unit {
  /* Only what does not change: name points at `name`, segments
   * at `segments`. */
  fsdp_unit_options options;
  fsdp_unit_settings settings; /* the port's; engine.c: sync */
  char *name;
  fsdp_engine *engine; /* engine.c: borrowed; NULL: in no engine */
  int64_t index;       /* engine.c: in engine->units */
  fsdp_unit *main;     /* engine.c: itself, or the one that it is apart from;
                          NULL: in no engine */

  int64_t num_segments;
  fsdp_unit_segment *segments; /* num_segments, then that of the marks */
  fsdp_segment marks_layout;   /* unused.c: of the segment of marks */
  void *marks;       /* unused.c: their sums in host memory; NULL: never read */
  bool reads_marks;  /* unused.c: the last reduction's are there, or will be */
  bool awaits_marks; /* unused.c: they are being copied there */
  bool has_missed;   /* unused.c: a gradient, in the last reduction */
  uint8_t *was_used; /* unused.c: per parameter, by this rank in a reduction
                        of this backward */

  /* place.c */
  bool is_resident; /* every segment is */
  bool has_cast;    /* some segment's parameters have another dtype */
  bool is_extended; /* some segment is */
  bool has_held;    /* some segment's gradients are held in another dtype than
                       they are reduced in: their block is another one */
  /* place.c: bytes of the unit's blocks; 0: needs none. */
  int64_t param_nbytes;
  int64_t part_nbytes;
  int64_t grad_nbytes;
  int64_t held_nbytes;
  int64_t full_nbytes;
  int64_t full_grad_nbytes;
  int64_t partial_nbytes;
  int64_t scratch_nbytes;

  /* In the engine's arena; -1: none. */
  int64_t param_client; /* engine.c */
  int64_t grad_client;  /* engine.c, place.c */
  int64_t held_client;  /* gradients.c, place.c; made at first use */
  int64_t full_client;  /* engine.c, unshard.c: whole parameters in master
                           dtype; made at first use */

  int64_t part_client; /* engine.c, unshard.c: its part; likewise */

  fsdp_unit_state state;  /* failure.c: along the table of unit/state.h */
  fsdp_error first_error; /* failure.c: meaningful in FAILED */
  fsdp_unit_step step;    /* backward.c, engine.c: cleared when a step ends */

  fsdp_event *unsharded; /* engine.c: recorded after the all-gather */
  void **param_data;     /* unshard.c: unsharded segments; valid while held */
  bool is_full;          /* unshard.c: the last unshard was in master dtype */
  bool is_of_parts;      /* unshard.c: the last unshard was of parts */

  /* in_place.c: Note [Reading shards in place] */
  fsdp_transport *sharer; /* of `shared` */
  fsdp_shared *shared;    /* NULL: none */
  void *shared_whole;     /* all ranks' shards, as in the block */
  bool asked_to_share;    /* in this engine */
  bool is_in_place;       /* the unit reads there, instead of a block */
  bool has_readers;       /* others may still read this rank's shard */

  fsdp_prefetch_list prefetches[FSDP_NUM_PASSES]; /* prefetch.c, engine.c */

  uint8_t grads; /* gradients.c: a set of fsdp_grads */
  /* gradients.c: valid while unsharded gradients exist. NULL entries: frozen;
   * of stage_data also: not offloaded. */
  void **grad_data;
  void **stage_data;
  bool is_held; /* gradients.c: grad_data is in held dtype, in that block */
  /* gradients.c: memory is kept once it was needed. NULL entries: frozen. */
  void *partial_block;
  void **partial_data;

  /* pack.c */
  uint8_t *is_filled; /* per parameter: grad_data holds its gradient */
  bool is_whole;      /* every element of the block was written */
  fsdp_grad *pending; /* handed over, not packed; by parameter, or zeros */
  int64_t num_pending;
  int64_t num_unlike; /* of them: not of the reduce dtype */
  int64_t pending_nbytes;
  /* pack.c, unused.c, unshard.c, in_place.c, reduce_unit.c, reduce_parts.c,
   * summoned.c: scratch, 3 * num_params + num_segments + 1. A pack of gradients
   * has the most: for each parameter a gradient, a gap after it and a mark. */
  fsdp_pack_item *items;

  int64_t num_forwards;    /* forward.c, engine.c: calls that run now */
  int64_t reduce_position; /* reduce.c: in the recorded order; -1: not there */
  bool is_pinned;          /* on_demand.c: unsharded at the user's request */
  bool is_left_shown;      /* engine.c, unshard.c: UNSHARDED since a forward */
  bool is_for_inference;   /* forward.c, backward.c: KEPT by a forward without
                              gradients */
  bool may_be_stale;       /* forward.c, unshard.c: what it holds is from before
                              somebody was to write the shards */

  /* summon.c */
  bool is_summoned;
  fsdp_summon_options summon; /* of the open summon */
  bool has_whole_grads;       /* some rank shows whole gradients */

  fsdp_summoned whole;      /* its parameters */
  fsdp_summoned whole_grad; /* its gradients */
};

/* A second buffer for reductions. */
typedef struct fsdp_scratch {
  /* scratch.c */
  void *block; /* NULL: none */
  int64_t block_nbytes;
  fsdp_event *free_event; /* after its last use; NULL: never used */
} fsdp_scratch;

enum { FSDP_NUM_SCRATCHES = 2 };

/* Lists of the reduction in parts that is in flight, used again. */
typedef struct fsdp_part_lists {
  /* reduce_parts.c */
  fsdp_part *parts;
  size_t num_parts;
  size_t part_capacity;
  fsdp_place *places;
  size_t num_places;
  size_t place_capacity;
} fsdp_part_lists;

struct fsdp_engine {
  fsdp_device_ops ops;
  fsdp_view_ops views;
  fsdp_arena *arena;
  fsdp_order *order;

  /* engine.c */
  fsdp_unit **units;
  size_t num_units;
  size_t units_capacity;
  fsdp_sync sync;
  bool offloads; /* some unit does */

  bool checks_order;  /* check_order.c */
  bool records_graph; /* forward.c, engine.c: the forward that runs or begins */
  bool ran_forward;   /* forward.c, backward.c: since the last backward */
  bool shows_kept;    /* forward.c, unshard.c, backward.c: some unit was left */
  bool in_backward;   /* backward.c, engine.c */
  int64_t depth;      /* forward.c, engine.c: units inside forward now */
  fsdp_unit *root;  /* forward.c, engine.c: outermost unit of this iteration */
  bool has_entered; /* backward.c: a unit of this backward, but the root */
  bool leaves_kept; /* backward.c: this backward brings no gradient */
  bool leaves_reduces_open;  /* engine.c: see set_waits_for_reduces */
  bool has_open_reduces;     /* gradients.c, reduce.c */
  bool is_capturing;         /* capture.c: a step, into a graph */
  size_t num_captured_units; /* capture.c: of the last capture */

  fsdp_event *compute_done; /* recorded on COMPUTE, waited for at once */
  fsdp_event *reduce_done;
  fsdp_event *replicate_done;
  fsdp_event *upload_done;
  fsdp_event *download_done;

  /* reduce.c: the order of reductions in the last backward and in this one. */
  fsdp_unit **recorded_reduces;
  size_t num_recorded_reduces;
  size_t recorded_capacity;
  fsdp_unit **issued_reduces;
  size_t num_issued_reduces;
  size_t issued_capacity;
  size_t reduce_cursor; /* into recorded_reduces */

  fsdp_scratch scratches[FSDP_NUM_SCRATCHES]; /* scratch.c: they take turns */
  int64_t scratch_turn;                       /* scratch.c */
  int64_t peak_scratch_nbytes;                /* scratch.c */
  fsdp_part_lists part_lists;

  int64_t num_iterations;     /* forward.c */
  int64_t num_all_gathers;    /* unshard.c, summoned.c */
  int64_t num_reduces;        /* reduce.c */
  int64_t num_prefetches;     /* unshard.c */
  uint64_t order_fingerprint; /* check_order.c, engine.c: of all collectives */
  int64_t num_order_checks;   /* check_order.c */
  fsdp_op_log log;
  /* note.c, forward.c, engine.c: borrowed; NULL: nothing is recorded. */
  fsdp_timeline *timeline;
};

/* The start of `rank`'s piece in a segment of `shard_numel` per rank. */
static inline void *fsdp_priv_slot(void *segment, int64_t rank,
                                   int64_t shard_numel, fsdp_dtype dtype) {
  return (char *)segment + rank * shard_numel * dtype.itemsize;
}

/* The dtype in which a segment is gathered. */
static inline fsdp_dtype fsdp_unit_priv_param_dtype(const fsdp_unit *unit,
                                                    int64_t segment) {
  return unit->is_full ? unit->segments[segment].layout->dtype
                       : unit->segments[segment].options.param_dtype;
}

/* Whether that is another one than the shard's. */
static inline bool fsdp_unit_priv_is_cast(const fsdp_unit *unit,
                                          int64_t segment) {
  return !fsdp_dtype_equal(fsdp_unit_priv_param_dtype(unit, segment),
                           unit->segments[segment].layout->dtype);
}

/* Segments that take part in a reduction: those of parameters, and marks. */
static inline int64_t fsdp_unit_priv_num_reduced(const fsdp_unit *unit) {
  return unit->num_segments + (unit->options.finds_unused ? 1 : 0);
}

/* Whether the device has no streams: Note [Memory on a host] in arena.h. */
static inline bool fsdp_engine_priv_is_host(const fsdp_engine *engine) {
  return engine->ops.is_host;
}

#endif /* FSDP_RUNTIME_RECORDS_PRIV_H */
