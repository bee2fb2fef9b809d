/*
 * Host pieces: pinned host memory for bytes that come from the device and go
 * back there. It lies in chunks of one size, which are kept for the run and
 * used again, so that a step allocates nothing once it has as many as it needs.
 *
 * A *run* is what is taken together: positions in one or more chunks, one
 * behind the other. Runs that follow each other share a chunk. Copies wait for
 * nothing here; the caller orders the lanes.
 */
#ifndef FSDP_OFFLOAD_HOST_PIECES_H
#define FSDP_OFFLOAD_HOST_PIECES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "port/device.h"

enum { FSDP_HOST_ALIGNMENT = 64 };

typedef struct fsdp_host_chunk {
  void *data;
  int64_t num_runs;             /* that have bytes in it */
  struct fsdp_host_chunk *next; /* of the list that it is in */
} fsdp_host_chunk;

typedef struct fsdp_host_pieces {
  const fsdp_device_ops *ops; /* borrowed */
  int64_t chunk_nbytes;       /* a multiple of FSDP_HOST_ALIGNMENT */
  fsdp_host_chunk *free;      /* list */
  fsdp_host_chunk *last;      /* where the next run goes on; NULL: anywhere */
  int64_t last_used;          /* bytes of it */
  int64_t num_chunks;
} fsdp_host_pieces;

typedef struct fsdp_host_run {
  fsdp_host_chunk **chunks;
  size_t num_chunks;
  size_t capacity;
  int64_t end; /* of what is taken, from the start of the first chunk */
} fsdp_host_run;

/* Takes `nbytes` (>= 1) more for the run, which is empty (zeroed) at first.
 * begin [out] their position, for the copies.
 * FSDP_OVERFLOW, FSDP_OUT_OF_MEMORY: the run is as before. */
FSDP_NODISCARD fsdp_status fsdp_host_pieces_take(fsdp_host_pieces *pieces,
                                                 fsdp_host_run *run,
                                                 int64_t nbytes, int64_t *begin,
                                                 fsdp_error *error);

/* Gives all of the run back; it can be filled again. Copies of it that are
 * still in flight must be ordered before later ones. Cannot fail. */
void fsdp_host_pieces_give(fsdp_host_pieces *pieces, fsdp_host_run *run);

/* Frees the run's own memory, after its bytes were given back. Cannot fail. */
void fsdp_host_run_fini(fsdp_host_run *run);

/* Copies `nbytes` at position `begin` of the run, from the device or to it. */
FSDP_NODISCARD fsdp_status fsdp_host_pieces_download(
    const fsdp_host_pieces *pieces, const fsdp_host_run *run, int64_t begin,
    const void *device, int64_t nbytes, fsdp_error *error);
FSDP_NODISCARD fsdp_status fsdp_host_pieces_upload(
    const fsdp_host_pieces *pieces, const fsdp_host_run *run, int64_t begin,
    void *device, int64_t nbytes, fsdp_error *error);

/* Frees all chunks; no run has bytes in them, and no copy is in flight. Cannot
 * fail. */
void fsdp_host_pieces_fini(fsdp_host_pieces *pieces);

#endif /* FSDP_OFFLOAD_HOST_PIECES_H */
