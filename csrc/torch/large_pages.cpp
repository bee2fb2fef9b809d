#include "torch/large_pages.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <memory>

#include "torch/device/host_memory.hpp"
#include "torch/unit.hpp"

// Note [Slabs]
// Tensors that are made together lie side by side in slabs, so that also small
// ones lie on large pages (Note [Fresh memory] in pages.h). A slab lives until
// the last of its tensors goes, hence the limit; a tensor that is larger has a
// slab of its own.

namespace fsdp_torch {
namespace {

constexpr size_t kLargePage = size_t{2} << 20;
constexpr size_t kSlab = size_t{64} << 20;
constexpr size_t kAlignment = 64;

size_t round_up(size_t nbytes, size_t multiple) {
  return (nbytes + multiple - 1) / multiple * multiple;
}

using Slab = std::shared_ptr<c10::DataPtr>;

at::Tensor tensor_in(const Slab &slab, size_t offset, const TensorSpec &spec,
                     size_t nbytes, c10::DispatchKeySet keys) {
  c10::DataPtr data(
      static_cast<char *>(slab->get()) + offset, new Slab(slab),
      [](void *held) { delete static_cast<Slab *>(held); }, c10::kCPU);
  const auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), nbytes, std::move(data),
      c10::GetAllocator(c10::kCPU), /*resizable=*/true);
  return make_view(storage, keys, spec.dtype, {spec.numel}, 0);
}

size_t nbytes_of(const TensorSpec &spec) {
  if (spec.numel < 0) {
    throw std::invalid_argument(
        c10::str("a tensor cannot have ", spec.numel, " elements"));
  }
  return static_cast<size_t>(spec.numel) * c10::elementSize(spec.dtype);
}

}  // namespace

std::vector<at::Tensor> empty_tensors(const std::vector<TensorSpec> &specs) {
  const c10::DispatchKeySet keys = keys_of(c10::kCPU);
  std::vector<at::Tensor> tensors;
  for (size_t begin = 0; begin < specs.size();) {
    size_t end = begin;
    size_t total = 0;
    while (end < specs.size()) {
      const size_t more = round_up(nbytes_of(specs[end]), kAlignment);
      if (end > begin && total + more > kSlab) break;
      total += more;
      end++;
    }
    if (total < kLargePage) {  // no large page: torch's allocator
      for (; begin < end; begin++) {
        tensors.push_back(at::empty({specs[begin].numel}, specs[begin].dtype));
      }
      continue;
    }
    const auto slab = std::make_shared<c10::DataPtr>(make_host_memory(total));
    for (size_t offset = 0; begin < end; begin++) {
      const size_t nbytes = nbytes_of(specs[begin]);
      tensors.push_back(tensor_in(slab, offset, specs[begin], nbytes, keys));
      offset += round_up(nbytes, kAlignment);
    }
  }
  return tensors;
}

}  // namespace fsdp_torch
