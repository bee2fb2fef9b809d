// Transports: what carries a process group's collectives.
#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <string>
#include <unordered_map>

#include "port/transport.h"
#include "torch/device/provider.hpp"

namespace fsdp_torch {

// `object` is a ProcessGroup, or null: this rank alone. GIL.
Group group_from(struct _object *object, c10::Device device);

// The ProcessGroup of group_from, or None. New reference. Throws. GIL.
struct _object *group_object(const Group &group);

// Gives the group its transport: shared memory for gloo (in each host, if there
// are several), NCCL on a device, else c10d, for the reason in
// `group.why_c10d`. All ranks of the group must come here, and wait for each
// other at the group's first time. Throws if a rank did not come. call_nbytes:
// the most that a rank hands to the others in one call, the same on all of them
// (Note [Size of rings]).
void connect(Group &group, c10::Device device, int64_t call_nbytes);

// Whether FSDP_C_TRANSPORT lets others read this rank's shards in place.
bool may_read_in_place();

// Lets the group's transport, if it is one of a host, make small calls one
// (transports/merging.h); the same for all groups over it, which `made` keeps.
using Mergings =
    std::unordered_map<fsdp_transport *, std::shared_ptr<fsdp_transport>>;
void merge_small_calls(Group &group, Mergings &made);

// Finds the group's transport if it has met already and has one of our own.
// Asks no other rank, but waits while a group of this process is meeting.
void look_up(Group &group, c10::DeviceType device_type);

}  // namespace fsdp_torch
