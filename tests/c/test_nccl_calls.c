/*
 * NCCL transport: what a call costs, when communicators are made and how they
 * are configured.
 */
#define _POSIX_C_SOURCE 200809L /* syscall */
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/alloc.h"
#include "nccl_fixture.h"

static _Atomic int64_t g_num_sleeps;

/* Counts what the transport sleeps, in place of libc's. */
int nanosleep(const struct timespec *time, struct timespec *left) {
  atomic_fetch_add(&g_num_sleeps, 1);
  return (int)syscall(SYS_nanosleep, time, left);
}

static fsdp_transport *create(const fsdp_nccl_options *options, int version) {
  const fsdp_store store = nccl_fake_store();
  fsdp_nccl_library library = nccl_fake_library();
  fsdp_transport *transport = NULL;
  fsdp_error error = {0};
  library.version = version;
  CHECK_OK(
      fsdp_nccl_create(&library, options, &store, 0, 2, &transport, &error));
  return transport;
}

/* Past the first call the host asks nothing and sleeps never: the communicators
 * are blocking ones. */
TEST(test_steady_state) {
  fsdp_transport *transport = nccl_fixture_open(0, 2);
  CHECK_LACKS(nccl_fake_tape(), "NON-BLOCKING");
  CHECK_OK(nccl_fixture_unit(transport, true, NULL));
  const int64_t num_polls = nccl_fake_num(NCCL_FAKE_POLLS);
  const int64_t num_requests = nccl_fake_num(NCCL_FAKE_STORE_CALLS);
  const int64_t num_sleeps = atomic_load(&g_num_sleeps);
  for (int i = 0; i < 100; i++) {
    CHECK_OK(nccl_fixture_unit(transport, true, NULL));
  }
  CHECK_I64(nccl_fake_num(NCCL_FAKE_POLLS), num_polls);
  CHECK_I64(nccl_fake_num(NCCL_FAKE_STORE_CALLS), num_requests);
  CHECK_I64(atomic_load(&g_num_sleeps), num_sleeps);
  nccl_fixture_leave(transport);
}

TEST(test_made_when_needed) {
  const fsdp_nccl_options options = nccl_fixture_options();
  char *memory = nccl_fixture_memory;
  nccl_fake_reset();
  nccl_fake_set_base(memory);
  fsdp_transport *transport = create(&options, 22703);
  CHECK_TEXT(nccl_fake_tape(), "");
  CHECK_I64(nccl_fake_num(NCCL_FAKE_STORE_CALLS), 0);
  CHECK_OK(nccl_fixture_gather(transport, NULL, NULL));
  CHECK_OK(nccl_fixture_gather(transport, NULL, NULL));
  CHECK_LINES(nccl_fake_tape(),
              "init 0 id0 rank 0/2; all_gather 0 u8 16 +0 +0 s1; "
              "all_gather 0 u8 16 +0 +0 s1");
  nccl_fake_clear_tape();
  const fsdp_call call = nccl_fixture_call(FSDP_CHANNEL_REDUCE, 2, NULL);
  CHECK_OK(transport->ops->all_reduce(transport, &call, memory, 1, NCCL_F32,
                                      NULL, NULL));
  CHECK_LINES(nccl_fake_tape(),
              "init 1 id1 rank 0/2; all_reduce 1 f32 1 +0 +0 op0 s2");
  nccl_fixture_leave(transport);
}

/* A group that was never used has nothing to leave. */
TEST(test_never_used) {
  const fsdp_nccl_options options = nccl_fixture_options();
  nccl_fake_reset();
  nccl_fixture_leave(create(&options, 22703));
  CHECK_TEXT(nccl_fake_tape(), "");
}

TEST(test_tuning) {
  fsdp_nccl_options options = nccl_fixture_options();
  fsdp_transport *transport = nccl_fixture_join(&options, 0, 2);
  fsdp_nccl_config config = nccl_fake_config();
  CHECK_I64(config.cga_cluster_size, FSDP_NCCL_CONFIG_UNDEFINED);
  CHECK_I64(config.min_ctas, FSDP_NCCL_CONFIG_UNDEFINED);
  CHECK_I64(config.max_ctas, FSDP_NCCL_CONFIG_UNDEFINED);
  CHECK_I64(config.split_share, FSDP_NCCL_CONFIG_UNDEFINED);
  CHECK_TEXT(config.net_name, "");
  nccl_fixture_leave(transport);

  char net_name[] = "Socket";
  options.tuning = (fsdp_nccl_tuning){.cga_cluster_size = 2,
                                      .min_ctas = 4,
                                      .max_ctas = 16,
                                      .split_share = 1,
                                      .net_name = net_name};
  nccl_fake_reset();
  transport = create(&options, 22703);
  net_name[0] = 'X'; /* it is the caller's */
  CHECK_OK(nccl_fixture_gather(transport, NULL, NULL));
  config = nccl_fake_config();
  CHECK_I64(config.blocking, 1);
  CHECK_I64(config.cga_cluster_size, 2);
  CHECK_I64(config.min_ctas, 4);
  CHECK_I64(config.max_ctas, 16);
  CHECK_I64(config.split_share, 1);
  CHECK_TEXT(config.net_name, "Socket");
  nccl_fixture_leave(transport);
}

typedef struct meeting_case {
  int64_t world_size;
  int64_t refusing; /* a rank, or -1 */
} meeting_case;

/* All ranks arrive, then all conclude: the last one to arrive waits for none,
 * so that one thread can play all of them. */
static void run_meeting(const meeting_case *c) {
  const fsdp_store store = nccl_fake_store();
  fsdp_error error = {0};
  int64_t most = 0;
  nccl_fake_reset();
  for (int64_t rank = 0; rank < c->world_size; rank++) {
    const int64_t before = nccl_fake_num(NCCL_FAKE_STORE_CALLS);
    const char *refusal = rank == c->refusing ? "has no libnccl" : "";
    CHECK_OK(fsdp_nccl_meeting_arrive(&store, "m", rank, c->world_size, refusal,
                                      &error));
    const int64_t num = nccl_fake_num(NCCL_FAKE_STORE_CALLS) - before;
    if (num > most) most = num;
  }
  CHECK(most <= 4);
  most = 0;
  for (int64_t rank = 0; rank < c->world_size; rank++) {
    const int64_t before = nccl_fake_num(NCCL_FAKE_STORE_CALLS);
    char reason[128];
    bool is_possible = c->refusing >= 0;
    CHECK_OK(fsdp_nccl_meeting_conclude(&store, "m", c->world_size, 0,
                                        &is_possible, reason, sizeof reason,
                                        &error));
    CHECK(is_possible == (c->refusing < 0));
    char expected[128] = "";
    if (c->refusing >= 0) {
      (void)snprintf(expected, sizeof expected, "rank %d: has no libnccl",
                     (int)c->refusing);
    }
    CHECK_TEXT(reason, expected);
    const int64_t num = nccl_fake_num(NCCL_FAKE_STORE_CALLS) - before;
    if (num > most) most = num;
  }
  CHECK_I64(most, 1);
}

TEST(test_meeting) {
  const int64_t world_sizes[] = {2, 64, 4096};
  for (size_t i = 0; i < sizeof world_sizes / sizeof world_sizes[0]; i++) {
    const int64_t n = world_sizes[i];
    const meeting_case cases[] = {{n, -1}, {n, 0}, {n, n / 2}, {n, n - 1}};
    for (size_t j = 0; j < sizeof cases / sizeof cases[0]; j++) {
      run_meeting(&cases[j]);
    }
  }
}

TEST(test_meeting_that_fails) {
  const fsdp_store store = nccl_fake_store();
  fsdp_error error = {0};
  bool is_possible = false;
  char reason[64];
  nccl_fake_reset();
  CHECK_OK(fsdp_nccl_meeting_arrive(&store, "m", 0, 3, NULL, &error));
  CHECK_OK(fsdp_nccl_meeting_arrive(&store, "m", 2, 3, NULL, &error));
  CHECK_FAILS(fsdp_nccl_meeting_conclude(&store, "m", 3, 20, &is_possible,
                                         reason, sizeof reason, &error),
              FSDP_BACKEND, error.message,
              "2 of 3 ranks came to the meeting of a NCCL group within 20 ms "
              "(no key m/verdict after 20 ms)");
  /* Two refuse: either reason, the same answer. */
  nccl_fake_reset();
  CHECK_OK(fsdp_nccl_meeting_arrive(&store, "m", 0, 2, "a", &error));
  CHECK_OK(fsdp_nccl_meeting_arrive(&store, "m", 1, 2, "b", &error));
  CHECK_OK(fsdp_nccl_meeting_conclude(&store, "m", 2, 20, &is_possible, reason,
                                      sizeof reason, &error));
  CHECK(!is_possible);
  CHECK_TEXT(reason, "rank 1: b");
  for (int64_t i = 0; i < 6; i++) {
    nccl_fake_reset();
    nccl_fake_store_fail_at(i);
    fsdp_status status =
        fsdp_nccl_meeting_arrive(&store, "m", 0, 1, i < 4 ? "a" : "", &error);
    if (status == FSDP_OK) {
      nccl_fake_set(NCCL_FAKE_STORE_BROKEN, true);
      status = fsdp_nccl_meeting_conclude(&store, "m", 1, 0, &is_possible,
                                          reason, sizeof reason, &error);
    }
    CHECK(status == FSDP_BACKEND);
    CHECK(strstr(error.message, "injected at store") != NULL);
  }
}
