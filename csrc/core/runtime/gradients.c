/*
 * The gradients of a unit: which exist, where their memory is, and what the
 * user sees of them.
 */
#include <ctype.h>

#include "base/alloc.h"
#include "runtime/engine_priv.h"

void fsdp_unit_priv_set_grads(fsdp_unit *unit, int kinds, bool exist) {
  unit->grads = (uint8_t)(exist ? unit->grads | kinds : unit->grads & ~kinds);
}

bool fsdp_unit_holds_grads(const fsdp_unit *unit) {
  return fsdp_unit_priv_has_grads(unit,
                                  FSDP_GRADS_UNSHARDED | FSDP_GRADS_PARTIAL);
}

fsdp_status fsdp_priv_grad_kinds(fsdp_unit *const *units, size_t num_units,
                                 char **kinds, fsdp_error *error) {
  static const char letters[] = {[FSDP_SYNC_NONE] = 'n',
                                 [FSDP_SYNC_SHARD] = 's',
                                 [FSDP_SYNC_REDUCE] = 'r'};
  size_t num_segments = 0;
  for (size_t i = 0; i < num_units; i++) {
    num_segments += (size_t)units[i]->num_segments;
  }
  char *text = fsdp_calloc(num_segments + 1, 1);
  if (text == NULL) {
    return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY,
                     "out of host memory for comparing gradients");
  }
  *kinds = text;
  for (size_t i = 0; i < num_units; i++) {
    const fsdp_unit *unit = units[i];
    for (int64_t j = 0; j < unit->num_segments; j++) {
      const bool is_reduced =
          unit->step.is_reduce_ready && unit->segments[j].is_trainable;
      const char letter = letters[unit->settings.sync];
      *text++ = is_reduced ? (char)toupper(letter) : letter;
    }
  }
  return FSDP_OK;
}

/* COMPUTE waits for the lanes of reductions. */
fsdp_status fsdp_engine_priv_wait_reduces(fsdp_engine *engine,
                                          fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  FSDP_TRY(fsdp_engine_priv_wait_lane(
      engine, FSDP_LANE_COMPUTE, FSDP_LANE_REDUCE, engine->reduce_done, error));
  FSDP_TRY(fsdp_engine_priv_wait_lane(engine, FSDP_LANE_COMPUTE,
                                      FSDP_LANE_REPLICATE,
                                      engine->replicate_done, error));
done:
  return status;
}

fsdp_status fsdp_engine_join_reduces(fsdp_engine *engine, fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  if (!engine->has_open_reduces) return FSDP_OK;
  const fsdp_priv_span span =
      fsdp_engine_priv_begin(engine, FSDP_TIMELINE_WAIT_REDUCES);
  FSDP_TRY(fsdp_engine_priv_wait_reduces(engine, error));
  fsdp_engine_priv_end(engine, NULL, span, 0, 0);
  engine->has_open_reduces = false;
  if (!fsdp_engine_priv_is_host(engine)) { /* there, at the end of backward */
    FSDP_TRY(fsdp_arena_settle(engine->arena, error));
  }
done:
  return status;
}

bool fsdp_engine_has_open_reduces(const fsdp_engine *engine) {
  return engine->has_open_reduces;
}

/* Unsharded ---------------------------------------------------------------- */

/* Takes a block in held dtype, or in reduce dtype. */
static fsdp_status take_block(fsdp_unit *unit, bool is_held,
                              fsdp_error *error) {
  fsdp_arena *arena = unit->engine->arena;
  fsdp_status status = FSDP_OK;
  void *block = NULL;

  if (is_held && unit->held_client < 0) {
    FSDP_TRY(fsdp_arena_add_client(arena, unit->held_nbytes, &unit->held_client,
                                   error));
  }
  FSDP_TRY(fsdp_arena_take(arena,
                           is_held ? unit->held_client : unit->grad_client,
                           FSDP_LANE_COMPUTE, &block, error));
  for (int64_t i = 0; i < fsdp_unit_priv_num_reduced(unit); i++) {
    const fsdp_unit_segment *segment = &unit->segments[i];
    const int64_t offset =
        is_held ? segment->held_offset : segment->grad_offset;
    const bool has_grad = segment->is_trainable;
    unit->grad_data[i] = has_grad ? (char *)block + offset : NULL;
    unit->stage_data[i] = has_grad && unit->options.offloads && !is_held
                              ? (char *)block + segment->grad_stage_offset
                              : NULL;
  }
  unit->is_held = is_held;
  fsdp_unit_priv_set_grads(unit, FSDP_GRADS_UNSHARDED, true);
done:
  return status;
}

fsdp_status fsdp_unit_priv_take_grad_block(fsdp_unit *unit, fsdp_error *error) {
  return take_block(
      unit, unit->has_held && unit->settings.sync == FSDP_SYNC_NONE, error);
}

fsdp_dtype fsdp_unit_priv_block_dtype(const fsdp_unit *unit, int64_t segment) {
  const fsdp_segment_options *options = &unit->segments[segment].options;
  return unit->is_held ? options->held_dtype : options->reduce_dtype;
}

double fsdp_unit_priv_prescale(const fsdp_unit *unit) {
  return unit->settings.has_reduce_hook ? 1.0 : unit->options.prescale;
}

static fsdp_status cast_block(fsdp_unit *unit, const char *held,
                              fsdp_error *error) {
  int64_t num_items = 0;
  for (int64_t i = 0; i < unit->num_segments; i++) {
    const fsdp_unit_segment *segment = &unit->segments[i];
    if (unit->grad_data[i] == NULL || segment->layout->padded_numel == 0) {
      continue;
    }
    unit->items[num_items++] =
        (fsdp_pack_item){.to = unit->grad_data[i],
                         .to_dtype = segment->options.reduce_dtype,
                         .from_dtype = segment->options.held_dtype,
                         .from = held + segment->held_offset,
                         .numel = segment->layout->padded_numel};
  }
  return fsdp_unit_priv_pack_items(unit, FSDP_LANE_COMPUTE, num_items,
                                   fsdp_unit_priv_prescale(unit), error);
}

fsdp_status fsdp_unit_priv_cast_held(fsdp_unit *unit, fsdp_error *error) {
  fsdp_arena *arena = unit->engine->arena;
  if (!fsdp_unit_priv_has_grads(unit, FSDP_GRADS_UNSHARDED) || !unit->is_held) {
    return FSDP_OK;
  }
  const char *held = fsdp_arena_data(arena, unit->held_client);
  fsdp_status status = take_block(unit, false, error);
  if (status != FSDP_OK) return status; /* they are held as before */
  status = cast_block(unit, held, error);
  unit->engine->views.keep_grads(unit->engine->views.context,
                                 unit->options.owner, FSDP_VIEW_UNSHARDED);
  const fsdp_status given =
      fsdp_arena_give(arena, unit->held_client, FSDP_LANE_COMPUTE,
                      status == FSDP_OK ? error : NULL);
  return status == FSDP_OK ? given : status;
}

fsdp_status fsdp_unit_priv_drop_grads(fsdp_unit *unit, fsdp_lane lane,
                                      fsdp_error *error) {
  const fsdp_view_ops *views = &unit->engine->views;
  if (!fsdp_unit_priv_has_grads(unit, FSDP_GRADS_UNSHARDED)) return FSDP_OK;
  fsdp_unit_priv_set_grads(unit, FSDP_GRADS_UNSHARDED, false);
  views->keep_grads(views->context, unit->options.owner, FSDP_VIEW_UNSHARDED);
  return fsdp_arena_give(unit->engine->arena,
                         unit->is_held ? unit->held_client : unit->grad_client,
                         lane, error);
}

/* Partial ------------------------------------------------------------------ */

fsdp_status fsdp_unit_priv_take_partial(fsdp_unit *unit, fsdp_error *error) {
  fsdp_status status = FSDP_OK;

  if (unit->partial_block != NULL) return FSDP_OK;
  FSDP_TRY(fsdp_engine_priv_alloc(unit->engine, unit->partial_nbytes,
                                  &unit->partial_block, error));
  for (int64_t i = 0; i < fsdp_unit_priv_num_reduced(unit); i++) {
    unit->partial_data[i] =
        unit->segments[i].has_grad_place
            ? (char *)unit->partial_block + unit->segments[i].partial_offset
            : NULL;
  }
done:
  return status;
}

void fsdp_unit_priv_free_partial(fsdp_unit *unit) {
  const fsdp_device_ops *ops = &unit->engine->ops;
  const fsdp_view_ops *views = &unit->engine->views;
  fsdp_unit_priv_set_grads(unit, FSDP_GRADS_PARTIAL, false);
  if (unit->partial_block == NULL) return;
  FSDP_IGNORE(fsdp_engine_join_reduces(unit->engine, NULL)); /* best effort */
  views->keep_grads(views->context, unit->options.owner, FSDP_VIEW_PARTIAL);
  ops->block_free(ops->context, unit->partial_block, unit->partial_nbytes);
  unit->partial_block = NULL;
}

/* Sharded ------------------------------------------------------------------ */

fsdp_status fsdp_unit_priv_make_grad_shard(fsdp_unit *unit, int64_t segment,
                                           bool is_replaced,
                                           fsdp_error *error) {
  const fsdp_view_ops *views = &unit->engine->views;
  void *owner = unit->options.owner;
  void **data = &unit->segments[segment].grad_shard;
  const fsdp_status status = views->grad_shard(views->context, owner, segment,
                                               is_replaced, data, error);
  if (!fsdp_engine_priv_has_made_room(unit->engine, status)) return status;
  return views->grad_shard(views->context, owner, segment, is_replaced, data,
                           error);
}

bool fsdp_unit_priv_adds_to_grads(const fsdp_unit *unit) {
  return fsdp_unit_priv_has_grads(unit, FSDP_GRADS_SHARDED) &&
         !unit->settings.is_followed;
}

fsdp_status fsdp_unit_priv_make_grad_shards(fsdp_unit *unit,
                                            fsdp_error *error) {
  const fsdp_view_ops *views = &unit->engine->views;
  fsdp_status status = FSDP_OK;

  if (unit->settings.is_followed &&
      fsdp_unit_priv_has_grads(unit, FSDP_GRADS_SHARDED)) {
    views->grads_set_aside(views->context, unit->options.owner);
  }
  for (int64_t i = 0; i < unit->num_segments; i++) {
    if (!unit->segments[i].is_trainable) continue;
    FSDP_TRY(fsdp_unit_priv_make_grad_shard(
        unit, i, !fsdp_unit_priv_adds_to_grads(unit), error));
  }
done:
  return status;
}

double fsdp_unit_priv_mean_scale(const fsdp_unit *unit) {
  const double num_ranks = (double)unit->options.shard_group.world_size *
                           (double)unit->options.replica_group.world_size;
  const double divisor =
      unit->settings.divisor > 0 ? unit->settings.divisor : num_ranks;
  if (unit->settings.has_reduce_hook) return 1.0;
  return 1.0 / (unit->options.prescale * divisor);
}

fsdp_status fsdp_unit_priv_tell_followers(fsdp_unit *unit, fsdp_lane lane,
                                          fsdp_error *error) {
  const fsdp_view_ops *views = &unit->engine->views;
  fsdp_status status = FSDP_OK;
  if (!unit->settings.is_followed) return FSDP_OK;
  FSDP_TRY(fsdp_unit_priv_await_readers(unit, error));
  FSDP_TRY(
      views->grads_reduced(views->context, unit->options.owner, lane, error));
done:
  return status;
}

void fsdp_unit_drop_sharded_grads(fsdp_unit *unit) {
  const fsdp_view_ops *views = &unit->engine->views;
  FSDP_IGNORE(fsdp_engine_join_reduces(unit->engine, NULL)); /* best effort */
  fsdp_unit_priv_set_grads(unit, FSDP_GRADS_SHARDED, false);
  views->grads_free(views->context, unit->options.owner);
  for (int64_t i = 0; i < unit->num_segments; i++) {
    unit->segments[i].grad_shard = NULL;
  }
}

void fsdp_unit_priv_drop_cleared_grads(fsdp_unit *unit) {
  const fsdp_view_ops *views = &unit->engine->views;
  /* While others exist, or a summon is open, the user sees those. */
  if (unit->grads != FSDP_GRADS_SHARDED || unit->is_summoned ||
      views->grads_live(views->context, unit->options.owner)) {
    return;
  }
  fsdp_unit_drop_sharded_grads(unit);
}

/* The user's view ---------------------------------------------------------- */

fsdp_status fsdp_unit_priv_take_user_grads(fsdp_unit *unit, fsdp_error *error) {
  const fsdp_view_ops *views = &unit->engine->views;
  const bool holds = fsdp_unit_priv_has_grads(unit, FSDP_GRADS_UNSHARDED);
  fsdp_status status = FSDP_OK;
  bool any_live = false;

  if (unit->grad_nbytes == 0) return FSDP_OK;
  FSDP_TRY(fsdp_engine_join_reduces(unit->engine, error));
  FSDP_TRY(views->take_grads(views->context, unit->options.owner, holds,
                             holds ? unit->grad_data : NULL, &any_live, error));
  if (any_live) {
    /* Set by the user before any backward: they are in the shard now. */
    if (unit->grads == 0) {
      fsdp_unit_priv_set_grads(unit, FSDP_GRADS_SHARDED, true);
    }
    return FSDP_OK;
  }
  if (fsdp_unit_priv_has_grads(unit, FSDP_GRADS_SHARDED)) {
    fsdp_unit_drop_sharded_grads(unit);
  }
  fsdp_unit_priv_set_grads(unit, FSDP_GRADS_PARTIAL, false);
  FSDP_TRY(fsdp_unit_priv_drop_grads(unit, FSDP_LANE_COMPUTE, error));
done:
  return status;
}

fsdp_status fsdp_unit_priv_show_grads(fsdp_unit *unit, fsdp_error *error) {
  const fsdp_view_ops *views = &unit->engine->views;
  void *owner = unit->options.owner;

  if (fsdp_unit_priv_has_grads(unit, FSDP_GRADS_UNSHARDED)) {
    return views->show_grads(views->context, owner, FSDP_VIEW_UNSHARDED,
                             unit->grad_data, error);
  }
  if (fsdp_unit_priv_has_grads(unit, FSDP_GRADS_PARTIAL)) {
    return views->show_grads(views->context, owner, FSDP_VIEW_PARTIAL,
                             unit->partial_data, error);
  }
  if (fsdp_unit_priv_has_grads(unit, FSDP_GRADS_SHARDED)) {
    return views->show_grads(views->context, owner, FSDP_VIEW_SHARDED, NULL,
                             error);
  }
  return FSDP_OK;
}
