#include "torch/groups/transports.hpp"

#include <ATen/ATen.h>
#include <Python.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <mutex>
#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "base/dtypes.h"
#include "shm/shm_transport.h"
#include "torch/groups/hosts.hpp"
#include "torch/groups/nccl_group.hpp"
#include "torch/groups/within.hpp"
#include "torch/guard.hpp"
#include "transports/hierarchical.h"
#include "transports/merging.h"

namespace fsdp_torch {
namespace {

static_assert(FSDP_DTYPE_UINT8 == static_cast<int>(at::kByte));
static_assert(FSDP_DTYPE_INT8 == static_cast<int>(at::kChar));
static_assert(FSDP_DTYPE_INT16 == static_cast<int>(at::kShort));
static_assert(FSDP_DTYPE_INT32 == static_cast<int>(at::kInt));
static_assert(FSDP_DTYPE_INT64 == static_cast<int>(at::kLong));
static_assert(FSDP_DTYPE_FLOAT16 == static_cast<int>(at::kHalf));
static_assert(FSDP_DTYPE_FLOAT32 == static_cast<int>(at::kFloat));
static_assert(FSDP_DTYPE_FLOAT64 == static_cast<int>(at::kDouble));
static_assert(FSDP_DTYPE_BOOL == static_cast<int>(at::kBool));
static_assert(FSDP_DTYPE_BFLOAT16 == static_cast<int>(at::kBFloat16));

// The store of a process group, for the transports ---------------------------

struct GroupStore {
  c10::intrusive_ptr<c10d::Store> store;
  std::string prefix;
  // For all questions until the ranks have met; empty: none.
  std::optional<std::chrono::steady_clock::time_point> deadline = std::nullopt;

  std::string key(const char *name) const { return prefix + name; }
};

std::chrono::milliseconds time_left(const GroupStore &self) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
      *self.deadline - std::chrono::steady_clock::now());
  return std::max(left, std::chrono::milliseconds(0));
}

// The answer of `ask`. The store may never give one: if the process that hosts
// it is stopped, the store's own time limits do not hold. Throws what `ask`
// throws, and after the deadline.
std::vector<uint8_t> answer_of(
    const GroupStore &self,
    const std::function<std::vector<uint8_t>(c10d::Store &)> &ask) {
  // The store has the same limit, which FileStore rounds up to whole seconds.
  constexpr std::chrono::milliseconds kGrace(1250);
  if (!self.deadline) return ask(*self.store);
  struct Answer {
    std::vector<uint8_t> bytes;
    std::exception_ptr error;
  };
  const auto answer = std::make_shared<Answer>();
  const bool is_there =
      run_within(time_left(self) + kGrace, [answer, ask, store = self.store] {
        try {
          answer->bytes = ask(*store);
        } catch (...) {
          answer->error = std::current_exception();
        }
      });
  TORCH_CHECK_WITH(DistStoreError, is_there,
                   "the group's store did not answer within the time limit");
  if (answer->error) std::rethrow_exception(answer->error);
  return answer->bytes;
}

std::vector<uint8_t> bytes_of(const std::string &text) {
  return {text.begin(), text.end()};
}

std::string text_of(const std::vector<uint8_t> &bytes) {
  return {bytes.begin(), bytes.end()};
}

fsdp_status store_set(void *context, const char *key, const void *value,
                      int64_t nbytes, fsdp_error *error) {
  GUARDED(error) {
    const auto &self = *static_cast<GroupStore *>(context);
    const auto *bytes = static_cast<const uint8_t *>(value);
    answer_of(self, [key = self.key(key),
                     sent = std::vector<uint8_t>(bytes, bytes + nbytes)](
                        c10d::Store &store) {
      store.set(key, sent);
      return std::vector<uint8_t>();
    });
    return FSDP_OK;
  };
}

fsdp_status store_get(void *context, const char *key, int64_t timeout_ms,
                      void *value, int64_t capacity, int64_t *nbytes,
                      fsdp_error *error) {
  GUARDED(error) {
    const auto &self = *static_cast<GroupStore *>(context);
    if (timeout_ms <= 0 && !self.store->check({self.key(key)})) {
      return FSDP_FAIL(error, FSDP_BACKEND, "the store has no key '%s'", key);
    }
    const std::vector<uint8_t> bytes =
        answer_of(self, [key = self.key(key), timeout_ms](c10d::Store &store) {
          if (timeout_ms > 0) {
            store.wait({key}, std::chrono::milliseconds(timeout_ms));
          }
          return store.get(key);
        });
    const auto numel = static_cast<int64_t>(bytes.size());
    if (!bytes.empty()) {
      std::memcpy(value, bytes.data(),
                  static_cast<size_t>(std::min(numel, capacity)));
    }
    *nbytes = numel;
    return FSDP_OK;
  };
}

fsdp_status store_add(void *context, const char *key, int64_t change,
                      int64_t *sum, fsdp_error *error) {
  GUARDED(error) {
    const auto &self = *static_cast<GroupStore *>(context);
    const std::string text = text_of(
        answer_of(self, [key = self.key(key), change](c10d::Store &store) {
          return bytes_of(std::to_string(store.add(key, change)));
        }));
    *sum = std::stoll(text);
    return FSDP_OK;
  };
}

bool has_value(const char *name, const char *wanted) {
  const char *value = std::getenv(name);
  return value != nullptr && std::strcmp(value, wanted) == 0;
}

// A word that means nothing would leave the user with what he did not want.
void check_switch() {
  const char *value = std::getenv("FSDP_C_TRANSPORT");
  if (value == nullptr || *value == '\0') return;
  if (has_value("FSDP_C_TRANSPORT", "c10d") ||
      has_value("FSDP_C_TRANSPORT", "flat") ||
      has_value("FSDP_C_TRANSPORT", "rings") ||
      has_value("FSDP_C_TRANSPORT", "copy")) {
    return;
  }
  throw std::invalid_argument(
      std::string("FSDP_C_TRANSPORT=") + value +
      ": set it to c10d, flat, rings or copy, or unset it; "
      "`python -m fsdp_c doctor` says what they do");
}

bool is_nccl(c10d::ProcessGroup &group, c10::DeviceType device) {
  try {
    return group.getBackend(device)->getBackendName() == "nccl";
  } catch (const std::exception &) {
    return false;  // a user's own group
  }
}

int64_t timeout_ms_of(c10d::ProcessGroup &group, c10::Device device) {
  try {
    const auto options = group.getBackend(device.type())->getBackendOptions();
    if (options) return options->timeout.count();
  } catch (const std::exception &) {  // it has no options, or is a user's own
  }
  return kBackendDefaultTimeout.count();
}

// An integer of c10d's ncclConfig_t, unless it is NCCL's "undefined".
std::optional<int> integer_of(const pybind11::object &config,
                              const char *name) {
  if (!pybind11::hasattr(config, name)) return std::nullopt;
  const auto value = config.attr(name).cast<int>();
  if (value == std::numeric_limits<int>::min()) return std::nullopt;
  return value;
}

// The group's NCCL options, read by attribute, since their class needs nccl.h.
// NCCL chooses what they do not have.
NcclTuning tuning_of(c10d::ProcessGroup &group, c10::Device device) {
  NcclTuning tuning;
  const pybind11::gil_scoped_acquire gil;
  try {
    const pybind11::object options =
        pybind11::cast(group.getBackend(device.type())).attr("options");
    if (!pybind11::hasattr(options, "config")) return tuning;
    const pybind11::object config = options.attr("config");
    tuning.cga_cluster_size = integer_of(config, "cga_cluster_size");
    tuning.min_ctas = integer_of(config, "min_ctas");
    tuning.max_ctas = integer_of(config, "max_ctas");
    tuning.split_share = integer_of(config, "split_share");
    if (pybind11::hasattr(config, "net_name") &&
        !config.attr("net_name").is_none()) {
      tuning.net_name = config.attr("net_name").cast<std::string>();
    }
  } catch (const std::exception &) {  // a user's own backend
  }
  return tuning;
}

// Choosing --------------------------------------------------------------------

// What carries one process group on one kind of device. All ranks make it
// together, so it lives as long as the group, whatever engines use it.
struct Connection {
  c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
  c10::DeviceType device_type;
  std::shared_ptr<GroupStore> store;  // outlives the transport
  std::shared_ptr<fsdp_transport> transport;
  std::string why_not;
  const char *refusal = nullptr;  // of this rank, when the ranks met
  int64_t ring_nbytes = 0;        // of shared memory, per channel
  bool spans_hosts = false;
};

fsdp_store core_store(const Connection &connection) {
  fsdp_store store = {};
  store.context = connection.store.get();
  store.set = store_set;
  store.get = store_get;
  store.add = store_add;
  return store;
}

// Note [Size of rings]
// Where the ranks may not read each other's memory, a ring holds one call of
// the largest unit, so that starting a call need not wait for its readers, but
// no more than 8 MiB: with more, a call goes in turns. Where an engine with
// larger units comes later, its ranks meet anew. Otherwise only small calls use
// rings.
constexpr int64_t kMinRingNbytes = 64 << 10;
constexpr int64_t kMaxRingNbytes = 8 << 20;
constexpr int64_t kMaxSlotNbytes = 256 << 10;
constexpr int64_t kMessageNbytes = 128 << 10;
constexpr int64_t kSlotsOfRing = 8;

int64_t ring_nbytes_for(int64_t call_nbytes) {
  return std::clamp(call_nbytes, kMinRingNbytes, kMaxRingNbytes);
}

int64_t slot_nbytes_for(int64_t ring_nbytes, int64_t world_size) {
  const int64_t line = 64 * world_size;  // a line of each rank
  const int64_t wanted =
      std::min((ring_nbytes + kSlotsOfRing - 1) / kSlotsOfRing, kMaxSlotNbytes);
  return (wanted + line - 1) / line * line;
}

// Shared memory of `world_size` ranks; null: the verdict [out] says why not.
std::shared_ptr<fsdp_transport> meet_in_shm(const Connection &connection,
                                            const std::string &key_prefix,
                                            int64_t rank, int64_t world_size,
                                            int64_t timeout_ms,
                                            const char *refusal,
                                            fsdp_shm_verdict *verdict) {
  const fsdp_store store = core_store(connection);
  fsdp_shm_options options = {};
  options.nbytes = sizeof(options);
  options.key_prefix = key_prefix.c_str();
  options.refusal = refusal;
  options.slot_nbytes = slot_nbytes_for(connection.ring_nbytes, world_size);
  // Whole slots.
  options.ring_nbytes = (connection.ring_nbytes + options.slot_nbytes - 1) /
                        options.slot_nbytes * options.slot_nbytes;
  options.message_nbytes = kMessageNbytes;
  if (has_value("FSDP_C_TRANSPORT", "rings")) options.direct_call_nbytes = -1;
  options.timeout_ms = timeout_ms;
  options.meeting_timeout_ms = timeout_ms;
  fsdp_transport *transport = nullptr;
  fsdp_error error = {};
  if (fsdp_shm_create(&store, &options, rank, world_size, &transport, verdict,
                      &error) != FSDP_OK) {
    throw_error(error);
  }
  if (transport == nullptr) return nullptr;
  return {transport, [](fsdp_transport *self) { self->ops->destroy(self); }};
}

// Shared memory in each host, and gloo between them.
void connect_hosts(Connection &connection, c10d::ProcessGroup &group,
                   const Hosts &hosts, int64_t timeout_ms) {
  const int64_t num_local = hosts.layout.num_local;
  const int64_t rank = group.getRank();
  fsdp_shm_verdict verdict = {};
  const std::shared_ptr<fsdp_transport> local =
      meet_in_shm(connection, "host" + std::to_string(rank / num_local) + "/",
                  rank % num_local, num_local, timeout_ms, nullptr, &verdict);
  connection.why_not = agree_on_hosts(core_store(connection), hosts, rank,
                                      verdict.reason, timeout_ms);
  if (!connection.why_not.empty()) return;
  const GroupStore &store = *connection.store;
  const std::array<std::shared_ptr<fsdp_transport>, FSDP_NUM_CHANNELS> peers = {
      connect_peers(group, hosts, store.store, store.key("gathers/"),
                    time_left(store)),
      connect_peers(group, hosts, store.store, store.key("sums/"),
                    time_left(store))};
  const fsdp_hierarchical_parts parts = {local.get(),
                                         {peers[0].get(), peers[1].get()}};
  fsdp_transport *transport = nullptr;
  fsdp_error error = {};
  if (fsdp_hierarchical_create(&parts, hosts.layout, rank, &transport,
                               &error) != FSDP_OK) {
    throw_error(error);
  }
  connection.transport = std::shared_ptr<fsdp_transport>(
      transport,
      [local, peers](fsdp_transport *self) { self->ops->destroy(self); });
}

enum class Kind { kC10d, kShm, kNccl };

// The transport to try. For c10d, why_not [out] is the reason.
Kind kind_for(const Group &group, c10::Device device, std::string *why_not) {
  if (device.is_cpu()) {
    if (!group.is_gloo) {
      *why_not = "the group's backend on the CPU is not gloo";
      return Kind::kC10d;
    }
    return Kind::kShm;
  }
  if (is_nccl(*group.process_group, device.type())) return Kind::kNccl;
  *why_not = "the group's backend on this device is not nccl";
  return Kind::kC10d;
}

// The reason if a switch turns the transport off on this rank. The ranks tell
// each other when they meet, and none uses it then.
const char *refusal_of(Kind kind, bool spans_hosts) {
  if (kind == Kind::kC10d) return nullptr;
  if (has_value("FSDP_C_TRANSPORT", "c10d")) {
    return "switched off by FSDP_C_TRANSPORT=c10d";
  }
  if (kind == Kind::kShm && spans_hosts &&
      has_value("FSDP_C_TRANSPORT", "flat")) {
    return "switched off by FSDP_C_TRANSPORT=flat";
  }
  return nullptr;
}

// Shared memory where the ranks share a host. On several hosts, where each has
// as many ranks as the others, shared memory in each and gloo between them.
void connect_on_cpu(Connection &connection, c10d::ProcessGroup &group,
                    c10::Device device) {
  const int64_t timeout_ms = timeout_ms_of(group, device);
  const Hosts hosts =
      meet_hosts(core_store(connection), group.getRank(), group.getSize(),
                 refusal_of(Kind::kShm, true), timeout_ms);
  connection.spans_hosts = hosts.layout.num_hosts > 1;
  connection.refusal = refusal_of(Kind::kShm, connection.spans_hosts);
  if (!connection.spans_hosts) {
    fsdp_shm_verdict verdict = {};
    connection.transport =
        meet_in_shm(connection, "shm/", group.getRank(), group.getSize(),
                    timeout_ms, connection.refusal, &verdict);
    connection.why_not = verdict.reason;
    if (verdict.is_direct) connection.ring_nbytes = kMaxRingNbytes;  // for any
  } else {
    connection.why_not = hosts.why_not();
    if (connection.why_not.empty()) {
      connect_hosts(connection, group, hosts, timeout_ms);
    }
  }
  connection.store->deadline = std::nullopt; /* they have met */
}

void choose(Connection &connection, Kind kind,
            c10d::ProcessGroup &process_group, c10::Device device,
            const NcclTuning &tuning) {
  const auto store = process_group.getStore();
  if (!store) {
    connection.why_not = "the group has no store";
    return;
  }
  // Each rank counts how often it came here: a group that is made again over
  // one store meets at new keys.
  const std::string base = "fsdp_c/transport/" + process_group.getGroupName() +
                           "/" + c10::DeviceTypeName(device.type(), true) + "/";
  connection.store = std::make_shared<GroupStore>();
  connection.store->store = store;
  // A limit without an end is a year, which a clock can count.
  const std::chrono::milliseconds limit = std::min<std::chrono::milliseconds>(
      std::chrono::milliseconds(timeout_ms_of(process_group, device)),
      std::chrono::hours(24 * 365));
  connection.store->deadline = std::chrono::steady_clock::now() + limit;
  const std::vector<uint8_t> count = answer_of(
      *connection.store, [key = base + std::to_string(process_group.getRank())](
                             c10d::Store &asked) {
        return bytes_of(std::to_string(asked.add(key, 1)));
      });
  connection.store->prefix = base + text_of(count) + "/";
  if (kind == Kind::kShm) {
    connect_on_cpu(connection, process_group, device);
    return;
  }
  // NCCL's threads ask while others wait, so they need a connection of their
  // own.
  const auto cloned = std::make_shared<c10::intrusive_ptr<c10d::Store>>();
  answer_of(*connection.store, [cloned](c10d::Store &asked) {
    *cloned = asked.clone();
    return std::vector<uint8_t>();
  });
  connection.store->store = *cloned;
  connection.transport = join_nccl(
      core_store(connection), connection.store, process_group.getRank(),
      process_group.getSize(), device, timeout_ms_of(process_group, device),
      tuning, connection.refusal, &connection.why_not);
  // They have met: from here on NCCL's own limits hold, and no call of the
  // store delays them.
  connection.store->deadline = std::nullopt;
}

// A rank did not come: throws a report like that of a failed collective.
[[noreturn]] void meeting_failed(const Group &group, const char *cause) {
  std::string text = cause;
  if (group.post_mortem) {
    text = group.post_mortem->describe(
        cause, "meeting of the ranks, before the group's first collective",
        nullptr);
  }
  C10_THROW_ERROR(DistBackendError, text);
}

struct Registry {
  // Null where the group has not met. Forgets the groups that are gone.
  Connection *find(const c10d::ProcessGroup &group,
                   c10::DeviceType device_type) {
    connections.erase(std::remove_if(connections.begin(), connections.end(),
                                     [](const Connection &one) {
                                       return one.group.expired();
                                     }),
                      connections.end());
    for (Connection &one : connections) {
      if (one.group._unsafe_get_target() == &group &&
          one.device_type == device_type) {
        return &one;
      }
    }
    return nullptr;
  }

  std::mutex mutex;
  std::vector<Connection> connections;
};

Registry &registry() {
  // Never destroyed: process groups may outlive static objects.
  static auto *const self = [] {
    // What has threads must go before the devices do. Engines that nobody
    // destroyed still hold their transports then.
    std::atexit(leave_nccl);
    return new Registry();
  }();
  return *self;
}

}  // namespace

Group group_from(PyObject *object, c10::Device device) {
  Group group;
  if (object == nullptr) return group;
  group.process_group =
      pybind11::handle(object).cast<c10::intrusive_ptr<c10d::ProcessGroup>>();
  group.device = device;
  group.rank = group.process_group->getRank();
  group.world_size = group.process_group->getSize();
  try {
    const bool is_of_gloo = is_gloo(*group.process_group, device.type());
    group.is_gloo = is_of_gloo && device.is_cpu();
  } catch (const std::exception &) {
    group.has_backend = false;  // a user's own group
  }
  {
    // It waits for the store, which may be written in Python.
    const pybind11::gil_scoped_release no_gil;
    group.post_mortem = PostMortem::of(group.process_group);
  }
  return group;
}

PyObject *group_object(const Group &group) {
  return pybind11::cast(group.process_group).release().ptr();
}

void connect(Group &group, c10::Device device, int64_t call_nbytes) {
  if (group.world_size == 1) return;
  check_switch();
  if (!group.c10d) group.c10d = make_c10d_transport(group);
  group.transport = group.c10d;
  const Kind kind = kind_for(group, device, &group.why_c10d);
  if (kind == Kind::kC10d) return;
  // Before the lock: it takes the GIL, and threads that hold the GIL may wait
  // for the registry.
  const NcclTuning tuning = kind == Kind::kNccl
                                ? tuning_of(*group.process_group, device)
                                : NcclTuning{};
  Registry &all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  Connection *found = all.find(*group.process_group, device.type());
  const char *refusal =
      refusal_of(kind, found != nullptr && found->spans_hosts);
  const int64_t ring_nbytes = ring_nbytes_for(call_nbytes);
  // Switched on again since, on all ranks or none; or too small.
  const bool is_too_small = found != nullptr && kind == Kind::kShm &&
                            found->transport &&
                            found->ring_nbytes < ring_nbytes;
  const bool is_anew = found != nullptr && refusal == nullptr &&
                       (found->refusal != nullptr || is_too_small);
  if (found == nullptr || is_anew) {
    Connection made{
        c10::weak_intrusive_ptr<c10d::ProcessGroup>(group.process_group),
        device.type(),
        nullptr,
        nullptr,
        "",
        refusal,
        ring_nbytes};
    try {
      choose(made, kind, *group.process_group, device, tuning);
    } catch (const c10::Error &e) {
      meeting_failed(group, e.what_without_backtrace());
    } catch (const std::exception &e) {
      meeting_failed(group, e.what());
    }
    if (found == nullptr) {
      all.connections.push_back(std::move(made));
      found = &all.connections.back();
    } else {
      *found = std::move(made);
    }
  }
  // A switch that was set after the ranks met applies to this user of the
  // group.
  refusal = refusal_of(kind, found->spans_hosts);
  if (refusal == nullptr && found->transport) {
    group.transport = found->transport;
    // All have come to connect. Those of a host are read after a collective.
    if (kind == Kind::kNccl && group.post_mortem) group.post_mortem->meet();
  }
  group.why_c10d = refusal == nullptr ? found->why_not : refusal;
}

bool may_read_in_place() {
  return !has_value("FSDP_C_TRANSPORT", "c10d") &&
         !has_value("FSDP_C_TRANSPORT", "copy");
}

void merge_small_calls(Group &group, Mergings &made) {
  const std::shared_ptr<fsdp_transport> inner = group.transport;
  if (!inner || !inner->ops->is_host) return;
  std::shared_ptr<fsdp_transport> &merging = made[inner.get()];
  if (!merging) {
    fsdp_transport *created = nullptr;
    FSDP_LOCAL_ERROR(error);
    if (fsdp_merging_create(inner.get(), group.rank, group.world_size, &created,
                            &error) != FSDP_OK) {
      throw_error(error);
    }
    merging.reset(created,
                  [inner](fsdp_transport *self) { self->ops->destroy(self); });
  }
  group.transport = merging;
}

void look_up(Group &group, c10::DeviceType device_type) {
  if (!group.process_group) return;
  Registry &all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const Connection *found = all.find(*group.process_group, device_type);
  if (found == nullptr) {
    group.why_c10d = "the group has not been used yet";
    return;
  }
  group.transport = found->transport;
  group.why_c10d = found->why_not;
}

}  // namespace fsdp_torch
