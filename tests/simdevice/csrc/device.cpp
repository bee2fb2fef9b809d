// Device, streams, events and allocators of the simulated device, for c10.
#include <ATen/Context.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>
#include <map>
#include <memory>
#include <mutex>

#include "sim.hpp"

namespace sim {
namespace {

// Streams by id; 0 is the default stream, then come those of the pool. CUDA's
// pool has 32, so that streams of different owners are one. That would hide
// missing waits, hence more here.
constexpr c10::StreamId kPoolStreams = 1024;

struct Streams {
  std::mutex mutex;
  std::vector<sim_stream *> by_id;
  c10::StreamId next_of_pool = 0;

  Streams() {
    for (c10::StreamId id = 0; id <= kPoolStreams; id++) {
      by_id.push_back(sim_stream_create());
    }
  }
};

Streams &streams() {
  static Streams *all = new Streams();  // outlives static destructors
  return *all;
}

thread_local c10::StreamId current_id = 0;

}  // namespace

sim_stream *stream_of(c10::StreamId id) {
  Streams &all = streams();
  const std::lock_guard<std::mutex> lock(all.mutex);
  return all.by_id.at(static_cast<size_t>(id));
}

sim_stream *current_stream() {
  return stream_of(current_id);
}

c10::Stream new_stream() {
  Streams &all = streams();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.by_id.push_back(sim_stream_create());
  return c10::Stream(c10::Stream::UNSAFE, device(),
                     static_cast<c10::StreamId>(all.by_id.size() - 1));
}

namespace {

void run_body(void *argument) {
  try {
    (*static_cast<std::function<void()> *>(argument))();
  } catch (const c10::Error &e) {
    sim_fail(e.what_without_backtrace());
  } catch (const std::exception &e) {
    sim_fail(e.what());
  }
}

void drop_body(void *argument) {
  delete static_cast<std::function<void()> *>(argument);
}

}  // namespace

uint64_t enqueue(sim_stream *stream, std::function<void()> body) {
  // For debugging: the host waits for every task.
  static const bool is_synchronous = std::getenv("SIM_SYNC") != nullptr;
  auto *kept = new std::function<void()>(std::move(body));
  const uint64_t ticket = sim_stream_push(stream, run_body, drop_body, kept);
  if (is_synchronous && !sim_graph_is_capturing()) {
    sim_stream_synchronize(stream, ticket);
  }
  return ticket;
}

void throw_capture_failure() {
  char message[256];
  TORCH_CHECK(
      !sim_graph_failure(message, sizeof message),
      "sim: operation not permitted when a stream is capturing: ", message);
}

void throw_failure() {
  throw_capture_failure();
  char message[1024];
  if (sim_take_failure(message, sizeof message)) {
    TORCH_CHECK(false, "a task of the sim device failed: ", message);
  }
}

void synchronize(sim_stream *stream) {
  sim_stream_synchronize(stream, sim_stream_last(stream));
  throw_failure();
}

// ---- Memory
// ------------------------------------------------------------------

namespace {

// To torch's profiler, whose events tests count.
void report(void *data, int64_t nbytes) {
  if (!c10::memoryProfilingEnabled()) return;
  const sim_memory_stats stats = sim_memory_get_stats();
  c10::reportMemoryUsageToProfiler(
      data, nbytes, static_cast<size_t>(stats.live_nbytes),
      static_cast<size_t>(stats.held_nbytes), device());
}

void release(void *data) {
  if (data == nullptr) return;
  report(data, -static_cast<int64_t>(sim_memory_nbytes(data)));
  sim_memory_free(data);
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, device()};
    void *data = sim_memory_alloc(current_stream(), nbytes);
    TORCH_CHECK_WITH(OutOfMemoryError, data != nullptr,
                     "sim device out of memory: tried to allocate ", nbytes,
                     " bytes");
    report(data, static_cast<int64_t>(nbytes));
    return {data, data, release, device()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return release; }
  void copy_data(void *to, const void *from, size_t nbytes) const override {
    sim_stream *stream = current_stream();
    enqueue(stream, [=] { std::memcpy(to, from, nbytes); });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t /*pool*/) override {
    sim_memory_empty_cache();
  }
  void recordStream(const c10::DataPtr &data, c10::Stream stream) override {
    sim_memory_record_stream(data.get_context(), stream_of(stream.id()));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(
      c10::DeviceIndex /*index*/) override {
    using c10::CachingAllocator::StatType;
    const sim_memory_stats stats = sim_memory_get_stats();
    const auto all = static_cast<size_t>(StatType::AGGREGATE);
    c10::CachingDeviceAllocator::DeviceStats out;
    out.allocated_bytes[all].current = stats.live_nbytes;
    out.allocated_bytes[all].peak = stats.peak_nbytes;
    out.active_bytes[all] = out.allocated_bytes[all];
    out.reserved_bytes[all].current = stats.held_nbytes;
    out.allocation[all].current = stats.live_blocks;
    out.allocation[all].allocated = stats.num_allocs;
    return out;
  }
  void resetAccumulatedStats(c10::DeviceIndex /*index*/) override {}
  void resetPeakStats(c10::DeviceIndex /*index*/) override {
    sim_memory_reset_peak();
  }
};

DeviceMemory device_memory;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &device_memory)

// Freed pinned memory goes back once the copies that were recorded are done.
struct PinnedMemory final : c10::Allocator {
  struct Block {
    size_t nbytes = 0;
    std::map<sim_stream *, uint64_t> uses;
  };
  std::mutex mutex;
  std::map<const void *, Block> blocks;

  static PinnedMemory &get() {
    static auto *memory = new PinnedMemory();
    return *memory;
  }

  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, c10::kCPU};
    const size_t rounded = (nbytes + 63) / 64 * 64;
    void *data = std::aligned_alloc(64, rounded);
    if (data == nullptr) throw std::bad_alloc();
    std::memset(data, 0xFF, rounded);
    const std::lock_guard<std::mutex> lock(mutex);
    blocks[data] = {rounded, {}};
    return {data, data, release, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return release; }
  void copy_data(void *to, const void *from, size_t nbytes) const override {
    default_copy_data(to, from, nbytes);
  }

  static void release(void *data) {
    PinnedMemory &self = get();
    Block block;
    {
      const std::lock_guard<std::mutex> lock(self.mutex);
      block = self.blocks.at(data);
      self.blocks.erase(data);
    }
    for (const auto &[stream, ticket] : block.uses) {
      sim_stream_synchronize(stream, ticket);
    }
    std::memset(data, 0xFF, block.nbytes);
    std::free(data);
  }
};

}  // namespace

c10::DataPtr allocate(size_t nbytes) {
  return device_memory.allocate(nbytes);
}

void resize_storage(c10::StorageImpl &storage, size_t nbytes) {
  c10::DataPtr data = allocate(nbytes);
  const size_t kept = std::min(nbytes, storage.nbytes());
  if (kept > 0) {
    device_memory.copy_data(data.get(), storage.data(), kept);
  }
  storage.set_data_ptr_noswap(std::move(data));
  storage.set_nbytes(nbytes);
}

c10::Allocator *pinned_allocator() {
  return &PinnedMemory::get();
}

bool is_pinned(const void *data) {
  PinnedMemory &memory = PinnedMemory::get();
  const std::lock_guard<std::mutex> lock(memory.mutex);
  auto after = memory.blocks.upper_bound(data);
  if (after == memory.blocks.begin()) return false;
  const auto &[begin, block] = *--after;
  return data < static_cast<const char *>(begin) + block.nbytes;
}

void record_pinned(const void *data, sim_stream *stream) {
  PinnedMemory &memory = PinnedMemory::get();
  const std::lock_guard<std::mutex> lock(memory.mutex);
  const auto found = memory.blocks.find(data);
  if (found == memory.blocks.end()) return;
  found->second.uses[stream] = sim_stream_last(stream);
}

// ---- Device, streams, events ------------------------------------------------

namespace {

struct Event {
  sim_stream *stream;
  uint64_t ticket;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  static c10::Stream stream(c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, device(), id);
  }
  c10::Stream getStream(c10::Device) const override {
    return stream(current_id);
  }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    Streams &all = streams();
    const std::lock_guard<std::mutex> lock(all.mutex);
    return stream(1 + all.next_of_pool++ % kPoolStreams);
  }
  c10::Stream getNewStream(c10::Device, int) const override {
    return new_stream();
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const c10::Stream previous = stream(current_id);
    current_id = next.id();
    return previous;
  }
  void *getStreamNativeHandle(const c10::Stream s) const override {
    return stream_of(s.id());
  }
  bool queryStream(const c10::Stream &s) const override {
    sim_stream *stream = stream_of(s.id());
    const bool is_done = sim_stream_is_done(stream, sim_stream_last(stream));
    throw_capture_failure();
    return is_done;
  }
  void synchronizeStream(const c10::Stream &s) const override {
    sim::synchronize(stream_of(s.id()));
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    sim_synchronize();
    throw_failure();
  }

  void destroyEvent(void *event,
                    const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event *>(event);
  }
  void record(void **event, const c10::Stream &s, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event();
    sim_stream *stream = stream_of(s.id());
    *static_cast<Event *>(*event) = {stream, sim_stream_last(stream)};
  }
  void block(void *event, const c10::Stream &s) const override {
    const Event &self = *static_cast<Event *>(event);
    sim_stream_wait(stream_of(s.id()), self.stream, self.ticket);
    if (s.id() == 0 && sim_graph_of(stream_of(0)) != 0) {
      sim_graph_fail("the default stream cannot be captured");
    }
    throw_capture_failure();
  }
  bool isStreamCapturing(const c10::Stream &s) const override {
    return sim_graph_of(stream_of(s.id())) != 0;
  }
  bool queryEvent(void *event) const override {
    const auto *self = static_cast<Event *>(event);
    const bool is_done =
        self == nullptr || sim_stream_is_done(self->stream, self->ticket);
    throw_capture_failure();
    return is_done;
  }
  void synchronizeEvent(void *event) const override {
    const Event &self = *static_cast<Event *>(event);
    sim_stream_synchronize(self.stream, self.ticket);
    throw_failure();
  }
  double elapsedTime(void *, void *, const c10::DeviceIndex) const override {
    return 0.0;
  }
  void recordDataPtrOnStream(const c10::DataPtr &data,
                             const c10::Stream &s) const override {
    device_memory.recordStream(data, s);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  bool isPinnedPtr(const void *data) const override {
    return sim::is_pinned(data);
  }
  c10::Allocator *getPinnedMemoryAllocator() const override {
    return sim::pinned_allocator();
  }
  c10::Device getDeviceFromPtr(void *) const override { return device(); }
  // Random numbers are drawn by the CPU's kernels, from the CPU's generator.
  const at::Generator &getDefaultGenerator(c10::DeviceIndex) const override {
    return at::globalContext().defaultGenerator(c10::kCPU);
  }
  void resizePrivateUse1Bytes(const c10::Storage &storage,
                              size_t nbytes) const override {
    sim::resize_storage(*storage.unsafeGetStorageImpl(), nbytes);
  }
};

[[maybe_unused]] const bool is_hooked = [] {
  static auto *hooks = new Hooks();
  at::RegisterPrivateUse1HooksInterface(hooks);
  return true;
}();

}  // namespace
}  // namespace sim
