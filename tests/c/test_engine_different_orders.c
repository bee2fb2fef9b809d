/*
 * Tests of runtime/: ranks whose orders differ serve each other; see Note
 * [Ranks that differ].
 */
#include "engine_failures.h"

/* What check_order.c sends. */
typedef struct sent_step {
  char text[160];
  uint64_t history;
  int64_t unit;
  int32_t op; /* 0: gather, 1: reduction, 2: end */
  int32_t is_full;
  int32_t in_backward;
  int32_t obstacle;
} sent_step;

/* What the other rank wants in each comparison: "." the same as this one, "g2"
 * to gather unit 2, "r2" to reduce it, "e" to end. Then the same. */
static struct {
  const char *wants;
  const char *now;   /* in `wants`, while they differ */
  const char *kinds; /* of its gradients at the end of backward; NULL: ours */
} other;

static void answer(void *context, int64_t rank, const void *mine,
                   int64_t nbytes, void *theirs) {
  (void)context;
  (void)rank;
  (void)mine;
  if (nbytes == 8) {
    other.now = other.wants;
    if (*other.wants == '\0') return;
    other.wants += *other.now == 'g' || *other.now == 'r' ? 2 : 1;
    if (*other.now != '.') *(char *)theirs = (char)(*(char *)theirs + 1);
  } else if (nbytes == (int64_t)sizeof(sent_step)) {
    sent_step *step = theirs;
    step->op = *other.now == 'g' ? 0 : *other.now == 'r' ? 1 : 2;
    step->unit = step->op == 2 ? -1 : other.now[1] - '0';
    step->is_full = 0;
    snprintf(step->text, sizeof step->text, "something else");
  } else if (other.kinds != NULL) {
    CHECK_I64(nbytes, (int64_t)strlen(other.kinds));
    memcpy(theirs, other.kinds, (size_t)nbytes);
  }
}

static void want(const char *wants, const char *kinds) {
  other.wants = wants;
  other.kinds = kinds;
}

static void turn_on(void) {
  want("", NULL);
  fsdp_engine_set_order_check(m.engine, true);
  recorder_set_answer(m.device, answer, NULL);
}

static void open_tree(const model_options *options) {
  model_start_tree(&m, options, 2);
  turn_on();
  PLAY("step; step; zero_grad; clear");
}

/* This rank skips unit a, the other skips b: both units are gathered, and
 * reduced at the end, by both. */
TEST(test_other_units) {
  open_tree(NULL);
  want(".g1.g1.", NULL);
  PLAY("enter root; enter b");
  CHECK_TAPE_HAS("take_params a sharded");
  CHECK_TAPE_HAS("all_gather unshard g0 8 f32");
  PLAY("state a SHARDED; leave b; leave root; num_reduces 6; clear");
  /* b is gathered, and reduced when the other wants to reduce a; root follows
   * it. Then the other is at the end with a. */
  want(".r1.e", "rRr");
  PLAY("pre_backward b; grads b; num_reduces 6");
  PLAY("pre_backward root; grads root; num_reduces 7; finish");
  PLAY("num_reduces 9; has_grads a; has_grads b; check_grads");
  CHECK_TAPE_HAS("all_gather_bytes g0 3;");
  PLAY("zero_grad; step; check_grads");
}

/* A unit whose block is held: it stays as it is. */
TEST(test_held_units_are_gathered) {
  open_tree(WITH(.keeps_after_forward = true));
  PLAY("enter root; enter a; leave a; state a UNSHARDED");
  want("g1g0.", NULL);
  PLAY("enter b; state a UNSHARDED; view a unsharded; state b UNSHARDED");
  PLAY("check_races");
  PLAY("leave b; leave root; state a HIDDEN");
  want("g1.", NULL);
  PLAY("backward; check_grads");
}

/* A unit that this rank has frozen: it takes part. */
TEST(test_frozen_here) {
  model_open(NULL, "root 4; a 8 frozen");
  turn_on();
  PLAY("step; step; zero_grad; forward");
  want("", NULL);
  PLAY("pre_backward root; grads root");
  want("e", "rR");
  const int64_t before = model_stats(&m).num_reduces;
  PLAY("finish");
  CHECK_I64(model_stats(&m).num_reduces, before + 1);
}

static void check_refused(const char *wants, const char *kinds,
                          const char *reason) {
  fsdp_error error;
  PLAY("forward");
  want(wants, kinds);
  CHECK_FAILS(model_backward(&m, &error), FSDP_INVALID_STATE, error.message,
              reason);
  CHECK_I64(error.remedy, FSDP_REMEDY_SYNC_ALIKE);
  PLAY("reset");
  want("", NULL);
}

/* The ranks that hold gradients of a unit must do the same with them. */
TEST(test_other_gradients) {
  open_tree(NULL);
  /* Gathers of b and a, and three reductions, come before the end. */
  check_refused(".....e", "rSr",
                "..different things with the gradients of unit 'a': all "
                "ranks that run it must train the same parameters");
  PLAY("step; zero_grad; step; check_grads");
}

/* Only shards of one group are served. */
TEST(test_replicas_are_refused) {
  fsdp_error error;
  open_tree(WITH(.num_replicas = 2));
  PLAY("enter root");
  want("g2", NULL);
  CHECK_FAILS(model_enter(&m, 1, &error), FSDP_INVALID_STATE, error.message,
              "..must run the same units in the same order, since some units "
              "have shards and replicas, parts, extensions or another process "
              "group");
  want("", NULL);
  PLAY("abandon root");
}

/* Steps in which the other rank wants something else, after a common one. */
static fsdp_status train(fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  want("", NULL);
  FSDP_TRY(model_try("sync none; step", error));
  want(".g0g3.", NULL);
  FSDP_TRY(model_try("step", error));
  want("......ee", "rrrrRRr");
  FSDP_TRY(model_try("sync reduce; step", error));
done:
  want("", NULL);
  return status;
}

TEST(test_every_call_can_fail) {
  failures_every_call_of_steps(NULL, turn_on, train);
}

TEST(test_every_allocation_can_fail) {
  failures_every_allocation(NULL, turn_on, train);
}
