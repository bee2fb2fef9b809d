/*
 * Reduce: when a unit's complete gradient is reduced.
 *
 * Note [Order of reductions]
 * All ranks must issue their collectives in one order, also where gradients
 * become ready in another. The order of the last backward is recorded. In the
 * next one a unit that stands in the record waits until every unit before it
 * that ran forward has been reduced; a unit that does not stand there, or
 * whose turn is over, is reduced as soon as it is ready.
 */
#include "base/alloc.h"
#include "runtime/engine_priv.h"

static fsdp_status issue_reduce(fsdp_unit *unit, fsdp_error *error) {
  fsdp_engine *engine = unit->engine;
  fsdp_status status = FSDP_OK;
  FSDP_LOCAL_ERROR(local);

  const fsdp_priv_span span =
      fsdp_engine_priv_begin(engine, FSDP_TIMELINE_REDUCE);
  unit->step.is_reduce_ready = false;
  if (!fsdp_grow((void **)&engine->issued_reduces, &engine->issued_capacity,
                 engine->num_issued_reduces + 1,
                 sizeof *engine->issued_reduces)) {
    status = FSDP_FAIL(&local, FSDP_OUT_OF_MEMORY,
                       "unit '%s': out of host memory for the order of "
                       "reductions",
                       unit->name);
    goto done;
  }
  FSDP_TRY(fsdp_unit_priv_enqueue_reduce(unit, &local));
  if (fsdp_engine_priv_is_host(engine)) {
    FSDP_TRY(fsdp_engine_priv_wait_reduces(engine, &local));
    FSDP_TRY(fsdp_unit_priv_end_reduce(unit, &local));
  }
  FSDP_TRY(fsdp_unit_priv_advance(unit, FSDP_EVENT_REDUCE, &local));
  engine->issued_reduces[engine->num_issued_reduces++] = unit;
  engine->num_reduces++;
  fsdp_engine_priv_end(engine, unit, span, 0, 0);
done:
  if (status != FSDP_OK) fsdp_unit_priv_fail(unit, &local, error);
  return status;
}

/* Issues, from the cursor on, what stands in the record and is ready. */
static fsdp_status advance_cursor(fsdp_engine *engine, bool skip_unready,
                                  fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  while (engine->reduce_cursor < engine->num_recorded_reduces) {
    fsdp_unit *next = engine->recorded_reduces[engine->reduce_cursor];
    if (next->step.is_reduce_ready) {
      engine->reduce_cursor++;
      FSDP_TRY(issue_reduce(next, error));
    } else if (skip_unready || !next->step.ran_forward) {
      engine->reduce_cursor++;
    } else {
      break;
    }
  }
done:
  return status;
}

fsdp_status fsdp_unit_priv_submit_reduce(fsdp_unit *unit, fsdp_error *error) {
  fsdp_engine *engine = unit->engine;
  const int64_t position = unit->reduce_position;

  unit->step.is_reduce_ready = true;
  if (position < (int64_t)engine->reduce_cursor) { /* -1: not recorded */
    return issue_reduce(unit, error);
  }
  return advance_cursor(engine, false, error);
}

fsdp_status fsdp_engine_priv_flush_reduces(fsdp_engine *engine,
                                           fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  FSDP_TRY(advance_cursor(engine, true, error));
  for (size_t i = engine->num_units; i-- > 0;) {
    if (engine->units[i]->step.is_reduce_ready) {
      FSDP_TRY(issue_reduce(engine->units[i], error));
    }
  }
done:
  return status;
}

/* This backward's order becomes the recorded one; the arrays swap. */
static void record_order(fsdp_engine *engine) {
  fsdp_unit **units = engine->recorded_reduces;
  const size_t capacity = engine->recorded_capacity;

  for (size_t i = 0; i < engine->num_units; i++) {
    engine->units[i]->reduce_position = -1;
  }
  for (size_t i = 0; i < engine->num_issued_reduces; i++) {
    engine->issued_reduces[i]->reduce_position = (int64_t)i;
  }
  engine->recorded_reduces = engine->issued_reduces;
  engine->recorded_capacity = engine->issued_capacity;
  engine->num_recorded_reduces = engine->num_issued_reduces;
  engine->issued_reduces = units;
  engine->issued_capacity = capacity;
  engine->num_issued_reduces = 0;
  engine->reduce_cursor = 0;
}

fsdp_status fsdp_engine_priv_finish_reduces(fsdp_engine *engine,
                                            fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  const bool any = engine->num_issued_reduces > 0;
  engine->has_open_reduces = engine->has_open_reduces || any;
  if (!engine->leaves_reduces_open) {
    FSDP_TRY(fsdp_engine_join_reduces(engine, error));
  }
  if (any) record_order(engine);
  engine->reduce_cursor = 0;
done:
  return status;
}

void fsdp_engine_priv_reset_reduces(fsdp_engine *engine) {
  engine->num_issued_reduces = 0;
  record_order(engine);
}

void fsdp_engine_priv_forget_reduces(fsdp_engine *engine,
                                     const fsdp_unit *unit) {
  size_t num_left = 0;
  for (size_t i = 0; i < engine->num_issued_reduces; i++) {
    if (engine->issued_reduces[i] == unit) continue;
    engine->issued_reduces[num_left++] = engine->issued_reduces[i];
  }
  engine->num_issued_reduces = num_left;
  if (engine->num_recorded_reduces > 0) { /* once, not for every unit */
    for (size_t i = 0; i < engine->num_units; i++) {
      engine->units[i]->reduce_position = -1;
    }
  }
  engine->num_recorded_reduces = 0;
  engine->reduce_cursor = 0;
}
