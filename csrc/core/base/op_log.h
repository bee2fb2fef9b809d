/*
 * Log of operations: the last ones of one engine, kept for error messages and
 * for the report of a hang. A ring of fixed size: no allocation, the newest
 * entry overwrites the oldest.
 */
#ifndef FSDP_BASE_OP_LOG_H
#define FSDP_BASE_OP_LOG_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { FSDP_OP_LOG_CAPACITY = 64 };

typedef struct fsdp_op_log_entry {
  int64_t sequence;      /* 0, 1, 2, ... over the engine's life */
  const char *operation; /* static string, "all_gather" */
  const char *unit;      /* borrowed: the unit's name outlives the engine */
} fsdp_op_log_entry;

typedef struct fsdp_op_log {
  fsdp_op_log_entry entries[FSDP_OP_LOG_CAPACITY];
  int64_t
      num_recorded; /* all-time; entries hold the last FSDP_OP_LOG_CAPACITY */
} fsdp_op_log;

/* Appends one operation. Cannot fail. */
void fsdp_op_log_add(fsdp_op_log *log, const char *operation, const char *unit);

/* The newest entry, or NULL when nothing was recorded. Borrowed. */
const fsdp_op_log_entry *fsdp_op_log_last(const fsdp_op_log *log);

/* Writes the newest `num_entries`, oldest first, one "sequence operation unit"
 * per line, into `text` (always terminated, cut when too long). Returns the
 * number of characters written. */
size_t fsdp_op_log_format(const fsdp_op_log *log, int64_t num_entries,
                          char *text, size_t text_nbytes);

#ifdef __cplusplus
}
#endif
#endif /* FSDP_BASE_OP_LOG_H */
