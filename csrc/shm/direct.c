/*
 * Copies between the memory of two processes. Long messages without staging:
 * the receiver offers its memory, and the sender writes into it. Also reads of
 * a peer's memory, for direct calls.
 *
 * Note [Direct messages]
 * A message through the ring is copied twice, once by each side, and each side
 * waits for the other. Where one process may trace another, the kernel copies
 * between them (process_vm_writev). The sender then does all the work, page
 * faults included, and the receiver is free to do its own meanwhile.
 *
 * Each rank has offers for each sender: the memory of the next messages that it
 * expects from that sender. The sender locks an offer, writes a piece and
 * unlocks it. A receiver that fails withdraws its offers by locking them for
 * good, so nothing is written afterwards. If a sender was stopped while it held
 * the lock, the receiver waits a short time only; has_writers then says that
 * the memory must not be given back.
 *
 * A message that cannot be written goes through the ring, and so does every
 * later one to that rank.
 */
#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#include "shm/shm_priv.h"

enum {
  PIECE_NBYTES = 4 << 20,
  WITHDRAW_MS = 1000,
  SEEN_MS = 10,
  READ_SEEN_MS = 50, /* longer: a read changes nothing in the other process */
};

enum { FREE = 0, WRITING, WITHDRAWN };

static fsdp_shm_offer *offer_of(const fsdp_shm *shm,
                                const fsdp_shm_message *message) {
  const int64_t sender = message->is_send ? shm->rank : message->peer;
  const int64_t receiver = message->is_send ? message->peer : shm->rank;
  char *offers = fsdp_shm_priv_base(shm, receiver) + shm->geometry.offers;
  return &(
      (fsdp_shm_offer *)(void *)offers)[sender * FSDP_SHM_OFFERS +
                                        message->sequence % FSDP_SHM_OFFERS];
}

void fsdp_shm_priv_offer(fsdp_shm *shm, fsdp_shm_message *message) {
  const fsdp_shm_peer *peer = &shm->peers[message->peer];
  if (message->is_offered ||
      message->sequence > peer->num_recvs_done + FSDP_SHM_OFFERS) {
    return;
  }
  fsdp_shm_offer *offer = offer_of(shm, message);
  offer->address = (uint64_t)(uintptr_t)message->data;
  offer->nbytes = message->nbytes;
  message->is_offered = true;
  atomic_store(&offer->sequence, message->sequence);
  fsdp_shm_priv_ring(shm, message->peer);
}

bool fsdp_shm_priv_is_direct(const fsdp_shm *shm,
                             const fsdp_shm_message *message) {
  return message->nbytes >= shm->geometry.direct_nbytes &&
         shm->geometry.direct_nbytes > 0 &&
         !shm->peers[message->peer].is_closed;
}

bool fsdp_shm_priv_is_offered(const fsdp_shm *shm,
                              const fsdp_shm_message *message) {
  return atomic_load(&offer_of(shm, message)->sequence) == message->sequence;
}

/* A range of another process's memory. */
static struct iovec range_there(uint64_t address, size_t nbytes) {
  union {
    uintptr_t number;
    void *pointer;
  } there = {.number = (uintptr_t)address};
  return (struct iovec){.iov_base = there.pointer, .iov_len = nbytes};
}

/* Bytes written; 0 when the kernel refuses, or the memory is gone. */
static int64_t write_piece(int64_t pid, uint64_t address, char *data,
                           int64_t nbytes) {
  const size_t piece =
      (size_t)(nbytes < PIECE_NBYTES ? nbytes : (int64_t)PIECE_NBYTES);
  const struct iovec from = {.iov_base = data, .iov_len = piece};
  const struct iovec into = range_there(address, piece);
  const ssize_t written = process_vm_writev((pid_t)pid, &from, 1, &into, 1, 0);
  return written > 0 ? (int64_t)written : 0;
}

/* Whether the pid is still the peer's. It is asked every `ms`: the kernel does
 * not use a pid again that soon. */
static bool is_there(fsdp_shm_peer *peer, int64_t ms) {
  const int64_t now_ns = fsdp_shm_priv_now();
  if (now_ns - peer->seen_ns < ms * FSDP_SHM_NS_PER_MS) return true;
  if (fsdp_shm_priv_process_look(&peer->process) == FSDP_SHM_PROCESS_DEAD) {
    return false;
  }
  peer->seen_ns = now_ns;
  return true;
}

void fsdp_shm_priv_write_direct(fsdp_shm *shm, fsdp_shm_message *message) {
  fsdp_shm_peer *peer = &shm->peers[message->peer];
  fsdp_shm_offer *offer = offer_of(shm, message);
  int32_t free_state = FREE;
  int64_t written = 0;
  /* Where the sizes differ, the receiver reports it, from the slot. */
  if (offer->nbytes == message->nbytes &&
      atomic_compare_exchange_strong(&offer->lock, &free_state, WRITING)) {
    if (is_there(peer, SEEN_MS)) {
      written = write_piece(peer->process.pid,
                            offer->address + (uint64_t)message->num_done,
                            message->data + message->num_done,
                            message->nbytes - message->num_done);
    }
    atomic_store(&offer->lock, FREE);
  }
  if (written > 0) {
    message->num_done += written;
  } else {
    peer->is_closed = true;
    message->num_done = 0; /* all of it through the ring */
  }
}

/* Reads what is left: ranges from `first` on, of which `done` bytes are there.
 * Bytes that were read; below 1 when the kernel refuses. */
static ssize_t read_some(int64_t pid, const fsdp_shm_range *ranges,
                         int64_t num_ranges, int64_t first, int64_t done) {
  struct iovec into[FSDP_SHM_MAX_RANGES];
  struct iovec from[FSDP_SHM_MAX_RANGES];
  unsigned long num = 0;
  for (int64_t i = first; i < num_ranges; i++) {
    const int64_t skipped = i == first ? done : 0;
    const size_t left = (size_t)(ranges[i].nbytes - skipped);
    into[num] =
        (struct iovec){.iov_base = ranges[i].to + skipped, .iov_len = left};
    from[num++] = range_there(ranges[i].address + (uint64_t)skipped, left);
  }
  return process_vm_readv((pid_t)pid, into, num, from, num, 0);
}

fsdp_status fsdp_shm_priv_read_ranges(fsdp_shm *shm, int64_t peer,
                                      const fsdp_shm_range *ranges,
                                      int64_t num_ranges, bool *read,
                                      fsdp_error *error) {
  fsdp_shm_peer *other = &shm->peers[peer];
  int64_t first = 0; /* range that is not all read */
  int64_t done = 0;  /* bytes of it */
  int code = 0;
  *read = false;
  if (!is_there(other, READ_SEEN_MS)) return FSDP_OK;
  while (first < num_ranges && code == 0) {
    const ssize_t part =
        read_some(other->process.pid, ranges, num_ranges, first, done);
    if (part <= 0) {
      code = part < 0 ? errno : EFAULT;
      continue;
    }
    for (done += part; first < num_ranges && done >= ranges[first].nbytes;) {
      done -= ranges[first++].nbytes;
    }
  }
  /* After the read: a rank says that it fails before it gives memory back. */
  if (atomic_load(&other->segment.header->presence) != FSDP_SHM_HERE ||
      code == ESRCH) {
    return FSDP_OK;
  }
  if (code != 0) {
    return FSDP_FAIL_WITH(FSDP_REMEDY_NO_READING, error, FSDP_BACKEND,
                          "rank %" PRId64
                          " cannot read the memory of rank %" PRId64
                          " (process %" PRId64 "): %s",
                          shm->rank, peer, other->process.pid, strerror(code));
  }
  *read = true;
  return FSDP_OK;
}

fsdp_status fsdp_shm_priv_read_peer(fsdp_shm *shm, int64_t peer,
                                    uint64_t address, void *to, int64_t nbytes,
                                    bool *read, fsdp_error *error) {
  const fsdp_shm_range range = {.address = address, .to = to, .nbytes = nbytes};
  return fsdp_shm_priv_read_ranges(shm, peer, &range, nbytes > 0 ? 1 : 0, read,
                                   error);
}

/* Whether the sender is known to write no more into this message's memory. */
static bool withdraw(const fsdp_shm *shm, const fsdp_shm_message *message,
                     int64_t end_ns) {
  fsdp_shm_offer *offer = offer_of(shm, message);
  for (;;) {
    int32_t state = FREE;
    if (atomic_compare_exchange_strong(&offer->lock, &state, WITHDRAWN)) {
      return true;
    }
    if (state == WITHDRAWN) return true;
    const fsdp_shm_process *process = &shm->peers[message->peer].process;
    if (fsdp_shm_priv_process_look(process) == FSDP_SHM_PROCESS_DEAD) {
      return true;
    }
    if (fsdp_shm_priv_now() > end_ns) return false;
    (void)usleep(1000);
  }
}

void fsdp_shm_priv_withdraw_offers(fsdp_shm *shm) {
  const int64_t end_ns =
      fsdp_shm_priv_now() + (int64_t)WITHDRAW_MS * FSDP_SHM_NS_PER_MS;
  for (size_t i = 0; i < shm->num_messages; i++) {
    const fsdp_shm_message *message = &shm->messages[i];
    if (message->is_send || !message->is_offered) continue;
    if (!withdraw(shm, message, end_ns)) shm->has_writers = true;
  }
}
