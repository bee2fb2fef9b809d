// What engines do before and after a call of autograd's engine, which has no
// hook there: fsdp_c/_torch_compat.py makes one.
//
// Note [Before a backward]
// Hooks tell a unit that its backward begins, with a gradient of an output. Two
// things must be so earlier:
//   - Leaves require grad where the user says so now. With fully_shard, and
//     with flat parameters, the user sets it on another object.
//   - Autograd saves a leaf itself, not a view. The outermost unit keeps its
//     block for backward, but its parameters show the shards there. A graph may
//     reach them before the output that the unit hooked (an auxiliary loss on
//     something that a module keeps), so they must be whole by then.
// Whose graph will run is not known yet, so this happens in all engines, which
// hide their parameters again if it was not theirs.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "torch/bridge.h"
#include "torch/guard.hpp"
#include "torch/step_stream.hpp"
#include "torch/unit.hpp"

namespace fsdp_torch {
namespace {

struct LiveEngines {
  std::mutex mutex;
  std::vector<std::weak_ptr<Engine>> engines;
};

// Never destroyed: an engine may outlive static objects.
LiveEngines &live_engines() {
  static auto *const live = new LiveEngines;
  return *live;
}

std::vector<std::shared_ptr<Engine>> engines_that_live() {
  LiveEngines &live = live_engines();
  const std::lock_guard<std::mutex> lock(live.mutex);
  std::vector<std::shared_ptr<Engine>> result;
  for (const auto &each : live.engines) {
    if (auto engine = each.lock()) result.push_back(std::move(engine));
  }
  return result;
}

// Note [Engines of other threads]
// Another thread that is in a call of its engine is in a step of its own, as a
// rule: this backward is not its graph's. Its call may be waiting for other
// ranks, and they for this thread: ranks may be threads of one process, and
// with two models in two threads each rank may have come to another one first.
// So nothing waits for such a call. An engine is left out also while another
// thread calls it between steps (a state dict beside training), which no
// thread may do to a model that is being trained. Who has the lock outside of a
// call soon gives it up, but may wait for the GIL.
//
// The engine's lock, or none: it is in another thread's call.
std::unique_lock<std::mutex> lock_of(Engine &engine) {
  std::unique_lock<std::mutex> lock(engine.mutex, std::try_to_lock);
  if (lock.owns_lock() || engine.in_call) return lock;
  const pybind11::gil_scoped_release no_gil;
  while (!lock.try_lock() && !engine.in_call) std::this_thread::yield();
  return lock;
}

// Whether there is something to do. It must not touch a stream otherwise: the
// backward may be another model's, inside a capture.
bool is_concerned(Engine &engine, bool begins) {
  if (engine.is_aborted || fsdp_engine_in_forward(engine.core) ||
      fsdp_engine_in_backward(engine.core)) {
    return false;
  }
  for (Unit *unit : engine.units) {
    if (begins) show_requires_grad(*unit);
  }
  return fsdp_engine_keeps_hidden(engine.core);
}

}  // namespace

void note_engine(const std::shared_ptr<Engine> &engine) {
  LiveEngines &live = live_engines();
  const std::lock_guard<std::mutex> lock(live.mutex);
  auto &engines = live.engines;
  engines.erase(std::remove_if(engines.begin(), engines.end(),
                               [](const auto &each) { return each.expired(); }),
                engines.end());
  engines.push_back(engine);
}

}  // namespace fsdp_torch

extern "C" fsdp_status fsdp_torch_around_backward(bool begins,
                                                  fsdp_error *error) {
  GUARDED(error) {
    for (const auto &engine : fsdp_torch::engines_that_live()) {
      auto lock = fsdp_torch::lock_of(*engine);
      if (!lock.owns_lock()) continue;
      if (!fsdp_torch::is_concerned(*engine, begins)) continue;
      const fsdp_torch::EngineCall call(*engine, std::move(lock));
      const fsdp_status status =
          fsdp_engine_show_hidden(engine->core, begins, error);
      if (status != FSDP_OK) return status;
    }
    return FSDP_OK;
  };
}

extern "C" fsdp_status fsdp_torch_expect_writes(fsdp_error *error) {
  GUARDED(error) {
    for (const auto &engine : fsdp_torch::engines_that_live()) {
      auto lock = fsdp_torch::lock_of(*engine);
      if (!lock.owns_lock() || engine->is_aborted ||
          !fsdp_engine_keeps_params(engine->core)) {
        continue;
      }
      const fsdp_torch::EngineCall call(*engine, std::move(lock));
      const fsdp_status status = fsdp_engine_expect_writes(engine->core, error);
      if (status != FSDP_OK) return status;
    }
    return FSDP_OK;
  };
}

extern "C" PyObject *fsdp_torch_leaf_of(PyObject *object) {
  HANDLE_TH_ERRORS
  if (!THPVariable_Check(object)) return Py_NewRef(object);
  const at::Tensor &tensor = THPVariable_Unpack(object);
  for (const auto &engine : fsdp_torch::engines_that_live()) {
    for (fsdp_torch::Unit *unit : engine->units) {
      for (fsdp_torch::Param &param : unit->params) {
        if (!param.sharded_param.param.is_same(tensor)) continue;
        return THPVariable_Wrap(param.leaf());
      }
    }
  }
  return Py_NewRef(object);
  END_HANDLE_TH_ERRORS
}
