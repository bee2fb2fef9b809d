// Views: what a unit's parameters point at, and what happens when the user
// points them elsewhere.
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>

#include <algorithm>

#include "torch/guard.hpp"
#include "torch/step_stream.hpp"
#include "torch/unit.hpp"

namespace fsdp_torch {
namespace {

// A reference to a view that is not counted. A tensor's own pointer has another
// type than shallow_copy_from wants, so passing it would count twice.
class Borrowed {
 public:
  explicit Borrowed(const at::Tensor &view)
      : impl_(c10::intrusive_ptr<c10::TensorImpl>::reclaim(
            view.unsafeGetTensorImpl())) {}
  ~Borrowed() { (void)impl_.release(); }
  Borrowed(const Borrowed &) = delete;
  Borrowed &operator=(const Borrowed &) = delete;

  const c10::intrusive_ptr<c10::TensorImpl> &impl() const { return impl_; }

 private:
  c10::intrusive_ptr<c10::TensorImpl> impl_;
};

void show(Param &param, const at::Tensor &view) {
  const Borrowed shown(view);
  param.tensor.unsafeGetTensorImpl()->shallow_copy_from(shown.impl());
  if (!param.parallel_local.defined()) return;
  param.parallel_local.unsafeGetTensorImpl()->shallow_copy_from(shown.impl());
}

// Uploads of a forward that had no backward may still read a shard in host
// memory.
void wait_for_uploads(const Unit &unit) {
  if (!unit.offloads || !unit.engine) return;
  FSDP_LOCAL_ERROR(error);
  if (fsdp_engine_join_host(unit.engine->core, &error) != FSDP_OK) {
    throw_error(error);
  }
}

// Copies a replaced parameter into `view`, its place in the shard or in the
// whole parameters.
void write_back(const Unit &unit, const Param &param, const at::Tensor &view,
                size_t index) {
  const at::Tensor value = param.tensor.detach();
  const int64_t numel = param.unsharded.numel();
  at::Tensor target = view;
  wait_for_uploads(unit);
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
  record_current_stream(value);
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
    wait_for_uploads(unit);
    segment.shard.copy_(value.reshape({-1}));
    record_current_stream(value);
    segment.flat_param.unsafeGetTensorImpl()->shallow_copy_from(
        segment.shard.getIntrusivePtr());
    unit.shard_was_written = true;
  }
}

// Torch may put other memory into the storage of a shard, with its values
// (share_memory_(), or a queue of torch.multiprocessing): the core uses that.
// Whether it did.
bool follow_moved_shards(Unit &unit) {
  bool any = false;
  for (size_t i = 0; i < unit.segments.size(); i++) {
    const Segment &segment = unit.segments[i];
    const auto index = static_cast<int64_t>(i);
    c10::StorageImpl &storage = *segment.shard.storage().unsafeGetStorageImpl();
    void *const data = storage.data_ptr().get();
    const size_t needed = segment.shard.nbytes();
    if (data == fsdp_unit_shard(unit.core, index) || needed == 0) continue;
    if (storage.nbytes() < needed ||
        storage.device() != segment.shard.device()) {
      throw std::invalid_argument(c10::str(
          "FSDP unit '", unit.name,
          "': the memory of its shard was replaced by ", storage.nbytes(),
          " bytes on ", storage.device(), "; expected ", needed, " bytes on ",
          segment.shard.device(),
          ". If it was moved away, move it back before the unit runs. Else the "
          "values are lost: load them again, and resize no storage of a "
          "sharded "
          "parameter"));
    }
    fsdp_unit_move_shard(unit.core, index, data);
    any = true;
  }
  return any;
}

// Note [Hidden parameters]
// With use_orig_params=False the flat parameter is what the user has between
// steps. What a module still finds as `self.weight` has its whole shape and no
// memory then, as in FSDP1: programs ask it for its shape, dtype and device.
const at::Tensor &at_rest(const Unit &unit, const Param &param) {
  return unit.hides_params ? param.full : param.sharded;
}

// The view that parameters have under `view`.
const at::Tensor &view_of(const Unit &unit, const Param &param,
                          fsdp_view view) {
  switch (view) {
    case FSDP_VIEW_SHARDED:
      return at_rest(unit, param);
    case FSDP_VIEW_UNSHARDED:
      return param.unsharded;
    case FSDP_VIEW_FULL_ON_HOST:
      return param.full_on_host;
    default:
      return param.full;
  }
}

StoragePtr &storage_of_view(Segment &segment, fsdp_view view) {
  switch (view) {
    case FSDP_VIEW_UNSHARDED:
      return segment.unsharded;
    case FSDP_VIEW_FULL_ON_HOST:
      return segment.full_on_host;
    default:
      return segment.full;
  }
}

bool is_extended(const Unit &unit, const Segment &segment) {
  return std::any_of(
      unit.params.begin(), unit.params.end(), [&](const Param &param) {
        return param.is_extended &&
               &unit.segments[static_cast<size_t>(param.segment)] == &segment;
      });
}

// Whole parameters on the host: only a summon on an accelerator needs them.
void make_host_views(Unit &unit) {
  const c10::DispatchKeySet keys = keys_of(c10::kCPU);
  for (Segment &segment : unit.segments) {
    if (!segment.full_on_host) segment.full_on_host = empty_storage(c10::kCPU);
  }
  for (Param &param : unit.params) {
    const Segment &segment = unit.segments[static_cast<size_t>(param.segment)];
    if (param.full_on_host.defined()) continue;
    param.full_on_host =
        make_view(segment.full_on_host, keys, segment.master, param.sizes,
                  param.unsharded.storage_offset());
  }
}

// Where the last parameter of a segment ends, in elements: what comes before is
// parameters and the gaps that align them.
int64_t end_of_params(const Unit &unit, const Segment &segment) {
  int64_t end = 0;
  for (const Param &param : unit.params) {
    if (&unit.segments[static_cast<size_t>(param.segment)] != &segment) {
      continue;
    }
    end = std::max(end,
                   param.unsharded.storage_offset() + param.unsharded.numel());
  }
  return end;
}

// The flat parameters of a summon: whole, without the padding at their end, as
// FSDP1 shows them.
void show_flat_params(Unit &unit, fsdp_view view) {
  for (Segment &segment : unit.segments) {
    if (!segment.flat_param.defined()) continue;
    const c10::Device device =
        view == FSDP_VIEW_FULL_ON_HOST ? c10::Device(c10::kCPU) : unit.device;
    const at::Tensor whole =
        make_view(storage_of_view(segment, view), keys_of(device),
                  segment.master, {end_of_params(unit, segment)}, 0);
    segment.flat_param.unsafeGetTensorImpl()->shallow_copy_from(
        whole.getIntrusivePtr());
  }
}

// Ends that. One that the user pointed elsewhere stays there: its values are
// taken over where those of the others are.
void hide_flat_params(Unit &unit) {
  for (Segment &segment : unit.segments) {
    if (!segment.flat_param.defined()) continue;
    const bool is_whole =
        is_over(segment.flat_param, segment.full.get()) ||
        (segment.full_on_host &&
         is_over(segment.flat_param, segment.full_on_host.get()));
    if (!is_whole) continue;
    segment.flat_param.unsafeGetTensorImpl()->shallow_copy_from(
        segment.shard.getIntrusivePtr());
  }
}

void show_shards(Unit &unit) {
  for (Param &param : unit.params) show(param, at_rest(unit, param));
  hide_flat_params(unit);
}

void empty_storages(Unit &unit) {
  for (Segment &segment : unit.segments) {
    if (!is_resident(segment)) detach(unit, *segment.unsharded);
    if (segment.full != segment.unsharded) detach(unit, *segment.full);
    if (segment.full_on_host) detach(unit, *segment.full_on_host);
    if (segment.part) detach(unit, *segment.part);
  }
}

// Note [Saved parameters]
// Autograd saves a parameter itself. A gradient of gradients reads it in a
// backward of its own, which runs no hook of the unit: if the unit is sharded,
// that would be the shard, and where shapes allow it a wrong result without a
// word. So once a backward of the unit has made a graph, its parameters have
// another version while they show the shards, which autograd refuses. With the
// whole parameters the version is back, unless the user wrote meanwhile.
void show_sharded_version(Unit &unit, Param &param) {
  if (param.whole_version) return;
  c10::TensorImpl *const impl = param.leaf().unsafeGetTensorImpl();
  param.whole_version = impl->version_counter();
  param.sharded_version = param.whole_version->current_version() + 1;
  impl->set_version_counter(
      c10::VariableVersion(static_cast<uint32_t>(param.sharded_version)));
  param.marked_version++;
  unit.marked_version++;
}

void show_whole_version(Unit &unit, Param &param) {
  if (!param.whole_version) return;
  c10::TensorImpl *const impl = param.leaf().unsafeGetTensorImpl();
  if (impl->version_counter().current_version() == param.sharded_version) {
    impl->set_version_counter(*param.whole_version);
    param.marked_version--;
    unit.marked_version--;
  }
  param.whole_version.reset();
}

void show_version(Unit &unit, fsdp_view view) {
  if (!unit.guards_saved) return;
  const bool is_sharded = view == FSDP_VIEW_SHARDED || view == FSDP_VIEW_PART;
  for (Param &param : unit.params) {
    if (is_sharded) {
      show_sharded_version(unit, param);
    } else {
      show_whole_version(unit, param);
    }
  }
}

// The port --------------------------------------------------------------------

fsdp_status show_params(void * /*context*/, void *owner, fsdp_view view,
                        void *const *data, fsdp_error *error) {
  GUARDED(error) {
    Unit &unit = unit_of(owner);
    show_version(unit, view);
    if (view == FSDP_VIEW_SHARDED) {
      show_shards(unit);
      if (data == nullptr) empty_storages(unit);
      return FSDP_OK;
    }
    if (view == FSDP_VIEW_PART) {
      attach_parts(unit, data);
      copy_parts(unit);
      show_sharded(unit);  // and empties them, too
      attach_parts(unit, data);
      return FSDP_OK;
    }
    if (data == nullptr) {  // shapes only
      for (Param &param : unit.params) show(param, param.unsharded);
      return FSDP_OK;
    }
    if (view == FSDP_VIEW_FULL_ON_HOST) make_host_views(unit);
    for (size_t i = 0; i < unit.segments.size(); i++) {
      Segment &segment = unit.segments[i];
      const at::ScalarType dtype =
          view == FSDP_VIEW_UNSHARDED ? segment.compute : segment.master;
      const int64_t numel =
          view == FSDP_VIEW_UNSHARDED
              ? segment.layout->padded_numel + segment.spare_numel
              : segment.layout->padded_numel;
      const StoragePtr &storage = storage_of_view(segment, view);
      if (storage.get() == storage_of(segment.shard)) continue;
      attach(*storage, data[i],
             numel * static_cast<int64_t>(c10::elementSize(dtype)));
    }
    if (view == FSDP_VIEW_UNSHARDED && unit.is_by_rows) show_columns(unit);
    for (Param &param : unit.params) {
      show(param, view_of(unit, param, view));
    }
    if (view == FSDP_VIEW_UNSHARDED && unit.is_by_rows) show_extended(unit);
    if (view != FSDP_VIEW_UNSHARDED) show_flat_params(unit, view);
    return FSDP_OK;
  };
}

// Copies what parameters have elsewhere, by `param.data = x`, into `view`.
// Whether any did.
bool take_replaced_data(Unit &unit, fsdp_view view) {
  bool any = false;
  for (size_t i = 0; i < unit.params.size(); i++) {
    Param &param = unit.params[i];
    const at::Tensor &expected = view_of(unit, param, view);
    if (is_over(param.tensor, storage_of(expected))) continue;
    const bool is_sharded = view == FSDP_VIEW_SHARDED;
    write_back(unit, param, is_sharded ? param.sharded : expected, i);
    show(param, expected);
    any = true;
    if (is_sharded) unit.shard_was_written = true;
  }
  return any;
}

void empty_params(void * /*context*/, void *owner) {
  empty_storages(unit_of(owner));
}

fsdp_status take_params(void * /*context*/, void *owner, fsdp_view view,
                        void *const *data, bool *any_copied,
                        fsdp_error *error) {
  GUARDED(error) {
    Unit &unit = unit_of(owner);
    if (view == FSDP_VIEW_SHARDED) {
      if (follow_moved_shards(unit)) unit.shard_was_written = true;
      take_written_shards(unit);
      if (take_replaced_locals(unit)) unit.shard_was_written = true;
      // Also by replace_param, or by a call that failed after its first copy.
      *any_copied = unit.shard_was_written;
      unit.shard_was_written = false;
    } else {
      for (size_t i = 0; i < unit.segments.size(); i++) {
        Segment &segment = unit.segments[i];
        const StoragePtr &storage = storage_of_view(segment, view);
        if (storage.get() == storage_of(segment.shard)) continue;  // followed
        bring_back(*storage, data[i]);
      }
      *any_copied = take_replaced_data(unit, view);
    }
    return FSDP_OK;
  };
}

// Version counters only grow: their sum tells whether any of them did. Those of
// a DTensor and of its local tensor are their own.
int64_t version_of(const Param &param) {
  if (param.tensor.is_inference()) return 0;  // has none
  int64_t sum = param.tensor._version();
  if (param.parallel_local.defined()) {
    sum += param.parallel._version() + param.parallel_local._version();
  }
  return sum;
}

// Over the whole parameters of the segment, in either dtype.
bool is_over_whole(const Segment &segment, const at::Tensor &tensor) {
  return is_over(tensor, segment.unsharded.get()) ||
         is_over(tensor, segment.full.get());
}

fsdp_status take_writes(void * /*context*/, void *owner, bool in_backward,
                        fsdp_error *error) {
  GUARDED(error) {
    Unit &unit = unit_of(owner);
    if (unit.is_by_rows) return FSDP_OK;  // the user writes the other objects
    for (size_t i = 0; i < unit.params.size(); i++) {
      Param &param = unit.params[i];
      const Segment &segment =
          unit.segments[static_cast<size_t>(param.segment)];
      const bool is_ours = is_over_whole(segment, param.tensor);
      if (is_ours && version_of(param) == param.marked_version) continue;
      if (!is_ours && in_backward) refuse_change(unit, c10::str(i));
      const at::NoGradGuard no_grad;
      write_back(unit, param, param.sharded, i);
      unit.shard_was_written = true;
    }
    return FSDP_OK;
  };
}

uint64_t sum_of_versions(const Unit &unit) {
  uint64_t sum = 0;
  for (const Param &param : unit.params) {
    sum += static_cast<uint64_t>(version_of(param));
    // A write into a DTensor counts in it, and not in its local tensor.
    const ShardedParam &shown = param.sharded_param;
    if (shown.local.defined()) {
      sum += shown.param._version() + shown.local._version();
    }
  }
  for (const Segment &segment : unit.segments) {
    if (segment.flat_param.defined()) sum += segment.flat_param._version();
  }
  return sum;
}

void mark_params(void * /*context*/, void *owner) {
  Unit &unit = unit_of(owner);
  unit.marked_version = sum_of_versions(unit);
  for (Param &param : unit.params) {
    param.marked_version = version_of(param);
  }
}

bool params_changed(void * /*context*/, void *owner) {
  const Unit &unit = unit_of(owner);
  for (const Param &param : unit.params) {
    const Segment &segment = unit.segments[static_cast<size_t>(param.segment)];
    const bool is_whole =
        unit.is_by_rows ? is_over(param.tensor, storage_of(param.unsharded))
                        : is_over_whole(segment, param.tensor);
    if (!is_whole && !is_over(param.tensor, storage_of(at_rest(unit, param)))) {
      return true;
    }
  }
  for (const Segment &segment : unit.segments) {
    if (segment.flat_param.defined() &&
        !is_over(segment.flat_param, storage_of(segment.shard))) {
      return true;
    }
  }
  return sum_of_versions(unit) != unit.marked_version;
}

}  // namespace

void take_written_shards(Unit &unit) {
  take_replaced_data(unit, FSDP_VIEW_SHARDED);
  write_back_flat_params(unit);
}

void replace_param(Unit &unit, size_t index, const at::Tensor &tensor) {
  Param &param = unit.params[index];
  const at::ScalarType master =
      unit.segments[static_cast<size_t>(param.segment)].master;
  if (tensor.scalar_type() != master) {
    refuse(unit, c10::str("parameter ", index), tensor,
           c10::str("expected dtype ", master));
  }
  const at::Tensor old = param.tensor;
  // Whoever still holds the old one must not write into the shard, and may put
  // it back (functional_call).
  const at::Tensor own = old.detach().clone();
  param.tensor = tensor;
  try {
    write_back(unit, param, param.sharded, index);
    unit.shard_was_written = true;  // the next take_params tells the core
  } catch (...) {
    param.tensor = old;
    throw;
  }
  param.replaced_at = ++unit.num_replaced;
  unhook_accumulator(param);
  show(param, at_rest(unit, param));
  old.unsafeGetTensorImpl()->shallow_copy_from(own.getIntrusivePtr());
}

void mark_entry(Unit &unit) {
  for (Param &param : unit.params) param.entered_version = version_of(param);
}

// Whether this rank's part of a whole parameter has the shard's values. Some
// writes leave them: torch.nn.utils.parametrize sets a tensor to itself when
// it is registered, as peft does in each forward for target_parameters.
bool has_values_of_shard(const Param &param) {
  const at::Tensor &whole = param.unsharded;
  const bool is_cut_by_rows = !param.is_extended && param.columns.empty();
  if (!is_cut_by_rows || !is_over(param.tensor, storage_of(whole))) {
    return false;
  }
  const at::NoGradGuard no_grad;
  const at::Tensor part =
      whole.view({-1}).slice(0, param.in_param.begin, param.in_param.end);
  return at::equal(part, param.sharded.reshape({-1}).to(part.options()));
}

const Param *find_written(Unit &unit) {
  constexpr int num_looks = 3;  // each waits for the device
  for (Param &param : unit.params) {
    if (version_of(param) == param.entered_version) continue;
    const bool is_resident =
        storage_of(param.unsharded) == storage_of(param.sharded);
    if (is_resident || param.num_same_writes >= num_looks) continue;
    if (!has_values_of_shard(param)) return &param;
    param.num_same_writes++;
  }
  return nullptr;
}

void add_view_ops(fsdp_view_ops *ops) {
  ops->show_params = show_params;
  ops->empty_params = empty_params;
  ops->take_params = take_params;
  ops->mark_params = mark_params;
  ops->take_writes = take_writes;
  ops->params_changed = params_changed;
}

void make_views(Unit &unit) {
  unit.why_no_access =
      "FSDP unit '" + unit.name +
      "' is sharded now: this tensor is one of its unsharded parameters, or a "
      "view of them. Use it in the unit's forward, or inside "
      "summon_full_params. Keep a clone to read it later.";
  const bool is_alone = fsdp_flat_layout_world_size(unit.layout) == 1;
  bool all_resident = true;
  for (Segment &segment : unit.segments) {
    const bool is_resident = is_alone && segment.compute == segment.master &&
                             !unit.offloads && !is_extended(unit, segment);
    all_resident = all_resident && is_resident;
    segment.unsharded =
        is_resident ? segment.shard.storage().getWeakStorageImpl().lock()
                    : empty_storage(unit.device);
  }
  for (Segment &segment :
       unit.segments) {  // a summon shows all of them or none
    segment.full =
        all_resident ? segment.unsharded : empty_storage(unit.device);
  }
  const c10::DispatchKeySet keys = keys_of(unit.device);
  for (size_t i = 0; i < unit.params.size(); i++) {
    Param &param = unit.params[i];
    const fsdp_param_slot *slot =
        fsdp_flat_layout_slot(unit.layout, static_cast<int64_t>(i));
    Segment &segment = unit.segments[static_cast<size_t>(slot->segment)];
    const std::vector<int64_t> local =
        unit.is_by_rows ? local_sizes(unit, param)
                        : std::vector<int64_t>{param.local_numel()};
    // A lone rank holds the whole parameter and can show its shape.
    param.sharded = make_view(
        segment.shard.storage().getWeakStorageImpl().lock(),
        segment.shard.key_set(), segment.master,
        is_alone ? at::IntArrayRef(param.sizes) : at::IntArrayRef(local),
        segment.shard.storage_offset() + param.in_shard.begin);
    const bool has_columns = unit.is_by_rows && is_by_columns(unit, param);
    param.unsharded =
        make_view(segment.unsharded, keys, segment.compute, param.sizes,
                  has_columns ? columns_offset(segment) : slot->offset);
    param.full = make_view(segment.full, keys, segment.master, param.sizes,
                           slot->offset);
    if (!has_columns) continue;
    segment.spare_numel = param.unsharded.storage_offset() + param.numel() -
                          segment.layout->padded_numel;
    param.columns = column_copies(unit, param, unit.shard_group.world_size);
  }
  unit.hides_params = !unit.use_orig_params && !unit.is_by_rows && !is_alone &&
                      can_refuse_access<c10::StorageImpl>;
  make_part_views(unit);
}

void show_sharded(Unit &unit) {
  show_shards(unit);
  empty_storages(unit);
}

}  // namespace fsdp_torch
