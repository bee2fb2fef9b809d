/* The recorder's views, in the order of the table. */
#include <string.h>

#include "recorder_priv.h"

enum { GRAD_SHARD_NBYTES = 4096 };

static fsdp_status show_params(void *context, void *owner, fsdp_view view,
                               void *const *segments, fsdp_error *error) {
  if (view == FSDP_VIEW_SHARDED && segments != NULL) { /* beside its block */
    return recorder_priv_begin(context, FSDP_BACKEND, error, "hide %O", owner);
  }
  return recorder_priv_begin(context, FSDP_BACKEND, error, "show %O %V", owner,
                             view);
}

static void empty_params(void *context, void *owner) {
  recorder_priv_write_line(context, "empty %O", owner);
}

static fsdp_status take_params(void *context, void *owner, fsdp_view view,
                               void *const *segments, bool *any_copied,
                               fsdp_error *error) {
  recorder *self = context;
  (void)segments;
  const fsdp_status status = recorder_priv_begin(
      self, FSDP_BACKEND, error, "take_params %O %V", owner, view);
  if (status != FSDP_OK) return status;
  *any_copied = self->params_copied;
  return FSDP_OK;
}

static void mark_params(void *context, void *owner) {
  recorder_priv_write_line(context, "mark_params %O", owner);
}

static fsdp_status take_writes(void *context, void *owner, bool in_backward,
                               fsdp_error *error) {
  return recorder_priv_begin(context, FSDP_BACKEND, error, "take_writes %O%s",
                             owner, in_backward ? " in backward" : "");
}

static bool params_changed(void *context, void *owner) {
  recorder *self = context;
  recorder_priv_write_line(context, "params_changed %O", owner);
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
      recorder_priv_begin(self, FSDP_BACKEND, error, "take_grads %O%s", owner,
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
      self, FSDP_BACKEND, error, "take_full_grads %O %V", owner, view);
  if (status != FSDP_OK) return status;
  *any_live = self->grads_live;
  return FSDP_OK;
}

static bool grads_live(void *context, void *owner) {
  recorder *self = context;
  recorder_priv_write_line(context, "grads_live %O", owner);
  return self->grads_live;
}

static void grads_free(void *context, void *owner) {
  recorder_priv_write_line(context, "grads_free %O", owner);
  set_grad_shards_made(context, owner, false);
}

static fsdp_status show_grads(void *context, void *owner, fsdp_view view,
                              void *const *segments, fsdp_error *error) {
  (void)segments;
  return recorder_priv_begin(context, FSDP_BACKEND, error, "show_grads %O %V",
                             owner, view);
}

void recorder_lend(recorder *self, const void *owner, fsdp_view view,
                   const void *data) {
  for (int64_t i = 0; i < self->num_loans; i++) {
    if (self->loans[i].data == data) return;
  }
  self->loans = recorder_priv_append_item(self->loans, self->num_loans,
                                          sizeof *self->loans);
  self->loans[self->num_loans++] =
      (loan){.owner = owner, .view = view, .data = data};
}

static void keep_grads(void *context, void *owner, fsdp_view view) {
  recorder *self = context;
  int64_t num_left = 0;
  for (int64_t i = 0; i < self->num_loans; i++) {
    const loan *each = &self->loans[i];
    if (each->owner == owner && each->view == view) continue;
    self->loans[num_left++] = *each;
  }
  if (num_left < self->num_loans) {
    recorder_priv_write_line(self, "keep_grads %O %V", owner, view);
  }
  self->num_loans = num_left;
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
      self, FSDP_OUT_OF_MEMORY, error, "grad_shard %O %d", owner, segment);
  if (status != FSDP_OK) return status;
  grad_shard *shard = find_grad_shard(self, owner, segment);
  if (!shard->is_made && is_replaced) {
    memset(shard->data, 0xCD, (size_t)shard->nbytes); /* nobody may read it */
  } else if (!shard->is_made) {
    const int lane = recorder_priv_is_on_host(self, shard->data)
                         ? RECORDER_HOST
                         : (int)FSDP_LANE_COMPUTE;
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

static fsdp_status reduce_hook(void *context, void *owner, fsdp_lane lane,
                               int64_t segment, void *buffer,
                               fsdp_error *error) {
  return recorder_priv_begin(context, FSDP_BACKEND, error,
                             "reduce_hook %O %L %d%t", owner, lane, segment,
                             buffer);
}

/* All ranks have the same elements, as in a gather of the transport. */
static fsdp_status custom_add(void *context, void *owner, void *whole,
                              int64_t whole_numel, const void *own,
                              int64_t own_numel, fsdp_dtype dtype,
                              fsdp_error *error) {
  const fsdp_status status =
      recorder_priv_begin(context, FSDP_BACKEND, error, "custom_add %O %d%t",
                          owner, own_numel, whole);
  if (status != FSDP_OK) return status;
  const size_t nbytes = (size_t)(own_numel * dtype.itemsize);
  for (int64_t i = 0; i < whole_numel / own_numel; i++) {
    char *slot = (char *)whole + (size_t)i * nbytes;
    if (slot != own) memcpy(slot, own, nbytes); /* no partial overlap */
  }
  return FSDP_OK;
}

static fsdp_status custom_run(void *context, void *owner, fsdp_lane lane,
                              fsdp_custom kind, const fsdp_group *group,
                              double scale, fsdp_error *error) {
  (void)group;
  (void)scale;
  return recorder_priv_begin(context, FSDP_BACKEND, error,
                             "custom_run %O %L %d", owner, lane, (int64_t)kind);
}

fsdp_view_ops recorder_priv_view_ops(recorder *self) {
  return (fsdp_view_ops){
      .context = self,
      .reduce_hook = reduce_hook,
      .custom_add = custom_add,
      .custom_run = custom_run,
      .show_params = show_params,
      .empty_params = empty_params,
      .take_params = take_params,
      .mark_params = mark_params,
      .take_writes = take_writes,
      .params_changed = params_changed,
      .take_grads = take_grads,
      .take_full_grads = take_full_grads,
      .grads_live = grads_live,
      .grads_free = grads_free,
      .show_grads = show_grads,
      .keep_grads = keep_grads,
      .grad_shard = get_grad_shard,
      .grad_release = grad_release,
  };
}
