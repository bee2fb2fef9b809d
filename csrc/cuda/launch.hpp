// The host's side of a launch: checks what it is given and fills the tables
// that become the kernels' parameters. Without CUDA, so that a test can run it.
#pragma once

#include "cuda/kernels.h"
#include "cuda/work.hpp"

namespace fsdp_cuda {

// One table fits into the 4 KiB of parameters that every driver takes.
constexpr int kFewItems = 120;
constexpr int kManyItems = FSDP_CUDA_MAX_ITEMS;
static_assert(sizeof(Table<kFewItems>) + 32 <= 4096, "4 KiB of parameters");
static_assert(sizeof(Table<kManyItems>) + 32 <= 32764, "32 KiB of parameters");

inline bool is_floating(fsdp_dtype dtype) {
  return dtype.code == FSDP_DTYPE_FLOAT16 ||
         dtype.code == FSDP_DTYPE_BFLOAT16 ||
         dtype.code == FSDP_DTYPE_FLOAT32 || dtype.code == FSDP_DTYPE_FLOAT64;
}

inline fsdp_status check_pack(const fsdp_pack_item *items, int64_t num_items,
                              fsdp_error *error) {
  for (int64_t i = 0; i < num_items; i++) {
    const fsdp_pack_item &item = items[i];
    if (item.numel < 0 || (item.to == nullptr && item.numel > 0) ||
        !is_floating(item.to_dtype) ||
        (item.from != nullptr && !is_floating(item.from_dtype))) {
      return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                       "CUDA pack: item %lld has %lld elements of dtype %d for "
                       "%p of dtype %d, there must be >= 0, of fp16, bf16, "
                       "fp32 or fp64, for memory of one of them",
                       static_cast<long long>(i),
                       static_cast<long long>(item.numel),
                       static_cast<int>(item.from_dtype.code), item.to,
                       static_cast<int>(item.to_dtype.code));
    }
  }
  return FSDP_OK;
}

inline fsdp_status check_spans(const fsdp_host_span *spans, int64_t num_spans,
                               const char *operation, fsdp_error *error) {
  for (int64_t i = 0; i < num_spans; i++) {
    if (spans[i].numel < 0 || !is_floating(spans[i].dtype)) {
      return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                       "CUDA %s: span %lld has %lld elements of dtype %d, "
                       "there must be >= 0, of fp16, bf16, fp32 or fp64",
                       operation, static_cast<long long>(i),
                       static_cast<long long>(spans[i].numel),
                       static_cast<int>(spans[i].dtype.code));
    }
  }
  return FSDP_OK;
}

// What a launch will do with one item: the entry of the table, and its tiles.
inline Item item_for_pack(const fsdp_pack_item &from, int64_t *num_tiles) {
  Item item = {};
  const bool is_constant = from.from == nullptr;
  const fsdp_dtype to_dtype = from.to_dtype;
  const fsdp_dtype from_dtype = is_constant ? to_dtype : from.from_dtype;
  item.to = from.to;
  item.from = from.from;
  item.numel = from.numel;
  item.to_code = static_cast<int8_t>(to_dtype.code);
  item.from_code = static_cast<int8_t>(from_dtype.code);
  item.kind = is_constant         ? (from.is_one ? Kind::kOnes : Kind::kZeros)
              : from.add          ? Kind::kAdd
              : from.scales_first ? Kind::kScaled
                                  : Kind::kCopy;
  item.head = static_cast<int8_t>(
      head_numel(reinterpret_cast<uintptr_t>(from.to), to_dtype.itemsize,
                 reinterpret_cast<uintptr_t>(is_constant ? from.to : from.from),
                 from_dtype.itemsize));
  *num_tiles =
      num_tiles_of(cut_of(item.numel, item.head,
                          unit_numel(to_dtype.itemsize, from_dtype.itemsize)));
  return item;
}

// A span that is read, or scaled where it is.
inline Item item_for_span(const fsdp_host_span &span, int64_t *num_tiles) {
  fsdp_pack_item item = {};
  item.to = const_cast<void *>(span.data);
  item.to_dtype = span.dtype;
  item.from_dtype = span.dtype;
  item.from = span.data;
  item.numel = span.numel;
  return item_for_pack(item, num_tiles);
}

// The same for a norm, whose tiles are larger.
inline Item item_for_norm(const fsdp_host_span &span, int64_t *num_tiles) {
  const Item item = item_for_span(span, num_tiles);
  const int32_t itemsize = span.dtype.itemsize;
  *num_tiles = num_tiles_of(
      cut_of(item.numel, item.head, unit_numel(itemsize, itemsize)),
      kNormTileUnits);
  return item;
}

// Calls `launch(table)` for as many tables as the items need. `make(i, &n)`
// gives item i and its number of tiles; items of no elements are left out.
template <typename Numel, typename Make, typename Launch>
fsdp_status for_tables(int64_t num_items, const Numel &numel_of,
                       const Make &make, const Launch &launch,
                       fsdp_error *error) {
  constexpr int64_t kMostTiles = INT32_MAX;
  Table<kManyItems> table;
  table.num_items = 0;
  table.num_tiles = 0;
  for (int64_t i = 0; i < num_items; i++) {
    if (numel_of(i) == 0) continue;
    int64_t num_tiles = 0;
    Item item = make(i, &num_tiles);
    if (num_tiles > kMostTiles) {
      return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                       "CUDA kernels: item %lld has %lld elements, too many "
                       "for one launch: use smaller units",
                       static_cast<long long>(i),
                       static_cast<long long>(numel_of(i)));
    }
    if (table.num_items == kManyItems ||
        table.num_tiles > kMostTiles - num_tiles) {
      const fsdp_status status = launch(table);
      if (status != FSDP_OK) return status;
      table.num_items = 0;
      table.num_tiles = 0;
    }
    item.first_tile = table.num_tiles;
    table.items[table.num_items++] = item;
    table.num_tiles += static_cast<int32_t>(num_tiles);
  }
  return table.num_items > 0 ? launch(table) : FSDP_OK;
}

// The same items as a smaller kernel parameter.
inline Table<kFewItems> few_items(const Table<kManyItems> &table) {
  Table<kFewItems> few;
  few.num_items = table.num_items;
  few.num_tiles = table.num_tiles;
  memcpy(few.items, table.items,
         sizeof(Item) * static_cast<size_t>(table.num_items));
  return few;
}

}  // namespace fsdp_cuda
