/*
 * Calls of any kind with known elements, and their right results: the plain
 * copy or sum, element by element.
 */
#ifndef FSDP_TESTS_SHM_CALLS_H
#define FSDP_TESTS_SHM_CALLS_H

#include "shm_fixture.h"

typedef enum shm_kind {
  GATHER,
  GATHER_IN_PLACE,
  BROADCAST,
  SCATTER,
  REDUCE,
  NUM_KINDS
} shm_kind;

typedef struct shm_call {
  shm_kind what;
  fsdp_dtype dtype;
  int64_t numel;
  int64_t root;
  int64_t salt; /* makes the elements of this call its own */
  char *memory; /* the buffer between guards */
  char *buffer;
  char *input;
  char *scratch;
  uint64_t ticket;
} shm_call;

typedef struct shm_dtype {
  fsdp_dtype dtype;
  bool is_summed;
} shm_dtype;

enum { SHM_NUM_DTYPES = 11 };
extern const shm_dtype shm_dtypes[SHM_NUM_DTYPES];

bool shm_is_sum(shm_kind what);
fsdp_channel shm_channel_of(shm_kind what);

/* Makes this rank's elements and starts the call. */
void shm_start(const shm_rank *self, fsdp_transport *transport, shm_call *call);

/* Waits for the call and checks its result. */
void shm_finish(const shm_rank *self, fsdp_transport *transport,
                shm_call *call);

/* A call in which nobody looks at the elements: SHM_PLAIN_NUMEL floats of each
 * of up to 8 ranks, which is more than a ring holds. */
enum { SHM_PLAIN_NUMEL = 3000 };
fsdp_status shm_start_plain(fsdp_transport *transport, shm_kind what,
                            int64_t root, const char *label, uint64_t *ticket,
                            fsdp_error *error);

/* The transport failed with `first` and fails so for good. */
void shm_check_stays_failed(fsdp_transport *transport, shm_kind what,
                            const fsdp_error *first);

#endif /* FSDP_TESTS_SHM_CALLS_H */
