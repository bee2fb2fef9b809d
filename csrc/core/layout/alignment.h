/*
 * The alignment that training uses: one rule for training and for planning.
 */
#ifndef FSDP_LAYOUT_ALIGNMENT_H
#define FSDP_LAYOUT_ALIGNMENT_H

#include <stdbool.h>
#include <stdint.h>

#include "layout/flat_layout.h"

/* A unit with parameters of so many bytes takes longer than its launches. */
enum { FSDP_LARGE_UNIT_NBYTES = 1 << 20 };

/*
 * The alignment is FSDP1's, so that shards have FSDP1's shapes: parameters are
 * aligned with use_orig_params, shards are not. An accelerator aligns both in
 * large units, because collectives and matrix products are slower over
 * unaligned addresses.
 *
 * param_itemsize  bytes of the dtype in which the unit computes; 0: the
 *                 parameters' own dtypes.
 * unit_nbytes     of the unit's parameters, in their own dtypes.
 */
static inline fsdp_alignment fsdp_alignment_choose(int32_t param_itemsize,
                                                   bool use_orig_params,
                                                   bool is_cpu,
                                                   int64_t unit_nbytes) {
  const bool aligns_all = !is_cpu && unit_nbytes >= FSDP_LARGE_UNIT_NBYTES;
  fsdp_alignment alignment;
  /* The largest value makes each segment use its own itemsize. */
  alignment.itemsize =
      param_itemsize > 0 ? param_itemsize : FSDP_ALIGNMENT_NBYTES;
  alignment.params = use_orig_params || aligns_all;
  alignment.shards = aligns_all;
  return alignment;
}

#endif /* FSDP_LAYOUT_ALIGNMENT_H */
