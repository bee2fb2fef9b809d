/*
 * Tests of runtime/: shards that are read in place, over a transport that says
 * it can. The whole is memory of the test.
 */
#include <stdlib.h>

#include "base/dtypes.h"
#include "engine_fixture.h"

enum { MAX_NBYTES = 1 << 18 };

struct fsdp_shared {
  float whole[MAX_NBYTES / sizeof(float)];
  char name[16];
  bool is_open;
};

static const fsdp_transport_ops *recorded;
static fsdp_transport_ops able;
static char notes[2048];
static struct fsdp_shared shares[MODEL_MAX_UNITS];
static int64_t num_shares;
static bool can_share;
static int64_t fails_at; /* number of an open; 0: none */
static int64_t num_opens;
static void *homes[MODEL_MAX_UNITS]; /* in regions; NULL: there is none */

static void note(const char *what, const char *name) {
  (void)snprintf(notes + strlen(notes), sizeof notes - strlen(notes), "%s%s %s",
                 notes[0] == '\0' ? "" : "; ", what, name);
}

#define CHECK_NOTES(text)    \
  do {                       \
    CHECK_TEXT(notes, text); \
    notes[0] = '\0';         \
  } while (0)

static fsdp_transport *sharer(fsdp_transport *transport) {
  return transport;
}

static fsdp_status share(fsdp_transport *transport, const char *label,
                         fsdp_region region, int64_t nbytes,
                         const fsdp_region_range *own, int64_t num_own,
                         void **whole, fsdp_shared **shared,
                         fsdp_error *error) {
  (void)transport, (void)region, (void)own, (void)num_own, (void)error;
  note("share", label);
  if (!can_share) return FSDP_OK;
  CHECK(nbytes <= MAX_NBYTES);
  struct fsdp_shared *made = &shares[num_shares++];
  (void)snprintf(made->name, sizeof made->name, "%s", label);
  *whole = made->whole;
  *shared = made;
  return FSDP_OK;
}

static void unshare(fsdp_shared *shared) {
  CHECK(!shared->is_open);
  note("unshare", shared->name);
}

/* The ranks hold the same shards: the whole is what lies in the region, or the
 * shard, repeated. */
static void fill(fsdp_shared *shared) {
  for (int64_t i = 0; i < m.num_units; i++) {
    const model_unit *unit = &m.units[i];
    if (strcmp(unit->name, shared->name) != 0) continue;
    const void *own = homes[i] == NULL ? unit->shards[0] : homes[i];
    for (int64_t rank = 0; rank < 2; rank++) {
      memcpy((char *)shared->whole + rank * unit->shard_nbytes[0], own,
             (size_t)unit->shard_nbytes[0]);
    }
  }
}

static fsdp_status open_shared(fsdp_transport *transport, const fsdp_call *call,
                               fsdp_shared *shared, uint64_t *ticket,
                               fsdp_error *error) {
  (void)transport, (void)call, (void)ticket;
  CHECK(!shared->is_open);
  shared->is_open = true;
  if (++num_opens == fails_at) {
    return FSDP_FAIL(error, FSDP_BACKEND, "rank 1 is gone");
  }
  fill(shared);
  note("open", shared->name);
  return FSDP_OK;
}

static void close_shared(fsdp_transport *transport, fsdp_shared *shared) {
  (void)transport;
  CHECK(shared->is_open);
  shared->is_open = false;
  note("close", shared->name);
}

static fsdp_status await_closed(fsdp_transport *transport, fsdp_shared *shared,
                                fsdp_error *error) {
  (void)transport, (void)error;
  CHECK(!shared->is_open);
  note("await", shared->name);
  return FSDP_OK;
}

/* A root, which is kept, and units a, b and tiny, over two ranks. */
static void plan(const model_options *options, bool is_able) {
  notes[0] = '\0';
  num_shares = num_opens = fails_at = 0;
  can_share = is_able;
  memset(shares, 0, sizeof shares);
  memset(homes, 0, sizeof homes);
  model_init(&m, options);
  recorded = m.shard_group.transport->ops;
  able = *recorded;
  able.sharer = sharer;
  able.share = share;
  able.unshare = unshare;
  able.open = open_shared;
  able.close = close_shared;
  able.await_closed = await_closed;
  m.shard_group.transport->ops = &able;
  model_plan_units("root 4096; a 4096; b 4096; tiny 4");
}

static void start(const model_options *options, bool is_able) {
  plan(options, is_able);
  model_start(&m);
}

/* The shards of rank 0 lie where the others read them: at the beginning of a
 * region, of which the others' part is not touched here. */
static void start_in_regions(void) {
  fsdp_segment_options segments[MODEL_MAX_SEGMENTS];
  plan(NULL, true);
  CHECK_OK(fsdp_engine_create(&m.ops, &m.views, &m.engine, NULL));
  for (int64_t i = 0; i < m.num_units; i++) {
    model_unit *unit = &m.units[i];
    fsdp_unit_options options = model_unit_options(&m, i, segments);
    homes[i] = unit->shards[0];
    options.region.data = homes[i];
    options.region.nbytes = unit->full_nbytes[0];
    CHECK_OK(fsdp_unit_create(&options, &unit->unit, NULL));
    CHECK_OK(fsdp_engine_add_unit(m.engine, unit->unit, NULL));
  }
}

static fsdp_unit *unit_of(int64_t index) {
  return m.units[index].unit;
}

/* The values are checked where parameters are shown. */
TEST(test_a_step) {
  start(NULL, true);
  PLAY("forward");
  CHECK_NOTES(
      "share root; share a; share b; open a; close a; open b; close b; "
      "await a; await b");
  CHECK_TAPE_LACKS("all_gather a");
  PLAY("backward");
  CHECK_NOTES("open b; open a; close b; close a; await a; await b");
  PLAY("optimizer; zero_grad; step");
  CHECK_NOTES(
      "open a; close a; open b; close b; await a; await b; "
      "open b; open a; close b; close a; await a; await b");
  PLAY("check_sharded; eval");
  CHECK_NOTES("open a; close a; open b; close b; await a; await b");
  PLAY("destroy a");
  model_fini(&m);
  CHECK_NOTES("unshare a; unshare b; unshare root");
}

/* Another rank has no region: nothing changes, and nobody asks again. */
TEST(test_ranks_that_cannot) {
  start(NULL, false);
  PLAY("step");
  CHECK_NOTES("share root; share a; share b");
  PLAY("zero_grad; step");
  CHECK_NOTES("");
}

TEST(test_units_that_keep_their_parameters) {
  start(WITH(.keeps_after_forward = true), true);
  PLAY("step");
  CHECK_NOTES("");
  start(WITH(.param_dtype = {FSDP_DTYPE_BFLOAT16, 2}), true);
  PLAY("step");
  CHECK_NOTES("");
  start(WITH(.keeps_without_sync = true), true);
  PLAY("sync none; step"); /* kept for the next micro-batch */
  CHECK_NOTES("share root; share a; share b");
  PLAY("sync reduce; step; zero_grad; step");
  CHECK_NOTES(
      "open b; open a; close b; close a; await a; await b; "
      "open a; close a; open b; close b; await a; await b; "
      "open b; open a; close b; close a; await a; await b");
}

/* The setting may change when the shards are shared already. */
TEST(test_a_unit_that_keeps_them_later) {
  start(NULL, true);
  PLAY("step; zero_grad");
  notes[0] = '\0';
  fsdp_unit_get_settings(unit_of(1))->reshard_after_forward = false;
  PLAY("step");
  CHECK_NOTES("open b; close b; await b; open b; close b; await b");
}

/* What the user asks for may be kept: it has a block. */
TEST(test_on_demand) {
  start(NULL, true);
  PLAY("eval");
  notes[0] = '\0';
  PLAY("unshard a; wait_unshard a");
  CHECK_NOTES("");
  PLAY("reshard a; enter root; enter a");
  CHECK_NOTES("open a");
  PLAY("unshard a"); /* inside its own forward */
  PLAY("wait_unshard a");
  CHECK_NOTES("close a");
  PLAY("leave_eval a; leave_eval root; check_sharded");
}

/* The ranks compare what they do next, so each gathers as usual. */
TEST(test_checked_order) {
  start(NULL, true);
  PLAY("eval");
  notes[0] = '\0';
  fsdp_engine_set_order_check(m.engine, true);
  PLAY("eval");
  CHECK_NOTES("");
}

/* Nobody waits after a module raised: the others may be waiting for
 * this rank. */
TEST(test_forward_that_raises) {
  start(NULL, true);
  PLAY("eval; enter root; enter a");
  notes[0] = '\0';
  PLAY("abandon a; abandon root");
  CHECK_NOTES("close a");
  PLAY("step");
}

TEST(test_an_open_that_fails) {
  fsdp_error error = {0};
  start(NULL, true);
  fails_at = 2;
  PLAY("enter root; enter a; leave a");
  notes[0] = '\0';
  CHECK_I64(model_enter(&m, 2, &error), FSDP_BACKEND);
  CHECK_NOTES("close b");
  PLAY("state b FAILED; reset; check_sharded");
}

/* A reset closes what an unfinished step left open. */
TEST(test_reset) {
  start(NULL, true);
  PLAY("enter root; enter a");
  notes[0] = '\0';
  PLAY("reset");
  CHECK_NOTES("close a");
  PLAY("step");
}

/* Shards that were moved out of their regions: the others read the new values
 * there, also those of later steps. */
TEST(test_moved_shards_are_brought_home) {
  start_in_regions();
  PLAY("step; zero_grad; clear; eval");
  CHECK_TAPE_LACKS("pack unshard x1 4096 f32->f32"); /* they are at home */
  for (int64_t i = 0; i < m.num_units; i++) {
    model_unit *unit = &m.units[i];
    unit->shards[0] = malloc((size_t)unit->shard_nbytes[0]);
    if (unit->shards[0] == NULL) abort();
    memcpy(unit->shards[0], homes[i], (size_t)unit->shard_nbytes[0]);
    fsdp_unit_move_shard(unit->unit, 0, unit->shards[0]);
  }
  recorder_set_params_copied(m.device, true);
  notes[0] = '\0';
  PLAY("optimizer; clear; step; check_grads");
  CHECK_TAPE_HAS("pack unshard x1 4096 f32->f32");
  CHECK_NOTES(
      "open a; close a; open b; close b; await a; await b; "
      "open b; open a; close b; close a; await a; await b");
  recorder_set_params_copied(m.device, false);
  PLAY("optimizer; zero_grad; step; check_grads");
  const int64_t num_units = m.num_units;
  for (int64_t i = 0; i < num_units; i++) free(homes[i]);
}
