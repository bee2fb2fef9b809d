/* Streams of the simulated device: threads that run queues with delays. */
#include "sim_streams.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "sim_graph.h"

/*
 * Note [When a task runs]
 * A stream draws a mood for each stretch of tasks:
 *   eager   tasks run at once;
 *   jitter  each sleeps for a random time first;
 *   lazy    each waits until somebody waits for it, the host or a task of
 *           another stream, or until a few milliseconds are over.
 * Lazy stretches are what finds missing waits: the work that nobody waits for
 * has not happened when its result is read. The limit is there since a device
 * makes progress on its own: another rank may depend on it.
 */
enum { MOOD_EAGER, MOOD_JITTER, MOOD_LAZY };

enum {
  STRETCH_TASKS = 24,    /* the mean */
  JITTER_US = 150,       /* the longest usual sleep */
  LONG_JITTER_US = 3000, /* one in 64 */
  LAZY_US = 12000,       /* the longest wait for demand */
  MAX_STREAMS = 4096
};

typedef struct task_entry {
  struct task_entry *next;
  sim_task run;
  sim_task drop;
  void *argument;
  bool is_immediate;
} task_entry;

struct sim_stream {
  pthread_mutex_t mutex;
  pthread_cond_t changed; /* any of what follows */
  task_entry *first;
  task_entry *last;
  uint64_t num_pushed;
  uint64_t num_done;
  uint64_t wanted; /* the highest ticket that somebody waits for */
  bool has_thread;
  /* Only the stream's thread uses these. */
  uint64_t number;
  uint64_t random;
  uint64_t schedule; /* the schedule that `random` was seeded for */
  int mood;
  int num_left; /* of this stretch */
};

static pthread_mutex_t registry_mutex = PTHREAD_MUTEX_INITIALIZER;
static sim_stream *registry[MAX_STREAMS];
static size_t num_streams;
static char failure[1024];

static pthread_mutex_t schedule_mutex = PTHREAD_MUTEX_INITIALIZER;
static uint64_t schedule_number; /* 0: not read from the environment yet */
static uint64_t schedule_seed;
static double schedule_scale = 1.0;

static void *allocate(size_t nbytes) {
  void *memory = calloc(1, nbytes);
  if (memory == NULL) {
    fputs("sim: no memory for a stream\n", stderr);
    abort();
  }
  return memory;
}

/* ---- Delays -------------------------------------------------------------- */

static uint64_t next_random(uint64_t *state) {
  uint64_t z = (*state += 0x9E3779B97F4A7C15ULL); /* splitmix64 */
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  return z ^ (z >> 31);
}

static uint64_t draw(sim_stream *stream, uint64_t bound) {
  return next_random(&stream->random) % bound;
}

void sim_set_schedule(uint64_t seed, double scale) {
  pthread_mutex_lock(&schedule_mutex);
  schedule_number++;
  schedule_seed = seed;
  schedule_scale = scale < 0.0 ? 0.0 : scale;
  pthread_mutex_unlock(&schedule_mutex);
}

static double follow_schedule(sim_stream *stream) {
  double scale = 0.0;
  pthread_mutex_lock(&schedule_mutex);
  if (schedule_number == 0) {
    const char *seed = getenv("SIM_SEED");
    const char *delay = getenv("SIM_DELAY");
    schedule_number = 1;
    if (seed != NULL) schedule_seed = strtoull(seed, NULL, 10);
    if (delay != NULL) schedule_scale = strtod(delay, NULL);
  }
  scale = schedule_scale;
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
static void delay(sim_stream *stream, uint64_t ticket) {
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

/* ---- The queue ------------------------------------------------------------
 */

static void *run_stream(void *argument) {
  sim_stream *stream = argument;
  pthread_mutex_lock(&stream->mutex);
  for (;;) {
    while (stream->first == NULL) {
      pthread_cond_wait(&stream->changed, &stream->mutex);
    }
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
  return NULL;
}

static void start_thread(sim_stream *stream) {
  pthread_t thread;
  if (pthread_create(&thread, NULL, run_stream, stream) != 0) {
    fputs("sim: no thread for a stream\n", stderr);
    abort();
  }
  pthread_detach(thread);
  stream->has_thread = true;
}

sim_stream *sim_stream_create(void) {
  sim_stream *stream = allocate(sizeof *stream);
  pthread_condattr_t attributes;
  pthread_condattr_init(&attributes);
  pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
  pthread_mutex_init(&stream->mutex, NULL);
  pthread_cond_init(&stream->changed, &attributes);
  pthread_condattr_destroy(&attributes);
  pthread_mutex_lock(&registry_mutex);
  if (num_streams == MAX_STREAMS) {
    fputs("sim: too many streams\n", stderr);
    abort();
  }
  stream->number = num_streams;
  registry[num_streams++] = stream;
  pthread_mutex_unlock(&registry_mutex);
  return stream;
}

static uint64_t push(sim_stream *stream, const task_entry *task) {
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

static uint64_t capture_or_push(sim_stream *stream, const task_entry *task) {
  const uint64_t captured =
      sim_graph_add(stream, task->run, task->drop, task->argument);
  return captured != 0 ? captured : push(stream, task);
}

uint64_t sim_stream_push(sim_stream *stream, sim_task task, sim_task drop,
                         void *argument) {
  return capture_or_push(
      stream, &(task_entry){.run = task, .drop = drop, .argument = argument});
}

uint64_t sim_stream_push_now(sim_stream *stream, sim_task task, sim_task drop,
                             void *argument) {
  return capture_or_push(stream, &(task_entry){.run = task,
                                               .drop = drop,
                                               .argument = argument,
                                               .is_immediate = true});
}

void sim_stream_push_past(sim_stream *stream, sim_task task, void *argument) {
  push(stream,
       &(task_entry){.run = task, .argument = argument, .is_immediate = true});
}

static uint64_t last_pushed(sim_stream *stream) {
  pthread_mutex_lock(&stream->mutex);
  const uint64_t ticket = stream->num_pushed;
  pthread_mutex_unlock(&stream->mutex);
  return ticket;
}

static bool is_done(sim_stream *stream, uint64_t ticket) {
  pthread_mutex_lock(&stream->mutex);
  const bool value = stream->num_done >= ticket;
  pthread_mutex_unlock(&stream->mutex);
  return value;
}

static void wait_until_done(sim_stream *stream, uint64_t ticket) {
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

uint64_t sim_stream_last(sim_stream *stream) {
  const uint64_t captured = sim_graph_last(stream);
  return captured != 0 ? captured : last_pushed(stream);
}

bool sim_stream_is_done(sim_stream *stream, uint64_t ticket) {
  if (!sim_ticket_is_captured(ticket)) return is_done(stream, ticket);
  sim_graph_fail("a question about captured work, which is never done");
  return true;
}

bool sim_stream_is_idle(sim_stream *stream) {
  return is_done(stream, last_pushed(stream));
}

void sim_stream_synchronize(sim_stream *stream, uint64_t ticket) {
  if (sim_graph_is_capturing()) {
    sim_graph_fail("the host must not wait while a stream is capturing");
  } else if (sim_ticket_is_captured(ticket)) {
    sim_fail("the host waits for an event that was recorded in a capture");
  } else {
    wait_until_done(stream, ticket);
  }
}

void sim_stream_finish(sim_stream *stream) {
  wait_until_done(stream, last_pushed(stream));
}

/* ---- Between streams -------------------------------------------------------
 */

typedef struct wait_argument {
  sim_stream *recorder;
  uint64_t ticket;
} wait_argument;

static void run_wait(void *argument) {
  wait_argument *wait = argument;
  wait_until_done(wait->recorder, wait->ticket);
}

void sim_stream_wait(sim_stream *waiter, sim_stream *recorder,
                     uint64_t ticket) {
  if (sim_graph_add_wait(waiter, recorder, ticket)) return;
  if (waiter == recorder || ticket == 0) return;
  wait_argument *wait = allocate(sizeof *wait);
  wait->recorder = recorder;
  wait->ticket = ticket;
  sim_stream_push_now(waiter, run_wait, free, wait);
}

void sim_synchronize(void) {
  pthread_mutex_lock(&registry_mutex);
  const size_t count = num_streams;
  pthread_mutex_unlock(&registry_mutex);
  for (size_t i = 0; i < count; i++) { /* registered streams stay */
    sim_stream_synchronize(registry[i], last_pushed(registry[i]));
  }
}

/* ---- Failures
 * ---------------------------------------------------------------- */

void sim_fail(const char *message) {
  pthread_mutex_lock(&registry_mutex);
  if (failure[0] == '\0') {
    snprintf(failure, sizeof failure, "%s", message);
  }
  pthread_mutex_unlock(&registry_mutex);
}

bool sim_take_failure(char *message, size_t capacity) {
  pthread_mutex_lock(&registry_mutex);
  const bool is_failed = failure[0] != '\0';
  if (is_failed) {
    snprintf(message, capacity, "%s", failure);
    failure[0] = '\0';
  }
  pthread_mutex_unlock(&registry_mutex);
  return is_failed;
}
