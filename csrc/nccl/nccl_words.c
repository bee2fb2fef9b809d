/*
 * Last words: the ranks tell each other in the store where they were when a
 * transport ended, and which of them ended first. See Note [NCCL failures].
 */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "nccl/nccl_priv.h"

enum {
  LOOK_MS = 1000,    /* between looks for another rank's failure */
  MAX_MISSING = 8,   /* ranks without an answer that are listed */
  MAX_ASKED = 64,    /* ranks whose words are read */
  FIRST_PAUSE_MS = 5 /* between rounds of reading, doubled each time */
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

void fsdp_nccl_priv_format_position(fsdp_nccl_transport *transport, char *out,
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
  /* The first rank to fail is the one that matters. Two at the same moment:
   * either will do. */
  (void)snprintf(key, sizeof key, "%s/failed", transport->options.prefix);
  if (read_text(transport, key, 0, words, sizeof words)) return true;
  length = snprintf(words, sizeof words, "%s", cause);
  if (length >= (int)sizeof words) length = (int)sizeof words - 1;
  return store->set(store->context, key, words, length, NULL) == FSDP_OK;
}

/* The words of the ranks that are asked. */
typedef struct answers {
  char words[MAX_ASKED][FSDP_NCCL_WORDS_NBYTES]; /* empty: none so far */
  int64_t num_asked;                             /* ranks 0 to here */
  int64_t num_missing;
} answers;

/* One question to each rank that has not answered; none waits. */
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

/* Rounds of questions until all have answered, or the grace is over: no rank
 * without an answer keeps the others from being asked. */
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

/* An errand. */
static void look(fsdp_nccl_transport *transport, fsdp_channel unused) {
  char key[FSDP_NCCL_KEY_NBYTES];
  char words[FSDP_NCCL_WORDS_NBYTES];
  fsdp_error cause;
  (void)unused;
  (void)snprintf(key, sizeof key, "%s/failed", transport->options.prefix);
  if (!read_text(transport, key, 0, words, sizeof words)) return;
  (void)FSDP_FAIL(&cause, FSDP_BACKEND,
                  "rank %" PRId64 " of %" PRId64
                  " ends because another rank failed: %s",
                  transport->rank, transport->world_size, words);
  (void)fsdp_nccl_priv_fail(transport, &cause, NULL); /* kept there */
}

void fsdp_nccl_priv_look_at_others(fsdp_nccl_transport *transport) {
  const int64_t now_ms = fsdp_nccl_priv_now_ms();
  if (transport->world_size == 1) return;
  if (now_ms - transport->last_look_ms < LOOK_MS) return;
  transport->last_look_ms = now_ms;
  /* While the last look hangs in the store there is no other one. */
  (void)fsdp_nccl_priv_errand_start(transport, FSDP_NCCL_LOOKING, look,
                                    FSDP_CHANNEL_GATHER);
}
