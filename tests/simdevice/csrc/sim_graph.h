/*
 * Graphs of the simulated device: what streams were asked to do, recorded
 * instead of done, and enqueued again by each replay.
 *
 * As in CUDA, a stream joins the capture when it waits for one that captures,
 * and must be joined by the origin before the end. What CUDA refuses, and what
 * would be wrong in each replay, makes the capture fail: waiting for work from
 * outside it, host waits, questions about captured work.
 *
 * Memory that a capturing stream allocates is the graph's until the graph is
 * destroyed: a free gives it back to this graph only.
 *
 * One graph is captured at a time.
 */
#ifndef SIM_GRAPH_H
#define SIM_GRAPH_H

#include "sim_streams.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sim_graph sim_graph;

/* NULL while another one is captured. Aborts without memory. */
SIM_API sim_graph *sim_graph_begin(sim_stream *origin);
/* The capture failed; the first reason stays. Nothing outside a capture. */
SIM_API void sim_graph_fail(const char *reason);
/* Copies the reason; false: no capture, or one that has not failed. */
SIM_API bool sim_graph_failure(char *reason, size_t capacity);
/* Ends the capture; false with a reason if it failed: destroy the graph. */
SIM_API bool sim_graph_end(sim_graph *graph, char *reason, size_t capacity);
/* Enqueues all of it, behind the work of `stream`, which goes on after it. */
SIM_API void sim_graph_replay(sim_graph *graph, sim_stream *stream);
/* Waits for its replays. NULL is fine. */
SIM_API void sim_graph_destroy(sim_graph *graph);

/* The number of the graph that the stream is captured into; 0: none. */
SIM_API uint64_t sim_graph_of(sim_stream *stream);
/* Whether it was begun and not destroyed. */
SIM_API bool sim_graph_is_alive(uint64_t number);
SIM_API bool sim_graph_is_capturing(void);

/* ---- For sim_streams.c. A ticket of captured work is told by its value. ----
 */

bool sim_ticket_is_captured(uint64_t ticket);
/* Captures a task of a capturing stream; 0: the stream does not capture. */
uint64_t sim_graph_add(sim_stream *stream, sim_task task, sim_task drop,
                       void *argument);
uint64_t sim_graph_last(sim_stream *stream); /* likewise 0 */
/* Captures the wait, or fails the capture; false: nobody captures here. */
bool sim_graph_add_wait(sim_stream *waiter, sim_stream *recorder,
                        uint64_t ticket);

#ifdef __cplusplus
}
#endif
#endif /* SIM_GRAPH_H */
