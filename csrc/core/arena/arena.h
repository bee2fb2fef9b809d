/*
 * Arena: the blocks that hold unsharded parameters and gradients.
 *
 * A *client* takes a block when it needs memory and gives it back afterwards.
 * A unit's unsharded parameters are one client, its unsharded gradients are
 * another.
 *
 * Note [Blocks of a step]
 * On a device with streams a block lives as long as its client holds it, so
 * what only backward needs is not there in forward.
 * - Its memory comes from COMPUTE, the stream of the user's tensors, and goes
 *   back to it: what a unit leaves, activations can have, and the other way
 *   round. Memory that is used again is always behind COMPUTE's work so far.
 * - Another lane that takes a block waits for what COMPUTE has at that moment,
 *   because that work may still use the memory.
 * - The gather of a unit in forward must not wait for the unit before it. So
 *   its block is *reserved* one unit ahead, and it waits for what COMPUTE had
 *   then: beside what is kept there are the running unit and the next one. In
 *   backward a gather is issued one unit ahead, with the same effect.
 * - A block that is given back on COMPUTE goes at once. One that another lane
 *   uses last, a reduction's, *leaves*: it goes when COMPUTE next takes a block
 *   (the next unit's gradients are complete) or joins the reductions. COMPUTE
 *   then waits for its last use. So one unit's reduction runs beside the next
 *   unit's backward, and one gradient block exists at a time.
 * - The host decides all of this in the order of its calls. It waits for
 *   nothing, and memory is the same on every run.
 * - In a capture the same calls take memory of the graph, whose allocator keeps
 *   the addresses. No block is held where a capture begins or ends.
 *
 * Note [Memory on a host]
 * A host has no streams, and its allocator no cache: a block that is given back
 * is kept for the next client of its exact size; the one given back last is
 * still in the caches. If there is none, all free blocks are freed, so that
 * none of another size waits while one is allocated. One free block of a size
 * is enough for a backward: when accumulated gradients are reduced, a second
 * would only pile up. At the end of backward all free blocks go. The engine
 * takes and gives back as late and as early as it can: a gradient block when a
 * unit's gradients are complete, back when its reduction has ended, before the
 * next unit is gathered (Note [Least memory in backward] in backward.c).
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
 * Gives `client` a block for work on `lane`, which waits until it may use it.
 * data [out] borrowed until the block is given back.
 *
 * FSDP_INVALID_STATE  the client holds a block already.
 * FSDP_OUT_OF_MEMORY, or what the port reports.
 */
FSDP_NODISCARD fsdp_status fsdp_arena_take(fsdp_arena *arena, int64_t client,
                                           fsdp_lane lane, void **data,
                                           fsdp_error *error);

/* Gives the client's block back after the work now on `lane`; what other lanes
 * did with it, COMPUTE or `lane` has waited for. FSDP_INVALID_STATE: the client
 * holds none. The block is given back even if recording the event fails. */
FSDP_NODISCARD fsdp_status fsdp_arena_give(fsdp_arena *arena, int64_t client,
                                           fsdp_lane lane, fsdp_error *error);

/* The block that `client` holds, or NULL. Borrowed. */
void *fsdp_arena_data(const fsdp_arena *arena, int64_t client);

/* Allocates a block of `nbytes` for the next take of this size that is not on
 * COMPUTE: it waits for the work that COMPUTE has now. Any other take of that
 * kind drops it. Where memory is short there is none. Nothing on a host. */
FSDP_NODISCARD fsdp_status fsdp_arena_reserve(fsdp_arena *arena, int64_t nbytes,
                                              fsdp_error *error);
/* Drops what is reserved. Cannot fail. */
void fsdp_arena_unreserve(fsdp_arena *arena);

/* Lets the blocks go that are leaving: COMPUTE waits for their last uses. On a
 * host the free blocks go. */
FSDP_NODISCARD fsdp_status fsdp_arena_settle(fsdp_arena *arena,
                                             fsdp_error *error);

/* Lets all blocks go that nobody holds, for memory is short. Returns whether
 * that left any memory. May block the host. Cannot fail. */
bool fsdp_arena_trim(fsdp_arena *arena);

/* Cannot fail. */
void fsdp_arena_get_stats(const fsdp_arena *arena, fsdp_arena_stats *stats);

#ifdef __cplusplus
}
#endif
#endif /* FSDP_ARENA_ARENA_H */
