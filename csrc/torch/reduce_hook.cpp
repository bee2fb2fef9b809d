// Communication hooks: the user's Python function in place of a unit's
// reductions. It runs on autograd's thread and takes the GIL; units without one
// never do.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <Python.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "torch/bridge.h"
#include "torch/guard.hpp"
#include "torch/unit.hpp"

namespace fsdp_torch {

struct ReduceHook {
  py::object state;
  py::object function;
};

namespace {

// Objects of Python go with the GIL held, or not at all when it has ended.
void destroy_hook(ReduceHook *hook) {
  if (Py_IsInitialized() == 0) return;
  const pybind11::gil_scoped_acquire gil;
  delete hook;
}

void run_hook(const Unit &unit, const at::Tensor &whole) {
  const int64_t shard_numel = whole.numel() / unit.shard_group.world_size;
  const at::Tensor own =
      whole.narrow(0, unit.shard_group.rank * shard_numel, shard_numel);
  const bool is_sharded = own.numel() != whole.numel();
  // The hook may point either tensor at new memory (`grad.data = ...`).
  at::Tensor result = is_sharded ? at::empty_like(own) : whole;
  {
    const pybind11::gil_scoped_acquire gil;
    const ReduceHook &hook = *unit.reduce_hook;
    const py::object grad =
        py::reinterpret_steal<py::object>(THPVariable_Wrap(whole));
    try {
      if (is_sharded) {
        const py::object output =
            py::reinterpret_steal<py::object>(THPVariable_Wrap(result));
        hook.function(hook.state, grad, output);
      } else {
        hook.function(hook.state, grad);
      }
    } catch (py::error_already_set &raised) {
      raised.restore();
      python_error kept;
      kept.persist();
      throw kept;
    }
  }
  if (result.data_ptr() != own.data_ptr()) own.copy_(result);
}

fsdp_status reduce_hook(void *context, void *owner, fsdp_lane lane,
                        int64_t index, void *buffer, fsdp_error *error) {
  GUARDED(error) {
    const Provider &provider = *static_cast<Provider *>(context);
    const Unit &unit = unit_of(owner);
    const Segment &segment = unit.segments[static_cast<size_t>(index)];
    if (segment.layout->shard_numel == 0) return FSDP_OK;
    at::Tensor whole =
        provider.view(buffer, segment.layout->padded_numel,
                      {static_cast<int32_t>(segment.reduce),
                       static_cast<int32_t>(c10::elementSize(segment.reduce))});
    provider.on_lane(lane, [&] {
      const StoragePtr lent = whole.storage().getWeakStorageImpl().lock();
      run_hook(unit, whole);
      whole = at::Tensor();
      end_loan(unit, lent);
    });
    return FSDP_OK;
  };
}

}  // namespace

void add_hook_ops(fsdp_view_ops *ops) {
  ops->reduce_hook = reduce_hook;
}

}  // namespace fsdp_torch

extern "C" fsdp_status fsdp_torch_unit_set_reduce_hook(fsdp_torch_unit *unit,
                                                       PyObject *state,
                                                       PyObject *function,
                                                       fsdp_error *error) {
  GUARDED(error) {
    fsdp_torch::Unit &self = *unit->self;
    self.reduce_hook = std::shared_ptr<fsdp_torch::ReduceHook>(
        new fsdp_torch::ReduceHook{
            py::reinterpret_borrow<py::object>(state),
            py::reinterpret_borrow<py::object>(function)},
        fsdp_torch::destroy_hook);
    fsdp_unit_get_settings(self.core)->has_reduce_hook = true;
    return FSDP_OK;
  };
}
