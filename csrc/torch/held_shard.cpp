// Note [Shards in a forked child]
// A child made by fork has the parent's values of that moment, in all memory
// but the shards that ranks read in place: their pages are a file's, and the
// child sees what the parent writes later. A copy for each child would cost a
// data loader's workers, which read no parameter, as much memory as the shards.
// So the child is refused: its storages over such pages raise when they are
// read. Whoever wants the values clones them before the fork, or turns shards
// in place off (FSDP_C_TRANSPORT=copy). The handler runs in the child before
// anything else and costs a few stores for each shard. It needs what holds
// shards: all of them are in a list, whose lock fork holds.
#include "torch/held_shard.hpp"

#include <c10/core/CPUAllocator.h>
#include <c10/util/StringUtil.h>
#include <pthread.h>

#include <mutex>
#include <stdexcept>
#include <unordered_set>

#include "torch/compat.hpp"

namespace fsdp_torch {
namespace {

// What a storage over a region owns. torch's memory profiler sees a shard's.
struct HeldShard {
  std::shared_ptr<Region> region;
  void *data;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  bool is_shard;

  static void free(void *held);
};

// Never destroyed: storages may be freed when the process ends.
struct HeldShards {
  std::mutex mutex;
  std::unordered_set<HeldShard *> items;

  HeldShards();
};

HeldShards &held_shards() {
  static auto *const self = new HeldShards;
  return *self;
}

// The user may have given the storage other memory.
void refuse_in_child(const HeldShard &held) {
  const auto storage = held.storage.lock();
  if (!storage || storage->_mutable_data_ptr_no_checks().get() != held.data) {
    return;
  }
  refuse_access(
      *storage,
      c10::str("FSDP unit '", held.region->unit,
               "': this process was forked, and its shards are memory of its "
               "parent, where values change when the parent trains on. Clone "
               "what the child reads before the fork, or set "
               "FSDP_C_TRANSPORT=copy."));
}

void before_fork() {
  held_shards().mutex.lock();
}

void after_fork() {
  held_shards().mutex.unlock();
}

void after_fork_in_child() {
  for (const HeldShard *held : held_shards().items) {
    if (held->region->is_shared) refuse_in_child(*held);
  }
  held_shards().mutex.unlock();
}

HeldShards::HeldShards() {
  if (pthread_atfork(before_fork, after_fork, after_fork_in_child) != 0) {
    throw std::bad_alloc();
  }
}

void HeldShard::free(void *held) {
  const std::unique_ptr<HeldShard> self(static_cast<HeldShard *>(held));
  {
    HeldShards &all = held_shards();
    const std::lock_guard<std::mutex> lock(all.mutex);
    all.items.erase(self.get());
  }
  if (self->is_shard) c10::profiledCPUMemoryReporter().Delete(self->data);
}

c10::DataPtr held_in_region(c10::StorageImpl &storage,
                            const std::shared_ptr<Region> &region, void *data,
                            bool is_shard) {
  HeldShards &all = held_shards();
  auto held = std::make_unique<HeldShard>(HeldShard{
      region, data,
      c10::weak_intrusive_ptr<c10::StorageImpl>(
          c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(&storage)),
      is_shard});
  {
    const std::lock_guard<std::mutex> lock(all.mutex);
    all.items.insert(held.get());
  }
  return {data, held.release(), &HeldShard::free, c10::kCPU};
}

void let_go(void *storage) {
  delete static_cast<c10::Storage *>(storage);
}

}  // namespace

c10::intrusive_ptr<c10::StorageImpl> storage_in_region(
    const std::shared_ptr<Region> &region, void *data, int64_t nbytes) {
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), static_cast<size_t>(nbytes),
      c10::DataPtr(nullptr, c10::kCPU), c10::GetAllocator(c10::kCPU),
      /*resizable=*/true);
  c10::DataPtr held = held_in_region(*storage, region, data, true);
  c10::profiledCPUMemoryReporter().New(data, static_cast<size_t>(nbytes));
  storage->set_data_ptr_noswap(std::move(held));
  return storage;
}

void show_shard(c10::StorageImpl &storage, const at::Tensor &shard,
                const std::shared_ptr<Region> &region) {
  void *data = shard.mutable_data_ptr();
  if (region) {
    storage.set_data_ptr_noswap(held_in_region(storage, region, data, false));
    return;
  }
  auto whole = std::make_unique<c10::Storage>(shard.storage());
  storage.set_data_ptr_noswap(
      c10::DataPtr(data, whole.release(), &let_go, shard.device()));
}

}  // namespace fsdp_torch
