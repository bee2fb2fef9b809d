/*
 * Regions of shards in one memory file, which the ranks read in place. See Note
 * [Shards in place] in port/transport.h. The file holds, each from a page on,
 * how often each rank closed, and the region.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* madvise */
#endif
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/dtypes.h"
#include "shm/shm_priv.h"

/* What a rank tells the others, in turn. */
typedef struct notice {
  int64_t descriptor; /* of the file, in rank 0's process; -1: none */
  int64_t nbytes;     /* of the file; 0: this rank cannot */
} notice;

static int64_t in_pages(int64_t nbytes) {
  const int64_t page = (int64_t)sysconf(_SC_PAGESIZE);
  return (nbytes + page - 1) / page * page;
}

/* Gathers the notices of all ranks. */
static fsdp_status tell(fsdp_shm *shm, const char *label, const notice *mine,
                        notice *all, fsdp_error *error) {
  static const fsdp_dtype bytes = {.code = FSDP_DTYPE_UINT8, .itemsize = 1};
  fsdp_transport *transport = &shm->base;
  const fsdp_call call = {.channel = FSDP_CHANNEL_GATHER, .label = label};
  uint64_t ticket = 0;
  fsdp_status status = FSDP_OK;
  FSDP_TRY(transport->ops->all_gather(transport, &call, all, mine, sizeof *mine,
                                      bytes, &ticket, error));
  FSDP_TRY(transport->ops->wait(transport, call.channel, ticket, error));
done:
  return status;
}

/* Copies bytes of the region into the file. */
static bool write_range(const fsdp_shared *self, fsdp_region region,
                        fsdp_region_range range, int file) {
  for (int64_t done = 0; done < range.nbytes;) {
    const int64_t at = range.offset + done;
    const ssize_t num = pwrite(file, (const char *)region.data + at,
                               (size_t)(range.nbytes - done),
                               (off_t)(self->closed_nbytes + at));
    if (num < 0 && errno == EINTR) continue;
    if (num <= 0) return false;
    done += num;
  }
  return true;
}

/* Maps the file, in the end over the region, with this rank's shards in it.
 * False when the system refuses. */
static bool join(fsdp_shared *self, fsdp_region region,
                 const fsdp_region_range *own, int64_t num_own, int file) {
  const int access = PROT_READ | PROT_WRITE;
  void *closed =
      mmap(NULL, (size_t)self->closed_nbytes, access, MAP_SHARED, file, 0);
  if (closed == MAP_FAILED) return false;
  self->closed = closed;
  void *whole =
      mmap(NULL, (size_t)self->nbytes, access, MAP_PRIVATE | MAP_NORESERVE,
           file, (off_t)self->closed_nbytes);
  if (whole == MAP_FAILED) return false;
  self->whole = whole;
  for (int64_t i = 0; i < num_own; i++) {
    if (!write_range(self, region, own[i], file)) return false;
  }
  if (mmap(region.data, (size_t)self->nbytes, access, MAP_SHARED | MAP_FIXED,
           file, (off_t)self->closed_nbytes) == MAP_FAILED) {
    return false;
  }
  if (region.is_shared != NULL) *region.is_shared = true;
  return true;
}

void fsdp_shm_priv_unshare(fsdp_shared *shared) {
  if (shared == NULL) return;
  if (shared->whole != NULL) {
    (void)munmap(shared->whole, (size_t)shared->nbytes);
  }
  if (shared->closed != NULL) {
    (void)munmap(shared->closed, (size_t)shared->closed_nbytes);
  }
  fsdp_free(shared);
}

/* NULL when memory is out. */
static fsdp_shared *create(const fsdp_shm *shm, const char *label,
                           int64_t nbytes) {
  fsdp_shared *self = fsdp_calloc(1, sizeof *self);
  if (self == NULL) return NULL;
  self->closed_nbytes =
      in_pages(shm->world_size * (int64_t)sizeof *self->closed);
  self->nbytes = in_pages(nbytes);
  self->owner = getpid();
  (void)snprintf(self->label, sizeof self->label, "%s", label);
  return self;
}

fsdp_status fsdp_shm_priv_share(fsdp_transport *transport, const char *label,
                                fsdp_region region, int64_t nbytes,
                                const fsdp_region_range *own, int64_t num_own,
                                void **whole, fsdp_shared **shared,
                                fsdp_error *error) {
  fsdp_shm *shm = (fsdp_shm *)transport;
  fsdp_status status = FSDP_OK;
  bool can_all = false;
  int created = -1;
  int opened = -1;
  notice mine = {.descriptor = -1};
  if (shm->page_map < 0) {
    shm->page_map = fsdp_shm_priv_open_page_map();
    shm->counts_faults = shm->page_map >= 0 && fsdp_shm_priv_counts_faults();
  }
  notice *all = fsdp_calloc((size_t)shm->world_size, sizeof *all);
  if (all == NULL) {
    return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY,
                     "out of host memory while %" PRId64 " ranks share shards",
                     shm->world_size);
  }
  fsdp_shared *self = region.data == NULL ? NULL : create(shm, label, nbytes);
  can_all = self != NULL;
  if (can_all) mine.nbytes = self->closed_nbytes + self->nbytes;
  if (can_all && shm->rank == 0 &&
      fsdp_shm_priv_file_create("fsdp_c_shards", mine.nbytes, 1, &created,
                                NULL) == FSDP_OK) {
    mine.descriptor = created;
  }
  FSDP_TRY(tell(shm, label, &mine, all, error));
  for (int64_t rank = 0; rank < shm->world_size; rank++) {
    can_all = can_all && mine.nbytes > 0 && all[rank].nbytes == mine.nbytes;
  }
  const bool has_joined =
      can_all && all[0].descriptor >= 0 &&
      fsdp_shm_priv_file_open(shm->peers[0].process.pid, all[0].descriptor,
                              mine.nbytes, &opened, NULL) == FSDP_OK &&
      join(self, region, own, num_own, opened);
  if (!has_joined) mine.nbytes = 0;
  FSDP_TRY(tell(shm, label, &mine, all, error));
  for (int64_t rank = 0; rank < shm->world_size; rank++) {
    can_all = can_all && all[rank].nbytes != 0;
  }
  if (can_all) {
    *whole = self->whole;
    *shared = self;
    self = NULL;
  }
done:
  if (created >= 0) close(created);
  if (opened >= 0) close(opened);
  fsdp_shm_priv_unshare(self);
  fsdp_free(all);
  return status;
}

/* Note [Pages without a fault] */
static bool may_have_written(const fsdp_shm *shm, const fsdp_shared *shared) {
  return !shm->counts_faults ||
         fsdp_shm_priv_num_faults() != shared->num_faults;
}

void fsdp_shm_priv_open(const fsdp_shm *shm, fsdp_shared *shared) {
  if (shm->counts_faults) shared->num_faults = fsdp_shm_priv_num_faults();
  shared->is_open = true;
  shared->num_opened++;
}

void fsdp_shm_priv_close(fsdp_shm *shm, fsdp_shared *shared) {
  if (!shared->is_open || shared->owner != getpid()) return;
  shared->is_open = false;
  /* Mapping all pages again takes longer than looking for those that differ. */
  if (may_have_written(shm, shared) &&
      fsdp_shm_priv_has_own_pages(shm->page_map, shared->whole,
                                  shared->nbytes)) {
    (void)madvise(shared->whole, (size_t)shared->nbytes, MADV_DONTNEED);
  }
  (void)atomic_fetch_add(&shared->closed[shm->rank].value, 1);
  fsdp_shm_priv_ring_all(shm);
}
