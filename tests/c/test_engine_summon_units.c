/*
 * Tests of runtime/: summons of units of all kinds, with all options.
 */
#include "engine_failures.h"

static bool is_shown_here(int bits, int64_t rank) {
  return (bits & FIRST_ONLY) == 0 || rank == 0;
}

/* Gradients that are not sharded yet stay as they are. */
TEST(test_unreduced_gradients_stay) {
  static const char *const steps[] = {"sync none; step", "sync shard; step"};
  for (int i = 0; i < 2; i++) {
    model_start_tree(&m, NULL, 0);
    PLAY(steps[i]);
    const fsdp_view view = m.units[0].grad_view;
    PLAY("summon root with_grads");
    CHECK_I64(m.units[0].grad_view, view);
    PLAY("dismiss root");
    CHECK_I64(m.units[0].grad_view, view);
    PLAY("check_grads; sync reduce; step; check_grads");
  }
}

TEST(test_mixed_segments) {
  for (int bits = 0; bits < MODEL_NUM_SUMMONS; bits++) {
    for (int64_t rank = 0; rank < 2; rank++) {
      const fsdp_summon_options how = model_summon_options(bits);
      model_open(WITH(.rank = rank), "u mixed");
      PLAY("step; check_grads");
      CHECK_OK(fsdp_unit_summon(m.units[0].unit, &how, NULL));
      model_check_params(&m, 0);
      if ((bits & WITH_GRADS) != 0 && is_shown_here(bits, rank)) {
        CHECK(m.units[0].grads[0] != NULL && m.units[0].grads[2] != NULL);
        CHECK(m.units[0].grads[1] == NULL && m.units[0].grads[3] == NULL);
      }
      /* Nothing is shown on the other rank that could be written back. */
      CHECK_OK(
          fsdp_unit_dismiss(m.units[0].unit, is_shown_here(bits, rank), NULL));
      PLAY("step; check_grads");
    }
  }
}

/* Nothing to show, anywhere. */
TEST(test_units_without_elements) {
  for (int bits = 0; bits < MODEL_NUM_SUMMONS; bits++) {
    for (int64_t num_params = 0; num_params < 2; num_params++) {
      model_options options = {.rank = 0};
      const fsdp_summon_options how = model_summon_options(bits);
      options.num_replicas = 2;
      options.offloads = num_params == 1;
      model_open(&options, num_params == 1 ? "u (0)" : "u ()");
      CHECK_OK(fsdp_unit_summon(m.units[0].unit, &how, NULL));
      PLAY("dismiss u");
      CHECK_TAPE_LACKS("alloc");
      CHECK_TAPE_LACKS("broadcast");
      PLAY("step");
    }
  }
}

/* A unit, or its engine, that goes while it is summoned. */
TEST(test_summoned_unit_goes) {
  for (int bits = 0; bits < MODEL_NUM_SUMMONS; bits++) {
    for (int is_engine = 0; is_engine < 2; is_engine++) {
      const fsdp_summon_options how = model_summon_options(bits);
      model_start_tree(&m, WITH(.rank = 0), 0);
      PLAY("step");
      CHECK_OK(fsdp_unit_summon(m.units[0].unit, &how, NULL));
      if (is_engine) {
        fsdp_engine_destroy(m.engine);
        m.engine = NULL;
      } else {
        PLAY("destroy root");
      }
      PLAY("view root sharded; grad_view root sharded");
    }
  }
}

/* A unit that goes must let go of what it shows, whatever the port says. */
TEST(test_every_call_of_going_can_fail) {
  for (int bits = 0; bits < MODEL_NUM_SUMMONS; bits++) {
    for (int64_t i = 0;; i++) {
      const fsdp_summon_options how = model_summon_options(bits);
      model_start_tree(&m, WITH(.rank = 0), 0);
      PLAY("step");
      CHECK_OK(fsdp_unit_summon(m.units[0].unit, &how, NULL));
      const int64_t num_before = recorder_num_calls(m.device);
      recorder_fail_at(m.device, i);
      fsdp_unit_destroy(m.units[0].unit);
      recorder_fail_at(m.device, -1);
      m.units[0].unit = NULL;
      const int64_t num_calls = recorder_num_calls(m.device) - num_before;
      PLAY("view root sharded");
      if (num_calls <= i) break;
    }
  }
}
