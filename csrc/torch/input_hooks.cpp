// Note [Leaving a unit in backward]
// Autograd tells when it is done with a trainable parameter: its gradient
// comes. Of others it says nothing: of a frozen one, of one whose gradient
// comes in a graph task of its own (reentrant checkpointing of a part of the
// unit), of an unused one. A unit with one of those cannot be resharded when
// the gradients that are announced have come: a frozen layer may still have to
// pass a gradient on. Autograd runs the nodes of one thread in the reverse
// order of their creation, and the nodes that made a unit's inputs are older
// than all nodes inside it. So once the inputs have their gradients, backward
// has left the unit. An input that several units have is complete only when
// backward has left all of them, and a leaf keeps its hooks for ever: there the
// unit gets an alias of its own. Where no input requires grad, the unit waits
// for the end of backward. A unit whose parameters are all announced does not
// wait with its reshard: the units inside it may still have a long way to go.
// (It must not use a parameter detached before it uses it otherwise; FSDP1 has
// the same limit.) Its reduction does wait: Note [Where a unit is reduced].
#include <ATen/core/Tensor.h>
#include <ATen/ops/alias.h>
#include <Python.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "torch/bridge.h"
#include "torch/guard.hpp"
#include "torch/step_stream.hpp"
#include "torch/transforms.hpp"
#include "torch/unit.hpp"

namespace fsdp_torch {

// The inputs of one forward call.
struct InputCall {
  struct Input {
    torch::autograd::Node *node;  // it owns this object; null: it is gone
    int received_in = -1;         // graph task
  };

  std::shared_ptr<UnitHandle> handle;
  std::vector<Input> inputs;
  int graph_task = -1;  // in which `missing` was counted
  int64_t missing = 0;

  // Counts the inputs whose gradients will come; how many.
  int64_t begin(int current) {
    graph_task = current;
    missing = std::count_if(
        inputs.begin(), inputs.end(),
        [](const Input &input) { return will_receive(input.node); });
    return missing;
  }

  // The input made by `node` has its gradient.
  void on_grad(const torch::autograd::Node *node) {
    const int current = torch::autograd::get_current_graph_task_id();
    if (graph_task != current) return;
    for (Input &input : inputs) {
      if (input.node != node || input.received_in == current) continue;
      input.received_in = current;
      if (--missing == 0) leave();
    }
  }

 private:
  void leave() const {
    if (handle->unit == nullptr) return;
    const Unit &unit = *handle->unit;
    const std::shared_ptr<Engine> engine = unit.engine;
    if (fsdp_unit_pending_grads(unit.core) == 1) follow_reductions(*engine);
    const EngineCall call(*engine);
    const int64_t begin_ns = engine->begin_span();
    FSDP_LOCAL_ERROR(error);
    if (fsdp_unit_inputs_ready(unit.core, &error) != FSDP_OK) {
      throw_error(error);
    }
    fsdp_engine_note(engine->core, unit.core, FSDP_TIMELINE_GRAD_READY,
                     begin_ns);
  }
};

// Runs before the node that made an input. A node that is gone is not waited
// for, whoever has its address now.
class InputHook : public torch::autograd::FunctionPreHook {
 public:
  InputHook(std::shared_ptr<InputCall> call, size_t index)
      : call_(std::move(call)), index_(index) {}
  ~InputHook() override { call_->inputs[index_].node = nullptr; }
  InputHook(const InputHook &) = delete;
  InputHook &operator=(const InputHook &) = delete;

  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list &grads) override {
    call_->on_grad(call_->inputs[index_].node);
    return grads;
  }

 private:
  std::shared_ptr<InputCall> call_;
  size_t index_;
};

void receive_input(Engine &engine, const torch::autograd::Node *node) {
  const auto found = engine.input_users.find(node);
  if (found == engine.input_users.end()) return;
  if (const auto call = found->second.lock()) call->on_grad(node);
}

bool will_receive(torch::autograd::Node *node) {
  const auto *nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (nodes == nullptr || nodes->find(node) == nodes->end()) return false;
  const auto *infos = torch::autograd::get_current_graph_task_exec_info();
  if (infos == nullptr || infos->empty()) return true;
  const auto info = infos->find(node);
  return info != infos->end() && info->second.should_execute();
}

int64_t count_input_calls(Unit &unit) {
  const int current = torch::autograd::get_current_graph_task_id();
  int64_t num_calls = 0;
  for (const std::weak_ptr<InputCall> &item : unit.input_calls) {
    const std::shared_ptr<InputCall> call = item.lock();
    if (call && call->begin(current) > 0) num_calls++;
  }
  return num_calls;
}

namespace {

// Whether another unit has the input made by `node` in this iteration.
bool is_taken(Engine &engine, const torch::autograd::Node *node,
              const std::shared_ptr<InputCall> &call) {
  std::weak_ptr<InputCall> &first = engine.input_users[node];
  const std::shared_ptr<InputCall> other = first.lock();
  if (!other) first = call;
  return other && other->handle != call->handle;
}

// Whether the unit needs an alias of its own.
bool needs_alias(const std::shared_ptr<InputCall> &call,
                 const at::Tensor &input) {
  const Unit &unit = *call->handle->unit;
  return input.is_leaf() ||
         (unit.engine && is_taken(*unit.engine, input.grad_fn().get(), call));
}

// The tensor that the unit gets for `input`: itself, or an alias.
at::Tensor hook_input(const std::shared_ptr<InputCall> &call,
                      const at::Tensor &input) {
  at::Tensor own = input;
  bool is_aliased = false;
  for (const at::Tensor &each : layers_of(input)) {
    is_aliased |= each.requires_grad() && needs_alias(call, each);
  }
  if (is_aliased) own = at::alias(input);
  for (const at::Tensor &each : layers_of(own)) {
    if (!each.requires_grad()) continue;
    torch::autograd::Node *node = each.grad_fn().get();
    call->inputs.push_back({node});
    node->add_tensor_pre_hook(
        std::make_unique<InputHook>(call, call->inputs.size() - 1));
  }
  return own;
}

}  // namespace
}  // namespace fsdp_torch

using fsdp_torch::InputCall;

struct fsdp_torch_inputs {
  std::shared_ptr<InputCall> call;
};

extern "C" {

bool fsdp_torch_wants_inputs() noexcept {
  return c10::GradMode::is_enabled();
}

fsdp_status fsdp_torch_inputs_create(fsdp_torch_unit *unit,
                                     fsdp_torch_inputs **inputs,
                                     fsdp_error *error) {
  GUARDED(error) {
    fsdp_torch::Unit &self = *unit->self;
    auto &calls = self.input_calls;
    calls.erase(std::remove_if(calls.begin(), calls.end(),
                               [](const auto &call) { return call.expired(); }),
                calls.end());
    if (self.engine && !fsdp_engine_in_forward(self.engine->core) &&
        !fsdp_engine_in_backward(self.engine->core)) {
      self.engine->input_users.clear();  // an iteration begins
    }
    auto call = std::make_shared<InputCall>();
    call->handle = self.handle;
    calls.push_back(call);
    *inputs = new fsdp_torch_inputs{std::move(call)};
    return FSDP_OK;
  };
}

PyObject *fsdp_torch_inputs_hook(fsdp_torch_inputs *inputs, PyObject *tensor) {
  HANDLE_TH_ERRORS
  const at::Tensor &input = THPVariable_Unpack(tensor);
  const at::Tensor own = fsdp_torch::hook_input(inputs->call, input);
  if (own.unsafeGetTensorImpl() == input.unsafeGetTensorImpl()) {
    return Py_NewRef(tensor);
  }
  return THPVariable_Wrap(own);
  END_HANDLE_TH_ERRORS
}

void fsdp_torch_inputs_destroy(fsdp_torch_inputs *inputs) {
  delete inputs;
}

}  // extern "C"
