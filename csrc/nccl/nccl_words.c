/*
 * Positions: after a failure the ranks exchange through the store where they
 * were, and which of them failed first. See Note [NCCL failures].
 */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "nccl/nccl_priv.h"

enum {
  MAX_MISSING = 8,   /* ranks without a position that are listed */
  MAX_ASKED = 64,    /* ranks whose positions are read */
  FIRST_PAUSE_MS = 5 /* between rounds of reading, doubled each time */
};

/* A message that is put together piece by piece, and truncated. */
typedef struct message {
  char *at;
  size_t nbytes; /* of free space, terminator included */
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

static const char *kind_of(const fsdp_nccl_transport *transport,
                           fsdp_channel channel) {
  if (!transport->options.splits_channels) return "collectives";
  return channel == FSDP_CHANNEL_GATHER ? "gathers" : "reductions";
}

void fsdp_nccl_priv_format_operation(const fsdp_nccl_transport *transport,
                                     fsdp_channel channel,
                                     const fsdp_nccl_operation *operation,
                                     char *out, size_t out_nbytes) {
  message result = {out, out_nbytes};
  const char *kind = kind_of(transport, channel);
  if (operation->sequence == 0) {
    append(&result, "the start of the %s", kind);
    return;
  }
  append(&result, "operation %" PRId64 " of the %s (%s)", operation->sequence,
         kind, operation->label[0] == 0 ? operation->name : operation->label);
}

void fsdp_nccl_priv_format_position(fsdp_nccl_transport *transport, char *out,
                                    size_t out_nbytes) {
  message result = {out, out_nbytes};
  const int num_channels =
      transport->options.splits_channels ? FSDP_NUM_CHANNELS : 1;
  out[0] = 0;
  for (int i = 0; i < num_channels; i++) {
    char operation[FSDP_NCCL_LABEL_NBYTES + 64];
    (void)pthread_mutex_lock(&transport->lock);
    const fsdp_nccl_operation last = transport->channels[i].last;
    (void)pthread_mutex_unlock(&transport->lock);
    fsdp_nccl_priv_format_operation(transport, (fsdp_channel)i, &last,
                                    operation, sizeof operation);
    append(&result, "%s%s", i == 0 ? "at " : ", ", operation);
  }
}

static void format_key(const fsdp_nccl_transport *transport, int64_t rank,
                       char *key) {
  (void)snprintf(key, FSDP_NCCL_KEY_NBYTES, "%s/words/%" PRId64,
                 transport->options.prefix, rank);
}

/* Reads a text from the store. False if it is not there in time. */
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

bool fsdp_nccl_priv_read_failure(const fsdp_nccl_transport *transport,
                                 char *cause, size_t cause_nbytes) {
  char key[FSDP_NCCL_KEY_NBYTES];
  (void)snprintf(key, sizeof key, "%s/failed", transport->options.prefix);
  return read_text(transport, key, 0, cause, cause_nbytes);
}

bool fsdp_nccl_priv_publish(fsdp_nccl_transport *transport,
                            const char *position, const char *cause) {
  const fsdp_store *store = &transport->store;
  char key[FSDP_NCCL_KEY_NBYTES];
  char words[FSDP_NCCL_WORDS_NBYTES];
  int length = snprintf(words, sizeof words, "%s", position);
  format_key(transport, transport->rank, key);
  if (store->set(store->context, key, words, length, NULL) != FSDP_OK) {
    return false;
  }
  /* The first rank to fail matters. Of two at the same moment, either does. */
  if (fsdp_nccl_priv_read_failure(transport, words, sizeof words)) return true;
  (void)snprintf(key, sizeof key, "%s/failed", transport->options.prefix);
  length = snprintf(words, sizeof words, "%s", cause);
  if (length >= (int)sizeof words) length = (int)sizeof words - 1;
  return store->set(store->context, key, words, length, NULL) == FSDP_OK;
}

/* The positions of the first ranks. */
typedef struct answers {
  char words[MAX_ASKED][FSDP_NCCL_WORDS_NBYTES]; /* empty: not there yet */
  int64_t num_asked;                             /* ranks [0, num_asked) */
  int64_t num_missing;
} answers;

/* One read for each rank without a position; none of them waits. */
static void ask(const fsdp_nccl_transport *transport, int64_t deadline_ms,
                answers *all) {
  all->num_missing = 0;
  for (int64_t rank = 0; rank < all->num_asked; rank++) {
    char key[FSDP_NCCL_KEY_NBYTES];
    char *words = all->words[rank];
    if (rank == transport->rank || words[0] != 0) continue;
    format_key(transport, rank, key);
    if (fsdp_nccl_priv_now_ms() > deadline_ms ||
        !read_text(transport, key, 0, words, FSDP_NCCL_WORDS_NBYTES)) {
      all->num_missing++;
    }
  }
}

/* Reads in rounds until all positions are there, or the grace is over. So a
 * rank without a position does not delay the others. */
static void ask_all(const fsdp_nccl_transport *transport, answers *all) {
  const int64_t deadline_ms =
      fsdp_nccl_priv_now_ms() + transport->options.grace_ms;
  int64_t pause_ms = FIRST_PAUSE_MS;
  for (;;) {
    ask(transport, deadline_ms, all);
    const int64_t left_ms = deadline_ms - fsdp_nccl_priv_now_ms();
    if (all->num_missing == 0 || left_ms <= 0) return;
    fsdp_nccl_priv_sleep_ms(pause_ms < left_ms ? pause_ms : left_ms);
    pause_ms *= 2;
  }
}

static void list_missing(const fsdp_nccl_transport *transport,
                         const answers *all, message *out) {
  int64_t num_listed = 0;
  if (all->num_missing == 0) return;
  append(out, " No answer from rank ");
  for (int64_t rank = 0; rank < all->num_asked; rank++) {
    if (rank == transport->rank || all->words[rank][0] != 0) continue;
    if (num_listed++ >= MAX_MISSING) continue;
    append(out, "%s%" PRId64, num_listed == 1 ? "" : ", ", rank);
  }
  append(out, "%s within %" PRId64 " ms.",
         num_listed > MAX_MISSING ? " and more" : "",
         transport->options.grace_ms);
}

void fsdp_nccl_priv_collect(const fsdp_nccl_transport *transport,
                            const char *position, fsdp_error *error) {
  const size_t length = strlen(error->message);
  message out = {error->message + length, sizeof error->message - length};
  int64_t num_same = 0;
  answers *all = fsdp_calloc(1, sizeof *all);
  if (all == NULL) return;
  all->num_asked =
      transport->world_size < MAX_ASKED ? transport->world_size : MAX_ASKED;
  ask_all(transport, all);
  append(&out, ".");
  for (int64_t rank = 0; rank < all->num_asked; rank++) {
    const char *words = all->words[rank];
    if (rank == transport->rank || words[0] == 0) continue;
    if (strcmp(words, position) == 0) {
      num_same++;
    } else {
      append(&out, " Rank %" PRId64 " is %s.", rank, words);
    }
  }
  append(&out, " This rank is %s", position);
  if (num_same == 1) append(&out, ", as is 1 other");
  if (num_same > 1) append(&out, ", as are %" PRId64 " others", num_same);
  append(&out, ".");
  list_missing(transport, all, &out);
  if (transport->world_size > MAX_ASKED) {
    append(&out, " Ranks from %d on were not asked.", MAX_ASKED);
  }
  fsdp_free(all);
}
