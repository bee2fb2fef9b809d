// Launches of kernels: blocks one after another, and the threads of a block as
// fibers, each of which runs until the threads have to meet.
#include <sys/mman.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <set>
#include <vector>

#include "cuda_runtime.h"

extern "C" {
// Of the runtime (tests/fakecuda/runtime/fake.h).
int fakecuda_push(void *stream, void (*task)(void *), void (*drop)(void *),
                  void *argument, uint64_t *ticket);
bool fakecuda_is_noop(void);
void fakecuda_count_launch(void);
bool fakecuda_is_reached(const void *data, size_t nbytes);
void fakecuda_fail(int code, const char *message);
}

namespace fakecuda {

thread_local Index block_index;
thread_local Index thread_index;

namespace {

constexpr unsigned kWarp = 32;
constexpr unsigned kMostThreads = 1024;
constexpr size_t kStack = 256 << 10;

struct Launch {
  const void *kernel;
  unsigned num_blocks;
  unsigned num_threads;
  std::function<void()> body;
};

struct Fiber {
  ucontext_t context;
  void *stack = nullptr;
  bool is_running = false;
  unsigned num_meetings = 0;
  double told[2] = {0, 0};  // to the warp, by the parity of the meeting
};

struct Block {
  std::vector<Fiber> fibers;
  ucontext_t scheduler;
  const Launch *launch = nullptr;
  bool has_met = false;
};

thread_local Block *block;  // of this stream; NULL: threads do not meet

// Kernels that were seen to run without a meeting: their threads need no
// fibers.
std::mutex alone_mutex;
std::set<const void *> &alone() {
  static auto &kernels = *new std::set<const void *>;
  return kernels;
}

Fiber &current() {
  if (block == nullptr) {
    std::fputs("fake CUDA: threads meet that did not in an earlier launch\n",
               stderr);
    std::abort();
  }
  return block->fibers[thread_index.x];
}

// The others run until they come here, or end.
void let_others_run() {
  Fiber &mine = current();
  block->has_met = true;
  mine.num_meetings++;
  swapcontext(&mine.context, &block->scheduler);
}

void run_fiber() {
  Fiber &mine = current();
  block->launch->body();
  mine.is_running = false;
}

void run_block() {
  for (Fiber &fiber : block->fibers) {
    if (fiber.stack == nullptr) {
      fiber.stack = mmap(nullptr, kStack, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    }
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack;
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = &block->scheduler;
    makecontext(&fiber.context, run_fiber, 0);
    fiber.is_running = true;
    fiber.num_meetings = 0;
  }
  for (bool is_any = true; is_any;) {
    is_any = false;
    for (unsigned i = 0; i < block->fibers.size(); i++) {
      Fiber &fiber = block->fibers[i];
      if (!fiber.is_running) continue;
      is_any = true;
      thread_index = {i, 0, 0};
      swapcontext(&block->scheduler, &fiber.context);
    }
  }
}

void run_together(const Launch &launch) {
  static thread_local Block own;
  own.fibers.resize(launch.num_threads);
  own.launch = &launch;
  own.has_met = false;
  block = &own;
  for (unsigned i = 0; i < launch.num_blocks; i++) {
    block_index = {i, 0, 0};
    run_block();
  }
  block = nullptr;
  if (own.has_met) return;
  const std::lock_guard<std::mutex> lock(alone_mutex);
  alone().insert(launch.kernel);
}

void run_launch(void *argument) {
  const auto &launch = *static_cast<const Launch *>(argument);
  if (fakecuda_is_noop()) return;
  bool is_alone = false;
  {
    const std::lock_guard<std::mutex> lock(alone_mutex);
    is_alone = alone().count(launch.kernel) > 0;
  }
  if (!is_alone) {
    run_together(launch);
    return;
  }
  for (unsigned i = 0; i < launch.num_blocks; i++) {
    block_index = {i, 0, 0};
    for (unsigned thread = 0; thread < launch.num_threads; thread++) {
      thread_index = {thread, 0, 0};
      launch.body();
    }
  }
}

void drop_launch(void *argument) {
  delete static_cast<Launch *>(argument);
}

}  // namespace

void meet() {
  let_others_run();
}

double from_further(double value, int distance) {
  Fiber &mine = current();
  const unsigned parity = mine.num_meetings % 2;
  const unsigned self = thread_index.x;
  const unsigned lane = self % kWarp + static_cast<unsigned>(distance);
  mine.told[parity] = value;
  let_others_run();
  const unsigned other = self - self % kWarp + lane;
  if (lane >= kWarp || other >= block->fibers.size()) return value;
  return block->fibers[other].told[parity];
}

void check_reached(const void *data) {
  if (data == nullptr || fakecuda_is_reached(data, 1)) return;
  fakecuda_fail(cudaErrorIllegalAddress,
                "a kernel of csrc/cuda, in memory of the host");
}

void launch(const void *kernel, unsigned num_blocks, unsigned num_threads,
            cudaStream_t stream, std::function<void()> body) {
  if (num_blocks == 0 || num_threads == 0 || num_threads > kMostThreads) {
    // What CUDA says to it.
    dim3 grid(num_blocks);
    dim3 threads(num_threads);
    (void)cudaLaunchKernel(kernel, grid, threads, nullptr, 0, stream);
    return;
  }
  fakecuda_count_launch();
  auto *made = new Launch{kernel, num_blocks, num_threads, std::move(body)};
  (void)fakecuda_push(stream, run_launch, drop_launch, made, nullptr);
}

}  // namespace fakecuda
