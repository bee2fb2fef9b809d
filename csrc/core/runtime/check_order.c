/*
 * Note [Checking the order]
 * All ranks must issue their collectives in one order; where a branch of the
 * model, or a unit that only some ranks use, breaks that, they hang or read
 * each other's data. With the check on, every rank folds the name of its unit
 * and the operation into a running fingerprint before each collective, and the
 * ranks compare these 8 bytes. Where they differ, this is the first difference:
 * only then do they compare names, and every rank raises an error with all of
 * them.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "runtime/engine_priv.h"

enum { STEP_NBYTES = 160, REPORT_NBYTES = 400 };

/* How FSDP1's error begins, for programs that look for it. */
#define FSDP1_WORDS "Forward order differs across ranks: "

/* Whether all ranks sent the same bytes. `all` has room for one per rank. */
static fsdp_status compare(fsdp_unit *unit, const void *mine, size_t nbytes,
                           void *all, bool *is_same, fsdp_error *error) {
  const fsdp_device_ops *ops = &unit->engine->ops;
  const fsdp_group *group = &unit->options.shard_group;
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
static void describe(const char *steps, int64_t world_size, char *report) {
  size_t used = 0;
  for (int64_t rank = 0; rank < world_size; rank++) {
    const char *step = steps + (size_t)rank * STEP_NBYTES;
    int64_t last = rank;
    while (last + 1 < world_size &&
           strcmp(step, steps + (size_t)(last + 1) * STEP_NBYTES) == 0) {
      last++;
    }
    const int written = last > rank
                            ? snprintf(report + used, REPORT_NBYTES - used,
                                       "%sranks %" PRId64 "-%" PRId64 ": %s",
                                       used > 0 ? "; " : "", rank, last, step)
                            : snprintf(report + used, REPORT_NBYTES - used,
                                       "%srank %" PRId64 ": %s",
                                       used > 0 ? "; " : "", rank, step);
    if (written < 0 || used + (size_t)written >= REPORT_NBYTES) return;
    used += (size_t)written;
    rank = last;
  }
}

static fsdp_status check_next(fsdp_unit *unit, const char *operation,
                              fsdp_error *error) {
  fsdp_engine *engine = unit->engine;
  const size_t world_size = (size_t)unit->options.shard_group.world_size;
  fsdp_status status = FSDP_OK;
  char mine[STEP_NBYTES] = {0};
  char report[REPORT_NBYTES] = {0};
  char *steps = NULL;
  bool is_same = true;

  engine->order_fingerprint = fsdp_order_fold(
      fsdp_order_fold(engine->order_fingerprint, operation), unit->name);
  engine->num_order_checks++;
  steps = fsdp_calloc(world_size, STEP_NBYTES);
  if (steps == NULL) {
    return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY,
                     "unit '%s': out of host memory for checking the order",
                     unit->name);
  }
  FSDP_TRY(compare(unit, &engine->order_fingerprint,
                   sizeof engine->order_fingerprint, steps, &is_same, error));
  if (is_same) goto done;
  (void)snprintf(mine, sizeof mine, "%s of unit '%.100s'", operation,
                 unit->name);
  FSDP_TRY(compare(unit, mine, sizeof mine, steps, &is_same, error));
  describe(steps, (int64_t)world_size, report);
  status = FSDP_FAIL(
      error, FSDP_INVALID_STATE,
      "%sthe ranks run their units in different orders, first in collective "
      "%" PRId64 " (iteration %" PRId64
      "): %s. All ranks must run the same units in the same order",
      engine->in_backward ? "" : FSDP1_WORDS, engine->num_order_checks - 1,
      engine->num_iterations, report);
done:
  fsdp_free(steps);
  return status;
}

fsdp_status fsdp_unit_priv_check_order(fsdp_unit *unit, const char *operation,
                                       fsdp_error *error) {
  return unit->engine->checks_order && unit->options.shard_group.world_size > 1
             ? check_next(unit, operation, error)
             : FSDP_OK;
}

void fsdp_engine_set_order_check(fsdp_engine *engine, bool is_on) {
  engine->checks_order = is_on;
}

#undef FSDP1_WORDS
