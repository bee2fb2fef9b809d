/*
 * The meeting, in which the ranks of a transport map each other's memory.
 */
#ifndef FSDP_SHM_MEETING_PRIV_H
#define FSDP_SHM_MEETING_PRIV_H

#include <stdint.h>

#include "port/transport.h"
#include "shm/shm_priv.h"
#include "shm/shm_transport.h"

enum { FSDP_SHM_PREFIX_NBYTES = 256, FSDP_SHM_KEY_NBYTES = 320 };

typedef struct fsdp_shm_meeting {
  const fsdp_store *store;
  const char *key_prefix; /* shorter than FSDP_SHM_PREFIX_NBYTES */
  const char *name;       /* in the keys: a transport may need two meetings */
  const char *refusal;    /* why this rank takes no part; NULL: it does */
  int64_t timeout_ms;     /* for all of it, not for each wait */
  int64_t rank;
  int64_t world_size;
} fsdp_shm_meeting;

/* Maps all segments into shm->peers. shm is NULL when this rank is out of
 * memory; the others are told. outcome [out] the same on all ranks. Whatever it
 * is, the mapped segments stay in shm. */
FSDP_NODISCARD fsdp_status fsdp_shm_priv_meet(const fsdp_shm_meeting *meeting,
                                              fsdp_shm *shm,
                                              fsdp_shm_verdict *outcome,
                                              fsdp_error *error);

#endif /* FSDP_SHM_MEETING_PRIV_H */
