// Operators of the simulated device that are no arithmetic: memory, views,
// copies and values for the host.
#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include "sim.hpp"

namespace sim {
namespace {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout> layout, std::optional<at::Device>,
                 std::optional<bool> pin_memory,
                 std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(c10::layout_or_default(layout) == at::kStrided,
              "the sim device has only strided tensors");
  TORCH_CHECK(!pin_memory.value_or(false),
              "Only dense CPU tensors can be pinned");
  return at::detail::empty_generic(sizes, c10::GetAllocator(kType), kKeys,
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides,
                         std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout> /*layout*/,
                         std::optional<at::Device> /*device*/,
                         std::optional<bool> /*pin_memory*/) {
  return at::detail::empty_strided_generic(sizes, strides,
                                           c10::GetAllocator(kType), kKeys,
                                           c10::dtype_or_default(dtype));
}

void make_room(const at::Tensor &tensor) {
  c10::StorageImpl &storage =
      *tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  if (tensor.numel() == 0) return;
  const size_t nbytes = at::detail::computeStorageNbytes(
      tensor.sizes(), tensor.strides(), tensor.itemsize(),
      static_cast<size_t>(tensor.storage_offset()));
  if (nbytes > storage.nbytes()) resize_storage(storage, nbytes);
}

const at::Tensor &resize_(const at::Tensor &self, c10::IntArrayRef sizes,
                          std::optional<at::MemoryFormat> format) {
  c10::TensorImpl &impl = *self.unsafeGetTensorImpl();
  if (self.sizes() != sizes) impl.set_sizes_contiguous(sizes);
  if (format.has_value() && *format != at::MemoryFormat::Preserve) {
    impl.empty_tensor_restride(*format);
  }
  make_room(self);
  return self;
}

at::Tensor &set_storage_part(at::Tensor &self, at::Storage source,
                             int64_t offset, c10::IntArrayRef sizes,
                             c10::IntArrayRef strides) {
  c10::TensorImpl &impl = *self.unsafeGetTensorImpl();
  impl.set_storage_keep_dtype(std::move(source));
  impl.set_storage_offset(offset);
  if (strides.data() == nullptr || strides.size() != sizes.size()) {
    impl.set_sizes_contiguous(sizes);
  } else {
    impl.set_sizes_and_strides(sizes, strides);
  }
  make_room(self);
  return self;
}

at::Tensor &set_storage(at::Tensor &self, at::Storage source) {
  const auto numel = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage_part(self, std::move(source), 0, {numel}, {});
}

at::Tensor &set_nothing(at::Tensor &self) {
  return set_storage(self,
                     at::Storage(c10::Storage::use_byte_size_t(), 0,
                                 c10::DataPtr(nullptr, device()),
                                 c10::GetAllocator(kType), /*resizable=*/true));
}

void record_stream(at::Tensor &self, at::Stream stream) {
  sim_memory_record_stream(self.storage().data_ptr().get_context(),
                           stream_of(stream.id()));
}

at::Scalar local_scalar_dense(const at::Tensor &self) {
  synchronize(current_stream());
  return at::native::_local_scalar_dense_cpu(host_alias(self));
}

// ---- Copies
// --------------------------------------------------------------------

void enqueue_copy(const at::Tensor &to, const at::Tensor &from) {
  sim_stream *stream = current_stream();
  enqueue(stream, [to, from]() mutable {
    const at::AutoDispatchBelowADInplaceOrView guard;
    to.copy_(from);
  });
}

// As CUDA does it: host memory that is not pinned has been read when the call
// returns, and is written when it returns.
at::Tensor &copy_(at::Tensor &to, const at::Tensor &source, bool non_blocking) {
  if (to.numel() == 0 && source.numel() == 0) return to;
  const at::AutoDispatchBelowADInplaceOrView guard;
  const at::Tensor from = source.expand(to.sizes());
  sim_stream *stream = current_stream();
  if (is_ours(to) && is_ours(from)) {
    if (!to.is_same(source)) enqueue_copy(host_alias(to), host_alias(from));
    return to;
  }
  const at::Tensor &host = is_ours(to) ? from : to;
  TORCH_CHECK(host.device().is_cpu(), "no copy between sim and ",
              host.device());
  const void *memory = host.storage().data_ptr().get();
  const bool is_pinned = sim::is_pinned(memory);
  if (is_ours(to)) {
    const at::Tensor target = host_alias(to);
    if (is_pinned) {
      // Not by the tensor itself, which would keep the memory alive.
      const at::Tensor read =
          at::from_blob(host.data_ptr(), host.sizes(), host.strides(),
                        host.options().pinned_memory(false));
      enqueue_copy(target, read);
    } else {
      enqueue_copy(target, host.clone());
    }
  } else {
    enqueue_copy(at::from_blob(host.data_ptr(), host.sizes(), host.strides(),
                               host.options().pinned_memory(false)),
                 host_alias(from));
  }
  if (is_pinned) record_pinned(memory, stream);
  if (!non_blocking || (!is_ours(to) && !is_pinned)) synchronize(stream);
  return to;
}

at::Tensor copy_from(const at::Tensor &source, const at::Tensor &to,
                     bool non_blocking) {
  at::Tensor target = to;
  return copy_(target, source, non_blocking);
}

// Attention by plain operators.
int64_t fused_sdp_choice(const at::Tensor &, const at::Tensor &,
                         const at::Tensor &, const std::optional<at::Tensor> &,
                         double, bool, std::optional<double>, bool) {
  return 0;  // at::SDPBackend::math
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("resize_", resize_);
  m.impl("set_", set_nothing);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_part);
  m.impl("record_stream", record_stream);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_fused_sdp_choice", fused_sdp_choice);
}

}  // namespace
}  // namespace sim
