/*
 * Trace ring: the last operations of one engine, kept for error messages and
 * for the report of a hang. Fixed size, no allocation, overwrites the oldest.
 */
#ifndef FSDP_BASE_TRACE_H
#define FSDP_BASE_TRACE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { FSDP_TRACE_CAPACITY = 64 };

typedef struct fsdp_trace_entry {
  int64_t sequence;      /* 0, 1, 2, ... over the engine's life */
  const char *operation; /* static string, "all_gather" */
  const char *unit;      /* borrowed: the unit's name outlives the engine */
} fsdp_trace_entry;

typedef struct fsdp_trace {
  fsdp_trace_entry entries[FSDP_TRACE_CAPACITY];
  int64_t
      num_recorded; /* all-time; entries hold the last FSDP_TRACE_CAPACITY */
} fsdp_trace;

/* Appends one operation. Cannot fail. */
void fsdp_trace_add(fsdp_trace *trace, const char *operation, const char *unit);

/* The newest entry, or NULL when nothing was recorded. Borrowed. */
const fsdp_trace_entry *fsdp_trace_last(const fsdp_trace *trace);

/* Writes the newest `num_entries`, oldest first, one "sequence operation unit"
 * per line, into `text` (always terminated, cut when too long). Returns the
 * number of characters written. */
size_t fsdp_trace_format(const fsdp_trace *trace, int64_t num_entries,
                         char *text, size_t text_nbytes);

#ifdef __cplusplus
}
#endif
#endif /* FSDP_BASE_TRACE_H */
