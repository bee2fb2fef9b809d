/*
 * Placements of small layouts: see placement_fixture.h.
 */
#include "placement_fixture.h"

#include "check.h"

fsdp_param_table *placement_table(const fsdp_param_spec *uses,
                                  int64_t num_uses) {
  fsdp_param_table *table = NULL;
  CHECK_OK(fsdp_param_table_create(uses, num_uses, &table, NULL));
  return table;
}

fsdp_flat_layout *placement_layout(const fsdp_param_spec *uses,
                                   int64_t num_uses, int64_t world_size,
                                   fsdp_alignment alignment) {
  fsdp_param_table *table = placement_table(uses, num_uses);
  fsdp_flat_layout *layout = NULL;
  CHECK_OK(
      fsdp_flat_layout_create(table, world_size, alignment, &layout, NULL));
  fsdp_param_table_destroy(table);
  return layout;
}

fsdp_flat_layout *placement_picture(void) {
  const fsdp_param_spec uses[] = {
      {1, 5, {1, 4}, true}, {2, 7, {2, 8}, false}, {3, 3, {1, 4}, true}};
  return placement_layout(uses, 3, 2, (fsdp_alignment){16, false, false});
}

fsdp_placement *place(const fsdp_piece *pieces, int64_t num_pieces) {
  fsdp_placement *placement = NULL;
  CHECK_OK(fsdp_placement_create(pieces, num_pieces, &placement, NULL));
  return placement;
}

fsdp_placement *place_flat(const fsdp_flat_layout *layout, int64_t segment,
                           int64_t begin, int64_t end) {
  fsdp_placement *placement = NULL;
  CHECK_OK(fsdp_placement_create_flat(layout, segment, (fsdp_range){begin, end},
                                      &placement, NULL));
  return placement;
}
