// One number over the ranks of a group, for the norm of gradients.
#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "torch/guard.hpp"
#include "torch/port/provider.hpp"

namespace fsdp_torch {
namespace {

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

}  // namespace

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
  if (provider.has_streams()) {
    call.stream = provider.native_stream(FSDP_LANE_REDUCE);
  }
  const fsdp_dtype dtype = {static_cast<int32_t>(term.scalar_type()),
                            static_cast<int32_t>(term.element_size())};
  // Transports have sums only; the maximum is found among all terms.
  const at::Tensor all =
      is_max ? at::empty({group.world_size}, term.options()) : term;
  fsdp_error error = {};
  uint64_t ticket = 0;
  fsdp_status status = FSDP_OK;
  between_compute(provider, [&] {
    status = is_max ? ops.all_gather(transport, &call, all.data_ptr(),
                                     term.data_ptr(), 1, dtype, &ticket, &error)
                    : ops.all_reduce(transport, &call, all.data_ptr(), 1, dtype,
                                     1.0, &ticket, &error);
  });
  if (status == FSDP_OK && ops.is_host) {
    status = ops.wait(transport, call.channel, ticket, &error);
  }
  if (status != FSDP_OK) provider.call_failed(group, error, label);
  return is_max ? all.max() : all;
}

}  // namespace fsdp_torch
