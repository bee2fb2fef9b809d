/*
 * Recorder: see recorder.h. Its tape and its names; the operations are in
 * recorder_device.c, recorder_views.c and recorder_transport.c, what catches
 * races in recorder_races.c.
 */
#include "recorder.h"

#include <stdarg.h>

#include "recorder_priv.h"

/* --- Memory of the recorder itself --------------------------------------- */

void *recorder_priv_must(void *pointer) {
  if (pointer != NULL) return pointer;
  fprintf(stderr, "recorder: out of memory\n");
  exit(2);
}

void *recorder_priv_append_item(void *items, int64_t num_items, size_t nbytes) {
  return recorder_priv_must(realloc(items, ((size_t)num_items + 1) * nbytes));
}

void recorder_priv_die(const char *what) {
  fprintf(stderr, "recorder: %s\n", what);
  exit(2);
}

/* --- Names --------------------------------------------------------------- */

static const char *name_of_dtype(fsdp_dtype dtype) {
  switch (dtype.code) {
    case FSDP_DTYPE_FLOAT32:
      return "f32";
    case FSDP_DTYPE_BFLOAT16:
      return "bf16";
    case FSDP_DTYPE_FLOAT64:
      return "f64";
    case FSDP_DTYPE_UINT8:
      return "u8";
    default:
      return "unknown";
  }
}

const char *recorder_priv_lane_name(fsdp_lane lane) {
  static const char *const names[FSDP_NUM_LANES] = {
      "compute", "unshard", "reduce", "replicate", "upload", "download"};
  return (unsigned)lane < FSDP_NUM_LANES ? names[lane] : "unknown_lane";
}

static const char *name_of_view(fsdp_view view) {
  static const char *const names[] = {"sharded",      "unsharded", "full",
                                      "full_on_host", "part",      "partial"};
  return (unsigned)view < 6 ? names[view] : "unknown_view";
}

static named *add_named(named_list *list, const void *pointer) {
  list->items =
      recorder_priv_append_item(list->items, list->num_items, sizeof(named));
  named *item = &list->items[list->num_items++];
  item->pointer = pointer;
  return item;
}

/* The name of `pointer`; at first sight `prefix` and the next number. */
const char *recorder_priv_find_name(named_list *list, const void *pointer,
                                    const char *prefix, int64_t first_number) {
  for (int64_t i = 0; i < list->num_items; i++) {
    if (list->items[i].pointer == pointer) return list->items[i].name;
  }
  const int64_t number = list->num_items + first_number;
  named *item = add_named(list, pointer);
  snprintf(item->name, sizeof item->name, "%s%" PRId64, prefix, number);
  return item->name;
}

memory *recorder_priv_add_memory(recorder *self, const void *data,
                                 int64_t nbytes) {
  self->memories = recorder_priv_append_item(self->memories, self->num_memories,
                                             sizeof(memory));
  memory *added = &self->memories[self->num_memories++];
  *added = (memory){.data = data, .nbytes = nbytes};
  return added;
}

const char *recorder_priv_memory_name(const recorder *self, const char *before,
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
    self->tape = recorder_priv_must(realloc(self->tape, self->tape_capacity));
  }
  memcpy(self->tape + self->tape_length, text, length + 1);
  self->tape_length += length;
}

static void append_memory(recorder *self, const char *before, const void *data,
                          char *text, size_t nbytes) {
  const size_t length = strlen(text);
  (void)recorder_priv_memory_name(self, before, data, text + length,
                                  nbytes - length);
}

/* " 5 bf16->f32 add, zero 4 f32"; each with its memory. */
static void append_items(recorder *self, const fsdp_pack_item *items,
                         int64_t num_items, char *to, size_t nbytes) {
  to[0] = '\0';
  for (int64_t i = 0; i < num_items; i++) {
    const fsdp_pack_item *item = &items[i];
    const bool is_constant = item->from == NULL;
    const size_t length = strlen(to);
    (void)snprintf(to + length, nbytes - length, "%s %s%" PRId64 " %s%s%s%s",
                   i == 0 ? "" : ",",
                   !is_constant   ? ""
                   : item->is_one ? "one "
                                  : "zero ",
                   item->numel,
                   is_constant ? "" : name_of_dtype(item->from_dtype),
                   is_constant ? "" : "->", name_of_dtype(item->to_dtype),
                   !is_constant && item->add ? " add" : "");
    append_memory(self, " ", item->to, to, nbytes);
    if (!is_constant) append_memory(self, " <- ", item->from, to, nbytes);
  }
}

/* One directive of a line's format; see recorder_priv_begin. */
static void append_directive(recorder *self, char directive, char *to,
                             size_t nbytes, va_list *arguments) {
  const char *text = "";
  if (directive == 'd') {
    (void)snprintf(to, nbytes, "%" PRId64, va_arg(*arguments, int64_t));
    return;
  }
  if (directive == 'g') {
    (void)snprintf(to, nbytes, "%g", va_arg(*arguments, double));
    return;
  }
  if (directive == 't' || directive == 'f') {
    const void *data = va_arg(*arguments, const void *);
    if (data == NULL) return;
    (void)recorder_priv_memory_name(self, directive == 't' ? " " : " <- ", data,
                                    to, nbytes);
    return;
  }
  if (directive == 'I') {
    const fsdp_pack_item *items = va_arg(*arguments, const fsdp_pack_item *);
    append_items(self, items, va_arg(*arguments, int64_t), to, nbytes);
    return;
  }
  if (directive == 's') text = va_arg(*arguments, const char *);
  if (directive == 'L') {
    text = recorder_priv_lane_name((fsdp_lane)va_arg(*arguments, int));
  }
  if (directive == 'V') text = name_of_view((fsdp_view)va_arg(*arguments, int));
  if (directive == 'D') text = name_of_dtype(va_arg(*arguments, fsdp_dtype));
  if (directive == 'O' || directive == 'G') {
    const void *pointer = va_arg(*arguments, const void *);
    text = directive == 'O'
               ? recorder_priv_find_name(&self->owners, pointer, "unit", 0)
               : recorder_priv_find_name(&self->groups, pointer, "g", 0);
  }
  (void)snprintf(to, nbytes, "%s", text);
}

static void format_line(recorder *self, char *line, size_t nbytes,
                        const char *format, va_list *arguments) {
  size_t length = 0;
  for (; *format != '\0' && length + 1 < nbytes; format++) {
    line[length] = *format;
    line[length + 1] = '\0';
    if (*format == '%') {
      line[length] = '\0';
      append_directive(self, *++format, line + length, nbytes - length,
                       arguments);
      length += strlen(line + length);
    } else {
      length++;
    }
  }
}

void recorder_priv_write_line(recorder *self, const char *format, ...) {
  char line[1024] = "";
  va_list arguments;
  va_start(arguments, format);
  format_line(self, line, sizeof line, format, &arguments);
  va_end(arguments);
  tape_append(self, line);
  tape_append(self, "\n");
}

fsdp_status recorder_priv_begin(recorder *self, fsdp_status code,
                                fsdp_error *error, const char *format, ...) {
  char line[1024] = "";
  va_list arguments;
  va_start(arguments, format);
  format_line(self, line, sizeof line, format, &arguments);
  va_end(arguments);

  self->num_calls++;
  const int64_t index = self->fail_at;
  if (index >= 0) self->fail_at--;
  if (index == 0) {
    if (strncmp(line, "record ", 7) == 0 || strncmp(line, "wait ", 5) == 0) {
      self->lacks_order = true;
    }
    return FSDP_FAIL(error, code, "injected at %s", line);
  }
  tape_append(self, line);
  tape_append(self, "\n");
  return FSDP_OK;
}

/* --- Public -------------------------------------------------------------- */

recorder *recorder_create(void) {
  recorder *self = recorder_priv_must(calloc(1, sizeof *self));
  self->ops = recorder_priv_device_ops(self);
  self->views = recorder_priv_view_ops(self);
  self->fail_at = -1;
  tape_append(self, "");
  return self;
}

void recorder_destroy(recorder *self) {
  for (int64_t i = 0; i < self->num_memories; i++) {
    memory *block = &self->memories[i];
    if (block->is_block && block->data != NULL) {
      recorder_priv_free_block(self, block);
    }
  }
  while (self->events != NULL) {
    self->ops.event_destroy(self, self->events);
  }
  while (self->transports != NULL) {
    recorder_transport *next = self->transports->next;
    free(self->transports);
    self->transports = next;
  }
  free(self->accesses);
  for (int64_t i = 0; i < self->num_grad_shards; i++) {
    if (self->grad_shards[i].is_owned) free(self->grad_shards[i].data);
  }
  free(self->grad_shards);
  free(self->loans);
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

const fsdp_view_ops *recorder_views(recorder *self) {
  return &self->views;
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
  memory *added = recorder_priv_add_memory(self, data, nbytes);
  snprintf(added->name, sizeof added->name, "%s", name);
}

void recorder_name_host_memory(recorder *self, const void *data, int64_t nbytes,
                               const char *name) {
  recorder_name_memory(self, data, nbytes, name);
  self->memories[self->num_memories - 1].is_host = true;
}

void recorder_unname_memory(recorder *self, const void *data) {
  for (int64_t i = 0; i < self->num_memories; i++) {
    if (self->memories[i].data == data) self->memories[i].data = NULL;
  }
}

void recorder_name_owner(recorder *self, const void *owner, const char *name) {
  named *item = add_named(&self->owners, owner);
  snprintf(item->name, sizeof item->name, "%s", name);
}

void recorder_limit_memory(recorder *self, int64_t nbytes) {
  self->memory_limit = nbytes;
}

void recorder_set_host(recorder *self, bool is_host) {
  self->is_host = is_host;
  self->ops.is_host = is_host;
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

void recorder_set_params_copied(recorder *self, bool any_copied) {
  self->params_copied = any_copied;
}

void recorder_set_params_changed(recorder *self, bool changed) {
  self->params_changed = changed;
}

void recorder_set_grad_shard(recorder *self, void *owner, int64_t segment,
                             void *data, int64_t nbytes) {
  (void)recorder_priv_add_grad_shard(self, owner, segment, data, nbytes);
}

void recorder_set_broadcast(recorder *self, double first) {
  self->broadcast_first = first;
}

static void answer_byte(void *context, int64_t rank, const void *mine,
                        int64_t nbytes, void *theirs) {
  (void)rank;
  (void)mine;
  memset(theirs, *(const unsigned char *)context, (size_t)nbytes);
}

void recorder_set_answer(recorder *self, recorder_answer answer,
                         void *context) {
  self->answer = answer;
  self->answer_context = context;
}

void recorder_set_answer_byte(recorder *self, bool byte) {
  static unsigned char bytes[] = {0, 1};
  recorder_set_answer(self, answer_byte, &bytes[byte]);
}
