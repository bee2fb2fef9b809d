/*
 * Recorder: see recorder.h. One function per operation of the port, in the
 * port's order, over a tape and small lists of what it has seen.
 */
#define _POSIX_C_SOURCE 200112L /* posix_memalign */

#include "recorder.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "elements.h"

enum { BLOCK_ALIGNMENT = 256, GRAD_SHARD_NBYTES = 4096, NAME_NBYTES = 32 };

struct fsdp_event {
  int64_t number;
  fsdp_event *next; /* list of the live ones */
};

/* A block, or memory that a test named. */
typedef struct memory {
  const char *data; /* NULL: freed */
  int64_t nbytes;
  char name[NAME_NBYTES];
  bool is_block;
} memory;

/* Something known by its pointer: an owner, a group handle, a token. */
typedef struct named {
  const void *pointer;
  char name[NAME_NBYTES];
} named;

typedef struct named_list {
  named *items;
  int64_t num_items;
} named_list;

typedef struct grad_shard {
  void *owner;
  int64_t segment;
  void *data;
  bool is_owned;
} grad_shard;

struct recorder {
  fsdp_device_ops ops;
  char *tape;
  size_t tape_length;
  size_t tape_capacity;
  bool shows_memory;
  int64_t fail_at;
  int64_t num_calls;
  memory *memories;
  int64_t num_memories;
  int64_t num_blocks_ever;
  int64_t live_blocks;
  int64_t live_nbytes;
  fsdp_event *events;
  int64_t num_events_ever;
  int64_t live_events;
  named_list owners;
  named_list groups;
  named_list tokens;
  grad_shard *grad_shards;
  int64_t num_grad_shards;
  bool grads_live;
};

/* --- Memory of the recorder itself --------------------------------------- */

static void *must(void *pointer) {
  if (pointer != NULL) return pointer;
  fprintf(stderr, "recorder: out of memory\n");
  exit(2);
}

static void *append_item(void *items, int64_t num_items, size_t nbytes) {
  return must(realloc(items, ((size_t)num_items + 1) * nbytes));
}

static void die(const char *what) {
  fprintf(stderr, "recorder: %s\n", what);
  exit(2);
}

/* --- Names --------------------------------------------------------------- */

static const char *lane_name(fsdp_lane lane) {
  static const char *const names[FSDP_NUM_LANES] = {
      "compute", "unshard", "reduce", "replicate", "host_copy"};
  return (unsigned)lane < FSDP_NUM_LANES ? names[lane] : "unknown_lane";
}

static const char *dtype_name(fsdp_dtype dtype) {
  static const char *const names[] = {"unknown", "f32", "bf16", "f64", "u8"};
  return dtype.code >= 1 && dtype.code <= 4 ? names[dtype.code] : names[0];
}

static const char *view_name(fsdp_view view) {
  static const char *const names[] = {"sharded", "unsharded", "full"};
  return (unsigned)view < 3 ? names[view] : "unknown_view";
}

static named *add_named(named_list *list, const void *pointer) {
  list->items = append_item(list->items, list->num_items, sizeof(named));
  named *item = &list->items[list->num_items++];
  item->pointer = pointer;
  return item;
}

/* The name of `pointer`; at first sight `prefix` and the next number. */
static const char *find_name(named_list *list, const void *pointer,
                             const char *prefix, int64_t first_number) {
  for (int64_t i = 0; i < list->num_items; i++) {
    if (list->items[i].pointer == pointer) return list->items[i].name;
  }
  const int64_t number = list->num_items + first_number;
  named *item = add_named(list, pointer);
  snprintf(item->name, sizeof item->name, "%s%" PRId64, prefix, number);
  return item->name;
}

static const char *owner_name(recorder *self, const void *owner) {
  return find_name(&self->owners, owner, "unit", 0);
}

static const char *group_name(recorder *self, const fsdp_group *group) {
  return find_name(&self->groups, group->handle, "g", 0);
}

static memory *add_memory(recorder *self, const void *data, int64_t nbytes) {
  self->memories =
      append_item(self->memories, self->num_memories, sizeof(memory));
  memory *added = &self->memories[self->num_memories++];
  *added = (memory){.data = data, .nbytes = nbytes};
  return added;
}

/* "b1+16" into `text`; "" unless memory is shown. */
static const char *memory_name(const recorder *self, const char *before,
                               const void *data, char *text,
                               size_t text_nbytes) {
  const char *address = data;
  text[0] = '\0';
  if (!self->shows_memory) return text;
  for (int64_t i = self->num_memories - 1; i >= 0; i--) {
    const memory *candidate = &self->memories[i];
    if (candidate->data == NULL || address < candidate->data ||
        address >= candidate->data + candidate->nbytes) {
      continue;
    }
    const int64_t offset = address - candidate->data;
    if (offset == 0) {
      snprintf(text, text_nbytes, "%s%s", before, candidate->name);
    } else {
      snprintf(text, text_nbytes, "%s%s+%" PRId64, before, candidate->name,
               offset);
    }
    return text;
  }
  snprintf(text, text_nbytes, "%s%s", before, data == NULL ? "null" : "?");
  return text;
}

/* --- Tape ---------------------------------------------------------------- */

static void tape_append(recorder *self, const char *text) {
  const size_t length = strlen(text);
  if (self->tape_length + length + 1 > self->tape_capacity) {
    self->tape_capacity = 2 * (self->tape_length + length + 1);
    self->tape = must(realloc(self->tape, self->tape_capacity));
  }
  memcpy(self->tape + self->tape_length, text, length + 1);
  self->tape_length += length;
}

static void write_line(recorder *self, const char *format, ...)
    FSDP_PRINTF(2, 3);
static fsdp_status begin(recorder *self, fsdp_status code, fsdp_error *error,
                         const char *format, ...) FSDP_PRINTF(4, 5);

/* A line of an operation that cannot fail. */
static void write_line(recorder *self, const char *format, ...) {
  char line[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  tape_append(self, line);
  tape_append(self, "\n");
}

/* Starts an operation that can fail: its line, or the injected failure. */
static fsdp_status begin(recorder *self, fsdp_status code, fsdp_error *error,
                         const char *format, ...) {
  char line[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);

  self->num_calls++;
  const int64_t index = self->fail_at;
  if (index >= 0) self->fail_at--;
  if (index == 0) return FSDP_FAIL(error, code, "injected at %s", line);
  tape_append(self, line);
  tape_append(self, "\n");
  return FSDP_OK;
}

/* --- The port ------------------------------------------------------------ */

static fsdp_status block_alloc(void *context, int64_t nbytes, void **block,
                               fsdp_error *error) {
  recorder *self = context;
  char name[NAME_NBYTES + 1] = "";
  const int64_t number = self->num_blocks_ever + 1;
  if (self->shows_memory) snprintf(name, sizeof name, " b%" PRId64, number);
  const fsdp_status status = begin(self, FSDP_OUT_OF_MEMORY, error,
                                   "alloc %" PRId64 "%s", nbytes, name);
  if (status != FSDP_OK) return status;

  void *data = NULL;
  if (posix_memalign(&data, BLOCK_ALIGNMENT, (size_t)nbytes) != 0) {
    die("out of memory");
  }
  memset(data, 0xCD, (size_t)nbytes);
  memory *added = add_memory(self, data, nbytes);
  snprintf(added->name, sizeof added->name, "b%" PRId64, number);
  added->is_block = true;
  self->num_blocks_ever = number;
  self->live_blocks++;
  self->live_nbytes += nbytes;
  *block = data;
  return FSDP_OK;
}

static void block_free(void *context, void *block, int64_t nbytes,
                       fsdp_event *last_use) {
  recorder *self = context;
  char name[2 * NAME_NBYTES];
  char after[NAME_NBYTES] = "";
  if (last_use != NULL) {
    snprintf(after, sizeof after, " after e%" PRId64, last_use->number);
  }
  write_line(self, "free %" PRId64 "%s%s", nbytes,
             memory_name(self, " ", block, name, sizeof name), after);
  for (int64_t i = self->num_memories - 1; i >= 0; i--) {
    memory *candidate = &self->memories[i];
    if (!candidate->is_block || candidate->data != block) continue;
    if (candidate->nbytes != nbytes) die("block_free with a wrong nbytes");
    candidate->data = NULL;
    self->live_blocks--;
    self->live_nbytes -= nbytes;
    free(block);
    return;
  }
  die("block_free of an unknown block");
}

static fsdp_status event_create(void *context, fsdp_event **event,
                                fsdp_error *error) {
  recorder *self = context;
  const int64_t number = self->num_events_ever + 1;
  const fsdp_status status =
      begin(self, FSDP_BACKEND, error, "event e%" PRId64, number);
  if (status != FSDP_OK) return status;
  fsdp_event *created = must(malloc(sizeof *created));
  *created = (fsdp_event){.number = number, .next = self->events};
  self->events = created;
  self->num_events_ever = number;
  self->live_events++;
  *event = created;
  return FSDP_OK;
}

static void event_destroy(void *context, fsdp_event *event) {
  recorder *self = context;
  write_line(self, "destroy e%" PRId64, event->number);
  fsdp_event **link = &self->events;
  while (*link != NULL && *link != event) link = &(*link)->next;
  if (*link == NULL) die("event_destroy of an unknown event");
  *link = event->next;
  self->live_events--;
  free(event);
}

static fsdp_status event_record(void *context, fsdp_event *event,
                                fsdp_lane lane, fsdp_error *error) {
  return begin(context, FSDP_BACKEND, error, "record e%" PRId64 " %s",
               event->number, lane_name(lane));
}

static fsdp_status event_wait(void *context, fsdp_lane lane, fsdp_event *event,
                              fsdp_error *error) {
  return begin(context, FSDP_BACKEND, error, "wait %s e%" PRId64,
               lane_name(lane), event->number);
}

static fsdp_status cast(void *context, fsdp_lane lane, void *destination,
                        fsdp_dtype destination_dtype, const void *source,
                        fsdp_dtype source_dtype, int64_t numel,
                        fsdp_error *error) {
  recorder *self = context;
  char to[2 * NAME_NBYTES];
  char from[2 * NAME_NBYTES];
  const fsdp_status status =
      begin(self, FSDP_BACKEND, error, "cast %s %" PRId64 " %s->%s%s%s",
            lane_name(lane), numel, dtype_name(source_dtype),
            dtype_name(destination_dtype),
            memory_name(self, " ", destination, to, sizeof to),
            memory_name(self, " <- ", source, from, sizeof from));
  if (status != FSDP_OK) return status;
  elements_combine(destination, destination_dtype, source, source_dtype, numel,
                   1, false);
  return FSDP_OK;
}

static fsdp_status pack(void *context, fsdp_lane lane, void *destination,
                        fsdp_dtype destination_dtype,
                        const fsdp_pack_item *items, int64_t num_items,
                        double scale, fsdp_error *error) {
  recorder *self = context;
  char text[256] = "";
  char to[2 * NAME_NBYTES];
  size_t length = 0;
  for (int64_t i = 0; i < num_items && length < sizeof text; i++) {
    length += (size_t)snprintf(
        text + length, sizeof text - length, " %s%" PRId64 "@%" PRId64 "%s",
        items[i].data == NULL ? "zero" : "", items[i].numel, items[i].offset,
        items[i].add ? "+" : "");
  }
  const fsdp_status status =
      begin(self, FSDP_BACKEND, error, "pack %s %s x%g%s%s", lane_name(lane),
            dtype_name(destination_dtype), scale, text,
            memory_name(self, " ", destination, to, sizeof to));
  if (status != FSDP_OK) return status;
  for (int64_t i = 0; i < num_items; i++) {
    elements_combine(
        (char *)destination + items[i].offset * destination_dtype.itemsize,
        destination_dtype, items[i].data, items[i].dtype, items[i].numel, scale,
        items[i].add);
  }
  return FSDP_OK;
}

static fsdp_status accumulate(void *context, fsdp_lane lane, void *destination,
                              fsdp_dtype destination_dtype, const void *source,
                              fsdp_dtype source_dtype, int64_t numel,
                              double scale, bool add, fsdp_error *error) {
  recorder *self = context;
  char to[2 * NAME_NBYTES];
  char from[2 * NAME_NBYTES];
  const fsdp_status status = begin(
      self, FSDP_BACKEND, error, "accumulate %s %" PRId64 " %s->%s x%g%s%s%s",
      lane_name(lane), numel, dtype_name(source_dtype),
      dtype_name(destination_dtype), scale, add ? " add" : "",
      memory_name(self, " ", destination, to, sizeof to),
      memory_name(self, " <- ", source, from, sizeof from));
  if (status != FSDP_OK) return status;
  elements_combine(destination, destination_dtype, source, source_dtype, numel,
                   scale, add);
  return FSDP_OK;
}

static fsdp_status group_begin(void *context, fsdp_lane lane,
                               const fsdp_group *group, fsdp_error *error) {
  return begin(context, FSDP_BACKEND, error, "group_begin %s %s",
               lane_name(lane), group_name(context, group));
}

static fsdp_status group_end(void *context, fsdp_lane lane,
                             const fsdp_group *group, fsdp_error *error) {
  return begin(context, FSDP_BACKEND, error, "group_end %s %s", lane_name(lane),
               group_name(context, group));
}

static fsdp_status all_gather(void *context, fsdp_lane lane,
                              const fsdp_group *group, void *output,
                              const void *input, int64_t shard_numel,
                              fsdp_dtype dtype, fsdp_error *error) {
  recorder *self = context;
  char to[2 * NAME_NBYTES];
  char from[2 * NAME_NBYTES];
  const fsdp_status status =
      begin(self, FSDP_BACKEND, error, "all_gather %s %s %" PRId64 " %s%s%s",
            lane_name(lane), group_name(self, group), shard_numel,
            dtype_name(dtype), memory_name(self, " ", output, to, sizeof to),
            memory_name(self, " <- ", input, from, sizeof from));
  if (status != FSDP_OK) return status;
  const size_t nbytes = (size_t)(shard_numel * dtype.itemsize);
  for (int64_t rank = 0; rank < group->world_size; rank++) {
    char *slot = (char *)output + (size_t)rank * nbytes;
    if (slot != input) memcpy(slot, input, nbytes); /* no partial overlap */
  }
  return FSDP_OK;
}

static fsdp_status reduce_scatter(void *context, fsdp_lane lane,
                                  const fsdp_group *group, void *buffer,
                                  void *scratch, int64_t shard_numel,
                                  fsdp_dtype dtype, fsdp_error *error) {
  recorder *self = context;
  char to[2 * NAME_NBYTES];
  const fsdp_status status = begin(
      self, FSDP_BACKEND, error, "reduce_scatter %s %s %" PRId64 " %s%s%s",
      lane_name(lane), group_name(self, group), shard_numel, dtype_name(dtype),
      scratch == NULL ? "" : " scratch",
      memory_name(self, " ", buffer, to, sizeof to));
  if (status != FSDP_OK) return status;
  const size_t nbytes = (size_t)(shard_numel * dtype.itemsize);
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
  char to[2 * NAME_NBYTES];
  const fsdp_status status =
      begin(self, FSDP_BACKEND, error, "all_reduce %s %s %" PRId64 " %s%s",
            lane_name(lane), group_name(self, group), numel, dtype_name(dtype),
            memory_name(self, " ", buffer, to, sizeof to));
  if (status != FSDP_OK) return status;
  elements_combine(buffer, dtype, buffer, dtype, numel,
                   (double)group->world_size, false);
  return FSDP_OK;
}

static fsdp_status show_params(void *context, void *owner, fsdp_view view,
                               void *const *segments, fsdp_error *error) {
  (void)segments;
  return begin(context, FSDP_BACKEND, error, "show %s %s",
               owner_name(context, owner), view_name(view));
}

static fsdp_status take_params(void *context, void *owner, fsdp_view view,
                               void *const *segments, fsdp_error *error) {
  (void)segments;
  return begin(context, FSDP_BACKEND, error, "take_params %s %s",
               owner_name(context, owner), view_name(view));
}

static fsdp_status take_grads(void *context, void *owner, bool unsharded_live,
                              void *const *unsharded_segments, bool *any_live,
                              fsdp_error *error) {
  recorder *self = context;
  (void)unsharded_segments;
  const fsdp_status status =
      begin(self, FSDP_BACKEND, error, "take_grads %s%s",
            owner_name(self, owner), unsharded_live ? " unsharded" : "");
  if (status != FSDP_OK) return status;
  *any_live = self->grads_live;
  return FSDP_OK;
}

static fsdp_status show_grads(void *context, void *owner, fsdp_view view,
                              void *const *segments, fsdp_error *error) {
  (void)segments;
  return begin(context, FSDP_BACKEND, error, "show_grads %s %s",
               owner_name(context, owner), view_name(view));
}

static grad_shard *add_grad_shard(recorder *self, void *owner, int64_t segment,
                                  void *data) {
  self->grad_shards =
      append_item(self->grad_shards, self->num_grad_shards, sizeof(grad_shard));
  grad_shard *added = &self->grad_shards[self->num_grad_shards++];
  *added = (grad_shard){.owner = owner, .segment = segment, .data = data};
  return added;
}

static fsdp_status get_grad_shard(void *context, void *owner, int64_t segment,
                                  void **data, fsdp_error *error) {
  recorder *self = context;
  const fsdp_status status =
      begin(self, FSDP_OUT_OF_MEMORY, error, "grad_shard %s %" PRId64,
            owner_name(self, owner), segment);
  if (status != FSDP_OK) return status;
  for (int64_t i = 0; i < self->num_grad_shards; i++) {
    const grad_shard *known = &self->grad_shards[i];
    if (known->owner != owner || known->segment != segment) continue;
    *data = known->data;
    return FSDP_OK;
  }
  grad_shard *added =
      add_grad_shard(self, owner, segment, must(calloc(1, GRAD_SHARD_NBYTES)));
  added->is_owned = true;
  *data = added->data;
  return FSDP_OK;
}

static void grad_release(void *context, void *token) {
  recorder *self = context;
  write_line(self, "release %s", find_name(&self->tokens, token, "t", 1));
}

/* --- Public -------------------------------------------------------------- */

recorder *recorder_create(void) {
  recorder *self = must(calloc(1, sizeof *self));
  self->ops = (fsdp_device_ops){.context = self,
                                .block_alloc = block_alloc,
                                .block_free = block_free,
                                .event_create = event_create,
                                .event_destroy = event_destroy,
                                .event_record = event_record,
                                .event_wait = event_wait,
                                .cast = cast,
                                .pack = pack,
                                .accumulate = accumulate,
                                .group_begin = group_begin,
                                .group_end = group_end,
                                .all_gather = all_gather,
                                .reduce_scatter = reduce_scatter,
                                .all_reduce = all_reduce,
                                .show_params = show_params,
                                .take_params = take_params,
                                .take_grads = take_grads,
                                .show_grads = show_grads,
                                .grad_shard = get_grad_shard,
                                .grad_release = grad_release};
  self->fail_at = -1;
  tape_append(self, "");
  return self;
}

void recorder_destroy(recorder *self) {
  for (int64_t i = 0; i < self->num_memories; i++) {
    memory *block = &self->memories[i];
    if (block->is_block && block->data != NULL) {
      block_free(self, (void *)(uintptr_t)block->data, block->nbytes, NULL);
    }
  }
  while (self->events != NULL) event_destroy(self, self->events);
  for (int64_t i = 0; i < self->num_grad_shards; i++) {
    if (self->grad_shards[i].is_owned) free(self->grad_shards[i].data);
  }
  free(self->grad_shards);
  free(self->tokens.items);
  free(self->groups.items);
  free(self->owners.items);
  free(self->memories);
  free(self->tape);
  free(self);
}

const fsdp_device_ops *recorder_ops(recorder *self) {
  return &self->ops;
}

const char *recorder_tape(const recorder *self) {
  return self->tape;
}

void recorder_clear(recorder *self) {
  self->tape_length = 0;
  self->tape[0] = '\0';
}

void recorder_show_memory(recorder *self, bool is_shown) {
  self->shows_memory = is_shown;
}

void recorder_name_memory(recorder *self, const void *data, int64_t nbytes,
                          const char *name) {
  memory *added = add_memory(self, data, nbytes);
  snprintf(added->name, sizeof added->name, "%s", name);
}

void recorder_name_owner(recorder *self, const void *owner, const char *name) {
  named *item = add_named(&self->owners, owner);
  snprintf(item->name, sizeof item->name, "%s", name);
}

void recorder_fail_at(recorder *self, int64_t index) {
  self->fail_at = index;
}

int64_t recorder_num_calls(const recorder *self) {
  return self->num_calls;
}

int64_t recorder_live_blocks(const recorder *self) {
  return self->live_blocks;
}

int64_t recorder_live_nbytes(const recorder *self) {
  return self->live_nbytes;
}

int64_t recorder_live_events(const recorder *self) {
  return self->live_events;
}

void recorder_set_grads_live(recorder *self, bool any_live) {
  self->grads_live = any_live;
}

void recorder_set_grad_shard(recorder *self, void *owner, int64_t segment,
                             void *data) {
  add_grad_shard(self, owner, segment, data);
}
