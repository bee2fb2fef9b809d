/*
 * How much memory this process may still take.
 */
#ifndef FSDP_SHM_MEMORY_PRIV_H
#define FSDP_SHM_MEMORY_PRIV_H

#include <stdint.h>

/* The smaller of the bytes that the machine has available and those that the
 * control groups (v2) of this process allow in all. INT64_MAX when neither can
 * be read. Cannot fail. */
int64_t fsdp_shm_priv_available_nbytes(void);

#endif /* FSDP_SHM_MEMORY_PRIV_H */
