// What torch's tensors and dtypes are to the core, for the files of the bridge.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "base/types.h"

namespace fsdp_torch {

fsdp_dtype core_dtype(at::ScalarType dtype);

// Raises unless the tensor's elements are in its own memory, one behind the
// other; the message begins with `name`.
void check_memory(const at::Tensor &tensor, const std::string &name);

}  // namespace fsdp_torch
