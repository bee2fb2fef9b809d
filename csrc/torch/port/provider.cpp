// Memory, ordering and copies for the engine, over torch.
#include "torch/port/provider.hpp"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>

#include "host/kernels.h"
#include "torch/guard.hpp"
#include "torch/port/cuda_kernels.hpp"
#include "torch/port/nccl_group.hpp"

// A point on a lane: a ticket on the host, an event of the device elsewhere.
struct fsdp_event {
  fsdp_lane lane = FSDP_LANE_COMPUTE;
  uint64_t ticket = 0;
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
  for (int lane = 0; lane < FSDP_NUM_LANES; lane++) {
    streams_.push_back(guard.getStreamFromGlobalPool(device, true));
    know_stream(streams_.back());
  }
}

at::Tensor Provider::view(void *data, int64_t numel, fsdp_dtype dtype) const {
  return at::from_blob(
      data, {numel},
      at::TensorOptions().dtype(scalar_type(dtype)).device(device_));
}

at::Tensor Provider::host_view(void *data, int64_t nbytes) {
  return at::from_blob(data, {nbytes}, at::TensorOptions().dtype(at::kByte));
}

// Note [Streams of blocks]
// A caching allocator hands out memory that the current stream still uses,
// since later work of that stream comes after. Lanes do not: they use a new
// block at once. Blocks therefore belong to a stream of their own, on which
// nothing runs, and are given back after their last use. Memory that was given
// back stays in that stream's cache, of no use to the user's tensors, until the
// cache is emptied (Note [Memory that blocks leave] in arena.h).
void *Provider::allocate(int64_t nbytes) {
  std::optional<c10::StreamGuard> guard;
  if (has_streams_) guard.emplace(streams_[FSDP_LANE_COMPUTE]);
  c10::DataPtr data =
      c10::GetAllocator(device_.type())->allocate(static_cast<size_t>(nbytes));
  void *block = data.get();
  Block &made = blocks_[block];
  made.data = std::move(data);
  if (has_streams_ && groups && registers_blocks()) {
    for (const Group *group : groups()) {
      if (!group->transport || group->transport->ops->is_host) continue;
      register_block(*group->transport, block, nbytes);
      made.registered.push_back(group->transport);
    }
  }
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
  for (const auto &transport : blocks_.at(block).registered) {
    deregister_block(*transport, block);
  }
  blocks_.erase(block);
}

void Provider::release_memory() noexcept {
  if (!has_streams_) return;
  auto *allocator =
      dynamic_cast<c10::DeviceAllocator *>(c10::GetAllocator(device_.type()));
  if (allocator == nullptr) return;  // one without a cache
  try {
    allocator->emptyCache();
  } catch (const std::exception &) {  // a capture of a graph: it stays there
  }
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

void Provider::add_work(fsdp_lane lane, Group *group,
                        c10::intrusive_ptr<c10d::Work> work) {
  if (work == nullptr) return;  // some backends finish at once
  const int64_t sequence = trace != nullptr ? trace->num_recorded - 1 : -1;
  if (has_streams_) {
    on_lane(lane,
            // Enqueues; the host goes on.
            [&] { wait_for(group, *work, sequence); });
    return;
  }
  host_lanes_[lane].items.push_back(
      {std::move(work), group, sequence, nullptr});
  host_lanes_[lane].num_added++;
}

void Provider::add_ticket(fsdp_lane lane, Group *group, fsdp_channel channel,
                          uint64_t ticket) {
  const int64_t sequence = trace == nullptr ? -1 : trace->num_recorded - 1;
  host_lanes_[lane].items.push_back(
      {nullptr, group, sequence, nullptr, channel, ticket});
  host_lanes_[lane].num_added++;
}

void *Provider::native_stream(fsdp_lane lane) const {
  const c10::impl::VirtualGuardImpl guard(device_.type());
  return (lane == FSDP_LANE_COMPUTE ? guard.getStream(device_) : streams_[lane])
      .native_handle();
}

void Provider::add_step(fsdp_lane lane, std::function<void()> step) {
  HostLane &queue = host_lanes_[lane];
  if (has_streams_ || queue.items.empty()) {
    on_lane(lane, step);
    return;
  }
  queue.items.push_back({nullptr, nullptr, -1, std::move(step)});
  queue.num_added++;
}

namespace {

// Lets the others know this process, once a collective has told that all came.
void meet(Group &group) {
  if (group.has_met) return;
  group.has_met = true;
  if (group.post_mortem) group.post_mortem->meet();
}

// Waits; a failure of the ranks is thrown again as what `report` makes of it.
template <typename Report>
void wait_or_report(c10d::Work &work, Report &&report) {
  try {
    work.wait();
  } catch (const c10::DistBackendError &e) {
    C10_THROW_ERROR(DistBackendError, report(e.what_without_backtrace()));
  } catch (const c10::Error &) {
    throw;                             // of the tensors, not of the ranks
  } catch (const std::exception &e) {  // gloo's
    throw std::runtime_error(report(e.what()));
  }
}

}  // namespace

std::string Provider::report(Group *group, const char *cause,
                             const std::string &operation) const {
  if (!group->post_mortem) return cause;
  break_groups(c10::str(operation, " failed in another group (", cause, ")"));
  const std::string text =
      group->post_mortem->describe(cause, operation, trace);
  tell_others(group, text);
  return text;
}

void Provider::break_groups(const std::string &cause) const {
  if (has_streams_ || !groups) return;
  for (const Group *each : groups()) {
    fsdp_transport *transport = each->transport.get();
    if (transport != nullptr && transport->ops->give_up != nullptr) {
      transport->ops->give_up(transport, cause.c_str());
    }
    if (each->is_gloo) break_gloo(*each->process_group);
  }
}

void Provider::tell_others(const Group *group, const std::string &text) const {
  if (!groups) return;
  for (const Group *each : groups()) {
    if (each->post_mortem && each->post_mortem != group->post_mortem) {
      each->post_mortem->say("failed in another group: " +
                             text.substr(0, text.find_last_not_of('.') + 1));
    }
  }
}

void Provider::transport_failed(Group *group, const char *cause,
                                int64_t sequence) const {
  C10_THROW_ERROR(DistBackendError,
                  report(group, cause, operation_of(trace, sequence)));
}

void Provider::transport_failed(Group *group, const char *cause,
                                const std::string &operation) const {
  C10_THROW_ERROR(DistBackendError, report(group, cause, operation));
}

void Provider::wait_for(Group *group, c10d::Work &work,
                        int64_t sequence) const {
  wait_or_report(work, [&](const char *cause) {
    return report(group, cause, operation_of(trace, sequence));
  });
  if (!has_streams_) meet(*group);
}

void Provider::finish(Group *group, c10d::Work &work,
                      const std::string &operation) {
  wait_or_report(
      work, [&](const char *cause) { return report(group, cause, operation); });
}

void Provider::wait_for(const HostItem &item, bool has_failed) const {
  fsdp_transport *transport = item.group->transport.get();
  FSDP_LOCAL_ERROR(error);
  if (transport->ops->wait(transport, item.channel, item.ticket, &error) ==
      FSDP_OK) {
    meet(*item.group);
  } else if (!has_failed) {
    transport_failed(item.group, error.message, item.sequence);
  }
}

void Provider::run_item(const HostItem &item, bool has_failed) const {
  if (item.group == nullptr) {
    if (!has_failed) item.step();
  } else if (item.work == nullptr) {
    wait_for(item, has_failed);
  } else if (has_failed) {
    item.work->wait();  // the first failure is the one to describe
  } else {
    wait_for(item.group, *item.work, item.sequence);
  }
}

void Provider::run_recorded(const HostItem &item,
                            fsdp_timeline *timeline) const {
  fsdp_timeline_entry entry = {};
  entry.kind = FSDP_TIMELINE_WAIT;
  entry.sequence = item.sequence;
  entry.unit = -1;
  entry.nbytes = -1;
  entry.mark_begin = -1;
  entry.mark_end = -1;
  if (item.work != nullptr && item.work->isCompleted()) {
    entry.flags = FSDP_TIMELINE_WAS_DONE;
  }
  entry.begin_ns = fsdp_timeline_now(timeline);
  run_item(item, false);
  entry.end_ns = fsdp_timeline_now(timeline);
  fsdp_timeline_add(timeline, &entry);
}

// After a failure the rest, up to the ticket, still has to end, because its
// memory will be reused; its steps would only work on garbage.
void Provider::run_until(HostLane &lane, uint64_t ticket) {
  std::exception_ptr failure;
  fsdp_timeline *timeline =
      engine == nullptr ? nullptr : fsdp_engine_timeline(engine);
  while (lane.num_done < ticket && !lane.items.empty()) {
    const HostItem item = std::move(lane.items.front());
    lane.items.pop_front();
    lane.num_done++;
    try {
      if (timeline != nullptr && item.group != nullptr && !failure) {
        run_recorded(item, timeline);
      } else {
        run_item(item, failure != nullptr);
      }
    } catch (...) {
      if (!failure) failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

namespace {

int32_t mark_lane(void *context, fsdp_lane lane) {
  return provider_of(context).mark(lane);
}

fsdp_status block_alloc(void *context, int64_t nbytes, void **block,
                        fsdp_error *error) {
  GUARDED(error) {
    *block = provider_of(context).allocate(nbytes);
    return FSDP_OK;
  };
}

void block_free(void *context, void *block, int64_t /*nbytes*/,
                fsdp_event *last_use) {
  // A failed collective is reported where it is waited for, not here.
  try {
    provider_of(context).free_block(block, last_use);
  } catch (...) {
  }
}

void memory_release(void *context) {
  provider_of(context).release_memory();
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
bool pack_on_host(void *destination, fsdp_dtype dtype,
                  const fsdp_pack_item &item, double scale) {
  fsdp_pack_item nothing = item;
  nothing.numel = 0;
  if (fsdp_host_pack(destination, dtype, &nothing, 1, scale, nullptr) !=
      FSDP_OK) {
    return false;
  }
  at::parallel_for(0, item.numel, kGrainNumel, [&](int64_t begin, int64_t end) {
    fsdp_pack_item part = item;
    part.offset += begin;
    part.numel = end - begin;
    if (item.data != nullptr) {
      part.data =
          static_cast<const char *>(item.data) + begin * item.dtype.itemsize;
    }
    fsdp_error error;
    if (fsdp_host_pack(destination, dtype, &part, 1, scale, &error) !=
        FSDP_OK) {
      throw_error(error);
    }
  });
  return true;
}

fsdp_status cast(void *context, fsdp_lane lane, void *destination,
                 fsdp_dtype destination_dtype, const void *source,
                 fsdp_dtype source_dtype, int64_t numel, fsdp_error *error) {
  GUARDED(error) {
    Provider &provider = provider_of(context);
    if (numel == 0 || destination == source) return FSDP_OK;
    const fsdp_pack_item item = {source, source_dtype, 0, numel, false};
    if (!provider.has_streams() &&
        pack_on_host(destination, destination_dtype, item, 1.0)) {
      return FSDP_OK;
    }
    provider.on_lane(lane, [&] {
      if (pack_on_cuda(provider.device(), destination, destination_dtype, &item,
                       1, 1.0)) {
        return;
      }
      provider.view(destination, numel, destination_dtype)
          .copy_(provider.view(const_cast<void *>(source), numel, source_dtype),
                 /*non_blocking=*/true);
    });
    return FSDP_OK;
  };
}

// destination = scale * source (+ destination), for any dtypes and device.
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
  if (provider.has_streams()
          ? pack_on_cuda(provider.device(), destination, dtype, &item, 1, scale)
          : pack_on_host(destination, dtype, item, scale)) {
    return;
  }
  char *target =
      static_cast<char *>(destination) + item.offset * dtype.itemsize;
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
    const Provider &provider = provider_of(context);
    provider.on_lane(lane, [&] {
      if (pack_on_cuda(provider.device(), destination, destination_dtype, items,
                       num_items, scale)) {
        return;
      }
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
    Provider &provider = provider_of(context);
    const fsdp_pack_item item = {source, source_dtype, 0, numel, add};
    provider.add_step(
        lane, [&provider, destination, destination_dtype, item, scale] {
          pack_item(provider, destination, destination_dtype, item, scale);
        });
    return FSDP_OK;
  };
}

}  // namespace

fsdp_device_ops Provider::ops() {
  fsdp_device_ops table = {};
  table.context = this;
  table.block_alloc = block_alloc;
  table.block_free = block_free;
  table.memory_release = memory_release;
  table.event_create = event_create;
  table.event_destroy = event_destroy;
  table.event_record = event_record;
  table.event_wait = event_wait;
  table.event_synchronize = event_synchronize;
  if (has_streams_) table.mark = mark_lane;
  table.host_alloc = host_alloc;
  table.host_free = host_free;
  table.copy_to_device = copy_to_device;
  table.copy_to_host = copy_to_host;
  table.cast = cast;
  table.pack = pack;
  table.accumulate = accumulate;
  add_collective_ops(&table);
  return table;
}

}  // namespace fsdp_torch
