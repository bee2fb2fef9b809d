/* The fixture of the tests of plan/. */
#include "plan_fixture.h"

#include "base/alloc.h"
#include "base/dtypes.h"
#include "check.h"

static const fsdp_dtype FP32 = {FSDP_DTYPE_FLOAT32, 4};
static const fsdp_dtype BF16 = {FSDP_DTYPE_BFLOAT16, 2};

void plan_fixture_add_unit(plan_fixture *self, const char *name,
                           bool has_frozen, int64_t world_size) {
  const int64_t index = self->options.num_units++;
  const fsdp_param_spec specs[] = {
      {.key = 0, .numel = PLAN_NUMEL, .dtype = FP32, .requires_grad = true},
      {.key = 1,
       .numel = PLAN_NUMEL,
       .dtype = FP32,
       .requires_grad = !has_frozen},
  };
  CHECK_OK(fsdp_param_table_create(specs, 2, &self->tables[index], NULL));
  const fsdp_alignment alignment = {.itemsize = 4, .params = true};
  CHECK_OK(fsdp_flat_layout_create(self->tables[index], world_size, alignment,
                                   &self->layouts[index], NULL));
  for (int i = 0; i < 2; i++) {
    self->segments[index][i] = (fsdp_segment_options){
        .param_dtype = BF16, .reduce_dtype = BF16, .grad_dtype = FP32};
  }
  self->units[index] = (fsdp_step_unit){
      .name = name,
      .layout = self->layouts[index],
      .segments = self->segments[index],
      .num_replicas = 1,
      .reshards = true,
      .backward_prefetch = FSDP_PREFETCH_PRE,
  };
}

fsdp_step_event *plan_fixture_add_event(plan_fixture *self,
                                        fsdp_step_event_kind kind, int64_t unit,
                                        int64_t param) {
  fsdp_step_event *event = &self->events[self->num_events++];
  *event = (fsdp_step_event){.kind = kind, .unit = unit, .param = param};
  return event;
}

void plan_fixture_run_unit(plan_fixture *self, int64_t unit, int64_t nbytes) {
  plan_fixture_add_event(self, FSDP_STEP_ENTER, unit, 0);
  plan_fixture_add_event(self, FSDP_STEP_USE, unit, 0);
  plan_fixture_add_event(self, FSDP_STEP_USE, unit, 1);
  fsdp_step_event *work = plan_fixture_add_event(self, FSDP_STEP_WORK, 0, 0);
  work->nbytes = nbytes;
  work->peak_nbytes = nbytes;
  work->seconds = 1;
  self->backward_seconds[work - self->events] = 2;
  plan_fixture_add_event(self, FSDP_STEP_LEAVE, unit, 0);
}

void plan_fixture_init(plan_fixture *self) {
  *self = (plan_fixture){0};
  const fsdp_link link = {.bytes_per_second = 1e15, .latency_seconds = 0};
  self->options = (fsdp_step_plan_options){
      .units = self->units,
      .forward = self->forward,
      .backward = self->backward,
      .shard_link = link,
      .replica_link = link,
      .num_batches = 1,
  };
}

void plan_fixture_init_tree(plan_fixture *self, int64_t world_size) {
  static const char *const names[] = {"a", "b", "c"};
  plan_fixture_init(self);
  plan_fixture_add_unit(self, "root", false, world_size);
  plan_fixture_add_event(self, FSDP_STEP_ENTER, 0, 0);
  plan_fixture_add_event(self, FSDP_STEP_USE, 0, 0);
  for (int64_t i = 1; i < PLAN_MAX_UNITS; i++) {
    plan_fixture_add_unit(self, names[i - 1], false, world_size);
    plan_fixture_run_unit(self, i, 1000);
  }
  plan_fixture_add_event(self, FSDP_STEP_USE, 0, 1);
  plan_fixture_add_event(self, FSDP_STEP_LEAVE, 0, 0);
}

void plan_fixture_fini(plan_fixture *self) {
  for (int64_t i = 0; i < self->options.num_units; i++) {
    fsdp_flat_layout_destroy(self->layouts[i]);
    fsdp_param_table_destroy(self->tables[i]);
  }
  CHECK_I64(fsdp_alloc_live(), 0);
}

static bool is_trainable(const plan_fixture *self, const fsdp_step_event *use) {
  const fsdp_flat_layout *layout = self->layouts[use->unit];
  const int64_t segment = fsdp_flat_layout_slot(layout, use->param)->segment;
  return fsdp_flat_layout_segment(layout, segment)->requires_grad;
}

void plan_fixture_write_events(plan_fixture *self) {
  bool has_grad[PLAN_MAX_EVENTS] = {false}; /* what flows there requires grad */
  self->options.num_forward = 0;
  self->options.num_backward = 0;
  for (int64_t i = 0; i < self->num_events; i++) {
    const fsdp_step_event *event = &self->events[i];
    has_grad[i] = i > 0 && has_grad[i - 1];
    if (event->kind == FSDP_STEP_USE) {
      has_grad[i] = has_grad[i] || is_trainable(self, event);
      continue;
    }
    fsdp_step_event *made = &self->forward[self->options.num_forward++];
    *made = *event;
    made->requires_grad = has_grad[i];
  }
  int64_t index = self->options.num_forward;
  for (int64_t i = self->num_events; i-- > 0;) {
    fsdp_step_event made = self->events[i];
    if (made.kind != FSDP_STEP_USE) index--;
    if (made.kind == FSDP_STEP_USE
            ? !is_trainable(self, &made)
            : made.kind != FSDP_STEP_WORK && !has_grad[i]) {
      continue;
    }
    made.nbytes = -made.nbytes;
    made.peak_nbytes = 0;
    made.seconds = has_grad[i] ? self->backward_seconds[i] : 0;
    if (made.kind == FSDP_STEP_WORK) made.saved_by = index;
    self->backward[self->options.num_backward++] = made;
  }
}

const fsdp_step_plan_report *plan_fixture_run_as_written(plan_fixture *self) {
  fsdp_error error = {0};
  const fsdp_status status = fsdp_step_plan_run(&self->options, &self->report,
                                                self->unit_seconds, &error);
  if (!CHECK_OK(status)) printf("  %s\n", error.message);
  return &self->report;
}

const fsdp_step_plan_report *plan_fixture_run(plan_fixture *self) {
  plan_fixture_write_events(self);
  return plan_fixture_run_as_written(self);
}

const char *plan_fixture_message(plan_fixture *self, fsdp_status expected) {
  static fsdp_error error;
  error = (fsdp_error){0};
  const fsdp_step_plan_report report = self->report;
  CHECK_I64(fsdp_step_plan_run(&self->options, &self->report,
                               self->unit_seconds, &error),
            expected);
  CHECK(memcmp(&report, &self->report, sizeof report) == 0);
  return error.message;
}
