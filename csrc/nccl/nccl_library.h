/*
 * Finds libnccl at run time: the copy that is in the process already (torch's,
 * so that there are not two), the one in the NCCL wheel, the system's.
 */
#ifndef FSDP_NCCL_LIBRARY_H
#define FSDP_NCCL_LIBRARY_H

#include "base/status.h"
#include "nccl/nccl_abi.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum fsdp_nccl_origin {
  FSDP_NCCL_FORCED = 0, /* the file that the caller insisted on */
  FSDP_NCCL_LOADED,     /* was in the process */
  FSDP_NCCL_WHEEL,      /* the file that the caller proposed */
  FSDP_NCCL_SYSTEM,     /* found by the dynamic linker */
  FSDP_NCCL_NUM_ORIGINS
} fsdp_nccl_origin;

enum { FSDP_NCCL_PATH_NBYTES = 512 };

typedef struct fsdp_nccl_library {
  fsdp_nccl_api api;
  int version; /* 22703 is 2.27.3 */
  fsdp_nccl_origin origin;
  char path[FSDP_NCCL_PATH_NBYTES]; /* of the file in use, cut when longer */
} fsdp_nccl_library;

typedef struct fsdp_nccl_search {
  const char *forced_path; /* use this file or none; NULL: search */
  const char *wheel_path;  /* file, or folder of libnccl.so.2; may be NULL */
} fsdp_nccl_search;

/*
 * Opens libnccl and fills the table of its entry points. A library without a
 * function that the transport needs, or older than
 * FSDP_NCCL_OLDEST_VERSION (the first with a non-blocking configuration of the
 * layout in nccl_abi.h), is refused; the search goes on with the next place,
 * the error tells all of them. A library in use stays loaded for good.
 *
 * library  [out] written on success.
 *
 * FSDP_BACKEND  no usable library; names each place and what is wrong there.
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
