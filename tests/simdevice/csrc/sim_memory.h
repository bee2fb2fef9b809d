/*
 * Memory of the simulated device: a caching allocator in stream order.
 *
 * A block belongs to the stream that was current when it was allocated. A freed
 * block is poisoned by a task of that stream and may be handed out at once to
 * the next allocation for the same stream, as with CUDA's caching allocator:
 * whoever still uses it on another stream reads poison, or another tensor.
 * Fresh memory is poisoned too. Poison is bytes of 0xFF: NaN in every floating
 * dtype, -1 in signed integers.
 */
#ifndef SIM_MEMORY_H
#define SIM_MEMORY_H

#include "sim_streams.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sim_memory_stats {
  int64_t num_allocs;
  int64_t num_cached; /* of those, how many were handed out again */
  int64_t live_blocks;
  int64_t live_nbytes;
  int64_t peak_nbytes; /* of live_nbytes */
  int64_t held_nbytes; /* live and cached */
} sim_memory_stats;

/* NULL without memory. nbytes == 0 gives a block, too. */
SIM_API void *sim_memory_alloc(sim_stream *stream, size_t nbytes);
/* What was asked for when `data` was allocated. */
SIM_API size_t sim_memory_nbytes(void *data);
/* NULL is fine. */
SIM_API void sim_memory_free(void *data);
/* `data` is used by work so far on `stream`: once freed, it is not handed out
 * before that is done. */
SIM_API void sim_memory_record_stream(void *data, sim_stream *stream);
/* Gives cached blocks back to the system. */
SIM_API void sim_memory_empty_cache(void);
/* The device has so much memory, live and cached; 0: as much as the host. */
SIM_API void sim_memory_set_limit(int64_t nbytes);
SIM_API sim_memory_stats sim_memory_get_stats(void);
SIM_API void sim_memory_reset_peak(void);

#ifdef __cplusplus
}
#endif
#endif /* SIM_MEMORY_H */
