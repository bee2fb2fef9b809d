/*
 * Tests of plan/: the engine over the counting port.
 */
#include "base/dtypes.h"
#include "check.h"
#include "layout/alignment.h"
#include "plan_fixture.h"

static const fsdp_dtype FP32 = {FSDP_DTYPE_FLOAT32, 4};

static void check_close(double actual, double expected) {
  const double difference = actual - expected;
  if (!CHECK(difference < 1e-6 && difference > -1e-6)) {
    printf("  is %.9f, expected %.9f\n", actual, expected);
  }
}

TEST(test_memory_and_bytes) {
  plan_fixture self;
  plan_fixture_init_tree(&self, PLAN_WORLD_SIZE);
  const fsdp_step_plan_report *report = plan_fixture_run(&self);
  const int64_t whole = 2 * PLAN_NUMEL * 2; /* of a unit in bf16 */
  const int64_t shard = 2 * PLAN_NUMEL * 4 / PLAN_WORLD_SIZE;

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
  plan_fixture_fini(&self);
}

TEST(test_busiest_moment) {
  plan_fixture self;
  plan_fixture_init_tree(&self, PLAN_WORLD_SIZE);
  const fsdp_step_plan_report *report = plan_fixture_run(&self);
  const int64_t shard = 2 * PLAN_NUMEL * 4 / PLAN_WORLD_SIZE;
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
  CHECK_I64(report->at_peak[FSDP_COUNTED_PENDING_GRADS], 3 * PLAN_NUMEL * 2);
  CHECK_I64(report->at_peak[FSDP_COUNTED_ACTIVATIONS], 1000);
  plan_fixture_fini(&self);
}

TEST(test_activations) {
  plan_fixture self;
  plan_fixture_init_tree(&self, PLAN_WORLD_SIZE);
  const int64_t large = (int64_t)1 << 30;
  for (int64_t i = 0; i < self.num_events; i++) {
    if (self.events[i].kind != FSDP_STEP_WORK) continue;
    self.events[i].nbytes = large;
    self.events[i].peak_nbytes = large;
  }
  const fsdp_step_plan_report *report = plan_fixture_run(&self);
  CHECK_I64(report->at_peak[FSDP_COUNTED_ACTIVATIONS], 3 * large);
  plan_fixture_fini(&self);
}

/* What is there in the middle of an event counts where it is: in c's forward
 * little else is there, in c's backward all activations. */
TEST(test_the_most_of_an_event) {
  plan_fixture self;
  plan_fixture_init_tree(&self, PLAN_WORLD_SIZE);
  const int64_t large = (int64_t)1 << 30;
  plan_fixture_write_events(&self);
  int64_t at = self.options.num_forward;
  while (self.forward[--at].kind != FSDP_STEP_WORK) continue;
  self.forward[at].peak_nbytes = large;
  CHECK_I64(
      plan_fixture_run_as_written(&self)->at_peak[FSDP_COUNTED_ACTIVATIONS],
      2000 + large);
  for (at = 0; self.backward[at].kind != FSDP_STEP_WORK;) at++;
  self.backward[at].peak_nbytes = large;
  CHECK_I64(
      plan_fixture_run_as_written(&self)->at_peak[FSDP_COUNTED_ACTIVATIONS],
      3000 + large);
  plan_fixture_fini(&self);
}

/* A gradient is an activation until its parameter gets it: then it is counted
 * as one that waits to be packed, never as both. */
TEST(test_gradients_among_activations) {
  plan_fixture self;
  plan_fixture_init_tree(&self, PLAN_WORLD_SIZE);
  const int64_t peak = plan_fixture_run(&self)->peak_nbytes;
  const int64_t grad = PLAN_NUMEL * 2;
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
  CHECK_I64(plan_fixture_run_as_written(&self)->peak_nbytes, peak + 1000);
  plan_fixture_fini(&self);
}

TEST(test_time_without_communication) {
  plan_fixture self;
  plan_fixture_init_tree(&self, PLAN_WORLD_SIZE);
  const fsdp_step_plan_report *report = plan_fixture_run(&self);
  check_close(report->compute_seconds, 9);
  check_close(report->step_seconds, 9);
  check_close(report->stall_seconds, 0);
  plan_fixture_fini(&self);
}

/* Every launch takes 0.25 s a hop, and 4 ranks have 2 hops. */
TEST(test_exposed_communication) {
  plan_fixture self;
  plan_fixture_init_tree(&self, PLAN_WORLD_SIZE);
  self.options.shard_link.latency_seconds = 0.25;
  const fsdp_step_plan_report *report = plan_fixture_run(&self);
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
  plan_fixture_fini(&self);
}

TEST(test_bandwidth) {
  plan_fixture self;
  plan_fixture_init(&self);
  plan_fixture_add_unit(&self, "root", false, PLAN_WORLD_SIZE);
  plan_fixture_run_unit(&self, 0, 0);
  const double wire = 2 * PLAN_NUMEL * 2 / 4.0 * 3;
  self.options.shard_link.bytes_per_second = wire; /* a second a launch */
  const fsdp_step_plan_report *report = plan_fixture_run(&self);
  /* One gather, which nothing hides; one reduction, likewise. */
  check_close(report->step_seconds, 1 + 1 + 2 + 1);
  check_close(report->stall_seconds, 2);
  plan_fixture_fini(&self);
}

/* 2 hosts of 2 ranks: half of the payload on each link, and a hop each. */
TEST(test_hosts) {
  plan_fixture self;
  plan_fixture_init(&self);
  plan_fixture_add_unit(&self, "root", false, PLAN_WORLD_SIZE);
  plan_fixture_run_unit(&self, 0, 0);
  const double payload = 2 * PLAN_NUMEL * 2;
  self.options.shard_link = (fsdp_link){payload / 2, 0.25};
  self.options.host_link = (fsdp_link){payload / 4, 0.5};
  self.options.num_local = 2;
  check_close(plan_fixture_run(&self)->step_seconds, 3.75 + 1 + 2 + 3.75);
  self.options.num_local = 4; /* all on one host */
  check_close(plan_fixture_run(&self)->step_seconds, 2 + 1 + 2 + 2);
  self.options.num_local = 3; /* flat: three ranks' ring over a host's link */
  check_close(plan_fixture_run(&self)->step_seconds, 10 + 1 + 2 + 10);
  self.options.num_local = -1;
  CHECK(strstr(plan_fixture_message(&self, FSDP_INVALID_ARGUMENT),
               "-1 ranks of a host") != NULL);
  self.options.num_local = 2;
  self.options.host_link.bytes_per_second = 0;
  CHECK(strstr(plan_fixture_message(&self, FSDP_INVALID_ARGUMENT),
               "hosts' group") != NULL);
  plan_fixture_fini(&self);
}

TEST(test_replicas) {
  plan_fixture self;
  plan_fixture_init_tree(&self, 2);
  for (int i = 0; i < PLAN_MAX_UNITS; i++) self.units[i].num_replicas = 8;
  self.options.replica_link.latency_seconds = 0.125;
  const fsdp_step_plan_report *report = plan_fixture_run(&self);
  const fsdp_collective_count *sums =
      &report->collectives[FSDP_COLLECTIVE_ALL_REDUCE];
  const int64_t slot = PLAN_NUMEL * 2;
  CHECK_I64(sums->num_launches, 4);
  CHECK_I64(sums->payload_nbytes, 4 * slot);
  CHECK_I64(sums->wire_nbytes, 4 * 2 * (slot - slot / 8));
  check_close(sums->seconds, 4 * 3 * 0.125);
  CHECK_I64(report->collectives[FSDP_COLLECTIVE_REDUCE_SCATTER].num_launches,
            4);
  plan_fixture_fini(&self);
}

/* One rank a shard group, in fp32: parameters need no block at all, and one
 * unit's gradients after the other. */
TEST(test_one_rank) {
  plan_fixture self;
  plan_fixture_init_tree(&self, 1);
  for (int i = 0; i < PLAN_MAX_UNITS; i++) {
    self.segments[i][0].param_dtype = FP32;
    self.segments[i][0].reduce_dtype = FP32;
  }
  const fsdp_step_plan_report *report = plan_fixture_run(&self);
  for (int i = 0; i < FSDP_NUM_COLLECTIVES; i++) {
    CHECK_I64(report->collectives[i].num_launches, 0);
  }
  CHECK_I64(report->stats.arena.peak_nbytes, 2 * PLAN_NUMEL * 4);
  plan_fixture_fini(&self);
}

/* With a frozen segment: no gradient memory, one more gather call; the unit
 * that backward leaves by its inputs is reduced there, not at the end. */
TEST(test_frozen) {
  plan_fixture self;
  plan_fixture_init(&self);
  plan_fixture_add_unit(&self, "root", false, PLAN_WORLD_SIZE);
  plan_fixture_add_unit(&self, "a", true, PLAN_WORLD_SIZE);
  plan_fixture_add_event(&self, FSDP_STEP_ENTER, 0, 0);
  plan_fixture_add_event(&self, FSDP_STEP_USE, 0, 0);
  plan_fixture_run_unit(&self, 1, 0);
  plan_fixture_add_event(&self, FSDP_STEP_USE, 0, 1);
  plan_fixture_add_event(&self, FSDP_STEP_LEAVE, 0, 0);
  const fsdp_step_plan_report *report = plan_fixture_run(&self);
  CHECK_I64(report->stats.shard_nbytes,
            2 * (2 * PLAN_NUMEL * 4 / PLAN_WORLD_SIZE));
  CHECK_I64(report->stats.grad_shard_nbytes,
            3 * (PLAN_NUMEL * 4 / PLAN_WORLD_SIZE));
  CHECK_I64(report->collectives[FSDP_COLLECTIVE_ALL_GATHER].num_launches, 3);
  CHECK_I64(report->collectives[FSDP_COLLECTIVE_ALL_GATHER].num_calls, 5);
  CHECK_I64(report->collectives[FSDP_COLLECTIVE_REDUCE_SCATTER].num_launches,
            2);
  plan_fixture_fini(&self);
}

/* Nothing that requires grad before a: it keeps nothing for backward, and has
 * none. */
TEST(test_frozen_beginning) {
  plan_fixture self;
  plan_fixture_init_tree(&self, PLAN_WORLD_SIZE);
  const fsdp_step_event *events = self.events;
  CHECK_I64(events[1].kind, FSDP_STEP_USE);
  self.events[1].kind = FSDP_STEP_WORK; /* the root's first is unused */
  for (int64_t i = 2; i < self.num_events; i++) {
    if (events[i].kind == FSDP_STEP_USE && events[i].unit == 1) {
      self.events[i].kind = FSDP_STEP_WORK;
    }
  }
  const fsdp_step_plan_report *report = plan_fixture_run(&self);
  /* The root once, b and c twice, a in forward; and once more by b's prefetch,
   * which does not know that a has no backward. */
  CHECK_I64(report->collectives[FSDP_COLLECTIVE_ALL_GATHER].num_launches, 7);
  CHECK_I64(report->collectives[FSDP_COLLECTIVE_REDUCE_SCATTER].num_launches,
            3);
  /* Backward has no work before b. */
  check_close(report->compute_seconds, 3 + 4);
  plan_fixture_fini(&self);
}

TEST(test_accumulation) {
  plan_fixture self;
  plan_fixture_init_tree(&self, PLAN_WORLD_SIZE);
  const int64_t whole = 2 * PLAN_NUMEL * 2;
  self.options.num_batches = 3;
  self.options.accumulation = FSDP_SYNC_NONE;
  const fsdp_step_plan_report *report = plan_fixture_run(&self);
  CHECK_I64(report->collectives[FSDP_COLLECTIVE_REDUCE_SCATTER].num_launches,
            4);
  CHECK_I64(report->collectives[FSDP_COLLECTIVE_ALL_GATHER].num_launches, 21);
  CHECK_I64(report->stats.arena.peak_nbytes, (1 + 2 + 4) * whole);
  check_close(report->compute_seconds, 27);

  self.options.accumulation = FSDP_SYNC_SHARD;
  report = plan_fixture_run(&self);
  CHECK_I64(report->collectives[FSDP_COLLECTIVE_REDUCE_SCATTER].num_launches,
            12);
  CHECK_I64(report->stats.arena.peak_nbytes, 4 * whole);
  CHECK_I64(report->stats.partial_grad_nbytes, 0); /* at the end */
  plan_fixture_fini(&self);
}

TEST(test_scratch) {
  plan_fixture self;
  plan_fixture_init_tree(&self, PLAN_WORLD_SIZE);
  self.options.wants_scratch = true;
  /* Of 4 ranks the other 3. */
  CHECK_I64(plan_fixture_run(&self)->stats.scratch_nbytes,
            2 * 2 * PLAN_NUMEL * 2 * 3 / 4);
  plan_fixture_fini(&self);
}

/* Offloaded: sharded gradients are on the host; the cast needs a stage. */
TEST(test_offload) {
  plan_fixture self;
  plan_fixture_init_tree(&self, PLAN_WORLD_SIZE);
  for (int i = 0; i < PLAN_MAX_UNITS; i++) self.units[i].offloads = true;
  const fsdp_step_plan_report *report = plan_fixture_run(&self);
  const int64_t shard = 2 * PLAN_NUMEL * 4 / PLAN_WORLD_SIZE;
  CHECK_I64(report->stats.grad_shard_nbytes, 4 * shard);
  CHECK_I64(report->at_peak[FSDP_COUNTED_GRAD_SHARDS], 0);
  /* What passes through the device lies in other ranks' slots. */
  CHECK_I64(report->stats.arena.peak_nbytes, 4 * 2 * PLAN_NUMEL * 2);
  plan_fixture_fini(&self);
}

TEST(test_hundred_thousand_ranks) {
  plan_fixture self;
  plan_fixture_init_tree(&self, 100000);
  self.options.shard_link.latency_seconds = 1;
  const fsdp_step_plan_report *report = plan_fixture_run(&self);
  /* 8,192 elements over 100,000 ranks: 1 each, the rest is padding. */
  CHECK_I64(report->stats.shard_nbytes, 4 * 4);
  const fsdp_collective_count *gathers =
      &report->collectives[FSDP_COLLECTIVE_ALL_GATHER];
  CHECK_I64(gathers->payload_nbytes, 7 * 2 * 100000);
  check_close(gathers->seconds, 7 * 17); /* 2^17 ranks and more */
  plan_fixture_fini(&self);
}

/* FSDP1's shapes; large units of an accelerator are aligned. */
TEST(test_alignment) {
  const fsdp_alignment flat = fsdp_alignment_choose(0, false, true, INT64_MAX);
  CHECK_I64(flat.itemsize, FSDP_ALIGNMENT_NBYTES);
  CHECK(!flat.params && !flat.shards);
  const fsdp_alignment orig = fsdp_alignment_choose(2, true, true, INT64_MAX);
  CHECK_I64(orig.itemsize, 2);
  CHECK(orig.params && !orig.shards);
  const fsdp_alignment small =
      fsdp_alignment_choose(2, false, false, FSDP_LARGE_UNIT_NBYTES - 1);
  CHECK(!small.params && !small.shards);
  const fsdp_alignment large =
      fsdp_alignment_choose(2, false, false, FSDP_LARGE_UNIT_NBYTES);
  CHECK(large.params && large.shards);
}

/* Two units' activations are there at once, not three. */
TEST(test_offload_of_activations) {
  plan_fixture self;
  plan_fixture_init_tree(&self, PLAN_WORLD_SIZE);
  for (int64_t i = 0; i < self.num_events; i++) {
    self.events[i].nbytes *= 1000; /* more than the blocks */
    self.events[i].peak_nbytes *= 1000;
  }
  const int64_t peak = plan_fixture_run(&self)->peak_nbytes;
  CHECK_I64(self.report.at_peak[FSDP_COUNTED_ACTIVATIONS], 3000000);
  self.options.offload_keep_last = 1;
  CHECK_I64(plan_fixture_run(&self)->peak_nbytes, peak); /* nothing may go */
  for (int64_t i = 0; i < self.num_events; i++) {
    self.events[i].offload_nbytes = self.events[i].nbytes;
  }
  const fsdp_step_plan_report *report = plan_fixture_run(&self);
  /* In the backward of b, when the gradients of c are there, whole
   * and sharded. */
  const int64_t shard = 2 * PLAN_NUMEL * 4 / PLAN_WORLD_SIZE;
  CHECK_I64(report->peak_nbytes, peak - 1000000 + shard + 2 * PLAN_NUMEL * 2);
  CHECK_I64(report->at_peak[FSDP_COUNTED_ACTIVATIONS], 2000000);
  CHECK_I64(report->at_peak[FSDP_COUNTED_HOST], FSDP_OFFLOAD_CHUNK_NBYTES);
  CHECK_I64(report->offload.peak_nbytes, 2000000);
  CHECK_I64(report->offload.held_nbytes, 0);
  CHECK_I64(report->offload.num_downloads, 2 * 3);
  CHECK_I64(report->offload.num_uploads, 2 * 3);
  check_close(report->stall_seconds, 0);
  self.options.copy_bytes_per_second = 1e6; /* as long as a forward */
  check_close(plan_fixture_run(&self)->stall_seconds, 0);
  /* 4 s: of both downloads a forward is hidden, of the uploads a backward. */
  self.options.copy_bytes_per_second = 250e3;
  check_close(plan_fixture_run(&self)->stall_seconds,
              2 * (4 - 1) + 2 * (4 - 2));
  self.options.offload_keep_last = 2;
  CHECK_I64(plan_fixture_run(&self)->offload.num_downloads, 3);
  plan_fixture_fini(&self);
}
