/*
 * Shards on their way from the host into their slots of a block. A shard that
 * is cast comes first to where other ranks' slots are, a piece in each turn if
 * they are too small for it (place.c).
 */
#include "runtime/engine_priv.h"

/* The elements of a segment's shard that come in a turn, if it is cast. False:
 * none. */
static bool find_piece(const fsdp_unit_segment *segment, int64_t turn,
                       int64_t *begin, int64_t *numel) {
  const int64_t all = segment->layout->shard_numel;
  *begin = turn * segment->param_stage_numel;
  *numel = segment->param_stage_numel;
  if (*numel > all - *begin) *numel = all - *begin;
  return *numel > 0;
}

/* How many turns the segment takes that has the most pieces. */
static int64_t count_turns(const fsdp_unit *unit) {
  int64_t most = 1;
  for (int64_t i = 0; i < unit->num_segments; i++) {
    const fsdp_unit_segment *segment = &unit->segments[i];
    int64_t begin;
    int64_t numel;
    if (segment->is_resident || !fsdp_unit_priv_is_cast(unit, i)) continue;
    while (find_piece(segment, most, &begin, &numel)) most++;
  }
  return most;
}

/* Copies what comes in a turn and notes the casts that follow. num_casts [out]
 * how many. */
static fsdp_status copy_pieces(fsdp_unit *unit, char *block, int64_t turn,
                               int64_t *num_casts, fsdp_error *error) {
  const fsdp_device_ops *ops = &unit->engine->ops;
  fsdp_status status = FSDP_OK;

  *num_casts = 0;
  for (int64_t i = 0; i < unit->num_segments; i++) {
    const fsdp_unit_segment *segment = &unit->segments[i];
    const fsdp_dtype from = segment->layout->dtype;
    const fsdp_dtype to = fsdp_unit_priv_param_dtype(unit, i);
    char *slot =
        fsdp_priv_slot(unit->param_data[i], unit->options.shard_group.rank,
                       segment->layout->shard_numel, to);
    int64_t begin = 0;
    int64_t numel = segment->layout->shard_numel;
    if (segment->is_resident) continue;
    if (!fsdp_unit_priv_is_cast(unit, i)) {
      if (turn > 0) continue;
      FSDP_TRY(ops->copy_to_device(ops->context, FSDP_LANE_UPLOAD, slot,
                                   segment->shard, numel * from.itemsize,
                                   error));
      continue;
    }
    if (!find_piece(segment, turn, &begin, &numel)) continue;
    char *stage = block + segment->param_stage_offset;
    FSDP_TRY(ops->copy_to_device(
        ops->context, FSDP_LANE_UPLOAD, stage,
        (const char *)segment->shard + begin * from.itemsize,
        numel * from.itemsize, error));
    unit->items[(*num_casts)++] = (fsdp_pack_item){
        .to = slot + begin * to.itemsize,
        .to_dtype = to,
        .from_dtype = from,
        .from = stage,
        .numel = numel,
    };
  }
done:
  return status;
}

fsdp_status fsdp_unit_priv_upload(fsdp_unit *unit, void *block,
                                  fsdp_lane *last_use, fsdp_error *error) {
  fsdp_engine *engine = unit->engine;
  const int64_t num_turns = count_turns(unit);
  fsdp_status status = FSDP_OK;
  int64_t num_casts;

  *last_use = FSDP_LANE_UPLOAD;
  for (int64_t turn = 0; turn < num_turns; turn++) {
    if (turn > 0) { /* into the same memory as the piece before */
      FSDP_TRY(fsdp_engine_priv_wait_lane(engine, FSDP_LANE_UPLOAD,
                                          FSDP_LANE_UNSHARD,
                                          engine->upload_done, error));
      *last_use = FSDP_LANE_UPLOAD;
    }
    FSDP_TRY(copy_pieces(unit, block, turn, &num_casts, error));
    FSDP_TRY(fsdp_engine_priv_wait_lane(engine, FSDP_LANE_UNSHARD,
                                        FSDP_LANE_UPLOAD, engine->upload_done,
                                        error));
    *last_use = FSDP_LANE_UNSHARD;
    FSDP_TRY(fsdp_unit_priv_pack_items(unit, FSDP_LANE_UNSHARD, num_casts, 1.0,
                                       error));
  }
done:
  return status;
}
