/*
 * The end of a forward or a backward, to which all ranks come together while
 * they serve each other: Note [Ranks that differ]. At the end of backward a
 * rank contributes zeros to the reductions that only others wait for.
 */
#include <ctype.h>
#include <string.h>

#include "base/alloc.h"
#include "runtime/engine_priv.h"

/* The letters of one unit, of all ranks. */
typedef struct ballot {
  const char *kinds; /* of rank 0; see fsdp_priv_grad_kinds() */
  size_t stride;     /* to those of the next rank */
  int64_t num_ranks;
} ballot;

static bool is_reduced(const fsdp_unit *unit, const char *kinds) {
  for (int64_t i = 0; i < unit->num_segments; i++) {
    if (isupper((unsigned char)kinds[i])) return true;
  }
  return false;
}

/* kinds [out] those of a rank whose reduction of the unit waits; NULL: none.
 * The ranks whose reductions wait must reduce the same segments, and all must
 * do the same with them. */
static fsdp_status find_kinds(const fsdp_unit *unit, const ballot *votes,
                              const char **kinds, fsdp_error *error) {
  const char *found = NULL;
  for (int64_t rank = 0; rank < votes->num_ranks; rank++) {
    const char *theirs = votes->kinds + (size_t)rank * votes->stride;
    if (found == NULL && is_reduced(unit, theirs)) found = theirs;
  }
  *kinds = found;
  for (int64_t rank = 0; found != NULL && rank < votes->num_ranks; rank++) {
    const char *theirs = votes->kinds + (size_t)rank * votes->stride;
    const bool takes_part = is_reduced(unit, theirs);
    for (int64_t i = 0; i < unit->num_segments; i++) {
      if (takes_part ? theirs[i] == found[i]
                     : theirs[i] == tolower((unsigned char)found[i])) {
        continue;
      }
      return FSDP_FAIL_WITH(
          FSDP_REMEDY_SYNC_ALIKE, error, FSDP_INVALID_STATE,
          "the ranks run their units in different orders and do "
          "different things with the gradients of unit '%s': all "
          "ranks that run it must train the same parameters",
          unit->name);
    }
  }
  return FSDP_OK;
}

/* Zeros, for a reduction of the segments that other ranks reduce. A parameter
 * that this rank froze keeps its value: the user does not see its gradient. */
static fsdp_status contribute_zeros(fsdp_unit *unit, const char *kinds,
                                    fsdp_error *error) {
  fsdp_status status = FSDP_OK;

  for (int64_t i = 0; i < unit->num_segments; i++) {
    const bool is_trainable = isupper((unsigned char)kinds[i]);
    FSDP_TRY(fsdp_unit_priv_train(unit, i, is_trainable, error));
  }
  FSDP_TRY(fsdp_unit_priv_reshard(unit, error)); /* kept for backward */
  if (!unit->step.entered_backward) {
    FSDP_TRY(fsdp_unit_priv_take_user_grads(unit, error));
    unit->step.entered_backward = true;
  }
  FSDP_TRY(fsdp_unit_priv_fill_grads(unit, error));
  fsdp_unit_priv_put_off_reduce(unit);
done:
  return status;
}

static fsdp_status unite_grads(fsdp_engine *engine, const char *kinds,
                               fsdp_error *error) {
  const fsdp_device_ops *ops = &engine->ops;
  const fsdp_group *group = fsdp_unit_priv_checked_group(engine->units[0]);
  const size_t nbytes = strlen(kinds);
  fsdp_status status = FSDP_OK;

  char *all = fsdp_calloc((size_t)group->world_size, nbytes);
  if (all == NULL) {
    return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY,
                     "out of host memory for comparing gradients");
  }
  FSDP_TRY(ops->all_gather_bytes(ops->context, group, kinds, (int64_t)nbytes,
                                 all, error));
  ballot votes = {
      .kinds = all, .stride = nbytes, .num_ranks = group->world_size};
  for (size_t i = 0; i < engine->num_units; i++) {
    fsdp_unit *unit = engine->units[i];
    const char *theirs = NULL;
    FSDP_TRY(find_kinds(unit, &votes, &theirs, error));
    if (theirs != NULL && !unit->step.is_reduce_ready) {
      FSDP_TRY(contribute_zeros(unit, theirs, error));
    }
    votes.kinds += unit->num_segments;
  }
done:
  fsdp_free(all);
  return status;
}

fsdp_status fsdp_engine_priv_end_phase(fsdp_engine *engine, fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  fsdp_priv_turn turn;
  char *kinds = NULL;

  if (!engine->checks_order || !fsdp_engine_priv_can_serve(engine)) {
    return FSDP_OK;
  }
  if (engine->in_backward) {
    FSDP_TRY(
        fsdp_priv_grad_kinds(engine->units, engine->num_units, &kinds, error));
  }
  const fsdp_priv_next next = {.op = FSDP_OP_END,
                               .detail = kinds == NULL ? "" : kinds};
  FSDP_TRY(fsdp_engine_priv_agree(engine, &next, &turn, error));
  if (kinds != NULL && turn.kind == FSDP_TURN_UNITE) {
    FSDP_TRY(unite_grads(engine, kinds, error));
  }
done:
  fsdp_free(kinds);
  return status;
}
