/*
 * Small layouts and placements that must succeed.
 */
#ifndef FSDP_TESTS_PLACEMENT_FIXTURE_H
#define FSDP_TESTS_PLACEMENT_FIXTURE_H

#include "layout/flat_layout.h"
#include "layout/param_table.h"
#include "state/placement.h"

/* All return new references. */
fsdp_param_table *placement_table(const fsdp_param_spec *uses,
                                  int64_t num_uses);

fsdp_flat_layout *placement_layout(const fsdp_param_spec *uses,
                                   int64_t num_uses, int64_t world_size,
                                   fsdp_alignment alignment);

/* The picture of placement.h: a[5] b[3] on 2 ranks as params 0 and 2, and
 * another segment with param 1, [7]. */
fsdp_flat_layout *placement_picture(void);

fsdp_placement *place(const fsdp_piece *pieces, int64_t num_pieces);

/* Of the ranks [begin, end). */
fsdp_placement *place_flat(const fsdp_flat_layout *layout, int64_t segment,
                           int64_t begin, int64_t end);

#endif /* FSDP_TESTS_PLACEMENT_FIXTURE_H */
