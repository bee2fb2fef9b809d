// Gradients: what the user sees on the parameters, and what happens when the
// user sets or clears them.
#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <iterator>

#include "torch/guard.hpp"
#include "torch/step_stream.hpp"
#include "torch/unit.hpp"

namespace fsdp_torch {
namespace {

Segment &segment_of(Unit &unit, const Param &param) {
  return unit.segments[static_cast<size_t>(param.segment)];
}

size_t index_of(const Unit &unit, const GradPlace &place) {
  return index_of(unit, *place.segment);
}

int64_t nbytes_of(int64_t numel, at::ScalarType dtype) {
  return numel * static_cast<int64_t>(c10::elementSize(dtype));
}

// The places, found once: a hot path walks them.
const std::vector<GradPlace> &grad_places(Unit &unit) {
  if (!unit.grad_places.empty()) return unit.grad_places;
  if (unit.use_orig_params) {
    for (Param &param : unit.params) {
      Segment &segment = segment_of(unit, param);
      if (is_trainable(unit, segment)) {
        unit.grad_places.push_back(
            {unit.is_by_rows ? &param.sharded_param.param : &param.tensor,
             &segment, &param});
      }
    }
  } else {
    for (Segment &segment : unit.segments) {
      if (is_trainable(unit, segment) && segment.flat_param.defined()) {
        unit.grad_places.push_back({&segment.flat_param, &segment, nullptr});
      }
    }
  }
  return unit.grad_places;
}

// Views -----------------------------------------------------------------------

// The piece of `param` in a tensor like the segment's shard.
at::Tensor view_of_piece(const StoragePtr &storage, int64_t storage_offset,
                         c10::DispatchKeySet keys, at::ScalarType dtype,
                         const Param &param) {
  return make_view(storage, keys, dtype, param.sharded.sizes(),
                   storage_offset + param.in_shard.begin);
}

const at::Tensor &sharded_grad_view(Unit &unit, Param &param) {
  Segment &segment = segment_of(unit, param);
  // `param.grad.data = ...` points our own view elsewhere: then make a new one.
  const bool is_ours = param.grad.defined() && segment.grad_shard.defined() &&
                       is_over(param.grad, storage_of(segment.grad_shard));
  if (is_ours || !segment.grad_shard.defined()) return param.grad;
  StoragePtr storage = segment.grad_shard.storage().getWeakStorageImpl().lock();
  if (param.idle_grad.defined()) {
    param.grad = std::move(param.idle_grad);
    show_at(param.grad, storage,
            segment.grad_shard.storage_offset() + param.in_shard.begin);
  } else {
    param.grad = view_of_piece(storage, segment.grad_shard.storage_offset(),
                               param.sharded.key_set(), segment.grad, param);
  }
  return param.grad;
}

// Lets go of the gradient's memory, and keeps the view for the next gradient
// unless somebody else holds it: a step then makes no tensors.
void idle_grad_view(Unit &unit, Param &param) {
  Segment &segment = segment_of(unit, param);
  at::Tensor view = std::move(param.grad);
  param.grad = at::Tensor();
  if (!view.defined() || view.use_count() > 1 ||
      !segment.grad_shard.defined() ||
      !is_over(view, storage_of(segment.grad_shard))) {
    return;
  }
  if (!segment.no_grad) segment.no_grad = empty_storage(view.device());
  view.unsafeGetTensorImpl()->set_storage_keep_dtype(
      c10::Storage(segment.no_grad));
  param.idle_grad = std::move(view);
}

at::Tensor sharded_grad(Unit &unit, const GradPlace &place) {
  return place.param != nullptr ? sharded_grad_view(unit, *place.param)
                                : place.segment->grad_shard;
}

// The view of the unsharded gradient, over `data` from now on.
at::Tensor unsharded_grad(Unit &unit, const GradPlace &place, void *data) {
  Segment &segment = *place.segment;
  const int64_t numel = segment.layout->padded_numel;
  lend(segment.unsharded_grad, unit.device, data,
       nbytes_of(numel, segment.held));
  at::Tensor &view = place.param != nullptr ? place.param->unsharded_grad
                                            : segment.flat_unsharded_grad;
  if (view.defined()) return view;
  const c10::DispatchKeySet keys = keys_of(unit.device);
  if (place.param == nullptr) {
    view = make_view(segment.unsharded_grad.storage, keys, segment.held,
                     {numel}, 0);
  } else {
    view =
        make_view(segment.unsharded_grad.storage, keys, segment.held,
                  place.param->sizes, place.param->unsharded.storage_offset());
  }
  return view;
}

// The view of the partial gradient, over `data` from now on.
at::Tensor partial_grad(Unit &unit, const GradPlace &place, void *data) {
  Segment &segment = *place.segment;
  const int64_t numel = segment.layout->shard_numel;
  lend(segment.partial_grad, unit.device, data,
       nbytes_of(numel, segment.reduce));
  at::Tensor &view = place.param != nullptr ? place.param->partial_grad
                                            : segment.flat_partial_grad;
  if (view.defined()) return view;
  const c10::DispatchKeySet keys = keys_of(unit.device);
  const StoragePtr &storage = segment.partial_grad.storage;
  view = place.param == nullptr
             ? make_view(storage, keys, segment.reduce, {numel}, 0)
             : view_of_piece(storage, 0, keys, segment.reduce, *place.param);
  return view;
}

// Not a parameter that was frozen before it got one.
bool has_grad(const GradPlace &place) {
  return place.holder->requires_grad() || place.had_grad;
}

// A rank that holds nothing of a parameter has no gradient of it, unless that
// is a DTensor. One without elements has a gradient on all ranks, as unsharded.
bool has_sharded_piece(const Unit &unit, const GradPlace &place) {
  if (!has_grad(place)) return false;
  return place.param == nullptr || unit.is_by_rows ||
         place.param->local_numel() > 0 || place.param->numel() == 0;
}

// Taking ----------------------------------------------------------------------

// The gradient that show_grads shows in the place, or would show: what a
// no_sync() has left unreduced, or its partial sums, before the sharded one.
at::Tensor settable_grad(Unit &unit, const GradPlace &place) {
  Segment &segment = *place.segment;
  if (void *const data = segment.unsharded_grad.data) {
    return unsharded_grad(unit, place, data);
  }
  if (void *const data = segment.partial_grad.data) {
    return partial_grad(unit, place, data);
  }
  ensure_grad_shard(unit, segment, false);
  return sharded_grad(unit, place);
}

// Copies in a gradient that the user set.
void adopt_grad(Unit &unit, const GradPlace &place, const at::Tensor &grad) {
  at::Tensor target = settable_grad(unit, place);  // not `grad`, even if it was
  if (grad.numel() != target.numel()) {
    refuse(unit, "the gradient of a parameter", grad,
           c10::str("expected ", target.numel(),
                    " elements, its size on this rank now"));
  }
  target.copy_(grad.detach().reshape(target.sizes()));
  record_current_stream(grad);
}

bool lies_over(const at::Tensor &tensor, const StoragePtr &storage) {
  return storage && is_over(tensor, storage.get());
}

bool take_one_grad(Unit &unit, const GradPlace &place) {
  if (unit.is_by_rows) return take_sharded_grad(unit, *place.param);
  at::Tensor &grad = place.holder->mutable_grad();
  if (!grad.defined()) return false;
  const Segment &segment = *place.segment;
  const bool is_ours = (segment.grad_shard.defined() &&
                        is_over(grad, storage_of(segment.grad_shard))) ||
                       lies_over(grad, segment.unsharded_grad.storage) ||
                       lies_over(grad, segment.partial_grad.storage);
  if (!is_ours) adopt_grad(unit, place, grad);
  grad = at::Tensor();
  return true;
}

// Whether the user kept the sharded gradient that was cleared at the place.
bool is_kept(Unit &unit, const GradPlace &place) {
  const Segment &segment = *place.segment;
  if (!segment.grad_shard.defined()) return false;
  if (is_grad_shard_held(unit, segment)) return true;
  if (place.param == nullptr) return segment.grad_shard.use_count() > 1;
  if (unit.is_by_rows) return is_sharded_grad_held(*place.param);
  return place.param->grad.defined() && place.param->grad.use_count() > 1;
}

void zero_taken_grad(Unit &unit, const GradPlace &place, void *unsharded) {
  if (is_kept(unit, place)) renew_grad_shard(unit, *place.segment);
  const at::Tensor sharded = sharded_grad(unit, place);
  if (sharded.defined()) sharded.zero_();
  if (unsharded != nullptr) unsharded_grad(unit, place, unsharded).zero_();
  void *const partial = place.segment->partial_grad.data;
  if (partial != nullptr) partial_grad(unit, place, partial).zero_();
}

// Calls function(lent, views) for what the segments' gradients show of the
// core's memory.
template <typename Function>
void for_each_loan(Unit &unit, fsdp_view view, Function &&function) {
  const bool is_partial = view == FSDP_VIEW_PARTIAL;
  for (Segment &segment : unit.segments) {
    Lent &lent = is_partial ? segment.partial_grad : segment.unsharded_grad;
    if (lent.data == nullptr) continue;
    std::vector<at::Tensor *> views = {
        is_partial ? &segment.flat_partial_grad : &segment.flat_unsharded_grad};
    for (Param &param : unit.params) {
      if (&segment_of(unit, param) != &segment) continue;
      views.push_back(is_partial ? &param.partial_grad : &param.unsharded_grad);
    }
    function(lent, views);
  }
}

void bring_back_grads(Unit &unit) {
  for (const fsdp_view view : {FSDP_VIEW_UNSHARDED, FSDP_VIEW_PARTIAL}) {
    for_each_loan(unit, view, [](Lent &lent, const auto &) {
      bring_back(*lent.storage, lent.data);
    });
  }
}

// What the user holds of them keeps its values; the core's change now.
void disown_grads(Unit &unit) {
  for (const fsdp_view view : {FSDP_VIEW_UNSHARDED, FSDP_VIEW_PARTIAL}) {
    for_each_loan(unit, view, [&](Lent &lent, const auto &views) {
      disown(unit, lent, views);
    });
  }
}

// The port --------------------------------------------------------------------

fsdp_status take_grads(void * /*context*/, void *owner, bool unsharded_live,
                       void *const *unsharded, bool *any_live,
                       fsdp_error *error) {
  GUARDED(error) {
    Unit &unit = unit_of(owner);
    std::vector<const GradPlace *> cleared;
    // By rows the user does not see what is not reduced yet, nor clears it.
    const bool holds = unit.is_by_rows && fsdp_unit_holds_grads(unit.core);
    bool any = holds;
    recall_grads(unit);
    bring_back_grads(unit);
    grad_places(unit);
    for (GradPlace &place : unit.grad_places) {
      place.was_cleared = false;
      place.had_grad = take_one_grad(unit, place);
      if (place.had_grad) {
        any = true;
      } else {
        cleared.push_back(&place);
      }
    }
    disown_grads(unit);
    for (size_t i = 0; any && i < cleared.size(); i++) {
      zero_taken_grad(unit, *cleared[i],
                      unsharded_live && !holds
                          ? unsharded[index_of(unit, *cleared[i])]
                          : nullptr);
    }
    *any_live = any;
    return FSDP_OK;
  };
}

// Parameters that have gradients, or segments where flat ones have them.
std::unordered_set<const void *> holders_of_grads(Unit &unit) {
  std::unordered_set<const void *> holders;
  for (const GradPlace &place : grad_places(unit)) {
    if (!has_grad(place)) continue;
    if (place.param != nullptr) {
      holders.insert(place.param);
    } else {
      holders.insert(place.segment);
    }
  }
  return holders;
}

// Whole gradients stand on the original parameters, also where a flat parameter
// stands for them.
fsdp_status take_full_grads(void * /*context*/, void *owner, fsdp_view /*view*/,
                            void *const * /*data*/, bool *any_live,
                            fsdp_error *error) {
  GUARDED(error) {
    Unit &unit = unit_of(owner);
    bool any = false;
    const std::unordered_set<const void *> had_grad = holders_of_grads(unit);
    for (Param &param : unit.params) {
      const Segment &segment = segment_of(unit, param);
      if (!is_trainable(unit, segment)) continue;
      at::Tensor &grad = param.tensor.mutable_grad();
      at::Tensor whole = param.full_grad;
      if (!grad.defined()) {
        whole.zero_();
      } else if (!lies_over(grad, segment.full_grad)) {
        if (grad.numel() != whole.numel()) {
          refuse(unit, "the gradient of a parameter", grad,
                 c10::str("expected ", whole.numel(), " elements, all of it"));
        }
        whole.copy_(grad.detach().reshape(whole.sizes()));
      }
      any = any || (grad.defined() && (had_grad.count(&param) > 0 ||
                                       had_grad.count(&segment) > 0));
      grad = at::Tensor();
      param.full_grad = at::Tensor();
    }
    for (Segment &segment : unit.segments) {
      if (segment.full_grad) detach(unit, *segment.full_grad);
    }
    *any_live = any;
    return FSDP_OK;
  };
}

void show_full_grads(Unit &unit, c10::Device device, void *const *data) {
  const c10::DispatchKeySet keys = keys_of(device);
  for (size_t i = 0; i < unit.segments.size(); i++) {
    Segment &segment = unit.segments[i];
    if (!is_trainable(unit, segment)) continue;
    segment.full_grad = empty_storage(device);
    attach(*segment.full_grad, data[i],
           nbytes_of(segment.layout->padded_numel, segment.grad));
  }
  // Of one that was frozen since, this rank may not know whether others had a
  // gradient: zeros then.
  for (Param &param : unit.params) {
    const Segment &segment = segment_of(unit, param);
    if (!is_trainable(unit, segment)) continue;
    param.full_grad = make_view(segment.full_grad, keys, segment.grad,
                                param.sizes, param.unsharded.storage_offset());
    param.tensor.mutable_grad() = param.full_grad;
  }
}

fsdp_status show_grads(void * /*context*/, void *owner, fsdp_view view,
                       void *const *data, fsdp_error *error) {
  GUARDED(error) {
    Unit &unit = unit_of(owner);
    if (view == FSDP_VIEW_FULL || view == FSDP_VIEW_FULL_ON_HOST) {
      show_full_grads(unit, view == FSDP_VIEW_FULL ? unit.device : c10::kCPU,
                      data);
      return FSDP_OK;
    }
    if (unit.is_by_rows) {
      // At the end of backward, with the GIL; who follows has seen them.
      unit.grads_are_new = view == FSDP_VIEW_SHARDED && !unit.follower;
      return FSDP_OK;
    }
    recall_grads(unit);
    for (const GradPlace &place : grad_places(unit)) {
      if (view == FSDP_VIEW_UNSHARDED) {
        if (!has_grad(place)) continue;
        place.holder->mutable_grad() =
            unsharded_grad(unit, place, data[index_of(unit, place)]);
        continue;
      }
      if (!has_sharded_piece(unit, place) || place.was_cleared) continue;
      place.holder->mutable_grad() =
          view == FSDP_VIEW_PARTIAL
              ? partial_grad(unit, place, data[index_of(unit, place)])
              : sharded_grad(unit, place);
    }
    if (view == FSDP_VIEW_SHARDED) leave_grads(unit);
    return FSDP_OK;
  };
}

void keep_grads(void * /*context*/, void *owner, fsdp_view view) {
  Unit &unit = unit_of(owner);
  for_each_loan(unit, view, [&](Lent &lent, const auto &views) {
    end_loan(unit, lent, views);
  });
}

fsdp_status grad_shard(void * /*context*/, void *owner, int64_t index,
                       bool is_replaced, void **data, fsdp_error *error) {
  GUARDED(error) {
    Unit &unit = unit_of(owner);
    Segment &segment = unit.segments[static_cast<size_t>(index)];
    recall_grads(unit);
    ensure_grad_shard(unit, segment, is_replaced);
    *data = segment.grad_shard.data_ptr();
    return FSDP_OK;
  };
}

bool grads_live(void * /*context*/, void *owner) {
  const auto &places = grad_places(unit_of(owner));
  return std::any_of(places.begin(), places.end(), [](const auto &place) {
    return place.holder->grad().defined();
  });
}

void grads_free(void * /*context*/, void *owner) {
  Unit &unit = unit_of(owner);
  recall_grads(unit);
  for (Param &param : unit.params) {
    if (unit.is_by_rows) free_sharded_grad(unit, param);
    idle_grad_view(unit, param);
  }
  drop_grad_shards(unit);
}

void grad_release(void * /*context*/, void *token) {
  // The token is the reference that hooks.cpp released from its tensor.
  (void)c10::intrusive_ptr<c10::TensorImpl>::reclaim(
      static_cast<c10::TensorImpl *>(token));
}

}  // namespace

void show_followed_grads(Unit &unit) {
  if (unit.is_by_rows) {
    show_sharded_grads(unit);
    return;
  }
  recall_grads(unit);
  for (const GradPlace &place : grad_places(unit)) {
    if (!has_sharded_piece(unit, place) ||
        !place.segment->grad_shard.defined()) {
      continue;
    }
    place.holder->mutable_grad() = sharded_grad(unit, place);
  }
}

void take_followed_grads(Unit &unit) {
  const bool in_backward = fsdp_engine_in_backward(unit.engine->core);
  bool any = false;
  recall_grads(unit);
  grad_places(unit);
  for (GradPlace &place : unit.grad_places) {
    if (!has_sharded_piece(unit, place)) continue;
    place.was_cleared = in_backward && !place.holder->grad().defined();
    any = any || place.holder->grad().defined();
  }
  if (!any) {
    fsdp_unit_drop_sharded_grads(unit.core);
    return;
  }
  if (!in_backward) {  // the user's from now on
    leave_grads(unit);
    return;
  }
  for (const GradPlace &place : grad_places(unit)) {
    if (!has_sharded_piece(unit, place)) continue;
    if (place.was_cleared) {
      at::Tensor rest = sharded_grad(unit, place);
      if (rest.defined()) rest.zero_();
    } else {
      take_one_grad(unit, place);
    }
  }
}

void hide_grads(Unit &unit) {
  // They are on the flat parameters, or on the sharded ones.
  if (!unit.use_orig_params || unit.is_by_rows) return;
  for (Param &param : unit.params) {
    at::Tensor &grad = param.tensor.mutable_grad();
    if (grad.defined()) param.hidden_grad = std::move(grad);
  }
}

void show_hidden_grads(Unit &unit) {
  for (Param &param : unit.params) {
    if (!param.hidden_grad.defined()) continue;
    at::Tensor hidden = std::move(param.hidden_grad);
    param.hidden_grad = at::Tensor();
    at::Tensor &grad = param.tensor.mutable_grad();
    if (!grad.defined()) grad = std::move(hidden);
  }
}

// The tensors of a parameter are one for the user, who sees now this one and
// now that: the one that was set since the last look counts. Flat parameters
// count alone. An original parameter is a single tensor, but beside tensor
// parallelism.
void show_requires_grad(Unit &unit) {
  for (Param &param : unit.params) {
    const bool is_original = !unit.is_by_rows && unit.use_orig_params;
    if (is_original && !param.parallel.defined()) continue;
    const bool is_flat = !unit.is_by_rows && !unit.use_orig_params;
    const at::Tensor &shown = unit.is_by_rows ? param.sharded_param.param
                              : is_flat ? segment_of(unit, param).flat_param
                                        : param.tensor;
    if (!shown.defined()) continue;
    const at::Tensor *const tensors[] = {&shown, &param.tensor, &param.leaf()};
    const auto was_set = [&param](const at::Tensor *tensor) {
      return tensor->requires_grad() != param.required_grad;
    };
    if (is_flat) {
      param.required_grad = shown.requires_grad();
    } else if (std::any_of(std::begin(tensors), std::end(tensors), was_set)) {
      param.required_grad = !param.required_grad;
    }
    for (const at::Tensor *tensor : tensors) {
      if (was_set(tensor)) tensor->set_requires_grad(param.required_grad);
    }
  }
}

// Note [What a backward needs]
// All ranks must reduce the same segments, whatever gradients each of them has:
// those with a parameter that some forward of this backward wanted a gradient
// of. So a forward adds the segments whose parameters require grad now. It
// drops the others, which are frozen, only if it has a backward itself, and no
// earlier forward still waits for one: with adapters, a reference model's
// outputs are computed between the policy's forward and backward, with the
// adapters frozen and without gradients. A forward that never gets a backward
// keeps the unit's segments, whose reductions are zeros then: that is slower,
// but not wrong. The counts are equal on all ranks; whether a graph still
// exists would not be. Reentrant checkpointing runs forward without gradients,
// too, before the one that counts.
void follow_requires_grad(Unit &unit) {
  show_requires_grad(unit);
  const bool has_backward = c10::GradMode::is_enabled();
  const bool may_drop = has_backward && *unit.num_awaited == 0;
  if (may_drop) unit.ran_frozen = false;
  for (Segment &segment : unit.segments) segment.wants_grad = false;
  for (Param &param : unit.params) {
    Segment &segment = segment_of(unit, param);
    const bool wants_grad = param.tensor.requires_grad();
    segment.wants_grad = segment.wants_grad || wants_grad;
    unit.ran_frozen = unit.ran_frozen || (has_backward && !wants_grad);
  }
  for (const Segment &segment : unit.segments) {
    const auto index = static_cast<int64_t>(index_of(unit, segment));
    if (segment.wants_grad == is_trainable(unit, segment)) continue;
    if (!segment.wants_grad && !may_drop) continue;
    FSDP_LOCAL_ERROR(error);
    if (fsdp_unit_set_trainable(unit.core, index, segment.wants_grad, &error) !=
        FSDP_OK) {
      throw_error(error);
    }
    unit.grad_places.clear();
  }
}

void add_grad_ops(fsdp_view_ops *ops) {
  ops->take_grads = take_grads;
  ops->take_full_grads = take_full_grads;
  ops->show_grads = show_grads;
  ops->keep_grads = keep_grads;
  ops->grads_live = grads_live;
  ops->grads_free = grads_free;
  ops->grad_shard = grad_shard;
  ops->grad_release = grad_release;
}

}  // namespace fsdp_torch
