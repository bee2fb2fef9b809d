/*
 * Status names, and filling the caller's error record.
 */
#include "base/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

const char *fsdp_status_name(fsdp_status status) {
  switch (status) {
    case FSDP_OK:
      return "OK";
    case FSDP_INVALID_ARGUMENT:
      return "INVALID_ARGUMENT";
    case FSDP_INVALID_STATE:
      return "INVALID_STATE";
    case FSDP_OVERFLOW:
      return "OVERFLOW";
    case FSDP_OUT_OF_MEMORY:
      return "OUT_OF_MEMORY";
    case FSDP_BACKEND:
      return "BACKEND";
    case FSDP_INTERNAL:
      return "INTERNAL";
    case FSDP_NUM_STATUSES:
      break;
  }
  return "UNKNOWN";
}

fsdp_status fsdp_error_set(fsdp_error *error, fsdp_status status,
                           const char *file, int line, const char *format,
                           ...) {
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
  return status;
}
