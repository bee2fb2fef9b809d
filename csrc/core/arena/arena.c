/*
 * Arena: hands blocks to clients, records which clients may not share one, and
 * fixes the assignment by graph colouring. See Note [Block assignment].
 */
#include "arena/arena.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "arena/arena_priv.h"
#include "base/alloc.h"

enum { NONE = -1, WORD_BITS = 64 };

typedef struct block {
  void *data; /* NULL: this slot of the array is empty */
  int64_t nbytes;
  fsdp_event *free_event;
  bool was_given;   /* free_event has been recorded */
  int64_t given_at; /* position in the sequence of gives; 0: never */
  int64_t holder;   /* client or NONE */
  bool is_claimed;  /* by a colour of the plan in progress */
} block;

typedef struct client_state {
  int64_t nbytes;
  int64_t held;    /* block or NONE */
  int64_t planned; /* block or NONE */
  int64_t colour;  /* in the plan in progress, or NONE */
  bool ever_took;
} client_state;

struct fsdp_arena {
  const fsdp_device_ops *ops;
  block *blocks;
  size_t num_slots; /* of `blocks`, empty ones included */
  size_t blocks_capacity;
  client_state *clients;
  size_t clients_capacity;
  /* Rows of row_words words, one bit per client; room for row_words *
   * WORD_BITS rows. The client that took later carries the bit. */
  uint64_t *conflicts;
  uint64_t *holders; /* one such row: the clients that hold a block now */
  size_t row_words;
  int64_t last_taker;         /* for an all-gather; client or NONE */
  int64_t last_compute_giver; /* gave back after compute; likewise */
  int64_t last_async_giver;   /* gave back after a collective; likewise */
  int64_t num_gives;
  int64_t num_held;
  int64_t num_pins;
  bool is_dirty;          /* fsdp_arena_plan() has something to do */
  bool left_memory;       /* a block was freed since the last memory_release */
  int64_t num_plan_steps; /* see arena_priv.h */
  fsdp_arena_stats stats;
};

/* --- Conflicts ----------------------------------------------------------- */

static bool row_has(const uint64_t *row, int64_t client) {
  return (row[client / WORD_BITS] >> (client % WORD_BITS) & 1) != 0;
}

static void row_flip(uint64_t *row, int64_t client) {
  row[client / WORD_BITS] ^= UINT64_C(1) << (client % WORD_BITS);
}

static uint64_t *conflict_row(const fsdp_arena *arena, int64_t client) {
  return arena->conflicts + (size_t)client * arena->row_words;
}

static bool is_conflict(const fsdp_arena *arena, int64_t a, int64_t b) {
  return row_has(conflict_row(arena, a), b) ||
         row_has(conflict_row(arena, b), a);
}

/* Records that `taker` may not share a block with `other`. */
static void learn_conflict(fsdp_arena *arena, int64_t taker, int64_t other) {
  if (other == NONE || other == taker || is_conflict(arena, taker, other)) {
    return;
  }
  row_flip(conflict_row(arena, taker), other);
  const int64_t planned = arena->clients[taker].planned;
  if (planned != NONE && planned == arena->clients[other].planned) {
    arena->is_dirty = true;
  }
}

/* Records the conflicts of `taker`: with all holders, and with its neighbours
 * in time (Note [Block assignment] in arena.h). One pass over a row instead of
 * a loop over clients. */
static void learn_conflicts(fsdp_arena *arena, int64_t taker) {
  uint64_t *row = conflict_row(arena, taker);
  for (size_t i = 0; i < arena->row_words; i++) row[i] |= arena->holders[i];
  learn_conflict(arena, taker, arena->last_async_giver);
  if (arena->last_compute_giver == arena->last_taker) {
    learn_conflict(arena, taker, arena->last_compute_giver);
  }
}

/* Makes room for one more client's row and column. */
static bool grow_conflicts(fsdp_arena *arena) {
  const size_t num_clients = (size_t)arena->stats.num_clients;
  const size_t row_words = arena->row_words == 0 ? 1 : 2 * arena->row_words;
  if (num_clients < arena->row_words * WORD_BITS) return true;

  uint64_t *conflicts =
      fsdp_calloc(row_words * row_words * WORD_BITS, sizeof *conflicts);
  uint64_t *holders = fsdp_calloc(row_words, sizeof *holders);
  if (conflicts == NULL || holders == NULL) {
    fsdp_free(conflicts);
    fsdp_free(holders);
    return false;
  }
  const size_t row_nbytes = arena->row_words * sizeof *conflicts;
  for (size_t i = 0; i < num_clients; i++) {
    memcpy(conflicts + i * row_words, conflict_row(arena, (int64_t)i),
           row_nbytes);
  }
  if (num_clients > 0) memcpy(holders, arena->holders, row_nbytes);
  fsdp_free(arena->conflicts);
  fsdp_free(arena->holders);
  arena->conflicts = conflicts;
  arena->holders = holders;
  arena->row_words = row_words;
  return true;
}

/* --- Blocks -------------------------------------------------------------- */

/* Allocates a block that nobody holds. slot [out] its place in `blocks`. */
static fsdp_status add_block(fsdp_arena *arena, int64_t nbytes, int64_t *slot,
                             fsdp_error *error) {
  const fsdp_device_ops *ops = arena->ops;
  fsdp_event *free_event = NULL;
  void *data = NULL;
  void *blocks = arena->blocks;
  fsdp_status status = FSDP_OK;

  size_t i = 0;
  while (i < arena->num_slots && arena->blocks[i].data != NULL) i++;
  if (!fsdp_grow(&blocks, &arena->blocks_capacity, i + 1,
                 sizeof *arena->blocks)) {
    return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY,
                     "out of host memory for a list of %zu blocks", i + 1);
  }
  arena->blocks = blocks;

  FSDP_TRY(ops->event_create(ops->context, &free_event, error));
  FSDP_TRY(ops->block_alloc(ops->context, nbytes, &data, error));

  if (i == arena->num_slots) arena->num_slots++;
  arena->blocks[i] = (block){
      .data = data, .nbytes = nbytes, .free_event = free_event, .holder = NONE};
  free_event = NULL;
  arena->stats.num_allocs++;
  arena->stats.num_blocks++;
  /* Cannot overflow: all blocks fit on one device. */
  arena->stats.nbytes += nbytes;
  if (arena->stats.nbytes > arena->stats.peak_nbytes) {
    arena->stats.peak_nbytes = arena->stats.nbytes;
  }
  *slot = (int64_t)i;
done:
  if (free_event != NULL) ops->event_destroy(ops->context, free_event);
  return status;
}

/* Frees a block and removes it from the plan. */
static void remove_block(fsdp_arena *arena, int64_t slot) {
  const fsdp_device_ops *ops = arena->ops;
  block *target = &arena->blocks[slot];
  ops->block_free(ops->context, target->data, target->nbytes,
                  target->was_given ? target->free_event : NULL);
  ops->event_destroy(ops->context, target->free_event);
  arena->left_memory = true;
  arena->stats.num_frees++;
  arena->stats.num_blocks--;
  arena->stats.nbytes -= target->nbytes;
  *target = (block){.holder = NONE};
  for (int64_t i = 0; i < arena->stats.num_clients; i++) {
    if (arena->clients[i].planned != slot) continue;
    arena->clients[i].planned = NONE;
    arena->is_dirty = true;
  }
}

/* See Note [Memory that blocks leave] in arena.h. */
static void release_memory(fsdp_arena *arena) {
  const fsdp_device_ops *ops = arena->ops;
  if (!arena->left_memory) return;
  arena->left_memory = false;
  if (ops->memory_release != NULL) ops->memory_release(ops->context);
}

/* Frees every block that nobody holds, unless the arena is pinned. */
static void remove_free_blocks(fsdp_arena *arena) {
  if (arena->num_pins > 0) return;
  for (size_t i = 0; i < arena->num_slots; i++) {
    const block *candidate = &arena->blocks[i];
    if (candidate->data == NULL || candidate->holder != NONE) continue;
    remove_block(arena, (int64_t)i);
  }
}

/* The free block that fits and was given back longest ago, or NONE; on a host
 * that of the exact size that was given back last. */
static int64_t find_free_block(const fsdp_arena *arena, int64_t nbytes) {
  const bool wants_last = arena->ops->is_host;
  int64_t best = NONE;
  for (size_t i = 0; i < arena->num_slots; i++) {
    const block *candidate = &arena->blocks[i];
    if (candidate->data == NULL || candidate->holder != NONE ||
        candidate->nbytes < nbytes ||
        (wants_last && candidate->nbytes > nbytes)) {
      continue;
    }
    const bool is_later =
        best != NONE && candidate->given_at > arena->blocks[best].given_at;
    if (best == NONE || is_later == wants_last) best = (int64_t)i;
  }
  return best;
}

/* On a host: frees all free blocks as large as block `slot`, but for it. */
static void keep_only(fsdp_arena *arena, int64_t slot) {
  const int64_t nbytes = arena->blocks[slot].nbytes;
  for (size_t i = 0; i < arena->num_slots; i++) {
    const block *candidate = &arena->blocks[i];
    if (candidate->data == NULL || candidate->holder != NONE) continue;
    if (candidate->nbytes == nbytes && (int64_t)i != slot) {
      remove_block(arena, (int64_t)i);
    }
  }
}

/* A block for a client whose planned block is missing or held. */
static fsdp_status find_or_add_block(fsdp_arena *arena, int64_t nbytes,
                                     int64_t *slot, fsdp_error *error) {
  const int64_t found = find_free_block(arena, nbytes);
  if (found != NONE) {
    *slot = found;
    return FSDP_OK;
  }
  remove_free_blocks(arena); /* none of them fits */
  return add_block(arena, nbytes, slot, error);
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
  self->last_taker = NONE;
  self->last_compute_giver = NONE;
  self->last_async_giver = NONE;
  *arena = self;
  return FSDP_OK;
}

void fsdp_arena_destroy(fsdp_arena *arena) {
  if (arena == NULL) return;
  for (size_t i = 0; i < arena->num_slots; i++) {
    if (arena->blocks[i].data != NULL) remove_block(arena, (int64_t)i);
  }
  fsdp_free(arena->holders);
  fsdp_free(arena->conflicts);
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
    goto no_memory;
  }
  arena->clients = clients;
  if (!grow_conflicts(arena)) goto no_memory;

  arena->clients[id] = (client_state){
      .nbytes = nbytes, .held = NONE, .planned = NONE, .colour = NONE};
  arena->stats.num_clients++;
  *client = id;
  return FSDP_OK;

no_memory:
  return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY,
                   "out of host memory while adding arena client %" PRId64, id);
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
  resized->planned = NONE; /* its block may be too small */
  arena->is_dirty = true;
  return FSDP_OK;
}

fsdp_status fsdp_arena_take(fsdp_arena *arena, int64_t client, fsdp_lane lane,
                            void **data, fsdp_error *error) {
  const fsdp_device_ops *ops = arena->ops;
  assert(client >= 0 && client < arena->stats.num_clients);
  client_state *taker = &arena->clients[client];
  fsdp_status status = FSDP_OK;

  if (taker->held != NONE) {
    return FSDP_FAIL(error, FSDP_INVALID_STATE,
                     "arena client %" PRId64 " already holds a block", client);
  }

  int64_t slot = taker->planned;
  const bool is_planned = slot != NONE && arena->blocks[slot].holder == NONE;
  if (!is_planned) {
    FSDP_TRY(find_or_add_block(arena, taker->nbytes, &slot, error));
  }
  block *taken = &arena->blocks[slot];
  if (taken->was_given) {
    FSDP_TRY(ops->event_wait(ops->context, lane, taken->free_event, error));
  }

  if (!arena->ops->is_host) learn_conflicts(arena, client);
  if (lane != FSDP_LANE_COMPUTE) arena->last_taker = client;
  if (!is_planned) arena->is_dirty = true;
  taker->ever_took = true;
  taker->held = slot;
  taken->holder = client;
  row_flip(arena->holders, client);
  arena->num_held++;
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

  const int64_t slot = giver->held;
  block *given = &arena->blocks[slot];
  giver->held = NONE;
  given->holder = NONE;
  given->was_given = true;
  given->given_at = ++arena->num_gives;
  row_flip(arena->holders, client);
  arena->num_held--;
  arena->stats.held_nbytes -= given->nbytes;
  if (ops->is_host) keep_only(arena, slot);
  if (lane == FSDP_LANE_COMPUTE) {
    arena->last_compute_giver = client;
  } else {
    arena->last_async_giver = client;
  }
  return ops->event_record(ops->context, given->free_event, lane, error);
}

void *fsdp_arena_data(const fsdp_arena *arena, int64_t client) {
  assert(client >= 0 && client < arena->stats.num_clients);
  const int64_t slot = arena->clients[client].held;
  return slot == NONE ? NULL : arena->blocks[slot].data;
}

void fsdp_arena_pin(fsdp_arena *arena) {
  arena->num_pins++;
}

void fsdp_arena_unpin(fsdp_arena *arena) {
  assert(arena->num_pins > 0);
  arena->num_pins--;
}

fsdp_status fsdp_arena_renew_events(fsdp_arena *arena, fsdp_lane lane,
                                    fsdp_error *error) {
  const fsdp_device_ops *ops = arena->ops;
  fsdp_status status = FSDP_OK;
  for (size_t i = 0; i < arena->num_slots; i++) {
    block *renewed = &arena->blocks[i];
    if (renewed->data == NULL || renewed->holder != NONE) continue;
    FSDP_TRY(ops->event_record(ops->context, renewed->free_event, lane, error));
    renewed->was_given = true;
  }
done:
  return status;
}

bool fsdp_arena_trim(fsdp_arena *arena) {
  const int64_t num_frees = arena->stats.num_frees;
  remove_free_blocks(arena);
  if (arena->stats.num_frees == num_frees) return false;
  release_memory(arena);
  return true;
}

void fsdp_arena_get_stats(const fsdp_arena *arena, fsdp_arena_stats *stats) {
  *stats = arena->stats;
}

int64_t fsdp_arena_priv_plan_steps(const fsdp_arena *arena) {
  return arena->num_plan_steps;
}

/* --- Plan ---------------------------------------------------------------- */

/* One client to colour. */
typedef struct coloured {
  int64_t nbytes;
  int64_t client;
} coloured;

/* One colour: clients that share a block of `nbytes`. */
typedef struct colour_class {
  int64_t nbytes;
  int64_t slot;        /* block or NONE */
  int64_t refused_for; /* the client that conflicts with it, or NONE */
  bool is_new;         /* allocated for this plan */
} colour_class;

/* qsort order: largest first, ties by client. */
static int compare_coloured(const void *left, const void *right) {
  const coloured *a = left;
  const coloured *b = right;
  if (a->nbytes != b->nbytes) return a->nbytes > b->nbytes ? -1 : 1;
  return a->client < b->client ? -1 : 1;
}

/* The first client >= `from` with a bit in the row of `client`, or NONE. */
static int64_t next_conflict(fsdp_arena *arena, int64_t client, int64_t from) {
  const uint64_t *row = conflict_row(arena, client);
  for (size_t i = (size_t)from / WORD_BITS; i < arena->row_words; i++) {
    const int64_t begin = (int64_t)i * WORD_BITS;
    const uint64_t later =
        from > begin ? ~UINT64_C(0) << (from - begin) : ~UINT64_C(0);
    arena->num_plan_steps++;
    if ((row[i] & later) != 0) return begin + __builtin_ctzll(row[i] & later);
  }
  return NONE;
}

/* Enters each conflict in both rows, so that one row has all of a client's. */
static void make_symmetric(fsdp_arena *arena) {
  for (int64_t i = 0; i < arena->stats.num_clients; i++) {
    for (int64_t other = next_conflict(arena, i, 0); other != NONE;
         other = next_conflict(arena, i, other + 1)) {
      if (!row_has(conflict_row(arena, other), i)) {
        row_flip(conflict_row(arena, other), i);
      }
    }
  }
}

/* Gives each item the lowest colour without a conflict. Returns the number of
 * colours. Items are largest first, so the first of a colour sets its size. */
static int64_t colour_items(fsdp_arena *arena, const coloured *items,
                            int64_t num_items, colour_class *colours) {
  int64_t num_colours = 0;
  for (int64_t i = 0; i < num_items; i++) {
    const int64_t client = items[i].client;
    int64_t chosen = 0;
    for (int64_t other = next_conflict(arena, client, 0); other != NONE;
         other = next_conflict(arena, client, other + 1)) {
      const int64_t colour = arena->clients[other].colour;
      if (colour != NONE) colours[colour].refused_for = client;
    }
    while (chosen < num_colours && colours[chosen].refused_for == client) {
      chosen++;
      arena->num_plan_steps++;
    }
    arena->clients[client].colour = chosen;
    if (chosen == num_colours) {
      colours[num_colours++] = (colour_class){
          .nbytes = items[i].nbytes, .slot = NONE, .refused_for = NONE};
    }
  }
  return num_colours;
}

/* Claims an existing block of exactly the right size for each colour, or
 * allocates one. On failure it frees what it allocated. Colours are largest
 * first, so each search continues where the last one of its size stopped. */
static fsdp_status claim_blocks(fsdp_arena *arena, colour_class *colours,
                                int64_t num_colours, fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  size_t next = 0;
  for (size_t j = 0; j < arena->num_slots; j++) {
    arena->blocks[j].is_claimed = false;
  }
  for (int64_t i = 0; i < num_colours; i++) {
    if (i == 0 || colours[i].nbytes != colours[i - 1].nbytes) next = 0;
    for (; next < arena->num_slots && colours[i].slot == NONE; next++) {
      block *candidate = &arena->blocks[next];
      arena->num_plan_steps++;
      if (candidate->data == NULL || candidate->nbytes != colours[i].nbytes) {
        continue;
      }
      candidate->is_claimed = true;
      colours[i].slot = (int64_t)next;
    }
  }
  for (int64_t i = 0; i < num_colours; i++) {
    if (colours[i].slot != NONE) continue;
    FSDP_TRY(add_block(arena, colours[i].nbytes, &colours[i].slot, error));
    arena->blocks[colours[i].slot].is_claimed = true;
    colours[i].is_new = true;
  }
done:
  if (status != FSDP_OK) {
    for (int64_t i = 0; i < num_colours; i++) {
      if (colours[i].is_new) remove_block(arena, colours[i].slot);
    }
  }
  return status;
}

fsdp_status fsdp_arena_plan(fsdp_arena *arena, fsdp_error *error) {
  const int64_t num_clients = arena->stats.num_clients;
  coloured *items = NULL;
  colour_class *colours = NULL;
  int64_t num_items = 0;
  fsdp_status status = FSDP_OK;

  arena->last_taker = NONE;
  arena->last_compute_giver = NONE;
  arena->last_async_giver = NONE;
  if (arena->ops->is_host) {
    remove_free_blocks(arena);
    return FSDP_OK;
  }
  if (!arena->is_dirty || arena->num_held > 0 || arena->num_pins > 0) {
    return FSDP_OK;
  }
  arena->num_plan_steps = 0;

  items = fsdp_calloc((size_t)num_clients, sizeof *items);
  if (items == NULL) goto no_memory;
  colours = fsdp_calloc((size_t)num_clients, sizeof *colours);
  if (colours == NULL) goto no_memory;

  for (int64_t i = 0; i < num_clients; i++) {
    arena->clients[i].colour = NONE;
    if (!arena->clients[i].ever_took) continue;
    items[num_items++] =
        (coloured){.nbytes = arena->clients[i].nbytes, .client = i};
  }
  qsort(items, (size_t)num_items, sizeof *items, compare_coloured);
  make_symmetric(arena);
  const int64_t num_colours = colour_items(arena, items, num_items, colours);
  status = claim_blocks(arena, colours, num_colours, error);
  if (status == FSDP_OUT_OF_MEMORY && fsdp_arena_trim(arena)) {
    for (int64_t i = 0; i < num_colours; i++) {
      colours[i] = (colour_class){.nbytes = colours[i].nbytes, .slot = NONE};
    }
    status = claim_blocks(arena, colours, num_colours, error);
  }
  if (status != FSDP_OK) goto done;

  for (size_t i = 0; i < arena->num_slots; i++) {
    if (arena->blocks[i].data == NULL) continue;
    if (!arena->blocks[i].is_claimed) remove_block(arena, (int64_t)i);
  }
  for (int64_t i = 0; i < num_items; i++) {
    client_state *planned = &arena->clients[items[i].client];
    planned->planned = colours[planned->colour].slot;
  }
  arena->is_dirty = false;
  release_memory(arena);
  goto done;

no_memory:
  status = FSDP_FAIL(error, FSDP_OUT_OF_MEMORY,
                     "out of host memory while planning the blocks of %" PRId64
                     " arena clients",
                     num_clients);
done:
  fsdp_free(colours);
  fsdp_free(items);
  return status;
}
