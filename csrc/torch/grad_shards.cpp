// The memory of sharded gradients: made when a reduction needs it, let go when
// the user has cleared them.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "torch/device/host_memory.hpp"
#include "torch/unit.hpp"

namespace fsdp_torch {
namespace {

// Whatever it contains. It comes and goes in every step: on a CPU its pages are
// kept.
at::Tensor empty_grads(const Unit &unit, at::ScalarType dtype, int64_t numel) {
  const at::TensorOptions options = shard_options(unit, dtype);
  if (!unit.device.is_cpu() || unit.offloads) {
    return at::empty({numel}, options);
  }
  at::Tensor made = at::empty({0}, options);
  const auto nbytes = static_cast<size_t>(numel) * c10::elementSize(dtype);
  c10::StorageImpl *storage = made.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(make_kept_host_memory(nbytes));
  storage->set_nbytes(nbytes);
  made.unsafeGetTensorImpl()->set_sizes_contiguous({numel});
  return made;
}

// Note [Sharded gradients of a unit by rows]
// Its segments are many and small, so the sharded gradients of all are one
// allocation. The first one that is needed makes it; the others wait in
// `next_grad`. Tensors of an earlier one are used again: a step makes none.
void make_next_grads(Unit &unit) {
  constexpr int64_t kAlignment = 64;
  std::vector<int64_t> begins;
  int64_t nbytes = 0;
  const auto is_wanted = [&](size_t index) {
    return !unit.segments[index].grad_shard.defined() &&
           fsdp_unit_is_trainable(unit.core, static_cast<int64_t>(index));
  };
  for (size_t i = 0; i < unit.segments.size(); i++) {
    const Segment &segment = unit.segments[i];
    begins.push_back((nbytes + kAlignment - 1) / kAlignment * kAlignment);
    if (!is_wanted(i)) continue;
    nbytes = begins.back() +
             segment.layout->shard_numel *
                 static_cast<int64_t>(c10::elementSize(segment.grad));
  }
  const at::Tensor all = empty_grads(unit, at::kByte, nbytes);
  const StoragePtr storage = all.storage().getWeakStorageImpl().lock();
  for (size_t i = 0; i < unit.segments.size(); i++) {
    Segment &segment = unit.segments[i];
    if (!is_wanted(i)) continue;
    const int64_t begin =
        begins[i] / static_cast<int64_t>(c10::elementSize(segment.grad));
    if (segment.idle_grad.defined()) {
      segment.next_grad = std::move(segment.idle_grad);
      show_at(segment.next_grad, storage, begin);
    } else {
      segment.next_grad = make_view(storage, all.key_set(), segment.grad,
                                    {segment.layout->shard_numel}, begin);
    }
  }
}

}  // namespace

void LeftTensor::leave(at::Tensor &tensor) {
  if (!tensor.defined()) return;
  left_ = tensor.getIntrusivePtr();
  tensor = at::Tensor();
}

void LeftTensor::recall(at::Tensor &tensor) {
  auto left = left_.lock();
  left_.reset();
  if (left.defined()) tensor = at::Tensor(std::move(left));
}

// Note [Gradients of the user]
// Between steps the unit does not hold a gradient that the user sees, so that
// its memory goes when the user clears it, as in torch's classes. On a CPU only
// flat gradients are left so: original and sharded parameters have many
// gradients, whose tensors are made once for the whole run there, and their
// memory goes with the next forward. Nor are those left that are still being
// reduced after backward (set_is_last_backward).
void leave_grads(Unit &unit) {
  for (Segment &segment : unit.segments) {
    if (segment.flat_param.defined() &&
        segment.flat_param.grad().is_same(segment.grad_shard)) {
      segment.left_grad.leave(segment.grad_shard);
      unit.grads_are_left = true;
    }
  }
  if (unit.device.is_cpu() || unit.offloads || !unit.use_orig_params ||
      fsdp_engine_has_open_reduces(unit.engine->core)) {
    return;
  }
  unit.grads_are_left = true;
  for (Segment &segment : unit.segments) {
    segment.next_grad = at::Tensor();
    if (!segment.grad_shard.defined()) continue;
    segment.left_storage = segment.grad_shard.storage().getWeakStorageImpl();
    segment.left_begin = segment.grad_shard.storage_offset();
    segment.grad_shard = at::Tensor();
  }
  for (Param &param : unit.params) {
    param.left_grad.leave(param.grad);
    ShardedParam &shown = param.sharded_param;
    shown.left_grad.leave(shown.grad);
    shown.left_grad_local.leave(shown.grad_local);
  }
}

void recall_grads(Unit &unit) {
  if (!unit.grads_are_left) return;
  unit.grads_are_left = false;
  for (Segment &segment : unit.segments) {
    segment.left_grad.recall(segment.grad_shard);
    StoragePtr storage = segment.left_storage.lock();
    segment.left_storage.reset();
    if (!storage) continue;
    segment.grad_shard =
        make_view(storage, keys_of(unit.device), segment.grad,
                  {segment.layout->shard_numel}, segment.left_begin);
  }
  for (Param &param : unit.params) {
    param.left_grad.recall(param.grad);
    ShardedParam &shown = param.sharded_param;
    shown.left_grad.recall(shown.grad);
    shown.left_grad_local.recall(shown.grad_local);
    if (shown.grad.defined() != shown.grad_local.defined()) {
      shown.grad = shown.grad_local = at::Tensor();
    }
  }
}

void ensure_grad_shard(Unit &unit, Segment &segment, bool is_replaced) {
  if (segment.grad_shard.defined()) return;
  if (unit.is_by_rows) {
    if (!segment.next_grad.defined()) make_next_grads(unit);
    segment.grad_shard = std::move(segment.next_grad);
    if (!is_replaced) segment.grad_shard.zero_();
    return;
  }
  segment.grad_shard =
      empty_grads(unit, segment.grad, segment.layout->shard_numel);
  if (!is_replaced) segment.grad_shard.zero_();
}

bool is_grad_shard_held(const Unit &unit, const Segment &segment) {
  const c10::StorageImpl *storage = storage_of(segment.grad_shard);
  size_t num_own = 0;
  const auto count = [&](const at::Tensor &tensor) {
    if (tensor.defined() && is_over(tensor, storage)) num_own++;
  };
  for (const Segment &each : unit.segments) {
    count(each.grad_shard);
    count(each.next_grad);
  }
  for (const Param &param : unit.params) {
    count(param.grad);
    count(param.sharded_param.grad_local);
  }
  return segment.grad_shard.storage().use_count() > num_own;
}

void renew_grad_shard(const Unit &unit, Segment &segment) {
  const at::Tensor old = segment.grad_shard;
  segment.grad_shard =
      empty_grads(unit, segment.grad, segment.layout->shard_numel);
  segment.grad_shard.copy_(old);
}

void drop_grad_shards(Unit &unit) {
  for (Segment &segment : unit.segments) {
    segment.next_grad = at::Tensor();
    at::Tensor view = std::move(segment.grad_shard);
    segment.grad_shard = at::Tensor();
    if (!unit.is_by_rows || !view.defined() || view.use_count() > 1) continue;
    if (!segment.no_grad) segment.no_grad = empty_storage(view.device());
    show_at(view, segment.no_grad, 0);
    segment.idle_grad = std::move(view);
  }
}

}  // namespace fsdp_torch
