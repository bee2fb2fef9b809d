/*
 * Tests of the recorder: its lines, its names, its arithmetic and its
 * injected failures, since other tests rest on them.
 */
#include "check.h"
#include "recorder.h"

static fsdp_call call; /* of the transport, on a lane */
static uint64_t ticket;

static const fsdp_call *call_on(const fsdp_device_ops *ops, fsdp_lane lane) {
  call = (fsdp_call){.stream = ops->stream(ops->context, lane)};
  return &call;
}

TEST(test_lines_and_names) {
  recorder *device = recorder_create();
  const fsdp_device_ops *ops = recorder_ops(device);
  const fsdp_view_ops *views = recorder_views(device);
  void *const it = ops->context;
  int owner = 0;
  int root = 0;
  const fsdp_group group = recorder_group(device, 1, 2, false);
  const fsdp_transport_ops *carries = group.transport->ops;
  float shard[2] = {1, 2};
  void *block = NULL;
  void *grad_shard = NULL;
  fsdp_event *event = NULL;
  bool any_live = true;
  bool any_copied = true;
  const fsdp_lane lane = FSDP_LANE_UNSHARD;

  recorder_show_memory(device, true);
  recorder_name_memory(device, shard, sizeof shard, "shard");
  recorder_name_owner(device, &root, "root");
  CHECK_I64(ops->block_alloc(it, 16, &block, NULL), FSDP_OK);
  CHECK((uintptr_t)block % 256 == 0);
  CHECK_I64(ops->event_create(it, &event, NULL), FSDP_OK);
  CHECK_I64(carries->group_begin(group.transport, call_on(ops, lane), NULL),
            FSDP_OK);
  CHECK_I64(carries->all_gather(group.transport, call_on(ops, lane), block,
                                shard, 2, RECORDER_F32, &ticket, NULL),
            FSDP_OK);
  CHECK_I64(carries->group_end(group.transport, call_on(ops, lane), NULL),
            FSDP_OK);
  CHECK(memcmp(block, shard, 8) == 0);
  CHECK(memcmp((char *)block + 8, shard, 8) == 0);
  CHECK_I64(
      carries->reduce_scatter(group.transport, call_on(ops, FSDP_LANE_REDUCE),
                              block, 2, RECORDER_F32, 1.0, &ticket, NULL),
      FSDP_OK);
  CHECK(((float *)block)[2] == 2 && ((float *)block)[3] == 4);
  CHECK_I64(
      carries->all_reduce(group.transport, call_on(ops, FSDP_LANE_REPLICATE),
                          shard, 1, RECORDER_F32, 1.0, &ticket, NULL),
      FSDP_OK);
  CHECK(shard[0] == 2 && shard[1] == 2);
  CHECK_I64(ops->event_record(it, event, lane, NULL), FSDP_OK);
  CHECK_I64(ops->event_wait(it, FSDP_LANE_COMPUTE, event, NULL), FSDP_OK);
  CHECK_I64(views->show_params(it, &root, FSDP_VIEW_UNSHARDED, NULL, NULL),
            FSDP_OK);
  CHECK_I64(
      views->take_params(it, &owner, FSDP_VIEW_FULL, NULL, &any_copied, NULL),
      FSDP_OK);
  CHECK(!any_copied);
  recorder_set_params_copied(device, true);
  CHECK_I64(
      views->take_params(it, &root, FSDP_VIEW_SHARDED, NULL, &any_copied, NULL),
      FSDP_OK);
  CHECK(any_copied);
  CHECK(!views->grads_live(it, &owner));
  CHECK_I64(views->take_grads(it, &owner, true, NULL, &any_live, NULL),
            FSDP_OK);
  CHECK(!any_live);
  recorder_set_grads_live(device, true);
  CHECK_I64(views->take_grads(it, &owner, false, NULL, &any_live, NULL),
            FSDP_OK);
  CHECK(any_live);
  CHECK(views->grads_live(it, &owner));
  CHECK_I64(views->show_grads(it, &owner, FSDP_VIEW_SHARDED, NULL, NULL),
            FSDP_OK);
  recorder_set_grad_shard(device, &owner, 1, shard, sizeof shard);
  CHECK_I64(views->grad_shard(it, &owner, 1, false, &grad_shard, NULL),
            FSDP_OK);
  CHECK(grad_shard == shard && shard[0] == 0 && shard[1] == 0);
  CHECK_I64(views->grad_shard(it, &owner, 0, false, &grad_shard, NULL),
            FSDP_OK);
  CHECK(grad_shard != shard);
  void *again = NULL;
  CHECK_I64(views->grad_shard(it, &owner, 0, false, &again, NULL), FSDP_OK);
  CHECK(again == grad_shard);
  shard[0] = 7; /* kept, until it is made anew */
  CHECK_I64(views->grad_shard(it, &owner, 1, false, &again, NULL), FSDP_OK);
  CHECK(again == shard && shard[0] == 7);
  views->grads_free(it, &owner);
  CHECK(shard[0] == 7);
  CHECK_I64(views->grad_shard(it, &owner, 1, false, &again, NULL), FSDP_OK);
  CHECK(again == shard && shard[0] == 0);
  views->grad_release(it, &owner);
  CHECK_I64(recorder_live_nbytes(device), 16);
  ops->block_free(it, block, 16, event);
  ops->event_destroy(it, event);
  CHECK_TEXT(recorder_tape(device),
             "alloc 16 b1\n"
             "event e1\n"
             "group_begin unshard g0\n"
             "all_gather unshard g0 2 f32 b1 <- shard\n"
             "group_end unshard g0\n"
             "reduce_scatter reduce g0 2 f32 b1\n"
             "all_reduce replicate g0 1 f32 shard\n"
             "record e1 unshard\n"
             "wait compute e1\n"
             "show root unsharded\n"
             "take_params unit1 full\n"
             "take_params root sharded\n"
             "grads_live unit1\n"
             "take_grads unit1 unsharded\n"
             "take_grads unit1\n"
             "grads_live unit1\n"
             "show_grads unit1 sharded\n"
             "grad_shard unit1 1\n"
             "grad_shard unit1 0\n"
             "grad_shard unit1 0\n"
             "grad_shard unit1 1\n"
             "grads_free unit1\n"
             "grad_shard unit1 1\n"
             "release t1\n"
             "free 16 b1 after e1\n"
             "destroy e1\n");
  CHECK_I64(recorder_live_blocks(device), 0);
  CHECK_I64(recorder_live_events(device), 0);
  recorder_destroy(device);
}

TEST(test_data_operations) {
  recorder *device = recorder_create();
  const fsdp_device_ops *ops = recorder_ops(device);
  void *const it = ops->context;
  const fsdp_lane lane = FSDP_LANE_COMPUTE;
  const float source[] = {1, 2.5F, -3};
  double wide[4] = {100, 100, 100, 100};
  uint16_t half[3];
  unsigned char bytes[3];
  const fsdp_pack_item items[] = {
      {source, RECORDER_F32, 0, 2, false},
      {source, RECORDER_F32, 2, 1, true},
      {NULL, RECORDER_F32, 3, 1, false},
  };
  CHECK_I64(ops->pack(it, lane, wide, RECORDER_F64, items, 3, 0.5, NULL),
            FSDP_OK);
  CHECK(wide[0] == 0.5 && wide[1] == 1.25 && wide[2] == 100.5 && wide[3] == 0);
  CHECK_I64(
      ops->cast(it, lane, half, RECORDER_BF16, source, RECORDER_F32, 3, NULL),
      FSDP_OK);
  CHECK(half[0] == 0x3F80 && half[1] == 0x4020 && half[2] == 0xC040);
  CHECK_I64(ops->accumulate(it, lane, wide, RECORDER_F64, half, RECORDER_BF16,
                            3, 2, true, NULL),
            FSDP_OK);
  CHECK(wide[0] == 2.5 && wide[1] == 6.25 && wide[2] == 94.5);
  CHECK_I64(
      ops->cast(it, lane, bytes, RECORDER_U8, wide, RECORDER_F64, 3, NULL),
      FSDP_OK);
  CHECK(bytes[0] == 2 && bytes[1] == 6 && bytes[2] == 94);
  CHECK_I64(
      ops->cast(it, lane, wide, RECORDER_F64, bytes, RECORDER_U8, 3, NULL),
      FSDP_OK);
  CHECK(wide[2] == 94);
  CHECK_TEXT(recorder_tape(device),
             "pack compute f64 x0.5 2@0 1@2+ zero1@3\n"
             "cast compute 3 f32->bf16\n"
             "accumulate compute 3 bf16->f64 x2 add\n"
             "cast compute 3 f64->u8\n"
             "cast compute 3 u8->f64\n");
  recorder_destroy(device);
}

static void double_rank(void *context, int64_t rank, const void *mine,
                        int64_t nbytes, void *theirs) {
  (void)context;
  (void)mine;
  memset(theirs, (int)(2 * rank), (size_t)nbytes);
}

TEST(test_host_memory) {
  recorder *device = recorder_create();
  const fsdp_device_ops *ops = recorder_ops(device);
  const fsdp_view_ops *views = recorder_views(device);
  void *const it = ops->context;
  const fsdp_lane lane = FSDP_LANE_DOWNLOAD;
  int owner = 0;
  const fsdp_group group = recorder_group(device, 1, 3, false);
  const fsdp_transport_ops *carries = group.transport->ops;
  float shard[2] = {1, 2};
  char mine = 9;
  char all[3] = {0, 0, 0};
  void *block = NULL;
  void *host = NULL;
  fsdp_event *event = NULL;
  bool any_live = true;

  recorder_show_memory(device, true);
  recorder_name_host_memory(device, shard, sizeof shard, "shard");
  CHECK_I64(ops->block_alloc(it, 8, &block, NULL), FSDP_OK);
  CHECK_I64(ops->host_alloc(it, 8, &host, NULL), FSDP_OK);
  CHECK_I64(ops->event_create(it, &event, NULL), FSDP_OK);
  CHECK_I64(ops->copy_to_device(it, lane, block, shard, 8, NULL), FSDP_OK);
  CHECK_I64(carries->broadcast(group.transport, call_on(ops, lane), block, 1, 1,
                               RECORDER_F32, &ticket, NULL),
            FSDP_OK);
  CHECK(memcmp(block, shard, 8) == 0);
  recorder_set_broadcast(device, 5);
  CHECK_I64(carries->broadcast(group.transport, call_on(ops, lane), block, 2, 0,
                               RECORDER_F32, &ticket, NULL),
            FSDP_OK);
  CHECK_I64(ops->copy_to_host(it, lane, host, block, 8, NULL), FSDP_OK);
  CHECK(((float *)host)[0] == 5 && ((float *)host)[1] == 6);
  CHECK_I64(ops->event_record(it, event, lane, NULL), FSDP_OK);
  CHECK_I64(ops->event_synchronize(it, event, NULL), FSDP_OK);
  CHECK_I64(ops->all_gather_bytes(it, &group, &mine, 1, all, NULL), FSDP_OK);
  CHECK(all[0] == 9 && all[1] == 9 && all[2] == 9);
  recorder_set_answer(device, double_rank, NULL);
  CHECK_I64(ops->all_gather_bytes(it, &group, &mine, 1, all, NULL), FSDP_OK);
  CHECK(all[0] == 0 && all[1] == 9 && all[2] == 4);
  CHECK_I64(views->reduce_hook(it, &owner, lane, 2, block, NULL), FSDP_OK);
  CHECK_I64(views->take_full_grads(it, &owner, FSDP_VIEW_FULL_ON_HOST, NULL,
                                   &any_live, NULL),
            FSDP_OK);
  CHECK(!any_live);
  views->mark_params(it, &owner);
  CHECK(!views->params_changed(it, &owner));
  recorder_set_params_changed(device, true);
  CHECK(views->params_changed(it, &owner));
  CHECK_I64(recorder_live_blocks(device), 2);
  CHECK_I64(recorder_live_nbytes(device), 8); /* of the device */
  ops->host_free(it, host);
  ops->block_free(it, block, 8, event);
  CHECK_TEXT(recorder_race(device), "");
  CHECK_TEXT(recorder_tape(device),
             "alloc 8 b1\n"
             "host_alloc 8 h1\n"
             "event e1\n"
             "copy_to_device download 8 b1 <- shard\n"
             "broadcast download g0 1 f32 from 1 b1\n"
             "broadcast download g0 2 f32 from 0 b1\n"
             "copy_to_host download 8 h1 <- b1\n"
             "record e1 download\n"
             "synchronize e1\n"
             "all_gather_bytes g0 1\n"
             "all_gather_bytes g0 1\n"
             "reduce_hook unit0 download 2 b1\n"
             "take_full_grads unit0 full_on_host\n"
             "mark_params unit0\n"
             "params_changed unit0\n"
             "params_changed unit0\n"
             "host_free h1\n"
             "free 8 b1 after e1\n");
  CHECK_I64(recorder_live_blocks(device), 0);
  recorder_destroy(device);
}

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
  CHECK_I64(ops->event_create(ops->context, &event, NULL), FSDP_OK);
  recorder_touch(device, FSDP_LANE_REDUCE, data + 4, 4, true);
  fsdp_lane from = FSDP_LANE_REDUCE;
  if (through_another) {
    CHECK_I64(ops->event_record(ops->context, event, from, NULL), FSDP_OK);
    from = FSDP_LANE_REPLICATE;
    CHECK_I64(ops->event_wait(ops->context, from, event, NULL), FSDP_OK);
  }
  if (waits) {
    CHECK_I64(ops->event_record(ops->context, event, from, NULL), FSDP_OK);
    CHECK_I64(ops->event_wait(ops->context, FSDP_LANE_COMPUTE, event, NULL),
              FSDP_OK);
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

/* Reads do not race; the host and its lanes do; so does what is freed. */
TEST(test_races_of_readers_and_the_host) {
  recorder *device = recorder_create();
  const fsdp_device_ops *ops = recorder_ops(device);
  fsdp_event *event = NULL;
  void *block = NULL;
  CHECK_I64(ops->event_create(ops->context, &event, NULL), FSDP_OK);
  CHECK_I64(ops->block_alloc(ops->context, 8, &block, NULL), FSDP_OK);
  recorder_touch(device, RECORDER_HOST_LANE, block, 8, true);
  /* What the host did is over when it enqueues. */
  recorder_touch(device, FSDP_LANE_COMPUTE, block, 8, false);
  recorder_touch(device, FSDP_LANE_UNSHARD, block, 8, false);
  CHECK_TEXT(recorder_race(device), "");
  CHECK_I64(ops->event_record(ops->context, event, FSDP_LANE_UNSHARD, NULL),
            FSDP_OK);
  CHECK_I64(ops->event_synchronize(ops->context, event, NULL), FSDP_OK);
  ops->block_free(ops->context, block, 8, event);
  CHECK_TEXT(recorder_race(device),
             "free, not after read of b1 by compute (free 8 after e1)");
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
  CHECK_I64(ops->event_create(ops->context, &event, &error), FSDP_OK);
  CHECK_I64(ops->block_alloc(ops->context, 8, &block, &error),
            FSDP_OUT_OF_MEMORY);
  CHECK_TEXT(error.message, "injected at alloc 8");
  CHECK(block == NULL);
  CHECK_I64(ops->block_alloc(ops->context, 8, &block, &error), FSDP_OK);
  recorder_fail_at(device, 0);
  CHECK_I64(ops->event_record(ops->context, event, FSDP_LANE_DOWNLOAD, &error),
            FSDP_BACKEND);
  CHECK_TEXT(error.message, "injected at record e1 download");
  CHECK_TEXT(recorder_tape(device), "event e1\nalloc 8\n");
  CHECK_I64(recorder_num_calls(device), 4);
  recorder_clear(device);
  CHECK_TEXT(recorder_tape(device), "");
  recorder_destroy(device); /* frees what is alive */
}
