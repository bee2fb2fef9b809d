#include "torch/step_stream.hpp"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

#include "torch/unit.hpp"

namespace fsdp_torch {
namespace {

void wait_for(const c10::Stream &waiter, const c10::Stream &recorder) noexcept {
  try {
    c10::Event event(recorder.device_type());
    event.record(recorder);
    event.block(waiter);
  } catch (const std::exception &) {  // see the constructor of EngineCall
  }
}

bool is_between_steps(const Engine &engine) {
  return engine.is_aborted || (!fsdp_engine_in_forward(engine.core) &&
                               !fsdp_engine_in_backward(engine.core));
}

// A call on `current`, which is not the step's stream: takes over, between
// steps, or lets the step's wait for it. Whether it took over.
bool take_over(Engine &engine, const c10::Stream &current) noexcept {
  std::optional<c10::Stream> &stream = engine.step_stream;
  if (stream && !is_between_steps(engine)) {
    wait_for(*stream, current);
    return false;
  }
  if (stream) wait_for(current, *stream);
  stream = current;
  return true;
}

void leave_step_stream(const c10::StreamGuard &guard) noexcept {
  wait_for(guard.original_stream(), guard.current_stream());
}

}  // namespace

EngineCall::EngineCall(Engine &engine) noexcept
    : EngineCall(engine, std::unique_lock<std::mutex>(engine.mutex)) {}

EngineCall::EngineCall(Engine &engine,
                       std::unique_lock<std::mutex> lock) noexcept
    : lock_(std::move(lock)) {
  if (!engine.provider.has_streams()) return;
  const c10::Device device = engine.provider.device();
  const c10::impl::VirtualGuardImpl guard(device.type());
  const c10::Stream current = guard.getStream(device);
  if (engine.step_stream == current || take_over(engine, current)) return;
  guard_.emplace(*engine.step_stream);
}

EngineCall::~EngineCall() {
  if (guard_) leave_step_stream(*guard_);
}

void EngineCall::take(const at::Tensor &tensor) const {
  if (guard_) record_current_stream(tensor);
}

void record_current_stream(const at::Tensor &tensor) {
  const c10::impl::VirtualGuardImpl guard(tensor.device().type());
  guard.recordDataPtrOnStream(tensor.storage().data_ptr(),
                              guard.getStream(tensor.device()));
}

void forget_step_stream(Engine &engine) noexcept {
  engine.step_stream.reset();
}

}  // namespace fsdp_torch
