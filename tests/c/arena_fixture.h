/* An arena over the recorder, with calls that must succeed. */
#ifndef FSDP_TESTS_ARENA_FIXTURE_H
#define FSDP_TESTS_ARENA_FIXTURE_H

#include "arena/arena.h"
#include "recorder.h"

fsdp_arena *arena_fixture_create(recorder *device, const int64_t *nbytes,
                                 int64_t num_clients);

void arena_fixture_destroy(fsdp_arena *arena, recorder *device);

void *arena_fixture_take(fsdp_arena *arena, int64_t client);

void arena_fixture_give(fsdp_arena *arena, int64_t client);

void arena_fixture_settle(fsdp_arena *arena);

fsdp_arena_stats arena_fixture_stats(const fsdp_arena *arena);

#endif /* FSDP_TESTS_ARENA_FIXTURE_H */
