// The kernels of csrc/cuda, found at run time: fsdp_c/_cuda.so next to this
// extension, if it was built and the machine can run it. Without it ATen does
// the same work in more launches.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <vector>

#include "cuda/kernels.h"

namespace fsdp_torch {

// The kernels for `device`, opened at the first call; nullptr where the device
// is not CUDA, with FSDP_C_CUDA=0, and where they cannot be had.
const fsdp_cuda_kernels *cuda_kernels(c10::Device device);

// Why cuda_kernels gives nullptr for a CUDA device; "" if it gives them.
const char *why_no_cuda_kernels(c10::Device device);

// fsdp_host_pack on the current stream of `device`, in one launch. False, with
// nothing done, when there is no kernel for it.
bool pack_on_cuda(c10::Device device, const fsdp_pack_item *items,
                  int64_t num_items, double scale);

// The norm of dense CUDA tensors together, fp64 on their device, without
// waiting for it. An undefined tensor when there is no kernel for it.
at::Tensor norm_on_cuda(const std::vector<at::Tensor> &tensors, double power);

// Multiplies dense CUDA tensors by `scale` (fp32, one element, on their
// device) in place. False, with nothing done, when there is no kernel for it.
bool scale_on_cuda(const std::vector<at::Tensor> &tensors,
                   const at::Tensor &scale);

}  // namespace fsdp_torch
