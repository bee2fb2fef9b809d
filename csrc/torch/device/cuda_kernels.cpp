// Opens the library of CUDA kernels and calls it.
#include "torch/device/cuda_kernels.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <cstdlib>
#include <string>

#include "torch/guard.hpp"

namespace fsdp_torch {
namespace {

struct KernelLibrary {
  const fsdp_cuda_kernels *kernels = nullptr;
  std::string reason;
};

// fsdp_c/_cuda.so, in the folder of this extension; or what FSDP_C_CUDA_LIBRARY
// names.
std::string library_path() {
  const char *named = std::getenv("FSDP_C_CUDA_LIBRARY");
  if (named != nullptr) return named;
  Dl_info info = {};
  if (dladdr(reinterpret_cast<const void *>(&library_path), &info) == 0 ||
      info.dli_fname == nullptr) {
    return "_cuda.so";
  }
  const std::string self = info.dli_fname;
  return self.substr(0, self.find_last_of('/') + 1) + "_cuda.so";
}

// Never closed: kernels may be in flight until the process ends.
KernelLibrary open_library(c10::Device device) {
  const char *choice = std::getenv("FSDP_C_CUDA");
  if (choice != nullptr && std::string(choice) == "0") {
    return {nullptr, "FSDP_C_CUDA=0"};
  }
  const std::string path = library_path();
  void *handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char *cause = dlerror();
    return {nullptr, cause != nullptr ? cause : path + " cannot be opened"};
  }
  using Entry = decltype(&fsdp_cuda_kernels_table);
  const auto entry =
      reinterpret_cast<Entry>(dlsym(handle, "fsdp_cuda_kernels_table"));
  if (entry == nullptr) return {nullptr, path + " has no kernels"};
  const c10::DeviceGuard guard(device);  // it asks whether this one can
  fsdp_error error = {};
  const fsdp_cuda_kernels *kernels = entry(&error);
  if (kernels == nullptr) return {nullptr, text_of(error)};
  if (kernels->version != FSDP_CUDA_KERNELS_VERSION) {
    return {nullptr, path + " is of another version of fsdp_c, build it again"};
  }
  return {kernels, ""};
}

const KernelLibrary &library(c10::Device device) {
  static const KernelLibrary opened = open_library(device);
  return opened;
}

void *stream_of(c10::Device device) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  return guard.getStream(device).native_handle();
}

// Empty when one of them is no dense floating CUDA tensor, or they are not all
// on one device.
std::vector<fsdp_host_span> spans_of(const std::vector<at::Tensor> &tensors) {
  std::vector<fsdp_host_span> spans;
  for (const at::Tensor &tensor : tensors) {
    if (!tensor.is_cuda() || !tensor.is_non_overlapping_and_dense() ||
        tensor.device() != tensors.front().device() ||
        (tensor.scalar_type() != at::kFloat &&
         tensor.scalar_type() != at::kHalf &&
         tensor.scalar_type() != at::kBFloat16 &&
         tensor.scalar_type() != at::kDouble)) {
      return {};
    }
    spans.push_back({tensor.data_ptr(),
                     {static_cast<int32_t>(tensor.scalar_type()),
                      static_cast<int32_t>(tensor.element_size())},
                     tensor.numel()});
  }
  return spans;
}

void throw_unless_ok(fsdp_status status, const fsdp_error &error) {
  if (status != FSDP_OK) throw_error(error);
}

}  // namespace

const fsdp_cuda_kernels *cuda_kernels(c10::Device device) {
  return device.is_cuda() ? library(device).kernels : nullptr;
}

const char *why_no_cuda_kernels(c10::Device device) {
  if (!device.is_cuda()) return "the device is not CUDA";
  return library(device).reason.c_str();
}

bool pack_on_cuda(c10::Device device, const fsdp_pack_item *items,
                  int64_t num_items, double scale) {
  const fsdp_cuda_kernels *kernels = cuda_kernels(device);
  if (kernels == nullptr) return false;
  const c10::DeviceGuard guard(device);
  fsdp_error error;
  const fsdp_status status =
      kernels->pack(items, num_items, scale, stream_of(device), &error);
  if (status == FSDP_INVALID_ARGUMENT) return false;  // integers: ATen's
  throw_unless_ok(status, error);
  return true;
}

at::Tensor norm_on_cuda(const std::vector<at::Tensor> &tensors, double power) {
  const std::vector<fsdp_host_span> spans = spans_of(tensors);
  if (spans.empty()) return {};
  const c10::Device device = tensors.front().device();
  const fsdp_cuda_kernels *kernels = cuda_kernels(device);
  if (kernels == nullptr) return {};
  const c10::DeviceGuard guard(device);
  const auto num_spans = static_cast<int64_t>(spans.size());
  fsdp_error error;
  int64_t nbytes = 0;
  throw_unless_ok(
      kernels->norm_scratch(spans.data(), num_spans, &nbytes, &error), error);
  const at::TensorOptions options =
      at::TensorOptions().dtype(at::kDouble).device(device);
  const at::Tensor scratch = at::empty({nbytes / 8}, options);
  at::Tensor norm = at::empty({}, options);
  throw_unless_ok(
      kernels->norm(spans.data(), num_spans, power, scratch.data_ptr(),
                    norm.data_ptr<double>(), stream_of(device), &error),
      error);
  return norm;
}

bool scale_on_cuda(const std::vector<at::Tensor> &tensors,
                   const at::Tensor &scale) {
  const std::vector<fsdp_host_span> spans = spans_of(tensors);
  if (spans.empty() || scale.scalar_type() != at::kFloat ||
      scale.device() != tensors.front().device()) {
    return false;
  }
  const c10::Device device = tensors.front().device();
  const fsdp_cuda_kernels *kernels = cuda_kernels(device);
  if (kernels == nullptr) return false;
  const c10::DeviceGuard guard(device);
  fsdp_error error;
  throw_unless_ok(
      kernels->scale(spans.data(), static_cast<int64_t>(spans.size()),
                     scale.data_ptr<float>(), stream_of(device), &error),
      error);
  for (const at::Tensor &tensor : tensors) {
    tensor.unsafeGetTensorImpl()->bump_version();  // autograd sees the write
  }
  return true;
}

}  // namespace fsdp_torch
