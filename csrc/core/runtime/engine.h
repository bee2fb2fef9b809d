/*
 * Engine and units: the sequences of a training step, written against the
 * port. One engine serves all units of one module tree.
 *
 * Order of the calls in a step, for each unit:
 *
 *   pre_forward -> (module runs) -> post_forward
 *   pre_backward -> grad_ready for each expected gradient -> reduce
 *   engine finish_backward, once, at the end of backward
 *
 * Not thread-safe: the bridge holds one lock per engine around every call.
 * After a failure the unit is SHARDED (nothing was enqueued) or FAILED (it
 * keeps the first error and returns it) until fsdp_engine_reset().
 */
#ifndef FSDP_RUNTIME_ENGINE_H
#define FSDP_RUNTIME_ENGINE_H

#include <stdbool.h>
#include <stdint.h>

#include "arena/arena.h"
#include "base/op_log.h"
#include "base/status.h"
#include "base/timeline.h"
#include "base/types.h"
#include "layout/flat_layout.h"
#include "port/device.h"
#include "port/views.h"
#include "unit/state.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fsdp_engine fsdp_engine;
typedef struct fsdp_unit fsdp_unit;

typedef enum fsdp_prefetch {
  FSDP_PREFETCH_NONE = 0,
  FSDP_PREFETCH_PRE, /* before the current unit's gradients are computed */
  FSDP_PREFETCH_POST /* after them */
} fsdp_prefetch;

typedef enum fsdp_pass {
  FSDP_PASS_FORWARD = 0,
  FSDP_PASS_BACKWARD,
  FSDP_NUM_PASSES
} fsdp_pass;

/* What a backward does with its gradients. */
typedef enum fsdp_sync {
  FSDP_SYNC_NONE = 0, /* keeps them unsharded, without communication */
  FSDP_SYNC_REDUCE,   /* reduces them to the mean over all ranks (usual) */
  FSDP_SYNC_SHARD     /* sums them over the shard group and keeps the sum
                         sharded, in reduce dtype; replicas do not talk */
} fsdp_sync;

/* Smaller units are not read in place: Note [Reading shards in place] in
 * in_place.c. They are gathered faster than their pages are looked at. */
enum { FSDP_MIN_REGION_NBYTES = 4 << 10 };

/* Segments of one block start at multiples of this many bytes. */
enum { FSDP_SEGMENT_ALIGNMENT_NBYTES = 256 };

/* How one segment of a unit is held. */
typedef struct fsdp_segment_options {
  fsdp_dtype param_dtype; /* of the unsharded parameters in forward */
  /* Of gradients; unused if frozen. */
  fsdp_dtype reduce_dtype; /* of unsharded ones that are to be reduced */
  fsdp_dtype held_dtype;   /* of those that FSDP_SYNC_NONE keeps; itemsize 0:
                              reduce_dtype, as it always is in a unit that
                              finds unused parameters */
  fsdp_dtype grad_dtype;   /* of the sharded one */
  void *shard;             /* shard_numel elements of the segment's dtype, in
                              host memory if the unit offloads; borrowed,
                              outlives the unit */
  int64_t spare_numel; /* elements of the block behind the gathered ones, for
                          show_params; 0: none */
  bool is_extended;    /* views->gather gathers its parameter, into memory
                          that the port has; gradients are as usual */
  int64_t part_numel;  /* elements of a part, if the unit has a part_group:
                          its ranks' parts are the segment, and some padding */
} fsdp_segment_options;

/*
 * Note [Parts of a unit]
 * Between forward and backward a unit may keep a part of its block instead of
 * all or nothing of it: the shard group is divided into groups of a few ranks
 * that are close to each other, each of which holds all of the unit. Backward
 * then gathers within that small group. The part is cut as the shard is, for
 * fewer ranks, in compute dtype. It does not outlive the backward, nor the next
 * forward: the parameters may have changed. Collectives keep their order, and
 * reductions their group.
 */

/*
 * Note [Shown until backward]
 * A unit that does not reshard after forward shows its whole parameters until
 * its backward, so that a penalty on weights is of all of them, as in FSDP1.
 * There the shards are other objects; here they are the same. So:
 *   - What the user writes into parameters there goes into the shards when the
 *     unit enters backward, or is hidden or resharded before. Replacing their
 *     memory or the module's attribute is an error in backward, as in FSDP1.
 *   - Whoever needs the shards there (an optimizer's step, a state dict) hides
 *     the parameters first: fsdp_engine_show_kept(). Backward goes on with the
 *     block.
 *   - Gradients stay those of the shards, so that zero_grad() clears them.
 *     fsdp_unit_enter_backward() removes them before a whole one accumulates.
 */

/* What may change while a unit exists. */
typedef struct fsdp_unit_settings {
  fsdp_sync sync; /* set with the engine's; until then of this unit */
  bool reshard_after_forward;
  bool keeps_for_inference; /* it does not, past a forward without gradients,
                               too: Note [Kept between forwards] in
                               runtime/forward.c */
  bool keeps_part; /* where it reshards after forward, if it has a part_group */
  bool unshards_in_backward; /* without it parameters have their shapes there,
                                for the gradients, but no memory */
  bool reshard_after_backward_without_sync;
  bool fills_unused;    /* with finds_unused: this rank takes part as if it had
                           used all parameters, with zeros for the others, in
                           every backward that reduces, after a forward */
  bool wants_full;      /* unsharded in master dtype instead of param dtype from
                           its next forward on (evaluation in full precision) */
  double divisor;       /* of sums of gradients; 0: the number of ranks */
  bool has_reduce_hook; /* the port's reduce_hook stands for the reductions; it
                           scales as it sees fit */
  unsigned custom;      /* calls that the port's custom_run makes: fsdp_custom.
                           Between steps */
  bool is_followed;     /* the port acts: grads_set_aside and grads_reduced */
} fsdp_unit_settings;

typedef struct fsdp_unit_options {
  const char *name; /* for messages; copied */
  void *owner;      /* the token of the view_ops */
  /* Borrowed, outlives the unit. Made for shard_group.world_size. */
  const fsdp_flat_layout *layout;
  const fsdp_segment_options *segments; /* one per segment; copied */
  fsdp_group shard_group;
  fsdp_group replica_group;    /* world_size 1: no replicas */
  fsdp_group part_group;       /* world_size < 2: the unit keeps no parts */
  fsdp_unit_settings settings; /* at first */
  bool
      reshards_as_root; /* false: the outermost unit keeps its parameters
                           after forward, whatever reshard_after_forward says */
  bool shows_kept;   /* parameters that are kept for backward stay shown until
                        then; but see fsdp_engine_show_kept() */
  bool finds_unused; /* parameters that no rank used have no gradient: Note
                        [Unused parameters] in runtime/unused.c */
  bool is_apart;     /* of the module of the unit added before it: Note [Units
                        apart] in runtime/apart.c. It finds unused parameters */
  bool stays_shown;  /* what is kept does, past a backward without reduction or
                        a forward without gradients, too: the user has other
                        objects for the shards */
  fsdp_prefetch backward_prefetch;
  bool forward_prefetch;
  /* Gradients are multiplied by prescale before the reduction and by
   * 1 / (prescale * ranks) after it. 1 unless reduce_dtype is fp16. */
  double prescale;
  /* Memory laid out like the unit's block: ranks of one host may read the
   * shards there. */
  fsdp_region region;
  /* Shards and sharded gradients are in host memory, the device is elsewhere.
   * Copies run on the lanes UPLOAD and DOWNLOAD, through the unit's blocks. */
  bool offloads;
} fsdp_unit_options;

/* A gradient that autograd has finished. */
typedef struct fsdp_grad {
  int64_t param;
  const void *data; /* contiguous, as many elements as the parameter */
  fsdp_dtype dtype;
  bool is_expected; /* one of those that fsdp_unit_expect_grads announced */
  void *token;      /* passed to grad_release exactly once, on failure too */
} fsdp_grad;

typedef struct fsdp_engine_stats {
  fsdp_arena_stats arena;
  int64_t num_units;
  int64_t shard_nbytes;        /* of all segments of all units, this rank */
  int64_t grad_shard_nbytes;   /* of the sharded gradients allocated so far */
  int64_t partial_grad_nbytes; /* likewise of partial ones (FSDP_SYNC_SHARD) */
  int64_t scratch_nbytes;      /* of the scratch memory for reductions */
  int64_t num_iterations;      /* forwards of an outermost unit */
  int64_t num_all_gathers;     /* launches of unshards and summons, all-time */
  int64_t num_reduces;         /* reductions issued, all-time */
  int64_t num_prefetches;      /* unshards issued ahead of their use */
} fsdp_engine_stats;

/* The tables are copied; their contexts must outlive the engine. engine [out]
 * new. */
FSDP_NODISCARD fsdp_status fsdp_engine_create(const fsdp_device_ops *device,
                                              const fsdp_view_ops *views,
                                              fsdp_engine **engine,
                                              fsdp_error *error);

/* Destroys the engine; its units stay and can be added to another. Accepts
 * NULL. Cannot fail. */
void fsdp_engine_destroy(fsdp_engine *engine);

/* unit [out] new reference; release with fsdp_unit_destroy(). */
FSDP_NODISCARD fsdp_status fsdp_unit_create(const fsdp_unit_options *options,
                                            fsdp_unit **unit,
                                            fsdp_error *error);

/* Removes the unit from its engine first. Accepts NULL. Cannot fail. */
void fsdp_unit_destroy(fsdp_unit *unit);

/*
 * Adds `unit`, in the order of the module tree, parents first. A unit that
 * belongs to another engine moves.
 *
 * FSDP_INVALID_STATE  the unit, or its old engine, is in the middle of a step.
 */
FSDP_NODISCARD fsdp_status fsdp_engine_add_unit(fsdp_engine *engine,
                                                fsdp_unit *unit,
                                                fsdp_error *error);

/* Where the shard of the segment lies. Borrowed. */
void *fsdp_unit_shard(const fsdp_unit *unit, int64_t segment);
/* The shard lies elsewhere from now on, with its values, and may have changed:
 * take_params says so. Between an unshard and its end nobody calls it. */
void fsdp_unit_move_shard(fsdp_unit *unit, int64_t segment, void *shard);

/* Sets what carries the unit's groups; before it joins an engine. */
void fsdp_unit_set_transports(fsdp_unit *unit, fsdp_transport *shard,
                              fsdp_transport *replica, fsdp_transport *part);

/* What later backward passes do with their gradients; REDUCE at first. What
 * NONE and SHARD kept is part of the next REDUCE. */
void fsdp_engine_set_sync(fsdp_engine *engine, fsdp_sync sync);
fsdp_sync fsdp_engine_get_sync(const fsdp_engine *engine);

/* Compares before every unshard and reduction what the ranks of the group are
 * about to do; see Note [Checking the order]. Off at first. */
void fsdp_engine_set_order_check(fsdp_engine *engine, bool is_on);

/*
 * Lets the engine write what it does into `timeline` (borrowed; NULL: no
 * longer), until that is full or a unit leaves the engine. While there is none,
 * each place costs a comparison.
 *
 * FSDP_INVALID_STATE  in the middle of a step, and timeline is not NULL.
 */
FSDP_NODISCARD fsdp_status fsdp_engine_set_timeline(fsdp_engine *engine,
                                                    fsdp_timeline *timeline,
                                                    fsdp_error *error);
/* Borrowed; NULL: nothing is recorded. */
fsdp_timeline *fsdp_engine_timeline(const fsdp_engine *engine);
/* Writes a span from `begin_ns` to now. Nothing happens if begin_ns is 0 or
 * nothing is recorded. unit NULL: none. */
void fsdp_engine_note(const fsdp_engine *engine, const fsdp_unit *unit,
                      fsdp_timeline_kind kind, int64_t begin_ns);
/* Spans of a round of whole parameters: returns its start, 0 if nothing is
 * recorded; mark [out] of the device; -1: none. nbytes: see timeline.h. */
int64_t fsdp_engine_begin_wholes(const fsdp_engine *engine,
                                 fsdp_timeline_kind kind, int32_t *mark);
void fsdp_engine_end_wholes(const fsdp_engine *engine, fsdp_timeline_kind kind,
                            int64_t begin_ns, int32_t mark, int64_t nbytes);

/* Borrowed; a change counts from the next use on. All ranks must agree. */
fsdp_unit_settings *fsdp_unit_get_settings(fsdp_unit *unit);

/*
 * Whether the segment's parameters require grad; at first as in the layout. A
 * frozen segment has no gradient and is not reduced. All ranks must agree.
 * Freezing waits until the gradients that the unit holds have been reduced.
 *
 * FSDP_INVALID_STATE  unfreezing while the unit holds gradients that were not
 *                     reduced yet.
 */
FSDP_NODISCARD fsdp_status fsdp_unit_set_trainable(fsdp_unit *unit,
                                                   int64_t segment,
                                                   bool is_trainable,
                                                   fsdp_error *error);
bool fsdp_unit_is_trainable(const fsdp_unit *unit, int64_t segment);

/*
 * Lets the unit unshard `units` (copied), in this order, right after itself in
 * forward or backward, instead of what the recorded order says; none: that
 * again. A unit that leaves the engine leaves the lists.
 *
 * FSDP_INVALID_STATE  one is not in the same engine.
 */
FSDP_NODISCARD fsdp_status fsdp_unit_set_prefetches(fsdp_unit *unit,
                                                    fsdp_pass pass,
                                                    fsdp_unit *const *units,
                                                    size_t num_units,
                                                    fsdp_error *error);
/* Whether what it last gathered were parts. */
bool fsdp_unit_is_of_parts(const fsdp_unit *unit);

/* Whether no rank had a gradient of the parameter to reduce, in the last
 * reduction; after fsdp_unit_await_unused(). False if the unit does not find
 * out. */
bool fsdp_unit_is_unused(const fsdp_unit *unit, int64_t param);
/* The host waits for the unit's last reduction if this rank had no gradient of
 * some parameter in it. The end of backward does so. */
FSDP_NODISCARD fsdp_status fsdp_unit_await_unused(fsdp_unit *unit,
                                                  fsdp_error *error);

/*
 * Unsharding at the user's request, between steps or in another unit's forward.
 * `unshard` issues the all-gather, `wait_unshard` makes the compute lane wait
 * for it and shows the parameters. The unit then keeps its block until its own
 * next forward or the engine's next backward ends, or fsdp_unit_reshard(),
 * which is also the way to give up what a forward kept for backward, and
 * between steps the memory of gradients that the user cleared. All ranks must
 * call. Nothing happens where there is nothing to do.
 *
 * FSDP_INVALID_STATE  the unit is in no engine, or summoned.
 */
FSDP_NODISCARD fsdp_status fsdp_unit_unshard(fsdp_unit *unit,
                                             fsdp_error *error);
FSDP_NODISCARD fsdp_status fsdp_unit_wait_unshard(fsdp_unit *unit,
                                                  fsdp_error *error);
FSDP_NODISCARD fsdp_status fsdp_unit_reshard(fsdp_unit *unit,
                                             fsdp_error *error);
/* Whether it is unsharded, or being so, at the user's request, and a forward
 * that begins now would leave it so: the parameters have not changed since. */
bool fsdp_unit_is_requested(fsdp_unit *unit);

/* Hides the parameters that a forward left shown: the user sees the shards,
 * with what was written into the parameters. With `shows`: shows them again.
 * Backward uses them either way. Nothing happens inside forward or backward. */
FSDP_NODISCARD fsdp_status fsdp_engine_show_kept(fsdp_engine *engine,
                                                 bool shows, fsdp_error *error);
/* Around a call of autograd. Before it, `shows`: shows parameters that are kept
 * for backward, but hidden, of the outermost unit or by a forward without
 * gradients: a graph may reach them before it reaches their unit's output.
 * After it: hides them, if they are still kept. Nothing happens inside forward
 * or backward. */
FSDP_NODISCARD fsdp_status fsdp_engine_show_hidden(fsdp_engine *engine,
                                                   bool shows,
                                                   fsdp_error *error);
/* Whether that has anything to show, or to hide. */
bool fsdp_engine_keeps_hidden(const fsdp_engine *engine);
/* Whether a forward left the unit's parameters shown. */
bool fsdp_unit_is_left_shown(const fsdp_unit *unit);
/* Whether it did of some unit, and backward has not begun. */
bool fsdp_engine_shows_kept(const fsdp_engine *engine);

/* Lets the sharded gradients go, which nobody needs any more. Their memory is
 * in use on COMPUTE only. In an engine only. Cannot fail. */
void fsdp_unit_drop_sharded_grads(fsdp_unit *unit);

/*
 * pre_forward: unshards the unit (unless a prefetch did), makes the compute
 * lane wait for it, and prefetches the next one. A unit that enters while none
 * is running starts an iteration and is its root: its parameters stay
 * unsharded until its backward, unless it has reshards_as_root. `in_backward`:
 * a recomputation by activation checkpointing; the unit then stays unsharded
 * until its own backward.
 */
FSDP_NODISCARD fsdp_status fsdp_unit_pre_forward(fsdp_unit *unit,
                                                 bool in_backward,
                                                 fsdp_error *error);

/* Whether the forwards that begin from now on record a graph, as at first; see
 * keeps_for_inference. Equal on all ranks. Cannot fail. */
void fsdp_engine_set_records_graph(fsdp_engine *engine, bool records_graph);
/* Whether some unit keeps whole parameters. */
bool fsdp_engine_keeps_params(const fsdp_engine *engine);
/* Somebody is about to write the shards: no later forward uses what is kept.
 * Nothing happens inside forward or backward. */
FSDP_NODISCARD fsdp_status fsdp_engine_expect_writes(fsdp_engine *engine,
                                                     fsdp_error *error);

/* post_forward: reshards, unless the parameters are kept for backward, or for
 * the next forward without gradients.
 * `expects_backward`: an output requires grad. After a failure the unit is
 * still in forward: fsdp_unit_abandon_forward() leaves it. */
FSDP_NODISCARD fsdp_status fsdp_unit_post_forward(fsdp_unit *unit,
                                                  bool in_backward,
                                                  bool expects_backward,
                                                  fsdp_error *error);

/* Leaves forward after the module raised: as post_forward of a unit that
 * expects no backward. (A recomputation often ends so, when it has all that it
 * needs; the unit then stays unsharded.) Cannot fail. */
void fsdp_unit_abandon_forward(fsdp_unit *unit, bool in_backward);

/* The unit's first event in a backward, which it opens if it is the first:
 * takes the gradients that the user sees away. Nothing happens later.
 * pre_backward and grad_ready begin with it; a gradient that accumulates before
 * them must come after it. */
FSDP_NODISCARD fsdp_status fsdp_unit_enter_backward(fsdp_unit *unit,
                                                    fsdp_error *error);

/* pre_backward: unshards for the unit's backward, prefetches the next one. The
 * first call of a backward opens it. */
FSDP_NODISCARD fsdp_status fsdp_unit_pre_backward(fsdp_unit *unit,
                                                  fsdp_error *error);

/*
 * Says that `num_grads` more gradients of the unit will come in this backward,
 * after which it is resharded, and then those of the inputs of `num_inputs`
 * calls, of which fsdp_unit_inputs_ready() tells; then its reduction starts.
 *
 * Some parameters have no gradient that would tell when backward is done with
 * them (frozen ones, for example). For a unit with such a parameter, inputs are
 * counted in `num_grads` instead. If one never comes, the unit is kept until
 * the end of backward.
 *
 * Note [Where a unit is reduced]
 * All ranks must issue gathers and reductions in one order. Which parameters a
 * rank uses, and so when the last of their gradients comes, may differ between
 * ranks; where backward leaves a unit does not.
 */
void fsdp_unit_expect_grads(fsdp_unit *unit, int64_t num_grads,
                            int64_t num_inputs);

/* Hands over a gradient. The token is released in every case. */
FSDP_NODISCARD fsdp_status fsdp_unit_grad_ready(fsdp_unit *unit,
                                                const fsdp_grad *grad,
                                                fsdp_error *error);

/* A call's inputs have their gradients: counts as one that is expected. Nothing
 * happens if none is expected. */
FSDP_NODISCARD fsdp_status fsdp_unit_inputs_ready(fsdp_unit *unit,
                                                  fsdp_error *error);

/* End of backward: reduces what is left, reshards what is left, drops unused
 * prefetches, makes the compute lane wait for the reductions, shows the
 * gradients and plans the arena. Does nothing outside a backward. */
FSDP_NODISCARD fsdp_status fsdp_engine_finish_backward(fsdp_engine *engine,
                                                       fsdp_error *error);

/*
 * The host waits until no copy reads or writes shards and gradients in host
 * memory (units that offload). The end of a backward does so, and the end of a
 * forward that no backward follows. Between a forward and its backward, call it
 * before the host writes a shard. Does nothing if no unit offloads.
 */
FSDP_NODISCARD fsdp_status fsdp_engine_join_host(fsdp_engine *engine,
                                                 fsdp_error *error);

/*
 * Whether a backward ends with COMPUTE waiting for its reductions; yes at
 * first. If not, the next backward does: until then nobody may read or write
 * sharded gradients on COMPUTE, unless fsdp_engine_join_reduces() was called.
 * On a host reductions have ended in any case.
 */
void fsdp_engine_set_waits_for_reduces(fsdp_engine *engine, bool waits);
FSDP_NODISCARD fsdp_status fsdp_engine_join_reduces(fsdp_engine *engine,
                                                    fsdp_error *error);
/* Whether reductions may still run for which COMPUTE does not wait. */
bool fsdp_engine_has_open_reduces(const fsdp_engine *engine);

/*
 * Reduces what backwards with FSDP_SYNC_NONE and FSDP_SYNC_SHARD kept, as the
 * end of a backward does, where none is to come: a pipeline's schedule.
 *
 * FSDP_INVALID_STATE  in a forward or a backward.
 */
FSDP_NODISCARD fsdp_status fsdp_engine_reduce_kept(fsdp_engine *engine,
                                                   fsdp_error *error);

/*
 * Opens a backward whose first event is no unit's, such as a recomputation. The
 * first event of a unit opens it otherwise. Nothing if one is open.
 */
void fsdp_engine_open_backward(fsdp_engine *engine);

/*
 * In an open backward: no rank's call asks for the gradient of a parameter
 * (torch.autograd.grad() for inputs), so its end leaves what FSDP_SYNC_NONE and
 * FSDP_SYNC_SHARD kept to a later one. It may end inside a forward that goes on
 * with the parameters, or before the backward of the same graph.
 */
void fsdp_engine_leave_kept(fsdp_engine *engine);

/* Whether a backward is open. */
bool fsdp_engine_in_backward(const fsdp_engine *engine);

/* Whether a forward is running (an outermost unit has entered, not left). */
bool fsdp_engine_in_forward(const fsdp_engine *engine);

/* Drops everything of an unfinished step: gradients of this backward that were
 * not reduced yet, unsharded parameters, prefetches. All units are SHARDED
 * after it, failed ones too. The way back after an exception. */
void fsdp_engine_reset(fsdp_engine *engine);

/*
 * Capturing a step in a graph of the device, and replaying it: see Note
 * [Captured steps] in capture.c. The order of the calls:
 *
 * 1. begin_capture refuses, or brings the units to rest.
 * 2. The capture begins. fork_lanes; a whole step, whose gradients are cleared
 *    at its end; join_lanes. The capture ends.
 * 3. end_capture, also if the step or the capture failed.
 * 4. begin_replay and a replay on COMPUTE, any number of times.
 *
 * FSDP_INVALID_STATE: the engine is in the middle of a step, or a unit cannot
 * be captured or replayed, at all or in the state that it is in.
 */
FSDP_NODISCARD fsdp_status fsdp_engine_begin_capture(fsdp_engine *engine,
                                                     fsdp_error *error);
FSDP_NODISCARD fsdp_status fsdp_engine_fork_lanes(fsdp_engine *engine,
                                                  fsdp_error *error);
FSDP_NODISCARD fsdp_status fsdp_engine_join_lanes(fsdp_engine *engine,
                                                  fsdp_error *error);
void fsdp_engine_end_capture(fsdp_engine *engine);
FSDP_NODISCARD fsdp_status fsdp_engine_begin_replay(fsdp_engine *engine,
                                                    fsdp_error *error);
bool fsdp_engine_is_capturing(const fsdp_engine *engine);

/* What a summon shows, and where. */
typedef struct fsdp_summon_options {
  bool on_first_rank_only; /* the other ranks of the shard group take part, and
                              go on seeing their shards */
  bool on_host;            /* in host memory; the device holds it in passing */
  bool with_grads;         /* whole gradients too, in grad dtype */
} fsdp_summon_options;

/*
 * Unshards the unit in master dtype into memory of its own (not the arena) and
 * shows the parameters in it, on the compute lane. For reading and writing
 * whole parameters between steps. All ranks of the group must call, with the
 * same options.
 *
 * FSDP_INVALID_STATE  the unit is summoned already or inside forward/backward.
 */
FSDP_NODISCARD fsdp_status fsdp_unit_summon(fsdp_unit *unit,
                                            const fsdp_summon_options *options,
                                            fsdp_error *error);

/* Ends a summon; with `writeback` this rank's part of every parameter (and
 * gradient) is copied into its shard first; of an on_first_rank_only summon it
 * comes from rank 0. All ranks must call, with the same `writeback`. */
FSDP_NODISCARD fsdp_status fsdp_unit_dismiss(fsdp_unit *unit, bool writeback,
                                             fsdp_error *error);

bool fsdp_unit_is_summoned(const fsdp_unit *unit);

/* Whether the unit holds gradients that were not reduced to the mean yet. */
bool fsdp_unit_holds_grads(const fsdp_unit *unit);

fsdp_unit_state fsdp_unit_get_state(const fsdp_unit *unit);
const char *fsdp_unit_name(const fsdp_unit *unit); /* borrowed */
int64_t fsdp_unit_pending_grads(const fsdp_unit *unit);

/* Cannot fail. */
void fsdp_engine_get_stats(const fsdp_engine *engine, fsdp_engine_stats *stats);
const fsdp_op_log *fsdp_engine_log(const fsdp_engine *engine); /* borrowed */

#ifdef __cplusplus
}
#endif
#endif /* FSDP_RUNTIME_ENGINE_H */
