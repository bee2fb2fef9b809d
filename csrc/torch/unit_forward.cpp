// The calls around a unit's forward, unsharding on request, and summons.
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <Python.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>

#include "torch/bridge.h"
#include "torch/guard.hpp"
#include "torch/offload.hpp"
#include "torch/step_stream.hpp"
#include "torch/unit.hpp"

using fsdp_torch::Engine;
using fsdp_torch::Unit;

namespace {

// Whether a forward that runs now is activation checkpointing's, in backward. A
// call for some gradients may begin inside a unit and recompute it before a
// hook has opened the backward (Note [Split backward]). In a call for all the
// forward may be that of reentrant checkpointing around the model, a new one.
bool is_recomputation(const Engine &engine) noexcept {
  if (torch::autograd::get_current_graph_task_id() == -1) return false;
  if (fsdp_engine_in_backward(engine.core)) return true;
  const auto *asked = torch::autograd::get_current_graph_task_exec_info();
  return asked != nullptr && !asked->empty();
}

// The last step of pre_forward, which is undone where it fails.
void enter_offload_or_abandon(Unit &unit, bool in_backward) {
  try {
    fsdp_torch::enter_offload(unit);
  } catch (...) {
    fsdp_torch::show_hidden_grads(unit);
    fsdp_unit_abandon_forward(unit.core, in_backward);
    throw;
  }
}

// autocast keeps what it cast of a parameter until its outermost context ends.
// It knows parameters by their tensors, which stay while their memory and
// values come and go: the casts of all units would stay at once, and a step
// within the context would not be seen. So they live as long as the unit's
// forward.
void drop_casts(const Unit &unit) noexcept {
  if (at::autocast::is_autocast_enabled(unit.device.type())) {
    at::autocast::clear_cache();
  }
}

}  // namespace

extern "C" {

void fsdp_torch_unit_input_cast(const fsdp_torch_unit *unit,
                                fsdp_torch_cast *cast) noexcept {
  const Unit &self = *unit->self;
  const fsdp_engine *core = self.engine ? self.engine->core : nullptr;
  // A recomputation gets what forward got.
  const bool is_root = core != nullptr && (is_recomputation(*self.engine)
                                               ? self.ran_as_root
                                               : !fsdp_engine_in_forward(core));
  const bool is_wanted =
      self.cast_forward_inputs || (is_root && self.cast_root_forward_inputs);
  const bool is_cast = is_wanted && !fsdp_unit_is_summoned(self.core) &&
                       !fsdp_unit_get_settings(self.core)->wants_full;
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
    fsdp_torch::await_end_of_backward(*self.engine);
    if (is_recomputation(*self.engine)) fsdp_torch::open_rows(*self.engine);
    const fsdp_torch::EngineCall call(*self.engine);
    self.engine->recover();
    const bool in_backward = is_recomputation(*self.engine);
    self.forward_call.reset();
    if (in_backward) {
      fsdp_torch::open_backward(self.engine);
    } else {
      self.ran_as_root = !fsdp_engine_in_forward(self.engine->core);
      if (self.ran_as_root) {
        fsdp_engine_set_records_graph(self.engine->core,
                                      c10::GradMode::is_enabled());
      }
      fsdp_torch::follow_requires_grad(self);
      if (c10::GradMode::is_enabled()) fsdp_torch::note_followers(self);
    }
    const fsdp_status status =
        fsdp_unit_pre_forward(self.core, in_backward, error);
    if (status == FSDP_OK && !in_backward) {
      fsdp_torch::hide_grads(self);
      fsdp_torch::mark_entry(self);
    }
    if (status == FSDP_OK && c10::GradMode::is_enabled() &&
        !fsdp_unit_is_summoned(self.core)) {
      fsdp_torch::hook_accumulators(self);
    }
    if (status == FSDP_OK) enter_offload_or_abandon(self, in_backward);
    return status;
  };
}

PyObject *fsdp_torch_unit_written_param(const fsdp_torch_unit *unit) {
  HANDLE_TH_ERRORS
  Unit &self = *unit->self;
  const bool is_kept = fsdp_unit_is_summoned(self.core) ||
                       (self.engine && is_recomputation(*self.engine));
  const fsdp_torch::Param *written =
      is_kept ? nullptr : fsdp_torch::find_written(self);
  if (written == nullptr) Py_RETURN_NONE;
  return THPVariable_Wrap(written->leaf());
  END_HANDLE_TH_ERRORS
}

fsdp_status fsdp_torch_unit_post_forward(fsdp_torch_unit *unit,
                                         bool expects_backward,
                                         fsdp_error *error) {
  GUARDED(error) {
    Unit &self = *unit->self;
    const fsdp_torch::EngineCall call(*self.engine);
    const bool in_backward = is_recomputation(*self.engine);
    fsdp_torch::show_hidden_grads(self);
    if (self.engine->offload) self.engine->offload->leave(self);
    drop_casts(self);
    return fsdp_unit_post_forward(self.core, in_backward, expects_backward,
                                  error);
  };
}

bool fsdp_torch_unit_recomputes(const fsdp_torch_unit *unit) noexcept {
  const Unit &self = *unit->self;
  return self.engine && is_recomputation(*self.engine);
}

void fsdp_torch_unit_abandon_forward(fsdp_torch_unit *unit,
                                     const char *reason) noexcept {
  Unit &self = *unit->self;
  if (!self.engine) return;
  const fsdp_torch::EngineCall call(*self.engine);
  if (!self.engine->has_abort_reason) {
    try {  // a unit around this one knows no better
      self.engine->publish_abort_reason("left forward of unit '" + self.name +
                                        "' by " + reason);
    } catch (...) {  // no memory: the others learn less
    }
  }
  fsdp_torch::show_hidden_grads(self);
  if (self.engine->offload) self.engine->offload->leave(self);
  drop_casts(self);
  fsdp_unit_abandon_forward(self.core, is_recomputation(*self.engine));
}

fsdp_status fsdp_torch_unit_unshard(fsdp_torch_unit *unit, fsdp_error *error) {
  GUARDED(error) {
    Unit &self = *unit->self;
    if (!self.engine) return fsdp_unit_unshard(self.core, error);
    const fsdp_torch::EngineCall call(*self.engine);
    self.engine->recover();
    return fsdp_unit_unshard(self.core, error);
  };
}

fsdp_status fsdp_torch_unit_wait_unshard(fsdp_torch_unit *unit,
                                         fsdp_error *error) {
  GUARDED(error) {
    Unit &self = *unit->self;
    if (!self.engine) return fsdp_unit_wait_unshard(self.core, error);
    const fsdp_torch::EngineCall call(*self.engine);
    fsdp_torch::follow_requires_grad(self);
    const fsdp_status status = fsdp_unit_wait_unshard(self.core, error);
    // The parameters may be used outside the unit's own forward.
    if (status == FSDP_OK) fsdp_torch::hook_accumulators(self);
    return status;
  };
}

fsdp_status fsdp_torch_unit_reshard(fsdp_torch_unit *unit, fsdp_error *error) {
  GUARDED(error) {
    Unit &self = *unit->self;
    if (!self.engine) return FSDP_OK;  // it is sharded
    const fsdp_torch::EngineCall call(*self.engine);
    self.engine->recover();
    return fsdp_unit_reshard(self.core, error);
  };
}

fsdp_status fsdp_torch_unit_summon(fsdp_torch_unit *unit,
                                   const fsdp_summon_options *options,
                                   fsdp_error *error) {
  GUARDED(error) {
    Unit &self = *unit->self;
    fsdp_summon_options here = *options;
    here.on_host = here.on_host && !self.device.is_cpu(); /* it is there */
    if (!self.engine) return fsdp_unit_summon(self.core, &here, error);
    const fsdp_torch::EngineCall call(*self.engine);
    self.engine->recover();
    const at::NoGradGuard no_grad;
    fsdp_torch::show_requires_grad(self);
    self.grad_places.clear();  // those of frozen segments, too
    return fsdp_unit_summon(self.core, &here, error);
  };
}

fsdp_status fsdp_torch_unit_dismiss(fsdp_torch_unit *unit, bool writeback,
                                    fsdp_error *error) {
  GUARDED(error) {
    Unit &self = *unit->self;
    if (!self.engine) return fsdp_unit_dismiss(self.core, writeback, error);
    const fsdp_torch::EngineCall call(*self.engine);
    const at::NoGradGuard no_grad;
    const fsdp_status status = fsdp_unit_dismiss(self.core, writeback, error);
    self.grad_places.clear();
    return status;
  };
}

}  // extern "C"
