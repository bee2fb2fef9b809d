// Host memory of csrc/host/pages.h as torch owns memory.
#pragma once

#include <c10/core/Allocator.h>

#include <memory>

namespace fsdp_torch {

// Uninitialised. Throws std::bad_alloc.
c10::DataPtr make_host_memory(size_t nbytes);

// The same, for what comes and goes in every step: Note [Kept pages].
c10::DataPtr make_kept_host_memory(size_t nbytes);

// Address space of zeros (fsdp_host_space_alloc). Null: out of memory.
std::shared_ptr<c10::DataPtr> make_host_space(int64_t nbytes);

}  // namespace fsdp_torch
