// What differs between the supported versions of torch, in one place.
#pragma once

#include <c10/core/StorageImpl.h>
#include <torch/csrc/autograd/variable.h>

#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

namespace fsdp_torch {

// std::shared_ptr<Node> up to torch 2.12, c10::intrusive_ptr<Node> later.
using NodePtr = decltype(torch::autograd::impl::grad_accumulator(
    std::declval<const at::Tensor &>()));

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// Three ProcessGroup methods were renamed in 2.13.
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

// Makes reading a storage that holds nothing an exception with `message`
// instead of a crash, where torch can. Undone by allow_access.
template <typename Storage>
void refuse_access(Storage &storage, const std::string &message) {
  if constexpr (requires { storage.clear_data_ptr_access_error_msg_(); }) {
    storage.release_data_and_set_meta_custom_data_ptr_error_msg_(message);
  }
}

template <typename Storage>
void allow_access(Storage &storage) {
  if constexpr (requires { storage.clear_data_ptr_access_error_msg_(); }) {
    storage.clear_data_ptr_access_error_msg_();
  }
}

}  // namespace fsdp_torch
