/*
 * Tests of runtime/: segments that are frozen and unfrozen after the unit was
 * made.
 */
#include "base/alloc.h"
#include "engine_failures.h"

static fsdp_status set_trainable(int64_t unit, int64_t segment,
                                 bool is_trainable, fsdp_error *error) {
  return fsdp_unit_set_trainable(m.units[unit].unit, segment, is_trainable,
                                 error);
}

/* A whole unit: it had no gradient memory at all. */
TEST(test_frozen_unit_is_unfrozen) {
  for (int offloads = 0; offloads < 2; offloads++) {
    model_options options = {.offloads = offloads != 0, .wants_scratch = true};
    failures_plan(&options);
    model_start(&m);
    PLAY("step; check_grads; num_reduces 3");
    CHECK_I64(model_stats(&m).arena.num_clients, 4 + 3);
    CHECK(!fsdp_unit_is_trainable(m.units[2].unit, 0));
    CHECK_OK(set_trainable(2, 0, true, NULL));
    CHECK_OK(set_trainable(2, 0, true, NULL)); /* is already */
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
  PLAY("sync reduce; step; check_grads");
  CHECK_OK(set_trainable(0, 1, true, NULL));
  CHECK_I64(model_stats(&m).partial_grad_nbytes, 0);
  CHECK_I64(model_stats(&m).arena.num_clients, 2);
  PLAY("step; check_grads"); /* added to what the others had */
  CHECK_I64(model_stats(&m).grad_shard_nbytes, 8 * 4 + 4 * 4 + 8 * 2);
  PLAY("sync shard; step; check_grads");
  CHECK_I64(model_stats(&m).partial_grad_nbytes, 512 + 4 * 4);
  PLAY("sync reduce; step; check_grads");
  const fsdp_summon_options with_grads = {.with_grads = true};
  CHECK_OK(fsdp_unit_summon(m.units[0].unit, &with_grads, NULL));
  CHECK(m.units[0].grads[1] != NULL && m.units[0].grads[3] == NULL);
  PLAY("dismiss u; step; check_grads");
}

/* What is frozen is not reduced; its memory stays, and serves again. */
TEST(test_segments_are_frozen) {
  model_open(NULL, "u mixed");
  PLAY("step; check_grads");
  CHECK_OK(set_trainable(0, 0, false, NULL));
  PLAY("zero_grad; clear; step; check_grads");
  CHECK_TAPE_LACKS("reduce_scatter reduce g0 8 f32");
  CHECK_TAPE_HAS("reduce_scatter reduce g0 8 bf16");
  CHECK_OK(set_trainable(0, 2, false, NULL)); /* nothing is left */
  PLAY("zero_grad; clear; step; check_grads");
  CHECK_TAPE_LACKS("reduce");
  PLAY("no_grads u");
  for (int64_t i = 0; i < 3; i += 2) {
    CHECK_OK(set_trainable(0, i, true, NULL));
  }
  PLAY("zero_grad");
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
    CHECK_OK(set_trainable(0, 0, false, NULL));
    CHECK(fsdp_unit_is_trainable(m.units[0].unit, 0));
    CHECK_FAILS(set_trainable(0, 1, true, &error), FSDP_INVALID_STATE,
                error.message,
                "parameters of unit 'u' were unfrozen in the middle of a "
                "gradient accumulation");
    CHECK_I64(error.remedy, FSDP_REMEDY_TRAIN_LATER);
    PLAY("sync reduce; step; check_grads");
    CHECK_OK(set_trainable(0, 0, false, NULL));
    CHECK(!fsdp_unit_is_trainable(m.units[0].unit, 0));
    PLAY("forward; pre_backward u");
    CHECK_I64(set_trainable(0, 0, true, NULL), FSDP_INVALID_STATE);
    PLAY("reset");
    CHECK_OK(set_trainable(0, 0, true, NULL));
    PLAY("zero_grad; step; check_grads");
  }
}

/* Before it joins an engine, and between two. */
TEST(test_without_an_engine) {
  model_start_tree(&m, NULL, 1);
  fsdp_engine_destroy(m.engine);
  CHECK_OK(set_trainable(0, 0, false, NULL));
  model_join_new_engine(&m);
  PLAY("step; check_grads; no_grads root; has_grads a");

  failures_plan(NULL);
  model_start(&m);
  fsdp_engine_destroy(m.engine);
  CHECK_OK(set_trainable(2, 0, true, NULL));
  model_join_new_engine(&m);
  PLAY("step; check_grads");
}

/* A unit whose gradients do not fit stays as it was. */
TEST(test_what_does_not_fit) {
  const fsdp_param_spec spec = {1, INT64_MAX / 8, RECORDER_U8, false};
  fsdp_param_table *table = NULL;
  fsdp_flat_layout *layout = NULL;
  fsdp_unit *unit = NULL;
  fsdp_error error;
  CHECK_OK(fsdp_param_table_create(&spec, 1, &table, NULL));
  CHECK_OK(fsdp_flat_layout_create(table, 2, (fsdp_alignment){1, true, true},
                                   &layout, NULL));
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
  fsdp_param_table_destroy(table);
  CHECK_I64(fsdp_alloc_live(), 0);
}

static fsdp_status unfreeze_and_train(fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  FSDP_TRY(failures_train(error));
  FSDP_TRY(fsdp_unit_set_trainable(m.units[1].unit, 1, true, error));
  FSDP_TRY(fsdp_unit_set_trainable(m.units[2].unit, 0, true, error));
  FSDP_TRY(failures_train(error));
done:
  return status;
}

TEST(test_every_call_can_fail) {
  const model_options options = {0};
  failures_every_call(&options, NULL, unfreeze_and_train, 0);
}

TEST(test_every_allocation_can_fail) {
  failures_every_allocation(NULL, NULL, unfreeze_and_train);
}
