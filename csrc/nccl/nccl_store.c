/*
 * The store as calls of a transport use it: a wait for a key ends when the
 * transport fails.
 */
#include "nccl/nccl_priv.h"

/* How long one request waits in the store: another thread may need the same
 * connection, and the transport may fail. */
enum { SLICE_MS = 500 };

static fsdp_status set(void *context, const char *key, const void *value,
                       int64_t nbytes, fsdp_error *error) {
  const fsdp_store *store = &((fsdp_nccl_transport *)context)->store;
  return store->set(store->context, key, value, nbytes, error);
}

static fsdp_status add(void *context, const char *key, int64_t change,
                       int64_t *sum, fsdp_error *error) {
  const fsdp_store *store = &((fsdp_nccl_transport *)context)->store;
  return store->add(store->context, key, change, sum, error);
}

static fsdp_status get(void *context, const char *key, int64_t timeout_ms,
                       void *value, int64_t capacity, int64_t *nbytes,
                       fsdp_error *error) {
  fsdp_nccl_transport *transport = context;
  const fsdp_store *store = &transport->store;
  const int64_t deadline_ms = fsdp_nccl_priv_now_ms() + timeout_ms;
  for (;;) {
    const int64_t begin_ms = fsdp_nccl_priv_now_ms();
    int64_t slice_ms = deadline_ms - begin_ms;
    if (slice_ms > SLICE_MS) slice_ms = SLICE_MS;
    if (slice_ms < 1) slice_ms = 1;
    const fsdp_status status = store->get(store->context, key, slice_ms, value,
                                          capacity, nbytes, error);
    if (status == FSDP_OK) return FSDP_OK;
    const int64_t now_ms = fsdp_nccl_priv_now_ms();
    /* A store that fails long before the time limit does not work. */
    const bool is_broken = now_ms - begin_ms < slice_ms / 2;
    if (is_broken || now_ms >= deadline_ms ||
        !fsdp_nccl_priv_is_healthy(transport)) {
      return status;
    }
  }
}

fsdp_store fsdp_nccl_priv_store_of(fsdp_nccl_transport *transport) {
  return (fsdp_store){.context = transport, .set = set, .get = get, .add = add};
}
