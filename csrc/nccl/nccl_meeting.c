/*
 * The meeting: finds out whether all ranks of a group can use NCCL. A counter
 * in the store tells the last rank that it is the last. That rank writes the
 * verdict, which the others read. A rank that refuses writes the verdict at
 * once.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "nccl/nccl_priv.h"

/* The verdict's first byte; the reason follows. */
enum { YES = 'y', NO = 'n' };

static void format(char *out, const char *key, const char *name) {
  (void)snprintf(out, FSDP_NCCL_KEY_NBYTES, "%s/%s", key, name);
}

static fsdp_status write_verdict(const fsdp_store *store, const char *key,
                                 char answer, const char *reason,
                                 fsdp_error *error) {
  char name[FSDP_NCCL_KEY_NBYTES];
  char verdict[FSDP_ERROR_MESSAGE_NBYTES];
  int length = snprintf(verdict, sizeof verdict, "%c%s", answer, reason);
  if (length >= (int)sizeof verdict) length = (int)sizeof verdict - 1;
  format(name, key, "verdict");
  return store->set(store->context, name, verdict, length, error);
}

fsdp_status fsdp_nccl_meeting_arrive(const fsdp_store *store, const char *key,
                                     int64_t rank, int64_t world_size,
                                     const char *refusal, fsdp_error *error) {
  char met[FSDP_NCCL_KEY_NBYTES];
  char refused[FSDP_NCCL_KEY_NBYTES];
  int64_t num_refused = 0;
  int64_t num_met = 0;
  fsdp_status status = FSDP_OK;
  format(met, key, "met");
  format(refused, key, "refused");
  if (refusal != NULL && refusal[0] != 0) {
    char reason[FSDP_ERROR_MESSAGE_NBYTES];
    (void)snprintf(reason, sizeof reason, "rank %" PRId64 ": %.480s", rank,
                   refusal);
    /* Before this rank is counted as met, so that the last rank sees the
     * refusal. */
    FSDP_TRY(store->add(store->context, refused, 1, &num_refused, error));
    FSDP_TRY(write_verdict(store, key, NO, reason, error));
  }
  FSDP_TRY(store->add(store->context, met, 1, &num_met, error));
  if (num_met < world_size) return FSDP_OK;
  FSDP_TRY(store->add(store->context, refused, 0, &num_refused, error));
  if (num_refused == 0) {
    FSDP_TRY(write_verdict(store, key, YES, "", error));
  }
done:
  return status;
}

fsdp_status fsdp_nccl_meeting_conclude(const fsdp_store *store, const char *key,
                                       int64_t world_size, int64_t timeout_ms,
                                       bool *is_possible, char *reason,
                                       size_t reason_nbytes,
                                       fsdp_error *error) {
  char name[FSDP_NCCL_KEY_NBYTES];
  char verdict[FSDP_ERROR_MESSAGE_NBYTES] = "";
  fsdp_error cause = {0};
  int64_t nbytes = 0;
  int64_t num_met = 0;
  format(name, key, "verdict");
  if (store->get(store->context, name, timeout_ms, verdict,
                 (int64_t)sizeof verdict - 1, &nbytes, &cause) == FSDP_OK) {
    *is_possible = verdict[0] == YES;
    (void)snprintf(reason, reason_nbytes, "%s", verdict + 1);
    return FSDP_OK;
  }
  format(name, key, "met");
  if (store->add(store->context, name, 0, &num_met, NULL) != FSDP_OK) {
    num_met = -1; /* the store is gone, as the cause tells */
  }
  return FSDP_FAIL(error, FSDP_BACKEND,
                   "%" PRId64 " of %" PRId64
                   " ranks came to the meeting of a NCCL group within %" PRId64
                   " ms (%.300s)",
                   num_met, world_size, timeout_ms, cause.message);
}
