/*
 * Tests of plan/: what cannot be planned.
 */
#include "base/dtypes.h"
#include "check.h"
#include "every_allocation.h"
#include "plan_fixture.h"

static const fsdp_dtype FP32 = {FSDP_DTYPE_FLOAT32, 4};

TEST(test_wrong_arguments) {
  plan_init_tree(PLAN_WORLD_SIZE);
  plan_write_events();
  const fsdp_step_plan_options good = p.options;

  p.options.shard_link.bytes_per_second = -1;
  PLAN_REFUSED(
      "the link of the shard group has -1 bytes per second and a latency "
      "of 0 seconds: need more than 0, and at least 0");
  p.options = good;
  p.options.replica_link.latency_seconds = -2;
  PLAN_REFUSED("..-2 seconds");
  p.options = good;
  p.options.num_batches = 0;
  PLAN_REFUSED(
      "a plan needs at least 1 unit and 1 batch, got 4, 0, and 11 and 18 "
      "events");
  p.options = good;
  p.options.num_units = 0;
  PLAN_REFUSED("..got 0, 1");
  p.options = good;
}

TEST(test_wrong_events) {
  plan_init_tree(PLAN_WORLD_SIZE);
  plan_write_events();
  fsdp_step_event *use = &p.backward[1];
  const fsdp_step_event good_use = *use;
  fsdp_step_event *enter = &p.forward[1];
  const fsdp_step_event good_enter = *enter;
  CHECK_I64(use->kind, FSDP_STEP_USE);
  CHECK_I64(enter->kind, FSDP_STEP_ENTER);

  use->param = 2;
  PLAN_REFUSED(
      "backward uses parameter 2 of unit 'root', which has 2: each that "
      "is trainable is used at most once");
  use->param = 0; /* used again at the end */
  PLAN_REFUSED("..parameter 0");
  *use = good_use;
  use->nbytes = 1;
  PLAN_REFUSED(
      "an event changes activations by 1 bytes and at most 0, and takes "
      "0 seconds: need a most that is no less, 0 unless it is WORK or "
      "USE, and seconds >= 0");
  use->peak_nbytes = 1;
  PLAN_REFUSED("1 bytes of activations are never given back");
  *use = good_use;
  use->nbytes = -3001;
  PLAN_REFUSED(
      "an event gives back 1 bytes of activations more than there are");
  *use = good_use;
  enter->peak_nbytes = 1;
  PLAN_REFUSED("..at most 1");
  *enter = good_enter;
  enter->unit = 4;
  PLAN_REFUSED("an event names unit 4 of 4");
  *enter = (fsdp_step_event){.kind = FSDP_STEP_LEAVE, .unit = 2};
  PLAN_REFUSED(
      "forward leaves unit 'b' outside the root, or without an ENTER "
      "before it");
  *enter = (fsdp_step_event){.kind = FSDP_STEP_ENTER, .unit = 2};
  PLAN_REFUSED(
      "forward leaves unit 'a' outside the root, or without an ENTER "
      "before it");
  *enter = (fsdp_step_event){.kind = FSDP_STEP_USE, .unit = 2};
  PLAN_REFUSED(
      "forward uses parameter 0 of unit 'b': gradients come in "
      "backward");
  *enter = good_enter;
  p.options.num_forward--;
  PLAN_REFUSED("unit 'root' is entered and never left");
}

/* What needs no gradient gets none. */
TEST(test_a_frozen_use) {
  plan_init();
  plan_add_unit("root", true, PLAN_WORLD_SIZE);
  plan_run_unit(0, 0);
  plan_write_events();
  fsdp_step_event *event = &p.backward[p.options.num_backward++];
  *event = (fsdp_step_event){.kind = FSDP_STEP_USE, .param = 1};
  PLAN_REFUSED("..parameter 1");
}

TEST(test_overflow) {
  plan_init_tree(PLAN_WORLD_SIZE);
  for (int64_t i = 0; i < p.num_events; i++) {
    if (p.events[i].kind == FSDP_STEP_WORK) {
      p.events[i].nbytes = INT64_MAX / 2;
      p.events[i].peak_nbytes = INT64_MAX / 2;
    }
  }
  plan_write_events();
  PLAN_FAILS(FSDP_OVERFLOW,
             "..do not fit in int64: the model is too large to be planned");
}

static fsdp_status run(void *context, fsdp_error *error) {
  fsdp_step_plan_report report = {.peak_nbytes = -1};
  const fsdp_status status =
      fsdp_step_plan_run(&p.options, &report, p.unit_seconds, error);
  (void)context;
  CHECK((report.peak_nbytes == -1) == (status != FSDP_OK));
  return status;
}

TEST(test_every_allocation_can_fail) {
  plan_init_tree(PLAN_WORLD_SIZE);
  plan_write_events();
  CHECK(every_allocation(run, NULL) > 50);
}

TEST(test_bad_offloads) {
  plan_init_tree(PLAN_WORLD_SIZE);
  (void)plan_run();
  p.forward[0].offload_nbytes = 1;
  PLAN_REFUSED(
      "an event offloads 1 bytes: need 0 or more, and 0 unless it is "
      "WORK");
  p.forward[0].offload_nbytes = 0;
  int64_t at = 0;
  while (p.backward[at].kind != FSDP_STEP_WORK) at++;
  p.backward[at].offload_nbytes = 1;
  p.backward[at].saved_by = 2;
  PLAN_REFUSED("backward needs 1 bytes that event 2 of forward has not saved");
  p.backward[at].saved_by = 11;
  PLAN_REFUSED("..event 11 of forward");
  p.backward[at].offload_nbytes = 0;
  p.options.offload_keep_last = -1;
  PLAN_REFUSED(
      "-1 last units that are not offloaded, 0 bytes per second to the "
      "host: need numbers >= 0");
}

/* What belongs to summons and hooks, not to a step, is refused. */
TEST(test_calls_outside_a_step) {
  const fsdp_link link = {.bytes_per_second = 1};
  fsdp_counting_device device;
  fsdp_counting_transport transport;
  fsdp_counting_device_init(&device, link, link, false);
  const fsdp_device_ops ops = fsdp_counting_device_ops(&device);
  const fsdp_view_ops views = fsdp_counting_device_views(&device);
  const fsdp_group group =
      fsdp_counting_device_group(&device, false, 2, &transport);
  const fsdp_call call = {0};
  uint64_t ticket = 0;
  void *block = NULL;
  CHECK_I64(group.transport->ops->broadcast(group.transport, &call, NULL, 1, 0,
                                            FP32, &ticket, NULL),
            FSDP_INVALID_STATE);
  CHECK_I64(views.reduce_hook(&device, NULL, FSDP_LANE_REDUCE, 0, NULL, NULL),
            FSDP_INVALID_STATE);
  CHECK_I64(ops.all_gather_bytes(&device, &group, NULL, 8, NULL, NULL),
            FSDP_INVALID_STATE);
  CHECK_I64(ops.block_alloc(&device, INT64_MAX, &block, NULL), FSDP_OVERFLOW);
  CHECK_I64(ops.host_alloc(&device, INT64_MAX, &block, NULL), FSDP_OVERFLOW);
  CHECK(block == NULL);
  CHECK_I64(device.peak_nbytes, 0);
}
