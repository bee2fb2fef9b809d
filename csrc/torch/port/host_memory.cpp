#include "torch/port/host_memory.hpp"

#include <memory>
#include <new>

#include "host/pages.h"

namespace fsdp_torch {
namespace {

struct HostMemory {
  void *data;
  int64_t nbytes;

  static void free(void *context) {
    const std::unique_ptr<HostMemory> memory(
        static_cast<HostMemory *>(context));
    fsdp_host_pages_free(memory->data, memory->nbytes);
  }
};

}  // namespace

c10::DataPtr make_host_memory(size_t nbytes) {
  auto memory = std::make_unique<HostMemory>();
  memory->nbytes = nbytes == 0 ? 1 : static_cast<int64_t>(nbytes);
  memory->data = fsdp_host_pages_alloc(memory->nbytes);
  if (memory->data == nullptr) throw std::bad_alloc();
  void *data = memory->data;
  return c10::DataPtr(data, memory.release(), &HostMemory::free, c10::kCPU);
}

}  // namespace fsdp_torch
