/* The rule of alignment.h. */
#include "layout/alignment.h"

fsdp_alignment fsdp_alignment_choose(int32_t param_itemsize,
                                     bool use_orig_params, bool is_cpu) {
  return (fsdp_alignment){
      /* The largest value makes each segment use its own itemsize. */
      .itemsize = param_itemsize > 0 ? param_itemsize : FSDP_ALIGNMENT_NBYTES,
      .params = use_orig_params || !is_cpu,
      .shards = !is_cpu,
  };
}
