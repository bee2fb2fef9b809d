#include "torch/groups/post_mortem_text.hpp"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <sstream>
#include <unordered_map>
#include <utility>

namespace fsdp_torch {
namespace {

constexpr int kMaxListedRanks = 16;

// A position begins with this; the reason of a rank that left does not.
const std::string kAt = "at ";

bool is_departure(const std::string &position) {
  return !position.empty() && position.compare(0, kAt.size(), kAt) != 0;
}

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
std::vector<std::string> operations_of(const std::string &position) {
  std::vector<std::string> operations;
  if (position.empty() || is_departure(position)) return operations;
  std::istringstream lines(position.substr(kAt.size()));
  for (std::string line; std::getline(lines, line);) operations.push_back(line);
  return operations;
}

// "#17" of "#17 all_gather of unit 'blocks.3'".
std::string number_of(const std::string &operation) {
  return operation.substr(0, operation.find(' '));
}

// The first number that is another operation on some rank, after one that was
// the same on all; "" where there is none. Without a common one, numbers cannot
// be compared: a rank has reset its engine alone, or has several engines.
std::string first_difference(const std::vector<std::string> &positions) {
  std::unordered_map<std::string, std::pair<std::string, size_t>> known;
  std::vector<std::string> order;
  size_t num_ranks = 0;
  for (const std::string &each : positions) {
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
                     const std::vector<std::string> &positions) {
  int num_listed = 0;
  for (size_t rank = 0; rank < positions.size(); rank++) {
    for (const std::string &operation : operations_of(positions[rank])) {
      if (number_of(operation) != number) continue;
      if (++num_listed > kMaxListedRanks) continue;
      text << (num_listed == 1 ? " (rank " : "; rank ") << rank << ":"
           << operation.substr(number.size());
    }
  }
  if (num_listed > 0) text << ")";
}

// What follows a rank's number in the list.
std::string answer_of(const std::string &position, const Process &process,
                      ProcessState state) {
  if (is_departure(position)) return position;
  if (!position.empty()) return operations_of(position).front();
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

std::string position_at(const std::string &operation) {
  return kAt + operation;
}

std::string position_of(const fsdp_op_log *log, int64_t num_operations) {
  std::string text = position_at(operation_of(log, -1));
  const int64_t end = log != nullptr ? log->num_recorded : 0;
  const int64_t begin = std::max<int64_t>(end - num_operations, 0);
  for (int64_t i = end - 2; i >= begin; i--) {
    text += "\n" + operation_of(log, i);
  }
  return text;
}

std::string describe_ranks(const RankAnswers &answers, int rank) {
  const int world_size = static_cast<int>(answers.names.size());
  std::ostringstream text;
  const std::string &mine = answers.positions[static_cast<size_t>(rank)];
  const std::string difference = first_difference(answers.positions);
  const auto last_of = [&](const std::string &position) {
    return operations_of(position.empty() ? mine : position).front();
  };
  bool is_explained = false;
  bool differ = !difference.empty();
  bool has_unexplained = false;
  for (int other = 0; other < world_size; other++) {
    const auto i = static_cast<size_t>(other);
    if (other == rank || !answers.positions[i].empty()) continue;
    name_culprit(text, answers.names[i], answers.processes[i],
                 answers.states[i]);
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
  for (int other = 0; other < world_size; other++) {
    const auto i = static_cast<size_t>(other);
    const std::string &theirs = answers.positions[i];
    const bool is_down = answers.states[i] == ProcessState::kEnded ||
                         answers.states[i] == ProcessState::kStopped;
    const bool is_elsewhere = is_departure(theirs);
    is_explained = is_explained || is_down || is_elsewhere;
    differ = differ || (!is_elsewhere && last_of(theirs) != last_of(mine));
    has_unexplained = has_unexplained || (theirs.empty() && !is_down);
    if (other >= kMaxListedRanks) continue;
    text << (other == 0 ? " " : "; ") << answers.names[i] << ": "
         << answer_of(theirs, answers.processes[i], answers.states[i]);
  }
  if (world_size > kMaxListedRanks) text << "; ...";
  text << ".";
  if (differ && !is_explained) {
    text << " The ranks are at different units: all must run the same units in "
            "the same order; ";
    if (!difference.empty()) {
      text << "they first differ at " << difference;
      list_difference(text, difference, answers.positions);
      text << ", and values may be mixed up since; with "
              "TORCH_DISTRIBUTED_DEBUG=INFO the ranks serve each other, or all "
              "raise before that.";
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

}  // namespace fsdp_torch
