// Memory, ordering, copies and collectives for the engine, over torch.
#include "torch/provider.hpp"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstring>
#include <optional>

#include "torch/compat.hpp"
#include "torch/guard.hpp"

// A point on a lane: a ticket on the host, an event of the device elsewhere.
struct fsdp_event {
  fsdp_lane lane = FSDP_LANE_COMPUTE;
  uint64_t ticket = 0;
  std::optional<c10::Event> event;
  bool is_recorded = false;
};

namespace fsdp_torch {
namespace {

// Below this many elements a plain loop is faster than an ATen call.
constexpr int64_t kLoopNumel = 16384;

at::ScalarType scalar_type(fsdp_dtype dtype) {
  return static_cast<at::ScalarType>(dtype.code);
}

bool is_float(fsdp_dtype dtype) {
  return scalar_type(dtype) == at::ScalarType::Float;
}

}  // namespace

Provider::Provider(c10::Device device)
    : device_(device), has_streams_(!device.is_cpu()) {
  if (!has_streams_) return;
  const c10::impl::VirtualGuardImpl guard(device.type());
  for (int lane = 0; lane < FSDP_NUM_LANES; lane++) {
    streams_.push_back(guard.getStreamFromGlobalPool(device, true));
  }
}

at::Tensor Provider::view(void *data, int64_t numel, fsdp_dtype dtype) const {
  return at::from_blob(
      data, {numel},
      at::TensorOptions().dtype(scalar_type(dtype)).device(device_));
}

template <typename Body>
void Provider::on_lane(fsdp_lane lane, Body &&body) const {
  if (!has_streams_ || lane == FSDP_LANE_COMPUTE) {
    body();
    return;
  }
  const c10::StreamGuard guard(streams_[lane]);
  body();
}

void *Provider::allocate(int64_t nbytes) {
  c10::DataPtr data =
      c10::GetAllocator(device_.type())->allocate(static_cast<size_t>(nbytes));
  void *block = data.get();
  blocks_.emplace(block, std::move(data));
  return block;
}

void Provider::free_block(void *block, fsdp_event *last_use) {
  if (last_use != nullptr) {
    if (!has_streams_) {
      run_until(host_lanes_[last_use->lane], last_use->ticket);
    } else if (last_use->is_recorded) {
      last_use->event->synchronize();
    }
  }
  blocks_.erase(block);
}

void Provider::record(fsdp_event *event, fsdp_lane lane) {
  event->lane = lane;
  event->is_recorded = true;
  if (!has_streams_) {
    event->ticket = host_lanes_[lane].num_added;
    return;
  }
  if (!event->event.has_value()) event->event.emplace(device_.type());
  const c10::impl::VirtualGuardImpl guard(device_.type());
  event->event->record(lane == FSDP_LANE_COMPUTE ? guard.getStream(device_)
                                                 : streams_[lane]);
}

void Provider::wait(fsdp_lane lane, fsdp_event *event) {
  if (!event->is_recorded) return;
  if (!has_streams_) {
    run_until(host_lanes_[event->lane], event->ticket);
    return;
  }
  const c10::impl::VirtualGuardImpl guard(device_.type());
  event->event->block(lane == FSDP_LANE_COMPUTE ? guard.getStream(device_)
                                                : streams_[lane]);
}

void Provider::add_work(fsdp_lane lane, c10::intrusive_ptr<c10d::Work> work) {
  if (work == nullptr) return;  // some backends finish at once
  if (has_streams_) {
    on_lane(lane, [&] { work->wait(); });  // enqueues; the host goes on
    return;
  }
  host_lanes_[lane].items.push_back({std::move(work), nullptr});
  host_lanes_[lane].num_added++;
}

void Provider::add_step(fsdp_lane lane, std::function<void()> step) {
  HostLane &queue = host_lanes_[lane];
  if (has_streams_ || queue.items.empty()) {
    on_lane(lane, step);
    return;
  }
  queue.items.push_back({nullptr, std::move(step)});
  queue.num_added++;
}

void Provider::run_until(HostLane &lane, uint64_t ticket) {
  while (lane.num_done < ticket && !lane.items.empty()) {
    const HostItem item = std::move(lane.items.front());
    lane.items.pop_front();
    lane.num_done++;  // also when it throws: it will not run again
    if (item.work != nullptr) {
      item.work->wait();
    } else {
      item.step();
    }
  }
}

namespace {

Provider &self(void *context) {
  return *static_cast<Provider *>(context);
}

const Group &backend_of(const fsdp_group *group) {
  return *static_cast<const Group *>(group->handle);
}

fsdp_status block_alloc(void *context, int64_t nbytes, void **block,
                        fsdp_error *error) {
  GUARDED(error) {
    *block = self(context).allocate(nbytes);
    return FSDP_OK;
  };
}

void block_free(void *context, void *block, int64_t /*nbytes*/,
                fsdp_event *last_use) {
  // A failed collective is reported where it is waited for, not here.
  try {
    self(context).free_block(block, last_use);
  } catch (...) {
  }
}

fsdp_status event_create(void * /*context*/, fsdp_event **event,
                         fsdp_error *error) {
  GUARDED(error) {
    *event = new fsdp_event();
    return FSDP_OK;
  };
}

void event_destroy(void * /*context*/, fsdp_event *event) {
  delete event;
}

fsdp_status event_record(void *context, fsdp_event *event, fsdp_lane lane,
                         fsdp_error *error) {
  GUARDED(error) {
    self(context).record(event, lane);
    return FSDP_OK;
  };
}

fsdp_status event_wait(void *context, fsdp_lane lane, fsdp_event *event,
                       fsdp_error *error) {
  GUARDED(error) {
    self(context).wait(lane, event);
    return FSDP_OK;
  };
}

fsdp_status cast(void *context, fsdp_lane lane, void *destination,
                 fsdp_dtype destination_dtype, const void *source,
                 fsdp_dtype source_dtype, int64_t numel, fsdp_error *error) {
  GUARDED(error) {
    Provider &provider = self(context);
    if (numel == 0 || destination == source) return FSDP_OK;
    if (!provider.has_streams() &&
        fsdp_dtype_equal(destination_dtype, source_dtype)) {
      std::memcpy(destination, source,
                  static_cast<size_t>(numel * source_dtype.itemsize));
      return FSDP_OK;
    }
    provider.on_lane(lane, [&] {
      provider.view(destination, numel, destination_dtype)
          .copy_(provider.view(const_cast<void *>(source), numel, source_dtype),
                 /*non_blocking=*/true);
    });
    return FSDP_OK;
  };
}

// destination = scale * source (+ destination), fp32 on the host.
void scale_floats(float *destination, const float *source, int64_t numel,
                  float scale, bool add) {
  if (add) {
    for (int64_t i = 0; i < numel; i++) destination[i] += scale * source[i];
  } else if (scale == 1.0F) {
    std::memcpy(destination, source, static_cast<size_t>(numel) * 4);
  } else {
    for (int64_t i = 0; i < numel; i++) destination[i] = scale * source[i];
  }
}

// The general form of the same, for any dtypes and device.
void scale_tensor(const at::Tensor &destination, const at::Tensor &source,
                  double scale, bool add) {
  at::Tensor target = destination;
  if (add) {
    target.add_(source, scale);
  } else if (scale == 1.0) {
    target.copy_(source, /*non_blocking=*/true);
  } else if (source.scalar_type() == target.scalar_type()) {
    at::mul_out(target, source, at::scalar_tensor(scale, at::kDouble));
  } else {
    target.copy_(source, /*non_blocking=*/true);
    target.mul_(scale);
  }
}

void pack_item(const Provider &provider, void *destination, fsdp_dtype dtype,
               const fsdp_pack_item &item, double scale) {
  char *target =
      static_cast<char *>(destination) + item.offset * dtype.itemsize;
  if (!provider.has_streams()) {
    if (item.data == nullptr) {
      std::memset(target, 0, static_cast<size_t>(item.numel * dtype.itemsize));
      return;
    }
    if (is_float(dtype) && is_float(item.dtype) &&
        (item.numel < kLoopNumel || (!item.add && scale == 1.0))) {
      scale_floats(reinterpret_cast<float *>(target),
                   static_cast<const float *>(item.data), item.numel,
                   static_cast<float>(scale), item.add);
      return;
    }
  }
  const at::Tensor view = provider.view(target, item.numel, dtype);
  if (item.data == nullptr) {
    view.zero_();
    return;
  }
  scale_tensor(
      view,
      provider.view(const_cast<void *>(item.data), item.numel, item.dtype),
      scale, item.add);
}

fsdp_status pack(void *context, fsdp_lane lane, void *destination,
                 fsdp_dtype destination_dtype, const fsdp_pack_item *items,
                 int64_t num_items, double scale, fsdp_error *error) {
  GUARDED(error) {
    const Provider &provider = self(context);
    provider.on_lane(lane, [&] {
      for (int64_t i = 0; i < num_items; i++) {
        pack_item(provider, destination, destination_dtype, items[i], scale);
      }
    });
    return FSDP_OK;
  };
}

fsdp_status accumulate(void *context, fsdp_lane lane, void *destination,
                       fsdp_dtype destination_dtype, const void *source,
                       fsdp_dtype source_dtype, int64_t numel, double scale,
                       bool add, fsdp_error *error) {
  GUARDED(error) {
    Provider &provider = self(context);
    const fsdp_pack_item item = {source, source_dtype, 0, numel, add};
    provider.add_step(
        lane, [&provider, destination, destination_dtype, item, scale] {
          pack_item(provider, destination, destination_dtype, item, scale);
        });
    return FSDP_OK;
  };
}

// Collectives ---------------------------------------------------------------

// Grouping: with NCCL through c10d each call is a launch of its own; the
// native NCCL provider merges them.
fsdp_status group_begin(void * /*context*/, fsdp_lane /*lane*/,
                        const fsdp_group * /*group*/, fsdp_error * /*error*/) {
  return FSDP_OK;
}

fsdp_status group_end(void * /*context*/, fsdp_lane /*lane*/,
                      const fsdp_group * /*group*/, fsdp_error * /*error*/) {
  return FSDP_OK;
}

// gloo gathers through a buffer of its own and copies twice. One broadcast per
// rank, all in flight together and in place, is faster for few ranks; with
// many, its world_size messages of log(world_size) hops are not.
constexpr int64_t kMaxBroadcastRanks = 8;

void gather_by_broadcasts(Provider &provider, fsdp_lane lane,
                          const fsdp_group *group, void *output,
                          const void *input, int64_t shard_numel,
                          fsdp_dtype dtype) {
  const int64_t nbytes = shard_numel * dtype.itemsize;
  char *slot = static_cast<char *>(output) + group->rank * nbytes;
  if (slot != input) std::memcpy(slot, input, static_cast<size_t>(nbytes));
  for (int64_t root = 0; root < group->world_size; root++) {
    std::vector<at::Tensor> piece = {provider.view(
        static_cast<char *>(output) + root * nbytes, shard_numel, dtype)};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    provider.add_work(
        lane, backend_of(group).process_group->broadcast(piece, options));
  }
}

fsdp_status all_gather(void *context, fsdp_lane lane, const fsdp_group *group,
                       void *output, const void *input, int64_t shard_numel,
                       fsdp_dtype dtype, fsdp_error *error) {
  GUARDED(error) {
    Provider &provider = self(context);
    const Group &backend = backend_of(group);
    if (shard_numel == 0) return FSDP_OK;
    if (backend.is_gloo && group->world_size <= kMaxBroadcastRanks) {
      gather_by_broadcasts(provider, lane, group, output, input, shard_numel,
                           dtype);
      return FSDP_OK;
    }
    at::Tensor whole =
        provider.view(output, shard_numel * group->world_size, dtype);
    at::Tensor piece =
        provider.view(const_cast<void *>(input), shard_numel, dtype);
    c10::intrusive_ptr<c10d::Work> work;
    provider.on_lane(lane, [&] {
      work = all_gather_base(*backend.process_group, whole, piece);
    });
    provider.add_work(lane, std::move(work));
    return FSDP_OK;
  };
}

// Each rank sends its part for every other rank and adds up what it got: half
// the time of gloo's own reduce-scatter, and the sum's order is that of the
// ranks.
void reduce_by_all_to_all(Provider &provider, fsdp_lane lane,
                          const fsdp_group *group, void *buffer, void *scratch,
                          int64_t shard_numel, fsdp_dtype dtype) {
  const int64_t numel = shard_numel * group->world_size;
  at::Tensor received = provider.view(scratch, numel, dtype);
  at::Tensor sent = provider.view(buffer, numel, dtype);
  provider.add_work(
      lane, all_to_all_base(*backend_of(group).process_group, received, sent));
  at::Tensor own = sent.narrow(0, group->rank * shard_numel, shard_numel);
  const int64_t world_size = group->world_size;
  provider.add_step(lane, [received, own, world_size]() mutable {
    const at::Tensor pieces = received.view({world_size, -1});
    if (world_size == 2) {
      at::add_out(own, pieces[0], pieces[1]);
    } else {
      at::sum_out(own, pieces, /*dim=*/{0});
    }
  });
}

fsdp_status reduce_scatter(void *context, fsdp_lane lane,
                           const fsdp_group *group, void *buffer, void *scratch,
                           int64_t shard_numel, fsdp_dtype dtype,
                           fsdp_error *error) {
  GUARDED(error) {
    Provider &provider = self(context);
    if (shard_numel == 0) return FSDP_OK;
    if (scratch != nullptr) {
      reduce_by_all_to_all(provider, lane, group, buffer, scratch, shard_numel,
                           dtype);
      return FSDP_OK;
    }
    at::Tensor whole =
        provider.view(buffer, shard_numel * group->world_size, dtype);
    at::Tensor own = whole.narrow(0, group->rank * shard_numel, shard_numel);
    c10::intrusive_ptr<c10d::Work> work;
    provider.on_lane(lane, [&] {
      work = reduce_scatter_base(*backend_of(group).process_group, own, whole);
    });
    provider.add_work(lane, std::move(work));
    return FSDP_OK;
  };
}

fsdp_status all_reduce(void *context, fsdp_lane lane, const fsdp_group *group,
                       void *buffer, int64_t numel, fsdp_dtype dtype,
                       fsdp_error *error) {
  GUARDED(error) {
    Provider &provider = self(context);
    if (numel == 0) return FSDP_OK;
    std::vector<at::Tensor> tensors = {provider.view(buffer, numel, dtype)};
    c10::intrusive_ptr<c10d::Work> work;
    provider.on_lane(lane, [&] {
      work = backend_of(group).process_group->allreduce(tensors);
    });
    provider.add_work(lane, std::move(work));
    return FSDP_OK;
  };
}

}  // namespace

fsdp_device_ops Provider::ops() {
  fsdp_device_ops table = {};
  table.context = this;
  table.block_alloc = block_alloc;
  table.block_free = block_free;
  table.event_create = event_create;
  table.event_destroy = event_destroy;
  table.event_record = event_record;
  table.event_wait = event_wait;
  table.cast = cast;
  table.pack = pack;
  table.accumulate = accumulate;
  table.group_begin = group_begin;
  table.group_end = group_end;
  table.all_gather = all_gather;
  table.reduce_scatter = reduce_scatter;
  table.all_reduce = all_reduce;
  return table;
}

}  // namespace fsdp_torch
