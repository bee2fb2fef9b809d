/*
 * The alignment that training uses: one rule for training and for planning.
 */
#ifndef FSDP_LAYOUT_ALIGNMENT_H
#define FSDP_LAYOUT_ALIGNMENT_H

#include <stdbool.h>
#include <stdint.h>

#include "layout/flat_layout.h"

/*
 * On the CPU the alignment is FSDP1's, so that shards have FSDP1's shapes: only
 * parameters are aligned, and only with use_orig_params. An accelerator aligns
 * parameters and shards, because collectives and kernels are slower over
 * unaligned addresses.
 *
 * param_itemsize  bytes of the dtype in which the unit computes; 0: the
 *                 parameters' own dtypes.
 */
static inline fsdp_alignment fsdp_alignment_choose(int32_t param_itemsize,
                                                   bool use_orig_params,
                                                   bool is_cpu) {
  fsdp_alignment alignment;
  /* The largest value makes each segment use its own itemsize. */
  alignment.itemsize =
      param_itemsize > 0 ? param_itemsize : FSDP_ALIGNMENT_NBYTES;
  alignment.params = use_orig_params || !is_cpu;
  alignment.shards = !is_cpu;
  return alignment;
}

#endif /* FSDP_LAYOUT_ALIGNMENT_H */
