/*
 * Collectives that read the other ranks' buffers where they are, without a
 * ring. See Note [Direct calls] in shm_priv.h.
 */
#include "shm/shm_priv.h"

static int64_t min_i64(int64_t a, int64_t b) {
  return a < b ? a : b;
}

static uint64_t address_of(const void *memory) {
  return (uint64_t)(uintptr_t)memory;
}

uint64_t fsdp_shm_priv_direct_address(const fsdp_shm *shm,
                                      const fsdp_shm_op *op) {
  const bool is_gather = op->descriptor.kind == FSDP_SHM_ALL_GATHER;
  if (op->descriptor.kind == FSDP_SHM_OPEN) return 0;
  if (op->descriptor.kind == FSDP_SHM_REDUCE_PARTS) {
    return address_of(op->parts.parts);
  }
  return address_of(op->output + (is_gather ? shm->rank * op->nbytes : 0));
}

fsdp_status fsdp_shm_priv_copy_direct(fsdp_shm *shm, const fsdp_shm_op *op,
                                      int64_t peer, uint64_t address,
                                      bool *read, fsdp_error *error) {
  *read = true;
  char *to = op->output;
  if (op->descriptor.kind == FSDP_SHM_OPEN) return FSDP_OK;
  if (op->descriptor.kind == FSDP_SHM_ALL_GATHER) {
    to += peer * op->nbytes;
  } else if (peer != op->descriptor.root) {
    return FSDP_OK;
  }
  return fsdp_shm_priv_read_peer(shm, peer, address, to, op->nbytes, read,
                                 error);
}

/* Where the part of rank `rank` begins in the buffer of a reduction. */
static int64_t part_begin(const fsdp_shm *shm, const fsdp_shm_op *op,
                          int64_t rank) {
  const int64_t line = FSDP_SHM_LINE_NBYTES;
  if (!op->is_split) return rank * op->nbytes;
  const int64_t each = op->nbytes / shm->world_size / line * line + line;
  return min_i64(rank * each, op->nbytes);
}

/* Sums bytes [begin, end) of the buffers into this rank's. */
static fsdp_status sum_direct(fsdp_shm *shm, const fsdp_shm_op *op,
                              const fsdp_shm_reader *readers, int64_t begin,
                              int64_t end, bool *read, fsdp_error *error) {
  const int64_t line = FSDP_SHM_LINE_NBYTES;
  const int64_t room = shm->scratch_nbytes / shm->world_size / line * line;
  for (int64_t at = begin; at < end; at += room) {
    const int64_t nbytes = min_i64(room, end - at);
    char *scratch = shm->scratch;
    for (int64_t rank = 0; rank < shm->world_size; rank++) {
      const int64_t turn = op->is_split ? rank : fsdp_shm_priv_turn(shm, rank);
      shm->pieces[turn] = rank == shm->rank ? op->output + at : scratch;
      if (rank == shm->rank) continue;
      const fsdp_status status = fsdp_shm_priv_read_peer(
          shm, rank, readers[rank].address + (uint64_t)at, scratch, nbytes,
          read, error);
      if (status != FSDP_OK || !*read) return status;
      scratch += room;
    }
    fsdp_shm_priv_sum(op->output + at, op->dtype, shm->pieces, shm->world_size,
                      nbytes / op->dtype.itemsize);
  }
  return FSDP_OK;
}

fsdp_status fsdp_shm_priv_reduce_direct(fsdp_shm *shm, const fsdp_shm_op *op,
                                        const fsdp_shm_reader *readers,
                                        bool is_sum, bool *read,
                                        fsdp_error *error) {
  *read = true;
  if (op->descriptor.kind == FSDP_SHM_REDUCE_PARTS) {
    return fsdp_shm_priv_reduce_parts(shm, op, readers, read, error);
  }
  if (!is_sum) {
    return sum_direct(shm, op, readers, part_begin(shm, op, shm->rank),
                      part_begin(shm, op, shm->rank + 1), read, error);
  }
  for (int64_t rank = 0; rank < shm->world_size; rank++) {
    const int64_t begin = part_begin(shm, op, rank);
    const int64_t end = part_begin(shm, op, rank + 1);
    if (rank == shm->rank || begin == end) continue;
    const fsdp_status status = fsdp_shm_priv_read_peer(
        shm, rank, readers[rank].address + (uint64_t)begin, op->output + begin,
        end - begin, read, error);
    if (status != FSDP_OK || !*read) return status;
  }
  return FSDP_OK;
}
