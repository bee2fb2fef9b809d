// Host memory for many tensors at once, over large pages.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace fsdp_torch {

struct TensorSpec {
  int64_t numel;
  at::ScalarType dtype;
};

// One uninitialised 1-D tensor on the CPU each. Each has a storage of its own
// size; see Note [Slabs].
std::vector<at::Tensor> empty_tensors(const std::vector<TensorSpec> &specs);

}  // namespace fsdp_torch
