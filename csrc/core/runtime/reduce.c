/*
 * Reduce: when a unit's complete gradient is reduced.
 *
 * Note [Order of reductions]
 * All ranks must issue their collectives in one order, even where units become
 * ready in another, in spite of Note [Where a unit is reduced]. The order of
 * the last backward is recorded. In the next one a unit that stands in the
 * record waits until every unit before it that ran forward, is trained and
 * reduces has been reduced; a unit that does not stand there, or whose turn is
 * over, is reduced as soon as it is ready. Without a forward since the last
 * backward (retain_graph, or a second loss), any may come.
 */
#include "base/alloc.h"
#include "runtime/engine_priv.h"

/* With the check of the order on, whether all ranks issue it now. */
static fsdp_status agree_on_reduce(fsdp_unit *unit, bool *is_put_off,
                                   fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  fsdp_priv_turn turn = {.kind = FSDP_TURN_GO};
  char *kinds = NULL;
  FSDP_TRY(fsdp_priv_grad_kinds(&unit, 1, &kinds, error));
  const fsdp_priv_next next = {
      .op = FSDP_OP_REDUCE, .unit = unit, .detail = kinds};
  FSDP_TRY(fsdp_engine_priv_agree(unit->engine, &next, &turn, error));
  *is_put_off = turn.kind == FSDP_TURN_PUT_OFF;
done:
  fsdp_free(kinds);
  return status;
}

static void clear_record(fsdp_engine *engine) {
  for (size_t i = 0; i < engine->num_units; i++) {
    engine->units[i]->reduce_position = -1;
  }
  engine->num_recorded_reduces = 0;
}

/* Issues the reduction; on a host waits for its end. */
static fsdp_status run_reduce(fsdp_unit *unit, fsdp_error *error) {
  fsdp_engine *engine = unit->engine;
  fsdp_status status = FSDP_OK;
  FSDP_TRY(fsdp_unit_priv_enqueue_reduce(unit, error));
  if (fsdp_engine_priv_is_host(engine)) {
    FSDP_TRY(fsdp_engine_priv_wait_reduces(engine, error));
    FSDP_TRY(fsdp_unit_priv_end_reduce(unit, error));
  }
  FSDP_TRY(fsdp_unit_priv_advance(unit, FSDP_EVENT_REDUCE, error));
  engine->num_reduces++;
done:
  return status;
}

static fsdp_status issue_reduce(fsdp_unit *unit, fsdp_error *error) {
  fsdp_engine *engine = unit->engine;
  fsdp_status status = FSDP_OK;
  FSDP_LOCAL_ERROR(local);
  bool is_put_off = false;

  if (fsdp_unit_priv_is_checked(unit)) {
    FSDP_TRY(agree_on_reduce(unit, &is_put_off, &local));
    if (is_put_off) return FSDP_OK;
  }
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
  FSDP_TRY(run_reduce(unit, &local));
  unit->step.was_reduced = true;
  engine->issued_reduces[engine->num_issued_reduces++] = unit;
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
    } else if (skip_unready ||
               (engine->ran_forward && !next->step.ran_forward) ||
               next->settings.sync == FSDP_SYNC_NONE ||
               !fsdp_unit_priv_is_trained(next)) {
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

fsdp_status fsdp_unit_priv_reduce_partial(fsdp_unit *unit, fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  unit->step.is_unreached = true;
  FSDP_TRY(run_reduce(unit, error));
done:
  unit->step.is_unreached = false;
  return status;
}

void fsdp_unit_priv_put_off_reduce(fsdp_unit *unit) {
  unit->step.is_reduce_ready = true;
}

fsdp_status fsdp_engine_priv_flush_reduces(fsdp_engine *engine,
                                           fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  if (engine->checks_order) { /* ranks that differ have come to other turns */
    engine->reduce_cursor = engine->num_recorded_reduces;
  }
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

  clear_record(engine);
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
  if (engine->num_recorded_reduces > 0) clear_record(engine); /* once for all */
  engine->reduce_cursor = 0;
}
