/*
 * Sums of what lies in many places of the ranks' memory. See Note [Parts] in
 * port/transport.h and Note [Direct calls] in shm_priv.h.
 */
#include <string.h>

#include "base/alloc.h"
#include "host/kernels.h"
#include "shm/shm_priv.h"

/* A rank's array: a list of parts, of this process or of another one. */
typedef struct sparse_array {
  const fsdp_part *parts;
  int64_t num_parts;
} sparse_array;

/* Bytes [begin, end) of the arrays. */
typedef struct span {
  int64_t begin;
  int64_t end;
} span;

static int64_t min_i64(int64_t a, int64_t b) {
  return a < b ? a : b;
}

static uint64_t address_of(const void *memory, int64_t offset) {
  return (uint64_t)(uintptr_t)memory + (uint64_t)offset;
}

/* Bytes of scratch for each rank. */
static int64_t room_of(const fsdp_shm *shm) {
  const int64_t line = FSDP_SHM_LINE_NBYTES;
  return shm->scratch_nbytes / shm->world_size / line * line;
}

/* The first part that ends after `offset`. */
static int64_t find_part(const sparse_array *array, int64_t offset) {
  int64_t low = 0;
  int64_t high = array->num_parts;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    const fsdp_part *part = &array->parts[middle];
    if (part->offset + part->nbytes > offset) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

/* Zeros, or ones. */
static fsdp_status fill(char *to, int64_t nbytes, fsdp_dtype dtype, bool is_one,
                        fsdp_error *error) {
  const fsdp_pack_item item = {.to = to,
                               .to_dtype = dtype,
                               .numel = nbytes / dtype.itemsize,
                               .is_one = is_one};
  return fsdp_host_pack(&item, 1, 1.0, error);
}

/* What makes up a piece of an array. */
typedef struct piece_copies {
  fsdp_shm_range ranges[FSDP_SHM_MAX_RANGES];
  int64_t num_ranges;
} piece_copies;

/* Lists what is to be copied to `to`, for bytes [bytes->begin, bytes->end), and
 * fills in the zeros and ones. Ends before them when the list is full: then
 * bytes->begin is where it goes on, else bytes->end. */
static fsdp_status list_copies(const sparse_array *array, span *bytes,
                               fsdp_dtype dtype, char *to, piece_copies *copies,
                               fsdp_error *error) {
  const int64_t first = bytes->begin;
  fsdp_status status = FSDP_OK;
  copies->num_ranges = 0;
  for (int64_t i = find_part(array, first); bytes->begin < bytes->end; i++) {
    const fsdp_part *part = i < array->num_parts ? &array->parts[i] : NULL;
    const int64_t begin =
        part == NULL ? bytes->end : min_i64(part->offset, bytes->end);
    if (copies->num_ranges == FSDP_SHM_MAX_RANGES) break;
    if (begin > bytes->begin) {
      FSDP_TRY(fill(to + (bytes->begin - first), begin - bytes->begin, dtype,
                    false, error));
      bytes->begin = begin;
    }
    if (bytes->begin == bytes->end) break;
    char *here = to + (bytes->begin - first);
    const int64_t skipped = bytes->begin - part->offset;
    const int64_t nbytes =
        min_i64(part->nbytes - skipped, bytes->end - bytes->begin);
    if (part->data == NULL) {
      FSDP_TRY(fill(here, nbytes, dtype, true, error));
    } else {
      copies->ranges[copies->num_ranges++] = (fsdp_shm_range){
          .address = address_of(part->data, skipped),
          .to = here,
          .nbytes = nbytes,
      };
    }
    bytes->begin += nbytes;
  }
done:
  return status;
}

/* Copies bytes of the array of rank `peer` to `to`. */
static fsdp_status fetch(fsdp_shm *shm, int64_t peer, span bytes,
                         fsdp_dtype dtype, char *to, bool *read,
                         fsdp_error *error) {
  const fsdp_shm_part_list *list = &shm->part_lists[peer];
  const sparse_array array = {list->parts, list->num_parts};
  const int64_t first = bytes.begin;
  piece_copies copies;
  fsdp_status status = FSDP_OK;
  *read = true;
  while (bytes.begin < bytes.end && *read) {
    FSDP_TRY(list_copies(&array, &bytes, dtype, to + (bytes.begin - first),
                         &copies, error));
    if (copies.num_ranges == 0) continue;
    FSDP_TRY(fsdp_shm_priv_read_ranges(shm, peer, copies.ranges,
                                       copies.num_ranges, read, error));
  }
done:
  return status;
}

/* Bytes of this rank's own array: where they are, or gathered in `room`. */
static fsdp_status find_own(const fsdp_parts *own, span bytes, fsdp_dtype dtype,
                            char *room, const void **piece, fsdp_error *error) {
  const sparse_array array = {own->parts, own->num_parts};
  const int64_t first = bytes.begin;
  const int64_t i = find_part(&array, first);
  const fsdp_part *part = i < array.num_parts ? &array.parts[i] : NULL;
  piece_copies copies;
  fsdp_status status = FSDP_OK;
  if (part != NULL && part->data != NULL && part->offset <= first &&
      part->offset + part->nbytes >= bytes.end) {
    *piece = (const char *)part->data + (first - part->offset);
    return FSDP_OK;
  }
  while (bytes.begin < bytes.end) {
    FSDP_TRY(list_copies(&array, &bytes, dtype, room + (bytes.begin - first),
                         &copies, error));
    for (int64_t j = 0; j < copies.num_ranges; j++) {
      const fsdp_shm_range *range = &copies.ranges[j];
      memcpy(range->to, (const void *)(uintptr_t)range->address,
             (size_t)range->nbytes);
    }
  }
  *piece = room;
done:
  return status;
}

/* Sums `numel` elements of a place, from element `first` on. */
static fsdp_status sum_piece(fsdp_shm *shm, const fsdp_parts *own,
                             const fsdp_place *place, int64_t first,
                             int64_t numel, bool *read, fsdp_error *error) {
  const fsdp_dtype dtype = place->sum_dtype;
  const int64_t room = room_of(shm);
  const int64_t begin = place->offset + first * dtype.itemsize;
  const span bytes = {begin, begin + numel * dtype.itemsize};
  fsdp_status status = FSDP_OK;
  *read = true;
  for (int64_t rank = 0; rank < shm->world_size; rank++) {
    const void **piece = &shm->pieces[fsdp_shm_priv_turn(shm, rank)];
    char *scratch = shm->scratch + rank * room;
    if (rank == shm->rank) {
      FSDP_TRY(find_own(own, bytes, dtype, scratch, piece, error));
      continue;
    }
    FSDP_TRY(fetch(shm, rank, bytes, dtype, scratch, read, error));
    if (!*read) return FSDP_OK;
    *piece = scratch;
  }
  /* Not into this rank's parts: they are the caller's. */
  char *sum = shm->scratch;
  fsdp_shm_priv_sum(sum, dtype, shm->pieces, shm->world_size, numel);
  const fsdp_pack_item item = {
      .to = (char *)place->data + first * place->dtype.itemsize,
      .to_dtype = place->dtype,
      .from_dtype = dtype,
      .from = sum,
      .numel = numel,
      .add = place->adds,
      .scales_first = true};
  FSDP_TRY(fsdp_host_pack(&item, 1, place->scale, error));
done:
  return status;
}

/* Copies the list of parts of rank `peer`. */
static fsdp_status read_list(fsdp_shm *shm, int64_t peer,
                             const fsdp_shm_reader *reader, bool *read,
                             fsdp_error *error) {
  fsdp_shm_part_list *list = &shm->part_lists[peer];
  void *parts = list->parts;
  *read = true;
  list->num_parts = reader->num_parts;
  if (list->num_parts == 0) return FSDP_OK;
  if (!fsdp_grow(&parts, &list->capacity, (size_t)list->num_parts,
                 sizeof *list->parts)) {
    return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY,
                     "out of host memory for a list of %lld gradients",
                     (long long)list->num_parts);
  }
  list->parts = parts;
  return fsdp_shm_priv_read_peer(shm, peer, reader->address, list->parts,
                                 list->num_parts * (int64_t)sizeof *list->parts,
                                 read, error);
}

fsdp_status fsdp_shm_priv_reduce_parts(fsdp_shm *shm, const fsdp_shm_op *op,
                                       const fsdp_shm_reader *readers,
                                       bool *read, fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  *read = true;
  for (int64_t rank = 0; rank < shm->world_size; rank++) {
    if (rank == shm->rank) continue;
    FSDP_TRY(read_list(shm, rank, &readers[rank], read, error));
    if (!*read) return FSDP_OK;
  }
  for (int64_t i = 0; i < op->parts.num_places; i++) {
    const fsdp_place *place = &op->parts.places[i];
    const int64_t step = room_of(shm) / place->sum_dtype.itemsize;
    for (int64_t first = 0; first < place->numel; first += step) {
      FSDP_TRY(sum_piece(shm, &op->parts, place, first,
                         min_i64(step, place->numel - first), read, error));
      if (!*read) return FSDP_OK;
    }
  }
done:
  return status;
}
