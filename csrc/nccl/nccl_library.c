/*
 * Finds libnccl and fills the table of its entry points.
 */
#include "nccl/nccl_library.h"

#include <dlfcn.h>
#include <elf.h>
#include <inttypes.h>
#include <link.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { REASON_NBYTES = 256, REASONS_NBYTES = 832 };

typedef struct entry_point {
  const char *name;
  size_t offset; /* of the pointer in fsdp_nccl_api */
  bool is_optional;
} entry_point;

#define REQUIRED(member, name) {name, offsetof(fsdp_nccl_api, member), false}
#define OPTIONAL(member, name) {name, offsetof(fsdp_nccl_api, member), true}

static const entry_point ENTRY_POINTS[] = {
    REQUIRED(get_version, "ncclGetVersion"),
    REQUIRED(get_unique_id, "ncclGetUniqueId"),
    REQUIRED(comm_init_rank_config, "ncclCommInitRankConfig"),
    REQUIRED(comm_get_async_error, "ncclCommGetAsyncError"),
    REQUIRED(comm_finalize, "ncclCommFinalize"),
    REQUIRED(comm_destroy, "ncclCommDestroy"),
    REQUIRED(comm_abort, "ncclCommAbort"),
    REQUIRED(get_error_string, "ncclGetErrorString"),
    REQUIRED(group_start, "ncclGroupStart"),
    REQUIRED(group_end, "ncclGroupEnd"),
    REQUIRED(all_gather, "ncclAllGather"),
    REQUIRED(reduce_scatter, "ncclReduceScatter"),
    REQUIRED(all_reduce, "ncclAllReduce"),
    REQUIRED(broadcast, "ncclBroadcast"),
    OPTIONAL(get_last_error, "ncclGetLastError"),
    OPTIONAL(comm_revoke, "ncclCommRevoke"),
};

#undef REQUIRED
#undef OPTIONAL

const char *fsdp_nccl_origin_name(fsdp_nccl_origin origin) {
  static const char *const names[] = {"forced", "already loaded", "wheel",
                                      "system"};
  if ((unsigned)origin >= (unsigned)FSDP_NCCL_NUM_ORIGINS) return "unknown";
  return names[origin];
}

void fsdp_nccl_version_format(int version, char *text, size_t text_nbytes) {
  /* Up to 2.8 the minor version had one digit less. */
  const int base = version < 10000 ? 1000 : 10000;
  (void)snprintf(text, text_nbytes, "%d.%d.%d", version / base,
                 version % base / 100, version % 100);
}

/* The address of function `name`, or NULL; also NULL when the symbol is data,
 * which must not be called. */
static void *find_function(void *handle, const char *name) {
  void *address = dlsym(handle, name);
  Dl_info info;
  ElfW(Sym) *symbol = NULL;
  if (address == NULL) return NULL;
  if (dladdr1(address, &info, (void **)&symbol, RTLD_DL_SYMENT) == 0 ||
      symbol == NULL) {
    return address; /* in no symbol table: accepted */
  }
  const int type = symbol->st_info & 0xf;
  return type == STT_FUNC || type == STT_GNU_IFUNC ? address : NULL;
}

/* Fills `library` from `handle`. False, with a `reason`, when the transport
 * cannot use that NCCL. */
static bool fill_library(void *handle, fsdp_nccl_library *library,
                         char *reason) {
  const size_t num = sizeof ENTRY_POINTS / sizeof ENTRY_POINTS[0];
  for (size_t i = 0; i < num; i++) {
    const entry_point *entry = &ENTRY_POINTS[i];
    void *address = find_function(handle, entry->name);
    if (address == NULL && !entry->is_optional) {
      (void)snprintf(reason, REASON_NBYTES, "has no function %s", entry->name);
      return false;
    }
    /* memcpy: C has no cast between data and function pointers. */
    memcpy((char *)&library->api + entry->offset, &address, sizeof address);
  }

  const int result = library->api.get_version(&library->version);
  if (result != FSDP_NCCL_SUCCESS) {
    (void)snprintf(reason, REASON_NBYTES, "ncclGetVersion fails with result %d",
                   result);
    return false;
  }
  if (library->version < FSDP_NCCL_OLDEST_VERSION) {
    char text[32];
    fsdp_nccl_version_format(library->version, text, sizeof text);
    (void)snprintf(reason, REASON_NBYTES,
                   "is NCCL %s, older than 2.18, the first whose communicators "
                   "can be configured as this transport needs",
                   text);
    return false;
  }

  void *address = NULL;
  Dl_info info;
  memcpy(&address, &library->api.get_version, sizeof address);
  const bool is_known = dladdr(address, &info) != 0 && info.dli_fname != NULL;
  (void)snprintf(library->path, sizeof library->path, "%s",
                 is_known ? info.dli_fname : "?");
  return true;
}

/* Opens `name` and fills `library`. Appends the reason of a failure to
 * `reasons`. */
static bool try_open(const char *name, int flags, fsdp_nccl_origin origin,
                     fsdp_nccl_library *library, char *reasons) {
  char reason[REASON_NBYTES] = "";
  fsdp_nccl_library found = {.origin = origin};
  void *handle = dlopen(name, RTLD_NOW | RTLD_LOCAL | flags);
  if (handle == NULL) {
    const char *text = dlerror();
    if (flags != 0) text = "is not loaded";
    (void)snprintf(reason, sizeof reason, "%s",
                   text == NULL ? "cannot be opened" : text);
  } else if (fill_library(handle, &found, reason)) {
    *library = found;
    return true;
  } else {
    (void)dlclose(handle); /* a failure leaves it loaded, which is harmless */
  }
  const size_t used = strlen(reasons);
  (void)snprintf(reasons + used, REASONS_NBYTES - used, "%s%s (%s): %s",
                 used == 0 ? "" : "; ", name, fsdp_nccl_origin_name(origin),
                 reason);
  return false;
}

/* Tries a libnccl that is linked into another library, or was loaded under
 * another name. */
static bool try_loaded_symbols(fsdp_nccl_library *library) {
  char reason[REASON_NBYTES];
  fsdp_nccl_library found = {.origin = FSDP_NCCL_LOADED};
  if (dlsym(RTLD_DEFAULT, "ncclGetVersion") == NULL) return false;
  if (!fill_library(RTLD_DEFAULT, &found, reason)) return false;
  *library = found;
  return true;
}

/* Tries the file `path`, or the library `name` in the folder `path`. */
static bool try_wheel(const char *path, const char *name,
                      fsdp_nccl_library *library, char *reasons) {
  char file[FSDP_NCCL_PATH_NBYTES];
  if (strstr(path, ".so") != NULL) {
    return try_open(path, 0, FSDP_NCCL_WHEEL, library, reasons);
  }
  const int length = snprintf(file, sizeof file, "%s/%s", path, name);
  if (length < 0 || (size_t)length >= sizeof file) return false;
  return try_open(file, 0, FSDP_NCCL_WHEEL, library, reasons);
}

fsdp_status fsdp_nccl_library_open(const fsdp_nccl_search *search,
                                   fsdp_nccl_library *library,
                                   fsdp_error *error) {
  static const char name[] = "libnccl.so.2";
  char reasons[REASONS_NBYTES] = "";

  if (search->forced_path != NULL) {
    if (try_open(search->forced_path, 0, FSDP_NCCL_FORCED, library, reasons)) {
      return FSDP_OK;
    }
    return FSDP_FAIL(error, FSDP_BACKEND, "NCCL cannot be used: %s", reasons);
  }
  if (try_open(name, RTLD_NOLOAD, FSDP_NCCL_LOADED, library, reasons) ||
      try_loaded_symbols(library)) {
    return FSDP_OK;
  }
  if (search->wheel_path != NULL &&
      try_wheel(search->wheel_path, name, library, reasons)) {
    return FSDP_OK;
  }
  if (try_open(name, 0, FSDP_NCCL_SYSTEM, library, reasons)) return FSDP_OK;
  return FSDP_FAIL(error, FSDP_BACKEND,
                   "no usable NCCL was found; tried %s. Install torch with "
                   "CUDA, or the package of NCCL for your CUDA",
                   reasons);
}
