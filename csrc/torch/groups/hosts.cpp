#include "torch/groups/hosts.hpp"

#include <array>
#include <exception>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "torch/groups/c10d_transport.hpp"
#include "torch/groups/processes.hpp"
#include "torch/groups/within.hpp"
#include "torch/guard.hpp"

namespace fsdp_torch {
namespace {

constexpr size_t kWordsNbytes = 768;

void say(const fsdp_store &store, const std::string &key,
         const std::string &words) {
  FSDP_LOCAL_ERROR(error);
  if (store.set(store.context, key.c_str(), words.data(),
                static_cast<int64_t>(words.size()), &error) != FSDP_OK) {
    throw_error(error);
  }
}

std::string hear(const fsdp_store &store, const std::string &key,
                 int64_t timeout_ms) {
  std::array<char, kWordsNbytes> words = {};
  int64_t nbytes = 0;
  FSDP_LOCAL_ERROR(error);
  if (store.get(store.context, key.c_str(), timeout_ms, words.data(),
                kWordsNbytes, &nbytes, &error) != FSDP_OK) {
    throw_error(error);
  }
  return {words.data(), std::min(static_cast<size_t>(nbytes), kWordsNbytes)};
}

}  // namespace

std::string Hosts::why_not() const {
  if (layout.num_local == 0) {
    return c10::str("the group's ", layout.num_hosts,
                    " hosts hold different numbers of its ranks, or ranks that "
                    "do not follow each other");
  }
  if (layout.num_local == 1) {
    return c10::str("each of the group's ", layout.num_hosts,
                    " hosts holds one of its ranks");
  }
  return refusal;
}

Hosts meet_hosts(const fsdp_store &store, int64_t rank, int64_t world_size,
                 const char *refusal, int64_t timeout_ms) {
  const auto key = [](int64_t of) { return "host/" + std::to_string(of); };
  const std::string why_not =
      refusal == nullptr ? "" : c10::str("rank ", rank, ": ", refusal);
  say(store, key(rank), why_not + "\n" + this_host());
  Hosts hosts;
  std::vector<std::string> names;
  for (int64_t of = 0; of < world_size; of++) {
    const std::string words = hear(store, key(of), timeout_ms);
    const size_t end = words.find('\n');
    if (hosts.refusal.empty()) hosts.refusal = words.substr(0, end);
    names.push_back(words.substr(end + 1));
  }
  std::vector<const char *> texts;
  for (const std::string &name : names) texts.push_back(name.c_str());
  hosts.layout = fsdp_host_layout_of(texts.data(), world_size);
  return hosts;
}

std::string agree_on_hosts(const fsdp_store &store, const Hosts &hosts,
                           int64_t rank, const std::string &mine,
                           int64_t timeout_ms) {
  const int64_t num_local = hosts.layout.num_local;
  const auto key = [](int64_t of) { return "local/" + std::to_string(of); };
  if (rank % num_local == 0) say(store, key(rank / num_local), mine);
  std::string first;
  for (int64_t host = 0; host < hosts.layout.num_hosts; host++) {
    const std::string theirs = hear(store, key(host), timeout_ms);
    if (!first.empty() || theirs.empty()) continue;
    first =
        c10::str("among ranks ", host * num_local, " to ",
                 (host + 1) * num_local - 1, ", which share a host, ", theirs);
  }
  return first;
}

std::shared_ptr<fsdp_transport> connect_peers(
    c10d::ProcessGroup &group, const Hosts &hosts,
    const c10::intrusive_ptr<c10d::Store> &store, const std::string &name,
    std::chrono::milliseconds limit) {
  const int num_local = static_cast<int>(hosts.layout.num_local);
  const int local = group.getRank() % num_local;
  const int host = group.getRank() / num_local;
  std::vector<int> ranks;
  for (int rank = local; rank < group.getSize(); rank += num_local) {
    ranks.push_back(rank);
  }
  const auto keys =
      c10::make_intrusive<c10d::PrefixStore>(c10::str(name, local, "/"), store);
  struct Made {
    c10::intrusive_ptr<c10d::Backend> backend;
    std::exception_ptr error;
  };
  const auto made = std::make_shared<Made>();
  const bool is_there = run_within(
      limit, [made, ranks, keys, parent = group.getBackend(c10::kCPU)] {
        try {
          made->backend =
              parent->split(keys, ranks, parent->getBackendOptions());
        } catch (...) {
          made->error = std::current_exception();
        }
      });
  TORCH_CHECK_WITH(DistBackendError, is_there,
                   "the ranks of other hosts did not connect within the time "
                   "limit");
  if (made->error) std::rethrow_exception(made->error);
  C10dGroup peers;
  peers.process_group = c10::make_intrusive<c10d::ProcessGroup>(
      keys, host, static_cast<int>(ranks.size()));
  peers.process_group->setBackend(
      c10::kCPU, c10d::ProcessGroup::BackendType::GLOO, made->backend);
  peers.process_group->setDefaultBackend(c10d::ProcessGroup::BackendType::GLOO);
  peers.rank = host;
  peers.world_size = static_cast<int64_t>(ranks.size());
  peers.is_gloo = true;
  return make_c10d_transport(peers);
}

}  // namespace fsdp_torch
