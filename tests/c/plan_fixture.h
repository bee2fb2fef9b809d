/*
 * Units and the events of a step, for the tests of plan/. Sizes and times are
 * those that a reader can work out by hand.
 */
#ifndef FSDP_TESTS_PLAN_FIXTURE_H
#define FSDP_TESTS_PLAN_FIXTURE_H

#include "layout/param_table.h"
#include "plan/step_plan.h"

enum {
  PLAN_MAX_UNITS = 4,
  PLAN_MAX_EVENTS = 32,
  PLAN_WORLD_SIZE = 4,
  PLAN_NUMEL = 4096
};

/* Units of two parameters of PLAN_NUMEL elements each, and the events of a
 * step. `events` stands for both lists: backward is forward in reverse, with a
 * use where forward has one, what work kept given back, and `backward_seconds`.
 */
typedef struct plan_fixture {
  fsdp_param_table *tables[PLAN_MAX_UNITS];
  fsdp_flat_layout *layouts[PLAN_MAX_UNITS];
  fsdp_segment_options segments[PLAN_MAX_UNITS][2];
  fsdp_step_unit units[PLAN_MAX_UNITS];
  fsdp_step_event events[PLAN_MAX_EVENTS];
  double backward_seconds[PLAN_MAX_EVENTS];
  int64_t num_events;
  fsdp_step_event forward[PLAN_MAX_EVENTS];
  fsdp_step_event backward[PLAN_MAX_EVENTS];
  fsdp_step_plan_options options;
  fsdp_step_plan_report report;
  double unit_seconds[PLAN_MAX_UNITS];
} plan_fixture;

/* Without units and events. The fixture must not move. */
void plan_fixture_init(plan_fixture *self);

/* A root with one parameter in front of three children and one behind them. */
void plan_fixture_init_tree(plan_fixture *self, int64_t world_size);

void plan_fixture_fini(plan_fixture *self);

/* A unit of two parameters, of which the second may be frozen. */
void plan_fixture_add_unit(plan_fixture *self, const char *name,
                           bool has_frozen, int64_t world_size);

/* Returns it, to be changed. */
fsdp_step_event *plan_fixture_add_event(plan_fixture *self,
                                        fsdp_step_event_kind kind, int64_t unit,
                                        int64_t param);

/* One unit, with `nbytes` of activations; 1 s of forward, 2 s of backward. */
void plan_fixture_run_unit(plan_fixture *self, int64_t unit, int64_t nbytes);

/* Makes `forward` and `backward` of `events`. */
void plan_fixture_write_events(plan_fixture *self);

/* Plans the lists as they are, or as they are written first. Must succeed. */
const fsdp_step_plan_report *plan_fixture_run_as_written(plan_fixture *self);
const fsdp_step_plan_report *plan_fixture_run(plan_fixture *self);

/* Plans the lists as they are, which fails; the message, until the next one. */
const char *plan_fixture_message(plan_fixture *self, fsdp_status expected);

#endif /* FSDP_TESTS_PLAN_FIXTURE_H */
