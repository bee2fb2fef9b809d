// Copies: bytes of tensors that become bytes of others, many at once, without a
// view for each.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

struct _object;

namespace fsdp_torch {

// Both tensors are on one device and have their elements in a row.
struct Copy {
  at::Tensor source;
  int64_t source_offset;  // in bytes
  at::Tensor target;
  int64_t target_offset;
  int64_t nbytes;
};

using Copies = std::vector<Copy>;

// Bytes of a tensor, as a view. `keys` are keys_of() its device.
at::Tensor bytes_of(const at::Tensor &tensor, int64_t offset, int64_t nbytes,
                    c10::DispatchKeySet keys);

void make_copy(const Copy &copy, c10::DispatchKeySet keys);

// A new Python object of them. GIL. Throws.
struct _object *wrap_copies(Copies copies);
// Those in such an object. Borrowed. GIL. Throws.
const Copies &copies_in(struct _object *object);

}  // namespace fsdp_torch
