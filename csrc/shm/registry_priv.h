/*
 * All transports of this process.
 *
 * Note [Progress of other transports]
 * A rank that waits in one group may be what others wait for in another: it has
 * started a call there that its ring could not take whole. So whoever waits
 * also makes progress on the process's other transports. It cannot sleep on
 * their doorbells, so it sleeps shortly while one of them has calls in flight.
 */
#ifndef FSDP_SHM_REGISTRY_PRIV_H
#define FSDP_SHM_REGISTRY_PRIV_H

#include <stdbool.h>

#include "shm/shm_priv.h"

/* Adds a transport that is whole. */
void fsdp_shm_priv_registry_add(fsdp_shm *shm);

/* Takes it out; afterwards no other thread makes progress on it. */
void fsdp_shm_priv_registry_remove(fsdp_shm *shm);

/* Makes progress on all but `shm`, whose mutex is not held. Does not wait: what
 * another thread is busy with is left to it. Returns whether any has calls or
 * messages in flight, as far as that can be seen. */
bool fsdp_shm_priv_progress_others(const fsdp_shm *shm);

#endif /* FSDP_SHM_REGISTRY_PRIV_H */
