/*
 * Search for libnccl: which file is taken, and what is wrong with others. The
 * libraries of nccl/wrong_library.c lie beside this program.
 */
#define _POSIX_C_SOURCE 200809L /* readlink, mkdir, symlink */
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "nccl/nccl_library.h"

static const char *file(const char *name) {
  static char path[FSDP_NCCL_PATH_NBYTES];
  const ssize_t length = readlink("/proc/self/exe", path, 400);
  if (!CHECK(length > 0)) exit(1);
  path[length] = 0;
  (void)snprintf(strrchr(path, '/'), 100, "/%s", name);
  return path;
}

/* The error of a forced library. */
static const char *refusal(const char *path) {
  static fsdp_error error;
  const fsdp_nccl_search search = {.forced_path = path};
  fsdp_nccl_library library = {.version = -7};
  error.message[0] = 0;
  CHECK(fsdp_nccl_library_open(&search, &library, &error) == FSDP_BACKEND);
  CHECK_I64(library.version, -7);
  return error.message;
}

static void find_loaded(void *context) {
  const fsdp_nccl_search search = {.wheel_path = "/nowhere"};
  fsdp_nccl_library library = {.version = -7};
  const char *path = file("libwrong_none.so");
  (void)context;
  CHECK(dlopen(path, RTLD_NOW | RTLD_GLOBAL) != NULL);
  CHECK_OK(fsdp_nccl_library_open(&search, &library, NULL));
  CHECK_I64(library.origin, FSDP_NCCL_LOADED);
  CHECK_TEXT(library.path, path);
}

/* NCCL inside another library, or under another name. In a process of its own:
 * what was found once stays loaded. */
TEST(test_symbols_that_are_loaded) {
  check_in_child(find_loaded, NULL);
}

/* Runs before any libnccl.so.2 is loaded, then loads one. */
TEST(test_order_of_places) {
  char folder[] = "/tmp/fsdp_c_nccl_XXXXXX";
  char link[FSDP_NCCL_PATH_NBYTES];
  fsdp_nccl_library library = {.version = -7};
  fsdp_error error;
  if (!CHECK(mkdtemp(folder) != NULL)) return;
  (void)snprintf(link, sizeof link, "%s/libnccl.so.2", folder);
  CHECK(symlink(file("libwrong_soname.so"), link) == 0);

  fsdp_nccl_search search = {.wheel_path = "/nowhere"};
  const bool has_system =
      fsdp_nccl_library_open(&search, &library, &error) == FSDP_OK;
  if (has_system) {
    CHECK(library.origin == FSDP_NCCL_SYSTEM);
  } else {
    CHECK(strstr(error.message,
                 "libnccl.so.2 (already loaded): is not loaded; "
                 "/nowhere/libnccl.so.2 (wheel): ") != NULL);
    CHECK(strstr(error.message, "; libnccl.so.2 (system): ") != NULL);
    search.wheel_path = folder;
    CHECK_OK(fsdp_nccl_library_open(&search, &library, &error));
    CHECK_I64(library.origin, FSDP_NCCL_WHEEL);
    CHECK_TEXT(library.path, link);
    search.wheel_path = link; /* the file itself; loaded now */
    CHECK_OK(fsdp_nccl_library_open(&search, &library, &error));
    CHECK_I64(library.origin, FSDP_NCCL_LOADED);
    CHECK_TEXT(library.path, link);
  }
  CHECK(unlink(link) == 0 && rmdir(folder) == 0);
}

TEST(test_libraries_that_are_refused) {
  CHECK(strstr(refusal("/nowhere/libnccl.so.2"),
               "NCCL cannot be used: /nowhere/libnccl.so.2 (forced): ") !=
        NULL);
  CHECK(strstr(refusal("/nowhere/libnccl.so.2"), "No such file") != NULL);
  CHECK(strstr(refusal("/etc/passwd"), "(forced): ") != NULL);
  CHECK(strstr(refusal("libm.so.6"), "has no function ncclGetVersion") != NULL);
  CHECK(strstr(refusal(file("libwrong_old.so")),
               "is NCCL 2.12.3, older than 2.18, the first whose") != NULL);
  CHECK(strstr(refusal(file("libwrong_failing.so")),
               "ncclGetVersion fails with result 3") != NULL);
  /* A symbol of that name which must not be called. */
  CHECK(strstr(refusal(file("libwrong_data.so")),
               "has no function ncclCommAbort") != NULL);
}

TEST(test_a_usable_library) {
  const fsdp_nccl_search search = {.forced_path = file("libwrong_none.so")};
  fsdp_nccl_library library;
  fsdp_error error;
  char version[32];
  CHECK_OK(fsdp_nccl_library_open(&search, &library, &error));
  CHECK(library.api.all_gather != NULL);
  CHECK(library.api.comm_revoke == NULL);
  CHECK_TEXT(library.path, search.forced_path);
  CHECK_I64(library.origin, FSDP_NCCL_FORCED);
  fsdp_nccl_version_format(library.version, version, sizeof version);
  CHECK_TEXT(version, "2.32.3");
}

TEST(test_names) {
  char version[32];
  fsdp_nccl_version_format(22703, version, sizeof version);
  CHECK_TEXT(version, "2.27.3");
  fsdp_nccl_version_format(2804, version, sizeof version);
  CHECK_TEXT(version, "2.8.4");
  CHECK_TEXT(fsdp_nccl_origin_name(FSDP_NCCL_LOADED), "already loaded");
  CHECK_TEXT(fsdp_nccl_origin_name(FSDP_NCCL_NUM_ORIGINS), "unknown");
}
