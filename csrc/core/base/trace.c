/*
 * Trace ring: appends operations over the oldest and prints the newest.
 */
#include "base/trace.h"

#include <inttypes.h>
#include <stdio.h>

void fsdp_trace_add(fsdp_trace *trace, const char *operation,
                    const char *unit) {
  const int64_t sequence = trace->num_recorded++;
  trace->entries[sequence % FSDP_TRACE_CAPACITY] = (fsdp_trace_entry){
      .sequence = sequence, .operation = operation, .unit = unit};
}

const fsdp_trace_entry *fsdp_trace_last(const fsdp_trace *trace) {
  if (trace->num_recorded == 0) return NULL;
  return &trace->entries[(trace->num_recorded - 1) % FSDP_TRACE_CAPACITY];
}

size_t fsdp_trace_format(const fsdp_trace *trace, int64_t num_entries,
                         char *text, size_t text_nbytes) {
  if (text_nbytes == 0) return 0;
  text[0] = '\0';

  int64_t num_kept = trace->num_recorded;
  if (num_kept > FSDP_TRACE_CAPACITY) num_kept = FSDP_TRACE_CAPACITY;
  if (num_entries > num_kept) num_entries = num_kept;

  size_t written = 0;
  for (int64_t i = trace->num_recorded - num_entries; i < trace->num_recorded;
       i++) {
    const fsdp_trace_entry *entry = &trace->entries[i % FSDP_TRACE_CAPACITY];
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
