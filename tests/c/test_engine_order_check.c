/*
 * Tests of runtime/: the check that all ranks run their units in one order.
 */
#include "engine_failures.h"

/* What another rank is about to do; "": the same as this one. */
typedef struct other_ranks {
  const char *steps[4]; /* of each rank */
  int64_t num_exchanges;
  int64_t differs_at; /* exchange of the first difference; -1: none */
} other_ranks;

static void answer(void *context, int64_t rank, const void *mine,
                   int64_t nbytes, void *theirs) {
  other_ranks *others = context;
  const char *step = others->steps[rank];
  (void)mine;
  if (rank == 1) others->num_exchanges++; /* every exchange asks it once */
  if (others->differs_at < 0 || others->num_exchanges <= others->differs_at ||
      step == NULL) {
    return;
  }
  memset(theirs, 0, (size_t)nbytes);
  if (nbytes == 8) {
    *(char *)theirs = 1; /* another fingerprint */
  } else {
    snprintf(theirs, (size_t)nbytes, "%s", step);
  }
}

static void turn_on(void) {
  fsdp_engine_set_order_check(m.engine, true);
}

/* Before each unshard, each reduction and each end, 8 bytes. */
TEST(test_same_order_passes) {
  other_ranks others = {.differs_at = -1};
  model_start_tree(&m, NULL, 1);
  turn_on();
  recorder_set_answer(m.device, answer, &others);
  PLAY("clear; step; check_grads");
  CHECK_I64(others.num_exchanges, 3 + 2 + 2); /* unshards, reductions, ends */
  CHECK_TAPE_HAS("take_params root sharded; all_gather_bytes g0 8;");
  CHECK_TAPE_LACKS("all_gather_bytes g0 192;");
  PLAY("step");
  CHECK_I64(others.num_exchanges, 2 * (3 + 2 + 2));
  fsdp_engine_set_order_check(m.engine, false);
  PLAY("step");
  CHECK_I64(others.num_exchanges, 2 * (3 + 2 + 2));
}

/* Keeps the fingerprints that this rank sends. */
typedef struct sent {
  uint64_t prints[16];
  int64_t num;
} sent;

static void keep(void *context, int64_t rank, const void *mine, int64_t nbytes,
                 void *theirs) {
  sent *kept = context;
  (void)rank;
  (void)theirs;
  if (nbytes == 8 && kept->num < 16) {
    memcpy(&kept->prints[kept->num++], mine, 8);
  }
}

/* Runs `first`, then `second`, without backward. */
static sent run_in_order(int64_t first, int64_t second) {
  const int64_t order[] = {first, second};
  sent kept = {.num = 0};
  model_start_tree(&m, NULL, 2);
  turn_on();
  recorder_set_answer(m.device, keep, &kept);
  PLAY("enter root");
  for (int i = 0; i < 2; i++) {
    CHECK_OK(model_enter(&m, order[i], NULL));
    CHECK_OK(model_leave(&m, order[i], false, NULL));
  }
  PLAY("leave_eval root; reset"); /* starts anew */
  PLAY("enter root; leave_eval root");
  CHECK_I64(kept.num, 6);
  return kept;
}

/* Equal orders have equal fingerprints; others differ, and stay different. */
TEST(test_fingerprints) {
  const sent ab = run_in_order(1, 2);
  const sent again = run_in_order(1, 2);
  const sent ba = run_in_order(2, 1);
  CHECK(memcmp(ab.prints, again.prints, sizeof ab.prints) == 0);
  CHECK(ab.prints[0] == ba.prints[0]);
  CHECK(ab.prints[1] != ba.prints[1]);
  CHECK(ab.prints[2] != ba.prints[2]);
  CHECK(ab.prints[3] != ba.prints[3]); /* the end */
  CHECK(ab.prints[4] == ab.prints[0]);
}

/* A rank that gathers another unit: both say so. */
TEST(test_other_unit) {
  other_ranks others = {.differs_at = 1};
  fsdp_error error;
  others.steps[1] = "all_gather of unit 'b'";
  model_start_tree(&m, NULL, 2);
  turn_on();
  recorder_set_answer(m.device, answer, &others);
  PLAY("enter root");
  CHECK_FAILS(
      model_enter(&m, 1, &error), FSDP_INVALID_STATE, error.message,
      "Forward order differs across ranks: the ranks run their units in "
      "different orders, first in collective 1 (iteration 1): "
      "rank 0: all_gather of unit 'a'; "
      "rank 1: all_gather of unit 'b'. All ranks must run the same "
      "units in the same order in the first iteration");
  PLAY("state a SHARDED"); /* nothing was issued */
  PLAY("abandon root");
  others.differs_at = -1;
  failures_check_recovers();
}

/* Neighbours that agree are named together. */
TEST(test_many_ranks) {
  other_ranks others = {.differs_at = 0};
  model_options options = {0};
  fsdp_error error;
  options.world_size = 4;
  others.steps[2] = "reduce_scatter of unit 'x'";
  others.steps[3] = "reduce_scatter of unit 'x'";
  model_start_tree(&m, &options, 1);
  turn_on();
  recorder_set_answer(m.device, answer, &others);
  CHECK_FAILS(model_enter(&m, 0, &error), FSDP_INVALID_STATE, error.message,
              "..first in collective 0 (iteration 1): ranks 0-1: "
              "all_gather of unit 'root'; ranks 2-3: reduce_scatter of unit "
              "'x'. All");
}

/* A report that does not fit is cut, not the message's end. */
TEST(test_long_names) {
  char name[200];
  other_ranks others = {.differs_at = 0};
  model_options options = {0};
  fsdp_error error;
  memset(name, 'n', sizeof name);
  name[sizeof name - 1] = '\0';
  options.world_size = 4;
  others.steps[1] = name;
  others.steps[2] = "all_gather of unit 'b'";
  others.steps[3] = name;
  model_init(&m, &options);
  model_plan_simple(&m, name, 4);
  model_start(&m);
  turn_on();
  recorder_set_answer(m.device, answer, &others);
  CHECK_FAILS(model_enter(&m, 0, &error), FSDP_INVALID_STATE, error.message,
              "..rank 1: nnn");
}

/* A reduction that differs fails the unit. */
TEST(test_other_reduction) {
  other_ranks others = {.differs_at = 4};
  fsdp_error error;
  others.steps[1] = "reduce_scatter of unit 'root'";
  model_start_tree(&m, NULL, 1);
  turn_on();
  recorder_set_answer(m.device, answer, &others);
  PLAY("forward");
  CHECK_FAILS(model_backward(&m, &error), FSDP_INVALID_STATE, error.message,
              "..rank 0: reduce_scatter of unit 'a'; rank 1: reduce_scatter "
              "of unit 'root'. All");
  PLAY("state a FAILED");
  others.differs_at = -1;
  failures_check_recovers();
}

/* Alone, a rank has nobody to ask. */
TEST(test_one_rank) {
  model_start_tree(&m, WITH(.world_size = 1), 1);
  turn_on();
  PLAY("step");
  CHECK_TAPE_LACKS("all_gather_bytes");
}

TEST(test_every_call_can_fail) {
  const model_options options = {0};
  failures_every_call_of_steps(&options, turn_on, failures_train);
}

TEST(test_every_allocation_can_fail) {
  failures_every_allocation(NULL, turn_on, failures_train);
}
