/* Host pieces: chunks, and copies that are cut where a chunk ends. */
#include "offload/host_pieces.h"

#include <inttypes.h>

#include "base/alloc.h"
#include "base/arith.h"

/* A chunk that no run has bytes in, a new one if there is none. */
static fsdp_status take_chunk(fsdp_host_pieces *pieces, fsdp_host_chunk **chunk,
                              fsdp_error *error) {
  const fsdp_device_ops *ops = pieces->ops;
  fsdp_host_chunk *taken = pieces->free;
  fsdp_status status = FSDP_OK;

  if (taken != NULL) {
    pieces->free = taken->next;
    *chunk = taken;
    return FSDP_OK;
  }
  taken = fsdp_calloc(1, sizeof *taken);
  if (taken == NULL) {
    return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY,
                     "out of host memory for the record of a chunk of "
                     "offloaded activations");
  }
  status =
      ops->host_alloc(ops->context, pieces->chunk_nbytes, &taken->data, error);
  if (status != FSDP_OK) {
    fsdp_free(taken);
    return status;
  }
  pieces->num_chunks++;
  *chunk = taken;
  return FSDP_OK;
}

static void give_chunk(fsdp_host_pieces *pieces, fsdp_host_chunk *chunk) {
  if (--chunk->num_runs > 0) return;
  if (pieces->last == chunk) pieces->last = NULL;
  chunk->next = pieces->free;
  pieces->free = chunk;
}

/* Adds a chunk to the run: there is room in its array. */
static fsdp_status add_chunk(fsdp_host_pieces *pieces, fsdp_host_run *run,
                             fsdp_error *error) {
  fsdp_host_chunk *chunk = NULL;
  fsdp_status status = take_chunk(pieces, &chunk, error);
  if (status != FSDP_OK) return status;
  chunk->num_runs++;
  run->chunks[run->num_chunks++] = chunk;
  return FSDP_OK;
}

/* Gives the chunks of the run back from the one at `first` on. */
static void cut(fsdp_host_pieces *pieces, fsdp_host_run *run, size_t first) {
  while (run->num_chunks > first) {
    give_chunk(pieces, run->chunks[--run->num_chunks]);
  }
}

fsdp_status fsdp_host_pieces_take(fsdp_host_pieces *pieces, fsdp_host_run *run,
                                  int64_t nbytes, int64_t *begin,
                                  fsdp_error *error) {
  const size_t num_before = run->num_chunks;
  const bool joins = num_before == 0 && pieces->last != NULL;
  const int64_t start = joins ? pieces->last_used : run->end;
  int64_t end = 0;
  fsdp_status status = FSDP_OK;

  if (!fsdp_add_i64(start, nbytes, &end) ||
      !fsdp_round_up_i64(end, FSDP_HOST_ALIGNMENT, &end)) {
    return FSDP_FAIL(error, FSDP_OVERFLOW,
                     "%" PRId64 " bytes of saved tensors and %" PRId64
                     " more do not fit in int64",
                     start, nbytes);
  }
  const int64_t chunk_nbytes = pieces->chunk_nbytes;
  const size_t num_needed =
      (size_t)(end / chunk_nbytes + (end % chunk_nbytes > 0 ? 1 : 0));
  if (!fsdp_grow((void **)&run->chunks, &run->capacity, num_needed,
                 sizeof *run->chunks)) {
    return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY, "chunks of saved tensors");
  }
  if (joins) {
    pieces->last->num_runs++;
    run->chunks[run->num_chunks++] = pieces->last;
  }
  while (run->num_chunks < num_needed) {
    FSDP_TRY(add_chunk(pieces, run, error));
  }
  run->end = end;
  pieces->last = run->chunks[num_needed - 1];
  pieces->last_used = end - (int64_t)(num_needed - 1) * chunk_nbytes;
  if (pieces->last_used == chunk_nbytes) pieces->last = NULL;
  *begin = start;
done:
  if (status != FSDP_OK) cut(pieces, run, num_before);
  return status;
}

void fsdp_host_pieces_give(fsdp_host_pieces *pieces, fsdp_host_run *run) {
  cut(pieces, run, 0);
  run->end = 0;
}

void fsdp_host_run_fini(fsdp_host_run *run) {
  fsdp_free(run->chunks);
}

/* A part of a copy that lies in one chunk. */
typedef struct chunk_part {
  void *data;
  int64_t nbytes;
} chunk_part;

static chunk_part part_at(const fsdp_host_pieces *pieces,
                          const fsdp_host_run *run, int64_t position,
                          int64_t nbytes) {
  const int64_t offset = position % pieces->chunk_nbytes;
  const int64_t left = pieces->chunk_nbytes - offset;
  char *chunk = run->chunks[position / pieces->chunk_nbytes]->data;
  return (chunk_part){.data = chunk + offset,
                      .nbytes = nbytes < left ? nbytes : left};
}

fsdp_status fsdp_host_pieces_download(const fsdp_host_pieces *pieces,
                                      const fsdp_host_run *run, int64_t begin,
                                      const void *device, int64_t nbytes,
                                      fsdp_error *error) {
  const fsdp_device_ops *ops = pieces->ops;
  fsdp_status status = FSDP_OK;
  for (int64_t done = 0; done < nbytes && status == FSDP_OK;) {
    const chunk_part part = part_at(pieces, run, begin + done, nbytes - done);
    status = ops->copy_to_host(ops->context, FSDP_LANE_DOWNLOAD, part.data,
                               (const char *)device + done, part.nbytes, error);
    done += part.nbytes;
  }
  return status;
}

fsdp_status fsdp_host_pieces_upload(const fsdp_host_pieces *pieces,
                                    const fsdp_host_run *run, int64_t begin,
                                    void *device, int64_t nbytes,
                                    fsdp_error *error) {
  const fsdp_device_ops *ops = pieces->ops;
  fsdp_status status = FSDP_OK;
  for (int64_t done = 0; done < nbytes && status == FSDP_OK;) {
    const chunk_part part = part_at(pieces, run, begin + done, nbytes - done);
    status = ops->copy_to_device(ops->context, FSDP_LANE_UPLOAD,
                                 (char *)device + done, part.data, part.nbytes,
                                 error);
    done += part.nbytes;
  }
  return status;
}

void fsdp_host_pieces_fini(fsdp_host_pieces *pieces) {
  while (pieces->free != NULL) {
    fsdp_host_chunk *chunk = pieces->free;
    pieces->free = chunk->next;
    pieces->ops->host_free(pieces->ops->context, chunk->data);
    fsdp_free(chunk);
  }
}
