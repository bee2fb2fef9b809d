// The memory of a unit's shards, where other ranks can map it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <memory>
#include <string>

namespace fsdp_torch {

// See Note [Shards in place] in port/transport.h.
struct Region {
  std::string unit;  // its name
  std::shared_ptr<c10::DataPtr> space;
  int64_t nbytes = 0;
  bool is_shared = false;
};

// A storage over `nbytes` of a region from `data` on, which keeps the region.
// See Note [Shards in a forked child].
c10::intrusive_ptr<c10::StorageImpl> storage_in_region(
    const std::shared_ptr<Region> &region, void *data, int64_t nbytes);

// Lets `storage` show, in the place of its own memory, that of `shard`, a view
// of a unit's shard of the same size, and keep it. `region` is the unit's, or
// null.
void show_shard(c10::StorageImpl &storage, const at::Tensor &shard,
                const std::shared_ptr<Region> &region);

}  // namespace fsdp_torch
