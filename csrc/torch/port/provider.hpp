// The provider: fills the port from ATen, c10 streams and c10d, for one device.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/intrusive_ptr.h>

#include <array>
#include <deque>
#include <functional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <unordered_map>
#include <vector>

#include "base/op_log.h"
#include "port/device_ops.h"
#include "port/transport.h"
#include "runtime/engine.h"
#include "torch/port/post_mortem.hpp"

namespace fsdp_torch {

// A process group and what the provider has to know about its backend.
struct Group {
  c10::intrusive_ptr<c10d::ProcessGroup> process_group;
  // gloo over host memory. Over device memory gloo copies through the host, and
  // is one backend among others.
  bool is_gloo = false;
  // Without one (a group written in Python) only the calls that Python can
  // override work.
  bool has_backend = true;
  // What carries the collectives, transports.hpp; null: c10d.
  std::shared_ptr<fsdp_transport> transport;
  std::string why_not;                      // there is none
  std::shared_ptr<PostMortem> post_mortem;  // null: a single rank
  bool has_met = false;                     // see PostMortem::meet
};

class Provider {
 public:
  explicit Provider(c10::Device device);

  // The table whose context is this object. The functions for views and
  // gradients are filled by unit_views.cpp.
  fsdp_device_ops ops();

  void *allocate(int64_t nbytes);
  void free_block(void *block, fsdp_event *last_use);
  // Empties the device allocator's cache.
  void release_memory() noexcept;
  void record(fsdp_event *event, fsdp_lane lane);
  void wait(fsdp_lane lane, fsdp_event *event);

  // A tensor over memory that somebody else owns.
  at::Tensor view(void *data, int64_t numel, fsdp_dtype dtype) const;

  // The same of host memory.
  static at::Tensor host_view(void *data, int64_t nbytes);

  void *allocate_on_host(int64_t nbytes);
  void free_on_host(void *block);
  // The host waits for the event.
  void synchronize(fsdp_event *event);

  // Runs `body` with the lane's stream as the current one.
  template <typename Body>
  void on_lane(fsdp_lane lane, Body &&body) const {
    if (!has_streams_ || lane == FSDP_LANE_COMPUTE) {
      body();
      return;
    }
    const c10::StreamGuard guard(streams_[lane]);
    body();
  }

  // Queues `work` of `group` on a host lane; makes a stream lane wait for it.
  void add_work(fsdp_lane lane, Group *group,
                c10::intrusive_ptr<c10d::Work> work);
  // Queues a collective that a host transport of `group` has started.
  void add_ticket(fsdp_lane lane, Group *group, fsdp_channel channel,
                  uint64_t ticket);
  // Runs `step` after the lane's work so far; on a stream lane that is now.
  void add_step(fsdp_lane lane, std::function<void()> step);

  // Waits for `work` of `group` now. A failure names what every rank was
  // doing; `operation` is what failed.
  void finish(Group *group, c10d::Work &work, const std::string &operation);

  // What this rank issued, for reports of failures. Borrowed; set once.
  const fsdp_op_log *log = nullptr;
  // Whose timeline hears of waits for collectives; likewise.
  const fsdp_engine *engine = nullptr;
  // All groups of the engine: where one fails, none can go on.
  std::function<std::vector<Group *>()> groups;
  // Throws: the group's transport failed. Says what every rank was doing, and
  // lets those know that wait elsewhere. sequence: in `log`; -1: the last.
  [[noreturn]] void transport_failed(Group *group, const char *cause,
                                     int64_t sequence) const;
  // The same; `operation` is what failed.
  [[noreturn]] void transport_failed(Group *group, const char *cause,
                                     const std::string &operation) const;

  // Marks: points in time on the lanes of a device, for one timeline
  // (marks.cpp). A host device has none. start throws; the others cannot fail.
  void start_marks(int64_t num_marks);
  // The number of a new mark, or -1: none is left.
  int32_t mark(fsdp_lane lane) noexcept;
  // When each happened, by the host's steady clock; waits for them. -1: not
  // known.
  std::vector<int64_t> take_marks() noexcept;

  bool has_streams() const { return has_streams_; }
  // The stream of a lane as the device's own handle.
  void *native_stream(fsdp_lane lane) const;
  c10::Device device() const { return device_; }

 private:
  // Note [Lanes on a host device] in device_ops.h.
  struct HostItem {
    c10::intrusive_ptr<c10d::Work> work;
    Group *group;      // of `work` or of `ticket`; null: a step
    int64_t sequence;  // of `work`, in `log`
    std::function<void()> step;
    fsdp_channel channel = FSDP_CHANNEL_GATHER;
    uint64_t ticket = 0;
  };
  struct HostLane {
    std::deque<HostItem> items;
    uint64_t num_added = 0;
    uint64_t num_done = 0;
  };
  void run_until(HostLane &lane, uint64_t ticket);
  void run_item(const HostItem &item, bool has_failed) const;
  // The same for a collective while a timeline is recorded.
  void run_recorded(const HostItem &item, fsdp_timeline *timeline) const;
  // Ends a collective of a host transport; only the first failure is described.
  void wait_for(const HostItem &item, bool has_failed) const;
  // The same for the operation `sequence` of `log`.
  void wait_for(Group *group, c10d::Work &work, int64_t sequence) const;
  // What waits in the engine's groups ends, on all ranks: over gloo, and over
  // transports that can tell the others `cause`.
  void break_groups(const std::string &cause) const;
  // Says so in the engine's groups other than `group`.
  void tell_others(const Group *group, const std::string &text) const;
  // What to tell of a failure. Breaks the engine's groups.
  std::string report(Group *group, const char *cause,
                     const std::string &operation) const;

  c10::Stream stream_of(fsdp_lane lane) const;

  c10::Device device_;
  struct Marks;
  std::shared_ptr<Marks> marks_;  // null: no timeline
  bool has_streams_;
  // By lane. COMPUTE is the current one; in its place stands that of the
  // blocks.
  std::vector<c10::Stream> streams_;
  std::array<HostLane, FSDP_NUM_LANES> host_lanes_;
  // A block of the arena, and the transports that know its memory.
  struct Block {
    c10::DataPtr data;
    std::vector<std::shared_ptr<fsdp_transport>> registered;
  };
  std::unordered_map<void *, Block> blocks_;
  std::unordered_map<void *, at::Tensor> host_blocks_;
};

// A point on a lane, not recorded yet.
std::shared_ptr<fsdp_event> make_event();

// collectives.cpp
void add_collective_ops(fsdp_device_ops *ops);
// The sum over the group's ranks, or the maximum, of a tensor of one element on
// the provider's device; may be the tensor itself. Goes through the group's
// transport where it has one, on the channel of reductions, which all work on
// the compute lane follows. Throws; `label` says what failed.
at::Tensor reduce_scalar(Provider &provider, Group &group,
                         const at::Tensor &term, bool is_max,
                         const char *label);

// The provider behind the context of the port's functions.
inline Provider &provider_of(void *context) {
  return *static_cast<Provider *>(context);
}

}  // namespace fsdp_torch
