#include "torch/groups/within.hpp"

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

namespace fsdp_torch {

bool run_within(std::chrono::milliseconds limit, std::function<void()> body) {
  struct Shared {
    std::mutex mutex;
    std::condition_variable ended;
    bool has_ended = false;
  };
  const auto shared = std::make_shared<Shared>();
  std::thread([shared, body = std::move(body)] {
    try {
      body();
    } catch (...) {  // see the header
    }
    const std::lock_guard<std::mutex> lock(shared->mutex);
    shared->has_ended = true;
    shared->ended.notify_all();
  }).detach();
  std::unique_lock<std::mutex> lock(shared->mutex);
  return shared->ended.wait_for(lock, limit, [&] { return shared->has_ended; });
}

}  // namespace fsdp_torch
