/*
 * A NCCL that only writes down its calls: the table of entry points, a store
 * in memory and events for tests of the transport. Knows what is wrong with a
 * call (a communicator after its end, or in the hands of two threads, a group
 * left open) and says "WRONG" on the tape. One per process; any thread may
 * call.
 */
#ifndef FSDP_TESTS_NCCL_FAKE_H
#define FSDP_TESTS_NCCL_FAKE_H

#include <stdbool.h>
#include <stdint.h>

#include "nccl/nccl_transport.h"

/* Back to nothing: no communicators, empty store and tape, no injection. */
void nccl_fake_reset(void);

/* The table, with every optional entry point. A copy may be changed. */
fsdp_nccl_library nccl_fake_library(void);

/* Lines like "all_gather 1 u8 16 +0 +0 s1": communicator 1, 16 elements, sends
 * from byte 0 of the base, receives there, on stream 1. Borrowed, until the
 * next call of the fake. */
const char *nccl_fake_tape(void);
void nccl_fake_clear_tape(void);
/* Where the offsets on the tape count from. */
void nccl_fake_set_base(const void *base);
/* The stream that the tape shows as "s<number>". */
void *nccl_fake_stream(intptr_t number);

/* NCCL call number `index` from now (0 = the next) returns `result`; -1: none.
 * Polls of errors count when `with_polls`. */
void nccl_fake_fail_at(int64_t index, int result, bool with_polls);
/* Whether the injected failure came to pass. */
bool nccl_fake_has_failed(void);
typedef enum nccl_fake_setting {
  NCCL_FAKE_NON_BLOCKING = 0, /* as with NCCL_COMM_BLOCKING=0 */
  NCCL_FAKE_ASYNC_ERROR,      /* what every poll says */
  /* Collectives block until their communicator is aborted (then they succeed)
   * or revoked (then they do not). */
  NCCL_FAKE_BLOCKING,
  NCCL_FAKE_ABORTS_AWAITED, /* aborts wait until so many have begun */
  NCCL_FAKE_INITS_WAIT,     /* so many communicators, the first, are not made */
  NCCL_FAKE_GRAPHS_LIVE,    /* finalizing waits until there are none */
  NCCL_FAKE_EVENTS_HELD,    /* none is done */
  NCCL_FAKE_STORE_HELD,     /* every call of the store waits */
  NCCL_FAKE_STORE_BROKEN,   /* every call of the store fails */
  NCCL_FAKE_NUM_SETTINGS
} nccl_fake_setting;

/* 0 at first. */
void nccl_fake_set(nccl_fake_setting setting, int64_t value);

typedef enum nccl_fake_count {
  NCCL_FAKE_POLLS = 0, /* of errors */
  NCCL_FAKE_ABORTS,
  NCCL_FAKE_STORE_CALLS,
  NCCL_FAKE_NUM_COUNTS
} nccl_fake_count;

int64_t nccl_fake_num(nccl_fake_count count);

/* Of the last communicator that was made; net_name is "" for none. */
fsdp_nccl_config nccl_fake_config(void);

/* Communicators that were made, and not aborted or destroyed since. */
int64_t nccl_fake_num_live(void);

/* The store. Call number `index` from now fails; -1: none. */
fsdp_store nccl_fake_store(void);
void nccl_fake_store_fail_at(int64_t index);
/* The store's text for `key`, or "". Borrowed as the tape. */
const char *nccl_fake_store_text(const char *key);

/* Events. Recorded ones are done at once unless NCCL_FAKE_EVENTS_HELD. */
fsdp_nccl_events nccl_fake_events(void);
void nccl_fake_event_fail_at(int64_t index);
/* Queries fail with `text` from now on; NULL: no more. */
void nccl_fake_event_set_error(const char *text);
int64_t nccl_fake_num_events(void); /* not destroyed */

/* Between true and false the watchdog looks at nothing, so that a slow machine
 * does not make the test's own calls exceed a time limit. Needs a watchdog that
 * looks often, and transports with these events. */
void nccl_fake_hold_watchdog(bool is_held);

#endif /* FSDP_TESTS_NCCL_FAKE_H */
