/*
 * Small value types that every room shares: ranges, dtypes and lanes.
 */
#ifndef FSDP_BASE_TYPES_H
#define FSDP_BASE_TYPES_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Elements [begin, end). Empty when begin == end; never inclusive. */
typedef struct fsdp_range {
  int64_t begin;
  int64_t end;
} fsdp_range;

/* An element type. The core compares codes and multiplies by itemsize. The
 * provider chooses the codes (the bridge uses torch's ScalarType). */
typedef struct fsdp_dtype {
  int32_t code;
  int32_t itemsize; /* bytes, >= 1 */
} fsdp_dtype;

static inline int fsdp_dtype_equal(fsdp_dtype a, fsdp_dtype b) {
  return a.code == b.code;
}

/* The stream for one purpose. */
typedef enum fsdp_lane {
  FSDP_LANE_COMPUTE = 0, /* the caller's current stream */
  FSDP_LANE_UNSHARD,
  FSDP_LANE_REDUCE,
  FSDP_LANE_REPLICATE,
  FSDP_LANE_UPLOAD, /* offloaded parameters and saved tensors, to the device */
  FSDP_LANE_DOWNLOAD, /* offloaded gradients (and back, where they accumulate)
                         and saved tensors, to the host */
  FSDP_NUM_LANES
} fsdp_lane;

#ifdef __cplusplus
}
#endif
#endif /* FSDP_BASE_TYPES_H */
