// The split of work: which thread of which block touches which elements. For
// the device and, so that a test can run every block and thread in a loop
// without one, for the host.
//
// Note [Tiles]
// An item's elements are cut in three: a head before the first boundary of 16
// bytes, units of 16 bytes or more that are read and written whole, and a tail.
// Where destination and source have no such boundary in common, a unit is one
// element, which is moved as one: elements start at multiples of their width. A
// tile is kTileUnits units of one item, or kNormTileUnits in a norm, whose
// blocks end with a sum over their threads; a block works on one tile. The
// first and the last tile of an item also do its head and its tail.
#pragma once

#include <stdint.h>

#include "cuda/elements.hpp"

namespace fsdp_cuda {

constexpr int kThreads = 256;
constexpr int kUnitsPerThread = 4;
constexpr int kTileUnits = kThreads * kUnitsPerThread;  // 16 KiB or more
constexpr int kNormTileUnits = 8 * kTileUnits;          // 128 KiB
constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;
constexpr int kNoVectors = -1;

// One item of a launch, or one span of a norm.
struct Item {
  void *to;
  const void *from;    // NULL: zeros, or ones
  int64_t numel;       // >= 1
  int32_t first_tile;  // within the launch
  int8_t to_code;      // dtype of `to`
  int8_t from_code;    // dtype of `from`
  int8_t head;         // elements before the first unit; kNoVectors: none
  Kind kind;
};
static_assert(sizeof(Item) == 32, "an item fills two vectors of 16 bytes");

// A kernel parameter: at most 4 KiB on any driver, 32 KiB with CUDA 12.1.
template <int Capacity>
struct Table {
  int32_t num_items;
  int32_t num_tiles;
  Item items[Capacity];
};

// Elements per unit: of 16 bytes in the narrower dtype.
FSDP_HD constexpr int unit_numel(int to_itemsize, int from_itemsize) {
  return 16 / (to_itemsize < from_itemsize ? to_itemsize : from_itemsize);
}

// The elements before the first one that starts at a multiple of 16 bytes on
// both sides; kNoVectors when there is none.
inline int head_numel(uintptr_t to, int to_itemsize, uintptr_t from,
                      int from_itemsize) {
  const int most = unit_numel(to_itemsize, from_itemsize);
  for (int head = 0; head < most; head++) {
    if ((to + static_cast<uintptr_t>(head * to_itemsize)) % 16 == 0 &&
        (from + static_cast<uintptr_t>(head * from_itemsize)) % 16 == 0) {
      return head;
    }
  }
  return kNoVectors;
}

// An item cut by its units.
struct Cut {
  int64_t head;       // elements before the units
  int64_t num_units;  // of `numel` elements each
  int64_t numel;
};

FSDP_HD Cut cut_of(int64_t numel, int head, int vector_numel) {
  if (head == kNoVectors) return {0, numel, 1};
  if (head > numel) head = static_cast<int>(numel);
  return {head, (numel - head) / vector_numel, vector_numel};
}

// At least one, for the head and the tail.
inline int64_t num_tiles_of(const Cut &cut, int tile_units = kTileUnits) {
  const int64_t num_tiles = (cut.num_units + tile_units - 1) / tile_units;
  return num_tiles > 0 ? num_tiles : 1;
}

// The item of a tile: the last whose first tile is not behind it.
FSDP_HD int item_of(const Item *items, int num_items, int tile) {
  int begin = 0;
  int end = num_items;
  while (end - begin > 1) {
    const int middle = (begin + end) / 2;
    if (items[middle].first_tile <= tile) {
      begin = middle;
    } else {
      end = middle;
    }
  }
  return begin;
}

// 16 bytes that are loaded or stored at once.
struct alignas(16) Chunk {
  uint32_t words[4];
};

// `Numel` elements from one place to another: one by one, or in whole chunks,
// both aligned to 16 bytes.
template <int Numel, typename Element>
FSDP_HD void move(Element *to, const Element *from) {
  if constexpr (Numel == 1) {
    *to = *from;
  } else {
    constexpr int kNbytes = Numel * static_cast<int>(sizeof(Element));
    static_assert(kNbytes % 16 == 0, "units are chunks");
    FSDP_UNROLL
    for (int i = 0; i < kNbytes / 16; i++) {
      reinterpret_cast<Chunk *>(to)[i] =
          reinterpret_cast<const Chunk *>(from)[i];
    }
  }
}

// The units of a tile that one thread has: first loads, so that they are in
// flight together, then the rest; all at once, unless that is more than 128
// bytes. `body(values, first)` gets each.
template <int Code, int Numel, typename Body>
FSDP_HD void for_units(const element<Code> *from, const Cut &cut,
                       int64_t first_unit, int thread, const Body &body) {
  struct alignas(16) Unit {
    element<Code> values[Numel];
  };
  constexpr int kAtOnce = kUnitsPerThread * sizeof(Unit) <= 128
                              ? kUnitsPerThread
                              : 128 / sizeof(Unit);
  FSDP_UNROLL
  for (int begin = 0; begin < kUnitsPerThread; begin += kAtOnce) {
    Unit units[kAtOnce];
    FSDP_UNROLL
    for (int k = 0; k < kAtOnce; k++) {
      const int64_t unit = first_unit + (begin + k) * kThreads + thread;
      if (unit >= cut.num_units || from == nullptr) continue;
      move<Numel>(units[k].values, from + cut.head + unit * Numel);
    }
    FSDP_UNROLL
    for (int k = 0; k < kAtOnce; k++) {
      const int64_t unit = first_unit + (begin + k) * kThreads + thread;
      if (unit >= cut.num_units) continue;
      body(units[k].values, cut.head + unit * Numel);
    }
  }
}

// The element of the item's head or tail that a thread has in this tile, or -1.
// Both are shorter than a block, and head and tail fall to the same threads in
// different calls: `is_tail` tells which.
FSDP_HD int64_t edge_of(const Cut &cut, int64_t numel, int64_t first_unit,
                        int thread, bool is_tail, int tile_units = kTileUnits) {
  if (!is_tail) return first_unit == 0 && thread < cut.head ? thread : -1;
  const int64_t begin = cut.head + cut.num_units * cut.numel;
  const bool is_last = first_unit + tile_units >= cut.num_units;
  return is_last && begin + thread < numel ? begin + thread : -1;
}

// A thread's part of one tile of a pack.
template <int To, int From, int Numel>
FSDP_HD void pack_units(element<To> *to, const element<From> *from, Kind kind,
                        const Cut &cut, int64_t first_unit, int thread,
                        double scale) {
  for_units<From, Numel>(
      from, cut, first_unit, thread,
      [&](const element<From> *values, int64_t first) {
        struct alignas(16) Unit {
          element<To> values[Numel];
        };
        const element<To> constant =
            Dtype<To>::put(kind == Kind::kOnes ? 1.0F : 0.0F);
        Unit result = {};
        if (kind == Kind::kAdd) move<Numel>(result.values, to + first);
        FSDP_UNROLL
        for (int i = 0; i < Numel; i++) {
          result.values[i] = from == nullptr
                                 ? constant
                                 : combined<To, From>(result.values[i],
                                                      values[i], scale, kind);
        }
        move<Numel>(to + first, result.values);
      });
}

template <int To, int From>
FSDP_HD void pack_item(const Item &item, int tile, int thread, double scale) {
  constexpr int kNumel = unit_numel(sizeof(element<To>), sizeof(element<From>));
  element<To> *to = static_cast<element<To> *>(item.to);
  const element<From> *from = static_cast<const element<From> *>(item.from);
  const Cut cut = cut_of(item.numel, item.head, kNumel);
  const int64_t first_unit =
      static_cast<int64_t>(tile - item.first_tile) * kTileUnits;
  for (int is_tail = 0; is_tail < 2; is_tail++) {
    const int64_t i =
        edge_of(cut, item.numel, first_unit, thread, is_tail != 0);
    if (i < 0) continue;
    to[i] = from == nullptr
                ? Dtype<To>::put(item.kind == Kind::kOnes ? 1.0F : 0.0F)
                : combined<To, From>(to[i], from[i], scale, item.kind);
  }
  if (cut.numel == 1) {
    pack_units<To, From, 1>(to, from, item.kind, cut, first_unit, thread,
                            scale);
  } else {
    pack_units<To, From, kNumel>(to, from, item.kind, cut, first_unit, thread,
                                 scale);
  }
}

template <int To>
FSDP_HD void pack_into(const Item &item, int tile, int thread, double scale) {
  switch (item.from_code) {
    case FSDP_DTYPE_FLOAT16:
      pack_item<To, FSDP_DTYPE_FLOAT16>(item, tile, thread, scale);
      return;
    case FSDP_DTYPE_BFLOAT16:
      pack_item<To, FSDP_DTYPE_BFLOAT16>(item, tile, thread, scale);
      return;
    case FSDP_DTYPE_FLOAT32:
      pack_item<To, FSDP_DTYPE_FLOAT32>(item, tile, thread, scale);
      return;
    default:
      pack_item<To, FSDP_DTYPE_FLOAT64>(item, tile, thread, scale);
  }
}

// What thread `thread` of block `tile` does in a pack.
template <int Capacity>
FSDP_HD void pack_thread(const Table<Capacity> &table, int tile, int thread,
                         double scale) {
  const Item &item = table.items[item_of(table.items, table.num_items, tile)];
  switch (item.to_code) {
    case FSDP_DTYPE_FLOAT16:
      pack_into<FSDP_DTYPE_FLOAT16>(item, tile, thread, scale);
      return;
    case FSDP_DTYPE_BFLOAT16:
      pack_into<FSDP_DTYPE_BFLOAT16>(item, tile, thread, scale);
      return;
    case FSDP_DTYPE_FLOAT32:
      pack_into<FSDP_DTYPE_FLOAT32>(item, tile, thread, scale);
      return;
    default:
      pack_into<FSDP_DTYPE_FLOAT64>(item, tile, thread, scale);
  }
}

template <int Code>
FSDP_HD double norm_item(const Item &item, int tile, int thread, double power) {
  constexpr int kNumel = unit_numel(sizeof(element<Code>), 16);
  const element<Code> *from = static_cast<const element<Code> *>(item.from);
  const Cut cut = cut_of(item.numel, item.head, kNumel);
  const int64_t begin =
      static_cast<int64_t>(tile - item.first_tile) * kNormTileUnits;
  const int64_t end = begin + kNormTileUnits < cut.num_units
                          ? begin + kNormTileUnits
                          : cut.num_units;
  double sum = 0;
  const auto join = [&](element<Code> value) {
    const double term =
        norm_term(static_cast<double>(Dtype<Code>::get(value)), power);
    sum = norm_joined(sum, term, power);
  };
  for (int is_tail = 0; is_tail < 2; is_tail++) {
    const int64_t i =
        edge_of(cut, item.numel, begin, thread, is_tail != 0, kNormTileUnits);
    if (i >= 0) join(from[i]);
  }
  for (int64_t first_unit = begin; first_unit < end; first_unit += kTileUnits) {
    if (cut.numel == 1) {
      for_units<Code, 1>(
          from, cut, first_unit, thread,
          [&](const element<Code> *values, int64_t) { join(values[0]); });
    } else {
      for_units<Code, kNumel>(from, cut, first_unit, thread,
                              [&](const element<Code> *values, int64_t) {
                                FSDP_UNROLL
                                for (int i = 0; i < kNumel; i++)
                                  join(values[i]);
                              });
    }
  }
  return sum;
}

// A thread's part of the norm of block `tile`'s elements.
template <int Capacity>
FSDP_HD double norm_thread(const Table<Capacity> &table, int tile, int thread,
                           double power) {
  const Item &item = table.items[item_of(table.items, table.num_items, tile)];
  switch (item.from_code) {
    case FSDP_DTYPE_FLOAT16:
      return norm_item<FSDP_DTYPE_FLOAT16>(item, tile, thread, power);
    case FSDP_DTYPE_BFLOAT16:
      return norm_item<FSDP_DTYPE_BFLOAT16>(item, tile, thread, power);
    case FSDP_DTYPE_FLOAT32:
      return norm_item<FSDP_DTYPE_FLOAT32>(item, tile, thread, power);
    default:
      return norm_item<FSDP_DTYPE_FLOAT64>(item, tile, thread, power);
  }
}

// A thread's part of the second stage, over what the blocks of the first left.
FSDP_HD double norm_partials(const double *partials, int64_t num_partials,
                             int thread, double power) {
  double sum = 0;
  for (int64_t i = thread; i < num_partials; i += kThreads) {
    sum = norm_joined(sum, partials[i], power);
  }
  return sum;
}

// The sum of `width` neighbours, a power of two, with the first of them: a
// tree. `down(sum, half)` is the sum of the thread that is `half` further, of
// the same step. The others end with values that mean nothing.
template <typename Down>
FSDP_HD double norm_fold(double sum, int width, double power,
                         const Down &down) {
  FSDP_UNROLL
  for (int half = width / 2; half > 0; half /= 2) {
    sum = norm_joined(sum, down(sum, half), power);
  }
  return sum;
}

// What thread `thread` of block `tile` does in a scale: a pack into itself.
template <int Capacity>
FSDP_HD void scale_thread(const Table<Capacity> &table, int tile, int thread,
                          float scale) {
  const Item &item = table.items[item_of(table.items, table.num_items, tile)];
  const double factor = static_cast<double>(scale);
  switch (item.from_code) {
    case FSDP_DTYPE_FLOAT16:
      pack_item<FSDP_DTYPE_FLOAT16, FSDP_DTYPE_FLOAT16>(item, tile, thread,
                                                        factor);
      return;
    case FSDP_DTYPE_BFLOAT16:
      pack_item<FSDP_DTYPE_BFLOAT16, FSDP_DTYPE_BFLOAT16>(item, tile, thread,
                                                          factor);
      return;
    case FSDP_DTYPE_FLOAT32:
      pack_item<FSDP_DTYPE_FLOAT32, FSDP_DTYPE_FLOAT32>(item, tile, thread,
                                                        factor);
      return;
    default:
      pack_item<FSDP_DTYPE_FLOAT64, FSDP_DTYPE_FLOAT64>(item, tile, thread,
                                                        factor);
  }
}

FSDP_HD double norm_of_sum(double sum, double power) {
  if (isinf(power)) return sum;
  return power == 2.0 ? sqrt(sum) : pow(sum, 1.0 / power);
}

}  // namespace fsdp_cuda
