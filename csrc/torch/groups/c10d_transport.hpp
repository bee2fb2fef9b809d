// The transport over c10d: for groups that no transport of our own carries.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <string>

#include "port/transport.h"

namespace c10d {
class ProcessGroup;
class Work;
}  // namespace c10d

namespace fsdp_torch {

using ProcessGroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

// What is to be known about a group's backend on a device.
struct GroupFacts {
  c10::Device device{c10::DeviceType::CPU};
  int64_t rank = 0;
  int64_t world_size = 1;
  // gloo over host memory. Over device memory gloo copies through the host, and
  // is one backend among others.
  bool is_gloo = false;
  // Without one (a group written in Python) only the calls that Python can
  // override work.
  bool has_backend = true;
};

// A process group. The last reference to it goes without the GIL.
struct C10dGroup : GroupFacts {
  // Not inline: files without c10d's headers hold groups, too.
  C10dGroup();
  C10dGroup(const C10dGroup &);
  C10dGroup &operator=(const C10dGroup &);
  ~C10dGroup();

  ProcessGroupPtr process_group;
};

std::shared_ptr<fsdp_transport> make_c10d_transport(const C10dGroup &group);

// On the current stream. `whole` and `piece` outlive the work.
c10::intrusive_ptr<c10d::Work> all_gather_over_c10d(const C10dGroup &group,
                                                    at::Tensor &whole,
                                                    at::Tensor &piece);

// In a catch block around a wait: the message of a failure of the ranks. Throws
// anything else again.
std::string failure_of_ranks();

}  // namespace fsdp_torch
