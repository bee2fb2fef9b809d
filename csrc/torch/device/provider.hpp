// The provider: the device table over ATen and c10 streams.
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
#include <optional>
#include <unordered_map>
#include <vector>

#include "base/op_log.h"
#include "port/device.h"
#include "runtime/engine.h"
#include "torch/groups/break_group.hpp"
#include "torch/groups/c10d_transport.hpp"
#include "torch/groups/post_mortem.hpp"

namespace fsdp_torch {

// A process group as the provider knows it.
struct Group : C10dGroup {
  // What carries the collectives, transports.hpp; null: a rank alone, or not
  // connected yet.
  std::shared_ptr<fsdp_transport> transport;
  std::shared_ptr<fsdp_transport> c10d;     // the one over c10d, once made
  std::string why_c10d;                     // why that one is used; else ""
  std::shared_ptr<PostMortem> post_mortem;  // null: a single rank
  bool has_met = false;                     // see PostMortem::meet
};

// A call of a group's transport, which knows when the device has done it.
struct LaneCall {
  fsdp_transport *transport = nullptr;  // null: none
  fsdp_channel channel = FSDP_CHANNEL_GATHER;
  uint64_t ticket = 0;
};

class Provider {
 public:
  explicit Provider(c10::Device device);

  // The table whose context is this object.
  fsdp_device_ops ops();

  void *allocate(int64_t nbytes);
  // After what COMPUTE does now.
  void free_block(void *block);
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
    newest_calls_[lane] = {};
    if (!has_streams_ || lane == FSDP_LANE_COMPUTE) {
      body();
      return;
    }
    const c10::StreamGuard guard(streams_[lane]);
    body();
  }

  // Makes a call of the group's transport a part of the lane's work; on a
  // stream lane it is there.
  void add_call(fsdp_lane lane, Group *group, fsdp_channel channel,
                uint64_t ticket);
  // Runs `step` after the lane's work so far; on a stream lane that is now.
  void add_step(fsdp_lane lane, std::function<void()> step);

  // What this rank issued, for reports of failures. Borrowed; set once.
  const fsdp_op_log *log = nullptr;
  // Whose timeline shows waits for collectives; likewise.
  const fsdp_engine *engine = nullptr;
  // All groups of the engine: where one fails, none can go on.
  std::function<std::vector<Group *>()> groups;
  // Throws: `operation` failed because of the group's ranks. The exception
  // tells what every rank was doing; ranks that wait elsewhere are told, too.
  [[noreturn]] void ranks_failed(const Group &group, const char *cause,
                                 const std::string &operation) const;
  // The same of a call of the group's transport; throws `error` if it was not
  // the ranks who failed.
  [[noreturn]] void call_failed(const Group &group, const fsdp_error &error,
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
  // Note [Lanes on a host device] in device.h.
  struct HostItem {
    Group *group;  // of a call; null: a step
    fsdp_channel channel;
    uint64_t ticket;
    int64_t sequence;  // of the call's operation, in `log`
    std::function<void()> step;
  };
  struct HostLane {
    std::deque<HostItem> items;
    uint64_t num_added = 0;
    uint64_t num_done = 0;
  };
  void run_until(HostLane &lane, uint64_t ticket);
  // After a failure it waits for calls all the same, and drops steps.
  void run_item(const HostItem &item, bool has_failed) const;
  // The same for a call while a timeline is recorded.
  void run_recorded(const HostItem &item, fsdp_timeline *timeline) const;
  void break_groups(const std::string &cause) const;
  // Publishes `text` in the engine's groups other than `group`.
  void tell_others(const Group &group, const std::string &text) const;
  // The text of a failure. Breaks the engine's groups.
  std::string report(const Group &group, const char *cause,
                     const std::string &operation) const;

  c10::Stream stream_of(fsdp_lane lane) const;
  void record_on_device(fsdp_event *event);

  c10::Device device_;
  struct Marks;
  std::shared_ptr<Marks> marks_;  // null: no timeline
  bool has_streams_;
  // By lane; COMPUTE is the current stream, whatever its entry says.
  std::vector<c10::Stream> streams_;
  // By stream lane: the call that is its newest work, if that is a call.
  mutable std::array<LaneCall, FSDP_NUM_LANES> newest_calls_;
  std::array<HostLane, FSDP_NUM_LANES> host_lanes_;
  struct Block {
    c10::DataPtr data;
    std::optional<c10::Stream> stream;  // where it is free; none on a host
  };
  std::unordered_map<void *, Block> blocks_;
  std::unordered_map<void *, at::Tensor> host_blocks_;
};

// A point on a lane, not recorded yet.
std::shared_ptr<fsdp_event> make_event();

// lanes.cpp
void add_lane_ops(fsdp_device_ops *ops);

// group_values.cpp
void add_group_ops(fsdp_device_ops *ops);
// The sum over the group's ranks, or the maximum, of a tensor of one element on
// the provider's device; may be the tensor itself. On the channel of
// reductions, which all work on the compute lane follows. Throws; `label` is
// the operation of an error.
at::Tensor reduce_scalar(Provider &provider, Group &group,
                         const at::Tensor &term, bool is_max,
                         const char *label);

// The provider behind the context of the port's functions.
inline Provider &provider_of(void *context) {
  return *static_cast<Provider *>(context);
}

}  // namespace fsdp_torch
