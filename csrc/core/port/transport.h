/*
 * A transport carries the collectives of one process group: through shared
 * memory, through NCCL, or through the group's c10d backend. The bridge chooses
 * it and implements the last one; the first two include neither torch nor
 * Python.
 *
 * All ranks of the group make the same calls, per channel in the same order.
 * The two channels, one for gathers and one for reductions, do not wait for
 * each other.
 */
#ifndef FSDP_PORT_TRANSPORT_H
#define FSDP_PORT_TRANSPORT_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "base/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The group's key-value store, for meeting and for last words. */
typedef struct fsdp_store {
  void *context; /* first argument of every call */
  fsdp_status (*set)(void *context, const char *key, const void *value,
                     int64_t nbytes, fsdp_error *error);
  /* Waits up to timeout_ms for the key. At most `capacity` bytes are copied;
   * nbytes [out] the value's own size. FSDP_BACKEND after the time limit. */
  fsdp_status (*get)(void *context, const char *key, int64_t timeout_ms,
                     void *value, int64_t capacity, int64_t *nbytes,
                     fsdp_error *error);
  /* Adds `change` to the number in the key, 0 before; sum [out] the new one,
   * which no other rank sees at the same time. NULL where nobody counts. */
  fsdp_status (*add)(void *context, const char *key, int64_t change,
                     int64_t *sum, fsdp_error *error);
} fsdp_store;

typedef enum fsdp_channel {
  FSDP_CHANNEL_GATHER = 0, /* parameters: all_gather, broadcast */
  FSDP_CHANNEL_REDUCE,     /* gradients: reduce_scatter, all_reduce */
  FSDP_NUM_CHANNELS
} fsdp_channel;

/* How and what for a call is made. */
typedef struct fsdp_call {
  fsdp_channel channel;
  void *stream;      /* the device's; NULL on a host transport */
  const char *label; /* unit and operation, for errors; copied; may be NULL */
  void *scratch;     /* of reduce_scatter: fsdp_scratch_numel(); NULL: none */
  bool is_captured;  /* into a graph: it runs later, and more than once */
} fsdp_call;

/* Elements of a reduce_scatter's scratch: a shard of each other rank. */
static inline int64_t fsdp_scratch_numel(int64_t world_size,
                                         int64_t shard_numel) {
  return (world_size - 1) * shard_numel;
}

typedef struct fsdp_transport fsdp_transport;

/*
 * Note [Shards in place]
 * Ranks of one host can read each other's shards where they lie. A unit's
 * shards are in a region: address space as large as the unsharded unit, in
 * which each shard has the place that it has there. `share` maps one memory
 * file over the regions of all ranks. So a region holds the shards of all, and
 * each rank writes its own.
 *
 * Others read through a second, private mapping of the file. It shows what the
 * owners write, but what is written into it does not reach them, and `close`
 * drops it. An all-gather then copies nothing and needs no block.
 *
 * The gather only makes the ranks meet: `open` ends when all have begun it, so
 * the owners have written what the others are to read. An owner may write again
 * when all others have closed: `await_closed`.
 */
typedef struct fsdp_shared fsdp_shared; /* the transport's own */

typedef struct fsdp_region {
  void *data; /* of fsdp_host_space_alloc(nbytes); NULL: none */
  int64_t nbytes;
  bool *is_shared; /* set when this process maps the file over it; NULL: nobody
                      asks */
} fsdp_region;

/* Bytes of a region. */
typedef struct fsdp_region_range {
  int64_t offset;
  int64_t nbytes;
} fsdp_region_range;

/*
 * Note [Parts]
 * Ranks that read each other's memory can sum what lies in many places. Each
 * rank gives a sparse array: parts, with zeros between them. All arrays are of
 * one length, and elements at one offset are added. Each rank takes from the
 * sum what its places name. So nobody packs a contribution into one buffer, and
 * the sum goes where it is used, scaled. The lists, the parts' memory and the
 * places' belong to the call until it ends.
 */
typedef struct fsdp_part {
  const void *data; /* NULL: ones, of the places' dtype */
  int64_t offset;   /* bytes from the start of the array; ascending */
  int64_t nbytes;   /* >= 1; parts do not overlap */
} fsdp_part;

/* data = scale * sum (+ data with `adds`). Each place has one dtype on all
 * ranks, and so do the parts under it. */
typedef struct fsdp_place {
  int64_t offset; /* bytes from the start of the array */
  int64_t numel;
  fsdp_dtype sum_dtype; /* of the array here; floating */
  void *data;
  fsdp_dtype dtype; /* of `data`; floating */
  double scale;
  bool adds;
} fsdp_place;

typedef struct fsdp_parts {
  int64_t nbytes; /* of the array; the same on all ranks */
  const fsdp_part *parts;
  int64_t num_parts;
  const fsdp_place *places;
  int64_t num_places;
} fsdp_parts;

typedef struct fsdp_transport_ops {
  const char *name; /* "shm", "hierarchical", "nccl", "c10d"; static */
  /* Whether buffers are host memory. Then a collective only starts, and `wait`
   * ends it; else it is enqueued on the stream and `wait` is NULL. */
  bool is_host;
  /* Whether it uses the labels of calls; else they may be NULL. */
  bool reads_labels;
  /* Whether reduce_scatter is faster with scratch memory. */
  bool wants_scratch;
  /* Whether its calls may be captured in a graph of the device. */
  bool can_capture;

  /* Leaves the group without waiting for the others. NULL is fine. */
  void (*destroy)(fsdp_transport *transport);

  /* Collectives between begin and end may be merged into one. */
  fsdp_status (*group_begin)(fsdp_transport *transport, const fsdp_call *call,
                             fsdp_error *error);
  fsdp_status (*group_end)(fsdp_transport *transport, const fsdp_call *call,
                           fsdp_error *error);

  /* ticket [out] > 0 names the call to `wait` or `end_of`. On a host the
   * buffers belong to the call until then.
   *
   * Gathers `shard_numel` elements of each rank into `output`, which holds
   * world_size times as many. `input` is this rank's piece: its own slot of
   * `output` (in place) or memory outside it. */
  fsdp_status (*all_gather)(fsdp_transport *transport, const fsdp_call *call,
                            void *output, const void *input,
                            int64_t shard_numel, fsdp_dtype dtype,
                            uint64_t *ticket, fsdp_error *error);
  /* Every rank gets what `root` holds in `buffer`. */
  fsdp_status (*broadcast)(fsdp_transport *transport, const fsdp_call *call,
                           void *buffer, int64_t numel, int64_t root,
                           fsdp_dtype dtype, uint64_t *ticket,
                           fsdp_error *error);
  /* Sums `buffer` (world_size * shard_numel) over the ranks; this rank's slot
   * of `buffer` holds its piece of the sum, the other slots are undefined. */
  fsdp_status (*reduce_scatter)(fsdp_transport *transport,
                                const fsdp_call *call, void *buffer,
                                int64_t shard_numel, fsdp_dtype dtype,
                                uint64_t *ticket, fsdp_error *error);
  /* The mean instead of the sum, of a floating dtype, and this rank's piece
   * goes into `output`: its own slot of `buffer`, or memory outside it. The
   * rest of `buffer` is undefined then. NULL: the transport cannot. */
  fsdp_status (*reduce_scatter_mean)(fsdp_transport *transport,
                                     const fsdp_call *call, void *output,
                                     void *buffer, int64_t shard_numel,
                                     fsdp_dtype dtype, uint64_t *ticket,
                                     fsdp_error *error);
  /* Sums `buffer` over the ranks, in place. */
  fsdp_status (*all_reduce)(fsdp_transport *transport, const fsdp_call *call,
                            void *buffer, int64_t numel, fsdp_dtype dtype,
                            uint64_t *ticket, fsdp_error *error);
  /* Whether reduce_parts works; the same on all ranks. NULL: it does not, and
   * reduce_parts is NULL. */
  bool (*can_reduce_parts)(fsdp_transport *transport);
  /* Note [Parts]. Host only. */
  fsdp_status (*reduce_parts)(fsdp_transport *transport, const fsdp_call *call,
                              const fsdp_parts *parts, uint64_t *ticket,
                              fsdp_error *error);

  /* Host only: ends the call `ticket` of the channel and all before it. */
  fsdp_status (*wait)(fsdp_transport *transport, fsdp_channel channel,
                      uint64_t ticket, fsdp_error *error);
  /* Host only: whether that has ended on this rank, so that `wait` returns at
   * once. NULL: the transport does not know. Cannot fail. */
  bool (*is_done)(fsdp_transport *transport, fsdp_channel channel,
                  uint64_t ticket);

  /* Device only: an event of the device, of whoever made the transport, that
   * happens after the call `ticket` of the channel; NULL: that is done. It is
   * the transport's, which records it again later. Cannot fail. NULL: all
   * tickets are 0. */
  void *(*end_of)(fsdp_transport *transport, fsdp_channel channel,
                  uint64_t ticket);

  /* The first failure so far, of any rank that this one knows of; FSDP_OK if
   * there was none. Cheap, does not wait. After a failure every call returns
   * it again, except over c10d, which still makes them. */
  fsdp_status (*check)(fsdp_transport *transport, fsdp_error *error);

  /* Bytes of memory that it has reserved for itself. NULL: none that it knows
   * of. Cannot fail. */
  int64_t (*reserved_nbytes)(const fsdp_transport *transport);

  /* Note [Shards in place]. The transport that the next five are asked of, if
   * there is one; NULL: none, and they are NULL. */
  fsdp_transport *(*sharer)(fsdp_transport *transport);
  /* Shares the regions of `nbytes`, of which `own` are this rank's shards.
   * Their addresses and values stay. All ranks call it; one without a region
   * takes part, too. whole [out] what the ranks read between open and close.
   * shared [out] new; NULL: some rank could not, and none does. `label` is
   * copied. */
  fsdp_status (*share)(fsdp_transport *transport, const char *label,
                       fsdp_region region, int64_t nbytes,
                       const fsdp_region_range *own, int64_t num_own,
                       void **whole, fsdp_shared **shared, fsdp_error *error);
  /* Frees what this rank has of the whole. The region stays. NULL is fine.
   * Cannot fail. */
  void (*unshare)(fsdp_shared *shared);
  /* Starts a collective; from its end until `close` this rank reads. */
  fsdp_status (*open)(fsdp_transport *transport, const fsdp_call *call,
                      fsdp_shared *shared, uint64_t *ticket, fsdp_error *error);
  /* After the end of `open`, or its failure. Cannot fail. */
  void (*close)(fsdp_transport *transport, fsdp_shared *shared);
  /* Waits until no other rank reads. */
  fsdp_status (*await_closed)(fsdp_transport *transport, fsdp_shared *shared,
                              fsdp_error *error);

  /* Fails the transport on all ranks because of something outside of it; they
   * are told `cause`. Nothing changes after an earlier failure. Does not wait.
   * NULL: the transport cannot. */
  void (*give_up)(fsdp_transport *transport, const char *cause);
} fsdp_transport_ops;

/* The first member of every transport. */
struct fsdp_transport {
  const fsdp_transport_ops *ops;
};

/* A process group as the core sees it. */
typedef struct fsdp_group {
  fsdp_transport
      *transport;     /* borrowed; NULL: of one rank, or not chosen yet */
  void *handle;       /* the provider's own, borrowed */
  int64_t rank;       /* in [0, world_size) */
  int64_t world_size; /* >= 1 */
} fsdp_group;

#ifdef __cplusplus
}
#endif
#endif /* FSDP_PORT_TRANSPORT_H */
