/*
 * Timeline: what one engine did and when, as spans of host time. A ring of
 * fixed size, allocated when a recording starts. It overwrites the oldest
 * entries.
 *
 * Not thread-safe: the bridge writes under the engine's lock.
 */
#ifndef FSDP_BASE_TIMELINE_H
#define FSDP_BASE_TIMELINE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum fsdp_timeline_kind {
  FSDP_TIMELINE_STEP = 0, /* an outermost unit begins forward; no length */
  /* Calls into fsdp_c. */
  FSDP_TIMELINE_PRE_FORWARD, /* before the unit's module runs */
  FSDP_TIMELINE_POST_FORWARD,
  FSDP_TIMELINE_PRE_BACKWARD,
  FSDP_TIMELINE_GRAD_READY,      /* of a parameter, or of the unit's inputs */
  FSDP_TIMELINE_FINISH_BACKWARD, /* of the engine: no unit */
  FSDP_TIMELINE_CLIP_GRAD_NORM,  /* likewise */
  /* Inside those calls. */
  FSDP_TIMELINE_UNSHARD,
  FSDP_TIMELINE_WAIT_UNSHARD,
  FSDP_TIMELINE_RESHARD,
  FSDP_TIMELINE_REDUCE,
  FSDP_TIMELINE_WAIT_REDUCES, /* COMPUTE waits for all of them: no unit */
  /* Inside these: the calls that start a unit's collective, */
  FSDP_TIMELINE_ALL_GATHER,
  FSDP_TIMELINE_REDUCE_SCATTER,
  FSDP_TIMELINE_ALL_REDUCE,
  FSDP_TIMELINE_REDUCE_HOOK,
  /* and the host waiting for one: no unit, but its `sequence`. */
  FSDP_TIMELINE_WAIT,
  /* Of a round of whole parameters, outside the engine: to their owners, the
   * optimizer's step there, and home. No unit. */
  FSDP_TIMELINE_GATHER_WHOLES,
  FSDP_TIMELINE_STEP_WHOLES,
  FSDP_TIMELINE_SCATTER_WHOLES,
  FSDP_NUM_TIMELINE_KINDS
} fsdp_timeline_kind;

enum {
  FSDP_TIMELINE_IS_AHEAD = 1,  /* UNSHARD: a prefetch. WAIT_UNSHARD: of one */
  FSDP_TIMELINE_IS_KEPT = 2,   /* WAIT_UNSHARD: the block was still there */
  FSDP_TIMELINE_IS_UNUSED = 4, /* RESHARD: of a prefetch that nobody used */
  FSDP_TIMELINE_WAS_DONE = 8   /* WAIT: it was complete before the wait */
};

typedef struct fsdp_timeline_entry {
  int64_t begin_ns; /* of the recording's clock */
  int64_t end_ns;
  int64_t sequence;   /* of a collective in the engine's trace; -1: none */
  int64_t nbytes;     /* of a collective or a round, over all ranks; else bytes
                         that the arena holds at the end; -1: unknown */
  int32_t unit;       /* index in the engine; -1: none */
  int32_t mark_begin; /* points in time on a lane of the device, for the port's
                         `mark`; -1: none */
  int32_t mark_end;
  uint8_t kind;
  uint8_t flags;
  uint8_t reserved[2]; /* 0 */
} fsdp_timeline_entry;

typedef struct fsdp_timeline fsdp_timeline;

/* Monotonic nanoseconds. */
typedef int64_t (*fsdp_clock)(void);

/*
 * A ring for `capacity` entries that is full after `max_steps` steps.
 * timeline [out] new reference.
 *
 * FSDP_INVALID_ARGUMENT  capacity or max_steps < 1.
 * FSDP_OUT_OF_MEMORY
 */
FSDP_NODISCARD fsdp_status fsdp_timeline_create(int64_t capacity,
                                                int64_t max_steps,
                                                fsdp_clock clock,
                                                fsdp_timeline **timeline,
                                                fsdp_error *error);

/* Accepts NULL. Cannot fail. */
void fsdp_timeline_destroy(fsdp_timeline *timeline);

/* Now, by the recording's clock. */
int64_t fsdp_timeline_now(const fsdp_timeline *timeline);

/* Appends a copy of `entry`. Cannot fail. */
void fsdp_timeline_add(fsdp_timeline *timeline,
                       const fsdp_timeline_entry *entry);

/* Begins a step. Returns false once max_steps were recorded; add nothing more
 * then. */
bool fsdp_timeline_begin_step(fsdp_timeline *timeline);

/* When the recording was full, or 0. */
int64_t fsdp_timeline_full_ns(const fsdp_timeline *timeline);
int64_t fsdp_timeline_num_steps(const fsdp_timeline *timeline);

/* The number of kept and of overwritten entries. */
int64_t fsdp_timeline_num_entries(const fsdp_timeline *timeline);
int64_t fsdp_timeline_num_lost(const fsdp_timeline *timeline);

/* Kept entry `index`; 0 is the oldest. Entries are sorted by their ends.
 * Borrowed until the next add. */
const fsdp_timeline_entry *fsdp_timeline_get(const fsdp_timeline *timeline,
                                             int64_t index);

/* Whether it is of a round of whole parameters. */
bool fsdp_timeline_is_of_wholes(int kind);

/* "pre_forward" for FSDP_TIMELINE_PRE_FORWARD; static. NULL: no such kind. */
const char *fsdp_timeline_kind_name(int kind);

#ifdef __cplusplus
}
#endif
#endif /* FSDP_BASE_TIMELINE_H */
