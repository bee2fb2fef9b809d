// Memory of the core's that the user's tensors show: see Note [Lent memory].
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <utility>

#include "torch/unit.hpp"

namespace fsdp_torch {
namespace {

at::Tensor bytes_at(c10::Device device, void *data, int64_t nbytes) {
  const StoragePtr storage = empty_storage(device);
  attach(*storage, data, nbytes);
  return make_view(storage, keys_of(device), at::kByte, {nbytes}, 0);
}

// The storage owns a copy of what it shows.
void own_copy(const Unit &unit, c10::StorageImpl &storage) noexcept {
  try {
    const at::NoGradGuard no_grad;
    const c10::Device device = storage.device();
    const auto nbytes = static_cast<int64_t>(storage.nbytes());
    const at::Tensor copy =
        at::empty({nbytes}, at::TensorOptions(at::kByte).device(device));
    copy.copy_(bytes_at(device, storage.mutable_data(), nbytes));
    storage.set_data_ptr_noswap(
        copy.storage().unsafeGetStorageImpl()->set_data_ptr(
            c10::DataPtr(nullptr, device)));
  } catch (...) {  // no memory
    detach(unit, storage);
  }
}

}  // namespace

void lend(Lent &lent, c10::Device device, void *data, int64_t nbytes) {
  if (!lent.storage) lent.storage = empty_storage(device);
  attach(*lent.storage, data, nbytes);
  lent.data = data;
  lent.nbytes = nbytes;
}

void bring_back(c10::StorageImpl &storage, void *data) {
  if (data == nullptr || storage.data_ptr().get() == data) return;
  const at::NoGradGuard no_grad;
  const c10::Device device = storage.device();
  const auto nbytes = static_cast<int64_t>(storage.nbytes());
  bytes_at(device, data, nbytes)
      .copy_(bytes_at(device, storage.mutable_data(), nbytes));
  attach(storage, data, nbytes);
}

void disown(const Unit &unit, Lent &lent,
            const std::vector<at::Tensor *> &views) noexcept {
  if (lent.data == nullptr) return;
  size_t num_own = 1;
  bool is_shown = false;
  for (const at::Tensor *view : views) {
    if (!view->defined()) continue;
    num_own++;
    is_shown = is_shown || view->use_count() > 1;
  }
  if (!is_shown && lent.storage.use_count() <= num_own) return;
  own_copy(unit, *lent.storage);
  for (at::Tensor *view : views) *view = at::Tensor();
  const StoragePtr theirs = std::move(lent.storage);
  lend(lent, theirs->device(), lent.data, lent.nbytes);
}

void end_loan(const Unit &unit, Lent &lent,
              const std::vector<at::Tensor *> &views) noexcept {
  if (lent.data == nullptr) return;
  disown(unit, lent, views);
  detach(unit, *lent.storage);
  lent.data = nullptr;
}

void end_loan(const Unit &unit, const StoragePtr &lent) noexcept {
  if (lent.use_count() > 1) own_copy(unit, *lent);
}

}  // namespace fsdp_torch
