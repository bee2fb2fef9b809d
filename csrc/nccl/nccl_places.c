/*
 * Places: which memory of the arena's blocks each collective uses. A collective
 * is known by its unit, its arguments and the launch before it, which all
 * ranks have in common; the memory is this rank's own choice. See Note
 * [Symmetric windows] in nccl_windows.c.
 */
#include "base/alloc.h"
#include "nccl/nccl_priv.h"
#include "order/order.h"

/* A place that was used so often in a row is expected to stay. */
enum { STEADY_USES = 3, MAX_USES_NEEDED = 1024 };

/* Not symmetric: the launch before is folded with the launch. */
static uint64_t fold_number(uint64_t hash, uint64_t value) {
  hash = hash * UINT64_C(0x9e3779b97f4a7c15) + value;
  return hash ^ hash >> 32;
}

/* The launch that is about to be made, whatever came before. */
static uint64_t hash_launch(const fsdp_nccl_channel *channel) {
  uint64_t hash = fsdp_order_fold(FSDP_ORDER_FINGERPRINT, channel->label);
  hash = fold_number(hash, (uint64_t)channel->unit);
  for (size_t i = 0; i < channel->num_collectives; i++) {
    const fsdp_nccl_collective *each = &channel->collectives[i];
    hash = fold_number(hash, (uint64_t)each->kind);
    hash = fold_number(hash, (uint64_t)each->numel);
    hash = fold_number(hash, (uint64_t)each->dtype);
    hash = fold_number(hash, (uint64_t)each->root);
  }
  return hash;
}

/* The index of the place of `call`, or num_places. Launches come in the same
 * order again and again, so it is mostly the first one that is looked at. */
static size_t find(fsdp_nccl_windows *windows, uint64_t call) {
  for (size_t i = 0; i < windows->num_places; i++) {
    const size_t index = (windows->next_place + i) % windows->num_places;
    if (windows->places[index].call != call) continue;
    windows->next_place = index + 1;
    return index;
  }
  return windows->num_places;
}

static bool is_within(const fsdp_nccl_block *block, const char *data) {
  return data >= block->data && data < block->data + block->nbytes;
}

/* `data` if it is in a block, else NULL. */
static const char *in_blocks(fsdp_nccl_transport *transport, const char *data) {
  bool is_found = false;
  (void)pthread_mutex_lock(&transport->lock);
  for (size_t i = 0; i < transport->num_blocks && !is_found; i++) {
    is_found = is_within(&transport->blocks[i], data);
  }
  (void)pthread_mutex_unlock(&transport->lock);
  return is_found ? data : NULL;
}

/* `data` if it is in an open window, else NULL. */
static const char *in_windows(const fsdp_nccl_windows *windows,
                              const char *data) {
  for (size_t i = 0; i < windows->num_open; i++) {
    const fsdp_nccl_open_window *each = &windows->open[i];
    if (each->window != NULL && is_within(&each->block, data)) return data;
  }
  return NULL;
}

static const char *buffer_of(const fsdp_nccl_collective *collective) {
  return collective->kind == FSDP_NCCL_ALL_GATHER ? collective->receive
                                                  : collective->send;
}

static const char *input_of(const fsdp_nccl_transport *transport,
                            const fsdp_nccl_collective *collective) {
  const char *buffer = buffer_of(collective);
  if (collective->kind != FSDP_NCCL_ALL_GATHER) return buffer;
  const char *slot = buffer + collective->numel * (size_t)transport->rank;
  return collective->send == slot ? buffer : collective->send;
}

fsdp_status fsdp_nccl_priv_learn(fsdp_nccl_transport *transport,
                                 fsdp_channel index, bool *is_due,
                                 fsdp_error *error) {
  const fsdp_nccl_channel *channel = &transport->channels[index];
  fsdp_nccl_windows *windows = &transport->channels[index].windows;
  const uint64_t launch = hash_launch(channel);
  const uint64_t call = fold_number(windows->last_call, launch);
  *is_due = false;
  for (size_t i = 0; i < channel->num_collectives; i++) {
    const fsdp_nccl_collective *each = &channel->collectives[i];
    const size_t found = find(windows, fold_number(call, i));
    if (found == windows->num_places) {
      void *places = windows->places;
      const bool has_room = fsdp_grow(&places, &windows->place_capacity,
                                      found + 1, sizeof *windows->places);
      windows->places = places;
      if (!has_room) {
        return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY,
                         "out of host memory for a list of %zu collectives",
                         found + 1);
      }
      windows->places[found] = (fsdp_nccl_place){.call = fold_number(call, i)};
      windows->num_places++;
      windows->next_place = found + 1;
    }
    fsdp_nccl_place *place = &windows->places[found];
    const char *buffer = in_blocks(transport, buffer_of(each));
    const char *input = in_blocks(transport, input_of(transport, each));
    const bool is_same = place->buffer == buffer && place->input == input;
    place->buffer = buffer;
    place->input = input;
    place->num_same = is_same ? place->num_same + 1 : 1;
    if (++place->num_uses == windows->uses_needed) *is_due = true;
  }
  windows->last_call = launch;
  return FSDP_OK;
}

fsdp_nccl_verdict fsdp_nccl_priv_compare(fsdp_nccl_transport *transport,
                                         fsdp_channel index) {
  const fsdp_nccl_channel *channel = &transport->channels[index];
  fsdp_nccl_windows *windows = &transport->channels[index].windows;
  const uint64_t launch = hash_launch(channel);
  const uint64_t call = fold_number(windows->last_call, launch);
  fsdp_nccl_verdict verdict = FSDP_NCCL_AS_AGREED;
  for (size_t i = 0; i < channel->num_collectives; i++) {
    const fsdp_nccl_collective *each = &channel->collectives[i];
    const size_t found = find(windows, fold_number(call, i));
    if (found == windows->num_places || !windows->places[found].is_known) {
      return FSDP_NCCL_NEW_CALL;
    }
    const fsdp_nccl_place *place = &windows->places[found];
    if (place->buffer != in_windows(windows, buffer_of(each)) ||
        place->input != in_windows(windows, input_of(transport, each))) {
      verdict = FSDP_NCCL_OTHER_MEMORY;
    }
  }
  /* Otherwise it is learned next. */
  if (verdict == FSDP_NCCL_AS_AGREED) windows->last_call = launch;
  return verdict;
}

/* The number of the block of `data` in `open`, from 1, which it enters at its
 * first use; 0 for NULL. False when memory is out. */
static bool number_block(fsdp_nccl_transport *transport,
                         fsdp_nccl_windows *windows, const char *data,
                         size_t *number) {
  *number = 0;
  if (data == NULL) return true;
  for (size_t i = 0; i < windows->num_open; i++) {
    if (!is_within(&windows->open[i].block, data)) continue;
    *number = i + 1;
    return true;
  }
  void *open = windows->open;
  const bool has_room = fsdp_grow(&open, &windows->open_capacity,
                                  windows->num_open + 1, sizeof *windows->open);
  windows->open = open;
  if (!has_room) return false;
  (void)pthread_mutex_lock(&transport->lock);
  for (size_t i = 0; i < transport->num_blocks; i++) {
    if (!is_within(&transport->blocks[i], data)) continue;
    windows->open[windows->num_open] =
        (fsdp_nccl_open_window){.block = transport->blocks[i]};
    *number = ++windows->num_open;
  }
  (void)pthread_mutex_unlock(&transport->lock);
  return true; /* 0: the block is gone since, with its last use */
}

/* Folds in which block `data` is in, and where. */
static bool fold_place(fsdp_nccl_transport *transport,
                       fsdp_nccl_windows *windows, const char *data,
                       uint64_t *digest) {
  size_t number;
  if (!number_block(transport, windows, data, &number)) return false;
  *digest = fold_number(*digest, number);
  if (number > 0) {
    const char *begin = windows->open[number - 1].block.data;
    *digest = fold_number(*digest, (uint64_t)(data - begin));
  }
  return true;
}

fsdp_status fsdp_nccl_priv_plan_places(fsdp_nccl_transport *transport,
                                       fsdp_channel index,
                                       fsdp_nccl_places_plan *plan,
                                       fsdp_error *error) {
  fsdp_nccl_windows *windows = &transport->channels[index].windows;
  *plan = (fsdp_nccl_places_plan){.digest = FSDP_ORDER_FINGERPRINT};
  windows->num_open = 0;
  for (size_t i = 0; i < windows->num_places; i++) {
    fsdp_nccl_place *each = &windows->places[i];
    /* The same on all ranks. */
    each->is_known = 2 * each->num_uses >= windows->uses_needed;
    if (!each->is_known) continue;
    plan->digest = fold_number(plan->digest, each->call);
    if (!fold_place(transport, windows, each->buffer, &plan->digest) ||
        !fold_place(transport, windows, each->input, &plan->digest)) {
      windows->num_open = 0;
      return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY,
                       "out of host memory for a list of %zu windows",
                       windows->open_capacity);
    }
    plan->num_known++;
    if (each->buffer != NULL) plan->num_in_blocks++;
    if (each->num_same < STEADY_USES) plan->num_moved++;
  }
  for (size_t i = 0; i < windows->num_open; i++) {
    const int64_t nbytes = windows->open[i].block.nbytes;
    plan->digest = fold_number(plan->digest, (uint64_t)nbytes);
    plan->nbytes += nbytes;
  }
  plan->num_blocks = (int64_t)windows->num_open;
  return FSDP_OK;
}

void fsdp_nccl_priv_forget_places(fsdp_nccl_transport *transport,
                                  fsdp_channel index) {
  fsdp_nccl_windows *windows = &transport->channels[index].windows;
  windows->num_places = 0;
  windows->next_place = 0;
  windows->uses_needed *= 2;
  if (windows->uses_needed > MAX_USES_NEEDED) {
    windows->uses_needed = MAX_USES_NEEDED;
  }
}
