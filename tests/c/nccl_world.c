/*
 * The world of the random failures: NCCL, its streams and the store.
 */
#include "nccl_world.h"

#include <inttypes.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

struct fsdp_nccl_comm {
  nccl_world_group *_Atomic group; /* an abort looks at the other one's */
  _Atomic int64_t num_inside;      /* threads in calls */
  _Atomic bool is_ending;          /* abort was called */
  _Atomic bool is_over;
};

/* What was launched when an event was recorded. */
typedef struct world_event {
  const struct fsdp_nccl_comm *comm;
  int64_t launched;
} world_event;

static nccl_world *g_world;
static int64_t g_rank;
static _Atomic int64_t g_failing_launch;
static _Atomic bool g_is_silent;
/* Never freed: whoever uses one after its end is told. */
static struct fsdp_nccl_comm g_comms[NCCL_WORLD_MAX_GROUPS];
static _Thread_local struct fsdp_nccl_comm
    *t_last; /* for the event behind it */

static void note_wrong(const char *what) {
  atomic_fetch_add(&g_world->num_wrong, 1);
  printf("rank %" PRId64 ": WRONG %s\n", g_rank, what);
  (void)fflush(stdout);
}

void nccl_world_init(nccl_world *world, int64_t world_size) {
  world->world_size = world_size;
  for (int i = 0; i < NCCL_WORLD_MAX_GROUPS; i++) {
    for (int j = 0; j < NCCL_WORLD_MAX_RANKS; j++) {
      atomic_store(&world->groups[i].launched[j], -1);
    }
  }
}

void nccl_world_enter(nccl_world *world, int64_t rank, int64_t failing_launch) {
  g_world = world;
  g_rank = rank;
  atomic_store(&g_failing_launch, failing_launch);
}

/* ---- Communicators --------------------------------------------------------*/

static void enter(fsdp_nccl_comm *comm, const char *call) {
  if (atomic_fetch_add(&comm->num_inside, 1) > 0 || atomic_load(&comm->is_over))
    note_wrong(call);
  (void)sched_yield();
}

static void leave(fsdp_nccl_comm *comm) {
  atomic_fetch_sub(&comm->num_inside, 1);
}

/* Whether every rank has launched `num`. */
static bool is_launched(const nccl_world_group *group, int64_t num) {
  for (int64_t i = 0; i < g_world->world_size; i++) {
    if (atomic_load(&group->launched[i]) < num) return false;
  }
  return true;
}

/* Whether another rank is seen to be gone. */
static bool has_lost_peer(const nccl_world_group *group) {
  for (int64_t i = 0; i < g_world->world_size; i++) {
    if (i == g_rank || !g_world->is_death_noticed) continue;
    if (atomic_load(&g_world->is_dead[i])) return true;
    if (atomic_load(&group->is_aborted[i])) return true;
  }
  return false;
}

/* Waits in NCCL for all ranks to launch `num`; an abort ends it. */
static int wait_for_peers(fsdp_nccl_comm *comm, int64_t num) {
  while (!is_launched(comm->group, num)) {
    if (atomic_load(&comm->is_ending)) return FSDP_NCCL_INTERNAL_ERROR;
    if (has_lost_peer(comm->group)) return FSDP_NCCL_REMOTE_ERROR;
    check_sleep_ms(1);
  }
  return FSDP_NCCL_SUCCESS;
}

static int world_version(int *version) {
  *version = 22809;
  return FSDP_NCCL_SUCCESS;
}

static int world_unique_id(fsdp_nccl_id *id) {
  memset(id, 0, sizeof *id);
  id->internal[0] = (char)('a' + atomic_fetch_add(&g_world->num_ids, 1));
  return FSDP_NCCL_SUCCESS;
}

static int world_init(fsdp_nccl_comm **comm, int num_ranks, fsdp_nccl_id id,
                      int rank, fsdp_nccl_config *config) {
  const int index = id.internal[0] - 'a';
  if (index < 0 || index >= NCCL_WORLD_MAX_GROUPS || rank != (int)g_rank ||
      num_ranks != (int)g_world->world_size || config->blocking != 1) {
    note_wrong("init");
    return FSDP_NCCL_INVALID_ARGUMENT;
  }
  fsdp_nccl_comm *made = &g_comms[index];
  made->group = &g_world->groups[index];
  *comm = made;
  atomic_store(&made->group->launched[rank], 0);
  enter(made, "init");
  const int result = wait_for_peers(made, 0);
  leave(made);
  return result;
}

static int world_async_error(fsdp_nccl_comm *comm, int *async_error) {
  enter(comm, "async_error");
  *async_error =
      has_lost_peer(comm->group) ? FSDP_NCCL_REMOTE_ERROR : FSDP_NCCL_SUCCESS;
  leave(comm);
  return FSDP_NCCL_SUCCESS;
}

/* Globally: until all ranks have, or are seen to be gone. */
static int world_finalize(fsdp_nccl_comm *comm) {
  const nccl_world_group *group = comm->group;
  enter(comm, "finalize");
  atomic_store(&comm->group->has_left[g_rank], true);
  for (int64_t i = 0; i < g_world->world_size; i++) {
    while (!atomic_load(&group->has_left[i]) && !has_lost_peer(group) &&
           !atomic_load(&comm->is_ending)) {
      check_sleep_ms(1);
    }
  }
  leave(comm);
  return FSDP_NCCL_SUCCESS;
}

static int world_destroy(fsdp_nccl_comm *comm) {
  enter(comm, "destroy");
  atomic_store(&comm->is_over, true);
  leave(comm);
  return FSDP_NCCL_SUCCESS;
}

/* Whether a kernel of `comm` hangs, for all that this rank knows. */
static bool has_kernel(const fsdp_nccl_comm *comm) {
  if (comm->group == NULL || atomic_load(&comm->is_ending)) return false;
  if (atomic_load(&comm->is_over)) return false;
  const int64_t num = atomic_load(&comm->group->launched[g_rank]);
  return num > 0 && !is_launched(comm->group, num);
}

static int world_abort(fsdp_nccl_comm *comm) {
  if (atomic_exchange(&comm->is_ending, true) || atomic_load(&comm->is_over)) {
    note_wrong("abort");
  }
  atomic_store(&comm->group->is_aborted[g_rank], true);
  for (int i = 0; i < NCCL_WORLD_MAX_GROUPS; i++) {
    while (has_kernel(&g_comms[i])) check_sleep_ms(1);
  }
  atomic_store(&comm->is_over, true);
  return FSDP_NCCL_SUCCESS;
}

static const char *world_error_string(int result) {
  return result == FSDP_NCCL_REMOTE_ERROR ? "remote error" : "some error";
}

static int world_group_call(void) {
  return FSDP_NCCL_SUCCESS;
}

/* The first launch connects, and waits for the others in it. */
static int launch(fsdp_nccl_comm *comm) {
  int result = FSDP_NCCL_SUCCESS;
  enter(comm, "launch");
  if (atomic_fetch_sub(&g_failing_launch, 1) == 0) {
    result = FSDP_NCCL_SYSTEM_ERROR;
  } else if (has_lost_peer(comm->group)) {
    result = FSDP_NCCL_REMOTE_ERROR;
  } else {
    const int64_t num = atomic_fetch_add(&comm->group->launched[g_rank], 1) + 1;
    if (num == 1) result = wait_for_peers(comm, 1);
  }
  t_last = comm;
  leave(comm);
  return result;
}

static int world_all_gather(const void *send, void *receive, size_t numel,
                            int dtype, fsdp_nccl_comm *comm, void *stream) {
  (void)send, (void)receive, (void)numel, (void)dtype, (void)stream;
  return launch(comm);
}

static int world_broadcast(const void *send, void *receive, size_t numel,
                           int dtype, int root, fsdp_nccl_comm *comm,
                           void *stream) {
  (void)send, (void)receive, (void)numel, (void)dtype, (void)root, (void)stream;
  return launch(comm);
}

static int world_reduce(const void *send, void *receive, size_t numel,
                        int dtype, int op, fsdp_nccl_comm *comm, void *stream) {
  (void)send, (void)receive, (void)numel, (void)dtype, (void)op, (void)stream;
  return launch(comm);
}

fsdp_nccl_library nccl_world_library(void) {
  return (fsdp_nccl_library){
      .api =
          {
              .get_version = world_version,
              .get_unique_id = world_unique_id,
              .comm_init_rank_config = world_init,
              .comm_get_async_error = world_async_error,
              .comm_finalize = world_finalize,
              .comm_destroy = world_destroy,
              .comm_abort = world_abort,
              .get_error_string = world_error_string,
              .group_start = world_group_call,
              .group_end = world_group_call,
              .all_gather = world_all_gather,
              .reduce_scatter = world_reduce,
              .all_reduce = world_reduce,
              .broadcast = world_broadcast,
          },
      .version = 22809,
      .path = "world",
  };
}

/* ---- Events ---------------------------------------------------------------*/

static fsdp_status event_create(void *context, void **event,
                                fsdp_error *error) {
  (void)context;
  *event = calloc(1, sizeof(world_event));
  if (*event != NULL) return FSDP_OK;
  return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY, "an event");
}

static void event_destroy(void *context, void *event) {
  (void)context;
  free(event);
}

static fsdp_status event_record(void *context, void *event, void *stream,
                                fsdp_error *error) {
  (void)context, (void)stream, (void)error;
  *(world_event *)event =
      (world_event){t_last, atomic_load(&t_last->group->launched[g_rank])};
  return FSDP_OK;
}

static fsdp_status event_query(void *context, void *event, bool *is_done,
                               fsdp_error *error) {
  const world_event *self = event;
  (void)context, (void)error;
  *is_done = atomic_load(&self->comm->is_over) ||
             is_launched(self->comm->group, self->launched);
  return FSDP_OK;
}

fsdp_nccl_events nccl_world_events(void) {
  return (fsdp_nccl_events){.create = event_create,
                            .destroy = event_destroy,
                            .record = event_record,
                            .query = event_query};
}

/* ---- The store ------------------------------------------------------------*/

static void unlock_store(void) {
  atomic_store(&g_world->store_lock, false);
}

/* No thread of a rank that is about to go gets it. */
static void lock_store(void) {
  for (;;) {
    while (atomic_exchange(&g_world->store_lock, true)) (void)sched_yield();
    if (!atomic_load(&g_is_silent)) return;
    unlock_store();
    check_sleep_ms(1);
  }
}

void nccl_world_be_silent(void) {
  lock_store();
  atomic_store(&g_is_silent, true);
  unlock_store();
}

/* Whether the store takes a request; may never return. */
static bool begin_request(void) {
  while (atomic_load(&g_world->store_mode) == NCCL_WORLD_STORE_HANGS) {
    check_sleep_ms(1);
  }
  return atomic_load(&g_world->store_mode) == NCCL_WORLD_STORE_WORKS;
}

static nccl_world_entry *find(const char *key, bool makes) {
  for (int64_t i = 0; i < g_world->num_entries; i++) {
    if (strcmp(g_world->entries[i].key, key) == 0) return &g_world->entries[i];
  }
  if (!makes) return NULL;
  nccl_world_entry *entry = &g_world->entries[g_world->num_entries++];
  (void)snprintf(entry->key, sizeof entry->key, "%s", key);
  return entry;
}

static fsdp_status store_set(void *context, const char *key, const void *value,
                             int64_t nbytes, fsdp_error *error) {
  (void)context;
  if (!begin_request()) return FSDP_FAIL(error, FSDP_BACKEND, "store is gone");
  lock_store();
  nccl_world_entry *entry = find(key, true);
  memcpy(entry->value, value, (size_t)nbytes);
  entry->nbytes = nbytes;
  unlock_store();
  return FSDP_OK;
}

static fsdp_status store_get(void *context, const char *key, int64_t timeout_ms,
                             void *value, int64_t capacity, int64_t *nbytes,
                             fsdp_error *error) {
  (void)context;
  for (int64_t waited_ms = 0;; waited_ms++) {
    if (!begin_request()) {
      return FSDP_FAIL(error, FSDP_BACKEND, "the store is gone");
    }
    lock_store();
    const nccl_world_entry *entry = find(key, false);
    if (entry != NULL) {
      const int64_t num = entry->nbytes < capacity ? entry->nbytes : capacity;
      memcpy(value, entry->value, (size_t)num);
      *nbytes = entry->nbytes;
    }
    unlock_store();
    if (entry != NULL) return FSDP_OK;
    if (waited_ms >= timeout_ms) break;
    check_sleep_ms(1);
  }
  return FSDP_FAIL(error, FSDP_BACKEND, "no key %s", key);
}

static fsdp_status store_add(void *context, const char *key, int64_t change,
                             int64_t *sum, fsdp_error *error) {
  (void)context;
  if (!begin_request()) return FSDP_FAIL(error, FSDP_BACKEND, "store is gone");
  lock_store();
  nccl_world_entry *entry = find(key, true);
  int64_t value = 0;
  memcpy(&value, entry->value, sizeof value);
  value += change;
  memcpy(entry->value, &value, sizeof value);
  entry->nbytes = sizeof value;
  unlock_store();
  *sum = value;
  return FSDP_OK;
}

fsdp_store nccl_world_store(void) {
  return (fsdp_store){.set = store_set, .get = store_get, .add = store_add};
}
