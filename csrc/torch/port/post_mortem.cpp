// Publishes, collects and puts into words what the ranks of a group were doing
// when a collective failed.
#include "torch/port/post_mortem.hpp"

#include <ATen/ATen.h>
#include <Python.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstdlib>
#include <sstream>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <unordered_map>
#include <utility>

#include "torch/bridge.h"
#include "torch/port/transports.hpp"
#include "torch/port/within.hpp"

namespace fsdp_torch {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kDefaultLimit(5000);
constexpr std::chrono::milliseconds kPoll(50);
constexpr std::chrono::milliseconds kAskLimit(1000);
constexpr int kMaxListedRanks = 16;
// Up to this many ranks each one reads who all others are; in larger groups
// only who rank 0 is, which often has the store.
constexpr int kMaxMetRanks = 64;

// What a rank says that waits for a collective begins with this and goes on
// with its operations, newest first, one a line; else it has gone another way.
const std::string kAt = "at ";

bool is_departure(const std::string &words) {
  return !words.empty() && words.compare(0, kAt.size(), kAt) != 0;
}

// How many operations are published: all that are kept, or a few in groups
// where every rank reads those of very many.
int64_t num_published(int world_size) {
  return world_size <= kMaxMetRanks ? FSDP_OP_LOG_CAPACITY : 4;
}

std::string position_of(const fsdp_op_log *log, int world_size) {
  std::string text = kAt + operation_of(log, -1);
  const int64_t end = log != nullptr ? log->num_recorded : 0;
  const int64_t begin = std::max<int64_t>(end - num_published(world_size), 0);
  for (int64_t i = end - 2; i >= begin; i--) {
    text += "\n" + operation_of(log, i);
  }
  return text;
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

}  // namespace

std::chrono::milliseconds post_mortem_limit() {
  const char *text = std::getenv("FSDP_C_POST_MORTEM_SECONDS");
  if (text == nullptr) return kDefaultLimit;
  char *end = nullptr;
  const double seconds = std::strtod(text, &end);
  const bool is_usable =
      end != text && *end == '\0' && seconds >= 0 && seconds <= 3600;
  if (!is_usable) return kDefaultLimit;
  return std::chrono::milliseconds(static_cast<int64_t>(1000 * seconds));
}

std::string operation_of(const fsdp_op_log *log, int64_t sequence) {
  if (log == nullptr || log->num_recorded == 0) return "nothing yet";
  if (sequence < 0) sequence = log->num_recorded - 1;
  const fsdp_op_log_entry &entry =
      log->entries[sequence % FSDP_OP_LOG_CAPACITY];
  if (entry.sequence != sequence) {
    return c10::str("#", sequence, " (overwritten since)");
  }
  return c10::str("#", sequence, " ", entry.operation, " of unit '",
                  entry.unit != nullptr ? entry.unit : "-", "'");
}

bool is_gloo(c10d::ProcessGroup &process_group, c10::DeviceType device) {
  return process_group.getBackend(device)->getBackendName() == "gloo";
}

// A receive that runs out of time makes gloo end everything in flight on the
// same connections, and close them. Groups with several devices spread tags
// over them.
void break_gloo(c10d::ProcessGroup &process_group) noexcept {
  constexpr int kFirstTag = 1 << 30;
  constexpr int kNumTags = 4;
  const int world_size = process_group.getSize();
  if (world_size < 2) return;
  for (int i = 0; i < kNumTags; i++) {
    try {
      std::vector<at::Tensor> tensors = {at::empty({1}, at::kByte)};
      const auto work = process_group.recv(
          tensors, (process_group.getRank() + 1) % world_size, kFirstTag + i);
      if (work) work->wait(std::chrono::milliseconds(1));
    } catch (...) {  // that was the purpose
    }
  }
}

namespace {

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
struct PostMortem::Answers {
  // Set before the thread starts.
  c10::intrusive_ptr<c10d::Store> store;
  std::string prefix;
  std::string mine;
  Process self;
  int rank = 0;
  int world_size = 0;
  Clock::time_point deadline;

  std::mutex mutex;  // of the rest
  std::vector<Process> peers;
  std::vector<std::string> words;  // by rank, "": none
  std::vector<ProcessState> states;
  bool was_asked = false;  // the store answered every question
  bool has_failed = false;
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
      found->store_->set(process_key(found->prefix_, found->rank_),
                         text_of(found->self_));
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

void PostMortem::say(const std::string &words) noexcept {
  try {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!store_ || !report_.empty()) return;  // the failure says more
      if (!words.empty() && has_said_) return;
      has_said_ = !words.empty();
    }
    run_within(kAskLimit,
               [store = store_, key = words_key(prefix_, rank_),
                text = sign(self_, words)] { store->set(key, text); });
  } catch (...) {  // no thread: the others learn less
  }
}

// Publishes, then asks until every rank has answered, or cannot, or the time is
// over.
void PostMortem::collect(const std::shared_ptr<Answers> &answers) {
  Answers &all = *answers;
  c10d::Store &store = *all.store;
  const auto number = [](int rank) { return static_cast<size_t>(rank); };
  store.set(words_key(all.prefix, all.rank), sign(all.self, all.mine));
  for (int other = 0; other < all.world_size; other++) {
    if (other == all.rank) continue;
    // In large groups the introductions were not read before.
    const Process process =
        process_of(read(store, process_key(all.prefix, other)));
    const std::lock_guard<std::mutex> lock(all.mutex);
    if (process.is_known()) all.peers[number(other)] = process;
  }
  for (bool is_complete = false; !is_complete;) {
    is_complete = true;
    for (int other = 0; other < all.world_size; other++) {
      if (other == all.rank || !all.words[number(other)].empty()) continue;
      // The state first: a process may speak and end between the two.
      const ProcessState state = state_of(all.peers[number(other)]);
      const std::string words = words_of(
          all.peers[number(other)], read(store, words_key(all.prefix, other)));
      const std::lock_guard<std::mutex> lock(all.mutex);
      all.states[number(other)] = state;
      all.words[number(other)] = words;
      if (words.empty() && state != ProcessState::kEnded &&
          state != ProcessState::kStopped) {
        is_complete = false;
      }
    }
    all.was_asked = true;
    if (is_complete || Clock::now() >= all.deadline) return;
    std::this_thread::sleep_for(kPoll);
  }
}

std::string PostMortem::publish_and_collect(const std::string &mine) {
  const std::chrono::milliseconds limit = post_mortem_limit();
  const auto answers = std::make_shared<Answers>();
  answers->store = store_;
  answers->prefix = prefix_;
  answers->mine = mine;
  answers->self = self_;
  answers->rank = rank_;
  answers->world_size = world_size_;
  answers->deadline = Clock::now() + limit;
  answers->peers = peers_;
  answers->words.resize(peers_.size());
  answers->states.resize(peers_.size());
  run_within(limit + 10 * kPoll, [answers] {
    try {
      collect(answers);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(answers->mutex);
      answers->has_failed = true;
    }
  });
  const std::lock_guard<std::mutex> lock(answers->mutex);
  for (size_t other = 0; other < peers_.size(); other++) {
    if (!answers->words[other].empty()) continue;  // it could speak
    answers->states[other] = state_of(answers->peers[other]);
  }
  answers->words[static_cast<size_t>(rank_)] = mine;
  return compose(*answers);
}

namespace {

// Names a rank that cannot go on, and why.
void name_culprit(std::ostringstream &text, const std::string &rank,
                  const Process &process, ProcessState state) {
  if (state == ProcessState::kEnded) {
    text << " Dead: " << rank << ", " << name_of(process)
         << "; it ended, crashed or was killed, its own log may tell why.";
  } else if (state == ProcessState::kStopped) {
    text << " Stopped (SIGSTOP or a debugger): " << rank << ", "
         << name_of(process) << ".";
  }
}

// The operations of a rank that waits, newest first; none of another one.
std::vector<std::string> operations_of(const std::string &words) {
  std::vector<std::string> operations;
  if (words.empty() || is_departure(words)) return operations;
  std::istringstream lines(words.substr(kAt.size()));
  for (std::string line; std::getline(lines, line);) operations.push_back(line);
  return operations;
}

// "#17" of "#17 all_gather of unit 'blocks.3'".
std::string number_of(const std::string &operation) {
  return operation.substr(0, operation.find(' '));
}

// The first number that is another operation on some rank, after one that was
// the same on all; "" where there is none. Numbers mean nothing else where a
// rank has reset its engine alone, or has several.
std::string first_difference(const std::vector<std::string> &words) {
  std::unordered_map<std::string, std::pair<std::string, size_t>> known;
  std::vector<std::string> order;
  size_t num_ranks = 0;
  for (const std::string &each : words) {
    const std::vector<std::string> operations = operations_of(each);
    num_ranks += operations.empty() ? 0 : 1;
    if (num_ranks == 1 && order.empty()) {
      order.assign(operations.rbegin(), operations.rend());
    }
    for (const std::string &operation : operations) {
      auto &entry = known[number_of(operation)];
      if (entry.second == 0) entry.first = operation;
      if (entry.first == operation) entry.second++;
    }
  }
  bool have_agreed = false;
  for (const std::string &operation : order) {
    const std::string number = number_of(operation);
    const bool is_same = known[number].second == num_ranks;
    if (!is_same && have_agreed) return number;
    have_agreed = is_same;
  }
  return "";
}

// " (rank 0: ...; rank 1: ...)" of one number.
void list_difference(std::ostringstream &text, const std::string &number,
                     const std::vector<std::string> &words) {
  int num_listed = 0;
  for (size_t rank = 0; rank < words.size(); rank++) {
    for (const std::string &operation : operations_of(words[rank])) {
      if (number_of(operation) != number) continue;
      if (++num_listed > kMaxListedRanks) continue;
      text << (num_listed == 1 ? " (rank " : "; rank ") << rank << ":"
           << operation.substr(number.size());
    }
  }
  if (num_listed > 0) text << ")";
}

// What follows a rank's number in the list.
std::string answer_of(const std::string &words, const Process &process,
                      ProcessState state) {
  if (is_departure(words)) return words;
  if (!words.empty()) return operations_of(words).front();
  switch (state) {
    case ProcessState::kEnded:
      return "no answer, dead";
    case ProcessState::kStopped:
      return "no answer, stopped";
    case ProcessState::kRuns:
      return "no answer, " + name_of(process) + " runs";
    default:
      return process.is_known() ? "no answer, " + name_of(process)
                                : "no answer";
  }
}

}  // namespace

std::string PostMortem::compose(const Answers &answers) const {
  std::ostringstream text;
  const std::string &mine = answers.words[static_cast<size_t>(rank_)];
  const std::string difference = first_difference(answers.words);
  const auto last_of = [&](const std::string &words) {
    return operations_of(words.empty() ? mine : words).front();
  };
  bool is_explained = false;
  bool differ = !difference.empty();
  bool has_unexplained = false;
  for (int other = 0; other < world_size_; other++) {
    const auto i = static_cast<size_t>(other);
    if (other == rank_ || !answers.words[i].empty()) continue;
    name_culprit(text, rank_name(other), answers.peers[i], answers.states[i]);
  }
  if (!answers.was_asked) {
    text << (answers.has_failed
                 ? " The group's store is gone: the process that hosts it "
                   "(rank 0, or the launcher) is dead or cannot be reached."
                 : " The group's store does not answer: the process that hosts "
                   "it (rank 0, or the launcher) is stopped or cannot be "
                   "reached.");
  }
  text << " What each rank issued last:";
  for (int other = 0; other < world_size_; other++) {
    const auto i = static_cast<size_t>(other);
    const std::string &theirs = answers.words[i];
    const bool is_down = answers.states[i] == ProcessState::kEnded ||
                         answers.states[i] == ProcessState::kStopped;
    const bool is_elsewhere = is_departure(theirs);
    is_explained = is_explained || is_down || is_elsewhere;
    differ = differ || (!is_elsewhere && last_of(theirs) != last_of(mine));
    has_unexplained = has_unexplained || (theirs.empty() && !is_down);
    if (other >= kMaxListedRanks) continue;
    text << (other == 0 ? " " : "; ") << rank_name(other) << ": "
         << answer_of(theirs, answers.peers[i], answers.states[i]);
  }
  if (world_size_ > kMaxListedRanks) text << "; ...";
  text << ".";
  if (differ && !is_explained) {
    text << " The ranks are at different units: all must run the same units in "
            "the same order; ";
    if (!difference.empty()) {
      text << "they first differ at " << difference;
      list_difference(text, difference, answers.words);
      text << ", and values may be mixed up since; "
              "TORCH_DISTRIBUTED_DEBUG=INFO stops all ranks before that.";
    } else {
      text << "TORCH_DISTRIBUTED_DEBUG=INFO finds the first difference.";
    }
  }
  if (has_unexplained && answers.was_asked) {
    text << " A rank without an answer is not waiting for a collective: it "
            "skipped units, runs code of its own, or is dead.";
  }
  return text.str();
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
    report_ += store_ ? publish_and_collect(log != nullptr
                                                ? position_of(log, world_size_)
                                                : kAt + operation)
                      : " The group has no store to ask the other ranks.";
    return report_;
  } catch (...) {  // no memory, no thread
    return cause;
  }
}

}  // namespace fsdp_torch

namespace {

// What waits in the group ends on all ranks, over gloo and over shared memory.
void break_group(const c10::intrusive_ptr<c10d::ProcessGroup> &process_group,
                 const std::string &cause) noexcept {
  try {
    fsdp_torch::Group group;
    group.process_group = process_group;
    fsdp_torch::look_up(group, c10::kCPU);
    fsdp_transport *transport = group.transport.get();
    if (transport != nullptr && transport->ops->give_up != nullptr) {
      transport->ops->give_up(transport, cause.c_str());
    }
    if (fsdp_torch::is_gloo(*process_group, c10::kCPU)) {
      fsdp_torch::break_gloo(*process_group);
    }
  } catch (const std::exception &) {  // no backend for the CPU
  }
}

}  // namespace

extern "C" PyObject *fsdp_torch_describe_failure(PyObject *process_group,
                                                 const char *cause,
                                                 const char *operation) {
  HANDLE_TH_ERRORS
  const auto group = pybind11::handle(process_group)
                         .cast<c10::intrusive_ptr<c10d::ProcessGroup>>();
  std::string report = cause;
  {
    const pybind11::gil_scoped_release no_gil;
    const std::shared_ptr<fsdp_torch::PostMortem> post_mortem =
        fsdp_torch::PostMortem::of(group);
    if (post_mortem) {
      break_group(group, c10::str(operation, " failed (", cause, ")"));
      report = post_mortem->describe(cause, operation, nullptr);
    }
  }
  return PyUnicode_DecodeUTF8(
      report.data(), static_cast<Py_ssize_t>(report.size()), "replace");
  END_HANDLE_TH_ERRORS
}
