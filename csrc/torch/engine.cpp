// Engines: one per module tree, and the norm over all of its gradients.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <Python.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "torch/bridge.h"
#include "torch/device/cuda_kernels.hpp"
#include "torch/groups/transports.hpp"
#include "torch/guard.hpp"
#include "torch/step_stream.hpp"
#include "torch/unit.hpp"

namespace fsdp_torch {
namespace {

const c10d::ProcessGroup *process_group_of(const Group *group) {
  return group != nullptr ? group->process_group.get() : nullptr;
}

// Gradients whose norm one group sums up: every rank of it holds other
// elements. A null group means that each rank holds all of them.
struct NormPart {
  Group *group = nullptr;
  c10::Device device;  // of all `grads`
  std::vector<at::Tensor> grads;
};

void add_grad(std::vector<NormPart> &parts, Group *group, c10::Device device,
              const at::Tensor &holder) {
  auto part = parts.begin();
  while (part != parts.end() &&
         (process_group_of(part->group) != process_group_of(group) ||
          part->device != device)) {
    part++;
  }
  // A rank without gradients takes part in the group's sum all the same.
  if (part == parts.end()) {
    part = parts.insert(part, NormPart{group, device, {}});
  }
  if (holder.defined() && holder.grad().defined() &&
      holder.grad().numel() > 0) {
    part->grads.push_back(holder.grad());
  }
}

void add_unit(std::vector<NormPart> &parts, Unit &unit) {
  Group *group = unit.shard_group.world_size == 1 ? nullptr : &unit.shard_group;
  const c10::Device device = unit.offloads ? c10::kCPU : unit.device;
  for (const Segment &segment : unit.segments) {
    add_grad(parts, group, device, segment.flat_param);
  }
  if (!unit.use_orig_params) return;
  for (const Param &param : unit.params) {
    add_grad(parts, group, device, param.tensor);
  }
}

// Norm of one part, or its p-th power: what can be summed over ranks.
at::Tensor local_term(const NormPart &part, double norm_type,
                      const at::TensorOptions &options) {
  const bool is_max = std::isinf(norm_type);
  if (part.grads.empty()) return at::zeros({}, options);
  const at::Tensor norm = norm_on_cuda(part.grads, norm_type);
  if (norm.defined()) return is_max ? norm : norm.pow(norm_type);
  std::vector<at::Tensor> grads = part.grads;
  for (at::Tensor &grad : grads) {
    if (grad.is_complex()) grad = grad.abs();  // as elements count in a norm
  }
  const std::vector<at::Tensor> norms = at::_foreach_norm(
      grads, norm_type, c10::typeMetaToScalarType(options.dtype()));
  const at::Tensor stacked = at::stack(norms);
  return is_max ? stacked.max() : stacked.pow(norm_type).sum();
}

at::Tensor total_norm(Provider &provider, const std::vector<NormPart> &parts,
                      double norm_type, const at::TensorOptions &options) {
  const bool is_max = std::isinf(norm_type);
  at::Tensor total = at::zeros({}, options);
  for (const NormPart &part : parts) {
    at::Tensor term = local_term(part, norm_type, options).to(options);
    if (part.group != nullptr) {
      term = reduce_scalar(provider, *part.group, term, is_max,
                           "all_reduce of the norm in clip_grad_norm_");
    }
    total = is_max ? at::maximum(total, term) : total + term;
  }
  return is_max ? total : total.pow(1.0 / norm_type);
}

// The widest dtype of the sharded gradients: the same on all ranks,
// those without gradients included.
at::ScalarType norm_dtype(const std::vector<Unit *> &units) {
  at::ScalarType dtype = at::ScalarType::Undefined;
  for (const Unit *unit : units) {
    for (const Segment &segment : unit->segments) {
      if (!segment.layout->requires_grad && !is_trainable(*unit, segment)) {
        continue;
      }
      dtype = dtype == at::ScalarType::Undefined
                  ? segment.grad
                  : c10::promoteTypes(dtype, segment.grad);
    }
  }
  return dtype == at::ScalarType::Undefined ? at::kFloat : dtype;
}

at::Tensor clip(Provider &provider, std::vector<NormPart> &parts,
                double max_norm, double norm_type, at::ScalarType dtype,
                c10::Device device) {
  // Accumulated in fp32, or in fp64 where a parameter is fp64 or complex128.
  const at::Tensor norm = total_norm(
      provider, parts, norm_type,
      at::TensorOptions()
          .dtype(c10::toRealValueType(dtype) == at::kDouble ? at::kDouble
                                                            : at::kFloat)
          .device(device));
  // Always multiply: deciding it would make the host wait for the device.
  const at::Tensor scale = (max_norm / (norm + 1e-6)).clamp_max(1.0);
  for (NormPart &part : parts) {
    if (part.grads.empty()) continue;
    const at::Tensor factor = scale.to(part.grads.front().device());
    if (!scale_on_cuda(part.grads, factor)) {
      at::_foreach_mul_(part.grads, factor);
    }
  }
  return norm.to(dtype);  // as FSDP1 returns it
}

}  // namespace
}  // namespace fsdp_torch

using fsdp_torch::Engine;

extern "C" {

fsdp_status fsdp_torch_engine_create(fsdp_torch_unit *const *units,
                                     int64_t num_units,
                                     fsdp_torch_engine **engine,
                                     fsdp_error *error) {
  GUARDED(error) {
    if (num_units < 1) {
      return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                       "an engine needs at least one unit");
    }
    auto self = std::make_shared<Engine>(units[0]->self->device);
    fsdp_device_ops device = self->provider.ops();
    fsdp_torch::add_group_ops(&device);
    fsdp_view_ops views = {};
    views.context = device.context;
    fsdp_torch::add_view_ops(&views);
    fsdp_torch::add_grad_ops(&views);
    fsdp_torch::add_hook_ops(&views);
    fsdp_torch::add_custom_ops(&views);
    fsdp_torch::add_extension_ops(&views);
    fsdp_torch::add_following_ops(&views);
    fsdp_status status =
        fsdp_engine_create(&device, &views, &self->core, error);
    if (status != FSDP_OK) return status;
    // The provider is a part of the engine and does not outlive it.
    self->provider.log = fsdp_engine_log(self->core);
    self->provider.engine = self->core;
    self->provider.groups = [engine = self.get()] {
      return fsdp_torch::groups_of(*engine);
    };
    fsdp_torch::Mergings mergings;
    int64_t call_nbytes = 0;
    for (int64_t i = 0; i < num_units; i++) {
      call_nbytes =
          std::max(call_nbytes, fsdp_torch::call_nbytes_of(*units[i]->self));
    }
    for (int64_t i = 0; i < num_units && status == FSDP_OK; i++) {
      fsdp_torch::Unit &unit = *units[i]->self;
      if (unit.device != units[0]->self->device) {
        return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                         "unit '%s' is on %s, the root is on %s; wrap all "
                         "units with one device_id",
                         unit.name.c_str(), unit.device.str().c_str(),
                         units[0]->self->device.str().c_str());
      }
      {
        // The other ranks may need the GIL to come here.
        const pybind11::gil_scoped_release no_gil;
        fsdp_torch::connect(unit.shard_group, unit.device, call_nbytes);
        fsdp_torch::connect(unit.replica_group, unit.device, call_nbytes);
        fsdp_torch::connect(unit.part_group, unit.device, call_nbytes);
        if (unit.is_by_rows) {  // a call for each parameter
          fsdp_torch::merge_small_calls(unit.shard_group, mergings);
          fsdp_torch::merge_small_calls(unit.replica_group, mergings);
          fsdp_torch::merge_small_calls(unit.part_group, mergings);
        }
      }
      if (unit.engine) unit.engine->recover();
      fsdp_unit_set_transports(unit.core, unit.shard_group.transport.get(),
                               unit.replica_group.transport.get(),
                               unit.part_group.transport.get());
      status = fsdp_engine_add_unit(self->core, unit.core, error);
      if (status != FSDP_OK) break;
      if (unit.engine) {
        auto &others = unit.engine->units;
        others.erase(std::remove(others.begin(), others.end(), &unit),
                     others.end());
      }
      unit.engine = self;
      self->has_faces = self->has_faces || unit.face.context != nullptr;
      self->units.push_back(&unit);
    }
    if (status != FSDP_OK) return status;
    fsdp_torch::note_engine(self);
    *engine = new fsdp_torch_engine{self};
    return FSDP_OK;
  };
}

void fsdp_torch_engine_destroy(fsdp_torch_engine *engine) {
  delete engine;
}

fsdp_engine *fsdp_torch_engine_core(fsdp_torch_engine *engine) {
  return engine->self->core;
}

fsdp_status fsdp_torch_engine_reduce_kept(fsdp_torch_engine *engine,
                                          fsdp_error *error) {
  GUARDED(error) {
    Engine &self = *engine->self;
    fsdp_torch::open_rows(self);
    fsdp_status status = FSDP_OK;
    {
      const fsdp_torch::EngineCall call(self);
      self.recover();
    }
    try {
      fsdp_torch::take_assigned_grads(self);
    } catch (...) {
      self.is_aborted = true;
      fsdp_torch::close_failed_rows(self);
      throw;
    }
    {
      const fsdp_torch::EngineCall call(self);
      status = fsdp_engine_in_backward(self.core)
                   ? fsdp_engine_finish_backward(self.core, error)
                   : fsdp_engine_reduce_kept(self.core, error);
    }
    try {
      if (status == FSDP_OK) fsdp_torch::follow_reductions(self);
    } catch (...) {
      fsdp_torch::close_rows(self);
      throw;
    }
    fsdp_torch::close_rows(self);
    return status;
  };
}

void fsdp_torch_engine_reset(fsdp_torch_engine *engine) noexcept {
  fsdp_torch::Engine &self = *engine->self;
  fsdp_torch::await_end_of_backward(self);
  try {
    fsdp_torch::close_rows(self, true);
  } catch (...) {  // the next forward registers what it needs
  }
  {
    const fsdp_torch::EngineCall call(self);
    self.is_aborted = true;
    self.recover();
  }
  if (!self.has_faces || Py_IsInitialized() == 0) return;
  const pybind11::gil_scoped_acquire gil;
  const pybind11::error_scope kept;
  // What a finished forward kept is gone, too.
  if (fsdp_torch::hide_rows(self) < 0) PyErr_Clear();
}

fsdp_status fsdp_torch_engine_clip_grad_norm(fsdp_torch_engine *engine,
                                             PyObject *const *extra_params,
                                             int64_t num_extra_params,
                                             double max_norm, double norm_type,
                                             PyObject **norm,
                                             fsdp_error *error) {
  GUARDED(error) {
    Engine &self = *engine->self;
    const int64_t begin_ns = self.begin_span();
    std::vector<fsdp_torch::NormPart> parts;
    for (fsdp_torch::Unit *unit : self.units) {
      fsdp_torch::add_unit(parts, *unit);
    }
    for (int64_t i = 0; i < num_extra_params; i++) {
      if (!THPVariable_Check(extra_params[i])) {
        throw std::invalid_argument("a parameter is not a tensor");
      }
      const at::Tensor &param = THPVariable_Unpack(extra_params[i]);
      fsdp_torch::add_grad(parts, nullptr, param.device(), param);
    }
    at::Tensor result;
    {
      const pybind11::gil_scoped_release no_gil;
      const at::NoGradGuard no_grad;
      result = fsdp_torch::clip(self.provider, parts, max_norm, norm_type,
                                fsdp_torch::norm_dtype(self.units),
                                self.units.front()->device);
      const std::lock_guard<std::mutex> lock(self.mutex);
      fsdp_engine_note(self.core, nullptr, FSDP_TIMELINE_CLIP_GRAD_NORM,
                       begin_ns);
    }
    PyObject *object = THPVariable_Wrap(result);
    if (object == nullptr) throw python_error();
    *norm = object;
    return FSDP_OK;
  };
}

}  // extern "C"
