// Hosts of a gloo group's ranks, and the groups of peers between them.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <memory>
#include <string>

#include "port/transport.h"
#include "transports/host_layout.h"

namespace c10d {
class ProcessGroup;
class Store;
}  // namespace c10d

namespace fsdp_torch {

// What the ranks know of each other's hosts; the same on all of them.
struct Hosts {
  fsdp_host_layout layout = {};
  std::string refusal;  // the first rank's with one: "rank 3: switched off ..."

  // Why collectives cannot go by hosts; "": they can.
  std::string why_not() const;
};

// Tells the others this rank's host, and why it does not go by hosts (null: it
// does), and reads theirs. Throws if a rank does not come within the limit.
Hosts meet_hosts(const fsdp_store &store, int64_t rank, int64_t world_size,
                 const char *refusal, int64_t timeout_ms);

// Agrees on whether each host could connect its ranks: the reason of the first
// one that could not ("": all could), from `mine`, which all ranks of a host
// share. Throws as meet_hosts.
std::string agree_on_hosts(const fsdp_store &store, const Hosts &hosts,
                           int64_t rank, const std::string &mine,
                           int64_t timeout_ms);

// A gloo group, and the transport over it, of the ranks with this one's place
// in each host. `name` of its keys in the store. Throws, also after the limit.
std::shared_ptr<fsdp_transport> connect_peers(
    c10d::ProcessGroup &group, const Hosts &hosts,
    const c10::intrusive_ptr<c10d::Store> &store, const std::string &name,
    std::chrono::milliseconds limit);

}  // namespace fsdp_torch
