// The text of a post-mortem: what each rank of a group was doing when a
// collective failed.
#pragma once

#include <string>
#include <vector>

#include "base/op_log.h"
#include "torch/groups/processes.hpp"

namespace fsdp_torch {

// What is known of a group's ranks, by rank.
struct RankAnswers {
  std::vector<std::string> names;  // "rank 1 (global rank 5)"
  std::vector<Process> processes;  // unknown ones among them
  std::vector<ProcessState> states;
  std::vector<std::string> positions;  // what each published; "": nothing
  bool was_asked = false;              // the store answered every question
  bool has_failed = false;
};

// "#17 all_gather of unit 'blocks.3'": the entry of the log, or the newest with
// a sequence of -1.
std::string operation_of(const fsdp_op_log *log, int64_t sequence);

// What a rank publishes that waits for a collective: its operations, newest
// first, one a line, at most `num_operations`. Any other text is the reason why
// a rank has left forward or backward.
std::string position_of(const fsdp_op_log *log, int64_t num_operations);
// The same of an operation that is not in a log.
std::string position_at(const std::string &operation);

// For an error message: which ranks are dead or stopped, the last operation of
// each, where they first differ. `rank` is this one.
std::string describe_ranks(const RankAnswers &answers, int rank);

}  // namespace fsdp_torch
