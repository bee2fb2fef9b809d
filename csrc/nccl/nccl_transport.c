/*
 * Creates, checks and destroys a NCCL transport.
 */
#include "nccl/nccl_transport.h"

#include <inttypes.h>
#include <limits.h>
#include <string.h>

#include "base/alloc.h"
#include "nccl/nccl_priv.h"

void fsdp_nccl_options_init(fsdp_nccl_options *options) {
  enum { TEN_MINUTES_MS = 600000 };
  *options = (fsdp_nccl_options){
      .init_timeout_ms = TEN_MINUTES_MS,
      .timeout_ms = TEN_MINUTES_MS,
      .grace_ms = 2000,
      .leave_ms = 2000,
      .poll_ms = 200,
      .tuning =
          {
              .cga_cluster_size = FSDP_NCCL_CONFIG_UNDEFINED,
              .min_ctas = FSDP_NCCL_CONFIG_UNDEFINED,
              .max_ctas = FSDP_NCCL_CONFIG_UNDEFINED,
              .split_share = FSDP_NCCL_CONFIG_UNDEFINED,
          },
  };
}

static void destroy(fsdp_transport *base) {
  enum { MORE_MS = 1000 }; /* for errands that are about to end */
  fsdp_nccl_transport *transport;
  fsdp_error reason;
  if (base == NULL) return;
  transport = fsdp_nccl_priv_of(base);
  if (fsdp_nccl_priv_is_forked(transport)) {
    fsdp_nccl_priv_free(transport); /* the rest is the parent's */
    return;
  }
  fsdp_nccl_priv_unwatch(transport);
  (void)FSDP_FAIL(&reason, FSDP_INVALID_STATE,
                  "rank %" PRId64 " of %" PRId64 " has left its NCCL group",
                  transport->rank, transport->world_size);
  int64_t deadline_ms = fsdp_nccl_priv_now_ms() + transport->options.leave_ms;
  fsdp_nccl_priv_leave(transport, &reason, &deadline_ms);
  if (fsdp_nccl_priv_errands_end(
          transport,
          fsdp_nccl_priv_now_ms() + transport->options.grace_ms + MORE_MS)) {
    fsdp_nccl_priv_free(transport);
  }
}

static fsdp_status check(fsdp_transport *base, fsdp_error *error) {
  fsdp_nccl_transport *transport = fsdp_nccl_priv_of(base);
  if (fsdp_nccl_priv_is_forked(transport)) return FSDP_OK;
  for (int i = 0; i < FSDP_NUM_CHANNELS; i++) {
    fsdp_nccl_priv_poll(transport, (fsdp_channel)i);
  }
  return fsdp_nccl_priv_first_error(transport, false, error);
}

static const fsdp_transport_ops OPS = {
    .name = "nccl",
    .is_host = false,
    .reads_labels = true,
    .can_capture = true,
    .destroy = destroy,
    .group_begin = fsdp_nccl_priv_group_begin,
    .group_end = fsdp_nccl_priv_group_end,
    .all_gather = fsdp_nccl_priv_all_gather,
    .broadcast = fsdp_nccl_priv_broadcast,
    .reduce_scatter = fsdp_nccl_priv_reduce_scatter,
    .reduce_scatter_mean = fsdp_nccl_priv_reduce_scatter_mean,
    .all_reduce = fsdp_nccl_priv_all_reduce,
    .end_of = fsdp_nccl_priv_end_of,
    .check = check,
};

static fsdp_status check_arguments(const fsdp_nccl_options *options,
                                   int64_t rank, int64_t world_size,
                                   fsdp_error *error) {
  if (world_size < 1 || world_size > INT_MAX || rank < 0 ||
      rank >= world_size) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "need 0 <= rank < world_size, got rank %" PRId64
                     " and world_size %" PRId64,
                     rank, world_size);
  }
  enum { KEY_ROOM = 64 }; /* for the rest of a key */
  if (options->prefix == NULL ||
      strlen(options->prefix) > FSDP_NCCL_KEY_NBYTES - KEY_ROOM) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "need a prefix for the store of at most %d bytes",
                     FSDP_NCCL_KEY_NBYTES - KEY_ROOM);
  }
  if (options->init_timeout_ms < 1 || options->timeout_ms < 0 ||
      options->grace_ms < 0 || options->leave_ms < 0 || options->poll_ms < 0) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "times of the NCCL transport must not be negative, nor 0 "
                     "to join: init %" PRId64 ", operation %" PRId64
                     ", grace %" PRId64 ", leave %" PRId64 ", poll %" PRId64
                     " ms",
                     options->init_timeout_ms, options->timeout_ms,
                     options->grace_ms, options->leave_ms, options->poll_ms);
  }
  return FSDP_OK;
}

fsdp_status fsdp_nccl_create(const fsdp_nccl_library *library,
                             const fsdp_nccl_options *options,
                             const fsdp_store *store, int64_t rank,
                             int64_t world_size, fsdp_transport **transport,
                             fsdp_error *error) {
  fsdp_nccl_transport *self = NULL;
  fsdp_status status = FSDP_OK;

  FSDP_TRY(check_arguments(options, rank, world_size, error));
  self = fsdp_nccl_priv_make(library, options, store, rank, world_size);
  if (self == NULL) {
    return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY,
                     "NCCL transport of rank %" PRId64, rank);
  }
  self->base.ops = &OPS;
  FSDP_TRY(fsdp_nccl_priv_watch(self, error));
  *transport = &self->base;
  self = NULL;
done:
  /* After a failure the owner is still the caller's. */
  if (self != NULL) self->options.release = NULL;
  destroy(self == NULL ? NULL : &self->base);
  return status;
}
