/*
 * For tests: the cost of the last plan.
 */
#ifndef FSDP_ARENA_ARENA_PRIV_H
#define FSDP_ARENA_ARENA_PRIV_H

#include <stdint.h>

#include "arena/arena.h"

/* Steps of the last fsdp_arena_plan() that had work: conflicts, words of their
 * rows, colours and blocks that it looked at. */
int64_t fsdp_arena_priv_plan_steps(const fsdp_arena *arena);

#endif /* FSDP_ARENA_ARENA_PRIV_H */
