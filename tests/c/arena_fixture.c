/* Makes and drives an arena for its tests. */
#include "arena_fixture.h"

#include "base/alloc.h"
#include "check.h"

fsdp_arena *arena_fixture_create(recorder *device, const int64_t *nbytes,
                                 int64_t num_clients) {
  fsdp_arena *arena = NULL;
  CHECK_OK(fsdp_arena_create(recorder_ops(device), &arena, NULL));
  for (int64_t i = 0; i < num_clients; i++) {
    int64_t client = -1;
    CHECK_OK(fsdp_arena_add_client(arena, nbytes[i], &client, NULL));
    CHECK_I64(client, i);
  }
  return arena;
}

void arena_fixture_destroy(fsdp_arena *arena, recorder *device) {
  fsdp_arena_destroy(arena);
  CHECK_I64(recorder_live_blocks(device), 0);
  CHECK_I64(recorder_live_events(device), 0);
  CHECK_I64(fsdp_alloc_live(), 0);
  recorder_destroy(device);
}

void *arena_fixture_take(fsdp_arena *arena, int64_t client) {
  void *data = NULL;
  CHECK_OK(fsdp_arena_take(arena, client, FSDP_LANE_UNSHARD, &data, NULL));
  CHECK(data != NULL && data == fsdp_arena_data(arena, client));
  return data;
}

void arena_fixture_give(fsdp_arena *arena, int64_t client) {
  CHECK_OK(fsdp_arena_give(arena, client, FSDP_LANE_COMPUTE, NULL));
  CHECK(fsdp_arena_data(arena, client) == NULL);
}

void arena_fixture_settle(fsdp_arena *arena) {
  CHECK_OK(fsdp_arena_settle(arena, NULL));
}

fsdp_arena_stats arena_fixture_stats(const fsdp_arena *arena) {
  fsdp_arena_stats stats;
  fsdp_arena_get_stats(arena, &stats);
  return stats;
}
