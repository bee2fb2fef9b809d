// Saved tensors in host memory: see Note [Saved tensors] in offload.cpp.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/StorageImpl.h>

#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "offload/offload.h"
#include "port/device.h"
#include "torch/unit.hpp"

namespace fsdp_torch {

// A storage that saved tensors lie in; the core's token.
struct SavedStorage {
  StoragePtr storage;  // null: its bytes are on the host only
  int64_t nbytes = 0;
  int64_t num_tensors = 0;  // saved tensors in it
  int64_t num_unread = 0;   // of them, since it was brought back
  fsdp_offload_item *item = nullptr;
};

// One per engine. It has a lock of its own, which is taken inside the engine's
// or without it, and in which no Python runs.
class Offload {
 public:
  explicit Offload(Provider &provider);
  ~Offload();
  Offload(const Offload &) = delete;
  Offload &operator=(const Offload &) = delete;

  // A unit's forward begins that asked for it, or one inside such a unit.
  void enter(const Unit &unit);
  // It ends, also by an exception. Cannot fail.
  void leave(const Unit &unit) noexcept;
  // After a backward, also by an exception. Cannot fail.
  void end_backward() noexcept;
  // Whether `unit` is the outermost one whose forward runs.
  bool is_outermost(const Unit &unit) const { return outermost_ == &unit; }
  bool is_running() const { return outermost_ != nullptr; }

  // nullptr: the tensor is not worth it, or cannot be.
  SavedStorage *add(const at::Tensor &tensor);
  // Points a tensor without memory at what was saved.
  StoragePtr read(SavedStorage &saved);
  void drop(SavedStorage &saved) noexcept;

  fsdp_offload_stats stats() const;

 private:
  // Runs `body` with the lock. What the core lets go meanwhile is freed behind
  // it: a storage may have a Python object.
  template <typename Body>
  auto locked(Body &&body);

  fsdp_device_ops ops_;
  c10::Device device_;
  mutable std::mutex mutex_;
  fsdp_offload *core_ = nullptr;
  int64_t min_nbytes_ = 0;
  const Unit *outermost_ = nullptr;  // its forward runs. GIL.
  std::unordered_map<const c10::StorageImpl *, SavedStorage *> known_;
  std::vector<StoragePtr> freed_;
  std::vector<std::unique_ptr<SavedStorage>> forgotten_;

  friend struct OffloadCalls;
};

}  // namespace fsdp_torch
