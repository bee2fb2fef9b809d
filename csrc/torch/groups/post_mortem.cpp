// The protocol of a post-mortem, over the group's store: each rank introduces
// its process, publishes where it is, and reads what the others published.
#include "torch/groups/post_mortem.hpp"

#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <unordered_map>
#include <utility>

#include "torch/groups/within.hpp"

namespace fsdp_torch {
namespace {

using Clock = std::chrono::steady_clock;

// How long a post-mortem waits for the other ranks.
constexpr std::chrono::milliseconds kLimit(5000);
constexpr std::chrono::milliseconds kPoll(50);
constexpr std::chrono::milliseconds kAskLimit(1000);
// Up to this many ranks each one reads who all others are; in larger groups
// only who rank 0 is, which often has the store.
constexpr int kMaxMetRanks = 64;

// How many operations are published: all that are kept, or a few in groups
// where every rank reads those of very many.
int64_t num_published(int world_size) {
  return world_size <= kMaxMetRanks ? FSDP_OP_LOG_CAPACITY : 4;
}

std::string process_key(const std::string &prefix, int rank) {
  return prefix + "process/" + std::to_string(rank);
}

std::string words_key(const std::string &prefix, int rank) {
  return prefix + "words/" + std::to_string(rank);
}

// "" if there is no such key.
std::string read(c10d::Store &store, const std::string &key) {
  return store.check({key}) ? store.get_to_str(key) : "";
}

// Words carry the instance of the group that they are about: a store may be
// used again for a group of the same name.
std::string sign(const Process &process, const std::string &words) {
  return process.start + "." + process.instance + " " + words;
}

std::string words_of(const Process &process, const std::string &signed_words) {
  const std::string signature = sign(process, "");
  if (signed_words.compare(0, signature.size(), signature) != 0) return "";
  return signed_words.substr(signature.size());
}

// Of each rank of the group; empty where the group does not know.
std::vector<uint64_t> global_ranks_of(c10d::ProcessGroup &process_group) {
  try {
    for (const c10::Device device : process_group.getDeviceTypes()) {
      const auto options =
          process_group.getBackend(device.type())->getBackendOptions();
      if (options) return options->global_ranks_in_group;
    }
  } catch (const std::exception &) {  // a group without backends
  }
  return {};
}

}  // namespace

// What the thread that asks the store and the one that waits for it share.
struct PostMortem::Inquiry {
  // Set before the thread starts.
  c10::intrusive_ptr<c10d::Store> store;
  std::string prefix;
  std::string mine;
  Process self;
  int rank = 0;
  int world_size = 0;
  Clock::time_point deadline;

  std::mutex mutex;  // of the rest
  RankAnswers answers;
};

PostMortem::PostMortem(c10d::ProcessGroup &process_group,
                       std::vector<uint64_t> global_ranks)
    : store_(process_group.getStore()),
      prefix_("fsdp_c/post_mortem/" + process_group.getGroupName() + "/"),
      rank_(process_group.getRank()),
      world_size_(process_group.getSize()),
      global_ranks_(std::move(global_ranks)),
      self_(this_process()),
      peers_(static_cast<size_t>(world_size_)) {
  peers_[static_cast<size_t>(rank_)] = self_;
}

std::string PostMortem::rank_name(int rank) const {
  const auto i = static_cast<size_t>(rank);
  const std::string name = "rank " + std::to_string(rank);
  if (i >= global_ranks_.size() || global_ranks_[i] == i) return name;
  return name + " (global rank " + std::to_string(global_ranks_[i]) + ")";
}

std::shared_ptr<PostMortem> PostMortem::of(
    const c10::intrusive_ptr<c10d::ProcessGroup> &process_group) noexcept {
  // An entry lives as long as units of its group do, and so does the group.
  static std::mutex mutex;
  static std::unordered_map<c10d::ProcessGroup *, std::weak_ptr<PostMortem>>
      known;
  try {
    if (!process_group || process_group->getSize() < 2) return nullptr;
    const std::lock_guard<std::mutex> lock(mutex);
    std::erase_if(known,
                  [](const auto &each) { return each.second.expired(); });
    std::weak_ptr<PostMortem> &entry = known[process_group.get()];
    std::shared_ptr<PostMortem> found = entry.lock();
    if (found) return found;
    found = std::make_shared<PostMortem>(*process_group,
                                         global_ranks_of(*process_group));
    entry = found;
    if (found->store_) {
      // Where the store's process is stopped, threads of torch's may hold its
      // connection for ever.
      run_within(kAskLimit,
                 [store = found->store_,
                  key = process_key(found->prefix_, found->rank_),
                  text = text_of(found->self_)] { store->set(key, text); });
    }
    return found;
  } catch (...) {  // a group of the user's own has no store
    return nullptr;
  }
}

void PostMortem::meet() noexcept {
  try {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (has_met_) return;
    has_met_ = true;
    if (!store_) return;
    const int end = world_size_ <= kMaxMetRanks ? world_size_ : 1;
    const auto found = std::make_shared<std::vector<Process>>(peers_);
    const bool is_complete = run_within(
        kAskLimit,
        [found, end, store = store_, prefix = prefix_, rank = rank_] {
          for (int other = 0; other < end; other++) {
            if (other == rank) continue;
            (*found)[static_cast<size_t>(other)] =
                process_of(read(*store, process_key(prefix, other)));
          }
        });
    if (is_complete) peers_ = *found;
  } catch (...) {  // they stay unknown
  }
}

void PostMortem::publish(const std::string &reason) noexcept {
  try {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!store_ || !report_.empty()) return;  // the report tells more
      if (!reason.empty() && has_reason_) return;
      has_reason_ = !reason.empty();
    }
    run_within(kAskLimit,
               [store = store_, key = words_key(prefix_, rank_),
                text = sign(self_, reason)] { store->set(key, text); });
  } catch (...) {  // no thread: the others learn less
  }
}

// Publishes, then asks until every rank has answered, or cannot, or the time is
// over.
void PostMortem::collect(Inquiry &inquiry) {
  RankAnswers &answers = inquiry.answers;
  c10d::Store &store = *inquiry.store;
  store.set(words_key(inquiry.prefix, inquiry.rank),
            sign(inquiry.self, inquiry.mine));
  for (int other = 0; other < inquiry.world_size; other++) {
    if (other == inquiry.rank) continue;
    // In large groups the introductions were not read before.
    const Process process =
        process_of(read(store, process_key(inquiry.prefix, other)));
    const std::lock_guard<std::mutex> lock(inquiry.mutex);
    if (process.is_known()) {
      answers.processes[static_cast<size_t>(other)] = process;
    }
  }
  for (bool is_complete = false; !is_complete;) {
    is_complete = true;
    for (int other = 0; other < inquiry.world_size; other++) {
      const auto i = static_cast<size_t>(other);
      if (other == inquiry.rank || !answers.positions[i].empty()) continue;
      // The state first: a process may publish and end between the two.
      const ProcessState state = state_of(answers.processes[i]);
      const std::string position = words_of(
          answers.processes[i], read(store, words_key(inquiry.prefix, other)));
      const std::lock_guard<std::mutex> lock(inquiry.mutex);
      answers.states[i] = state;
      answers.positions[i] = position;
      if (position.empty() && state != ProcessState::kEnded &&
          state != ProcessState::kStopped) {
        is_complete = false;
      }
    }
    answers.was_asked = true;
    if (is_complete || Clock::now() >= inquiry.deadline) return;
    std::this_thread::sleep_for(kPoll);
  }
}

// The store may be in the process that was killed or stopped: a thread asks it,
// which is left alone when the time is over.
std::string PostMortem::publish_and_collect(const std::string &mine) {
  const auto inquiry = std::make_shared<Inquiry>();
  RankAnswers &answers = inquiry->answers;
  inquiry->store = store_;
  inquiry->prefix = prefix_;
  inquiry->mine = mine;
  inquiry->self = self_;
  inquiry->rank = rank_;
  inquiry->world_size = world_size_;
  inquiry->deadline = Clock::now() + kLimit;
  for (int rank = 0; rank < world_size_; rank++) {
    answers.names.push_back(rank_name(rank));
  }
  answers.processes = peers_;
  answers.positions.resize(peers_.size());
  answers.states.resize(peers_.size());
  run_within(kLimit + 10 * kPoll, [inquiry] {
    try {
      collect(*inquiry);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(inquiry->mutex);
      inquiry->answers.has_failed = true;
    }
  });
  const std::lock_guard<std::mutex> lock(inquiry->mutex);
  for (size_t other = 0; other < peers_.size(); other++) {
    if (!answers.positions[other].empty()) continue;  // it could publish
    answers.states[other] = state_of(answers.processes[other]);
  }
  answers.positions[static_cast<size_t>(rank_)] = mine;
  return describe_ranks(answers, rank_);
}

std::string PostMortem::describe(const std::string &cause,
                                 const std::string &operation,
                                 const fsdp_op_log *log) noexcept {
  try {
    const std::string headline =
        c10::str(rank_name(rank_), " of ", world_size_, ": ", operation,
                 " failed (", cause, ").");
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!report_.empty()) {
      return headline + " The group had failed before: " + report_;
    }
    report_ = headline;
    report_ += store_ ? publish_and_collect(
                            log != nullptr
                                ? position_of(log, num_published(world_size_))
                                : position_at(operation))
                      : " The group has no store to ask the other ranks.";
    return report_;
  } catch (...) {  // no memory, no thread
    return cause;
  }
}

}  // namespace fsdp_torch
