/*
 * The end of a transport: the first error is kept, the communicators are
 * aborted, the ranks tell each other in the store where they were. See Note
 * [NCCL failures].
 */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "nccl/nccl_priv.h"

enum {
  BUSY_MS = 200,          /* for a thread inside NCCL to come out */
  REVOKED_BUSY_MS = 2000, /* the same once NCCL was told to stop */
  MORE_MS = 1000,         /* beyond grace_ms, for the abort itself */
  LOOK_MS = 1000,         /* between looks for another rank's failure */
  MAX_MISSING = 8         /* ranks without an answer that are listed */
};

/* A message that is put together piece by piece; what is too long is cut. */
typedef struct message {
  char *at;
  size_t nbytes; /* left, terminator included */
} message;

FSDP_PRINTF(2, 3)
static void append(message *out, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const int length = vsnprintf(out->at, out->nbytes, format, arguments);
  va_end(arguments);
  if (length < 0 || out->nbytes == 0) return;
  const size_t written =
      (size_t)length < out->nbytes ? (size_t)length : out->nbytes - 1;
  out->at += written;
  out->nbytes -= written;
}

void fsdp_nccl_priv_format_operation(fsdp_channel channel,
                                     const fsdp_nccl_operation *operation,
                                     char *out, size_t out_nbytes) {
  message result = {out, out_nbytes};
  const char *kind = channel == FSDP_CHANNEL_GATHER ? "gathers" : "reductions";
  if (operation->sequence == 0) {
    append(&result, "the start of the %s", kind);
    return;
  }
  append(&result, "operation %" PRId64 " of the %s (%s)", operation->sequence,
         kind, operation->label[0] == 0 ? operation->name : operation->label);
}

/* Where this rank is: its last operation on both channels. */
static void format_position(fsdp_nccl_transport *transport, char *out,
                            size_t out_nbytes) {
  message result = {out, out_nbytes};
  out[0] = 0;
  for (int i = 0; i < FSDP_NUM_CHANNELS; i++) {
    char operation[FSDP_NCCL_LABEL_NBYTES + 64];
    (void)pthread_mutex_lock(&transport->lock);
    const fsdp_nccl_operation last = transport->channels[i].last;
    (void)pthread_mutex_unlock(&transport->lock);
    fsdp_nccl_priv_format_operation((fsdp_channel)i, &last, operation,
                                    sizeof operation);
    append(&result, "%s%s", i == 0 ? "at " : ", ", operation);
  }
}

static void format_key(const fsdp_nccl_transport *transport, int64_t rank,
                       char *key) {
  (void)snprintf(key, FSDP_NCCL_KEY_NBYTES, "%s/words/%" PRId64,
                 transport->options.prefix, rank);
}

/* Reads a text from the store. False if it does not come in time. */
static bool read_text(const fsdp_nccl_transport *transport, const char *key,
                      int64_t timeout_ms, char *value, size_t value_nbytes) {
  const fsdp_store *store = &transport->store;
  int64_t nbytes = 0;
  if (store->get(store->context, key, timeout_ms, value,
                 (int64_t)value_nbytes - 1, &nbytes, NULL) != FSDP_OK) {
    return false;
  }
  if (nbytes > (int64_t)value_nbytes - 1) nbytes = (int64_t)value_nbytes - 1;
  value[nbytes] = 0;
  return true;
}

/* Tells the others where this rank is and why it ended. False when the store
 * does not take it. */
static bool publish(fsdp_nccl_transport *transport, const char *position,
                    const char *cause) {
  const fsdp_store *store = &transport->store;
  char key[FSDP_NCCL_KEY_NBYTES];
  char words[FSDP_NCCL_WORDS_NBYTES];
  int length = snprintf(words, sizeof words, "%s", position);
  format_key(transport, transport->rank, key);
  if (store->set(store->context, key, words, length, NULL) != FSDP_OK) {
    return false;
  }
  /* The first rank to fail is the one that matters. Two at the same moment:
   * either will do. */
  (void)snprintf(key, sizeof key, "%s/failed", transport->options.prefix);
  if (read_text(transport, key, 0, words, sizeof words)) return true;
  length = snprintf(words, sizeof words, "%s", cause);
  if (length >= (int)sizeof words) length = (int)sizeof words - 1;
  return store->set(store->context, key, words, length, NULL) == FSDP_OK;
}

/* Waits under the lock for the channel to be out of use. */
static bool wait_until_free(fsdp_nccl_transport *transport,
                            const fsdp_nccl_channel *channel, int64_t time_ms) {
  const int64_t deadline_ms = fsdp_nccl_priv_now_ms() + time_ms;
  while (channel->is_busy && fsdp_nccl_priv_now_ms() < deadline_ms) {
    fsdp_nccl_priv_cond_wait(&transport->changed, &transport->lock,
                             deadline_ms);
  }
  return !channel->is_busy;
}

/*
 * Note [Aborting under a call]
 * A thread can be stuck inside an NCCL call because the device's queue is full
 * behind the very collective that hangs. It comes out when the collective is
 * stopped: ncclCommRevoke does that without freeing anything, where it exists.
 * Elsewhere, and if that does not help, the communicator is aborted under the
 * call, as c10d does: better than a process that hangs for good. Only the one
 * thread that moved the phase from HEALTHY comes here, so each communicator is
 * aborted once.
 */
static void abort_channel(fsdp_nccl_transport *transport, int index, int held) {
  fsdp_nccl_channel *channel = &transport->channels[index];
  (void)pthread_mutex_lock(&transport->lock);
  if (index != held && !wait_until_free(transport, channel, BUSY_MS) &&
      transport->api.comm_revoke != NULL && channel->comm != NULL) {
    (void)pthread_mutex_unlock(&transport->lock);
    (void)transport->api.comm_revoke(channel->comm, 0); /* abort follows */
    (void)pthread_mutex_lock(&transport->lock);
    (void)wait_until_free(transport, channel, REVOKED_BUSY_MS);
  }
  fsdp_nccl_comm *comm = channel->comm;
  channel->comm = NULL;
  channel->num_outstanding = 0; /* none of them will be heard of again */
  (void)pthread_mutex_unlock(&transport->lock);
  if (comm != NULL) (void)transport->api.comm_abort(comm); /* nothing to add */
}

/* Appends what the other ranks say to the first error. */
static void collect(fsdp_nccl_transport *transport, const char *position,
                    message *out) {
  const int64_t deadline_ms =
      fsdp_nccl_priv_now_ms() + transport->options.grace_ms;
  char missing_text[128];
  message missing = {missing_text, sizeof missing_text};
  int64_t num_missing = 0;
  int64_t num_same = 0;
  missing_text[0] = 0;
  for (int64_t rank = 0; rank < transport->world_size; rank++) {
    char key[FSDP_NCCL_KEY_NBYTES];
    char words[FSDP_NCCL_WORDS_NBYTES];
    int64_t left_ms = deadline_ms - fsdp_nccl_priv_now_ms();
    if (left_ms < 0) left_ms = 0;
    if (rank == transport->rank) continue;
    format_key(transport, rank, key);
    if (!read_text(transport, key, left_ms, words, sizeof words)) {
      if (num_missing++ < MAX_MISSING) {
        append(&missing, "%s%" PRId64, num_missing == 1 ? "" : ", ", rank);
      }
    } else if (strcmp(words, position) == 0) {
      num_same++;
    } else {
      append(out, " Rank %" PRId64 " is %s.", rank, words);
    }
  }
  append(out, " This rank is %s", position);
  if (num_same == 1) append(out, ", as is 1 other");
  if (num_same > 1) append(out, ", as are %" PRId64 " others", num_same);
  append(out, ".");
  if (num_missing == 0) return;
  append(out, " No answer from rank %s%s within %" PRId64 " ms.", missing_text,
         num_missing > MAX_MISSING ? " and more" : "",
         transport->options.grace_ms);
}

fsdp_status fsdp_nccl_priv_fail(fsdp_nccl_transport *transport, int held,
                                const fsdp_error *cause, fsdp_error *error) {
  char position[FSDP_NCCL_WORDS_NBYTES];
  fsdp_error final = *cause;

  (void)pthread_mutex_lock(&transport->lock);
  const bool is_first = transport->phase == FSDP_NCCL_HEALTHY;
  if (is_first) {
    transport->phase = FSDP_NCCL_FAILING;
    transport->error = *cause;
    (void)pthread_cond_broadcast(&transport->changed);
  }
  (void)pthread_mutex_unlock(&transport->lock);
  if (!is_first) return fsdp_nccl_priv_first_error(transport, false, error);

  format_position(transport, position, sizeof position);
  const bool is_published =
      transport->world_size > 1 && publish(transport, position, cause->message);
  for (int i = 0; i < FSDP_NUM_CHANNELS; i++) {
    abort_channel(transport, i, held);
  }

  const size_t length = strlen(final.message);
  message sink = {final.message + length, sizeof final.message - length};
  if (is_published) {
    append(&sink, ".");
    collect(transport, position, &sink);
  } else if (transport->world_size > 1) {
    append(&sink,
           ". What the other ranks did is not known: the group's store does "
           "not answer. This rank is %s.",
           position);
  }
  (void)pthread_mutex_lock(&transport->lock);
  transport->error = final;
  transport->phase = FSDP_NCCL_FAILED;
  (void)pthread_cond_broadcast(&transport->changed);
  (void)pthread_mutex_unlock(&transport->lock);
  return fsdp_nccl_priv_first_error(transport, false, error);
}

fsdp_status fsdp_nccl_priv_fail_result(fsdp_nccl_transport *transport,
                                       fsdp_channel index, int held,
                                       const char *what, int result,
                                       fsdp_error *error) {
  const fsdp_nccl_api *api = &transport->api;
  fsdp_error cause;
  char operation[FSDP_NCCL_LABEL_NBYTES + 64];
  char said[320] = "";
  const char *name = api->get_error_string(result);
  (void)pthread_mutex_lock(&transport->lock);
  const fsdp_nccl_channel *channel = &transport->channels[index];
  const fsdp_nccl_operation issued = channel->last;
  if (api->get_last_error != NULL && transport->phase == FSDP_NCCL_HEALTHY) {
    const char *last = api->get_last_error(channel->comm);
    if (last != NULL) (void)snprintf(said, sizeof said, "%s", last);
  }
  (void)pthread_mutex_unlock(&transport->lock);

  fsdp_nccl_priv_format_operation(index, &issued, operation, sizeof operation);
  (void)FSDP_FAIL(&cause, FSDP_BACKEND,
                  "rank %" PRId64 " of %" PRId64
                  ": %s failed at %s with NCCL result %d (%s%s%s)",
                  transport->rank, transport->world_size, what, operation,
                  result, name == NULL ? "unknown" : name,
                  said[0] == 0 ? "" : ": ", said);
  return fsdp_nccl_priv_fail(transport, held, &cause, error);
}

fsdp_status fsdp_nccl_priv_first_error(fsdp_nccl_transport *transport,
                                       bool waits, fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  (void)pthread_mutex_lock(&transport->lock);
  if (waits && transport->phase == FSDP_NCCL_FAILING) {
    const int64_t deadline_ms =
        fsdp_nccl_priv_now_ms() + transport->options.grace_ms + MORE_MS;
    while (transport->phase == FSDP_NCCL_FAILING &&
           fsdp_nccl_priv_now_ms() < deadline_ms) {
      fsdp_nccl_priv_cond_wait(&transport->changed, &transport->lock,
                               deadline_ms);
    }
  }
  if (transport->phase != FSDP_NCCL_HEALTHY) {
    status = transport->error.status;
    if (error != NULL) *error = transport->error;
  }
  (void)pthread_mutex_unlock(&transport->lock);
  return status;
}

void fsdp_nccl_priv_look_at_others(fsdp_nccl_transport *transport, int held) {
  char key[FSDP_NCCL_KEY_NBYTES];
  char words[FSDP_NCCL_WORDS_NBYTES];
  fsdp_error cause;
  const int64_t now_ms = fsdp_nccl_priv_now_ms();
  (void)pthread_mutex_lock(&transport->lock);
  const bool is_due = transport->phase == FSDP_NCCL_HEALTHY &&
                      now_ms - transport->last_look_ms >= LOOK_MS;
  if (is_due) transport->last_look_ms = now_ms;
  (void)pthread_mutex_unlock(&transport->lock);
  if (!is_due) return;
  (void)snprintf(key, sizeof key, "%s/failed", transport->options.prefix);
  if (!read_text(transport, key, 0, words, sizeof words)) return;
  (void)FSDP_FAIL(&cause, FSDP_BACKEND,
                  "rank %" PRId64 " of %" PRId64
                  " ends because another rank failed: %s",
                  transport->rank, transport->world_size, words);
  (void)fsdp_nccl_priv_fail(transport, held, &cause, NULL); /* kept there */
}
