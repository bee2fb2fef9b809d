/* Ranks as processes or threads, and a store for them. */
#include "shm_fixture.h"

#include <dirent.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/alloc.h"
#include "check.h"

enum {
  MAX_RANKS = 8,
  NUM_ENTRIES = 512,
  KEY_NBYTES = 96,
  VALUE_NBYTES = 1024,
  HARD_LIMIT_S = 300
};

typedef struct store_entry {
  char key[KEY_NBYTES];
  int64_t nbytes;
  char value[VALUE_NBYTES];
} store_entry;

/* Entries are only added, one writer at a time. */
typedef struct store_memory {
  _Atomic int32_t lock;
  _Atomic int32_t num;
  store_entry entries[NUM_ENTRIES];
} store_memory;

/* Of the running test. */
static _Atomic int32_t *g_pids;

bool shm_await(const _Atomic int32_t *word, int32_t value) {
  for (int i = 0; i < HARD_LIMIT_S * 1000; i++) {
    if (atomic_load(word) >= value) return true;
    check_sleep_ms(1);
  }
  return false;
}

void *shm_shared(int64_t nbytes) {
  void *memory = mmap(NULL, (size_t)nbytes, PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) abort();
  return memory;
}

static fsdp_status store_set(void *context, const char *key, const void *value,
                             int64_t nbytes, fsdp_error *error) {
  store_memory *store = context;
  if (nbytes > VALUE_NBYTES || strlen(key) >= KEY_NBYTES ||
      atomic_load(&store->num) == NUM_ENTRIES) {
    return FSDP_FAIL(error, FSDP_INTERNAL, "the test's store is too small");
  }
  int32_t is_free = 0;
  while (!atomic_compare_exchange_weak(&store->lock, &is_free, 1)) is_free = 0;
  store_entry *entry = &store->entries[atomic_load(&store->num)];
  (void)snprintf(entry->key, sizeof entry->key, "%s", key);
  memcpy(entry->value, value, (size_t)nbytes);
  entry->nbytes = nbytes;
  atomic_fetch_add(&store->num, 1);
  atomic_store(&store->lock, 0);
  return FSDP_OK;
}

static fsdp_status store_get(void *context, const char *key, int64_t timeout_ms,
                             void *value, int64_t capacity, int64_t *nbytes,
                             fsdp_error *error) {
  store_memory *store = context;
  for (int64_t waited_ms = 0; waited_ms <= timeout_ms; waited_ms++) {
    const int32_t num = atomic_load(&store->num);
    for (int32_t i = 0; i < num; i++) {
      const store_entry *entry = &store->entries[i];
      if (strcmp(entry->key, key) != 0) continue;
      const int64_t part = entry->nbytes < capacity ? entry->nbytes : capacity;
      memcpy(value, entry->value, (size_t)part);
      *nbytes = entry->nbytes;
      return FSDP_OK;
    }
    check_sleep_ms(1);
  }
  return FSDP_FAIL(error, FSDP_BACKEND, "no key %s after %" PRId64 " ms", key,
                   timeout_ms);
}

fsdp_store shm_store(void) {
  return (fsdp_store){.context = shm_shared(sizeof(store_memory)),
                      .set = store_set,
                      .get = store_get};
}

int64_t shm_direct_call_nbytes = -1;

fsdp_shm_options shm_options(const char *key_prefix) {
  return (fsdp_shm_options){
      .nbytes = sizeof(fsdp_shm_options),
      .key_prefix = key_prefix,
      .ring_nbytes = 4096,
      .slot_nbytes = 1024,
      .message_nbytes = 4096,
      .direct_call_nbytes = shm_direct_call_nbytes,
      .timeout_ms = 20000,
      .meeting_timeout_ms = 60000,
  };
}

fsdp_transport *shm_create(const shm_rank *self,
                           const fsdp_shm_options *options) {
  fsdp_transport *transport = NULL;
  fsdp_shm_verdict verdict = {0};
  fsdp_error error = {0};
  const fsdp_status status =
      fsdp_shm_create(&self->store, options, self->rank, self->world_size,
                      &transport, &verdict, &error);
  if (!CHECK_OK(status) || !CHECK(verdict.is_possible)) {
    printf("rank %" PRId64 ": %s %s\n", self->rank, error.message,
           verdict.reason);
    exit(1);
  }
  return transport;
}

fsdp_transport *shm_join(const shm_rank *self, const char *key_prefix) {
  const fsdp_shm_options options = shm_options(key_prefix);
  return shm_create(self, &options);
}

void shm_check_says(const fsdp_error *error, const char *const *texts,
                    int line) {
  for (; *texts != NULL; texts++) {
    if (CHECK(strstr(error->message, *texts) != NULL)) continue;
    printf("  line %d: no \"%s\" in: %s\n", line, *texts, error->message);
  }
}

fsdp_status shm_barrier(fsdp_transport *transport, const char *label,
                        fsdp_error *error) {
  const fsdp_call call = {.channel = FSDP_CHANNEL_GATHER, .label = label};
  const fsdp_dtype bytes = {.itemsize = 1};
  uint64_t ticket;
  const fsdp_status status = transport->ops->all_gather(
      transport, &call, NULL, NULL, 0, bytes, &ticket, error);
  if (status != FSDP_OK) return status;
  return transport->ops->wait(transport, call.channel, ticket, error);
}

pid_t shm_pid(int64_t rank) {
  (void)shm_await(&g_pids[rank], 1);
  return (pid_t)atomic_load(&g_pids[rank]);
}

static void run_child(const shm_rank *self, shm_body body) {
  check_num_failures = 0;
  (void)alarm(HARD_LIMIT_S);
  atomic_store(&g_pids[self->rank], (int32_t)getpid());
  body(self);
  CHECK_I64(fsdp_alloc_live(), 0);
  CHECK_I64(shm_num_segments(), 0);
  (void)fflush(stdout);
  exit(check_num_failures == 0 ? 0 : 1);
}

void shm_run_without(int64_t world_size, int64_t victim, shm_body body,
                     void *context) {
  pid_t pids[MAX_RANKS];
  shm_rank rank = {
      .world_size = world_size, .store = shm_store(), .context = context};
  g_pids = shm_shared(MAX_RANKS * (int64_t)sizeof *g_pids);
  (void)fflush(stdout);
  for (int64_t i = 0; i < world_size; i++) {
    rank.rank = i;
    pids[i] = fork();
    if (pids[i] == 0) run_child(&rank, body);
  }
  for (int64_t i = 0; i < world_size; i++) {
    int state = 0;
    while (waitpid(pids[i], &state, 0) < 0 && errno == EINTR) continue;
    if (i == victim) continue;
    if (!CHECK(WIFEXITED(state) && WEXITSTATUS(state) == 0)) {
      printf("  rank %" PRId64 " of %" PRId64 " ended with %d\n", i, world_size,
             state);
    }
  }
  (void)munmap(rank.store.context, sizeof(store_memory));
}

void shm_run(int64_t world_size, shm_body body, void *context) {
  shm_run_without(world_size, -1, body, context);
}

typedef struct thread_rank {
  shm_rank self;
  shm_body body;
} thread_rank;

static void *run_thread(void *argument) {
  const thread_rank *thread = argument;
  thread->body(&thread->self);
  return NULL;
}

void shm_run_threads(int64_t world_size, shm_body body, void *context) {
  pthread_t threads[MAX_RANKS];
  thread_rank ranks[MAX_RANKS];
  const fsdp_store store = shm_store();
  for (int64_t i = 0; i < world_size; i++) {
    ranks[i] = (thread_rank){.self = {.rank = i,
                                      .world_size = world_size,
                                      .store = store,
                                      .context = context},
                             .body = body};
    CHECK_I64(pthread_create(&threads[i], NULL, run_thread, &ranks[i]), 0);
  }
  for (int64_t i = 0; i < world_size; i++) {
    CHECK_I64(pthread_join(threads[i], NULL), 0);
  }
  (void)munmap(store.context, sizeof(store_memory));
}

static int64_t num_mapped(void) {
  char line[512];
  int64_t num = 0;
  FILE *maps = fopen("/proc/self/maps", "r");
  if (maps == NULL) abort();
  while (fgets(line, sizeof line, maps) != NULL) {
    if (strstr(line, "memfd:fsdp_c") != NULL) num++;
  }
  (void)fclose(maps);
  return num;
}

int64_t shm_num_segments(void) {
  int64_t num = num_mapped();
  DIR *files = opendir("/proc/self/fd");
  if (files == NULL) abort();
  for (const struct dirent *file; (file = readdir(files)) != NULL;) {
    char target[256];
    const ssize_t nbytes =
        readlinkat(dirfd(files), file->d_name, target, sizeof target - 1);
    if (nbytes < 0) continue;
    target[nbytes] = '\0';
    if (strstr(target, "memfd:fsdp_c") != NULL) num++;
  }
  (void)closedir(files);
  return num;
}
