/*
 * Log of operations: appends over the oldest entry and prints the newest ones.
 */
#include "base/op_log.h"

#include <inttypes.h>
#include <stdio.h>

void fsdp_op_log_add(fsdp_op_log *log, const char *operation,
                     const char *unit) {
  const int64_t sequence = log->num_recorded++;
  log->entries[sequence % FSDP_OP_LOG_CAPACITY] = (fsdp_op_log_entry){
      .sequence = sequence, .operation = operation, .unit = unit};
}

const fsdp_op_log_entry *fsdp_op_log_last(const fsdp_op_log *log) {
  if (log->num_recorded == 0) return NULL;
  return &log->entries[(log->num_recorded - 1) % FSDP_OP_LOG_CAPACITY];
}

size_t fsdp_op_log_format(const fsdp_op_log *log, int64_t num_entries,
                          char *text, size_t text_nbytes) {
  if (text_nbytes == 0) return 0;
  text[0] = '\0';

  int64_t num_kept = log->num_recorded;
  if (num_kept > FSDP_OP_LOG_CAPACITY) num_kept = FSDP_OP_LOG_CAPACITY;
  if (num_entries > num_kept) num_entries = num_kept;

  size_t written = 0;
  for (int64_t i = log->num_recorded - num_entries; i < log->num_recorded;
       i++) {
    const fsdp_op_log_entry *entry = &log->entries[i % FSDP_OP_LOG_CAPACITY];
    const size_t room = text_nbytes - written;
    const int length =
        snprintf(text + written, room, "%" PRId64 " %s %s\n", entry->sequence,
                 entry->operation, entry->unit == NULL ? "-" : entry->unit);
    if (length < 0) break;
    if ((size_t)length >= room) return text_nbytes - 1;
    written += (size_t)length;
  }
  return written;
}
