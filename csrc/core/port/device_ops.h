/*
 * The port: everything the engine asks of a device, as function pointers.
 *
 * The bridge fills the table from ATen, c10 streams and c10d; tests fill it
 * with a recorder. Pointers are device addresses. Each call enqueues on its
 * lane and returns; only event_wait with the lane COMPUTE on a host device
 * may block.
 *
 * Note [Lanes on a host device]
 * A CPU has no streams. There, collectives start in the order of the calls
 * (so that all ranks agree), cast and pack run at once, accumulate is queued
 * behind its lane's collectives, and event_wait runs the recording lane up to
 * the event, whichever lane waits. The engine is therefore written so that
 * cast and pack never touch memory of a collective that is still in flight on
 * their own lane; an event stands between them.
 */
#ifndef FSDP_PORT_DEVICE_OPS_H
#define FSDP_PORT_DEVICE_OPS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "base/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fsdp_event fsdp_event; /* the provider's own */

/* One source of a pack. */
typedef struct fsdp_pack_item {
  const void *data; /* `numel` contiguous elements; NULL writes zeros */
  fsdp_dtype dtype;
  int64_t offset; /* elements from the start of the destination */
  int64_t numel;
  bool add; /* add to what is there instead of replacing it */
} fsdp_pack_item;

/* What a unit's parameters, or their gradients, are views of. */
typedef enum fsdp_view {
  FSDP_VIEW_SHARDED = 0,  /* the shard; of gradients: the sharded gradient */
  FSDP_VIEW_UNSHARDED,    /* a block in compute (gradients: reduce) dtype */
  FSDP_VIEW_FULL,         /* a block in master (gradients: grad) dtype */
  FSDP_VIEW_FULL_ON_HOST, /* the same in host memory */
  FSDP_VIEW_PARTIAL       /* gradients only: this rank's part of the sum over
                             the micro-batches so far, in reduce dtype */
} fsdp_view;

typedef struct fsdp_device_ops {
  void *context; /* first argument of every call */

  /* Memory. block [out] new; aligned to at least 64 bytes; nbytes >= 1. */
  fsdp_status (*block_alloc)(void *context, int64_t nbytes, void **block,
                             fsdp_error *error);
  /* Gives a block back to the device once `last_use` (NULL: never used) has
   * happened; may block the host. Cannot fail. */
  void (*block_free)(void *context, void *block, int64_t nbytes,
                     fsdp_event *last_use);
  /* Gives what freed blocks have left with the device's allocator back to the
   * device; may be slow. May be NULL: nothing is left. Cannot fail. */
  void (*memory_release)(void *context);
  /* Blocks in host memory (pinned where there is an accelerator). */
  fsdp_status (*host_alloc)(void *context, int64_t nbytes, void **block,
                            fsdp_error *error);
  void (*host_free)(void *context, void *block);

  /* Ordering. event [out] new, as if already happened. */
  fsdp_status (*event_create)(void *context, fsdp_event **event,
                              fsdp_error *error);
  void (*event_destroy)(void *context, fsdp_event *event);
  /* Happens when all work now on `lane` is done. Replaces the last record. */
  fsdp_status (*event_record)(void *context, fsdp_event *event, fsdp_lane lane,
                              fsdp_error *error);
  /* Later work on `lane` starts after the event. */
  fsdp_status (*event_wait)(void *context, fsdp_lane lane, fsdp_event *event,
                            fsdp_error *error);
  /* The host waits for the event. */
  fsdp_status (*event_synchronize)(void *context, fsdp_event *event,
                                   fsdp_error *error);

  /* A point in time on `lane`, for a timeline: the number by which the provider
   * knows it, or -1: none. May be NULL: a device without lanes. Cannot fail. */
  int32_t (*mark)(void *context, fsdp_lane lane);

  /* Data. `cast` copies, converting when the dtypes differ. */
  fsdp_status (*cast)(void *context, fsdp_lane lane, void *destination,
                      fsdp_dtype destination_dtype, const void *source,
                      fsdp_dtype source_dtype, int64_t numel,
                      fsdp_error *error);
  /* Bytes between the device and host memory. */
  fsdp_status (*copy_to_device)(void *context, fsdp_lane lane, void *device,
                                const void *host, int64_t nbytes,
                                fsdp_error *error);
  fsdp_status (*copy_to_host)(void *context, fsdp_lane lane, void *host,
                              const void *device, int64_t nbytes,
                              fsdp_error *error);
  /* destination[item.offset ...] = scale * item.data (or += with item.add),
   * for all items in one launch where the device can. */
  fsdp_status (*pack)(void *context, fsdp_lane lane, void *destination,
                      fsdp_dtype destination_dtype, const fsdp_pack_item *items,
                      int64_t num_items, double scale, fsdp_error *error);
  /* destination = scale * source (+ destination with `add`). */
  fsdp_status (*accumulate)(void *context, fsdp_lane lane, void *destination,
                            fsdp_dtype destination_dtype, const void *source,
                            fsdp_dtype source_dtype, int64_t numel,
                            double scale, bool add, fsdp_error *error);

  /* Collectives. Calls between begin and end on one lane may be merged. */
  fsdp_status (*group_begin)(void *context, fsdp_lane lane,
                             const fsdp_group *group, fsdp_error *error);
  fsdp_status (*group_end)(void *context, fsdp_lane lane,
                           const fsdp_group *group, fsdp_error *error);
  /* Gathers `shard_numel` elements of each rank into `output`, which holds
   * world_size times as many. `input` is this rank's piece: its own slot of
   * `output` (in place) or memory outside it. */
  fsdp_status (*all_gather)(void *context, fsdp_lane lane,
                            const fsdp_group *group, void *output,
                            const void *input, int64_t shard_numel,
                            fsdp_dtype dtype, fsdp_error *error);
  /* Every rank gets what `root` holds in `buffer`. */
  fsdp_status (*broadcast)(void *context, fsdp_lane lane,
                           const fsdp_group *group, void *buffer, int64_t numel,
                           int64_t root, fsdp_dtype dtype, fsdp_error *error);
  /* Sums `buffer` (world_size * shard_numel) over the ranks; this rank's slot
   * of `buffer` holds its piece of the sum, the other slots are undefined.
   * `scratch` is as large as `buffer` if the unit was created with
   * needs_reduce_scratch and the group wants it, else NULL. */
  fsdp_status (*reduce_scatter)(void *context, fsdp_lane lane,
                                const fsdp_group *group, void *buffer,
                                void *scratch, int64_t shard_numel,
                                fsdp_dtype dtype, fsdp_error *error);
  /* Whether reduce_scatter of this group uses its scratch. May be NULL: yes.
   * Cannot fail. */
  bool (*reduce_wants_scratch)(void *context, const fsdp_group *group);
  /* Sums `buffer` over the ranks, in place. */
  fsdp_status (*all_reduce)(void *context, fsdp_lane lane,
                            const fsdp_group *group, void *buffer,
                            int64_t numel, fsdp_dtype dtype, fsdp_error *error);
  /* The user's communication hook, in place of a unit's reductions: runs it on
   * `buffer` (padded_numel elements of segment `segment`) and leaves this
   * rank's piece of the result in its slot of `buffer`. */
  fsdp_status (*reduce_hook)(void *context, void *owner, fsdp_lane lane,
                             int64_t segment, void *buffer, fsdp_error *error);
  /* For diagnosis: `mine` (nbytes, on the host) of each rank, in rank order, in
   * `all`. The host waits for it. */
  fsdp_status (*exchange)(void *context, const fsdp_group *group,
                          const void *mine, int64_t nbytes, void *all,
                          fsdp_error *error);

  /* Views. `owner` is the token that the unit was created with.
   * show_params points the unit's parameters at `view`. For SHARDED `segments`
   * is NULL and the unsharded storages are emptied; for the others
   * `segments[i]` is the memory of segment i, padded_numel elements long. */
  fsdp_status (*show_params)(void *context, void *owner, fsdp_view view,
                             void *const *segments, fsdp_error *error);
  /* Looks for parameters whose memory the user replaced (`param.data = ...`)
   * while they were views of `view` (SHARDED or one of the FULL; `segments` as
   * above), and copies their values in, on COMPUTE. The usual case, nothing
   * replaced, is cheap. any_copied [out] whether one was. */
  fsdp_status (*take_params)(void *context, void *owner, fsdp_view view,
                             void *const *segments, bool *any_copied,
                             fsdp_error *error);
  /* Whether the user changed parameters (values, or memory) since the last
   * mark_params; both while they are views of SHARDED. Cannot fail. A write
   * through `param.data` is not seen. */
  void (*mark_params)(void *context, void *owner);
  bool (*params_changed)(void *context, void *owner);
  /* Takes the gradients that the user sees off the parameters before a
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
} fsdp_device_ops;

#ifdef __cplusplus
}
#endif
#endif /* FSDP_PORT_DEVICE_OPS_H */
