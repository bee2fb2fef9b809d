// Calls that may never return, such as those to a store whose process is
// stopped: on a thread that is left alone when the time is over.
#pragma once

#include <chrono>
#include <functional>

namespace fsdp_torch {

// Runs `body` on a thread of its own. After `limit` the thread is left alone
// with what it holds, and the result is false: `body` must own what it uses,
// and keep its exceptions, which nobody hears of.
bool run_within(std::chrono::milliseconds limit, std::function<void()> body);

}  // namespace fsdp_torch
