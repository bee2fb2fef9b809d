// Autograd hooks: an output's gradient starts a unit's backward, a parameter's
// gradient is handed to the engine, the end of backward finishes the step. They
// run on autograd's threads. Only units by rows, parallel parameters, the look
// for replaced parameters and followers need the GIL.
#include <ATen/core/Tensor.h>
#include <Python.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "torch/bridge.h"
#include "torch/guard.hpp"
#include "torch/offload.hpp"
#include "torch/step_stream.hpp"
#include "torch/transforms.hpp"
#include "torch/unit.hpp"

namespace fsdp_torch {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

// Runs `body` and turns its failure into an exception, for autograd.
template <typename Body>
void check(Body &&body) {
  FSDP_LOCAL_ERROR(error);
  if (body(&error) != FSDP_OK) throw_error(error);
}

// Note [End of backward]
// The callback runs when its graph task ends. If the task raises, autograd
// destroys the callback without running it: then this object's destructor
// tells the engine, which resets itself at its next use. So the callback is
// queued before the engine opens the backward. A callback that raises (a hook
// of the user's on a gradient that was reduced last) tells the engine itself:
// the backward may be closed then, and nothing would wait for the destructor.
//
// On an accelerator the destructor runs in a thread of autograd, a moment after
// the caller got the exception. Then the destructor and the next use both want
// to register the sharded parameters, and the first to hold the GIL does: from
// the next use on, the engine is no longer aborted and the destructor leaves
// the parameters alone.
class BackwardEnd {
 public:
  explicit BackwardEnd(std::shared_ptr<Engine> engine)
      : engine_(std::move(engine)) {}
  ~BackwardEnd() {
    if (!has_run_) fail();
  }
  BackwardEnd(const BackwardEnd &) = delete;
  BackwardEnd &operator=(const BackwardEnd &) = delete;

  void run() {
    const OutsideTransforms outside;
    has_run_ = true;
    try {
      follow_reductions(*engine_);
      finish();
      follow_reductions(*engine_);
      close_rows(*engine_);
    } catch (...) {
      hold_python_error();  // fail() may call Python
      fail();
      throw;
    }
  }

 private:
  void fail() {
    engine_->publish_abort_reason("left backward by an exception");
    engine_->is_aborted = true;
    try {
      close_failed_rows(*engine_);
    } catch (...) {  // the exception that ended the backward is the one to see
    }
  }

  void finish() {
    const EngineCall call(*engine_);
    const int64_t begin_ns = engine_->begin_span();
    check([&](fsdp_error *error) {
      return fsdp_engine_finish_backward(engine_->core, error);
    });
    if (engine_->offload) engine_->offload->end_backward();
    fsdp_engine_note(engine_->core, nullptr, FSDP_TIMELINE_FINISH_BACKWARD,
                     begin_ns);
  }

  std::shared_ptr<Engine> engine_;
  bool has_run_ = false;
};

void queue_end_of_backward(const std::shared_ptr<Engine> &engine) {
  auto end = std::make_shared<BackwardEnd>(engine);
  torch::autograd::Engine::get_default_engine().queue_callback(
      [end] { end->run(); });
}

// The nodes that the running graph task will execute (not only capture what
// flows into them, as torch.autograd.grad does).
class NodesToRun {
 public:
  bool has(Node *node) const {
    return nodes_ != nullptr && nodes_->find(node) != nodes_->end() &&
           is_asked_for(node);
  }
  // Whether the task was asked for certain gradients only.
  bool is_partial() const { return infos_ != nullptr && !infos_->empty(); }
  // Whether it was asked to run `node`, be it in the graph or not.
  bool is_asked_for(Node *node) const {
    if (!is_partial()) return true;
    const auto info = infos_->find(node);
    return info != infos_->end() && info->second.needed_ &&
           info->second.captures_ == nullptr;
  }

 private:
  decltype(torch::autograd::get_current_graph_task_nodes_in_graph()) nodes_ =
      torch::autograd::get_current_graph_task_nodes_in_graph();
  decltype(torch::autograd::get_current_graph_task_exec_info()) infos_ =
      torch::autograd::get_current_graph_task_exec_info();
};

// Note [Split backward]
// A pipeline schedule may compute the gradients of a stage's inputs first and
// those of its parameters later, both with torch.autograd.grad: no gradient is
// accumulated, so no hook brings one. It looks for the parameters that are
// registered, and puts the gradients on them. These must be the plain ones, so
// a unit that keeps its block has them registered between such calls, and the
// reduction after the last one takes the gradients. Where the sharded ones were
// registered, the schedule finds nothing in the graph and goes on without their
// gradients (as with torch's fully_shard). That is noticed here, by a call for
// inputs alone while gradients are not reduced, and refused at the reduction: a
// user's own torch.autograd.grad has none of that kind.

// Tells the engine, once per graph task, how many gradients will come. A
// nested task (reentrant checkpointing of a part of the unit) may bring others,
// which do not count.
void expect_grads(Unit &unit, bool was_whole) {
  const int graph_task = torch::autograd::get_current_graph_task_id();
  if (unit.graph_task == graph_task) return;
  unit.graph_task = graph_task;
  const NodesToRun nodes;
  int64_t num_grads = 0;
  bool comes_all = !unit.ran_frozen;
  bool is_trained = false;
  for (Param &param : unit.params) {
    is_trained |= param.leaf().requires_grad();
    if (!param.accumulator || !nodes.has(param.accumulator.get())) {
      comes_all = false;
      continue;
    }
    param.expected_in = graph_task;
    num_grads++;
  }
  // One that never comes keeps the unit to the end of backward.
  const int64_t num_inputs = std::max<int64_t>(count_input_calls(unit), 1);
  if (num_grads == 0 && is_trained && !was_whole && nodes.is_partial() &&
      fsdp_unit_get_settings(unit.core)->sync == FSDP_SYNC_NONE) {
    unit.engine->split_unit = unit.name;
  }
  note_followers(unit);
  fsdp_unit_expect_grads(unit.core, num_grads + (comes_all ? 0 : num_inputs),
                         comes_all ? num_inputs : 0);
}

// `num_replaced`: in the forward whose backward begins.
void check_not_replaced(const Unit &unit, uint64_t num_replaced) {
  for (size_t i = 0; i < unit.params.size(); i++) {
    if (unit.params[i].replaced_at > num_replaced) {
      refuse_change(unit, std::to_string(i));
    }
  }
}

// Whether the task accumulates gradients of parameters. The same on all ranks,
// whatever their graphs: it is how the user called it.
bool asks_for_params(const Engine &engine) {
  const NodesToRun nodes;
  if (!nodes.is_partial()) return true;
  for (const Unit *unit : engine.units) {
    for (const Param &param : unit->params) {
      Node *node = param.accumulator.get();
      if (node != nullptr && nodes.is_asked_for(node)) return true;
    }
  }
  return false;
}

}  // namespace

void open_backward(const std::shared_ptr<Engine> &engine) {
  if (fsdp_engine_in_backward(engine->core)) return;
  queue_end_of_backward(engine);
  fsdp_engine_open_backward(engine->core);
  if (!asks_for_params(*engine)) fsdp_engine_leave_kept(engine->core);
}

namespace {

void run_pre_backward(Unit &unit, uint64_t num_replaced) {
  const OutsideTransforms outside;
  const std::shared_ptr<Engine> engine = unit.engine;
  check_left_shown(*engine);
  open_rows(*engine);
  if (unit.num_replaced != num_replaced) {
    check_not_replaced(unit, num_replaced);
  }
  const EngineCall call(*engine);
  const int64_t begin_ns = engine->begin_span();
  engine->recover();
  open_backward(engine);
  const bool was_whole = fsdp_unit_get_state(unit.core) == FSDP_UNIT_UNSHARDED;
  unit.guards_saved = unit.guards_saved || c10::GradMode::is_enabled();
  check([&](fsdp_error *error) {
    return fsdp_unit_pre_backward(unit.core, error);
  });
  expect_grads(unit, was_whole);
  fsdp_engine_note(engine->core, unit.core, FSDP_TIMELINE_PRE_BACKWARD,
                   begin_ns);
}

}  // namespace

// One forward call of a unit. Its outputs share it, so that the first gradient
// of a backward starts the unit's backward and later ones do nothing.
struct ForwardCall {
  std::shared_ptr<Unit> unit;  // the graph keeps the unit alive
  uint64_t num_replaced = 0;   // the unit's, in this forward
  int graph_task = -1;
  // What the call counts in, until a backward reaches it; null: nothing.
  std::shared_ptr<int64_t> num_awaited;

  // `node` made the output whose gradient has come. The output may be an input
  // of the next unit in forward. That unit is told first, so that it reshards
  // before this one prefetches.
  void on_grad(const Node *node) {
    if (unit->has_left_params) {
      throw std::runtime_error(
          "FSDP unit '" + unit->name +
          "': its parameters were converted (to(), half(), cuda()) or swapped "
          "(load_state_dict(assign=True)) after the forward of this backward: "
          "call backward first");
    }
    const int current = torch::autograd::get_current_graph_task_id();
    if (graph_task == current) {
      // The node may be on another stream, which has not waited for the gather.
      const EngineCall call(*unit->engine);
      return;
    }
    graph_task = current;
    if (const auto counted = std::exchange(num_awaited, nullptr)) --*counted;
    receive_input(*unit->engine, node);
    run_pre_backward(*unit, num_replaced);
  }
};

namespace {

// That of the forward which runs now.
std::shared_ptr<ForwardCall> forward_call_of(
    const std::shared_ptr<Unit> &unit) {
  std::shared_ptr<ForwardCall> call = unit->forward_call.lock();
  if (call) return call;
  call = std::make_shared<ForwardCall>();
  call->unit = unit;
  call->num_replaced = unit->num_replaced;
  unit->forward_call = call;
  if (unit->engine && !fsdp_engine_in_backward(unit->engine->core)) {
    call->num_awaited = unit->num_awaited;
    ++*call->num_awaited;
  }
  return call;
}

// Runs before the node that made an output.
class OutputHook : public torch::autograd::FunctionPreHook {
 public:
  OutputHook(std::shared_ptr<ForwardCall> call, const Node *node)
      : call_(std::move(call)), node_(node) {}

  variable_list operator()(const variable_list &grads) override {
    call_->on_grad(node_);
    return grads;
  }

 private:
  std::shared_ptr<ForwardCall> call_;
  const Node *node_;  // it owns the hook
};

// Not Tensor::register_hook, which makes four more objects.
void hook_tensor(const at::Tensor &tensor,
                 const std::shared_ptr<ForwardCall> &call) {
  const NodePtr &node = tensor.grad_fn();
  if (node) {
    node->add_tensor_pre_hook(std::make_unique<OutputHook>(call, node.get()));
    return;
  }
  tensor.register_hook(
      [call](const at::Tensor & /*grad*/) { call->on_grad(nullptr); });
}

// Runs before AccumulateGrad of a parameter that may be whole before its unit's
// own backward. The user may use it there, so that its gradient comes before
// the unit has taken the earlier one away, which has another shape.
class EarlyGradHook : public torch::autograd::FunctionPreHook {
 public:
  EarlyGradHook(std::shared_ptr<UnitHandle> handle, size_t index)
      : handle_(std::move(handle)), index_(index) {}

  variable_list operator()(const variable_list &grads) override {
    Unit *unit = handle_->unit;
    if (unit != nullptr && unit->params[index_].leaf().grad().defined()) {
      enter(*unit);
    }
    return grads;
  }

 private:
  static void enter(Unit &unit) {
    const std::shared_ptr<Engine> engine = unit.engine;
    check_left_shown(*engine);
    const EngineCall call(*engine);
    engine->recover();
    if (!fsdp_engine_in_backward(engine->core)) queue_end_of_backward(engine);
    check([&](fsdp_error *error) {
      return fsdp_unit_enter_backward(unit.core, error);
    });
  }

  std::shared_ptr<UnitHandle> handle_;
  size_t index_;
};

// Takes the gradient off a parameter. Undefined if it has none.
at::Tensor take_grad(Unit &unit, size_t index) {
  Param &param = unit.params[index];
  at::Tensor &leaf = param.leaf();
  at::Tensor grad = std::move(leaf.mutable_grad());
  leaf.mutable_grad() = at::Tensor();
  if (!grad.defined()) return grad;
  if (param.parallel_local.defined()) grad = local_grad(unit, index, grad);
  if (grad.is_sparse()) {
    throw std::invalid_argument(
        "FSDP unit '" + unit.name + "': parameter " + std::to_string(index) +
        " has a sparse gradient; use a dense one (Embedding(sparse=False))");
  }
  if (grad.requires_grad()) grad = grad.detach();
  if (param.shard_dim != 0 || !grad.is_contiguous()) {
    grad = in_memory_order(unit, param, grad);
  }
  return grad;
}

// With the engine's lock. Takes the token also if it fails.
void add_grad(Unit &unit, fsdp_grad &handed, at::Tensor grad) {
  handed.data = grad.const_data_ptr();
  handed.dtype = {static_cast<int32_t>(grad.scalar_type()),
                  static_cast<int32_t>(grad.element_size())};
  handed.token = grad.unsafeReleaseTensorImpl();
  check([&](fsdp_error *error) {
    return fsdp_unit_grad_ready(unit.core, &handed, error);
  });
}

// Runs after AccumulateGrad: hands the gradient to the engine.
class GradHook : public torch::autograd::FunctionPostHook {
 public:
  GradHook(std::shared_ptr<UnitHandle> handle, size_t index)
      : handle_(std::move(handle)), index_(index) {}

  variable_list operator()(const variable_list &outputs,
                           const variable_list & /*inputs*/) override {
    if (handle_->unit == nullptr) return outputs;
    const OutsideTransforms outside;
    at::Tensor grad = take_grad(*handle_->unit, index_);
    if (grad.defined()) hand_over(*handle_->unit, std::move(grad));
    return outputs;
  }

 private:
  void hand_over(Unit &unit, at::Tensor grad) {
    const std::shared_ptr<Engine> engine = unit.engine;
    fsdp_grad handed = {};
    handed.param = static_cast<int64_t>(index_);
    Param &param = unit.params[index_];
    handed.is_expected =
        param.expected_in == torch::autograd::get_current_graph_task_id();
    if (handed.is_expected) param.expected_in = -1;
    // Followers may free the last unit's gradients before this one's are made.
    if (handed.is_expected && fsdp_unit_pending_grads(unit.core) == 1) {
      follow_reductions(*engine);
    }
    check_left_shown(*engine);
    open_rows(*engine);
    const EngineCall call(*engine);
    const int64_t begin_ns = engine->begin_span();
    if (!fsdp_engine_in_backward(engine->core)) queue_end_of_backward(engine);
    call.take(grad);
    add_grad(unit, handed, std::move(grad));
    fsdp_engine_note(engine->core, unit.core, FSDP_TIMELINE_GRAD_READY,
                     begin_ns);
  }

  std::shared_ptr<UnitHandle> handle_;
  size_t index_;
};

// Note [Streams of accumulators]
// AccumulateGrad, and so our hooks of gradients, runs on the stream that was
// current when the node was made. Where that is not the step's stream, each
// gradient makes both wait (Note [Stream of a step]), and a capture fails. So
// if a step runs on another stream than the steps before (a capture does), its
// nodes are made anew. An older graph that still has them keeps them, with
// their hooks, until a forward finds that graph gone. So a unit notes the
// stream of its nodes, or none while they differ, and a forward on that stream
// does not look at them. Nodes of CPU units have no stream.
std::optional<c10::Stream> current_stream(const Unit &unit) {
  if (unit.device.is_cpu()) return std::nullopt;
  return c10::impl::VirtualGuardImpl(unit.device.type()).getStream(unit.device);
}

void drop_accumulators_of_other_streams(
    Unit &unit, const std::optional<c10::Stream> &stream) {
  for (Param &param : unit.params) {
    if (param.accumulator && param.accumulator.use_count() == 1 &&
        param.accumulator->stream() != stream) {
      unhook_accumulator(param);
    }
  }
}

bool are_accumulators_of(const Unit &unit,
                         const std::optional<c10::Stream> &stream) {
  return std::all_of(
      unit.params.begin(), unit.params.end(), [&](const Param &param) {
        return !param.accumulator || param.accumulator->stream() == stream;
      });
}

}  // namespace

void hook_accumulators(Unit &unit) {
  const std::optional<c10::Stream> stream = current_stream(unit);
  bool is_new = unit.accumulator_stream != stream;
  if (is_new) drop_accumulators_of_other_streams(unit, stream);
  for (size_t i = 0; i < unit.params.size(); i++) {
    Param &param = unit.params[i];
    // set_() makes torch forget a node; an older graph keeps it, and its hook.
    if (param.accumulator &&
        param.accumulator !=
            torch::autograd::impl::try_get_grad_accumulator(param.leaf())) {
      param.accumulator = nullptr;
    }
    if (param.accumulator || !param.leaf().requires_grad()) continue;
    is_new = true;
    param.accumulator = torch::autograd::impl::grad_accumulator(param.leaf());
    param.hook = param.accumulator->add_post_hook(
        std::make_unique<GradHook>(unit.handle, i));
    if ((unit.settings.shows_kept || unit.ran_as_root) &&
        unit.use_orig_params && !unit.is_by_rows) {
      param.accumulator->add_pre_hook(
          std::make_unique<EarlyGradHook>(unit.handle, i));
    }
  }
  // An older graph may have kept a parameter's earlier accumulator.
  if (is_new) {
    unit.accumulator_stream =
        are_accumulators_of(unit, stream) ? stream : std::nullopt;
  }
}

void take_assigned_grads(Engine &engine) {
  if (!engine.split_unit.empty()) {
    const std::string name = std::exchange(engine.split_unit, "");
    throw std::runtime_error(
        "FSDP unit '" + name +
        "': a pipeline schedule that splits backward "
        "(ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble, "
        "ScheduleDualPipeV) found no whole parameters, so their gradients are "
        "missing: call fully_shard(..., reshard_after_forward=False) on all "
        "modules of a stage, or give PipelineStage "
        "dw_builder=lambda: lambda: None, which does not split");
  }
  for (Unit *unit : engine.units) {
    if (!unit->is_by_rows) continue;
    for (size_t i = 0; i < unit->params.size(); i++) {
      at::Tensor grad = take_grad(*unit, i);
      if (!grad.defined()) continue;
      fsdp_grad handed = {};
      handed.param = static_cast<int64_t>(i);
      const EngineCall call(engine);
      add_grad(*unit, handed, std::move(grad));
    }
  }
}

void unhook_accumulator(Param &param) {
  if (!param.accumulator) return;
  param.accumulator->del_post_hook(param.hook);
  param.accumulator = nullptr;
}

void unhook_accumulators(Unit &unit) {
  for (Param &param : unit.params) unhook_accumulator(param);
}

}  // namespace fsdp_torch

extern "C" {

fsdp_status fsdp_torch_unit_hook_output(fsdp_torch_unit *unit, PyObject *tensor,
                                        bool *is_hooked, fsdp_error *error) {
  GUARDED(error) {
    std::shared_ptr<fsdp_torch::ForwardCall> call;
    for (const at::Tensor &output :
         fsdp_torch::layers_of(THPVariable_Unpack(tensor))) {
      if (!output.requires_grad()) continue;
      if (!call) call = fsdp_torch::forward_call_of(unit->self);
      fsdp_torch::hook_tensor(output, call);
      // An in-place operation on a view gives it a new node and drops its hook;
      // the node of its base stays in the graph.
      if (!output.is_view()) continue;
      const at::Tensor base(output._base());
      if (!base.is_leaf()) fsdp_torch::hook_tensor(base, call);
    }
    *is_hooked = call != nullptr;
    return FSDP_OK;
  };
}

bool fsdp_torch_unit_has_param(const fsdp_torch_unit *unit,
                               PyObject *tensor) noexcept {
  const at::Tensor &output = THPVariable_Unpack(tensor);
  if (!output.is_leaf()) return false;
  for (fsdp_torch::Param &param : unit->self->params) {
    if (param.leaf().is_same(output)) return true;
  }
  return false;
}

PyObject *fsdp_torch_copy_tensor(PyObject *tensor) {
  HANDLE_TH_ERRORS
  return THPVariable_Wrap(THPVariable_Unpack(tensor).clone());
  END_HANDLE_TH_ERRORS
}

bool fsdp_torch_has_listed_hooks(PyObject *tensor) noexcept {
  return reinterpret_cast<THPVariable *>(tensor)->backward_hooks != nullptr;
}

// Not through the attribute's setter: that makes autograd run the hooks.
void fsdp_torch_list_hooks(PyObject *tensor, PyObject *hooks) noexcept {
  reinterpret_cast<THPVariable *>(tensor)->backward_hooks = Py_NewRef(hooks);
}

int fsdp_torch_run_listed_hooks(PyObject *tensor, PyObject *hooks) {
  HANDLE_TH_ERRORS
  if (PyObject_SetAttrString(tensor, "_backward_hooks", hooks) < 0) return -1;
  if (THPVariable_Unpack(tensor).is_leaf()) return 0;
  PyObject *node = PyObject_GetAttrString(tensor, "grad_fn");
  if (node == nullptr) return -1;
  PyObject *result =
      PyObject_CallMethod(node, "_register_hook_dict", "O", tensor);
  Py_DECREF(node);
  Py_XDECREF(result);
  return result == nullptr ? -1 : 0;
  END_HANDLE_TH_ERRORS_RET(-1)
}

}  // extern "C"
