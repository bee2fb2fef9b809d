/*
 * Tests of shm/: shards that the ranks read in place. Every rank has two
 * shards, one smaller than a page, one of several.
 */
#include <stdatomic.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "host/pages.h"
#include "shm_fixture.h"
#include "transports/merging.h"

enum {
  SMALL_NBYTES = 100,
  LARGE_NBYTES = 9000, /* no multiple of a page */
  LARGE_OFFSET = 1024,
  MAX_RANKS = 5,
  REGION_NBYTES = LARGE_OFFSET + MAX_RANKS * LARGE_NBYTES
};

typedef struct shards {
  fsdp_transport *transport;
  fsdp_region region;
  fsdp_region_range own[2];
  char *whole;
  fsdp_shared *shared;
} shards;

/* What rank `rank` writes in round `round` at byte `i`. */
static char value_of(int64_t rank, int64_t round, int64_t i) {
  return (char)(rank * 31 + round * 7 + i);
}

static void write_own(const shards *self, int64_t rank, int64_t round) {
  for (int i = 0; i < 2; i++) {
    char *shard = (char *)self->region.data + self->own[i].offset;
    for (int64_t j = 0; j < self->own[i].nbytes; j++) {
      shard[j] = value_of(rank, round, j);
    }
  }
}

static bool holds(const char *memory, const shards *self, int64_t rank,
                  int64_t own_rank, int64_t round) {
  for (int i = 0; i < 2; i++) {
    const int64_t nbytes = self->own[i].nbytes;
    const char *shard =
        memory + self->own[i].offset + (rank - own_rank) * nbytes;
    for (int64_t j = 0; j < nbytes; j++) {
      if (shard[j] != value_of(rank, round, j)) return false;
    }
  }
  return true;
}

/* A region with this rank's shards of round 0, shared if all ranks have one. */
static shards begin(const shm_rank *self, const char *key, bool has_region) {
  shards made = {
      .transport = shm_join(self, key),
      .region = {.nbytes = REGION_NBYTES},
      .own = {{self->rank * SMALL_NBYTES, SMALL_NBYTES},
              {LARGE_OFFSET + self->rank * LARGE_NBYTES, LARGE_NBYTES}}};
  const fsdp_transport_ops *ops = made.transport->ops;
  void *whole = NULL;
  made.region.data = fsdp_host_space_alloc(REGION_NBYTES);
  CHECK(made.region.data != NULL);
  write_own(&made, self->rank, 0);
  const void *before = made.region.data;
  const fsdp_region none = {.data = NULL};
  CHECK(ops->sharer(made.transport) == made.transport);
  CHECK_OK(ops->share(made.transport, "unit 'a'",
                      has_region ? made.region : none, REGION_NBYTES, made.own,
                      2, &whole, &made.shared, NULL));
  CHECK(made.region.data == before);
  made.whole = whole;
  return made;
}

static fsdp_status open_all(const shards *self, fsdp_error *error) {
  const fsdp_call call = {.channel = FSDP_CHANNEL_GATHER, .label = "unit 'a'"};
  const fsdp_transport_ops *ops = self->transport->ops;
  uint64_t ticket = 0;
  fsdp_status status = FSDP_OK;
  FSDP_TRY(ops->open(self->transport, &call, self->shared, &ticket, error));
  FSDP_TRY(ops->wait(self->transport, FSDP_CHANNEL_GATHER, ticket, error));
done:
  return status;
}

static void close_all(const shards *self) {
  self->transport->ops->close(self->transport, self->shared);
}

static fsdp_status await(const shards *self, fsdp_error *error) {
  return self->transport->ops->await_closed(self->transport, self->shared,
                                            error);
}

static void end(const shards *self) {
  self->transport->ops->unshare(self->shared);
  self->transport->ops->destroy(self->transport);
  fsdp_host_space_free(self->region.data, self->region.nbytes);
}

/* ---- Tests --------------------------------------------------------------- */

static void read_each_other(const shm_rank *self) {
  shards s = begin(self, "read", true);
  CHECK(s.shared != NULL);
  CHECK(holds(s.region.data, &s, self->rank, self->rank, 0));
  for (int64_t round = 1; round < 20; round++) {
    write_own(&s, self->rank, round);
    CHECK_OK(open_all(&s, NULL));
    for (int64_t rank = 0; rank < self->world_size; rank++) {
      CHECK(holds(s.whole, &s, rank, self->rank, round));
    }
    if (round % 3 ==
        self->rank % 3) { /* as a module does that writes in place */
      memset(s.whole, 1, REGION_NBYTES);
    }
    close_all(&s);
    CHECK_OK(await(&s, NULL));
    CHECK(holds(s.region.data, &s, self->rank, self->rank, round));
  }
  end(&s);
}

/* Also that a fast rank may open again before a slow one waits for readers. */
TEST(test_ranks_read_each_other) {
  for (int64_t world_size = 2; world_size <= MAX_RANKS; world_size++) {
    shm_run(world_size, read_each_other, NULL);
  }
}

/* Calls of other kinds lie between, and one does not wait for the readers. */
static void mix_calls(const shm_rank *self) {
  shards s = begin(self, "mix", true);
  CHECK_OK(open_all(&s, NULL));
  CHECK_OK(shm_barrier(s.transport, NULL, NULL));
  CHECK_OK(shm_barrier(s.transport, NULL, NULL));
  close_all(&s);
  close_all(&s); /* once is enough */
  CHECK_OK(open_all(&s, NULL));
  close_all(&s);
  CHECK_OK(await(&s, NULL));
  end(&s);
}

TEST(test_other_calls_between) {
  shm_run(3, mix_calls, NULL);
}

static void share_without_rank_1(const shm_rank *self) {
  shards s = begin(self, "without", self->rank != 1);
  CHECK(s.shared == NULL && s.whole == NULL);
  CHECK(holds(s.region.data, &s, self->rank, self->rank, 0));
  CHECK_OK(shm_barrier(s.transport, NULL, NULL));
  end(&s);
}

TEST(test_all_or_none) {
  shm_run(3, share_without_rank_1, NULL);
}

static void read_slowly(const shm_rank *self) {
  _Atomic int32_t *is_closing = self->context;
  shards s = begin(self, "slow", true);
  CHECK_OK(open_all(&s, NULL));
  if (self->rank == 1) {
    check_sleep_ms(30);
    CHECK(holds(s.whole, &s, 0, self->rank, 0));
    atomic_store(is_closing, 1);
    close_all(&s);
  } else {
    close_all(&s);
    CHECK_OK(await(&s, NULL));
    CHECK(atomic_load(is_closing) == 1);
    write_own(&s, self->rank, 1);
  }
  CHECK_OK(shm_barrier(s.transport, NULL, NULL));
  end(&s);
}

TEST(test_an_owner_waits_for_readers) {
  shm_run(2, read_slowly, shm_shared(sizeof(_Atomic int32_t)));
}

static void die_while_reading(const shm_rank *self) {
  shards s = begin(self, "die", true);
  CHECK_OK(open_all(&s, NULL));
  if (self->rank == 1) _exit(0);
  close_all(&s);
  fsdp_error error = {0};
  CHECK_I64(await(&s, &error), FSDP_BACKEND);
  SHM_CHECK_SAYS(&error, "rank 1", "readers of its shards", "unit 'a'",
                 "its process has ended");
  end(&s);
}

TEST(test_a_reader_dies) {
  shm_run_without(2, 1, die_while_reading, NULL);
}

static void open_instead_of_gather(const shm_rank *self) {
  shards s = begin(self, "instead", true);
  fsdp_error error = {0};
  if (self->rank == 0) {
    CHECK_I64(open_all(&s, &error), FSDP_BACKEND);
  } else {
    CHECK_I64(shm_barrier(s.transport, "unit 'a'", &error), FSDP_BACKEND);
  }
  close_all(&s);
  SHM_CHECK_SAYS(&error, "all_gather in place");
  end(&s);
}

TEST(test_another_call) {
  shm_run(2, open_instead_of_gather, NULL);
}

/* A forked child, as a data loader has, reads on and disturbs nobody. */
static void fork_reader(const shm_rank *self) {
  shards s = begin(self, "fork", true);
  CHECK_OK(open_all(&s, NULL));
  const pid_t child = fork();
  if (child == 0) {
    close_all(&s);
    _exit(holds(s.region.data, &s, self->rank, self->rank, 0) ? 0 : 1);
  }
  int result = -1;
  CHECK(waitpid(child, &result, 0) == child && result == 0);
  close_all(&s);
  CHECK_OK(await(&s, NULL));
  end(&s);
}

TEST(test_forked_child) {
  shm_run(2, fork_reader, NULL);
}

static void merge(const shm_rank *self) {
  shards s = begin(self, "merge", true);
  fsdp_transport *merging = NULL;
  CHECK_OK(fsdp_merging_create(s.transport, self->rank, self->world_size,
                               &merging, NULL));
  CHECK(merging->ops->sharer(merging) == s.transport);
  merging->ops->destroy(merging);
  end(&s);
}

TEST(test_merging_shares_through_its_inner) {
  shm_run(2, merge, NULL);
}
