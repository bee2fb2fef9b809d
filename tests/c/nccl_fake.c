/*
 * The fake NCCL: tape, injection, communicators.
 */
#define _POSIX_C_SOURCE 200809L /* clock_gettime */
#include "nccl_fake.h"

#include <inttypes.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "nccl_fake_priv.h"

enum { TAPE_NBYTES = 65536, MAX_COMMS = 4096, ABORT_LIMIT_S = 10 };

struct fsdp_nccl_comm {
  bool is_live;
  bool is_revoked;
  bool is_ending;     /* abort was called */
  int64_t num_inside; /* threads that are in a call */
  /* As in NCCL 2.26 and newer: a launch leaves it behind, the next call on the
   * communicator frees it. Without a lock, so that the sanitizers see who comes
   * at the same time. */
  char *group_job;
};

pthread_mutex_t nccl_fake_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t g_changed = PTHREAD_COND_INITIALIZER;
static pthread_once_t g_once = PTHREAD_ONCE_INIT;
static void prepare_for_forks(void);
static char g_tape[TAPE_NBYTES];
static char g_copy[TAPE_NBYTES];
static size_t g_tape_nbytes;
static const char *g_base;
static struct fsdp_nccl_comm g_comms[MAX_COMMS];
static int64_t g_num_comms;
static int64_t g_num_ids;
static int64_t g_fail_at;
static int g_fail_result;
static bool g_fail_polls;
int64_t nccl_fake_settings[NCCL_FAKE_NUM_SETTINGS];
int64_t nccl_fake_counts[NCCL_FAKE_NUM_COUNTS];
static int64_t g_num_aborts_begun;
static fsdp_nccl_config g_config;
static char g_net_name[64];
static int g_num_launching; /* threads that are in a group or a collective */
static _Thread_local int t_group_depth;

static void write_line(const char *format, ...) FSDP_PRINTF(1, 2);
static void write_line(const char *format, ...) {
  const size_t left = TAPE_NBYTES - g_tape_nbytes;
  va_list arguments;
  va_start(arguments, format);
  const int length = vsnprintf(g_tape + g_tape_nbytes, left, format, arguments);
  va_end(arguments);
  if (length > 0 && (size_t)length < left) g_tape_nbytes += (size_t)length;
}

static void lock(void) {
  (void)pthread_mutex_lock(&nccl_fake_lock);
}
static void unlock(void) {
  (void)pthread_mutex_unlock(&nccl_fake_lock);
}

void nccl_fake_reset(void) {
  (void)pthread_once(&g_once, prepare_for_forks);
  lock();
  g_tape_nbytes = 0;
  g_tape[0] = 0;
  g_base = NULL;
  for (int64_t i = 0; i < g_num_comms; i++) free(g_comms[i].group_job);
  memset(g_comms, 0, sizeof g_comms);
  g_num_comms = 0;
  g_num_ids = 0;
  g_fail_at = -1;
  g_num_aborts_begun = 0;
  g_num_launching = 0;
  memset(nccl_fake_settings, 0, sizeof nccl_fake_settings);
  memset(nccl_fake_counts, 0, sizeof nccl_fake_counts);
  unlock();
  nccl_fake_priv_reset_store();
  nccl_fake_priv_reset_events();
}

const char *nccl_fake_tape(void) {
  lock();
  memcpy(g_copy, g_tape, g_tape_nbytes + 1);
  unlock();
  return g_copy;
}

void nccl_fake_clear_tape(void) {
  lock();
  g_tape_nbytes = 0;
  g_tape[0] = 0;
  unlock();
}

void nccl_fake_set_base(const void *base) {
  lock();
  g_base = base;
  unlock();
}

void *nccl_fake_stream(intptr_t number) {
  return (void *)(number * 16);
}

void nccl_fake_fail_at(int64_t index, int result, bool with_polls) {
  lock();
  g_fail_at = index;
  g_fail_result = result;
  g_fail_polls = with_polls;
  unlock();
}

bool nccl_fake_has_failed(void) {
  lock();
  const bool has_failed = g_fail_at == -1;
  unlock();
  return has_failed;
}

void nccl_fake_set(nccl_fake_setting setting, int64_t value) {
  lock();
  nccl_fake_settings[setting] = value;
  (void)pthread_cond_broadcast(&g_changed);
  unlock();
}

int64_t nccl_fake_num(nccl_fake_count count) {
  lock();
  const int64_t value = nccl_fake_counts[count];
  unlock();
  return value;
}

fsdp_nccl_config nccl_fake_config(void) {
  lock();
  const fsdp_nccl_config config = g_config;
  unlock();
  return config;
}

int64_t nccl_fake_num_live(void) {
  int64_t num = 0;
  lock();
  for (int64_t i = 0; i < g_num_comms; i++) num += g_comms[i].is_live ? 1 : 0;
  unlock();
  return num;
}

/* ---- Entry points; each takes the lock itself -----------------------------*/

/* Whether the call that begins is the one that fails. */
static bool is_chosen(void) {
  if (g_fail_at < 0) return false;
  return g_fail_at-- == 0;
}

static int64_t number(const fsdp_nccl_comm *comm) {
  return comm == NULL ? -1 : (int64_t)(comm - g_comms);
}

/* Notes on the tape what no caller may do. */
static void check_comm(const fsdp_nccl_comm *comm, const char *call) {
  if (comm == NULL || !comm->is_live) {
    write_line("WRONG %s on dead communicator %" PRId64 "\n", call,
               number(comm));
  }
}

/* The beginning of a call that no other may overlap; takes the lock. */
static void enter(fsdp_nccl_comm *comm, const char *call) {
  lock();
  check_comm(comm, call);
  if (comm == NULL) return;
  if (comm->num_inside++ > 0) {
    write_line("WRONG %s on communicator %" PRId64 " under another call\n",
               call, number(comm));
  }
  unlock();
  (void)sched_yield(); /* for whoever should not come */
  lock();
}

/* Gives the lock back. */
static void leave(fsdp_nccl_comm *comm) {
  if (comm != NULL) comm->num_inside--;
  unlock();
}

static void free_group_job(fsdp_nccl_comm *comm) {
  free(comm->group_job);
  comm->group_job = NULL;
}

/* A fork can come while another thread is in a call. The child takes over no
 * job, which that thread may have freed already. */
static void forget_group_jobs(void) {
  const pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;
  nccl_fake_lock = fresh;
  for (int i = 0; i < MAX_COMMS; i++) g_comms[i].group_job = NULL;
  g_num_launching = 0;
}

static void prepare_for_forks(void) {
  (void)pthread_atfork(NULL, NULL, forget_group_jobs);
}

static int fake_get_version(int *version) {
  *version = 22703;
  return FSDP_NCCL_SUCCESS;
}

static int fake_get_unique_id(fsdp_nccl_id *id) {
  int result = FSDP_NCCL_SUCCESS;
  lock();
  if (is_chosen()) {
    result = g_fail_result;
  } else {
    memset(id, 0, sizeof *id);
    (void)snprintf(id->internal, sizeof id->internal, "id%" PRId64,
                   g_num_ids++);
  }
  unlock();
  return result;
}

static int fake_init(fsdp_nccl_comm **comm, int num_ranks, fsdp_nccl_id id,
                     int rank, fsdp_nccl_config *config) {
  int result = FSDP_NCCL_SUCCESS;
  lock();
  if (is_chosen()) {
    result = g_fail_result;
  } else {
    fsdp_nccl_comm *made = &g_comms[g_num_comms++];
    made->is_live = true;
    made->num_inside = 1;
    *comm = made; /* as NCCL does, before it waits for the others */
    write_line("init %" PRId64 " %s rank %d/%d%s\n", number(made), id.internal,
               rank, num_ranks, config->blocking == 1 ? "" : " NON-BLOCKING");
    g_config = *config;
    (void)snprintf(g_net_name, sizeof g_net_name, "%s",
                   config->net_name == NULL ? "" : config->net_name);
    g_config.net_name = g_net_name;
    while (number(made) < nccl_fake_settings[NCCL_FAKE_INITS_WAIT])
      (void)pthread_cond_wait(&g_changed, &nccl_fake_lock);
    made->num_inside = 0;
    if (nccl_fake_settings[NCCL_FAKE_NON_BLOCKING] != 0)
      result = FSDP_NCCL_IN_PROGRESS;
  }
  unlock();
  return result;
}

static int fake_async_error(fsdp_nccl_comm *comm, int *async_error) {
  int result = FSDP_NCCL_SUCCESS;
  enter(comm, "get_async_error");
  nccl_fake_counts[NCCL_FAKE_POLLS]++;
  if (g_fail_polls && is_chosen()) {
    result = g_fail_result;
  } else if ((int)nccl_fake_settings[NCCL_FAKE_ASYNC_ERROR] !=
             FSDP_NCCL_SUCCESS) {
    *async_error = (int)nccl_fake_settings[NCCL_FAKE_ASYNC_ERROR];
  } else {
    *async_error = FSDP_NCCL_SUCCESS;
  }
  unlock();
  free_group_job(comm);
  lock();
  leave(comm);
  return result;
}

/* Common to finalize, destroy, abort and revoke. */
static int end_call(fsdp_nccl_comm *comm, const char *call) {
  write_line("%s %" PRId64 "\n", call, number(comm));
  return is_chosen() ? g_fail_result : FSDP_NCCL_SUCCESS;
}

static int fake_finalize(fsdp_nccl_comm *comm) {
  enter(comm, "finalize");
  const int result = end_call(comm, "finalize");
  while (nccl_fake_settings[NCCL_FAKE_GRAPHS_LIVE] > 0) {
    (void)pthread_cond_wait(&g_changed, &nccl_fake_lock);
  }
  if (!comm->is_live) write_line("WRONG finalize goes on in freed memory\n");
  leave(comm);
  return result;
}

static int fake_destroy(fsdp_nccl_comm *comm) {
  enter(comm, "destroy");
  const int result = end_call(comm, "destroy");
  comm->is_live = false;
  leave(comm);
  free_group_job(comm);
  return result;
}

/* May come under another call, which it ends; waits for the other
 * communicators, whose kernels are in the way, if it is asked to. */
static int fake_abort(fsdp_nccl_comm *comm) {
  lock();
  check_comm(comm, "abort");
  if (comm->is_ending) write_line("WRONG abort twice\n");
  comm->is_ending = true;
  g_num_aborts_begun++;
  (void)pthread_cond_broadcast(&g_changed);
  struct timespec end = {0};
  (void)clock_gettime(CLOCK_REALTIME, &end);
  end.tv_sec += ABORT_LIMIT_S;
  while (g_num_aborts_begun < nccl_fake_settings[NCCL_FAKE_ABORTS_AWAITED]) {
    if (pthread_cond_timedwait(&g_changed, &nccl_fake_lock, &end) != 0) {
      write_line("WRONG abort %" PRId64 " waits for another one\n",
                 number(comm));
      break;
    }
  }
  const int result = end_call(comm, "abort");
  comm->is_live = false;
  nccl_fake_counts[NCCL_FAKE_ABORTS]++;
  (void)pthread_cond_broadcast(&g_changed);
  /* Under the lock: the next test may reset while an orphan aborts. */
  if (comm->num_inside == 0) free_group_job(comm);
  unlock();
  return result;
}

static int fake_revoke(fsdp_nccl_comm *comm, int flags) {
  lock();
  check_comm(comm, "revoke");
  const int result = end_call(comm, flags == 0 ? "revoke" : "revoke FLAGS");
  comm->is_revoked = true;
  (void)pthread_cond_broadcast(&g_changed);
  unlock();
  return result;
}

static const char *fake_error_string(int result) {
  return result == FSDP_NCCL_REMOTE_ERROR ? "remote error" : "some error";
}

static const char *fake_last_error(fsdp_nccl_comm *comm) {
  return comm == NULL ? "the wire is cut" : "asked of a communicator";
}

/* Under the lock. With NCCL_LAUNCH_ORDER_IMPLICIT, NCCL refuses a launch beside
 * another thread's. */
static void begin_launch(void) {
  if (g_num_launching++ > 0) write_line("WRONG two threads launch at once\n");
}

static int fake_group_start(void) {
  int result = FSDP_NCCL_SUCCESS;
  lock();
  if (is_chosen()) {
    result = g_fail_result;
  } else {
    if (t_group_depth++ == 0) begin_launch();
    write_line("group_start\n");
  }
  unlock();
  return result;
}

static int fake_group_end(void) {
  int result = FSDP_NCCL_SUCCESS;
  lock();
  if (t_group_depth-- <= 0) write_line("WRONG group_end\n");
  if (t_group_depth == 0) g_num_launching--;
  write_line("group_end\n");
  if (is_chosen()) result = g_fail_result;
  unlock();
  return result;
}

static const char *dtype_name(int dtype) {
  static const char *const names[] = {"i8",  "u8",  "i32", "u32", "i64",
                                      "u64", "f16", "f32", "f64", "bf16"};
  return dtype >= 0 && dtype < 10 ? names[dtype] : "?";
}

/* One collective; `tail` names its operator or root, `tail_number`. */
static int collect(const char *name, const char *tail, int tail_number,
                   const void *send, const void *receive, size_t numel,
                   int dtype, fsdp_nccl_comm *comm, void *stream) {
  int result = FSDP_NCCL_SUCCESS;
  char text[32] = "";
  if (tail != NULL) {
    (void)snprintf(text, sizeof text, " %s%d", tail, tail_number);
  }
  enter(comm, name);
  if (t_group_depth == 0) begin_launch();
  if (comm->group_job == NULL) comm->group_job = malloc(1);
  if (is_chosen()) {
    result = g_fail_result;
    goto done;
  }
  if ((int)nccl_fake_settings[NCCL_FAKE_ASYNC_ERROR] != FSDP_NCCL_SUCCESS) {
    result =
        (int)nccl_fake_settings[NCCL_FAKE_ASYNC_ERROR]; /* as NCCL's own check
                                                           of a call */
    goto done;
  }
  write_line("%s %" PRId64 " %s %zu +%td +%td%s s%" PRIdPTR "\n", name,
             number(comm), dtype_name(dtype), numel,
             (const char *)send - g_base, (const char *)receive - g_base, text,
             (intptr_t)stream / 16);
  if (nccl_fake_settings[NCCL_FAKE_BLOCKING] != 0) {
    while (comm->is_live && !comm->is_revoked) {
      (void)pthread_cond_wait(&g_changed, &nccl_fake_lock);
    }
    if (comm->is_revoked) result = FSDP_NCCL_REMOTE_ERROR;
    goto done;
  }
done:
  if (t_group_depth == 0) g_num_launching--;
  leave(comm);
  return result;
}

static int fake_all_gather(const void *send, void *receive, size_t numel,
                           int dtype, fsdp_nccl_comm *comm, void *stream) {
  return collect("all_gather", NULL, 0, send, receive, numel, dtype, comm,
                 stream);
}

static int fake_broadcast(const void *send, void *receive, size_t numel,
                          int dtype, int root, fsdp_nccl_comm *comm,
                          void *stream) {
  return collect("broadcast", "root", root, send, receive, numel, dtype, comm,
                 stream);
}

static int fake_reduce_scatter(const void *send, void *receive, size_t numel,
                               int dtype, int op, fsdp_nccl_comm *comm,
                               void *stream) {
  return collect("reduce_scatter", "op", op, send, receive, numel, dtype, comm,
                 stream);
}

static int fake_all_reduce(const void *send, void *receive, size_t numel,
                           int dtype, int op, fsdp_nccl_comm *comm,
                           void *stream) {
  return collect("all_reduce", "op", op, send, receive, numel, dtype, comm,
                 stream);
}

fsdp_nccl_library nccl_fake_library(void) {
  const fsdp_nccl_library library = {
      .api =
          {
              .get_version = fake_get_version,
              .get_unique_id = fake_get_unique_id,
              .comm_init_rank_config = fake_init,
              .comm_get_async_error = fake_async_error,
              .comm_finalize = fake_finalize,
              .comm_destroy = fake_destroy,
              .comm_abort = fake_abort,
              .get_error_string = fake_error_string,
              .group_start = fake_group_start,
              .group_end = fake_group_end,
              .all_gather = fake_all_gather,
              .reduce_scatter = fake_reduce_scatter,
              .all_reduce = fake_all_reduce,
              .broadcast = fake_broadcast,
              .get_last_error = fake_last_error,
              .comm_revoke = fake_revoke,
          },
      .version = 22703,
      .origin = FSDP_NCCL_FORCED,
      .path = "fake",
  };
  return library;
}
