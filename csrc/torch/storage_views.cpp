// Views over storages that are pointed at memory and away from it.
//
// Note [Emptied storages]
// A view of a whole parameter may outlive the parameter's memory: the user
// keeps it, or autograd saved it and reads it again in a backward of a
// backward. Its storage refuses to be read then, with a message that names the
// unit. Most operators that would read it first make another view, and torch
// looks whether that lies within the storage. So an emptied storage of whole
// parameters keeps its size: the view is made, and reading it raises the unit's
// message. Emptied storages of gradients have no size. Nor has any where torch
// cannot refuse.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "torch/unit.hpp"

namespace fsdp_torch {

StoragePtr empty_storage(c10::Device device) {
  return c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), 0, c10::DataPtr(nullptr, device),
      /*allocator=*/nullptr, /*resizable=*/false);
}

at::Tensor make_view(const StoragePtr &storage, c10::DispatchKeySet keys,
                     at::ScalarType dtype, at::IntArrayRef sizes,
                     int64_t offset) {
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), keys, c10::scalarTypeToTypeMeta(dtype));
  view.unsafeGetTensorImpl()->set_storage_offset(offset);
  view.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return view;
}

at::Tensor make_strided_view(const at::Tensor &like, at::IntArrayRef sizes,
                             at::IntArrayRef strides, int64_t offset) {
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(like.storage()), like.key_set(), like.dtype());
  view.unsafeGetTensorImpl()->set_storage_offset(offset);
  view.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return view;
}

void show_at(const at::Tensor &view, const StoragePtr &storage,
             int64_t offset) {
  view.unsafeGetTensorImpl()->set_storage_keep_dtype(c10::Storage(storage));
  view.unsafeGetTensorImpl()->set_storage_offset(offset);
}

void attach(c10::StorageImpl &storage, void *data, int64_t nbytes) {
  const c10::Device device = storage.device();
  allow_access(storage);
  storage.set_data_ptr_noswap(c10::DataPtr(data, device));
  storage.set_nbytes(static_cast<size_t>(nbytes));
}

void note_sized_storages(Unit &unit) {
  unit.why_no_access +=
      " Gradients of gradients (create_graph=True) read such tensors, too: "
      "shard that module with NO_SHARD, or over a mesh of shape (n, 1), and "
      "let it compute in the dtype of its parameters.";
  if (!can_refuse_access<c10::StorageImpl>) return;
  for (const Segment &segment : unit.segments) {
    for (const StoragePtr *storage :
         {&segment.unsharded, &segment.full, &segment.part}) {
      if (*storage && storage->get() != storage_of(segment.shard)) {
        unit.sized_storages.insert(storage->get());
      }
    }
  }
}

void refuse_hidden_params(Unit &unit) {
  if (!unit.hides_params) return;
  for (const Segment &segment : unit.segments) {
    const int64_t itemsize =
        static_cast<int64_t>(c10::elementSize(segment.master));
    segment.full->set_nbytes(
        static_cast<size_t>(segment.layout->padded_numel * itemsize));
    refuse_access(*segment.full, unit.why_no_access);
  }
}

void detach(const Unit &unit, c10::StorageImpl &storage) {
  if (!has_memory(storage)) return;
  const c10::Device device = storage.device();
  storage.set_data_ptr_noswap(c10::DataPtr(nullptr, device));
  if (unit.sized_storages.count(&storage) == 0) storage.set_nbytes(0);
  refuse_access(storage, unit.why_no_access);
}

c10::DispatchKeySet keys_of(c10::Device device) {
  return at::empty({0}, at::TensorOptions().device(device)).key_set();
}

at::TensorOptions shard_options(const Unit &unit, at::ScalarType dtype) {
  const at::TensorOptions options = at::TensorOptions().dtype(dtype);
  return unit.offloads ? options.device(c10::kCPU).pinned_memory(true)
                       : options.device(unit.device);
}

void refuse(const Unit &unit, const std::string &what, const at::Tensor &value,
            const std::string &remedy) {
  throw std::invalid_argument(c10::str(
      "FSDP unit '", unit.name, "': ", what, " was replaced by a ",
      value.scalar_type(), " tensor of shape ", value.sizes(), "; ", remedy));
}

Unit &unit_of(void *owner) {
  return *static_cast<Unit *>(owner);
}

}  // namespace fsdp_torch
