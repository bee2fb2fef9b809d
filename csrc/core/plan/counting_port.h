/*
 * Counting port: a device without memory or data, for an engine that plans a
 * step and does not run it. It counts what the engine asks for, by purpose, and
 * times it with a simple model of the links.
 *
 * Note [Model of time]
 * Every lane has a clock, as a stream has. Work that the caller adds moves the
 * clock of COMPUTE. A launch of collectives (what stands between group_begin
 * and group_end) starts when its lane and its link are free, and takes
 *
 *   latency * ceil(log2(ranks)) + wire bytes / (bytes per second)
 *
 * where the wire bytes of a rank are those of a ring. With num_local ranks on
 * each host, a launch of a shard group on several hosts is one among the ranks
 * of a host and then one among the hosts, over the link of a host, for the same
 * payload (transports/hierarchical.h). There are two links: that
 * of the shard group and that of the replica group; the launches of one link
 * take turns, in the order in which the engine issues them. An event carries
 * the clock of its lane, waiting for it moves the waiting lane's clock. A stall
 * of COMPUTE is exposed communication. A copy between the device and the host
 * takes nbytes / copy_bytes_per_second of its lane. Casts, packs, the optimizer
 * and the host's own time count nothing.
 */
#ifndef FSDP_PLAN_COUNTING_PORT_H
#define FSDP_PLAN_COUNTING_PORT_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "base/types.h"
#include "layout/flat_layout.h"
#include "port/device.h"
#include "port/views.h"
#include "runtime/engine.h"

/* Purposes of memory. */
typedef enum fsdp_counted {
  FSDP_COUNTED_BLOCKS = 0,    /* arena, scratch, partial gradients */
  FSDP_COUNTED_GRAD_SHARDS,   /* sharded gradients on the device */
  FSDP_COUNTED_PENDING_GRADS, /* autograd's gradients, not packed yet */
  FSDP_COUNTED_ACTIVATIONS,   /* what the caller adds */
  FSDP_COUNTED_HOST, /* sharded gradients and saved tensors in host memory */
  FSDP_NUM_COUNTED
} fsdp_counted;

typedef enum fsdp_collective {
  FSDP_COLLECTIVE_ALL_GATHER = 0,
  FSDP_COLLECTIVE_REDUCE_SCATTER,
  FSDP_COLLECTIVE_ALL_REDUCE,
  FSDP_NUM_COLLECTIVES
} fsdp_collective;

typedef struct fsdp_collective_count {
  int64_t num_launches;   /* groups of calls */
  int64_t num_calls;      /* one per segment */
  int64_t payload_nbytes; /* of the whole buffers, padding included */
  int64_t wire_nbytes;    /* that a rank of a ring sends, and receives */
  double seconds;         /* that the link was busy with them */
} fsdp_collective_count;

typedef struct fsdp_link {
  double bytes_per_second; /* of one rank, in each direction; > 0 */
  double latency_seconds;  /* of one hop; >= 0 */
} fsdp_link;

/* The owner in the options of a unit. */
typedef struct fsdp_counted_unit {
  const fsdp_flat_layout *layout;       /* borrowed */
  const fsdp_segment_options *segments; /* borrowed */
  bool *has_grad_shard; /* per segment, false at first; borrowed */
  bool is_on_host;      /* its shards and sharded gradients are */
  bool has_grads;       /* the user sees gradients */
  double stall_seconds; /* of COMPUTE, charged to the unit */
} fsdp_counted_unit;

typedef struct fsdp_counting_device {
  /* Settings. */
  bool is_host;       /* blocks come and go; set it before `ops` */
  bool shares_memory; /* its ranks do: Notes [Shards in place] and [Parts] */
  fsdp_link shard_link;
  fsdp_link replica_link;
  int64_t num_local;   /* ranks of the shard group on a host; 0: one host */
  fsdp_link host_link; /* of a host, which its ranks share; with num_local */
  double copy_bytes_per_second; /* 0: copies take no time */
  bool params_changed;          /* the optimizer stepped since mark_params */
  /* The unit charged for COMPUTE's stalls; NULL: none. Borrowed. */
  fsdp_counted_unit *charged_unit;

  /* Counts. */
  int64_t nbytes[FSDP_NUM_COUNTED];  /* now */
  int64_t at_peak[FSDP_NUM_COUNTED]; /* when the device held most */
  int64_t peak_nbytes;               /* without the host */
  fsdp_collective_count collectives[FSDP_NUM_COLLECTIVES];
  double stall_seconds; /* of COMPUTE */

  /* Its own. */
  fsdp_transport_ops transport_ops;
  uint64_t next_address;
  double clocks[FSDP_NUM_LANES]; /* their addresses stand for streams */
  double link_clocks[2];
  bool is_open;              /* there were calls since group_begin: */
  fsdp_collective open_kind; /* of this kind */
  double open_bytes;         /* and so many bytes on the wire */
} fsdp_counting_device;

/* The transport of a group, on the one link or the other. */
typedef struct fsdp_counting_transport {
  fsdp_transport base;
  fsdp_counting_device *device;
  int64_t world_size;
  bool is_replica;
} fsdp_counting_transport;

/* Starts from nothing, and from time 0. wants_scratch: reductions use scratch
 * memory, as through gloo. */
void fsdp_counting_device_init(fsdp_counting_device *device, fsdp_link shard,
                               fsdp_link replica, bool wants_scratch);

/* The tables over `device`, which is borrowed. Cannot fail. */
fsdp_device_ops fsdp_counting_device_ops(fsdp_counting_device *device);
fsdp_view_ops fsdp_counting_device_views(fsdp_counting_device *device);

/* A group of `world_size` ranks, of which this is the first. `transport` [out]
 * is the caller's and outlives the group. */
fsdp_group fsdp_counting_device_group(fsdp_counting_device *device,
                                      bool is_replica, int64_t world_size,
                                      fsdp_counting_transport *transport);

/* Counts from here on: counts of collectives and stalls are 0, the peak is what
 * is held now. Clocks go on. */
void fsdp_counting_device_restart(fsdp_counting_device *device);

/* The device works for so long. */
void fsdp_counting_device_compute(fsdp_counting_device *device, double seconds);

/* Adds `nbytes` (negative: gives back) to what is held for `purpose`.
 * FSDP_OVERFLOW: the sum does not fit in int64_t. */
FSDP_NODISCARD fsdp_status
fsdp_counting_device_hold(fsdp_counting_device *device, fsdp_counted purpose,
                          int64_t nbytes, fsdp_error *error);

/* Gives back `nbytes` of what is held for `purpose`. */
void fsdp_counting_device_drop(fsdp_counting_device *device,
                               fsdp_counted purpose, int64_t nbytes);

/* A token of a gradient of `nbytes`, held from now on until it is released. */
FSDP_NODISCARD fsdp_status
fsdp_counting_device_make_grad(fsdp_counting_device *device, int64_t nbytes,
                               void **token, fsdp_error *error);

/* The clock of COMPUTE. */
double fsdp_counting_device_now(const fsdp_counting_device *device);

#endif /* FSDP_PLAN_COUNTING_PORT_H */
