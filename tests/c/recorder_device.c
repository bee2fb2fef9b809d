/* The recorder's device, in the order of the table. */
#define _POSIX_C_SOURCE 200112L /* posix_memalign */

#include "elements.h"
#include "recorder_priv.h"

enum { BLOCK_ALIGNMENT = 256 };

static fsdp_status block_alloc(void *context, int64_t nbytes, void **block,
                               fsdp_error *error) {
  recorder *self = context;
  char name[RECORDER_NAME_NBYTES + 1] = "";
  const int64_t number = self->num_blocks_ever + 1;
  if (self->shows_memory) snprintf(name, sizeof name, " b%" PRId64, number);
  const fsdp_status status = recorder_priv_begin(
      self, FSDP_OUT_OF_MEMORY, error, "alloc %d%s", nbytes, name);
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
  /* Its memory may be in use by what COMPUTE has now; a host waited. */
  if (!self->is_host) {
    recorder_touch(self, FSDP_LANE_COMPUTE, data, nbytes, true);
  }
  self->num_blocks_ever = number;
  self->live_blocks++;
  self->live_nbytes += nbytes;
  *block = data;
  return FSDP_OK;
}

/* Whether the memory is on the host. */
bool recorder_priv_is_on_host(const recorder *self, const void *data) {
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

void recorder_priv_touch(recorder *self, fsdp_lane lane, const void *data,
                         int64_t nbytes, bool is_write) {
  if (nbytes > 0 && recorder_priv_is_on_host(self, data)) {
    recorder_priv_die("the device touches host memory");
  }
  recorder_touch(self, (int)lane, data, nbytes, is_write);
}

static void touch_host(recorder *self, fsdp_lane lane, const void *data,
                       int64_t nbytes, bool is_write) {
  if (nbytes > 0 && !recorder_priv_is_on_host(self, data)) {
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
                             int64_t nbytes) {
  for (int64_t i = self->num_memories - 1; i >= 0; i--) {
    memory *candidate = &self->memories[i];
    if (!candidate->is_block || candidate->data != data) continue;
    if (candidate->is_host != is_host)
      recorder_priv_die("a free of the other kind");
    if (!is_host && candidate->nbytes != nbytes)
      recorder_priv_die("block_free with a wrong nbytes");
    for (int64_t j = 0; j < self->num_loans; j++) {
      const char *lent = self->loans[j].data;
      if (lent >= candidate->data &&
          lent < candidate->data + candidate->nbytes) {
        recorder_priv_die("a free of memory that shows gradients");
      }
    }
    recorder_forget(self, data, candidate->nbytes,
                    is_host ? RECORDER_HOST_LANE : FSDP_LANE_COMPUTE);
    recorder_priv_free_block(self, candidate);
    return;
  }
  recorder_priv_die("free of an unknown block");
}

static void block_free(void *context, void *block, int64_t nbytes) {
  recorder *self = context;
  recorder_priv_write_line(self, "free %d%t", nbytes, block);
  free_known_block(self, block, false, nbytes);
}

static fsdp_status host_alloc(void *context, int64_t nbytes, void **block,
                              fsdp_error *error) {
  recorder *self = context;
  char name[RECORDER_NAME_NBYTES + 1] = "";
  const int64_t number = self->num_host_blocks_ever + 1;
  if (self->shows_memory) snprintf(name, sizeof name, " h%" PRId64, number);
  const fsdp_status status = recorder_priv_begin(
      self, FSDP_OUT_OF_MEMORY, error, "host_alloc %d%s", nbytes, name);
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
  recorder_priv_write_line(self, "host_free%t", block);
  free_known_block(self, block, true, 0);
}

static fsdp_status event_create(void *context, fsdp_event **event,
                                fsdp_error *error) {
  recorder *self = context;
  const int64_t number = self->num_events_ever + 1;
  const fsdp_status status =
      recorder_priv_begin(self, FSDP_BACKEND, error, "event e%d", number);
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
  recorder_priv_write_line(self, "destroy e%d", event->number);
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
      context, FSDP_BACKEND, error, "record e%d %L", event->number, lane);
  if (status == FSDP_OK) recorder_priv_record(context, event, lane);
  return status;
}

static fsdp_status event_wait(void *context, fsdp_lane lane, fsdp_event *event,
                              fsdp_error *error) {
  const fsdp_status status = recorder_priv_begin(
      context, FSDP_BACKEND, error, "wait %L e%d", lane, event->number);
  if (status == FSDP_OK) recorder_priv_wait(context, (int)lane, event);
  return status;
}

static fsdp_status event_synchronize(void *context, fsdp_event *event,
                                     fsdp_error *error) {
  const fsdp_status status = recorder_priv_begin(
      context, FSDP_BACKEND, error, "synchronize e%d", event->number);
  if (status == FSDP_OK) recorder_priv_wait(context, RECORDER_HOST, event);
  return status;
}

static fsdp_status copy_to_device(void *context, fsdp_lane lane, void *device,
                                  const void *host, int64_t nbytes,
                                  fsdp_error *error) {
  recorder *self = context;
  const fsdp_status status =
      recorder_priv_begin(self, FSDP_BACKEND, error, "copy_to_device %L %d%t%f",
                          lane, nbytes, device, host);
  if (status != FSDP_OK) return status;
  touch_host(self, lane, host, nbytes, false);
  recorder_priv_touch(self, lane, device, nbytes, true);
  memcpy(device, host, (size_t)nbytes);
  return FSDP_OK;
}

static fsdp_status copy_to_host(void *context, fsdp_lane lane, void *host,
                                const void *device, int64_t nbytes,
                                fsdp_error *error) {
  recorder *self = context;
  const fsdp_status status =
      recorder_priv_begin(self, FSDP_BACKEND, error, "copy_to_host %L %d%t%f",
                          lane, nbytes, host, device);
  if (status != FSDP_OK) return status;
  recorder_priv_touch(self, lane, device, nbytes, false);
  touch_host(self, lane, host, nbytes, true);
  memcpy(host, device, (size_t)nbytes);
  return FSDP_OK;
}

static fsdp_status run_items(recorder *self, const char *operation,
                             fsdp_lane lane, const fsdp_pack_item *items,
                             int64_t num_items, double scale,
                             fsdp_error *error) {
  const fsdp_status status =
      recorder_priv_begin(self, FSDP_BACKEND, error, "%s %L x%g%I", operation,
                          lane, scale, items, num_items);
  if (status != FSDP_OK) return status;
  recorder_priv_check_items(self, lane, items, num_items);
  for (int64_t i = 0; i < num_items; i++) {
    const fsdp_pack_item *item = &items[i];
    recorder_priv_touch(self, lane, item->from,
                        item->numel * item->from_dtype.itemsize, false);
    recorder_priv_touch(self, lane, item->to,
                        item->numel * item->to_dtype.itemsize, true);
    elements_combine(item->to, item->to_dtype, item->from, item->from_dtype,
                     item->numel, scale, item->add);
    for (int64_t j = 0; item->from == NULL && item->is_one && j < item->numel;
         j++) {
      elements_write(item->to, item->to_dtype, j, 1);
    }
  }
  return FSDP_OK;
}

static fsdp_status pack(void *context, fsdp_lane lane,
                        const fsdp_pack_item *items, int64_t num_items,
                        double scale, fsdp_error *error) {
  return run_items(context, "pack", lane, items, num_items, scale, error);
}

static fsdp_status accumulate(void *context, fsdp_lane lane,
                              const fsdp_pack_item *items, int64_t num_items,
                              double scale, fsdp_error *error) {
  return run_items(context, "accumulate", lane, items, num_items, scale, error);
}

static void *stream(void *context, fsdp_lane lane) {
  recorder *self = context;
  return &self->clocks[lane];
}

static fsdp_status all_gather_bytes(void *context, const fsdp_group *group,
                                    const void *mine, int64_t nbytes, void *all,
                                    fsdp_error *error) {
  recorder *self = context;
  const fsdp_status status =
      recorder_priv_begin(self, FSDP_BACKEND, error, "all_gather_bytes %G %d",
                          group->transport, nbytes);
  if (status != FSDP_OK) return status;
  for (int64_t rank = 0; rank < group->world_size; rank++) {
    char *slot = (char *)all + rank * nbytes;
    memcpy(slot, mine, (size_t)nbytes);
    if (rank != group->rank && self->answer != NULL) {
      self->answer(self->answer_context, rank, mine, nbytes, slot);
    }
  }
  return FSDP_OK;
}

fsdp_device_ops recorder_priv_device_ops(recorder *self) {
  return (fsdp_device_ops){
      .context = self,
      .block_alloc = block_alloc,
      .block_free = block_free,
      .host_alloc = host_alloc,
      .host_free = host_free,
      .event_create = event_create,
      .event_destroy = event_destroy,
      .event_record = event_record,
      .event_wait = event_wait,
      .event_synchronize = event_synchronize,
      .copy_to_device = copy_to_device,
      .copy_to_host = copy_to_host,
      .pack = pack,
      .accumulate = accumulate,
      .stream = stream,
      .all_gather_bytes = all_gather_bytes,
  };
}
