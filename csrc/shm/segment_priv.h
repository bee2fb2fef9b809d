/*
 * The layout of a segment, the memory that one rank shares with the others.
 * Only its owner writes to it, except for the doorbell and the locks of offers.
 */
#ifndef FSDP_SHM_SEGMENT_PRIV_H
#define FSDP_SHM_SEGMENT_PRIV_H

#include <stdalign.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "port/transport.h"

enum {
  FSDP_SHM_LINE_NBYTES =
      64, /* of a cache; each shared counter has its own line */
  FSDP_SHM_LABEL_NBYTES = 128,
  FSDP_SHM_MESSAGE_SLOTS = 2, /* per receiver */
  FSDP_SHM_OFFERS = 16,       /* per sender */
  FSDP_SHM_VERSION = 7
};

typedef enum fsdp_shm_kind {
  FSDP_SHM_ALL_GATHER = 0,
  FSDP_SHM_BROADCAST,
  FSDP_SHM_REDUCE_SCATTER,
  FSDP_SHM_ALL_REDUCE,
  FSDP_SHM_OPEN, /* an all_gather in place: Note [Shards in place] */
  FSDP_SHM_REDUCE_PARTS
} fsdp_shm_kind;

/* Describes a call, so that ranks can compare their calls. */
typedef struct fsdp_shm_descriptor {
  uint64_t sequence; /* 1, 2, 3, ... on its channel */
  int32_t kind;
  int32_t dtype_code;
  int64_t itemsize;
  int64_t numel;       /* the argument shard_numel or numel */
  int64_t root;        /* 0 without one */
  uint64_t label_hash; /* 0 without a label */
  uint64_t address;    /* of a direct call: what the others read, in the
                          caller's process */
  int64_t num_parts;   /* reduce_parts: of the list at that address */
  char label[FSDP_SHM_LABEL_NBYTES];
} fsdp_shm_descriptor;

typedef struct fsdp_shm_channel_header {
  /* Slots that this rank has filled since the beginning. */
  alignas(FSDP_SHM_LINE_NBYTES) _Atomic int64_t head;
  /* For error messages of other ranks: the calls started and ended, and the
   * last two started, at index sequence % 2. */
  alignas(FSDP_SHM_LINE_NBYTES) _Atomic uint64_t num_started;
  _Atomic uint64_t num_ended;
  fsdp_shm_descriptor started[2];
  /* The call in whose wait this rank's program is; 0: in none. */
  _Atomic uint64_t awaited;
} fsdp_shm_channel_header;

typedef enum fsdp_shm_presence {
  FSDP_SHM_HERE = 0,
  FSDP_SHM_LEFT,  /* destroyed its transport */
  FSDP_SHM_FAILED /* `failure` says why */
} fsdp_shm_presence;

typedef struct fsdp_shm_header {
  uint64_t token; /* as in the meeting: proves that this is the right segment */
  /* A futex: the others ring it, but only while this rank sleeps. */
  alignas(FSDP_SHM_LINE_NBYTES) _Atomic uint32_t doorbell;
  _Atomic int32_t num_sleepers;
  alignas(FSDP_SHM_LINE_NBYTES) _Atomic uint32_t presence;
  _Atomic bool has_threads; /* several have called the transport */
  char failure[FSDP_ERROR_MESSAGE_NBYTES];
  fsdp_shm_channel_header channels[FSDP_NUM_CHANNELS];
} fsdp_shm_header;

/* A counter that another rank polls, alone on its cache line. */
typedef struct fsdp_shm_counter {
  alignas(FSDP_SHM_LINE_NBYTES) _Atomic int64_t value;
} fsdp_shm_counter;

/* In the first slot of a message: its size, and whether the sender has written
 * it into the receiver's memory (Note [Direct messages]). */
typedef struct fsdp_shm_message_header {
  alignas(FSDP_SHM_LINE_NBYTES) int64_t nbytes;
  bool is_written;
} fsdp_shm_message_header;

/* Memory in which its owner expects a message. The sender writes `lock`. */
typedef struct fsdp_shm_offer {
  alignas(
      FSDP_SHM_LINE_NBYTES) _Atomic int64_t sequence; /* 1, 2, ...; 0: none */
  _Atomic int32_t lock;
  int64_t nbytes;
  uint64_t address; /* in the owner's process */
} fsdp_shm_offer;

/* Sizes and offsets in bytes; the same for all segments of a transport. */
typedef struct fsdp_shm_geometry {
  int64_t world_size;
  int64_t num_slots; /* of one channel */
  int64_t slot_nbytes;
  int64_t piece_nbytes; /* of a slot, for each other rank; 0: no others */
  int64_t message_slot_nbytes;
  int64_t direct_nbytes;      /* the smallest direct message; 0: none are */
  int64_t direct_call_nbytes; /* the smallest direct call; 0: none are */

  int64_t tails;           /* counters [channel][rank that wrote] */
  int64_t message_heads;   /* counters [receiver] */
  int64_t message_tails;   /* counters [sender] */
  int64_t message_headers; /* [receiver][message slot] */
  int64_t offers;          /* [sender][offer] */
  int64_t descriptors;     /* [channel][slot], of the call that begins there */
  int64_t messages;        /* memory [receiver][message slot] */
  int64_t slots;           /* memory [channel][slot] */
  int64_t nbytes;          /* of the whole */
} fsdp_shm_geometry;

/* A mapped segment. */
typedef struct fsdp_shm_segment {
  fsdp_shm_header *header; /* NULL: not mapped */
  int64_t nbytes;
} fsdp_shm_segment;

/* Lays out a segment. False when a size does not fit in int64. */
FSDP_NODISCARD bool fsdp_shm_priv_layout(
    int64_t world_size, int64_t ring_nbytes, int64_t slot_nbytes,
    int64_t message_nbytes, int64_t direct_nbytes, fsdp_shm_geometry *geometry);

/* file.c: makes a memory file of zeros, whose memory is reserved, as all
 * `num_files` like it are going to be. /proc shows its name. descriptor [out]
 * to be closed. */
FSDP_NODISCARD fsdp_status fsdp_shm_priv_file_create(const char *name,
                                                     int64_t nbytes,
                                                     int64_t num_files,
                                                     int *descriptor,
                                                     fsdp_error *error);

/* file.c: opens the memory file that process `pid` has open as `descriptor`.
 * opened [out] to be closed. */
FSDP_NODISCARD fsdp_status fsdp_shm_priv_file_open(int64_t pid,
                                                   int64_t descriptor,
                                                   int64_t nbytes, int *opened,
                                                   fsdp_error *error);

/* Makes a new segment of zeros with no name. All of its memory is reserved: no
 * later access can fail. descriptor [out] to be closed when all ranks have
 * opened it. */
FSDP_NODISCARD fsdp_status fsdp_shm_priv_segment_create(
    const fsdp_shm_geometry *geometry, fsdp_shm_segment *segment,
    int *descriptor, fsdp_error *error);

/* Maps the segment that process `pid` has open as `descriptor`. */
FSDP_NODISCARD fsdp_status fsdp_shm_priv_segment_open(
    int64_t pid, int64_t descriptor, int64_t nbytes, uint64_t token,
    fsdp_shm_segment *segment, fsdp_error *error);

/* Unmaps it. A segment that was not mapped is fine. */
void fsdp_shm_priv_segment_close(fsdp_shm_segment *segment);

#endif /* FSDP_SHM_SEGMENT_PRIV_H */
