/* The recorder's transports: every rank of a group holds the same data. */
#include "elements.h"
#include "recorder_priv.h"

static recorder_transport *group_of(fsdp_transport *transport) {
  return (recorder_transport *)transport;
}

/* The clock of a lane stands for its stream. */
static fsdp_lane lane_of(const recorder *self, const fsdp_call *call) {
  return (fsdp_lane)((const recorder_clock *)call->stream - self->clocks);
}

static fsdp_status group_begin(fsdp_transport *transport, const fsdp_call *call,
                               fsdp_error *error) {
  recorder *self = group_of(transport)->device;
  return recorder_priv_begin(
      self, FSDP_BACKEND, error,
      call->is_captured ? "group_begin %L %G captured" : "group_begin %L %G",
      lane_of(self, call), transport);
}

static fsdp_status group_end(fsdp_transport *transport, const fsdp_call *call,
                             fsdp_error *error) {
  recorder *self = group_of(transport)->device;
  return recorder_priv_begin(self, FSDP_BACKEND, error, "group_end %L %G",
                             lane_of(self, call), transport);
}

static fsdp_status all_gather(fsdp_transport *transport, const fsdp_call *call,
                              void *output, const void *input,
                              int64_t shard_numel, fsdp_dtype dtype,
                              uint64_t *ticket, fsdp_error *error) {
  const recorder_transport *group = group_of(transport);
  recorder *self = group->device;
  const fsdp_lane lane = lane_of(self, call);
  (void)ticket;
  const fsdp_status status = recorder_priv_begin(
      self, FSDP_BACKEND, error, "all_gather %L %G %d %D%t%f", lane, transport,
      shard_numel, dtype, output, input);
  if (status != FSDP_OK) return status;
  const size_t nbytes = (size_t)(shard_numel * dtype.itemsize);
  recorder_priv_touch(self, lane, input, (int64_t)nbytes, false);
  recorder_priv_touch(self, lane, output, group->world_size * (int64_t)nbytes,
                      true);
  for (int64_t rank = 0; rank < group->world_size; rank++) {
    char *slot = (char *)output + (size_t)rank * nbytes;
    if (slot != input) memcpy(slot, input, nbytes); /* no partial overlap */
  }
  return FSDP_OK;
}

static fsdp_status broadcast(fsdp_transport *transport, const fsdp_call *call,
                             void *buffer, int64_t numel, int64_t root,
                             fsdp_dtype dtype, uint64_t *ticket,
                             fsdp_error *error) {
  const recorder_transport *group = group_of(transport);
  recorder *self = group->device;
  const fsdp_lane lane = lane_of(self, call);
  (void)ticket;
  const fsdp_status status = recorder_priv_begin(
      self, FSDP_BACKEND, error, "broadcast %L %G %d %D from %d%t", lane,
      transport, numel, dtype, root, buffer);
  if (status != FSDP_OK) return status;
  recorder_priv_touch(self, lane, buffer, numel * dtype.itemsize,
                      group->rank != root);
  for (int64_t k = 0; group->rank != root && k < numel; k++) {
    elements_write(buffer, dtype, k, self->broadcast_first + (double)k);
  }
  return FSDP_OK;
}

static fsdp_status reduce_scatter(fsdp_transport *transport,
                                  const fsdp_call *call, void *buffer,
                                  int64_t shard_numel, fsdp_dtype dtype,
                                  uint64_t *ticket, fsdp_error *error) {
  const recorder_transport *group = group_of(transport);
  recorder *self = group->device;
  const fsdp_lane lane = lane_of(self, call);
  void *scratch = call->scratch;
  (void)ticket;
  const fsdp_status status = recorder_priv_begin(
      self, FSDP_BACKEND, error, "reduce_scatter %L %G %d %D%t%s%t", lane,
      transport, shard_numel, dtype, buffer, scratch == NULL ? "" : " scratch",
      scratch);
  if (status != FSDP_OK) return status;
  const size_t nbytes = (size_t)(shard_numel * dtype.itemsize);
  const int64_t scratch_nbytes =
      fsdp_scratch_numel(group->world_size, shard_numel) * dtype.itemsize;
  recorder_priv_touch(self, lane, buffer, group->world_size * (int64_t)nbytes,
                      true);
  recorder_priv_touch(self, lane, scratch, scratch_nbytes, true);
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
    memset(scratch, 0xCD, (size_t)scratch_nbytes);
  }
  return FSDP_OK;
}

static fsdp_status reduce_scatter_mean(fsdp_transport *transport,
                                       const fsdp_call *call, void *output,
                                       void *buffer, int64_t shard_numel,
                                       fsdp_dtype dtype, uint64_t *ticket,
                                       fsdp_error *error) {
  const recorder_transport *group = group_of(transport);
  recorder *self = group->device;
  const fsdp_lane lane = lane_of(self, call);
  (void)ticket;
  const fsdp_status status = recorder_priv_begin(
      self, FSDP_BACKEND, error, "reduce_scatter_mean %L %G %d %D%t%f", lane,
      transport, shard_numel, dtype, output, buffer);
  if (status != FSDP_OK) return status;
  const int64_t nbytes = shard_numel * dtype.itemsize;
  char *own = (char *)buffer + group->rank * nbytes;
  recorder_priv_touch(self, lane, buffer, group->world_size * nbytes, true);
  recorder_priv_touch(self, lane, output, nbytes, true);
  memmove(output, own, (size_t)nbytes); /* of equal pieces */
  for (char *slot = buffer; slot < (char *)buffer + group->world_size * nbytes;
       slot += nbytes) {
    if (slot != output) memset(slot, 0xCD, (size_t)nbytes);
  }
  return FSDP_OK;
}

static fsdp_status all_reduce(fsdp_transport *transport, const fsdp_call *call,
                              void *buffer, int64_t numel, fsdp_dtype dtype,
                              uint64_t *ticket, fsdp_error *error) {
  const recorder_transport *group = group_of(transport);
  recorder *self = group->device;
  const fsdp_lane lane = lane_of(self, call);
  (void)ticket;
  const fsdp_status status =
      recorder_priv_begin(self, FSDP_BACKEND, error, "all_reduce %L %G %d %D%t",
                          lane, transport, numel, dtype, buffer);
  if (status != FSDP_OK) return status;
  recorder_priv_touch(self, lane, buffer, numel * dtype.itemsize, true);
  elements_combine(buffer, dtype, buffer, dtype, numel,
                   (double)group->world_size, false);
  return FSDP_OK;
}

void recorder_reduce_to_mean(const fsdp_group *group) {
  group_of(group->transport)->ops.reduce_scatter_mean = reduce_scatter_mean;
}

fsdp_group recorder_group(recorder *self, int64_t rank, int64_t world_size,
                          bool wants_scratch) {
  recorder_transport *made = recorder_priv_must(malloc(sizeof *made));
  *made = (recorder_transport){.base = {&made->ops},
                               .ops =
                                   {
                                       .name = "recorder",
                                       .reads_labels = true,
                                       .wants_scratch = wants_scratch,
                                       .can_capture = true,
                                       .group_begin = group_begin,
                                       .group_end = group_end,
                                       .all_gather = all_gather,
                                       .broadcast = broadcast,
                                       .reduce_scatter = reduce_scatter,
                                       .all_reduce = all_reduce,
                                   },
                               .device = self,
                               .rank = rank,
                               .world_size = world_size,
                               .next = self->transports};
  self->transports = made;
  return (fsdp_group){
      .transport = &made->base, .rank = rank, .world_size = world_size};
}
