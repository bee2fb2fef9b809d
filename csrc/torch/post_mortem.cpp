#include "torch/post_mortem.hpp"

#include <chrono>
#include <sstream>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "torch/provider.hpp"

namespace fsdp_torch {
namespace {

// The ranks of a hung collective time out within this of each other.
constexpr std::chrono::seconds kGrace(5);
constexpr std::chrono::milliseconds kPoll(50);
constexpr int64_t kMaxListedRanks = 16;

// What `key` holds once it is there; empty after the deadline.
std::string read(c10d::Store &store, const std::string &key,
                 std::chrono::steady_clock::time_point deadline) {
  while (!store.check({key})) {
    if (std::chrono::steady_clock::now() >= deadline) return "";
    std::this_thread::sleep_for(kPoll);
  }
  return store.get_to_str(key);
}

std::string describe(Group &group, const std::string &cause,
                     const std::string &position) {
  c10d::ProcessGroup &process_group = *group.process_group;
  const int rank = process_group.getRank();
  const int world_size = process_group.getSize();
  const auto store = process_group.getStore();
  if (!store) return cause;
  const std::string prefix = "fsdp_c/failure/" + process_group.getGroupName() +
                             "/" + std::to_string(group.num_failures++) + "/";
  store->set(prefix + std::to_string(rank), position);

  const auto deadline = std::chrono::steady_clock::now() + kGrace;
  std::ostringstream text;
  text << "a collective failed on rank " << rank << " of " << world_size << " ("
       << cause << "). What each rank issued last:";
  bool differ = false;
  bool is_missing = false;
  int64_t num_listed = 0;
  for (int other = 0; other < world_size; other++) {
    const std::string theirs =
        other == rank ? position
                      : read(*store, prefix + std::to_string(other), deadline);
    differ = differ || (!theirs.empty() && theirs != position);
    is_missing = is_missing || theirs.empty();
    if (++num_listed > kMaxListedRanks) continue;
    text << (num_listed == 1 ? " rank " : "; rank ") << other << ": "
         << (theirs.empty() ? "no answer" : theirs);
  }
  if (num_listed > kMaxListedRanks) text << "; ...";
  text << ".";
  if (differ) {
    text << " The ranks are at different units: all must run the same units in "
            "the same order; TORCH_DISTRIBUTED_DEBUG=INFO finds the first "
            "difference.";
  }
  if (is_missing) {
    text << " A rank without an answer is not waiting for a collective: it "
            "skipped units, runs code of its own, or is dead.";
  }
  return text.str();
}

}  // namespace

std::string describe_failure(Group &group, const std::string &cause,
                             const std::string &position) noexcept {
  try {
    return describe(group, cause, position);
  } catch (...) {
    return cause;  // the store went with its host
  }
}

}  // namespace fsdp_torch
