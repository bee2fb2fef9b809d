/*
 * Tests of transports/merging: over a transport that notes its calls, on which
 * every rank holds what this one holds.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "check.h"
#include "transports/merging.h"

enum { RANK = 1, WORLD_SIZE = 3, LARGE = FSDP_MERGED_PIECE_NBYTES / 4 + 1 };

static const fsdp_dtype f32 = {1, 4};
static const fsdp_dtype u8 = {3, 1};

static char notes[512];
static uint64_t num_calls;
static uint64_t num_waited;
static uint64_t fails_at; /* number of a call; 0: none */

static fsdp_status note(const char *what, int64_t numel, uint64_t *ticket,
                        fsdp_error *error) {
  (void)snprintf(notes + strlen(notes), sizeof notes - strlen(notes),
                 "%s %" PRId64 "; ", what, numel);
  if (++num_calls == fails_at) return FSDP_FAIL(error, FSDP_BACKEND, "gone");
  *ticket = num_calls;
  return FSDP_OK;
}

static fsdp_status group_edge(fsdp_transport *self, const fsdp_call *call,
                              fsdp_error *error) {
  (void)self, (void)call, (void)error;
  return FSDP_OK;
}

static fsdp_status all_gather(fsdp_transport *self, const fsdp_call *call,
                              void *output, const void *input, int64_t numel,
                              fsdp_dtype dtype, uint64_t *ticket,
                              fsdp_error *error) {
  (void)self, (void)call;
  const size_t nbytes = (size_t)(numel * dtype.itemsize);
  for (size_t i = 0; i < WORLD_SIZE; i++) {
    memmove((char *)output + i * nbytes, input, nbytes);
  }
  return note("all_gather", numel, ticket, error);
}

static fsdp_status broadcast(fsdp_transport *self, const fsdp_call *call,
                             void *buffer, int64_t numel, int64_t root,
                             fsdp_dtype dtype, uint64_t *ticket,
                             fsdp_error *error) {
  (void)self, (void)call, (void)buffer, (void)root, (void)dtype;
  return note("broadcast", numel, ticket, error);
}

static void sum_up(float *data, int64_t numel) {
  for (int64_t i = 0; i < numel; i++) data[i] *= WORLD_SIZE;
}

static fsdp_status reduce_scatter(fsdp_transport *self, const fsdp_call *call,
                                  void *buffer, int64_t numel, fsdp_dtype dtype,
                                  uint64_t *ticket, fsdp_error *error) {
  (void)self, (void)dtype;
  const size_t nbytes = (size_t)numel * 4;
  memset(call->scratch, 7, WORLD_SIZE * nbytes); /* ASan sees one too small */
  sum_up((float *)((char *)buffer + RANK * nbytes), numel);
  memset(buffer, 9, nbytes); /* other slots are undefined */
  return note("reduce_scatter", numel, ticket, error);
}

static fsdp_status all_reduce(fsdp_transport *self, const fsdp_call *call,
                              void *buffer, int64_t numel, fsdp_dtype dtype,
                              uint64_t *ticket, fsdp_error *error) {
  (void)self, (void)call, (void)dtype;
  sum_up(buffer, numel);
  return note("all_reduce", numel, ticket, error);
}

static fsdp_status wait_for(fsdp_transport *self, fsdp_channel channel,
                            uint64_t ticket, fsdp_error *error) {
  (void)self, (void)channel;
  num_waited = ticket;
  if (fails_at == UINT64_MAX) return FSDP_FAIL(error, FSDP_BACKEND, "gone");
  return FSDP_OK;
}

static bool is_done(fsdp_transport *self, fsdp_channel channel,
                    uint64_t ticket) {
  (void)self, (void)channel;
  return ticket <= num_waited;
}

static fsdp_status check(fsdp_transport *self, fsdp_error *error) {
  (void)self;
  return FSDP_FAIL(error, FSDP_BACKEND, "checked");
}

static void give_up(fsdp_transport *self, const char *cause) {
  (void)self;
  (void)snprintf(notes, sizeof notes, "%s", cause);
}

static const fsdp_transport_ops inner_ops = {
    .name = "inner",
    .is_host = true,
    .wants_scratch = true,
    .group_begin = group_edge,
    .group_end = group_edge,
    .all_gather = all_gather,
    .broadcast = broadcast,
    .reduce_scatter = reduce_scatter,
    .all_reduce = all_reduce,
    .wait = wait_for,
    .is_done = is_done,
    .check = check,
    .give_up = give_up,
};
static fsdp_transport inner = {&inner_ops};
static fsdp_call call = {.channel = FSDP_CHANNEL_GATHER};

static fsdp_transport *start(void) {
  fsdp_transport *transport = NULL;
  notes[0] = '\0';
  num_calls = num_waited = fails_at = 0;
  CHECK_OK(fsdp_merging_create(&inner, RANK, WORLD_SIZE, &transport, NULL));
  return transport;
}

TEST(test_small_gathers_are_one) {
  fsdp_transport *transport = start();
  const fsdp_transport_ops *ops = transport->ops;
  static float outputs[4][WORLD_SIZE * LARGE];
  static float inputs[4][LARGE];
  const int64_t numels[4] = {2, LARGE, 3, 1};
  uint64_t ticket = 0;
  CHECK_TEXT(ops->name, "inner");
  for (int round = 0; round < 2; round++) { /* the memory is used again */
    for (int i = 0; i < 4; i++) {
      for (int j = 0; j < LARGE; j++)
        inputs[i][j] = (float)(100 * i + j + round);
    }
    notes[0] = '\0';
    CHECK_OK(ops->group_begin(transport, &call, NULL));
    for (int i = 0; i < 4; i++) {
      CHECK_OK(ops->all_gather(transport, &call, outputs[i], inputs[i],
                               numels[i], f32, &ticket, NULL));
    }
    uint8_t byte[WORLD_SIZE];
    CHECK_OK(ops->all_gather(transport, &call, byte, &byte[RANK], 1, u8,
                             &ticket, NULL)); /* of another dtype */
    CHECK_OK(ops->group_end(transport, &call, NULL));
    CHECK_TEXT(notes, "all_gather 8193; all_gather 1; all_gather 6; ");
    CHECK(!ops->is_done(transport, FSDP_CHANNEL_GATHER, ticket));
    CHECK_I64((int64_t)ticket, 3 * (round + 1));
    CHECK_OK(ops->wait(transport, FSDP_CHANNEL_GATHER, ticket, NULL));
    CHECK(ops->is_done(transport, FSDP_CHANNEL_GATHER, ticket));
    for (int i = 0; i < 4; i++) {
      for (int64_t j = 0; j < WORLD_SIZE * numels[i]; j++) {
        CHECK(!(outputs[i][j] < inputs[i][j % numels[i]]) &&
              !(outputs[i][j] > inputs[i][j % numels[i]]));
      }
    }
  }
  void (*destroy)(fsdp_transport *) = ops->destroy;
  destroy(transport);
  destroy(NULL);
}

TEST(test_small_sums_are_one) {
  fsdp_transport *transport = start();
  const fsdp_transport_ops *ops = transport->ops;
  fsdp_call reduce = {.channel = FSDP_CHANNEL_REDUCE};
  float scratch[WORLD_SIZE * 2];
  float scattered[2][WORLD_SIZE * 2] = {{1, 2, 3, 4, 5, 6}, {7, 8, 9}};
  float summed[2][2] = {{1, 2}, {3, 4}};
  uint64_t ticket = 0;
  CHECK_OK(ops->group_begin(transport, &reduce, NULL));
  for (int i = 0; i < 2; i++) {
    reduce.scratch = scratch;
    CHECK_OK(ops->reduce_scatter(transport, &reduce, scattered[i], 2 - i, f32,
                                 &ticket, NULL));
  }
  CHECK_OK(ops->group_end(transport, &reduce, NULL));
  CHECK_OK(ops->wait(transport, FSDP_CHANNEL_REDUCE, ticket, NULL));
  CHECK_I64((int64_t)scattered[0][2], 9);
  CHECK_I64((int64_t)scattered[0][3], 12);
  CHECK_I64((int64_t)scattered[1][1], 24);
  CHECK_OK(ops->group_begin(transport, &reduce, NULL));
  for (int i = 0; i < 2; i++) {
    CHECK_OK(
        ops->all_reduce(transport, &reduce, summed[i], 2, f32, &ticket, NULL));
  }
  CHECK_OK(ops->group_end(transport, &reduce, NULL));
  CHECK_OK(ops->wait(transport, FSDP_CHANNEL_REDUCE, ticket, NULL));
  CHECK_I64((int64_t)(summed[0][1] + summed[1][0]), 15);
  CHECK_TEXT(notes, "reduce_scatter 3; all_reduce 4; ");
  ops->destroy(transport);
}

TEST(test_calls_that_pass_through) {
  fsdp_transport *transport = start();
  const fsdp_transport_ops *ops = transport->ops;
  float data[WORLD_SIZE] = {1, 2, 3};
  float scratch[WORLD_SIZE];
  fsdp_error error = {0};
  uint64_t ticket = 0;
  fsdp_call reduce = {.channel = FSDP_CHANNEL_REDUCE, .scratch = scratch};
  CHECK_OK(ops->all_reduce(transport, &reduce, data, 1, f32, &ticket,
                           NULL)); /* in no group */
  CHECK_OK(ops->group_begin(transport, &reduce, NULL));
  CHECK_OK(ops->broadcast(transport, &reduce, data, 1, 0, f32, &ticket, NULL));
  CHECK_OK(ops->reduce_scatter(transport, &reduce, data, 1, f32, &ticket,
                               NULL));              /* alone */
  CHECK_OK(ops->group_end(transport, &call, NULL)); /* another one */
  CHECK_TEXT(notes, "all_reduce 1; broadcast 1; ");
  CHECK_OK(ops->group_end(transport, &reduce, NULL));
  CHECK_TEXT(notes, "all_reduce 1; broadcast 1; reduce_scatter 1; ");
  CHECK_I64((int64_t)data[RANK], 6);
  CHECK_FAILS(ops->check(transport, &error), FSDP_BACKEND, error.message,
              "checked");
  ops->give_up(transport, "a cause");
  CHECK_TEXT(notes, "a cause");
  ops->destroy(transport);
}

/* One group of two gathers. */
static fsdp_status gather(fsdp_transport *transport, float data[2][WORLD_SIZE],
                          uint64_t *ticket) {
  const fsdp_transport_ops *ops = transport->ops;
  fsdp_status status = FSDP_OK;
  FSDP_TRY(ops->group_begin(transport, &call, NULL));
  for (int i = 0; i < 2; i++) {
    FSDP_TRY(ops->all_gather(transport, &call, data[i], &data[i][RANK], 1, f32,
                             ticket, NULL));
  }
  FSDP_TRY(ops->group_end(transport, &call, NULL));
done:
  return status;
}

/* What fails is forgotten; the next group starts anew. */
TEST(test_failures) {
  fsdp_transport *transport = start();
  const fsdp_transport_ops *ops = transport->ops;
  float data[2][WORLD_SIZE] = {{0, 5, 0}, {0, 6, 0}};
  uint64_t ticket = 0;
  fails_at = 1;
  CHECK_I64(gather(transport, data, &ticket), FSDP_BACKEND);
  fails_at = 0;
  CHECK_OK(gather(transport, data, &ticket));
  fails_at = UINT64_MAX; /* of the wait */
  CHECK_I64(ops->wait(transport, FSDP_CHANNEL_GATHER, ticket, NULL),
            FSDP_BACKEND);
  CHECK_I64((int64_t)data[0][0], 0); /* untouched */
  fails_at = 0;
  CHECK_OK(gather(transport, data, &ticket));
  /* Not waited for: the next one has memory of its own. */
  CHECK_OK(gather(transport, data, &ticket));
  CHECK_OK(ops->wait(transport, FSDP_CHANNEL_GATHER, ticket, NULL));
  CHECK_I64((int64_t)(data[0][0] + data[1][2]), 11);
  CHECK_TEXT(notes, "all_gather 2; all_gather 2; all_gather 2; all_gather 2; ");
  ops->destroy(transport);
}

TEST(test_every_allocation_can_fail) {
  for (int64_t i = 0;; i++) {
    fsdp_transport *transport = NULL;
    float data[2][WORLD_SIZE] = {{0, 5, 0}, {0, 6, 0}};
    uint64_t ticket = 0;
    fsdp_alloc_fail_at(i);
    fsdp_status status =
        fsdp_merging_create(&inner, RANK, WORLD_SIZE, &transport, NULL);
    if (status == FSDP_OK) status = gather(transport, data, &ticket);
    if (status == FSDP_OK) {
      status =
          transport->ops->wait(transport, FSDP_CHANNEL_GATHER, ticket, NULL);
    }
    fsdp_alloc_fail_at(-1);
    if (transport != NULL) transport->ops->destroy(transport);
    CHECK_I64(fsdp_alloc_live(), 0);
    if (status == FSDP_OK) CHECK_I64((int64_t)(data[0][0] + data[1][2]), 11);
    if (status == FSDP_OK && i > 2) break;
  }
}
