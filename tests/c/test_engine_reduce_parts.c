/*
 * Tests of runtime/: reductions in parts, over a transport that says it can.
 * All ranks hold the same gradients, so a sum is this rank's, times the ranks.
 */
#include <stdlib.h>

#include "base/alloc.h"
#include "elements.h"
#include "engine_fixture.h"
#include "runtime/engine_priv.h"

static fsdp_transport_ops able;
static char notes[2048];
static bool can;
static int64_t fails_in; /* calls from now; 0: never */

#define CHECK_NOTES(text)    \
  do {                       \
    CHECK_TEXT(notes, text); \
    notes[0] = '\0';         \
  } while (0)

static bool can_reduce_parts(fsdp_transport *transport) {
  (void)transport;
  return can;
}

/* This rank's element at byte `offset` of the array. */
static double element_at(const fsdp_parts *parts, fsdp_dtype dtype,
                         int64_t offset) {
  for (int64_t i = 0; i < parts->num_parts; i++) {
    const fsdp_part *part = &parts->parts[i];
    const int64_t inside = offset - part->offset;
    if (inside < 0 || inside >= part->nbytes) continue;
    if (part->data == NULL) return 1;
    return elements_read(part->data, dtype, inside / dtype.itemsize);
  }
  return 0;
}

static void check_list(const fsdp_parts *parts) {
  int64_t end = 0;
  for (int64_t i = 0; i < parts->num_parts; i++) {
    CHECK(parts->parts[i].offset >= end && parts->parts[i].nbytes >= 1);
    end = parts->parts[i].offset + parts->parts[i].nbytes;
  }
  CHECK(end <= parts->nbytes);
}

static void reduce_place(const fsdp_parts *parts, const fsdp_place *place) {
  const fsdp_dtype dtype = place->sum_dtype;
  for (int64_t i = 0; i < place->numel; i++) {
    const int64_t offset = place->offset + i * dtype.itemsize;
    double value = element_at(parts, dtype, offset) * place->scale *
                   (double)m.options.world_size;
    if (place->adds) value += elements_read(place->data, place->dtype, i);
    elements_write(place->data, place->dtype, i, value);
  }
}

static fsdp_status reduce_parts(fsdp_transport *transport,
                                const fsdp_call *call, const fsdp_parts *parts,
                                uint64_t *ticket, fsdp_error *error) {
  const fsdp_lane lane = FSDP_LANE_REDUCE;
  (void)transport, (void)call, (void)ticket;
  if (fails_in > 0 && --fails_in == 0) {
    return FSDP_FAIL(error, FSDP_BACKEND, "rank 1 is gone");
  }
  (void)snprintf(notes + strlen(notes), sizeof notes - strlen(notes),
                 "%s%" PRId64 "B %" PRId64 ">%" PRId64,
                 notes[0] == '\0' ? "" : "; ", parts->nbytes, parts->num_parts,
                 parts->num_places);
  check_list(parts);
  for (int64_t i = 0; i < parts->num_parts; i++) {
    const fsdp_part *part = &parts->parts[i];
    if (part->data == NULL) continue;
    recorder_touch(m.device, lane, part->data, part->nbytes, false);
  }
  for (int64_t i = 0; i < parts->num_places; i++) {
    const fsdp_place *place = &parts->places[i];
    recorder_touch(m.device, lane, place->data,
                   place->numel * place->dtype.itemsize, true);
    reduce_place(parts, place);
  }
  return FSDP_OK;
}

static void begin(const model_options *options) {
  notes[0] = '\0';
  can = true;
  fails_in = 0;
  model_init(&m, options);
  m.ops.is_host = true;
  able = *m.shard_group.transport->ops;
  able.can_reduce_parts = can_reduce_parts;
  able.reduce_parts = reduce_parts;
  m.shard_group.transport->ops = &able;
}

/* A root and units a and tiny. */
static void start(const model_options *options) {
  begin(options);
  model_plan_units("root 4096; a 4096; tiny 4");
  model_start(&m);
}

/* A unit with two parameters, and room between them and after them. */
static void start_pair(const model_options *options) {
  begin(options);
  model_plan_units("u (4096,4097)");
  model_start(&m);
}

static void check_grads(void) {
  PLAY("check_grads; check_races");
}

/* Nothing is packed but the tiny unit. */
TEST(test_a_step) {
  start(NULL);
  PLAY("forward; clear; backward");
  CHECK_NOTES("32768B 1>1; 32768B 1>1");
  CHECK_TAPE_HAS("pack compute x1 8 f32->f32"); /* tiny */
  CHECK_TAPE_LACKS("pack compute x1 8192 f32->f32");
  CHECK_TAPE_HAS("reduce_scatter reduce g0 4 f32");
  check_grads();
  for (int i = 0; i < 2; i++) {
    PLAY("step; check_grads; zero_grad; optimizer; step");
    check_grads();
  }
}

/* Parameters without a gradient are zeros between the parts. */
TEST(test_unused) {
  start_pair(WITH(.rank = 1));
  PLAY("step; zero_grad; forward; pre_backward u; expect u 1; grad u 1");
  PLAY("finish");
  check_grads();
}

/* A block that an accumulation left is one part. */
TEST(test_kept_without_sync) {
  start_pair(NULL);
  PLAY("sync none; step; check_grads; grad_view u unsharded; step");
  CHECK_NOTES("");
  PLAY("sync reduce; step");
  CHECK_NOTES("32800B 1>1");
  check_grads();
  PLAY("step");
  CHECK_NOTES("32800B 2>1");
  check_grads();
}

TEST(test_partial) {
  start_pair(WITH(.rank = 1));
  PLAY("sync shard; step; check_grads; grad_view u partial; step; check_grads");
  PLAY("sync reduce; step");
  check_grads();
  CHECK_I64(model_stats(&m).partial_grad_nbytes, 0);
  PLAY("sync shard; step; check_grads; sync reduce; step");
  check_grads();
  PLAY("zero_grad; sync shard; step; zero_grad; sync reduce; step");
  check_grads();
  CHECK_NOTES(
      "32800B 2>1; 32800B 2>1; 32800B 2>1; 32800B 2>1; 32800B 2>1; 32800B "
      "2>1; 32800B 2>1");
}

/* A second gradient of a parameter is added to the first, in a block. */
TEST(test_two_gradients) {
  start_pair(NULL);
  PLAY("forward; pre_backward u; expect u 3; grad u 0; grad u 0; grad u 1");
  PLAY("finish");
  CHECK_NOTES("32800B 1>1");
  check_grads();
}

/* They are packed in the reduce dtype. */
TEST(test_other_dtypes) {
  start_pair(WITH(.param_dtype = RECORDER_BF16, .reduce_dtype = RECORDER_F32));
  PLAY("step; check_grads");
  CHECK_NOTES("32832B 1>1");
  start_pair(WITH(.param_dtype = RECORDER_BF16));
  PLAY("step; check_grads");
  CHECK_NOTES("16416B 2>1");
}

/* Ones, in bf16, that nobody expects. */
static void give_narrow_ones(int64_t index, int64_t param) {
  model_unit *unit = &m.units[index];
  const fsdp_param_slot *slot = fsdp_flat_layout_slot(unit->layout, param);
  model_grad *grad = &m.grads[m.num_grads++];
  grad->nbytes = slot->numel * RECORDER_BF16.itemsize;
  grad->data = malloc((size_t)grad->nbytes);
  if (grad->data == NULL) abort();
  recorder_touch(m.device, FSDP_LANE_COMPUTE, grad->data, grad->nbytes, true);
  for (int64_t i = 0; i < slot->numel; i++) {
    elements_write(grad->data, RECORDER_BF16, i, 1);
    unit->expected[slot->segment][slot->offset + i] += 1;
  }
  const fsdp_grad handed = {.param = param,
                            .data = grad->data,
                            .dtype = RECORDER_BF16,
                            .token = grad};
  CHECK_OK(fsdp_unit_grad_ready(unit->unit, &handed, NULL));
}

/* It is packed, though the unit had left its gradients and waits for `x`. */
TEST(test_another_dtype_while_waiting) {
  begin(NULL);
  model_plan_units("root 4096; u (4096,4096); x 4096");
  model_start(&m);
  PLAY("step; zero_grad; forward; pre_backward root; pre_backward u");
  notes[0] = '\0';
  PLAY("expect u 1; grad u 1");
  CHECK_NOTES(""); /* it waits */
  give_narrow_ones(1, 0);
  PLAY("pre_backward x; grads x; grads root; finish");
  check_grads();
  CHECK_NOTES("32768B 1>1; 32768B 1>1; 32768B 1>1");
}

TEST(test_units_that_do_not) {
  start(WITH(.prescale = 0.5));
  PLAY("step; check_grads");
  start(WITH(.num_replicas = 2));
  PLAY("step; check_grads");
  start(NULL);
  can = false;
  PLAY("step; check_grads");
  start(NULL);
  fsdp_engine_set_order_check(m.engine, true);
  PLAY("step; check_grads");
  CHECK_NOTES("");
}

/* A rank without some gradient asks for the sums of its marks. */
TEST(test_marks) {
  start_pair(WITH(.rank = 1, .finds_unused = true));
  const fsdp_unit *unit = m.units[0].unit;
  PLAY("step");
  CHECK_NOTES("32816B 3>1");
  PLAY("zero_grad; forward; pre_backward u; expect u 1; grad u 1; finish");
  CHECK_NOTES("32816B 3>2");
  check_grads();
  CHECK_OK(fsdp_unit_await_unused(m.units[0].unit, NULL));
  CHECK(fsdp_unit_is_unused(unit, 0) && !fsdp_unit_is_unused(unit, 1));
  PLAY("zero_grad; sync shard; forward; pre_backward u; expect u 1; grad u 0");
  PLAY("finish; sync reduce; forward; pre_backward u; expect u 1; grad u 0");
  PLAY("finish");
  check_grads();
  CHECK(!fsdp_unit_is_unused(unit, 0) && fsdp_unit_is_unused(unit, 1));
  PLAY("zero_grad; sync none; step; sync reduce; step"); /* packed marks */
  check_grads();
  CHECK(!fsdp_unit_is_unused(unit, 0) && !fsdp_unit_is_unused(unit, 1));
}

TEST(test_failure) {
  fsdp_error error = {0};
  start(NULL);
  PLAY("step; zero_grad; forward");
  fails_in = 2;
  CHECK_I64(model_backward(&m, &error), FSDP_BACKEND);
  CHECK(strstr(error.message, "rank 1 is gone") != NULL);
  PLAY("reset; zero_grad; step");
  check_grads();
}

/* Allocations of a first step fail, one by one. */
TEST(test_every_allocation) {
  for (int64_t i = 0;; i++) {
    fsdp_error error = {0};
    start_pair(NULL);
    PLAY("forward; pre_backward u");
    fsdp_alloc_fail_at(i);
    const fsdp_status given = model_give_grads(&m, 0, &error);
    const fsdp_status status =
        given != FSDP_OK ? given : model_finish(&m, &error);
    fsdp_alloc_fail_at(-1);
    if (status == FSDP_OK) {
      CHECK(i >= 2);
      PLAY("check_grads");
      break;
    }
    CHECK_I64(status, FSDP_OUT_OF_MEMORY);
    PLAY("reset; zero_grad; step; check_grads");
  }
}
