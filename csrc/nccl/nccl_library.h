/*
 * Finds libnccl at run time: the copy that torch has loaded, so that there is
 * only one in the process; else the one in the NCCL wheel; else the system's.
 */
#ifndef FSDP_NCCL_LIBRARY_H
#define FSDP_NCCL_LIBRARY_H

#include <stdbool.h>

#include "base/status.h"
#include "nccl/nccl_abi.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum fsdp_nccl_origin {
  FSDP_NCCL_FORCED = 0, /* the file that the caller requires */
  FSDP_NCCL_LOADED,     /* was in the process already */
  FSDP_NCCL_WHEEL,      /* the file that the caller suggests */
  FSDP_NCCL_SYSTEM,     /* found by the dynamic linker */
  FSDP_NCCL_NUM_ORIGINS
} fsdp_nccl_origin;

enum { FSDP_NCCL_PATH_NBYTES = 512 };

typedef struct fsdp_nccl_library {
  fsdp_nccl_api api;
  int version; /* 22703 is 2.27.3 */
  fsdp_nccl_origin origin;
  char path[FSDP_NCCL_PATH_NBYTES]; /* of the file in use; truncated */
} fsdp_nccl_library;

typedef struct fsdp_nccl_search {
  const char *forced_path; /* use only this file; NULL: search */
  const char *wheel_path;  /* file, or folder of the library; may be NULL */
} fsdp_nccl_search;

/*
 * Opens libnccl and fills the table of its entry points. A library is refused
 * if it lacks a required function or is older than FSDP_NCCL_OLDEST_VERSION,
 * the first whose configuration has the layout in nccl_abi.h. The search then
 * goes on. A library in use stays loaded.
 *
 * library  [out] written on success.
 *
 * FSDP_BACKEND  no usable library; the message lists each place and its
 * failure.
 */
FSDP_NODISCARD fsdp_status
fsdp_nccl_library_open(const fsdp_nccl_search *search,
                       fsdp_nccl_library *library, fsdp_error *error);

/* "forced", "already loaded", "wheel", "system". Cannot fail. */
const char *fsdp_nccl_origin_name(fsdp_nccl_origin origin);

/* Writes "2.27.3" for 22703. Cannot fail. */
void fsdp_nccl_version_format(int version, char *text, size_t text_nbytes);

#ifdef __cplusplus
}
#endif
#endif /* FSDP_NCCL_LIBRARY_H */
