/*
 * Streams of the simulated device: queues of tasks, one thread each.
 *
 * Tasks of a stream run in their order; between streams there is no order but
 * what waits for tickets say. When a task runs is drawn at random (Note [When a
 * task runs]), so that an order that only holds by luck does not hold for long.
 *
 * An event of the device is a pair (stream, ticket).
 */
#ifndef SIM_STREAMS_H
#define SIM_STREAMS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SIM_API __attribute__((visibility("default")))

typedef struct sim_stream sim_stream;

/* Runs on the stream's thread. One that was captured runs in each replay
 * (sim_graph.h). */
typedef void (*sim_task)(void *argument);

/* A new stream. It lives as long as the process. Aborts without memory. */
SIM_API sim_stream *sim_stream_create(void);

/* Enqueues; returns the task's ticket. `drop` (NULL: nothing) gets the argument
 * when the task will not run again. */
SIM_API uint64_t sim_stream_push(sim_stream *stream, sim_task task,
                                 sim_task drop, void *argument);
/* The same without a delay of its own: for what hardware does at once. */
SIM_API uint64_t sim_stream_push_now(sim_stream *stream, sim_task task,
                                     sim_task drop, void *argument);
/* The same past a capture: the stream does it now. */
SIM_API void sim_stream_push_past(sim_stream *stream, sim_task task,
                                  void *argument);
/* The ticket of the last task so far; 0: none. */
SIM_API uint64_t sim_stream_last(sim_stream *stream);

/* Whether the ticket's task, and all before it, are done. */
SIM_API bool sim_stream_is_done(sim_stream *stream, uint64_t ticket);
/* The calling thread waits for the ticket's task. Not while a graph is
 * captured: that fails the capture, and does not wait. */
SIM_API void sim_stream_synchronize(sim_stream *stream, uint64_t ticket);
/* Waits for all that was enqueued, also while a graph is captured. */
SIM_API void sim_stream_finish(sim_stream *stream);
/* Whether all that was enqueued is done, whatever is captured. */
SIM_API bool sim_stream_is_idle(sim_stream *stream);
/* Later tasks of `waiter` start after the ticket's task of `recorder`. */
SIM_API void sim_stream_wait(sim_stream *waiter, sim_stream *recorder,
                             uint64_t ticket);

/* The calling thread waits for all streams. */
SIM_API void sim_synchronize(void);

/* How tasks are delayed. `scale` multiplies all delays, 0 ends them. Before
 * the first call: the environment's SIM_SEED and SIM_DELAY, or 0 and 1. */
SIM_API void sim_set_schedule(uint64_t seed, double scale);

/* A task failed. The first message is kept until it is taken. */
SIM_API void sim_fail(const char *message);
/* Copies the message and forgets it; false if there is none. */
SIM_API bool sim_take_failure(char *message, size_t capacity);

#ifdef __cplusplus
}
#endif
#endif /* SIM_STREAMS_H */
