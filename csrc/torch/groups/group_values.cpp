// Small values over the ranks of a group: bytes that are compared, and numbers
// for the norm of gradients.
#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "torch/device/provider.hpp"
#include "torch/groups/c10d_compat.hpp"
#include "torch/guard.hpp"

namespace fsdp_torch {
namespace {

// Runs `body` on the lane of reductions, after what the current stream has now
// and before what it gets later.
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

fsdp_status all_gather_bytes(void *context, const fsdp_group *group,
                             const void *mine, int64_t nbytes, void *all,
                             fsdp_error *error) {
  GUARDED(error) {
    const Provider &provider = provider_of(context);
    const auto &asked = *static_cast<const Group *>(group->handle);
    const at::TensorOptions options =
        at::TensorOptions().dtype(at::kByte).device(provider.device());
    at::Tensor piece =
        Provider::host_view(const_cast<void *>(mine), nbytes)
            .to(provider.device(), /*dtype=*/at::kByte, /*non_blocking=*/false,
                /*copy=*/true);
    at::Tensor whole = at::empty({nbytes * group->world_size}, options);
    const WorkPtr work = all_gather_over_c10d(asked, whole, piece);
    try {
      if (work) work->wait();
    } catch (...) {
      provider.ranks_failed(
          asked, failure_of_ranks().c_str(),
          "comparison of the ranks before the next operation");
    }
    Provider::host_view(all, whole.numel()).copy_(whole);
    return FSDP_OK;
  };
}

}  // namespace

void add_group_ops(fsdp_device_ops *ops) {
  ops->all_gather_bytes = all_gather_bytes;
}

at::Tensor reduce_scalar(Provider &provider, Group &group,
                         const at::Tensor &term, bool is_max,
                         const char *label) {
  TORCH_INTERNAL_ASSERT(term.numel() == 1 &&
                        term.device() == provider.device());
  fsdp_transport *transport = group.transport.get();
  const fsdp_transport_ops &ops = *transport->ops;
  fsdp_call call = {};
  call.channel = FSDP_CHANNEL_REDUCE;
  call.label = label;
  call.is_captured = fsdp_engine_is_capturing(provider.engine);
  if (provider.has_streams()) {
    call.stream = provider.native_stream(FSDP_LANE_REDUCE);
  }
  const fsdp_dtype dtype = {static_cast<int32_t>(term.scalar_type()),
                            static_cast<int32_t>(term.element_size())};
  // Transports have sums only; the maximum is found among all terms.
  const at::Tensor all =
      is_max ? at::empty({group.world_size}, term.options()) : term;
  FSDP_LOCAL_ERROR(error);
  uint64_t ticket = 0;
  fsdp_status status = FSDP_OK;
  between_compute(provider, [&] {
    status = is_max ? ops.all_gather(transport, &call, all.data_ptr(),
                                     term.data_ptr(), 1, dtype, &ticket, &error)
                    : ops.all_reduce(transport, &call, all.data_ptr(), 1, dtype,
                                     &ticket, &error);
  });
  if (status == FSDP_OK && ops.is_host) {
    status = ops.wait(transport, call.channel, ticket, &error);
  }
  if (status != FSDP_OK) provider.call_failed(group, error, label);
  return is_max ? all.max() : all;
}

}  // namespace fsdp_torch
