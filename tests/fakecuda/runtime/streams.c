/* Streams: threads that run queues with delays. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "fake.h"

/*
 * Note [Moods of a stream]
 * A stream draws a mood for each stretch of tasks:
 *   eager   tasks run at once;
 *   jitter  each sleeps for a random time first;
 *   lazy    each waits until somebody waits for it, the host or a task of
 * another stream, or until a few milliseconds are over. Lazy stretches are what
 * finds missing waits: the work that nobody waits for has not happened when its
 * result is read. The limit is there since a device makes progress on its own:
 * another rank may depend on it.
 */
enum { MOOD_EAGER, MOOD_JITTER, MOOD_LAZY };

enum {
  STRETCH_TASKS = 24,    /* the mean */
  JITTER_US = 150,       /* the longest usual sleep */
  LONG_JITTER_US = 3000, /* one in 64 */
  LAZY_US = 12000        /* the longest wait for demand */
};

#define MAGIC UINT64_C(0x73747265616d7321)

typedef struct task_entry {
  struct task_entry *next;
  fake_task run;
  fake_task drop;
  void *argument;
  bool is_immediate;
} task_entry;

struct CUstream_st {
  uint64_t magic;           /* of a stream that was not destroyed */
  struct CUstream_st *next; /* of all that were made, the newest first */
  uint64_t number;
  int device;
  int priority;
  unsigned flags;
  pthread_mutex_t mutex;
  pthread_cond_t changed; /* any of what follows */
  task_entry *first;
  task_entry *last;
  uint64_t num_pushed;
  uint64_t num_done;
  uint64_t wanted; /* the highest ticket that somebody waits for */
  bool has_thread;
  bool is_ended;
  /* Only the stream's thread uses these. */
  uint64_t random;
  uint64_t schedule; /* the schedule that `random` was seeded for */
  int mood;
  int num_left; /* of this stretch */
};

static pthread_mutex_t registry_mutex = PTHREAD_MUTEX_INITIALIZER;
static fake_stream
    *registry; /* a stream's memory lives as long as the process */
static uint64_t num_streams;
static fake_stream *defaults[FAKE_MAX_DEVICES];
static int num_blocking; /* streams that the default one waits for */

static pthread_mutex_t schedule_mutex = PTHREAD_MUTEX_INITIALIZER;
static uint64_t schedule_number; /* 0: not read from the environment yet */
static uint64_t schedule_seed;
static double schedule_scale = 1.0;

static void *allocate(size_t nbytes) {
  void *memory = calloc(1, nbytes);
  if (memory == NULL) {
    fputs("fake CUDA: no memory for a stream\n", stderr);
    abort();
  }
  return memory;
}

/*
 * Note [Behind the host]
 * Alone, a task runs when it is enqueued. A GPU is further behind, and what an
 * event guards stays taken until the host sees that it is over. With
 * fakecuda_set_behind() the device is as far behind as the host lets it be: it
 * works in the order in which it was asked, and an event is over when the host
 * has waited for it, or for something that came later.
 */
static atomic_bool is_behind;
static atomic_uint_fast64_t num_recorded; /* events */
static atomic_uint_fast64_t num_seen;     /* of them, to be over */

void fakecuda_set_behind(bool value) {
  atomic_store(&is_behind, value);
}

uint64_t fake_order_next(void) {
  return atomic_fetch_add(&num_recorded, 1) + 1;
}

bool fake_order_is_seen(uint64_t order) {
  return !atomic_load(&is_behind) || order <= atomic_load(&num_seen);
}

void fake_order_see(uint64_t order) {
  uint_fast64_t seen = atomic_load(&num_seen);
  while (seen < order &&
         !atomic_compare_exchange_weak(&num_seen, &seen, order)) {
  }
}

/* ---- Delays -------------------------------------------------------------- */

static uint64_t next_random(uint64_t *state) {
  uint64_t z = (*state += 0x9E3779B97F4A7C15ULL); /* splitmix64 */
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  return z ^ (z >> 31);
}

static uint64_t draw(fake_stream *stream, uint64_t bound) {
  return next_random(&stream->random) % bound;
}

void fakecuda_set_schedule(uint64_t seed, double scale) {
  pthread_mutex_lock(&schedule_mutex);
  schedule_number++;
  schedule_seed = seed;
  schedule_scale = scale < 0.0 ? 0.0 : scale;
  pthread_mutex_unlock(&schedule_mutex);
}

static double follow_schedule(fake_stream *stream) {
  pthread_mutex_lock(&schedule_mutex);
  if (schedule_number == 0) {
    const char *seed = getenv("FAKE_CUDA_SEED");
    const char *delay = getenv("FAKE_CUDA_DELAY");
    schedule_number = 1;
    if (seed != NULL) schedule_seed = strtoull(seed, NULL, 10);
    if (delay != NULL) schedule_scale = strtod(delay, NULL);
  }
  const double scale = schedule_scale;
  if (stream->schedule != schedule_number) {
    stream->schedule = schedule_number;
    stream->random = schedule_seed * 0x2545F4914F6CDD1DULL + stream->number;
    stream->num_left = 0;
  }
  pthread_mutex_unlock(&schedule_mutex);
  return scale;
}

static struct timespec after_us(clockid_t clock, uint64_t us) {
  struct timespec time = {0};
  if (clock == CLOCK_MONOTONIC) clock_gettime(clock, &time);
  time.tv_sec += (time_t)(us / 1000000);
  time.tv_nsec += (long)(us % 1000000) * 1000;
  if (time.tv_nsec >= 1000000000) {
    time.tv_sec++;
    time.tv_nsec -= 1000000000;
  }
  return time;
}

/* Called with the mutex held; may let it go for a while. */
static void delay(fake_stream *stream, uint64_t ticket) {
  const double scale = follow_schedule(stream);
  if (scale <= 0.0) return;
  if (stream->num_left-- <= 0) {
    stream->mood = (int)draw(stream, 3);
    stream->num_left = (int)draw(stream, 2 * STRETCH_TASKS);
  }
  if (stream->mood == MOOD_JITTER) {
    const uint64_t longest = draw(stream, 64) == 0 ? LONG_JITTER_US : JITTER_US;
    const uint64_t us = (uint64_t)((double)draw(stream, longest) * scale);
    const struct timespec time = after_us(CLOCK_REALTIME, us);
    pthread_mutex_unlock(&stream->mutex);
    if (us > 0) nanosleep(&time, NULL);
    pthread_mutex_lock(&stream->mutex);
  } else if (stream->mood == MOOD_LAZY) {
    const struct timespec limit = after_us(
        CLOCK_MONOTONIC, (uint64_t)((double)draw(stream, LAZY_US) * scale));
    while (stream->wanted < ticket) {
      if (pthread_cond_timedwait(&stream->changed, &stream->mutex, &limit)) {
        break;
      }
    }
  }
}

/* ---- The queue ----------------------------------------------------------- */

static void *run_stream(void *argument) {
  fake_stream *stream = argument;
  pthread_mutex_lock(&stream->mutex);
  for (;;) {
    while (stream->first == NULL && !stream->is_ended) {
      pthread_cond_wait(&stream->changed, &stream->mutex);
    }
    if (stream->first == NULL) break;
    task_entry *entry = stream->first;
    if (!entry->is_immediate) delay(stream, stream->num_done + 1);
    stream->first = entry->next;
    if (stream->first == NULL) stream->last = NULL;
    pthread_mutex_unlock(&stream->mutex);
    entry->run(entry->argument);
    if (entry->drop != NULL) entry->drop(entry->argument);
    free(entry);
    pthread_mutex_lock(&stream->mutex);
    stream->num_done++;
    pthread_cond_broadcast(&stream->changed);
  }
  pthread_mutex_unlock(&stream->mutex);
  return NULL;
}

static void start_thread(fake_stream *stream) {
  pthread_t thread;
  if (pthread_create(&thread, NULL, run_stream, stream) != 0) {
    fputs("fake CUDA: no thread for a stream\n", stderr);
    abort();
  }
  pthread_detach(thread);
  stream->has_thread = true;
}

fake_stream *fake_stream_create(int device, unsigned flags, int priority) {
  fake_stream *stream = allocate(sizeof *stream);
  pthread_condattr_t attributes;
  pthread_condattr_init(&attributes);
  pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
  pthread_mutex_init(&stream->mutex, NULL);
  pthread_cond_init(&stream->changed, &attributes);
  pthread_condattr_destroy(&attributes);
  stream->device = device;
  stream->flags = flags;
  stream->priority = priority;
  stream->magic = MAGIC;
  pthread_mutex_lock(&registry_mutex);
  stream->number = num_streams++;
  stream->next = registry;
  registry = stream;
  if ((flags & cudaStreamNonBlocking) == 0) num_blocking++;
  pthread_mutex_unlock(&registry_mutex);
  return stream;
}

static fake_stream *default_of(int device) {
  pthread_mutex_lock(&registry_mutex);
  fake_stream *found = defaults[device];
  pthread_mutex_unlock(&registry_mutex);
  if (found != NULL) return found;
  found = fake_stream_create(device, cudaStreamNonBlocking, 0);
  pthread_mutex_lock(&registry_mutex);
  if (defaults[device] == NULL) defaults[device] = found;
  found = defaults[device];
  pthread_mutex_unlock(&registry_mutex);
  return found;
}

fake_stream *fake_stream_find(cudaStream_t handle) {
  if (handle == NULL || handle == cudaStreamLegacy) {
    return default_of(fakecuda_current_device());
  }
  if (handle == cudaStreamPerThread) return NULL;
  return handle->magic == MAGIC ? handle : NULL;
}

void fake_stream_end(fake_stream *stream) {
  pthread_mutex_lock(&stream->mutex);
  stream->is_ended = true;
  stream->magic = 0;
  pthread_cond_broadcast(&stream->changed);
  pthread_mutex_unlock(&stream->mutex);
}

int fake_stream_device(const fake_stream *stream) {
  return stream->device;
}

int fake_stream_priority(const fake_stream *stream) {
  return stream->priority;
}

unsigned fake_stream_flags(const fake_stream *stream) {
  return stream->flags;
}

uint64_t fake_stream_number(const fake_stream *stream) {
  return stream->number;
}

/* As rank 0 alone: no task waits for another one. */
static uint64_t run_at_once(fake_stream *stream, const task_entry *task) {
  task->run(task->argument);
  if (task->drop != NULL) task->drop(task->argument);
  pthread_mutex_lock(&stream->mutex);
  const uint64_t ticket = ++stream->num_pushed;
  stream->num_done++;
  pthread_mutex_unlock(&stream->mutex);
  return ticket;
}

static uint64_t push(fake_stream *stream, const task_entry *task) {
  if (fakecuda_is_alone()) return run_at_once(stream, task);
  task_entry *entry = allocate(sizeof *entry);
  *entry = *task;
  pthread_mutex_lock(&stream->mutex);
  if (!stream->has_thread) start_thread(stream);
  if (stream->last != NULL) {
    stream->last->next = entry;
  } else {
    stream->first = entry;
  }
  stream->last = entry;
  const uint64_t ticket = ++stream->num_pushed;
  pthread_cond_broadcast(&stream->changed);
  pthread_mutex_unlock(&stream->mutex);
  return ticket;
}

static uint64_t last_pushed(fake_stream *stream) {
  pthread_mutex_lock(&stream->mutex);
  const uint64_t ticket = stream->num_pushed;
  pthread_mutex_unlock(&stream->mutex);
  return ticket;
}

bool fake_stream_is_done(fake_stream *stream, uint64_t ticket) {
  pthread_mutex_lock(&stream->mutex);
  const bool value = stream->num_done >= ticket;
  pthread_mutex_unlock(&stream->mutex);
  return value;
}

bool fake_stream_is_idle(fake_stream *stream) {
  pthread_mutex_lock(&stream->mutex);
  const bool value = stream->num_done == stream->num_pushed;
  pthread_mutex_unlock(&stream->mutex);
  return value;
}

void fake_stream_wait_until(fake_stream *stream, uint64_t ticket) {
  pthread_mutex_lock(&stream->mutex);
  if (ticket > stream->wanted) {
    stream->wanted = ticket;
    pthread_cond_broadcast(&stream->changed);
  }
  while (stream->num_done < ticket) {
    pthread_cond_wait(&stream->changed, &stream->mutex);
  }
  pthread_mutex_unlock(&stream->mutex);
}

void fake_stream_finish(fake_stream *stream) {
  fake_order_see(atomic_load(&num_recorded));
  fake_stream_wait_until(stream, last_pushed(stream));
}

uint64_t fake_stream_last(fake_stream *stream) {
  const uint64_t captured = fake_graph_last(stream);
  return captured != 0 ? captured : last_pushed(stream);
}

/* ---- Between streams ----------------------------------------------------- */

typedef struct wait_argument {
  fake_stream *recorder;
  uint64_t ticket;
} wait_argument;

static void run_wait(void *argument) {
  const wait_argument *wait = argument;
  fake_stream_wait_until(wait->recorder, wait->ticket);
}

static void push_wait(fake_stream *waiter, fake_stream *recorder,
                      uint64_t ticket) {
  if (waiter == recorder || fake_stream_is_done(recorder, ticket)) return;
  wait_argument *wait = allocate(sizeof *wait);
  wait->recorder = recorder;
  wait->ticket = ticket;
  push(waiter, &(task_entry){.run = run_wait,
                             .drop = free,
                             .argument = wait,
                             .is_immediate = true});
}

bool fake_stream_wait(fake_stream *waiter, fake_stream *recorder,
                      uint64_t ticket) {
  const int captured = fake_graph_add_wait(waiter, recorder, ticket);
  if (captured == 0) push_wait(waiter, recorder, ticket);
  return captured >= 0;
}

/* Streams that were not made "non blocking" wait for the default one, which
 * waits for them. */
static void keep_legacy_order(fake_stream *stream) {
  const bool is_blocking = (stream->flags & cudaStreamNonBlocking) == 0;
  pthread_mutex_lock(&registry_mutex);
  fake_stream *first = num_blocking > 0 ? registry : NULL;
  fake_stream *its_default = defaults[stream->device];
  pthread_mutex_unlock(&registry_mutex);
  if (is_blocking && its_default != NULL) {
    push_wait(stream, its_default, last_pushed(its_default));
  }
  if (stream != its_default) return;
  for (; first != NULL; first = first->next) {
    if (first->device == stream->device &&
        (first->flags & cudaStreamNonBlocking) == 0) {
      push_wait(stream, first, last_pushed(first));
    }
  }
}

static uint64_t capture_or_push(fake_stream *stream, const task_entry *task) {
  const uint64_t captured =
      fake_graph_add(stream, task->run, task->drop, task->argument);
  if (captured != 0) return captured;
  keep_legacy_order(stream);
  return push(stream, task);
}

uint64_t fake_stream_push(fake_stream *stream, fake_task task, fake_task drop,
                          void *argument) {
  return capture_or_push(
      stream, &(task_entry){.run = task, .drop = drop, .argument = argument});
}

uint64_t fake_stream_push_now(fake_stream *stream, fake_task task,
                              fake_task drop, void *argument) {
  return capture_or_push(stream, &(task_entry){.run = task,
                                               .drop = drop,
                                               .argument = argument,
                                               .is_immediate = true});
}

void fake_synchronize(int device) {
  pthread_mutex_lock(&registry_mutex);
  fake_stream *first = registry;
  pthread_mutex_unlock(&registry_mutex);
  for (; first != NULL; first = first->next) { /* what was registered stays */
    if (device < 0 || first->device == device) fake_stream_finish(first);
  }
}

/* ---- For libraries beside the runtime ------------------------------------ */

static int no_stream(const char *call) {
  return fake_refuse(call, cudaErrorInvalidResourceHandle,
                     "there is no such stream, or it was destroyed");
}

int fakecuda_push(void *stream, fake_task task, fake_task drop, void *argument,
                  uint64_t *ticket) {
  fake_stream *found = fake_stream_find(stream);
  if (found == NULL) return no_stream(__func__);
  const uint64_t pushed = fake_stream_push(found, task, drop, argument);
  if (ticket != NULL) *ticket = pushed;
  return cudaSuccess;
}

bool fakecuda_is_idle(void *stream) {
  fake_stream *found = fake_stream_find(stream);
  return found == NULL || fake_stream_is_idle(found);
}

int fakecuda_wait(void *stream, void *recorder, uint64_t ticket) {
  fake_stream *waiter = fake_stream_find(stream);
  fake_stream *waited_for = fake_stream_find(recorder);
  if (waiter == NULL || waited_for == NULL) return no_stream(__func__);
  return fake_stream_wait(waiter, waited_for, ticket)
             ? cudaSuccess
             : cudaErrorStreamCaptureIsolation;
}

int fakecuda_finish_ticket(void *stream, uint64_t ticket) {
  fake_stream *found = fake_stream_find(stream);
  if (found == NULL) return no_stream(__func__);
  fake_stream_wait_until(found, ticket);
  return cudaSuccess;
}
