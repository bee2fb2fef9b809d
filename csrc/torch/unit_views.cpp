// Views: what a unit's parameters and gradients point at, and what happens
// when the user points them elsewhere.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include "torch/guard.hpp"
#include "torch/unit.hpp"

namespace fsdp_torch {
namespace {

c10::intrusive_ptr<c10::StorageImpl> empty_storage(c10::Device device) {
  return c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), 0, c10::DataPtr(nullptr, device),
      /*allocator=*/nullptr, /*resizable=*/false);
}

// A view that may lie over a storage that holds nothing yet.
at::Tensor make_view(const c10::intrusive_ptr<c10::StorageImpl> &storage,
                     c10::DispatchKeySet keys, at::ScalarType dtype,
                     at::IntArrayRef sizes, int64_t offset) {
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), keys, c10::scalarTypeToTypeMeta(dtype));
  view.unsafeGetTensorImpl()->set_storage_offset(offset);
  view.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return view;
}

void attach(c10::StorageImpl &storage, void *data, int64_t nbytes,
            c10::Device device) {
  allow_access(storage);
  storage.set_data_ptr_noswap(c10::DataPtr(data, device));
  storage.set_nbytes(static_cast<size_t>(nbytes));
}

void detach(const Unit &unit, c10::StorageImpl &storage) {
  if (storage.nbytes() == 0) return;
  storage.set_data_ptr_noswap(c10::DataPtr(nullptr, unit.device));
  storage.set_nbytes(0);
  refuse_access(storage,
                "FSDP unit '" + unit.name +
                    "' is sharded now: this tensor was a view of its "
                    "unsharded parameters. Keep a clone, or read it inside "
                    "summon_full_params.");
}

bool is_over(const at::Tensor &tensor, const c10::StorageImpl *storage) {
  return tensor.has_storage() &&
         tensor.storage().unsafeGetStorageImpl() == storage;
}

const c10::StorageImpl *storage_of(const at::Tensor &tensor) {
  return tensor.storage().unsafeGetStorageImpl();
}

void show(Param &param, const at::Tensor &view) {
  param.tensor.unsafeGetTensorImpl()->shallow_copy_from(view.getIntrusivePtr());
}

[[noreturn]] void refuse(const Unit &unit, const std::string &what,
                         const at::Tensor &value, const std::string &remedy) {
  throw std::invalid_argument(c10::str(
      "FSDP unit '", unit.name, "': ", what, " was replaced by a ",
      value.scalar_type(), " tensor of shape ", value.sizes(), "; ", remedy));
}

// Copies a replaced parameter into `view`, its place in the shard or in the
// whole parameters.
void write_back(const Unit &unit, const Param &param, const at::Tensor &view,
                size_t index) {
  const at::Tensor value = param.tensor.detach();
  const int64_t numel = param.unsharded.numel();
  at::Tensor target = view;
  if (value.numel() == view.numel()) {
    target.copy_(value.reshape(view.sizes()));
  } else if (value.numel() == numel) {  // the whole one: keep this rank's part
    target.copy_(
        value.reshape({-1}).slice(0, param.in_param.begin, param.in_param.end));
  } else {
    refuse(unit, c10::str("parameter ", index), value,
           c10::str("expected ", view.numel(),
                    " elements (this rank's shard) "
                    "or ",
                    numel, " (all of it)"));
  }
}

// FSDP_VIEW_SHARDED: the flat parameters, which the optimizer steps.
void write_back_flat_params(Unit &unit) {
  for (size_t i = 0; i < unit.segments.size(); i++) {
    Segment &segment = unit.segments[i];
    if (!segment.flat_param.defined() ||
        is_over(segment.flat_param, storage_of(segment.shard))) {
      continue;
    }
    const at::Tensor value = segment.flat_param.detach();
    if (value.numel() != segment.shard.numel() ||
        value.scalar_type() != segment.master) {
      refuse(unit, c10::str("flat parameter ", i), value,
             c10::str("expected ", segment.shard.numel(), " elements of ",
                      segment.master));
    }
    segment.shard.copy_(value.reshape({-1}));
    segment.flat_param.unsafeGetTensorImpl()->shallow_copy_from(
        segment.shard.getIntrusivePtr());
  }
}

// Gradients -----------------------------------------------------------------

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

// The port --------------------------------------------------------------------

Unit &unit_of(void *owner) {
  return *static_cast<Unit *>(owner);
}

fsdp_status show_params(void * /*context*/, void *owner, fsdp_view view,
                        void *const *data, fsdp_error *error) {
  GUARDED(error) {
    Unit &unit = unit_of(owner);
    if (view == FSDP_VIEW_SHARDED) {
      show_sharded(unit);
      return FSDP_OK;
    }
    const bool is_full = view == FSDP_VIEW_FULL;
    for (size_t i = 0; i < unit.segments.size(); i++) {
      Segment &segment = unit.segments[i];
      attach(is_full ? *segment.full : *segment.unsharded, data[i],
             segment.layout->padded_numel *
                 static_cast<int64_t>(c10::elementSize(
                     is_full ? segment.master : segment.compute)),
             unit.device);
    }
    for (Param &param : unit.params) {
      show(param, is_full ? param.full : param.unsharded);
    }
    return FSDP_OK;
  };
}

fsdp_status take_params(void * /*context*/, void *owner, fsdp_view view,
                        void *const * /*data*/, fsdp_error *error) {
  GUARDED(error) {
    Unit &unit = unit_of(owner);
    const bool is_full = view == FSDP_VIEW_FULL;
    for (size_t i = 0; i < unit.params.size(); i++) {
      Param &param = unit.params[i];
      const at::Tensor &expected = is_full ? param.full : param.sharded;
      if (is_over(param.tensor, storage_of(expected))) continue;
      write_back(unit, param, expected, i);
      show(param, expected);
    }
    if (!is_full) write_back_flat_params(unit);
    return FSDP_OK;
  };
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

void add_view_ops(fsdp_device_ops *ops) {
  ops->show_params = show_params;
  ops->take_params = take_params;
  ops->take_grads = take_grads;
  ops->show_grads = show_grads;
  ops->grad_shard = grad_shard;
  ops->grad_release = grad_release;
}

void make_views(Unit &unit) {
  for (Segment &segment : unit.segments) {
    segment.unsharded = empty_storage(unit.device);
    segment.full = empty_storage(unit.device);
  }
  const bool is_alone = fsdp_flat_layout_world_size(unit.layout) == 1;
  for (size_t i = 0; i < unit.params.size(); i++) {
    Param &param = unit.params[i];
    const fsdp_param_slot *slot =
        fsdp_flat_layout_slot(unit.layout, static_cast<int64_t>(i));
    const Segment &segment = unit.segments[static_cast<size_t>(slot->segment)];
    const c10::DispatchKeySet keys = segment.shard.key_set();
    const std::vector<int64_t> local = {param.local_numel()};
    // A lone rank holds the whole parameter and can show its shape.
    param.sharded = make_view(
        segment.shard.storage().getWeakStorageImpl().lock(), keys,
        segment.master,
        is_alone ? at::IntArrayRef(param.sizes) : at::IntArrayRef(local),
        segment.shard.storage_offset() + param.in_shard.begin);
    param.unsharded = make_view(segment.unsharded, keys, segment.compute,
                                param.sizes, slot->offset);
    param.full = make_view(segment.full, keys, segment.master, param.sizes,
                           slot->offset);
  }
}

void show_sharded(Unit &unit) {
  for (Param &param : unit.params) show(param, param.sharded);
  for (Segment &segment : unit.segments) {
    detach(unit, *segment.unsharded);
    detach(unit, *segment.full);
  }
}

}  // namespace fsdp_torch
