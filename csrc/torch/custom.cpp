// Collectives of the user's own, and the hook on reduced gradients: Python's
// functions, see fsdp_unit_settings. They take the GIL; units without them
// never come here.
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <Python.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <utility>

#include "torch/bridge.h"
#include "torch/groups/transports.hpp"
#include "torch/guard.hpp"
#include "torch/unit.hpp"

namespace fsdp_torch {

struct CustomCalls {
  py::object function;
};

namespace {

// Objects of Python go with the GIL held, or not at all when it has ended.
void destroy_custom(CustomCalls *custom) {
  if (Py_IsInitialized() == 0) return;
  const pybind11::gil_scoped_acquire gil;
  delete custom;
}

fsdp_status custom_add(void *context, void *owner, void *whole,
                       int64_t whole_numel, const void *own, int64_t own_numel,
                       fsdp_dtype dtype, fsdp_error *error) {
  GUARDED(error) {
    const Provider &provider = *static_cast<Provider *>(context);
    unit_of(owner).custom_pieces.emplace_back(
        provider.view(whole, whole_numel, dtype),
        provider.view(const_cast<void *>(own), own_numel, dtype));
    return FSDP_OK;
  };
}

py::object wrapped(const at::Tensor &tensor) {
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
}

void call(const Unit &unit, const CustomPieces &pieces, fsdp_custom kind,
          const Group &group, double scale) {
  const pybind11::gil_scoped_acquire gil;
  try {
    py::list listed;
    for (const auto &piece : pieces) {
      listed.append(
          py::make_tuple(wrapped(piece.first), wrapped(piece.second)));
    }
    unit.custom->function(
        static_cast<int>(kind), listed,
        py::reinterpret_steal<py::object>(group_object(group)), group.rank,
        scale);
  } catch (py::error_already_set &raised) {
    raised.restore();
    python_error kept;
    kept.persist();
    throw kept;
  }
}

fsdp_status custom_run(void *context, void *owner, fsdp_lane lane,
                       fsdp_custom kind, const fsdp_group *group, double scale,
                       fsdp_error *error) {
  GUARDED(error) {
    const Provider &provider = *static_cast<Provider *>(context);
    Unit &unit = unit_of(owner);
    CustomPieces pieces = std::exchange(unit.custom_pieces, {});
    if (pieces.empty()) return FSDP_OK;
    const Group &whose = group == nullptr || group->handle == nullptr
                             ? unit.shard_group
                             : *static_cast<const Group *>(group->handle);
    const at::NoGradGuard no_grad;
    provider.on_lane(lane, [&] {
      std::vector<StoragePtr> lent;
      for (const auto &piece : pieces) {
        lent.push_back(piece.first.storage().getWeakStorageImpl().lock());
        lent.push_back(piece.second.storage().getWeakStorageImpl().lock());
      }
      call(unit, std::exchange(pieces, {}), kind, whose, scale);
      for (const StoragePtr &each : lent) end_loan(unit, each);
    });
    return FSDP_OK;
  };
}

}  // namespace

void add_custom_ops(fsdp_view_ops *ops) {
  ops->custom_add = custom_add;
  ops->custom_run = custom_run;
}

}  // namespace fsdp_torch

extern "C" fsdp_status fsdp_torch_unit_set_custom(fsdp_torch_unit *unit,
                                                  PyObject *function,
                                                  unsigned kinds,
                                                  fsdp_error *error) {
  GUARDED(error) {
    fsdp_torch::Unit &self = *unit->self;
    self.custom = std::shared_ptr<fsdp_torch::CustomCalls>(
        new fsdp_torch::CustomCalls{
            py::reinterpret_borrow<py::object>(function)},
        fsdp_torch::destroy_custom);
    fsdp_unit_get_settings(self.core)->custom = kinds;
    return FSDP_OK;
  };
}
