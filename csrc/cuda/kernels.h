/*
 * Kernels over CUDA memory: pack, norm and scale of many tensors with one
 * launch each. They are in a library of their own,
 * fsdp_c/_cuda.so, which includes neither torch nor Python and is opened at run
 * time. Its one entry point returns a table of functions.
 *
 * Every function enqueues on `stream` (a cudaStream_t) of the current device
 * and returns; none waits for the device. Items and spans are read before it
 * returns: they become parameters of the kernel, at most FSDP_CUDA_MAX_ITEMS
 * per launch; more items take more launches. Rounding and statuses are those of
 * host/kernels.h (Note [Rounding]); FSDP_BACKEND means that a launch failed.
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

enum { FSDP_CUDA_KERNELS_VERSION = 3, FSDP_CUDA_MAX_ITEMS = 960 };

typedef struct fsdp_cuda_kernels {
  int64_t version; /* FSDP_CUDA_KERNELS_VERSION */

  /* As fsdp_host_pack; no item writes what another one touches. */
  fsdp_status (*pack)(const fsdp_pack_item *items, int64_t num_items,
                      double scale, void *stream, fsdp_error *error);

  /* Bytes of device memory that `norm` of these spans needs as scratch, at
   * least 8. */
  fsdp_status (*norm_scratch)(const fsdp_host_span *spans, int64_t num_spans,
                              int64_t *nbytes, fsdp_error *error);
  /* The `power` norm of all elements together; power > 0 or infinity. NaN and
   * infinity propagate; no elements: 0. `norm` is in device memory. Two stages,
   * in an order that depends only on the sizes, so the bits are the same every
   * time. */
  fsdp_status (*norm)(const fsdp_host_span *spans, int64_t num_spans,
                      double power, void *scratch, double *norm, void *stream,
                      fsdp_error *error);

  /* data *= *scale for every span, which must be writable; `scale` is in device
   * memory, so that the host does not wait for it. */
  fsdp_status (*scale)(const fsdp_host_span *spans, int64_t num_spans,
                       const float *scale, void *stream, fsdp_error *error);
} fsdp_cuda_kernels;

/* The table; static. NULL, with the reason in `error`, when the driver is older
 * than the CUDA that the library was built with. */
const fsdp_cuda_kernels *fsdp_cuda_kernels_table(fsdp_error *error);

#ifdef __cplusplus
}
#endif
#endif /* FSDP_CUDA_KERNELS_H */
