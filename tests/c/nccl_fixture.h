/*
 * What the tests of the NCCL transport start from: a joined rank, and calls on
 * it with few words.
 */
#ifndef FSDP_TESTS_NCCL_FIXTURE_H
#define FSDP_TESTS_NCCL_FIXTURE_H

#include <pthread.h>

#include "base/dtypes.h"
#include "check.h"
#include "nccl_fake.h"

enum { NCCL_FIXTURE_NBYTES = 4096 };
extern char nccl_fixture_memory[NCCL_FIXTURE_NBYTES]; /* the tape's base */

extern const fsdp_dtype NCCL_F32;
extern const fsdp_dtype NCCL_BF16;

/* Options for tests: a prefix, events, limits that nothing reaches by being
 * slow, short grace, a watchdog that is asleep (it looks once an hour). */
fsdp_nccl_options nccl_fixture_options(void);

/* The same with a watchdog that looks every millisecond. */
fsdp_nccl_options nccl_fixture_quick_options(void);

/* A transport that is not connected yet. */
fsdp_transport *nccl_fixture_create(const fsdp_nccl_options *options,
                                    int64_t rank, int64_t world_size);
/* Nothing is allocated, or will not be in a moment. */
void nccl_fixture_check_nothing_lives(void);
/* Destroys the last transport; nothing is left then. */
void nccl_fixture_leave(fsdp_transport *transport);

/* Resets the fake and joins as `rank`; rank > 0 finds the ids in the store. */
fsdp_transport *nccl_fixture_join(const fsdp_nccl_options *options,
                                  int64_t rank, int64_t world_size);
/* Likewise, with the usual options. */
fsdp_transport *nccl_fixture_open(int64_t rank, int64_t world_size);
/* Joins without a reset, after rank 0. */
fsdp_transport *nccl_fixture_join_next(const fsdp_nccl_options *options,
                                       int64_t rank, int64_t world_size);
/* Makes both communicators, as the first calls on the channels would. The two
 * functions above have done it. */
void nccl_fixture_connect(fsdp_transport *transport);
/* Writes the ids that rank 0 would. */
void nccl_fixture_write_ids(void);

fsdp_call nccl_fixture_call(fsdp_channel channel, intptr_t stream,
                            const char *label);

/* What a unit with two segments (fp32) does: one group of gathers, on stream 1;
 * with `has_reduce` also one of reductions, on stream 2. */
fsdp_status nccl_fixture_unit(fsdp_transport *transport, bool has_reduce,
                              fsdp_error *error);

/* One all_gather, alone. */
fsdp_status nccl_fixture_gather(fsdp_transport *transport, const char *label,
                                fsdp_error *error);

/* A gather of "unit 'b'" in a thread of its own. */
typedef struct nccl_fixture_gather_thread {
  fsdp_transport *transport;
  pthread_t thread;
  fsdp_status status;
  fsdp_error error;
} nccl_fixture_gather_thread;
/* Returns when the fake's tape has `tape`. */
void nccl_fixture_start_gather(nccl_fixture_gather_thread *self,
                               const char *tape);
/* It ends with this status. */
void nccl_fixture_join_gather(nccl_fixture_gather_thread *self,
                              fsdp_status status);

/* Waits up to 10 s for so many aborts. */
void nccl_fixture_wait_for_aborts(int64_t num);
/* Waits up to 10 s for `transport` to have failed. */
fsdp_status nccl_fixture_wait_for_failure(fsdp_transport *transport,
                                          fsdp_error *error);
/* Waits up to 10 s for `text` on the fake's tape. */
void nccl_fixture_wait_for_tape(const char *text);

#endif /* FSDP_TESTS_NCCL_FIXTURE_H */
