/*
 * Note [Reading shards in place]
 * Ranks that are processes of one host need no all-gather: they can read each
 * other's shards (Note [Shards in place] in port/transport.h). Then an unshard
 * takes no block and copies nothing. It only waits for the others.
 *
 * While a rank reads, nobody may write. Within a forward or a backward nobody
 * does, and at its end a rank waits until no other reads its shards. So only
 * what ends by then is read in place: the parameters of a unit that reshards
 * after forward and after backward. Kept parameters, those that the user asked
 * for, and parameters in another dtype need memory of their own. The ranks must
 * decide alike, so the decision depends on settings that are equal on all.
 *
 * An optimizer in backward writes earlier: it waits for the unit's readers.
 * After a failure nobody waits.
 *
 * Torch may move a shard out of the region (share_memory_() for a process that
 * reads the weights). Then its values are copied into the region whenever the
 * unit is opened.
 */
#include "base/alloc.h"
#include "runtime/engine_priv.h"

/* This rank's shard of a segment, in the region. */
static fsdp_region_range own_range(const fsdp_unit *unit, int64_t segment) {
  const fsdp_unit_segment *self = &unit->segments[segment];
  const int64_t nbytes =
      self->layout->shard_numel * self->layout->dtype.itemsize;
  return (fsdp_region_range){
      .offset = self->param_offset + unit->options.shard_group.rank * nbytes,
      .nbytes = self->is_resident ? 0 : nbytes};
}

/* Whether the unit's block holds the shards of all ranks, and no more; the same
 * on all ranks. */
static bool is_shareable(const fsdp_unit *unit) {
  if (unit->is_resident || unit->has_cast || unit->is_extended ||
      unit->options.offloads || !unit->settings.reshard_after_forward ||
      unit->param_nbytes < FSDP_MIN_REGION_NBYTES) {
    return false;
  }
  for (int64_t i = 0; i < unit->num_segments; i++) {
    if (unit->segments[i].options.spare_numel > 0) return false;
  }
  return true;
}

/* The region, if each shard lies there as in the block. */
static fsdp_region region_of(const fsdp_unit *unit) {
  static const fsdp_region none = {.data = NULL};
  const fsdp_region region = unit->options.region;
  if (region.data == NULL || region.nbytes != unit->param_nbytes) return none;
  for (int64_t i = 0; i < unit->num_segments; i++) {
    const fsdp_region_range own = own_range(unit, i);
    const char *shard = unit->segments[i].shard;
    if (own.nbytes > 0 && shard != (char *)region.data + own.offset) {
      return none;
    }
  }
  return region;
}

static bool keeps_parts(const fsdp_unit *unit) {
  return unit->settings.keeps_part && unit->options.part_group.world_size > 1;
}

/* Whether it gives back what it unshards before forward or backward ends. */
static bool reshards_in_time(const fsdp_unit *unit) {
  const bool is_kept_as_root =
      unit->main == unit->engine->root && !unit->options.reshards_as_root;
  return unit->settings.reshard_after_forward && !is_kept_as_root &&
         !keeps_parts(unit) &&
         (unit->settings.sync != FSDP_SYNC_NONE ||
          unit->settings.reshard_after_backward_without_sync);
}

fsdp_status fsdp_unit_priv_share(fsdp_unit *unit, fsdp_error *error) {
  fsdp_transport *transport = unit->options.shard_group.transport;
  fsdp_status status = FSDP_OK;
  if (unit->asked_to_share) return FSDP_OK;
  unit->asked_to_share = true;
  if (!is_shareable(unit) || transport->ops->sharer == NULL) return FSDP_OK;
  unit->sharer = transport->ops->sharer(transport);
  if (unit->sharer == NULL) return FSDP_OK;
  fsdp_region_range *own = fsdp_calloc((size_t)unit->num_segments, sizeof *own);
  if (own == NULL) {
    return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY,
                     "unit '%s': out of host memory while sharing its shards",
                     unit->name);
  }
  const fsdp_region region = region_of(unit);
  for (int64_t i = 0; i < unit->num_segments; i++) own[i] = own_range(unit, i);
  FSDP_TRY(unit->sharer->ops->share(unit->sharer, unit->name, region,
                                    unit->param_nbytes, own, unit->num_segments,
                                    &unit->shared_whole, &unit->shared, error));
  for (int64_t i = 0; unit->shared != NULL && i < unit->num_segments; i++) {
    if (own[i].nbytes == 0 || region.data == NULL) continue;
    unit->segments[i].home = (char *)region.data + own[i].offset;
  }
done:
  fsdp_free(own);
  return status;
}

void fsdp_unit_priv_unshare(fsdp_unit *unit) {
  if (unit->shared != NULL) unit->sharer->ops->unshare(unit->shared);
  for (int64_t i = 0; i < unit->num_segments; i++) {
    unit->segments[i].home = NULL;
  }
  unit->shared = NULL;
  unit->shared_whole = NULL;
  unit->sharer = NULL;
  unit->asked_to_share = false;
  unit->has_readers = false;
}

void fsdp_unit_priv_choose_place(fsdp_unit *unit, bool is_on_demand) {
  const fsdp_engine *engine = unit->engine;
  unit->is_in_place =
      unit->shared != NULL && !is_on_demand && reshards_in_time(unit) &&
      unit->state != FSDP_UNIT_PARTED && !engine->checks_order &&
      (unit->settings.custom & FSDP_CUSTOM_ALL_GATHER) == 0;
}

/* Copies shards that were moved to where the others read them. */
static fsdp_status bring_home(fsdp_unit *unit, fsdp_error *error) {
  int64_t num_items = 0;
  for (int64_t i = 0; i < unit->num_segments; i++) {
    const fsdp_unit_segment *segment = &unit->segments[i];
    const fsdp_dtype dtype = segment->layout->dtype;
    if (segment->home == NULL || segment->home == segment->shard) continue;
    unit->items[num_items++] =
        (fsdp_pack_item){.to = segment->home,
                         .to_dtype = dtype,
                         .from_dtype = dtype,
                         .from = segment->shard,
                         .numel = segment->layout->shard_numel};
  }
  return fsdp_unit_priv_pack_items(unit, FSDP_LANE_UNSHARD, num_items, 1.0,
                                   error);
}

fsdp_status fsdp_unit_priv_open(fsdp_unit *unit, const fsdp_call *call,
                                uint64_t *ticket, fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  FSDP_TRY(bring_home(unit, error));
  unit->has_readers = true;
  FSDP_TRY(
      unit->sharer->ops->open(unit->sharer, call, unit->shared, ticket, error));
done:
  return status;
}

void fsdp_unit_priv_close(fsdp_unit *unit) {
  if (!unit->is_in_place) return;
  unit->is_in_place = false;
  unit->sharer->ops->close(unit->sharer, unit->shared);
}

fsdp_status fsdp_unit_priv_await_readers(fsdp_unit *unit, fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  if (!unit->has_readers || unit->is_in_place) return FSDP_OK;
  FSDP_TRY(unit->sharer->ops->await_closed(unit->sharer, unit->shared, error));
  unit->has_readers = false;
done:
  return status;
}

fsdp_status fsdp_engine_priv_await_readers(fsdp_engine *engine,
                                           fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  for (size_t i = 0; i < engine->num_units; i++) {
    FSDP_TRY(fsdp_unit_priv_await_readers(engine->units[i], error));
  }
done:
  return status;
}
