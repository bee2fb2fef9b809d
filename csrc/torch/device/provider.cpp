// The device over torch: memory, events and data movement.
#include "torch/device/provider.hpp"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>

#include "host/kernels.h"
#include "torch/device/cuda_kernels.hpp"
#include "torch/device/host_memory.hpp"
#include "torch/groups/nccl_group.hpp"
#include "torch/guard.hpp"

// A point on a lane: a ticket on the host; elsewhere the end of a call, which
// the call's transport watches anyway, or an event of the device.
struct fsdp_event {
  fsdp_lane lane = FSDP_LANE_COMPUTE;
  uint64_t ticket = 0;
  fsdp_torch::LaneCall call;
  std::optional<c10::Event> event;
  bool is_recorded = false;
};

namespace fsdp_torch {
namespace {

// The elements that one of torch's threads takes at a time, as in ATen.
constexpr int64_t kGrainNumel = 32768;

at::ScalarType scalar_type(fsdp_dtype dtype) {
  return static_cast<at::ScalarType>(dtype.code);
}

}  // namespace

std::shared_ptr<fsdp_event> make_event() {
  return std::make_shared<fsdp_event>();
}

Provider::Provider(c10::Device device)
    : device_(device), has_streams_(!device.is_cpu()) {
  if (!has_streams_) return;
  const c10::impl::VirtualGuardImpl guard(device.type());
  streams_.push_back(guard.getDefaultStream(device));  // COMPUTE: see stream_of
  for (int lane = FSDP_LANE_UNSHARD; lane < FSDP_NUM_LANES; lane++) {
    streams_.push_back(guard.getStreamFromGlobalPool(device, true));
    know_stream(streams_.back());
  }
}

// The device is said, not found out by the address: that would be a question to
// the driver for each view, and an empty part has no address on the device.
at::Tensor Provider::view(void *data, int64_t numel, fsdp_dtype dtype) const {
  return at::for_blob(data, {numel})
      .options(at::TensorOptions().dtype(scalar_type(dtype)).device(device_))
      .target_device(device_)
      .make_tensor();
}

at::Tensor Provider::host_view(void *data, int64_t nbytes) {
  return at::from_blob(data, {nbytes}, at::TensorOptions().dtype(at::kByte));
}

// Note [Streams of blocks]
// A caching allocator hands out memory that its stream still uses, since later
// work of that stream comes after. Blocks belong to the step's stream, which is
// COMPUTE, so they and the user's tensors are made of the same memory. The core
// lets other lanes wait for COMPUTE before they use a block, and COMPUTE for
// them before it goes: the host waits for nothing. That also holds for an
// allocator that is ordered by streams (cudaMallocAsync). A block that was kept
// over a change of the step's stream goes back to the older one, which waits
// for what the newer one did with it. In a capture the memory is the graph's.
void *Provider::allocate(int64_t nbytes) {
  Block made;
  if (!has_streams_) {
    made.data = make_kept_host_memory(static_cast<size_t>(nbytes));
  } else {
    made.stream = stream_of(FSDP_LANE_COMPUTE);
    const c10::StreamGuard guard(*made.stream);  // and its device
    made.data = c10::GetAllocator(device_.type())
                    ->allocate(static_cast<size_t>(nbytes));
  }
  void *block = made.data.get();
  blocks_[block] = std::move(made);
  return block;
}

void Provider::free_block(void *block) {
  if (!has_streams_) {
    HostLane &lane = host_lanes_[FSDP_LANE_COMPUTE];
    run_until(lane, lane.num_added);
    blocks_.erase(block);
    return;
  }
  const auto freed = blocks_.extract(block);
  const c10::Stream owner = *freed.mapped().stream;
  const c10::Stream current = stream_of(FSDP_LANE_COMPUTE);
  if (current == owner) return;
  c10::Event last_use(device_.type());
  last_use.record(current);
  last_use.block(owner);
}

// Pinned, so that copies need not wait for the host.
void *Provider::allocate_on_host(int64_t nbytes) {
  at::Tensor block = at::empty(
      {nbytes},
      at::TensorOptions().dtype(at::kByte).pinned_memory(has_streams_));
  void *data = block.data_ptr();
  host_blocks_.emplace(data, std::move(block));
  return data;
}

void Provider::free_on_host(void *block) {
  host_blocks_.erase(block);
}

void Provider::synchronize(fsdp_event *event) {
  if (!event->is_recorded) return;
  if (has_streams_) {
    if (event->call.transport != nullptr) record_on_device(event);
    event->event->synchronize();
  } else {
    run_until(host_lanes_[event->lane], event->ticket);
  }
}

void Provider::record(fsdp_event *event, fsdp_lane lane) {
  event->lane = lane;
  event->is_recorded = true;
  if (!has_streams_) {
    event->ticket = host_lanes_[lane].num_added;
    return;
  }
  event->call = newest_calls_[lane];
  if (event->call.transport == nullptr) record_on_device(event);
}

void Provider::record_on_device(fsdp_event *event) {
  event->call = {};
  if (!event->event.has_value()) event->event.emplace(device_.type());
  event->event->record(stream_of(event->lane));
}

void Provider::wait(fsdp_lane lane, fsdp_event *event) {
  if (!event->is_recorded) return;
  if (!has_streams_) {
    run_until(host_lanes_[event->lane], event->ticket);
    return;
  }
  newest_calls_[lane] = {};
  const LaneCall &call = event->call;
  if (call.transport == nullptr) {
    event->event->block(stream_of(lane));
    return;
  }
  const auto *end = static_cast<const c10::Event *>(
      call.transport->ops->end_of(call.transport, call.channel, call.ticket));
  if (end != nullptr) end->block(stream_of(lane));
}

void *Provider::native_stream(fsdp_lane lane) const {
  newest_calls_[lane] = {};  // whoever asks enqueues work of his own
  return stream_of(lane).native_handle();
}

namespace {

int32_t mark_lane(void *context, fsdp_lane lane) {
  return provider_of(context).mark(lane);
}

void *stream_of_lane(void *context, fsdp_lane lane) {
  return provider_of(context).native_stream(lane);
}

fsdp_status block_alloc(void *context, int64_t nbytes, void **block,
                        fsdp_error *error) {
  GUARDED(error) {
    *block = provider_of(context).allocate(nbytes);
    return FSDP_OK;
  };
}

void block_free(void *context, void *block, int64_t /*nbytes*/) {
  // A failed collective is reported where it is waited for, not here.
  try {
    provider_of(context).free_block(block);
  } catch (...) {
  }
}

fsdp_status host_alloc(void *context, int64_t nbytes, void **block,
                       fsdp_error *error) {
  GUARDED(error) {
    *block = provider_of(context).allocate_on_host(nbytes);
    return FSDP_OK;
  };
}

void host_free(void *context, void *block) {
  provider_of(context).free_on_host(block);
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
    provider_of(context).record(event, lane);
    return FSDP_OK;
  };
}

fsdp_status event_wait(void *context, fsdp_lane lane, fsdp_event *event,
                       fsdp_error *error) {
  GUARDED(error) {
    provider_of(context).wait(lane, event);
    return FSDP_OK;
  };
}

fsdp_status event_synchronize(void *context, fsdp_event *event,
                              fsdp_error *error) {
  GUARDED(error) {
    provider_of(context).synchronize(event);
    return FSDP_OK;
  };
}

fsdp_status copy_to_device(void *context, fsdp_lane lane, void *device,
                           const void *host, int64_t nbytes,
                           fsdp_error *error) {
  GUARDED(error) {
    const Provider &provider = provider_of(context);
    const fsdp_dtype bytes = {static_cast<int32_t>(at::kByte), 1};
    provider.on_lane(lane, [&] {
      provider.view(device, nbytes, bytes)
          .copy_(Provider::host_view(const_cast<void *>(host), nbytes),
                 /*non_blocking=*/true);
    });
    return FSDP_OK;
  };
}

fsdp_status copy_to_host(void *context, fsdp_lane lane, void *host,
                         const void *device, int64_t nbytes,
                         fsdp_error *error) {
  GUARDED(error) {
    const Provider &provider = provider_of(context);
    const fsdp_dtype bytes = {static_cast<int32_t>(at::kByte), 1};
    provider.on_lane(lane, [&] {
      Provider::host_view(host, nbytes)
          .copy_(provider.view(const_cast<void *>(device), nbytes, bytes),
                 /*non_blocking=*/true);
    });
    return FSDP_OK;
  };
}

// The item by the kernels of csrc/host, over torch's threads if it is large.
// False, with nothing done, when they do not know the dtypes.
bool pack_on_host(const fsdp_pack_item &item, double scale) {
  if (item.numel <= kGrainNumel) {
    return fsdp_host_pack(&item, 1, scale, nullptr) == FSDP_OK;
  }
  fsdp_pack_item nothing = item;
  nothing.numel = 0;
  if (fsdp_host_pack(&nothing, 1, scale, nullptr) != FSDP_OK) return false;
  at::parallel_for(0, item.numel, kGrainNumel, [&](int64_t begin, int64_t end) {
    fsdp_pack_item part = item;
    part.to = static_cast<char *>(item.to) + begin * item.to_dtype.itemsize;
    part.numel = end - begin;
    if (item.from != nullptr) {
      part.from = static_cast<const char *>(item.from) +
                  begin * item.from_dtype.itemsize;
    }
    fsdp_error error;
    if (fsdp_host_pack(&part, 1, scale, &error) != FSDP_OK) throw_error(error);
  });
  return true;
}

// destination = scale * source (+ destination), for any dtypes and device.
void scale_tensor(const at::Tensor &destination, const at::Tensor &source,
                  double scale, bool add, bool scales_first) {
  at::Tensor target = destination;
  if (add) {
    target.add_(source, scale);
  } else if (scale == 1.0) {
    target.copy_(source, /*non_blocking=*/true);
  } else if (source.scalar_type() == target.scalar_type()) {
    at::mul_out(target, source, at::scalar_tensor(scale, at::kDouble));
  } else if (scales_first) {
    target.copy_(at::mul(source, scale), /*non_blocking=*/true);
  } else {
    target.copy_(source, /*non_blocking=*/true);
    target.mul_(scale);
  }
}

void pack_item(const Provider &provider, const fsdp_pack_item &item,
               double scale) {
  if (provider.has_streams() ? pack_on_cuda(provider.device(), &item, 1, scale)
                             : pack_on_host(item, scale)) {
    return;
  }
  const at::Tensor view = provider.view(item.to, item.numel, item.to_dtype);
  if (item.from == nullptr) {
    view.fill_(item.is_one ? 1 : 0);
    return;
  }
  scale_tensor(
      view,
      provider.view(const_cast<void *>(item.from), item.numel, item.from_dtype),
      scale, item.add, item.scales_first);
}

void pack_items(const Provider &provider, const fsdp_pack_item *items,
                int64_t num_items, double scale) {
  if (provider.has_streams() &&
      pack_on_cuda(provider.device(), items, num_items, scale)) {
    return;
  }
  for (int64_t i = 0; i < num_items; i++) pack_item(provider, items[i], scale);
}

fsdp_status pack(void *context, fsdp_lane lane, const fsdp_pack_item *items,
                 int64_t num_items, double scale, fsdp_error *error) {
  GUARDED(error) {
    const Provider &provider = provider_of(context);
    provider.on_lane(lane,
                     [&] { pack_items(provider, items, num_items, scale); });
    return FSDP_OK;
  };
}

fsdp_status accumulate(void *context, fsdp_lane lane,
                       const fsdp_pack_item *items, int64_t num_items,
                       double scale, fsdp_error *error) {
  GUARDED(error) {
    Provider &provider = provider_of(context);
    if (provider.has_streams()) {  // at once
      provider.on_lane(lane,
                       [&] { pack_items(provider, items, num_items, scale); });
      return FSDP_OK;
    }
    provider.add_step(lane, [&provider, scale,
                             own = std::vector<fsdp_pack_item>(
                                 items, items + num_items)] {
      pack_items(provider, own.data(), static_cast<int64_t>(own.size()), scale);
    });
    return FSDP_OK;
  };
}

}  // namespace

fsdp_device_ops Provider::ops() {
  fsdp_device_ops table = {};
  table.context = this;
  table.is_host = !has_streams_;
  table.block_alloc = block_alloc;
  table.block_free = block_free;
  table.event_create = event_create;
  table.event_destroy = event_destroy;
  table.event_record = event_record;
  table.event_wait = event_wait;
  table.event_synchronize = event_synchronize;
  if (has_streams_) {
    table.mark = mark_lane;
    table.stream = stream_of_lane;
  }
  table.host_alloc = host_alloc;
  table.host_free = host_free;
  table.copy_to_device = copy_to_device;
  table.copy_to_host = copy_to_host;
  table.pack = pack;
  table.accumulate = accumulate;
  add_lane_ops(&table);
  return table;
}

}  // namespace fsdp_torch
