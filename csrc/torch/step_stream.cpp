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

// A node of autograd without a stream of its own runs on the device's default
// stream. No capture can have that one, and a replay does nothing on it.
bool is_beside_capture(const Engine &engine, const c10::Stream &stream) {
  if (!fsdp_engine_is_capturing(engine.core)) return false;
  const c10::impl::VirtualGuardImpl guard(stream.device_type());
  return stream == guard.getDefaultStream(stream.device());
}

}  // namespace

EngineCall::EngineCall(Engine &engine) noexcept
    : EngineCall(engine, std::unique_lock<std::mutex>(engine.mutex)) {}

EngineCall::EngineCall(Engine &engine,
                       std::unique_lock<std::mutex> lock) noexcept
    : in_call_(engine.in_call), lock_(std::move(lock)) {
  in_call_ = true;
  if (!engine.provider.has_streams()) return;
  const c10::Device device = engine.provider.device();
  const c10::impl::VirtualGuardImpl guard(device.type());
  const c10::Stream current = guard.getStream(device);
  if (engine.step_stream == current) return;
  is_beside_ = engine.step_stream && is_beside_capture(engine, current);
  if (!is_beside_ && take_over(engine, current)) return;
  guard_.emplace(*engine.step_stream);
}

EngineCall::~EngineCall() {
  if (guard_ && !is_beside_) {
    wait_for(guard_->original_stream(), guard_->current_stream());
  }
  in_call_ = false;
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
