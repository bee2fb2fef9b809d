/*
 * Tests of the recorder: its search for races and its injected failures. What
 * it writes and computes the tests of the engine see.
 */
#include "check.h"
#include "recorder.h"

/* --- Races --------------------------------------------------------------- */

/* A write on one lane, then an access on another, which `waits` for the first,
 * or for a third that did. */
static const char *race_of(const char *name, bool is_write, bool waits,
                           bool through_another) {
  static char text[256];
  recorder *device = recorder_create();
  const fsdp_device_ops *ops = recorder_ops(device);
  fsdp_event *event = NULL;
  char data[8];
  recorder_name_memory(device, data, sizeof data, name);
  CHECK_OK(ops->event_create(ops->context, &event, NULL));
  recorder_touch(device, FSDP_LANE_REDUCE, data + 4, 4, true);
  fsdp_lane from = FSDP_LANE_REDUCE;
  if (through_another) {
    CHECK_OK(ops->event_record(ops->context, event, from, NULL));
    from = FSDP_LANE_REPLICATE;
    CHECK_OK(ops->event_wait(ops->context, from, event, NULL));
  }
  if (waits) {
    CHECK_OK(ops->event_record(ops->context, event, from, NULL));
    CHECK_OK(ops->event_wait(ops->context, FSDP_LANE_COMPUTE, event, NULL));
  }
  recorder_touch(device, FSDP_LANE_COMPUTE, data, 4, true); /* beside it */
  recorder_touch(device, FSDP_LANE_COMPUTE, data + 2, 4, is_write);
  snprintf(text, sizeof text, "%s", recorder_race(device));
  recorder_destroy(device);
  return text;
}

TEST(test_races) {
  CHECK_TEXT(race_of("x", false, true, false), "");
  CHECK_TEXT(race_of("x", true, true, true), "");
  CHECK_TEXT(race_of("x", false, false, false),
             "read by compute, not after write of x+4 by reduce (event e1)");
  CHECK_TEXT(race_of("x", true, false, true),
             "write by compute, not after write of x+4 by reduce (wait "
             "replicate e1)");
}

/* Two items of one call, the second `from` somewhere; -1: it writes zeros. */
static const char *race_of_items(int64_t to, int64_t from) {
  static char text[256];
  recorder *device = recorder_create();
  const fsdp_device_ops *ops = recorder_ops(device);
  float data[4] = {0};
  const fsdp_dtype f32 = RECORDER_F32;
  recorder_name_memory(device, data, sizeof data, "x");
  const fsdp_pack_item items[] = {
      {data, f32, f32, data, 2, false, false, false},
      {data + to, f32, f32, from < 0 ? NULL : data + from, 1, false, false,
       false}};
  CHECK_OK(ops->pack(ops->context, FSDP_LANE_COMPUTE, items, 2, 1, NULL));
  snprintf(text, sizeof text, "%s", recorder_race(device));
  recorder_destroy(device);
  return text;
}

TEST(test_items_of_one_call) {
  CHECK_TEXT(race_of_items(2, 3), "");
  CHECK_TEXT(race_of_items(2, -1), "");
  CHECK_TEXT(race_of_items(1, -1),
             "write by an item of the same call, not after write of x+4 by "
             "compute (pack compute x1 2 f32->f32, zero 1 f32)");
  CHECK_TEXT(race_of_items(2, 1),
             "write by an item of the same call, not after read of x+4 by "
             "compute (pack compute x1 2 f32->f32, 1 f32->f32)");
}

/* A lane waits for COMPUTE before it uses a new block, and COMPUTE for the lane
 * before it is freed. */
static const char *race_of_block(bool waits_first, bool waits_last) {
  static char text[256];
  recorder *device = recorder_create();
  const fsdp_device_ops *ops = recorder_ops(device);
  fsdp_event *event = NULL;
  void *block = NULL;
  CHECK_OK(ops->event_create(ops->context, &event, NULL));
  CHECK_OK(ops->block_alloc(ops->context, 8, &block, NULL));
  if (waits_first) {
    CHECK_OK(ops->event_record(ops->context, event, FSDP_LANE_COMPUTE, NULL));
    CHECK_OK(ops->event_wait(ops->context, FSDP_LANE_UNSHARD, event, NULL));
  }
  recorder_touch(device, FSDP_LANE_UNSHARD, block, 8, true);
  if (waits_last) {
    CHECK_OK(ops->event_record(ops->context, event, FSDP_LANE_UNSHARD, NULL));
    CHECK_OK(ops->event_wait(ops->context, FSDP_LANE_COMPUTE, event, NULL));
  }
  ops->block_free(ops->context, block, 8);
  snprintf(text, sizeof text, "%s", recorder_race(device));
  recorder_destroy(device);
  return text;
}

TEST(test_races_of_blocks) {
  CHECK_TEXT(race_of_block(true, true), "");
  CHECK_TEXT(race_of_block(false, true),
             "write by unshard, not after write of b1 by compute (alloc 8)");
  CHECK_TEXT(race_of_block(true, false),
             "free, not after write of b1 by unshard (free 8)");
}

/* Reads do not race; the host and its lanes do. */
TEST(test_races_of_readers_and_the_host) {
  char read = 0;
  recorder *device = recorder_create();
  const fsdp_device_ops *ops = recorder_ops(device);
  fsdp_event *event = NULL;
  recorder_name_memory(device, &read, 1, "x");
  CHECK_OK(ops->event_create(ops->context, &event, NULL));
  recorder_touch(device, RECORDER_HOST_LANE, &read, 1, true);
  /* What the host did is over when it enqueues. */
  recorder_touch(device, FSDP_LANE_COMPUTE, &read, 1, false);
  recorder_touch(device, FSDP_LANE_UNSHARD, &read, 1, false);
  CHECK_TEXT(recorder_race(device), "");
  CHECK_OK(ops->event_record(ops->context, event, FSDP_LANE_UNSHARD, NULL));
  CHECK_OK(ops->event_synchronize(ops->context, event, NULL));
  recorder_forget(device, &read, 1, RECORDER_HOST_LANE);
  CHECK_TEXT(recorder_race(device),
             "free, not after read of x by compute (synchronize e1)");
  /* A record that was made to fail may leave that behind. */
  recorder_fail_at(device, 0);
  CHECK_I64(ops->event_record(ops->context, event, FSDP_LANE_UNSHARD, NULL),
            FSDP_BACKEND);
  CHECK_TEXT(recorder_race(device), "");
  recorder_destroy(device);

  char data = 0;
  device = recorder_create();
  recorder_touch(device, FSDP_LANE_UNSHARD, &data, 1, false);
  recorder_forget(device, &data, 1, FSDP_LANE_UNSHARD);
  recorder_touch(device, RECORDER_HOST_LANE, &data, 1, true);
  CHECK_TEXT(recorder_race(device), "");
  recorder_destroy(device);
}

TEST(test_chosen_call_fails_once) {
  recorder *device = recorder_create();
  const fsdp_device_ops *ops = recorder_ops(device);
  fsdp_event *event = NULL;
  void *block = NULL;
  fsdp_error error;
  recorder_fail_at(device, 1);
  CHECK_OK(ops->event_create(ops->context, &event, &error));
  CHECK_FAILS(ops->block_alloc(ops->context, 8, &block, &error),
              FSDP_OUT_OF_MEMORY, error.message, "injected at alloc 8");
  CHECK(block == NULL);
  CHECK_OK(ops->block_alloc(ops->context, 8, &block, &error));
  recorder_fail_at(device, 0);
  CHECK_FAILS(
      ops->event_record(ops->context, event, FSDP_LANE_DOWNLOAD, &error),
      FSDP_BACKEND, error.message, "injected at record e1 download");
  CHECK_LINES(recorder_tape(device), "event e1; alloc 8");
  CHECK_I64(recorder_num_calls(device), 4);
  recorder_clear(device);
  CHECK_TEXT(recorder_tape(device), "");
  recorder_destroy(device); /* frees what is alive */
}
