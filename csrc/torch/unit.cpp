// Units: flattening parameters, and the calls around a unit's forward.
#include "torch/unit.hpp"

#include <ATen/ATen.h>
#include <Python.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <algorithm>

#include "torch/bridge.h"
#include "torch/guard.hpp"

namespace fsdp_torch {
namespace {

fsdp_dtype core_dtype(at::ScalarType dtype) {
  return {static_cast<int32_t>(dtype),
          static_cast<int32_t>(c10::elementSize(dtype))};
}

at::ScalarType dtype_or(PyObject *object, at::ScalarType otherwise) {
  if (object == nullptr) return otherwise;
  if (!THPDtype_Check(object)) {
    throw std::invalid_argument("expected a torch.dtype");
  }
  return reinterpret_cast<THPDtype *>(object)->scalar_type;
}

Group group_from(PyObject *object, c10::Device device) {
  Group group;
  if (object == nullptr) return group;
  group.process_group =
      py::handle(object).cast<c10::intrusive_ptr<c10d::ProcessGroup>>();
  try {
    group.is_gloo =
        group.process_group->getBackend(device.type())->getBackendName() ==
        "gloo";
  } catch (const std::exception &) {
    group.is_gloo = false;  // a user's own group: only the general calls
  }
  return group;
}

fsdp_group core_group(Group &group) {
  fsdp_group result = {};
  result.handle = &group;
  result.world_size = group.process_group ? group.process_group->getSize() : 1;
  result.rank = group.process_group ? group.process_group->getRank() : 0;
  return result;
}

void check_param(const std::string &unit, size_t index, PyObject *object) {
  const auto fail = [&](const std::string &what) {
    throw std::invalid_argument("FSDP unit '" + unit + "': parameter " +
                                std::to_string(index) + " " + what);
  };
  if (!THPVariable_Check(object)) fail("is not a tensor");
  const at::Tensor &tensor = THPVariable_Unpack(object);
  if (!tensor.is_leaf()) fail("is not a leaf of the autograd graph");
  if (tensor.is_meta()) {
    fail("is on the meta device; materialise it with param_init_fn");
  }
  if (tensor.layout() != at::kStrided || !tensor.has_storage()) {
    fail("is not a plain strided tensor");
  }
}

// How each segment is held, from the unit's dtypes.
void choose_dtypes(Unit &unit, PyObject *param_dtype, PyObject *reduce_dtype) {
  const auto num_segments = fsdp_flat_layout_num_segments(unit.layout);
  for (int64_t i = 0; i < num_segments; i++) {
    Segment segment;
    segment.layout = fsdp_flat_layout_segment(unit.layout, i);
    segment.master = static_cast<at::ScalarType>(segment.layout->dtype.code);
    segment.compute = segment.master;
    segment.reduce = segment.master;
    if (c10::isFloatingType(segment.master)) {
      segment.compute = dtype_or(param_dtype, segment.master);
      segment.reduce = dtype_or(reduce_dtype, segment.compute);
    }
    unit.segments.push_back(std::move(segment));
  }
}

int32_t smallest_itemsize(const std::vector<fsdp_param_spec> &specs,
                          PyObject *param_dtype, PyObject *reduce_dtype) {
  int32_t smallest = 16;
  for (const fsdp_param_spec &spec : specs) {
    smallest = std::min(smallest, spec.dtype.itemsize);
  }
  for (PyObject *dtype : {param_dtype, reduce_dtype}) {
    if (dtype == nullptr) continue;
    smallest = std::min(
        smallest, core_dtype(dtype_or(dtype, at::ScalarType::Float)).itemsize);
  }
  return smallest;
}

fsdp_status make_layout(Unit &unit, const fsdp_torch_unit_options &options,
                        int64_t world_size, fsdp_error *error) {
  std::vector<fsdp_param_spec> specs;
  for (int64_t i = 0; i < options.num_uses; i++) {
    check_param(unit.name, static_cast<size_t>(i), options.uses[i]);
    const at::Tensor &tensor = THPVariable_Unpack(options.uses[i]);
    fsdp_param_spec spec = {};
    spec.key = reinterpret_cast<uint64_t>(tensor.unsafeGetTensorImpl());
    spec.numel = tensor.numel();
    spec.dtype = core_dtype(tensor.scalar_type());
    spec.requires_grad = tensor.requires_grad();
    specs.push_back(spec);
  }
  fsdp_status status = fsdp_param_table_create(specs.data(), options.num_uses,
                                               &unit.table, error);
  if (status != FSDP_OK) return status;
  for (int64_t i = 0; i < options.num_uses; i++) {
    unit.param_of_use.push_back(fsdp_param_table_param_of_use(unit.table, i));
  }
  return fsdp_flat_layout_create(
      unit.table, world_size,
      smallest_itemsize(specs, options.param_dtype, options.reduce_dtype),
      &unit.layout, error);
}

// Copies this rank's part of every parameter into fresh shards.
void fill_shards(Unit &unit, const fsdp_torch_unit_options &options,
                 int64_t rank) {
  for (Segment &segment : unit.segments) {
    segment.shard = at::zeros(
        {segment.layout->shard_numel},
        at::TensorOptions().dtype(segment.master).device(unit.device));
  }
  const int64_t num_params = fsdp_flat_layout_num_params(unit.layout);
  for (int64_t i = 0; i < num_params; i++) {
    Param param;
    param.tensor = THPVariable_Unpack(
        options.uses[fsdp_param_table_first_use(unit.table, i)]);
    param.sizes = param.tensor.sizes().vec();
    param.segment = fsdp_flat_layout_slot(unit.layout, i)->segment;
    fsdp_flat_layout_intersect(unit.layout, rank, i, &param.in_param,
                               &param.in_shard);
    if (param.local_numel() > 0) {
      unit.segments[static_cast<size_t>(param.segment)]
          .shard.slice(0, param.in_shard.begin, param.in_shard.end)
          .copy_(param.tensor.detach().reshape({-1}).slice(
              0, param.in_param.begin, param.in_param.end));
    }
    unit.params.push_back(std::move(param));
  }
}

// fp16 sums overflow: part of the division comes before them. FSDP1's rule:
// the power of two nearest to the square root of the number of ranks.
double fp16_prescale(int64_t num_ranks) {
  int64_t factor = 1;
  while (num_ranks % factor == 0 && num_ranks / factor > factor) factor *= 2;
  return 1.0 / static_cast<double>(factor);
}

fsdp_status make_core(Unit &unit, const fsdp_torch_unit_options &options,
                      fsdp_error *error) {
  fsdp_unit_options core = {};
  std::vector<fsdp_segment_options> segments;
  bool has_fp16 = false;
  for (const Segment &segment : unit.segments) {
    fsdp_segment_options item = {};
    item.param_dtype = core_dtype(segment.compute);
    item.reduce_dtype = core_dtype(segment.reduce);
    item.shard = segment.shard.data_ptr();
    has_fp16 = has_fp16 || segment.reduce == at::ScalarType::Half;
    segments.push_back(item);
  }
  core.name = unit.name.c_str();
  core.owner = &unit;
  core.layout = unit.layout;
  core.segments = segments.data();
  core.shard_group = core_group(unit.shard_group);
  core.replica_group = core_group(unit.replica_group);
  core.reshard_after_forward = options.reshard_after_forward;
  core.reshard_after_backward_without_sync =
      options.reshard_after_backward_without_sync;
  core.backward_prefetch = options.backward_prefetch;
  core.forward_prefetch = options.forward_prefetch;
  core.prescale = has_fp16 ? fp16_prescale(core.shard_group.world_size *
                                           core.replica_group.world_size)
                           : 1.0;
  core.needs_reduce_scratch =
      unit.shard_group.is_gloo && core.shard_group.world_size > 1;
  return fsdp_unit_create(&core, &unit.core, error);
}

// Whether a forward that runs now is activation checkpointing's, in backward.
bool is_recomputation(const Engine &engine) {
  return torch::autograd::get_current_graph_task_id() != -1 &&
         fsdp_engine_in_backward(engine.core);
}

}  // namespace

Unit::~Unit() {
  if (handle) handle->unit = nullptr;
  unhook_accumulators(*this);
  if (engine) {
    const std::lock_guard<std::mutex> lock(engine->mutex);
    auto &units = engine->units;
    units.erase(std::remove(units.begin(), units.end(), this), units.end());
    fsdp_unit_destroy(core);
  } else {
    fsdp_unit_destroy(core);
  }
  fsdp_flat_layout_destroy(layout);
  fsdp_param_table_destroy(table);
}

}  // namespace fsdp_torch

using fsdp_torch::Engine;
using fsdp_torch::Unit;

extern "C" {

bool fsdp_torch_is_tensor(PyObject *object) {
  return THPVariable_Check(object);
}

const char *fsdp_torch_version(void) {
  return TORCH_VERSION;
}

fsdp_status fsdp_torch_unit_create(const fsdp_torch_unit_options *options,
                                   fsdp_torch_unit **unit, fsdp_error *error) {
  GUARDED(error) {
    const at::NoGradGuard no_grad;
    auto self = std::make_shared<Unit>();
    self->name = options->name;
    if (!THPDevice_Check(options->device)) {
      throw std::invalid_argument("device is not a torch.device");
    }
    self->device = reinterpret_cast<THPDevice *>(options->device)->device;
    self->use_orig_params = options->use_orig_params;
    self->cast_forward_inputs = options->cast_forward_inputs;
    self->cast_root_forward_inputs = options->cast_root_forward_inputs;
    if (options->param_dtype != nullptr) {
      self->param_dtype_code = static_cast<int32_t>(
          fsdp_torch::dtype_or(options->param_dtype, at::ScalarType::Float));
    }
    self->shard_group =
        fsdp_torch::group_from(options->shard_group, self->device);
    self->replica_group =
        fsdp_torch::group_from(options->replica_group, self->device);
    const fsdp_group shard_group = fsdp_torch::core_group(self->shard_group);

    fsdp_status status =
        fsdp_torch::make_layout(*self, *options, shard_group.world_size, error);
    if (status != FSDP_OK) return status;
    fsdp_torch::choose_dtypes(*self, options->param_dtype,
                              options->reduce_dtype);
    fsdp_torch::fill_shards(*self, *options, shard_group.rank);
    fsdp_torch::make_views(*self);
    status = fsdp_torch::make_core(*self, *options, error);
    if (status != FSDP_OK) return status;
    self->handle = std::make_shared<fsdp_torch::UnitHandle>();
    self->handle->unit = self.get();
    auto *result = new fsdp_torch_unit{self};
    fsdp_torch::show_sharded(*self);  // the parameters' old memory goes
    *unit = result;
    return FSDP_OK;
  };
}

void fsdp_torch_unit_destroy(fsdp_torch_unit *unit) {
  delete unit;
}

const fsdp_unit *fsdp_torch_unit_core(const fsdp_torch_unit *unit) {
  return unit->self->core;
}

const fsdp_flat_layout *fsdp_torch_unit_layout(const fsdp_torch_unit *unit) {
  return unit->self->layout;
}

const int64_t *fsdp_torch_unit_param_of_use(const fsdp_torch_unit *unit,
                                            int64_t *num_uses) {
  *num_uses = static_cast<int64_t>(unit->self->param_of_use.size());
  return unit->self->param_of_use.data();
}

PyObject *fsdp_torch_unit_shard(fsdp_torch_unit *unit, int64_t segment) {
  HANDLE_TH_ERRORS
  return THPVariable_Wrap(
      unit->self->segments.at(static_cast<size_t>(segment)).shard);
  END_HANDLE_TH_ERRORS
}

PyObject *fsdp_torch_unit_dtype(fsdp_torch_unit *unit, int64_t segment) {
  HANDLE_TH_ERRORS
  PyObject *dtype = reinterpret_cast<PyObject *>(torch::getTHPDtype(
      unit->self->segments.at(static_cast<size_t>(segment)).master));
  Py_INCREF(dtype);
  return dtype;
  END_HANDLE_TH_ERRORS
}

fsdp_status fsdp_torch_unit_bind_flat_params(fsdp_torch_unit *unit,
                                             PyObject *const *flat_params,
                                             int64_t num_flat_params,
                                             fsdp_error *error) {
  GUARDED(error) {
    auto &segments = unit->self->segments;
    if (num_flat_params != static_cast<int64_t>(segments.size())) {
      return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                       "unit '%s' has %zu segments, got %lld flat parameters",
                       unit->self->name.c_str(), segments.size(),
                       static_cast<long long>(num_flat_params));
    }
    for (size_t i = 0; i < segments.size(); i++) {
      if (!THPVariable_Check(flat_params[i])) {
        throw std::invalid_argument("a flat parameter is not a tensor");
      }
      segments[i].flat_param = THPVariable_Unpack(flat_params[i]);
    }
    return FSDP_OK;
  };
}

void fsdp_torch_unit_input_cast(const fsdp_torch_unit *unit,
                                fsdp_torch_cast *cast) {
  const Unit &self = *unit->self;
  const fsdp_engine *core = self.engine ? self.engine->core : nullptr;
  const bool is_root = core != nullptr && !fsdp_engine_in_forward(core) &&
                       !fsdp_engine_in_backward(core);
  const bool is_wanted =
      self.cast_forward_inputs || (is_root && self.cast_root_forward_inputs);
  const bool is_cast = is_wanted && !fsdp_unit_is_summoned(self.core);
  cast->dtype_code = is_cast ? self.param_dtype_code : -1;
  cast->is_needed = cast->dtype_code >= 0 || (is_root && !self.device.is_cpu());
}

PyObject *fsdp_torch_unit_cast_input(const fsdp_torch_unit *unit,
                                     const fsdp_torch_cast *cast,
                                     PyObject *tensor) {
  HANDLE_TH_ERRORS
  const at::Tensor &input = THPVariable_Unpack(tensor);
  const bool is_cast = cast->dtype_code >= 0 && input.is_floating_point();
  const auto dtype = is_cast ? static_cast<at::ScalarType>(cast->dtype_code)
                             : input.scalar_type();
  if (input.scalar_type() == dtype && input.device() == unit->self->device) {
    return Py_NewRef(tensor);
  }
  return THPVariable_Wrap(
      input.to(unit->self->device, dtype, /*non_blocking=*/true));
  END_HANDLE_TH_ERRORS
}

fsdp_status fsdp_torch_unit_pre_forward(fsdp_torch_unit *unit,
                                        fsdp_error *error) {
  GUARDED(error) {
    Unit &self = *unit->self;
    if (!self.engine) return fsdp_unit_pre_forward(self.core, false, error);
    const std::lock_guard<std::mutex> lock(self.engine->mutex);
    self.engine->recover();
    const bool in_backward = fsdp_torch::is_recomputation(*self.engine);
    const fsdp_status status =
        fsdp_unit_pre_forward(self.core, in_backward, error);
    if (status == FSDP_OK && c10::GradMode::is_enabled() &&
        !fsdp_unit_is_summoned(self.core)) {
      fsdp_torch::hook_accumulators(self);
    }
    return status;
  };
}

fsdp_status fsdp_torch_unit_post_forward(fsdp_torch_unit *unit,
                                         bool expects_backward,
                                         fsdp_error *error) {
  GUARDED(error) {
    Unit &self = *unit->self;
    const std::lock_guard<std::mutex> lock(self.engine->mutex);
    const bool in_backward = fsdp_torch::is_recomputation(*self.engine);
    return fsdp_unit_post_forward(self.core, in_backward, expects_backward,
                                  error);
  };
}

void fsdp_torch_unit_abandon_forward(fsdp_torch_unit *unit) noexcept {
  Unit &self = *unit->self;
  if (!self.engine) return;
  const std::lock_guard<std::mutex> lock(self.engine->mutex);
  fsdp_unit_abandon_forward(self.core,
                            fsdp_torch::is_recomputation(*self.engine));
}

fsdp_status fsdp_torch_unit_summon(fsdp_torch_unit *unit, fsdp_error *error) {
  GUARDED(error) {
    Unit &self = *unit->self;
    if (!self.engine) return fsdp_unit_summon(self.core, error);
    const std::lock_guard<std::mutex> lock(self.engine->mutex);
    self.engine->recover();
    return fsdp_unit_summon(self.core, error);
  };
}

fsdp_status fsdp_torch_unit_dismiss(fsdp_torch_unit *unit, bool writeback,
                                    fsdp_error *error) {
  GUARDED(error) {
    Unit &self = *unit->self;
    if (!self.engine) return fsdp_unit_dismiss(self.core, writeback, error);
    const std::lock_guard<std::mutex> lock(self.engine->mutex);
    const at::NoGradGuard no_grad;
    return fsdp_unit_dismiss(self.core, writeback, error);
  };
}

}  // extern "C"
