// Parameters that are cut along another dimension than 0.
//
// Note [Parameters by columns]
// A shard is contiguous in the shape that the user sees, so what a gather
// leaves is one such piece behind the other, not the parameter. The block has
// room for the parameter behind them: showing it copies the pieces there, on
// COMPUTE. Gradients go the other way when they are packed. A dimension that
// the ranks do not divide evenly needs nothing more: all pieces but the last
// are of one size, so there are no gaps.
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>

#include <algorithm>
#include <numeric>

#include "torch/unit.hpp"

namespace fsdp_torch {
namespace {

// Sizes before, of, and behind the dimension that is cut.
struct Shape3 {
  int64_t before = 1;
  int64_t cut = 0;
  int64_t behind = 1;
};

Shape3 shape3_of(const Param &param) {
  Shape3 shape;
  const auto dim = static_cast<size_t>(param.shard_dim);
  shape.cut = param.sizes[dim];
  for (size_t i = 0; i < param.sizes.size(); i++) {
    if (i < dim) shape.before *= param.sizes[i];
    if (i > dim) shape.behind *= param.sizes[i];
  }
  return shape;
}

int64_t rows_per_rank(int64_t rows, int64_t num_ranks) {
  return (rows + num_ranks - 1) / num_ranks;
}

// The piece that `rank` has, in the parameter.
at::Tensor piece_in_param(const at::Tensor &whole, const Shape3 &shape,
                          int64_t begin, int64_t rows) {
  return make_strided_view(whole, {shape.before, rows, shape.behind},
                           {shape.cut * shape.behind, shape.behind, 1},
                           whole.storage_offset() + begin * shape.behind);
}

}  // namespace

bool is_by_columns(const Unit &unit, const Param &param) {
  return param.shard_dim != 0 && unit.shard_group.world_size > 1;
}

int64_t columns_offset(const Segment &segment) {
  constexpr int64_t kAlignment = 64;
  return (segment.layout->padded_numel + kAlignment - 1) / kAlignment *
         kAlignment;
}

std::vector<ColumnCopy> column_copies(const Unit &unit, const Param &param,
                                      int64_t num_ranks) {
  std::vector<ColumnCopy> copies;
  const Segment &segment = unit.segments[static_cast<size_t>(param.segment)];
  const Shape3 shape = shape3_of(param);
  const int64_t per_rank = rows_per_rank(shape.cut, num_ranks);
  int64_t offset = 0;
  for (int64_t begin = 0; begin < shape.cut; begin += per_rank) {
    const int64_t rows = std::min(per_rank, shape.cut - begin);
    ColumnCopy copy;
    copy.target = piece_in_param(param.unsharded, shape, begin, rows);
    copy.source =
        make_view(segment.unsharded, param.unsharded.key_set(), segment.compute,
                  {shape.before, rows, shape.behind}, offset);
    offset += shape.before * rows * shape.behind;
    copies.push_back(std::move(copy));
  }
  return copies;
}

void show_columns(Unit &unit) {
  const bool of_parts = fsdp_unit_is_of_parts(unit.core);
  const at::NoGradGuard no_grad;
  for (Param &param : unit.params) {
    for (ColumnCopy &copy : of_parts ? param.part_columns : param.columns) {
      copy.target.copy_(copy.source);
    }
  }
}

at::Tensor in_memory_order(const Unit &unit, const Param &param,
                           const at::Tensor &grad) {
  if (!is_by_columns(unit, param)) return grad.contiguous();
  const Shape3 shape = shape3_of(param);
  const at::Tensor whole =
      grad.reshape({shape.before, shape.cut, shape.behind});
  const int64_t num_ranks = unit.shard_group.world_size;
  if (shape.cut % num_ranks == 0) {
    return whole
        .view({shape.before, num_ranks, shape.cut / num_ranks, shape.behind})
        .transpose(0, 1)
        .contiguous();
  }
  std::vector<at::Tensor> pieces;
  for (const at::Tensor &piece :
       whole.split(rows_per_rank(shape.cut, num_ranks), 1)) {
    pieces.push_back(piece.reshape({-1}));
  }
  return at::cat(pieces);
}

// Parts ---------------------------------------------------------------------

int64_t part_numel_of(const Unit &unit, const Param &param) {
  const int64_t numel = param.numel();
  const int64_t rows = param.sizes[static_cast<size_t>(param.shard_dim)];
  if (numel == 0) return 0;
  return rows_per_rank(rows, unit.part_group.world_size) * (numel / rows);
}

void make_part_views(Unit &unit) {
  const int64_t num_ranks = unit.part_group.world_size;
  if (num_ranks < 2) return;
  for (Param &param : unit.params) {
    Segment &segment = unit.segments[static_cast<size_t>(param.segment)];
    if (!segment.part) segment.part = empty_storage(unit.device);
    const Shape3 shape = shape3_of(param);
    const int64_t per_rank = rows_per_rank(shape.cut, num_ranks);
    const int64_t begin = std::min(unit.part_group.rank * per_rank, shape.cut);
    const int64_t rows = std::min(per_rank, shape.cut - begin);
    std::vector<int64_t> sizes = param.sizes;
    sizes[static_cast<size_t>(param.shard_dim)] = rows;
    param.part = make_view(segment.part, keys_of(unit.device), segment.compute,
                           sizes, 0);
    param.part_source = piece_in_param(param.unsharded, shape, begin, rows);
    if (is_by_columns(unit, param)) {
      param.part_columns = column_copies(unit, param, num_ranks);
    }
  }
}

void attach_parts(Unit &unit, void *const *data) {
  for (const Param &param : unit.params) {
    const auto index = static_cast<size_t>(param.segment);
    const int64_t numel = part_numel_of(unit, param);
    const Segment &segment = unit.segments[index];
    if (numel == 0) continue;
    attach(*segment.part, data[index],
           numel * static_cast<int64_t>(c10::elementSize(segment.compute)));
  }
}

void copy_parts(Unit &unit) {
  const at::NoGradGuard no_grad;
  for (Param &param : unit.params) {
    if (param.part.numel() == 0) continue;
    param.part.copy_(param.part_source.view(param.part.sizes()));
  }
}

}  // namespace fsdp_torch
