/*
 * What the runtime's files share: the structs of an engine and a unit.
 *
 * A comment that begins with names of files names the only files that write
 * the field. On a line of its own it stands for the fields up to the next blank
 * line or comment line. fsdp_unit_create() and fsdp_engine_create() may
 * initialise every field. tests/lint/test_writers.py checks this.
 *
 * A file calls only files below it:
 *
 *   engine.c
 *   forward.c  backward.c  summon.c
 *   end_phase.c
 *   reduce.c  summoned.c  place.c  on_demand.c  prefetch.c
 *   reduce_unit.c
 *   unshard.c  pack.c  scratch.c
 *   unused.c
 *   gradients.c  check_order.c  launch.c
 *   memory.c  failure.c  note.c
 */
#ifndef FSDP_RUNTIME_ENGINE_PRIV_H
#define FSDP_RUNTIME_ENGINE_PRIV_H

#include <stddef.h>

#include "order/order.h"
#include "runtime/engine.h"

/* Segments of one block start at multiples of this many bytes. */
enum { FSDP_SEGMENT_ALIGNMENT_NBYTES = 256 };

/* Gradients wait to be packed together until they are this large: few launches
 * for small parameters, early release for large ones. On a host, where blocks
 * come and go, they wait until the unit's are complete, unless its block is
 * there. */
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

  bool is_resident;    /* place.c: one rank, no cast: the shard is all of it */
  bool is_trainable;   /* place.c, unused.c: some parameter requires grad */
  bool has_grad_place; /* place.c, unused.c: it ever was trainable */

  /* gradients.c: memory of the sharded gradient; NULL: none. Ask for it again
   * in each reduction: the port may have moved it since. */
  void *grad_shard;

  /* place.c: bytes from the start of the parameter block */
  int64_t param_offset;
  int64_t param_stage_offset; /* the shard before its cast, if offloaded */
  int64_t part_offset;        /* of the block of its part */
  /* place.c: bytes from the start of the gradient block */
  int64_t grad_offset;
  int64_t grad_stage_offset; /* the sharded gradient on the device, likewise */
  /* place.c: bytes from the start of other blocks */
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
  bool entered_backward; /* backward.c, end_phase.c: in the open backward */
  /* backward.c: still to come in the open backward */
  int64_t expected_grads;  /* until the unit is resharded */
  int64_t expected_inputs; /* and then until it is reduced */
  bool is_reduce_ready; /* reduce.c: gradient complete, reduction not issued */
  bool was_marked;      /* unused.c: a reduction of this backward had marks */
  bool shows_shapes;    /* unshard.c: see fsdp_unit_set_unshard_in_backward() */
} fsdp_unit_step;

struct fsdp_unit {
  fsdp_unit_options options; /* name points at `name`, segments at `segments` */
  char *name;
  fsdp_engine *engine; /* engine.c: borrowed; NULL: in no engine */
  int64_t index;       /* engine.c: in engine->units */

  int64_t num_segments;
  fsdp_unit_segment *segments; /* and that of marks, behind them */
  fsdp_segment marks_layout;   /* unused.c: of the segment of marks */
  void *marks;       /* unused.c: their sums in host memory; NULL: never read */
  bool reads_marks;  /* unused.c: the last reduction's are there, or will be */
  bool awaits_marks; /* unused.c: they are being copied there */
  bool fills_unused; /* unused.c: see fsdp_unit_set_fills_unused() */
  bool has_missed;   /* unused.c: a gradient, in the last reduction */

  /* place.c */
  bool is_resident; /* every segment is */
  bool has_cast;    /* some segment's parameters have another dtype */
  bool is_extended; /* some segment is */
  /* place.c: bytes of the unit's blocks; 0: needs none. */
  int64_t param_nbytes;
  int64_t part_nbytes;
  int64_t grad_nbytes;
  int64_t full_nbytes;
  int64_t full_grad_nbytes;
  int64_t partial_nbytes;
  int64_t scratch_nbytes;

  /* In the engine's arena; -1: none. */
  int64_t param_client; /* engine.c */
  int64_t grad_client;  /* engine.c, place.c */
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
  bool wants_full;       /* engine.c: the next one is, if there is a cast */
  bool keeps_part;       /* engine.c: where it reshards after forward */
  bool unshards_in_backward; /* engine.c */

  fsdp_prefetch_list prefetches[FSDP_NUM_PASSES]; /* prefetch.c, engine.c */

  uint8_t grads; /* gradients.c: a set of fsdp_grads */
  /* gradients.c: valid while unsharded gradients exist. NULL entries: frozen;
   * of stage_data also: not offloaded. */
  void **grad_data;
  void **stage_data;
  /* gradients.c: memory is kept once it was needed. NULL entries: frozen. */
  void *partial_block;
  void **partial_data;

  /* pack.c */
  uint8_t *is_filled; /* per parameter: grad_data holds its gradient */
  bool is_whole;      /* every element of the block was written */
  fsdp_grad *pending; /* handed over, not packed; by parameter, or zeros */
  int64_t num_pending;
  int64_t pending_nbytes;
  /* pack.c, unused.c: scratch, 2 * num_params + num_segments */
  fsdp_pack_item *items;

  int64_t reduce_position; /* reduce.c: in the recorded order; -1: not there */
  bool has_reduce_hook;    /* engine.c */
  unsigned custom;         /* engine.c: fsdp_custom, what the port does */
  fsdp_sync sync;          /* engine.c: what its backward does */
  double divisor;          /* engine.c: of gradients; 0: the number of ranks */
  bool is_pinned;          /* on_demand.c: unsharded at the user's request */
  bool is_left_shown;      /* engine.c, unshard.c: UNSHARDED since a forward */
  bool is_followed;        /* engine.c: the port acts after each reduction */

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

  bool checks_order; /* check_order.c */
  bool ran_forward;  /* forward.c, backward.c: since the last backward */
  bool shows_kept;   /* forward.c, unshard.c, backward.c: some unit was left */
  bool in_backward;  /* backward.c, engine.c */
  int64_t depth;     /* forward.c, engine.c: units inside forward now */
  fsdp_unit *root;   /* forward.c, engine.c: outermost unit of this iteration */
  bool has_entered;  /* backward.c: a unit of this backward, but the root */
  bool leaves_reduces_open; /* engine.c: see set_waits_for_reduces */
  bool has_open_reduces;    /* gradients.c, reduce.c */

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

/* Segments that take part in a reduction: those of parameters, and marks. */
static inline int64_t fsdp_unit_priv_num_reduced(const fsdp_unit *unit) {
  return unit->num_segments + (unit->options.finds_unused ? 1 : 0);
}

/* Whether blocks come and go: Note [Memory on a host] in arena.h. */
static inline bool fsdp_engine_priv_is_host(const fsdp_engine *engine) {
  return engine->ops.is_host;
}

/* place.c */
/* What fsdp_unit_set_trainable() does; the segment has no gradient now. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_train(fsdp_unit *unit,
                                                int64_t segment,
                                                bool is_trainable,
                                                fsdp_error *error);
/* Lays the segments out in the unit's kinds of block. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_place_segments(fsdp_unit *self,
                                                         fsdp_error *error);

/* failure.c */
/* Moves the unit along the table of its states. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_advance(fsdp_unit *unit,
                                                  fsdp_unit_event event,
                                                  fsdp_error *error);
/* FSDP_OK, or the error that put the unit into FAILED. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_check(const fsdp_unit *unit,
                                                fsdp_error *error);
/* Puts the unit into FAILED, which keeps `cause` if it is its first error.
 * error [out] `cause`; NULL is fine. */
void fsdp_unit_priv_fail(fsdp_unit *unit, const fsdp_error *cause,
                         fsdp_error *error);
/* `waiter` waits for the work now on `recorder`, through `event`. */
FSDP_NODISCARD fsdp_status fsdp_engine_priv_wait_lane(fsdp_engine *engine,
                                                      fsdp_lane waiter,
                                                      fsdp_lane recorder,
                                                      fsdp_event *event,
                                                      fsdp_error *error);

/* launch.c: calls of one group's transport on one lane, which it may merge. */
enum { FSDP_LABEL_NBYTES = 160 };
typedef struct fsdp_priv_launch {
  const fsdp_group *group;
  fsdp_lane lane;
  fsdp_call call;  /* of all of them */
  uint64_t ticket; /* of the last one; 0: none was made, or it needs none */
  char label[FSDP_LABEL_NBYTES];
} fsdp_priv_launch;
/* Opens the launch of the newest operation in the log. */
FSDP_NODISCARD fsdp_status fsdp_engine_priv_open_launch(
    fsdp_engine *engine, fsdp_lane lane, const fsdp_group *group,
    fsdp_priv_launch *launch, fsdp_error *error);
/* Closes it, also after a failure: `status` and `error` are those of opening it
 * and of its calls. */
FSDP_NODISCARD fsdp_status fsdp_engine_priv_close_launch(
    fsdp_engine *engine, const fsdp_priv_launch *launch, fsdp_status status,
    fsdp_error *error);

/* memory.c */
/* A block besides those of the arena; give it back with block_free. */
FSDP_NODISCARD fsdp_status fsdp_engine_priv_alloc(fsdp_engine *engine,
                                                  int64_t nbytes, void **block,
                                                  fsdp_error *error);
/* Whether a call of the port that ended with `status` is worth another try:
 * the device was out of memory, and blocks that nobody holds were freed. */
bool fsdp_engine_priv_has_made_room(fsdp_engine *engine, fsdp_status status);

/* unused.c: Note [Unused parameters]. Nothing happens in a unit that does not
 * find them. */
/* Makes the segment of marks, whose places place.c finds. NULL: there are
 * marks already. */
fsdp_unit_segment *fsdp_unit_priv_add_marks(fsdp_unit *unit, fsdp_dtype dtype);
/* Writes this rank's marks into the gradient block. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_pack_marks(fsdp_unit *unit,
                                                     fsdp_error *error);
/* Copies the sums to the host if this rank needs them; on `lane`, where they
 * are complete. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_read_marks(fsdp_unit *unit,
                                                     fsdp_lane lane,
                                                     fsdp_error *error);
void fsdp_unit_priv_free_marks(fsdp_unit *unit);

/* note.c: spans of the timeline. Nothing happens while none is recorded. */
typedef struct fsdp_priv_span {
  int64_t begin_ns; /* 0: nothing is recorded */
  int32_t mark;     /* of the device at its begin; -1: none */
  fsdp_timeline_kind kind;
} fsdp_priv_span;
fsdp_priv_span fsdp_engine_priv_begin_span(const fsdp_engine *engine,
                                           fsdp_timeline_kind kind);
void fsdp_engine_priv_end_span(const fsdp_engine *engine, const fsdp_unit *unit,
                               fsdp_priv_span span, int64_t nbytes, int flags);
static inline fsdp_priv_span fsdp_engine_priv_begin(const fsdp_engine *engine,
                                                    fsdp_timeline_kind kind) {
  if (engine->timeline != NULL) {
    return fsdp_engine_priv_begin_span(engine, kind);
  }
  return (fsdp_priv_span){.begin_ns = 0, .mark = -1, .kind = kind};
}
/* Adds the span. unit NULL: none. nbytes: of a collective, which is the newest
 * of the log. */
static inline void fsdp_engine_priv_end(const fsdp_engine *engine,
                                        const fsdp_unit *unit,
                                        fsdp_priv_span span, int64_t nbytes,
                                        int flags) {
  if (span.begin_ns != 0) {
    fsdp_engine_priv_end_span(engine, unit, span, nbytes, flags);
  }
}

/* check_order.c: Note [Checking the order] */
typedef enum fsdp_priv_op {
  FSDP_OP_GATHER = 0,
  FSDP_OP_REDUCE,
  FSDP_OP_END /* of forward or backward; no collective */
} fsdp_priv_op;

/* What this rank wants to do next. */
typedef struct fsdp_priv_next {
  fsdp_priv_op op;
  const fsdp_unit *unit; /* NULL: an end */
  bool is_full;          /* of a gather: in master dtype */
  const char *detail;    /* what must be equal, too; "": nothing */
} fsdp_priv_next;

/* What it does instead, or now, for the ranks to agree. */
typedef struct fsdp_priv_turn {
  enum {
    FSDP_TURN_GO = 0,  /* this; so do all */
    FSDP_TURN_SERVE,   /* gathers `unit` for other ranks; then it asks again */
    FSDP_TURN_AGAIN,   /* asks again */
    FSDP_TURN_PUT_OFF, /* its reduction waits for the end of backward */
    FSDP_TURN_UNITE    /* all ended backward with gradients of other units */
  } kind;
  fsdp_unit *unit;
  bool is_full;
} fsdp_priv_turn;

/* The group whose ranks must issue the unit's collectives in one order. */
static inline const fsdp_group *fsdp_unit_priv_checked_group(
    const fsdp_unit *unit) {
  return unit->options.shard_group.world_size > 1
             ? &unit->options.shard_group
             : &unit->options.replica_group;
}
/* Whether the engine compares what they do. */
static inline bool fsdp_unit_priv_is_checked(const fsdp_unit *unit) {
  return unit->engine->checks_order &&
         fsdp_unit_priv_checked_group(unit)->world_size > 1;
}
/* Compares with the other ranks of the group; all must call.
 * FSDP_INVALID_STATE  the ranks cannot go on together. */
FSDP_NODISCARD fsdp_status
fsdp_engine_priv_compare_next(fsdp_engine *engine, const fsdp_priv_next *next,
                              fsdp_priv_turn *turn, fsdp_error *error);
/* Whether ranks whose orders differ can serve each other: all units have one
 * group, and gather whole shards of plain parameters. No, in a group of one. */
bool fsdp_engine_priv_can_serve(const fsdp_engine *engine);

/* unshard.c */
/* SHARDED or REDUCING -> UNSHARDING. Nothing happens in other states. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_unshard(fsdp_unit *unit,
                                                  fsdp_error *error);
/* Makes the compute lane wait for the block: -> UNSHARDED. Nothing happens
 * without a block, or if the unit is UNSHARDED. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_wait_unshard(fsdp_unit *unit,
                                                       fsdp_error *error);
/* Gives the block back: -> SHARDED. Nothing happens without one. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_reshard(fsdp_unit *unit,
                                                  fsdp_error *error);
/* After forward: UNSHARDED -> PARTED if the unit keeps a part for backward; the
 * same as reshard in other units and states. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_part(fsdp_unit *unit,
                                               fsdp_error *error);
/* UNSHARDED -> HIDDEN: the unit keeps its block, for a backward or the next
 * micro-batch, but between forward and backward, and between steps, the user
 * sees the shards: parameters may be stepped, saved or changed there. Nothing
 * happens in other states, or to a resident unit. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_hide(fsdp_unit *unit,
                                               fsdp_error *error);
/* UNSHARDED, at the end of a forward: its parameters stay shown, for the user
 * to read until backward. Nothing happens to others. */
void fsdp_unit_priv_leave_shown(fsdp_unit *unit);
/* Ends that: what the user wrote into the parameters goes into the shards. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_take_writes(fsdp_unit *unit,
                                                      bool in_backward,
                                                      fsdp_error *error);
/* Of a unit without a block: the parameters have the shapes that they have
 * unsharded, and no memory, until an unshard or hide_shapes. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_show_shapes(fsdp_unit *unit,
                                                      fsdp_error *error);
FSDP_NODISCARD fsdp_status fsdp_unit_priv_hide_shapes(fsdp_unit *unit,
                                                      fsdp_error *error);
/* Unshards `engine->units[index]` ahead of its use, if it is SHARDED; an index
 * below 0 is fine. */
FSDP_NODISCARD fsdp_status fsdp_engine_priv_prefetch(fsdp_engine *engine,
                                                     int64_t index,
                                                     fsdp_error *error);
/* Compares until it is this rank's turn, and takes part in the gathers of
 * others meanwhile. turn [out] GO, PUT_OFF or UNITE. */
FSDP_NODISCARD fsdp_status fsdp_engine_priv_agree(fsdp_engine *engine,
                                                  const fsdp_priv_next *next,
                                                  fsdp_priv_turn *turn,
                                                  fsdp_error *error);
/* Whether the unit's next unshard is in master dtype. */
static inline bool fsdp_unit_priv_wants_full(const fsdp_unit *unit) {
  return unit->wants_full && unit->has_cast;
}

/* prefetch.c */
/* Whether a prefetch for backward makes sense: not when the unit entered it. */
static inline bool fsdp_unit_priv_is_needed_in_backward(const fsdp_unit *unit) {
  return unit->unshards_in_backward && !unit->step.entered_backward;
}
/* Whether the user has said what the unit prefetches. */
static inline bool fsdp_unit_priv_has_prefetches(const fsdp_unit *unit,
                                                 fsdp_pass pass) {
  return unit->prefetches[pass].num_units > 0;
}
/* Unshards the units of its list. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_prefetch_listed(fsdp_unit *unit,
                                                          fsdp_pass pass,
                                                          fsdp_error *error);
/* Empties the unit's lists and takes it off those of others. */
void fsdp_engine_priv_forget_prefetches(fsdp_engine *engine, fsdp_unit *unit);

/* on_demand.c */
/* Whether the unit keeps the block that the user asked for; not if the user
 * changed the parameters since. */
bool fsdp_unit_priv_is_pinned(fsdp_unit *unit);
/* Keeps the block of an unsharded unit as if the user had asked for it. Cannot
 * fail. */
void fsdp_unit_priv_pin(fsdp_unit *unit);
void fsdp_unit_priv_unpin(fsdp_unit *unit);

/* summoned.c: parameters (`is_grad` false) or gradients of a unit, whole. */
/* Gathers the shards into a new block on the device; lane COMPUTE. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_gather_whole(fsdp_unit *unit,
                                                       bool is_grad,
                                                       fsdp_error *error);
/* Moves the block to host memory. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_move_to_host(fsdp_unit *unit,
                                                       bool is_grad,
                                                       fsdp_error *error);
/* Gives every rank the block of the first one. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_broadcast_whole(fsdp_unit *unit,
                                                          bool is_grad,
                                                          fsdp_error *error);
/* Copies this rank's piece of the block into its shards. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_keep_own_piece(fsdp_unit *unit,
                                                         bool is_grad,
                                                         fsdp_error *error);
/* Frees the block after the work now on COMPUTE. */
void fsdp_unit_priv_free_whole(fsdp_unit *unit, bool is_grad);
/* Frees both after a failure, whatever is still using them. */
void fsdp_unit_priv_abandon_whole(fsdp_unit *unit);

/* summon.c */
/* Ends a summon without writing back, whatever fails. Nothing happens if the
 * unit is not summoned. */
void fsdp_unit_priv_end_summon(fsdp_unit *unit);

/* gradients.c: which gradients of a unit exist, their memory, and what the user
 * sees of them. */
FSDP_NODISCARD fsdp_status fsdp_engine_priv_wait_reduces(fsdp_engine *engine,
                                                         fsdp_error *error);
/* Whether any gradient of the set exists. */
static inline bool fsdp_unit_priv_has_grads(const fsdp_unit *unit, int kinds) {
  return (unit->grads & kinds) != 0;
}
/* A letter for each segment of the units: what backward does with its gradient
 * (n: none, s: shard, r: reduce); a capital if a reduction of it waits. kinds
 * [out] new; free with fsdp_free(). */
FSDP_NODISCARD fsdp_status fsdp_priv_grad_kinds(fsdp_unit *const *units,
                                                size_t num_units, char **kinds,
                                                fsdp_error *error);
/* Says that the gradients of the set exist, or do not. */
void fsdp_unit_priv_set_grads(fsdp_unit *unit, int kinds, bool exist);
/* Takes a block for unsharded gradients, whatever it contains. The unit has
 * none. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_take_grad_block(fsdp_unit *unit,
                                                          fsdp_error *error);
/* Forgets the unsharded gradients, if there are any; their block is free after
 * `lane`. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_drop_grads(fsdp_unit *unit,
                                                     fsdp_lane lane,
                                                     fsdp_error *error);
/* Allocates the partial gradient unless it has memory. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_take_partial(fsdp_unit *unit,
                                                       fsdp_error *error);
/* Frees the partial gradient; COMPUTE waited for the lane that used it. */
void fsdp_unit_priv_free_partial(fsdp_unit *unit);
/* Updates grad_shard of the segment: the port allocates what has no memory, as
 * zeros unless all of it is about to be replaced. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_make_grad_shard(fsdp_unit *unit,
                                                          int64_t segment,
                                                          bool is_replaced,
                                                          fsdp_error *error);
/* Lets sharded gradients go that the user cleared since the last step: their
 * memory is free for the activations of the forward that begins. */
void fsdp_unit_priv_drop_cleared_grads(fsdp_unit *unit);
/* Takes the user's view of the gradients away, so that a backward starts from
 * nothing. Gradients that the user cleared no longer exist; those that the user
 * set are in the sharded one. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_take_user_grads(fsdp_unit *unit,
                                                          fsdp_error *error);
/* Lets the user see the gradients. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_show_grads(fsdp_unit *unit,
                                                     fsdp_error *error);
/* Whether it holds unsharded gradients, packed or not. */
static inline bool fsdp_unit_priv_has_unreduced(const fsdp_unit *unit) {
  return fsdp_unit_priv_has_grads(unit, FSDP_GRADS_UNSHARDED) ||
         unit->num_pending > 0;
}
/* pack.c */
/* Takes a block for unsharded gradients, all unfilled, unless one is held. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_open_grads(fsdp_unit *unit,
                                                     fsdp_error *error);
/* Takes ownership of `grad`: packed now or later. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_add_grad(fsdp_unit *unit,
                                                   const fsdp_grad *grad,
                                                   fsdp_error *error);
/* Packs all pending gradients and releases them, on failure too. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_pack_grads(fsdp_unit *unit,
                                                     fsdp_error *error);
/* The same, and zeroes what no gradient filled: unused parameters and padding.
 * One launch a segment for both. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_fill_grads(fsdp_unit *unit,
                                                     fsdp_error *error);
/* Releases the pending gradients unpacked. */
void fsdp_unit_priv_release_pending(fsdp_unit *unit);

/* scratch.c */
/* Memory that REDUCE may write: `nbytes` or more. Every take is followed by a
 * give. */
FSDP_NODISCARD fsdp_status fsdp_engine_priv_take_scratch(fsdp_engine *engine,
                                                         int64_t nbytes,
                                                         void **data,
                                                         fsdp_error *error);
/* It is free after the work now on REDUCE. */
FSDP_NODISCARD fsdp_status fsdp_engine_priv_give_scratch(fsdp_engine *engine,
                                                         fsdp_error *error);
/* On a host: frees it, since the reduction has ended. */
void fsdp_engine_priv_end_scratch(fsdp_engine *engine);
/* On a host: the most that was held at once. */
int64_t fsdp_engine_priv_scratch_nbytes(const fsdp_engine *engine);
void fsdp_engine_priv_free_scratch(fsdp_engine *engine);

/* reduce_unit.c */
/* Enqueues the unit's reduction: from the complete gradient block to the
 * sharded gradient, or, with FSDP_SYNC_SHARD, to the partial one. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_enqueue_reduce(fsdp_unit *unit,
                                                         fsdp_error *error);
/* On a host, when COMPUTE has waited for the collectives: only now does the
 * sharded, or partial, gradient need memory; that of the others goes. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_end_reduce(fsdp_unit *unit,
                                                     fsdp_error *error);

/* reduce.c */
/* Says that the unit's gradient is complete. Issues its reduction, and those
 * that waited for it, when its turn in the recorded order has come. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_submit_reduce(fsdp_unit *unit,
                                                        fsdp_error *error);
/* The same, but it is issued at the end of backward. */
void fsdp_unit_priv_put_off_reduce(fsdp_unit *unit);
/* Issues what is ready and was held back, in order, whatever its turn. */
FSDP_NODISCARD fsdp_status fsdp_engine_priv_flush_reduces(fsdp_engine *engine,
                                                          fsdp_error *error);
/* Makes the compute lane wait for all reductions, unless they stay open, and
 * starts a new record. */
FSDP_NODISCARD fsdp_status fsdp_engine_priv_finish_reduces(fsdp_engine *engine,
                                                           fsdp_error *error);
/* Forgets the reductions of an unfinished backward and the recorded order. */
void fsdp_engine_priv_reset_reduces(fsdp_engine *engine);
/* Forgets those of the unit and the recorded order. What this backward issued
 * for other units stays: its end has to wait for it. */
void fsdp_engine_priv_forget_reduces(fsdp_engine *engine,
                                     const fsdp_unit *unit);

/* end_phase.c */
/* Before the end of a forward or backward: waits until all ranks are there, if
 * they can serve each other. */
FSDP_NODISCARD fsdp_status fsdp_engine_priv_end_phase(fsdp_engine *engine,
                                                      fsdp_error *error);

#endif /* FSDP_RUNTIME_ENGINE_PRIV_H */
