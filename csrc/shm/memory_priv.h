/*
 * How much memory this process may still take.
 */
#ifndef FSDP_SHM_MEMORY_PRIV_H
#define FSDP_SHM_MEMORY_PRIV_H

#include <stdint.h>

/* Bytes that the machine has available, or that the control groups (v2) of
 * this process allow in all, whichever is less. INT64_MAX when neither says
 * anything. Cannot fail. */
int64_t fsdp_shm_priv_available_nbytes(void);

#endif /* FSDP_SHM_MEMORY_PRIV_H */
