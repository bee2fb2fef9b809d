// Units by rows: what `fully_shard` needs of a unit.
//
// Note [Parameters by rows]
// A parameter has two objects. The user's is a DTensor, the sharded parameter,
// which the module has registered between steps: its local tensor is a view of
// the shard. The other one is plain, belongs to the unit, is a leaf of autograd
// and never seen outside forward. The owner of the unit registers it while the
// module runs, and for all units of the engine from the first gradient of a
// backward to its end, because recomputed parts of a module need not enter
// through the unit. That, and the DTensors on `.grad`, are all that a backward
// does with the GIL.
//
// On a CPU the gradient of a sharded parameter is one DTensor for the whole
// run. When the user has cleared it, its local tensor is emptied until the next
// one comes, unless somebody still holds it: then it stays as it is and a new
// one is made. Elsewhere see Note [Gradients of the user].
//
// Note [Tensors of before the unit]
// A state dict from before the first forward shares the memory that the sharded
// parameters had then, and programs save it again and again (torchtitan's
// ModelWrapper did). So the storage itself is pointed at the shard: whatever
// shares it goes on with the parameter, and its old memory is freed. This needs
// a storage that is no larger than the parameter, as fully_shard() makes them;
// tensors that share another one keep the old values.
//
// Note [Parallel parameters]
// A parameter may be a DTensor of a tensor parallel mesh. The unit then holds
// its local tensor and knows nothing else. What the modules see is another
// DTensor, made once: its local tensor shows what the plain parameter does. It
// is the leaf of autograd, and its gradient a DTensor with placements of its
// own. The owner of the unit brings that to the placements of the parameter:
// one call of Python, in which the tensor parallel ranks may communicate.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <Python.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>

#include "torch/bridge.h"
#include "torch/guard.hpp"
#include "torch/step_stream.hpp"
#include "torch/transforms.hpp"
#include "torch/unit.hpp"

namespace fsdp_torch {
namespace {

Segment &own_segment(Unit &unit, const Param &param) {
  return unit.segments[static_cast<size_t>(param.segment)];
}

// Lets the tensors that share `old`, the storage that a parameter had, show the
// shard; see Note [Tensors of before the unit].
void move_sharers(const Unit &unit, const Param &param,
                  const c10::Storage &old) {
  const at::Tensor &shard = param.sharded;
  if (is_over(shard, old.unsafeGetStorageImpl())) return;
  const bool is_its_own =
      old.nbytes() == shard.nbytes() && old.device() == shard.device();
  if (old.use_count() == 1 || !is_its_own || shard.numel() == 0) return;
  if (!shard.device().is_cpu()) {  // other streams may still read it
    const c10::impl::VirtualGuardImpl guard(shard.device().type());
    guard.synchronizeDevice(shard.device().index());
  }
  show_shard(*old.unsafeGetStorageImpl(), shard, unit.region);
}

// Copies what `local` holds into the shard and makes it a view of it.
void adopt_local(Unit &unit, Param &param, size_t index) {
  at::Tensor &local = param.sharded_param.local;
  const at::NoGradGuard no_grad;
  const OutsideTransforms outside;
  if (local.sizes() != param.sharded.sizes() ||
      local.scalar_type() != param.sharded.scalar_type()) {
    refuse(unit, c10::str("the local tensor of parameter ", index), local,
           c10::str("expected ", param.sharded.sizes(), " of ",
                    param.sharded.scalar_type()));
  }
  const size_t needed = at::detail::computeStorageNbytes(
      local.sizes(), local.strides(), local.itemsize(), local.storage_offset());
  if (local.storage().nbytes() < needed) {
    refuse(unit, c10::str("the local tensor of parameter ", index), local,
           c10::str("its storage was resized to ", local.storage().nbytes(),
                    " bytes; expected ", needed));
  }
  if (local.numel() > 0) param.sharded.copy_(local);
  record_current_stream(local);
  const bool is_alike = local.is_contiguous();
  const c10::Storage old = local.storage();
  local.unsafeGetTensorImpl()->shallow_copy_from(
      param.sharded.getIntrusivePtr());
  if (is_alike) move_sharers(unit, param, old);
  unit.shard_was_written = true;
}

// `param.data = value` leaves the local tensor of a DTensor as it is.
void refuse_new_data(const Unit &unit, ShardedParam &shown, size_t index) {
  if (is_over(shown.param, shown.storage.get())) return;
  shown.storage = storage_ptr_of(shown.param);  // the user knows it now
  throw std::invalid_argument(c10::str(
      "FSDP unit '", unit.name, "': the data of parameter ", index,
      " was set, which does not change the values of a DTensor; write them "
      "into it: with torch.no_grad(): param.copy_(value)"));
}

// Whether somebody else holds the gradient or its local tensor: Python, or a
// parameter that was frozen with it. Reads counts that only the user's threads
// change, of which this one runs the step.
bool is_held(const ShardedParam &shown) {
  const at::Tensor *const tensors[] = {&shown.grad, &shown.grad_local};
  for (size_t i = 0; i < 2; i++) {
    if (Py_REFCNT(shown.grad_objects[i]) > shown.grad_references[i] ||
        tensors[i]->use_count() > shown.grad_uses[i]) {
      return true;
    }
  }
  return false;
}

void make_grad(Unit &unit, Param &param, int64_t index) {
  ShardedParam &shown = param.sharded_param;
  const Segment &segment = own_segment(unit, param);
  {
    const at::Tensor view =
        make_view(segment.grad_shard.storage().getWeakStorageImpl().lock(),
                  param.sharded.key_set(), segment.grad, param.sharded.sizes(),
                  segment.grad_shard.storage_offset() + param.in_shard.begin);
    const auto local =
        py::reinterpret_steal<py::object>(THPVariable_Wrap(view));
    const auto made = py::reinterpret_steal<py::object>(
        unit.face.make_grad(unit.face.context, index, local.ptr()));
    if (!made) throw_python_error();
    for (size_t i = 0; i < 2; i++) {
      PyObject *object =
          PyTuple_GetItem(made.ptr(), static_cast<Py_ssize_t>(i));
      if (object == nullptr) throw_python_error();
      shown.grad_objects[i] = object;
      (i == 0 ? shown.grad : shown.grad_local) = THPVariable_Unpack(object);
    }
  }
  for (size_t i = 0; i < 2; i++) {
    shown.grad_references[i] = Py_REFCNT(shown.grad_objects[i]);
  }
  shown.grad_uses[0] = shown.grad.use_count();
  shown.grad_uses[1] = shown.grad_local.use_count();
}

// The local tensor of a gradient that the unit did not make; undefined where it
// did. GIL.
at::Tensor local_of_other_grad(const ShardedParam &shown) {
  const at::Tensor &grad = shown.param.grad();
  if (!grad.defined() || grad.is_same(shown.grad)) return {};
  const auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(grad));
  const auto local = py::reinterpret_steal<py::object>(
      PyObject_GetAttrString(object.ptr(), "_local_tensor"));
  if (!local) throw_python_error();
  return THPVariable_Unpack(local.ptr());
}

// Notes the local tensors of gradients that the user set. GIL.
void note_user_grads(Unit &unit) {
  recall_grads(unit);
  for (Param &param : unit.params) {
    ShardedParam &shown = param.sharded_param;
    at::Tensor local = local_of_other_grad(shown);
    if (local.defined()) shown.user_grad = std::move(local);
  }
}

// `local`: of `grad`; undefined if it has none.
void check_grad(const Unit &unit, const Param &param, const at::Tensor &grad,
                const at::Tensor &local) {
  if (local.defined() && local.sizes() == param.sharded.sizes()) return;
  refuse(unit, "the gradient of a parameter", local.defined() ? local : grad,
         c10::str("expected a DTensor with ", param.sharded.sizes(),
                  " on this rank"));
}

// Joins the reductions, which gradients must have before somebody reads them.
void join_reduces(const Unit &unit) {
  FSDP_LOCAL_ERROR(error);
  if (fsdp_engine_join_reduces(unit.engine->core, &error) != FSDP_OK) {
    throw_error(error);
  }
}

// What modules have registered outside forward and backward.
fsdp_torch_shown shown_at_rest(const Unit &unit) {
  if (!unit.engine) return FSDP_TORCH_SHOWN_SHARDED;
  const fsdp_unit_state state = fsdp_unit_get_state(unit.core);
  if (state != FSDP_UNIT_PARTED && state != FSDP_UNIT_UNSHARDED) {
    return FSDP_TORCH_SHOWN_SHARDED;
  }
  unit.engine->shows_kept = true;
  return state == FSDP_UNIT_PARTED ? FSDP_TORCH_SHOWN_PART
                                   : FSDP_TORCH_SHOWN_PLAIN;
}

}  // namespace

void throw_python_error() {
  python_error raised;
  raised.persist();
  throw raised;
}

std::vector<int64_t> local_sizes(const Unit &unit, const Param &param) {
  std::vector<int64_t> sizes = param.sizes;
  if (sizes.empty()) return {param.local_numel()};
  // Not from the part's elements: rows may have none.
  const Group &group = unit.shard_group;
  int64_t &rows = sizes[static_cast<size_t>(param.shard_dim)];
  const int64_t whole = rows;
  const int64_t each = (whole + group.world_size - 1) / group.world_size;
  const int64_t begin = std::min<int64_t>(group.rank * each, whole);
  rows = std::min(each, whole - begin);
  return sizes;
}

at::Tensor local_grad(Unit &unit, size_t index, const at::Tensor &grad) {
  const pybind11::gil_scoped_acquire gil;
  const auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(grad));
  const auto local = py::reinterpret_steal<py::object>(unit.face.local_grad(
      unit.face.context, static_cast<int64_t>(index), object.ptr()));
  if (!local) throw_python_error();
  return THPVariable_Unpack(local.ptr());
}

bool is_sharded_grad_held(const Param &param) {
  return param.sharded_param.grad.defined() && is_held(param.sharded_param);
}

bool take_sharded_grad(Unit &unit, Param &param) {
  ShardedParam &shown = param.sharded_param;
  const at::Tensor &grad = shown.param.grad();
  if (!grad.defined()) return false;
  if (grad.is_same(shown.grad)) return true;
  Segment &segment = own_segment(unit, param);
  check_grad(unit, param, grad, shown.user_grad);
  ensure_grad_shard(unit, segment, false);
  make_view(segment.grad_shard.storage().getWeakStorageImpl().lock(),
            param.sharded.key_set(), segment.grad, param.sharded.sizes(),
            segment.grad_shard.storage_offset() + param.in_shard.begin)
      .copy_(shown.user_grad);
  record_current_stream(shown.user_grad);
  shown.taken_version = grad._version();
  return true;
}

void show_sharded_grads(Unit &unit) {
  const pybind11::gil_scoped_acquire gil;
  const at::NoGradGuard no_grad;
  unit.grads_are_new = false;
  recall_grads(unit);
  const bool fills_unused = fsdp_unit_get_settings(unit.core)->fills_unused;
  for (size_t i = 0; i < unit.params.size(); i++) {
    Param &param = unit.params[i];
    ShardedParam &shown = param.sharded_param;
    const Segment &segment = own_segment(unit, param);
    if (!segment.grad_shard.defined()) continue;
    // One that was frozen since then may have got a gradient before.
    if (!shown.param.requires_grad() &&
        (fills_unused || !is_trainable(unit, segment))) {
      continue;
    }
    if (!shown.param.grad().defined() &&
        fsdp_unit_is_unused(unit.core, static_cast<int64_t>(i))) {
      continue;
    }
    // Of the sharded parameter itself, after the unit took what was there: the
    // user computed with it before the forward.
    const at::Tensor late = local_of_other_grad(shown);
    if (late.defined() && late.is_same(shown.user_grad) &&
        shown.param.grad()._version() != shown.taken_version) {
      throw std::runtime_error(c10::str(
          "FSDP unit '", unit.name, "': the gradient that the user set on ",
          "parameter ", i, " was added to after the unit had taken it. ",
          "Compute terms of the loss that have sharded parameters after the ",
          "forward, or clear gradients before"));
    }
    const bool moved =
        shown.grad.defined() &&
        !is_over(shown.grad_local, storage_of(segment.grad_shard));
    if (!shown.grad.defined() || (moved && is_held(shown))) {
      make_grad(unit, param, static_cast<int64_t>(i));
    } else if (moved) {
      show_at(shown.grad_local,
              segment.grad_shard.storage().getWeakStorageImpl().lock(),
              segment.grad_shard.storage_offset() + param.in_shard.begin);
    }
    shown.param.mutable_grad() = shown.grad;
    if (late.defined() && !late.is_same(shown.user_grad)) {
      check_grad(unit, param, late, late);
      join_reduces(unit);
      shown.grad_local.add_(late);
    }
    shown.user_grad = at::Tensor();
    const auto &hook = torch::autograd::impl::post_acc_grad_hooks(shown.param);
    if (hook == nullptr) continue;
    join_reduces(unit);
    try {
      (*hook)(shown.param);
    } catch (...) {
      hold_python_error();  // close_rows puts back what Python had before
      throw;
    }
  }
  leave_grads(unit);
}

void free_sharded_grad(Unit &unit, Param &param) {
  ShardedParam &shown = param.sharded_param;
  if (!shown.grad.defined()) return;
  if (is_held(shown)) {
    shown.grad = shown.grad_local = at::Tensor();
    return;
  }
  Segment &segment = own_segment(unit, param);
  if (!segment.no_grad) {
    segment.no_grad = empty_storage(shown.grad_local.device());
  }
  shown.grad_local.unsafeGetTensorImpl()->set_storage_keep_dtype(
      c10::Storage(segment.no_grad));
}

bool take_replaced_locals(Unit &unit) {
  bool any = false;
  for (size_t i = 0; i < unit.params.size(); i++) {
    Param &param = unit.params[i];
    const at::Tensor &local = param.sharded_param.local;
    if (!local.defined()) continue;
    refuse_new_data(unit, param.sharded_param, i);
    if (param.is_extended || is_over(local, storage_of(param.sharded))) {
      continue;
    }
    adopt_local(unit, param, i);
    any = true;
  }
  return any;
}

void refuse_change(const Unit &unit, const std::string &param) {
  const std::string message =
      "FSDP does not support changing the parameters between forward and "
      "backward: parameter " +
      param + " of unit '" + unit.name +
      "' was replaced after forward (torch.func.functional_call() does, when "
      "it puts back what was there). Replace it before forward or after "
      "backward, or copy into it under torch.no_grad(). This step is lost; the "
      "next forward begins a new one";
  const pybind11::gil_scoped_acquire gil;
  PyErr_SetString(PyExc_AssertionError, message.c_str());
  throw_python_error();
}

void check_left_shown(Engine &engine) {
  if (!fsdp_engine_shows_kept(engine.core)) return;
  const auto is_checked = [](const Unit *unit) {
    return unit->watch.context != nullptr &&
           fsdp_unit_is_left_shown(unit->core);
  };
  if (std::none_of(engine.units.begin(), engine.units.end(), is_checked))
    return;
  const pybind11::gil_scoped_acquire gil;
  for (const Unit *unit : engine.units) {
    if (!is_checked(unit)) continue;
    const char *name = unit->watch.find_replaced(unit->watch.context);
    if (name != nullptr) refuse_change(*unit, c10::str("'", name, "'"));
  }
}

void open_rows(Engine &engine) {
  if (!engine.has_faces || engine.shows_plain.exchange(true)) return;
  const pybind11::gil_scoped_acquire gil;
  for (Unit *unit : engine.units) {
    if (unit->face.context == nullptr) continue;
    if (unit->is_by_rows) note_user_grads(*unit);
    if (unit->face.show(unit->face.context, FSDP_TORCH_SHOWN_PLAIN) < 0) {
      throw_python_error();
    }
  }
}

void close_rows(Engine &engine, bool has_failed) {
  if (!engine.has_faces || !engine.shows_plain) return;
  if (Py_IsInitialized() == 0) return;
  const pybind11::gil_scoped_acquire gil;
  if (!engine.shows_plain.exchange(false)) return;
  const py::error_scope kept;  // an exception on its way stays
  for (Unit *unit : engine.units) {
    if (unit->face.context == nullptr) continue;
    const fsdp_torch_shown kind = unit->is_by_rows && !has_failed
                                      ? shown_at_rest(*unit)
                                      : FSDP_TORCH_SHOWN_SHARDED;
    if (unit->face.show(unit->face.context, kind) < 0) throw_python_error();
    if (unit->grads_are_new) show_sharded_grads(*unit);
  }
}

int show_kept_parallel(Engine &engine) {
  for (const Unit *unit : engine.units) {
    if (unit->face.context == nullptr || unit->is_by_rows) continue;
    if (unit->face.show(unit->face.context, shown_at_rest(*unit)) < 0) {
      return -1;
    }
  }
  return 0;
}

int hide_rows(Engine &engine) {
  if (!engine.shows_kept) return 0;
  engine.shows_kept = false;
  for (Unit *unit : engine.units) {
    if (unit->face.context == nullptr) continue;
    if (fsdp_unit_is_requested(unit->core)) {
      engine.shows_kept = true;
      continue;
    }
    if (unit->face.show(unit->face.context, FSDP_TORCH_SHOWN_SHARDED) < 0) {
      return -1;
    }
  }
  return 0;
}

void close_failed_rows(Engine &engine) {
  if (!engine.shows_plain || Py_IsInitialized() == 0) return;
  const pybind11::gil_scoped_acquire gil;
  if (engine.is_aborted) close_rows(engine, true);
}

}  // namespace fsdp_torch

using fsdp_torch::Unit;

extern "C" {

void fsdp_torch_unit_set_face(fsdp_torch_unit *unit,
                              const fsdp_torch_face *face) noexcept {
  Unit &self = *unit->self;
  self.face = face == nullptr ? fsdp_torch_face{} : *face;
  if (face != nullptr) return;
  // A graph may keep the unit; the user's objects are to be free.
  for (auto &param : self.params) {
    param.sharded_param = {};
    param.parallel = param.parallel_local = at::Tensor();
  }
  self.grad_places.clear();
}

fsdp_status fsdp_torch_unit_bind_sharded(fsdp_torch_unit *unit, int64_t index,
                                         PyObject *param, PyObject *local,
                                         fsdp_error *error) {
  GUARDED(error) {
    Unit &self = *unit->self;
    if (!THPVariable_Check(param) || !THPVariable_Check(local)) {
      throw std::invalid_argument("a sharded parameter is not a tensor");
    }
    auto &target = self.params.at(static_cast<size_t>(index));
    fsdp_torch::ShardedParam shown;
    shown.param = THPVariable_Unpack(param);
    shown.storage = fsdp_torch::storage_ptr_of(shown.param);
    shown.local = THPVariable_Unpack(local);
    std::swap(target.sharded_param, shown);
    target.replaced_at = ++self.num_replaced;
    if (target.is_extended) return FSDP_OK;  // it keeps its memory
    // As in replace_param().
    const bool was_shown =
        shown.local.defined() &&
        !shown.local.is_same(target.sharded_param.local) &&
        fsdp_torch::is_over(shown.local,
                            fsdp_torch::storage_of(target.sharded));
    const at::Tensor own =
        was_shown ? shown.local.detach().clone() : at::Tensor();
    try {
      fsdp_torch::adopt_local(self, target, static_cast<size_t>(index));
    } catch (...) {
      std::swap(target.sharded_param, shown);
      throw;
    }
    self.grad_places.clear();
    if (was_shown) {
      shown.local.unsafeGetTensorImpl()->shallow_copy_from(
          own.getIntrusivePtr());
    }
    return FSDP_OK;
  };
}

fsdp_status fsdp_torch_unit_bind_parallel(fsdp_torch_unit *unit, int64_t index,
                                          PyObject *param, PyObject *local,
                                          fsdp_error *error) {
  GUARDED(error) {
    if (!THPVariable_Check(param) || !THPVariable_Check(local)) {
      throw std::invalid_argument("a parallel parameter is not a tensor");
    }
    auto &target = unit->self->params.at(static_cast<size_t>(index));
    target.parallel = THPVariable_Unpack(param);
    target.parallel_local = THPVariable_Unpack(local);
    target.parallel_local.unsafeGetTensorImpl()->shallow_copy_from(
        target.tensor.getIntrusivePtr());
    return FSDP_OK;
  };
}

int fsdp_torch_unit_take_locals(fsdp_torch_unit *unit,
                                PyObject *name) noexcept {
  HANDLE_TH_ERRORS
  Unit &self = *unit->self;
  for (size_t i = 0; i < self.params.size(); i++) {
    fsdp_torch::Param &param = self.params[i];
    fsdp_torch::ShardedParam &shown = param.sharded_param;
    if (!shown.local.defined() || param.is_extended) continue;
    const auto object = pybind11::reinterpret_steal<pybind11::object>(
        THPVariable_Wrap(shown.param));
    const auto local = pybind11::reinterpret_steal<pybind11::object>(
        PyObject_GetAttr(object.ptr(), name));
    if (!local) return -1;
    if (!THPVariable_Check(local.ptr()) ||
        THPVariable_Unpack(local.ptr()).is_same(shown.local)) {
      continue;
    }
    shown.local = THPVariable_Unpack(local.ptr());
    fsdp_torch::adopt_local(self, param, i);
  }
  return 0;
  END_HANDLE_TH_ERRORS_RET(-1)
}

PyObject *fsdp_torch_unit_part_of(fsdp_torch_unit *unit, int64_t index) {
  HANDLE_TH_ERRORS
  return THPVariable_Wrap(
      unit->self->params.at(static_cast<size_t>(index)).part);
  END_HANDLE_TH_ERRORS
}

fsdp_torch_shown fsdp_torch_unit_shown_after_forward(
    fsdp_torch_unit *unit) noexcept {
  return fsdp_torch::shown_at_rest(*unit->self);
}

int fsdp_torch_unit_hide_for_inference(fsdp_torch_unit *unit) noexcept {
  const auto &engine = unit->self->engine;
  if (!engine || !engine->shows_kept || fsdp_engine_in_forward(engine->core)) {
    return 0;
  }
  for (const Unit *each : engine->units) {
    if (fsdp_unit_get_state(each->core) != FSDP_UNIT_KEPT) continue;
    if (each->face.context == nullptr || !each->is_by_rows) continue;
    if (each->face.show(each->face.context, FSDP_TORCH_SHOWN_SHARDED) < 0) {
      return -1;
    }
  }
  return 0;
}

int fsdp_torch_unit_hide_kept(fsdp_torch_unit *unit) noexcept {
  const auto &engine = unit->self->engine;
  if (engine && engine->shows_plain) {
    HANDLE_TH_ERRORS {
      const pybind11::gil_scoped_release no_gil;
      fsdp_torch::await_end_of_backward(*engine);
    }
    fsdp_torch::close_failed_rows(*engine);
    END_HANDLE_TH_ERRORS_RET(-1)
  }
  if (!engine || !engine->shows_kept || engine->shows_plain ||
      fsdp_engine_in_forward(engine->core)) {
    return 0;
  }
  return fsdp_torch::hide_rows(*engine);
}

void fsdp_torch_unit_set_watch(fsdp_torch_unit *unit,
                               const fsdp_torch_watch *watch) noexcept {
  unit->self->watch = watch == nullptr ? fsdp_torch_watch{} : *watch;
}

int fsdp_torch_unit_show_kept(fsdp_torch_unit *unit, bool shows) noexcept {
  const auto &engine = unit->self->engine;
  if (!engine || fsdp_engine_in_forward(engine->core) ||
      fsdp_engine_in_backward(engine->core)) {
    return 0;
  }
  HANDLE_TH_ERRORS
  if (!shows && fsdp_torch_unit_hide_kept(unit) < 0) return -1;
  if (!shows && !fsdp_engine_shows_kept(engine->core) &&
      !fsdp_engine_keeps_params(engine->core)) {
    return 0;
  }
  FSDP_LOCAL_ERROR(error);
  fsdp_status status = FSDP_OK;
  {
    const pybind11::gil_scoped_release no_gil;
    const fsdp_torch::EngineCall call(*engine);
    engine->recover();
    status = fsdp_engine_show_kept(engine->core, shows, &error);
  }
  if (status != FSDP_OK) fsdp_torch::throw_error(error);
  return shows ? fsdp_torch::show_kept_parallel(*engine) : 0;
  END_HANDLE_TH_ERRORS_RET(-1)
}

bool fsdp_torch_unit_is_shown_in_backward(
    const fsdp_torch_unit *unit) noexcept {
  const auto &engine = unit->self->engine;
  return engine && engine->shows_plain;
}

}  // extern "C"
