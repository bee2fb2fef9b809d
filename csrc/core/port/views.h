/*
 * What the user sees of a unit, as function pointers: what its parameters and
 * gradients are views of, what the user changed, and the user's hooks. The
 * bridge fills the table, tests fill it with a recorder.
 */
#ifndef FSDP_PORT_VIEWS_H
#define FSDP_PORT_VIEWS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "base/types.h"
#include "port/transport.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What a unit's parameters, or their gradients, are views of. */
typedef enum fsdp_view {
  FSDP_VIEW_SHARDED = 0,  /* the shard; of gradients: the sharded gradient */
  FSDP_VIEW_UNSHARDED,    /* a block in compute (gradients: held) dtype */
  FSDP_VIEW_FULL,         /* a block in master (gradients: grad) dtype */
  FSDP_VIEW_FULL_ON_HOST, /* the same in host memory */
  FSDP_VIEW_PART,         /* parameters only: the shard, while a part of the
                             block is kept; see Note [Parts of a unit] */
  FSDP_VIEW_PARTIAL       /* gradients only: this rank's part of the sum over
                             the micro-batches so far, in reduce dtype */
} fsdp_view;

/* What the user does instead of the engine, or after it. */
typedef enum fsdp_custom {
  FSDP_CUSTOM_ALL_GATHER = 1,
  FSDP_CUSTOM_REDUCE_SCATTER = 2,
  FSDP_CUSTOM_REDUCED = 4, /* sees gradients that are reduced, and scaled */
} fsdp_custom;

/* `owner` is the token that the unit was created with. */
typedef struct fsdp_view_ops {
  void *context; /* first argument of every call */

  /* Parameters.
   * show_params points the unit's parameters at `view`. For SHARDED with NULL
   * the unsharded storages are emptied, with `segments` they keep their memory:
   * what autograd saved of them stays valid. For the other views
   * `segments[i]` is the memory of segment i, padded_numel elements long;
   * UNSHARDED with NULL gives them its shapes, but no memory. PART
   * follows UNSHARDED: it copies this rank's part of segment i, part_numel
   * elements of compute dtype, into `segments[i]` first, on COMPUTE. */
  fsdp_status (*show_params)(void *context, void *owner, fsdp_view view,
                             void *const *segments, fsdp_error *error);
  /* Empties the unsharded storages: reading what was saved of them is an error
   * from now on. Of parameters that are views of SHARDED. Cannot fail. */
  void (*empty_params)(void *context, void *owner);
  /* Looks for parameters whose memory the user replaced (`param.data = ...`)
   * while they were views of `view` (SHARDED or one of the FULL; `segments` as
   * above), and copies their values in, on COMPUTE. The usual case, nothing
   * replaced, is cheap. any_copied [out] whether one was. */
  fsdp_status (*take_params)(void *context, void *owner, fsdp_view view,
                             void *const *segments, bool *any_copied,
                             fsdp_error *error);
  /* Of an extended segment: issues what gathers its parameter, as a part of the
   * launch `call` of the group, whose ticket it updates. A group of one rank:
   * `call` is NULL, and it copies on UNSHARD. Adds the bytes of the whole to
   * `nbytes`. show_params follows. */
  fsdp_status (*gather)(void *context, void *owner, int64_t segment,
                        const fsdp_group *group, const fsdp_call *call,
                        uint64_t *ticket, int64_t *nbytes, fsdp_error *error);
  /* Of a unit with extended segments: their parameters are not used until the
   * next gather. Cannot fail. */
  void (*ungather)(void *context, void *owner);
  /* Whether the user changed parameters (values, or memory) since the last
   * mark_params; both while they are views of SHARDED, or of UNSHARDED where
   * the user has other tensors of the shards. Cannot fail. A write through
   * `param.data` is not seen. */
  void (*mark_params)(void *context, void *owner);
  bool (*params_changed)(void *context, void *owner);
  /* Of parameters that have been views of UNSHARDED or FULL since mark_params:
   * copies what the user wrote into them since, or put in the place of their
   * memory, to the shards, on COMPUTE; the next take_params says so.
   * `in_backward`: an error for the second, since autograd's graph has the old
   * memory. */
  fsdp_status (*take_writes)(void *context, void *owner, bool in_backward,
                             fsdp_error *error);
  /* Gradients.
   * take_grads takes the ones that the user sees off the parameters before a
   * backward writes new ones. A gradient that is not the engine's own view is
   * copied in; where the user cleared one while others stand, its range in
   * the sharded gradient and (if `unsharded_live`) in `unsharded_segments` is
   * zeroed. any_live [out] whether there was any gradient at all. */
  fsdp_status (*take_grads)(void *context, void *owner, bool unsharded_live,
                            void *const *unsharded_segments, bool *any_live,
                            fsdp_error *error);
  /* The same for gradients shown as one of the FULL views of `segments`: one
   * that the user set is copied in, the range of one that was cleared zeroed.
   * The parameters have no gradients after it. */
  fsdp_status (*take_full_grads)(void *context, void *owner, fsdp_view view,
                                 void *const *segments, bool *any_live,
                                 fsdp_error *error);
  /* Whether the user still holds a gradient that was shown. */
  bool (*grads_live)(void *context, void *owner);
  /* Lets the memory of the sharded gradients go; grad_shard allocates anew. */
  void (*grads_free)(void *context, void *owner);
  /* Lets the user see the gradients: sharded ones, or those in `segments`
   * (entries of frozen segments are NULL): of UNSHARDED and the FULL
   * padded_numel elements, of PARTIAL shard_numel. */
  fsdp_status (*show_grads)(void *context, void *owner, fsdp_view view,
                            void *const *segments, fsdp_error *error);
  /* The memory of gradients that were shown as UNSHARDED, or PARTIAL, goes:
   * what still shows it, on a parameter or elsewhere, keeps a copy, made on
   * COMPUTE. Cannot fail. */
  void (*keep_grads)(void *context, void *owner, fsdp_view view);
  /* The sharded gradient of a trainable segment, in grad dtype (in host memory
   * if the unit offloads), allocated at the first call, and again after
   * grads_free: zeros, written on COMPUTE, unless the next work on it will
   * replace all of them (`is_replaced`). data [out] borrowed. */
  fsdp_status (*grad_shard)(void *context, void *owner, int64_t segment,
                            bool is_replaced, void **data, fsdp_error *error);
  /* Of a unit that is followed. grads_set_aside, before a reduction: what the
   * sharded gradients hold stays with the port, and grad_shard allocates anew.
   * grads_reduced, after it: the new ones are there after the work now on
   * `lane`; the port adds what stood aside. It may let them go, no more. */
  void (*grads_set_aside)(void *context, void *owner);
  fsdp_status (*grads_reduced)(void *context, void *owner, fsdp_lane lane,
                               fsdp_error *error);
  /* Frees a gradient that was handed over by fsdp_unit_grad_ready. All work
   * that reads it is on the lane COMPUTE. Cannot fail. */
  void (*grad_release)(void *context, void *token);

  /* The user's communication hook, in place of a unit's reductions: runs it on
   * `buffer` (padded_numel elements of segment `segment`) and leaves this
   * rank's piece of the result in its slot of `buffer`. */
  fsdp_status (*reduce_hook)(void *context, void *owner, fsdp_lane lane,
                             int64_t segment, void *buffer, fsdp_error *error);

  /* The user's own collectives, see fsdp_unit_settings. custom_add hands over
   * one segment: `whole` of all ranks, and `own`, this rank's piece, which may
   * lie in it. custom_run makes one call for all that were added, on `lane`.
   * REDUCED has the pieces only; they are multiplied by `scale` before. */
  fsdp_status (*custom_add)(void *context, void *owner, void *whole,
                            int64_t whole_numel, const void *own,
                            int64_t own_numel, fsdp_dtype dtype,
                            fsdp_error *error);
  fsdp_status (*custom_run)(void *context, void *owner, fsdp_lane lane,
                            fsdp_custom kind, const fsdp_group *group,
                            double scale, fsdp_error *error);
} fsdp_view_ops;

#ifdef __cplusplus
}
#endif
#endif /* FSDP_PORT_VIEWS_H */
