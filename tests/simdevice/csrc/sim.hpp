// The simulated device as torch sees it: what its C++ files share.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <functional>
#include <string>
#include <vector>

#include "sim_graph.h"
#include "sim_memory.h"
#include "sim_streams.h"

namespace sim {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;

inline c10::Device device() {
  return {kType, 0};
}

// The stream that the calling thread enqueues on.
sim_stream *current_stream();
sim_stream *stream_of(c10::StreamId id);
c10::Stream new_stream();

// Enqueues `body` on the stream. It must hold no tensor of the device: memory
// is safe by the order of streams, or not at all, as on a GPU. What it throws
// is thrown by the host's next wait.
uint64_t enqueue(sim_stream *stream, std::function<void()> body);

// The host waits for the stream's tasks so far.
void synchronize(sim_stream *stream);
// Throws the first failure of a task, once.
void throw_failure();
// Throws if a graph is being captured and that has failed.
void throw_capture_failure();

// A CPU tensor over the memory of a tensor of the device.
at::Tensor host_alias(const at::Tensor &tensor);

inline bool is_ours(const at::Tensor &tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

// Memory of `nbytes` for the current stream, as a storage's data.
c10::DataPtr allocate(size_t nbytes);
void resize_storage(c10::StorageImpl &storage, size_t nbytes);

// Pinned host memory: knows which streams copy from it or to it.
c10::Allocator *pinned_allocator();
bool is_pinned(const void *data);
// Work so far on the stream uses this memory, if it starts a pinned block.
void record_pinned(const void *data, sim_stream *stream);

}  // namespace sim
