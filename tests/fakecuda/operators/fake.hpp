// The operators of the fake CUDA: what its C++ files share.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <functional>

extern "C" {
// Of the runtime, which is loaded before torch (tests/fakecuda/runtime/fake.h).
int fakecuda_push(void *stream, void (*task)(void *), void (*drop)(void *),
                  void *argument, uint64_t *ticket);
bool fakecuda_is_idle(void *stream);
uint64_t fakecuda_graph_of(void *stream);
void fakecuda_fail(int code, const char *message);
bool fakecuda_is_noop(void);
void fakecuda_count_operator(void);
}

namespace fakecuda {

using torch::jit::Stack;

// Enqueues `body` on the current stream. It must hold no tensor of the device:
// memory is safe by the order of streams, or not at all, as on a GPU. When it
// throws, the device has failed.
void enqueue(std::function<void()> body);

// The host waits for the current stream's tasks so far.
void synchronize();

// A CPU tensor over the memory of a tensor of the device.
at::Tensor host_alias(const at::Tensor &tensor);

// Numbers that a task draws. They depend on the state that the device's
// generator has when the operator is called, which then moves on, and on
// nothing else.
std::function<at::Generator()> draw_from(
    const std::optional<at::Generator> &given);

// Replaces torch's operators of CUDA; returns how many.
int install_operators();
void install_copies();
// Operators that only CUDA has.
void install_fused();
// Raises what CUDA would say of the dtypes of a call.
void check_dtypes(const c10::FunctionSchema &schema, const Stack &arguments);
// What torch's allocator hands out is poisoned (Note [Poison]).
void poison_blocks();

}  // namespace fakecuda
