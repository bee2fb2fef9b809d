/*
 * Tests of runtime/: segments that are frozen and unfrozen after the unit was
 * made.
 */
#include "engine_failures.h"
#include "placement_fixture.h"

/* A whole unit: it had no gradient memory at all. */
TEST(test_frozen_unit_is_unfrozen) {
  for (int offloads = 0; offloads < 2; offloads++) {
    failures_plan(WITH(.offloads = offloads != 0, .wants_scratch = true));
    model_start(&m);
    PLAY("step; check_grads; num_reduces 3");
    CHECK_I64(model_stats(&m).arena.num_clients, 4 + 3);
    CHECK(!fsdp_unit_is_trainable(m.units[2].unit, 0));
    PLAY("unfreeze frozen 0; unfreeze frozen 0"); /* it is already */
    CHECK(fsdp_unit_is_trainable(m.units[2].unit, 0));
    CHECK_I64(model_stats(&m).arena.num_clients, 4 + 4);
    for (int i = 0; i < 2; i++) {
      PLAY("zero_grad; sync none; step; check_grads");
      PLAY("sync reduce; step; check_grads");
    }
    PLAY("num_reduces 11; has_grads frozen; zero_grad");
    PLAY("sync shard; step; check_grads; sync reduce; step; check_grads");
  }
}

/* A second segment of a unit: its blocks grow, also the partial gradient's. */
TEST(test_frozen_segment_is_unfrozen) {
  model_open(NULL, "u mixed");
  PLAY("sync shard; step; check_grads");
  CHECK_I64(model_stats(&m).partial_grad_nbytes, 256 + 8 * 2);
  PLAY("sync reduce; step; check_grads; unfreeze u 1");
  CHECK_I64(model_stats(&m).partial_grad_nbytes, 0);
  CHECK_I64(model_stats(&m).arena.num_clients, 2);
  PLAY("step; check_grads"); /* added to what the others had */
  CHECK_I64(model_stats(&m).grad_shard_nbytes, 8 * 4 + 4 * 4 + 8 * 2);
  PLAY("sync shard; step; check_grads");
  CHECK_I64(model_stats(&m).partial_grad_nbytes, 512 + 4 * 4);
  PLAY("sync reduce; step; check_grads");
  PLAY("summon u with_grads");
  CHECK(m.units[0].grads[1] != NULL && m.units[0].grads[3] == NULL);
  PLAY("dismiss u; step; check_grads");
}

/* What is frozen is not reduced; its memory stays, and serves again. */
TEST(test_segments_are_frozen) {
  model_open(NULL, "u mixed");
  PLAY("step; check_grads; freeze u 0; zero_grad; clear; step; check_grads");
  CHECK_TAPE_LACKS("reduce_scatter reduce g0 8 f32");
  CHECK_TAPE_HAS("reduce_scatter reduce g0 8 bf16");
  PLAY("freeze u 2; zero_grad; clear; step; check_grads"); /* nothing left */
  CHECK_TAPE_LACKS("reduce");
  PLAY("no_grads u; unfreeze u 0; unfreeze u 2; zero_grad");
  const int64_t num_clients = model_stats(&m).arena.num_clients;
  PLAY("step; check_grads");
  CHECK_I64(model_stats(&m).arena.num_clients, num_clients);
}

/* Not while gradients are held: to freeze waits, to unfreeze is refused. */
TEST(test_held_gradients) {
  static const char *const steps[] = {"sync none; step; check_grads",
                                      "sync shard; step; check_grads"};
  for (int i = 0; i < 2; i++) {
    fsdp_error error;
    model_open(NULL, "u mixed");
    PLAY(steps[i]);
    PLAY("freeze u 0");
    CHECK(fsdp_unit_is_trainable(m.units[0].unit, 0));
    CHECK_FAILS(model_try("unfreeze u 1", &error), FSDP_INVALID_STATE,
                error.message,
                "parameters of unit 'u' were unfrozen in the middle of a "
                "gradient accumulation");
    CHECK_I64(error.remedy, FSDP_REMEDY_TRAIN_LATER);
    PLAY("sync reduce; step; check_grads; freeze u 0");
    CHECK(!fsdp_unit_is_trainable(m.units[0].unit, 0));
    PLAY("forward; pre_backward u");
    CHECK_I64(model_try("unfreeze u 0", &error), FSDP_INVALID_STATE);
    PLAY("reset; unfreeze u 0; zero_grad; step; check_grads");
  }
}

/* Before it joins an engine, and between two. */
TEST(test_without_an_engine) {
  model_start_tree(&m, NULL, 1);
  fsdp_engine_destroy(m.engine);
  PLAY("freeze root 0");
  model_join_new_engine(&m);
  PLAY("step; check_grads; no_grads root; has_grads a");

  failures_plan(NULL);
  model_start(&m);
  fsdp_engine_destroy(m.engine);
  PLAY("unfreeze frozen 0");
  model_join_new_engine(&m);
  PLAY("step; check_grads");
}

/* A unit whose gradients do not fit stays as it was. */
TEST(test_what_does_not_fit) {
  const fsdp_param_spec spec = {1, INT64_MAX / 8, RECORDER_U8, false};
  fsdp_flat_layout *layout =
      placement_layout(&spec, 1, 2, (fsdp_alignment){1, true, true});
  fsdp_unit *unit = NULL;
  fsdp_error error;
  const fsdp_segment_options segment = {.param_dtype = RECORDER_U8,
                                        .reduce_dtype = {9, 16},
                                        .grad_dtype = {9, 16}};
  const fsdp_unit_options options = {.name = "huge",
                                     .layout = layout,
                                     .segments = &segment,
                                     .shard_group = {.world_size = 2},
                                     .replica_group = {.world_size = 1},
                                     .prescale = 1};
  CHECK_OK(fsdp_unit_create(&options, &unit, NULL));
  CHECK_FAILS(fsdp_unit_set_trainable(unit, 0, true, &error), FSDP_OVERFLOW,
              error.message,
              "unit 'huge': segment 0 of 1152921504606846976 elements does not "
              "fit in int64 bytes");
  CHECK(!fsdp_unit_is_trainable(unit, 0));
  fsdp_unit_destroy(unit);
  fsdp_flat_layout_destroy(layout);
}

static fsdp_status unfreeze_and_train(fsdp_error *error) {
  return model_try(TRAIN "; unfreeze mixed 1; unfreeze frozen 0; " TRAIN,
                   error);
}

TEST(test_every_call_can_fail) {
  const model_options options = {0};
  failures_every_call(&options, NULL, unfreeze_and_train, 0);
}

TEST(test_every_allocation_can_fail) {
  failures_every_allocation(NULL, NULL, unfreeze_and_train);
}
