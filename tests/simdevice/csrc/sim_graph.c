/* Graphs of the simulated device: capture and replay. */
#include "sim_graph.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A ticket of captured work: this bit, the graph's number, the node. */
#define CAPTURED (UINT64_C(1) << 63)
enum { NODE_BITS = 32, MAX_STREAMS = 64, MAX_GRAPHS = 4096 };

typedef struct node {
  int stream;     /* in `streams` */
  size_t before;  /* the stream's last node; its own number: none */
  size_t awaited; /* a wait's; its own number: none */
  sim_task run;   /* NULL: a wait, or nothing */
  sim_task drop;
  void *argument;
  uint64_t ticket; /* of the last replay, on the stream's worker */
} node;

struct sim_graph {
  uint64_t number;
  sim_stream *streams[MAX_STREAMS]; /* the origin first */
  size_t lasts[MAX_STREAMS];        /* their last nodes */
  sim_stream *workers[MAX_STREAMS]; /* what runs the nodes of a replay */
  int num_streams;
  node *nodes;
  size_t num_nodes;
  size_t capacity;
  char failure[256];
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static sim_graph *active; /* being captured */
static uint64_t num_graphs;
static bool is_alive[MAX_GRAPHS];
/* Streams live as long as the process: those of destroyed graphs serve again.
 */
static sim_stream *idle_workers[MAX_GRAPHS];
static int num_idle;

static void *must(void *memory) {
  if (memory != NULL) return memory;
  fputs("sim: no memory for a graph\n", stderr);
  abort();
}

/* ---- Capture, with the mutex held ---------------------------------------- */

static int find_stream(const sim_stream *stream) {
  for (int i = 0; active != NULL && i < active->num_streams; i++) {
    if (active->streams[i] == stream) return i;
  }
  return -1;
}

static uint64_t ticket_of(size_t number) {
  return CAPTURED | active->number << NODE_BITS | number;
}

static node *add_node(int stream) {
  if (active->num_nodes == active->capacity) {
    active->capacity = 2 * active->capacity + 64;
    active->nodes =
        must(realloc(active->nodes, active->capacity * sizeof(node)));
  }
  const size_t number = active->num_nodes++;
  node *made = &active->nodes[number];
  *made = (node){.stream = stream, .before = number, .awaited = number};
  if (active->lasts[stream] != SIZE_MAX) made->before = active->lasts[stream];
  active->lasts[stream] = number;
  return made;
}

static int add_stream(sim_stream *stream) {
  if (active->num_streams == MAX_STREAMS) abort();
  active->streams[active->num_streams] = stream;
  active->lasts[active->num_streams] = SIZE_MAX;
  return active->num_streams++;
}

static void fail(const char *reason) {
  if (active == NULL || active->failure[0] != '\0') return;
  snprintf(active->failure, sizeof active->failure, "%s", reason);
}

/* Every node must be one that the origin's last node comes after. */
static void check_joined(void) {
  bool *is_reached = must(calloc(active->num_nodes, sizeof *is_reached));
  is_reached[active->lasts[0]] = true;
  for (size_t i = active->num_nodes; i-- > 0;) { /* edges point backwards */
    if (!is_reached[i]) continue;
    is_reached[active->nodes[i].before] = true;
    is_reached[active->nodes[i].awaited] = true;
  }
  for (size_t i = 0; i < active->num_nodes; i++) {
    if (!is_reached[i]) fail("a stream of the capture was not joined");
  }
  free(is_reached);
}

/* ---- Capture --------------------------------------------------------------
 */

sim_graph *sim_graph_begin(sim_stream *origin) {
  sim_graph *made = NULL;
  pthread_mutex_lock(&mutex);
  if (active == NULL && num_graphs + 1 < MAX_GRAPHS) {
    made = must(calloc(1, sizeof *made));
    made->number = ++num_graphs;
    is_alive[made->number] = true;
    active = made;
    add_node(add_stream(origin));
  }
  pthread_mutex_unlock(&mutex);
  return made;
}

void sim_graph_fail(const char *reason) {
  pthread_mutex_lock(&mutex);
  fail(reason);
  pthread_mutex_unlock(&mutex);
}

static bool copy_failure(const sim_graph *graph, char *reason,
                         size_t capacity) {
  if (graph == NULL || graph->failure[0] == '\0') return false;
  snprintf(reason, capacity, "%s", graph->failure);
  return true;
}

bool sim_graph_failure(char *reason, size_t capacity) {
  pthread_mutex_lock(&mutex);
  const bool is_any = copy_failure(active, reason, capacity);
  pthread_mutex_unlock(&mutex);
  return is_any;
}

bool sim_graph_end(sim_graph *graph, char *reason, size_t capacity) {
  pthread_mutex_lock(&mutex);
  check_joined();
  active = NULL;
  for (int i = 0; i < graph->num_streams; i++) {
    graph->workers[i] =
        num_idle > 0 ? idle_workers[--num_idle] : sim_stream_create();
  }
  const bool is_failed = copy_failure(graph, reason, capacity);
  pthread_mutex_unlock(&mutex);
  return !is_failed;
}

uint64_t sim_graph_of(sim_stream *stream) {
  pthread_mutex_lock(&mutex);
  const uint64_t number = find_stream(stream) < 0 ? 0 : active->number;
  pthread_mutex_unlock(&mutex);
  return number;
}

bool sim_graph_is_alive(uint64_t number) {
  pthread_mutex_lock(&mutex);
  const bool value = is_alive[number];
  pthread_mutex_unlock(&mutex);
  return value;
}

bool sim_graph_is_capturing(void) {
  pthread_mutex_lock(&mutex);
  const bool value = active != NULL;
  pthread_mutex_unlock(&mutex);
  return value;
}

bool sim_ticket_is_captured(uint64_t ticket) {
  return (ticket & CAPTURED) != 0;
}

uint64_t sim_graph_add(sim_stream *stream, sim_task task, sim_task drop,
                       void *argument) {
  uint64_t ticket = 0;
  pthread_mutex_lock(&mutex);
  const int index = find_stream(stream);
  if (index >= 0) {
    node *made = add_node(index);
    made->run = task;
    made->drop = drop;
    made->argument = argument;
    ticket = ticket_of(active->lasts[index]);
  }
  pthread_mutex_unlock(&mutex);
  return ticket;
}

uint64_t sim_graph_last(sim_stream *stream) {
  pthread_mutex_lock(&mutex);
  const int index = find_stream(stream);
  const uint64_t ticket = index < 0 ? 0 : ticket_of(active->lasts[index]);
  pthread_mutex_unlock(&mutex);
  return ticket;
}

bool sim_graph_add_wait(sim_stream *waiter, sim_stream *recorder,
                        uint64_t ticket) {
  pthread_mutex_lock(&mutex);
  int index = find_stream(waiter);
  const bool is_captured = sim_ticket_is_captured(ticket);
  const bool is_ours = is_captured && active != NULL &&
                       (ticket & ~CAPTURED) >> NODE_BITS == active->number;
  const bool is_ended = is_captured && !is_ours;
  if (is_ours) {
    if (index < 0) index = add_stream(waiter);
    if (active->streams[index] != recorder) {
      node *made = add_node(index);
      made->awaited = ticket & ((UINT64_C(1) << NODE_BITS) - 1);
    }
  } else if (index >= 0) {
    fail("a capturing stream waits for an event from outside the capture");
  } else if (is_ended) {
    sim_fail("a wait for an event that was recorded in a capture");
  }
  pthread_mutex_unlock(&mutex);
  return index >= 0 || is_ended;
}

/* ---- Replay ----------------------------------------------------------------
 */

void sim_graph_replay(sim_graph *graph, sim_stream *stream) {
  const uint64_t before = sim_stream_last(stream);
  for (int i = 0; i < graph->num_streams; i++) {
    sim_stream_wait(graph->workers[i], stream, before);
  }
  for (size_t i = 0; i < graph->num_nodes; i++) {
    node *each = &graph->nodes[i];
    sim_stream *worker = graph->workers[each->stream];
    if (each->awaited != i) {
      const node *other = &graph->nodes[each->awaited];
      sim_stream_wait(worker, graph->workers[other->stream], other->ticket);
    }
    each->ticket = each->run == NULL ? sim_stream_last(worker)
                                     : sim_stream_push(worker, each->run, NULL,
                                                       each->argument);
  }
  for (int i = 0; i < graph->num_streams; i++) {
    sim_stream_wait(stream, graph->workers[i],
                    sim_stream_last(graph->workers[i]));
  }
}

void sim_graph_destroy(sim_graph *graph) {
  if (graph == NULL) return;
  for (int i = 0; i < graph->num_streams; i++) {
    sim_stream_finish(graph->workers[i]);
  }
  for (size_t i = 0; i < graph->num_nodes; i++) {
    const node *each = &graph->nodes[i];
    if (each->drop != NULL) each->drop(each->argument);
  }
  pthread_mutex_lock(&mutex);
  is_alive[graph->number] = false;
  for (int i = 0; i < graph->num_streams && num_idle < MAX_GRAPHS; i++) {
    idle_workers[num_idle++] = graph->workers[i];
  }
  pthread_mutex_unlock(&mutex);
  free(graph->nodes);
  free(graph);
}
