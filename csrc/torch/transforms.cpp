// Tensors within the wrappers of function transforms: see Note [Function
// transforms].
#include "torch/transforms.hpp"

#include <Python.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

namespace fsdp_torch {
namespace {

bool is_wrapper(const at::Tensor &tensor) {
  return tensor.key_set().has_any(
      c10::DispatchKeySet({c10::DispatchKey::FuncTorchGradWrapper,
                           c10::DispatchKey::FuncTorchBatched}));
}

// By torch's function in Python: the C++ headers of the wrappers need another
// one that torch does not install.
at::Tensor unwrapped(const at::Tensor &tensor) {
  THPObjectPtr module(PyImport_ImportModule("torch._C._functorch"));
  if (module.get() == nullptr) throw python_error();
  THPObjectPtr wrapper(THPVariable_Wrap(tensor));
  if (wrapper.get() == nullptr) throw python_error();
  THPObjectPtr value(
      PyObject_CallMethod(module.get(), "get_unwrapped", "O", wrapper.get()));
  if (value.get() == nullptr) throw python_error();
  return THPVariable_Unpack(value.get());
}

}  // namespace

Layers layers_of(const at::Tensor &tensor) {
  Layers layers{tensor};
  for (size_t i = 0; i < layers.size(); i++) {
    const at::Tensor tangent = layers[i]._fw_grad(/*level=*/0);
    if (tangent.defined()) layers.push_back(tangent);
    if (is_wrapper(layers[i])) layers.push_back(unwrapped(layers[i]));
  }
  return layers;
}

}  // namespace fsdp_torch
