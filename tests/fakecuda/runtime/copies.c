/* Copies and fills, in the order of a stream. */
#include <stdlib.h>
#include <string.h>

#include "fake.h"

typedef struct copy {
  char *to;
  const char *from; /* `staged`, or where it is */
  size_t nbytes;    /* of a row */
  size_t height;
  size_t to_pitch;
  size_t from_pitch;
  int value; /* of a fill */
  char staged[];
} copy;

static void run_copy(void *argument) {
  const copy *self = argument;
  if (fakecuda_is_noop() && self->nbytes > 4096) return;
  for (size_t i = 0; i < self->height; i++) {
    memmove(self->to + i * self->to_pitch, self->from + i * self->from_pitch,
            self->nbytes);
  }
}

static void run_fill(void *argument) {
  const copy *self = argument;
  if (fakecuda_is_noop() && self->nbytes > 4096) return;
  memset(self->to, self->value, self->nbytes);
}

/* Refuses memory of a device that is not one block from its begin to
 * its end. */
static cudaError_t check(const char *call, const void *data, size_t nbytes,
                         const fake_region *region) {
  if (region->kind == FAKE_UNKNOWN ||
      (const char *)data + nbytes <= region->data + region->nbytes) {
    return cudaSuccess;
  }
  /* Segments that the driver mapped side by side are one range. */
  const fake_region next = fake_region_of(region->data + region->nbytes);
  if (region->kind == FAKE_MAPPED && next.kind == FAKE_MAPPED) {
    return check(call, data, nbytes, &next);
  }
  return fake_refuse(call, cudaErrorInvalidValue,
                     "%zu bytes at %p reach over the end of their memory",
                     nbytes, data);
}

static bool is_device(fake_kind kind) {
  return kind == FAKE_DEVICE || kind == FAKE_MAPPED;
}

/* Whether a kind that was said is the memory's. */
static cudaError_t check_kind(const char *call, enum cudaMemcpyKind kind,
                              const fake_region *to, const fake_region *from) {
  const bool to_device =
      kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  const bool from_device =
      kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  if (kind == cudaMemcpyDefault ||
      ((!to_device || to->kind != FAKE_UNKNOWN) &&
       (!from_device || from->kind != FAKE_UNKNOWN))) {
    return cudaSuccess;
  }
  return fake_refuse(call, cudaErrorInvalidValue,
                     "memory of the host, said to be a device's");
}

static cudaError_t enqueue(const char *call, const copy *wanted,
                           enum cudaMemcpyKind kind, cudaStream_t handle,
                           bool is_waited_for) {
  fake_stream *stream = fake_stream_find(handle);
  if (stream == NULL) {
    return fake_refuse(call, cudaErrorInvalidResourceHandle,
                       "there is no such stream, or it was destroyed");
  }
  if (wanted->nbytes == 0 || wanted->height == 0) {
    return fake_result(cudaSuccess);
  }
  const fake_region to = fake_region_of(wanted->to);
  const fake_region from = fake_region_of(wanted->from);
  const size_t rows = wanted->height - 1;
  cudaError_t code = check_kind(call, kind, &to, &from);
  if (code == cudaSuccess) {
    code =
        check(call, wanted->to, rows * wanted->to_pitch + wanted->nbytes, &to);
  }
  if (code == cudaSuccess) {
    code = check(call, wanted->from, rows * wanted->from_pitch + wanted->nbytes,
                 &from);
  }
  if (code != cudaSuccess) return code;
  /* Memory of the host that is not pinned has been read when the call returns,
   * and is written when it returns. */
  const bool is_staged = from.kind == FAKE_UNKNOWN && is_device(to.kind);
  const bool is_written = to.kind == FAKE_UNKNOWN && is_device(from.kind);
  const size_t staged = is_staged ? wanted->nbytes * wanted->height : 0;
  copy *made = malloc(sizeof *made + staged);
  if (made == NULL) return fake_result(cudaErrorMemoryAllocation);
  *made = *wanted;
  if (is_staged) {
    for (size_t i = 0; i < wanted->height; i++) {
      memcpy(made->staged + i * wanted->nbytes,
             wanted->from + i * wanted->from_pitch, wanted->nbytes);
    }
    made->from = made->staged;
    made->from_pitch = wanted->nbytes;
  }
  const bool is_host_waiting = is_waited_for || is_written;
  if (is_host_waiting && fake_graph_of(stream) != 0) {
    free(made);
    fake_graph_fail(call, "the host waits for a copy");
    return fake_refuse(call, cudaErrorStreamCaptureUnsupported,
                       "the host waits, and the stream is capturing");
  }
  const uint64_t ticket = fake_stream_push(stream, run_copy, free, made);
  if (!is_host_waiting) return fake_result(cudaSuccess);
  fake_count(FAKE_SYNCHRONIZATIONS);
  fake_stream_wait_until(stream, ticket);
  return fake_enter(call);
}

static copy flat(void *to, const void *from, size_t nbytes) {
  return (copy){.to = to, .from = from, .nbytes = nbytes, .height = 1};
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t nbytes,
                            enum cudaMemcpyKind kind, cudaStream_t stream) {
  FAKE_ENTER();
  fake_count(FAKE_MEMCPYS);
  const copy wanted = flat(to, from, nbytes);
  return enqueue(__func__, &wanted, kind, stream, false);
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t nbytes,
                       enum cudaMemcpyKind kind) {
  FAKE_ENTER();
  FAKE_ALLOWED();
  fake_count(FAKE_MEMCPYS);
  const copy wanted = flat(to, from, nbytes);
  return enqueue(__func__, &wanted, kind, NULL, true);
}

cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from,
                                int from_device, size_t nbytes,
                                cudaStream_t stream) {
  FAKE_ENTER();
  fake_count(FAKE_MEMCPYS);
  if (fake_region_of(to).device != to_device ||
      fake_region_of(from).device != from_device) {
    FAKE_REFUSE(cudaErrorInvalidValue,
                "the memory is not of the devices %d and %d", to_device,
                from_device);
  }
  const copy wanted = flat(to, from, nbytes);
  return enqueue(__func__, &wanted, cudaMemcpyDefault, stream, false);
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from,
                              size_t from_pitch, size_t width, size_t height,
                              enum cudaMemcpyKind kind, cudaStream_t stream) {
  FAKE_ENTER();
  fake_count(FAKE_MEMCPYS);
  const copy wanted = {.to = to,
                       .from = from,
                       .nbytes = width,
                       .height = height,
                       .to_pitch = to_pitch,
                       .from_pitch = from_pitch};
  return enqueue(__func__, &wanted, kind, stream, false);
}

cudaError_t cudaMemsetAsync(void *data, int value, size_t nbytes,
                            cudaStream_t handle) {
  FAKE_ENTER();
  fake_stream *stream = fake_stream_find(handle);
  if (stream == NULL) {
    FAKE_REFUSE(cudaErrorInvalidResourceHandle,
                "there is no such stream, or it was destroyed");
  }
  if (nbytes == 0) return fake_result(cudaSuccess);
  const fake_region region = fake_region_of(data);
  if (region.kind == FAKE_UNKNOWN) {
    FAKE_REFUSE(cudaErrorInvalidValue, "%p is not a device's", data);
  }
  const cudaError_t code = check(__func__, data, nbytes, &region);
  if (code != cudaSuccess) return code;
  copy *made = malloc(sizeof *made);
  if (made == NULL) return fake_result(cudaErrorMemoryAllocation);
  *made = (copy){.to = data, .nbytes = nbytes, .value = value};
  fake_stream_push(stream, run_fill, free, made);
  return fake_result(cudaSuccess);
}

cudaError_t cudaMemset(void *data, int value, size_t nbytes) {
  FAKE_ENTER();
  FAKE_ALLOWED();
  return cudaMemsetAsync(data, value, nbytes, NULL);
}

cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from,
                               size_t nbytes, size_t offset,
                               enum cudaMemcpyKind kind) {
  FAKE_ENTER();
  (void)symbol;
  (void)from;
  (void)offset;
  (void)kind;
  FAKE_REFUSE(cudaErrorNotSupported, "%zu bytes: no kernel would read them",
              nbytes);
}
