/*
 * Offload: what autograd saves for backward waits in host memory, from the end
 * of one unit's forward to the start of its backward.
 *
 * An *item* is device memory that is saved: one storage, however many saved
 * tensors lie in it. The caller says when a unit's forward begins, when a saved
 * tensor is needed, and when nobody needs an item any more. The caller owns the
 * device memory and locks; all calls are for the current stream as COMPUTE.
 *
 * Note [Groups of saved memory]
 * A *group* is what is saved from the start of one unit's forward to that of
 * the next. When a unit begins, the group before it is copied to the host on
 * DOWNLOAD, beside the unit's compute; when the unit after that begins, or
 * forward ends, COMPUTE waits for the copies and the device memory is let go.
 * The host never waits. The last groups stay on the device, because backward
 * begins with them: with keep_last = k, a group is copied when the k-th unit
 * after it begins.
 *
 * An item that somebody else still holds then (a unit's output that the caller
 * has in a variable, a buffer) would not leave the device. It is not copied, it
 * joins the group that is open.
 *
 * In backward the first need of a group brings all of it back, unless it is
 * there, and starts the copies of the group before it on UPLOAD. Device memory
 * for them is made at that time, so that two groups are there at once.
 */
#ifndef FSDP_OFFLOAD_OFFLOAD_H
#define FSDP_OFFLOAD_OFFLOAD_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "port/device.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Of host memory. An allocator of pinned memory may round up to powers of 2. */
enum { FSDP_OFFLOAD_CHUNK_NBYTES = 16 << 20 };

typedef struct fsdp_offload fsdp_offload;
typedef struct fsdp_offload_item fsdp_offload_item;

/* The caller's side of an item, which it knows by its token. */
typedef struct fsdp_offload_calls {
  void *context;
  /* Whether nobody but the caller's item holds its memory. */
  bool (*is_alone)(void *context, void *token);
  /* Lets the device memory go, for work that COMPUTE gets from now on. Cannot
   * fail. */
  void (*let_go)(void *context, void *token);
  /* Makes device memory for the item again, as COMPUTE allocates it. data [out]
   * borrowed until let_go or forget. */
  fsdp_status (*make)(void *context, void *token, void **data,
                      fsdp_error *error);
  /* The item is gone, and so is the device memory if it is there. Called once
   * for each item. Cannot fail. */
  void (*forget)(void *context, void *token);
} fsdp_offload_calls;

typedef struct fsdp_offload_stats {
  int64_t held_nbytes;   /* of items that have a copy in host memory */
  int64_t peak_nbytes;   /* most of them so far */
  int64_t host_nbytes;   /* of host memory, used or not */
  int64_t num_downloads; /* items copied so far */
  int64_t num_uploads;   /* likewise, back */
} fsdp_offload_stats;

/*
 * ops, and what it needs, must outlive the offload; `calls` is copied.
 * chunk_nbytes: of host memory, in which it is allocated. offload [out] new.
 *
 * FSDP_INVALID_ARGUMENT  chunk_nbytes is no positive multiple of 64.
 * FSDP_OUT_OF_MEMORY, or what the port reports.
 */
FSDP_NODISCARD fsdp_status fsdp_offload_create(const fsdp_device_ops *ops,
                                               const fsdp_offload_calls *calls,
                                               int64_t chunk_nbytes,
                                               fsdp_offload **offload,
                                               fsdp_error *error);

/* All items were dropped. Waits for copies. Accepts NULL. Cannot fail. */
void fsdp_offload_destroy(fsdp_offload *offload);

/* So many groups (>= 1) stay on the device. */
void fsdp_offload_keep_last(fsdp_offload *offload, int64_t num_groups);

/* Adds device memory to the open group. item [out] new; drop it. */
FSDP_NODISCARD fsdp_status fsdp_offload_add(fsdp_offload *offload, void *token,
                                            const void *data, int64_t nbytes,
                                            fsdp_offload_item **item,
                                            fsdp_error *error);

/* The item is saved once more, now: it joins the open group unless it was
 * copied. Cannot fail. */
void fsdp_offload_add_again(fsdp_offload *offload, fsdp_offload_item *item);

/* A unit's forward begins. */
FSDP_NODISCARD fsdp_status fsdp_offload_enter(fsdp_offload *offload,
                                              fsdp_error *error);

/* The forward of the outermost unit ends. */
FSDP_NODISCARD fsdp_status fsdp_offload_leave(fsdp_offload *offload,
                                              fsdp_error *error);

/* The item's memory is on the device for work that COMPUTE gets from now on. */
FSDP_NODISCARD fsdp_status fsdp_offload_need(fsdp_offload *offload,
                                             fsdp_offload_item *item,
                                             fsdp_error *error);

/* Lets the device memory of an item go if the item is on the host, too: what
 * needs it holds it now. Cannot fail. */
void fsdp_offload_spare(fsdp_offload *offload, fsdp_offload_item *item);

/* Nobody needs the item any more. It is forgotten now, or when copies that are
 * in flight have been waited for. Cannot fail. */
void fsdp_offload_drop(fsdp_offload *offload, fsdp_offload_item *item);

/* A backward has ended: lets device memory go that was brought back for
 * nothing. */
FSDP_NODISCARD fsdp_status fsdp_offload_end_backward(fsdp_offload *offload,
                                                     fsdp_error *error);

/* Cannot fail. */
void fsdp_offload_get_stats(const fsdp_offload *offload,
                            fsdp_offload_stats *stats);

#ifdef __cplusplus
}
#endif
#endif /* FSDP_OFFLOAD_OFFLOAD_H */
