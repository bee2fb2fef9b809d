/*
 * Messages between two ranks: a small ring for each pair and direction, which
 * the sender fills and the receiver empties. A message longer than a slot goes
 * through the ring slot by slot; a long one bypasses the ring (direct.c).
 */
#include <inttypes.h>
#include <string.h>

#include "base/alloc.h"
#include "shm/shm_priv.h"

/* Counts the slots that `sender` filled for `receiver`; written by
 * the sender. */
static _Atomic int64_t *head_of(const fsdp_shm *shm, int64_t sender,
                                int64_t receiver) {
  char *counters =
      fsdp_shm_priv_base(shm, sender) + shm->geometry.message_heads;
  return &((fsdp_shm_counter *)(void *)counters)[receiver].value;
}

/* Counts the slots that `receiver` emptied; written by the receiver. */
static _Atomic int64_t *tail_of(const fsdp_shm *shm, int64_t sender,
                                int64_t receiver) {
  char *counters =
      fsdp_shm_priv_base(shm, receiver) + shm->geometry.message_tails;
  return &((fsdp_shm_counter *)(void *)counters)[sender].value;
}

static int64_t slot_index(int64_t receiver, int64_t slot) {
  return receiver * FSDP_SHM_MESSAGE_SLOTS + slot % FSDP_SHM_MESSAGE_SLOTS;
}

static fsdp_shm_message_header *header_of(const fsdp_shm *shm, int64_t sender,
                                          int64_t receiver, int64_t slot) {
  char *headers =
      fsdp_shm_priv_base(shm, sender) + shm->geometry.message_headers;
  return &(
      (fsdp_shm_message_header *)(void *)headers)[slot_index(receiver, slot)];
}

static char *memory_of(const fsdp_shm *shm, int64_t sender, int64_t receiver,
                       int64_t slot) {
  return fsdp_shm_priv_base(shm, sender) + shm->geometry.messages +
         slot_index(receiver, slot) * shm->geometry.message_slot_nbytes;
}

static size_t next_nbytes(const fsdp_shm *shm,
                          const fsdp_shm_message *message) {
  const int64_t rest = message->nbytes - message->num_done;
  const int64_t slot = shm->geometry.message_slot_nbytes;
  return (size_t)(rest < slot ? rest : slot);
}

static bool is_done(const fsdp_shm_message *message) {
  return message->is_begun && message->num_done == message->nbytes;
}

fsdp_status fsdp_shm_priv_messages_start(fsdp_shm *shm,
                                         const fsdp_shm_message *message,
                                         fsdp_error *error) {
  void *messages = shm->messages;
  const bool is_grown = fsdp_grow(&messages, &shm->message_capacity,
                                  shm->num_messages + 1, sizeof *shm->messages);
  shm->messages = messages;
  if (!is_grown) {
    return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY, "list of %zu messages",
                     shm->num_messages + 1);
  }
  if (shm->num_messages == 0) shm->message_progress_ns = fsdp_shm_priv_now();
  fsdp_shm_message *added = &shm->messages[shm->num_messages++];
  fsdp_shm_peer *peer = &shm->peers[message->peer];
  *added = *message;
  added->sequence = message->is_send ? ++peer->num_sends : ++peer->num_recvs;
  return FSDP_OK;
}

/* ---- Progress ------------------------------------------------------------ */

static bool can_go_on(const fsdp_shm *shm, const fsdp_shm_message *message) {
  const fsdp_shm_peer *peer = &shm->peers[message->peer];
  if (message->is_send) {
    if (message->num_done < message->nbytes && !message->is_begun &&
        fsdp_shm_priv_is_direct(shm, message)) {
      return fsdp_shm_priv_is_offered(shm, message);
    }
    return peer->num_sent -
               atomic_load(tail_of(shm, shm->rank, message->peer)) <
           FSDP_SHM_MESSAGE_SLOTS;
  }
  return atomic_load(head_of(shm, message->peer, shm->rank)) >
         peer->num_received;
}

static void send_slot(fsdp_shm *shm, fsdp_shm_message *message) {
  fsdp_shm_peer *peer = &shm->peers[message->peer];
  const size_t nbytes = next_nbytes(shm, message);
  fsdp_shm_message_header *header =
      header_of(shm, shm->rank, message->peer, peer->num_sent);
  header->nbytes = message->is_begun ? -1 : message->nbytes;
  header->is_written = !message->is_begun && nbytes == 0 && message->nbytes > 0;
  if (nbytes > 0) {
    memcpy(memory_of(shm, shm->rank, message->peer, peer->num_sent),
           message->data + message->num_done, nbytes);
  }
  message->is_begun = true;
  message->num_done += (int64_t)nbytes;
  peer->num_sent++;
  atomic_store(head_of(shm, shm->rank, message->peer), peer->num_sent);
  fsdp_shm_priv_ring(shm, message->peer);
}

/* Sends the next piece of a message, directly or through the ring. */
static void send_piece(fsdp_shm *shm, fsdp_shm_message *message) {
  if (message->num_done < message->nbytes && !message->is_begun &&
      fsdp_shm_priv_is_direct(shm, message)) {
    fsdp_shm_priv_write_direct(shm, message);
  } else {
    send_slot(shm, message);
  }
}

static fsdp_status receive_slot(fsdp_shm *shm, fsdp_shm_message *message,
                                fsdp_error *error) {
  fsdp_shm_peer *peer = &shm->peers[message->peer];
  const fsdp_shm_message_header *header =
      header_of(shm, message->peer, shm->rank, peer->num_received);
  const int64_t sent = header->nbytes;
  if (!message->is_begun && sent != message->nbytes) {
    return FSDP_FAIL(error, FSDP_BACKEND,
                     "rank %" PRId64 " waits for a message of %" PRId64
                     " bytes (%s) and rank %" PRId64 " sent %" PRId64
                     " bytes; both sides must give the same size",
                     shm->rank, message->nbytes, message->label, message->peer,
                     sent);
  }
  if (!message->is_begun && header->is_written) {
    message->num_done = message->nbytes;
  }
  const size_t nbytes = next_nbytes(shm, message);
  if (nbytes > 0) {
    memcpy(message->data + message->num_done,
           memory_of(shm, message->peer, shm->rank, peer->num_received),
           nbytes);
  }
  message->is_begun = true;
  message->num_done += (int64_t)nbytes;
  peer->num_received++;
  atomic_store(tail_of(shm, message->peer, shm->rank), peer->num_received);
  fsdp_shm_priv_ring(shm, message->peer);
  return FSDP_OK;
}

/* Whether message i is the oldest of those to, or from, its rank. */
static bool is_first(const fsdp_shm *shm, size_t i) {
  const fsdp_shm_message *message = &shm->messages[i];
  for (size_t k = 0; k < i; k++) {
    const fsdp_shm_message *other = &shm->messages[k];
    if (other->peer == message->peer && other->is_send == message->is_send) {
      return false;
    }
  }
  return true;
}

static void remove_done(fsdp_shm *shm) {
  size_t num = 0;
  for (size_t i = 0; i < shm->num_messages; i++) {
    const fsdp_shm_message *message = &shm->messages[i];
    if (!is_done(message)) {
      shm->messages[num++] = *message;
    } else if (!message->is_send) {
      shm->peers[message->peer].num_recvs_done++;
    }
  }
  if (num < shm->num_messages && num == 0) {
    fsdp_shm_priv_ring(shm, shm->rank); /* another thread may wait for these */
  }
  shm->num_messages = num;
}

/* The same, during a pass over all messages: cheap, since there may be
 * hundreds. */
static bool is_first_in_pass(fsdp_shm *shm, const fsdp_shm_message *message) {
  fsdp_shm_peer *peer = &shm->peers[message->peer];
  uint64_t *pass = message->is_send ? &peer->send_pass : &peer->recv_pass;
  if (*pass == shm->message_pass) return false;
  *pass = shm->message_pass;
  return true;
}

fsdp_status fsdp_shm_priv_messages_progress(fsdp_shm *shm, fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  bool any_ever = false;
  for (bool any = shm->num_messages > 0; any;) {
    any = false;
    shm->message_pass++;
    for (size_t i = 0; i < shm->num_messages; i++) {
      fsdp_shm_message *message = &shm->messages[i];
      if (!message->is_send) fsdp_shm_priv_offer(shm, message);
      if (!is_first_in_pass(shm, message) || is_done(message)) continue;
      if (!can_go_on(shm, message)) continue;
      if (message->is_send) {
        send_piece(shm, message);
      } else {
        FSDP_TRY(receive_slot(shm, message, error));
      }
      any = any_ever = true;
    }
    if (any) remove_done(shm);
  }
done:
  if (any_ever) shm->message_progress_ns = fsdp_shm_priv_now();
  return status;
}

bool fsdp_shm_priv_messages_wait_for(const fsdp_shm *shm, int64_t peer) {
  for (size_t i = 0; i < shm->num_messages; i++) {
    const fsdp_shm_message *message = &shm->messages[i];
    if (message->peer != peer || !is_first(shm, i)) continue;
    if (!can_go_on(shm, message)) return true;
  }
  return false;
}
