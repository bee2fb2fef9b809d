/*
 * Tests of runtime/: parts of units, which small groups keep between forward
 * and backward. The recorder holds every access against the lanes.
 */
#include <string.h>

#include "engine_fixture.h"

static void start(bool prefetches) {
  model_start_tree(
      &m,
      WITH(.world_size = 4, .rank = 3, .part_world_size = 2,
           .param_dtype = RECORDER_BF16, .forward_prefetch = prefetches),
      2);
}

TEST(test_backward_gathers_parts) {
  start(false);
  PLAY("enter root; enter a; leave a; state a PARTED; enter b; leave b");
  PLAY("leave root; state b PARTED; state root HIDDEN; clear");
  PLAY("pre_backward root; pre_backward b");
  /* In the small group, twice as much per rank as in the shard group. */
  CHECK_TAPE_HAS("all_gather unshard g1 32 ");
  CHECK_TAPE_LACKS("all_gather unshard g0");
  PLAY("grads b; pre_backward a; grads a; grads root; finish");
  PLAY("check_sharded; check_grads; step; check_grads");
}

TEST(test_parts_do_not_outlive_a_step) {
  for (int prefetches = 0; prefetches < 2; prefetches++) {
    start(prefetches != 0);
    PLAY("forward; state a PARTED; enter root");
    CHECK(fsdp_unit_get_state(m.units[1].unit) != FSDP_UNIT_PARTED);
    PLAY("reset; check_sharded");
    PLAY("enter root; enter a; leave a; leave root; state a PARTED");
    PLAY("pre_backward root; grads root; finish; state a SHARDED");
    PLAY("eval; state a SHARDED; step");
  }
}

TEST(test_parts_by_request) {
  start(false);
  PLAY("forward; state a PARTED");
  CHECK(fsdp_unit_get_state(m.units[1].unit) == FSDP_UNIT_PARTED);
  PLAY("reshard a; state a SHARDED; backward; check_grads");
  fsdp_unit_get_settings(m.units[1].unit)->keeps_part = false;
  PLAY("forward; state a SHARDED; state b PARTED; backward");
}
