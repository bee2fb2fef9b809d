// Parameters that say themselves what is gathered of them.
//
// Note [Extended parameters]
// A tensor with fsdp_pre_all_gather and fsdp_post_all_gather hands over what
// its rank sends, some tensors of any dtype, and makes the parameter of what
// came. Its owner calls both, in Python, once per gather, and has the memory of
// all of it. The unit issues the all-gathers among its own. For gradients such
// a parameter is like all others.
#include <ATen/core/Tensor.h>
#include <Python.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "torch/guard.hpp"
#include "torch/unit.hpp"

namespace fsdp_torch {
namespace {

// GIL.
py::object extend(Unit &unit, size_t index, fsdp_torch_extension stage) {
  auto result = py::reinterpret_steal<py::object>(
      unit.face.extend(unit.face.context, static_cast<int64_t>(index), stage));
  if (!result) throw_python_error();
  return result;
}

struct Gathering {
  at::Tensor output;
  at::Tensor input;
};

std::vector<Gathering> tensors_to_gather(Unit &unit, size_t index) {
  const pybind11::gil_scoped_acquire gil;
  const py::object listed = extend(unit, index, FSDP_TORCH_EXTENSION_GATHER);
  std::vector<Gathering> tensors;
  for (const py::handle item : listed) {
    const auto pair = py::reinterpret_borrow<py::tuple>(item);
    tensors.push_back({THPVariable_Unpack(py::object(pair[0]).ptr()),
                       THPVariable_Unpack(py::object(pair[1]).ptr())});
  }
  return tensors;
}

fsdp_status gather_extended(void *context, void *owner, int64_t segment,
                            const fsdp_group *group, const fsdp_call *call,
                            uint64_t *ticket, int64_t *nbytes,
                            fsdp_error *error) {
  GUARDED(error) {
    const Provider &provider = *static_cast<Provider *>(context);
    Unit &unit = unit_of(owner);
    Param &param = unit.params[static_cast<size_t>(segment)];
    param.is_gathered = param.is_arriving = true;
    fsdp_status status = FSDP_OK;
    provider.on_lane(FSDP_LANE_UNSHARD, [&] {
      // By rows each parameter is a segment.
      for (Gathering &each :
           tensors_to_gather(unit, static_cast<size_t>(segment))) {
        *nbytes += static_cast<int64_t>(each.output.nbytes());
        if (call == nullptr) {
          each.output.copy_(each.input);
          continue;
        }
        const fsdp_dtype bytes = {static_cast<int32_t>(at::kByte), 1};
        if (status != FSDP_OK || each.input.nbytes() == 0) continue;
        status = group->transport->ops->all_gather(
            group->transport, call, each.output.data_ptr(),
            each.input.data_ptr(), static_cast<int64_t>(each.input.nbytes()),
            bytes, ticket, error);
      }
    });
    return status;
  };
}

void ungather_extended(void * /*context*/, void *owner) {
  Unit &unit = unit_of(owner);
  for (size_t i = 0; i < unit.params.size(); i++) {
    Param &param = unit.params[i];
    if (!param.is_gathered) continue;
    param.is_gathered = param.is_arriving = false;
    if (unit.face.context == nullptr || Py_IsInitialized() == 0) continue;
    const pybind11::gil_scoped_acquire gil;
    const py::error_scope kept;  // an exception on its way stays
    try {
      (void)extend(unit, i, FSDP_TORCH_EXTENSION_FREE);
    } catch (...) {  // the memory stays until the next gather
    }
  }
}

}  // namespace

void add_extension_ops(fsdp_view_ops *ops) {
  ops->gather = gather_extended;
  ops->ungather = ungather_extended;
}

void show_extended(Unit &unit) {
  for (size_t i = 0; i < unit.params.size(); i++) {
    Param &param = unit.params[i];
    if (!param.is_arriving || unit.face.context == nullptr) continue;
    const pybind11::gil_scoped_acquire gil;
    const py::object shown = extend(unit, i, FSDP_TORCH_EXTENSION_SHOW);
    param.is_arriving = false;
    const at::Tensor &tensor = THPVariable_Unpack(shown.ptr());
    if (param.parallel.is_same(tensor)) continue;
    unhook_accumulator(param);
    param.parallel = tensor;
  }
}

}  // namespace fsdp_torch
