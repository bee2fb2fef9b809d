#include "torch/groups/nccl_group.hpp"

#include <c10/core/Allocator.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "nccl/nccl_transport.h"
#include "torch/guard.hpp"

namespace fsdp_torch {
namespace {

// Streams by their native handles --------------------------------------------

struct Streams {
  std::mutex mutex;
  std::unordered_map<void *, c10::Stream> by_handle;
};

Streams &streams() {
  static auto *const self = new Streams();  // the watchdog may outlive others
  return *self;
}

// Events for the watchdog -----------------------------------------------------

// The device whose events a transport uses; lives as long as the transport.
struct EventSource {
  c10::Device device;
};

fsdp_status event_create(void *context, void **event, fsdp_error *error) {
  GUARDED(error) {
    const auto &source = *static_cast<EventSource *>(context);
    *event = new c10::Event(source.device.type());
    return FSDP_OK;
  };
}

void event_destroy(void * /*context*/, void *event) {
  delete static_cast<c10::Event *>(event);
}

fsdp_status event_record(void * /*context*/, void *event, void *stream,
                         fsdp_error *error) {
  GUARDED(error) {
    static_cast<c10::Event *>(event)->record(known_stream(stream));
    return FSDP_OK;
  };
}

fsdp_status event_query(void * /*context*/, void *event, bool *is_done,
                        fsdp_error *error) {
  GUARDED(error) {
    *is_done = static_cast<c10::Event *>(event)->query();
    return FSDP_OK;
  };
}

void enter_thread(void *context) {
  const c10::Device device = static_cast<EventSource *>(context)->device;
  // Where a user captures a graph, the watchdog's questions must not spoil it.
  if (device.is_cuda()) (void)fsdp_nccl_relax_capture();
  const c10::impl::VirtualGuardImpl guard(device.type());
  guard.uncheckedSetDevice(device);
}

// The library -----------------------------------------------------------------

// Where the NCCL wheel keeps it, next to torch; empty if that is unknown.
std::string wheel_folder() {
  Dl_info info = {};
  // Any function of torch's: the folder above torch/lib is site-packages.
  if (dladdr(reinterpret_cast<void *>(&c10::GetAllocator), &info) == 0 ||
      info.dli_fname == nullptr) {
    return "";
  }
  const std::string file = info.dli_fname;
  const size_t end = file.rfind("/torch/lib/");
  return end == std::string::npos ? ""
                                  : file.substr(0, end) + "/nvidia/nccl/lib";
}

// Opened once; a failure is remembered, too.
struct Library {
  fsdp_nccl_library library = {};
  std::string why_not;
};

const Library &the_library() {
  static const auto *const self = [] {
    auto *made = new Library();
    if (FSDP_C_ROCM != 0) {  // its librccl has NCCL's names
      made->why_not = "this torch is for AMD GPUs, which c10d serves";
      return made;
    }
    fsdp_nccl_search search = {};
    const std::string wheel = wheel_folder();
    search.forced_path = std::getenv("FSDP_C_NCCL_LIBRARY");
    search.wheel_path = wheel.empty() ? nullptr : wheel.c_str();
    fsdp_error error = {};
    if (fsdp_nccl_library_open(&search, &made->library, &error) != FSDP_OK) {
      made->why_not = text_of(error);
    }
    return made;
  }();
  return *self;
}

// What a transport's threads use, for as long as one of them may run.
struct Owner {
  EventSource source;
  std::shared_ptr<void> store;
};

void release_owner(void *owner) {
  delete static_cast<Owner *>(owner);
}

// Whether all ranks have a library and want to use it; else one rank's reason.
bool agree(const fsdp_store &store, int64_t rank, int64_t world_size,
           int64_t timeout_ms, const std::string &mine, std::string *why_not) {
  constexpr const char *kKey = "nccl/library";
  std::array<char, FSDP_ERROR_MESSAGE_NBYTES> reason = {};
  bool is_possible = false;
  fsdp_error error = {};
  if (fsdp_nccl_meeting_arrive(&store, kKey, rank, world_size, mine.c_str(),
                               &error) != FSDP_OK ||
      fsdp_nccl_meeting_conclude(&store, kKey, world_size, timeout_ms,
                                 &is_possible, reason.data(), reason.size(),
                                 &error) != FSDP_OK) {
    throw_error(error);
  }
  *why_not = reason.data();
  return is_possible;
}

bool is_switched_on(const char *name) {
  const char *value = std::getenv(name);
  return value != nullptr && std::strcmp(value, "1") == 0;
}

fsdp_nccl_tuning core_tuning(const NcclTuning &tuning) {
  const auto value = [](const std::optional<int> &each) {
    return each.value_or(FSDP_NCCL_CONFIG_UNDEFINED);
  };
  return {value(tuning.cga_cluster_size), value(tuning.min_ctas),
          value(tuning.max_ctas), value(tuning.split_share),
          tuning.net_name.empty() ? nullptr : tuning.net_name.c_str()};
}

}  // namespace

c10::Stream known_stream(void *handle) {
  Streams &all = streams();
  const std::lock_guard<std::mutex> lock(all.mutex);
  return all.by_handle.at(handle);
}

void know_stream(c10::Stream stream) {
  Streams &all = streams();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.by_handle.insert_or_assign(stream.native_handle(), stream);
}

bool is_nccl(const fsdp_transport &transport) {
  return std::strcmp(transport.ops->name, "nccl") == 0;
}

NcclLibrary find_nccl() {
  const Library &found = the_library();
  if (!found.why_not.empty()) return {"", "", "", found.why_not};
  std::array<char, 32> version = {};
  fsdp_nccl_version_format(found.library.version, version.data(),
                           version.size());
  return {found.library.path, fsdp_nccl_origin_name(found.library.origin),
          version.data(), ""};
}

std::shared_ptr<fsdp_transport> join_nccl(
    const fsdp_store &store, std::shared_ptr<void> store_owner, int64_t rank,
    int64_t world_size, c10::Device device, int64_t timeout_ms,
    const NcclTuning &tuning, const char *refusal, std::string *why_not) {
  static const Library no_library = {};
  const Library &found = refusal == nullptr ? the_library() : no_library;
  const std::string mine = refusal == nullptr ? found.why_not : refusal;
  if (!agree(store, rank, world_size, timeout_ms, mine, why_not)) {
    return nullptr;
  }
  auto owner = std::make_unique<Owner>(Owner{{device}, std::move(store_owner)});
  fsdp_nccl_events events = {};
  events.context = &owner->source;
  events.create = event_create;
  events.destroy = event_destroy;
  events.record = event_record;
  events.query = event_query;
  events.enter_thread = enter_thread;
  fsdp_nccl_options options = {};
  fsdp_nccl_options_init(&options);
  options.prefix = "nccl/";
  options.init_timeout_ms = timeout_ms;
  options.timeout_ms = timeout_ms;
  options.events = &events;
  options.tuning = core_tuning(tuning);
  options.splits_channels = is_switched_on("FSDP_C_NCCL_SPLIT");
  options.release = release_owner;
  options.owner = owner.get();
  fsdp_transport *transport = nullptr;
  fsdp_error error = {};
  if (fsdp_nccl_create(&found.library, &options, &store, rank, world_size,
                       &transport, &error) != FSDP_OK) {
    throw_error(error);
  }
  (void)owner.release();  // the transport's
  return {transport, [](fsdp_transport *self) { self->ops->destroy(self); }};
}

void watch_replay(fsdp_transport &transport, c10::Stream stream) {
  fsdp_error error;
  know_stream(stream);
  if (fsdp_nccl_watch_replay(&transport, stream.native_handle(), &error) !=
      FSDP_OK) {
    throw_error(error);
  }
}

void leave_nccl() {
  fsdp_nccl_leave_all();
}

}  // namespace fsdp_torch
