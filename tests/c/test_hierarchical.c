/*
 * Tests of transports/hierarchical and transports/host_layout: hosts are groups
 * of ranks of this machine, and shared memory stands for the network too.
 */
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/dtypes.h"
#include "check.h"
#include "shm_calls.h"
#include "shm_fixture.h"
#include "transports/hierarchical.h"

static const fsdp_dtype g_float = {FSDP_DTYPE_FLOAT32, 4};

/* Both levels and the transport over them. */
typedef struct levels {
  fsdp_hierarchical_parts parts;
  fsdp_transport *transport;
} levels;

static fsdp_transport *join_level(const shm_rank *self, int64_t rank,
                                  int64_t world_size, const char *what,
                                  int64_t which) {
  const shm_rank level = {
      .rank = rank, .world_size = world_size, .store = self->store};
  char key[48];
  (void)snprintf(key, sizeof key, "%s%" PRId64, what, which);
  return shm_join(&level, key);
}

static levels join_levels(const shm_rank *self) {
  const int64_t num_local = self->num_local;
  const fsdp_host_layout layout = {.num_hosts = self->world_size / num_local,
                                   .num_local = num_local};
  const int64_t host = self->rank / num_local;
  const int64_t local = self->rank % num_local;
  levels made = {
      .parts = {.local = join_level(self, local, num_local, "host", host)}};
  for (int i = 0; i < FSDP_NUM_CHANNELS; i++) {
    made.parts.peers[i] = join_level(self, host, layout.num_hosts,
                                     i == 0 ? "gathers" : "sums", local);
  }
  CHECK_OK(fsdp_hierarchical_create(&made.parts, layout, self->rank,
                                    &made.transport, NULL));
  return made;
}

static void leave_levels(levels *joined) {
  joined->transport->ops->destroy(joined->transport);
  joined->parts.local->ops->destroy(joined->parts.local);
  for (int i = 0; i < FSDP_NUM_CHANNELS; i++) {
    joined->parts.peers[i]->ops->destroy(joined->parts.peers[i]);
  }
}

/* Around the size of a small all_reduce, and odd ones. */
static const int64_t g_numels[] = {0, 1, 3, 257, 1023, 1024, 1025, 4097, 9999};
enum { NUM_NUMELS = sizeof g_numels / sizeof g_numels[0] };

/* The context of a rank's body: ranks of a host. */
static shm_rank with_hosts(const shm_rank *self) {
  shm_rank own = *self;
  own.num_local = *(const int64_t *)self->context;
  return own;
}

static void every_case(const shm_rank *given) {
  const shm_rank self = with_hosts(given);
  levels joined = join_levels(&self);
  for (int64_t i = 0; i < NUM_KINDS * SHM_NUM_DTYPES * NUM_NUMELS; i++) {
    const shm_dtype *dtype = &shm_dtypes[i / NUM_KINDS % SHM_NUM_DTYPES];
    shm_call call = {
        .what = (shm_kind)(i % NUM_KINDS),
        .dtype = dtype->dtype,
        .numel = g_numels[i / NUM_KINDS / SHM_NUM_DTYPES],
        .root = i % self.world_size,
        .salt = i,
    };
    if (shm_is_sum(call.what) && !dtype->is_summed) continue;
    shm_start(&self, joined.transport, &call);
    shm_finish(&self, joined.transport, &call);
  }
  leave_levels(&joined);
}

TEST(test_every_kind_dtype_and_size_by_hosts) {
  const int64_t shapes[][2] = {{4, 2}, {6, 2}, {6, 3}, {8, 4}};
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
    int64_t num_local = shapes[i][1];
    shm_run(shapes[i][0], every_case, &num_local);
  }
}

enum { NUM_STEPS = 120, MAX_IN_FLIGHT = 6 };

/* Each rank waits when it likes and in its own order, on both channels. */
static void run_at_random(const shm_rank *given) {
  const shm_rank self = with_hosts(given);
  uint64_t shared = 5;
  uint64_t own = 31 + (uint64_t)self.rank;
  levels joined = join_levels(&self);
  shm_call list[MAX_IN_FLIGHT];
  int64_t num = 0;
  for (int64_t step = 0; step < NUM_STEPS; step++) {
    shm_call call = {
        .what = (shm_kind)check_random(&shared, NUM_KINDS),
        .dtype = g_float,
        .root = check_random(&shared, self.world_size),
        .numel = check_random(&shared, 4000),
        .salt = step,
    };
    if (check_random(&own, 6) == 0) check_sleep_ms(check_random(&own, 3));
    shm_start(&self, joined.transport, &call);
    list[num++] = call;
    while (num == MAX_IN_FLIGHT || (num > 0 && check_random(&own, 2) == 0)) {
      const int64_t i = check_random(&own, num);
      shm_finish(&self, joined.transport, &list[i]);
      list[i] = list[--num];
    }
  }
  while (num-- > 0) shm_finish(&self, joined.transport, &list[num]);
  leave_levels(&joined);
}

TEST(test_ranks_wait_in_their_own_order) {
  int64_t num_local = 2;
  shm_run(4, run_at_random, &num_local);
  num_local = 3;
  shm_run(6, run_at_random, &num_local);
}

/* ---- Failures ------------------------------------------------------------ */

enum { VICTIM = 3 };

static fsdp_status run_call(fsdp_transport *transport, shm_kind kind,
                            const char *label, fsdp_error *error) {
  uint64_t ticket = 0;
  const fsdp_status status =
      shm_start_plain(transport, kind, VICTIM, label, &ticket, error);
  if (status != FSDP_OK) return status;
  CHECK(!transport->ops->is_done(transport, shm_channel_of(kind), ticket));
  return transport->ops->wait(transport, shm_channel_of(kind), ticket, error);
}

typedef struct trial {
  int64_t num_local;
  shm_kind kind;
} trial;

/* All others end, those of the other host too. */
static void kill_one(const shm_rank *given) {
  const shm_rank self = with_hosts(given);
  const trial *mine = self.context;
  levels joined = join_levels(&self);
  fsdp_transport *transport = joined.transport;
  fsdp_error error = {0};
  CHECK_OK(transport->ops->check(transport, &error));
  CHECK_OK(run_call(transport, mine->kind, "unit 'a'", &error));
  if (self.rank == VICTIM) (void)kill(getpid(), SIGKILL);
  CHECK_I64(run_call(transport, mine->kind, "unit 'b'", &error), FSDP_BACKEND);
  SHM_CHECK_SAYS(&error, "unit 'b'");
  if (self.rank % mine->num_local == VICTIM % mine->num_local &&
      mine->kind != SCATTER && mine->kind != REDUCE) {
    SHM_CHECK_SAYS(&error, "between hosts", "dead");
  }
  shm_check_stays_failed(transport, mine->kind, &error);
  leave_levels(&joined);
}

TEST(test_a_rank_of_another_host_dies) {
  const shm_kind kinds[] = {GATHER, BROADCAST, SCATTER, REDUCE};
  for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
    trial mine = {.num_local = 2, .kind = kinds[i]};
    shm_run_without(4, VICTIM, kill_one, &mine);
    shm_run_without(6, VICTIM, kill_one, &mine);
  }
}

/* What fails outside of it ends the others' calls. */
static void give_one_up(const shm_rank *given) {
  const shm_rank self = with_hosts(given);
  levels joined = join_levels(&self);
  fsdp_transport *transport = joined.transport;
  fsdp_error error = {0};
  CHECK(transport->ops->reserved_nbytes(transport) > 0);
  if (self.rank == VICTIM) transport->ops->give_up(transport, "no more disk");
  CHECK_I64(run_call(transport, GATHER, "unit 'c'", &error), FSDP_BACKEND);
  if (self.rank != 0) SHM_CHECK_SAYS(&error, "no more disk");
  transport->ops->give_up(transport, "again"); /* the first one stays */
  CHECK_I64(transport->ops->check(transport, &error), FSDP_BACKEND);
  CHECK(strstr(error.message, "again") == NULL);
  leave_levels(&joined);
}

TEST(test_giving_up_ends_all_hosts) {
  int64_t num_local = 2;
  shm_run(4, give_one_up, &num_local);
}

static void call_wrongly(const shm_rank *given) {
  const shm_rank self = with_hosts(given);
  levels joined = join_levels(&self);
  fsdp_transport *transport = joined.transport;
  const fsdp_call call = {.channel = FSDP_CHANNEL_REDUCE, .label = "unit 'd'"};
  float buffer[4] = {0};
  uint64_t ticket = 7;
  fsdp_error error = {0};
  CHECK_I64(transport->ops->reduce_scatter(transport, &call, buffer, 1, g_float,
                                           &ticket, &error),
            FSDP_INVALID_ARGUMENT);
  SHM_CHECK_SAYS(&error, "unit 'd'", "1 elements", "no scratch memory");
  CHECK_I64((int64_t)ticket, 7);
  fsdp_alloc_fail_at(0); /* of the queue */
  CHECK_I64(transport->ops->all_reduce(transport, &call, buffer, 1, g_float,
                                       &ticket, &error),
            FSDP_OUT_OF_MEMORY);
  fsdp_alloc_fail_at(-1);
  CHECK_I64((int64_t)ticket, 7);
  CHECK_OK(transport->ops->check(transport, NULL));
  leave_levels(&joined);
}

TEST(test_wrong_calls_by_hosts) {
  int64_t num_local = 2;
  shm_run(4, call_wrongly, &num_local);
}

TEST(test_hierarchical_needs_hosts_and_ranks) {
  const fsdp_hierarchical_parts parts = {0};
  const fsdp_host_layout layouts[] = {{1, 4}, {4, 1}, {2, 0}, {2, 2}};
  fsdp_transport *transport = NULL;
  for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
    CHECK_I64(fsdp_hierarchical_create(&parts, layouts[i], 4, &transport, NULL),
              FSDP_INVALID_ARGUMENT);
  }
  fsdp_alloc_fail_at(0);
  CHECK_I64(fsdp_hierarchical_create(&parts, layouts[3], 3, &transport, NULL),
            FSDP_OUT_OF_MEMORY);
  fsdp_alloc_fail_at(-1);
  CHECK(transport == NULL);
}

/* ---- Layout -------------------------------------------------------------- */

static void check_layout(const char *ranks, int64_t num_hosts,
                         int64_t num_local) {
  char names[16][2] = {{0}};
  const char *hosts[16];
  const int64_t world_size = (int64_t)strlen(ranks);
  for (int64_t i = 0; i < world_size; i++) {
    names[i][0] = ranks[i];
    hosts[i] = names[i];
  }
  const fsdp_host_layout layout = fsdp_host_layout_of(hosts, world_size);
  if (!CHECK_I64(layout.num_hosts, num_hosts) ||
      !CHECK_I64(layout.num_local, num_local)) {
    printf("  of %s\n", ranks);
  }
}

TEST(test_layouts_of_hosts) {
  check_layout("a", 1, 1);
  check_layout("aaaa", 1, 4);
  check_layout("aabb", 2, 2);
  check_layout("bbbaaaccc", 3, 3);
  check_layout("abc", 3, 1);
  check_layout("aab", 2, 0);
  check_layout("abab", 2, 0);
  check_layout("abba", 2, 0);
  check_layout("aaabbb", 2, 3);
  check_layout("aaabbc", 3, 0);
  check_layout("aabbb", 2, 0);
}
