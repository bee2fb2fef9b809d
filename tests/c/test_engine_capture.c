/*
 * Tests of runtime/capture.c: what a step that a device captures may not do,
 * and how it is fenced off from the steps around it.
 */
#include "engine_fixture.h"

/* On the tape, every event that is waited for was recorded before. */
static void check_fenced(void) {
  bool is_recorded[64] = {false};
  for (const char *line = recorder_tape(m.device); *line != '\0';
       line = strchr(line, '\n') + 1) {
    int event = 0;
    if (sscanf(line, "record e%d", &event) == 1) is_recorded[event] = true;
    if (sscanf(line, "wait %*s e%d", &event) != 1) continue;
    if (!CHECK(is_recorded[event])) printf("e%d\n", event);
  }
}

/* Leaves what follows the capture on the tape. */
static void capture(const char *step) {
  CHECK_OK(fsdp_engine_begin_capture(m.engine, NULL));
  PLAY("clear");
  CHECK_OK(fsdp_engine_fork_lanes(m.engine, NULL));
  PLAY(step);
  CHECK_OK(fsdp_engine_join_lanes(m.engine, NULL));
  check_fenced();
  CHECK_TAPE_HAS("group_begin unshard g0 captured;");
  CHECK_TAPE_HAS("group_begin reduce g0 captured;");
  CHECK_TAPE_HAS(
      "wait unshard e1; wait reduce e1; wait replicate e1; wait upload e1; "
      "wait download e1;");
  CHECK_TAPE_HAS(
      "record e1 unshard; wait compute e1; record e1 reduce; wait compute e1; "
      "record e1 replicate; wait compute e1; record e1 upload; "
      "wait compute e1; record e1 download; wait compute e1;");
  PLAY("clear");
  fsdp_engine_end_capture(m.engine);
}

/* A capture waits for nothing from before it, and nothing waits for what was
 * recorded in it. */
TEST(test_fences) {
  model_start_tree(&m, NULL, 2);
  PLAY("step; zero_grad");
  capture("step; zero_grad; optimizer");
  PLAY("step; check_grads");
  check_fenced();
  CHECK_TAPE_LACKS("captured");
}

/* The memory of a captured step is taken and given back inside, where the
 * device's allocator knows that it is the graph's. */
TEST(test_memory_of_a_capture) {
  model_start_tree(
      &m, WITH(.keeps_after_forward = true, .forward_prefetch = true), 2);
  PLAY("step; zero_grad; forward"); /* kept for a backward */
  CHECK(recorder_live_blocks(m.device) > 0);
  CHECK_OK(fsdp_engine_begin_capture(m.engine, NULL));
  CHECK_I64(recorder_live_blocks(m.device), 0);
  CHECK_OK(fsdp_engine_fork_lanes(m.engine, NULL));
  PLAY("step; zero_grad; forward");
  CHECK_OK(fsdp_engine_join_lanes(m.engine, NULL));
  CHECK_I64(recorder_live_blocks(m.device), 0);
  fsdp_engine_end_capture(m.engine);
  PLAY("step; check_grads");
}

/* A replay finds what the capture found. */
TEST(test_replays_find_units_at_rest) {
  fsdp_error error = {0};
  model_start_tree(&m, WITH(.keeps_after_forward = true), 2);
  PLAY("step; zero_grad");
  capture("step; zero_grad");
  PLAY("forward; state a HIDDEN");
  CHECK_OK(fsdp_engine_begin_replay(m.engine, NULL));
  PLAY("check_sharded; check_idle; step; zero_grad; unshard a");
  CHECK_FAILS(fsdp_engine_begin_replay(m.engine, &error), FSDP_INVALID_STATE,
              error.message, "..it was unsharded on demand");
  CHECK_I64(error.remedy, FSDP_REMEDY_RESHARD);
  PLAY("reshard a; summon root");
  CHECK_FAILS(fsdp_engine_begin_replay(m.engine, &error), FSDP_INVALID_STATE,
              error.message, "..its parameters are summoned");
  CHECK_I64(error.remedy, FSDP_REMEDY_DISMISS);
  PLAY("drop root; sync none; step");
  CHECK_FAILS(fsdp_engine_begin_replay(m.engine, &error), FSDP_INVALID_STATE,
              error.message, "..gradients that are not reduced");
  CHECK_I64(error.remedy, FSDP_REMEDY_REDUCE);
  PLAY("sync reduce; zero_grad; enter root");
  CHECK_FAILS(fsdp_engine_begin_replay(m.engine, &error), FSDP_INVALID_STATE,
              error.message, "..not inside a forward");
  PLAY("leave root; step; zero_grad; destroy b");
  CHECK_FAILS(fsdp_engine_begin_replay(m.engine, &error), FSDP_INVALID_STATE,
              error.message, "..captured with 3 units, of which 2 are left");
}

static void check_refused(const char *why, fsdp_remedy remedy) {
  fsdp_error error = {0};
  PLAY("clear");
  CHECK_FAILS(fsdp_engine_begin_capture(m.engine, &error), FSDP_INVALID_STATE,
              error.message, why);
  CHECK_I64(error.remedy, remedy);
  CHECK_TAPE(""); /* nothing was changed */
}

TEST(test_refusals) {
  model_start_tree(&m, WITH(.offloads = true), 2);
  check_refused("..its shards are in host memory", FSDP_REMEDY_NO_OFFLOAD);
  model_start_tree(&m, NULL, 2);
  fsdp_transport *transport = m.shard_group.transport;
  fsdp_transport_ops ops = *transport->ops;
  fsdp_transport other = {&ops};
  ops.can_capture = false;
  fsdp_unit_set_transports(m.units[1].unit, &other, NULL, NULL);
  check_refused("..do not go through NCCL from C", FSDP_REMEDY_TRANSPORT);
  fsdp_unit_set_transports(m.units[1].unit, transport, NULL, NULL);
  PLAY("sync none");
  check_refused("..it accumulates gradients", FSDP_REMEDY_SYNC);
  PLAY("sync reduce");
  fsdp_engine_set_order_check(m.engine, true);
  check_refused("..while the ranks compare what they do on the host",
                FSDP_REMEDY_NO_ORDER_CHECK);
  fsdp_engine_set_order_check(m.engine, false);
  CHECK_OK(fsdp_engine_begin_capture(m.engine, NULL));
  check_refused("..while another one is", FSDP_REMEDY_NONE);
  fsdp_engine_end_capture(m.engine);
  PLAY("step");
}
