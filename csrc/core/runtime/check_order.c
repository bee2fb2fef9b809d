/*
 * Note [Checking the order]
 * All ranks must issue their collectives in one order; where a branch of the
 * model, or a unit that only some ranks use, breaks that, they hang or read
 * each other's data. With the check on, every rank folds the name of its unit
 * and the operation into a running fingerprint of what was issued, and the
 * ranks compare these 8 bytes before each collective. Where they differ, every
 * rank sends what it wants. Then either all raise an error with what each of
 * them wants, or they go on together (Note [Ranks that differ]).
 *
 * Note [Ranks that differ]
 * From the second iteration on, ranks whose orders differ serve each other:
 *
 *   a gather     all ranks issue it; a rank that does not want the unit lets
 *                the result go at once
 *   a reduction  is put off to the end of backward, unless all ranks want it
 *   an end       of forward or backward: the rank goes on serving until all
 *                have come there
 *
 * At the end of backward the ranks exchange which reductions they put off, and
 * issue all of them in one order; a rank that has no gradient of a unit
 * contributes zeros (end_phase.c). No rank waits for a reduction that another
 * rank comes to later, so they cannot wait for each other in a circle.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "runtime/engine_priv.h"

enum { STEP_NBYTES = 160, REPORT_NBYTES = 400 };

/* How FSDP1's error begins, for programs that look for it. */
#define FSDP1_WORDS "Forward order differs across ranks: "

/* Why ranks cannot serve each other. */
typedef enum obstacle {
  OBSTACLE_NONE = 0,
  OBSTACLE_FIRST_ITERATION,
  OBSTACLE_UNITS,
  OBSTACLE_PHASE,
  OBSTACLE_HISTORY,
  OBSTACLE_FROZEN
} obstacle;

static const char *const obstacle_texts[] = {
    [OBSTACLE_NONE] = "",
    [OBSTACLE_FIRST_ITERATION] = " in the first iteration",
    [OBSTACLE_UNITS] =
        (", since some units have shards and replicas, parts, extensions or "
         "another process group"),
    [OBSTACLE_PHASE] = ": some ranks are in backward, others are not",
    [OBSTACLE_HISTORY] = ": some ranks left an earlier step by an exception",
    [OBSTACLE_FROZEN] = " and train the same parameters",
};

/* What a rank wants; the same size on all ranks, without padding. */
typedef struct step {
  char text[STEP_NBYTES];
  uint64_t history;
  int64_t unit; /* its index; -1: none */
  int32_t op;
  int32_t is_full;
  int32_t is_backward;
  int32_t obstacle;
} step;

/* Whether all ranks sent the same bytes. `all` has room for one per rank. */
static fsdp_status compare(fsdp_engine *engine, const fsdp_group *group,
                           const void *mine, size_t nbytes, void *all,
                           bool *is_same, fsdp_error *error) {
  const fsdp_device_ops *ops = &engine->ops;
  fsdp_status status = FSDP_OK;

  FSDP_TRY(ops->all_gather_bytes(ops->context, group, mine, (int64_t)nbytes,
                                 all, error));
  *is_same = true;
  for (int64_t rank = 0; rank < group->world_size; rank++) {
    if (memcmp((char *)all + (size_t)rank * nbytes, mine, nbytes) != 0) {
      *is_same = false;
    }
  }
done:
  return status;
}

/* Lists the ranks' steps, equal neighbours together, as far as they fit. */
static void describe(const step *steps, int64_t world_size, char *report) {
  size_t used = 0;
  for (int64_t rank = 0; rank < world_size; rank++) {
    const char *text = steps[rank].text;
    int64_t last = rank;
    while (last + 1 < world_size && strcmp(text, steps[last + 1].text) == 0) {
      last++;
    }
    const int written = last > rank
                            ? snprintf(report + used, REPORT_NBYTES - used,
                                       "%sranks %" PRId64 "-%" PRId64 ": %s",
                                       used > 0 ? "; " : "", rank, last, text)
                            : snprintf(report + used, REPORT_NBYTES - used,
                                       "%srank %" PRId64 ": %s",
                                       used > 0 ? "; " : "", rank, text);
    if (written < 0 || used + (size_t)written >= REPORT_NBYTES) return;
    used += (size_t)written;
    rank = last;
  }
}

static const char *op_name(const fsdp_engine *engine, fsdp_priv_op op) {
  return op == FSDP_OP_GATHER   ? "all_gather"
         : op == FSDP_OP_REDUCE ? "reduce_scatter"
         : engine->in_backward  ? "end of backward"
                                : "end of forward";
}

static const char *unit_name(const fsdp_unit *unit) {
  return unit == NULL ? "" : unit->name;
}

static uint64_t fold(const fsdp_engine *engine, const fsdp_priv_next *next) {
  uint64_t print = engine->order_fingerprint;
  print = fsdp_order_fold(print, op_name(engine, next->op));
  print = fsdp_order_fold(print, unit_name(next->unit));
  return fsdp_order_fold(print, next->is_full ? "full" : next->detail);
}

static step describe_own(const fsdp_engine *engine,
                         const fsdp_priv_next *next) {
  step mine;
  memset(&mine, 0, sizeof mine);
  mine.history = engine->order_fingerprint;
  mine.unit = next->unit == NULL ? -1 : next->unit->index;
  mine.op = (int32_t)next->op;
  mine.is_full = next->is_full;
  mine.is_backward = engine->in_backward;
  mine.obstacle = engine->num_iterations <= 1 ? OBSTACLE_FIRST_ITERATION
                  : !fsdp_engine_priv_can_serve(engine) ? OBSTACLE_UNITS
                                                        : OBSTACLE_NONE;
  (void)snprintf(mine.text, sizeof mine.text,
                 next->unit == NULL ? "%s" : "%s of unit '%.100s'",
                 op_name(engine, next->op), unit_name(next->unit));
  return mine;
}

static bool do_the_same(const step *steps, int64_t world_size) {
  for (int64_t rank = 1; rank < world_size; rank++) {
    if (strcmp(steps[rank].text, steps[0].text) != 0) return false;
  }
  return true;
}

/* The same on all ranks. */
static obstacle find_obstacle(const step *steps, int64_t world_size) {
  for (int64_t rank = 0; rank < world_size; rank++) {
    if (steps[rank].obstacle != OBSTACLE_NONE) {
      return do_the_same(steps, world_size) ? OBSTACLE_FROZEN
                                            : (obstacle)steps[rank].obstacle;
    }
    if (steps[rank].is_backward != steps[0].is_backward) return OBSTACLE_PHASE;
    if (steps[rank].history != steps[0].history) return OBSTACLE_HISTORY;
  }
  return OBSTACLE_NONE;
}

/* The gather that is next, as ranks run units: in backward from the last one.
 * NULL: no rank wants one. */
static const step *next_gather(const step *steps, int64_t world_size) {
  const step *found = NULL;
  for (int64_t rank = 0; rank < world_size; rank++) {
    const step *each = &steps[rank];
    if (each->op != FSDP_OP_GATHER) continue;
    if (found == NULL || (each->is_backward ? each->unit > found->unit
                                            : each->unit < found->unit)) {
      found = each;
    }
  }
  return found;
}

/* What this rank does where the ranks want different things. */
static fsdp_priv_turn choose(fsdp_engine *engine, const step *steps,
                             int64_t world_size, const step *mine) {
  const step *gather = next_gather(steps, world_size);
  bool any_reduce = false;
  for (int64_t rank = 0; rank < world_size; rank++) {
    any_reduce = any_reduce || steps[rank].op == FSDP_OP_REDUCE;
  }
  if (any_reduce) { /* first: those ranks may come to where the others are */
    return (fsdp_priv_turn){.kind = mine->op == FSDP_OP_REDUCE
                                        ? FSDP_TURN_PUT_OFF
                                        : FSDP_TURN_AGAIN};
  }
  if (gather == NULL) {
    engine->order_fingerprint =
        fsdp_order_fold(engine->order_fingerprint, "united");
    return (fsdp_priv_turn){.kind = FSDP_TURN_UNITE};
  }
  fsdp_unit *unit = engine->units[gather->unit];
  const fsdp_priv_next issued = {.op = FSDP_OP_GATHER,
                                 .unit = unit,
                                 .is_full = gather->is_full != 0,
                                 .detail = ""};
  engine->order_fingerprint = fold(engine, &issued);
  if (mine->op == FSDP_OP_GATHER && mine->unit == gather->unit &&
      mine->is_full == gather->is_full) {
    return (fsdp_priv_turn){.kind = FSDP_TURN_GO};
  }
  return (fsdp_priv_turn){
      .kind = FSDP_TURN_SERVE, .unit = unit, .is_full = issued.is_full};
}

fsdp_status fsdp_engine_priv_compare_next(fsdp_engine *engine,
                                          const fsdp_priv_next *next,
                                          fsdp_priv_turn *turn,
                                          fsdp_error *error) {
  const fsdp_unit *unit = next->unit == NULL ? engine->units[0] : next->unit;
  const fsdp_group *group = fsdp_unit_priv_checked_group(unit);
  const uint64_t print = fold(engine, next);
  const step mine = describe_own(engine, next);
  fsdp_status status = FSDP_OK;
  char report[REPORT_NBYTES] = {0};
  bool is_same = true;

  engine->num_order_checks++;
  step *steps = fsdp_calloc((size_t)group->world_size, sizeof *steps);
  if (steps == NULL) {
    return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY,
                     "unit '%s': out of host memory for checking the order",
                     unit->name);
  }
  FSDP_TRY(
      compare(engine, group, &print, sizeof print, steps, &is_same, error));
  if (is_same) {
    engine->order_fingerprint = print;
    *turn = (fsdp_priv_turn){.kind = FSDP_TURN_GO};
    goto done;
  }
  FSDP_TRY(compare(engine, group, &mine, sizeof mine, steps, &is_same, error));
  const obstacle found = find_obstacle(steps, group->world_size);
  if (found == OBSTACLE_NONE) {
    *turn = choose(engine, steps, group->world_size, &mine);
    goto done;
  }
  describe(steps, group->world_size, report);
  status = FSDP_FAIL(
      error, FSDP_INVALID_STATE,
      "%sthe ranks run their units in different orders, first in collective "
      "%" PRId64 " (iteration %" PRId64
      "): %s. All ranks must run the same units in the same order%s",
      engine->in_backward ? "" : FSDP1_WORDS, engine->num_order_checks - 1,
      engine->num_iterations, report, obstacle_texts[found]);
done:
  fsdp_free(steps);
  return status;
}

bool fsdp_engine_priv_can_serve(const fsdp_engine *engine) {
  for (size_t i = 0; i < engine->num_units; i++) {
    const fsdp_unit *unit = engine->units[i];
    const fsdp_unit_options *options = &unit->options;
    const bool is_hybrid = options->shard_group.world_size > 1 &&
                           options->replica_group.world_size > 1;
    const fsdp_group *group = fsdp_unit_priv_checked_group(unit);
    if (is_hybrid || group->world_size == 1 ||
        group->transport !=
            fsdp_unit_priv_checked_group(engine->units[0])->transport ||
        options->part_group.world_size > 1 || unit->is_extended) {
      return false;
    }
  }
  return true;
}

void fsdp_engine_set_order_check(fsdp_engine *engine, bool is_on) {
  engine->checks_order = is_on;
}

#undef FSDP1_WORDS
