/* Prefetch lists: units that the user wants unsharded ahead of their use. */
#include <string.h>

#include "base/alloc.h"
#include "runtime/engine_priv.h"

fsdp_status fsdp_unit_set_prefetches(fsdp_unit *unit, fsdp_pass pass,
                                     fsdp_unit *const *units, size_t num_units,
                                     fsdp_error *error) {
  fsdp_prefetch_list *list = &unit->prefetches[pass];
  void *copy = list->units;

  for (size_t i = 0; i < num_units; i++) {
    if (unit->engine != NULL && units[i]->engine == unit->engine) continue;
    return FSDP_FAIL(error, FSDP_INVALID_STATE,
                     "unit '%s' cannot prefetch unit '%s': they are not in one "
                     "engine",
                     unit->name, units[i]->name);
  }
  if (!fsdp_grow(&copy, &list->capacity, num_units, sizeof(fsdp_unit *))) {
    return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY,
                     "unit '%s': out of host memory for a prefetch list",
                     unit->name);
  }
  list->units = copy;
  if (num_units > 0) memcpy(copy, units, num_units * sizeof *units);
  list->num_units = num_units;
  return FSDP_OK;
}

fsdp_status fsdp_unit_priv_prefetch_listed(fsdp_unit *unit, fsdp_pass pass,
                                           fsdp_error *error) {
  const fsdp_prefetch_list *list = &unit->prefetches[pass];
  fsdp_status status = FSDP_OK;

  for (size_t i = 0; i < list->num_units; i++) {
    const fsdp_unit *next = list->units[i];
    if (pass == FSDP_PASS_BACKWARD &&
        !fsdp_unit_priv_is_needed_in_backward(next)) {
      continue;
    }
    FSDP_TRY(fsdp_engine_priv_prefetch(unit->engine, next->index, error));
  }
done:
  return status;
}

void fsdp_engine_priv_forget_prefetches(fsdp_engine *engine, fsdp_unit *unit) {
  for (int pass = 0; pass < FSDP_NUM_PASSES; pass++) {
    unit->prefetches[pass].num_units = 0;
    for (size_t i = 0; i < engine->num_units; i++) {
      fsdp_prefetch_list *list = &engine->units[i]->prefetches[pass];
      size_t num_left = 0;
      for (size_t j = 0; j < list->num_units; j++) {
        if (list->units[j] != unit) list->units[num_left++] = list->units[j];
      }
      list->num_units = num_left;
    }
  }
}
