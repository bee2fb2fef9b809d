/*
 * A transport through memory that the processes of one host share: every rank
 * writes what the others need into its own segment, and they read it there.
 *
 *   rank 0's segment            rank 1's segment
 *   gather  [slot][slot]...     gather  [slot][slot]...   <- rank 0 reads
 *   reduce  [slot][slot]...     reduce  [slot][slot]...
 *
 * A collective is cut into slots; starting it writes as many as the ring has
 * room for, `wait` does the rest, of all collectives in flight on any transport
 * of the process. There is no thread: data moves while some thread of the rank
 * is inside start or wait. So a rank that has started more than a ring holds
 * must come to wait before it waits for others by other means.
 *
 * Any thread may call. Memory of sums is aligned to its elements.
 *
 * Note [Order of sums]
 * A reduce_scatter adds up rank r's shard in the order r - 1, r - 2, ... 0, the
 * last rank, ... r + 1, r, and rounds float16 and bfloat16 after each addition.
 * So do the rings of gloo: sums have the bits that torch's have over it.
 * An all_reduce goes in rank order, so that all ranks get the same bits.
 *
 * A rank that dies, leaves, is stopped for longer than the time limit or makes
 * another call than the others ends every other rank's wait with FSDP_BACKEND.
 * The labels of the calls (fsdp_call) are compared too where both ranks give
 * one, so a label must not name the rank.
 */
#ifndef FSDP_SHM_TRANSPORT_H
#define FSDP_SHM_TRANSPORT_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "port/transport.h"

#ifdef __cplusplus
extern "C" {
#endif

/* 0 means the default, except in `nbytes` and `key_prefix`. */
typedef struct fsdp_shm_options {
  int64_t nbytes;         /* sizeof(fsdp_shm_options) */
  const char *key_prefix; /* of the keys in the store; one per transport */
  const char *refusal;    /* why this rank takes no part; NULL: it does */
  int64_t ring_nbytes;    /* staging memory of one rank and channel */
  int64_t slot_nbytes;    /* a multiple of 64, at least 64 * world_size */
  int64_t message_nbytes; /* staging memory of one rank for fsdp_shm_send */
  int64_t direct_nbytes;  /* messages of this size or more bypass the ring where
                             the system allows it; negative: none do */
  int64_t direct_call_nbytes; /* so do collectives; then a ring is only for the
                                 smaller ones, whatever ring_nbytes says */
  int64_t timeout_ms;         /* of a collective without progress: 1800000 */
  int64_t meeting_timeout_ms; /* for the whole meeting of all ranks: 300000 */
  int64_t spin_us; /* how long to wait before sleeping; negative: not at all */
} fsdp_shm_options;

enum { FSDP_SHM_REASON_NBYTES = 256 };

/* Whether the ranks can share memory; the same on every rank. */
typedef struct fsdp_shm_verdict {
  bool is_possible;
  bool is_direct; /* the ranks read each other's memory, so rings stay small */
  char reason[FSDP_SHM_REASON_NBYTES]; /* why not: "rank 3: ..."; else empty */
} fsdp_shm_verdict;

/*
 * Meets the other ranks in the store and maps their segments. All ranks call
 * it. If one of them cannot (another host, another user, no memory, ...), all
 * return FSDP_OK with transport untouched and verdict->is_possible false.
 *
 * transport  [out] new; its ops->destroy releases it. Ends by itself with the
 *            process: nothing stays behind, also after SIGKILL.
 * verdict    [out]
 *
 * FSDP_INVALID_ARGUMENT  an option, rank or world_size out of bounds
 * FSDP_BACKEND           the store failed, or a rank did not come in time
 */
FSDP_NODISCARD fsdp_status fsdp_shm_create(const fsdp_store *store,
                                           const fsdp_shm_options *options,
                                           int64_t rank, int64_t world_size,
                                           fsdp_transport **transport,
                                           fsdp_shm_verdict *verdict,
                                           fsdp_error *error);

/*
 * Messages between two ranks, of any size. Messages of one direction keep their
 * order; messages and collectives do not. Both calls only start a message; its
 * memory belongs to it until fsdp_shm_wait_messages. Both sides must give the
 * same `nbytes`.
 */
FSDP_NODISCARD fsdp_status fsdp_shm_send(fsdp_transport *transport,
                                         int64_t receiver, const void *data,
                                         int64_t nbytes, const char *label,
                                         fsdp_error *error);
FSDP_NODISCARD fsdp_status fsdp_shm_recv(fsdp_transport *transport,
                                         int64_t sender, void *data,
                                         int64_t nbytes, const char *label,
                                         fsdp_error *error);
/* After a failure: whether another rank, which was stopped while it wrote, may
 * still write into the memory of a message. The memory must then not be freed.
 */
bool fsdp_shm_has_writers(fsdp_transport *transport);

/* Makes progress without waiting. A rank that is busy with other work calls it
 * now and then, since senders wait for the receiver's offers. */
FSDP_NODISCARD fsdp_status fsdp_shm_move_messages(fsdp_transport *transport,
                                                  fsdp_error *error);

/* Waits until all messages that this rank started have ended. */
FSDP_NODISCARD fsdp_status fsdp_shm_wait_messages(fsdp_transport *transport,
                                                  fsdp_error *error);

#ifdef __cplusplus
}
#endif
#endif /* FSDP_SHM_TRANSPORT_H */
