// Lanes of a host device, and failures of the collectives on any device.
#include <string>

#include "torch/device/provider.hpp"
#include "torch/guard.hpp"

namespace fsdp_torch {
namespace {

Group &group_of(const fsdp_group *group) {
  return *static_cast<Group *>(group->handle);
}

// Reads who the others are, once a collective has shown that all came.
void meet(Group &group) {
  if (group.has_met) return;
  group.has_met = true;
  if (group.post_mortem) group.post_mortem->meet();
}

}  // namespace

void Provider::add_call(fsdp_lane lane, Group *group, fsdp_channel channel,
                        uint64_t ticket) {
  if (has_streams_) {
    // On COMPUTE others enqueue work, too.
    if (lane != FSDP_LANE_COMPUTE) {
      newest_calls_[lane] = {group->transport.get(), channel, ticket};
    }
    return;
  }
  const int64_t sequence = log == nullptr ? -1 : log->num_recorded - 1;
  host_lanes_[lane].items.push_back(
      {group, channel, ticket, sequence, nullptr});
  host_lanes_[lane].num_added++;
}

void Provider::add_step(fsdp_lane lane, std::function<void()> step) {
  HostLane &queue = host_lanes_[lane];
  if (has_streams_ || queue.items.empty()) {
    on_lane(lane, step);
    return;
  }
  queue.items.push_back({nullptr, FSDP_CHANNEL_GATHER, 0, -1, std::move(step)});
  queue.num_added++;
}

std::string Provider::report(const Group &group, const char *cause,
                             const std::string &operation) const {
  if (!group.post_mortem) return cause;
  break_groups(c10::str(operation, " failed in another group (", cause, ")"));
  const std::string text = group.post_mortem->describe(cause, operation, log);
  tell_others(group, text);
  return text;
}

void Provider::break_groups(const std::string &cause) const {
  if (has_streams_ || !groups) return;
  for (const Group *each : groups()) break_group(*each, cause);
}

void Provider::tell_others(const Group &group, const std::string &text) const {
  if (!groups) return;
  for (const Group *each : groups()) {
    if (each->post_mortem && each->post_mortem != group.post_mortem) {
      each->post_mortem->publish(
          "failed in another group: " +
          text.substr(0, text.find_last_not_of('.') + 1));
    }
  }
}

void Provider::ranks_failed(const Group &group, const char *cause,
                            const std::string &operation) const {
  C10_THROW_ERROR(DistBackendError, report(group, cause, operation));
}

void Provider::call_failed(const Group &group, const fsdp_error &error,
                           const std::string &operation) const {
  FSDP_LOCAL_ERROR(cause);
  if (group.transport->ops->check(group.transport.get(), &cause) != FSDP_OK) {
    ranks_failed(group, text_of(cause).c_str(), operation);
  }
  throw_error(error);
}

void Provider::run_item(const HostItem &item, bool has_failed) const {
  if (item.group == nullptr) {
    if (!has_failed) item.step();
    return;
  }
  fsdp_transport *transport = item.group->transport.get();
  FSDP_LOCAL_ERROR(error);
  if (transport->ops->wait(transport, item.channel, item.ticket, &error) ==
      FSDP_OK) {
    meet(*item.group);
  } else if (!has_failed) {  // the first failure is the one to describe
    call_failed(*item.group, error, operation_of(log, item.sequence));
  }
}

void Provider::run_recorded(const HostItem &item,
                            fsdp_timeline *timeline) const {
  fsdp_transport *transport = item.group->transport.get();
  fsdp_timeline_entry entry = {};
  entry.kind = FSDP_TIMELINE_WAIT;
  entry.sequence = item.sequence;
  entry.unit = -1;
  entry.nbytes = -1;
  entry.mark_begin = -1;
  entry.mark_end = -1;
  if (transport->ops->is_done != nullptr &&
      transport->ops->is_done(transport, item.channel, item.ticket)) {
    entry.flags = FSDP_TIMELINE_WAS_DONE;
  }
  entry.begin_ns = fsdp_timeline_now(timeline);
  run_item(item, false);
  entry.end_ns = fsdp_timeline_now(timeline);
  fsdp_timeline_add(timeline, &entry);
}

// After a failure the rest, up to the ticket, still has to end, because its
// memory will be reused; its steps would only work on garbage.
void Provider::run_until(HostLane &lane, uint64_t ticket) {
  std::exception_ptr failure;
  fsdp_timeline *timeline =
      engine == nullptr ? nullptr : fsdp_engine_timeline(engine);
  while (lane.num_done < ticket && !lane.items.empty()) {
    const HostItem item = std::move(lane.items.front());
    lane.items.pop_front();
    lane.num_done++;
    try {
      if (timeline != nullptr && item.group != nullptr && !failure) {
        run_recorded(item, timeline);
      } else {
        run_item(item, failure != nullptr);
      }
    } catch (...) {
      if (!failure) failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

namespace {

fsdp_status add_call(void *context, fsdp_lane lane, const fsdp_group *group,
                     fsdp_channel channel, uint64_t ticket, fsdp_error *error) {
  GUARDED(error) {
    provider_of(context).add_call(lane, &group_of(group), channel, ticket);
    return FSDP_OK;
  };
}

fsdp_status explain_failure(void *context, const fsdp_group *group,
                            fsdp_error *error) {
  GUARDED(error) {
    const Provider &provider = provider_of(context);
    FSDP_LOCAL_ERROR(cause);
    if (group->transport->ops->check(group->transport, &cause) != FSDP_OK) {
      provider.ranks_failed(group_of(group), text_of(cause).c_str(),
                            operation_of(provider.log, -1));
    }
    return FSDP_BACKEND;
  };
}

}  // namespace

void add_lane_ops(fsdp_device_ops *ops) {
  ops->add_call = add_call;
  ops->explain_failure = explain_failure;
}

}  // namespace fsdp_torch
