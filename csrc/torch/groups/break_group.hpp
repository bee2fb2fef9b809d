// Breaking a group whose collectives cannot end: ranks that wait for this one
// fail at once.
#pragma once

#include <c10/core/Device.h>

#include <string>

namespace c10d {
class ProcessGroup;
}

namespace fsdp_torch {

struct Group;

// Whether `device`'s collectives go through gloo. Throws where there are none.
bool is_gloo(c10d::ProcessGroup &process_group, c10::DeviceType device);

// Ends what a gloo group has in flight on all ranks, and its connections.
// Cannot fail.
void break_gloo(c10d::ProcessGroup &process_group) noexcept;

// Ends what the group has in flight on all ranks: over a transport that can
// tell them `cause`, and over gloo. The group cannot be used any more. Cannot
// fail.
void break_group(const Group &group, const std::string &cause) noexcept;

}  // namespace fsdp_torch
