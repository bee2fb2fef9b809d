/*
 * The fake CUDA: what its C files share. See docs/internals/fakecuda.md.
 *
 * A device is host memory; a stream is a queue with a thread. Whatever a stream
 * is asked to do is a task of that queue.
 */
#ifndef FAKE_H
#define FAKE_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define FAKE_API __attribute__((visibility("default")))

enum { FAKE_MAX_DEVICES = 16, FAKE_POISON = 0xFF };

/* ---- Errors: errors.c ---------------------------------------------------- */

/* The call's result. What a thread got last is what cudaGetLastError tells. */
cudaError_t fake_result(cudaError_t code);
/* The same for a call that is wrong: says so, with the call's name, and adds it
 * to the text of the error. */
__attribute__((format(printf, 3, 4))) cudaError_t fake_refuse(const char *call,
                                                              cudaError_t code,
                                                              const char *why,
                                                              ...);
/* A task failed: every later call of this process does, as CUDA has it. */
FAKE_API void fakecuda_fail(int code, const char *message);
/* Forgets such a failure; for tests. */
FAKE_API void fakecuda_forget_failure(void);
/* What makes every call fail: an earlier failure, a fork of a process that used
 * CUDA, a callback that calls CUDA. */
cudaError_t fake_enter(const char *call);

#define FAKE_ENTER()                                  \
  do {                                                \
    const cudaError_t entered = fake_enter(__func__); \
    if (entered != cudaSuccess) return entered;       \
  } while (0)
#define FAKE_REFUSE(code, ...) return fake_refuse(__func__, code, __VA_ARGS__)

/* Whether the thread is in a callback of a stream. */
extern _Thread_local bool fake_is_in_callback;

/* ---- Devices: devices.c -------------------------------------------------- */

int fake_num_devices(void);
FAKE_API int fakecuda_current_device(void);

/* ---- Streams: streams.c -------------------------------------------------- */

typedef struct CUstream_st fake_stream;
/* Runs on the stream's thread; one that was captured runs in each replay. */
typedef void (*fake_task)(void *argument);

fake_stream *fake_stream_create(int device, unsigned flags, int priority);
/* The stream of a handle: 0 and cudaStreamLegacy are the current device's
 * default one. NULL if there is none. */
fake_stream *fake_stream_find(cudaStream_t handle);
void fake_stream_end(fake_stream *stream);
int fake_stream_device(const fake_stream *stream);
int fake_stream_priority(const fake_stream *stream);
unsigned fake_stream_flags(const fake_stream *stream);
uint64_t fake_stream_number(const fake_stream *stream);

/* Enqueues; returns the task's ticket. `drop` (NULL: nothing) gets the argument
 * when the task will not run again. */
uint64_t fake_stream_push(fake_stream *stream, fake_task task, fake_task drop,
                          void *argument);
/* The same without a delay of its own: for what hardware does at once. */
uint64_t fake_stream_push_now(fake_stream *stream, fake_task task,
                              fake_task drop, void *argument);
/* The ticket of the last task so far; 0: none. */
uint64_t fake_stream_last(fake_stream *stream);
/* Whether the ticket's task, and all before it, are done. Not for captured
 * ones. */
bool fake_stream_is_done(fake_stream *stream, uint64_t ticket);
void fake_stream_wait_until(fake_stream *stream, uint64_t ticket);
/* Waits for all that was enqueued. */
void fake_stream_finish(fake_stream *stream);
/* Whether all that was enqueued is done. */
bool fake_stream_is_idle(fake_stream *stream);
/* Later tasks of `waiter` start after the ticket's task of `recorder`. False: a
 * capture refuses that, and failed. */
bool fake_stream_wait(fake_stream *waiter, fake_stream *recorder,
                      uint64_t ticket);
/* Waits for all streams of a device; -1: of all. */
void fake_synchronize(int device);

/* The place of an event among all; whether the host has seen that it is over;
 * that it has. See Note [Behind the host]. */
uint64_t fake_order_next(void);
bool fake_order_is_seen(uint64_t order);
void fake_order_see(uint64_t order);
FAKE_API void fakecuda_set_behind(bool value);

/* For libraries beside the runtime (operators, NCCL): enqueues on a handle's
 * stream. An error if there is no such stream. */
FAKE_API int fakecuda_push(void *stream, fake_task task, fake_task drop,
                           void *argument, uint64_t *ticket);
/* Whether all that was enqueued there is done. */
FAKE_API bool fakecuda_is_idle(void *stream);
/* Later tasks of a handle's stream start after a task of another one's. */
FAKE_API int fakecuda_wait(void *stream, void *recorder, uint64_t ticket);
FAKE_API int fakecuda_finish_ticket(void *stream, uint64_t ticket);
/* How tasks are delayed. `scale` multiplies all delays, 0 ends them. Before the
 * first call: FAKE_CUDA_SEED and FAKE_CUDA_DELAY, or 0 and 1. */
FAKE_API void fakecuda_set_schedule(uint64_t seed, double scale);

/* ---- Graphs: graphs.c ---------------------------------------------------- */

typedef struct CUgraph_st fake_graph;

bool fake_ticket_is_captured(uint64_t ticket);
/* Whether a stream is being captured, and into which number; 0: it is not. */
uint64_t fake_graph_of(const fake_stream *stream);
FAKE_API uint64_t fakecuda_graph_of(void *stream);
bool fake_graph_is_capturing(void);
/* A call that CUDA does not allow while a stream is captured: makes the capture
 * fail and returns true, unless this thread may. */
bool fake_graph_forbids(const char *call);
/* The capture failed; the first reason stays. Nothing outside a capture. */
void fake_graph_fail(const char *call, const char *reason);
/* For streams.c. Captures a task of a capturing stream; 0: it does
 * not capture. */
uint64_t fake_graph_add(fake_stream *stream, fake_task task, fake_task drop,
                        void *argument);
uint64_t fake_graph_last(const fake_stream *stream); /* likewise 0 */
/* 1: captured; -1: refused, the capture failed; 0: nobody captures here. */
int fake_graph_add_wait(fake_stream *waiter, fake_stream *recorder,
                        uint64_t ticket);

#define FAKE_ALLOWED()                                          \
  do {                                                          \
    if (fake_graph_forbids(__func__)) {                         \
      FAKE_REFUSE(cudaErrorStreamCaptureUnsupported,            \
                  "not permitted while a stream is capturing"); \
    }                                                           \
  } while (0)

/* ---- Memory: memory.c ---------------------------------------------------- */

typedef enum fake_kind {
  FAKE_UNKNOWN, /* the host's, which CUDA knows nothing of */
  FAKE_DEVICE,
  FAKE_PINNED,
  FAKE_REGISTERED,
  FAKE_MAPPED /* by the driver's cuMemMap */
} fake_kind;

typedef struct fake_region {
  char *data;
  size_t nbytes;
  fake_kind kind;
  int device;
} fake_region;

void fake_region_add(const fake_region *region);
/* Removes the region that starts there; false: there is none of this kind. */
bool fake_region_remove(void *data, fake_kind kind, fake_region *removed);
/* The region that the address is in; its kind is FAKE_UNKNOWN outside
 * of all. */
fake_region fake_region_of(const void *data);
/* Whether one allocation, or one mapping, has all of it. */
FAKE_API bool fakecuda_is_one_region(const void *data, size_t nbytes);
/* Whether a device can read and write there: pageable memory of the host is
 * none of its. */
FAKE_API bool fakecuda_is_reached(const void *data, size_t nbytes);
/* Takes a part of a device's memory, or gives it back. */
bool fake_memory_take(int device, size_t nbytes);
void fake_memory_give(int device, size_t nbytes);
/* FAKE_CUDA_NOOP: shapes only. Nothing is computed, memory is not touched. */
FAKE_API bool fakecuda_is_noop(void);
/* FAKE_CUDA_NOOP=alone: besides, this process is rank 0 of ranks that do not
 * exist. Nobody waits for anybody, so tasks run when they are enqueued. */
FAKE_API bool fakecuda_is_alone(void);

/* The limit of a device's memory; 0: what FAKE_CUDA_MEMORY says (80 GiB). */
FAKE_API void fakecuda_set_memory(int device, size_t nbytes);

/* ---- Counters: devices.c ------------------------------------------------- */

typedef enum fake_counter {
  FAKE_MALLOCS,
  FAKE_FREES,
  FAKE_LAUNCHES,  /* of csrc/cuda, and of torch's own, which are refused */
  FAKE_OPERATORS, /* of torch, one or more launches each */
  FAKE_MEMCPYS,
  FAKE_EVENT_CREATES,
  FAKE_EVENT_RECORDS,
  FAKE_EVENT_WAITS,
  FAKE_EVENT_QUERIES,
  FAKE_SYNCHRONIZATIONS,
  FAKE_POINTER_QUERIES,
  FAKE_NUM_COUNTERS
} fake_counter;

void fake_count(fake_counter counter);
/* For libraries beside the runtime. */
FAKE_API void fakecuda_count_launch(void);
FAKE_API void fakecuda_count_operator(void);
/* How often the calls of a kind were made so far; -1: there is no such kind. */
FAKE_API long fakecuda_count(const char *name);

#endif /* FAKE_H */
