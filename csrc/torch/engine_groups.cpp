// An engine's groups, and leaving a step that failed.
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "torch/offload.hpp"
#include "torch/unit.hpp"

namespace fsdp_torch {

Engine::~Engine() {
  std::optional<c10::StreamGuard> guard;  // blocks go after the last step
  if (step_stream) guard.emplace(*step_stream);
  fsdp_engine_destroy(core);
  fsdp_timeline_destroy(timeline);
}

void Engine::recover() {
  if (has_abort_reason) publish_abort_reason("");
  if (!is_aborted.exchange(false)) return;
  fsdp_engine_reset(core);
  if (offload) offload->end_backward();
  for (Unit *unit : units) {
    unit->graph_task = -1;
    unit->num_awaited = std::make_shared<int64_t>(0);
    unit->custom_pieces.clear();
    for (Segment &segment : unit->segments) segment.earlier_grad.reset();
  }
  reduced.clear();
  split_unit.clear();
}

void await_end_of_backward(Engine &engine) {
  constexpr std::chrono::microseconds kPause(200);
  constexpr std::chrono::seconds kLimit(1);
  if (torch::autograd::get_current_graph_task_id() != -1) return;
  const auto is_open = [&] {
    const std::lock_guard<std::mutex> lock(engine.mutex);
    return fsdp_engine_in_backward(engine.core) && !engine.is_aborted;
  };
  if (!is_open()) return;
  const auto end = std::chrono::steady_clock::now() + kLimit;
  while (is_open() && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(kPause);
  }
}

std::vector<Group *> groups_of(const Engine &engine) {
  std::vector<Group *> groups;
  const auto add = [&](Group &group) {
    const bool is_known =
        std::any_of(groups.begin(), groups.end(), [&](const Group *each) {
          return each->process_group == group.process_group;
        });
    if (group.world_size > 1 && !is_known) {
      groups.push_back(&group);
    }
  };
  for (Unit *unit : engine.units) {
    add(unit->shard_group);
    add(unit->replica_group);
    add(unit->part_group);
  }
  return groups;
}

int64_t call_nbytes_of(const Unit &unit) {
  const int64_t num_others = unit.shard_group.world_size - 1;
  int64_t gathered = 0;
  int64_t reduced = 0;
  for (const Segment &segment : unit.segments) {
    const auto nbytes = [&](at::ScalarType dtype) {
      return segment.layout->shard_numel *
             static_cast<int64_t>(c10::elementSize(dtype));
    };
    gathered += nbytes(segment.compute);
    if (segment.layout->requires_grad) reduced += nbytes(segment.reduce);
  }
  return std::max(gathered, reduced * std::max<int64_t>(num_others, 1));
}

void Engine::publish_abort_reason(const std::string &reason) noexcept {
  try {
    for (const Group *group : groups_of(*this)) {
      if (!group->post_mortem) continue;
      group->post_mortem->publish(reason.empty()
                                      ? reason
                                      : reason + ", after " +
                                            operation_of(provider.log, -1));
    }  // a group that failed has published that already
    has_abort_reason = !reason.empty();
  } catch (...) {  // no memory: the others learn less
  }
}

}  // namespace fsdp_torch

extern "C" int64_t fsdp_torch_engine_ring_nbytes(
    fsdp_torch_engine *engine) noexcept {
  int64_t nbytes = 0;
  for (const fsdp_torch::Group *group : fsdp_torch::groups_of(*engine->self)) {
    const fsdp_transport *transport = group->transport.get();
    if (transport == nullptr || transport->ops->reserved_nbytes == nullptr) {
      continue;
    }
    nbytes += transport->ops->reserved_nbytes(transport);
  }
  return nbytes;
}
