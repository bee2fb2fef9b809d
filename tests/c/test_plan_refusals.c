/*
 * Tests of plan/: what cannot be planned.
 */
#include "base/alloc.h"
#include "base/dtypes.h"
#include "check.h"
#include "plan_fixture.h"

static const fsdp_dtype FP32 = {FSDP_DTYPE_FLOAT32, 4};

TEST(test_wrong_arguments) {
  plan_fixture self;
  plan_fixture_init_tree(&self, PLAN_WORLD_SIZE);
  plan_fixture_write_events(&self);
  const fsdp_step_plan_options good = self.options;

  self.options.shard_link.bytes_per_second = -1;
  CHECK_TEXT(
      plan_fixture_message(&self, FSDP_INVALID_ARGUMENT),
      "the link of the shard group has -1 bytes per second and a latency "
      "of 0 seconds: need more than 0, and at least 0");
  self.options = good;
  self.options.replica_link.latency_seconds = -2;
  CHECK(strstr(plan_fixture_message(&self, FSDP_INVALID_ARGUMENT),
               "-2 seconds") != NULL);
  self.options = good;
  self.options.num_batches = 0;
  CHECK_TEXT(
      plan_fixture_message(&self, FSDP_INVALID_ARGUMENT),
      "a plan needs at least 1 unit and 1 batch, got 4, 0, and 11 and 18 "
      "events");
  self.options = good;
  self.options.num_units = 0;
  CHECK(strstr(plan_fixture_message(&self, FSDP_INVALID_ARGUMENT),
               "got 0, 1") != NULL);
  self.options = good;
  plan_fixture_fini(&self);
}

TEST(test_wrong_events) {
  plan_fixture self;
  plan_fixture_init_tree(&self, PLAN_WORLD_SIZE);
  plan_fixture_write_events(&self);
  fsdp_step_event *use = &self.backward[1];
  const fsdp_step_event good_use = *use;
  fsdp_step_event *enter = &self.forward[1];
  const fsdp_step_event good_enter = *enter;
  CHECK_I64(use->kind, FSDP_STEP_USE);
  CHECK_I64(enter->kind, FSDP_STEP_ENTER);

  use->param = 2;
  CHECK_TEXT(plan_fixture_message(&self, FSDP_INVALID_ARGUMENT),
             "backward uses parameter 2 of unit 'root', which has 2: each that "
             "is trainable is used at most once");
  use->param = 0; /* used again at the end */
  CHECK(strstr(plan_fixture_message(&self, FSDP_INVALID_ARGUMENT),
               "parameter 0") != NULL);
  *use = good_use;
  use->nbytes = 1;
  CHECK_TEXT(plan_fixture_message(&self, FSDP_INVALID_ARGUMENT),
             "an event changes activations by 1 bytes and at most 0, and takes "
             "0 seconds: need a most that is no less, 0 unless it is WORK or "
             "USE, and seconds >= 0");
  use->peak_nbytes = 1;
  CHECK_TEXT(plan_fixture_message(&self, FSDP_INVALID_ARGUMENT),
             "1 bytes of activations are never given back");
  *use = good_use;
  use->nbytes = -3001;
  CHECK_TEXT(plan_fixture_message(&self, FSDP_INVALID_ARGUMENT),
             "an event gives back 1 bytes of activations more than there are");
  *use = good_use;
  enter->peak_nbytes = 1;
  CHECK(strstr(plan_fixture_message(&self, FSDP_INVALID_ARGUMENT),
               "at most 1") != NULL);
  *enter = good_enter;
  enter->unit = 4;
  CHECK_TEXT(plan_fixture_message(&self, FSDP_INVALID_ARGUMENT),
             "an event names unit 4 of 4");
  *enter = (fsdp_step_event){.kind = FSDP_STEP_LEAVE, .unit = 2};
  CHECK_TEXT(plan_fixture_message(&self, FSDP_INVALID_ARGUMENT),
             "forward leaves unit 'b' outside the root, or without an ENTER "
             "before it");
  *enter = (fsdp_step_event){.kind = FSDP_STEP_ENTER, .unit = 2};
  CHECK_TEXT(plan_fixture_message(&self, FSDP_INVALID_ARGUMENT),
             "forward leaves unit 'a' outside the root, or without an ENTER "
             "before it");
  *enter = (fsdp_step_event){.kind = FSDP_STEP_USE, .unit = 2};
  CHECK_TEXT(plan_fixture_message(&self, FSDP_INVALID_ARGUMENT),
             "forward uses parameter 0 of unit 'b': gradients come in "
             "backward");
  *enter = good_enter;
  self.options.num_forward--;
  CHECK_TEXT(plan_fixture_message(&self, FSDP_INVALID_ARGUMENT),
             "unit 'root' is entered and never left");
  plan_fixture_fini(&self);
}

/* What needs no gradient gets none. */
TEST(test_a_frozen_use) {
  plan_fixture self;
  plan_fixture_init(&self);
  plan_fixture_add_unit(&self, "root", true, PLAN_WORLD_SIZE);
  plan_fixture_run_unit(&self, 0, 0);
  plan_fixture_write_events(&self);
  fsdp_step_event *event = &self.backward[self.options.num_backward++];
  *event = (fsdp_step_event){.kind = FSDP_STEP_USE, .param = 1};
  CHECK(strstr(plan_fixture_message(&self, FSDP_INVALID_ARGUMENT),
               "parameter 1") != NULL);
  plan_fixture_fini(&self);
}

TEST(test_overflow) {
  plan_fixture self;
  plan_fixture_init_tree(&self, PLAN_WORLD_SIZE);
  for (int64_t i = 0; i < self.num_events; i++) {
    if (self.events[i].kind == FSDP_STEP_WORK) {
      self.events[i].nbytes = INT64_MAX / 2;
      self.events[i].peak_nbytes = INT64_MAX / 2;
    }
  }
  plan_fixture_write_events(&self);
  CHECK(strstr(plan_fixture_message(&self, FSDP_OVERFLOW),
               "do not fit in int64: the model is too large to be planned") !=
        NULL);
  plan_fixture_fini(&self);
}

TEST(test_every_allocation_can_fail) {
  plan_fixture self;
  plan_fixture_init_tree(&self, PLAN_WORLD_SIZE);
  plan_fixture_write_events(&self);
  const int64_t live = fsdp_alloc_live();
  for (int64_t i = 0;; i++) {
    fsdp_error error = {0};
    fsdp_step_plan_report report = {.peak_nbytes = -1};
    fsdp_alloc_fail_at(i);
    const fsdp_status status =
        fsdp_step_plan_run(&self.options, &report, self.unit_seconds, &error);
    fsdp_alloc_fail_at(-1);
    CHECK_I64(fsdp_alloc_live(), live);
    if (status == FSDP_OK) {
      CHECK(i > 50);
      break;
    }
    CHECK_I64(status, FSDP_OUT_OF_MEMORY);
    CHECK_I64(error.status, FSDP_OUT_OF_MEMORY);
    CHECK_I64(report.peak_nbytes, -1);
  }
  plan_fixture_fini(&self);
}

TEST(test_bad_offloads) {
  plan_fixture self;
  plan_fixture_init_tree(&self, PLAN_WORLD_SIZE);
  (void)plan_fixture_run(&self);
  self.forward[0].offload_nbytes = 1;
  CHECK_TEXT(plan_fixture_message(&self, FSDP_INVALID_ARGUMENT),
             "an event offloads 1 bytes: need 0 or more, and 0 unless it is "
             "WORK");
  self.forward[0].offload_nbytes = 0;
  int64_t at = 0;
  while (self.backward[at].kind != FSDP_STEP_WORK) at++;
  self.backward[at].offload_nbytes = 1;
  self.backward[at].saved_by = 2;
  CHECK_TEXT(plan_fixture_message(&self, FSDP_INVALID_ARGUMENT),
             "backward needs 1 bytes that event 2 of forward has not saved");
  self.backward[at].saved_by = 11;
  CHECK(strstr(plan_fixture_message(&self, FSDP_INVALID_ARGUMENT),
               "event 11 of forward") != NULL);
  self.backward[at].offload_nbytes = 0;
  self.options.offload_keep_last = -1;
  CHECK_TEXT(plan_fixture_message(&self, FSDP_INVALID_ARGUMENT),
             "-1 last units that are not offloaded, 0 bytes per second to the "
             "host: need numbers >= 0");
  plan_fixture_fini(&self);
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
