/*
 * Copy plan: the list of copies that leads from one placement to another.
 *
 *   source: flat shards on 2 ranks     target: whole tensors
 *
 *     a [0, 4) in 0 from 0   a [4, 5) in 1 from 0   b [0, 3) in 1 from 1
 *
 *   copies, (source buffer, offset) -> (target buffer, offset), numel:
 *
 *     (0, 0) -> (a, 0) 4     (1, 0) -> (a, 4) 1     (1, 1) -> (b, 0) 3
 *
 * Saving, loading and changing the number of ranks are all such plans.
 * Immutable once created, needs no lock.
 */
#ifndef FSDP_STATE_COPY_PLAN_H
#define FSDP_STATE_COPY_PLAN_H

#include <stdint.h>

#include "base/status.h"
#include "state/placement.h"

#ifdef __cplusplus
extern "C" {
#endif

/* All in elements. */
typedef struct fsdp_copy {
  int64_t source_buffer;
  int64_t source_offset;
  int64_t target_buffer;
  int64_t target_offset;
  int64_t numel; /* >= 1 */
} fsdp_copy;

typedef struct fsdp_copy_plan fsdp_copy_plan;

/*
 * Plans what fills `target` from `source`; neither is referred to afterwards.
 * An element that `target` holds in several places is copied to each; one that
 * `source` holds in several places comes from the piece that counts there. What
 * `source` does not hold is listed as missing and is no failure. Time is
 * O(n log n) in pieces and copies.
 *
 * plan  [out] new reference; release with fsdp_copy_plan_destroy().
 *
 * FSDP_INVALID_ARGUMENT  two different elements go to one place of a target
 *                        buffer.
 * FSDP_OVERFLOW          the elements to copy do not fit in int64_t.
 * FSDP_OUT_OF_MEMORY
 */
FSDP_NODISCARD fsdp_status fsdp_copy_plan_create(const fsdp_placement *source,
                                                 const fsdp_placement *target,
                                                 fsdp_copy_plan **plan,
                                                 fsdp_error *error);

/* Accepts NULL. Cannot fail. */
void fsdp_copy_plan_destroy(fsdp_copy_plan *plan);

int64_t fsdp_copy_plan_num_copies(const fsdp_copy_plan *plan);
int64_t fsdp_copy_plan_num_missing(const fsdp_copy_plan *plan);

/* Elements of all copies together. */
int64_t fsdp_copy_plan_numel(const fsdp_copy_plan *plan);

/* num_copies, by (target_buffer, target_offset); two that follow one another on
 * both sides are one. Borrowed. */
const fsdp_copy *fsdp_copy_plan_copies(const fsdp_copy_plan *plan);

/* num_missing, by (param, begin), none adjacent. Borrowed. */
const fsdp_param_range *fsdp_copy_plan_missing(const fsdp_copy_plan *plan);

/* Buffers of one side, as the caller has them. */
typedef struct fsdp_buffer_numels {
  const int64_t *numels; /* per buffer; -1: absent */
  int64_t num_buffers;
} fsdp_buffer_numels;

/*
 * Checks that every copy stays inside its two buffers. A copy from or to an
 * absent buffer is not made, so its other side is not checked for size.
 *
 * FSDP_INVALID_ARGUMENT  a buffer is too small or there are too few; the
 *                        message says how many elements are needed.
 */
FSDP_NODISCARD fsdp_status fsdp_copy_plan_check(const fsdp_copy_plan *plan,
                                                fsdp_buffer_numels sources,
                                                fsdp_buffer_numels targets,
                                                fsdp_error *error);

/* Makes the copies between host buffers that passed the check; NULL: absent.
 * No source may overlap a target. `itemsize` is bytes per element. Cannot
 * fail. */
void fsdp_copy_plan_run(const fsdp_copy_plan *plan, const void *const *sources,
                        void *const *targets, int32_t itemsize);

#ifdef __cplusplus
}
#endif
#endif /* FSDP_STATE_COPY_PLAN_H */
