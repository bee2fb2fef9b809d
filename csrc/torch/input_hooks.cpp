// Note [Leaving a unit in backward]
// Autograd tells when it is done with a trainable parameter: its gradient
// comes. Of others it says nothing: of a frozen one, of one whose gradient
// comes in a graph task of its own (reentrant checkpointing of a part of the
// unit), of an unused one, of one that is also used detached. So a unit cannot
// simply be resharded when the gradients that are announced have come: a frozen
// layer may still have to pass a gradient on. Autograd runs the nodes of one
// thread in the reverse order of their creation, and the nodes that made a
// unit's inputs are older than all nodes inside it. So once the inputs have
// their gradients, backward has left the unit. Two cases have no such end, or a
// late one: no input requires grad, or several units share an input, whose
// gradient is complete when backward has left all of them. If all parameters of
// the unit are announced, it then ends with their gradients; if not, with the
// inputs after all, or with the end of backward.
#include <Python.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "torch/bridge.h"
#include "torch/guard.hpp"
#include "torch/unit.hpp"

namespace fsdp_torch {

// The inputs of one forward call.
struct InputCall {
  std::shared_ptr<UnitHandle> handle;
  bool is_shared = false;  // another unit has one of the inputs, too
  // Not owned: the hooks of these nodes own this object.
  std::vector<torch::autograd::Node *> nodes;
  int graph_task = -1;  // in which `missing` was counted
  int64_t missing = 0;

  // Counts the inputs whose gradients will come; how many.
  int64_t begin(int current) {
    graph_task = current;
    missing = std::count_if(nodes.begin(), nodes.end(), will_receive);
    return missing;
  }

  void on_grad() {
    const int current = torch::autograd::get_current_graph_task_id();
    if (graph_task != current || missing == 0 || --missing > 0) return;
    if (handle->unit == nullptr) return;
    Unit &unit = *handle->unit;
    const std::shared_ptr<Engine> engine = unit.engine;
    const std::lock_guard<std::mutex> lock(engine->mutex);
    fsdp_error error = {};
    if (fsdp_unit_inputs_ready(unit.core, &error) != FSDP_OK) {
      throw_error(error);
    }
  }
};

bool will_receive(torch::autograd::Node *node) {
  const auto *nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (nodes == nullptr || nodes->find(node) == nodes->end()) return false;
  const auto *infos = torch::autograd::get_current_graph_task_exec_info();
  if (infos == nullptr || infos->empty()) return true;
  const auto info = infos->find(node);
  return info != infos->end() && info->second.should_execute();
}

InputCalls count_input_calls(Unit &unit) {
  const int current = torch::autograd::get_current_graph_task_id();
  InputCalls result;
  for (const std::weak_ptr<InputCall> &item : unit.input_calls) {
    const std::shared_ptr<InputCall> call = item.lock();
    if (!call || call->begin(current) == 0) continue;
    result.num_calls++;
    result.is_shared = result.is_shared || call->is_shared;
  }
  return result;
}

namespace {

// Notes that `call` has the input made by `node`; finds others that have it.
void note_user(Engine &engine, torch::autograd::Node *node,
               const std::shared_ptr<InputCall> &call) {
  std::weak_ptr<InputCall> &first = engine.input_users[node];
  const std::shared_ptr<InputCall> other = first.lock();
  if (!other) {
    first = call;
  } else if (other->handle != call->handle) {
    other->is_shared = true;
    call->is_shared = true;
  }
}

}  // namespace

}  // namespace fsdp_torch

using fsdp_torch::InputCall;

struct fsdp_torch_inputs {
  std::shared_ptr<InputCall> call;
  bool hooks_leaves = false;
};

extern "C" {

bool fsdp_torch_unit_wants_inputs(const fsdp_torch_unit *unit) noexcept {
  return c10::GradMode::is_enabled() && !unit->self->params.empty();
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
    const bool has_frozen =
        std::any_of(self.params.begin(), self.params.end(),
                    [](const auto &p) { return !p.tensor.requires_grad(); });
    *inputs = new fsdp_torch_inputs{std::move(call), has_frozen};
    return FSDP_OK;
  };
}

fsdp_status fsdp_torch_inputs_hook(fsdp_torch_inputs *inputs, PyObject *tensor,
                                   fsdp_error *error) {
  GUARDED(error) {
    const at::Tensor &input = THPVariable_Unpack(tensor);
    if (!input.requires_grad()) return FSDP_OK;
    // A leaf keeps its hooks, and may be the input of many steps. Without
    // frozen parameters the end of backward will do.
    if (input.is_leaf() && !inputs->hooks_leaves) return FSDP_OK;
    const std::shared_ptr<InputCall> call = inputs->call;
    auto *node = torch::autograd::impl::gradient_edge(input).function.get();
    call->nodes.push_back(node);
    fsdp_torch::Unit &unit = *call->handle->unit;
    if (unit.engine) fsdp_torch::note_user(*unit.engine, node, call);
    input.register_hook(
        [call](const at::Tensor & /*grad*/) { call->on_grad(); });
    return FSDP_OK;
  };
}

void fsdp_torch_inputs_destroy(fsdp_torch_inputs *inputs) {
  delete inputs;
}

}  // extern "C"
