/*
 * A libnccl for the fake CUDA: for csrc/nccl and for torch's ProcessGroupNCCL.
 *
 * A collective is a task of the stream that it is given. Ranks move data
 * through a shared segment that is named by the unique id, piece by piece. One
 * communicator runs one call at a time, in the order of the calls, on whatever
 * streams they are.
 */
#ifndef FAKE_NCCL_H
#define FAKE_NCCL_H

#include <nccl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define FAKE_API __attribute__((visibility("default")))

enum { NAME_NBYTES = 64, PIECE = 1 << 20, LETTER = 1 << 16 };

/* ---- The shared segment: segment.c --------------------------------------- */

/* What a rank is about to do; the same on all, or nobody does it. */
typedef struct description {
  int kind;
  int dtype;
  int op;
  int root;
  uint64_t numel;
  uint64_t number; /* of the call */
} description;

typedef struct slot {
  atomic_int is_joined;
  int device;
  char host[64];
  int color; /* of a split */
  int key;
  char id[NAME_NBYTES];
  description description;
} slot;

typedef struct meeting {
  atomic_uint num_arrived;
  atomic_uint phase;
} meeting;

/* One piece of a message between two ranks. */
typedef struct letter {
  atomic_uint is_full;
  uint32_t nbytes;
  char data[LETTER];
} letter;

typedef struct segment segment;

/* Maps the segment of that name, which the first to come makes. NULL: errno. */
segment *segment_open(const char *name, int rank, int num_ranks);
void segment_close(segment *self);
slot *segment_slot(segment *self, int rank);
char *segment_piece(segment *self, int rank);
letter *segment_letter(segment *self, int from, int to);
meeting *segment_host_meeting(segment *self);
meeting *segment_device_meeting(segment *self);
void segment_new_name(char name[NAME_NBYTES]);

/* ---- Communicators: comm.c ----------------------------------------------- */

struct ncclComm {
  int rank;
  int num_ranks;
  int device;
  char name[NAME_NBYTES];
  segment *segment; /* NULL until the ranks have met */
  bool is_ours;     /* of csrc/nccl: one thread at a time */
  atomic_bool is_aborted;
  pthread_mutex_t mutex; /* over all that follows */
  pthread_cond_t changed;
  ncclResult_t result; /* the asynchronous one */
  int num_references;  /* the user's, the meeting thread's, each task's */
  int num_inside;      /* threads of the user in calls */
  char message[512];
  void *last_stream; /* of the last call */
  uint64_t last_ticket;
  uint64_t last_graph; /* that it was captured into; 0: none */
  bool has_launched;
  int num_captured;   /* launches that graphs hold */
  uint64_t num_calls; /* that have run; only a task's */
};

typedef struct ncclComm comm;

void comm_release(comm *self);
/* The first failure of a communicator is what it reports from then on. */
void comm_fail(comm *self, ncclResult_t result, const char *message);
/* The real one corrupts its memory when two threads use a communicator, also in
 * ncclCommGetAsyncError. Only an abort may come under another call. */
void comm_enter(comm *self, const char *call);
void comm_leave(comm *self);
/* Waits until all ranks have come; false: the communicator was aborted. */
bool comm_meet(comm *self, meeting *where);

/* ---- Arithmetic: reduce.c ------------------------------------------------ */

size_t size_of(ncclDataType_t dtype);
const char *dtype_name(ncclDataType_t dtype);
/* into = the operands' reduction, in the order of the ranks, rounded after
 * each. */
bool reduce(void *into, char *const *operands, int num_operands, size_t numel,
            ncclDataType_t dtype, ncclRedOp_t op);
bool multiply(void *data, size_t numel, ncclDataType_t dtype, double factor);
double read_scalar(const void *data, ncclDataType_t dtype);

/* ---- For tests ----------------------------------------------------------- */

/* Launches of this process so far (a group counts once), communicators ever
 * made, how the last one was configured. */
FAKE_API long long fake_nccl_num_launches(void);
FAKE_API long long fake_nccl_num_comms(void);
FAKE_API const char *fake_nccl_last_config(void);
/* Whether kernels start in the order of the launches: NCCL reads that at the
 * first launch of the process. */
FAKE_API bool fake_nccl_keeps_order(void);

/* ---- What the runtime offers --------------------------------------------- */

int fakecuda_current_device(void);
int fakecuda_push(void *stream, void (*task)(void *), void (*drop)(void *),
                  void *argument, uint64_t *ticket);
int fakecuda_wait(void *stream, void *recorder, uint64_t ticket);
int fakecuda_finish_ticket(void *stream, uint64_t ticket);
uint64_t fakecuda_graph_of(void *stream);
bool fakecuda_is_one_region(const void *data, size_t nbytes);
bool fakecuda_is_reached(const void *data, size_t nbytes);
bool fakecuda_is_noop(void);
/* The other ranks of every communicator do not exist. */
bool fakecuda_is_alone(void);

#endif /* FAKE_NCCL_H */
