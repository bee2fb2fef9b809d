// What torch's Python objects are to the core: tensors' memory and dtypes.
#include "torch/objects.hpp"

#include <Python.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <stdexcept>

#include "torch/bridge.h"
#include "torch/guard.hpp"
#include "torch/unit.hpp"

namespace fsdp_torch {

fsdp_dtype core_dtype(at::ScalarType dtype) {
  return {static_cast<int32_t>(dtype),
          static_cast<int32_t>(c10::elementSize(dtype))};
}

void check_memory(const at::Tensor &tensor, const std::string &name) {
  const auto fail = [&](const std::string &what) {
    throw std::invalid_argument(name + " " + what);
  };
  if (tensor.unsafeGetTensorImpl()->is_python_dispatch()) {
    fail("is a tensor subclass without memory of its own; pass what it holds");
  }
  if (tensor.is_meta()) fail("is on the meta device and has no data");
  if (tensor.layout() != at::kStrided || !tensor.has_storage()) {
    fail("is not a plain strided tensor");
  }
  if (!tensor.is_contiguous()) {
    fail("is not contiguous; pass tensor.contiguous()");
  }
  if (tensor.is_conj() || tensor.is_neg()) {
    fail(
        "is a lazy conjugate or negation; pass tensor.resolve_conj() or "
        "tensor.resolve_neg()");
  }
  c10::StorageImpl *storage = tensor.storage().unsafeGetStorageImpl();
  if (tensor.numel() > 0 && !has_memory(*storage)) {
    fail("has no memory now: a resharded parameter, or a resized storage");
  }
}

}  // namespace fsdp_torch

extern "C" {

bool fsdp_torch_is_tensor(PyObject *object) {
  return THPVariable_Check(object);
}

int64_t fsdp_torch_num_dims(PyObject *tensor) noexcept {
  return THPVariable_Unpack(tensor).dim();
}

void fsdp_torch_count_write(PyObject *tensor) noexcept {
  const at::Tensor &variable = THPVariable_Unpack(tensor);
  if (!variable.is_inference()) variable.unsafeGetTensorImpl()->bump_version();
}

fsdp_status fsdp_torch_read_dtype(PyObject *object, fsdp_dtype *dtype,
                                  fsdp_error *error) {
  GUARDED(error) {
    if (!THPDtype_Check(object)) {
      throw std::invalid_argument("expected a torch.dtype");
    }
    *dtype = fsdp_torch::core_dtype(
        reinterpret_cast<THPDtype *>(object)->scalar_type);
    return FSDP_OK;
  };
}

PyObject *fsdp_torch_dtype_object(fsdp_dtype dtype) {
  HANDLE_TH_ERRORS
  PyObject *object = reinterpret_cast<PyObject *>(
      torch::getTHPDtype(static_cast<at::ScalarType>(dtype.code)));
  Py_INCREF(object);
  return object;
  END_HANDLE_TH_ERRORS
}

fsdp_status fsdp_torch_host_bytes(PyObject *object, const void **data,
                                  int64_t *nbytes, fsdp_error *error) {
  GUARDED(error) {
    const at::Tensor &tensor = THPVariable_Unpack(object);
    fsdp_torch::check_memory(tensor, "the tensor");
    if (!tensor.is_cpu()) {
      throw std::invalid_argument("the tensor is on " + tensor.device().str() +
                                  ", need one on the CPU");
    }
    *data = tensor.numel() > 0 ? tensor.const_data_ptr() : nullptr;
    *nbytes = static_cast<int64_t>(tensor.nbytes());
    return FSDP_OK;
  };
}

}  // extern "C"
