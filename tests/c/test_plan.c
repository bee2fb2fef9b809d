/*
 * Tests of plan/: the engine over the counting port.
 */
#include "base/dtypes.h"
#include "check.h"
#include "layout/alignment.h"
#include "plan_fixture.h"

static const fsdp_dtype FP32 = {FSDP_DTYPE_FLOAT32, 4};

static const fsdp_collective_count *const gathers =
    &p.report.collectives[FSDP_COLLECTIVE_ALL_GATHER];
static const fsdp_collective_count *const reduces =
    &p.report.collectives[FSDP_COLLECTIVE_REDUCE_SCATTER];

static void check_close(double actual, double expected) {
  const double difference = actual - expected;
  if (!CHECK(difference < 1e-6 && difference > -1e-6)) {
    printf("  is %.9f, expected %.9f\n", actual, expected);
  }
}

TEST(test_memory_and_bytes) {
  plan_init_tree(PLAN_WORLD_SIZE);
  const fsdp_step_plan_report *report = plan_run();
  const int64_t whole = 2 * PLAN_NUMEL * 2; /* of a unit in bf16 */
  const int64_t shard = 2 * PLAN_NUMEL * 4 / PLAN_WORLD_SIZE;

  CHECK_I64(report->stats.shard_nbytes, 4 * shard);
  CHECK_I64(report->stats.grad_shard_nbytes, 4 * shard);
  /* The root's, two for parameters and one for gradients. */
  CHECK_I64(report->stats.arena.peak_nbytes, 4 * whole);
  CHECK_I64(report->stats.arena.nbytes, 0);
  CHECK_I64(report->num_step_allocs, 7 + 4);
  CHECK_I64(report->stats.scratch_nbytes, 0);

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
}

TEST(test_busiest_moment) {
  plan_init_tree(PLAN_WORLD_SIZE);
  const fsdp_step_plan_report *report = plan_run();
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
}

TEST(test_activations) {
  plan_init_tree(PLAN_WORLD_SIZE);
  const int64_t large = (int64_t)1 << 30;
  for (int64_t i = 0; i < p.num_events; i++) {
    if (p.events[i].kind != FSDP_STEP_WORK) continue;
    p.events[i].nbytes = large;
    p.events[i].peak_nbytes = large;
  }
  const fsdp_step_plan_report *report = plan_run();
  CHECK_I64(report->at_peak[FSDP_COUNTED_ACTIVATIONS], 3 * large);
}

/* What is there in the middle of an event counts where it is: in c's forward
 * little else is there, in c's backward all activations. */
TEST(test_the_most_of_an_event) {
  plan_init_tree(PLAN_WORLD_SIZE);
  const int64_t large = (int64_t)1 << 30;
  plan_write_events();
  int64_t at = p.options.num_forward;
  while (p.forward[--at].kind != FSDP_STEP_WORK) continue;
  p.forward[at].peak_nbytes = large;
  CHECK_I64(plan_run_as_written()->at_peak[FSDP_COUNTED_ACTIVATIONS],
            2000 + large);
  for (at = 0; p.backward[at].kind != FSDP_STEP_WORK;) at++;
  p.backward[at].peak_nbytes = large;
  CHECK_I64(plan_run_as_written()->at_peak[FSDP_COUNTED_ACTIVATIONS],
            3000 + large);
}

/* A gradient is an activation until its parameter gets it: then it is counted
 * as one that waits to be packed, never as both. */
TEST(test_gradients_among_activations) {
  plan_init_tree(PLAN_WORLD_SIZE);
  const int64_t peak = plan_run()->peak_nbytes;
  const int64_t grad = PLAN_NUMEL * 2;
  int64_t num_uses = 0;
  for (int64_t i = 0; i < p.options.num_backward; i++) {
    fsdp_step_event *event = &p.backward[i];
    if (event->kind == FSDP_STEP_WORK) {
      event->nbytes += 2 * grad;
      event->peak_nbytes = 2 * grad;
    } else if (event->kind == FSDP_STEP_USE && event->unit != 0) {
      event->nbytes = -grad;
      num_uses++;
    }
  }
  CHECK_I64(num_uses, 6);
  CHECK_I64(plan_run_as_written()->peak_nbytes, peak + 1000);
}

TEST(test_time_without_communication) {
  plan_init_tree(PLAN_WORLD_SIZE);
  const fsdp_step_plan_report *report = plan_run();
  check_close(report->compute_seconds, 9);
  check_close(report->step_seconds, 9);
  check_close(report->stall_seconds, 0);
}

/* Every launch takes 0.25 s a hop, and 4 ranks have 2 hops. */
TEST(test_exposed_communication) {
  plan_init_tree(PLAN_WORLD_SIZE);
  p.options.shard_link.latency_seconds = 0.25;
  const fsdp_step_plan_report *report = plan_run();
  check_close(gathers->seconds, 3.5);
  check_close(reduces->seconds, 2);
  check_close(report->compute_seconds, 9);
  check_close(report->step_seconds, 9 + report->stall_seconds);
  /* Forward has no prefetch: the host issues a child's gather when it comes to
   * the child, without waiting; so b's and c's hide behind compute. The root's
   * and a's do not: nothing runs before. Nor does c's in backward, whose memory
   * is there when forward has ended. At the end a's and the root's reductions
   * follow the compute: the root's gradients wait for a's. */
  check_close(p.unit_seconds[0], 0.5 + 0.5);
  check_close(p.unit_seconds[1], 0.5);
  check_close(p.unit_seconds[2], 0);
  check_close(p.unit_seconds[3], 0.5);
  check_close(report->stall_seconds, 0.5 + 0.5 + 0.5 + 1);
}

TEST(test_bandwidth) {
  plan_init();
  plan_add_unit("root", false, PLAN_WORLD_SIZE);
  plan_run_unit(0, 0);
  const double wire = 2 * PLAN_NUMEL * 2 / 4.0 * 3;
  p.options.shard_link.bytes_per_second = wire; /* a second a launch */
  const fsdp_step_plan_report *report = plan_run();
  /* One gather, which nothing hides; one reduction, likewise. */
  check_close(report->step_seconds, 1 + 1 + 2 + 1);
  check_close(report->stall_seconds, 2);
}

/* 2 hosts of 2 ranks: half of the payload on each link, and a hop each. */
TEST(test_hosts) {
  plan_init();
  plan_add_unit("root", false, PLAN_WORLD_SIZE);
  plan_run_unit(0, 0);
  const double payload = 2 * PLAN_NUMEL * 2;
  p.options.shard_link = (fsdp_link){payload / 2, 0.25};
  p.options.host_link = (fsdp_link){payload / 4, 0.5};
  p.options.num_local = 2;
  check_close(plan_run()->step_seconds, 3.75 + 1 + 2 + 3.75);
  p.options.num_local = 4; /* all on one host */
  check_close(plan_run()->step_seconds, 2 + 1 + 2 + 2);
  p.options.num_local = 3; /* flat: three ranks' ring over a host's link */
  check_close(plan_run()->step_seconds, 10 + 1 + 2 + 10);
  p.options.num_local = -1;
  PLAN_REFUSED("..-1 ranks of a host");
  p.options.num_local = 2;
  p.options.host_link.bytes_per_second = 0;
  PLAN_REFUSED("..hosts' group");
}

TEST(test_replicas) {
  plan_init_tree(2);
  for (int i = 0; i < PLAN_MAX_UNITS; i++) p.units[i].num_replicas = 8;
  p.options.replica_link.latency_seconds = 0.125;
  const fsdp_step_plan_report *report = plan_run();
  const fsdp_collective_count *sums =
      &report->collectives[FSDP_COLLECTIVE_ALL_REDUCE];
  const int64_t slot = PLAN_NUMEL * 2;
  CHECK_I64(sums->num_launches, 4);
  CHECK_I64(sums->payload_nbytes, 4 * slot);
  CHECK_I64(sums->wire_nbytes, 4 * 2 * (slot - slot / 8));
  check_close(sums->seconds, 4 * 3 * 0.125);
  CHECK_I64(reduces->num_launches, 4);
}

/* One rank a shard group, in fp32: parameters need no block at all, and one
 * unit's gradients after the other. */
TEST(test_one_rank) {
  plan_init_tree(1);
  for (int i = 0; i < PLAN_MAX_UNITS; i++) {
    p.segments[i][0].param_dtype = FP32;
    p.segments[i][0].reduce_dtype = FP32;
  }
  const fsdp_step_plan_report *report = plan_run();
  for (int i = 0; i < FSDP_NUM_COLLECTIVES; i++) {
    CHECK_I64(report->collectives[i].num_launches, 0);
  }
  CHECK_I64(report->stats.arena.peak_nbytes, 2 * PLAN_NUMEL * 4);
}

/* With a frozen segment: no gradient memory, one more gather call; the unit
 * that backward leaves by its inputs is reduced there, not at the end. */
TEST(test_frozen) {
  plan_init();
  plan_add_unit("root", false, PLAN_WORLD_SIZE);
  plan_add_unit("a", true, PLAN_WORLD_SIZE);
  plan_add_event(FSDP_STEP_ENTER, 0, 0);
  plan_add_event(FSDP_STEP_USE, 0, 0);
  plan_run_unit(1, 0);
  plan_add_event(FSDP_STEP_USE, 0, 1);
  plan_add_event(FSDP_STEP_LEAVE, 0, 0);
  const fsdp_step_plan_report *report = plan_run();
  CHECK_I64(report->stats.shard_nbytes,
            2 * (2 * PLAN_NUMEL * 4 / PLAN_WORLD_SIZE));
  CHECK_I64(report->stats.grad_shard_nbytes,
            3 * (PLAN_NUMEL * 4 / PLAN_WORLD_SIZE));
  CHECK_I64(gathers->num_launches, 3);
  CHECK_I64(gathers->num_calls, 5);
  CHECK_I64(reduces->num_launches, 2);
}

/* Nothing that requires grad before a: it keeps nothing for backward, and has
 * none. */
TEST(test_frozen_beginning) {
  plan_init_tree(PLAN_WORLD_SIZE);
  const fsdp_step_event *events = p.events;
  CHECK_I64(events[1].kind, FSDP_STEP_USE);
  p.events[1].kind = FSDP_STEP_WORK; /* the root's first is unused */
  for (int64_t i = 2; i < p.num_events; i++) {
    if (events[i].kind == FSDP_STEP_USE && events[i].unit == 1) {
      p.events[i].kind = FSDP_STEP_WORK;
    }
  }
  const fsdp_step_plan_report *report = plan_run();
  /* The root once, b and c twice, a in forward; and once more by b's prefetch,
   * which does not know that a has no backward. */
  CHECK_I64(gathers->num_launches, 7);
  CHECK_I64(reduces->num_launches, 3);
  /* Backward has no work before b. */
  check_close(report->compute_seconds, 3 + 4);
}

TEST(test_accumulation) {
  plan_init_tree(PLAN_WORLD_SIZE);
  const int64_t whole = 2 * PLAN_NUMEL * 2;
  p.options.num_batches = 3;
  p.options.accumulation = FSDP_SYNC_NONE;
  const fsdp_step_plan_report *report = plan_run();
  CHECK_I64(reduces->num_launches, 4);
  CHECK_I64(gathers->num_launches, 21);
  CHECK_I64(report->stats.arena.peak_nbytes, (1 + 2 + 4) * whole);
  check_close(report->compute_seconds, 27);

  p.options.accumulation = FSDP_SYNC_SHARD;
  report = plan_run();
  CHECK_I64(reduces->num_launches, 12);
  CHECK_I64(report->stats.arena.peak_nbytes, 4 * whole);
  CHECK_I64(report->stats.partial_grad_nbytes, 0); /* at the end */
}

TEST(test_scratch) {
  plan_init_tree(PLAN_WORLD_SIZE);
  p.options.wants_scratch = true;
  /* Of 4 ranks the other 3. */
  CHECK_I64(plan_run()->stats.scratch_nbytes, 2 * 2 * PLAN_NUMEL * 2 * 3 / 4);
}

/* Offloaded: sharded gradients are on the host; the cast needs a stage. */
TEST(test_offload) {
  plan_init_tree(PLAN_WORLD_SIZE);
  for (int i = 0; i < PLAN_MAX_UNITS; i++) p.units[i].offloads = true;
  const fsdp_step_plan_report *report = plan_run();
  const int64_t shard = 2 * PLAN_NUMEL * 4 / PLAN_WORLD_SIZE;
  CHECK_I64(report->stats.grad_shard_nbytes, 4 * shard);
  CHECK_I64(report->at_peak[FSDP_COUNTED_GRAD_SHARDS], 0);
  /* What passes through the device lies in other ranks' slots. */
  CHECK_I64(report->stats.arena.peak_nbytes, 4 * 2 * PLAN_NUMEL * 2);
}

TEST(test_hundred_thousand_ranks) {
  plan_init_tree(100000);
  p.options.shard_link.latency_seconds = 1;
  const fsdp_step_plan_report *report = plan_run();
  /* 8,192 elements over 100,000 ranks: 1 each, the rest is padding. */
  CHECK_I64(report->stats.shard_nbytes, 4 * 4);
  CHECK_I64(gathers->payload_nbytes, 7 * 2 * 100000);
  check_close(gathers->seconds, 7 * 17); /* 2^17 ranks and more */
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
  plan_init_tree(PLAN_WORLD_SIZE);
  for (int64_t i = 0; i < p.num_events; i++) {
    p.events[i].nbytes *= 1000; /* more than the blocks */
    p.events[i].peak_nbytes *= 1000;
  }
  const int64_t peak = plan_run()->peak_nbytes;
  CHECK_I64(p.report.at_peak[FSDP_COUNTED_ACTIVATIONS], 3000000);
  p.options.offload_keep_last = 1;
  CHECK_I64(plan_run()->peak_nbytes, peak); /* nothing may go */
  for (int64_t i = 0; i < p.num_events; i++) {
    p.events[i].offload_nbytes = p.events[i].nbytes;
  }
  const fsdp_step_plan_report *report = plan_run();
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
  p.options.copy_bytes_per_second = 1e6; /* as long as a forward */
  check_close(plan_run()->stall_seconds, 0);
  /* 4 s: of both downloads a forward is hidden, of the uploads a backward. */
  p.options.copy_bytes_per_second = 250e3;
  check_close(plan_run()->stall_seconds, 2 * (4 - 1) + 2 * (4 - 2));
  p.options.offload_keep_last = 2;
  CHECK_I64(plan_run()->offload.num_downloads, 3);
}
