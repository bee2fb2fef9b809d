/* Notes: what the engine writes into a timeline, while one is recorded. */
#include "runtime/engine_priv.h"

fsdp_status fsdp_engine_set_timeline(fsdp_engine *engine,
                                     fsdp_timeline *timeline,
                                     fsdp_error *error) {
  if (timeline != NULL && (engine->depth > 0 || engine->in_backward)) {
    return FSDP_FAIL(error, FSDP_INVALID_STATE,
                     "a recording cannot start in the middle of a step; start "
                     "it before forward");
  }
  engine->timeline = timeline;
  return FSDP_OK;
}

fsdp_timeline *fsdp_engine_timeline(const fsdp_engine *engine) {
  return engine->timeline;
}

static bool is_collective(fsdp_timeline_kind kind) {
  return kind == FSDP_TIMELINE_ALL_GATHER ||
         kind == FSDP_TIMELINE_REDUCE_SCATTER ||
         kind == FSDP_TIMELINE_ALL_REDUCE || kind == FSDP_TIMELINE_REDUCE_HOOK;
}

/* A mark on the lane on which the device does what the span is about. */
static int32_t mark_lane(const fsdp_engine *engine, fsdp_timeline_kind kind) {
  const fsdp_device_ops *ops = &engine->ops;
  fsdp_lane lane = FSDP_LANE_COMPUTE;

  if (ops->mark == NULL) return -1;
  switch ((int)kind) {
    case FSDP_TIMELINE_UNSHARD: /* its collective has marks */
    case FSDP_TIMELINE_REDUCE:
    case FSDP_TIMELINE_GRAD_READY: /* the reshard after the last one has */
    case FSDP_TIMELINE_CLIP_GRAD_NORM:
      return -1;
    case FSDP_TIMELINE_ALL_GATHER:
      lane = FSDP_LANE_UNSHARD;
      break;
    case FSDP_TIMELINE_REDUCE_SCATTER:
    case FSDP_TIMELINE_REDUCE_HOOK:
      lane = FSDP_LANE_REDUCE;
      break;
    case FSDP_TIMELINE_ALL_REDUCE:
      lane = FSDP_LANE_REPLICATE;
      break;
    default:
      break;
  }
  return ops->mark(ops->context, lane);
}

fsdp_priv_span fsdp_engine_priv_begin_span(const fsdp_engine *engine,
                                           fsdp_timeline_kind kind) {
  return (fsdp_priv_span){.begin_ns = fsdp_timeline_now(engine->timeline),
                          .mark = mark_lane(engine, kind),
                          .kind = kind};
}

void fsdp_engine_priv_end_span(const fsdp_engine *engine, const fsdp_unit *unit,
                               fsdp_priv_span span, int64_t nbytes, int flags) {
  if (engine->timeline == NULL) return; /* it became full meanwhile */
  fsdp_timeline_entry entry = {
      .begin_ns = span.begin_ns,
      .sequence = -1,
      .nbytes = nbytes,
      .unit = unit == NULL ? -1 : (int32_t)unit->index,
      .mark_begin = span.mark,
      .mark_end = mark_lane(engine, span.kind),
      .kind = (uint8_t)span.kind,
      .flags = (uint8_t)flags,
  };
  if (is_collective(span.kind)) {
    entry.sequence = engine->log.num_recorded - 1;
  } else if (!fsdp_timeline_is_of_wholes((int)span.kind)) {
    fsdp_arena_stats stats;
    fsdp_arena_get_stats(engine->arena, &stats);
    entry.nbytes = stats.held_nbytes;
  }
  entry.end_ns = fsdp_timeline_now(engine->timeline);
  fsdp_timeline_add(engine->timeline, &entry);
}

void fsdp_engine_note(const fsdp_engine *engine, const fsdp_unit *unit,
                      fsdp_timeline_kind kind, int64_t begin_ns) {
  const fsdp_priv_span span = {.begin_ns = begin_ns, .mark = -1, .kind = kind};
  fsdp_engine_priv_end(engine, unit, span, 0, 0);
}

int64_t fsdp_engine_begin_wholes(const fsdp_engine *engine,
                                 fsdp_timeline_kind kind, int32_t *mark) {
  const fsdp_priv_span span = fsdp_engine_priv_begin(engine, kind);
  *mark = span.mark;
  return span.begin_ns;
}

void fsdp_engine_end_wholes(const fsdp_engine *engine, fsdp_timeline_kind kind,
                            int64_t begin_ns, int32_t mark, int64_t nbytes) {
  const fsdp_priv_span span = {
      .begin_ns = begin_ns, .mark = mark, .kind = kind};
  fsdp_engine_priv_end(engine, NULL, span, nbytes, 0);
}
