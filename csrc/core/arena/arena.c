/*
 * Arena: hands blocks to clients, and lets them go as early as the order of the
 * lanes allows. See Note [Blocks of a step] and Note [Memory on a host].
 */
#include "arena/arena.h"

#include <assert.h>
#include <inttypes.h>

#include "base/alloc.h"

enum { NONE = -1 };

typedef enum block_state {
  BLOCK_EMPTY = 0, /* this slot of the array has no block */
  BLOCK_HELD,      /* by a client */
  BLOCK_RESERVED,
  BLOCK_LEAVING,
  BLOCK_FREE /* on a host */
} block_state;

typedef struct block {
  block_state state;
  void *data;
  int64_t nbytes;
  /* What the next use waits for: after the last one; of a reserved block,
   * COMPUTE's work when it was allocated. Stays with the slot; NULL: never
   * needed. */
  fsdp_event *event;
  bool is_fresh;    /* nobody used it yet */
  int64_t given_at; /* position in the sequence of gives */
} block;

typedef struct client_state {
  int64_t nbytes;
  int64_t held; /* block or NONE */
} client_state;

struct fsdp_arena {
  const fsdp_device_ops *ops;
  block *blocks;
  size_t num_slots; /* of `blocks`, empty ones included */
  size_t blocks_capacity;
  client_state *clients;
  size_t clients_capacity;
  int64_t num_gives;
  fsdp_arena_stats stats;
};

/* --- Blocks -------------------------------------------------------------- */

/* Frees a block, after what COMPUTE does now. */
static void remove_block(fsdp_arena *arena, block *target) {
  const fsdp_device_ops *ops = arena->ops;
  ops->block_free(ops->context, target->data, target->nbytes);
  arena->stats.num_frees++;
  arena->stats.num_blocks--;
  arena->stats.nbytes -= target->nbytes;
  *target = (block){.event = target->event};
}

/* COMPUTE waits for the block's last use, and it goes. */
static fsdp_status let_go(fsdp_arena *arena, block *target, fsdp_error *error) {
  const fsdp_device_ops *ops = arena->ops;
  fsdp_status status = FSDP_OK;
  if (!target->is_fresh) {
    FSDP_TRY(
        ops->event_wait(ops->context, FSDP_LANE_COMPUTE, target->event, error));
  }
  remove_block(arena, target);
done:
  return status;
}

/* Lets all blocks of one state go, up to the first failure. */
static fsdp_status let_all_go(fsdp_arena *arena, block_state state,
                              fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  for (size_t i = 0; i < arena->num_slots; i++) {
    if (arena->blocks[i].state != state) continue;
    FSDP_TRY(let_go(arena, &arena->blocks[i], error));
  }
done:
  return status;
}

/* The index of a slot without a block, which has an event. */
static fsdp_status find_slot(fsdp_arena *arena, size_t *slot,
                             fsdp_error *error) {
  const fsdp_device_ops *ops = arena->ops;
  fsdp_status status = FSDP_OK;
  void *blocks = arena->blocks;
  size_t i = 0;
  while (i < arena->num_slots && arena->blocks[i].state != BLOCK_EMPTY) i++;
  if (!fsdp_grow(&blocks, &arena->blocks_capacity, i + 1,
                 sizeof *arena->blocks)) {
    return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY,
                     "out of host memory for a list of %zu blocks", i + 1);
  }
  arena->blocks = blocks;
  if (i == arena->num_slots) {
    arena->blocks[i] = (block){.event = NULL};
    arena->num_slots++;
  }
  if (arena->blocks[i].event == NULL) {
    FSDP_TRY(ops->event_create(ops->context, &arena->blocks[i].event, error));
  }
  *slot = i;
done:
  return status;
}

/* Allocates a block that is to be in `state`. */
static fsdp_status add_block(fsdp_arena *arena, int64_t nbytes,
                             block_state state, int64_t *slot,
                             fsdp_error *error) {
  const fsdp_device_ops *ops = arena->ops;
  void *data = NULL;
  size_t i = 0;
  fsdp_status status = FSDP_OK;

  FSDP_TRY(find_slot(arena, &i, error));
  status = ops->block_alloc(ops->context, nbytes, &data, error);
  if (status == FSDP_OUT_OF_MEMORY && fsdp_arena_trim(arena)) {
    status = ops->block_alloc(ops->context, nbytes, &data, error);
  }
  if (status != FSDP_OK) goto done;

  arena->blocks[i] = (block){.state = state,
                             .data = data,
                             .nbytes = nbytes,
                             .event = arena->blocks[i].event,
                             .is_fresh = true};
  arena->stats.num_allocs++;
  arena->stats.num_blocks++;
  /* Cannot overflow: all blocks fit on one device. */
  arena->stats.nbytes += nbytes;
  if (arena->stats.nbytes > arena->stats.peak_nbytes) {
    arena->stats.peak_nbytes = arena->stats.nbytes;
  }
  *slot = (int64_t)i;
done:
  return status;
}

/* The newest block of the state and the exact size, or NONE. */
static int64_t find_block(const fsdp_arena *arena, block_state state,
                          int64_t nbytes) {
  int64_t newest = NONE;
  for (size_t i = 0; i < arena->num_slots; i++) {
    const block *candidate = &arena->blocks[i];
    if (candidate->state != state || candidate->nbytes != nbytes) continue;
    if (newest == NONE ||
        candidate->given_at > arena->blocks[newest].given_at) {
      newest = (int64_t)i;
    }
  }
  return newest;
}

/* On a host: frees all free blocks as large as this one, but for it. */
static void keep_only(fsdp_arena *arena, const block *kept) {
  for (size_t i = 0; i < arena->num_slots; i++) {
    block *other = &arena->blocks[i];
    if (other->state != BLOCK_FREE || other == kept) continue;
    if (other->nbytes == kept->nbytes) {
      /* Whoever uses it next reports it. */
      FSDP_IGNORE(let_go(arena, other, NULL));
    }
  }
}

/* A block of `nbytes`, which `lane` may use. */
static fsdp_status find_or_add_block(fsdp_arena *arena, int64_t nbytes,
                                     fsdp_lane lane, int64_t *slot,
                                     fsdp_error *error) {
  const fsdp_device_ops *ops = arena->ops;
  const bool is_host = ops->is_host;
  const bool is_compute = lane == FSDP_LANE_COMPUTE;
  fsdp_status status = FSDP_OK;

  if (is_host || !is_compute) {
    *slot = find_block(arena, is_host ? BLOCK_FREE : BLOCK_RESERVED, nbytes);
  } else {
    FSDP_TRY(fsdp_arena_settle(arena, error));
    *slot = NONE;
  }
  const bool is_new = *slot == NONE;
  if (is_new) {
    if (is_host) FSDP_IGNORE(let_all_go(arena, BLOCK_FREE, NULL));
    if (!is_compute) fsdp_arena_unreserve(arena);
    FSDP_TRY(add_block(arena, nbytes, BLOCK_HELD, slot, error));
    if (is_host || is_compute) return FSDP_OK;
    status = ops->event_record(ops->context, arena->blocks[*slot].event,
                               FSDP_LANE_COMPUTE, error);
  }
  if (status == FSDP_OK) {
    status =
        ops->event_wait(ops->context, lane, arena->blocks[*slot].event, error);
  }
  if (status != FSDP_OK && is_new) remove_block(arena, &arena->blocks[*slot]);
done:
  return status;
}

/* --- Public -------------------------------------------------------------- */

fsdp_status fsdp_arena_create(const fsdp_device_ops *ops, fsdp_arena **arena,
                              fsdp_error *error) {
  fsdp_arena *self = fsdp_calloc(1, sizeof *self);
  if (self == NULL) {
    return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY,
                     "out of host memory while creating the arena");
  }
  self->ops = ops;
  *arena = self;
  return FSDP_OK;
}

void fsdp_arena_destroy(fsdp_arena *arena) {
  if (arena == NULL) return;
  for (size_t i = 0; i < arena->num_slots; i++) {
    block *each = &arena->blocks[i];
    if (each->state == BLOCK_LEAVING || each->state == BLOCK_FREE) {
      FSDP_IGNORE(let_go(arena, each, NULL));
    }
    if (each->state != BLOCK_EMPTY) remove_block(arena, each);
    if (each->event != NULL) {
      arena->ops->event_destroy(arena->ops->context, each->event);
    }
  }
  fsdp_free(arena->clients);
  fsdp_free(arena->blocks);
  fsdp_free(arena);
}

fsdp_status fsdp_arena_add_client(fsdp_arena *arena, int64_t nbytes,
                                  int64_t *client, fsdp_error *error) {
  const int64_t id = arena->stats.num_clients;
  if (nbytes < 1) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "arena client %" PRId64 " needs %" PRId64
                     " bytes, must be >= 1",
                     id, nbytes);
  }
  void *clients = arena->clients;
  if (!fsdp_grow(&clients, &arena->clients_capacity, (size_t)id + 1,
                 sizeof *arena->clients)) {
    return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY,
                     "out of host memory while adding arena client %" PRId64,
                     id);
  }
  arena->clients = clients;
  arena->clients[id] = (client_state){.nbytes = nbytes, .held = NONE};
  arena->stats.num_clients++;
  *client = id;
  return FSDP_OK;
}

fsdp_status fsdp_arena_resize_client(fsdp_arena *arena, int64_t client,
                                     int64_t nbytes, fsdp_error *error) {
  assert(client >= 0 && client < arena->stats.num_clients && nbytes >= 1);
  client_state *resized = &arena->clients[client];

  if (resized->held != NONE) {
    return FSDP_FAIL(
        error, FSDP_INVALID_STATE,
        "arena client %" PRId64 " cannot be resized: it holds a block", client);
  }
  resized->nbytes = nbytes;
  return FSDP_OK;
}

fsdp_status fsdp_arena_take(fsdp_arena *arena, int64_t client, fsdp_lane lane,
                            void **data, fsdp_error *error) {
  assert(client >= 0 && client < arena->stats.num_clients);
  client_state *taker = &arena->clients[client];
  int64_t slot = NONE;
  fsdp_status status = FSDP_OK;

  if (taker->held != NONE) {
    return FSDP_FAIL(error, FSDP_INVALID_STATE,
                     "arena client %" PRId64 " already holds a block", client);
  }
  FSDP_TRY(find_or_add_block(arena, taker->nbytes, lane, &slot, error));
  block *taken = &arena->blocks[slot];
  taken->state = BLOCK_HELD;
  taken->is_fresh = false;
  taker->held = slot;
  arena->stats.held_nbytes += taken->nbytes;
  *data = taken->data;
done:
  return status;
}

fsdp_status fsdp_arena_give(fsdp_arena *arena, int64_t client, fsdp_lane lane,
                            fsdp_error *error) {
  const fsdp_device_ops *ops = arena->ops;
  assert(client >= 0 && client < arena->stats.num_clients);
  client_state *giver = &arena->clients[client];

  if (giver->held == NONE) {
    return FSDP_FAIL(error, FSDP_INVALID_STATE,
                     "arena client %" PRId64 " holds no block to give back",
                     client);
  }

  block *given = &arena->blocks[giver->held];
  giver->held = NONE;
  given->given_at = ++arena->num_gives;
  arena->stats.held_nbytes -= given->nbytes;
  if (!ops->is_host && lane == FSDP_LANE_COMPUTE) {
    remove_block(arena, given);
    return FSDP_OK;
  }
  given->state = ops->is_host ? BLOCK_FREE : BLOCK_LEAVING;
  if (ops->is_host) keep_only(arena, given);
  return ops->event_record(ops->context, given->event, lane, error);
}

void *fsdp_arena_data(const fsdp_arena *arena, int64_t client) {
  assert(client >= 0 && client < arena->stats.num_clients);
  const int64_t slot = arena->clients[client].held;
  return slot == NONE ? NULL : arena->blocks[slot].data;
}

fsdp_status fsdp_arena_reserve(fsdp_arena *arena, int64_t nbytes,
                               fsdp_error *error) {
  const fsdp_device_ops *ops = arena->ops;
  int64_t slot = NONE;
  FSDP_LOCAL_ERROR(local);

  if (ops->is_host || find_block(arena, BLOCK_RESERVED, nbytes) != NONE) {
    return FSDP_OK;
  }
  fsdp_arena_unreserve(arena);
  fsdp_status status = add_block(arena, nbytes, BLOCK_RESERVED, &slot, &local);
  if (status == FSDP_OUT_OF_MEMORY) return FSDP_OK; /* its gather tries again */
  if (status == FSDP_OK) {
    status = ops->event_record(ops->context, arena->blocks[slot].event,
                               FSDP_LANE_COMPUTE, &local);
  }
  if (status != FSDP_OK) {
    fsdp_arena_unreserve(arena);
    if (error != NULL) *error = local;
  }
  return status;
}

void fsdp_arena_unreserve(fsdp_arena *arena) {
  /* Fresh: nothing can fail. */
  FSDP_IGNORE(let_all_go(arena, BLOCK_RESERVED, NULL));
}

fsdp_status fsdp_arena_settle(fsdp_arena *arena, fsdp_error *error) {
  return let_all_go(arena, arena->ops->is_host ? BLOCK_FREE : BLOCK_LEAVING,
                    error);
}

bool fsdp_arena_trim(fsdp_arena *arena) {
  const int64_t num_frees = arena->stats.num_frees;
  fsdp_arena_unreserve(arena);
  /* Whoever waits next reports it. */
  FSDP_IGNORE(fsdp_arena_settle(arena, NULL));
  return arena->stats.num_frees > num_frees;
}

void fsdp_arena_get_stats(const fsdp_arena *arena, fsdp_arena_stats *stats) {
  *stats = arena->stats;
}
