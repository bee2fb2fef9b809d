// The NCCL transport of a process group: which libnccl, which streams.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <memory>
#include <optional>
#include <string>

#include "port/transport.h"

namespace fsdp_torch {

// Calls of a transport name streams by their native handles; who carries them
// needs torch's. Every lane's stream is made known once.
void know_stream(c10::Stream stream);
c10::Stream known_stream(void *handle);

bool is_nccl(const fsdp_transport &transport);

// A graph with the transport's collectives was launched on that stream.
void watch_replay(fsdp_transport &transport, c10::Stream stream);

// The libnccl that this process uses, or would use.
struct NcclLibrary {
  std::string path;
  std::string origin;   // "already loaded", "wheel", ...
  std::string version;  // "2.27.3"
  std::string why_not;  // there is none; else ""
};
NcclLibrary find_nccl();

// What the group's NCCL options ask for, as in fsdp_nccl_tuning; empty: NCCL
// decides.
struct NcclTuning {
  std::optional<int> cga_cluster_size;
  std::optional<int> min_ctas;
  std::optional<int> max_ctas;
  std::optional<int> split_share;
  std::string net_name;
};

// Joins the group over NCCL. All ranks come here and agree: null on all of them
// if one cannot, or has a refusal (else null), and `why_not` says why. Keeps
// `store_owner` as long as a thread may use `store`. Throws if a rank did not
// come.
std::shared_ptr<fsdp_transport> join_nccl(
    const fsdp_store &store, std::shared_ptr<void> store_owner, int64_t rank,
    int64_t world_size, c10::Device device, int64_t timeout_ms,
    const NcclTuning &tuning, const char *refusal, std::string *why_not);

// For the end of the process: all NCCL groups are left, whoever still holds
// them, and the watchdog ends.
void leave_nccl();

}  // namespace fsdp_torch
