/*
 * A device, as function pointers: memory, events, data movement. The bridge
 * fills the table from ATen and c10 streams, tests fill it with a recorder.
 *
 * Pointers are device addresses. Each call enqueues on its lane and returns,
 * unless its comment says otherwise. On a host device event_wait may block.
 *
 * Note [Lanes on a host device]
 * A CPU has no streams. There, collectives start in the order of the calls
 * (so that all ranks agree), pack runs at once, accumulate is queued behind its
 * lane's collectives, and event_wait runs the recording lane up to the event,
 * whichever lane waits. The engine is therefore written so that pack never
 * touches memory of a collective that is still in flight on its own lane; an
 * event stands between them.
 */
#ifndef FSDP_PORT_DEVICE_H
#define FSDP_PORT_DEVICE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "base/types.h"
#include "port/transport.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fsdp_event fsdp_event; /* the provider's own */

/* One copy of a pack, which converts when the dtypes differ. */
typedef struct fsdp_pack_item {
  void *to; /* `numel` contiguous elements */
  fsdp_dtype to_dtype;
  fsdp_dtype from_dtype;
  const void *from; /* as many; NULL: see `is_one` */
  int64_t numel;
  bool add;    /* add to what is there instead of replacing it */
  bool is_one; /* without `from`: writes ones, not zeros; neither is scaled */
  bool scales_first; /* scales, then converts; else it converts first */
} fsdp_pack_item;

typedef struct fsdp_device_ops {
  void *context; /* first argument of every call */
  bool is_host;  /* a device without streams; see Note [Memory on a host] in
                    arena.h */

  /* Memory. block [out] new; aligned to at least 64 bytes; nbytes >= 1. */
  fsdp_status (*block_alloc)(void *context, int64_t nbytes, void **block,
                             fsdp_error *error);
  /* The memory belongs to COMPUTE: before another lane uses a new block it
   * waits for what COMPUTE has then, and before a block is freed COMPUTE has
   * waited for all other lanes that used it. Cannot fail. */
  void (*block_free)(void *context, void *block, int64_t nbytes);
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

  /* Data. Bytes between the device and host memory. */
  fsdp_status (*copy_to_device)(void *context, fsdp_lane lane, void *device,
                                const void *host, int64_t nbytes,
                                fsdp_error *error);
  fsdp_status (*copy_to_host)(void *context, fsdp_lane lane, void *host,
                              const void *device, int64_t nbytes,
                              fsdp_error *error);
  /* item.to = scale * item.from (or += with item.add) for all items, in one
   * launch where the device can. No item writes what another one touches. The
   * items are the caller's. */
  fsdp_status (*pack)(void *context, fsdp_lane lane,
                      const fsdp_pack_item *items, int64_t num_items,
                      double scale, fsdp_error *error);
  /* The same, of what a collective before it on the lane leaves. */
  fsdp_status (*accumulate)(void *context, fsdp_lane lane,
                            const fsdp_pack_item *items, int64_t num_items,
                            double scale, fsdp_error *error);

  /* Collectives, which a group's transport carries. stream: the device's own
   * handle of a lane's stream; NULL on a host device. */
  void *(*stream)(void *context, fsdp_lane lane);
  /* The lane's newest work is the call `ticket` of the group's transport. On a
   * host device this makes the call, and all before it on the channel, a part
   * of the lane's work; elsewhere the transport knows when the lane has done
   * it, and an event need not be recorded. */
  fsdp_status (*add_call)(void *context, fsdp_lane lane,
                          const fsdp_group *group, fsdp_channel channel,
                          uint64_t ticket, fsdp_error *error);
  /* Adds to `error`, of a call of the group's transport that failed, what the
   * other ranks were doing, if it was they who failed. May wait for their
   * answers. May be NULL. Returns the status of `error`. */
  fsdp_status (*explain_failure)(void *context, const fsdp_group *group,
                                 fsdp_error *error);
  /* For diagnosis: `mine` (nbytes, on the host) of each rank, in rank order, in
   * `all`. The host waits for it. */
  fsdp_status (*all_gather_bytes)(void *context, const fsdp_group *group,
                                  const void *mine, int64_t nbytes, void *all,
                                  fsdp_error *error);
} fsdp_device_ops;

#ifdef __cplusplus
}
#endif
#endif /* FSDP_PORT_DEVICE_H */
