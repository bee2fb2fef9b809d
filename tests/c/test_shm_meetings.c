/*
 * Tests of shm/: meetings that fail, and options that are refused.
 */
#include <stdlib.h>
#include <sys/resource.h>

#include "base/alloc.h"
#include "check.h"
#include "shm_fixture.h"

typedef struct meeting {
  char reasons[8][FSDP_SHM_REASON_NBYTES];
} meeting;

static fsdp_status try_create(const shm_rank *self,
                              const fsdp_shm_options *options,
                              fsdp_shm_verdict *verdict, fsdp_error *error) {
  fsdp_transport *transport = NULL;
  const fsdp_status status =
      fsdp_shm_create(&self->store, options, self->rank, self->world_size,
                      &transport, verdict, error);
  CHECK((transport != NULL) == (status == FSDP_OK && verdict->is_possible));
  if (transport != NULL) transport->ops->destroy(transport);
  return status;
}

static void note(const shm_rank *self, const fsdp_shm_verdict *verdict) {
  meeting *all = self->context;
  CHECK(!verdict->is_possible);
  memcpy(all->reasons[self->rank], verdict->reason, sizeof verdict->reason);
}

/* Meets the others, who cannot use shared memory: all learn why. */
static void meet_in_vain(const shm_rank *self,
                         const fsdp_shm_options *options) {
  fsdp_shm_verdict verdict = {0};
  fsdp_error error = {0};
  CHECK_OK(try_create(self, options, &verdict, &error));
  note(self, &verdict);
}

static void check_reasons(const meeting *all, int64_t world_size,
                          const char *text) {
  for (int64_t rank = 0; rank < world_size; rank++) {
    CHECK_TEXT(all->reasons[rank], all->reasons[0]);
  }
  if (!CHECK(strstr(all->reasons[0], text) != NULL)) {
    printf("  no \"%s\" in: %s\n", text, all->reasons[0]);
  }
}

static void meet_with_little_memory(const shm_rank *self) {
  const fsdp_shm_options options = shm_options("little");
  struct rlimit before;
  CHECK_I64(getrlimit(RLIMIT_FSIZE, &before), 0);
  struct rlimit limit = before;
  if (self->rank == 1) limit.rlim_cur = 4096;
  CHECK_I64(setrlimit(RLIMIT_FSIZE, &limit), 0);
  meet_in_vain(self, &options);
  /* gcov writes files, too. */
  CHECK_I64(setrlimit(RLIMIT_FSIZE, &before), 0);
}

TEST(test_without_memory_there_is_none_for_anybody) {
  meeting *all = shm_shared(sizeof *all);
  shm_run(3, meet_with_little_memory, all);
  check_reasons(all, 3, "rank 1: ");
  check_reasons(all, 3, "ulimit -f");
}

static void meet_without_address_space(const shm_rank *self) {
  fsdp_shm_options options = shm_options("much");
  options.ring_nbytes = INT64_C(1) << 52; /* more than any machine has */
  /* Should it be tried all the same, then not at the cost of the machine. */
  const struct rlimit limit = {.rlim_cur = 1 << 20, .rlim_max = 1 << 20};
  CHECK_I64(setrlimit(RLIMIT_FSIZE, &limit), 0);
  meet_in_vain(self, &options);
}

TEST(test_too_much_memory_is_no_signal) {
  meeting *all = shm_shared(sizeof *all);
  shm_run(2, meet_without_address_space, all);
  check_reasons(all, 2, "more than half of the");
}

static void meet_with_other_options(const shm_rank *self) {
  fsdp_shm_options options = shm_options("other");
  if (self->rank == 2) options.ring_nbytes *= 2;
  meet_in_vain(self, &options);
}

TEST(test_ranks_with_other_options_do_not_meet) {
  meeting *all = shm_shared(sizeof *all);
  shm_run(3, meet_with_other_options, all);
  check_reasons(all, 3, "other options");
}

static void meet_alone(const shm_rank *self) {
  fsdp_shm_options options = shm_options("alone");
  options.meeting_timeout_ms = 100;
  fsdp_shm_verdict verdict = {0};
  fsdp_error error = {0};
  if (self->rank == 1) return;
  CHECK_I64(try_create(self, &options, &verdict, &error), FSDP_BACKEND);
}

TEST(test_a_rank_that_does_not_come_is_an_error) {
  shm_run(2, meet_alone, NULL);
}

/* A store whose answers take a while, and the limits that it was asked with. */
enum { SLOW_MS = 20, SLOW_RANKS = 4, SLOW_GETS = 2 * (SLOW_RANKS - 1) };

typedef struct slow_store {
  int64_t limits_ms[SLOW_GETS];
  int64_t num_gets;
} slow_store;

static fsdp_status slow_set(void *context, const char *key, const void *value,
                            int64_t nbytes, fsdp_error *error) {
  (void)context, (void)key, (void)value, (void)nbytes, (void)error;
  return FSDP_OK;
}

static fsdp_status slow_get(void *context, const char *key, int64_t timeout_ms,
                            void *value, int64_t capacity, int64_t *nbytes,
                            fsdp_error *error) {
  slow_store *self = context;
  (void)key, (void)error;
  if (CHECK(self->num_gets < SLOW_GETS)) {
    self->limits_ms[self->num_gets++] = timeout_ms;
  }
  check_sleep_ms(SLOW_MS);
  memset(value, 0,
         (size_t)capacity); /* of another version: nothing is mapped */
  *nbytes = capacity;
  return FSDP_OK;
}

/* One limit for all waits: what one takes is gone for the next. */
TEST(test_a_meeting_has_one_time_limit) {
  slow_store slow = {0};
  const fsdp_store store = {.context = &slow, .set = slow_set, .get = slow_get};
  fsdp_shm_options options = shm_options("slow");
  options.meeting_timeout_ms = 3 * SLOW_MS;
  fsdp_transport *transport = NULL;
  fsdp_shm_verdict verdict = {0};
  CHECK_OK(fsdp_shm_create(&store, &options, 0, SLOW_RANKS, &transport,
                           &verdict, NULL));
  CHECK(!verdict.is_possible && transport == NULL);
  CHECK_I64(slow.num_gets, SLOW_GETS);
  CHECK(slow.limits_ms[0] <= 3 * SLOW_MS);
  for (int64_t i = 1; i < SLOW_GETS; i++) {
    const int64_t most = slow.limits_ms[i - 1] - SLOW_MS;
    CHECK(slow.limits_ms[i] >= 1);
    CHECK(slow.limits_ms[i] <= (most > 1 ? most : 1) + 1);
  }
}

/* Rank 0's allocation i fails: nobody gets a transport, nothing is lost. */
static void meet_with_failing_allocations(const shm_rank *self) {
  char key[32];
  const int64_t direct = *(const int64_t *)self->context;
  for (int64_t i = 0;; i++) {
    fsdp_shm_verdict verdict = {0};
    fsdp_error error = {0};
    (void)snprintf(key, sizeof key, "memory%" PRId64, i);
    fsdp_shm_options options = shm_options(key);
    options.direct_call_nbytes = direct;
    if (self->rank == 0) fsdp_alloc_fail_at(i);
    CHECK_OK(try_create(self, &options, &verdict, &error));
    fsdp_alloc_fail_at(-1);
    CHECK_I64(fsdp_alloc_live(), 0);
    CHECK_I64(shm_num_segments(), 0);
    if (verdict.is_possible) {
      CHECK_I64(i,
                direct < 0 ? 5 : 7); /* another allocation needs another look */
      break;
    }
    CHECK(strstr(verdict.reason, "rank 0: no host memory") != NULL);
  }
}

TEST(test_every_allocation_of_a_meeting_can_fail) {
  for (int64_t direct = -1; direct <= 1; direct += 2) {
    shm_run(2, meet_with_failing_allocations, &direct);
  }
}

TEST(test_bad_options_are_refused) {
  const shm_rank self = {.rank = 0, .world_size = 2, .store = shm_store()};
  fsdp_shm_verdict verdict;
  fsdp_error error;
  for (int i = 0; i < 6; i++) {
    fsdp_shm_options options = shm_options("options");
    fsdp_status expected = FSDP_INVALID_ARGUMENT;
    if (i == 0) options.nbytes = 8;
    if (i == 1) options.slot_nbytes = 100;
    if (i == 2) options.slot_nbytes = 64;
    if (i == 3) options.timeout_ms = -1;
    if (i == 4) options.key_prefix = NULL;
    if (i == 5) {
      options.ring_nbytes = INT64_MAX;
      expected = FSDP_OVERFLOW;
    }
    CHECK_I64(try_create(&self, &options, &verdict, &error), expected);
  }
  const fsdp_shm_options options = shm_options("options");
  const shm_rank nobody = {.rank = 2, .world_size = 2, .store = self.store};
  CHECK_I64(try_create(&nobody, &options, &verdict, &error),
            FSDP_INVALID_ARGUMENT);
}
