// What the Python module of the simulated device offers beyond torch's own.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace sim {

// Collectives of `gloo` in stream order. `is_like_gloo`: as gloo itself carries
// tensors of a GPU.
c10::intrusive_ptr<c10d::Backend> make_backend(
    c10::intrusive_ptr<c10d::Backend> gloo, bool is_like_gloo);

}  // namespace sim
