/*
 * CUDA graphs: while a thread captures one in the global mode, many calls of
 * other threads (cudaEventQuery, for one) fail and invalidate the capture,
 * unless those threads are in the relaxed mode.
 */
#include <dlfcn.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

#include "nccl/nccl_priv.h"

typedef int (*exchange_mode)(int *mode);

enum { RELAXED = 2 }; /* the same number in the driver and in the runtime */

/* The driver's call, or that of the runtime that torch has loaded. Both set the
 * same mode. */
static exchange_mode find_exchange(void) {
  static const struct {
    const char *library;
    const char *function;
  } places[] = {
      {"libcuda.so.1", "cuThreadExchangeStreamCaptureMode"},
      {"libc10_cuda.so", "cudaThreadExchangeStreamCaptureMode"},
  };
  exchange_mode found = NULL;
  for (size_t i = 0; i < sizeof places / sizeof places[0]; i++) {
    /* Never closed: the library is in use by CUDA itself. */
    void *handle = dlopen(places[i].library, RTLD_NOW | RTLD_NOLOAD);
    void *address = handle == NULL ? NULL : dlsym(handle, places[i].function);
    if (address == NULL) continue;
    memcpy(&found, &address, sizeof address);
    return found;
  }
  return NULL;
}

bool fsdp_nccl_relax_capture(void) {
  static _Atomic(exchange_mode) known; /* NULL at first */
  static _Thread_local bool is_relaxed = false;
  int mode = RELAXED;
  if (is_relaxed) return true;
  exchange_mode exchange = atomic_load(&known);
  if (exchange == NULL) {
    exchange = find_exchange(); /* another thread finds the same */
    if (exchange == NULL) return false;
    atomic_store(&known, exchange);
  }
  is_relaxed = exchange(&mode) == 0;
  return is_relaxed;
}

fsdp_nccl_capture_error fsdp_nccl_priv_capture_error(const fsdp_error *error) {
  /* cudaErrorCapturedEvent: "... on an event last recorded in a capturing
   * stream". CUDA's other errors about captures name a capture or a capturing
   * stream. */
  if (strcasestr(error->message, "last recorded in a capturing") != NULL ||
      strstr(error->message, "CapturedEvent") != NULL) {
    return FSDP_NCCL_EVENT_CAPTURED;
  }
  const bool is_other = strcasestr(error->message, "captur") != NULL;
  return is_other ? FSDP_NCCL_CAPTURE_RUNS : FSDP_NCCL_NO_CAPTURE_ERROR;
}
