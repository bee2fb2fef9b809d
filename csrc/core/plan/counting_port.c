/* The counting port's device and transport, in the order of the tables. */
#include "plan/counting_port.h"

#include <inttypes.h>
#include <string.h>

#include "base/alloc.h"
#include "base/arith.h"

struct fsdp_event {
  fsdp_lane lane;
  double at;
};

enum { BLOCK_ALIGNMENT = 256, FIRST_ADDRESS = 1 << 20 };

/* Memory ------------------------------------------------------------------- */

fsdp_status fsdp_counting_device_hold(fsdp_counting_device *device,
                                      fsdp_counted purpose, int64_t nbytes,
                                      fsdp_error *error) {
  int64_t total = 0;
  int64_t held = device->nbytes[purpose];
  bool fits = fsdp_add_i64(held, nbytes, &held);
  for (int i = 0; fits && i < FSDP_NUM_COUNTED; i++) {
    if (i == FSDP_COUNTED_HOST) continue;
    fits = fsdp_add_i64(total, i == (int)purpose ? held : device->nbytes[i],
                        &total);
  }
  if (!fits) {
    return FSDP_FAIL(error, FSDP_OVERFLOW,
                     "%" PRId64
                     " more bytes do not fit in int64: the model is "
                     "too large to be planned",
                     nbytes);
  }
  device->nbytes[purpose] = held;
  if (total > device->peak_nbytes) {
    device->peak_nbytes = total;
    memcpy(device->at_peak, device->nbytes, sizeof device->at_peak);
  }
  return FSDP_OK;
}

void fsdp_counting_device_drop(fsdp_counting_device *device,
                               fsdp_counted purpose, int64_t nbytes) {
  /* It fits. */
  FSDP_IGNORE(fsdp_counting_device_hold(device, purpose, -nbytes, NULL));
}

/* Memory at an address that nobody reads or writes. */
static fsdp_status take_address(fsdp_counting_device *self, int64_t nbytes,
                                void **block, fsdp_error *error) {
  const uint64_t address = self->next_address;
  int64_t length = 0;
  if (!fsdp_round_up_i64(nbytes, BLOCK_ALIGNMENT, &length) ||
      (uint64_t)length > INT64_MAX - address) {
    return FSDP_FAIL(error, FSDP_OVERFLOW,
                     "a block of %" PRId64
                     " bytes does not fit in the address "
                     "space: the model is too large to be planned",
                     nbytes);
  }
  self->next_address = address + (uint64_t)length;
  *block = (void *)(uintptr_t)address;
  return FSDP_OK;
}

static fsdp_status block_alloc(void *context, int64_t nbytes, void **block,
                               fsdp_error *error) {
  fsdp_counting_device *self = context;
  fsdp_status status = FSDP_OK;
  void *taken = NULL;
  FSDP_TRY(take_address(self, nbytes, &taken, error));
  FSDP_TRY(fsdp_counting_device_hold(self, FSDP_COUNTED_BLOCKS, nbytes, error));
  *block = taken;
done:
  return status;
}

static void block_free(void *context, void *block, int64_t nbytes) {
  (void)block;
  fsdp_counting_device_drop(context, FSDP_COUNTED_BLOCKS, nbytes);
}

/* Of saved tensors: kept until the plan ends. */
static fsdp_status host_alloc(void *context, int64_t nbytes, void **block,
                              fsdp_error *error) {
  fsdp_counting_device *self = context;
  fsdp_status status = FSDP_OK;
  void *taken = NULL;
  FSDP_TRY(take_address(self, nbytes, &taken, error));
  FSDP_TRY(fsdp_counting_device_hold(self, FSDP_COUNTED_HOST, nbytes, error));
  *block = taken;
done:
  return status;
}

static void host_free(void *context, void *block) {
  (void)context, (void)block;
}

/* Ordering ----------------------------------------------------------------- */

static fsdp_status event_create(void *context, fsdp_event **event,
                                fsdp_error *error) {
  (void)context;
  fsdp_event *created = fsdp_calloc(1, sizeof *created);
  if (created == NULL) return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY, "event");
  *event = created;
  return FSDP_OK;
}

static void event_destroy(void *context, fsdp_event *event) {
  (void)context;
  fsdp_free(event);
}

static fsdp_status event_record(void *context, fsdp_event *event,
                                fsdp_lane lane, fsdp_error *error) {
  const fsdp_counting_device *self = context;
  (void)error;
  event->lane = lane;
  event->at = self->clocks[lane];
  return FSDP_OK;
}

static fsdp_status event_wait(void *context, fsdp_lane lane, fsdp_event *event,
                              fsdp_error *error) {
  fsdp_counting_device *self = context;
  const double waited = event->at - self->clocks[lane];
  (void)error;
  if (waited > 0) {
    self->clocks[lane] = event->at;
    if (lane == FSDP_LANE_COMPUTE) {
      self->stall_seconds += waited;
      if (self->charged_unit != NULL) {
        self->charged_unit->stall_seconds += waited;
      }
    }
  }
  return FSDP_OK;
}

/* The host's own time counts nothing. */
static fsdp_status event_synchronize(void *context, fsdp_event *event,
                                     fsdp_error *error) {
  (void)context, (void)event, (void)error;
  return FSDP_OK;
}

/* Data: there is none. ----------------------------------------------------- */

static fsdp_status pack(void *context, fsdp_lane lane,
                        const fsdp_pack_item *items, int64_t num_items,
                        double scale, fsdp_error *error) {
  (void)context, (void)lane, (void)items, (void)num_items, (void)scale,
      (void)error;
  return FSDP_OK;
}

static fsdp_status copy_to_device(void *context, fsdp_lane lane, void *device,
                                  const void *host, int64_t nbytes,
                                  fsdp_error *error) {
  fsdp_counting_device *self = context;
  (void)device, (void)host, (void)error;
  if (self->copy_bytes_per_second > 0) {
    self->clocks[lane] += (double)nbytes / self->copy_bytes_per_second;
  }
  return FSDP_OK;
}

static fsdp_status copy_to_host(void *context, fsdp_lane lane, void *host,
                                const void *device, int64_t nbytes,
                                fsdp_error *error) {
  return copy_to_device(context, lane, host, device, nbytes, error);
}

/* Streams and collectives -------------------------------------------------- */

/* A lane's stream is its clock. */
static void *stream(void *context, fsdp_lane lane) {
  fsdp_counting_device *self = context;
  return &self->clocks[lane];
}

static fsdp_status all_gather_bytes(void *context, const fsdp_group *group,
                                    const void *mine, int64_t nbytes, void *all,
                                    fsdp_error *error) {
  (void)context, (void)group, (void)mine, (void)all;
  return FSDP_FAIL(error, FSDP_INVALID_STATE,
                   "a step plan has no other ranks to compare %" PRId64
                   " bytes with",
                   nbytes);
}

static fsdp_counting_device *device_of(const fsdp_transport *transport) {
  return ((const fsdp_counting_transport *)transport)->device;
}

static int64_t world_size_of(const fsdp_transport *transport) {
  return ((const fsdp_counting_transport *)transport)->world_size;
}

static fsdp_status group_begin(fsdp_transport *transport, const fsdp_call *call,
                               fsdp_error *error) {
  fsdp_counting_device *self = device_of(transport);
  (void)call, (void)error;
  self->open_bytes = 0;
  self->is_open = false; /* a unit without segments launches nothing */
  return FSDP_OK;
}

/* Hops of a tree over the ranks: ceil(log2(world_size)). */
static double num_hops(int64_t world_size) {
  double hops = 0;
  for (int64_t reached = 1; reached < world_size; hops++) {
    if (reached > world_size / 2) {
      reached = world_size;
    } else {
      reached *= 2;
    }
  }
  return hops;
}

/* A launch in which a rank of a ring sends `wire` bytes. */
static double launch_seconds(const fsdp_link *link, int64_t num_ranks,
                             double wire) {
  return link->latency_seconds * num_hops(num_ranks) +
         wire / link->bytes_per_second;
}

static double shard_launch_seconds(const fsdp_counting_device *self,
                                   int64_t num_ranks, double wire) {
  const int64_t num_local = self->num_local;
  if (num_local == 0 || num_ranks <= num_local) {
    return launch_seconds(&self->shard_link, num_ranks, wire);
  }
  if (num_ranks % num_local != 0) { /* flat, as fast as the slower link */
    return launch_seconds(&self->host_link, num_ranks,
                          wire * (double)num_local);
  }
  const int64_t num_hosts = num_ranks / num_local;
  const double payload = wire * (double)num_ranks / (double)(num_ranks - 1);
  return launch_seconds(&self->shard_link, num_local,
                        payload * (1 - 1 / (double)num_local)) +
         launch_seconds(&self->host_link, num_hosts,
                        payload * (1 - 1 / (double)num_hosts));
}

static fsdp_status group_end(fsdp_transport *transport, const fsdp_call *call,
                             fsdp_error *error) {
  fsdp_counting_device *self = device_of(transport);
  (void)error;
  if (!self->is_open) return FSDP_OK;
  const bool is_replica =
      ((const fsdp_counting_transport *)transport)->is_replica;
  double *free_at = &self->link_clocks[is_replica ? 1 : 0];
  double *clock = call->stream;
  fsdp_collective_count *count = &self->collectives[self->open_kind];
  const int64_t num_ranks = world_size_of(transport);
  const double seconds =
      is_replica
          ? launch_seconds(&self->replica_link, num_ranks, self->open_bytes)
          : shard_launch_seconds(self, num_ranks, self->open_bytes);
  const double begin = *clock > *free_at ? *clock : *free_at;

  *clock = begin + seconds;
  *free_at = begin + seconds;
  count->num_launches++;
  count->seconds += seconds;
  self->is_open = false;
  return FSDP_OK;
}

/* One call of the launch that is open. */
static fsdp_status count_call(fsdp_counting_device *self, fsdp_collective kind,
                              int64_t payload_nbytes, int64_t wire_nbytes,
                              fsdp_error *error) {
  fsdp_collective_count *count = &self->collectives[kind];
  int64_t payload = count->payload_nbytes;
  int64_t wire = count->wire_nbytes;
  if (!fsdp_add_i64(payload, payload_nbytes, &payload) ||
      !fsdp_add_i64(wire, wire_nbytes, &wire)) {
    return FSDP_FAIL(error, FSDP_OVERFLOW,
                     "the bytes of a step's collectives do not fit in int64: "
                     "the model is too large to be planned");
  }
  count->payload_nbytes = payload;
  count->wire_nbytes = wire;
  count->num_calls++;
  self->open_kind = kind;
  self->open_bytes += (double)wire_nbytes;
  self->is_open = true;
  return FSDP_OK;
}

/* A segment's padded bytes fit in int64_t: its layout checked that, for its own
 * dtype; a wider reduce dtype was checked where the unit placed its blocks. */
static fsdp_status count_shards(const fsdp_transport *transport,
                                fsdp_collective kind, int64_t shard_numel,
                                fsdp_dtype dtype, fsdp_error *error) {
  const int64_t world_size = world_size_of(transport);
  const int64_t shard_nbytes = shard_numel * dtype.itemsize;
  return count_call(device_of(transport), kind, shard_nbytes * world_size,
                    shard_nbytes * (world_size - 1), error);
}

static fsdp_status all_gather(fsdp_transport *transport, const fsdp_call *call,
                              void *output, const void *input,
                              int64_t shard_numel, fsdp_dtype dtype,
                              uint64_t *ticket, fsdp_error *error) {
  (void)call, (void)output, (void)input, (void)ticket;
  return count_shards(transport, FSDP_COLLECTIVE_ALL_GATHER, shard_numel, dtype,
                      error);
}

/* Shards in place: nothing goes over the link, and no memory is taken. */

static fsdp_transport *sharer(fsdp_transport *transport) {
  return device_of(transport)->shares_memory ? transport : NULL;
}

static fsdp_status share(fsdp_transport *transport, const char *label,
                         fsdp_region region, int64_t nbytes,
                         const fsdp_region_range *own, int64_t num_own,
                         void **whole, fsdp_shared **shared,
                         fsdp_error *error) {
  (void)label, (void)region, (void)own, (void)num_own, (void)error;
  *whole = device_of(transport);              /* an address; never read */
  *shared = (fsdp_shared *)(uintptr_t)nbytes; /* a number, not an address */
  return FSDP_OK;
}

static void unshare(fsdp_shared *shared) {
  (void)shared;
}

static fsdp_status open_shared(fsdp_transport *transport, const fsdp_call *call,
                               fsdp_shared *shared, uint64_t *ticket,
                               fsdp_error *error) {
  (void)call, (void)ticket;
  return count_call(device_of(transport), FSDP_COLLECTIVE_ALL_GATHER,
                    (int64_t)(uintptr_t)shared, 0, error);
}

static void close_shared(fsdp_transport *transport, fsdp_shared *shared) {
  (void)transport, (void)shared;
}

static fsdp_status await_closed(fsdp_transport *transport, fsdp_shared *shared,
                                fsdp_error *error) {
  (void)transport, (void)shared, (void)error;
  return FSDP_OK;
}

/* Belongs to summons, of which a plan has none. */
static fsdp_status broadcast(fsdp_transport *transport, const fsdp_call *call,
                             void *buffer, int64_t numel, int64_t root,
                             fsdp_dtype dtype, uint64_t *ticket,
                             fsdp_error *error) {
  (void)transport, (void)call, (void)buffer, (void)root, (void)dtype;
  (void)ticket;
  return FSDP_FAIL(error, FSDP_INVALID_STATE,
                   "a step plan has no broadcast of %" PRId64 " elements",
                   numel);
}

static fsdp_status reduce_scatter(fsdp_transport *transport,
                                  const fsdp_call *call, void *buffer,
                                  int64_t shard_numel, fsdp_dtype dtype,
                                  uint64_t *ticket, fsdp_error *error) {
  (void)call, (void)buffer, (void)ticket;
  return count_shards(transport, FSDP_COLLECTIVE_REDUCE_SCATTER, shard_numel,
                      dtype, error);
}

static bool can_reduce_parts(fsdp_transport *transport) {
  return device_of(transport)->shares_memory;
}

static fsdp_status reduce_parts(fsdp_transport *transport,
                                const fsdp_call *call, const fsdp_parts *parts,
                                uint64_t *ticket, fsdp_error *error) {
  const int64_t shard_nbytes = parts->nbytes / world_size_of(transport);
  (void)call, (void)ticket;
  return count_call(device_of(transport), FSDP_COLLECTIVE_REDUCE_SCATTER,
                    parts->nbytes, parts->nbytes - shard_nbytes, error);
}

static fsdp_status all_reduce(fsdp_transport *transport, const fsdp_call *call,
                              void *buffer, int64_t numel, fsdp_dtype dtype,
                              uint64_t *ticket, fsdp_error *error) {
  const int64_t nbytes = numel * dtype.itemsize;
  int64_t wire = 0;
  (void)call, (void)buffer, (void)ticket;
  /* Twice all but the part that is the rank's own. */
  if (!fsdp_mul_i64(2, nbytes - nbytes / world_size_of(transport), &wire)) {
    wire = INT64_MAX;
  }
  return count_call(device_of(transport), FSDP_COLLECTIVE_ALL_REDUCE, nbytes,
                    wire, error);
}

/* The device --------------------------------------------------------------- */

void fsdp_counting_device_init(fsdp_counting_device *device, fsdp_link shard,
                               fsdp_link replica, bool wants_scratch) {
  *device = (fsdp_counting_device){
      .shard_link = shard,
      .replica_link = replica,
      .next_address = FIRST_ADDRESS,
      .transport_ops = {.name = "counting",
                        .wants_scratch = wants_scratch,
                        .group_begin = group_begin,
                        .group_end = group_end,
                        .all_gather = all_gather,
                        .can_reduce_parts = can_reduce_parts,
                        .reduce_parts = reduce_parts,
                        .sharer = sharer,
                        .share = share,
                        .unshare = unshare,
                        .open = open_shared,
                        .close = close_shared,
                        .await_closed = await_closed,
                        .broadcast = broadcast,
                        .reduce_scatter = reduce_scatter,
                        .all_reduce = all_reduce}};
}

fsdp_device_ops fsdp_counting_device_ops(fsdp_counting_device *device) {
  return (fsdp_device_ops){
      .context = device,
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
      .accumulate = pack,
      .stream = stream,
      .is_host = device->is_host,
      .all_gather_bytes = all_gather_bytes,
  };
}

fsdp_group fsdp_counting_device_group(fsdp_counting_device *device,
                                      bool is_replica, int64_t world_size,
                                      fsdp_counting_transport *transport) {
  *transport = (fsdp_counting_transport){.base = {&device->transport_ops},
                                         .device = device,
                                         .world_size = world_size,
                                         .is_replica = is_replica};
  return (fsdp_group){.transport = &transport->base, .world_size = world_size};
}

void fsdp_counting_device_restart(fsdp_counting_device *device) {
  memset(device->collectives, 0, sizeof device->collectives);
  memcpy(device->at_peak, device->nbytes, sizeof device->at_peak);
  device->peak_nbytes = 0;
  for (int i = 0; i < FSDP_NUM_COUNTED; i++) {
    if (i != FSDP_COUNTED_HOST) device->peak_nbytes += device->nbytes[i];
  }
  device->stall_seconds = 0;
}

void fsdp_counting_device_compute(fsdp_counting_device *device,
                                  double seconds) {
  device->clocks[FSDP_LANE_COMPUTE] += seconds;
}

fsdp_status fsdp_counting_device_make_grad(fsdp_counting_device *device,
                                           int64_t nbytes, void **token,
                                           fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  FSDP_TRY(fsdp_counting_device_hold(device, FSDP_COUNTED_PENDING_GRADS, nbytes,
                                     error));
  *token = (void *)((uintptr_t)nbytes + 1); /* a number, not an address */
done:
  return status;
}

double fsdp_counting_device_now(const fsdp_counting_device *device) {
  return device->clocks[FSDP_LANE_COMPUTE];
}
