/* The communicators of the fake libnccl: meeting, creation and the end. */
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "fake_nccl.h"

static pthread_mutex_t counters_mutex = PTHREAD_MUTEX_INITIALIZER;
static long long num_ids;
static long long num_comms;
static long long num_live; /* neither destroyed nor aborted */

void fake_count(long long *counter, long long change) {
  pthread_mutex_lock(&counters_mutex);
  *counter += change;
  pthread_mutex_unlock(&counters_mutex);
}

long long fake_read_counter(const long long *counter) {
  pthread_mutex_lock(&counters_mutex);
  const long long value = *counter;
  pthread_mutex_unlock(&counters_mutex);
  return value;
}

void fake_release(struct comm *comm) {
  pthread_mutex_lock(&comm->mutex);
  const bool is_last = --comm->num_references == 0;
  pthread_mutex_unlock(&comm->mutex);
  if (!is_last) return;
  if (comm->transport != NULL) {
    comm->transport->ops->destroy(comm->transport);
  }
  pthread_mutex_destroy(&comm->mutex);
  pthread_cond_destroy(&comm->changed);
  free(comm);
}

/* The first failure of a communicator is what it reports from then on. */
void fake_fail(struct comm *comm, int result, const char *message) {
  pthread_mutex_lock(&comm->mutex);
  if (comm->result == SUCCESS || comm->result == IN_PROGRESS) {
    comm->result = result;
    snprintf(comm->message, sizeof comm->message, "%.255s", message);
  }
  pthread_cond_broadcast(&comm->changed);
  pthread_mutex_unlock(&comm->mutex);
}

/* The real one corrupts its memory when two threads use a communicator, also
 * in ncclCommGetAsyncError. Only an abort may come under another call. */
void fake_enter(struct comm *comm, const char *call) {
  pthread_mutex_lock(&comm->mutex);
  const bool is_alone = comm->num_inside++ == 0;
  comm->num_references++; /* an abort may come before the call's end */
  pthread_mutex_unlock(&comm->mutex);
  if (is_alone) return;
  fprintf(stderr, "fake NCCL: %s on a communicator under another call\n", call);
  abort();
}

void fake_leave(struct comm *comm) {
  pthread_mutex_lock(&comm->mutex);
  comm->num_inside--;
  pthread_mutex_unlock(&comm->mutex);
  fake_release(comm);
}

bool fake_is_aborted(struct comm *comm) {
  pthread_mutex_lock(&comm->mutex);
  const bool value = comm->is_aborted;
  pthread_mutex_unlock(&comm->mutex);
  return value;
}

/* ---- The store: files in the folder of the unique id
 * ---------------------------- */

static void path_of(const struct comm *comm, const char *key, char *path,
                    size_t capacity) {
  const int length = snprintf(path, capacity, "%s/", comm->folder);
  const size_t begin = length < 0 ? 0 : (size_t)length;
  for (size_t i = 0; key[i] != '\0' && begin + i + 1 < capacity; i++) {
    path[begin + i] = key[i] == '/' ? '_' : key[i];
    path[begin + i + 1] = '\0';
  }
}

static fsdp_status store_set(void *context, const char *key, const void *value,
                             int64_t nbytes, fsdp_error *error) {
  struct comm *comm = context;
  char path[512];
  char partial[600];
  path_of(comm, key, path, sizeof path);
  snprintf(partial, sizeof partial, "%s.%d", path, comm->rank);
  FILE *file = fopen(partial, "wb");
  if (file == NULL) {
    return FSDP_FAIL(error, FSDP_BACKEND, "%s: %s", partial, strerror(errno));
  }
  const size_t written = fwrite(value, 1, (size_t)nbytes, file);
  if (fclose(file) != 0 || written != (size_t)nbytes ||
      rename(partial, path) != 0) {
    return FSDP_FAIL(error, FSDP_BACKEND, "cannot write %s", path);
  }
  return FSDP_OK;
}

static fsdp_status store_get(void *context, const char *key, int64_t timeout_ms,
                             void *value, int64_t capacity, int64_t *nbytes,
                             fsdp_error *error) {
  struct comm *comm = context;
  const struct timespec pause = {.tv_nsec = POLL_US * 1000};
  char path[512];
  path_of(comm, key, path, sizeof path);
  FILE *file = NULL;
  for (int64_t us = 0; (file = fopen(path, "rb")) == NULL; us += POLL_US) {
    if (us > timeout_ms * 1000 || fake_is_aborted(comm)) {
      return FSDP_FAIL(error, FSDP_BACKEND, "no key %s after %lld ms", key,
                       (long long)timeout_ms);
    }
    nanosleep(&pause, NULL);
  }
  char buffer[4096];
  const size_t length = fread(buffer, 1, sizeof buffer, file);
  fclose(file);
  const size_t copied = length < (size_t)capacity ? length : (size_t)capacity;
  memcpy(value, buffer, copied);
  *nbytes = (int64_t)length;
  return FSDP_OK;
}

/* ---- Creation and the end
 * ---------------------------------------------------------- */

int ncclGetVersion(int *version) {
  *version = VERSION;
  return SUCCESS;
}

int ncclGetUniqueId(ncclUniqueId *id) {
  const char *parent = getenv("TMPDIR");
  fake_count(&num_ids, 1);
  memset(id, 0, sizeof *id);
  snprintf(id->internal, sizeof id->internal, "%s/fake_nccl_%d_%lld_XXXXXX",
           parent == NULL ? "/tmp" : parent, (int)getpid(),
           fake_read_counter(&num_ids));
  return mkdtemp(id->internal) == NULL ? INTERNAL_ERROR : SUCCESS;
}

/* Once all ranks have met nobody needs the folder: rank 0 removes it. */
static void remove_folder(const struct comm *comm) {
  char command[PATH_NBYTES + 16];
  if (comm->rank != 0 || strncmp(comm->folder, "/", 1) != 0) return;
  snprintf(command, sizeof command, "rm -rf '%s'", comm->folder);
  if (system(command) != 0) return; /* left for the system to clean */
}

/* Every call waits for all ranks, one without elements too. */
static bool is_met(fsdp_transport *transport) {
  const fsdp_call call = {.channel = FSDP_CHANNEL_GATHER, .label = "meeting"};
  const fsdp_dtype bytes = {.itemsize = 1};
  uint64_t ticket;
  return transport->ops->all_gather(transport, &call, NULL, NULL, 0, bytes,
                                    &ticket, NULL) == FSDP_OK &&
         transport->ops->wait(transport, call.channel, ticket, NULL) == FSDP_OK;
}

static void *meet(void *argument) {
  struct comm *comm = argument;
  const fsdp_store store = {
      .context = comm, .set = store_set, .get = store_get};
  const fsdp_shm_options options = {.nbytes = sizeof options,
                                    .key_prefix = "shm"};
  fsdp_transport *transport = NULL;
  fsdp_shm_verdict verdict = {0};
  fsdp_error error = {0};
  const fsdp_status status =
      fsdp_shm_create(&store, &options, comm->rank, comm->num_ranks, &transport,
                      &verdict, &error);
  if (status == FSDP_OK && verdict.is_possible) {
    if (is_met(transport)) remove_folder(comm);
    pthread_mutex_lock(&comm->mutex);
    comm->transport = transport;
    if (comm->result == IN_PROGRESS) comm->result = SUCCESS;
    pthread_cond_broadcast(&comm->changed);
    pthread_mutex_unlock(&comm->mutex);
  } else {
    fake_fail(comm, INTERNAL_ERROR,
              status == FSDP_OK ? verdict.reason : error.message);
  }
  fake_release(comm);
  return NULL;
}

static char last_config[256];

static void keep_config(const ncclConfig_t *config) {
  pthread_mutex_lock(&counters_mutex);
  snprintf(last_config, sizeof last_config,
           "blocking=%d cga_cluster_size=%d min_ctas=%d max_ctas=%d "
           "net_name=%s split_share=%d",
           config->blocking, config->cga_cluster_size, config->min_ctas,
           config->max_ctas,
           config->net_name == NULL ? "none" : config->net_name,
           config->split_share);
  pthread_mutex_unlock(&counters_mutex);
}

int ncclCommInitRankConfig(ncclComm_t *comm, int num_ranks, ncclUniqueId id,
                           int rank, ncclConfig_t *config) {
  if (rank < 0 || rank >= num_ranks) return INVALID_ARGUMENT;
  if (config != NULL) keep_config(config);
  fake_count(&num_comms, 1);
  fake_count(&num_live, 1);
  struct comm *made = calloc(1, sizeof *made);
  pthread_t thread;
  if (made == NULL) return INTERNAL_ERROR;
  made->rank = rank;
  made->num_ranks = num_ranks;
  made->num_references = 2;
  made->result = IN_PROGRESS;
  memcpy(made->folder, id.internal, sizeof made->folder - 1);
  pthread_mutex_init(&made->mutex, NULL);
  pthread_cond_init(&made->changed, NULL);
  if (pthread_create(&thread, NULL, meet, made) != 0) {
    free(made);
    return INTERNAL_ERROR;
  }
  pthread_detach(thread);
  *comm = made;
  if (config != NULL && config->blocking == 0) return IN_PROGRESS;
  pthread_mutex_lock(&made->mutex);
  while (made->result == IN_PROGRESS) {
    pthread_cond_wait(&made->changed, &made->mutex);
  }
  const int result = made->result;
  pthread_mutex_unlock(&made->mutex);
  return result;
}

int ncclCommGetAsyncError(ncclComm_t comm, int *async_error) {
  fake_enter(comm, "ncclCommGetAsyncError");
  pthread_mutex_lock(&comm->mutex);
  *async_error = comm->result;
  pthread_mutex_unlock(&comm->mutex);
  sched_yield(); /* for whoever should not come */
  fake_leave(comm);
  return SUCCESS;
}

int ncclCommFinalize(ncclComm_t comm) {
  fake_enter(comm, "ncclCommFinalize");
  pthread_mutex_lock(&comm->mutex);
  sim_stream *stream = comm->last_stream;
  const uint64_t ticket = comm->last_ticket;
  const int result = comm->result;
  pthread_mutex_unlock(&comm->mutex);
  if (result == SUCCESS && stream != NULL) {
    sim_stream_synchronize(stream, ticket);
  }
  fake_leave(comm);
  return result;
}

/* The last that the process does: what did it leave? */
__attribute__((destructor)) static void tell_live(void) {
  if (getenv("FAKE_NCCL_TELLS") == NULL) return;
  dprintf(STDOUT_FILENO, "%lld of %lld communicators left\n",
          fake_read_counter(&num_live), fake_read_counter(&num_comms));
}

int ncclCommDestroy(ncclComm_t comm) {
  fake_count(&num_live, -1);
  fake_release(comm);
  return SUCCESS;
}

/* What runs or waits on a stream ends with an error; nobody waits for it. */
int ncclCommAbort(ncclComm_t comm) {
  fake_count(&num_live, -1);
  fake_fail(comm, INVALID_USAGE, "aborted");
  pthread_mutex_lock(&comm->mutex);
  comm->is_aborted = true;
  if (comm->transport != NULL) {
    comm->transport->ops->give_up(comm->transport, "it was aborted");
  }
  pthread_mutex_unlock(&comm->mutex);
  fake_release(comm);
  return SUCCESS;
}

const char *ncclGetErrorString(int result) {
  switch (result) {
    case SUCCESS:
      return "no error";
    case INTERNAL_ERROR:
      return "internal error";
    case INVALID_ARGUMENT:
      return "invalid argument";
    case INVALID_USAGE:
      return "invalid usage";
    case REMOTE_ERROR:
      return "remote process exited or there was a network error";
    case IN_PROGRESS:
      return "NCCL operation in progress";
    default:
      return "unknown result code";
  }
}

const char *ncclGetLastError(ncclComm_t comm) {
  return comm == NULL ? "" : comm->message;
}

long long fake_nccl_num_comms(void) {
  return fake_read_counter(&num_comms);
}

const char *fake_nccl_last_config(void) {
  return last_config;
}
