/*
 * Status codes and the error record: how every room says that a call failed.
 *
 * A function that can fail returns fsdp_status and takes `fsdp_error *error`
 * as its last parameter. The caller owns the record and may pass NULL. It is
 * written only on failure, and out-parameters are untouched on failure.
 */
#ifndef FSDP_BASE_STATUS_H
#define FSDP_BASE_STATUS_H

#include "base/remedy.h"

#if defined(__GNUC__)
#define FSDP_NODISCARD __attribute__((warn_unused_result))
#define FSDP_PRINTF(text, first) __attribute__((format(printf, text, first)))
#else
#define FSDP_NODISCARD
#define FSDP_PRINTF(text, first)
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum fsdp_status {
  FSDP_OK = 0,
  FSDP_INVALID_ARGUMENT, /* the caller passed an impossible value */
  FSDP_INVALID_STATE,    /* the right call at the wrong moment */
  FSDP_OVERFLOW,         /* a size does not fit in int64_t */
  FSDP_OUT_OF_MEMORY,    /* host or device memory */
  FSDP_BACKEND,          /* the provider (ATen, c10d, NCCL) reported an error */
  FSDP_INTERNAL,         /* our own bug */
  FSDP_NUM_STATUSES
} fsdp_status;

enum { FSDP_ERROR_MESSAGE_NBYTES = 1024 };

typedef struct fsdp_error {
  fsdp_status status;
  int line;
  const char *file; /* static string */
  char message[FSDP_ERROR_MESSAGE_NBYTES];
  fsdp_remedy remedy; /* not told in the message */
} fsdp_error;

/* Makes `error` say that nothing failed. The text is emptied, not cleared: a
 * record is 1 KiB, and a step makes one in every call. */
static inline void fsdp_error_clear(fsdp_error *error) {
  error->status = FSDP_OK;
  error->line = 0;
  error->file = 0;
  error->message[0] = '\0';
  error->remedy = FSDP_REMEDY_NONE;
}

/* Declares a record in which nothing has failed. */
#define FSDP_LOCAL_ERROR(name) \
  fsdp_error name;             \
  fsdp_error_clear(&name)

/* Fills `error` (may be NULL) and returns `status`. A message that is too long
 * is cut. */
fsdp_status fsdp_error_set(fsdp_error *error, fsdp_status status,
                           fsdp_remedy remedy, const char *file, int line,
                           const char *format, ...) FSDP_PRINTF(6, 7);

/* So that a caller can write `return FSDP_FAIL(...)`. The value is the constant
 * itself, which lets compilers and analysers follow the failure. */
#define FSDP_FAIL(error, status, ...) \
  FSDP_FAIL_WITH(FSDP_REMEDY_NONE, error, status, __VA_ARGS__)

/* Likewise, with what the caller can do about it. */
#define FSDP_FAIL_WITH(remedy, error, status, ...)                       \
  ((void)fsdp_error_set((error), (status), (remedy), __FILE__, __LINE__, \
                        __VA_ARGS__),                                    \
   (status))

/* Runs `call`; on failure stores its code in the local `status` and leaves
 * through the function's one exit label `done`. */
#define FSDP_TRY(call)                \
  do {                                \
    status = (call);                  \
    if (status != FSDP_OK) goto done; \
  } while (0)

/* Drops the outcome of `call`: in clean-up, which must go on, and where a later
 * call reports the same. */
#define FSDP_IGNORE(call) ((void)!(call))

#ifdef __cplusplus
}
#endif
#endif /* FSDP_BASE_STATUS_H */
