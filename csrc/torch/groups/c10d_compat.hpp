// What differs between process groups of the supported versions of torch.
#pragma once

#include <ATen/core/Tensor.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace fsdp_torch {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// These ProcessGroup methods were renamed in 2.13.
template <typename ProcessGroup>
WorkPtr all_gather_base(ProcessGroup &group, at::Tensor &output,
                        at::Tensor &input) {
  if constexpr (requires { group.all_gather_single(output, input); }) {
    return group.all_gather_single(output, input);
  } else {
    return group._allgather_base(output, input);
  }
}

template <typename ProcessGroup>
WorkPtr reduce_scatter_base(ProcessGroup &group, at::Tensor &output,
                            at::Tensor &input) {
  if constexpr (requires { group.reduce_scatter_single(output, input); }) {
    return group.reduce_scatter_single(output, input);
  } else {
    return group._reduce_scatter_base(output, input);
  }
}

// The forms that a group written in Python can override.
template <typename ProcessGroup>
WorkPtr all_gather_base_coalesced(ProcessGroup &group,
                                  std::vector<at::Tensor> &outputs,
                                  std::vector<at::Tensor> &inputs) {
  if constexpr (requires {
                  group.all_gather_single_coalesced(outputs, inputs);
                }) {
    return group.all_gather_single_coalesced(outputs, inputs);
  } else {
    return group.allgather_into_tensor_coalesced(outputs, inputs);
  }
}

template <typename ProcessGroup>
WorkPtr reduce_scatter_base_coalesced(ProcessGroup &group,
                                      std::vector<at::Tensor> &outputs,
                                      std::vector<at::Tensor> &inputs) {
  if constexpr (requires {
                  group.reduce_scatter_single_coalesced(outputs, inputs);
                }) {
    return group.reduce_scatter_single_coalesced(outputs, inputs);
  } else {
    return group.reduce_scatter_tensor_coalesced(outputs, inputs);
  }
}

// `received` and `sent` have the elements from and to each rank.
template <typename ProcessGroup>
WorkPtr all_to_all_base(ProcessGroup &group, at::Tensor &output,
                        at::Tensor &input, std::vector<int64_t> received,
                        std::vector<int64_t> sent) {
  if constexpr (requires {
                  group.all_to_all_single(output, input, received, sent);
                }) {
    return group.all_to_all_single(output, input, received, sent);
  } else {
    return group.alltoall_base(output, input, received, sent);
  }
}

}  // namespace fsdp_torch
