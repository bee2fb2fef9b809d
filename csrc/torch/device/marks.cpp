// Marks: events with a time, put on the lanes of a device for a timeline.
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>
#include <cmath>

#include "torch/device/provider.hpp"

namespace fsdp_torch {

struct Provider::Marks {
  std::vector<c10::Event> events;  // the first is at `begin_ns`
  size_t num_used = 0;
  int64_t begin_ns = 0;
};

namespace {

int64_t steady_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

c10::Stream Provider::stream_of(fsdp_lane lane) const {
  const c10::impl::VirtualGuardImpl guard(device_.type());
  return lane == FSDP_LANE_COMPUTE ? guard.getStream(device_) : streams_[lane];
}

// All are recorded once: a device makes an event at its first record, and a
// step should not.
void Provider::start_marks(int64_t num_marks) {
  marks_.reset();
  if (!has_streams_) return;
  auto marks = std::make_shared<Marks>();
  const c10::Stream stream = stream_of(FSDP_LANE_COMPUTE);
  marks->events.reserve(static_cast<size_t>(num_marks) + 1);
  for (int64_t i = 0; i <= num_marks; i++) {
    marks->events.emplace_back(device_.type(), c10::EventFlag::BACKEND_DEFAULT);
    marks->events.back().record(stream);
  }
  stream.synchronize();
  marks->events[0].record(stream);
  marks->events[0].synchronize();
  marks->begin_ns = steady_ns();
  marks_ = std::move(marks);
}

int32_t Provider::mark(fsdp_lane lane) noexcept {
  if (!marks_ || marks_->num_used + 1 >= marks_->events.size()) return -1;
  try {
    marks_->events[marks_->num_used + 1].record(stream_of(lane));
  } catch (...) {  // the timeline knows less
    return -1;
  }
  return static_cast<int32_t>(marks_->num_used++);
}

std::vector<int64_t> Provider::take_marks() noexcept {
  std::vector<int64_t> times;
  if (!marks_) return times;
  try {
    bool has_times = false;
    times.assign(marks_->num_used, -1);
    for (size_t i = 0; i < times.size(); i++) {
      const c10::Event &event = marks_->events[i + 1];
      event.synchronize();
      const double elapsed_ms = marks_->events[0].elapsedTime(event);
      has_times = has_times || elapsed_ms != 0.0;
      times[i] = marks_->begin_ns + std::llround(elapsed_ms * 1e6);
    }
    if (!has_times) times.clear();  // a device whose events know none
  } catch (...) {                   // those so far
  }
  marks_.reset();
  return times;
}

}  // namespace fsdp_torch
