// Runs every block and thread of the CUDA kernels in a loop, on the host, and
// compares with the kernels of csrc/host: the split of the work, its edges and
// its alignments are the code that the device runs.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "cuda/launch.hpp"
#include "host/kernels.h"

namespace {

using fsdp_cuda::kManyItems;
using fsdp_cuda::kThreads;
using fsdp_cuda::Table;

constexpr fsdp_dtype kDtypes[] = {{FSDP_DTYPE_FLOAT16, 2},
                                  {FSDP_DTYPE_BFLOAT16, 2},
                                  {FSDP_DTYPE_FLOAT32, 4},
                                  {FSDP_DTYPE_FLOAT64, 8}};
constexpr int64_t kNumels[] = {1,    2,    3,    7,    8,    9,
                               17,   255,  1023, 1024, 1025, 4095,
                               4096, 4100, 8191, 8193, 16389};

int64_t num_failures = 0;

void expect(bool fact, const char *what) {
  if (fact) return;
  num_failures++;
  if (num_failures < 20) std::printf("failed: %s\n", what);
}

uint64_t random_state = 1;
int64_t random_below(int64_t bound) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return static_cast<int64_t>(random_state >> 16) % bound;
}

// Bytes at any multiple of the itemsize from a boundary of 16.
struct Memory {
  explicit Memory(int64_t nbytes) : bytes(static_cast<size_t>(nbytes) + 64) {}
  char *at(int64_t shift) {
    const auto address = reinterpret_cast<uintptr_t>(bytes.data());
    return bytes.data() + (16 - address % 16) % 16 + shift;
  }
  std::vector<char> bytes;
};

void fill(void *data, fsdp_dtype dtype, int64_t numel) {
  std::vector<double> values(static_cast<size_t>(numel));
  for (double &value : values) {
    value = static_cast<double>(random_below(1 << 20) - (1 << 19)) / 65536;
  }
  const fsdp_pack_item item = {data,  dtype, kDtypes[3], values.data(),
                               numel, false, false,      false};
  expect(fsdp_host_pack(&item, 1, 1.0, nullptr) == FSDP_OK, "fill");
}

// A pack as a launch does it; returns the number of launches.
int pack(const std::vector<fsdp_pack_item> &items, double scale) {
  int num_launches = 0;
  const auto num_items = static_cast<int64_t>(items.size());
  expect(fsdp_cuda::check_pack(items.data(), num_items, nullptr) == FSDP_OK,
         "check_pack");
  const fsdp_status status = fsdp_cuda::for_tables(
      num_items, [&](int64_t i) { return items[i].numel; },
      [&](int64_t i, int64_t *num_tiles) {
        return fsdp_cuda::item_for_pack(items[i], num_tiles);
      },
      [&](const Table<kManyItems> &table) {
        num_launches++;
        for (int tile = table.num_tiles - 1; tile >= 0; tile--) {
          for (int thread = 0; thread < kThreads; thread++) {
            fsdp_cuda::pack_thread(table, tile, thread, scale);
          }
        }
        return FSDP_OK;
      },
      nullptr);
  expect(status == FSDP_OK, "for_tables");
  return num_launches;
}

// Packs `num_items` random items from and to every dtype and alignment, with
// gaps between some of the destinations.
void check_pack(int64_t num_items, int64_t least_numel, int64_t most_numel) {
  std::vector<fsdp_pack_item> items;
  std::vector<Memory> sources;
  std::vector<int64_t> places;  // bytes from the start of the destination
  sources.reserve(static_cast<size_t>(num_items));
  int64_t end = 0;
  int64_t num_used = 0;
  for (int64_t i = 0; i < num_items; i++) {
    fsdp_pack_item item = {};
    item.to_dtype = kDtypes[random_below(4)];
    item.from_dtype = kDtypes[random_below(4)];
    item.numel = least_numel + random_below(most_numel - least_numel);
    item.add = random_below(2) == 0;
    item.is_one = random_below(2) == 0;
    item.scales_first = random_below(2) == 0;
    sources.emplace_back(item.numel * item.from_dtype.itemsize + 16);
    if (random_below(5) != 0) {
      char *from =
          sources.back().at(random_below(2) * item.from_dtype.itemsize);
      fill(from, item.from_dtype, item.numel);
      item.from = from;
    }
    if (random_below(2) == 0) end += 2 * random_below(9);
    const int64_t itemsize = item.to_dtype.itemsize;
    end = (end + itemsize - 1) / itemsize * itemsize;
    places.push_back(end);
    end += item.numel * itemsize;
    num_used += item.numel > 0;
    items.push_back(item);
  }
  const double scale = random_below(2) == 0 ? 1.0 : 1.0 / 3;
  Memory actual(end + 16);
  Memory expected(end + 16);
  for (size_t i = 0; i < items.size(); i++) {
    fill(expected.at(places[i]), items[i].to_dtype, items[i].numel);
  }
  std::memcpy(actual.at(0), expected.at(0), static_cast<size_t>(end + 16));
  for (size_t i = 0; i < items.size(); i++) items[i].to = actual.at(places[i]);
  expect(pack(items, scale) == (num_used + kManyItems - 1) / kManyItems,
         "one launch per 960 items");
  for (size_t i = 0; i < items.size(); i++) {
    items[i].to = expected.at(places[i]);
  }
  expect(fsdp_host_pack(items.data(), num_items, scale, nullptr) == FSDP_OK,
         "host pack");
  expect(std::memcmp(actual.at(0), expected.at(0),
                     static_cast<size_t>(end + 16)) == 0,
         "pack: another result than the host's");
}

// One source into one place, every pair, alignment and numel.
void check_accumulate(fsdp_dtype to, fsdp_dtype from, int64_t numel,
                      int64_t to_shift, int64_t from_shift, bool add,
                      bool scales_first) {
  Memory source(numel * from.itemsize + 32);
  Memory actual(numel * to.itemsize + 64);
  Memory expected(numel * to.itemsize + 64);
  fsdp_pack_item item = {};
  item.to_dtype = to;
  item.from_dtype = from;
  item.from = source.at(from_shift * from.itemsize);
  item.numel = numel;
  item.add = add;
  item.scales_first = scales_first;
  fill(source.at(from_shift * from.itemsize), from, numel);
  fill(expected.at(0), to, numel + 4);
  std::memcpy(actual.at(0), expected.at(0),
              static_cast<size_t>((numel + 4) * to.itemsize));
  item.to = actual.at(to_shift * to.itemsize);
  pack({item}, 1.0 / 3);
  item.to = expected.at(to_shift * to.itemsize);
  expect(fsdp_host_pack(&item, 1, 1.0 / 3, nullptr) == FSDP_OK, "host pack");
  expect(std::memcmp(actual.at(0), expected.at(0),
                     static_cast<size_t>((numel + 4) * to.itemsize)) == 0,
         "accumulate: another result than the host's");
}

// The fold of a warp's first `width` threads, for the first of them. What the
// one `half` further has by then is what the same steps have made of it.
double fold_warp(const double *values, int width, double power) {
  const auto before = [&](const auto &self, int thread, int half) -> double {
    if (2 * half == width) return values[thread];
    return fsdp_cuda::norm_joined(self(self, thread, 2 * half),
                                  self(self, thread + 2 * half, 2 * half),
                                  power);
  };
  return fsdp_cuda::norm_fold(values[0], width, power, [&](double, int half) {
    return before(before, half, half);
  });
}

// Both stages of a block: within the warps, then over them.
double fold(const std::vector<double> &sums, double power) {
  double totals[fsdp_cuda::kWarps];
  for (int warp = 0; warp < fsdp_cuda::kWarps; warp++) {
    totals[warp] = fold_warp(sums.data() + warp * fsdp_cuda::kWarp,
                             fsdp_cuda::kWarp, power);
  }
  return fold_warp(totals, fsdp_cuda::kWarps, power);
}

double norm_of(const std::vector<fsdp_host_span> &spans, double power) {
  std::vector<double> partials;
  std::vector<double> sums(kThreads);
  const fsdp_status status = fsdp_cuda::for_tables(
      static_cast<int64_t>(spans.size()),
      [&](int64_t i) { return spans[i].numel; },
      [&](int64_t i, int64_t *num_tiles) {
        return fsdp_cuda::item_for_norm(spans[i], num_tiles);
      },
      [&](const Table<kManyItems> &table) {
        for (int tile = 0; tile < table.num_tiles; tile++) {
          for (int thread = 0; thread < kThreads; thread++) {
            sums[thread] = fsdp_cuda::norm_thread(table, tile, thread, power);
          }
          partials.push_back(fold(sums, power));
        }
        return FSDP_OK;
      },
      nullptr);
  expect(status == FSDP_OK, "norm tables");
  for (int thread = 0; thread < kThreads; thread++) {
    sums[thread] = fsdp_cuda::norm_partials(
        partials.data(), static_cast<int64_t>(partials.size()), thread, power);
  }
  return fsdp_cuda::norm_of_sum(fold(sums, power), power);
}

void scale_all(const std::vector<fsdp_host_span> &spans, float scale) {
  const fsdp_status status = fsdp_cuda::for_tables(
      static_cast<int64_t>(spans.size()),
      [&](int64_t i) { return spans[i].numel; },
      [&](int64_t i, int64_t *num_tiles) {
        return fsdp_cuda::item_for_span(spans[i], num_tiles);
      },
      [&](const Table<kManyItems> &table) {
        for (int tile = 0; tile < table.num_tiles; tile++) {
          for (int thread = 0; thread < kThreads; thread++) {
            fsdp_cuda::scale_thread(table, tile, thread, scale);
          }
        }
        return FSDP_OK;
      },
      nullptr);
  expect(status == FSDP_OK, "scale tables");
}

// The norm in one loop over the values in fp64.
double plain_norm(const std::vector<fsdp_host_span> &spans, double power) {
  double sum = 0;
  for (const fsdp_host_span &span : spans) {
    std::vector<double> values(static_cast<size_t>(span.numel));
    const fsdp_pack_item item = {values.data(), kDtypes[3], span.dtype,
                                 span.data,     span.numel, false,
                                 false,         false};
    expect(fsdp_host_pack(&item, 1, 1.0, nullptr) == FSDP_OK,
           "values of a norm");
    for (const double value : values) {
      const double size = std::fabs(value);
      sum = std::isinf(power) ? std::fmax(sum, size)
                              : sum + std::pow(size, power);
    }
  }
  return std::isinf(power) ? sum : std::pow(sum, 1 / power);
}

void check_norm_and_scale(int64_t num_spans, int64_t most_numel) {
  std::vector<fsdp_host_span> spans;
  std::vector<Memory> memory;
  memory.reserve(static_cast<size_t>(num_spans));
  for (int64_t i = 0; i < num_spans; i++) {
    fsdp_host_span span = {};
    span.dtype = kDtypes[random_below(4)];
    span.numel = random_below(most_numel);
    memory.emplace_back(span.numel * span.dtype.itemsize + 64);
    span.data = memory.back().at(random_below(3) * span.dtype.itemsize);
    fill(const_cast<void *>(span.data), span.dtype, span.numel);
    spans.push_back(span);
  }
  for (const double power : {1.0, 2.0, 3.0, HUGE_VAL}) {
    const double expected = plain_norm(spans, power);
    const double actual = norm_of(spans, power);
    // The host adds in another order, of up to a million terms.
    expect(std::fabs(actual - expected) <= 1e-11 * expected,
           "norm: another result than the host's");
    expect(actual == norm_of(spans, power), "norm: two runs differ");
  }
  std::vector<std::vector<char>> expected;
  for (const fsdp_host_span &span : spans) {
    const char *data = static_cast<const char *>(span.data);
    expected.emplace_back(data, data + span.numel * span.dtype.itemsize);
    const fsdp_pack_item item = {expected.back().data(),
                                 span.dtype,
                                 span.dtype,
                                 expected.back().data(),
                                 span.numel,
                                 false,
                                 false,
                                 false};
    expect(
        fsdp_host_pack(&item, 1, static_cast<double>(0.3F), nullptr) == FSDP_OK,
        "host scale");
  }
  scale_all(spans, 0.3F);
  for (size_t i = 0; i < spans.size(); i++) {
    expect(expected[i].empty() || std::memcmp(spans[i].data, expected[i].data(),
                                              expected[i].size()) == 0,
           "scale: another result than the host's");
  }
}

void check_nan() {
  float values[3000] = {};
  const std::vector<fsdp_host_span> spans = {{values, kDtypes[2], 3000}};
  for (const int i : {0, 5, 1024, 2999}) {
    values[i] = NAN;
    values[2000] = HUGE_VALF;
    for (const double power : {1.0, 2.0, 3.0, HUGE_VAL}) {
      expect(std::isnan(norm_of(spans, power)), "norm: a NaN got lost");
    }
    values[i] = 0;
  }
}

void check_refusals() {
  const fsdp_dtype int_dtype = {FSDP_DTYPE_INT32, 4};
  float value = 1;
  fsdp_error error = {};
  const fsdp_dtype f32 = kDtypes[2];
  const fsdp_pack_item items[] = {
      {&value, f32, f32, &value, 1, false, false, false},
      {&value, f32, int_dtype, &value, 1, false, false, false}};
  expect(fsdp_cuda::check_pack(items, 2, &error) == FSDP_INVALID_ARGUMENT &&
             std::strstr(error.message,
                         "CUDA pack: item 1 has 1 elements of dtype 3 for "
                         "0x") == error.message,
         "a pack of integers is refused");
  const fsdp_pack_item refused[] = {
      {&value, int_dtype, f32, &value, 1, false, false, false},
      {&value, int_dtype, f32, nullptr, 1, false, false, false},
      {&value, f32, f32, &value, -1, false, false, false},
      {nullptr, f32, f32, &value, 1, false, false, false}};
  for (const fsdp_pack_item &item : refused) {
    expect(fsdp_cuda::check_pack(&item, 1, nullptr) == FSDP_INVALID_ARGUMENT,
           "an item is refused");
  }
  const fsdp_host_span span = {&value, kDtypes[2], -1};
  expect(fsdp_cuda::check_spans(&span, 1, "norm", nullptr) ==
             FSDP_INVALID_ARGUMENT,
         "a negative numel is refused");
  const fsdp_pack_item huge = {&value,           f32,   f32,   &value,
                               INT64_C(1) << 50, false, false, false};
  const fsdp_status status = fsdp_cuda::for_tables(
      1, [&](int64_t) { return huge.numel; },
      [&](int64_t, int64_t *num_tiles) {
        return fsdp_cuda::item_for_pack(huge, num_tiles);
      },
      [&](const Table<kManyItems> &) { return FSDP_INTERNAL; }, &error);
  expect(status == FSDP_INVALID_ARGUMENT, "more tiles than a grid has");
}

}  // namespace

int main() {
  for (const fsdp_dtype to : kDtypes) {
    for (const fsdp_dtype from : kDtypes) {
      for (const int64_t numel : kNumels) {
        for (int shifts = 0; shifts < 9; shifts++) {
          for (int how = 0; how < 3; how++) {
            check_accumulate(to, from, numel, shifts % 3, shifts / 3, how == 1,
                             how == 2);
          }
        }
      }
    }
  }
  for (int i = 0; i < 80; i++) check_pack(1 + random_below(20), 0, 6000);
  for (int i = 0; i < 4; i++) check_pack(2000, 0, 40);
  check_pack(kManyItems, 1, 20);
  check_pack(kManyItems + 1, 1, 20);
  for (int i = 0; i < 20; i++) check_norm_and_scale(random_below(20), 6000);
  check_norm_and_scale(1000, 30);
  check_norm_and_scale(4, 300000);  // several tiles of a norm
  check_nan();
  check_refusals();
  std::printf("%lld failed\n", static_cast<long long>(num_failures));
  return num_failures == 0 ? 0 : 1;
}
