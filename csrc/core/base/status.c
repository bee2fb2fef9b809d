/*
 * The error record: fills the caller's record.
 */
#include "base/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

fsdp_status fsdp_error_set(fsdp_error *error, fsdp_status status,
                           fsdp_remedy remedy, const char *file, int line,
                           const char *format, ...) {
  if (error == NULL) return status;

  /* Formatted into a copy: an argument may be the record's own message. */
  char message[FSDP_ERROR_MESSAGE_NBYTES];
  va_list arguments;
  va_start(arguments, format);
  const int length = vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  if (length < 0) message[0] = '\0';

  error->status = status;
  error->line = line;
  error->file = file;
  memcpy(error->message, message, sizeof message);
  error->remedy = remedy;
  return status;
}
