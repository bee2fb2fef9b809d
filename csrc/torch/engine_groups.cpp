// An engine's groups, and leaving a step that failed.
#include <algorithm>

#include "torch/unit.hpp"

namespace fsdp_torch {

Engine::~Engine() {
  fsdp_engine_destroy(core);
  fsdp_timeline_destroy(timeline);
}

void Engine::recover() {
  if (has_abort_reason) publish_abort_reason("");
  if (!is_aborted.exchange(false)) return;
  fsdp_engine_reset(core);
  for (Unit *unit : units) {
    unit->graph_task = -1;
    for (Segment &segment : unit->segments) segment.earlier_grad.reset();
  }
  reduced.clear();
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
  }
  return groups;
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
