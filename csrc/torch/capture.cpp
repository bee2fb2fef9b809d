// The stages of a captured step: see Note [Captured steps] in capture.c.
#include <c10/core/impl/VirtualGuardImpl.h>

#include "torch/bridge.h"
#include "torch/groups/nccl_group.hpp"
#include "torch/guard.hpp"
#include "torch/step_stream.hpp"
#include "torch/unit.hpp"

namespace fsdp_torch {
namespace {

void watch_replay_of(const Engine &engine) {
  const c10::Device device = engine.provider.device();
  const c10::impl::VirtualGuardImpl guard(device.type());
  const c10::Stream stream = guard.getStream(device);
  for (const Group *group : groups_of(engine)) {
    if (group->transport && is_nccl(*group->transport)) {
      watch_replay(*group->transport, stream);
    }
  }
}

fsdp_status run_stage(const Engine &engine, fsdp_torch_capture_stage stage,
                      fsdp_error *error) {
  fsdp_engine *core = engine.core;
  switch (stage) {
    case FSDP_TORCH_BEGIN_CAPTURE:
      return fsdp_engine_begin_capture(core, error);
    case FSDP_TORCH_FORK_LANES:
      return fsdp_engine_fork_lanes(core, error);
    case FSDP_TORCH_JOIN_LANES:
      return fsdp_engine_join_lanes(core, error);
    case FSDP_TORCH_END_CAPTURE:
      fsdp_engine_end_capture(core);
      return FSDP_OK;
    case FSDP_TORCH_BEGIN_REPLAY:
      return fsdp_engine_begin_replay(core, error);
    case FSDP_TORCH_END_REPLAY:
      break;
  }
  watch_replay_of(engine);
  return FSDP_OK;
}

bool brings_to_rest(fsdp_torch_capture_stage stage) {
  return stage == FSDP_TORCH_BEGIN_CAPTURE || stage == FSDP_TORCH_JOIN_LANES ||
         stage == FSDP_TORCH_BEGIN_REPLAY;
}

}  // namespace
}  // namespace fsdp_torch

extern "C" {

fsdp_status fsdp_torch_engine_run_capture_stage(fsdp_torch_engine *engine,
                                                fsdp_torch_capture_stage stage,
                                                fsdp_error *error) {
  GUARDED(error) {
    fsdp_torch::Engine &self = *engine->self;
    const bool rests = fsdp_torch::brings_to_rest(stage);
    fsdp_status status;
    {
      const fsdp_torch::EngineCall call(self);
      if (rests) self.recover();  // drops what an aborted backward left
      status = fsdp_torch::run_stage(self, stage, error);
      if (stage == FSDP_TORCH_BEGIN_CAPTURE)
        fsdp_torch::forget_step_stream(self);
    }
    if (rests && status == FSDP_OK) fsdp_torch::close_rows(self);
    return status;
  };
}

}  // extern "C"
