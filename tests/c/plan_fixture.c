/* The fixture of the tests of plan/. */
#include "plan_fixture.h"

#include "base/alloc.h"
#include "base/dtypes.h"
#include "check.h"

static const fsdp_dtype FP32 = {FSDP_DTYPE_FLOAT32, 4};
static const fsdp_dtype BF16 = {FSDP_DTYPE_BFLOAT16, 2};

plan_fixture p;

void plan_add_unit(const char *name, bool has_frozen, int64_t world_size) {
  const int64_t index = p.options.num_units++;
  const fsdp_param_spec specs[] = {
      {.key = 0, .numel = PLAN_NUMEL, .dtype = FP32, .requires_grad = true},
      {.key = 1,
       .numel = PLAN_NUMEL,
       .dtype = FP32,
       .requires_grad = !has_frozen},
  };
  CHECK_OK(fsdp_param_table_create(specs, 2, &p.tables[index], NULL));
  const fsdp_alignment alignment = {.itemsize = 4, .params = true};
  CHECK_OK(fsdp_flat_layout_create(p.tables[index], world_size, alignment,
                                   &p.layouts[index], NULL));
  for (int i = 0; i < 2; i++) {
    p.segments[index][i] = (fsdp_segment_options){
        .param_dtype = BF16, .reduce_dtype = BF16, .grad_dtype = FP32};
  }
  p.units[index] = (fsdp_step_unit){
      .name = name,
      .layout = p.layouts[index],
      .segments = p.segments[index],
      .num_replicas = 1,
      .reshards = true,
      .backward_prefetch = FSDP_PREFETCH_PRE,
  };
}

fsdp_step_event *plan_add_event(fsdp_step_event_kind kind, int64_t unit,
                                int64_t param) {
  fsdp_step_event *event = &p.events[p.num_events++];
  *event = (fsdp_step_event){.kind = kind, .unit = unit, .param = param};
  return event;
}

void plan_run_unit(int64_t unit, int64_t nbytes) {
  plan_add_event(FSDP_STEP_ENTER, unit, 0);
  plan_add_event(FSDP_STEP_USE, unit, 0);
  plan_add_event(FSDP_STEP_USE, unit, 1);
  fsdp_step_event *work = plan_add_event(FSDP_STEP_WORK, 0, 0);
  work->nbytes = nbytes;
  work->peak_nbytes = nbytes;
  work->seconds = 1;
  p.backward_seconds[work - p.events] = 2;
  plan_add_event(FSDP_STEP_LEAVE, unit, 0);
}

static void end(void) {
  for (int64_t i = 0; i < p.options.num_units; i++) {
    fsdp_flat_layout_destroy(p.layouts[i]);
    fsdp_param_table_destroy(p.tables[i]);
  }
  p.options.num_units = 0;
  CHECK_I64(fsdp_alloc_live(), 0);
}

void plan_init(void) {
  end();
  check_at_end(end);
  p = (plan_fixture){0};
  const fsdp_link link = {.bytes_per_second = 1e15, .latency_seconds = 0};
  p.options = (fsdp_step_plan_options){
      .units = p.units,
      .forward = p.forward,
      .backward = p.backward,
      .shard_link = link,
      .replica_link = link,
      .num_batches = 1,
  };
}

void plan_init_tree(int64_t world_size) {
  static const char *const names[] = {"a", "b", "c"};
  plan_init();
  plan_add_unit("root", false, world_size);
  plan_add_event(FSDP_STEP_ENTER, 0, 0);
  plan_add_event(FSDP_STEP_USE, 0, 0);
  for (int64_t i = 1; i < PLAN_MAX_UNITS; i++) {
    plan_add_unit(names[i - 1], false, world_size);
    plan_run_unit(i, 1000);
  }
  plan_add_event(FSDP_STEP_USE, 0, 1);
  plan_add_event(FSDP_STEP_LEAVE, 0, 0);
}

static bool is_trainable(const fsdp_step_event *use) {
  const fsdp_flat_layout *layout = p.layouts[use->unit];
  const int64_t segment = fsdp_flat_layout_slot(layout, use->param)->segment;
  return fsdp_flat_layout_segment(layout, segment)->requires_grad;
}

void plan_write_events(void) {
  bool has_grad[PLAN_MAX_EVENTS] = {false}; /* what flows there requires grad */
  p.options.num_forward = 0;
  p.options.num_backward = 0;
  for (int64_t i = 0; i < p.num_events; i++) {
    const fsdp_step_event *event = &p.events[i];
    has_grad[i] = i > 0 && has_grad[i - 1];
    if (event->kind == FSDP_STEP_USE) {
      has_grad[i] = has_grad[i] || is_trainable(event);
      continue;
    }
    fsdp_step_event *made = &p.forward[p.options.num_forward++];
    *made = *event;
    made->requires_grad = has_grad[i];
  }
  int64_t index = p.options.num_forward;
  for (int64_t i = p.num_events; i-- > 0;) {
    fsdp_step_event made = p.events[i];
    if (made.kind != FSDP_STEP_USE) index--;
    if (made.kind == FSDP_STEP_USE
            ? !is_trainable(&made)
            : made.kind != FSDP_STEP_WORK && !has_grad[i]) {
      continue;
    }
    made.nbytes = -made.nbytes;
    made.peak_nbytes = 0;
    made.seconds = has_grad[i] ? p.backward_seconds[i] : 0;
    if (made.kind == FSDP_STEP_WORK) made.saved_by = index;
    p.backward[p.options.num_backward++] = made;
  }
}

const fsdp_step_plan_report *plan_run_as_written(void) {
  fsdp_error error = {0};
  const fsdp_status status =
      fsdp_step_plan_run(&p.options, &p.report, p.unit_seconds, &error);
  if (!CHECK_OK(status)) printf("  %s\n", error.message);
  return &p.report;
}

const fsdp_step_plan_report *plan_run(void) {
  plan_write_events();
  return plan_run_as_written();
}

fsdp_status plan_try(void) {
  const fsdp_step_plan_report report = p.report;
  p.error = (fsdp_error){0};
  const fsdp_status status =
      fsdp_step_plan_run(&p.options, &p.report, p.unit_seconds, &p.error);
  CHECK(memcmp(&report, &p.report, sizeof report) == 0);
  return status;
}
