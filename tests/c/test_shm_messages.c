/*
 * Tests of shm/: messages between two ranks, through the ring and past it.
 */
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "shm/shm_priv.h"
#include "shm_calls.h"
#include "shm_fixture.h"

enum { VICTIM = 1, DIRECT_NBYTES = 600 };

static unsigned char g_buffer[100000];

/* Messages are staged, or from DIRECT_NBYTES on direct. */
static fsdp_shm_options message_options(const char *key_prefix,
                                        bool is_direct) {
  fsdp_shm_options options = shm_options(key_prefix);
  options.direct_nbytes = is_direct ? DIRECT_NBYTES : -1;
  return options;
}

static bool is_closed(fsdp_transport *transport, int64_t peer) {
  return ((fsdp_shm *)transport)->peers[peer].is_closed;
}

/* ---- Contents ------------------------------------------------------------ */

static unsigned char message_byte(int64_t from, int64_t to, int64_t i) {
  return (unsigned char)(from * 89 + to * 57 + i * 7 + i / 251);
}

/* Everybody sends to everybody, among them more than the rings hold. */
static void exchange(const shm_rank *self, const fsdp_shm_options *options) {
  static const int64_t sizes[] = {0, 1, 599, 600, 1000, 100000};
  enum { NUM_SIZES = 6, MAX = 100000 };
  fsdp_transport *transport = shm_create(self, options);
  unsigned char *sent[8] = {NULL};
  unsigned char *got[8] = {NULL};
  for (int64_t i = 0; i < NUM_SIZES * 2; i++) {
    const int64_t nbytes = sizes[i % NUM_SIZES];
    for (int64_t to = 0; to < self->world_size; to++) {
      if (to == self->rank) continue;
      if (i == 0) sent[to] = malloc(MAX);
      /* Filled: valgrind does not see what another process writes here. */
      if (i == 0) got[to] = calloc(1, MAX);
      for (int64_t k = 0; k < nbytes; k++) {
        sent[to][k] = message_byte(self->rank, to, k + i);
      }
      CHECK_OK(fsdp_shm_recv(transport, to, got[to], nbytes, "m", NULL));
      CHECK_OK(fsdp_shm_send(transport, to, sent[to], nbytes, "m", NULL));
    }
    CHECK_OK(fsdp_shm_wait_messages(transport, NULL));
    int64_t num_wrong = 0;
    for (int64_t from = 0; from < self->world_size; from++) {
      for (int64_t k = 0; from != self->rank && k < nbytes; k++) {
        if (got[from][k] != message_byte(from, self->rank, k + i)) num_wrong++;
      }
    }
    CHECK_I64(num_wrong, 0);
  }
  for (int64_t rank = 0; rank < self->world_size; rank++) {
    free(sent[rank]);
    free(got[rank]);
  }
  CHECK_OK(shm_barrier(transport, "end", NULL));
  transport->ops->destroy(transport);
}

static void exchange_staged(const shm_rank *self) {
  const fsdp_shm_options options = message_options("staged", false);
  exchange(self, &options);
}

static void exchange_direct(const shm_rank *self) {
  const fsdp_shm_options options = message_options("direct", true);
  exchange(self, &options);
}

TEST(test_messages) {
  for (int64_t world_size = 2; world_size <= 5; world_size++) {
    shm_run(world_size, exchange_staged, NULL);
    shm_run(world_size, exchange_direct, NULL);
  }
}

/* Several to one rank at once stay in order, also those of many slots. */
static void send_in_order(const shm_rank *self) {
  enum { NUM = 20, MAX_NUMEL = 2000 };
  const fsdp_shm_options options =
      message_options("order", *(const bool *)self->context);
  fsdp_transport *transport = shm_create(self, &options);
  int64_t (*numbers)[MAX_NUMEL] = calloc(NUM, sizeof *numbers);
  if (numbers == NULL) abort();
  for (int64_t i = 0; i < NUM; i++) {
    const int64_t nbytes = (i % 3 * 900 + 1) * (int64_t)sizeof(int64_t);
    for (int64_t k = 0; self->rank == 0 && k < MAX_NUMEL; k++) {
      numbers[i][k] = i * MAX_NUMEL + k;
    }
    const fsdp_status status =
        self->rank == 0
            ? fsdp_shm_send(transport, 1, numbers[i], nbytes, "number", NULL)
            : fsdp_shm_recv(transport, 0, numbers[i], nbytes, "number", NULL);
    CHECK_OK(status);
  }
  CHECK_OK(fsdp_shm_wait_messages(transport, NULL));
  int64_t num_wrong = 0;
  for (int64_t i = 0; i < NUM; i++) {
    for (int64_t k = 0; k <= i % 3 * 900; k++) {
      if (numbers[i][k] != i * MAX_NUMEL + k) num_wrong++;
    }
  }
  CHECK_I64(num_wrong, 0);
  CHECK_OK(shm_barrier(transport, "end", NULL));
  free(numbers);
  transport->ops->destroy(transport);
}

TEST(test_messages_keep_their_order) {
  for (int i = 0; i < 2; i++) {
    bool is_direct = i == 1;
    shm_run(2, send_in_order, &is_direct);
  }
}

/* ---- A kernel that forbids it -------------------------------------------- */

/* From now on the call of the kernel gives EPERM, as in many containers. */
static void forbid(unsigned call) {
  struct sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  struct sock_fprog program = {.len = 4, .filter = filter};
  CHECK_I64(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
  CHECK_I64(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program), 0);
}

static void exchange_forbidden(const shm_rank *self) {
  if (self->rank != 0) forbid(SYS_process_vm_writev);
  exchange_direct(self);
}

TEST(test_a_rank_that_may_not_write_uses_the_ring) {
  shm_run(3, exchange_forbidden, NULL);
}

static void gather_forbidden(const shm_rank *self) {
  fsdp_shm_options options = shm_options("forbidden");
  fsdp_transport *transport = NULL;
  fsdp_shm_verdict verdict = {0};
  options.direct_call_nbytes = 1;
  if (self->rank == 1) forbid(SYS_process_vm_readv);
  CHECK_OK(fsdp_shm_create(&self->store, &options, self->rank, self->world_size,
                           &transport, &verdict, NULL));
  CHECK(verdict.is_possible && !verdict.is_direct);
  for (int what = 0; what < NUM_KINDS; what++) {
    shm_call call = {.what = (shm_kind)what,
                     .dtype = shm_dtypes[0].dtype,
                     .numel = 5000,
                     .salt = what};
    shm_start(self, transport, &call);
    shm_finish(self, transport, &call);
  }
  transport->ops->destroy(transport);
}

TEST(test_where_one_rank_may_not_read_all_use_rings) {
  shm_run(3, gather_forbidden, NULL);
}

static void look_which_way(const shm_rank *self) {
  const fsdp_shm_options options = message_options("way", true);
  fsdp_transport *transport = shm_create(self, &options);
  const int64_t other = 1 - self->rank;
  if (self->rank == 1) forbid(SYS_process_vm_writev);
  for (int i = 0; i < 3; i++) {
    static unsigned char data[5000];
    CHECK_OK(
        fsdp_shm_recv(transport, other, g_buffer, sizeof data, "way", NULL));
    memset(data, i, sizeof data);
    CHECK_OK(fsdp_shm_send(transport, other, data, sizeof data, "way", NULL));
    CHECK_OK(fsdp_shm_wait_messages(transport, NULL));
    CHECK_I64(g_buffer[0], i);
    CHECK_I64(g_buffer[4999], i);
  }
  CHECK_I64(is_closed(transport, other), self->rank == 1);
  CHECK(!fsdp_shm_has_writers(transport));
  CHECK_OK(shm_barrier(transport, "end", NULL));
  transport->ops->destroy(transport);
}

TEST(test_only_who_may_not_write_changes_its_way) {
  shm_run(2, look_which_way, NULL);
}

/* ---- Failures ------------------------------------------------------------ */

static void send_another_size(const shm_rank *self) {
  const fsdp_shm_options options =
      message_options("sizes", *(const bool *)self->context);
  fsdp_transport *transport = shm_create(self, &options);
  fsdp_error error = {0};
  fsdp_status status;
  if (self->rank == 0) {
    status = fsdp_shm_send(transport, 1, g_buffer, 9000, "step", &error);
  } else {
    status = fsdp_shm_recv(transport, 0, g_buffer, 9001, "step", &error);
  }
  if (status == FSDP_OK) status = fsdp_shm_wait_messages(transport, &error);
  CHECK_I64(status, FSDP_BACKEND);
  SHM_CHECK_SAYS(&error, "rank 1 waits for a message of 9001 bytes (step)",
                 "rank 0 sent 9000 bytes");
  transport->ops->destroy(transport);
}

TEST(test_messages_of_another_size_are_told) {
  for (int i = 0; i < 2; i++) {
    bool is_direct = i == 1;
    shm_run(2, send_another_size, &is_direct);
  }
}

static void wait_for_a_dead_sender(const shm_rank *self) {
  const fsdp_shm_options options =
      message_options("sender", *(const bool *)self->context);
  fsdp_transport *transport = shm_create(self, &options);
  fsdp_error error = {0};
  CHECK_OK(shm_barrier(transport, "begin", &error));
  if (self->rank == VICTIM) (void)kill(getpid(), SIGKILL);
  fsdp_status status =
      self->rank == 0
          ? fsdp_shm_recv(transport, VICTIM, g_buffer, 30000, "state", &error)
          : fsdp_shm_send(transport, VICTIM, g_buffer, 30000, "state", &error);
  if (status == FSDP_OK) status = fsdp_shm_wait_messages(transport, &error);
  CHECK_I64(status, FSDP_BACKEND);
  SHM_CHECK_SAYS(&error, "1 message(s) (state)", "rank 1", "dead");
  CHECK(!fsdp_shm_has_writers(transport));
  transport->ops->destroy(transport);
}

TEST(test_a_killed_partner_of_messages_is_named) {
  for (int i = 0; i < 2; i++) {
    bool is_direct = i == 1;
    shm_run_without(3, VICTIM, wait_for_a_dead_sender, &is_direct);
  }
}

/* What was offered before a failure is not written after it. */
static void withdraw_an_offer(const shm_rank *self) {
  const fsdp_shm_options options = message_options("withdrawn", true);
  fsdp_transport *transport = shm_create(self, &options);
  _Atomic int32_t *turn = self->context;
  fsdp_error error = {0};
  if (self->rank == 1) {
    memset(g_buffer, 7, sizeof g_buffer);
    CHECK_OK(fsdp_shm_recv(transport, 0, g_buffer, 50000, "late", &error));
    transport->ops->give_up(transport, "a test");
    CHECK(!fsdp_shm_has_writers(transport));
    atomic_store(turn, 1);
    CHECK(shm_await(turn, 2));
    int64_t num_wrong = 0;
    for (size_t i = 0; i < sizeof g_buffer; i++) num_wrong += g_buffer[i] != 7;
    CHECK_I64(num_wrong, 0);
  } else {
    CHECK(shm_await(turn, 1));
    fsdp_status status =
        fsdp_shm_send(transport, 1, g_buffer, 50000, "late", &error);
    if (status == FSDP_OK) status = fsdp_shm_wait_messages(transport, &error);
    CHECK_I64(status, FSDP_BACKEND);
    SHM_CHECK_SAYS(&error, "rank 1 gave up: a test");
    atomic_store(turn, 2);
  }
  transport->ops->destroy(transport);
}

TEST(test_an_offer_ends_with_a_failure) {
  shm_run(2, withdraw_an_offer, shm_shared(sizeof(int32_t)));
}

/* A sender that was stopped while it wrote may go on at any time. */
static void leave_a_writer(const shm_rank *self) {
  const fsdp_shm_options options = message_options("writer", true);
  fsdp_transport *transport = shm_create(self, &options);
  const fsdp_shm *shm = (const fsdp_shm *)transport;
  if (self->rank == 1) {
    CHECK_OK(fsdp_shm_recv(transport, 0, g_buffer, 50000, "late", NULL));
    fsdp_shm_offer *offers =
        (fsdp_shm_offer *)(void *)(fsdp_shm_priv_base(shm, 1) +
                                   shm->geometry.offers);
    CHECK_I64(atomic_load(&offers[1].sequence), 1);
    atomic_store(&offers[1].lock, 1); /* as rank 0 would */
    transport->ops->give_up(transport, "a test");
    CHECK(fsdp_shm_has_writers(transport));
  }
  _Atomic int32_t *num_done = self->context;
  atomic_fetch_add(num_done, 1);
  CHECK(shm_await(num_done, 2));
  transport->ops->destroy(transport);
}

TEST(test_a_writer_that_does_not_end_is_told) {
  shm_run(2, leave_a_writer, shm_shared(sizeof(int32_t)));
}
