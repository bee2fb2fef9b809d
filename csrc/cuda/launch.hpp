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

inline fsdp_status check_pack(const void *destination, fsdp_dtype dtype,
                              const fsdp_pack_item *items, int64_t num_items,
                              fsdp_error *error) {
  if (destination == nullptr || !is_floating(dtype)) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "CUDA pack: a destination of dtype %d at %p, it must be "
                     "fp16, bf16, fp32 or fp64 and not NULL",
                     static_cast<int>(dtype.code), destination);
  }
  for (int64_t i = 0; i < num_items; i++) {
    if (items[i].numel < 0 || items[i].offset < 0 ||
        (items[i].data != nullptr && !is_floating(items[i].dtype))) {
      return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                       "CUDA pack: item %lld has %lld elements of dtype %d at "
                       "offset %lld, there must be >= 0, of fp16, bf16, fp32 "
                       "or fp64, at >= 0",
                       static_cast<long long>(i),
                       static_cast<long long>(items[i].numel),
                       static_cast<int>(items[i].dtype.code),
                       static_cast<long long>(items[i].offset));
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

// What a launch will do with one source: the entry of the table, and its tiles.
inline Item item_for_pack(const void *destination, fsdp_dtype dtype,
                          const fsdp_pack_item &from, int64_t *num_tiles) {
  Item item = {};
  const bool is_constant = from.data == nullptr;
  const fsdp_dtype source = is_constant ? dtype : from.dtype;
  const uintptr_t to = reinterpret_cast<uintptr_t>(destination) +
                       static_cast<uintptr_t>(from.offset * dtype.itemsize);
  item.data = from.data;
  item.offset = from.offset;
  item.numel = from.numel;
  item.code = static_cast<int8_t>(source.code);
  item.is_added = from.add && !is_constant;
  item.is_one = from.is_one;
  item.head = static_cast<int8_t>(
      head_numel(to, dtype.itemsize,
                 is_constant ? to : reinterpret_cast<uintptr_t>(from.data),
                 source.itemsize));
  *num_tiles = num_tiles_of(cut_of(
      item.numel, item.head, unit_numel(dtype.itemsize, source.itemsize)));
  return item;
}

inline Item item_for_span(const fsdp_host_span &span, int64_t *num_tiles) {
  fsdp_pack_item item = {};
  item.data = span.data;
  item.dtype = span.dtype;
  item.numel = span.numel;
  return item_for_pack(span.data, span.dtype, item, num_tiles);
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
