// What follows a unit's reduction: hooks on its flat parameters, and a function
// of Python's, which steps an optimizer.
//
// Note [Following reductions]
// The core tells when a reduction was issued, under the engine's lock. What
// follows runs Python, so it waits until the lock is free: until the gradients
// of the next unit are about to be reduced, or the end of backward. By then the
// reduction has had that unit's backward to run beside, and one unit's sharded
// gradient is held at a time. It runs on COMPUTE, which waits for the
// reduction, as an optimizer's step after backward does.
//
// Whoever follows sees this backward's mean alone. What the gradient held
// before stands aside meanwhile, as autograd keeps it from hooks. A gradient
// that is cleared is let go at once. Units that nobody follows pay for a
// comparison.
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <Python.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>

#include "torch/bridge.h"
#include "torch/guard.hpp"
#include "torch/step_stream.hpp"
#include "torch/unit.hpp"

namespace fsdp_torch {

struct Follower {
  py::object function;
};

namespace {

namespace impl = torch::autograd::impl;

// Objects of Python go with the GIL held, or not at all when it has ended.
void destroy_follower(Follower *follower) {
  if (Py_IsInitialized() == 0) return;
  const pybind11::gil_scoped_acquire gil;
  delete follower;
}

bool has_hooks(const at::Tensor &flat_param) {
  return flat_param.defined() &&
         impl::get_autograd_meta(flat_param) != nullptr &&
         (!impl::hooks(flat_param).empty() ||
          impl::post_acc_grad_hooks(flat_param) != nullptr);
}

// The hooks of Tensor.register_hook: they may replace the gradient.
void run_grad_hooks(const Unit &unit, Segment &segment) {
  at::Tensor grad = segment.grad_shard;
  for (const auto &hook : impl::hooks(segment.flat_param)) {
    const auto replaced = (*hook)({grad});
    if (!replaced.empty() && replaced.front().defined()) {
      grad = replaced.front();
    }
  }
  if (grad.is_same(segment.grad_shard)) return;
  if (grad.numel() != segment.grad_shard.numel()) {
    refuse(unit, "the gradient of a flat parameter", grad,
           c10::str("a hook must return one of ", segment.grad_shard.numel(),
                    " elements, this rank's shard"));
  }
  segment.grad_shard.copy_(grad.detach().reshape({-1}));
}

void add_earlier_grad(Segment &segment) {
  if (!segment.earlier_grad.defined()) return;
  if (segment.grad_shard.defined()) {
    segment.earlier_grad.add_(segment.grad_shard);
  }
  segment.grad_shard = std::move(segment.earlier_grad);
  segment.earlier_grad = at::Tensor();
}

void run_follower(const Follower &follower) {
  const pybind11::gil_scoped_acquire gil;
  try {
    follower.function();
  } catch (py::error_already_set &raised) {
    raised.restore();
    python_error kept;
    kept.persist();
    throw kept;
  }
}

void follow(Unit &unit) {
  Engine &engine = *unit.engine;
  const at::NoGradGuard no_grad;
  {
    const EngineCall call(engine);
    engine.provider.wait(FSDP_LANE_COMPUTE, unit.reduced.get());
    if (unit.offloads) engine.provider.synchronize(unit.reduced.get());
    FSDP_LOCAL_ERROR(error);
    if (fsdp_unit_await_unused(unit.core, &error) != FSDP_OK) {
      throw_error(error);
    }
  }
  recall_grads(unit);
  for (Segment &segment : unit.segments) {
    if (segment.grad_shard.defined() && has_hooks(segment.flat_param)) {
      run_grad_hooks(unit, segment);
    }
    add_earlier_grad(segment);
  }
  show_followed_grads(unit);
  for (const Segment &segment : unit.segments) {
    if (!has_hooks(segment.flat_param)) continue;
    const auto &hook = impl::post_acc_grad_hooks(segment.flat_param);
    if (hook != nullptr && segment.flat_param.grad().defined()) {
      (*hook)(segment.flat_param);
    }
  }
  if (unit.follower) run_follower(*unit.follower);
  const EngineCall call(engine);
  take_followed_grads(unit);
}

void grads_set_aside(void * /*context*/, void *owner) {
  recall_grads(unit_of(owner));
  for (Segment &segment : unit_of(owner).segments) {
    segment.earlier_grad = std::move(segment.grad_shard);
    segment.grad_shard = at::Tensor();
  }
}

fsdp_status grads_reduced(void *context, void *owner, fsdp_lane lane,
                          fsdp_error *error) {
  GUARDED(error) {
    Unit &unit = unit_of(owner);
    Provider &provider = provider_of(context);
    if (!unit.reduced) unit.reduced = make_event();
    provider.record(unit.reduced.get(), lane);
    unit.engine->reduced.push_back(unit.weak_from_this());
    return FSDP_OK;
  };
}

}  // namespace

void note_followers(Unit &unit) {
  bool is_followed = unit.follower != nullptr;
  if (!unit.use_orig_params) {
    is_followed =
        is_followed || std::any_of(unit.segments.begin(), unit.segments.end(),
                                   [](const Segment &segment) {
                                     return has_hooks(segment.flat_param);
                                   });
  }
  fsdp_unit_get_settings(unit.core)->is_followed = is_followed;
}

// Only the thread that runs the engine's backward adds to the list.
void follow_reductions(Engine &engine) {
  while (!engine.reduced.empty()) {
    const std::shared_ptr<Unit> unit = engine.reduced.front().lock();
    engine.reduced.erase(engine.reduced.begin());
    if (!unit) continue;
    try {
      follow(*unit);
    } catch (python_error &raised) {
      // A device's backward ends on a thread of autograd's, which drops what
      // Python keeps there.
      raised.persist();
      throw;
    }
  }
}

void add_following_ops(fsdp_view_ops *ops) {
  ops->grads_set_aside = grads_set_aside;
  ops->grads_reduced = grads_reduced;
}

}  // namespace fsdp_torch

extern "C" fsdp_status fsdp_torch_unit_follow_reductions(fsdp_torch_unit *unit,
                                                         PyObject *function,
                                                         fsdp_error *error) {
  GUARDED(error) {
    fsdp_torch::Unit &self = *unit->self;
    self.follower.reset();
    if (function != Py_None) {
      self.follower = std::shared_ptr<fsdp_torch::Follower>(
          new fsdp_torch::Follower{
              py::reinterpret_borrow<py::object>(function)},
          fsdp_torch::destroy_follower);
    }
    fsdp_torch::note_followers(self);
    return FSDP_OK;
  };
}
