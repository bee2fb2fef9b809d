#include "torch/copies.hpp"

#include <ATen/core/grad_mode.h>
#include <Python.h>
#include <torch/csrc/utils/pybind.h>

#include <cstring>
#include <memory>
#include <utility>

#include "torch/bridge.h"
#include "torch/guard.hpp"
#include "torch/unit.hpp"

namespace fsdp_torch {
namespace {

constexpr const char *kCapsule = "fsdp_c._native.copies";

void free_capsule(PyObject *capsule) {
  delete static_cast<Copies *>(PyCapsule_GetPointer(capsule, kCapsule));
}

}  // namespace

at::Tensor bytes_of(const at::Tensor &tensor, int64_t offset, int64_t nbytes,
                    c10::DispatchKeySet keys) {
  const int64_t begin =
      tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize());
  return make_view(storage_ptr_of(tensor), keys, at::kByte, {nbytes},
                   begin + offset);
}

void make_copy(const Copy &copy, c10::DispatchKeySet keys) {
  if (!copy.source.is_cpu()) {
    bytes_of(copy.target, copy.target_offset, copy.nbytes, keys)
        .copy_(bytes_of(copy.source, copy.source_offset, copy.nbytes, keys));
    return;
  }
  std::memcpy(
      static_cast<char *>(copy.target.mutable_data_ptr()) + copy.target_offset,
      static_cast<const char *>(copy.source.const_data_ptr()) +
          copy.source_offset,
      static_cast<size_t>(copy.nbytes));
}

PyObject *wrap_copies(Copies copies) {
  auto held = std::make_unique<Copies>(std::move(copies));
  PyObject *capsule = PyCapsule_New(held.get(), kCapsule, free_capsule);
  if (capsule == nullptr) throw python_error();
  (void)held.release();  // the capsule's now
  return capsule;
}

const Copies &copies_in(PyObject *object) {
  void *held = PyCapsule_GetPointer(object, kCapsule);
  if (held == nullptr) {
    PyErr_Clear();
    throw std::invalid_argument("expected the copies of an exchange");
  }
  return *static_cast<const Copies *>(held);
}

}  // namespace fsdp_torch

extern "C" fsdp_status fsdp_torch_copy_tensors(PyObject *copies,
                                               fsdp_error *error) {
  GUARDED(error) {
    const fsdp_torch::Copies &given = fsdp_torch::copies_in(copies);
    if (given.empty()) return FSDP_OK;
    const at::NoGradGuard no_grad;
    const py::gil_scoped_release released;
    const c10::DispatchKeySet keys =
        fsdp_torch::keys_of(given.front().target.device());
    for (const fsdp_torch::Copy &copy : given) {
      fsdp_torch::make_copy(copy, keys);
    }
    return FSDP_OK;
  };
}
