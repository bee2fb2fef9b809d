// After a failed collective: what every rank was doing.
//
// Note [Post-mortem]
// The ranks tell each other through the group's store. Every rank introduces
// its process when it first uses a group. A rank whose collective fails breaks
// the group, so that the ranks that wait for it fail too; it publishes what it
// issued last and collects what the others published. A rank that publishes
// nothing is not waiting for a collective; on the same host the others can see
// whether its process is stopped or has ended. A rank that leaves forward or
// backward by an exception of its own publishes the reason, for ranks that will
// wait for it in vain, and withdraws it when it goes on.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "torch/groups/post_mortem_text.hpp"

namespace c10d {
class ProcessGroup;
class Store;
}  // namespace c10d

namespace fsdp_torch {

// What the ranks of one process group publish. All units of the group share it;
// any thread may use it.
class PostMortem {
 public:
  // The one of `process_group`; made and introduced at the first call, which
  // returns within a second although the store does not answer.
  static std::shared_ptr<PostMortem> of(
      const c10::intrusive_ptr<c10d::ProcessGroup> &process_group) noexcept;

  // Reads who the others are (in large groups: who rank 0 is), once, while the
  // store can be asked. All ranks were introduced: a collective has come to its
  // end, or the ranks have met. Returns within a second. Cannot fail.
  void meet() noexcept;

  // Publishes why this rank left; the first reason stays until "" withdraws it.
  // Returns within a second. Cannot fail.
  void publish(const std::string &reason) noexcept;

  // The report of the failure of `operation`. Publishes what this rank issued
  // last (`log` may be null) and collects what the others did. Once per group:
  // later calls repeat it. Cannot fail.
  std::string describe(const std::string &cause, const std::string &operation,
                       const fsdp_op_log *log) noexcept;

  // Use `of`.
  PostMortem(c10d::ProcessGroup &process_group,
             std::vector<uint64_t> global_ranks);

 private:
  struct Inquiry;
  static void collect(Inquiry &inquiry);
  std::string publish_and_collect(const std::string &mine);
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
  bool has_reason_ = false;
  std::string report_;  // of the first failure
};

}  // namespace fsdp_torch
