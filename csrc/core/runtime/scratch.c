/*
 * Scratch: the second buffer of a reduction, for transports that want one. Two
 * blocks take turns, so that a reduction does not wait for the one before it.
 * Each is as large as the largest unit needs. On a host a reduction is
 * waited for at once, and its scratch ends with it.
 */
#include "runtime/engine_priv.h"

static int64_t largest_need(const fsdp_engine *engine, int64_t nbytes) {
  for (size_t i = 0; i < engine->num_units; i++) {
    const fsdp_unit *unit = engine->units[i];
    const fsdp_transport *transport = unit->options.shard_group.transport;
    if (transport != NULL && transport->ops->wants_scratch &&
        unit->scratch_nbytes > nbytes) {
      nbytes = unit->scratch_nbytes;
    }
  }
  return nbytes;
}

static void free_one(fsdp_engine *engine, fsdp_scratch *scratch) {
  const fsdp_device_ops *ops = &engine->ops;
  if (scratch->block == NULL) return;
  /* Who waits for that work next reports its failure. */
  FSDP_IGNORE(ops->event_wait(ops->context, FSDP_LANE_COMPUTE,
                              scratch->free_event, NULL));
  ops->block_free(ops->context, scratch->block, scratch->block_nbytes);
  scratch->block = NULL;
  scratch->block_nbytes = 0;
}

fsdp_status fsdp_engine_priv_take_scratch(fsdp_engine *engine, int64_t nbytes,
                                          void **data, fsdp_error *error) {
  const fsdp_device_ops *ops = &engine->ops;
  fsdp_scratch *scratch = &engine->scratches[engine->scratch_turn];
  const bool is_host = fsdp_engine_priv_is_host(engine);
  fsdp_status status = FSDP_OK;

  if (is_host) free_one(engine, scratch); /* left by a failure */
  if (scratch->block_nbytes >= nbytes) {
    FSDP_TRY(ops->event_wait(ops->context, FSDP_LANE_REDUCE,
                             scratch->free_event, error));
  } else {
    const int64_t need = is_host ? nbytes : largest_need(engine, nbytes);
    if (scratch->free_event == NULL) {
      FSDP_TRY(ops->event_create(ops->context, &scratch->free_event, error));
    }
    free_one(engine, scratch);
    FSDP_TRY(fsdp_engine_priv_alloc(engine, need, &scratch->block, error));
    scratch->block_nbytes = need;
    if (need > engine->peak_scratch_nbytes) engine->peak_scratch_nbytes = need;
    if (!is_host) {
      FSDP_TRY(fsdp_engine_priv_wait_lane(engine, FSDP_LANE_REDUCE,
                                          FSDP_LANE_COMPUTE,
                                          engine->compute_done, error));
    }
  }
  *data = scratch->block;
done:
  return status;
}

fsdp_status fsdp_engine_priv_give_scratch(fsdp_engine *engine,
                                          fsdp_error *error) {
  const fsdp_device_ops *ops = &engine->ops;
  fsdp_scratch *scratch = &engine->scratches[engine->scratch_turn];

  if (!fsdp_engine_priv_is_host(engine)) {
    engine->scratch_turn = (engine->scratch_turn + 1) % FSDP_NUM_SCRATCHES;
  }
  return ops->event_record(ops->context, scratch->free_event, FSDP_LANE_REDUCE,
                           error);
}

void fsdp_engine_priv_end_scratch(fsdp_engine *engine) {
  free_one(engine, &engine->scratches[engine->scratch_turn]);
}

int64_t fsdp_engine_priv_scratch_nbytes(const fsdp_engine *engine) {
  int64_t nbytes = 0;
  if (fsdp_engine_priv_is_host(engine)) return engine->peak_scratch_nbytes;
  for (int i = 0; i < FSDP_NUM_SCRATCHES; i++) {
    nbytes += engine->scratches[i].block_nbytes;
  }
  return nbytes;
}

void fsdp_engine_priv_free_scratch(fsdp_engine *engine) {
  for (int i = 0; i < FSDP_NUM_SCRATCHES; i++) {
    fsdp_scratch *scratch = &engine->scratches[i];
    free_one(engine, scratch);
    if (scratch->free_event == NULL) continue;
    engine->ops.event_destroy(engine->ops.context, scratch->free_event);
    scratch->free_event = NULL;
  }
}
