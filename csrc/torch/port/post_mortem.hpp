// After a failed collective: what every rank was doing, exchanged out of band
// through the group's store.
//
// Note [Post-mortem]
// Every rank introduces its process when it first uses a group. A rank whose
// collective fails publishes what it issued last, breaks the group, so that the
// ranks that wait for it fail too and do the same, and collects what the others
// say. A rank that says nothing is not waiting for a collective; whether its
// process is stopped or has ended can be seen on the same host. A rank that
// leaves forward or backward by an exception of its own says so too, for those
// that will wait for it in vain; the word is taken back when it goes on.
//
// The store may be in the process that was killed or stopped: it is asked by a
// thread that is left alone when the time is over.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "base/op_log.h"
#include "torch/port/processes.hpp"

namespace fsdp_torch {

// The last words of one process group's ranks. All units of the group share it;
// any thread may use it.
class PostMortem {
 public:
  // The one of `process_group`; made and introduced at the first call.
  static std::shared_ptr<PostMortem> of(
      const c10::intrusive_ptr<c10d::ProcessGroup> &process_group) noexcept;

  // Reads who the others are, once, while the store can be asked. All ranks
  // were introduced: a collective has come to its end. Returns within a second.
  // Cannot fail.
  void meet() noexcept;

  // Says that this rank went another way, for the reports of others; what was
  // said first stays until "" takes it back. Returns within a second. Cannot
  // fail.
  void say(const std::string &words) noexcept;

  // What is to be told about the failure of `operation`. Publishes what this
  // rank issued last (`log` may be null) and collects what the others did.
  // Once per group: later calls repeat it. Cannot fail.
  std::string describe(const std::string &cause, const std::string &operation,
                       const fsdp_op_log *log) noexcept;

  // Use `of`.
  PostMortem(c10d::ProcessGroup &process_group,
             std::vector<uint64_t> global_ranks);

 private:
  struct Answers;
  static void collect(const std::shared_ptr<Answers> &answers);
  std::string publish_and_collect(const std::string &mine);
  std::string compose(const Answers &answers) const;
  std::string rank_name(int rank) const;

  const c10::intrusive_ptr<c10d::Store> store_;
  const std::string prefix_;
  const int rank_;
  const int world_size_;
  const std::vector<uint64_t> global_ranks_;  // empty: unknown
  const Process self_;
  std::mutex mutex_;
  bool has_met_ = false;
  std::vector<Process> peers_;  // by rank; unknown ones among them
  bool has_said_ = false;
  std::string report_;  // of the first failure
};

// How long a post-mortem waits for the other ranks: FSDP_C_POST_MORTEM_SECONDS,
// or 5.
std::chrono::milliseconds post_mortem_limit();

// Whether `device`'s collectives go through gloo. Throws where there are none.
bool is_gloo(c10d::ProcessGroup &process_group, c10::DeviceType device);

// Ends what this rank has in flight in a gloo group, with an error, and closes
// its connections, so that ranks that wait for this one fail at once. The group
// cannot be used any more. Cannot fail.
void break_gloo(c10d::ProcessGroup &process_group) noexcept;

// "#17 all_gather of unit 'blocks.3'": the entry of the log, or the newest
// with a sequence of -1.
std::string operation_of(const fsdp_op_log *log, int64_t sequence);

}  // namespace fsdp_torch
