// What a kernel sees of CUDA's language when a C++ compiler compiles it for the
// fake CUDA: its place in the launch, and what its threads do together.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>

#undef __global__
#undef __device__
#undef __shared__
#undef __launch_bounds__
#define __global__
#define __device__
#define __launch_bounds__(...)
// Blocks of a stream run one after another, on its thread.
#define __shared__ static thread_local

namespace fakecuda {

struct Index {
  unsigned x;
  unsigned y;
  unsigned z;
};

// Of the thread that runs now.
extern thread_local Index block_index;
extern thread_local Index thread_index;

// All threads of the block come here before any goes on.
void meet();
// The value of the thread that is `distance` further in the warp, or one's own.
double from_further(double value, int distance);

// Enqueues: every block and thread calls `body` when it is the launch's turn.
void launch(const void *kernel, unsigned num_blocks, unsigned num_threads,
            cudaStream_t stream, std::function<void()> body);

// The launch fails as on a device if that cannot read there; NULL is fine.
void check_reached(const void *data);

// What a kernel reads and writes: tables of items (csrc/cuda/work.hpp),
// pointers.
template <typename Argument>
void check_argument(const Argument &argument) {
  if constexpr (std::is_class_v<Argument>) {
    for (int i = 0; i < argument.num_items; i++) {
      check_reached(argument.items[i].to);
      check_reached(argument.items[i].from);
    }
  } else if constexpr (std::is_pointer_v<Argument>) {
    check_reached(argument);
  }
}

// What `kernel<<<blocks, threads, shared, stream>>>` becomes; `call` is the
// kernel.
template <typename Call>
auto launcher(Call call, unsigned num_blocks, unsigned num_threads,
              size_t /*shared*/, cudaStream_t stream) {
  return [=](auto &&...arguments) {
    static const char identity = 0;  // of the kernel's instance
    (check_argument<std::decay_t<decltype(arguments)>>(arguments), ...);
    auto kept =
        std::make_tuple(std::forward<decltype(arguments)>(arguments)...);
    launch(&identity, num_blocks, num_threads, stream,
           [call, kept] { std::apply(call, kept); });
  };
}

}  // namespace fakecuda

#define blockIdx fakecuda::block_index
#define threadIdx fakecuda::thread_index
#define __syncthreads() fakecuda::meet()
#define __shfl_down_sync(mask, value, distance) \
  fakecuda::from_further(value, distance)
