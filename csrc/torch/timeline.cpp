// Timelines: who owns one while an engine writes it, and spans of the bridge.
#include <algorithm>
#include <chrono>

#include "torch/bridge.h"
#include "torch/guard.hpp"
#include "torch/unit.hpp"

using fsdp_torch::Engine;
using fsdp_torch::Unit;

namespace {

// Events are not cheap: a device may hold only so many.
constexpr int64_t kMaxMarks = 32768;

// CLOCK_MONOTONIC, as Python's time.monotonic_ns().
int64_t steady_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

extern "C" {

fsdp_status fsdp_torch_engine_start_timeline(fsdp_torch_engine *engine,
                                             int64_t capacity,
                                             int64_t num_steps,
                                             fsdp_error *error) {
  GUARDED(error) {
    Engine &self = *engine->self;
    const std::lock_guard<std::mutex> lock(self.mutex);
    self.recover();
    if (self.timeline != nullptr) {
      return FSDP_FAIL(error, FSDP_INVALID_STATE,
                       "this model is being recorded already; stop that "
                       "recording first");
    }
    fsdp_timeline *timeline = nullptr;
    fsdp_status status =
        fsdp_timeline_create(capacity, num_steps, steady_ns, &timeline, error);
    if (status != FSDP_OK) return status;
    status = fsdp_engine_set_timeline(self.core, timeline, error);
    if (status != FSDP_OK) {
      fsdp_timeline_destroy(timeline);
      return status;
    }
    self.timeline = timeline;
    try {
      self.provider.start_marks(std::min(capacity, kMaxMarks));
    } catch (const std::exception &) {  // host times only
    }
    return FSDP_OK;
  };
}

fsdp_timeline *fsdp_torch_engine_stop_timeline(
    fsdp_torch_engine *engine) noexcept {
  Engine &self = *engine->self;
  const std::lock_guard<std::mutex> lock(self.mutex);
  FSDP_IGNORE(fsdp_engine_set_timeline(self.core, nullptr, nullptr));
  fsdp_timeline *timeline = self.timeline;
  self.timeline = nullptr;
  self.mark_times = self.provider.take_marks();
  return timeline;
}

const int64_t *fsdp_torch_engine_mark_times(const fsdp_torch_engine *engine,
                                            int64_t *num_marks) noexcept {
  const std::vector<int64_t> &times = engine->self->mark_times;
  *num_marks = static_cast<int64_t>(times.size());
  return times.data();
}

bool fsdp_torch_engine_is_recording(const fsdp_torch_engine *engine) noexcept {
  return fsdp_engine_timeline(engine->self->core) != nullptr;
}

int64_t fsdp_torch_engine_begin_wholes(fsdp_torch_engine *engine,
                                       fsdp_timeline_kind kind,
                                       int32_t *mark) noexcept {
  Engine &self = *engine->self;
  *mark = -1;
  // The thread with the lock may want the GIL: do not wait for it.
  const std::unique_lock<std::mutex> lock(self.mutex, std::try_to_lock);
  if (!lock.owns_lock()) return 0;
  return fsdp_engine_begin_wholes(self.core, kind, mark);
}

void fsdp_torch_engine_end_wholes(fsdp_torch_engine *engine,
                                  fsdp_timeline_kind kind, int64_t begin_ns,
                                  int32_t mark, int64_t nbytes) noexcept {
  Engine &self = *engine->self;
  const std::unique_lock<std::mutex> lock(self.mutex, std::try_to_lock);
  if (!lock.owns_lock()) return;
  fsdp_engine_end_wholes(self.core, kind, begin_ns, mark, nbytes);
}

int64_t fsdp_torch_unit_begin_span(const fsdp_torch_unit *unit) noexcept {
  const Engine *engine = unit->self->engine.get();
  return engine == nullptr ? 0 : engine->begin_span();
}

void fsdp_torch_unit_end_span(const fsdp_torch_unit *unit,
                              fsdp_timeline_kind kind,
                              int64_t begin_ns) noexcept {
  if (begin_ns == 0 || unit->self->engine == nullptr) return;
  Engine &engine = *unit->self->engine;
  // The thread with the lock may want the GIL: do not wait for it.
  const std::unique_lock<std::mutex> lock(engine.mutex, std::try_to_lock);
  if (!lock.owns_lock()) return;
  fsdp_engine_note(engine.core, unit->self->core, kind, begin_ns);
}

}  // extern "C"
