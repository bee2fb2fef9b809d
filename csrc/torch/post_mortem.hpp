// After a failed collective: what every rank was doing, exchanged out of band.
#pragma once

#include <string>

namespace fsdp_torch {

struct Group;

// Publishes `position` (what this rank issued last) in the group's store, waits
// a moment for those of the other ranks, and returns `cause` followed by all of
// them. A rank that publishes none is not waiting for a collective: it is
// elsewhere, or dead. Cannot fail: without a store it returns `cause`.
std::string describe_failure(Group &group, const std::string &cause,
                             const std::string &position) noexcept;

}  // namespace fsdp_torch
