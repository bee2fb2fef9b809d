/*
 * What the files of the fake NCCL share.
 */
#ifndef FSDP_TESTS_NCCL_FAKE_PRIV_H
#define FSDP_TESTS_NCCL_FAKE_PRIV_H

#include <pthread.h>

#include "nccl_fake.h"

extern pthread_mutex_t nccl_fake_lock;
/* Under the lock. */
extern int64_t nccl_fake_settings[NCCL_FAKE_NUM_SETTINGS];
extern int64_t nccl_fake_counts[NCCL_FAKE_NUM_COUNTS];

void nccl_fake_priv_reset_store(void);
void nccl_fake_priv_reset_events(void);

#endif /* FSDP_TESTS_NCCL_FAKE_PRIV_H */
