/* Communicators of the fake libnccl: meeting, creation and the end. */
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "fake_nccl.h"

enum { POLL_US = 300, FUTEX_MS = 20 };

static pthread_mutex_t config_mutex = PTHREAD_MUTEX_INITIALIZER;
static char last_config[256];
static atomic_llong num_comms;
static atomic_llong num_live; /* neither destroyed nor aborted */

void comm_release(comm *self) {
  pthread_mutex_lock(&self->mutex);
  const bool is_last = --self->num_references == 0;
  pthread_mutex_unlock(&self->mutex);
  if (!is_last) return;
  segment_close(self->segment);
  pthread_mutex_destroy(&self->mutex);
  pthread_cond_destroy(&self->changed);
  free(self);
}

void comm_fail(comm *self, ncclResult_t result, const char *message) {
  pthread_mutex_lock(&self->mutex);
  if (self->result == ncclSuccess || self->result == ncclInProgress) {
    self->result = result;
    snprintf(self->message, sizeof self->message, "%s", message);
    if (!atomic_load(&self->is_aborted)) {
      fprintf(stderr, "fake NCCL: rank %d of %d: %s\n", self->rank,
              self->num_ranks, message);
    }
  }
  pthread_cond_broadcast(&self->changed);
  pthread_mutex_unlock(&self->mutex);
}

void comm_enter(comm *self, const char *call) {
  pthread_mutex_lock(&self->mutex);
  const bool is_alone = self->num_inside++ == 0;
  self->num_references++; /* an abort may come before the call's end */
  pthread_mutex_unlock(&self->mutex);
  if (is_alone || !self->is_ours) return;
  fprintf(stderr, "fake NCCL: %s on a communicator under another call\n", call);
  abort();
}

void comm_leave(comm *self) {
  pthread_mutex_lock(&self->mutex);
  self->num_inside--;
  pthread_mutex_unlock(&self->mutex);
  comm_release(self);
}

/* ---- Meeting ------------------------------------------------------------- */

static void pause_us(long us) {
  const struct timespec pause = {.tv_nsec = us * 1000};
  nanosleep(&pause, NULL);
}

bool comm_meet(comm *self, meeting *where) {
  const struct timespec limit = {.tv_nsec = FUTEX_MS * 1000000L};
  const unsigned phase = atomic_load(&where->phase);
  const unsigned arrived = atomic_fetch_add(&where->num_arrived, 1) + 1;
  if (arrived == (unsigned)self->num_ranks) {
    atomic_store(&where->num_arrived, 0);
    atomic_store(&where->phase, phase + 1);
    syscall(SYS_futex, &where->phase, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    return true;
  }
  while (atomic_load(&where->phase) == phase) {
    if (atomic_load(&self->is_aborted)) return false;
    syscall(SYS_futex, &where->phase, FUTEX_WAIT, phase, &limit, NULL, 0);
  }
  return true;
}

/* Two ranks of a host on one device are refused, as the real one does. */
static bool check_devices(comm *self, char *message, size_t capacity) {
  for (int i = 0; i < self->num_ranks; i++) {
    for (int j = 0; j < i; j++) {
      const slot *one = segment_slot(self->segment, i);
      const slot *other = segment_slot(self->segment, j);
      if (one->device != other->device ||
          strncmp(one->host, other->host, sizeof one->host) != 0) {
        continue;
      }
      snprintf(message, capacity,
               "Duplicate GPU detected : rank %d and rank %d both on CUDA "
               "device %x000",
               j, i, one->device + 1);
      return false;
    }
  }
  return true;
}

static void join(comm *self) {
  char message[256];
  segment *opened = segment_open(self->name, self->rank, self->num_ranks);
  if (opened == NULL) {
    snprintf(message, sizeof message, "no shared segment: %s", strerror(errno));
    comm_fail(self, ncclSystemError, message);
    return;
  }
  pthread_mutex_lock(&self->mutex);
  self->segment = opened;
  pthread_mutex_unlock(&self->mutex);
  slot *mine = segment_slot(opened, self->rank);
  const char *host = getenv("NCCL_HOSTID");
  snprintf(mine->host, sizeof mine->host, "%s", host == NULL ? "here" : host);
  mine->device = self->device;
  atomic_store(&mine->is_joined, 1);
  for (int i = 0; i < self->num_ranks; i++) {
    while (atomic_load(&segment_slot(opened, i)->is_joined) == 0) {
      if (atomic_load(&self->is_aborted)) return;
      pause_us(POLL_US);
    }
  }
  if (!comm_meet(self, segment_host_meeting(opened))) return;
  if (self->rank == 0) shm_unlink(self->name);
  if (!check_devices(self, message, sizeof message)) {
    comm_fail(self, ncclInvalidUsage, message);
    return;
  }
  pthread_mutex_lock(&self->mutex);
  if (self->result == ncclInProgress) self->result = ncclSuccess;
  pthread_cond_broadcast(&self->changed);
  pthread_mutex_unlock(&self->mutex);
}

static void *join_in_thread(void *argument) {
  join(argument);
  comm_release(argument);
  return NULL;
}

/* ---- Creation ------------------------------------------------------------ */

static void keep_config(const ncclConfig_t *config) {
  const char *net = config->netName == NULL ? "none" : config->netName;
  pthread_mutex_lock(&config_mutex);
  snprintf(last_config, sizeof last_config,
           "blocking=%d cga_cluster_size=%d min_ctas=%d max_ctas=%d "
           "net_name=%s split_share=%d",
           config->blocking, config->cgaClusterSize, config->minCTAs,
           config->maxCTAs, net, config->splitShare);
  pthread_mutex_unlock(&config_mutex);
}

static bool is_of_fsdp_c(const void *caller) {
  Dl_info info = {0};
  return dladdr(caller, &info) != 0 && info.dli_fname != NULL &&
         strstr(info.dli_fname, "_native") != NULL;
}

static ncclResult_t create(comm **out, int num_ranks, const char *name,
                           int rank, bool is_blocking, bool is_ours) {
  pthread_t thread;
  if (rank < 0 || rank >= num_ranks) return ncclInvalidArgument;
  comm *made = calloc(1, sizeof *made);
  if (made == NULL) return ncclSystemError;
  atomic_fetch_add(&num_comms, 1);
  atomic_fetch_add(&num_live, 1);
  made->rank = rank;
  made->num_ranks = num_ranks;
  made->device = fakecuda_current_device();
  const bool is_alone = fakecuda_is_alone();
  made->num_references = is_alone ? 1 : 2;
  made->result = is_alone ? ncclSuccess : ncclInProgress;
  made->is_ours = is_ours;
  snprintf(made->name, sizeof made->name, "%s", name);
  pthread_mutex_init(&made->mutex, NULL);
  pthread_cond_init(&made->changed, NULL);
  *out = made;
  if (is_alone) return ncclSuccess;
  if (pthread_create(&thread, NULL, join_in_thread, made) != 0) abort();
  pthread_detach(thread);
  if (!is_blocking) return ncclInProgress;
  pthread_mutex_lock(&made->mutex);
  while (made->result == ncclInProgress) {
    pthread_cond_wait(&made->changed, &made->mutex);
  }
  const ncclResult_t result = made->result;
  pthread_mutex_unlock(&made->mutex);
  return result;
}

ncclResult_t ncclGetVersion(int *version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
  memset(id, 0, sizeof *id);
  segment_new_name(id->internal);
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *out, int num_ranks,
                                    ncclUniqueId id, int rank,
                                    ncclConfig_t *config) {
  if (config != NULL) keep_config(config);
  const bool is_blocking = config == NULL || config->blocking != 0;
  return create(out, num_ranks, id.internal, rank, is_blocking,
                is_of_fsdp_c(__builtin_return_address(0)));
}

ncclResult_t ncclCommInitRank(ncclComm_t *out, int num_ranks, ncclUniqueId id,
                              int rank) {
  return create(out, num_ranks, id.internal, rank, true, false);
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t *out, int num_ranks, int rank,
                                      int num_ids, ncclUniqueId *ids,
                                      ncclConfig_t *config) {
  (void)num_ids;
  return ncclCommInitRankConfig(out, num_ranks, ids[0], rank, config);
}

/* All ranks say which part they go to; the first of each names its segment. */
ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key,
                           ncclComm_t *out, ncclConfig_t *config) {
  int num_ranks = 0;
  int rank = 0;
  char name[NAME_NBYTES] = "";
  if (parent->segment == NULL) {
    comm_fail(parent, ncclInvalidUsage,
              "a split without the other ranks: their colors are not known");
    return ncclInvalidUsage;
  }
  meeting *where = segment_host_meeting(parent->segment);
  slot *mine = segment_slot(parent->segment, parent->rank);
  mine->color = color;
  mine->key = key;
  segment_new_name(mine->id);
  if (!comm_meet(parent, where)) return ncclInternalError;
  for (int i = 0; i < parent->num_ranks; i++) {
    const slot *each = segment_slot(parent->segment, i);
    if (each->color != color) continue;
    if (num_ranks++ == 0) memcpy(name, each->id, sizeof name);
    rank += each->key < key || (each->key == key && i < parent->rank);
  }
  if (!comm_meet(parent, where)) return ncclInternalError;
  *out = NULL;
  if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
  if (config != NULL) keep_config(config);
  return create(out, num_ranks, name, rank, true, parent->is_ours);
}

/* ---- Questions ----------------------------------------------------------- */

ncclResult_t ncclCommGetAsyncError(ncclComm_t self, ncclResult_t *result) {
  comm_enter(self, "ncclCommGetAsyncError");
  pthread_mutex_lock(&self->mutex);
  *result = self->result;
  pthread_mutex_unlock(&self->mutex);
  sched_yield(); /* for whoever should not come */
  comm_leave(self);
  return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t self, int *num_ranks) {
  *num_ranks = self->num_ranks;
  return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t self, int *rank) {
  *rank = self->rank;
  return ncclSuccess;
}

ncclResult_t ncclCommCuDevice(const ncclComm_t self, int *device) {
  *device = self->device;
  return ncclSuccess;
}

/* ---- The end ------------------------------------------------------------- */

/* As the real one, it waits for the graphs that captured a collective. */
ncclResult_t ncclCommFinalize(ncclComm_t self) {
  comm_enter(self, "ncclCommFinalize");
  pthread_mutex_lock(&self->mutex);
  while (self->num_captured > 0) {
    pthread_cond_wait(&self->changed, &self->mutex);
  }
  const bool waits = self->result == ncclSuccess && self->has_launched &&
                     self->last_graph == 0;
  void *stream = self->last_stream;
  const uint64_t ticket = self->last_ticket;
  const ncclResult_t result = self->result;
  pthread_mutex_unlock(&self->mutex);
  if (waits) fakecuda_finish_ticket(stream, ticket);
  comm_leave(self);
  return result;
}

ncclResult_t ncclCommDestroy(ncclComm_t self) {
  if (self == NULL) return ncclSuccess;
  atomic_fetch_add(&num_live, -1);
  comm_release(self);
  return ncclSuccess;
}

/* What runs or waits on a stream ends; nobody waits for it. */
static void stop(comm *self) {
  atomic_store(&self->is_aborted, true);
  comm_fail(self, ncclInvalidUsage, "aborted");
}

ncclResult_t ncclCommAbort(ncclComm_t self) {
  if (self == NULL) return ncclSuccess;
  atomic_fetch_add(&num_live, -1);
  stop(self);
  comm_release(self);
  return ncclSuccess;
}

ncclResult_t ncclCommRevoke(ncclComm_t self, int flags) {
  (void)flags;
  stop(self);
  return ncclSuccess;
}

/* The last that the process does: what did it leave? */
__attribute__((destructor)) static void tell_live(void) {
  if (getenv("FAKE_NCCL_TELLS") == NULL) return;
  dprintf(STDOUT_FILENO, "%lld of %lld communicators left\n",
          atomic_load(&num_live), atomic_load(&num_comms));
}

const char *ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError:
      return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInternalError:
      return "internal error - please report this issue to the NCCL developers";
    case ncclInvalidArgument:
      return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case ncclInvalidUsage:
      return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInProgress:
      return "NCCL operation in progress";
    default:
      return "unknown result code";
  }
}

const char *ncclGetLastError(ncclComm_t self) {
  return self == NULL ? "" : self->message;
}

long long fake_nccl_num_comms(void) {
  return atomic_load(&num_comms);
}

const char *fake_nccl_last_config(void) {
  return last_config;
}
