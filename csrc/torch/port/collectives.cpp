// Collectives for the engine, over c10d.
#include <ATen/ATen.h>
#include <ATen/ThreadLocalPythonObjects.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <utility>

#include "torch/compat.hpp"
#include "torch/guard.hpp"
#include "torch/port/provider.hpp"

namespace fsdp_torch {
namespace {

Group &backend_of(const fsdp_group *group) {
  return *static_cast<Group *>(group->handle);
}

// How one call of a transport is made: the label lives as long as this.
class TransportCall {
 public:
  TransportCall(const Provider &provider, fsdp_lane lane, const char *label) {
    std::snprintf(text_.data(), text_.size(), "%s", label);
    place(provider, lane);
  }
  TransportCall(const Provider &provider, fsdp_lane lane) {
    const fsdp_trace_entry *entry =
        provider.trace == nullptr ? nullptr : fsdp_trace_last(provider.trace);
    if (entry != nullptr) {
      std::snprintf(text_.data(), text_.size(), "%s of unit '%s'",
                    entry->operation, entry->unit ? entry->unit : "-");
    }
    place(provider, lane);
  }
  TransportCall(const TransportCall &) = delete;
  TransportCall &operator=(const TransportCall &) = delete;

  const fsdp_call *get() const { return &call_; }

 private:
  void place(const Provider &provider, fsdp_lane lane) {
    call_.channel =
        lane == FSDP_LANE_UNSHARD ? FSDP_CHANNEL_GATHER : FSDP_CHANNEL_REDUCE;
    if (provider.has_streams()) call_.stream = provider.native_stream(lane);
    call_.label = text_.data();
  }

  std::array<char, 160> text_ = {};
  fsdp_call call_ = {};
};

// Starts a collective of the group's transport on a lane.
template <typename Start>
fsdp_status carry(Provider &provider, fsdp_lane lane, Group &group,
                  fsdp_error *error, Start &&start) {
  fsdp_transport *transport = group.transport.get();
  const TransportCall call(provider, lane);
  uint64_t ticket = 0;
  FSDP_LOCAL_ERROR(cause);
  const fsdp_status status = start(transport, call.get(), &ticket, &cause);
  if (status == FSDP_OK && transport->ops->is_host) {
    provider.add_ticket(lane, &group, call.get()->channel, ticket);
  } else if (status == FSDP_BACKEND) {
    provider.transport_failed(&group, cause.message, -1);
  }
  if (status != FSDP_OK && error != nullptr) *error = cause;
  return status;
}

// Grouping: a transport may merge the calls; c10d's are launches of their own.
fsdp_status group_begin(void *context, fsdp_lane lane, const fsdp_group *group,
                        fsdp_error *error) {
  GUARDED(error) {
    fsdp_transport *transport = backend_of(group).transport.get();
    if (transport == nullptr) return FSDP_OK;
    const TransportCall call(provider_of(context), lane);
    return transport->ops->group_begin(transport, call.get(), error);
  };
}

fsdp_status group_end(void *context, fsdp_lane lane, const fsdp_group *group,
                      fsdp_error *error) {
  GUARDED(error) {
    fsdp_transport *transport = backend_of(group).transport.get();
    if (transport == nullptr) return FSDP_OK;
    const TransportCall call(provider_of(context), lane);
    return transport->ops->group_end(transport, call.get(), error);
  };
}

bool reduce_wants_scratch(void * /*context*/, const fsdp_group *group) {
  return backend_of(group).transport == nullptr;
}

// Note [Python objects in thread-local state]
// Tensor.backward() keeps a Python object in the thread-local state while it
// runs, and gloo's work items capture that state. Whoever drops the last
// reference takes the GIL; when that is gloo's own thread, it does so with the
// group's queue locked, and the next collective waits for the GIL. Hence
// collectives are issued without such objects.
class WithoutPythonObjects {
 public:
  // Moved, since a copy would allocate: the state is this thread's own.
  WithoutPythonObjects()
      : saved_(std::move(const_cast<Objects &>(Objects::get_state()))) {
    Objects::set_state({});
  }
  ~WithoutPythonObjects() { Objects::set_state(std::move(saved_)); }
  WithoutPythonObjects(const WithoutPythonObjects &) = delete;
  WithoutPythonObjects &operator=(const WithoutPythonObjects &) = delete;

 private:
  using Objects = at::impl::ThreadLocalPythonObjects;
  Objects saved_;
};

WorkPtr gather(const Group &group, at::Tensor &whole, at::Tensor &piece) {
  c10d::ProcessGroup &process_group = *group.process_group;
  if (group.has_backend) return all_gather_base(process_group, whole, piece);
  std::vector<at::Tensor> outputs = {whole};
  std::vector<at::Tensor> inputs = {piece};
  return all_gather_base_coalesced(process_group, outputs, inputs);
}

WorkPtr scatter_sum(const Group &group, at::Tensor &piece, at::Tensor &whole) {
  c10d::ProcessGroup &process_group = *group.process_group;
  if (group.has_backend) {
    return reduce_scatter_base(process_group, piece, whole);
  }
  std::vector<at::Tensor> outputs = {piece};
  std::vector<at::Tensor> inputs = {whole};
  return reduce_scatter_base_coalesced(process_group, outputs, inputs);
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
        lane, &backend_of(group),
        backend_of(group).process_group->broadcast(piece, options));
  }
}

fsdp_status all_gather(void *context, fsdp_lane lane, const fsdp_group *group,
                       void *output, const void *input, int64_t shard_numel,
                       fsdp_dtype dtype, fsdp_error *error) {
  GUARDED(error) {
    Provider &provider = provider_of(context);
    const WithoutPythonObjects no_objects;
    Group &backend = backend_of(group);
    if (shard_numel == 0) return FSDP_OK;
    if (backend.transport) {
      return carry(provider, lane, backend, error,
                   [&](fsdp_transport *self, const fsdp_call *call,
                       uint64_t *ticket, fsdp_error *cause) {
                     return self->ops->all_gather(self, call, output, input,
                                                  shard_numel, dtype, ticket,
                                                  cause);
                   });
    }
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
    provider.on_lane(lane, [&] { work = gather(backend, whole, piece); });
    provider.add_work(lane, &backend_of(group), std::move(work));
    return FSDP_OK;
  };
}

// This rank's slot of a buffer that holds the shards of all ranks.
at::Tensor own_shard(Provider &provider, const fsdp_group *group, void *buffer,
                     int64_t shard_numel, fsdp_dtype dtype) {
  char *slot =
      static_cast<char *>(buffer) + group->rank * shard_numel * dtype.itemsize;
  return provider.view(slot, shard_numel, dtype);
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
      lane, &backend_of(group),
      all_to_all_base(*backend_of(group).process_group, received, sent));
  at::Tensor own = own_shard(provider, group, buffer, shard_numel, dtype);
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
    Provider &provider = provider_of(context);
    const WithoutPythonObjects no_objects;
    if (shard_numel == 0) return FSDP_OK;
    Group &backend = backend_of(group);
    if (backend.transport) {
      return carry(provider, lane, backend, error,
                   [&](fsdp_transport *self, const fsdp_call *call,
                       uint64_t *ticket, fsdp_error *cause) {
                     return self->ops->reduce_scatter(self, call, buffer,
                                                      shard_numel, dtype, 1.0,
                                                      ticket, cause);
                   });
    }
    if (scratch != nullptr) {
      reduce_by_all_to_all(provider, lane, group, buffer, scratch, shard_numel,
                           dtype);
      return FSDP_OK;
    }
    at::Tensor whole =
        provider.view(buffer, shard_numel * group->world_size, dtype);
    at::Tensor own = own_shard(provider, group, buffer, shard_numel, dtype);
    c10::intrusive_ptr<c10d::Work> work;
    provider.on_lane(
        lane, [&] { work = scatter_sum(backend_of(group), own, whole); });
    provider.add_work(lane, &backend_of(group), std::move(work));
    return FSDP_OK;
  };
}

fsdp_status all_reduce(void *context, fsdp_lane lane, const fsdp_group *group,
                       void *buffer, int64_t numel, fsdp_dtype dtype,
                       fsdp_error *error) {
  GUARDED(error) {
    Provider &provider = provider_of(context);
    const WithoutPythonObjects no_objects;
    if (numel == 0) return FSDP_OK;
    Group &backend = backend_of(group);
    if (backend.transport) {
      return carry(provider, lane, backend, error,
                   [&](fsdp_transport *self, const fsdp_call *call,
                       uint64_t *ticket, fsdp_error *cause) {
                     return self->ops->all_reduce(self, call, buffer, numel,
                                                  dtype, 1.0, ticket, cause);
                   });
    }
    std::vector<at::Tensor> tensors = {provider.view(buffer, numel, dtype)};
    c10::intrusive_ptr<c10d::Work> work;
    provider.on_lane(lane,
                     [&] { work = backend.process_group->allreduce(tensors); });
    provider.add_work(lane, &backend_of(group), std::move(work));
    return FSDP_OK;
  };
}

fsdp_status broadcast(void *context, fsdp_lane lane, const fsdp_group *group,
                      void *buffer, int64_t numel, int64_t root,
                      fsdp_dtype dtype, fsdp_error *error) {
  GUARDED(error) {
    Provider &provider = provider_of(context);
    const WithoutPythonObjects no_objects;
    if (numel == 0) return FSDP_OK;
    Group &backend = backend_of(group);
    if (backend.transport) {
      return carry(provider, lane, backend, error,
                   [&](fsdp_transport *self, const fsdp_call *call,
                       uint64_t *ticket, fsdp_error *cause) {
                     return self->ops->broadcast(self, call, buffer, numel,
                                                 root, dtype, ticket, cause);
                   });
    }
    std::vector<at::Tensor> tensors = {provider.view(buffer, numel, dtype)};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    c10::intrusive_ptr<c10d::Work> work;
    provider.on_lane(lane, [&] {
      work = backend_of(group).process_group->broadcast(tensors, options);
    });
    provider.add_work(lane, &backend_of(group), std::move(work));
    return FSDP_OK;
  };
}

fsdp_status exchange(void *context, const fsdp_group *group, const void *mine,
                     int64_t nbytes, void *all, fsdp_error *error) {
  GUARDED(error) {
    Provider &provider = provider_of(context);
    const at::TensorOptions options =
        at::TensorOptions().dtype(at::kByte).device(provider.device());
    at::Tensor piece =
        Provider::host_view(const_cast<void *>(mine), nbytes)
            .to(provider.device(), /*dtype=*/at::kByte, /*non_blocking=*/false,
                /*copy=*/true);
    at::Tensor whole = at::empty({nbytes * group->world_size}, options);
    const WorkPtr work = gather(backend_of(group), whole, piece);
    if (work) {
      provider.finish(&backend_of(group), *work,
                      "exchange of flags before the next operation");
    }
    Provider::host_view(all, whole.numel()).copy_(whole);
    return FSDP_OK;
  };
}

// Runs `body` on the lane of reductions, after and before what the current
// stream has and will have.
template <typename Body>
void between_compute(const Provider &provider, const Body &body) {
  if (!provider.has_streams()) {
    body();
    return;
  }
  const c10::DeviceType type = provider.device().type();
  const c10::impl::VirtualGuardImpl guard(type);
  const auto current = [&] { return guard.getStream(provider.device()); };
  c10::Event before(type);
  c10::Event after(type);
  before.record(current());
  provider.on_lane(FSDP_LANE_REDUCE, [&] {
    before.block(current());
    body();
    after.record(current());
  });
  after.block(current());
}

// Over the ranks, by the group's transport; the host waits if that is the
// host's.
at::Tensor reduce_by_transport(Provider &provider, Group &group,
                               const at::Tensor &term, bool is_max,
                               const char *label) {
  fsdp_transport *transport = group.transport.get();
  const TransportCall call(provider, FSDP_LANE_REDUCE, label);
  const fsdp_dtype dtype = {static_cast<int32_t>(term.scalar_type()),
                            static_cast<int32_t>(term.element_size())};
  // Transports have sums only; the maximum is found among all terms.
  const at::Tensor all =
      is_max ? at::empty({group.process_group->getSize()}, term.options())
             : term;
  FSDP_LOCAL_ERROR(error);
  uint64_t ticket = 0;
  fsdp_status status = FSDP_OK;
  between_compute(provider, [&] {
    status = is_max ? transport->ops->all_gather(
                          transport, call.get(), all.data_ptr(),
                          term.data_ptr(), 1, dtype, &ticket, &error)
                    : transport->ops->all_reduce(transport, call.get(),
                                                 all.data_ptr(), 1, dtype, 1.0,
                                                 &ticket, &error);
  });
  if (status == FSDP_OK && transport->ops->is_host) {
    status =
        transport->ops->wait(transport, call.get()->channel, ticket, &error);
  }
  if (status == FSDP_BACKEND) {
    provider.transport_failed(&group, error.message, std::string(label));
  }
  if (status != FSDP_OK) throw_error(error);
  return is_max ? all.max() : all;
}

}  // namespace

at::Tensor reduce_scalar(Provider &provider, Group &group,
                         const at::Tensor &term, bool is_max,
                         const char *label) {
  TORCH_INTERNAL_ASSERT(term.numel() == 1 &&
                        term.device() == provider.device());
  if (group.transport) {
    return reduce_by_transport(provider, group, term, is_max, label);
  }
  std::vector<at::Tensor> tensors = {term};
  c10d::AllreduceOptions options;
  options.reduceOp = is_max ? c10d::ReduceOp::MAX : c10d::ReduceOp::SUM;
  const WorkPtr work = group.process_group->allreduce(tensors, options);
  if (work) provider.finish(&group, *work, label);
  return tensors[0];
}

void add_collective_ops(fsdp_device_ops *ops) {
  ops->group_begin = group_begin;
  ops->group_end = group_end;
  ops->all_gather = all_gather;
  ops->broadcast = broadcast;
  ops->reduce_scatter = reduce_scatter;
  ops->all_reduce = all_reduce;
  ops->reduce_wants_scratch = reduce_wants_scratch;
  ops->exchange = exchange;
}

}  // namespace fsdp_torch
