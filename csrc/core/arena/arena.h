/*
 * Arena: the reusable blocks that hold unsharded parameters and gradients.
 * This is the rate limiter.
 *
 * A *client* is one thing that needs memory now and then (a unit's unsharded
 * parameters; its unsharded gradients). It takes a block and gives it back.
 * A block carries a free event, recorded on the lane that used it last; taking
 * a block makes the taking lane wait for that event, never the host.
 *
 * Note [Block assignment]
 * While nothing is known, a client takes the block that was given back longest
 * ago among those that fit, and a new one if there is none; blocks that are
 * too small are freed first. The arena notes which clients ever held blocks at
 * the same time ("conflict"). Neighbours in time conflict too, where sharing a
 * block would make one lane wait for another: a client that takes after one
 * gave back behind a collective (its reduction is still running), or after one
 * gave back behind compute when nothing was gathered in between (its compute is
 * still running, and the gather should overlap with it). fsdp_arena_plan()
 * colours the conflict graph, largest client first: clients of one colour
 * share one block, whose size is that of its largest client, and keep it for
 * the rest of the run. Addresses are then fixed and a step allocates nothing.
 * A take that finds its planned block held (the order changed) falls back to
 * the first rule and makes the plan dirty.
 *
 * Note [Memory that blocks leave]
 * Blocks lie in memory that the device's allocator keeps apart from the user's
 * tensors (Note [Streams of blocks] in provider.cpp). What a plan leaves over
 * would stay there unused, so the plan gives it back, once. When the device
 * runs out of memory, blocks that nobody holds are freed before the caller
 * gives up.
 */
#ifndef FSDP_ARENA_ARENA_H
#define FSDP_ARENA_ARENA_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "base/types.h"
#include "port/device.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fsdp_arena fsdp_arena;

typedef struct fsdp_arena_stats {
  int64_t num_clients;
  int64_t num_blocks;
  int64_t nbytes;      /* of all blocks, held or not */
  int64_t held_nbytes; /* of the blocks that are held now */
  int64_t peak_nbytes; /* highest `nbytes` so far */
  int64_t num_allocs;  /* block_alloc calls so far */
  int64_t num_frees;   /* block_free calls so far */
} fsdp_arena_stats;

/* ops is borrowed and must outlive the arena. arena [out] new reference. */
FSDP_NODISCARD fsdp_status fsdp_arena_create(const fsdp_device_ops *ops,
                                             fsdp_arena **arena,
                                             fsdp_error *error);

/* Frees every block, held ones too. Accepts NULL. Cannot fail. */
void fsdp_arena_destroy(fsdp_arena *arena);

/* Adds a client that will need `nbytes` (>= 1). client [out] its id: 0, 1, 2,
 * ... FSDP_INVALID_ARGUMENT, FSDP_OUT_OF_MEMORY. */
FSDP_NODISCARD fsdp_status fsdp_arena_add_client(fsdp_arena *arena,
                                                 int64_t nbytes,
                                                 int64_t *client,
                                                 fsdp_error *error);

/* Lets the client need `nbytes` (>= 1) from its next take on.
 * FSDP_INVALID_STATE: it holds a block. */
FSDP_NODISCARD fsdp_status fsdp_arena_resize_client(fsdp_arena *arena,
                                                    int64_t client,
                                                    int64_t nbytes,
                                                    fsdp_error *error);

/*
 * Gives `client` a block for work on `lane`, which waits for the block's free
 * event. data [out] borrowed until the block is given back.
 *
 * FSDP_INVALID_STATE  the client holds a block already.
 * FSDP_OUT_OF_MEMORY, or what the port reports.
 */
FSDP_NODISCARD fsdp_status fsdp_arena_take(fsdp_arena *arena, int64_t client,
                                           fsdp_lane lane, void **data,
                                           fsdp_error *error);

/* Gives the client's block back: free once the work now on `lane` is done.
 * FSDP_INVALID_STATE: the client holds none. The block is given back even when
 * recording the event fails. */
FSDP_NODISCARD fsdp_status fsdp_arena_give(fsdp_arena *arena, int64_t client,
                                           fsdp_lane lane, fsdp_error *error);

/* The block that `client` holds, or NULL. Borrowed. */
void *fsdp_arena_data(const fsdp_arena *arena, int64_t client);

/*
 * Call it between steps, when the lanes have joined: neighbours in time are
 * forgotten. Assigns a block to every client that ever took one, allocates what
 * is missing and frees what is left over. Does nothing when the plan still
 * holds or when a block is held. Where the device has no memory for new blocks,
 * the old ones are freed first. After a failure the arena has no plan.
 */
FSDP_NODISCARD fsdp_status fsdp_arena_plan(fsdp_arena *arena,
                                           fsdp_error *error);

/* Frees all blocks that are not held; later takes allocate again. Returns
 * whether there were any. May block the host. Cannot fail. */
bool fsdp_arena_trim(fsdp_arena *arena);

/* Cannot fail. */
void fsdp_arena_get_stats(const fsdp_arena *arena, fsdp_arena_stats *stats);

#ifdef __cplusplus
}
#endif
#endif /* FSDP_ARENA_ARENA_H */
