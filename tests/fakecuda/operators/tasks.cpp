// Tasks of streams, aliases of memory, random numbers, copies, poison.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/native/Copy.h>
#include <ATen/ops/copy_native.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <cstring>

#include "fake.hpp"

namespace fakecuda {
namespace {

constexpr int kAssert =
    710;  // cudaErrorAssert, what a kernel's check ends with
constexpr int kPoison = 0xFF;

void run_body(void *argument) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  try {
    (*static_cast<std::function<void()> *>(argument))();
  } catch (const c10::Error &error) {
    fakecuda_fail(kAssert, error.what_without_backtrace());
  } catch (const std::exception &error) {
    fakecuda_fail(kAssert, error.what());
  }
}

void drop_body(void *argument) {
  delete static_cast<std::function<void()> *>(argument);
}

}  // namespace

void enqueue(std::function<void()> body) {
  // For debugging: the host waits for every task.
  static const bool is_synchronous = std::getenv("FAKE_CUDA_SYNC") != nullptr;
  if (fakecuda_is_noop()) body = [] {};
  fakecuda_count_operator();
  auto *kept = new std::function<void()>(std::move(body));
  void *stream = c10::cuda::getCurrentCUDAStream().stream();
  const int code = fakecuda_push(stream, run_body, drop_body, kept, nullptr);
  C10_CUDA_CHECK(static_cast<cudaError_t>(code));
  C10_CUDA_CHECK(cudaPeekAtLastError() == cudaErrorAssert ? cudaErrorAssert
                                                          : cudaSuccess);
  if (is_synchronous && fakecuda_graph_of(stream) == 0) synchronize();
}

void synchronize() {
  C10_CUDA_CHECK(
      cudaStreamSynchronize(c10::cuda::getCurrentCUDAStream().stream()));
}

at::Tensor host_alias(const at::Tensor &tensor) {
  void *data = tensor.numel() == 0 ? nullptr : tensor.data_ptr();
  at::Tensor cpu = at::from_blob(data, tensor.sizes(), tensor.strides(),
                                 tensor.options().device(c10::kCPU));
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    cpu.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  if (tensor.is_conj()) cpu._set_conj(true);
  if (tensor.is_neg()) cpu._set_neg(true);
  return cpu;
}

// ---- Random numbers ---------------------------------------------------------

std::function<at::Generator()> draw_from(
    const std::optional<at::Generator> &given) {
  constexpr uint64_t kStep = 4;  // the least that the generator moves on by
  auto *generator = at::get_generator_or_default<at::CUDAGeneratorImpl>(
      given, at::cuda::detail::getDefaultCUDAGenerator());
  at::PhiloxCudaState state;
  {
    const std::lock_guard<std::mutex> lock(generator->mutex_);
    state = generator->philox_cuda_state(kStep);
  }
  return [state] {
    // A captured state is memory that each replay writes.
    const uint64_t seed = state.captured_
                              ? static_cast<uint64_t>(*state.seed_.ptr)
                              : state.seed_.val;
    const uint64_t offset = state.captured_
                                ? static_cast<uint64_t>(*state.offset_.ptr) +
                                      state.offset_intragraph_
                                : state.offset_.val;
    return at::detail::createCPUGenerator(seed * 0x9E3779B97F4A7C15ULL ^
                                          offset);
  };
}

// ---- Copies -----------------------------------------------------------------

namespace {

// Within a device a task; between devices, or with the host, torch's own code,
// which calls the runtime.
at::Tensor &copy(at::Tensor &to, const at::Tensor &from, bool non_blocking) {
  if (!to.is_cuda() || !from.is_cuda() || to.device() != from.device() ||
      !to.has_storage() || !from.has_storage()) {
    return at::native::copy_(to, from, non_blocking);
  }
  if (to.is_same(from) || to.numel() == 0) return to;
  const at::Tensor source = from.expand(to.sizes());
  const c10::DeviceGuard guard(to.device());
  enqueue([target = host_alias(to), read = host_alias(source)]() mutable {
    target.copy_(read);
  });
  return to;
}

}  // namespace

void install_copies() {
  static torch::Library library(torch::Library::IMPL, "aten",
                                c10::DispatchKey::CUDA, __FILE__, __LINE__);
  library.impl("copy_", &copy);
}

// ---- Memory of torch's allocator --------------------------------------------

// Note [Poison]
// A block that torch's allocator hands out holds what the last user left. It is
// poisoned at its turn in the stream that it belongs to: whoever still uses it
// on another stream reads poison, and so does who reads what nobody wrote. If
// nothing is left to do on that stream, its turn is now. A freed block keeps
// its content until then, since torch's FSDP2 goes on using some, with a wait
// before the next allocation.

namespace {

struct Range {
  void *data;
  size_t nbytes;
};

void poison(void *argument) {
  const auto *range = static_cast<Range *>(argument);
  std::memset(range->data, kPoison, range->nbytes);
}

void drop_range(void *argument) {
  delete static_cast<Range *>(argument);
}

using Entry = c10::cuda::CUDACachingAllocator::TraceEntry;

void follow(const Entry &entry) {
  if (entry.action_ != Entry::ALLOC) return;
  Range range{reinterpret_cast<void *>(entry.addr_), entry.size_};
  int before = 0;
  (void)cudaGetDevice(&before);
  if (before != entry.device_) (void)cudaSetDevice(entry.device_);
  if (fakecuda_graph_of(entry.stream_) == 0 &&
      fakecuda_is_idle(entry.stream_)) {
    poison(&range);
  } else {
    (void)fakecuda_push(entry.stream_, poison, drop_range, new Range(range),
                        nullptr);
  }
  if (before != entry.device_) (void)cudaSetDevice(before);
}

}  // namespace

void poison_blocks() {
  if (fakecuda_is_noop()) return;
  // The runtime poisons what others hand out.
  if (c10::cuda::CUDACachingAllocator::name() != "native") return;
  c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker(follow);
}

}  // namespace fakecuda
