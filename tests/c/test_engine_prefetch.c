/* What the user says about the schedule: prefetch lists, units that are not
 * unsharded in backward, backwards that leave their reductions open. */
#include "engine_fixture.h"

static void prefetch(int64_t unit, fsdp_pass pass, const char *names) {
  fsdp_unit *units[MODEL_MAX_UNITS];
  size_t num_units = 0;
  for (; *names != '\0'; names++) {
    units[num_units++] = m.units[*names - 'a' + 1].unit;
  }
  CHECK_OK(fsdp_unit_set_prefetches(m.units[unit].unit, pass, units, num_units,
                                    NULL));
}

TEST(test_lists_of_forward) {
  model_start_tree(&m, NULL, 3);
  prefetch(0, FSDP_PASS_FORWARD, "ab");
  prefetch(2, FSDP_PASS_FORWARD, "c");
  PLAY("eval");
  CHECK_SCHEDULE(
      "all_gather root; all_gather a; all_gather b; show root unsharded; "
      "show a unsharded; show a sharded; all_gather c; show b unsharded; "
      "show b sharded; show c unsharded; show c sharded; show root sharded");
  prefetch(0, FSDP_PASS_FORWARD, "");
  PLAY("clear; eval");
  CHECK_SCHEDULE(
      "all_gather root; show root unsharded; all_gather a; show a unsharded; "
      "show a sharded; all_gather b; all_gather c; show b unsharded; "
      "show b sharded; show c unsharded; show c sharded; show root sharded");
  PLAY("step; check_grads");
}

/* c is reduced when b lists it. */
TEST(test_lists_of_backward) {
  model_start_tree(&m, NULL, 3);
  prefetch(3, FSDP_PASS_BACKWARD, "ab");
  prefetch(2, FSDP_PASS_BACKWARD, "c");
  PLAY("forward; clear; pre_backward root; pre_backward c");
  PLAY("state a PREFETCHED; state b PREFETCHED; grads c; pre_backward b");
  PLAY("state c REDUCING; grads b; pre_backward a; grads a; grads root");
  PLAY("finish; check_grads; check_sharded");
}

TEST(test_a_unit_leaves_the_lists) {
  model_start_tree(&m, NULL, 3);
  prefetch(0, FSDP_PASS_FORWARD, "cab");
  prefetch(1, FSDP_PASS_BACKWARD, "c");
  PLAY("eval; destroy c; enter root; state a PREFETCHED; state b PREFETCHED");
  PLAY("leave_eval root");
  fsdp_unit *const gone = m.units[2].unit;
  fsdp_engine *other = NULL;
  fsdp_error error;
  CHECK_OK(fsdp_engine_create(&m.ops, &m.views, &other, NULL));
  CHECK_OK(fsdp_engine_add_unit(other, gone, NULL));
  CHECK_FAILS(fsdp_unit_set_prefetches(m.units[0].unit, FSDP_PASS_FORWARD,
                                       &gone, 1, &error),
              FSDP_INVALID_STATE, error.message,
              "unit 'root' cannot prefetch unit 'b': they are not in one "
              "engine");
  PLAY("enter root; state a PREFETCHED; state b SHARDED; leave_eval root");
  fsdp_engine_destroy(other);
}

/* Its parameters have shapes for the gradients, and no memory. */
TEST(test_no_unshard_in_backward) {
  model_start_tree(&m, NULL, 2);
  fsdp_unit_get_settings(m.units[1].unit)->unshards_in_backward = false;
  for (int i = 0; i < 2; i++) {
    PLAY("forward; clear; pre_backward root; pre_backward b; grads b");
    CHECK_OK(fsdp_unit_pre_backward(m.units[1].unit, NULL));
    PLAY("state a SHARDED; view a unsharded; grads a; view a sharded");
    PLAY("grads root; finish; check_grads; check_sharded; check_idle");
    CHECK_TAPE_LACKS("all_gather a");
  }
  PLAY("forward; pre_backward root");
  CHECK_OK(fsdp_unit_pre_backward(m.units[1].unit, NULL));
  PLAY("view a unsharded; reset; view a sharded");
  PLAY("forward; pre_backward root");
  CHECK_OK(fsdp_unit_pre_backward(m.units[1].unit, NULL));
  CHECK_OK(fsdp_unit_pre_forward(m.units[1].unit, true, NULL)); /* recomputed */
  PLAY("state a UNSHARDED; grads a; grads root; pre_backward b; grads b");
  PLAY("finish; check_sharded");
}

/* The next backward waits, or whoever needs the gradients. */
TEST(test_reductions_left_open) {
  const model_options kinds[] = {{0}, {.num_replicas = 2}, {.offloads = true}};
  for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
    model_start_tree(&m, &kinds[i], 2);
    fsdp_engine_set_waits_for_reduces(m.engine, false);
    PLAY("step; step; sync shard; step; sync reduce; step; sync none; step");
    PLAY("sync reduce");
    fsdp_engine_set_waits_for_reduces(m.engine, true);
    PLAY("step; check_grads; optimizer; zero_grad");
    fsdp_engine_set_waits_for_reduces(m.engine, false);
    PLAY("step");
    CHECK_OK(fsdp_engine_join_reduces(m.engine, NULL));
    PLAY("check_grads; step; zero_grad; step; reset; step; check_races");
  }
}
