/* Offload: groups of items, and the copies between the lanes. */
#include "offload/offload.h"

#include <inttypes.h>

#include "base/alloc.h"
#include "offload/host_pieces.h"

/* Where an item's bytes are. */
typedef enum place {
  ON_DEVICE = 0, /* not copied */
  LEAVING,       /* on the device; DOWNLOAD copies them */
  ON_HOST,
  ARRIVING, /* on the host; UPLOAD copies them to the device */
  ON_BOTH
} place;

typedef struct group group;

struct fsdp_offload_item {
  void *token;
  const void *source; /* on the device, until it was copied; of the caller */
  void *target;       /* likewise, when it comes back */
  int64_t nbytes;
  int64_t host_begin; /* in the group's run */
  place place;
  bool is_dropped; /* goes when its copy has been waited for */
  group *group;
  fsdp_offload_item *before;
  fsdp_offload_item *after;
};

struct group {
  fsdp_offload_item *first;
  fsdp_offload_item *last;
  bool is_away; /* its items were copied, or are being copied */
  bool is_arriving;
  int64_t num_on_host;
  fsdp_host_run run;
  fsdp_event *left;    /* recorded behind the downloads */
  fsdp_event *arrived; /* behind the uploads */
  group *before;       /* in the order of forward */
  group *after;        /* also of the list of spare groups */
};

struct fsdp_offload {
  const fsdp_device_ops *ops;
  fsdp_offload_calls calls;
  fsdp_host_pieces pieces;
  int64_t keep_last;
  group *open;    /* the newest; never NULL */
  group *leaving; /* NULL: none */
  group *spare;   /* list of groups to be used again */
  fsdp_event *moment;
  bool has_uploads; /* since DOWNLOAD last waited for them */
  fsdp_offload_stats stats;
};

/* Lanes -------------------------------------------------------------------- */

/* Later work on `lane` starts after all work now on `other`. */
static fsdp_status follow(fsdp_offload *self, fsdp_lane lane, fsdp_lane other,
                          fsdp_error *error) {
  const fsdp_device_ops *ops = self->ops;
  fsdp_status status = FSDP_OK;
  FSDP_TRY(ops->event_record(ops->context, self->moment, other, error));
  FSDP_TRY(ops->event_wait(ops->context, lane, self->moment, error));
done:
  return status;
}

/* The same after a failure, which is the one to report. */
static void follow_if_possible(fsdp_offload *self, fsdp_lane lane,
                               fsdp_lane other) {
  const fsdp_status ignored = follow(self, lane, other, NULL);
  (void)ignored;
}

/* Lists -------------------------------------------------------------------- */

static void append(group *to, fsdp_offload_item *item) {
  item->group = to;
  item->before = to->last;
  item->after = NULL;
  if (to->last != NULL) {
    to->last->after = item;
  } else {
    to->first = item;
  }
  to->last = item;
}

static void unlink_item(fsdp_offload_item *item) {
  group *from = item->group;
  if (item->before != NULL) {
    item->before->after = item->after;
  } else {
    from->first = item->after;
  }
  if (item->after != NULL) {
    item->after->before = item->before;
  } else {
    from->last = item->before;
  }
}

static fsdp_status make_group(fsdp_offload *self, group **made,
                              fsdp_error *error) {
  const fsdp_device_ops *ops = self->ops;
  group *created = self->spare;
  fsdp_status status = FSDP_OK;

  if (created != NULL) {
    self->spare = created->after;
    created->after = NULL;
    *made = created;
    return FSDP_OK;
  }
  created = fsdp_calloc(1, sizeof *created);
  if (created == NULL) {
    return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY,
                     "out of host memory for a group of saved tensors");
  }
  FSDP_TRY(ops->event_create(ops->context, &created->left, error));
  FSDP_TRY(ops->event_create(ops->context, &created->arrived, error));
  *made = created;
  created = NULL;
done:
  if (created != NULL) {
    if (created->left != NULL) ops->event_destroy(ops->context, created->left);
    fsdp_free(created);
  }
  return status;
}

static void free_group(const fsdp_offload *self, group *freed) {
  const fsdp_device_ops *ops = self->ops;
  ops->event_destroy(ops->context, freed->left);
  ops->event_destroy(ops->context, freed->arrived);
  fsdp_host_run_fini(&freed->run);
  fsdp_free(freed);
}

/* Puts a group that has no items aside, unless it is open. */
static void retire_if_empty(fsdp_offload *self, group *retired) {
  if (retired->first != NULL || retired == self->open) return;
  if (self->leaving == retired) self->leaving = NULL;
  if (retired->before != NULL) retired->before->after = retired->after;
  retired->after->before = retired->before; /* the open one comes last */
  fsdp_host_pieces_give(&self->pieces, &retired->run);
  retired->is_away = false;
  retired->is_arriving = false;
  retired->num_on_host = 0;
  retired->before = NULL;
  retired->after = self->spare;
  self->spare = retired;
}

static bool has_host_copy(const fsdp_offload_item *item) {
  return item->place != ON_DEVICE;
}

static void forget(fsdp_offload *self, fsdp_offload_item *item) {
  if (has_host_copy(item)) self->stats.held_nbytes -= item->nbytes;
  if (item->place == ON_HOST) item->group->num_on_host--;
  unlink_item(item);
  self->calls.forget(self->calls.context, item->token);
  fsdp_free(item);
}

/* The item's device memory goes; its bytes are on the host. */
static void let_go(fsdp_offload *self, fsdp_offload_item *item) {
  self->calls.let_go(self->calls.context, item->token);
  item->place = ON_HOST;
  item->group->num_on_host++;
}

/* Copies to the host ------------------------------------------------------- */

/* COMPUTE waits for the group that leaves, whose device memory goes. */
static fsdp_status finish_leaving(fsdp_offload *self, fsdp_error *error) {
  const fsdp_device_ops *ops = self->ops;
  group *leaving = self->leaving;
  fsdp_status status = FSDP_OK;

  if (leaving == NULL) return FSDP_OK;
  FSDP_TRY(
      ops->event_wait(ops->context, FSDP_LANE_COMPUTE, leaving->left, error));
  self->leaving = NULL;
  for (fsdp_offload_item *item = leaving->first; item != NULL;) {
    fsdp_offload_item *after = item->after;
    if (item->place == LEAVING) {
      let_go(self, item);
      if (item->is_dropped) forget(self, item);
    }
    item = after;
  }
  retire_if_empty(self, leaving);
done:
  return status;
}

static fsdp_status download(fsdp_offload *self, fsdp_offload_item *item,
                            fsdp_error *error) {
  fsdp_host_run *run = &item->group->run;
  fsdp_status status = FSDP_OK;
  FSDP_TRY(fsdp_host_pieces_take(&self->pieces, run, item->nbytes,
                                 &item->host_begin, error));
  item->place = LEAVING;
  self->stats.held_nbytes += item->nbytes;
  FSDP_TRY(fsdp_host_pieces_download(&self->pieces, run, item->host_begin,
                                     item->source, item->nbytes, error));
  self->stats.num_downloads++;
done:
  return status;
}

/* After a failure the group stays; some copies may be in flight. */
static void undo_leaving(fsdp_offload *self, group *from) {
  follow_if_possible(self, FSDP_LANE_COMPUTE, FSDP_LANE_DOWNLOAD);
  for (fsdp_offload_item *item = from->first; item != NULL;
       item = item->after) {
    if (item->place != LEAVING) continue;
    item->place = ON_DEVICE;
    self->stats.held_nbytes -= item->nbytes;
  }
  fsdp_host_pieces_give(&self->pieces, &from->run);
}

/* Moves items that somebody else holds, too, from the group to the open one. */
static void keep_shared(fsdp_offload *self, group *from) {
  for (fsdp_offload_item *item = from->first; item != NULL;) {
    fsdp_offload_item *after = item->after;
    if (!self->calls.is_alone(self->calls.context, item->token)) {
      unlink_item(item);
      append(self->open, item);
    }
    item = after;
  }
  retire_if_empty(self, from);
}

/* Starts the copies of a group that is on the device. */
static fsdp_status start_leaving(fsdp_offload *self, group *from,
                                 fsdp_error *error) {
  const fsdp_device_ops *ops = self->ops;
  fsdp_status status = FSDP_OK;

  FSDP_TRY(follow(self, FSDP_LANE_DOWNLOAD, FSDP_LANE_COMPUTE, error));
  if (self->has_uploads) { /* chunks are used again */
    FSDP_TRY(follow(self, FSDP_LANE_DOWNLOAD, FSDP_LANE_UPLOAD, error));
    self->has_uploads = false;
  }
  for (fsdp_offload_item *item = from->first; item != NULL;
       item = item->after) {
    FSDP_TRY(download(self, item, error));
  }
  FSDP_TRY(
      ops->event_record(ops->context, from->left, FSDP_LANE_DOWNLOAD, error));
  if (self->stats.held_nbytes > self->stats.peak_nbytes) {
    self->stats.peak_nbytes = self->stats.held_nbytes;
  }
  from->is_away = true;
  self->leaving = from;
done:
  if (status != FSDP_OK) undo_leaving(self, from);
  return status;
}

fsdp_status fsdp_offload_enter(fsdp_offload *self, fsdp_error *error) {
  group *closed = self->open;
  group *opened = NULL;
  fsdp_status status = FSDP_OK;

  if (closed->first == NULL) return FSDP_OK;
  FSDP_TRY(make_group(self, &opened, error));
  opened->before = closed;
  closed->after = opened;
  self->open = opened;

  FSDP_TRY(finish_leaving(self, error));
  group *next = closed;
  for (int64_t i = 1; next != NULL && i < self->keep_last; i++) {
    next = next->before;
  }
  while (next != NULL && !next->is_away) {
    group *before = next->before;
    keep_shared(self, next);
    if (next->first != NULL) {
      FSDP_TRY(finish_leaving(self, error));
      FSDP_TRY(start_leaving(self, next, error));
    }
    next = before;
  }
done:
  return status;
}

fsdp_status fsdp_offload_leave(fsdp_offload *self, fsdp_error *error) {
  return finish_leaving(self, error);
}

/* Copies to the device ----------------------------------------------------- */

/* Makes device memory for what is only on the host. */
static fsdp_status make_room(fsdp_offload *self, group *from,
                             fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  for (fsdp_offload_item *item = from->first; item != NULL;
       item = item->after) {
    if (item->place != ON_HOST) continue;
    FSDP_TRY(self->calls.make(self->calls.context, item->token, &item->target,
                              error));
    item->place = ARRIVING;
    from->num_on_host--;
  }
done:
  return status;
}

static fsdp_status upload(fsdp_offload *self, group *from, fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  for (fsdp_offload_item *item = from->first; item != NULL;
       item = item->after) {
    if (item->place != ARRIVING) continue;
    FSDP_TRY(fsdp_host_pieces_upload(&self->pieces, &from->run,
                                     item->host_begin, item->target,
                                     item->nbytes, error));
    self->stats.num_uploads++;
  }
done:
  return status;
}

/* After a failure; some copies may be in flight. */
static void undo_arriving(fsdp_offload *self, group *from) {
  follow_if_possible(self, FSDP_LANE_COMPUTE, FSDP_LANE_UPLOAD);
  for (fsdp_offload_item *item = from->first; item != NULL;
       item = item->after) {
    if (item->place == ARRIVING) let_go(self, item);
  }
}

/* Starts the copies of what is only on the host. */
static fsdp_status start_arriving(fsdp_offload *self, group *from,
                                  fsdp_error *error) {
  const fsdp_device_ops *ops = self->ops;
  fsdp_status status = FSDP_OK;

  if (from->num_on_host == 0 || from->is_arriving) return FSDP_OK;
  FSDP_TRY(make_room(self, from, error));
  /* COMPUTE may have used that memory last. */
  FSDP_TRY(follow(self, FSDP_LANE_UPLOAD, FSDP_LANE_COMPUTE, error));
  FSDP_TRY(ops->event_wait(ops->context, FSDP_LANE_UPLOAD, from->left, error));
  self->has_uploads = true;
  FSDP_TRY(upload(self, from, error));
  FSDP_TRY(
      ops->event_record(ops->context, from->arrived, FSDP_LANE_UPLOAD, error));
  from->is_arriving = true;
done:
  if (status != FSDP_OK) undo_arriving(self, from);
  return status;
}

/* COMPUTE waits for the group that arrives. */
static fsdp_status finish_arriving(fsdp_offload *self, group *from,
                                   fsdp_error *error) {
  const fsdp_device_ops *ops = self->ops;
  fsdp_status status = FSDP_OK;

  if (!from->is_arriving) return FSDP_OK;
  FSDP_TRY(
      ops->event_wait(ops->context, FSDP_LANE_COMPUTE, from->arrived, error));
  from->is_arriving = false;
  for (fsdp_offload_item *item = from->first; item != NULL;) {
    fsdp_offload_item *after = item->after;
    if (item->place == ARRIVING) {
      item->place = ON_BOTH;
      if (item->is_dropped) forget(self, item);
    }
    item = after;
  }
done:
  return status;
}

fsdp_status fsdp_offload_need(fsdp_offload *self, fsdp_offload_item *item,
                              fsdp_error *error) {
  group *needed = item->group;
  fsdp_status status = FSDP_OK;

  if (item->place == ON_HOST) {
    FSDP_TRY(finish_arriving(self, needed, error)); /* of an earlier need */
    FSDP_TRY(start_arriving(self, needed, error));
  }
  if (item->place == ARRIVING) FSDP_TRY(finish_arriving(self, needed, error));
  if (needed->before != NULL) {
    FSDP_TRY(start_arriving(self, needed->before, error));
  }
done:
  return status;
}

fsdp_status fsdp_offload_end_backward(fsdp_offload *self, fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  FSDP_TRY(finish_leaving(self, error));
  for (group *each = self->open; each != NULL;) {
    group *before = each->before;
    FSDP_TRY(finish_arriving(self, each, error));
    for (fsdp_offload_item *item = each->first; item != NULL;
         item = item->after) {
      fsdp_offload_spare(self, item);
    }
    retire_if_empty(self, each);
    each = before;
  }
done:
  return status;
}

/* Items -------------------------------------------------------------------- */

fsdp_status fsdp_offload_add(fsdp_offload *self, void *token, const void *data,
                             int64_t nbytes, fsdp_offload_item **item,
                             fsdp_error *error) {
  if (nbytes < 1) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "a saved tensor of %" PRId64 " bytes: need at least 1",
                     nbytes);
  }
  fsdp_offload_item *created = fsdp_calloc(1, sizeof *created);
  if (created == NULL) {
    return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY,
                     "out of host memory for the record of a saved tensor");
  }
  created->token = token;
  created->source = data;
  created->nbytes = nbytes;
  append(self->open, created);
  *item = created;
  return FSDP_OK;
}

void fsdp_offload_add_again(fsdp_offload *self, fsdp_offload_item *item) {
  group *from = item->group;
  if (item->place != ON_DEVICE || from == self->open) return;
  unlink_item(item);
  append(self->open, item);
  retire_if_empty(self, from);
}

void fsdp_offload_spare(fsdp_offload *self, fsdp_offload_item *item) {
  if (item->place == ON_BOTH) let_go(self, item);
}

void fsdp_offload_drop(fsdp_offload *self, fsdp_offload_item *item) {
  group *from = item->group;
  if (item->place == LEAVING || item->place == ARRIVING) {
    item->is_dropped = true;
    return;
  }
  forget(self, item);
  retire_if_empty(self, from);
}

/* Making and taking apart -------------------------------------------------- */

fsdp_status fsdp_offload_create(const fsdp_device_ops *ops,
                                const fsdp_offload_calls *calls,
                                int64_t chunk_nbytes, fsdp_offload **offload,
                                fsdp_error *error) {
  fsdp_offload *created = NULL;
  fsdp_status status = FSDP_OK;

  if (chunk_nbytes < 1 || chunk_nbytes % FSDP_HOST_ALIGNMENT != 0) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "chunks of %" PRId64
                     " bytes of host memory: need a positive multiple of %d",
                     chunk_nbytes, FSDP_HOST_ALIGNMENT);
  }
  created = fsdp_calloc(1, sizeof *created);
  if (created == NULL) {
    return FSDP_FAIL(
        error, FSDP_OUT_OF_MEMORY,
        "out of host memory while creating the offload of saved tensors");
  }
  created->ops = ops;
  created->calls = *calls;
  created->pieces =
      (fsdp_host_pieces){.ops = ops, .chunk_nbytes = chunk_nbytes};
  created->keep_last = 1;
  FSDP_TRY(ops->event_create(ops->context, &created->moment, error));
  FSDP_TRY(make_group(created, &created->open, error));
  *offload = created;
  created = NULL;
done:
  if (created != NULL) {
    if (created->moment != NULL) {
      ops->event_destroy(ops->context, created->moment);
    }
    fsdp_free(created);
  }
  return status;
}

/* The host waits for what is now on the lane. */
static void await_lane(fsdp_offload *self, fsdp_lane lane) {
  const fsdp_device_ops *ops = self->ops;
  if (ops->event_record(ops->context, self->moment, lane, NULL) == FSDP_OK) {
    (void)ops->event_synchronize(ops->context, self->moment, NULL);
  }
}

void fsdp_offload_destroy(fsdp_offload *self) {
  if (self == NULL) return;
  if (self->pieces.num_chunks > 0) {
    await_lane(self, FSDP_LANE_DOWNLOAD);
    await_lane(self, FSDP_LANE_UPLOAD);
  }
  for (group *each = self->open; each != NULL;) {
    group *before = each->before;
    while (each->first != NULL) forget(self, each->first); /* dropped ones */
    fsdp_host_pieces_give(&self->pieces, &each->run);
    free_group(self, each);
    each = before;
  }
  while (self->spare != NULL) {
    group *after = self->spare->after;
    free_group(self, self->spare);
    self->spare = after;
  }
  fsdp_host_pieces_fini(&self->pieces);
  self->ops->event_destroy(self->ops->context, self->moment);
  fsdp_free(self);
}

void fsdp_offload_keep_last(fsdp_offload *self, int64_t num_groups) {
  self->keep_last = num_groups < 1 ? 1 : num_groups;
}

void fsdp_offload_get_stats(const fsdp_offload *self,
                            fsdp_offload_stats *stats) {
  *stats = self->stats;
  stats->host_nbytes = self->pieces.num_chunks * self->pieces.chunk_nbytes;
}
