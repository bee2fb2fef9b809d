/* Memory of the simulated device: blocks cached per stream, freed ones
 * poisoned.
 */
#include "sim_memory.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "sim_graph.h"

enum { ALIGNMENT = 512, POISON = 0xFF };

typedef struct use {
  struct use *next;
  sim_stream *stream;
  uint64_t ticket;
} use;

/* Stands in front of a block's data, in ALIGNMENT bytes. */
typedef struct block {
  struct block *next; /* in `cached` or `pending` */
  sim_stream *stream;
  size_t nbytes;  /* a multiple of ALIGNMENT */
  size_t wanted;  /* of the present allocation */
  uint64_t graph; /* captured streams allocated it; 0: none did */
  use *uses;      /* on other streams */
} block;

_Static_assert(sizeof(block) <= ALIGNMENT, "a header fits before the data");

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static block *cached;
static block *pending; /* freed, and still used on another stream */
static sim_memory_stats stats;
static int64_t limit; /* of stats.held_nbytes; 0: none */

static block *block_of(void *data) {
  return (block *)(void *)((char *)data - ALIGNMENT);
}

static void *data_of(block *self) {
  return (char *)self + ALIGNMENT;
}

static void poison(void *argument) {
  block *self = argument;
  memset(data_of(self), POISON, self->nbytes);
}

/* With the mutex held, like all that follows. */

/* The graph that the block belongs to; 0: to nobody in particular. */
static uint64_t pool_of(const block *self) {
  return sim_graph_is_alive(self->graph) ? self->graph : 0;
}

static void give(block *self) {
  sim_stream *stream = self->stream;
  const uint64_t pool = pool_of(self);
  if (pool != 0 && pool == sim_graph_of(stream)) {
    sim_stream_push_now(stream, poison, NULL, self); /* in each replay */
  } else if (pool != 0) {
    /* Replays write it: nothing may be said of what it holds. */
  } else if (sim_stream_is_idle(stream)) {
    poison(self); /* its turn is now */
  } else {
    sim_stream_push_past(stream, poison, self);
  }
  self->next = cached;
  cached = self;
}

static bool is_used(block *self) {
  while (self->uses != NULL) {
    use *first = self->uses;
    const bool is_captured = sim_ticket_is_captured(first->ticket);
    if (is_captured ? sim_graph_is_capturing()
                    : !sim_stream_is_done(first->stream, first->ticket)) {
      return true;
    }
    self->uses = first->next;
    free(first);
  }
  return false;
}

static void give_pending(void) {
  block **link = &pending;
  while (*link != NULL) {
    block *self = *link;
    if (is_used(self)) {
      link = &self->next;
      continue;
    }
    *link = self->next;
    give(self);
  }
}

/* The smallest cached block of the stream that is not much too large. */
static block *take_cached(sim_stream *stream, size_t nbytes) {
  const uint64_t pool = sim_graph_of(stream);
  block **best = NULL;
  for (block **link = &cached; *link != NULL; link = &(*link)->next) {
    const block *self = *link;
    if (self->stream != stream || pool_of(self) != pool ||
        self->nbytes < nbytes || self->nbytes > 2 * nbytes) {
      continue;
    }
    if (best == NULL || self->nbytes < (*best)->nbytes) best = link;
  }
  if (best == NULL) return NULL;
  block *found = *best;
  *best = found->next;
  stats.num_cached++;
  return found;
}

static block *take_new(sim_stream *stream, size_t nbytes) {
  if (limit > 0 && (int64_t)nbytes > limit - stats.held_nbytes) return NULL;
  block *self = aligned_alloc(ALIGNMENT, ALIGNMENT + nbytes);
  if (self == NULL) return NULL;
  self->stream = stream;
  self->nbytes = nbytes;
  self->graph = sim_graph_of(stream);
  memset(data_of(self), POISON, nbytes);
  stats.held_nbytes += (int64_t)nbytes;
  return self;
}

void *sim_memory_alloc(sim_stream *stream, size_t nbytes) {
  if (nbytes > SIZE_MAX / 4) return NULL;
  const size_t rounded =
      nbytes == 0 ? ALIGNMENT : (nbytes + ALIGNMENT - 1) & ~(size_t)511;
  pthread_mutex_lock(&mutex);
  give_pending();
  block *self = take_cached(stream, rounded);
  if (self == NULL) self = take_new(stream, rounded);
  if (self == NULL && cached != NULL) { /* as CUDA's allocator does */
    pthread_mutex_unlock(&mutex);
    sim_memory_empty_cache();
    pthread_mutex_lock(&mutex);
    self = take_new(stream, rounded);
  }
  if (self != NULL) {
    self->next = NULL;
    self->uses = NULL;
    self->wanted = nbytes;
    stats.num_allocs++;
    stats.live_blocks++;
    stats.live_nbytes += (int64_t)self->nbytes;
    if (stats.live_nbytes > stats.peak_nbytes) {
      stats.peak_nbytes = stats.live_nbytes;
    }
  }
  pthread_mutex_unlock(&mutex);
  return self == NULL ? NULL : data_of(self);
}

size_t sim_memory_nbytes(void *data) {
  return block_of(data)->wanted;
}

void sim_memory_free(void *data) {
  if (data == NULL) return;
  block *self = block_of(data);
  pthread_mutex_lock(&mutex);
  stats.live_blocks--;
  stats.live_nbytes -= (int64_t)self->nbytes;
  if (self->uses == NULL) {
    give(self);
  } else {
    /* Work on those streams may have been enqueued since; as in CUDA's
     * allocator, all that is there when the block is freed counts. */
    for (use *each = self->uses; each != NULL; each = each->next) {
      each->ticket = sim_stream_last(each->stream);
    }
    self->next = pending;
    pending = self;
  }
  pthread_mutex_unlock(&mutex);
}

void sim_memory_record_stream(void *data, sim_stream *stream) {
  if (data == NULL) return;
  block *self = block_of(data);
  pthread_mutex_lock(&mutex);
  use *each = self->uses;
  while (each != NULL && each->stream != stream) each = each->next;
  if (each == NULL && stream != self->stream) {
    each = malloc(sizeof *each);
    if (each == NULL) abort();
    each->next = self->uses;
    each->stream = stream;
    self->uses = each;
  }
  if (each != NULL) each->ticket = sim_stream_last(stream);
  pthread_mutex_unlock(&mutex);
}

void sim_memory_empty_cache(void) {
  sim_synchronize(); /* the poison is written */
  pthread_mutex_lock(&mutex);
  block *rest = cached;
  block *kept = NULL;
  while (rest != NULL) {
    block *self = rest;
    rest = self->next;
    if (pool_of(self) == 0 && sim_stream_is_idle(self->stream)) {
      stats.held_nbytes -= (int64_t)self->nbytes;
      free(self);
    } else { /* another thread went on meanwhile, or a graph's replays do */
      self->next = kept;
      kept = self;
    }
  }
  cached = kept;
  pthread_mutex_unlock(&mutex);
}

void sim_memory_set_limit(int64_t nbytes) {
  pthread_mutex_lock(&mutex);
  limit = nbytes;
  pthread_mutex_unlock(&mutex);
}

sim_memory_stats sim_memory_get_stats(void) {
  pthread_mutex_lock(&mutex);
  const sim_memory_stats copy = stats;
  pthread_mutex_unlock(&mutex);
  return copy;
}

void sim_memory_reset_peak(void) {
  pthread_mutex_lock(&mutex);
  stats.peak_nbytes = stats.live_nbytes;
  pthread_mutex_unlock(&mutex);
}
