/*
 * Tests of runtime/: launches over a transport of a host, whose calls have
 * tickets and are waited for by the lane.
 */
#include "engine_fixture.h"

static const fsdp_transport_ops *recorded;
static fsdp_transport_ops host;
static uint64_t num_calls;
static uint64_t fails_at; /* number of a call; 0: none */
static char notes[256];   /* what the device was told */

static fsdp_status all_gather(fsdp_transport *transport, const fsdp_call *call,
                              void *output, const void *input,
                              int64_t shard_numel, fsdp_dtype dtype,
                              uint64_t *ticket, fsdp_error *error) {
  if (++num_calls == fails_at) {
    return FSDP_FAIL(error, FSDP_BACKEND, "rank 1 is gone");
  }
  CHECK_TEXT(call->label, "all_gather of unit 'u'");
  *ticket = num_calls;
  return recorded->all_gather(transport, call, output, input, shard_numel,
                              dtype, ticket, error);
}

static fsdp_status add_call(void *context, fsdp_lane lane,
                            const fsdp_group *group, fsdp_channel channel,
                            uint64_t ticket, fsdp_error *error) {
  (void)context, (void)error;
  CHECK(group->transport->ops == &host);
  CHECK_I64(channel, FSDP_CHANNEL_GATHER);
  CHECK_I64(lane, FSDP_LANE_UNSHARD);
  (void)snprintf(notes + strlen(notes), sizeof notes - strlen(notes),
                 "ticket %d; ", (int)ticket);
  return FSDP_OK;
}

static fsdp_status explain_failure(void *context, const fsdp_group *group,
                                   fsdp_error *error) {
  (void)context, (void)group;
  (void)snprintf(notes + strlen(notes), sizeof notes - strlen(notes), "%.64s; ",
                 error->message);
  return FSDP_FAIL(error, FSDP_BACKEND, "rank 1 is gone: dead");
}

static void start(uint64_t failing_call) {
  num_calls = 0;
  fails_at = failing_call;
  notes[0] = '\0';
  model_init(&m, NULL);
  m.ops.add_call = add_call;
  m.ops.explain_failure = explain_failure;
  recorded = m.shard_group.transport->ops;
  host = *recorded;
  host.is_host = true;
  host.all_gather = all_gather;
  m.shard_group.transport->ops = &host;
  model_plan_mixed(&m, "u");
  model_start(&m);
}

/* The last ticket stands for all calls of a launch: one a segment. */
TEST(test_one_ticket) {
  start(0);
  PLAY("enter u");
  CHECK_I64((int64_t)num_calls, 4);
  CHECK_TEXT(notes, "ticket 4; ");
}

/* What was started before the failure still uses its memory. */
TEST(test_failure) {
  fsdp_error error = {0};
  start(3);
  CHECK_I64(model_enter(&m, 0, &error), FSDP_BACKEND);
  CHECK_TEXT(notes, "ticket 2; rank 1 is gone; ");
  CHECK_TEXT(error.message, "rank 1 is gone: dead");
  CHECK_TAPE_LACKS("group_end");
  PLAY("state u FAILED; reset");
}
