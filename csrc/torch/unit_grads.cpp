// Gradients: what the user sees on the parameters, and what happens when the
// user sets or clears them.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include "torch/guard.hpp"
#include "torch/unit.hpp"

namespace fsdp_torch {
namespace {

const at::Tensor &sharded_grad_view(Unit &unit, Param &param) {
  Segment &segment = unit.segments[static_cast<size_t>(param.segment)];
  // `param.grad.data = ...` points our own view elsewhere: then make a new one.
  const bool is_ours = param.grad.defined() &&
                       is_over(param.grad, storage_of(segment.grad_shard));
  if (!is_ours && segment.grad_shard.defined()) {
    param.grad = make_view(
        segment.grad_shard.storage().getWeakStorageImpl().lock(),
        param.sharded.key_set(), segment.master, param.sharded.sizes(),
        segment.grad_shard.storage_offset() + param.in_shard.begin);
  }
  return param.grad;
}

void ensure_grad_shard(Segment &segment) {
  if (segment.grad_shard.defined()) return;
  segment.grad_shard = at::zeros_like(segment.shard);
}

// Where the user sees gradients: on the parameters or on the flat parameters.
struct GradPlace {
  at::Tensor holder;
  Segment *segment;
  Param *param;  // nullptr: the holder is the segment's flat parameter
};

std::vector<GradPlace> grad_places(Unit &unit) {
  std::vector<GradPlace> places;
  if (unit.use_orig_params) {
    places.reserve(unit.params.size());
    for (Param &param : unit.params) {
      Segment &segment = unit.segments[static_cast<size_t>(param.segment)];
      if (segment.layout->requires_grad) {
        places.push_back({param.tensor, &segment, &param});
      }
    }
  } else {
    for (Segment &segment : unit.segments) {
      if (segment.layout->requires_grad && segment.flat_param.defined()) {
        places.push_back({segment.flat_param, &segment, nullptr});
      }
    }
  }
  return places;
}

at::Tensor sharded_grad(Unit &unit, const GradPlace &place) {
  return place.param != nullptr ? sharded_grad_view(unit, *place.param)
                                : place.segment->grad_shard;
}

// The view of the unsharded gradient, over `data` from now on.
at::Tensor unsharded_grad(Unit &unit, const GradPlace &place, void *data) {
  Segment &segment = *place.segment;
  if (!segment.unsharded_grad) {
    segment.unsharded_grad = empty_storage(unit.device);
  }
  attach(*segment.unsharded_grad, data,
         segment.layout->padded_numel * c10::elementSize(segment.reduce),
         unit.device);
  at::Tensor &view = place.param != nullptr ? place.param->unsharded_grad
                                            : segment.flat_unsharded_grad;
  if (!view.defined()) {
    const std::vector<int64_t> flat = {segment.layout->padded_numel};
    view = make_view(
        segment.unsharded_grad, segment.shard.key_set(), segment.reduce,
        place.param != nullptr ? at::IntArrayRef(place.param->sizes)
                               : at::IntArrayRef(flat),
        place.param != nullptr ? place.param->unsharded.storage_offset() : 0);
  }
  return view;
}

// Copies in a gradient that the user set.
void adopt_grad(Unit &unit, const GradPlace &place, const at::Tensor &grad) {
  ensure_grad_shard(*place.segment);
  at::Tensor target = sharded_grad(unit, place);  // not `grad`, even if it was
  if (grad.numel() != target.numel()) {
    refuse(
        unit, "the gradient of a parameter", grad,
        c10::str("expected ", target.numel(), " elements, this rank's shard"));
  }
  target.copy_(grad.detach().reshape(target.sizes()));
}

bool take_one_grad(Unit &unit, const GradPlace &place) {
  at::Tensor &grad = place.holder.mutable_grad();
  if (!grad.defined()) return false;
  Segment &segment = *place.segment;
  const bool is_ours =
      (segment.grad_shard.defined() &&
       is_over(grad, storage_of(segment.grad_shard))) ||
      (segment.unsharded_grad && is_over(grad, segment.unsharded_grad.get()));
  if (!is_ours) adopt_grad(unit, place, grad);
  grad = at::Tensor();
  return true;
}

void zero_taken_grad(Unit &unit, const GradPlace &place, void *unsharded) {
  const at::Tensor sharded = sharded_grad(unit, place);
  if (sharded.defined()) sharded.zero_();
  if (unsharded != nullptr) unsharded_grad(unit, place, unsharded).zero_();
}

fsdp_status take_grads(void * /*context*/, void *owner, bool unsharded_live,
                       void *const *unsharded, bool *any_live,
                       fsdp_error *error) {
  GUARDED(error) {
    Unit &unit = unit_of(owner);
    std::vector<GradPlace> cleared;
    bool any = false;
    for (const GradPlace &place : grad_places(unit)) {
      if (take_one_grad(unit, place)) {
        any = true;
      } else {
        cleared.push_back(place);
      }
    }
    if (any) {
      for (const GradPlace &place : cleared) {
        const auto index = place.segment - unit.segments.data();
        zero_taken_grad(unit, place,
                        unsharded_live ? unsharded[index] : nullptr);
      }
    }
    *any_live = any;
    return FSDP_OK;
  };
}

fsdp_status show_grads(void * /*context*/, void *owner, fsdp_view view,
                       void *const *data, fsdp_error *error) {
  GUARDED(error) {
    Unit &unit = unit_of(owner);
    for (const GradPlace &place : grad_places(unit)) {
      if (view == FSDP_VIEW_UNSHARDED) {
        const auto index = place.segment - unit.segments.data();
        place.holder.mutable_grad() = unsharded_grad(unit, place, data[index]);
        continue;
      }
      // A rank that holds nothing of a parameter has no gradient of it, nor
      // has a parameter that was frozen after wrapping.
      if (place.param != nullptr &&
          (place.param->local_numel() == 0 || !place.holder.requires_grad())) {
        continue;
      }
      place.holder.mutable_grad() = sharded_grad(unit, place);
    }
    if (view == FSDP_VIEW_SHARDED) {
      for (Segment &segment : unit.segments) {
        if (segment.unsharded_grad) detach(unit, *segment.unsharded_grad);
      }
    }
    return FSDP_OK;
  };
}

fsdp_status grad_shard(void * /*context*/, void *owner, int64_t index,
                       void **data, fsdp_error *error) {
  GUARDED(error) {
    Segment &segment = unit_of(owner).segments[static_cast<size_t>(index)];
    ensure_grad_shard(segment);
    *data = segment.grad_shard.data_ptr();
    return FSDP_OK;
  };
}

void grad_release(void * /*context*/, void *token) {
  // The token is the reference that hooks.cpp released from its tensor.
  (void)c10::intrusive_ptr<c10::TensorImpl>::reclaim(
      static_cast<c10::TensorImpl *>(token));
}

}  // namespace

void add_grad_ops(fsdp_device_ops *ops) {
  ops->take_grads = take_grads;
  ops->take_full_grads = take_full_grads;
  ops->show_grads = show_grads;
  ops->grad_shard = grad_shard;
  ops->grad_release = grad_release;
}

}  // namespace fsdp_torch
