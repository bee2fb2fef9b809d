/*
 * Kernels over CUDA memory: pack, cast, accumulate, norm and scale of many
 * tensors with one launch each. They live in a library of their own,
 * fsdp_c/_cuda.so, which knows neither torch nor Python and is opened at run
 * time; its one entry point gives a table of functions.
 *
 * Every function enqueues on `stream` (a cudaStream_t) of the current device
 * and returns; none waits for the device. Items and spans are read before it
 * returns: they travel as parameters of the kernel, at most
 * FSDP_CUDA_MAX_ITEMS per launch, more take more launches. Roundings are those
 * of Note [Rounding] in host/kernels.h, and so are the statuses; FSDP_BACKEND
 * says that a launch failed.
 */
#ifndef FSDP_CUDA_KERNELS_H
#define FSDP_CUDA_KERNELS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "base/types.h"
#include "host/kernels.h"
#include "port/device.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { FSDP_CUDA_KERNELS_VERSION = 1, FSDP_CUDA_MAX_ITEMS = 960 };

typedef struct fsdp_cuda_kernels {
  int64_t version; /* FSDP_CUDA_KERNELS_VERSION */

  /* As fsdp_host_pack. With one item it is cast or accumulate. */
  fsdp_status (*pack)(void *destination, fsdp_dtype dtype,
                      const fsdp_pack_item *items, int64_t num_items,
                      double scale, void *stream, fsdp_error *error);

  /* Bytes of device memory that `norm` of these spans needs as scratch, at
   * least 8. */
  fsdp_status (*norm_scratch)(const fsdp_host_span *spans, int64_t num_spans,
                              int64_t *nbytes, fsdp_error *error);
  /* As fsdp_host_norm; `norm` is in device memory. Two stages, in an order that
   * depends on the sizes alone: the same bits every time. */
  fsdp_status (*norm)(const fsdp_host_span *spans, int64_t num_spans,
                      double power, void *scratch, double *norm, void *stream,
                      fsdp_error *error);

  /* data *= *scale for every span (of memory that may be written); `scale` is
   * in device memory, so that the host need not know it. */
  fsdp_status (*scale)(const fsdp_host_span *spans, int64_t num_spans,
                       const float *scale, void *stream, fsdp_error *error);
} fsdp_cuda_kernels;

/* The table, static; NULL, with the reason in `error`, when this machine's
 * driver is older than the CUDA that the library was built with. */
const fsdp_cuda_kernels *fsdp_cuda_kernels_table(fsdp_error *error);

#ifdef __cplusplus
}
#endif
#endif /* FSDP_CUDA_KERNELS_H */
