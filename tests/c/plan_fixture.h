/*
 * Units and the events of a step, for the tests of plan/. Sizes and times are
 * those that a reader can work out by hand.
 */
#ifndef FSDP_TESTS_PLAN_FIXTURE_H
#define FSDP_TESTS_PLAN_FIXTURE_H

#include "check.h"
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
  fsdp_error error; /* of plan_try() */
  double unit_seconds[PLAN_MAX_UNITS];
} plan_fixture;

/* Of the running test. */
extern plan_fixture p;

/* Without units and events. The end of the test, or the next one, ends it. */
void plan_init(void);

/* A root with one parameter in front of three children and one behind them. */
void plan_init_tree(int64_t world_size);

/* A unit of two parameters, of which the second may be frozen. */
void plan_add_unit(const char *name, bool has_frozen, int64_t world_size);

/* Returns it, to be changed. */
fsdp_step_event *plan_add_event(fsdp_step_event_kind kind, int64_t unit,
                                int64_t param);

/* One unit, with `nbytes` of activations; 1 s of forward, 2 s of backward. */
void plan_run_unit(int64_t unit, int64_t nbytes);

/* Makes `forward` and `backward` of `events`. */
void plan_write_events(void);

/* Plans the lists as they are, or as they are written first. Must succeed. */
const fsdp_step_plan_report *plan_run_as_written(void);
const fsdp_step_plan_report *plan_run(void);

/* Plans the lists as they are, which must fail and change nothing. */
fsdp_status plan_try(void);
#define PLAN_FAILS(status, expected) \
  CHECK_FAILS(plan_try(), (status), p.error.message, (expected))
#define PLAN_REFUSED(expected) PLAN_FAILS(FSDP_INVALID_ARGUMENT, expected)

#endif /* FSDP_TESTS_PLAN_FIXTURE_H */
