/*
 * Tests of plan/: the engine over the counting port. Sizes and times are those
 * that a reader can work out by hand.
 */
#include "base/alloc.h"
#include "base/dtypes.h"
#include "check.h"
#include "layout/alignment.h"
#include "layout/param_table.h"
#include "plan/step_plan.h"

enum { MAX_UNITS = 4, MAX_EVENTS = 32, WORLD_SIZE = 4, NUMEL = 4096 };

static const fsdp_dtype FP32 = {FSDP_DTYPE_FLOAT32, 4};
static const fsdp_dtype BF16 = {FSDP_DTYPE_BFLOAT16, 2};

/* Units of two parameters of NUMEL elements each, and the events of a step.
 * `events` stands for both lists: backward is forward in reverse, with a use
 * where forward has one, what work kept given back, and `backward_seconds`. */
typedef struct fixture {
  fsdp_param_table *tables[MAX_UNITS];
  fsdp_flat_layout *layouts[MAX_UNITS];
  fsdp_segment_options segments[MAX_UNITS][2];
  fsdp_step_unit units[MAX_UNITS];
  fsdp_step_event events[MAX_EVENTS];
  double backward_seconds[MAX_EVENTS];
  int64_t num_events;
  fsdp_step_event forward[MAX_EVENTS];
  fsdp_step_event backward[MAX_EVENTS];
  fsdp_step_plan_options options;
  fsdp_step_plan_report report;
  double unit_seconds[MAX_UNITS];
} fixture;

static void add_unit(fixture *self, const char *name, bool has_frozen,
                     int64_t world_size) {
  const int64_t index = self->options.num_units++;
  const fsdp_param_spec specs[] = {
      {.key = 0, .numel = NUMEL, .dtype = FP32, .requires_grad = true},
      {.key = 1, .numel = NUMEL, .dtype = FP32, .requires_grad = !has_frozen},
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

static fsdp_step_event *add_event(fixture *self, fsdp_step_event_kind kind,
                                  int64_t unit, int64_t param) {
  fsdp_step_event *event = &self->events[self->num_events++];
  *event = (fsdp_step_event){.kind = kind, .unit = unit, .param = param};
  return event;
}

/* One unit, with `nbytes` of activations; 1 s of forward, 2 s of backward. */
static void run_unit(fixture *self, int64_t unit, int64_t nbytes) {
  add_event(self, FSDP_STEP_ENTER, unit, 0);
  add_event(self, FSDP_STEP_USE, unit, 0);
  add_event(self, FSDP_STEP_USE, unit, 1);
  fsdp_step_event *work = add_event(self, FSDP_STEP_WORK, 0, 0);
  work->nbytes = nbytes;
  work->peak_nbytes = nbytes;
  work->seconds = 1;
  self->backward_seconds[work - self->events] = 2;
  add_event(self, FSDP_STEP_LEAVE, unit, 0);
}

static void init_options(fixture *self) {
  *self = (fixture){0};
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

/* A root with one parameter in front of three children and one behind them. */
static void init_tree(fixture *self, int64_t world_size) {
  static const char *const names[] = {"a", "b", "c"};
  init_options(self);
  add_unit(self, "root", false, world_size);
  add_event(self, FSDP_STEP_ENTER, 0, 0);
  add_event(self, FSDP_STEP_USE, 0, 0);
  for (int64_t i = 1; i < MAX_UNITS; i++) {
    add_unit(self, names[i - 1], false, world_size);
    run_unit(self, i, 1000);
  }
  add_event(self, FSDP_STEP_USE, 0, 1);
  add_event(self, FSDP_STEP_LEAVE, 0, 0);
}

static void fini(fixture *self) {
  for (int64_t i = 0; i < self->options.num_units; i++) {
    fsdp_flat_layout_destroy(self->layouts[i]);
    fsdp_param_table_destroy(self->tables[i]);
  }
  CHECK_I64(fsdp_alloc_live(), 0);
}

static bool is_trainable(const fixture *self, const fsdp_step_event *use) {
  const fsdp_flat_layout *layout = self->layouts[use->unit];
  const int64_t segment = fsdp_flat_layout_slot(layout, use->param)->segment;
  return fsdp_flat_layout_segment(layout, segment)->requires_grad;
}

/* Writes both lists. */
static void write_events(fixture *self) {
  bool has_grad[MAX_EVENTS] = {false}; /* what flows there requires grad */
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
    made->item = self->options.num_forward - 1;
    made->requires_grad = has_grad[i];
  }
  int64_t item = self->options.num_forward;
  for (int64_t i = self->num_events; i-- > 0;) {
    fsdp_step_event made = self->events[i];
    if (made.kind != FSDP_STEP_USE) item--;
    if (made.kind == FSDP_STEP_USE
            ? !is_trainable(self, &made)
            : made.kind != FSDP_STEP_WORK && !has_grad[i]) {
      continue;
    }
    made.nbytes = -made.nbytes;
    made.peak_nbytes = 0;
    made.seconds = has_grad[i] ? self->backward_seconds[i] : 0;
    if (made.kind == FSDP_STEP_WORK) made.item = item;
    self->backward[self->options.num_backward++] = made;
  }
}

static const fsdp_step_plan_report *run_as_written(fixture *self) {
  fsdp_error error = {0};
  const fsdp_status status = fsdp_step_plan_run(&self->options, &self->report,
                                                self->unit_seconds, &error);
  if (!CHECK_OK(status)) printf("  %s\n", error.message);
  return &self->report;
}

static const fsdp_step_plan_report *run(fixture *self) {
  write_events(self);
  return run_as_written(self);
}

static const char *message_of(fixture *self, fsdp_status expected) {
  static fsdp_error error;
  error = (fsdp_error){0};
  const fsdp_step_plan_report report = self->report;
  CHECK_I64(fsdp_step_plan_run(&self->options, &self->report,
                               self->unit_seconds, &error),
            expected);
  CHECK(memcmp(&report, &self->report, sizeof report) == 0);
  return error.message;
}

static void check_close(double actual, double expected) {
  const double difference = actual - expected;
  if (!CHECK(difference < 1e-6 && difference > -1e-6)) {
    printf("  is %.9f, expected %.9f\n", actual, expected);
  }
}

TEST(test_memory_and_bytes) {
  fixture self;
  init_tree(&self, WORLD_SIZE);
  const fsdp_step_plan_report *report = run(&self);
  const int64_t whole = 2 * NUMEL * 2; /* of a unit in bf16 */
  const int64_t shard = 2 * NUMEL * 4 / WORLD_SIZE;

  CHECK_I64(report->stats.shard_nbytes, 4 * shard);
  CHECK_I64(report->stats.grad_shard_nbytes, 4 * shard);
  /* The root's, two for parameters and one for gradients. */
  CHECK_I64(report->stats.arena.peak_nbytes, 4 * whole);
  CHECK_I64(report->stats.arena.nbytes, 0);
  CHECK_I64(report->num_step_allocs, 7 + 4);
  CHECK_I64(report->stats.scratch_nbytes, 0);

  const fsdp_collective_count *gathers =
      &report->collectives[FSDP_COLLECTIVE_ALL_GATHER];
  const fsdp_collective_count *reduces =
      &report->collectives[FSDP_COLLECTIVE_REDUCE_SCATTER];
  /* The root once, each child in forward and in backward, but for the last one:
   * nothing runs between. (It is gathered again all the same, as in FSDP1.) */
  CHECK_I64(gathers->num_launches, 7);
  CHECK_I64(gathers->num_calls, 7);
  CHECK_I64(gathers->payload_nbytes, 7 * whole);
  CHECK_I64(gathers->wire_nbytes, 7 * whole / 4 * 3);
  CHECK_I64(reduces->num_launches, 4);
  CHECK_I64(reduces->payload_nbytes, 4 * whole);
  CHECK_I64(reduces->wire_nbytes, 4 * whole / 4 * 3);
  CHECK_I64(report->collectives[FSDP_COLLECTIVE_ALL_REDUCE].num_launches, 0);
  fini(&self);
}

TEST(test_busiest_moment) {
  fixture self;
  init_tree(&self, WORLD_SIZE);
  const fsdp_step_plan_report *report = run(&self);
  const int64_t shard = 2 * NUMEL * 4 / WORLD_SIZE;
  int64_t sum = 0;
  for (int i = 0; i < FSDP_NUM_COUNTED; i++) {
    if (i != FSDP_COUNTED_HOST) sum += report->at_peak[i];
  }
  CHECK_I64(sum, report->peak_nbytes);
  CHECK_I64(report->at_peak[FSDP_COUNTED_HOST], 0);
  CHECK_I64(report->at_peak[FSDP_COUNTED_BLOCKS],
            report->stats.arena.peak_nbytes);
  /* In the backward of b: a is prefetched, c is being reduced; b's two
   * gradients and the root's first have come, and wait to be packed. */
  CHECK_I64(report->at_peak[FSDP_COUNTED_GRAD_SHARDS], shard);
  CHECK_I64(report->at_peak[FSDP_COUNTED_PENDING_GRADS], 3 * NUMEL * 2);
  CHECK_I64(report->at_peak[FSDP_COUNTED_ACTIVATIONS], 1000);
  fini(&self);
}

TEST(test_activations) {
  fixture self;
  init_tree(&self, WORLD_SIZE);
  const int64_t large = (int64_t)1 << 30;
  for (int64_t i = 0; i < self.num_events; i++) {
    if (self.events[i].kind != FSDP_STEP_WORK) continue;
    self.events[i].nbytes = large;
    self.events[i].peak_nbytes = large;
  }
  const fsdp_step_plan_report *report = run(&self);
  CHECK_I64(report->at_peak[FSDP_COUNTED_ACTIVATIONS], 3 * large);
  fini(&self);
}

/* What is there in the middle of an event counts where it is: in c's forward
 * little else is there, in c's backward all activations. */
TEST(test_the_most_of_an_event) {
  fixture self;
  init_tree(&self, WORLD_SIZE);
  const int64_t large = (int64_t)1 << 30;
  write_events(&self);
  int64_t at = self.options.num_forward;
  while (self.forward[--at].kind != FSDP_STEP_WORK) continue;
  self.forward[at].peak_nbytes = large;
  CHECK_I64(run_as_written(&self)->at_peak[FSDP_COUNTED_ACTIVATIONS],
            2000 + large);
  for (at = 0; self.backward[at].kind != FSDP_STEP_WORK;) at++;
  self.backward[at].peak_nbytes = large;
  CHECK_I64(run_as_written(&self)->at_peak[FSDP_COUNTED_ACTIVATIONS],
            3000 + large);
  fini(&self);
}

/* A gradient is an activation until its parameter gets it: then it is counted
 * as one that waits to be packed, never as both. */
TEST(test_gradients_among_activations) {
  fixture self;
  init_tree(&self, WORLD_SIZE);
  const int64_t peak = run(&self)->peak_nbytes;
  const int64_t grad = NUMEL * 2;
  int64_t num_uses = 0;
  for (int64_t i = 0; i < self.options.num_backward; i++) {
    fsdp_step_event *event = &self.backward[i];
    if (event->kind == FSDP_STEP_WORK) {
      event->nbytes += 2 * grad;
      event->peak_nbytes = 2 * grad;
    } else if (event->kind == FSDP_STEP_USE && event->unit != 0) {
      event->nbytes = -grad;
      num_uses++;
    }
  }
  CHECK_I64(num_uses, 6);
  CHECK_I64(run_as_written(&self)->peak_nbytes, peak + 1000);
  fini(&self);
}

TEST(test_time_without_communication) {
  fixture self;
  init_tree(&self, WORLD_SIZE);
  const fsdp_step_plan_report *report = run(&self);
  check_close(report->compute_seconds, 9);
  check_close(report->step_seconds, 9);
  check_close(report->stall_seconds, 0);
  fini(&self);
}

/* Every launch takes 0.25 s a hop, and 4 ranks have 2 hops. */
TEST(test_exposed_communication) {
  fixture self;
  init_tree(&self, WORLD_SIZE);
  self.options.shard_link.latency_seconds = 0.25;
  const fsdp_step_plan_report *report = run(&self);
  check_close(report->collectives[FSDP_COLLECTIVE_ALL_GATHER].seconds, 3.5);
  check_close(report->collectives[FSDP_COLLECTIVE_REDUCE_SCATTER].seconds, 2);
  check_close(report->compute_seconds, 9);
  check_close(report->step_seconds, 9 + report->stall_seconds);
  /* Forward has no prefetch: the host issues a child's gather when it comes to
   * the child, without waiting; so b's and c's hide behind compute. The root's
   * and a's do not: nothing runs before. Nor does c's in backward, whose memory
   * is there when forward has ended. At the end a's and the root's reductions
   * follow the compute: the root's gradients wait for a's. */
  check_close(self.unit_seconds[0], 0.5 + 0.5);
  check_close(self.unit_seconds[1], 0.5);
  check_close(self.unit_seconds[2], 0);
  check_close(self.unit_seconds[3], 0.5);
  check_close(report->stall_seconds, 0.5 + 0.5 + 0.5 + 1);
  fini(&self);
}

TEST(test_bandwidth) {
  fixture self;
  init_options(&self);
  add_unit(&self, "root", false, WORLD_SIZE);
  run_unit(&self, 0, 0);
  const double wire = 2 * NUMEL * 2 / 4.0 * 3;
  self.options.shard_link.bytes_per_second = wire; /* a second a launch */
  const fsdp_step_plan_report *report = run(&self);
  /* One gather, which nothing hides; one reduction, likewise. */
  check_close(report->step_seconds, 1 + 1 + 2 + 1);
  check_close(report->stall_seconds, 2);
  fini(&self);
}

/* 2 hosts of 2 ranks: half of the payload on each link, and a hop each. */
TEST(test_hosts) {
  fixture self;
  init_options(&self);
  add_unit(&self, "root", false, WORLD_SIZE);
  run_unit(&self, 0, 0);
  const double payload = 2 * NUMEL * 2;
  self.options.shard_link = (fsdp_link){payload / 2, 0.25};
  self.options.host_link = (fsdp_link){payload / 4, 0.5};
  self.options.num_local = 2;
  check_close(run(&self)->step_seconds, 3.75 + 1 + 2 + 3.75);
  self.options.num_local = 4; /* all on one host */
  check_close(run(&self)->step_seconds, 2 + 1 + 2 + 2);
  self.options.num_local = 3; /* flat: three ranks' ring over a host's link */
  check_close(run(&self)->step_seconds, 10 + 1 + 2 + 10);
  self.options.num_local = -1;
  CHECK(strstr(message_of(&self, FSDP_INVALID_ARGUMENT),
               "-1 ranks of a host") != NULL);
  self.options.num_local = 2;
  self.options.host_link.bytes_per_second = 0;
  CHECK(strstr(message_of(&self, FSDP_INVALID_ARGUMENT), "hosts' group") !=
        NULL);
  fini(&self);
}

TEST(test_replicas) {
  fixture self;
  init_tree(&self, 2);
  for (int i = 0; i < MAX_UNITS; i++) self.units[i].num_replicas = 8;
  self.options.replica_link.latency_seconds = 0.125;
  const fsdp_step_plan_report *report = run(&self);
  const fsdp_collective_count *sums =
      &report->collectives[FSDP_COLLECTIVE_ALL_REDUCE];
  const int64_t slot = NUMEL * 2;
  CHECK_I64(sums->num_launches, 4);
  CHECK_I64(sums->payload_nbytes, 4 * slot);
  CHECK_I64(sums->wire_nbytes, 4 * 2 * (slot - slot / 8));
  check_close(sums->seconds, 4 * 3 * 0.125);
  CHECK_I64(report->collectives[FSDP_COLLECTIVE_REDUCE_SCATTER].num_launches,
            4);
  fini(&self);
}

/* One rank a shard group, in fp32: parameters need no block at all, and one
 * unit's gradients after the other. */
TEST(test_one_rank) {
  fixture self;
  init_tree(&self, 1);
  for (int i = 0; i < MAX_UNITS; i++) {
    self.segments[i][0].param_dtype = FP32;
    self.segments[i][0].reduce_dtype = FP32;
  }
  const fsdp_step_plan_report *report = run(&self);
  for (int i = 0; i < FSDP_NUM_COLLECTIVES; i++) {
    CHECK_I64(report->collectives[i].num_launches, 0);
  }
  CHECK_I64(report->stats.arena.peak_nbytes, 2 * NUMEL * 4);
  fini(&self);
}

/* With a frozen segment: no gradient memory, one more gather call; the unit
 * that backward leaves by its inputs is reduced there, not at the end. */
TEST(test_frozen) {
  fixture self;
  init_options(&self);
  add_unit(&self, "root", false, WORLD_SIZE);
  add_unit(&self, "a", true, WORLD_SIZE);
  add_event(&self, FSDP_STEP_ENTER, 0, 0);
  add_event(&self, FSDP_STEP_USE, 0, 0);
  run_unit(&self, 1, 0);
  add_event(&self, FSDP_STEP_USE, 0, 1);
  add_event(&self, FSDP_STEP_LEAVE, 0, 0);
  const fsdp_step_plan_report *report = run(&self);
  CHECK_I64(report->stats.shard_nbytes, 2 * (2 * NUMEL * 4 / WORLD_SIZE));
  CHECK_I64(report->stats.grad_shard_nbytes, 3 * (NUMEL * 4 / WORLD_SIZE));
  CHECK_I64(report->collectives[FSDP_COLLECTIVE_ALL_GATHER].num_launches, 3);
  CHECK_I64(report->collectives[FSDP_COLLECTIVE_ALL_GATHER].num_calls, 5);
  CHECK_I64(report->collectives[FSDP_COLLECTIVE_REDUCE_SCATTER].num_launches,
            2);
  fini(&self);
}

/* Nothing that requires grad before a: it keeps nothing for backward, and has
 * none. */
TEST(test_frozen_beginning) {
  fixture self;
  init_tree(&self, WORLD_SIZE);
  const fsdp_step_event *events = self.events;
  CHECK_I64(events[1].kind, FSDP_STEP_USE);
  self.events[1].kind = FSDP_STEP_WORK; /* the root's first is unused */
  for (int64_t i = 2; i < self.num_events; i++) {
    if (events[i].kind == FSDP_STEP_USE && events[i].unit == 1) {
      self.events[i].kind = FSDP_STEP_WORK;
    }
  }
  const fsdp_step_plan_report *report = run(&self);
  /* The root once, b and c twice, a in forward; and once more by b's prefetch,
   * which does not know that a has no backward. */
  CHECK_I64(report->collectives[FSDP_COLLECTIVE_ALL_GATHER].num_launches, 7);
  CHECK_I64(report->collectives[FSDP_COLLECTIVE_REDUCE_SCATTER].num_launches,
            3);
  /* Backward has no work before b. */
  check_close(report->compute_seconds, 3 + 4);
  fini(&self);
}

TEST(test_accumulation) {
  fixture self;
  init_tree(&self, WORLD_SIZE);
  const int64_t whole = 2 * NUMEL * 2;
  self.options.num_batches = 3;
  self.options.accumulation = FSDP_SYNC_NONE;
  const fsdp_step_plan_report *report = run(&self);
  CHECK_I64(report->collectives[FSDP_COLLECTIVE_REDUCE_SCATTER].num_launches,
            4);
  CHECK_I64(report->collectives[FSDP_COLLECTIVE_ALL_GATHER].num_launches, 21);
  CHECK_I64(report->stats.arena.peak_nbytes, (1 + 2 + 4) * whole);
  check_close(report->compute_seconds, 27);

  self.options.accumulation = FSDP_SYNC_SHARD;
  report = run(&self);
  CHECK_I64(report->collectives[FSDP_COLLECTIVE_REDUCE_SCATTER].num_launches,
            12);
  CHECK_I64(report->stats.arena.peak_nbytes, 4 * whole);
  CHECK_I64(report->stats.partial_grad_nbytes, 0); /* at the end */
  fini(&self);
}

TEST(test_scratch) {
  fixture self;
  init_tree(&self, WORLD_SIZE);
  self.options.wants_scratch = true;
  /* Of 4 ranks the other 3. */
  CHECK_I64(run(&self)->stats.scratch_nbytes, 2 * 2 * NUMEL * 2 * 3 / 4);
  fini(&self);
}

/* Offloaded: sharded gradients are on the host; the cast needs a stage. */
TEST(test_offload) {
  fixture self;
  init_tree(&self, WORLD_SIZE);
  for (int i = 0; i < MAX_UNITS; i++) self.units[i].offloads = true;
  const fsdp_step_plan_report *report = run(&self);
  const int64_t shard = 2 * NUMEL * 4 / WORLD_SIZE;
  CHECK_I64(report->stats.grad_shard_nbytes, 4 * shard);
  CHECK_I64(report->at_peak[FSDP_COUNTED_GRAD_SHARDS], 0);
  /* What passes through the device lies in other ranks' slots. */
  CHECK_I64(report->stats.arena.peak_nbytes, 4 * 2 * NUMEL * 2);
  fini(&self);
}

TEST(test_hundred_thousand_ranks) {
  fixture self;
  init_tree(&self, 100000);
  self.options.shard_link.latency_seconds = 1;
  const fsdp_step_plan_report *report = run(&self);
  /* 8,192 elements over 100,000 ranks: 1 each, the rest is padding. */
  CHECK_I64(report->stats.shard_nbytes, 4 * 4);
  const fsdp_collective_count *gathers =
      &report->collectives[FSDP_COLLECTIVE_ALL_GATHER];
  CHECK_I64(gathers->payload_nbytes, 7 * 2 * 100000);
  check_close(gathers->seconds, 7 * 17); /* 2^17 ranks and more */
  fini(&self);
}

TEST(test_wrong_arguments) {
  fixture self;
  init_tree(&self, WORLD_SIZE);
  write_events(&self);
  const fsdp_step_plan_options good = self.options;

  self.options.shard_link.bytes_per_second = -1;
  CHECK_TEXT(
      message_of(&self, FSDP_INVALID_ARGUMENT),
      "the link of the shard group has -1 bytes per second and a latency "
      "of 0 seconds: need more than 0, and at least 0");
  self.options = good;
  self.options.replica_link.latency_seconds = -2;
  CHECK(strstr(message_of(&self, FSDP_INVALID_ARGUMENT), "-2 seconds") != NULL);
  self.options = good;
  self.options.num_batches = 0;
  CHECK_TEXT(
      message_of(&self, FSDP_INVALID_ARGUMENT),
      "a plan needs at least 1 unit and 1 batch, got 4, 0, and 11 and 18 "
      "events");
  self.options = good;
  self.options.num_units = 0;
  CHECK(strstr(message_of(&self, FSDP_INVALID_ARGUMENT), "got 0, 1") != NULL);
  self.options = good;
  fini(&self);
}

TEST(test_wrong_events) {
  fixture self;
  init_tree(&self, WORLD_SIZE);
  write_events(&self);
  fsdp_step_event *use = &self.backward[1];
  const fsdp_step_event good_use = *use;
  fsdp_step_event *enter = &self.forward[1];
  const fsdp_step_event good_enter = *enter;
  CHECK_I64(use->kind, FSDP_STEP_USE);
  CHECK_I64(enter->kind, FSDP_STEP_ENTER);

  use->param = 2;
  CHECK_TEXT(message_of(&self, FSDP_INVALID_ARGUMENT),
             "backward uses parameter 2 of unit 'root', which has 2: each that "
             "is trainable is used at most once");
  use->param = 0; /* used again at the end */
  CHECK(strstr(message_of(&self, FSDP_INVALID_ARGUMENT), "parameter 0") !=
        NULL);
  *use = good_use;
  use->nbytes = 1;
  CHECK_TEXT(message_of(&self, FSDP_INVALID_ARGUMENT),
             "an event changes activations by 1 bytes and at most 0, and takes "
             "0 seconds: need a most that is no less, 0 unless it is WORK or "
             "USE, and seconds >= 0");
  use->peak_nbytes = 1;
  CHECK_TEXT(message_of(&self, FSDP_INVALID_ARGUMENT),
             "1 bytes of activations are never given back");
  *use = good_use;
  use->nbytes = -3001;
  CHECK_TEXT(message_of(&self, FSDP_INVALID_ARGUMENT),
             "an event gives back 1 bytes of activations more than there are");
  *use = good_use;
  enter->peak_nbytes = 1;
  CHECK(strstr(message_of(&self, FSDP_INVALID_ARGUMENT), "at most 1") != NULL);
  *enter = good_enter;
  enter->unit = 4;
  CHECK_TEXT(message_of(&self, FSDP_INVALID_ARGUMENT),
             "an event names unit 4 of 4");
  *enter = (fsdp_step_event){.kind = FSDP_STEP_LEAVE, .unit = 2};
  CHECK_TEXT(message_of(&self, FSDP_INVALID_ARGUMENT),
             "forward leaves unit 'b' outside the root, or without an ENTER "
             "before it");
  *enter = (fsdp_step_event){.kind = FSDP_STEP_ENTER, .unit = 2};
  CHECK_TEXT(message_of(&self, FSDP_INVALID_ARGUMENT),
             "forward leaves unit 'a' outside the root, or without an ENTER "
             "before it");
  *enter = (fsdp_step_event){.kind = FSDP_STEP_USE, .unit = 2};
  CHECK_TEXT(message_of(&self, FSDP_INVALID_ARGUMENT),
             "forward uses parameter 0 of unit 'b': gradients come in "
             "backward");
  *enter = good_enter;
  self.options.num_forward--;
  CHECK_TEXT(message_of(&self, FSDP_INVALID_ARGUMENT),
             "unit 'root' is entered and never left");
  fini(&self);
}

/* What needs no gradient gets none. */
TEST(test_a_frozen_use) {
  fixture self;
  init_options(&self);
  add_unit(&self, "root", true, WORLD_SIZE);
  run_unit(&self, 0, 0);
  write_events(&self);
  fsdp_step_event *event = &self.backward[self.options.num_backward++];
  *event = (fsdp_step_event){.kind = FSDP_STEP_USE, .param = 1};
  CHECK(strstr(message_of(&self, FSDP_INVALID_ARGUMENT), "parameter 1") !=
        NULL);
  fini(&self);
}

TEST(test_overflow) {
  fixture self;
  init_tree(&self, WORLD_SIZE);
  for (int64_t i = 0; i < self.num_events; i++) {
    if (self.events[i].kind == FSDP_STEP_WORK) {
      self.events[i].nbytes = INT64_MAX / 2;
      self.events[i].peak_nbytes = INT64_MAX / 2;
    }
  }
  write_events(&self);
  CHECK(strstr(message_of(&self, FSDP_OVERFLOW),
               "do not fit in int64: the model is too large to be planned") !=
        NULL);
  fini(&self);
}

TEST(test_every_allocation_can_fail) {
  fixture self;
  init_tree(&self, WORLD_SIZE);
  write_events(&self);
  const int64_t live = fsdp_alloc_live();
  for (int64_t i = 0;; i++) {
    fsdp_error error = {0};
    fsdp_step_plan_report report = {.peak_nbytes = -1};
    fsdp_alloc_fail_at(i);
    const fsdp_status status =
        fsdp_step_plan_run(&self.options, &report, self.unit_seconds, &error);
    fsdp_alloc_fail_at(-1);
    CHECK_I64(fsdp_alloc_live(), live);
    if (status == FSDP_OK) {
      CHECK(i > 50);
      break;
    }
    CHECK_I64(status, FSDP_OUT_OF_MEMORY);
    CHECK_I64(error.status, FSDP_OUT_OF_MEMORY);
    CHECK_I64(report.peak_nbytes, -1);
  }
  fini(&self);
}

/* FSDP1's shapes on the CPU; everything aligned elsewhere. */
TEST(test_alignment) {
  const fsdp_alignment flat = fsdp_alignment_choose(0, false, true);
  CHECK_I64(flat.itemsize, FSDP_ALIGNMENT_NBYTES);
  CHECK(!flat.params && !flat.shards);
  const fsdp_alignment orig = fsdp_alignment_choose(2, true, true);
  CHECK_I64(orig.itemsize, 2);
  CHECK(orig.params && !orig.shards);
  const fsdp_alignment device = fsdp_alignment_choose(2, false, false);
  CHECK(device.params && device.shards);
}

/* Two units' activations are there at once, not three. */
TEST(test_offload_of_activations) {
  fixture self;
  init_tree(&self, WORLD_SIZE);
  for (int64_t i = 0; i < self.num_events; i++) {
    self.events[i].nbytes *= 1000; /* more than the blocks */
    self.events[i].peak_nbytes *= 1000;
  }
  const int64_t peak = run(&self)->peak_nbytes;
  CHECK_I64(self.report.at_peak[FSDP_COUNTED_ACTIVATIONS], 3000000);
  self.options.offload_keep_last = 1;
  CHECK_I64(run(&self)->peak_nbytes, peak); /* nothing may go */
  for (int64_t i = 0; i < self.num_events; i++) {
    self.events[i].offload_nbytes = self.events[i].nbytes;
  }
  const fsdp_step_plan_report *report = run(&self);
  /* In the backward of b, when the gradients of c are there, whole
   * and sharded. */
  const int64_t shard = 2 * NUMEL * 4 / WORLD_SIZE;
  CHECK_I64(report->peak_nbytes, peak - 1000000 + shard + 2 * NUMEL * 2);
  CHECK_I64(report->at_peak[FSDP_COUNTED_ACTIVATIONS], 2000000);
  CHECK_I64(report->at_peak[FSDP_COUNTED_HOST], FSDP_OFFLOAD_CHUNK_NBYTES);
  CHECK_I64(report->offload.peak_nbytes, 2000000);
  CHECK_I64(report->offload.held_nbytes, 0);
  CHECK_I64(report->offload.num_downloads, 2 * 3);
  CHECK_I64(report->offload.num_uploads, 2 * 3);
  check_close(report->stall_seconds, 0);
  self.options.copy_bytes_per_second = 1e6; /* as long as a forward */
  check_close(run(&self)->stall_seconds, 0);
  /* 4 s: of both downloads a forward is hidden, of the uploads a backward. */
  self.options.copy_bytes_per_second = 250e3;
  check_close(run(&self)->stall_seconds, 2 * (4 - 1) + 2 * (4 - 2));
  self.options.offload_keep_last = 2;
  CHECK_I64(run(&self)->offload.num_downloads, 3);
  fini(&self);
}

TEST(test_bad_offloads) {
  fixture self;
  init_tree(&self, WORLD_SIZE);
  (void)run(&self);
  self.forward[0].offload_nbytes = 1;
  CHECK_TEXT(message_of(&self, FSDP_INVALID_ARGUMENT),
             "an event offloads 1 bytes of item 0: need 0 or more, 0 unless it "
             "is WORK, and an item in [0, 11)");
  self.forward[0].offload_nbytes = 0;
  self.forward[2].offload_nbytes = 1;
  self.forward[2].item = 11;
  CHECK(strstr(message_of(&self, FSDP_INVALID_ARGUMENT), "item 11") != NULL);
  self.forward[2].offload_nbytes = 0;
  self.options.offload_keep_last = -1;
  CHECK_TEXT(message_of(&self, FSDP_INVALID_ARGUMENT),
             "-1 last units that are not offloaded, 0 bytes per second to the "
             "host: need numbers >= 0");
  fini(&self);
}

/* What belongs to summons and hooks, not to a step, is refused. */
TEST(test_calls_outside_a_step) {
  const fsdp_link link = {.bytes_per_second = 1};
  fsdp_counting_device device;
  fsdp_counting_transport transport;
  fsdp_counting_device_init(&device, link, link, false);
  const fsdp_device_ops ops = fsdp_counting_device_ops(&device);
  const fsdp_view_ops views = fsdp_counting_device_views(&device);
  const fsdp_group group =
      fsdp_counting_device_group(&device, false, 2, &transport);
  const fsdp_call call = {0};
  uint64_t ticket = 0;
  void *block = NULL;
  CHECK_I64(group.transport->ops->broadcast(group.transport, &call, NULL, 1, 0,
                                            FP32, &ticket, NULL),
            FSDP_INVALID_STATE);
  CHECK_I64(views.reduce_hook(&device, NULL, FSDP_LANE_REDUCE, 0, NULL, NULL),
            FSDP_INVALID_STATE);
  CHECK_I64(ops.all_gather_bytes(&device, &group, NULL, 8, NULL, NULL),
            FSDP_INVALID_STATE);
  CHECK_I64(ops.block_alloc(&device, INT64_MAX, &block, NULL), FSDP_OVERFLOW);
  CHECK_I64(ops.host_alloc(&device, INT64_MAX, &block, NULL), FSDP_OVERFLOW);
  CHECK(block == NULL);
  CHECK_I64(device.peak_nbytes, 0);
}
