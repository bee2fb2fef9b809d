// The stages of a captured step: see Note [Captured steps] in capture.c.
#include "torch/bridge.h"
#include "torch/guard.hpp"
#include "torch/unit.hpp"

namespace fsdp_torch {
namespace {

template <typename Stage>
fsdp_status run_locked(Engine &engine, Stage &&stage) {
  const std::lock_guard<std::mutex> lock(engine.mutex);
  return stage(engine.core);
}

// A stage that brings the units to rest. What an aborted backward left is
// dropped first.
template <typename Stage>
fsdp_status run_to_rest(Engine &engine, Stage &&stage) {
  const fsdp_status status = run_locked(engine, [&](fsdp_engine *core) {
    engine.recover();
    return stage(core);
  });
  if (status == FSDP_OK) close_rows(engine);
  return status;
}

}  // namespace
}  // namespace fsdp_torch

extern "C" {

fsdp_status fsdp_torch_engine_begin_capture(fsdp_torch_engine *engine,
                                            fsdp_error *error) {
  GUARDED(error) {
    return fsdp_torch::run_to_rest(*engine->self, [&](fsdp_engine *core) {
      return fsdp_engine_begin_capture(core, error);
    });
  };
}

fsdp_status fsdp_torch_engine_fork_lanes(fsdp_torch_engine *engine,
                                         fsdp_error *error) {
  GUARDED(error) {
    return fsdp_torch::run_locked(*engine->self, [&](fsdp_engine *core) {
      return fsdp_engine_fork_lanes(core, error);
    });
  };
}

fsdp_status fsdp_torch_engine_join_lanes(fsdp_torch_engine *engine,
                                         fsdp_error *error) {
  GUARDED(error) {
    return fsdp_torch::run_to_rest(*engine->self, [&](fsdp_engine *core) {
      return fsdp_engine_join_lanes(core, error);
    });
  };
}

fsdp_status fsdp_torch_engine_end_capture(fsdp_torch_engine *engine,
                                          fsdp_error *error) {
  GUARDED(error) {
    return fsdp_torch::run_locked(*engine->self, [&](fsdp_engine *core) {
      return fsdp_engine_end_capture(core, error);
    });
  };
}

fsdp_status fsdp_torch_engine_begin_replay(fsdp_torch_engine *engine,
                                           fsdp_error *error) {
  GUARDED(error) {
    return fsdp_torch::run_to_rest(*engine->self, [&](fsdp_engine *core) {
      return fsdp_engine_begin_replay(core, error);
    });
  };
}

fsdp_status fsdp_torch_engine_release_capture(fsdp_torch_engine *engine,
                                              fsdp_error *error) {
  GUARDED(error) {
    return fsdp_torch::run_locked(*engine->self, [](fsdp_engine *core) {
      fsdp_engine_release_capture(core);
      return FSDP_OK;
    });
  };
}

}  // extern "C"
