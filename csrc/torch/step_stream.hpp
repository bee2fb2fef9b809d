// The stream of a step, and calls into the engine, which run on it.
//
// Note [Stream of a step]
// The core takes COMPUTE for one lane of work, and the provider takes the
// current stream for COMPUTE. The user's code is not bound to one stream: a
// module may run on a side stream, autograd runs a node on the stream of its
// forward, AccumulateGrad on the one where it was made (by an older graph,
// perhaps), and the end of backward on the stream of who called backward().
//
// So a step has one stream: the one that is current when it begins, with the
// outermost forward or with the first gradient of a backward. Each call of the
// engine runs on it. Where the caller's stream is another one, the step's waits
// for it before the call: for inputs, gradients and the last use of parameters.
// The caller's waits for the step's after the call: for gathered parameters and
// reduced gradients. A call on the step's own stream costs a comparison. Of
// streams inside a module the engine knows nothing: its forward must join them.
//
// Between steps the stream of the next call takes over, after it has waited for
// the one before: blocks that this one kept may still be read there. Inside a
// capture such a wait is refused, and not needed, because the host waits for
// the device before it begins. For the same reason nothing in a capture waits
// for the device's default stream, nor that stream for the capture.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <atomic>
#include <mutex>
#include <optional>

#include "torch/transforms.hpp"

namespace fsdp_torch {

struct Engine;

// Holds the engine's lock, and has the step's stream as the current one. No
// transform is active: Note [Function transforms].
class EngineCall {
 public:
  // A wait that the device refuses is not reported here: a device that fails
  // also refuses the core's next call, which reports it.
  explicit EngineCall(Engine &engine) noexcept;
  // The caller has the engine's lock.
  EngineCall(Engine &engine, std::unique_lock<std::mutex> lock) noexcept;
  ~EngineCall();
  EngineCall(const EngineCall &) = delete;
  EngineCall &operator=(const EngineCall &) = delete;

  // The call may free the tensor, which came on the caller's stream.
  void take(const at::Tensor &tensor) const;

 private:
  OutsideTransforms outside_;
  std::atomic<bool> &in_call_;
  std::unique_lock<std::mutex> lock_;
  std::optional<c10::StreamGuard> guard_;  // the caller's stream is another one
  bool is_beside_ = false;                 // and neither waits for the other
};

// For a tensor that the engine copies and lets go: its memory, which may belong
// to another stream, is not used again before the current one has read it.
void record_current_stream(const at::Tensor &tensor);

// The next step does not wait for the stream of an earlier one. With the lock.
void forget_step_stream(Engine &engine) noexcept;

}  // namespace fsdp_torch
