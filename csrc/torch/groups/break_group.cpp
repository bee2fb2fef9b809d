#include "torch/groups/break_group.hpp"

#include <ATen/ATen.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "torch/device/provider.hpp"

namespace fsdp_torch {

// A receive that runs out of time makes gloo end everything in flight on the
// same connections, and close them. Groups with several devices spread tags
// over them.
void break_gloo(c10d::ProcessGroup &process_group) noexcept {
  constexpr int kFirstTag = 1 << 30;
  constexpr int kNumTags = 4;
  const int world_size = process_group.getSize();
  if (world_size < 2) return;
  for (int i = 0; i < kNumTags; i++) {
    try {
      std::vector<at::Tensor> tensors = {at::empty({1}, at::kByte)};
      const auto work = process_group.recv(
          tensors, (process_group.getRank() + 1) % world_size, kFirstTag + i);
      if (work) work->wait(std::chrono::milliseconds(1));
    } catch (...) {  // that was the purpose
    }
  }
}

bool is_gloo(c10d::ProcessGroup &process_group, c10::DeviceType device) {
  return process_group.getBackend(device)->getBackendName() == "gloo";
}

void break_group(const Group &group, const std::string &cause) noexcept {
  fsdp_transport *transport = group.transport.get();
  if (transport != nullptr && transport->ops->give_up != nullptr) {
    transport->ops->give_up(transport, cause.c_str());
  }
  if (group.is_gloo) break_gloo(*group.process_group);
}

}  // namespace fsdp_torch
