/*
 * Graphs: what streams were asked to do, recorded instead of done, and enqueued
 * again by each launch.
 *
 * As in CUDA, a stream joins the capture when it waits for one that captures,
 * and must be joined by the origin before the end. What CUDA refuses, and what
 * would be wrong in each replay, makes the capture fail: waiting for work from
 * outside it, host waits, questions about captured work.
 *
 * One graph is captured at a time.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fake.h"

/* A ticket of captured work: this bit, the graph's number, the node. */
#define CAPTURED (UINT64_C(1) << 63)
enum { NODE_BITS = 32, MAX_STREAMS = 64, MAX_WORKERS = 4096 };

typedef struct node {
  int stream;     /* in `streams` */
  size_t before;  /* the stream's last node; its own number: none */
  size_t awaited; /* a wait's; its own number: none */
  fake_task run;  /* NULL: a wait, or nothing */
  fake_task drop;
  void *argument;
  uint64_t ticket; /* of the last replay, on the stream's worker */
} node;

struct CUgraph_st {
  uint64_t number;
  enum cudaStreamCaptureMode mode;
  pthread_t owner;                   /* the thread that began it */
  int num_references;                /* the graph's, its executables' */
  fake_stream *streams[MAX_STREAMS]; /* the origin first */
  size_t lasts[MAX_STREAMS];         /* their last nodes */
  fake_stream *workers[MAX_STREAMS]; /* what runs the nodes of a replay */
  int num_streams;
  node *nodes;
  size_t num_nodes;
  size_t capacity;
  cudaError_t code;
  char failure[256];
};

struct CUgraphExec_st {
  fake_graph *graph;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static fake_graph *active; /* being captured */
static uint64_t num_graphs;
/* Streams of destroyed graphs serve again. */
static fake_stream *idle_workers[MAX_WORKERS];
static int num_idle;
static _Thread_local enum cudaStreamCaptureMode thread_mode;

static void *must(void *memory) {
  if (memory != NULL) return memory;
  fputs("fake CUDA: no memory for a graph\n", stderr);
  abort();
}

/* ---- Capture, with the mutex held ---------------------------------------- */

static int find_stream(const fake_stream *stream) {
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

static int add_stream(fake_stream *stream) {
  if (active->num_streams == MAX_STREAMS) abort();
  active->streams[active->num_streams] = stream;
  active->lasts[active->num_streams] = SIZE_MAX;
  return active->num_streams++;
}

static void fail(cudaError_t code, const char *call, const char *reason) {
  if (active == NULL || active->failure[0] != '\0') return;
  active->code = code;
  snprintf(active->failure, sizeof active->failure, "%s: %s", call, reason);
}

/* Every node must be one that the origin's last node comes after. */
static void check_joined(const char *call) {
  bool *is_reached = must(calloc(active->num_nodes, sizeof *is_reached));
  is_reached[active->lasts[0]] = true;
  for (size_t i = active->num_nodes; i-- > 0;) { /* edges point backwards */
    if (!is_reached[i]) continue;
    is_reached[active->nodes[i].before] = true;
    is_reached[active->nodes[i].awaited] = true;
  }
  for (size_t i = 0; i < active->num_nodes; i++) {
    const node *each = &active->nodes[i];
    if (is_reached[i] || (each->run == NULL && each->awaited == i)) continue;
    fail(cudaErrorStreamCaptureUnjoined, call,
         "a stream of the capture was not joined");
  }
  free(is_reached);
}

/* ---- Capture, for streams.c ---------------------------------------------- */

bool fake_ticket_is_captured(uint64_t ticket) {
  return (ticket & CAPTURED) != 0;
}

uint64_t fake_graph_of(const fake_stream *stream) {
  pthread_mutex_lock(&mutex);
  const uint64_t number = find_stream(stream) < 0 ? 0 : active->number;
  pthread_mutex_unlock(&mutex);
  return number;
}

uint64_t fakecuda_graph_of(void *stream) {
  const fake_stream *found = fake_stream_find(stream);
  return found == NULL ? 0 : fake_graph_of(found);
}

bool fake_graph_is_capturing(void) {
  pthread_mutex_lock(&mutex);
  const bool value = active != NULL;
  pthread_mutex_unlock(&mutex);
  return value;
}

void fake_graph_fail(const char *call, const char *reason) {
  pthread_mutex_lock(&mutex);
  fail(cudaErrorStreamCaptureInvalidated, call, reason);
  pthread_mutex_unlock(&mutex);
}

bool fake_graph_forbids(const char *call) {
  pthread_mutex_lock(&mutex);
  bool is_forbidden = false;
  if (active != NULL && thread_mode != cudaStreamCaptureModeRelaxed) {
    const bool is_own = pthread_equal(active->owner, pthread_self());
    is_forbidden = is_own ? active->mode != cudaStreamCaptureModeRelaxed
                          : thread_mode == cudaStreamCaptureModeGlobal &&
                                active->mode == cudaStreamCaptureModeGlobal;
  }
  if (is_forbidden) {
    fail(cudaErrorStreamCaptureInvalidated, call,
         "not permitted while a stream is capturing");
  }
  pthread_mutex_unlock(&mutex);
  return is_forbidden;
}

uint64_t fake_graph_add(fake_stream *stream, fake_task task, fake_task drop,
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

uint64_t fake_graph_last(const fake_stream *stream) {
  pthread_mutex_lock(&mutex);
  const int index = find_stream(stream);
  const uint64_t ticket = index < 0 ? 0 : ticket_of(active->lasts[index]);
  pthread_mutex_unlock(&mutex);
  return ticket;
}

int fake_graph_add_wait(fake_stream *waiter, fake_stream *recorder,
                        uint64_t ticket) {
  pthread_mutex_lock(&mutex);
  int index = find_stream(waiter);
  const bool is_captured = fake_ticket_is_captured(ticket);
  const bool is_ours = is_captured && active != NULL &&
                       (ticket & ~CAPTURED) >> NODE_BITS == active->number;
  int result = 0;
  if (is_ours) {
    if (index < 0) index = add_stream(waiter);
    if (active->streams[index] != recorder) {
      node *made = add_node(index);
      made->awaited = ticket & ((UINT64_C(1) << NODE_BITS) - 1);
    }
    result = 1;
  } else if (index >= 0) {
    fail(cudaErrorStreamCaptureIsolation, "cudaStreamWaitEvent",
         "a capturing stream waits for an event from outside the capture");
    result = -1;
  } else if (is_captured) {
    result = -1; /* recorded in a capture that has ended */
  }
  pthread_mutex_unlock(&mutex);
  return result;
}

/* ---- Capture, as CUDA has it --------------------------------------------- */

cudaError_t cudaStreamBeginCapture(cudaStream_t handle,
                                   enum cudaStreamCaptureMode mode) {
  FAKE_ENTER();
  fake_stream *stream = fake_stream_find(handle);
  if (stream == NULL) {
    FAKE_REFUSE(cudaErrorInvalidResourceHandle, "there is no such stream");
  }
  if (handle == NULL || handle == cudaStreamLegacy) {
    FAKE_REFUSE(cudaErrorStreamCaptureImplicit,
                "the default stream cannot be captured");
  }
  bool is_begun = false;
  pthread_mutex_lock(&mutex);
  if (active == NULL) {
    fake_graph *made = must(calloc(1, sizeof *made));
    made->number = ++num_graphs;
    made->mode = mode;
    made->owner = pthread_self();
    made->num_references = 1;
    active = made;
    add_node(add_stream(stream));
    is_begun = true;
  }
  pthread_mutex_unlock(&mutex);
  if (!is_begun) {
    FAKE_REFUSE(cudaErrorNotSupported,
                "another graph is being captured; the fake captures one");
  }
  return fake_result(cudaSuccess);
}

static void release(fake_graph *graph) {
  pthread_mutex_lock(&mutex);
  const bool is_last = --graph->num_references == 0;
  pthread_mutex_unlock(&mutex);
  if (!is_last) return;
  for (int i = 0; i < graph->num_streams; i++) {
    if (graph->workers[i] != NULL) fake_stream_finish(graph->workers[i]);
  }
  for (size_t i = 0; i < graph->num_nodes; i++) {
    const node *each = &graph->nodes[i];
    if (each->drop != NULL) each->drop(each->argument);
  }
  pthread_mutex_lock(&mutex);
  for (int i = 0; i < graph->num_streams && num_idle < MAX_WORKERS; i++) {
    if (graph->workers[i] != NULL) idle_workers[num_idle++] = graph->workers[i];
  }
  pthread_mutex_unlock(&mutex);
  free(graph->nodes);
  free(graph);
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *graph) {
  FAKE_ENTER();
  const fake_stream *stream = fake_stream_find(handle);
  *graph = NULL;
  pthread_mutex_lock(&mutex);
  fake_graph *ended = find_stream(stream) == 0 ? active : NULL;
  if (ended != NULL) {
    check_joined(__func__);
    active = NULL;
  }
  pthread_mutex_unlock(&mutex);
  if (ended == NULL) {
    FAKE_REFUSE(cudaErrorIllegalState,
                "the stream is not the origin of a capture");
  }
  if (ended->failure[0] != '\0') {
    const cudaError_t code = ended->code;
    char why[256];
    memcpy(why, ended->failure, sizeof why);
    release(ended);
    FAKE_REFUSE(code, "the capture failed, %s", why);
  }
  *graph = ended;
  return fake_result(cudaSuccess);
}

static enum cudaStreamCaptureStatus status_of(const fake_stream *stream) {
  if (find_stream(stream) < 0) return cudaStreamCaptureStatusNone;
  return active->failure[0] == '\0' ? cudaStreamCaptureStatusActive
                                    : cudaStreamCaptureStatusInvalidated;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle,
                                  enum cudaStreamCaptureStatus *status) {
  FAKE_ENTER();
  const fake_stream *stream = fake_stream_find(handle);
  if (stream == NULL) {
    FAKE_REFUSE(cudaErrorInvalidResourceHandle, "there is no such stream");
  }
  pthread_mutex_lock(&mutex);
  *status = status_of(stream);
  pthread_mutex_unlock(&mutex);
  return fake_result(cudaSuccess);
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle,
                                     enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **dependencies,
                                     const cudaGraphEdgeData **edges,
                                     size_t *num_dependencies) {
  FAKE_ENTER();
  const fake_stream *stream = fake_stream_find(handle);
  if (stream == NULL) {
    FAKE_REFUSE(cudaErrorInvalidResourceHandle, "there is no such stream");
  }
  pthread_mutex_lock(&mutex);
  *status = status_of(stream);
  if (*status == cudaStreamCaptureStatusActive) {
    if (id != NULL) *id = active->number;
    if (graph != NULL) *graph = active;
    if (dependencies != NULL) *dependencies = NULL;
    if (edges != NULL) *edges = NULL;
    if (num_dependencies != NULL) *num_dependencies = 0;
  }
  pthread_mutex_unlock(&mutex);
  return fake_result(cudaSuccess);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(
    enum cudaStreamCaptureMode *mode) {
  const enum cudaStreamCaptureMode old = thread_mode;
  thread_mode = *mode;
  *mode = old;
  return fake_result(cudaSuccess);
}

/* ---- Graphs -------------------------------------------------------------- */

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes,
                              size_t *count) {
  FAKE_ENTER();
  if (nodes != NULL) {
    FAKE_REFUSE(cudaErrorNotSupported, "the fake only counts the nodes");
  }
  *count = 0;
  for (size_t i = 0; i < graph->num_nodes; i++) {
    *count += graph->nodes[i].run != NULL;
  }
  return fake_result(cudaSuccess);
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *executable,
                                          cudaGraph_t graph,
                                          unsigned long long flags) {
  FAKE_ENTER();
  (void)flags;
  struct CUgraphExec_st *made = must(calloc(1, sizeof *made));
  made->graph = graph;
  pthread_mutex_lock(&mutex);
  graph->num_references++;
  for (int i = 0; i < graph->num_streams; i++) {
    if (graph->workers[i] == NULL && num_idle > 0) {
      graph->workers[i] = idle_workers[--num_idle];
    }
  }
  pthread_mutex_unlock(&mutex);
  for (int i = 0; i < graph->num_streams; i++) {
    if (graph->workers[i] != NULL) continue;
    graph->workers[i] = fake_stream_create(
        fake_stream_device(graph->streams[i]), cudaStreamNonBlocking, 0);
  }
  *executable = made;
  return fake_result(cudaSuccess);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t handle) {
  FAKE_ENTER();
  fake_stream *stream = fake_stream_find(handle);
  fake_graph *graph = executable->graph;
  if (stream == NULL) {
    FAKE_REFUSE(cudaErrorInvalidResourceHandle, "there is no such stream");
  }
  if (fake_graph_of(stream) != 0) {
    FAKE_REFUSE(cudaErrorNotSupported,
                "the fake captures no launch of another graph");
  }
  const uint64_t before = fake_stream_last(stream);
  for (int i = 0; i < graph->num_streams; i++) {
    fake_stream_wait(graph->workers[i], stream, before);
  }
  for (size_t i = 0; i < graph->num_nodes; i++) {
    node *each = &graph->nodes[i];
    fake_stream *worker = graph->workers[each->stream];
    if (each->awaited != i) {
      const node *other = &graph->nodes[each->awaited];
      fake_stream_wait(worker, graph->workers[other->stream], other->ticket);
    }
    each->ticket = each->run == NULL ? fake_stream_last(worker)
                                     : fake_stream_push(worker, each->run, NULL,
                                                        each->argument);
  }
  for (int i = 0; i < graph->num_streams; i++) {
    fake_stream_wait(stream, graph->workers[i],
                     fake_stream_last(graph->workers[i]));
  }
  return fake_result(cudaSuccess);
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  FAKE_ENTER();
  release(graph);
  return fake_result(cudaSuccess);
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  FAKE_ENTER();
  release(executable->graph);
  free(executable);
  return fake_result(cudaSuccess);
}

/* ---- Objects that a graph keeps ------------------------------------------ */

struct CUuserObject_st {
  cudaHostFn_t destroy;
  void *argument;
  unsigned num_references;
};

cudaError_t cudaUserObjectCreate(cudaUserObject_t *object, void *argument,
                                 cudaHostFn_t destroy, unsigned count,
                                 unsigned flags) {
  FAKE_ENTER();
  (void)flags;
  struct CUuserObject_st *made = must(calloc(1, sizeof *made));
  made->destroy = destroy;
  made->argument = argument;
  made->num_references = count;
  *object = made;
  return fake_result(cudaSuccess);
}

static void drop_object(void *argument) {
  struct CUuserObject_st *object = argument;
  pthread_mutex_lock(&mutex);
  const bool is_last = --object->num_references == 0;
  pthread_mutex_unlock(&mutex);
  if (!is_last) return;
  object->destroy(object->argument);
  free(object);
}

cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned count) {
  FAKE_ENTER();
  for (unsigned i = 0; i < count; i++) drop_object(object);
  return fake_result(cudaSuccess);
}

cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph,
                                      cudaUserObject_t object, unsigned count,
                                      unsigned flags) {
  FAKE_ENTER();
  pthread_mutex_lock(&mutex);
  if ((flags & cudaGraphUserObjectMove) == 0) object->num_references += count;
  fake_graph *before = active; /* a node of its own, which only drops it */
  active = graph;
  for (unsigned i = 0; i < count; i++) {
    const size_t last = graph->lasts[0];
    node *made = add_node(0);
    made->drop = drop_object;
    made->argument = object;
    graph->lasts[0] = last; /* nothing comes after it */
    made->before = last;
  }
  active = before;
  pthread_mutex_unlock(&mutex);
  return fake_result(cudaSuccess);
}
