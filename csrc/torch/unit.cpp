// Units: flattening parameters into shards, copying a unit, taking it apart.
#include "torch/unit.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <Python.h>
#include <c10/core/CPUAllocator.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <algorithm>

#include "host/pages.h"
#include "layout/alignment.h"
#include "torch/bridge.h"
#include "torch/device/host_memory.hpp"
#include "torch/groups/transports.hpp"
#include "torch/guard.hpp"
#include "torch/objects.hpp"
#include "torch/step_stream.hpp"

namespace fsdp_torch {
namespace {

at::ScalarType dtype_or(PyObject *object, at::ScalarType otherwise) {
  if (object == nullptr) return otherwise;
  if (!THPDtype_Check(object)) {
    throw std::invalid_argument("expected a torch.dtype");
  }
  return reinterpret_cast<THPDtype *>(object)->scalar_type;
}

fsdp_group core_group(const Group &group) {
  fsdp_group result = {};
  result.handle = const_cast<Group *>(&group);
  result.world_size = group.world_size;
  result.rank = group.rank;
  return result;
}

void check_param(const std::string &unit, size_t index, PyObject *object,
                 bool is_by_rows = false) {
  const auto fail = [&](const std::string &what) {
    throw std::invalid_argument("FSDP unit '" + unit + "': parameter " +
                                std::to_string(index) + " " + what);
  };
  if (!THPVariable_Check(object)) fail("is not a tensor");
  const at::Tensor &tensor = THPVariable_Unpack(object);
  if (!tensor.is_leaf()) fail("is not a leaf of the autograd graph");
  if (tensor.is_meta() && !is_by_rows) {
    fail("is on the meta device; materialise it with param_init_fn");
  }
  if (tensor.layout() != at::kStrided || !tensor.has_storage()) {
    fail("is not a plain strided tensor");
  }
}

// How each segment is held, from the unit's dtypes.
void choose_dtypes(Unit &unit, const fsdp_torch_unit_options &options) {
  const auto num_segments = fsdp_flat_layout_num_segments(unit.layout);
  for (int64_t i = 0; i < num_segments; i++) {
    Segment segment;
    segment.layout = fsdp_flat_layout_segment(unit.layout, i);
    segment.master = static_cast<at::ScalarType>(segment.layout->dtype.code);
    segment.compute = segment.master;
    segment.reduce = segment.master;
    if (c10::isFloatingType(segment.master)) {
      segment.compute = dtype_or(options.param_dtype, segment.master);
      segment.reduce = dtype_or(options.reduce_dtype, segment.compute);
    }
    // FSDP1 sums in the dtype of autograd's gradients, FSDP2 in reduce_dtype.
    segment.held = unit.is_by_rows ? segment.reduce : segment.compute;
    segment.grad =
        options.keep_low_precision_grads ? segment.compute : segment.master;
    unit.segments.push_back(std::move(segment));
  }
}

// Of a unit that has its table.
fsdp_alignment choose_alignment(const Unit &unit) {
  int64_t nbytes = 0;
  for (int64_t i = 0; i < fsdp_param_table_num_params(unit.table); i++) {
    const fsdp_param_spec *spec = fsdp_param_table_spec(unit.table, i);
    nbytes += spec->numel * spec->dtype.itemsize;
  }
  const auto dtype = static_cast<at::ScalarType>(unit.param_dtype_code);
  const int32_t itemsize =
      unit.param_dtype_code < 0 ? 0 : core_dtype(dtype).itemsize;
  return fsdp_alignment_choose(itemsize, unit.use_orig_params,
                               unit.device.is_cpu(), nbytes);
}

// The elements of a row of each use.
std::vector<int64_t> row_numels_of(const fsdp_torch_unit_options &options) {
  std::vector<int64_t> row_numels;
  for (int64_t i = 0; options.shard_dims != nullptr && i < options.num_uses;
       i++) {
    const at::Tensor &tensor = THPVariable_Unpack(options.uses[i]);
    const int64_t numel = tensor.numel();
    row_numels.push_back(numel == 0 || tensor.dim() == 0
                             ? 0
                             : numel / tensor.size(options.shard_dims[i]));
  }
  return row_numels;
}

// Of what is given per use, what the unit's parameters have.
std::vector<int64_t> by_param(const Unit &unit,
                              const std::vector<int64_t> &of_uses) {
  std::vector<int64_t> result;
  for (int64_t i = 0; i < fsdp_param_table_num_params(unit.table); i++) {
    result.push_back(of_uses.at(
        static_cast<size_t>(fsdp_param_table_first_use(unit.table, i))));
  }
  return result;
}

std::vector<int64_t> block_numels_of(const fsdp_torch_unit_options &options) {
  if (options.block_numels == nullptr) return {};
  return {options.block_numels, options.block_numels + options.num_uses};
}

// Note [Layouts of conversions]
// An optimizer keeps its state when a module gets another dtype, and so the
// elements must stay where they are: by the rules they would move, since
// alignment is in bytes and frozen parameters have segments of their own. So
// the new unit has the old one's slots, and what its segments trained.

// Gives the specs the segments of `like`. False if some segment would have two
// dtypes.
bool take_segments(std::vector<fsdp_param_spec> &specs,
                   const fsdp_flat_layout *like) {
  std::unordered_map<uint64_t, int64_t> params;  // by key, as in a table
  std::unordered_map<int64_t, fsdp_dtype> dtypes;
  for (fsdp_param_spec &spec : specs) {
    const int64_t param =
        params.emplace(spec.key, static_cast<int64_t>(params.size()))
            .first->second;
    if (param >= fsdp_flat_layout_num_params(like)) return false;
    const fsdp_param_slot *slot = fsdp_flat_layout_slot(like, param);
    const fsdp_dtype &dtype =
        dtypes.emplace(slot->segment, spec.dtype).first->second;
    if (slot->numel != spec.numel || !fsdp_dtype_equal(dtype, spec.dtype)) {
      return false;
    }
    spec.requires_grad =
        fsdp_flat_layout_segment(like, slot->segment)->requires_grad;
  }
  return static_cast<int64_t>(params.size()) ==
         fsdp_flat_layout_num_params(like);
}

fsdp_status make_layout_like(Unit &unit, const fsdp_flat_layout *like,
                             fsdp_error *error) {
  std::vector<int64_t> segments;
  std::vector<int64_t> offsets;
  std::vector<int64_t> shard_numels;
  for (int64_t i = 0; i < fsdp_flat_layout_num_params(like); i++) {
    const fsdp_param_slot *slot = fsdp_flat_layout_slot(like, i);
    segments.push_back(slot->segment);
    offsets.push_back(slot->offset);
  }
  for (int64_t i = 0; i < fsdp_flat_layout_num_segments(like); i++) {
    shard_numels.push_back(fsdp_flat_layout_segment(like, i)->shard_numel);
  }
  return fsdp_flat_layout_create_placed(
      unit.table, segments.data(), offsets.data(), shard_numels.data(),
      static_cast<int64_t>(shard_numels.size()),
      fsdp_flat_layout_world_size(like), &unit.layout, error);
}

// Makes the table and the layout of `specs`, one per use; row_numels likewise,
// of a unit by rows, and block_numels, empty where nothing is kept together.
// like: null, or the layout to have; see take_segments().
fsdp_status make_layout(Unit &unit, const std::vector<fsdp_param_spec> &specs,
                        const std::vector<int64_t> &row_numels,
                        std::vector<int64_t> block_numels,
                        const fsdp_flat_layout *like, fsdp_error *error) {
  const int64_t world_size = core_group(unit.shard_group).world_size;
  const auto num_uses = static_cast<int64_t>(specs.size());
  const fsdp_status status =
      fsdp_param_table_create(specs.data(), num_uses, &unit.table, error);
  if (status != FSDP_OK) return status;
  for (int64_t i = 0; i < num_uses; i++) {
    unit.param_of_use.push_back(fsdp_param_table_param_of_use(unit.table, i));
  }
  if (unit.is_by_rows) {
    return fsdp_flat_layout_create_by_rows(unit.table,
                                           by_param(unit, row_numels).data(),
                                           world_size, &unit.layout, error);
  }
  const fsdp_alignment alignment = choose_alignment(unit);
  unit.block_numels = std::move(block_numels);
  if (like != nullptr) return make_layout_like(unit, like, error);
  if (!unit.block_numels.empty()) {
    return fsdp_flat_layout_create_in_blocks(
        unit.table, by_param(unit, unit.block_numels).data(), world_size,
        alignment, &unit.layout, error);
  }
  return fsdp_flat_layout_create(unit.table, world_size, alignment,
                                 &unit.layout, error);
}

std::vector<fsdp_param_spec> specs_of(const Unit &unit,
                                      const fsdp_torch_unit_options &options) {
  std::vector<fsdp_param_spec> specs;
  for (int64_t i = 0; i < options.num_uses; i++) {
    check_param(unit.name, static_cast<size_t>(i), options.uses[i],
                unit.is_by_rows);
    const at::Tensor &tensor = THPVariable_Unpack(options.uses[i]);
    fsdp_param_spec spec = {};
    spec.key = reinterpret_cast<uint64_t>(tensor.unsafeGetTensorImpl());
    spec.numel = tensor.numel();
    spec.dtype = core_dtype(tensor.scalar_type());
    spec.requires_grad = tensor.requires_grad();
    specs.push_back(spec);
  }
  return specs;
}

// Where the segment after byte `end` begins in a block, and so in a region.
int64_t next_segment(int64_t end) {
  constexpr int64_t kMultiple = FSDP_SEGMENT_ALIGNMENT_NBYTES;
  return (end + kMultiple - 1) / kMultiple * kMultiple;
}

// The bytes of a region for the unit's shards; 0: they need none. The core
// looks for other obstacles (runtime/in_place.c).
int64_t region_nbytes_of(const Unit &unit) {
  int64_t nbytes = 0;
  if (!unit.device.is_cpu() || core_group(unit.shard_group).world_size < 2 ||
      !may_read_in_place()) {
    return 0;
  }
  for (const Segment &segment : unit.segments) {
    if (segment.layout->padded_numel == 0) continue;
    if (segment.compute != segment.master) return 0;
    nbytes = next_segment(nbytes) +
             segment.layout->padded_numel * segment.layout->dtype.itemsize;
  }
  return nbytes < FSDP_MIN_REGION_NBYTES ? 0 : nbytes;
}

// A shard in the unit's region, whose segment begins at byte `begin`.
at::Tensor shard_in_region(const Unit &unit, const Segment &segment,
                           int64_t begin, int64_t *populated) {
  const int64_t nbytes =
      segment.layout->shard_numel * segment.layout->dtype.itemsize;
  const int64_t offset = begin + core_group(unit.shard_group).rank * nbytes;
  char *space = static_cast<char *>(unit.region->space->get());
  *populated =
      fsdp_host_space_populate(space, offset, offset + nbytes, *populated);
  const auto storage = storage_in_region(unit.region, space + offset, nbytes);
  return make_view(storage, keys_of(c10::kCPU), segment.master,
                   {segment.layout->shard_numel}, 0);
}

void make_shards(Unit &unit) {
  int64_t end = 0;
  int64_t populated = 0;
  const int64_t nbytes = region_nbytes_of(unit);
  auto space = nbytes > 0 ? make_host_space(nbytes) : nullptr;
  if (space) {
    unit.region = std::make_shared<Region>(
        Region{unit.name, std::move(space), nbytes, false});
  }
  for (Segment &segment : unit.segments) {
    if (!unit.region || segment.layout->padded_numel == 0) {
      segment.shard = at::zeros({segment.layout->shard_numel},
                                shard_options(unit, segment.master));
      continue;
    }
    const int64_t begin = next_segment(end);
    segment.shard = shard_in_region(unit, segment, begin, &populated);
    end = begin + segment.layout->padded_numel * segment.layout->dtype.itemsize;
  }
}

// The unit's parameter number `index`, without views.
Param make_param(const Unit &unit, int64_t index, const at::Tensor &tensor,
                 at::IntArrayRef sizes) {
  Param param;
  param.tensor = tensor;
  param.required_grad = tensor.requires_grad();
  param.sizes = sizes.vec();
  param.segment = fsdp_flat_layout_slot(unit.layout, index)->segment;
  fsdp_flat_layout_intersect(unit.layout, core_group(unit.shard_group).rank,
                             index, &param.in_param, &param.in_shard);
  return param;
}

// Copies this rank's part of every parameter into the shards.
void fill_shards(Unit &unit, const fsdp_torch_unit_options &options) {
  const int64_t num_params = fsdp_flat_layout_num_params(unit.layout);
  for (int64_t i = 0; i < num_params; i++) {
    const int64_t use = fsdp_param_table_first_use(unit.table, i);
    const at::Tensor &tensor = THPVariable_Unpack(options.uses[use]);
    Param param = make_param(unit, i, tensor, tensor.sizes());
    if (unit.is_by_rows) {
      param.shard_dim = options.shard_dims[use];
      param.is_extended =
          options.extended != nullptr && options.extended[use] != 0;
    } else if (param.local_numel() > 0) {
      unit.segments[static_cast<size_t>(param.segment)]
          .shard.slice(0, param.in_shard.begin, param.in_shard.end)
          .copy_(tensor.detach().reshape({-1}).slice(0, param.in_param.begin,
                                                     param.in_param.end));
      record_current_stream(tensor);
    }
    unit.params.push_back(std::move(param));
  }
}

// fp16 sums overflow: part of the division comes before them. FSDP1's rule:
// a power of two near the square root of the number of ranks.
double fp16_prescale(int64_t num_ranks) {
  int64_t factor = 1;
  while (num_ranks % factor == 0 && num_ranks / factor > factor) factor *= 2;
  return 1.0 / static_cast<double>(factor);
}

// What of the options does not depend on the parameters.
void choose_settings(Unit &unit, const fsdp_torch_unit_options &options) {
  fsdp_unit_options &settings = unit.settings;
  bool has_fp16 = false;
  for (const Segment &segment : unit.segments) {
    has_fp16 = has_fp16 || segment.reduce == at::ScalarType::Half;
  }
  const int64_t shard_world_size = core_group(unit.shard_group).world_size;
  settings.settings.reshard_after_forward = options.reshard_after_forward;
  settings.settings.keeps_part = true;
  settings.settings.unshards_in_backward = true;
  settings.reshards_as_root = settings.stays_shown = settings.finds_unused =
      unit.is_by_rows;
  settings.is_apart = options.is_apart;
  settings.shows_kept = options.shows_kept;
  settings.settings.reshard_after_backward_without_sync =
      options.reshard_after_backward_without_sync;
  settings.backward_prefetch = options.backward_prefetch;
  settings.forward_prefetch = options.forward_prefetch;
  settings.prescale =
      has_fp16 ? fp16_prescale(shard_world_size *
                               core_group(unit.replica_group).world_size)
               : 1.0;
  settings.offloads = unit.offloads;
}

fsdp_status make_core(Unit &unit, fsdp_error *error) {
  fsdp_unit_options core = unit.settings;
  std::vector<fsdp_segment_options> segments;
  for (const Segment &segment : unit.segments) {
    fsdp_segment_options item = {};
    item.param_dtype = core_dtype(segment.compute);
    item.reduce_dtype = core_dtype(segment.reduce);
    item.held_dtype = core_dtype(segment.held);
    item.grad_dtype = core_dtype(segment.grad);
    item.shard = segment.shard.data_ptr();
    item.spare_numel = segment.spare_numel;
    segments.push_back(item);
  }
  for (const Param &param : unit.params) {
    fsdp_segment_options &item =
        segments.at(static_cast<size_t>(param.segment));
    item.is_extended = param.is_extended;
    if (unit.part_group.world_size < 2) continue;
    item.part_numel = part_numel_of(unit, param);
  }
  core.name = unit.name.c_str();
  core.owner = &unit;
  core.layout = unit.layout;
  core.segments = segments.data();
  if (unit.region) {
    core.region = {unit.region->space->get(), unit.region->nbytes,
                   &unit.region->is_shared};
  }
  core.shard_group = core_group(unit.shard_group);
  core.replica_group = core_group(unit.replica_group);
  if (unit.part_group.world_size > 1) {
    core.part_group = core_group(unit.part_group);
  }
  return fsdp_unit_create(&core, &unit.core, error);
}

// Views, core and handle; the parameters then show the shards.
fsdp_status finish_unit(Unit &unit, fsdp_error *error) {
  make_views(unit);
  note_sized_storages(unit);
  refuse_hidden_params(unit);
  const fsdp_status status = make_core(unit, error);
  if (status != FSDP_OK) return status;
  unit.handle = std::make_shared<UnitHandle>();
  unit.handle->unit = &unit;
  return FSDP_OK;
}

}  // namespace

Unit::~Unit() {
  if (handle) handle->unit = nullptr;
  unhook_accumulators(*this);
  if (engine) {
    const std::lock_guard<std::mutex> lock(engine->mutex);
    std::optional<c10::StreamGuard> guard;  // blocks go after the last step
    if (engine->step_stream) guard.emplace(*engine->step_stream);
    auto &units = engine->units;
    units.erase(std::remove(units.begin(), units.end(), this), units.end());
    fsdp_unit_destroy(core);
  } else {
    fsdp_unit_destroy(core);
  }
  fsdp_flat_layout_destroy(layout);
  fsdp_param_table_destroy(table);
}

// A graph may keep the unit; its end would show the shards on the parameters.
void leave_params(Unit &unit) {
  unit.has_left_params = true;
  if (unit.handle) unit.handle->unit = nullptr;
  unhook_accumulators(unit);
  for (Param &param : unit.params) {
    param.tensor = param.tensor.detach();
    param.parallel = param.parallel_local = at::Tensor();
  }
  for (Segment &segment : unit.segments) segment.flat_param = at::Tensor();
}

}  // namespace fsdp_torch

using fsdp_torch::Unit;

extern "C" {

const char *fsdp_torch_version(void) {
  return TORCH_VERSION;
}

fsdp_status fsdp_torch_unit_create(const fsdp_torch_unit_options *options,
                                   fsdp_torch_unit **unit, fsdp_error *error) {
  GUARDED(error) {
    const at::NoGradGuard no_grad;
    auto self = std::make_shared<Unit>();
    self->name = options->name;
    if (!THPDevice_Check(options->device)) {
      throw std::invalid_argument("device is not a torch.device");
    }
    self->device = reinterpret_cast<THPDevice *>(options->device)->device;
    self->use_orig_params = options->use_orig_params;
    self->is_by_rows = options->shard_dims != nullptr;
    self->cast_forward_inputs = options->cast_forward_inputs;
    self->cast_root_forward_inputs = options->cast_root_forward_inputs;
    if (options->param_dtype != nullptr) {
      self->param_dtype_code = static_cast<int32_t>(
          fsdp_torch::dtype_or(options->param_dtype, at::ScalarType::Float));
    }
    // On the CPU, shards are in host memory and need no copies.
    self->offloads = options->offloads && !self->device.is_cpu();
    self->shard_group =
        fsdp_torch::group_from(options->shard_group, self->device);
    self->replica_group =
        fsdp_torch::group_from(options->replica_group, self->device);
    self->part_group =
        fsdp_torch::group_from(options->part_group, self->device);

    auto specs = fsdp_torch::specs_of(*self, *options);
    const bool is_like = options->like != nullptr &&
                         fsdp_torch::take_segments(specs, options->like);
    fsdp_status status = fsdp_torch::make_layout(
        *self, specs, fsdp_torch::row_numels_of(*options),
        fsdp_torch::block_numels_of(*options),
        is_like ? options->like : nullptr, error);
    if (status != FSDP_OK) return status;
    fsdp_torch::choose_dtypes(*self, *options);
    fsdp_torch::choose_settings(*self, *options);
    fsdp_torch::make_shards(*self);
    fsdp_torch::fill_shards(*self, *options);
    status = fsdp_torch::finish_unit(*self, error);
    if (status != FSDP_OK) return status;
    auto *result = new fsdp_torch_unit{self};
    fsdp_torch::show_sharded(*self);  // the parameters' old memory goes
    *unit = result;
    return FSDP_OK;
  };
}

fsdp_status fsdp_torch_unit_clone(const fsdp_torch_unit *source,
                                  PyObject *const *uses, int64_t num_uses,
                                  fsdp_torch_unit **unit, fsdp_error *error) {
  GUARDED(error) {
    const at::NoGradGuard no_grad;
    fsdp_torch::take_written_shards(*source->self);
    const Unit &from = *source->self;
    if (num_uses != static_cast<int64_t>(from.param_of_use.size())) {
      throw std::invalid_argument("a clone needs one parameter per use");
    }
    auto self = std::make_shared<Unit>();
    self->name = from.name;
    self->device = from.device;
    self->use_orig_params = from.use_orig_params;
    self->offloads = from.offloads;
    self->cast_forward_inputs = from.cast_forward_inputs;
    self->cast_root_forward_inputs = from.cast_root_forward_inputs;
    self->offload_min_nbytes = from.offload_min_nbytes;
    self->offload_keep_last = from.offload_keep_last;
    self->param_dtype_code = from.param_dtype_code;
    self->shard_group = from.shard_group;
    self->replica_group = from.replica_group;
    self->shard_group.c10d = nullptr;  // belongs to the units of one engine
    self->replica_group.c10d = nullptr;
    self->settings = from.settings;
    std::vector<fsdp_param_spec> specs;
    for (int64_t i = 0; i < num_uses; i++) {
      fsdp_torch::check_param(self->name, static_cast<size_t>(i), uses[i]);
      const int64_t index = from.param_of_use[static_cast<size_t>(i)];
      fsdp_param_spec spec = *fsdp_param_table_spec(from.table, index);
      spec.key = reinterpret_cast<uint64_t>(
          THPVariable_Unpack(uses[i]).unsafeGetTensorImpl());
      specs.push_back(spec);
    }
    const bool is_placed = fsdp_flat_layout_is_placed(from.layout);
    fsdp_status status =
        fsdp_torch::make_layout(*self, specs, {}, from.block_numels,
                                is_placed ? from.layout : nullptr, error);
    if (status != FSDP_OK) return status;
    if (self->param_of_use != from.param_of_use) {
      throw std::invalid_argument("the parameters are shared in another way");
    }
    for (size_t i = 0; i < from.segments.size(); i++) {
      const fsdp_torch::Segment &like = from.segments[i];
      fsdp_torch::Segment segment;
      segment.layout =
          fsdp_flat_layout_segment(self->layout, static_cast<int64_t>(i));
      segment.master = like.master;
      segment.compute = like.compute;
      segment.reduce = like.reduce;
      segment.held = like.held;
      segment.grad = like.grad;
      self->segments.push_back(std::move(segment));
    }
    fsdp_torch::make_shards(*self);
    for (size_t i = 0; i < from.segments.size(); i++) {
      self->segments[i].shard.copy_(from.segments[i].shard);
    }
    for (size_t i = 0; i < from.params.size(); i++) {
      const int64_t first =
          fsdp_param_table_first_use(self->table, static_cast<int64_t>(i));
      self->params.push_back(fsdp_torch::make_param(
          *self, static_cast<int64_t>(i), THPVariable_Unpack(uses[first]),
          from.params[i].sizes));
    }
    status = fsdp_torch::finish_unit(*self, error);
    if (status != FSDP_OK) return status;
    auto *result = new fsdp_torch_unit{self};
    fsdp_torch::show_sharded(*self);
    *unit = result;
    return FSDP_OK;
  };
}

fsdp_status fsdp_torch_unit_leave_params(fsdp_torch_unit *unit,
                                         fsdp_error *error) {
  GUARDED(error) {
    const at::NoGradGuard no_grad;
    fsdp_torch::leave_params(*unit->self);
    return FSDP_OK;
  };
}

void fsdp_torch_unit_destroy(fsdp_torch_unit *unit) {
  delete unit;
}

fsdp_unit *fsdp_torch_unit_core(const fsdp_torch_unit *unit) {
  return unit->self->core;
}

const fsdp_flat_layout *fsdp_torch_unit_layout(const fsdp_torch_unit *unit) {
  return unit->self->layout;
}

PyObject *fsdp_torch_unit_shard(const fsdp_torch_unit *unit, int64_t segment) {
  HANDLE_TH_ERRORS
  return THPVariable_Wrap(
      unit->self->segments.at(static_cast<size_t>(segment)).shard);
  END_HANDLE_TH_ERRORS
}

fsdp_status fsdp_torch_unit_bind_flat_params(fsdp_torch_unit *unit,
                                             PyObject *const *flat_params,
                                             int64_t num_flat_params,
                                             fsdp_error *error) {
  GUARDED(error) {
    auto &segments = unit->self->segments;
    if (num_flat_params != static_cast<int64_t>(segments.size())) {
      return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                       "unit '%s' has %zu segments, got %lld flat parameters",
                       unit->self->name.c_str(), segments.size(),
                       static_cast<long long>(num_flat_params));
    }
    unit->self->grad_places.clear();
    for (size_t i = 0; i < segments.size(); i++) {
      if (!THPVariable_Check(flat_params[i])) {
        throw std::invalid_argument("a flat parameter is not a tensor");
      }
      segments[i].flat_param = THPVariable_Unpack(flat_params[i]);
    }
    return FSDP_OK;
  };
}

fsdp_status fsdp_torch_unit_replace_param(fsdp_torch_unit *unit, int64_t index,
                                          PyObject *tensor, fsdp_error *error) {
  GUARDED(error) {
    const at::NoGradGuard no_grad;
    Unit &self = *unit->self;
    fsdp_torch::check_param(self.name, static_cast<size_t>(index), tensor);
    fsdp_torch::replace_param(self, static_cast<size_t>(index),
                              THPVariable_Unpack(tensor));
    return FSDP_OK;
  };
}

}  // extern "C"
