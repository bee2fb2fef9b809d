/* What the recorder's files share. */
#ifndef FSDP_TESTS_RECORDER_PRIV_H
#define FSDP_TESTS_RECORDER_PRIV_H

#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "recorder.h"

enum { RECORDER_NAME_NBYTES = 32 };

enum { RECORDER_HOST = FSDP_NUM_LANES, RECORDER_NUM_LANES };

/* For each lane, and the host, how much of its work has happened before. */
typedef struct recorder_clock {
  int64_t done[RECORDER_NUM_LANES];
} recorder_clock;

/* A lane touched memory. */
typedef struct access {
  const char *begin;
  const char *end;
  int lane;
  int64_t time; /* of that lane */
  bool is_write;
} access;

struct fsdp_event {
  int64_t number;
  recorder_clock clock; /* of its last record */
  fsdp_event *next;     /* list of the live ones */
};

/* A block, or memory that a test named. */
typedef struct memory {
  const char *data; /* NULL: freed */
  int64_t nbytes;
  char name[RECORDER_NAME_NBYTES];
  bool is_block;
  bool is_host;
} memory;

/* Something known by its pointer: an owner, a transport, a token. */
typedef struct named {
  const void *pointer;
  char name[RECORDER_NAME_NBYTES];
} named;

typedef struct named_list {
  named *items;
  int64_t num_items;
} named_list;

typedef struct grad_shard {
  void *owner;
  int64_t segment;
  void *data;
  int64_t nbytes;
  bool is_owned;
  bool is_made; /* allocated, as the engine knows it */
} grad_shard;

/* Memory that the user sees gradients in. */
typedef struct loan {
  const void *owner;
  fsdp_view view;
  const char *data;
} loan;

typedef struct recorder_transport {
  fsdp_transport base;
  fsdp_transport_ops ops;
  recorder *device;
  int64_t rank;
  int64_t world_size;
  struct recorder_transport *next; /* list of all */
} recorder_transport;

struct recorder {
  fsdp_device_ops ops;
  fsdp_view_ops views;
  recorder_transport *transports;
  char *tape;
  size_t tape_length;
  size_t tape_capacity;
  bool shows_memory;
  int64_t fail_at;
  int64_t num_calls;
  memory *memories;
  int64_t num_memories;
  int64_t num_blocks_ever;
  int64_t num_host_blocks_ever;
  int64_t live_blocks;
  int64_t live_nbytes;
  int64_t memory_limit; /* of live_nbytes; 0: none */
  bool is_host;         /* a device without streams */
  fsdp_event *events;
  int64_t num_events_ever;
  int64_t live_events;
  named_list owners;
  named_list groups;
  named_list tokens;
  grad_shard *grad_shards;
  int64_t num_grad_shards;
  loan *loans;
  int64_t num_loans;
  bool grads_live;
  bool params_copied;
  bool params_changed;
  double broadcast_first;
  recorder_answer answer;
  void *answer_context;
  recorder_clock clocks[RECORDER_NUM_LANES];
  access *accesses;
  int64_t num_accesses;
  char race[256];   /* the first one */
  bool lacks_order; /* a record or a wait failed: less is ordered than should */
};

void *recorder_priv_must(void *pointer);
void *recorder_priv_append_item(void *items, int64_t num_items, size_t nbytes);
void recorder_priv_die(const char *what);

const char *recorder_priv_lane_name(fsdp_lane lane);
const char *recorder_priv_find_name(named_list *list, const void *pointer,
                                    const char *prefix, int64_t first_number);
memory *recorder_priv_add_memory(recorder *self, const void *data,
                                 int64_t nbytes);
/* "b1+16" into `text`; "" unless memory is shown. */
const char *recorder_priv_memory_name(const recorder *self, const char *before,
                                      const void *data, char *text,
                                      size_t text_nbytes);

/* Starts an operation that can fail: its line, or the injected failure. In the
 * format %d is an int64_t, %g a double, %s a text, %L a lane, %D a dtype, %V a
 * view, %O an owner, %G a transport, %I items and their number; %t and %f are
 * memory, as " b1" and " <- b1" where memory is shown. */
fsdp_status recorder_priv_begin(recorder *self, fsdp_status code,
                                fsdp_error *error, const char *format, ...);
/* The line of an operation that cannot fail. */
void recorder_priv_write_line(recorder *self, const char *format, ...);

/* recorder_device.c */
fsdp_device_ops recorder_priv_device_ops(recorder *self);
void recorder_priv_free_block(recorder *self, memory *block);
bool recorder_priv_is_on_host(const recorder *self, const void *data);
void recorder_priv_touch(recorder *self, fsdp_lane lane, const void *data,
                         int64_t nbytes, bool is_write);

/* recorder_views.c */
fsdp_view_ops recorder_priv_view_ops(recorder *self);
grad_shard *recorder_priv_add_grad_shard(recorder *self, void *owner,
                                         int64_t segment, void *data,
                                         int64_t nbytes);

/* recorder_races.c */
/* Items of one call run in no order: what one writes no other touches. */
void recorder_priv_check_items(recorder *self, fsdp_lane lane,
                               const fsdp_pack_item *items, int64_t num_items);
void recorder_priv_record(recorder *self, fsdp_event *event, fsdp_lane lane);
void recorder_priv_wait(recorder *self, int lane, const fsdp_event *event);

#endif /* FSDP_TESTS_RECORDER_PRIV_H */
