/*
 * A libnccl for the simulated device: the entry points that csrc/nccl uses.
 *
 * A collective is a task of the stream that it is given, and moves data between
 * local processes through csrc/shm. Communicators meet in a folder whose path
 * is the unique id. One communicator runs one call at a time, in the order of
 * the calls, on whatever streams they are.
 */
#ifndef FAKE_NCCL_H
#define FAKE_NCCL_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "shm/shm_transport.h"
#include "sim_graph.h"
#include "sim_streams.h"

/* ---- What nccl.h declares --------------------------------------------------
 */

typedef struct comm *ncclComm_t;
typedef struct {
  char internal[128];
} ncclUniqueId;
typedef struct {
  size_t size;
  unsigned int magic;
  unsigned int version;
  int blocking;
  int cga_cluster_size;
  int min_ctas;
  int max_ctas;
  const char *net_name;
  int split_share;
} ncclConfig_t; /* its beginning */

enum {
  SUCCESS = 0,
  INTERNAL_ERROR = 3,
  INVALID_ARGUMENT = 4,
  INVALID_USAGE = 5,
  REMOTE_ERROR = 6,
  IN_PROGRESS = 7
};
enum { SUM = 0 };
enum { VERSION = 22700, PATH_NBYTES = 128, POLL_US = 500 };

SIM_API int ncclGetVersion(int *version);
SIM_API int ncclGetUniqueId(ncclUniqueId *id);
SIM_API int ncclCommInitRankConfig(ncclComm_t *comm, int num_ranks,
                                   ncclUniqueId id, int rank,
                                   ncclConfig_t *config);
SIM_API int ncclCommGetAsyncError(ncclComm_t comm, int *async_error);
SIM_API int ncclCommFinalize(ncclComm_t comm);
SIM_API int ncclCommDestroy(ncclComm_t comm);
SIM_API int ncclCommAbort(ncclComm_t comm);
SIM_API const char *ncclGetErrorString(int result);
SIM_API const char *ncclGetLastError(ncclComm_t comm);
SIM_API int ncclGroupStart(void);
SIM_API int ncclGroupEnd(void);
SIM_API int ncclAllGather(const void *send, void *receive, size_t numel,
                          int dtype, ncclComm_t comm, void *stream);
SIM_API int ncclReduceScatter(const void *send, void *receive, size_t numel,
                              int dtype, int op, ncclComm_t comm, void *stream);
SIM_API int ncclAllReduce(const void *send, void *receive, size_t numel,
                          int dtype, int op, ncclComm_t comm, void *stream);
SIM_API int ncclBroadcast(const void *send, void *receive, size_t numel,
                          int dtype, int root, ncclComm_t comm, void *stream);
SIM_API int ncclCommRegister(ncclComm_t comm, void *buffer, size_t nbytes,
                             void **handle);
SIM_API int ncclCommDeregister(ncclComm_t comm, void *handle);

SIM_API int ncclMemAlloc(void **buffer, size_t nbytes);
SIM_API int ncclMemFree(void *buffer);
SIM_API int ncclCommWindowRegister(ncclComm_t comm, void *buffer, size_t nbytes,
                                   void **handle, int flags);
SIM_API int ncclCommWindowDeregister(ncclComm_t comm, void *handle);

/* For tests: windows that are registered now, collectives of this process in
 * windows so far, and a digest of their places, the same on all ranks. */
SIM_API long long fake_nccl_num_windows(void);
SIM_API long long fake_nccl_num_in_windows(void);
SIM_API unsigned long long fake_nccl_places(void);
/* Blocks of ncclMemAlloc that live; whether there are no more. */
SIM_API long long fake_nccl_num_blocks(void);
SIM_API void fake_nccl_run_out_of_memory(bool is_out);

/* For tests: launches of this process so far (a group counts once), and buffers
 * that are registered now. */
SIM_API long long fake_nccl_num_launches(void);
SIM_API long long fake_nccl_num_registered(void);
SIM_API long long fake_nccl_num_comms(void); /* ever made */
/* How the last communicator was configured, as "min_ctas=4 ...". */
SIM_API const char *fake_nccl_last_config(void);

/* ---- Communicators: fake_nccl_comm.c ---- */

struct comm {
  int rank;
  int num_ranks;
  char folder[PATH_NBYTES];
  pthread_mutex_t mutex; /* over all that follows */
  pthread_cond_t changed;
  fsdp_transport *transport; /* NULL until the ranks have met */
  int result;                /* the asynchronous one */
  bool is_aborted;
  int num_references; /* the user's, the meeting thread's, each task's */
  int num_inside;     /* threads of the user in calls */
  char message[256];
  sim_stream *last_stream; /* of the last call */
  uint64_t last_ticket;
  uint64_t last_graph; /* that it was captured into; 0: none */
};

void fake_count(long long *counter, long long change);
long long fake_read_counter(const long long *counter);
void fake_release(struct comm *comm);
void fake_fail(struct comm *comm, int result, const char *message);
/* Notes in which window a collective's buffer is. */
void fake_note_place(const struct comm *comm, const void *buffer);
void fake_enter(struct comm *comm, const char *call);
void fake_leave(struct comm *comm);
bool fake_is_aborted(struct comm *comm);

#endif /* FAKE_NCCL_H */
