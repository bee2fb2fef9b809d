/*
 * Ranks as forked processes (or threads) that meet in a store in shared
 * memory.
 */
#ifndef FSDP_TESTS_SHM_FIXTURE_H
#define FSDP_TESTS_SHM_FIXTURE_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "port/transport.h"
#include "shm/shm_transport.h"

/* What a rank's body gets. */
typedef struct shm_rank {
  int64_t rank;
  int64_t world_size;
  int64_t num_local; /* ranks of a host whose sums are rounded first; 0: all */
  fsdp_store store;
  void *context; /* the test's own */
} shm_rank;

typedef void (*shm_body)(const shm_rank *self);

/* Runs the body as `world_size` processes and waits for them; a CHECK that
 * fails there fails here. */
void shm_run(int64_t world_size, shm_body body, void *context);

/* The same as threads of this process. */
void shm_run_threads(int64_t world_size, shm_body body, void *context);

/* As shm_run, but rank `victim` may end by a signal. */
void shm_run_without(int64_t world_size, int64_t victim, shm_body body,
                     void *context);

/* The pid of a rank that was started by shm_run. */
pid_t shm_pid(int64_t rank);

/* Memory that all processes of the test share, `nbytes` of zeros; lives on. */
void *shm_shared(int64_t nbytes);

/* A store of its own, outside of shm_run. */
fsdp_store shm_store(void);

/* From how many bytes on calls read the other ranks' memory; negative: none. */
extern int64_t shm_direct_call_nbytes;

/* Options that suit tests: small rings and short times. */
fsdp_shm_options shm_options(const char *key_prefix);

/* A transport; a failure is a failure of the test. */
fsdp_transport *shm_create(const shm_rank *self,
                           const fsdp_shm_options *options);

/* The same with shm_options(key_prefix). */
fsdp_transport *shm_join(const shm_rank *self, const char *key_prefix);

/* The message holds each of the texts. */
#define SHM_CHECK_SAYS(error, ...) \
  shm_check_says((error), (const char *[]){__VA_ARGS__, NULL}, __LINE__)
void shm_check_says(const fsdp_error *error, const char *const *texts,
                    int line);

/* Waits until all ranks have come here. */
fsdp_status shm_barrier(fsdp_transport *transport, const char *label,
                        fsdp_error *error);

/* Mappings of segments, and files of them, that this process has. */
int64_t shm_num_segments(void);

/* Waits until `*word` is at least `value`; not for ever. */
bool shm_await(const _Atomic int32_t *word, int32_t value);

#endif /* FSDP_TESTS_SHM_FIXTURE_H */
