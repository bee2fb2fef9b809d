/* Step plan: checks the events, makes engine and units, and drives them. */
#include "plan/step_plan.h"

#include <inttypes.h>
#include <math.h>

#include "base/alloc.h"
#include "base/arith.h"
#include "plan/planned_offload.h"

/* The first step finds the order, the second is the first that prefetches by
 * it; from the third on blocks stay. */
enum { NUM_STEPS = 3 };

/* One unit of a run. */
typedef struct planned_unit {
  fsdp_counted_unit counted; /* the engine's owner token */
  fsdp_counting_transport shard_transport;
  fsdp_counting_transport replica_transport;
  fsdp_segment_options *segments;
  bool *is_used; /* per parameter: its gradient comes in a backward */
  int64_t num_uses;
  bool is_silent; /* the gradients that come do not tell when backward has
                     left the unit */
  int64_t num_inputs_ready; /* events that will tell it, in a backward */
  int64_t num_entered;      /* while events are checked */
  bool has_begun_backward;  /* in this backward */
  fsdp_unit *unit;
} planned_unit;

typedef struct plan_run {
  const fsdp_step_plan_options *options;
  fsdp_counting_device device;
  fsdp_planned_offload offload;
  planned_unit *units;
  fsdp_engine *engine;
} plan_run;

/* Checks ------------------------------------------------------------------- */

static bool is_seconds(double value) {
  return isfinite(value) && value >= 0;
}

static fsdp_status check_link(const char *name, const fsdp_link *link,
                              fsdp_error *error) {
  if (isfinite(link->bytes_per_second) && link->bytes_per_second > 0 &&
      is_seconds(link->latency_seconds)) {
    return FSDP_OK;
  }
  return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                   "the link of the %s group has %g bytes per second and a "
                   "latency of %g seconds: need more than 0, and at least 0",
                   name, link->bytes_per_second, link->latency_seconds);
}

static fsdp_status check_options(const fsdp_step_plan_options *options,
                                 fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  FSDP_TRY(check_link("shard", &options->shard_link, error));
  FSDP_TRY(check_link("replica", &options->replica_link, error));
  if (options->num_local < 0) {
    status = FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                       "%" PRId64 " ranks of a host: need 0 (one host) or more",
                       options->num_local);
    goto done;
  }
  if (options->num_local > 0) {
    FSDP_TRY(check_link("hosts'", &options->host_link, error));
  }
  if (options->offload_keep_last < 0 ||
      !is_seconds(options->copy_bytes_per_second)) {
    status =
        FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                  "%" PRId64
                  " last units that are not offloaded, %g "
                  "bytes per second to the host: need numbers >= 0",
                  options->offload_keep_last, options->copy_bytes_per_second);
    goto done;
  }
  if (options->num_units < 1 || options->num_batches < 1 ||
      options->num_forward < 0 || options->num_backward < 0) {
    status = FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                       "a plan needs at least 1 unit and 1 batch, got %" PRId64
                       ", %" PRId64 ", and %" PRId64 " and %" PRId64 " events",
                       options->num_units, options->num_batches,
                       options->num_forward, options->num_backward);
  }
done:
  return status;
}

static fsdp_status check_event(const fsdp_step_plan_options *options,
                               const fsdp_step_event *event,
                               fsdp_error *error) {
  const bool is_work = event->kind == FSDP_STEP_WORK;
  const bool may_hold = is_work || event->kind == FSDP_STEP_USE;
  const int64_t least_peak = event->nbytes > 0 ? event->nbytes : 0;

  if (event->peak_nbytes < least_peak || !is_seconds(event->seconds) ||
      (!may_hold && (event->nbytes != 0 || event->peak_nbytes != 0))) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "an event changes activations by %" PRId64
                     " bytes and at most %" PRId64
                     ", and takes %g seconds: need a most that is no less, 0 "
                     "unless it is WORK or USE, and seconds >= 0",
                     event->nbytes, event->peak_nbytes, event->seconds);
  }
  if (event->offload_nbytes < 0 || (event->offload_nbytes > 0 && !is_work)) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "an event offloads %" PRId64
                     " bytes: need 0 or more, and 0 unless it is WORK",
                     event->offload_nbytes);
  }
  if (is_work) return FSDP_OK;
  if (event->unit < 0 || event->unit >= options->num_units) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "an event names unit %" PRId64 " of %" PRId64, event->unit,
                     options->num_units);
  }
  return FSDP_OK;
}

static bool is_trainable(const fsdp_flat_layout *layout, int64_t param) {
  const int64_t segment = fsdp_flat_layout_slot(layout, param)->segment;
  return fsdp_flat_layout_segment(layout, segment)->requires_grad;
}

static fsdp_status check_use(plan_run *run, const fsdp_step_event *event,
                             fsdp_error *error) {
  const fsdp_step_unit *unit = &run->options->units[event->unit];
  planned_unit *planned = &run->units[event->unit];
  const int64_t num_params = fsdp_flat_layout_num_params(unit->layout);

  if (event->param < 0 || event->param >= num_params ||
      planned->is_used[event->param] ||
      !is_trainable(unit->layout, event->param)) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "backward uses parameter %" PRId64
                     " of unit '%s', which has %" PRId64
                     ": each that is trainable is used at most once",
                     event->param, unit->name, num_params);
  }
  planned->is_used[event->param] = true;
  planned->num_uses++;
  return FSDP_OK;
}

/* Of a backward event: what it needs was saved. */
static fsdp_status check_saved(const fsdp_step_plan_options *options,
                               const fsdp_step_event *event,
                               fsdp_error *error) {
  const int64_t index = event->saved_by;
  if (event->offload_nbytes == 0 ||
      (index >= 0 && index < options->num_forward &&
       options->forward[index].offload_nbytes == event->offload_nbytes)) {
    return FSDP_OK;
  }
  return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                   "backward needs %" PRId64 " bytes that event %" PRId64
                   " of forward has not saved",
                   event->offload_nbytes, index);
}

static fsdp_status check_nesting(plan_run *run, const fsdp_step_event *event,
                                 fsdp_error *error) {
  const bool enters = event->kind == FSDP_STEP_ENTER;
  const bool is_root = event->unit == 0;

  if (event->kind == FSDP_STEP_USE) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "forward uses parameter %" PRId64
                     " of unit '%s': gradients come in backward",
                     event->param, run->options->units[event->unit].name);
  }
  planned_unit *planned = &run->units[event->unit];
  planned->num_entered += enters ? 1 : -1;
  if (planned->num_entered >= 0 && (is_root || run->units[0].num_entered > 0)) {
    return FSDP_OK;
  }
  return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                   "forward %s unit '%s' outside the root, or "
                   "without an ENTER before it",
                   enters ? "enters" : "leaves",
                   run->options->units[event->unit].name);
}

static fsdp_status add_activations(int64_t *held, const fsdp_step_event *event,
                                   fsdp_error *error) {
  if (!fsdp_add_i64(*held, event->nbytes, held)) {
    return FSDP_FAIL(error, FSDP_OVERFLOW,
                     "activations do not fit in int64: the model is too large "
                     "to be planned");
  }
  if (*held < 0) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "an event gives back %" PRId64
                     " bytes of activations more than there are",
                     -*held);
  }
  return FSDP_OK;
}

/* Goes through a step once, and finds what tells each unit that backward has
 * left it (Note [Leaving a unit in backward]). */
static fsdp_status read_events(plan_run *run, fsdp_error *error) {
  const fsdp_step_plan_options *options = run->options;
  int64_t held = 0;
  fsdp_status status = FSDP_OK;

  for (int64_t i = 0; i < options->num_forward; i++) {
    const fsdp_step_event *event = &options->forward[i];
    FSDP_TRY(check_event(options, event, error));
    FSDP_TRY(add_activations(&held, event, error));
    if (event->kind == FSDP_STEP_WORK) continue;
    FSDP_TRY(check_nesting(run, event, error));
  }
  for (int64_t i = 0; i < options->num_backward; i++) {
    const fsdp_step_event *event = &options->backward[i];
    FSDP_TRY(check_event(options, event, error));
    FSDP_TRY(check_saved(options, event, error));
    FSDP_TRY(add_activations(&held, event, error));
    if (event->kind == FSDP_STEP_USE) FSDP_TRY(check_use(run, event, error));
    if (event->kind == FSDP_STEP_ENTER) {
      run->units[event->unit].num_inputs_ready++;
    }
  }
  if (held != 0) {
    status = FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                       "%" PRId64 " bytes of activations are never given back",
                       held);
    goto done;
  }
  for (int64_t i = 0; i < options->num_units; i++) {
    planned_unit *planned = &run->units[i];
    planned->is_silent = planned->num_uses !=
                         fsdp_flat_layout_num_params(options->units[i].layout);
    if (planned->num_entered != 0) {
      status = FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                         "unit '%s' is entered and never left",
                         options->units[i].name);
      goto done;
    }
  }
done:
  return status;
}

/* Making and taking apart -------------------------------------------------- */

static fsdp_status make_unit(plan_run *run, int64_t index, fsdp_error *error) {
  const fsdp_step_unit *plan = &run->options->units[index];
  planned_unit *planned = &run->units[index];
  const size_t num_segments =
      (size_t)fsdp_flat_layout_num_segments(plan->layout);
  fsdp_status status = FSDP_OK;

  planned->segments = fsdp_calloc(num_segments, sizeof *planned->segments);
  planned->counted.has_grad_shard = fsdp_calloc(num_segments, sizeof(bool));
  planned->is_used = fsdp_calloc(
      (size_t)fsdp_flat_layout_num_params(plan->layout), sizeof(bool));
  if (planned->segments == NULL || planned->counted.has_grad_shard == NULL ||
      planned->is_used == NULL) {
    return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY, "plan of unit '%s'",
                     plan->name);
  }
  for (size_t i = 0; i < num_segments; i++) {
    planned->segments[i] = plan->segments[i];
    planned->segments[i].shard = &run->device; /* an address; never read */
  }
  planned->counted.layout = plan->layout;
  planned->counted.segments = planned->segments;
  planned->counted.is_on_host = plan->offloads;
  const fsdp_unit_options options = {
      .name = plan->name,
      .owner = &planned->counted,
      .layout = plan->layout,
      .segments = planned->segments,
      .shard_group = fsdp_counting_device_group(
          &run->device, false, fsdp_flat_layout_world_size(plan->layout),
          &planned->shard_transport),
      .replica_group = fsdp_counting_device_group(
          &run->device, true, plan->num_replicas, &planned->replica_transport),
      .settings = {.reshard_after_forward = plan->reshards,
                   .reshard_after_backward_without_sync =
                       plan->reshards || plan->reshards_after_backward,
                   .unshards_in_backward = true},
      .finds_unused = plan->finds_unused,
      .is_apart = plan->is_apart,
      .backward_prefetch = plan->backward_prefetch,
      .forward_prefetch = plan->forward_prefetch,
      .prescale = 1,
      .offloads = plan->offloads,
  };
  FSDP_TRY(fsdp_unit_create(&options, &planned->unit, error));
  FSDP_TRY(fsdp_engine_add_unit(run->engine, planned->unit, error));
done:
  return status;
}

static fsdp_status run_init(plan_run *run,
                            const fsdp_step_plan_options *options,
                            fsdp_error *error) {
  fsdp_status status = FSDP_OK;

  *run = (plan_run){.options = options};
  FSDP_TRY(check_options(options, error));
  fsdp_counting_device_init(&run->device, options->shard_link,
                            options->replica_link, options->wants_scratch);
  run->device.num_local = options->num_local;
  run->device.host_link = options->host_link;
  run->device.is_host = options->is_host;
  run->device.shares_memory = options->is_host && options->num_local == 0 &&
                              !options->wants_scratch; /* shared memory */
  run->device.copy_bytes_per_second = options->copy_bytes_per_second;
  run->units = fsdp_calloc((size_t)options->num_units, sizeof *run->units);
  if (run->units == NULL) {
    status = FSDP_FAIL(error, FSDP_OUT_OF_MEMORY, "plan of %" PRId64 " units",
                       options->num_units);
    goto done;
  }
  FSDP_TRY(fsdp_planned_offload_init(&run->offload, &run->device,
                                     options->num_forward,
                                     options->offload_keep_last, error));
  const fsdp_device_ops ops = fsdp_counting_device_ops(&run->device);
  const fsdp_view_ops views = fsdp_counting_device_views(&run->device);
  FSDP_TRY(fsdp_engine_create(&ops, &views, &run->engine, error));
  for (int64_t i = 0; i < options->num_units; i++) {
    FSDP_TRY(make_unit(run, i, error));
  }
  FSDP_TRY(read_events(run, error));
done:
  return status;
}

static void run_fini(plan_run *run) {
  fsdp_planned_offload_fini(&run->offload);
  for (int64_t i = 0; run->units != NULL && i < run->options->num_units; i++) {
    planned_unit *planned = &run->units[i];
    fsdp_unit_destroy(planned->unit);
    fsdp_free(planned->is_used);
    fsdp_free(planned->counted.has_grad_shard);
    fsdp_free(planned->segments);
  }
  fsdp_engine_destroy(run->engine);
  fsdp_free(run->units);
}

/* Running ------------------------------------------------------------------ */

/* What the event changes in activations, its most first. */
static fsdp_status change_activations(plan_run *run,
                                      const fsdp_step_event *event,
                                      fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  FSDP_TRY(fsdp_counting_device_hold(&run->device, FSDP_COUNTED_ACTIVATIONS,
                                     event->peak_nbytes, error));
  FSDP_TRY(fsdp_counting_device_hold(&run->device, FSDP_COUNTED_ACTIVATIONS,
                                     event->nbytes - event->peak_nbytes,
                                     error));
done:
  return status;
}

static fsdp_status run_forward(plan_run *run, fsdp_error *error) {
  const fsdp_step_plan_options *options = run->options;
  fsdp_status status = FSDP_OK;

  for (int64_t i = 0; i < options->num_forward; i++) {
    const fsdp_step_event *event = &options->forward[i];
    planned_unit *planned =
        event->kind == FSDP_STEP_WORK ? NULL : &run->units[event->unit];
    run->device.charged_unit =
        event->kind == FSDP_STEP_WORK ? NULL : &planned->counted;
    if (event->kind == FSDP_STEP_ENTER) {
      FSDP_TRY(fsdp_unit_pre_forward(planned->unit, false, error));
      FSDP_TRY(fsdp_planned_offload_enter(&run->offload, error));
    }
    fsdp_counting_device_compute(&run->device, event->seconds);
    if (event->kind == FSDP_STEP_WORK) {
      FSDP_TRY(change_activations(run, event, error));
      FSDP_TRY(fsdp_planned_offload_save(&run->offload, i,
                                         event->offload_nbytes, error));
    }
    if (event->kind == FSDP_STEP_LEAVE) {
      if (event->unit == 0) {
        FSDP_TRY(fsdp_planned_offload_leave(&run->offload, error));
      }
      FSDP_TRY(fsdp_unit_post_forward(planned->unit, false,
                                      event->requires_grad, error));
    }
  }
done:
  return status;
}

/* As the bridge's expect_grads: once per backward. */
static void expect_grads(planned_unit *planned) {
  const int64_t num_grads = planned->num_uses;
  /* One that never comes keeps the unit to the end of backward. */
  const int64_t num_inputs =
      planned->num_inputs_ready > 0 ? planned->num_inputs_ready : 1;
  if (planned->has_begun_backward) return;
  planned->has_begun_backward = true;
  fsdp_unit_expect_grads(planned->unit,
                         num_grads + (planned->is_silent ? num_inputs : 0),
                         planned->is_silent ? 0 : num_inputs);
}

static fsdp_status give_grad(plan_run *run, const fsdp_step_event *event,
                             fsdp_error *error) {
  const fsdp_flat_layout *layout = run->options->units[event->unit].layout;
  const planned_unit *planned = &run->units[event->unit];
  const fsdp_param_slot *slot = fsdp_flat_layout_slot(layout, event->param);
  fsdp_grad grad = {.param = event->param, .is_expected = true};
  fsdp_status status = FSDP_OK;

  grad.dtype = planned->segments[slot->segment].param_dtype;
  /* Fits: the unit's blocks hold more. */
  FSDP_TRY(fsdp_counting_device_make_grad(
      &run->device, slot->numel * grad.dtype.itemsize, &grad.token, error));
  FSDP_TRY(fsdp_unit_grad_ready(planned->unit, &grad, error));
done:
  return status;
}

/* Brings what was saved back to the device, where the events' own count goes on
 * with it. */
static fsdp_status take_back(plan_run *run, const fsdp_step_event *event,
                             fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  if (run->offload.offload == NULL || event->offload_nbytes == 0) {
    return FSDP_OK;
  }
  FSDP_TRY(fsdp_planned_offload_need(&run->offload, event->saved_by, error));
  fsdp_planned_offload_drop(&run->offload, event->saved_by);
  FSDP_TRY(fsdp_counting_device_hold(&run->device, FSDP_COUNTED_ACTIVATIONS,
                                     event->offload_nbytes, error));
done:
  return status;
}

static fsdp_status backward_event(plan_run *run, const fsdp_step_event *event,
                                  fsdp_error *error) {
  planned_unit *planned =
      event->kind == FSDP_STEP_WORK ? NULL : &run->units[event->unit];
  fsdp_status status = FSDP_OK;

  run->device.charged_unit =
      event->kind == FSDP_STEP_WORK ? NULL : &planned->counted;
  if (event->kind == FSDP_STEP_LEAVE) {
    FSDP_TRY(fsdp_unit_pre_backward(planned->unit, error));
    expect_grads(planned);
  }
  FSDP_TRY(take_back(run, event, error));
  fsdp_counting_device_compute(&run->device, event->seconds);
  FSDP_TRY(change_activations(run, event, error));
  if (event->kind == FSDP_STEP_USE) FSDP_TRY(give_grad(run, event, error));
  if (event->kind == FSDP_STEP_ENTER && planned->has_begun_backward) {
    FSDP_TRY(fsdp_unit_inputs_ready(planned->unit, error));
  }
done:
  return status;
}

static fsdp_status run_backward(plan_run *run, fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  for (int64_t i = 0; i < run->options->num_units; i++) {
    run->units[i].has_begun_backward = false;
  }
  for (int64_t i = 0; i < run->options->num_backward; i++) {
    FSDP_TRY(backward_event(run, &run->options->backward[i], error));
  }
  run->device.charged_unit = NULL;
  FSDP_TRY(fsdp_engine_finish_backward(run->engine, error));
  FSDP_TRY(fsdp_planned_offload_end_backward(&run->offload, error));
done:
  return status;
}

/* All batches of a step; the optimizer stepped and cleared the gradients. */
static fsdp_status run_step(plan_run *run, fsdp_error *error) {
  const int64_t num_batches = run->options->num_batches;
  fsdp_status status = FSDP_OK;

  run->device.params_changed = true;
  for (int64_t i = 0; i < run->options->num_units; i++) {
    run->units[i].counted.has_grads = false;
  }
  for (int64_t i = 0; i < num_batches; i++) {
    fsdp_engine_set_sync(run->engine, i + 1 < num_batches
                                          ? run->options->accumulation
                                          : FSDP_SYNC_REDUCE);
    FSDP_TRY(run_forward(run, error));
    FSDP_TRY(run_backward(run, error));
  }
done:
  return status;
}

static double compute_seconds(const fsdp_step_plan_options *options) {
  double seconds = 0;
  for (int64_t i = 0; i < options->num_forward; i++) {
    seconds += options->forward[i].seconds;
  }
  for (int64_t i = 0; i < options->num_backward; i++) {
    seconds += options->backward[i].seconds;
  }
  return seconds * (double)options->num_batches;
}

fsdp_status fsdp_step_plan_run(const fsdp_step_plan_options *options,
                               fsdp_step_plan_report *report,
                               double *unit_seconds, fsdp_error *error) {
  plan_run run = {0};
  fsdp_engine_stats before = {0};
  double begin = 0;
  fsdp_status status = FSDP_OK;

  FSDP_TRY(run_init(&run, options, error));
  for (int step = 0; step < NUM_STEPS; step++) {
    fsdp_engine_get_stats(run.engine, &before);
    fsdp_counting_device_restart(&run.device);
    for (int64_t i = 0; i < options->num_units; i++) {
      run.units[i].counted.stall_seconds = 0;
    }
    begin = fsdp_counting_device_now(&run.device);
    FSDP_TRY(run_step(&run, error));
  }
  *report = (fsdp_step_plan_report){
      .peak_nbytes = run.device.peak_nbytes,
      .step_seconds = fsdp_counting_device_now(&run.device) - begin,
      .compute_seconds = compute_seconds(options),
      .stall_seconds = run.device.stall_seconds,
      .offload = fsdp_planned_offload_stats(&run.offload),
  };
  fsdp_engine_get_stats(run.engine, &report->stats);
  report->num_step_allocs =
      report->stats.arena.num_allocs - before.arena.num_allocs;
  for (int i = 0; i < FSDP_NUM_COUNTED; i++) {
    report->at_peak[i] = run.device.at_peak[i];
  }
  for (int i = 0; i < FSDP_NUM_COLLECTIVES; i++) {
    report->collectives[i] = run.device.collectives[i];
  }
  for (int64_t i = 0; i < options->num_units; i++) {
    unit_seconds[i] = run.units[i].counted.stall_seconds;
  }
done:
  run_fini(&run);
  return status;
}
