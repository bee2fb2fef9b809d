/*
 * What the runtime's files call of each other.
 *
 * A file calls only files below it, except for getters in engine.h:
 *
 *   engine.c
 *   forward.c  backward.c  summon.c  capture.c
 *   end_phase.c
 *   reduce.c  summoned.c  place.c  on_demand.c  prefetch.c
 *   reduce_unit.c
 *   reduce_parts.c
 *   unshard.c  scratch.c
 *   upload.c
 *   pack.c
 *   unused.c
 *   gradients.c  check_order.c  launch.c  apart.c
 *   in_place.c
 *   device_calls.c  failure.c  note.c
 */
#ifndef FSDP_RUNTIME_ENGINE_PRIV_H
#define FSDP_RUNTIME_ENGINE_PRIV_H

#include "runtime/records_priv.h"

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

/* device_calls.c */
/* A block besides those of the arena; give it back with block_free. COMPUTE may
 * use it at once, other lanes after a wait for COMPUTE. */
FSDP_NODISCARD fsdp_status fsdp_engine_priv_alloc(fsdp_engine *engine,
                                                  int64_t nbytes, void **block,
                                                  fsdp_error *error);
/* Whether a call of the port that ended with `status` is worth another try:
 * the device was out of memory, and blocks that nobody holds were freed. */
bool fsdp_engine_priv_has_made_room(fsdp_engine *engine, fsdp_status status);

/* The first items of the unit's list, in one launch. None: nothing. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_pack_items(fsdp_unit *unit,
                                                     fsdp_lane lane,
                                                     int64_t num_items,
                                                     double scale,
                                                     fsdp_error *error);
FSDP_NODISCARD fsdp_status fsdp_unit_priv_accumulate_items(fsdp_unit *unit,
                                                           fsdp_lane lane,
                                                           int64_t num_items,
                                                           double scale,
                                                           fsdp_error *error);
/* `waiter` waits for the work now on `recorder`, through `event`. */
FSDP_NODISCARD fsdp_status fsdp_engine_priv_wait_lane(fsdp_engine *engine,
                                                      fsdp_lane waiter,
                                                      fsdp_lane recorder,
                                                      fsdp_event *event,
                                                      fsdp_error *error);

/* unused.c: Note [Unused parameters]. Nothing happens in a unit that does not
 * find them. */
/* Makes the segment of marks, whose places place.c finds. NULL: there are
 * marks already. */
fsdp_unit_segment *fsdp_unit_priv_add_marks(fsdp_unit *unit, fsdp_dtype dtype);
/* Lists what writes this rank's marks into the gradient block, into the first
 * slot at least; at most one item for each parameter. Returns how many. */
int64_t fsdp_unit_priv_mark_items(fsdp_unit *unit, fsdp_pack_item *items);
/* When those are written: copies the first slot into the others, if it must. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_spread_marks(fsdp_unit *unit,
                                                       fsdp_error *error);
/* Copies `sums` of this rank's slot to the host if it needs them; on `lane`,
 * where they are complete. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_read_marks(fsdp_unit *unit,
                                                     fsdp_lane lane,
                                                     const void *sums,
                                                     fsdp_error *error);
/* Lists this rank's marks as parts, `offset` bytes from the start of the array;
 * at most one for each second element. Returns how many. */
int64_t fsdp_unit_priv_list_marks(fsdp_unit *unit, int64_t offset,
                                  fsdp_part *parts);
/* After list_marks: sums [out] memory for the sums of this rank's slot; NULL:
 * it does not need them. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_expect_marks(fsdp_unit *unit,
                                                       void **sums,
                                                       fsdp_error *error);
void fsdp_unit_priv_free_marks(fsdp_unit *unit);

/* note.c: spans of the timeline. Nothing happens while none is recorded. */
typedef struct fsdp_priv_span {
  int64_t begin_ns; /* 0: nothing is recorded */
  int32_t mark;     /* of the device at its start; -1: none */
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

/* in_place.c: Note [Reading shards in place] */
/* In the engine's first forward: moves the shards where all ranks of the host
 * can read them, if that is possible and of use. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_share(fsdp_unit *unit,
                                                fsdp_error *error);
/* Decides whether the unshard that begins reads in place. */
void fsdp_unit_priv_choose_place(fsdp_unit *unit, bool is_on_demand);
/* Adds the collective to the launch. Then nothing has to be gathered. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_open(fsdp_unit *unit,
                                               const fsdp_call *call,
                                               uint64_t *ticket,
                                               fsdp_error *error);
/* Ends reading, if the unit reads in place; also after a failed open. */
void fsdp_unit_priv_close(fsdp_unit *unit);
/* Waits until no other rank reads this rank's shard: it may be written. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_await_readers(fsdp_unit *unit,
                                                        fsdp_error *error);
FSDP_NODISCARD fsdp_status fsdp_engine_priv_await_readers(fsdp_engine *engine,
                                                          fsdp_error *error);
/* Frees it; the shard stays. */
void fsdp_unit_priv_unshare(fsdp_unit *unit);

/* upload.c */
/* Brings the shards from the host into their slots of `block`, cast if need be.
 * last_use [out] the lane that used the block last, also after a failure. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_upload(fsdp_unit *unit, void *block,
                                                 fsdp_lane *last_use,
                                                 fsdp_error *error);

/* unshard.c */
/* SHARDED, PARTED or REDUCING -> UNSHARDING. Nothing happens in others. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_unshard(fsdp_unit *unit,
                                                  fsdp_error *error);
/* The same at the user's request: into a block that the unit may keep. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_unshard_on_demand(fsdp_unit *unit,
                                                            fsdp_error *error);
/* Makes the compute lane wait for the block: -> UNSHARDED. Nothing happens
 * without a block, or if the unit is UNSHARDED. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_wait_unshard(fsdp_unit *unit,
                                                       fsdp_error *error);
/* Gives the block, or the part, back: -> SHARDED. Does nothing without one. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_reshard(fsdp_unit *unit,
                                                  fsdp_error *error);
/* After forward: UNSHARDED -> PARTED if the unit keeps a part for backward; the
 * same as reshard in other units and states. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_part(fsdp_unit *unit,
                                               fsdp_error *error);
/* UNSHARDED -> HIDDEN: the unit keeps its block, for a backward or the next
 * micro-batch, but between forward and backward, and between steps, the user
 * sees the shards: parameters may be stepped, saved or changed there. Nothing
 * happens in other states, or to a resident unit. A unit that is read in place
 * is resharded instead. */
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
/* Reserves the block of the unit's next unshard; it has none. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_reserve(const fsdp_unit *unit,
                                                  fsdp_error *error);
/* Unshards `engine->units[index]` ahead of its use, if it is at rest; an index
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
  return unit->settings.wants_full && unit->has_cast;
}

/* prefetch.c */
/* Whether a prefetch for backward makes sense: not when the unit entered it. */
static inline bool fsdp_unit_priv_is_needed_in_backward(const fsdp_unit *unit) {
  return unit->settings.unshards_in_backward && !unit->step.entered_backward;
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
/* Whether what the unit keeps may be older than its shard. */
bool fsdp_unit_priv_is_stale(const fsdp_unit *unit);
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
/* Takes a block for unsharded gradients, whatever it contains: in held dtype
 * with FSDP_SYNC_NONE. The unit has none. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_take_grad_block(fsdp_unit *unit,
                                                          fsdp_error *error);
/* Of segment `segment` in the block that the unit has. */
fsdp_dtype fsdp_unit_priv_block_dtype(const fsdp_unit *unit, int64_t segment);
/* What gradients are multiplied by on their way into reduce dtype. */
double fsdp_unit_priv_prescale(const fsdp_unit *unit);
/* Before a reduction: brings gradients that are in held dtype, complete, into a
 * block in reduce dtype. Both exist on the way. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_cast_held(fsdp_unit *unit,
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
/* Around a reduction: */
/* Whether it adds to the sharded gradient. Of a followed unit the port adds,
 * after the reduction: followers see this backward's part alone. */
bool fsdp_unit_priv_adds_to_grads(const fsdp_unit *unit);
/* From the sum over all ranks to the mean. */
double fsdp_unit_priv_mean_scale(const fsdp_unit *unit);
/* Gives the sharded gradient memory. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_make_grad_shards(fsdp_unit *unit,
                                                           fsdp_error *error);
/* Tells followers that it has ended; the result is ready after `lane`. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_tell_followers(fsdp_unit *unit,
                                                         fsdp_lane lane,
                                                         fsdp_error *error);
/* Whether it holds unsharded gradients, packed or not. */
static inline bool fsdp_unit_priv_has_unreduced(const fsdp_unit *unit) {
  return fsdp_unit_priv_has_grads(unit, FSDP_GRADS_UNSHARDED) ||
         unit->num_pending > 0;
}
/* Whether some parameter requires grad. */
static inline bool fsdp_unit_priv_is_trained(const fsdp_unit *unit) {
  for (int64_t i = 0; i < unit->num_segments; i++) {
    if (unit->segments[i].is_trainable) return true;
  }
  return false;
}

/* apart.c: Note [Units apart] */
/* Whether the unit must be reduced, without a gradient, because another one of
 * its module is. */
bool fsdp_unit_priv_owes_zeros(const fsdp_unit *unit);

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

/* reduce_parts.c: Note [Gradients in parts] */
/* Whether the unit's reductions read gradients where they are; the same on all
 * ranks. */
bool fsdp_unit_priv_can_reduce_parts(const fsdp_unit *unit);
/* Whether the gradients that have come can stay where they are until then. */
bool fsdp_unit_priv_leaves_grads(const fsdp_unit *unit);
/* Starts the reduction, of step.reduces_parts. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_start_parts(fsdp_unit *unit,
                                                      fsdp_error *error);
/* When it has ended. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_end_parts(fsdp_unit *unit,
                                                    fsdp_error *error);
void fsdp_engine_priv_free_part_lists(fsdp_engine *engine);

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
/* Makes the sharded gradient of what earlier backwards summed, in a unit that
 * this one does not reach, through its gradient block of zeros. No other rank
 * that shards the unit takes part, and the order of reductions does not have
 * it: a rank that shows the user no gradient of the unit cannot tell whether
 * the user has cleared that sum. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_reduce_partial(fsdp_unit *unit,
                                                         fsdp_error *error);
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
