// The NCCL transport of a process group: which libnccl, which streams.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "port/transport.h"

namespace fsdp_torch {

// Calls of a transport name streams by their native handles; who carries them
// needs torch's. Every lane's stream is made known once.
void know_stream(c10::Stream stream);
c10::Stream known_stream(void *handle);

bool is_nccl(const fsdp_transport &transport);

// Whether NCCL may be told of blocks at all.
bool knows_blocks();

// Tells every one of the groups' transports that is NCCL of a new block, and
// returns these. A block is symmetric if it is of symmetric memory.
std::vector<std::shared_ptr<fsdp_transport>> enter_block(
    const std::vector<std::shared_ptr<fsdp_transport>> &transports, void *block,
    int64_t nbytes, bool is_symmetric);
void leave_block(fsdp_transport &transport, void *block);

// A graph with the transport's collectives was launched on that stream.
void watch_replay(fsdp_transport &transport, c10::Stream stream);

// Symmetric memory: from ncclMemAlloc, not from torch's allocator. All ranks
// can reach it once it is a window (Note [Symmetric windows] in
// nccl_windows.c). FSDP_C_NCCL_SYMMETRIC=1 asks for it. False where none of the
// transports can have it; null where NCCL has no memory on the current device.
bool wants_symmetric_memory(
    const std::vector<std::shared_ptr<fsdp_transport>> &transports);
c10::DataPtr make_symmetric_memory(int64_t nbytes, c10::Device device);
// Where the windows of the transport stand; empty where nobody wants them.
std::string describe_windows(fsdp_transport &transport);

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
