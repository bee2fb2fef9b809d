/*
 * Copy plan: walks two placements side by side, then puts the copies in the
 * order of the target and joins neighbours.
 */
#include "state/copy_plan.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/arith.h"

struct fsdp_copy_plan {
  int64_t num_copies;
  int64_t num_missing;
  int64_t numel;
  size_t copies_capacity;
  size_t missing_capacity;
  fsdp_copy *copies;
  fsdp_param_range *missing;
};

static int64_t min_i64(int64_t a, int64_t b) {
  return a < b ? a : b;
}
static int64_t max_i64(int64_t a, int64_t b) {
  return a > b ? a : b;
}

/* Walking ------------------------------------------------------------------ */

/* The source without its replicas: pieces that do not overlap. `held` has room
 * for all of them. Returns how many there are. */
static int64_t drop_replicas(const fsdp_placement *source, fsdp_piece *held) {
  const fsdp_piece *pieces = fsdp_placement_pieces(source);
  int64_t num_held = 0;
  for (int64_t i = 0; i < fsdp_placement_num_pieces(source); i++) {
    fsdp_piece piece = pieces[i];
    if (num_held > 0 && held[num_held - 1].param == piece.param) {
      const int64_t begin =
          max_i64(piece.in_param.begin, held[num_held - 1].in_param.end);
      if (begin >= piece.in_param.end) continue;
      piece.offset += begin - piece.in_param.begin;
      piece.in_param.begin = begin;
    }
    held[num_held++] = piece;
  }
  return num_held;
}

static fsdp_status add_copy(fsdp_copy_plan *self, const fsdp_piece *from,
                            const fsdp_piece *to, fsdp_error *error) {
  const int64_t begin = max_i64(from->in_param.begin, to->in_param.begin);
  const int64_t end = min_i64(from->in_param.end, to->in_param.end);
  void *copies = self->copies;
  if (!fsdp_grow(&copies, &self->copies_capacity, (size_t)self->num_copies + 1,
                 sizeof *self->copies)) {
    return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY,
                     "plan of more than %" PRId64 " copies", self->num_copies);
  }
  self->copies = copies;
  self->copies[self->num_copies++] = (fsdp_copy){
      .source_buffer = from->buffer,
      .source_offset = from->offset + (begin - from->in_param.begin),
      .target_buffer = to->buffer,
      .target_offset = to->offset + (begin - to->in_param.begin),
      .numel = end - begin,
  };
  return FSDP_OK;
}

/* Notes elements [begin, end), which are behind all noted ones. */
static fsdp_status add_missing(fsdp_copy_plan *self, int64_t param,
                               int64_t begin, int64_t end, fsdp_error *error) {
  if (begin >= end) return FSDP_OK;
  if (self->num_missing > 0) {
    fsdp_param_range *last = &self->missing[self->num_missing - 1];
    if (last->param == param && last->in_param.end == begin) {
      last->in_param.end = end;
      return FSDP_OK;
    }
  }
  void *missing = self->missing;
  if (!fsdp_grow(&missing, &self->missing_capacity,
                 (size_t)self->num_missing + 1, sizeof *self->missing)) {
    return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY,
                     "plan of more than %" PRId64 " missing ranges",
                     self->num_missing);
  }
  self->missing = missing;
  self->missing[self->num_missing++] = (fsdp_param_range){param, {begin, end}};
  return FSDP_OK;
}

/* Fills one piece of the target from `held`, the first of which is the first
 * that is not wholly before it. Elements before `noted` were looked at for an
 * earlier piece, so they are not noted as missing again. */
static fsdp_status fill_piece(fsdp_copy_plan *self, const fsdp_piece *held,
                              int64_t num_held, const fsdp_piece *piece,
                              int64_t noted, fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  int64_t filled = piece->in_param.begin;
  for (int64_t i = 0; i < num_held && held[i].param == piece->param &&
                      held[i].in_param.begin < piece->in_param.end;
       i++) {
    FSDP_TRY(add_missing(self, piece->param, max_i64(filled, noted),
                         held[i].in_param.begin, error));
    FSDP_TRY(add_copy(self, &held[i], piece, error));
    filled = min_i64(held[i].in_param.end, piece->in_param.end);
  }
  FSDP_TRY(add_missing(self, piece->param, max_i64(filled, noted),
                       piece->in_param.end, error));
done:
  return status;
}

static fsdp_status fill_target(fsdp_copy_plan *self, const fsdp_piece *held,
                               int64_t num_held, const fsdp_placement *target,
                               fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  const fsdp_piece *pieces = fsdp_placement_pieces(target);
  int64_t first = 0; /* of held, not wholly before the piece */
  int64_t noted = 0; /* elements of the param that a piece has covered */
  for (int64_t i = 0; i < fsdp_placement_num_pieces(target); i++) {
    const fsdp_piece *piece = &pieces[i];
    if (i > 0 && pieces[i - 1].param != piece->param) noted = 0;
    while (first < num_held &&
           (held[first].param < piece->param ||
            (held[first].param == piece->param &&
             held[first].in_param.end <= piece->in_param.begin))) {
      first++;
    }
    FSDP_TRY(
        fill_piece(self, held + first, num_held - first, piece, noted, error));
    noted = max_i64(noted, piece->in_param.end);
  }
done:
  return status;
}

/* Joining ------------------------------------------------------------------ */

static int compare_i64(int64_t a, int64_t b) {
  return a < b ? -1 : a > b;
}

/* Equal copies may stand in any order. */
static int compare_copies(const void *left, const void *right) {
  const fsdp_copy *a = left;
  const fsdp_copy *b = right;
  int order = compare_i64(a->target_buffer, b->target_buffer);
  if (order == 0) order = compare_i64(a->target_offset, b->target_offset);
  if (order == 0) order = compare_i64(a->source_buffer, b->source_buffer);
  if (order == 0) order = compare_i64(a->source_offset, b->source_offset);
  return order;
}

static void sort_copies(fsdp_copy_plan *self) {
  int64_t num_sorted = 1;
  while (num_sorted < self->num_copies &&
         compare_copies(&self->copies[num_sorted - 1],
                        &self->copies[num_sorted]) <= 0) {
    num_sorted++;
  }
  if (num_sorted >= self->num_copies) return;
  qsort(self->copies, (size_t)self->num_copies, sizeof *self->copies,
        compare_copies);
}

/* Joins the sorted copies in place; two that write the same elements from the
 * same place are one too. */
static fsdp_status join_copies(fsdp_copy_plan *self, fsdp_error *error) {
  int64_t num_joined = 0;
  for (int64_t i = 0; i < self->num_copies; i++) {
    const fsdp_copy copy = self->copies[i];
    fsdp_copy *last = num_joined > 0 ? &self->copies[num_joined - 1] : NULL;
    if (last == NULL || last->target_buffer != copy.target_buffer ||
        last->target_offset + last->numel < copy.target_offset) {
      self->copies[num_joined++] = copy;
      continue;
    }
    const int64_t distance = copy.target_offset - last->target_offset;
    if (last->source_buffer == copy.source_buffer &&
        last->source_offset + distance == copy.source_offset) {
      last->numel = max_i64(last->numel, distance + copy.numel);
    } else if (distance == last->numel) {
      self->copies[num_joined++] = copy;
    } else {
      return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                       "target buffer %" PRId64
                       " gets different elements at "
                       "offset %" PRId64,
                       copy.target_buffer, copy.target_offset);
    }
  }
  self->num_copies = num_joined;
  return FSDP_OK;
}

static fsdp_status add_numels(fsdp_copy_plan *self, fsdp_error *error) {
  for (int64_t i = 0; i < self->num_copies; i++) {
    if (!fsdp_add_i64(self->numel, self->copies[i].numel, &self->numel)) {
      return FSDP_FAIL(error, FSDP_OVERFLOW,
                       "elements of %" PRId64 " copies do not fit in int64",
                       self->num_copies);
    }
  }
  return FSDP_OK;
}

fsdp_status fsdp_copy_plan_create(const fsdp_placement *source,
                                  const fsdp_placement *target,
                                  fsdp_copy_plan **plan, fsdp_error *error) {
  const int64_t num_pieces = fsdp_placement_num_pieces(source);
  fsdp_copy_plan *self = NULL;
  fsdp_piece *held = NULL;
  fsdp_status status = FSDP_OK;

  self = fsdp_calloc(1, sizeof *self);
  if (self == NULL) goto no_memory;
  held = fsdp_calloc((size_t)num_pieces, sizeof *held);
  if (held == NULL) goto no_memory;
  const int64_t num_held = drop_replicas(source, held);
  FSDP_TRY(fill_target(self, held, num_held, target, error));
  sort_copies(self);
  FSDP_TRY(join_copies(self, error));
  FSDP_TRY(add_numels(self, error));

  *plan = self;
  self = NULL;
  goto done;

no_memory:
  status = FSDP_FAIL(error, FSDP_OUT_OF_MEMORY, "plan from %" PRId64 " pieces",
                     num_pieces);
done:
  fsdp_free(held);
  fsdp_copy_plan_destroy(self);
  return status;
}

void fsdp_copy_plan_destroy(fsdp_copy_plan *plan) {
  if (plan == NULL) return;
  fsdp_free(plan->missing);
  fsdp_free(plan->copies);
  fsdp_free(plan);
}

int64_t fsdp_copy_plan_num_copies(const fsdp_copy_plan *plan) {
  return plan->num_copies;
}

int64_t fsdp_copy_plan_num_missing(const fsdp_copy_plan *plan) {
  return plan->num_missing;
}

int64_t fsdp_copy_plan_numel(const fsdp_copy_plan *plan) {
  return plan->numel;
}

const fsdp_copy *fsdp_copy_plan_copies(const fsdp_copy_plan *plan) {
  return plan->copies;
}

const fsdp_param_range *fsdp_copy_plan_missing(const fsdp_copy_plan *plan) {
  return plan->missing;
}

/* Running ------------------------------------------------------------------ */

/* One side of a copy. */
typedef struct copy_end {
  int64_t buffer;
  int64_t end; /* in elements of the buffer */
} copy_end;

static copy_end source_end(const fsdp_copy *copy) {
  return (copy_end){copy->source_buffer, copy->source_offset + copy->numel};
}

static copy_end target_end(const fsdp_copy *copy) {
  return (copy_end){copy->target_buffer, copy->target_offset + copy->numel};
}

/* Reports the buffer of `at` with all that the plan needs of it. */
static fsdp_status refuse_buffer(const fsdp_copy_plan *plan,
                                 copy_end (*side)(const fsdp_copy *),
                                 const char *name, copy_end at,
                                 fsdp_buffer_numels buffers,
                                 fsdp_error *error) {
  if (at.buffer >= buffers.num_buffers) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "the plan has a %s buffer %" PRId64 ", given are %" PRId64
                     " (an absent one counts)",
                     name, at.buffer, buffers.num_buffers);
  }
  int64_t needed = 0;
  for (int64_t i = 0; i < plan->num_copies; i++) {
    const copy_end other = side(&plan->copies[i]);
    if (other.buffer == at.buffer) needed = max_i64(needed, other.end);
  }
  return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                   "%s buffer %" PRId64 " has %" PRId64
                   " elements, the plan needs %" PRId64,
                   name, at.buffer, buffers.numels[at.buffer], needed);
}

fsdp_status fsdp_copy_plan_check(const fsdp_copy_plan *plan,
                                 fsdp_buffer_numels sources,
                                 fsdp_buffer_numels targets,
                                 fsdp_error *error) {
  for (int64_t i = 0; i < plan->num_copies; i++) {
    const copy_end from = source_end(&plan->copies[i]);
    const copy_end to = target_end(&plan->copies[i]);
    if (from.buffer >= sources.num_buffers) {
      return refuse_buffer(plan, source_end, "source", from, sources, error);
    }
    if (to.buffer >= targets.num_buffers) {
      return refuse_buffer(plan, target_end, "target", to, targets, error);
    }
    const int64_t from_numel = sources.numels[from.buffer];
    const int64_t to_numel = targets.numels[to.buffer];
    if (from_numel < 0 || to_numel < 0) continue;
    if (from.end > from_numel) {
      return refuse_buffer(plan, source_end, "source", from, sources, error);
    }
    if (to.end > to_numel) {
      return refuse_buffer(plan, target_end, "target", to, targets, error);
    }
  }
  return FSDP_OK;
}

void fsdp_copy_plan_run(const fsdp_copy_plan *plan, const void *const *sources,
                        void *const *targets, int32_t itemsize) {
  for (int64_t i = 0; i < plan->num_copies; i++) {
    const fsdp_copy *copy = &plan->copies[i];
    const char *from = sources[copy->source_buffer];
    char *to = targets[copy->target_buffer];
    if (from == NULL || to == NULL) continue;
    /* Cannot overflow: the buffers are in memory and hold these elements. */
    memcpy(to + copy->target_offset * itemsize,
           from + copy->source_offset * itemsize,
           (size_t)(copy->numel * itemsize));
  }
}
