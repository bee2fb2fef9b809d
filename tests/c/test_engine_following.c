/*
 * Tests of runtime/: a port that follows a unit's reductions.
 */
#include <stdlib.h>
#include <string.h>

#include "elements.h"
#include "engine_fixture.h"

static void *aside[MODEL_MAX_SEGMENTS];
static int num_aside;
static int num_reduced;
static fsdp_lane last_lane;

static void grads_set_aside(void *context, void *owner) {
  const model_unit *unit = owner;
  (void)context;
  num_aside++;
  for (int64_t i = 0; i < unit->num_segments; i++) {
    const size_t nbytes = (size_t)unit->grad_shard_nbytes[i];
    CHECK(aside[i] == NULL);
    aside[i] = malloc(nbytes);
    if (aside[i] == NULL) abort();
    memcpy(aside[i], unit->grad_shards[i], nbytes);
    memset(unit->grad_shards[i], 0xCD, nbytes); /* nobody adds to it */
  }
}

/* What stood aside is added, as the bridge does. */
static fsdp_status grads_reduced(void *context, void *owner, fsdp_lane lane,
                                 fsdp_error *error) {
  const model_unit *unit = owner;
  (void)context;
  (void)error;
  num_reduced++;
  last_lane = lane;
  for (int64_t i = 0; i < unit->num_segments; i++) {
    if (aside[i] == NULL) continue;
    elements_combine(unit->grad_shards[i], RECORDER_F32, aside[i], RECORDER_F32,
                     unit->grad_shard_nbytes[i] / RECORDER_F32.itemsize, 1,
                     true);
    free(aside[i]);
    aside[i] = NULL;
  }
  return FSDP_OK;
}

static void start(const model_options *options) {
  static const char *const names[] = {"root", "a", "b"};
  num_aside = 0;
  num_reduced = 0;
  model_init(&m, options);
  m.views.grads_set_aside = grads_set_aside;
  m.views.grads_reduced = grads_reduced;
  for (int64_t i = 0; i < 3; i++) model_plan_simple(&m, names[i], 4 * (i + 1));
  model_start(&m);
  for (int64_t i = 0; i < 3; i++) {
    fsdp_unit_get_settings(m.units[i].unit)->is_followed = true;
  }
}

TEST(test_numbers) {
  for (int kind = 0; kind < 4; kind++) {
    model_options options = {.num_replicas = 1 + (kind & 1),
                             .offloads = kind >= 2};
    start(&options);
    PLAY("step");
    CHECK_I64(num_reduced, 3);
    CHECK_I64(num_aside, 0);
    CHECK_I64(last_lane, options.offloads              ? FSDP_LANE_DOWNLOAD
                         : m.options.num_replicas == 2 ? FSDP_LANE_REPLICATE
                                                       : FSDP_LANE_REDUCE);
    PLAY("check_grads; step"); /* accumulates */
    CHECK_I64(num_reduced, 6);
    CHECK_I64(num_aside, 3);
    PLAY("check_grads");
    /* Only a backward that reduces to the mean. */
    PLAY("sync none; step; sync shard; step");
    CHECK_I64(num_reduced, 6);
    PLAY("sync reduce; step");
    CHECK_I64(num_reduced, 9);
    PLAY("check_grads");
    for (int64_t i = 0; i < 3; i++) {
      fsdp_unit_get_settings(m.units[i].unit)->is_followed = false;
    }
    PLAY("step");
    CHECK_I64(num_reduced, 9);
    PLAY("check_grads");
  }
}

/* Gradients that were dropped are neither shown nor counted. */
static bool drops;
static fsdp_status drop_grads(void *context, void *owner, fsdp_lane lane,
                              fsdp_error *error) {
  const fsdp_status status = grads_reduced(context, owner, lane, error);
  if (drops) fsdp_unit_drop_sharded_grads(((model_unit *)owner)->unit);
  return status;
}

TEST(test_drop) {
  fsdp_engine_stats stats;
  num_aside = 0;
  model_init(&m, NULL);
  m.views.grads_set_aside = grads_set_aside;
  m.views.grads_reduced = drop_grads;
  model_plan_simple(&m, "root", 4);
  model_start(&m);
  fsdp_unit_get_settings(m.units[0].unit)->is_followed = true;
  drops = true;
  for (int step = 0; step < 2; step++) {
    PLAY("zero_grad; step; no_grads root");
    CHECK_I64(m.units[0].num_frees, step + 1);
    fsdp_engine_get_stats(m.engine, &stats);
    CHECK_I64(stats.grad_shard_nbytes, 0);
  }
  CHECK_I64(num_aside, 0); /* nothing was left from the step before */
  drops = false;
  PLAY("zero_grad; step; check_grads");
}
