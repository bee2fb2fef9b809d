// Function transforms (torch.func): what units do while some are active.
//
// Note [Function transforms]
// While jvp, grad, vjp or vmap runs a function, the tensors that it sees are
// wrappers: around the tensor that the next transform outside sees, or around
// the plain one. Each level but vmap's has an autograd graph of its own, so a
// unit hooks its inputs and outputs in all of them, and their tangents, through
// which a backward may come first. What the engine itself does is about plain
// tensors. A transform would wrap what its operators return, so they run
// outside of all transforms.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>

namespace fsdp_torch {

using Layers = c10::SmallVector<at::Tensor, 1>;

// The tensor and what is in it, from the innermost transform's to the plain
// one, and the tangents of all of these. GIL.
Layers layers_of(const at::Tensor &tensor);

// While it lives, operators of this thread run outside of transforms.
class OutsideTransforms {
 private:
  c10::impl::ExcludeDispatchKeyGuard guard_{
      c10::DispatchKeySet({c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                           c10::DispatchKey::FuncTorchDynamicLayerBackMode})};
};

}  // namespace fsdp_torch
