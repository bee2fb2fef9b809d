/* The recorder's operations, in the port's order. */
#define _POSIX_C_SOURCE 200112L /* posix_memalign */

#include "elements.h"
#include "recorder_priv.h"

enum { BLOCK_ALIGNMENT = 256, GRAD_SHARD_NBYTES = 4096 };

static fsdp_status block_alloc(void *context, int64_t nbytes, void **block,
                               fsdp_error *error) {
  recorder *self = context;
  char name[RECORDER_NAME_NBYTES + 1] = "";
  const int64_t number = self->num_blocks_ever + 1;
  if (self->shows_memory) snprintf(name, sizeof name, " b%" PRId64, number);
  const fsdp_status status = recorder_priv_begin(
      self, FSDP_OUT_OF_MEMORY, error, "alloc %" PRId64 "%s", nbytes, name);
  if (status != FSDP_OK) return status;
  if (self->memory_limit > 0 &&
      nbytes > self->memory_limit - self->live_nbytes) {
    return FSDP_FAIL(
        error, FSDP_OUT_OF_MEMORY, "%" PRId64 " of %" PRId64 " bytes are left",
        self->memory_limit - self->live_nbytes, self->memory_limit);
  }

  if (nbytes < 1) recorder_priv_die("block_alloc of nothing");
  void *data = NULL;
  if (posix_memalign(&data, BLOCK_ALIGNMENT, (size_t)nbytes) != 0) {
    recorder_priv_die("out of memory");
  }
  memset(data, 0xCD, (size_t)nbytes);
  memory *added = recorder_priv_add_memory(self, data, nbytes);
  snprintf(added->name, sizeof added->name, "b%" PRId64, number);
  added->is_block = true;
  self->num_blocks_ever = number;
  self->live_blocks++;
  self->live_nbytes += nbytes;
  *block = data;
  return FSDP_OK;
}

/* Whether the memory is on the host. */
static bool is_on_host(const recorder *self, const void *data) {
  const char *address = data;
  for (int64_t i = self->num_memories - 1; i >= 0; i--) {
    const memory *candidate = &self->memories[i];
    if (candidate->data == NULL || address < candidate->data ||
        address >= candidate->data + candidate->nbytes) {
      continue;
    }
    return candidate->is_host;
  }
  return false;
}

static void touch(recorder *self, fsdp_lane lane, const void *data,
                  int64_t nbytes, bool is_write) {
  if (nbytes > 0 && is_on_host(self, data)) {
    recorder_priv_die("the device touches host memory");
  }
  recorder_touch(self, (int)lane, data, nbytes, is_write);
}

static void touch_host(recorder *self, fsdp_lane lane, const void *data,
                       int64_t nbytes, bool is_write) {
  if (nbytes > 0 && !is_on_host(self, data)) {
    recorder_priv_die("a copy of the host's memory that is not there");
  }
  recorder_touch(self, (int)lane, data, nbytes, is_write);
}

void recorder_priv_free_block(recorder *self, memory *block) {
  void *data = (void *)(uintptr_t)block->data;
  block->data = NULL;
  self->live_blocks--;
  self->live_nbytes -= block->is_host ? 0 : block->nbytes;
  free(data);
}

/* Frees the live block at `data`; `is_host` says of which kind it must be. */
static void free_known_block(recorder *self, const void *data, bool is_host,
                             int64_t nbytes, const fsdp_event *last_use) {
  for (int64_t i = self->num_memories - 1; i >= 0; i--) {
    memory *candidate = &self->memories[i];
    if (!candidate->is_block || candidate->data != data) continue;
    if (candidate->is_host != is_host)
      recorder_priv_die("a free of the other kind");
    if (!is_host && candidate->nbytes != nbytes)
      recorder_priv_die("block_free with a wrong nbytes");
    recorder_priv_forget(self, data, candidate->nbytes, last_use);
    recorder_priv_free_block(self, candidate);
    return;
  }
  recorder_priv_die("free of an unknown block");
}

static void block_free(void *context, void *block, int64_t nbytes,
                       fsdp_event *last_use) {
  recorder *self = context;
  char name[2 * RECORDER_NAME_NBYTES];
  char after[RECORDER_NAME_NBYTES] = "";
  if (last_use != NULL) {
    snprintf(after, sizeof after, " after e%" PRId64, last_use->number);
  }
  recorder_priv_write_line(
      self, "free %" PRId64 "%s%s", nbytes,
      recorder_priv_memory_name(self, " ", block, name, sizeof name), after);
  free_known_block(self, block, false, nbytes, last_use);
}

static void memory_release(void *context) {
  recorder_priv_write_line(context, "release_memory");
}

static fsdp_status host_alloc(void *context, int64_t nbytes, void **block,
                              fsdp_error *error) {
  recorder *self = context;
  char name[RECORDER_NAME_NBYTES + 1] = "";
  const int64_t number = self->num_host_blocks_ever + 1;
  if (self->shows_memory) snprintf(name, sizeof name, " h%" PRId64, number);
  const fsdp_status status =
      recorder_priv_begin(self, FSDP_OUT_OF_MEMORY, error,
                          "host_alloc %" PRId64 "%s", nbytes, name);
  if (status != FSDP_OK) return status;
  if (nbytes < 1) recorder_priv_die("host_alloc of nothing");
  void *data = recorder_priv_must(malloc((size_t)nbytes));
  memset(data, 0xCD, (size_t)nbytes);
  memory *added = recorder_priv_add_memory(self, data, nbytes);
  snprintf(added->name, sizeof added->name, "h%" PRId64, number);
  added->is_block = true;
  added->is_host = true;
  self->num_host_blocks_ever = number;
  self->live_blocks++;
  *block = data;
  return FSDP_OK;
}

static void host_free(void *context, void *block) {
  recorder *self = context;
  char name[2 * RECORDER_NAME_NBYTES];
  recorder_priv_write_line(
      self, "host_free%s",
      recorder_priv_memory_name(self, " ", block, name, sizeof name));
  free_known_block(self, block, true, 0, NULL);
}

static fsdp_status event_create(void *context, fsdp_event **event,
                                fsdp_error *error) {
  recorder *self = context;
  const int64_t number = self->num_events_ever + 1;
  const fsdp_status status =
      recorder_priv_begin(self, FSDP_BACKEND, error, "event e%" PRId64, number);
  if (status != FSDP_OK) return status;
  fsdp_event *created = recorder_priv_must(malloc(sizeof *created));
  *created = (fsdp_event){.number = number, .next = self->events};
  self->events = created;
  self->num_events_ever = number;
  self->live_events++;
  *event = created;
  return FSDP_OK;
}

static void event_destroy(void *context, fsdp_event *event) {
  recorder *self = context;
  recorder_priv_write_line(self, "destroy e%" PRId64, event->number);
  fsdp_event **link = &self->events;
  while (*link != NULL && *link != event) link = &(*link)->next;
  if (*link == NULL) recorder_priv_die("event_destroy of an unknown event");
  *link = event->next;
  self->live_events--;
  free(event);
}

static fsdp_status event_record(void *context, fsdp_event *event,
                                fsdp_lane lane, fsdp_error *error) {
  const fsdp_status status = recorder_priv_begin(
      context, FSDP_BACKEND, error, "record e%" PRId64 " %s", event->number,
      recorder_priv_lane_name(lane));
  if (status == FSDP_OK) recorder_priv_record(context, event, lane);
  return status;
}

static fsdp_status event_wait(void *context, fsdp_lane lane, fsdp_event *event,
                              fsdp_error *error) {
  const fsdp_status status =
      recorder_priv_begin(context, FSDP_BACKEND, error, "wait %s e%" PRId64,
                          recorder_priv_lane_name(lane), event->number);
  if (status == FSDP_OK) recorder_priv_wait(context, (int)lane, event);
  return status;
}

static fsdp_status event_synchronize(void *context, fsdp_event *event,
                                     fsdp_error *error) {
  const fsdp_status status = recorder_priv_begin(
      context, FSDP_BACKEND, error, "synchronize e%" PRId64, event->number);
  if (status == FSDP_OK) recorder_priv_wait(context, RECORDER_HOST, event);
  return status;
}

static fsdp_status cast(void *context, fsdp_lane lane, void *destination,
                        fsdp_dtype destination_dtype, const void *source,
                        fsdp_dtype source_dtype, int64_t numel,
                        fsdp_error *error) {
  recorder *self = context;
  char to[2 * RECORDER_NAME_NBYTES];
  char from[2 * RECORDER_NAME_NBYTES];
  const fsdp_status status = recorder_priv_begin(
      self, FSDP_BACKEND, error, "cast %s %" PRId64 " %s->%s%s%s",
      recorder_priv_lane_name(lane), numel,
      recorder_priv_dtype_name(source_dtype),
      recorder_priv_dtype_name(destination_dtype),
      recorder_priv_memory_name(self, " ", destination, to, sizeof to),
      recorder_priv_memory_name(self, " <- ", source, from, sizeof from));
  if (status != FSDP_OK) return status;
  touch(self, lane, source, numel * source_dtype.itemsize, false);
  touch(self, lane, destination, numel * destination_dtype.itemsize, true);
  elements_combine(destination, destination_dtype, source, source_dtype, numel,
                   1, false);
  return FSDP_OK;
}

static fsdp_status copy_to_device(void *context, fsdp_lane lane, void *device,
                                  const void *host, int64_t nbytes,
                                  fsdp_error *error) {
  recorder *self = context;
  char to[2 * RECORDER_NAME_NBYTES];
  char from[2 * RECORDER_NAME_NBYTES];
  const fsdp_status status = recorder_priv_begin(
      self, FSDP_BACKEND, error, "copy_to_device %s %" PRId64 "%s%s",
      recorder_priv_lane_name(lane), nbytes,
      recorder_priv_memory_name(self, " ", device, to, sizeof to),
      recorder_priv_memory_name(self, " <- ", host, from, sizeof from));
  if (status != FSDP_OK) return status;
  touch_host(self, lane, host, nbytes, false);
  touch(self, lane, device, nbytes, true);
  memcpy(device, host, (size_t)nbytes);
  return FSDP_OK;
}

static fsdp_status copy_to_host(void *context, fsdp_lane lane, void *host,
                                const void *device, int64_t nbytes,
                                fsdp_error *error) {
  recorder *self = context;
  char to[2 * RECORDER_NAME_NBYTES];
  char from[2 * RECORDER_NAME_NBYTES];
  const fsdp_status status = recorder_priv_begin(
      self, FSDP_BACKEND, error, "copy_to_host %s %" PRId64 "%s%s",
      recorder_priv_lane_name(lane), nbytes,
      recorder_priv_memory_name(self, " ", host, to, sizeof to),
      recorder_priv_memory_name(self, " <- ", device, from, sizeof from));
  if (status != FSDP_OK) return status;
  touch(self, lane, device, nbytes, false);
  touch_host(self, lane, host, nbytes, true);
  memcpy(host, device, (size_t)nbytes);
  return FSDP_OK;
}

static fsdp_status pack(void *context, fsdp_lane lane, void *destination,
                        fsdp_dtype destination_dtype,
                        const fsdp_pack_item *items, int64_t num_items,
                        double scale, fsdp_error *error) {
  recorder *self = context;
  char text[256] = "";
  char to[2 * RECORDER_NAME_NBYTES];
  size_t length = 0;
  for (int64_t i = 0; i < num_items && length < sizeof text; i++) {
    length += (size_t)snprintf(
        text + length, sizeof text - length, " %s%" PRId64 "@%" PRId64 "%s",
        items[i].data == NULL ? "zero" : "", items[i].numel, items[i].offset,
        items[i].add ? "+" : "");
  }
  const fsdp_status status = recorder_priv_begin(
      self, FSDP_BACKEND, error, "pack %s %s x%g%s%s",
      recorder_priv_lane_name(lane),
      recorder_priv_dtype_name(destination_dtype), scale, text,
      recorder_priv_memory_name(self, " ", destination, to, sizeof to));
  if (status != FSDP_OK) return status;
  for (int64_t i = 0; i < num_items; i++) {
    char *target =
        (char *)destination + items[i].offset * destination_dtype.itemsize;
    touch(self, lane, items[i].data, items[i].numel * items[i].dtype.itemsize,
          false);
    touch(self, lane, target, items[i].numel * destination_dtype.itemsize,
          true);
    elements_combine(target, destination_dtype, items[i].data, items[i].dtype,
                     items[i].numel, scale, items[i].add);
  }
  return FSDP_OK;
}

static fsdp_status accumulate(void *context, fsdp_lane lane, void *destination,
                              fsdp_dtype destination_dtype, const void *source,
                              fsdp_dtype source_dtype, int64_t numel,
                              double scale, bool add, fsdp_error *error) {
  recorder *self = context;
  char to[2 * RECORDER_NAME_NBYTES];
  char from[2 * RECORDER_NAME_NBYTES];
  const fsdp_status status = recorder_priv_begin(
      self, FSDP_BACKEND, error, "accumulate %s %" PRId64 " %s->%s x%g%s%s%s",
      recorder_priv_lane_name(lane), numel,
      recorder_priv_dtype_name(source_dtype),
      recorder_priv_dtype_name(destination_dtype), scale, add ? " add" : "",
      recorder_priv_memory_name(self, " ", destination, to, sizeof to),
      recorder_priv_memory_name(self, " <- ", source, from, sizeof from));
  if (status != FSDP_OK) return status;
  touch(self, lane, source, numel * source_dtype.itemsize, false);
  touch(self, lane, destination, numel * destination_dtype.itemsize, true);
  elements_combine(destination, destination_dtype, source, source_dtype, numel,
                   scale, add);
  return FSDP_OK;
}

static fsdp_status group_begin(void *context, fsdp_lane lane,
                               const fsdp_group *group, fsdp_error *error) {
  return recorder_priv_begin(context, FSDP_BACKEND, error, "group_begin %s %s",
                             recorder_priv_lane_name(lane),
                             recorder_priv_group_name(context, group));
}

static fsdp_status group_end(void *context, fsdp_lane lane,
                             const fsdp_group *group, fsdp_error *error) {
  return recorder_priv_begin(context, FSDP_BACKEND, error, "group_end %s %s",
                             recorder_priv_lane_name(lane),
                             recorder_priv_group_name(context, group));
}

static fsdp_status all_gather(void *context, fsdp_lane lane,
                              const fsdp_group *group, void *output,
                              const void *input, int64_t shard_numel,
                              fsdp_dtype dtype, fsdp_error *error) {
  recorder *self = context;
  char to[2 * RECORDER_NAME_NBYTES];
  char from[2 * RECORDER_NAME_NBYTES];
  const fsdp_status status = recorder_priv_begin(
      self, FSDP_BACKEND, error, "all_gather %s %s %" PRId64 " %s%s%s",
      recorder_priv_lane_name(lane), recorder_priv_group_name(self, group),
      shard_numel, recorder_priv_dtype_name(dtype),
      recorder_priv_memory_name(self, " ", output, to, sizeof to),
      recorder_priv_memory_name(self, " <- ", input, from, sizeof from));
  if (status != FSDP_OK) return status;
  const size_t nbytes = (size_t)(shard_numel * dtype.itemsize);
  touch(self, lane, input, (int64_t)nbytes, false);
  touch(self, lane, output, group->world_size * (int64_t)nbytes, true);
  for (int64_t rank = 0; rank < group->world_size; rank++) {
    char *slot = (char *)output + (size_t)rank * nbytes;
    if (slot != input) memcpy(slot, input, nbytes); /* no partial overlap */
  }
  return FSDP_OK;
}

static fsdp_status broadcast(void *context, fsdp_lane lane,
                             const fsdp_group *group, void *buffer,
                             int64_t numel, int64_t root, fsdp_dtype dtype,
                             fsdp_error *error) {
  recorder *self = context;
  char to[2 * RECORDER_NAME_NBYTES];
  const fsdp_status status = recorder_priv_begin(
      self, FSDP_BACKEND, error,
      "broadcast %s %s %" PRId64 " %s from %" PRId64 "%s",
      recorder_priv_lane_name(lane), recorder_priv_group_name(self, group),
      numel, recorder_priv_dtype_name(dtype), root,
      recorder_priv_memory_name(self, " ", buffer, to, sizeof to));
  if (status != FSDP_OK) return status;
  touch(self, lane, buffer, numel * dtype.itemsize, group->rank != root);
  for (int64_t k = 0; group->rank != root && k < numel; k++) {
    elements_write(buffer, dtype, k, self->broadcast_first + (double)k);
  }
  return FSDP_OK;
}

static fsdp_status reduce_scatter(void *context, fsdp_lane lane,
                                  const fsdp_group *group, void *buffer,
                                  void *scratch, int64_t shard_numel,
                                  fsdp_dtype dtype, fsdp_error *error) {
  recorder *self = context;
  char to[2 * RECORDER_NAME_NBYTES];
  char beside[2 * RECORDER_NAME_NBYTES] = "";
  if (scratch != NULL) {
    (void)recorder_priv_memory_name(self, " ", scratch, beside, sizeof beside);
  }
  const fsdp_status status = recorder_priv_begin(
      self, FSDP_BACKEND, error, "reduce_scatter %s %s %" PRId64 " %s%s%s%s",
      recorder_priv_lane_name(lane), recorder_priv_group_name(self, group),
      shard_numel, recorder_priv_dtype_name(dtype),
      recorder_priv_memory_name(self, " ", buffer, to, sizeof to),
      scratch == NULL ? "" : " scratch", beside);
  if (status != FSDP_OK) return status;
  const size_t nbytes = (size_t)(shard_numel * dtype.itemsize);
  touch(self, lane, buffer, group->world_size * (int64_t)nbytes, true);
  touch(self, lane, scratch, group->world_size * (int64_t)nbytes, true);
  for (int64_t rank = 0; rank < group->world_size; rank++) {
    char *slot = (char *)buffer + (size_t)rank * nbytes;
    if (rank == group->rank) {
      elements_combine(slot, dtype, slot, dtype, shard_numel,
                       (double)group->world_size, false);
    } else {
      memset(slot, 0xCD, nbytes);
    }
  }
  if (scratch != NULL) {
    memset(scratch, 0xCD, nbytes * (size_t)group->world_size);
  }
  return FSDP_OK;
}

static fsdp_status all_reduce(void *context, fsdp_lane lane,
                              const fsdp_group *group, void *buffer,
                              int64_t numel, fsdp_dtype dtype,
                              fsdp_error *error) {
  recorder *self = context;
  char to[2 * RECORDER_NAME_NBYTES];
  const fsdp_status status = recorder_priv_begin(
      self, FSDP_BACKEND, error, "all_reduce %s %s %" PRId64 " %s%s",
      recorder_priv_lane_name(lane), recorder_priv_group_name(self, group),
      numel, recorder_priv_dtype_name(dtype),
      recorder_priv_memory_name(self, " ", buffer, to, sizeof to));
  if (status != FSDP_OK) return status;
  touch(self, lane, buffer, numel * dtype.itemsize, true);
  elements_combine(buffer, dtype, buffer, dtype, numel,
                   (double)group->world_size, false);
  return FSDP_OK;
}

static fsdp_status reduce_hook(void *context, void *owner, fsdp_lane lane,
                               int64_t segment, void *buffer,
                               fsdp_error *error) {
  char to[2 * RECORDER_NAME_NBYTES];
  return recorder_priv_begin(
      context, FSDP_BACKEND, error, "reduce_hook %s %s %" PRId64 "%s",
      recorder_priv_owner_name(context, owner), recorder_priv_lane_name(lane),
      segment, recorder_priv_memory_name(context, " ", buffer, to, sizeof to));
}

static fsdp_status exchange(void *context, const fsdp_group *group,
                            const void *mine, int64_t nbytes, void *all,
                            fsdp_error *error) {
  recorder *self = context;
  const fsdp_status status =
      recorder_priv_begin(self, FSDP_BACKEND, error, "exchange %s %" PRId64,
                          recorder_priv_group_name(self, group), nbytes);
  if (status != FSDP_OK) return status;
  for (int64_t rank = 0; rank < group->world_size; rank++) {
    char *slot = (char *)all + rank * nbytes;
    memcpy(slot, mine, (size_t)nbytes);
    if (rank != group->rank && self->exchange != NULL) {
      self->exchange(self->exchange_context, rank, mine, nbytes, slot);
    }
  }
  return FSDP_OK;
}

static fsdp_status show_params(void *context, void *owner, fsdp_view view,
                               void *const *segments, fsdp_error *error) {
  (void)segments;
  return recorder_priv_begin(context, FSDP_BACKEND, error, "show %s %s",
                             recorder_priv_owner_name(context, owner),
                             recorder_priv_view_name(view));
}

static fsdp_status take_params(void *context, void *owner, fsdp_view view,
                               void *const *segments, bool *any_copied,
                               fsdp_error *error) {
  recorder *self = context;
  (void)segments;
  const fsdp_status status = recorder_priv_begin(
      self, FSDP_BACKEND, error, "take_params %s %s",
      recorder_priv_owner_name(self, owner), recorder_priv_view_name(view));
  if (status != FSDP_OK) return status;
  *any_copied = self->params_copied;
  return FSDP_OK;
}

static void mark_params(void *context, void *owner) {
  recorder_priv_write_line(context, "mark_params %s",
                           recorder_priv_owner_name(context, owner));
}

static bool params_changed(void *context, void *owner) {
  recorder *self = context;
  recorder_priv_write_line(context, "params_changed %s",
                           recorder_priv_owner_name(context, owner));
  return self->params_changed;
}

/* Whether the owner's sharded gradients have memory. */
static void set_grad_shards_made(recorder *self, const void *owner,
                                 bool is_made) {
  for (int64_t i = 0; i < self->num_grad_shards; i++) {
    grad_shard *shard = &self->grad_shards[i];
    if (shard->owner == owner) shard->is_made = is_made;
  }
}

static bool has_grad_shard(const recorder *self, const void *owner) {
  for (int64_t i = 0; i < self->num_grad_shards; i++) {
    const grad_shard *shard = &self->grad_shards[i];
    if (shard->owner == owner && shard->is_made) return true;
  }
  return false;
}

static fsdp_status take_grads(void *context, void *owner, bool unsharded_live,
                              void *const *unsharded_segments, bool *any_live,
                              fsdp_error *error) {
  recorder *self = context;
  (void)unsharded_segments;
  const fsdp_status status =
      recorder_priv_begin(self, FSDP_BACKEND, error, "take_grads %s%s",
                          recorder_priv_owner_name(self, owner),
                          unsharded_live ? " unsharded" : "");
  if (status != FSDP_OK) return status;
  *any_live = self->grads_live;
  if (*any_live && !has_grad_shard(self, owner)) { /* the user's: copied in */
    set_grad_shards_made(self, owner, true);
  }
  return FSDP_OK;
}

static fsdp_status take_full_grads(void *context, void *owner, fsdp_view view,
                                   void *const *segments, bool *any_live,
                                   fsdp_error *error) {
  recorder *self = context;
  (void)segments;
  const fsdp_status status = recorder_priv_begin(
      self, FSDP_BACKEND, error, "take_full_grads %s %s",
      recorder_priv_owner_name(self, owner), recorder_priv_view_name(view));
  if (status != FSDP_OK) return status;
  *any_live = self->grads_live;
  return FSDP_OK;
}

static bool grads_live(void *context, void *owner) {
  recorder *self = context;
  recorder_priv_write_line(context, "grads_live %s",
                           recorder_priv_owner_name(context, owner));
  return self->grads_live;
}

static void grads_free(void *context, void *owner) {
  recorder_priv_write_line(context, "grads_free %s",
                           recorder_priv_owner_name(context, owner));
  set_grad_shards_made(context, owner, false);
}

static fsdp_status show_grads(void *context, void *owner, fsdp_view view,
                              void *const *segments, fsdp_error *error) {
  (void)segments;
  return recorder_priv_begin(context, FSDP_BACKEND, error, "show_grads %s %s",
                             recorder_priv_owner_name(context, owner),
                             recorder_priv_view_name(view));
}

grad_shard *recorder_priv_add_grad_shard(recorder *self, void *owner,
                                         int64_t segment, void *data,
                                         int64_t nbytes) {
  self->grad_shards = recorder_priv_append_item(
      self->grad_shards, self->num_grad_shards, sizeof(grad_shard));
  grad_shard *added = &self->grad_shards[self->num_grad_shards++];
  *added = (grad_shard){
      .owner = owner, .segment = segment, .data = data, .nbytes = nbytes};
  return added;
}

static grad_shard *find_grad_shard(recorder *self, void *owner,
                                   int64_t segment) {
  for (int64_t i = 0; i < self->num_grad_shards; i++) {
    grad_shard *known = &self->grad_shards[i];
    if (known->owner == owner && known->segment == segment) return known;
  }
  grad_shard *added = recorder_priv_add_grad_shard(
      self, owner, segment, recorder_priv_must(malloc(GRAD_SHARD_NBYTES)),
      GRAD_SHARD_NBYTES);
  added->is_owned = true;
  return added;
}

static fsdp_status get_grad_shard(void *context, void *owner, int64_t segment,
                                  bool is_replaced, void **data,
                                  fsdp_error *error) {
  recorder *self = context;
  const fsdp_status status = recorder_priv_begin(
      self, FSDP_OUT_OF_MEMORY, error, "grad_shard %s %" PRId64,
      recorder_priv_owner_name(self, owner), segment);
  if (status != FSDP_OK) return status;
  grad_shard *shard = find_grad_shard(self, owner, segment);
  if (!shard->is_made && is_replaced) {
    memset(shard->data, 0xCD, (size_t)shard->nbytes); /* nobody may read it */
  } else if (!shard->is_made) {
    const int lane =
        is_on_host(self, shard->data) ? RECORDER_HOST : (int)FSDP_LANE_COMPUTE;
    recorder_touch(self, lane, shard->data, shard->nbytes, true);
    memset(shard->data, 0, (size_t)shard->nbytes);
  }
  shard->is_made = true;
  *data = shard->data;
  return FSDP_OK;
}

static void grad_release(void *context, void *token) {
  recorder *self = context;
  recorder_priv_write_line(
      self, "release %s",
      recorder_priv_find_name(&self->tokens, token, "t", 1));
}

void recorder_priv_fill_ops(fsdp_device_ops *ops) {
  ops->block_alloc = block_alloc;
  ops->block_free = block_free;
  ops->memory_release = memory_release;
  ops->host_alloc = host_alloc;
  ops->host_free = host_free;
  ops->event_create = event_create;
  ops->event_destroy = event_destroy;
  ops->event_record = event_record;
  ops->event_wait = event_wait;
  ops->event_synchronize = event_synchronize;
  ops->cast = cast;
  ops->copy_to_device = copy_to_device;
  ops->copy_to_host = copy_to_host;
  ops->pack = pack;
  ops->accumulate = accumulate;
  ops->group_begin = group_begin;
  ops->group_end = group_end;
  ops->all_gather = all_gather;
  ops->broadcast = broadcast;
  ops->reduce_scatter = reduce_scatter;
  ops->all_reduce = all_reduce;
  ops->reduce_hook = reduce_hook;
  ops->exchange = exchange;
  ops->show_params = show_params;
  ops->take_params = take_params;
  ops->mark_params = mark_params;
  ops->params_changed = params_changed;
  ops->take_grads = take_grads;
  ops->take_full_grads = take_full_grads;
  ops->grads_live = grads_live;
  ops->grads_free = grads_free;
  ops->show_grads = show_grads;
  ops->grad_shard = get_grad_shard;
  ops->grad_release = grad_release;
}
