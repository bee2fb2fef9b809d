// What differs between the supported versions of torch, in one place; what
// differs in process groups is in groups/c10d_compat.hpp.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <type_traits>
#include <utility>

namespace fsdp_torch {

// std::shared_ptr<Node> up to torch 2.12, c10::intrusive_ptr<Node> later.
using NodePtr =
    std::remove_cvref_t<decltype(std::declval<const at::Tensor &>().grad_fn())>;

template <typename Storage>
inline constexpr bool can_refuse_access =
    requires(Storage &storage) { storage.clear_data_ptr_access_error_msg_(); };

// Makes reading a storage that holds nothing an exception with `message`
// instead of a crash, where torch can. Undone by allow_access.
template <typename Storage>
void refuse_access(Storage &storage, const std::string &message) {
  if constexpr (can_refuse_access<Storage>) {
    storage.release_data_and_set_meta_custom_data_ptr_error_msg_(message);
  }
}

template <typename Storage>
void allow_access(Storage &storage) {
  if constexpr (can_refuse_access<Storage>) {
    storage.clear_data_ptr_access_error_msg_();
  }
}

}  // namespace fsdp_torch
