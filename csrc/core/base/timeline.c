/*
 * Timeline: a ring of spans, and the names of their kinds.
 */
#include "base/timeline.h"

#include <assert.h>
#include <inttypes.h>
#include <stddef.h>

#include "base/alloc.h"

struct fsdp_timeline {
  fsdp_timeline_entry *entries;
  int64_t capacity;
  int64_t num_added; /* all-time; `entries` holds the last `capacity` */
  int64_t num_steps;
  int64_t max_steps;
  int64_t full_ns; /* 0: not full */
  fsdp_clock clock;
};

fsdp_status fsdp_timeline_create(int64_t capacity, int64_t max_steps,
                                 fsdp_clock clock, fsdp_timeline **timeline,
                                 fsdp_error *error) {
  fsdp_timeline *self = NULL;

  if (capacity < 1 || max_steps < 1) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "a timeline of %" PRId64 " entries and %" PRId64
                     " steps: both must be >= 1",
                     capacity, max_steps);
  }
  self = fsdp_calloc(1, sizeof *self);
  if (self == NULL) goto no_memory;
  self->entries = fsdp_calloc((size_t)capacity, sizeof *self->entries);
  if (self->entries == NULL) goto no_memory;
  self->capacity = capacity;
  self->max_steps = max_steps;
  self->clock = clock;
  *timeline = self;
  return FSDP_OK;

no_memory:
  fsdp_timeline_destroy(self);
  return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY,
                   "out of host memory for a timeline of %" PRId64 " entries",
                   capacity);
}

void fsdp_timeline_destroy(fsdp_timeline *timeline) {
  if (timeline == NULL) return;
  fsdp_free(timeline->entries);
  fsdp_free(timeline);
}

int64_t fsdp_timeline_now(const fsdp_timeline *timeline) {
  return timeline->clock();
}

void fsdp_timeline_add(fsdp_timeline *timeline,
                       const fsdp_timeline_entry *entry) {
  timeline->entries[timeline->num_added++ % timeline->capacity] = *entry;
}

bool fsdp_timeline_begin_step(fsdp_timeline *timeline) {
  const int64_t now = timeline->clock();
  if (timeline->num_steps == timeline->max_steps) {
    if (timeline->full_ns == 0) timeline->full_ns = now;
    return false;
  }
  timeline->num_steps++;
  fsdp_timeline_add(timeline,
                    &(fsdp_timeline_entry){.begin_ns = now,
                                           .end_ns = now,
                                           .sequence = -1,
                                           .nbytes = -1,
                                           .unit = -1,
                                           .mark_begin = -1,
                                           .mark_end = -1,
                                           .kind = FSDP_TIMELINE_STEP});
  return true;
}

int64_t fsdp_timeline_full_ns(const fsdp_timeline *timeline) {
  return timeline->full_ns;
}

int64_t fsdp_timeline_num_steps(const fsdp_timeline *timeline) {
  return timeline->num_steps;
}

int64_t fsdp_timeline_num_entries(const fsdp_timeline *timeline) {
  return timeline->num_added < timeline->capacity ? timeline->num_added
                                                  : timeline->capacity;
}

int64_t fsdp_timeline_num_lost(const fsdp_timeline *timeline) {
  return timeline->num_added - fsdp_timeline_num_entries(timeline);
}

const fsdp_timeline_entry *fsdp_timeline_get(const fsdp_timeline *timeline,
                                             int64_t index) {
  assert(index >= 0 && index < fsdp_timeline_num_entries(timeline));
  const int64_t first = fsdp_timeline_num_lost(timeline);
  return &timeline->entries[(first + index) % timeline->capacity];
}

bool fsdp_timeline_is_of_wholes(int kind) {
  return kind >= FSDP_TIMELINE_GATHER_WHOLES &&
         kind <= FSDP_TIMELINE_SCATTER_WHOLES;
}

const char *fsdp_timeline_kind_name(int kind) {
  static const char *const names[FSDP_NUM_TIMELINE_KINDS] = {
      [FSDP_TIMELINE_STEP] = "step",
      [FSDP_TIMELINE_PRE_FORWARD] = "pre_forward",
      [FSDP_TIMELINE_POST_FORWARD] = "post_forward",
      [FSDP_TIMELINE_PRE_BACKWARD] = "pre_backward",
      [FSDP_TIMELINE_GRAD_READY] = "grad_ready",
      [FSDP_TIMELINE_FINISH_BACKWARD] = "finish_backward",
      [FSDP_TIMELINE_CLIP_GRAD_NORM] = "clip_grad_norm",
      [FSDP_TIMELINE_UNSHARD] = "unshard",
      [FSDP_TIMELINE_WAIT_UNSHARD] = "wait_unshard",
      [FSDP_TIMELINE_RESHARD] = "reshard",
      [FSDP_TIMELINE_REDUCE] = "reduce",
      [FSDP_TIMELINE_WAIT_REDUCES] = "wait_reduces",
      [FSDP_TIMELINE_ALL_GATHER] = "all_gather",
      [FSDP_TIMELINE_REDUCE_SCATTER] = "reduce_scatter",
      [FSDP_TIMELINE_ALL_REDUCE] = "all_reduce",
      [FSDP_TIMELINE_REDUCE_HOOK] = "reduce_hook",
      [FSDP_TIMELINE_WAIT] = "wait",
      [FSDP_TIMELINE_GATHER_WHOLES] = "gather_wholes",
      [FSDP_TIMELINE_STEP_WHOLES] = "step_wholes",
      [FSDP_TIMELINE_SCATTER_WHOLES] = "scatter_wholes",
  };
  if (kind < 0 || kind >= FSDP_NUM_TIMELINE_KINDS) return NULL;
  return names[kind];
}
