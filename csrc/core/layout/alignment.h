/*
 * Which alignment training uses: one rule for units and for plans of them.
 */
#ifndef FSDP_LAYOUT_ALIGNMENT_H
#define FSDP_LAYOUT_ALIGNMENT_H

#include <stdbool.h>
#include <stdint.h>

#include "layout/flat_layout.h"

#ifdef __cplusplus
extern "C" {
#endif

/*
 * FSDP1's alignment, for the same shapes: of parameters, and only with
 * use_orig_params. An accelerator aligns everything: its collectives and
 * kernels are slower over odd addresses, and on the CPU nothing is gained.
 *
 * param_itemsize  bytes of the dtype in which the unit computes; 0: in the
 *                 parameters' own dtypes.
 */
fsdp_alignment fsdp_alignment_choose(int32_t param_itemsize,
                                     bool use_orig_params, bool is_cpu);

#ifdef __cplusplus
}
#endif
#endif /* FSDP_LAYOUT_ALIGNMENT_H */
