/*
 * Tests of runtime/: summons with options. On the first rank only, in host
 * memory, with gradients; on either rank of two, alone, with replicas, with
 * casts, offloaded. (The usual summon is in test_engine_units.c.)
 */
#include "base/alloc.h"
#include "engine_failures.h"

/* What a summoned unit is made of: one segment, `numel` elements a rank. */
enum { NUMEL = 8 };

/* One unit after a step: it has a sharded gradient. */
static void start(const model_options *options) {
  model_open(options, "u 8"); /* NUMEL */
  PLAY("show_memory");
  if (!options->offloads) {
    recorder_name_memory(m.device, m.units[0].shards[0], 4 * NUMEL, "shard");
    recorder_name_memory(m.device, m.units[0].grad_shards[0], 4 * NUMEL,
                         "grad");
  }
  PLAY("step; clear");
}

static bool is_shown_here(int bits) {
  return (bits & FIRST_ONLY) == 0 || m.options.rank == 0;
}

/* The shard itself is the whole parameter. */
static bool is_resident(void) {
  return m.options.world_size == 1 && m.options.param_dtype.code == 0 &&
         !m.options.offloads;
}

static void touch_whole(const void *data, int bits, bool is_write) {
  recorder_touch(m.device,
                 (bits & ON_HOST) != 0 ? RECORDER_HOST_LANE : FSDP_LANE_COMPUTE,
                 data, 4 * NUMEL * m.options.world_size, is_write);
}

static float *shard(void) {
  model_touch_shard(&m, m.units[0].shards[0], 4 * NUMEL, false);
  return m.units[0].shards[0];
}

static float *grad_shard(void) {
  model_touch_shard(&m, m.units[0].grad_shards[0], 4 * NUMEL, false);
  return m.units[0].grad_shards[0];
}

/* `first`, `first` + 1, ... as another rank would broadcast it. */
static void write_whole(float *data, int bits, double first) {
  touch_whole(data, bits, true);
  for (int64_t i = 0; i < NUMEL * m.options.world_size; i++) {
    data[i] = (float)(first + (double)i);
  }
}

/* --- Tapes --------------------------------------------------------------- */

/* Rank 0 writes back what it alone sees: over the replicas, then the shards. */
TEST(test_first_rank) {
  start(WITH(.rank = 0, .num_replicas = 2));
  PLAY("summon u first_only; dismiss u");
  CHECK_TAPE(
      "take_params u sharded; alloc 64 b3; record e1 compute; wait unshard e1; "
      "group_begin unshard g0; all_gather unshard g0 8 f32 b3 <- shard; "
      "group_end unshard g0; record e6 unshard; wait compute e6; show u full; "
      "take_params u full; show u sharded; record e1 compute; wait unshard e1; "
      "group_begin unshard g1; broadcast unshard g1 16 f32 from 0 b3; "
      "group_end unshard g1; record e6 unshard; wait compute e6; "
      "group_begin unshard g0; broadcast unshard g0 16 f32 from 0 b3; "
      "group_end unshard g0; record e6 unshard; wait compute e6; "
      "pack compute x1 8 f32->f32 shard <- b3; record e1 compute; "
      "wait unshard e1; free 64 b3");
}

/* Rank 1 helps to gather, gives the memory back, and gets what rank 0 wrote. */
TEST(test_other_rank) {
  start(WITH(.rank = 1, .num_replicas = 2));
  PLAY("summon u first_only");
  CHECK_TAPE(
      "take_params u sharded; alloc 64 b3; record e1 compute; wait unshard e1; "
      "group_begin unshard g0; all_gather unshard g0 8 f32 b3 <- shard; "
      "group_end unshard g0; record e6 unshard; wait compute e6; free 64 b3");
  PLAY("clear; dismiss u");
  CHECK_TAPE(
      "alloc 64 b4; record e1 compute; wait unshard e1; record e6 unshard; "
      "wait compute e6; group_begin unshard g0; "
      "broadcast unshard g0 16 f32 from 0 b4; group_end unshard g0; "
      "record e6 unshard; wait compute e6; "
      "pack compute x1 8 f32->f32 shard <- b4+32; record e1 compute; "
      "wait unshard e1; free 64 b4");
}

/* Shards and whole parameters in host memory, the device in between. */
TEST(test_offloaded_on_host_with_gradients) {
  start(WITH(.rank = 1, .offloads = true));
  PLAY("summon u on_host+with_grads");
  CHECK_TAPE(
      "take_params u sharded; alloc 64 b3; "
      "copy_to_device compute 32 b3+32 <- u.shard0; record e6 compute; "
      "synchronize e6; record e1 compute; wait unshard e1; "
      "group_begin unshard g0; all_gather unshard g0 8 f32 b3 <- b3+32; "
      "group_end unshard g0; record e6 unshard; wait compute e6; "
      "host_alloc 64 h1; copy_to_host compute 64 h1 <- b3; record e6 compute; "
      "synchronize e6; free 64 b3; show u full_on_host; take_grads u; "
      "all_gather_bytes g0 1; alloc 64 b4; grad_shard u 0; "
      "copy_to_device compute 32 b4+32 <- u.grad0; record e6 compute; "
      "synchronize e6; record e1 compute; wait unshard e1; "
      "group_begin unshard g0; all_gather unshard g0 8 f32 b4 <- b4+32; "
      "group_end unshard g0; record e6 unshard; wait compute e6; "
      "host_alloc 64 h2; copy_to_host compute 64 h2 <- b4; record e6 compute; "
      "synchronize e6; free 64 b4; show_grads u full_on_host");
  PLAY("clear; dismiss u");
  CHECK_TAPE(
      "take_params u full_on_host; show u sharded; record e6 compute; "
      "synchronize e6; record e1 compute; wait unshard e1; "
      "take_full_grads u full_on_host; grad_shard u 0; record e6 compute; "
      "synchronize e6; show_grads u sharded; host_free h1; host_free h2");
}

/* One rank with replicas: the shard itself is what is broadcast. */
TEST(test_resident_on_first_rank) {
  start(WITH(.world_size = 1, .num_replicas = 2));
  PLAY("summon u first_only; dismiss u");
  CHECK_TAPE(
      "take_params u sharded; take_params u sharded; record e1 compute; "
      "wait unshard e1; group_begin unshard g0; "
      "broadcast unshard g0 8 f32 from 0 shard; group_end unshard g0; "
      "record e6 unshard; wait compute e6");
  PLAY("step");
}

/* --- Numbers ------------------------------------------------------------- */

static void check_shown(int bits) {
  model_unit *unit = &m.units[0];
  const bool is_whole = is_shown_here(bits) && !is_resident();
  const fsdp_view view =
      (bits & ON_HOST) != 0 ? FSDP_VIEW_FULL_ON_HOST : FSDP_VIEW_FULL;
  if (is_shown_here(bits) && (is_whole || (bits & ON_HOST) != 0)) {
    CHECK_I64(unit->view, view);
    model_check_params(&m, 0);
  } else {
    CHECK_I64(unit->view, FSDP_VIEW_SHARDED);
  }
  CHECK(unit->has_grads);
  if (is_shown_here(bits) && (bits & WITH_GRADS) != 0) {
    CHECK_I64(unit->grad_view, view);
    const float *whole = unit->grads[0];
    const float *piece = grad_shard();
    touch_whole(whole, bits, false);
    for (int64_t i = 0; i < NUMEL * m.options.world_size; i++) {
      CHECK(whole[i] == piece[i % NUMEL]);
    }
  } else {
    CHECK_I64(unit->grad_view, FSDP_VIEW_SHARDED);
  }
}

/* Both ways out of one combination; the step after it goes on from there. */
static void check_combination(const model_options *options, int bits,
                              bool writeback) {
  enum { PARAMS = 100, GRADS = 60 };
  const fsdp_summon_options how = model_summon_options(bits);
  float params_before[NUMEL];
  float grads_before[NUMEL];
  start(options);
  model_unit *unit = &m.units[0];
  memcpy(params_before, shard(), sizeof params_before);
  memcpy(grads_before, grad_shard(), sizeof grads_before);
  const int64_t num_blocks = recorder_live_blocks(m.device);

  CHECK_OK(fsdp_unit_summon(unit->unit, &how, NULL));
  check_shown(bits);
  const bool writes_params = unit->view != FSDP_VIEW_SHARDED;
  const bool writes_grads = unit->grad_view != FSDP_VIEW_SHARDED;
  if (writes_params) write_whole(unit->params[0], bits, PARAMS);
  if (writes_grads) write_whole(unit->grads[0], bits, GRADS);
  if (!is_shown_here(bits)) { /* the other ranks' shards are their own */
    recorder_set_broadcast(m.device, PARAMS);
    PLAY("optimizer");
    memcpy(params_before, shard(), sizeof params_before);
  }
  CHECK_OK(fsdp_unit_dismiss(unit->unit, writeback, NULL));
  CHECK(!fsdp_unit_is_summoned(unit->unit));
  CHECK_I64(unit->view, FSDP_VIEW_SHARDED);
  CHECK_I64(unit->grad_view, FSDP_VIEW_SHARDED);
  CHECK_I64(recorder_live_blocks(m.device), num_blocks);

  const double first = (double)(m.options.rank * NUMEL);
  const bool is_kept =
      writeback || (m.options.world_size == 1 && !options->offloads &&
                    (bits & (ON_HOST | FIRST_ONLY)) == 0);
  const bool gets_params = writes_params || !is_shown_here(bits);
  const bool gets_grads = writes_grads;
  const float *params = shard();
  const float *grads = grad_shard();
  for (int64_t i = 0; i < NUMEL; i++) {
    const float param = (float)(PARAMS + first + (double)i);
    const float grad = (float)(GRADS + first + (double)i);
    CHECK(params[i] == (is_kept && gets_params ? param : params_before[i]));
    if (!is_shown_here(bits)) continue; /* one broadcast for both */
    CHECK(grads[i] == (is_kept && gets_grads ? grad : grads_before[i]));
    if (is_kept && gets_grads) unit->expected[0][(int64_t)first + i] = grad;
  }
  if (is_shown_here(bits) || !writeback) {
    PLAY("step"); /* added to what was written */
    PLAY("check_grads");
  }
}

TEST(test_combinations) {
  for (int bits = 0; bits < MODEL_NUM_SUMMONS; bits++) {
    for (int kinds = 0; kinds < 32; kinds++) {
      model_options options = {.world_size = (kinds & 1) != 0 ? 2 : 1,
                               .rank = (kinds & 3) == 3 ? 1 : 0};
      if ((kinds & 3) == 2) continue; /* rank 1 of one */
      options.num_replicas = (kinds & 4) != 0 ? 2 : 1;
      options.offloads = (kinds & 8) != 0;
      if ((kinds & 16) != 0) {
        options.param_dtype = RECORDER_BF16;
        options.reduce_dtype = RECORDER_F32;
      }
      check_combination(&options, bits, false);
      check_combination(&options, bits, true);
    }
  }
}

/* The other rank gets the first one's gradients. */
TEST(test_gradients_of_the_first_rank) {
  start(WITH(.rank = 1));
  PLAY("summon u first_only+with_grads");
  recorder_set_broadcast(m.device, 40);
  PLAY("dismiss u");
  const float *grads = grad_shard();
  for (int64_t i = 0; i < NUMEL; i++) {
    CHECK(grads[i] == (float)(40 + NUMEL + i));
  }
}

/* --- Gradients that are not there ---------------------------------------- */

/* No rank has any: nothing is gathered, nothing is shown. */
TEST(test_no_gradients) {
  start(WITH(.rank = 0));
  PLAY("zero_grad; summon u with_grads; no_grads u; dismiss u; no_grads u");
  CHECK_TAPE_HAS("all_gather_bytes g0 1;");
  CHECK_TAPE_LACKS("take_full_grads");
  PLAY("step; check_grads");
}

/* Only another rank has some: this one's piece is zero. Without a write-back it
 * has none afterwards; with one, what the user made of it. */
TEST(test_gradients_of_another_rank) {
  for (int offloads = 0; offloads < 2; offloads++) {
    start(WITH(.rank = 1, .offloads = offloads != 0));
    PLAY("zero_grad");
    recorder_set_answer_byte(m.device, true);
    PLAY("summon u with_grads");
    CHECK_TAPE_HAS("pack compute x1 zero 8 f32");
    const float *whole = m.units[0].grads[0];
    for (int64_t i = 0; i < 2 * NUMEL; i++) CHECK(whole[i] == 0);
    PLAY("drop u");
    CHECK(m.units[0].grad_view != FSDP_VIEW_SHARDED); /* not shown again */
    PLAY("summon u with_grads");
    write_whole(m.units[0].grads[0], 0, 16);
    PLAY("grads_live 1; dismiss u; grad_view u sharded");
    CHECK(grad_shard()[0] == 16 + NUMEL);
  }
}

/* The user clears them while they are whole: gone on every rank. */
TEST(test_cleared_gradients) {
  for (int64_t rank = 0; rank < 2; rank++) {
    start(WITH(.rank = rank));
    PLAY("summon u first_only+with_grads; clear");
    if (rank == 0) {
      PLAY("zero_grad");
    } else {
      recorder_set_answer_byte(m.device, false);
    }
    PLAY("dismiss u");
    /* Rank 1 still saw its sharded ones: they are taken away. */
    CHECK_TAPE_HAS(rank == 0 ? "take_full_grads u full; all_gather_bytes g0 1;"
                             : "take_grads u; all_gather_bytes g0 1;");
    CHECK_TAPE_LACKS("show_grads");
    PLAY("zero_grad; step; check_grads");
  }
}

/* --- Failures ------------------------------------------------------------ */

enum { MAX_CALLS = 200 };

/* After a failure nothing is left over. A summon that failed shows the shards,
 * a dismissal that failed is done by the next one. False: no call failed. */
static bool fail_call(const model_options *options, int bits, int64_t index) {
  enum { PARAMS = 100, GRADS = 60 };
  const fsdp_summon_options how = model_summon_options(bits);
  start(options);
  model_unit *unit = &m.units[0];
  recorder_set_broadcast(m.device, PARAMS);
  const int64_t num_blocks = model_blocks_besides_arena(&m);
  const int64_t num_before = recorder_num_calls(m.device);
  recorder_fail_at(m.device, index);
  fsdp_status status = fsdp_unit_summon(unit->unit, &how, NULL);
  if (status != FSDP_OK) {
    recorder_fail_at(m.device, -1);
    CHECK(!fsdp_unit_is_summoned(unit->unit));
    CHECK_I64(unit->view, FSDP_VIEW_SHARDED);
  } else {
    const bool writes_params = unit->view != FSDP_VIEW_SHARDED;
    const bool writes_grads = unit->grad_view != FSDP_VIEW_SHARDED;
    if (writes_params) write_whole(unit->params[0], bits, PARAMS);
    if (writes_grads) write_whole(unit->grads[0], bits, GRADS);
    if (fsdp_unit_dismiss(unit->unit, true, NULL) != FSDP_OK) {
      recorder_fail_at(m.device, -1);
      CHECK(fsdp_unit_is_summoned(unit->unit));
      const bool is_taken =
          strstr(recorder_tape(m.device), "take_full_grads") != NULL;
      recorder_set_grads_live(m.device, !is_taken); /* not once more */
      CHECK_OK(fsdp_unit_dismiss(unit->unit, true, NULL));
      PLAY("grads_live 1");
    }
    const float first = (float)(PARAMS + m.options.rank * NUMEL);
    CHECK(shard()[0] == (writes_params || !is_shown_here(bits) ? first : 0));
    if (writes_grads) {
      CHECK(grad_shard()[0] == (float)(GRADS + m.options.rank * NUMEL));
      CHECK_I64(unit->grad_view, FSDP_VIEW_SHARDED);
    }
  }
  const int64_t num_calls = recorder_num_calls(m.device) - num_before;
  recorder_fail_at(m.device, -1);
  CHECK_I64(model_blocks_besides_arena(&m), num_blocks);
  CHECK_I64(unit->view, FSDP_VIEW_SHARDED);
  failures_check_recovers();
  return num_calls > index;
}

TEST(test_every_call_can_fail) {
  for (int bits = 0; bits < MODEL_NUM_SUMMONS; bits++) {
    for (int kinds = 0; kinds < 6; kinds++) {
      model_options options = {.world_size = kinds == 3 || kinds == 5 ? 1 : 2,
                               .rank = kinds == 1 ? 1 : 0,
                               .num_replicas = kinds == 0 || kinds == 3 ? 2 : 1,
                               .offloads = kinds == 2 || kinds == 5};
      if (kinds == 4) options.param_dtype = RECORDER_BF16;
      for (int64_t i = 0; i < MAX_CALLS; i++) {
        const int64_t num_failures = check_num_failures;
        const bool goes_on = fail_call(&options, bits, i);
        if (check_num_failures > num_failures) {
          printf("  combination %d of kind %d, call %" PRId64 "\n", bits, kinds,
                 i);
          return;
        }
        if (!goes_on) break;
      }
    }
  }
}

/* The ranks' agreement on gradients needs some memory. */
TEST(test_every_allocation_can_fail) {
  const fsdp_summon_options how = model_summon_options(FIRST_ONLY | WITH_GRADS);
  for (int64_t i = 0;; i++) {
    start(WITH(.rank = 0));
    fsdp_alloc_fail_at(i);
    fsdp_status status = fsdp_unit_summon(m.units[0].unit, &how, NULL);
    const bool is_summoned = status == FSDP_OK;
    if (is_summoned) status = fsdp_unit_dismiss(m.units[0].unit, true, NULL);
    fsdp_alloc_fail_at(-1);
    if (is_summoned && status != FSDP_OK) {
      PLAY("dismiss u");
    }
    failures_check_recovers();
    if (status != FSDP_OK) {
      CHECK_I64(status, FSDP_OUT_OF_MEMORY);
      continue;
    }
    CHECK_I64(i, 2);
    break;
  }
}
