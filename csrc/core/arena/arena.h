/*
 * Arena: the reusable blocks that hold unsharded parameters and gradients.
 * It bounds unsharded memory, so it is also the rate limiter.
 *
 * A *client* takes a block when it needs memory and gives it back afterwards.
 * A unit's unsharded parameters are one client, its unsharded gradients are
 * another. A block carries a free event, recorded on the lane that used it
 * last. The lane that takes the block waits for that event; the host does not.
 *
 * Note [Block assignment]
 * Before the first plan, a client takes the free block that fits and was given
 * back longest ago. If none fits, all free blocks are freed and a new block is
 * allocated.
 *
 * Meanwhile the arena records conflicts: pairs of clients that may not share a
 * block. Two clients conflict if they held blocks at the same time. They also
 * conflict if sharing would make one lane wait for another:
 * - one gave its block back behind a collective (its reduction may still run)
 *   and the other took a block next;
 * - one gave its block back behind compute, and the next all-gather took a
 *   block with no other all-gather between (the two should overlap).
 *
 * fsdp_arena_plan() colours the conflict graph, largest client first. Clients
 * of one colour share one block of the largest client's size for the rest of
 * the run. Addresses are then fixed and a step allocates nothing. If a client
 * finds its planned block held, because the order changed, it takes a block by
 * the first rule and the next plan starts anew.
 *
 * Note [Memory on a host]
 * A host has no streams: a block that is given back is free at once, and other
 * code can use its memory. There blocks are not kept for the run: less memory
 * at the peak, though a step allocates. A client takes the free block of its
 * exact size that was given back last, which is still in the caches. If there
 * is none, all free blocks are freed, so that none of another size waits while
 * one is allocated. One free block of a size is enough for a backward: when
 * accumulated gradients are reduced, a second would only pile up. At the end of
 * backward the plan frees all that nobody holds. The engine takes and gives
 * back as late and as early as it can: a gradient block when a unit's gradients
 * are complete, back when its reduction has ended, before the next unit is
 * gathered (Note [Least memory in backward] in backward.c).
 *
 * Note [Memory that blocks leave]
 * Blocks lie in memory that the device's allocator keeps apart from the user's
 * tensors (Note [Streams of blocks] in provider.cpp). Memory that a plan no
 * longer needs would stay there unused, so the plan gives it back, once. When
 * the device runs out of memory, free blocks are freed before the caller fails.
 *
 * Note [Pinned blocks]
 * A captured step has the addresses of blocks in its graph. While the arena is
 * pinned it frees no block and makes no plan, so that they stay what they are;
 * clients still share them with eager steps, in the order of the lanes.
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
  int64_t held_nbytes; /* of blocks that clients hold now */
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

/* Adds a client that needs `nbytes` (>= 1) per block. client [out] its id: 0,
 * 1, 2, ... FSDP_INVALID_ARGUMENT, FSDP_OUT_OF_MEMORY. */
FSDP_NODISCARD fsdp_status fsdp_arena_add_client(fsdp_arena *arena,
                                                 int64_t nbytes,
                                                 int64_t *client,
                                                 fsdp_error *error);

/* Changes the client's size to `nbytes` (>= 1), from its next take on.
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

/* Gives the client's block back. It is free once the work now on `lane` is
 * done. FSDP_INVALID_STATE: the client holds none. The block is given back even
 * if recording the event fails. */
FSDP_NODISCARD fsdp_status fsdp_arena_give(fsdp_arena *arena, int64_t client,
                                           fsdp_lane lane, fsdp_error *error);

/* The block that `client` holds, or NULL. Borrowed. */
void *fsdp_arena_data(const fsdp_arena *arena, int64_t client);

/*
 * Assigns a block to every client that ever took one, allocates missing blocks
 * and frees unused ones. Call it between steps, when the lanes have joined.
 * Does nothing if the plan still holds or a block is held. If the device has no
 * memory for new blocks, the old ones are freed first. After a failure the
 * arena has no plan. On a host it frees the free blocks.
 */
FSDP_NODISCARD fsdp_status fsdp_arena_plan(fsdp_arena *arena,
                                           fsdp_error *error);

/* From now on no block is freed, until as many unpins. Then the device must
 * have done all that uses them behind the arena's back. Cannot fail. */
void fsdp_arena_pin(fsdp_arena *arena);
void fsdp_arena_unpin(fsdp_arena *arena);

/* Every block that nobody holds is free after the work now on `lane`, whatever
 * its free event said. */
FSDP_NODISCARD fsdp_status fsdp_arena_renew_events(fsdp_arena *arena,
                                                   fsdp_lane lane,
                                                   fsdp_error *error);

/* Frees all free blocks; later takes allocate again. Returns whether there were
 * any: none while it is pinned. May block the host. Cannot fail. */
bool fsdp_arena_trim(fsdp_arena *arena);

/* Cannot fail. */
void fsdp_arena_get_stats(const fsdp_arena *arena, fsdp_arena_stats *stats);

#ifdef __cplusplus
}
#endif
#endif /* FSDP_ARENA_ARENA_H */
