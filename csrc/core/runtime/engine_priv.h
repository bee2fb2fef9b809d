/*
 * What the runtime's files share: the structs of an engine and a unit.
 * Each field is written by the file named beside it (or by engine.c).
 */
#ifndef FSDP_RUNTIME_ENGINE_PRIV_H
#define FSDP_RUNTIME_ENGINE_PRIV_H

#include <stddef.h>

#include "order/order.h"
#include "runtime/engine.h"

/* Segments of one block start at multiples of this many bytes. */
enum { FSDP_SEGMENT_ALIGNMENT_NBYTES = 256 };

/* Gradients wait to be packed together until they are this large: few launches
 * for small parameters, early release for large ones. */
enum { FSDP_PACK_THRESHOLD_NBYTES = 1 << 20 };

typedef struct fsdp_unit_segment {
  fsdp_segment_options options;
  const fsdp_segment *layout; /* borrowed */
  bool is_resident;  /* one rank, no cast: the shard is the unsharded segment */
  bool is_trainable; /* place.c: some parameter requires grad */
  bool has_grad_place; /* place.c: it ever was */
  bool has_grad_shard; /* reduce_unit.c: the sharded gradient is allocated */
  /* Bytes from the start of the parameter block. */
  int64_t param_offset;
  int64_t param_stage_offset; /* the shard before its cast, if offloaded */
  /* Bytes from the start of the gradient block. */
  int64_t grad_offset;
  int64_t grad_stage_offset; /* the sharded gradient on the device, likewise */
  /* Bytes from the start of other blocks. */
  int64_t full_offset;      /* of whole parameters in master dtype */
  int64_t full_grad_offset; /* of whole gradients in grad dtype */
  int64_t partial_offset;   /* of the partial gradient */
  int64_t scratch_offset;   /* of a reduction's scratch */
} fsdp_unit_segment;

/* Whole parameters, or whole gradients, of a unit in memory of their own. */
typedef struct fsdp_summoned {
  void *block;      /* on the device; NULL: none */
  void *host_block; /* in host memory; NULL: none */
  void **data;      /* segments in one of them; NULL entries: not in it */
  bool is_shown;    /* the user sees it */
  bool is_live;     /* gradients that the user saw: there were any at the end */
} fsdp_summoned;

struct fsdp_unit {
  fsdp_unit_options options; /* name points at `name`, segments at `segments` */
  char *name;
  fsdp_engine *engine; /* borrowed; NULL: in no engine */
  int64_t index;       /* in engine->units */

  int64_t num_segments;
  fsdp_unit_segment *segments;
  bool is_resident; /* every segment is */
  bool has_cast;    /* some segment's parameters have another dtype */
  /* Bytes of the unit's blocks; 0: needs none. */
  int64_t param_nbytes;
  int64_t grad_nbytes;
  int64_t full_nbytes;
  int64_t full_grad_nbytes;
  int64_t partial_nbytes;
  int64_t scratch_nbytes;
  /* In the engine's arena; -1: none. */
  int64_t param_client;
  int64_t grad_client;
  int64_t full_client; /* whole parameters in master dtype; made at first use */

  fsdp_unit_state state;
  fsdp_error first_error;  /* meaningful in FAILED */
  fsdp_event *unsharded;   /* unshard.c: after the all-gather */
  void **param_data;       /* unshard.c: unsharded segments */
  bool is_kept;            /* unshard.c: UNSHARDING, and the block was used:
                              hidden until backward or the next forward */
  bool is_ahead;           /* unshard.c: UNSHARDING by a prefetch */
  bool is_between_batches; /* backward.c: kept by a backward without sync */
  bool is_full;            /* unshard.c: this unshard is in master dtype */
  bool wants_full;         /* engine.c: the next one will be */

  bool ran_forward;       /* forward.c: since the last end of backward */
  bool entered_backward;  /* backward.c: in the open backward */
  int64_t expected_grads; /* backward.c: still to come in the open backward */

  void **grad_data;   /* grads.c: unsharded gradients; valid while held */
  void **stage_data;  /* grads.c: likewise; NULL entries: not offloaded */
  uint8_t *is_filled; /* grads.c: per parameter: grad_data holds its gradient */
  fsdp_grad *pending; /* grads.c: handed over, not packed; num_params places */
  int64_t num_pending;
  int64_t pending_nbytes;
  fsdp_pack_item *items; /* grads.c: scratch, 2 * num_params + num_segments */

  bool has_sharded_grad; /* reduce.c: the sharded gradient holds a value */
  bool is_reduce_ready;  /* reduce.c: gradient complete, reduction not issued */
  int64_t reduce_position; /* reduce.c: in the recorded order; -1: not there */
  bool has_reduce_hook;    /* engine.c */
  bool is_followed;        /* engine.c: the port acts after each reduction */

  bool has_partial;    /* reduce_unit.c: the partial gradient holds a value */
  void *partial_block; /* reduce_unit.c: kept once it was needed */
  void **partial_data; /* reduce_unit.c: NULL entries: frozen */

  bool is_summoned;           /* summon.c */
  fsdp_summon_options summon; /* summon.c: of the open summon */
  bool has_whole_grads;       /* summon.c: some rank shows whole gradients */
  fsdp_summoned whole;        /* summoned.c: its parameters */
  fsdp_summoned whole_grad;   /* summoned.c: its gradients */
};

/* A second buffer for reductions. */
typedef struct fsdp_scratch {
  void *block; /* NULL: none */
  int64_t nbytes;
  fsdp_event *free_event; /* after its last use; NULL: never used */
} fsdp_scratch;

enum { FSDP_NUM_SCRATCHES = 2 };

struct fsdp_engine {
  fsdp_device_ops ops;
  fsdp_view_ops views;
  fsdp_arena *arena;
  fsdp_order *order;
  fsdp_unit **units;
  size_t num_units;
  size_t units_capacity;

  fsdp_sync sync;
  bool checks_order; /* check_order.c */
  bool offloads;     /* some unit does */
  bool in_backward;  /* backward.c */
  int64_t depth;     /* forward.c: units inside forward now */
  fsdp_unit *root;   /* forward.c: outermost unit of this iteration */

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

  fsdp_scratch scratches[FSDP_NUM_SCRATCHES]; /* scratch.c; they take turns */
  int64_t scratch_turn;                       /* scratch.c */

  int64_t num_iterations;
  int64_t num_all_gathers;
  int64_t num_reduces;
  int64_t num_prefetches;
  uint64_t order_fingerprint; /* check_order.c: of all collectives so far */
  int64_t num_order_checks;   /* check_order.c */
  fsdp_op_log log;
  fsdp_timeline *timeline; /* note.c: borrowed; NULL: nothing is recorded */
};

/* The start of `rank`'s piece in a segment of `shard_numel` per rank. */
static inline void *fsdp_priv_slot(void *segment, int64_t rank,
                                   int64_t shard_numel, fsdp_dtype dtype) {
  return (char *)segment + rank * shard_numel * dtype.itemsize;
}

/* place.c */
/* Lays the segments out in the unit's kinds of block. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_place_segments(fsdp_unit *self,
                                                         fsdp_error *error);

/* failure.c */
/* FSDP_OK, or the error that put the unit into FAILED. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_check(const fsdp_unit *unit,
                                                fsdp_error *error);
/* Puts the unit into FAILED and keeps `error` (NULL is fine) as its first. */
void fsdp_unit_priv_fail(fsdp_unit *unit, const fsdp_error *error);
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
/* The grad_shard of the views. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_grad_shard(fsdp_unit *unit,
                                                     int64_t segment,
                                                     bool is_replaced,
                                                     void **data,
                                                     fsdp_error *error);

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

/* check_order.c */
/* Compares the unit's next collective with that of the other ranks of its
 * shard group, if the engine checks the order. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_check_order(fsdp_unit *unit,
                                                      const char *operation,
                                                      fsdp_error *error);

/* unshard.c */
/* SHARDED or REDUCING -> UNSHARDING. Nothing happens in other states. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_unshard(fsdp_unit *unit,
                                                  fsdp_error *error);
/* UNSHARDING -> UNSHARDED. Nothing happens in other states. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_wait_unshard(fsdp_unit *unit,
                                                       fsdp_error *error);
/* UNSHARDING or UNSHARDED -> SHARDED. Nothing happens in other states. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_reshard(fsdp_unit *unit,
                                                  fsdp_error *error);
/* UNSHARDED -> UNSHARDING: the unit keeps its block, for a backward or the next
 * micro-batch, but between forward and backward, and between steps, the user
 * sees the shards: parameters may be stepped, saved or changed there. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_hide(fsdp_unit *unit,
                                               fsdp_error *error);
/* Unshards `engine->units[index]` ahead of its use, if it is SHARDED; an index
 * below 0 is fine. */
FSDP_NODISCARD fsdp_status fsdp_engine_priv_prefetch(fsdp_engine *engine,
                                                     int64_t index,
                                                     fsdp_error *error);

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

/* grads.c */
/* Whether the unit holds an unsharded gradient. */
bool fsdp_unit_priv_holds_grads(const fsdp_unit *unit);
/* Takes a gradient block unless one is held. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_take_grad_block(fsdp_unit *unit,
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
/* Forgets the unsharded gradient; its block is free after `lane`. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_drop_grads(fsdp_unit *unit,
                                                     fsdp_lane lane,
                                                     fsdp_error *error);

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
int64_t fsdp_engine_priv_scratch_nbytes(const fsdp_engine *engine);
void fsdp_engine_priv_free_scratch(fsdp_engine *engine);

/* grads.c */
/* Lets sharded gradients go that the user cleared since the last step: their
 * memory is free for the activations of the forward that begins. */
void fsdp_unit_priv_drop_cleared_grads(fsdp_unit *unit);
void fsdp_unit_priv_free_grad_shards(fsdp_unit *unit);

/* reduce_unit.c */
/* Enqueues the unit's reduction: from the complete gradient block to the
 * sharded gradient, or, with FSDP_SYNC_SHARD, to the partial one. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_enqueue_reduce(fsdp_unit *unit,
                                                         fsdp_error *error);
/* Frees the partial gradient; COMPUTE waited for the lane that used it. */
void fsdp_unit_priv_free_partial(fsdp_unit *unit);

/* reduce.c */
/* Says that the unit's gradient is complete. Issues its reduction, and those
 * that waited for it, when its turn in the recorded order has come. */
FSDP_NODISCARD fsdp_status fsdp_unit_priv_submit_reduce(fsdp_unit *unit,
                                                        fsdp_error *error);
/* Issues what is ready and was held back, in order, whatever its turn. */
FSDP_NODISCARD fsdp_status fsdp_engine_priv_flush_reduces(fsdp_engine *engine,
                                                          fsdp_error *error);
/* Makes the compute lane wait for all reductions and starts a new record. */
FSDP_NODISCARD fsdp_status fsdp_engine_priv_finish_reduces(fsdp_engine *engine,
                                                           fsdp_error *error);
/* Forgets the reductions of an unfinished backward and the recorded order. */
void fsdp_engine_priv_reset_reduces(fsdp_engine *engine);

#endif /* FSDP_RUNTIME_ENGINE_PRIV_H */
