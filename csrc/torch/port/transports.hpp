// Transports: what carries a process group's collectives in place of c10d.
#pragma once

#include <c10/core/Device.h>

#include <string>

#include "port/transport.h"
#include "torch/port/provider.hpp"

namespace fsdp_torch {

// `object` is a ProcessGroup, or null: this rank alone. GIL.
Group group_from(struct _object *object, c10::Device device);

// Gives the group its transport where one is possible: shared memory for gloo
// ranks of one host, NCCL on a device. All ranks of the group must come here,
// and wait for each other at the group's first time. Without one the group
// keeps c10d, and `group.why_not` tells the reason. Throws if a rank did not
// come.
void connect(Group &group, c10::Device device);

// The same where the group has met already, else nothing; waits for nobody.
void look_up(Group &group, c10::DeviceType device_type);

}  // namespace fsdp_torch
