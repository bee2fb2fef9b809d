/*
 * Engine fixture, what it looks at: parameters, gradients, states and the
 * schedule, against what the model expects.
 */
#include <math.h>
#include <stdlib.h>

#include "elements.h"
#include "engine_fixture.h"

/* What is shown is the shard of this rank, once for each rank. */
void model_check_params(model *self, int64_t index) {
  fsdp_segment_options options[MODEL_MAX_SEGMENTS];
  const model_unit *unit = &self->units[index];
  (void)model_unit_options(self, index, options);
  if (unit->view == FSDP_VIEW_SHARDED) return; /* resident, or no parameters */
  for (int64_t i = 0; i < unit->num_segments; i++) {
    const fsdp_segment *segment = fsdp_flat_layout_segment(unit->layout, i);
    const bool on_host = unit->view == FSDP_VIEW_FULL_ON_HOST;
    const fsdp_dtype dtype = unit->view == FSDP_VIEW_UNSHARDED
                                 ? options[i].param_dtype
                                 : segment->dtype;
    int64_t num_wrong = 0;
    recorder_touch(
        self->device, on_host ? RECORDER_HOST_LANE : FSDP_LANE_COMPUTE,
        unit->params[i], segment->padded_numel * dtype.itemsize, false);
    for (int64_t j = 0; j < segment->padded_numel; j++) {
      const double expected = elements_read(unit->shards[i], segment->dtype,
                                            j % segment->shard_numel);
      num_wrong += elements_read(unit->params[i], dtype, j) != expected;
    }
    CHECK_I64(num_wrong, 0);
  }
}

/* Whether an unshard moves the parameters at all. */
static bool is_shown(const model *self, int64_t index) {
  const model_unit *unit = &self->units[index];
  int64_t numel = 0;
  for (int64_t i = 0; i < unit->num_segments; i++) {
    numel += fsdp_flat_layout_segment(unit->layout, i)->padded_numel;
  }
  return numel > 0 &&
         (self->options.world_size > 1 || self->options.param_dtype.code != 0 ||
          self->options.offloads);
}

void model_check_unsharded(model *self, int64_t index) {
  CHECK_I64(model_state(self, index), FSDP_UNIT_UNSHARDED);
  if (is_shown(self, index)) {
    const bool is_full =
        self->options.param_dtype.code != 0 &&
        fsdp_unit_get_settings(self->units[index].unit)->wants_full;
    CHECK_I64(self->units[index].view,
              is_full ? FSDP_VIEW_FULL : FSDP_VIEW_UNSHARDED);
  }
  model_check_params(self, index);
}

/* --- Looking ------------------------------------------------------------- */

/* Numbers outside the range of a segment's gradient that differ from the
 * expected ones; the padding must be zero. */
static int64_t count_wrong(const double *expected, const void *actual,
                           fsdp_dtype dtype, int64_t numel, double scale) {
  int64_t num_wrong = 0;
  for (int64_t i = 0; i < numel; i++) {
    const double value = scale * elements_read(actual, dtype, i);
    num_wrong += !(fabs(value - expected[i]) <= 1e-6 * fabs(expected[i]));
  }
  return num_wrong;
}

/* The partial gradient, and what the sharded one held before it. */
static void check_partial(model *self, const model_unit *unit, int64_t index,
                          const fsdp_segment_options *options) {
  const fsdp_segment *segment = fsdp_flat_layout_segment(unit->layout, index);
  const double scale =
      1 / ((double)self->options.world_size * self->options.prescale);
  const int64_t begin = self->options.rank * segment->shard_numel;
  int64_t num_wrong = 0;
  recorder_touch(self->device, FSDP_LANE_COMPUTE, unit->grads[index],
                 segment->shard_numel * options->reduce_dtype.itemsize, false);
  for (int64_t i = 0; i < segment->shard_numel; i++) {
    const double expected = unit->expected[index][begin + i];
    double value =
        scale * elements_read(unit->grads[index], options->reduce_dtype, i);
    if (unit->has_reduced) {
      value += elements_read(unit->grad_shards[index], options->grad_dtype, i);
    }
    num_wrong += !(fabs(value - expected) <= 1e-6 * fabs(expected));
  }
  CHECK_I64(num_wrong, 0);
}

void model_check_grads(model *self) {
  fsdp_segment_options options[MODEL_MAX_SEGMENTS];
  for (int64_t i = 0; i < self->num_units; i++) {
    const model_unit *unit = &self->units[i];
    (void)model_unit_options(self, i, options);
    for (int64_t j = 0; j < unit->num_segments; j++) {
      const fsdp_segment *segment = fsdp_flat_layout_segment(unit->layout, j);
      if (!fsdp_unit_is_trainable(unit->unit, j) ||
          segment->padded_numel == 0) {
        continue;
      }
      CHECK(unit->has_grads);
      if (unit->grad_view == FSDP_VIEW_UNSHARDED) {
        const bool is_held = options[j].held_dtype.code != 0;
        const fsdp_dtype dtype =
            is_held ? options[j].held_dtype : options[j].reduce_dtype;
        recorder_touch(self->device, FSDP_LANE_COMPUTE, unit->grads[j],
                       segment->padded_numel * dtype.itemsize, false);
        CHECK_I64(count_wrong(unit->expected[j], unit->grads[j], dtype,
                              segment->padded_numel,
                              is_held ? 1 : 1 / self->options.prescale),
                  0);
        continue;
      }
      if (unit->grad_view == FSDP_VIEW_PARTIAL) {
        check_partial(self, unit, j, &options[j]);
        continue;
      }
      const int64_t begin = self->options.rank * segment->shard_numel;
      model_touch_shard(self, unit->grad_shards[j],
                        segment->shard_numel * options[j].grad_dtype.itemsize,
                        false);
      CHECK_I64(count_wrong(unit->expected[j] + begin, unit->grad_shards[j],
                            options[j].grad_dtype, segment->shard_numel, 1),
                0);
    }
  }
}

void model_touch_shard(model *self, const void *data, int64_t nbytes,
                       bool is_write) {
  recorder_touch(
      self->device,
      self->options.offloads ? RECORDER_HOST_LANE : FSDP_LANE_COMPUTE, data,
      nbytes, is_write);
}

void model_check_states(const model *self, fsdp_unit_state state) {
  for (int64_t i = 0; i < self->num_units; i++) {
    CHECK_I64(model_state(self, i), state);
  }
}

fsdp_unit_state model_state(const model *self, int64_t unit) {
  return fsdp_unit_get_state(self->units[unit].unit);
}

fsdp_engine_stats model_stats(const model *self) {
  fsdp_engine_stats stats;
  fsdp_engine_get_stats(self->engine, &stats);
  return stats;
}

int64_t model_blocks_besides_arena(const model *self) {
  return recorder_live_blocks(self->device) -
         model_stats(self).arena.num_blocks;
}

/* The unit whose first segment has shards of so many elements. */
static const char *name_of_numel(const model *self, int64_t shard_numel) {
  for (int64_t i = 0; i < self->num_units; i++) {
    const model_unit *unit = &self->units[i];
    if (unit->num_segments > 0 &&
        fsdp_flat_layout_segment(unit->layout, 0)->shard_numel == shard_numel) {
      return unit->name;
    }
  }
  return "?";
}

const char *model_schedule(model *self) {
  const char *line = recorder_tape(self->device);
  size_t length = 0;
  self->schedule[0] = '\0';
  while (*line != '\0') {
    const char *end = strchr(line, '\n') + 1;
    char word[16];
    char lane[16];
    char group[16];
    long long numel = 0;
    char *out = self->schedule + length;
    const size_t room = sizeof self->schedule - length;
    int written = 0;
    const bool is_collective =
        strncmp(line, "all_", 4) == 0 || strncmp(line, "reduce_", 7) == 0;
    if (is_collective &&
        sscanf(line, "%15s %15s %15s %lld", word, lane, group, &numel) == 4) {
      written = snprintf(out, room, "%s %s\n", word,
                         name_of_numel(self, (int64_t)numel));
    } else if (strncmp(line, "show", 4) == 0 || strncmp(line, "hide", 4) == 0) {
      written = snprintf(out, room, "%.*s", (int)(end - line), line);
    }
    if (written < 0 || (size_t)written >= room) abort();
    length += (size_t)written;
    line = end;
  }
  return self->schedule;
}
