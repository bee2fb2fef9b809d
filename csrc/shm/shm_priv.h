/*
 * A rank's own side of a transport: its calls in flight, how far each of them
 * is, and what the files of this room call of each other, from the bottom up.
 *
 * Note [Slots]
 * A rank's calls on a channel are one stream of slots, numbered from 0 over the
 * transport's life; slot i lies at i % num_slots of its ring. A call's
 * arguments tell every rank how many slots each rank has in it: at least one.
 * The first slot carries the call's descriptor, so every call meets every rank.
 * `head` counts the slots that are filled. A reader's `tail` is the number of
 * the first slot that it may still need; it may be ahead of the head, where the
 * slots between are for other ranks. A rank fills a slot when all tails are
 * within a ring's length. Slots hold:
 *
 *   all_gather      a piece of the shard
 *   broadcast       root: a piece of the buffer; others: nothing
 *   reduce_scatter  a piece of the shard of each other rank, in rank order
 *   all_reduce      a piece of the buffer; or, with many ranks, first pieces
 *                   as for reduce_scatter, and then this rank's of the sum
 *
 * A rank reads calls in their order, and writes ahead as far as the ring goes.
 * No rank can wait for itself through others: filling slot i needs only reads
 * of slots before i, and reading slot i needs only that all ranks have filled
 * theirs up to it. The channels do not need each other, since every call makes
 * progress on both.
 *
 * Note [Direct calls]
 * Where one rank may read another's memory (process_vm_readv), large calls use
 * no ring: a slot only says that the writer's buffer is ready, and a reader
 * copies or sums straight out of that buffer. Each byte is copied once, and
 * rings stay small. A direct call has one slot of each rank; an all_reduce has
 * two, for the contribution and for this rank's part of the sum. It ends when
 * the others have read this rank's slots too, since its memory belongs to the
 * caller afterwards. A rank that fails gives its memory back at once: so what
 * was read counts only if its owner is still there after the read.
 *
 * `open` (Note [Shards in place] in port/transport.h) is a direct call that
 * reads nothing: it ends when all ranks have met. `reduce_parts` is always
 * direct: a reader first copies the writer's list of parts, and then what it
 * needs of them.
 */
#ifndef FSDP_SHM_PRIV_H
#define FSDP_SHM_PRIV_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "port/transport.h"
#include "shm/process_priv.h"
#include "shm/segment_priv.h"

enum {
  FSDP_SHM_NS_PER_MS = 1000000,
  FSDP_SHM_SCRATCH_NBYTES = 64 << 10 /* of direct sums, for each rank */
};

/* A call in flight. */
typedef struct fsdp_shm_op {
  fsdp_shm_descriptor descriptor;
  char *output;      /* or the buffer of the calls in place */
  const char *input; /* all_gather: NULL if it is in its place already */
  fsdp_parts parts;  /* reduce_parts */
  fsdp_dtype dtype;
  int64_t nbytes;      /* of the shard, or of the buffer */
  bool is_split;       /* all_reduce: as a reduce_scatter, then an all_gather */
  bool is_direct;      /* Note [Direct calls] */
  int64_t end_slot;    /* direct: the head after its last slot */
  int64_t num_slots;   /* of this rank */
  int64_t num_written; /* of them */
  int64_t num_reduced; /* slots of all ranks that were summed or copied */
} fsdp_shm_op;

/* Where this rank reads another's slots. */
typedef struct fsdp_shm_reader {
  int64_t begin;     /* the first slot of the oldest call */
  int64_t num_slots; /* of that call; 0: its first slot was not seen yet */
  int64_t num_read;
  uint64_t address;  /* of that call's descriptor */
  int64_t num_parts; /* likewise */
} fsdp_shm_reader;

/* A list of parts of another rank, read from its memory. */
typedef struct fsdp_shm_part_list {
  fsdp_part *parts;
  size_t capacity;
  int64_t num_parts;
} fsdp_shm_part_list;

typedef struct fsdp_shm_channel {
  fsdp_shm_op *ops; /* [first, end) are in flight, oldest first */
  size_t capacity;
  size_t first;
  size_t end;
  size_t writing; /* the first that is not all written */
  uint64_t num_started;
  uint64_t num_ended;
  int64_t head;             /* own slots that are filled */
  int64_t min_tail;         /* of the readers, as last seen */
  fsdp_shm_reader *readers; /* of each rank */
  int64_t progress_ns;      /* when a slot was last written or read */
} fsdp_shm_channel;

/* A message in flight. */
typedef struct fsdp_shm_message {
  bool is_send;
  int64_t peer;
  int64_t sequence; /* 1, 2, ... of this direction */
  char *data;
  int64_t nbytes;
  int64_t num_done; /* bytes */
  bool is_begun;    /* its first slot was written or read */
  bool is_offered;  /* the sender may write into its memory */
  char label[FSDP_SHM_LABEL_NBYTES];
} fsdp_shm_message;

typedef struct fsdp_shm_peer {
  fsdp_shm_segment segment;
  fsdp_shm_process process;
  int64_t num_sent;     /* message slots */
  int64_t num_received; /* message slots */
  int64_t num_sends;    /* messages started */
  int64_t num_recvs;
  int64_t num_recvs_done;
  uint64_t send_pass; /* the last pass over the messages that met one */
  uint64_t recv_pass;
  bool is_closed;  /* its memory cannot be written directly */
  int64_t seen_ns; /* direct.c: when its process was last seen */
} fsdp_shm_peer;

typedef struct fsdp_shm {
  fsdp_transport base;
  struct fsdp_shm *next; /* in the list of progress.c */
  int64_t rank;
  int64_t world_size;
  fsdp_shm_geometry geometry;
  int64_t timeout_ms;
  int64_t spin_ns; /* 0: sleep at once */
  bool is_crowded; /* fewer processors than ranks: yield instead of spinning */
  int64_t owner;   /* pid; its forked children cannot use the transport */

  pthread_mutex_t mutex; /* guards all that follows */
  fsdp_shm_peer *peers;  /* of each rank, itself included */
  pthread_t user;        /* the first thread that called */
  bool has_user;
  fsdp_shm_channel channels[FSDP_NUM_CHANNELS];
  fsdp_shm_message *messages;
  size_t message_capacity;
  size_t num_messages;
  int64_t message_progress_ns;
  uint64_t message_pass;
  bool has_writers;    /* see fsdp_shm_has_writers */
  const void **pieces; /* scratch of sums, one entry per rank */
  int page_map;        /* /proc/self/pagemap; -1: not open */
  bool counts_faults;  /* Note [Pages without a fault]; with page_map */
  bool reads_peers;    /* all ranks can read each other's memory */
  char *scratch;       /* pieces of direct sums; NULL: none */
  int64_t scratch_nbytes;
  fsdp_shm_part_list *part_lists; /* of each rank */
  fsdp_error failure;             /* status FSDP_OK: none yet */
} fsdp_shm;

/* ---- Where things lie ---- */

static inline char *fsdp_shm_priv_base(const fsdp_shm *shm, int64_t rank) {
  return (char *)shm->peers[rank].segment.header;
}

static inline fsdp_shm_channel_header *fsdp_shm_priv_channel_of(
    const fsdp_shm *shm, int64_t rank, fsdp_channel channel) {
  return &shm->peers[rank].segment.header->channels[channel];
}

/* How far `reader` has read what `writer` wrote; in the reader's segment. */
static inline _Atomic int64_t *fsdp_shm_priv_tail(const fsdp_shm *shm,
                                                  fsdp_channel channel,
                                                  int64_t reader,
                                                  int64_t writer) {
  char *counters = fsdp_shm_priv_base(shm, reader) + shm->geometry.tails;
  const int64_t i = (int64_t)channel * shm->world_size + writer;
  return &((fsdp_shm_counter *)(void *)counters)[i].value;
}

static inline fsdp_shm_descriptor *fsdp_shm_priv_descriptor(
    const fsdp_shm *shm, int64_t rank, fsdp_channel channel, int64_t slot) {
  const fsdp_shm_geometry *g = &shm->geometry;
  char *descriptors = fsdp_shm_priv_base(shm, rank) + g->descriptors;
  return &(
      (fsdp_shm_descriptor *)(void *)
          descriptors)[(int64_t)channel * g->num_slots + slot % g->num_slots];
}

static inline char *fsdp_shm_priv_slot(const fsdp_shm *shm, int64_t rank,
                                       fsdp_channel channel, int64_t slot) {
  const fsdp_shm_geometry *g = &shm->geometry;
  const int64_t i = (int64_t)channel * g->num_slots + slot % g->num_slots;
  return fsdp_shm_priv_base(shm, rank) + g->slots + i * g->slot_nbytes;
}

/*
 * Each file calls only files above it, except meeting.c and the two files of
 * calls, transport.c and message_calls.c, which come last.
 */

/* ---- bell.c: the time, and doorbells that wake sleeping ranks ---- */

/* Monotonic, in ns. */
int64_t fsdp_shm_priv_now(void);

/* Wakes a rank if it sleeps: what it waits for may have come. */
void fsdp_shm_priv_ring(const fsdp_shm *shm, int64_t rank);

/* Wakes every rank, this one too. */
void fsdp_shm_priv_ring_all(const fsdp_shm *shm);

/* Around a last look before a sleep: rings after `listen` end the sleep. */
uint32_t fsdp_shm_priv_listen(const fsdp_shm *shm);
void fsdp_shm_priv_sleep(const fsdp_shm *shm, uint32_t heard, int64_t ms);
void fsdp_shm_priv_unlisten(const fsdp_shm *shm);

/* ---- sum.c ---- */

/* Whether elements of this type can be added up. */
FSDP_NODISCARD fsdp_status fsdp_shm_priv_check_sum(fsdp_dtype dtype,
                                                   fsdp_error *error);

/* The turn of `rank` in the sum of this rank's shard: Note [Order of sums]. */
static inline int64_t fsdp_shm_priv_turn(const fsdp_shm *shm, int64_t rank) {
  return (shm->rank + shm->world_size - 1 - rank) % shm->world_size;
}
/* destination = pieces[0] + pieces[1] + ..., from the left; the
 * destination may be one of the pieces. For dtypes that check_sum accepts. */
void fsdp_shm_priv_sum(void *destination, fsdp_dtype dtype,
                       const void *const *pieces, int64_t num_pieces,
                       int64_t numel);

/* ---- describe.c: descriptions of calls and ranks ---- */

const char *fsdp_shm_priv_kind_name(int32_t kind);

/* "#17 all_gather (blocks.3)" */
void fsdp_shm_priv_describe_call(const fsdp_shm_descriptor *call, char *text,
                                 size_t text_nbytes);

/* "rank 1, which is in #15 ... on the gather channel (process 4711 is dead)" */
void fsdp_shm_priv_describe_peer(const fsdp_shm *shm, int64_t peer,
                                 fsdp_channel channel, char *text,
                                 size_t text_nbytes);

/* ---- direct.c: messages without staging, and reads of peers' memory ---- */

typedef struct fsdp_shm_range {
  uint64_t address; /* in the peer's process */
  char *to;
  int64_t nbytes; /* >= 1 */
} fsdp_shm_range;

enum { FSDP_SHM_MAX_RANGES = 64 };

/* Copies up to FSDP_SHM_MAX_RANGES ranges of rank `peer`'s memory. read [out]
 * false when the peer has failed, left or ended, which the wait reports.
 * FSDP_BACKEND when the system refuses. */
FSDP_NODISCARD fsdp_status fsdp_shm_priv_read_ranges(
    fsdp_shm *shm, int64_t peer, const fsdp_shm_range *ranges,
    int64_t num_ranges, bool *read, fsdp_error *error);

/* Copies one range, of any size. */
FSDP_NODISCARD fsdp_status fsdp_shm_priv_read_peer(fsdp_shm *shm, int64_t peer,
                                                   uint64_t address, void *to,
                                                   int64_t nbytes, bool *read,
                                                   fsdp_error *error);

/* Offers the memory of a message to its sender, once, if an offer is free. */
void fsdp_shm_priv_offer(fsdp_shm *shm, fsdp_shm_message *message);

/* Whether a message that is to be sent can bypass the ring. */
bool fsdp_shm_priv_is_direct(const fsdp_shm *shm,
                             const fsdp_shm_message *message);

bool fsdp_shm_priv_is_offered(const fsdp_shm *shm,
                              const fsdp_shm_message *message);

/* Writes a piece of the message into the memory that was offered. If that
 * fails, the message is not direct any more. */
void fsdp_shm_priv_write_direct(fsdp_shm *shm, fsdp_shm_message *message);

/* Ends all writing into memory that this rank offered, or sets has_writers. */
void fsdp_shm_priv_withdraw_offers(fsdp_shm *shm);

/* ---- parts.c: Note [Parts] in port/transport.h ---- */

/* Sums this rank's places from the parts of all ranks (`readers` has the
 * addresses of their lists). */
FSDP_NODISCARD fsdp_status fsdp_shm_priv_reduce_parts(
    fsdp_shm *shm, const fsdp_shm_op *op, const fsdp_shm_reader *readers,
    bool *read, fsdp_error *error);

/* ---- direct_calls.c: Note [Direct calls] ---- */

/* The address that the others read in a direct call of this rank. */
uint64_t fsdp_shm_priv_direct_address(const fsdp_shm *shm,
                                      const fsdp_shm_op *op);

/* Copies what rank `peer` gives in an all_gather or a broadcast. */
FSDP_NODISCARD fsdp_status
fsdp_shm_priv_copy_direct(fsdp_shm *shm, const fsdp_shm_op *op, int64_t peer,
                          uint64_t address, bool *read, fsdp_error *error);

/* Makes this rank's part of a sum from all ranks' buffers (`readers` has their
 * addresses), or with is_sum copies the parts that the others made. */
FSDP_NODISCARD fsdp_status fsdp_shm_priv_reduce_direct(
    fsdp_shm *shm, const fsdp_shm_op *op, const fsdp_shm_reader *readers,
    bool is_sum, bool *read, fsdp_error *error);

/* ---- channel.c: one channel's slots ---- */

/* Appends a call whose descriptor (without sequence), memory and dtype are
 * set. With FSDP_OUT_OF_MEMORY nothing has changed. */
FSDP_NODISCARD fsdp_status fsdp_shm_priv_channel_start(fsdp_shm *shm,
                                                       fsdp_channel channel,
                                                       const fsdp_shm_op *op,
                                                       uint64_t *ticket,
                                                       fsdp_error *error);

/* Writes and reads all that can be without waiting. FSDP_BACKEND when another
 * rank makes another call. */
FSDP_NODISCARD fsdp_status fsdp_shm_priv_channel_progress(fsdp_shm *shm,
                                                          fsdp_channel channel,
                                                          fsdp_error *error);

/* Whether the oldest call needs rank `peer` to go on. */
bool fsdp_shm_priv_channel_waits_for(const fsdp_shm *shm, fsdp_channel channel,
                                     int64_t peer);

/* ---- messages.c: between two ranks ---- */

/* Appends a message. With FSDP_OUT_OF_MEMORY nothing has changed. */
FSDP_NODISCARD fsdp_status fsdp_shm_priv_messages_start(
    fsdp_shm *shm, const fsdp_shm_message *message, fsdp_error *error);

/* Sends and receives all that can be without waiting. FSDP_BACKEND when the
 * sizes of both sides differ. */
FSDP_NODISCARD fsdp_status fsdp_shm_priv_messages_progress(fsdp_shm *shm,
                                                           fsdp_error *error);

/* Whether a message needs rank `peer` to go on. */
bool fsdp_shm_priv_messages_wait_for(const fsdp_shm *shm, int64_t peer);

/* ---- failure.c: why no call is possible any more ---- */

/* Keeps the first failure; the other ranks read `cause`. No call or message in
 * flight touches the caller's memory afterwards, unless has_writers is set.
 * Returns the first failure. */
fsdp_status fsdp_shm_priv_fail(fsdp_shm *shm, const fsdp_error *failure,
                               const char *cause, fsdp_error *error);

/* Fails because rank `peer` failed while this rank was `doing` something. */
fsdp_status fsdp_shm_priv_fail_as(fsdp_shm *shm, int64_t peer,
                                  const char *doing, fsdp_error *error);

/* The failure so far, of this rank or of another one, in *error. */
FSDP_NODISCARD fsdp_status fsdp_shm_priv_check(fsdp_shm *shm,
                                               fsdp_error *error);

/* Takes the mutex for a call. FSDP_INVALID_STATE in a forked child. */
FSDP_NODISCARD fsdp_status fsdp_shm_priv_lock(fsdp_shm *shm, fsdp_error *error);

/* ---- progress.c: of a transport, and of all transports ---- */

/* Progress of all calls and messages, once. Fails the transport on
 * an error. */
FSDP_NODISCARD fsdp_status fsdp_shm_priv_progress(fsdp_shm *shm,
                                                  fsdp_error *error);

/* Makes progress on all transports of the process but `shm`, whose mutex is
 * not held. Does not wait, so it skips a transport that another thread uses.
 * Returns whether any of them may have calls or messages in flight. */
bool fsdp_shm_priv_progress_others(const fsdp_shm *shm);

/* Adds a complete transport to that list. */
void fsdp_shm_priv_list(fsdp_shm *shm);

/* Removes it; afterwards no other thread makes progress on it. */
void fsdp_shm_priv_unlist(fsdp_shm *shm);

/* ---- page_map.c ---- */

/* Opens what tells about this process's pages; -1 where the system refuses. */
int fsdp_shm_priv_open_page_map(void);

/* Page faults of this process so far; negative: unknown. */
int64_t fsdp_shm_priv_num_faults(void);

/* Whether this system counts them: Note [Pages without a fault]. */
bool fsdp_shm_priv_counts_faults(void);

/* Whether pages of a private mapping of a file have memory of their own, since
 * they were written to; also where nobody can tell. */
bool fsdp_shm_priv_has_own_pages(int page_map, const void *begin,
                                 int64_t nbytes);

/* ---- shared.c ---- */

/* Of Note [Shards in place]. */
struct fsdp_shared {
  fsdp_shm_counter *closed; /* per rank: how often it closed; in the file */
  char *whole;              /* the private mapping of the region */
  int64_t closed_nbytes;    /* whole pages */
  int64_t nbytes;           /* of the region; whole pages */
  int64_t num_opened; /* by this rank, and so by all that have come so far */
  int64_t num_faults; /* of this process when it opened */
  bool is_open;
  int64_t owner; /* pid */
  char label[FSDP_SHM_LABEL_NBYTES];
};

/* Whether `rank` has not closed what this rank opened. */
static inline bool fsdp_shm_priv_is_reading(const fsdp_shared *shared,
                                            int64_t rank) {
  return atomic_load(&shared->closed[rank].value) < shared->num_opened;
}

/* Makes the memory file of the transport op. */
FSDP_NODISCARD fsdp_status fsdp_shm_priv_share(
    fsdp_transport *transport, const char *label, fsdp_region region,
    int64_t nbytes, const fsdp_region_range *own, int64_t num_own, void **whole,
    fsdp_shared **shared, fsdp_error *error);
void fsdp_shm_priv_unshare(fsdp_shared *shared);

/* From now on this rank reads. */
void fsdp_shm_priv_open(const fsdp_shm *shm, fsdp_shared *shared);

/* Drops what this rank wrote into the whole, and lets the owners write. */
void fsdp_shm_priv_close(fsdp_shm *shm, fsdp_shared *shared);

/* ---- waiting.c ---- */

/* What is waited for: that other ranks close, all messages, or a call of a
 * channel. */
typedef struct fsdp_shm_goal {
  const fsdp_shared *shared; /* NULL: one of the others */
  bool is_messages;
  fsdp_channel channel;
  uint64_t ticket;
} fsdp_shm_goal;

/* With the mutex held, which it releases in between. Fails the transport when
 * a rank that it needs is dead, has left, failed or is too late. */
FSDP_NODISCARD fsdp_status fsdp_shm_priv_wait(fsdp_shm *shm,
                                              const fsdp_shm_goal *goal,
                                              fsdp_error *error);

#endif /* FSDP_SHM_PRIV_H */
