// The transport over c10d: for groups that no transport of our own carries.
#include "torch/groups/c10d_transport.hpp"

#include <ATen/ATen.h>
#include <ATen/ThreadLocalPythonObjects.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <Python.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/distributed/c10d/debug.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "torch/groups/break_group.hpp"
#include "torch/groups/c10d_compat.hpp"
#include "torch/groups/nccl_group.hpp"
#include "torch/guard.hpp"

namespace fsdp_torch {

namespace {

// Without the GIL: gloo's destructor waits for its threads, and one of them may
// wait for the GIL, to free a tensor of a call that ended.
void drop_group(ProcessGroupPtr &group) noexcept {
  if (!group) return;
  const bool has_gil = Py_IsInitialized() != 0 && PyGILState_Check() != 0;
  PyThreadState *state = has_gil ? PyEval_SaveThread() : nullptr;
  group.reset();
  if (state != nullptr) PyEval_RestoreThread(state);
}

}  // namespace

C10dGroup::C10dGroup() = default;
C10dGroup::C10dGroup(const C10dGroup &) = default;

C10dGroup &C10dGroup::operator=(const C10dGroup &other) {
  ProcessGroupPtr old = std::exchange(process_group, other.process_group);
  GroupFacts::operator=(other);
  drop_group(old);
  return *this;
}

C10dGroup::~C10dGroup() {
  drop_group(process_group);
}

namespace over_c10d {  // the names stand in other files, too
namespace {

using Works = c10::SmallVector<WorkPtr, 1>;  // null ones have ended

// A collective on a host that has started.
struct Pending {
  Works works;
  std::function<void()> finish;  // runs when all have ended; may be empty
};

// A collective of an open group. It is made when the group ends.
struct Collected {
  enum Kind { kAllGather, kReduceScatter, kAllReduce } kind;
  at::Tensor output;  // of an all_reduce the only one
  at::Tensor input;
};

struct Channel {
  std::deque<Pending> pending;
  uint64_t num_started = 0;
  uint64_t num_ended = 0;
  bool is_collecting = false;  // between group_begin and group_end
  std::vector<Collected> collected;
};

// Flat tensors over memory that somebody else owns. A work may keep one until
// long after its end; those that nobody else holds are used again, so a step
// makes none.
class Views {
 public:
  at::Tensor over(const void *data, int64_t numel, fsdp_dtype dtype,
                  c10::Device device) {
    for (at::Tensor &view : views_) {
      if (view.use_count() > 1 || view.storage().use_count() > 1) continue;
      // What its last holder did with it came before.
      std::atomic_thread_fence(std::memory_order_acquire);
      point_at(view, const_cast<void *>(data), numel, dtype);
      return view;
    }
    // A forward in inference mode makes one that a backward uses later.
    const c10::InferenceMode no_inference(/*enabled=*/false);
    views_.push_back(
        at::for_blob(const_cast<void *>(data), {numel})
            .options(at::TensorOptions()
                         .dtype(static_cast<at::ScalarType>(dtype.code))
                         .device(device))
            .target_device(device)  // an empty one has no address there
            .make_tensor());
    return views_.back();
  }

 private:
  static void point_at(const at::Tensor &view, void *data, int64_t numel,
                       fsdp_dtype dtype) {
    const auto type = static_cast<at::ScalarType>(dtype.code);
    c10::TensorImpl &impl = *view.unsafeGetTensorImpl();
    c10::StorageImpl &storage = *view.storage().unsafeGetStorageImpl();
    storage.set_data_ptr_noswap(c10::DataPtr(data, storage.device()));
    storage.set_nbytes(static_cast<size_t>(numel * dtype.itemsize));
    if (view.scalar_type() != type) {
      impl.set_storage_and_dtype(view.storage(),
                                 c10::scalarTypeToTypeMeta(type));
    }
    if (view.numel() != numel) impl.set_sizes_contiguous({numel});
  }

  std::vector<at::Tensor> views_;
};

// On a device, c10d's works are waited for on their stream, at once.
struct C10dTransport : fsdp_transport {
  C10dGroup group;
  Views views;
  fsdp_transport_ops table = {};
  std::array<Channel, FSDP_NUM_CHANNELS> channels;
  bool coalesces = false;
  fsdp_error failure = {};  // the first one of the ranks
};

C10dTransport &self_of(fsdp_transport *transport) {
  return *static_cast<C10dTransport *>(transport);
}

at::Tensor view(C10dTransport &self, const void *data, int64_t numel,
                fsdp_dtype dtype) {
  return self.views.over(data, numel, dtype, self.group.device);
}

// For calls that add nothing: on a device bytes, so that any dtype works.
// NCCL's backend refuses complex ones, for example. What a user's own group
// makes of a dtype is not known.
at::Tensor plain_view(C10dTransport &self, const void *data, int64_t numel,
                      fsdp_dtype dtype) {
  constexpr fsdp_dtype kBytes = {static_cast<int32_t>(at::kByte), 1};
  return self.table.is_host || !self.group.has_backend
             ? view(self, data, numel, dtype)
             : view(self, data, numel * dtype.itemsize, kBytes);
}

// Note [Python objects in thread-local state]
// Tensor.backward() keeps a Python object in the thread-local state while it
// runs, and gloo's work items capture that state. Whoever drops the last
// reference takes the GIL; when that is gloo's own thread, it does so with the
// group's queue locked, and the next collective waits for the GIL. Hence
// collectives are issued without such objects.
class WithoutPythonObjects {
 public:
  // Moved, since a copy would allocate: the state is this thread's own.
  WithoutPythonObjects()
      : saved_(std::move(const_cast<Objects &>(Objects::get_state()))) {
    Objects::set_state({});
  }
  ~WithoutPythonObjects() { Objects::set_state(std::move(saved_)); }
  WithoutPythonObjects(const WithoutPythonObjects &) = delete;
  WithoutPythonObjects &operator=(const WithoutPythonObjects &) = delete;

 private:
  using Objects = at::impl::ThreadLocalPythonObjects;
  Objects saved_;
};

void finish(C10dTransport &self, Pending &pending, bool has_failed) {
  try {
    for (const WorkPtr &work : pending.works) {
      if (work) work->wait();
    }
  } catch (...) {
    const std::string cause = failure_of_ranks();
    if (self.failure.status == FSDP_OK) {
      (void)FSDP_FAIL(&self.failure, FSDP_BACKEND, "%s", cause.c_str());
    }
    throw;
  }
  if (pending.finish && !has_failed) pending.finish();
}

// Starts what `issue` returns. On a device the stream waits for it, too.
template <typename Issue>
fsdp_status start(C10dTransport &self, const fsdp_call *call, uint64_t *ticket,
                  fsdp_error *error, Issue &&issue) {
  GUARDED(error) {
    const WithoutPythonObjects no_objects;
    // Autograd sees neither the memory nor what a backend does with its views.
    std::optional<at::AutoDispatchBelowADInplaceOrView> below;
    if (self.group.has_backend) below.emplace();
    if (self.table.is_host) {
      Channel &channel = self.channels[call->channel];
      channel.pending.push_back(issue());
      *ticket = ++channel.num_started;
      return FSDP_OK;
    }
    const c10::StreamGuard guard(known_stream(call->stream));
    Pending pending = issue();
    finish(self, pending, false);
    return FSDP_OK;
  };
}

// gloo gathers through a buffer of its own and copies twice. One broadcast per
// rank, all in flight together and in place, is faster for few ranks; with
// many, its world_size messages of log(world_size) hops are not.
constexpr int64_t kMaxBroadcastRanks = 8;

Works gather_by_broadcasts(C10dTransport &self, void *output, const void *input,
                           int64_t shard_numel, fsdp_dtype dtype) {
  const int64_t nbytes = shard_numel * dtype.itemsize;
  char *slots = static_cast<char *>(output);
  char *own = slots + self.group.rank * nbytes;
  if (own != input) std::memcpy(own, input, static_cast<size_t>(nbytes));
  Works works;
  for (int64_t root = 0; root < self.group.world_size; root++) {
    std::vector<at::Tensor> piece = {
        view(self, slots + root * nbytes, shard_numel, dtype)};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    works.push_back(self.group.process_group->broadcast(piece, options));
  }
  return works;
}

WorkPtr scatter_sum(const C10dGroup &group, at::Tensor &piece,
                    at::Tensor &whole) {
  if (group.has_backend) {
    return reduce_scatter_base(*group.process_group, piece, whole);
  }
  std::vector<at::Tensor> outputs = {piece};
  std::vector<at::Tensor> inputs = {whole};
  return reduce_scatter_base_coalesced(*group.process_group, outputs, inputs);
}

// Each rank sends its slots to the other ranks and adds up what it got, in the
// order of gloo's own reduce-scatter (Note [Order of sums]) and half its time.
// `others` holds a shard of each other rank. all_to_all sends contiguous slots,
// and a rank's own, which is not sent, parts them: hence two calls, one to the
// ranks below and one to those above. Of two ranks, one call.
Pending reduce_by_exchange(C10dTransport &self, void *buffer, void *others,
                           int64_t shard_numel, fsdp_dtype dtype) {
  const int64_t rank = self.group.rank;
  const int64_t world_size = self.group.world_size;
  const auto slots = [&](void *data, int64_t begin, int64_t end) {
    const int64_t offset = begin * shard_numel * dtype.itemsize;
    return view(self, static_cast<char *>(data) + offset,
                (end - begin) * shard_numel, dtype);
  };
  const auto sizes = [&](int64_t begin, int64_t end) {
    std::vector<int64_t> of_ranks(static_cast<size_t>(world_size), 0);
    std::fill(of_ranks.begin() + begin, of_ranks.begin() + end, shard_numel);
    return of_ranks;
  };
  const auto place = [&](int64_t other) { return other - (other > rank); };
  Works works;
  const auto exchange = [&](int64_t to, int64_t to_end, int64_t from,
                            int64_t from_end) {
    at::Tensor sent = slots(buffer, to, to_end);
    at::Tensor received = slots(others, place(from), place(from_end));
    works.push_back(all_to_all_base(*self.group.process_group, received, sent,
                                    sizes(from, from_end), sizes(to, to_end)));
  };
  if (world_size == 2) {
    exchange(1 - rank, 2 - rank, 1 - rank, 2 - rank);
  } else {
    exchange(0, rank, rank + 1, world_size);
    exchange(rank + 1, world_size, 0, rank);
  }
  c10::SmallVector<at::Tensor, 8> parts;
  for (int64_t turn = 1; turn < world_size; turn++) {
    const int64_t from = place((rank + world_size - turn) % world_size);
    parts.push_back(slots(others, from, from + 1));
  }
  const auto sum = [parts, own = slots(buffer, rank, rank + 1)]() mutable {
    for (size_t i = 1; i < parts.size(); i++) parts[0].add_(parts[i]);
    own.add_(parts[0]);
  };
  return {works, sum};
}

// Groups ----------------------------------------------------------------------
//
// A unit by rows has a segment for each parameter, and a call of c10d costs
// more than what it is about: its work, its events, its record for the
// debugger. Backends of devices take many tensors in a call. On a host a
// merging transport (transports/merging.h) has the same task.

bool can_coalesce(const C10dGroup &group) {
  if (group.device.is_cpu() || !group.has_backend) return false;
  // In 2.11 the wrapper that checks each call knows no such calls.
  if (c10d::debug_level() == c10d::DebugLevel::Detail) return false;
  const auto backend = group.process_group->getBackend(group.device.type());
  return backend->supportsCoalescing() || backend->getBackendName() == "fake";
}

// Makes one call of collectives of one kind and dtype.
WorkPtr coalesce(C10dTransport &self, const Collected *begin,
                 const Collected *end) {
  c10d::ProcessGroup &group = *self.group.process_group;
  std::vector<at::Tensor> outputs;
  std::vector<at::Tensor> inputs;
  for (const Collected *each = begin; each != end; each++) {
    outputs.push_back(each->output);
    if (each->input.defined()) inputs.push_back(each->input);
  }
  const bool is_one = outputs.size() == 1;
  switch (begin->kind) {
    case Collected::kAllGather:
      return is_one ? all_gather_base(group, outputs[0], inputs[0])
                    : all_gather_base_coalesced(group, outputs, inputs);
    case Collected::kReduceScatter:
      return is_one ? reduce_scatter_base(group, outputs[0], inputs[0])
                    : reduce_scatter_base_coalesced(group, outputs, inputs);
    case Collected::kAllReduce:
    default:
      return is_one ? group.allreduce(outputs)
                    : group.allreduce_coalesced(outputs);
  }
}

// The end of the calls of one kind and dtype that start at `begin`.
const Collected *end_of_alike(const Collected *begin, const Collected *end) {
  return std::find_if(begin, end, [begin](const Collected &each) {
    return each.kind != begin->kind ||
           each.output.scalar_type() != begin->output.scalar_type();
  });
}

// Collects the call if a group is open; else returns false.
bool collect(C10dTransport &self, const fsdp_call *call, Collected::Kind kind,
             const at::Tensor &output, const at::Tensor &input = {}) {
  Channel &channel = self.channels[call->channel];
  if (!channel.is_collecting) return false;
  channel.collected.push_back({kind, output, input});
  return true;
}

// The table -------------------------------------------------------------------

void destroy(fsdp_transport *transport) {
  delete static_cast<C10dTransport *>(transport);
}

fsdp_status group_begin(fsdp_transport *transport, const fsdp_call *call,
                        fsdp_error * /*error*/) {
  C10dTransport &self = self_of(transport);
  Channel &channel = self.channels[call->channel];
  channel.collected.clear();  // of one that failed half-way
  channel.is_collecting = self.coalesces;
  return FSDP_OK;
}

fsdp_status group_end(fsdp_transport *transport, const fsdp_call *call,
                      fsdp_error *error) {
  C10dTransport &self = self_of(transport);
  Channel &channel = self.channels[call->channel];
  channel.is_collecting = false;
  fsdp_status status = FSDP_OK;
  uint64_t no_ticket = 0;  // of a device
  // In the order in which they came, which is that of all ranks.
  const Collected *const end =
      channel.collected.data() + channel.collected.size();
  for (const Collected *begin = channel.collected.data();
       status == FSDP_OK && begin != end;) {
    const Collected *const other = end_of_alike(begin, end);
    status = start(self, call, &no_ticket, error, [&]() -> Pending {
      return {{coalesce(self, begin, other)}, nullptr};
    });
    begin = other;
  }
  channel.collected.clear();
  return status;
}

fsdp_status all_gather(fsdp_transport *transport, const fsdp_call *call,
                       void *output, const void *input, int64_t shard_numel,
                       fsdp_dtype dtype, uint64_t *ticket, fsdp_error *error) {
  C10dTransport &self = self_of(transport);
  return start(self, call, ticket, error, [&]() -> Pending {
    if (self.group.is_gloo && self.group.world_size <= kMaxBroadcastRanks) {
      return {gather_by_broadcasts(self, output, input, shard_numel, dtype),
              nullptr};
    }
    at::Tensor whole =
        plain_view(self, output, shard_numel * self.group.world_size, dtype);
    at::Tensor piece = plain_view(self, input, shard_numel, dtype);
    if (collect(self, call, Collected::kAllGather, whole, piece)) return {};
    return {{all_gather_over_c10d(self.group, whole, piece)}, nullptr};
  });
}

fsdp_status broadcast(fsdp_transport *transport, const fsdp_call *call,
                      void *buffer, int64_t numel, int64_t root,
                      fsdp_dtype dtype, uint64_t *ticket, fsdp_error *error) {
  C10dTransport &self = self_of(transport);
  return start(self, call, ticket, error, [&]() -> Pending {
    std::vector<at::Tensor> tensors = {plain_view(self, buffer, numel, dtype)};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    return {{self.group.process_group->broadcast(tensors, options)}, nullptr};
  });
}

fsdp_status reduce_scatter(fsdp_transport *transport, const fsdp_call *call,
                           void *buffer, int64_t shard_numel, fsdp_dtype dtype,
                           uint64_t *ticket, fsdp_error *error) {
  C10dTransport &self = self_of(transport);
  return start(self, call, ticket, error, [&]() -> Pending {
    if (call->scratch != nullptr) {
      return reduce_by_exchange(self, buffer, call->scratch, shard_numel,
                                dtype);
    }
    char *slot = static_cast<char *>(buffer) +
                 self.group.rank * shard_numel * dtype.itemsize;
    at::Tensor own = view(self, slot, shard_numel, dtype);
    at::Tensor whole =
        view(self, buffer, shard_numel * self.group.world_size, dtype);
    if (collect(self, call, Collected::kReduceScatter, own, whole)) return {};
    return {{scatter_sum(self.group, own, whole)}, nullptr};
  });
}

fsdp_status all_reduce(fsdp_transport *transport, const fsdp_call *call,
                       void *buffer, int64_t numel, fsdp_dtype dtype,
                       uint64_t *ticket, fsdp_error *error) {
  C10dTransport &self = self_of(transport);
  return start(self, call, ticket, error, [&]() -> Pending {
    std::vector<at::Tensor> tensors = {view(self, buffer, numel, dtype)};
    if (collect(self, call, Collected::kAllReduce, tensors[0])) return {};
    return {{self.group.process_group->allreduce(tensors)}, nullptr};
  });
}

// After a failure the rest, up to the ticket, still has to end, because its
// memory will be reused.
fsdp_status wait(fsdp_transport *transport, fsdp_channel index, uint64_t ticket,
                 fsdp_error *error) {
  GUARDED(error) {
    C10dTransport &self = self_of(transport);
    Channel &channel = self.channels[index];
    std::exception_ptr failure;
    while (channel.num_ended < ticket && !channel.pending.empty()) {
      Pending next = std::move(channel.pending.front());
      channel.pending.pop_front();
      channel.num_ended++;
      try {
        finish(self, next, failure != nullptr);
      } catch (...) {
        if (!failure) failure = std::current_exception();
      }
    }
    if (failure) std::rethrow_exception(failure);
    return FSDP_OK;
  };
}

bool is_done(fsdp_transport *transport, fsdp_channel index, uint64_t ticket) {
  const Channel &channel = self_of(transport).channels[index];
  uint64_t number = channel.num_ended;
  for (const Pending &each : channel.pending) {
    if (number++ >= ticket) break;
    for (const WorkPtr &work : each.works) {
      if (work && !work->isCompleted()) return false;
    }
  }
  return true;
}

// Unlike other transports this one still makes calls after a failure: a user's
// own group may have recovered.
fsdp_status check(fsdp_transport *transport, fsdp_error *error) {
  const C10dTransport &self = self_of(transport);
  if (self.failure.status != FSDP_OK && error != nullptr) *error = self.failure;
  return self.failure.status;
}

// Of gloo: the others' calls end, too.
void give_up(fsdp_transport *transport, const char * /*cause*/) {
  break_gloo(*self_of(transport).group.process_group);
}

}  // namespace
}  // namespace over_c10d

std::string failure_of_ranks() {
  try {
    throw;
  } catch (const c10::DistBackendError &e) {
    return e.what_without_backtrace();
  } catch (const c10::Error &) {
    throw;                             // of the tensors, not of the ranks
  } catch (const std::exception &e) {  // gloo's
    return e.what();
  }
}

WorkPtr all_gather_over_c10d(const C10dGroup &group, at::Tensor &whole,
                             at::Tensor &piece) {
  if (group.has_backend) {
    return all_gather_base(*group.process_group, whole, piece);
  }
  std::vector<at::Tensor> outputs = {whole};
  std::vector<at::Tensor> inputs = {piece};
  return all_gather_base_coalesced(*group.process_group, outputs, inputs);
}

std::shared_ptr<fsdp_transport> make_c10d_transport(const C10dGroup &group) {
  auto self = std::make_unique<over_c10d::C10dTransport>();
  self->group = group;
  self->coalesces = over_c10d::can_coalesce(group);
  self->table.name = "c10d";
  self->table.is_host = group.device.is_cpu();
  self->table.wants_scratch = group.is_gloo;
  self->table.destroy = over_c10d::destroy;
  self->table.group_begin = over_c10d::group_begin;
  self->table.group_end = over_c10d::group_end;
  self->table.all_gather = over_c10d::all_gather;
  self->table.broadcast = over_c10d::broadcast;
  self->table.reduce_scatter = over_c10d::reduce_scatter;
  self->table.all_reduce = over_c10d::all_reduce;
  if (self->table.is_host) {
    self->table.wait = over_c10d::wait;
    self->table.is_done = over_c10d::is_done;
  }
  self->table.check = over_c10d::check;
  if (group.is_gloo) self->table.give_up = over_c10d::give_up;
  self->ops = &self->table;
  return {self.release(), over_c10d::destroy};
}

}  // namespace fsdp_torch
