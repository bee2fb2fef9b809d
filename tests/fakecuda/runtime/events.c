/* Streams and events as CUDA has them. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "fake.h"

#define MAGIC UINT64_C(0x6576656e74732121)
enum { QUARANTINE = 4096 };

/* When the device came by; the event's, and that of tasks that will
 * write it. */
typedef struct stamp {
  atomic_int num_references;
  struct timespec time;
} stamp;

struct CUevent_st {
  uint64_t magic; /* of an event that was not destroyed */
  int device;
  unsigned flags;
  fake_stream *stream; /* that it was recorded on; NULL: none */
  uint64_t ticket;
  uint64_t order; /* among all events */
  stamp *stamp;   /* NULL: without times */
};

/* ---- Streams ------------------------------------------------------------- */

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags,
                                         int priority) {
  FAKE_ENTER();
  *stream = fake_stream_create(fakecuda_current_device(), flags, priority);
  return fake_result(cudaSuccess);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) {
  return cudaStreamCreateWithPriority(stream, cudaStreamDefault, 0);
}

#define FIND_STREAM(stream, handle)                              \
  fake_stream *stream = fake_stream_find(handle);                \
  if (stream == NULL) {                                          \
    FAKE_REFUSE(cudaErrorInvalidResourceHandle,                  \
                "there is no such stream, or it was destroyed"); \
  }                                                              \
  (void)stream

cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  FAKE_ENTER();
  FIND_STREAM(stream, handle);
  if (handle == NULL || handle == cudaStreamLegacy) {
    FAKE_REFUSE(cudaErrorInvalidResourceHandle, "the default stream stays");
  }
  fake_stream_end(stream);
  return fake_result(cudaSuccess);
}

cudaError_t cudaStreamGetPriority(cudaStream_t handle, int *priority) {
  FAKE_ENTER();
  FIND_STREAM(stream, handle);
  *priority = fake_stream_priority(stream);
  return fake_result(cudaSuccess);
}

cudaError_t cudaStreamGetId(cudaStream_t handle, unsigned long long *id) {
  FAKE_ENTER();
  FIND_STREAM(stream, handle);
  *id = fake_stream_number(stream);
  return fake_result(cudaSuccess);
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  FAKE_ENTER();
  FIND_STREAM(stream, handle);
  if (fake_graph_of(stream) != 0) {
    fake_graph_fail(__func__, "a question about a capturing stream");
    FAKE_REFUSE(cudaErrorStreamCaptureUnsupported, "the stream is capturing");
  }
  FAKE_ALLOWED();
  return fake_result(fake_stream_is_idle(stream) ? cudaSuccess
                                                 : cudaErrorNotReady);
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  FAKE_ENTER();
  FIND_STREAM(stream, handle);
  if (fake_graph_of(stream) != 0) {
    fake_graph_fail(__func__, "the host waits for a capturing stream");
    FAKE_REFUSE(cudaErrorStreamCaptureUnsupported, "the stream is capturing");
  }
  FAKE_ALLOWED();
  fake_count(FAKE_SYNCHRONIZATIONS);
  fake_stream_finish(stream);
  return fake_enter(__func__);
}

/* ---- Events -------------------------------------------------------------- */

static void drop_stamp(void *argument) {
  stamp *self = argument;
  if (self != NULL && atomic_fetch_sub(&self->num_references, 1) == 1) {
    free(self);
  }
}

static void write_stamp(void *argument) {
  stamp *self = argument;
  clock_gettime(CLOCK_MONOTONIC, &self->time);
}

static struct CUevent_st *find_event(cudaEvent_t event) {
  return event != NULL && event->magic == MAGIC ? event : NULL;
}

#define FIND_EVENT(event)                                       \
  if (find_event(event) == NULL) {                              \
    FAKE_REFUSE(cudaErrorInvalidResourceHandle,                 \
                "there is no such event, or it was destroyed"); \
  }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
  FAKE_ENTER();
  fake_count(FAKE_EVENT_CREATES);
  struct CUevent_st *made = calloc(1, sizeof *made);
  if (made == NULL) return fake_result(cudaErrorMemoryAllocation);
  made->magic = MAGIC;
  made->device = fakecuda_current_device();
  made->flags = flags;
  *event = made;
  return fake_result(cudaSuccess);
}

cudaError_t cudaEventCreate(cudaEvent_t *event) {
  return cudaEventCreateWithFlags(event, cudaEventDefault);
}

/* Memory of destroyed events is kept for a while, so that their use shows. */
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  static struct CUevent_st *dead[QUARANTINE];
  static size_t next;
  FAKE_ENTER();
  FIND_EVENT(event);
  drop_stamp(event->stamp);
  event->magic = 0;
  pthread_mutex_lock(&mutex);
  struct CUevent_st *old = dead[next];
  dead[next] = event;
  next = (next + 1) % QUARANTINE;
  pthread_mutex_unlock(&mutex);
  free(old);
  return fake_result(cudaSuccess);
}

static cudaError_t record(const char *call, cudaEvent_t event,
                          cudaStream_t handle, unsigned flags) {
  const cudaError_t entered = fake_enter(call);
  if (entered != cudaSuccess) return entered;
  fake_stream *stream = fake_stream_find(handle);
  if (find_event(event) == NULL || stream == NULL) {
    return fake_refuse(call, cudaErrorInvalidResourceHandle,
                       "there is no such %s, or it was destroyed",
                       stream == NULL ? "stream" : "event");
  }
  fake_count(FAKE_EVENT_RECORDS);
  if (flags != cudaEventRecordDefault) {
    return fake_refuse(call, cudaErrorNotSupported, "flags %u", flags);
  }
  if (fake_stream_device(stream) != event->device) {
    return fake_refuse(call, cudaErrorInvalidResourceHandle,
                       "an event of device %d on a stream of device %d",
                       event->device, fake_stream_device(stream));
  }
  if ((event->flags & cudaEventDisableTiming) == 0) {
    drop_stamp(event->stamp);
    event->stamp = calloc(1, sizeof *event->stamp);
    if (event->stamp == NULL) return fake_result(cudaErrorMemoryAllocation);
    atomic_store(&event->stamp->num_references, 2);
    fake_stream_push_now(stream, write_stamp, drop_stamp, event->stamp);
  }
  event->stream = stream;
  event->ticket = fake_stream_last(stream);
  event->order = fake_order_next();
  return fake_result(cudaSuccess);
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream,
                                     unsigned flags) {
  return record(__func__, event, stream, flags);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return record(__func__, event, stream, cudaEventRecordDefault);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event,
                                unsigned flags) {
  FAKE_ENTER();
  FIND_STREAM(stream, handle);
  FIND_EVENT(event);
  (void)flags;
  fake_count(FAKE_EVENT_WAITS);
  if (event->stream == NULL) return fake_result(cudaSuccess);
  if (!fake_stream_wait(stream, event->stream, event->ticket)) {
    FAKE_REFUSE(fake_ticket_is_captured(event->ticket)
                    ? cudaErrorCapturedEvent
                    : cudaErrorStreamCaptureIsolation,
                "only one of the event and the stream is of the capture");
  }
  return fake_result(cudaSuccess);
}

/* The host asks about the event, or waits for it. */
static cudaError_t check_captured(const char *call, cudaEvent_t event) {
  if (!fake_ticket_is_captured(event->ticket)) return cudaSuccess;
  fake_graph_fail(call, "a question about captured work, which is never done");
  return fake_refuse(call, cudaErrorCapturedEvent,
                     "the event was recorded in a capture");
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  FAKE_ENTER();
  FIND_EVENT(event);
  fake_count(FAKE_EVENT_QUERIES);
  const cudaError_t code = check_captured(__func__, event);
  if (code != cudaSuccess) return code;
  FAKE_ALLOWED();
  if (event->stream == NULL ||
      (fake_order_is_seen(event->order) &&
       fake_stream_is_done(event->stream, event->ticket))) {
    return fake_result(cudaSuccess);
  }
  return fake_result(cudaErrorNotReady);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  FAKE_ENTER();
  FIND_EVENT(event);
  const cudaError_t code = check_captured(__func__, event);
  if (code != cudaSuccess) return code;
  FAKE_ALLOWED();
  fake_count(FAKE_SYNCHRONIZATIONS);
  if (event->stream != NULL) {
    fake_order_see(event->order);
    fake_stream_wait_until(event->stream, event->ticket);
  }
  return fake_enter(__func__);
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start,
                                 cudaEvent_t end) {
  FAKE_ENTER();
  FIND_EVENT(start);
  FIND_EVENT(end);
  if (start->stamp == NULL || end->stamp == NULL) {
    FAKE_REFUSE(cudaErrorInvalidResourceHandle,
                "an event that was not recorded, or has no time");
  }
  if (!fake_stream_is_done(start->stream, start->ticket) ||
      !fake_stream_is_done(end->stream, end->ticket)) {
    return fake_result(cudaErrorNotReady);
  }
  const struct timespec from = start->stamp->time;
  const struct timespec to = end->stamp->time;
  *ms = (float)(to.tv_sec - from.tv_sec) * 1e3F +
        (float)(to.tv_nsec - from.tv_nsec) / 1e6F;
  return fake_result(cudaSuccess);
}

/* ---- Callbacks ----------------------------------------------------------- */

typedef struct callback {
  cudaHostFn_t function;
  cudaStreamCallback_t with_status;
  cudaStream_t stream;
  void *argument;
} callback;

static void run_callback(void *argument) {
  const callback *self = argument;
  fake_is_in_callback = true;
  if (self->function != NULL) {
    self->function(self->argument);
  } else {
    self->with_status(self->stream, cudaSuccess, self->argument);
  }
  fake_is_in_callback = false;
}

static cudaError_t push_callback(fake_stream *stream, const callback *wanted) {
  callback *made = malloc(sizeof *made);
  if (made == NULL) return fake_result(cudaErrorMemoryAllocation);
  *made = *wanted;
  fake_stream_push(stream, run_callback, free, made);
  return fake_result(cudaSuccess);
}

cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function,
                               void *argument) {
  FAKE_ENTER();
  FIND_STREAM(stream, handle);
  return push_callback(stream,
                       &(callback){.function = function, .argument = argument});
}

cudaError_t cudaStreamAddCallback(cudaStream_t handle,
                                  cudaStreamCallback_t function, void *argument,
                                  unsigned flags) {
  FAKE_ENTER();
  FIND_STREAM(stream, handle);
  (void)flags;
  return push_callback(stream, &(callback){.with_status = function,
                                           .stream = handle,
                                           .argument = argument});
}
