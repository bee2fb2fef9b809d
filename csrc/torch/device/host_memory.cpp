#include "torch/device/host_memory.hpp"

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

  static void keep(void *context) {
    const std::unique_ptr<HostMemory> memory(
        static_cast<HostMemory *>(context));
    fsdp_host_pages_keep(memory->data, memory->nbytes);
  }

  static void free_space(void *context) {
    const std::unique_ptr<HostMemory> memory(
        static_cast<HostMemory *>(context));
    fsdp_host_space_free(memory->data, memory->nbytes);
  }
};

c10::DataPtr own(void *data, int64_t nbytes, c10::DeleterFnPtr free) {
  auto memory = std::make_unique<HostMemory>(HostMemory{data, nbytes});
  return c10::DataPtr(data, memory.release(), free, c10::kCPU);
}

c10::DataPtr make_pages(size_t nbytes, c10::DeleterFnPtr free) {
  const auto wanted = static_cast<int64_t>(nbytes == 0 ? 1 : nbytes);
  void *data = fsdp_host_pages_alloc(wanted);
  if (data == nullptr) throw std::bad_alloc();
  return own(data, wanted, free);
}

}  // namespace

c10::DataPtr make_host_memory(size_t nbytes) {
  return make_pages(nbytes, &HostMemory::free);
}

c10::DataPtr make_kept_host_memory(size_t nbytes) {
  return make_pages(nbytes, &HostMemory::keep);
}

std::shared_ptr<c10::DataPtr> make_host_space(int64_t nbytes) {
  void *data = fsdp_host_space_alloc(nbytes);
  if (data == nullptr) return nullptr;
  return std::make_shared<c10::DataPtr>(
      own(data, nbytes, &HostMemory::free_space));
}

}  // namespace fsdp_torch
