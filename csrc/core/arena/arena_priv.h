/*
 * For tests: what the last plan cost.
 */
#ifndef FSDP_ARENA_ARENA_PRIV_H
#define FSDP_ARENA_ARENA_PRIV_H

#include <stdint.h>

#include "arena/arena.h"

/* Conflicts, words of their rows, colours and blocks that fsdp_arena_plan()
 * looked at when it last had something to do. */
int64_t fsdp_arena_priv_plan_steps(const fsdp_arena *arena);

#endif /* FSDP_ARENA_ARENA_PRIV_H */
