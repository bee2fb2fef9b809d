/*
 * Segments: how they are laid out, made and opened.
 */
#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/arith.h"
#include "shm/segment_priv.h"

enum { PAGE_NBYTES = 4096 };

static_assert(ATOMIC_LLONG_LOCK_FREE == 2 && ATOMIC_INT_LOCK_FREE == 2,
              "atomics in shared memory need to be free of locks");

/* Puts num * nbytes at the next line at or after *end. */
static bool place(int64_t num, int64_t nbytes, int64_t multiple, int64_t *end,
                  int64_t *offset) {
  int64_t begin;
  int64_t total;
  if (!fsdp_round_up_i64(*end, multiple, &begin)) return false;
  if (!fsdp_mul_i64(num, nbytes, &total)) return false;
  if (!fsdp_add_i64(begin, total, end)) return false;
  *offset = begin;
  return true;
}

bool fsdp_shm_priv_layout(int64_t world_size, int64_t ring_nbytes,
                          int64_t slot_nbytes, int64_t message_nbytes,
                          int64_t direct_nbytes, fsdp_shm_geometry *geometry) {
  const int64_t num_others = world_size > 1 ? world_size - 1 : 1;
  const int64_t line = FSDP_SHM_LINE_NBYTES;
  int64_t end = sizeof(fsdp_shm_header);
  int64_t message_slot =
      message_nbytes / num_others / FSDP_SHM_MESSAGE_SLOTS / line * line;
  if (message_slot < line) message_slot = line;

  fsdp_shm_geometry g = {
      .world_size = world_size,
      .num_slots = ring_nbytes < slot_nbytes ? 1 : ring_nbytes / slot_nbytes,
      .slot_nbytes = slot_nbytes,
      .piece_nbytes = slot_nbytes / num_others / line * line,
      .message_slot_nbytes = message_slot,
      .direct_nbytes = direct_nbytes,
  };
  const int64_t counter = sizeof(fsdp_shm_counter);
  int64_t num_messages;
  if (!fsdp_mul_i64(world_size, FSDP_SHM_MESSAGE_SLOTS, &num_messages) ||
      !place(world_size, FSDP_NUM_CHANNELS * counter, line, &end, &g.tails) ||
      !place(world_size, counter, line, &end, &g.message_heads) ||
      !place(world_size, counter, line, &end, &g.message_tails) ||
      !place(num_messages, sizeof(fsdp_shm_message_header), line, &end,
             &g.message_headers) ||
      !place(world_size, FSDP_SHM_OFFERS * sizeof(fsdp_shm_offer), line, &end,
             &g.offers) ||
      !place(g.num_slots, FSDP_NUM_CHANNELS * sizeof(fsdp_shm_descriptor), line,
             &end, &g.descriptors) ||
      !place(num_messages, message_slot, PAGE_NBYTES, &end, &g.messages) ||
      !place(g.num_slots, FSDP_NUM_CHANNELS * slot_nbytes, PAGE_NBYTES, &end,
             &g.slots) ||
      !fsdp_round_up_i64(end, PAGE_NBYTES, &g.nbytes)) {
    return false;
  }
  *geometry = g;
  return true;
}

/* Maps all of an open segment. A forked child does not inherit the mapping: it
 * must not act for its parent, or keep the memory alive. */
static fsdp_status map(int descriptor, int64_t nbytes,
                       fsdp_shm_segment *segment, fsdp_error *error) {
  void *memory = mmap(NULL, (size_t)nbytes, PROT_READ | PROT_WRITE, MAP_SHARED,
                      descriptor, 0);
  if (memory == MAP_FAILED) {
    return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY,
                     "%" PRId64 " bytes of shared memory cannot be mapped (%s)",
                     nbytes, strerror(errno));
  }
  (void)madvise(memory, (size_t)nbytes, MADV_DONTFORK);
  segment->header = memory;
  segment->nbytes = nbytes;
  return FSDP_OK;
}

fsdp_status fsdp_shm_priv_segment_create(const fsdp_shm_geometry *geometry,
                                         fsdp_shm_segment *segment,
                                         int *descriptor, fsdp_error *error) {
  int file = -1;
  fsdp_status status = FSDP_OK;
  FSDP_TRY(fsdp_shm_priv_file_create("fsdp_c_shm", geometry->nbytes,
                                     geometry->world_size, &file, error));
  FSDP_TRY(map(file, geometry->nbytes, segment, error));
  *descriptor = file;
  file = -1;
done:
  if (file >= 0) close(file);
  return status;
}

fsdp_status fsdp_shm_priv_segment_open(int64_t pid, int64_t descriptor,
                                       int64_t nbytes, uint64_t token,
                                       fsdp_shm_segment *segment,
                                       fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  fsdp_shm_segment mapped = {0};
  int file = -1;
  FSDP_TRY(fsdp_shm_priv_file_open(pid, descriptor, nbytes, &file, error));
  FSDP_TRY(map(file, nbytes, &mapped, error));
  if (mapped.header->token != token) {
    status = FSDP_FAIL(error, FSDP_BACKEND,
                       "descriptor %" PRId64 " of process %" PRId64
                       " is not the segment that was announced",
                       descriptor, pid);
    goto done;
  }
  *segment = mapped;
  mapped.header = NULL;
done:
  fsdp_shm_priv_segment_close(&mapped);
  if (file >= 0) close(file);
  return status;
}

void fsdp_shm_priv_segment_close(fsdp_shm_segment *segment) {
  if (segment->header == NULL) return;
  (void)munmap(segment->header, (size_t)segment->nbytes);
  segment->header = NULL;
}
