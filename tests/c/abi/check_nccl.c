/*
 * Our declarations of NCCL against a real nccl.h and a real libnccl: types and
 * numbers when it is compiled, symbols when it is linked, the loader and the
 * transport when it runs. Runs where there is no GPU: connecting then fails,
 * with an error and nothing else.
 *
 * NCCL_LIBRARY is the file of libnccl.
 */
#include <nccl.h>

#include "check.h"
#include "nccl/nccl_priv.h"
#include "nccl_fake.h"

/* ---- Types ----------------------------------------------------------------*/

_Static_assert(sizeof(ncclResult_t) == sizeof(int), "results are int");
_Static_assert(sizeof(ncclDataType_t) == sizeof(int), "dtypes are int");
_Static_assert(sizeof(ncclRedOp_t) == sizeof(int), "operators are int");
_Static_assert(sizeof(ncclUniqueId) == sizeof(fsdp_nccl_id), "size of ids");
_Static_assert(_Alignof(ncclUniqueId) == _Alignof(fsdp_nccl_id), "alignment");

#define SAME_NUMBER(ours, theirs) \
  _Static_assert((int)(ours) == (int)(theirs), #ours " is " #theirs)
SAME_NUMBER(FSDP_NCCL_SUCCESS, ncclSuccess);
SAME_NUMBER(FSDP_NCCL_UNHANDLED_CUDA_ERROR, ncclUnhandledCudaError);
SAME_NUMBER(FSDP_NCCL_SYSTEM_ERROR, ncclSystemError);
SAME_NUMBER(FSDP_NCCL_INTERNAL_ERROR, ncclInternalError);
SAME_NUMBER(FSDP_NCCL_INVALID_ARGUMENT, ncclInvalidArgument);
SAME_NUMBER(FSDP_NCCL_INVALID_USAGE, ncclInvalidUsage);
SAME_NUMBER(FSDP_NCCL_REMOTE_ERROR, ncclRemoteError);
SAME_NUMBER(FSDP_NCCL_IN_PROGRESS, ncclInProgress);
SAME_NUMBER(FSDP_NCCL_INT8, ncclInt8);
SAME_NUMBER(FSDP_NCCL_UINT8, ncclUint8);
SAME_NUMBER(FSDP_NCCL_INT32, ncclInt32);
SAME_NUMBER(FSDP_NCCL_INT64, ncclInt64);
SAME_NUMBER(FSDP_NCCL_FLOAT16, ncclFloat16);
SAME_NUMBER(FSDP_NCCL_FLOAT32, ncclFloat32);
SAME_NUMBER(FSDP_NCCL_FLOAT64, ncclFloat64);
SAME_NUMBER(FSDP_NCCL_BFLOAT16, ncclBfloat16);
SAME_NUMBER(FSDP_NCCL_SUM, ncclSum);
SAME_NUMBER(FSDP_NCCL_AVG, ncclAvg);
SAME_NUMBER(FSDP_NCCL_CONFIG_UNDEFINED, NCCL_CONFIG_UNDEF_INT);
SAME_NUMBER(FSDP_NCCL_ID_NBYTES, NCCL_UNIQUE_ID_BYTES);
SAME_NUMBER(FSDP_NCCL_OLDEST_VERSION, NCCL_VERSION(2, 18, 0));
_Static_assert(NCCL_VERSION_CODE >= FSDP_NCCL_OLDEST_VERSION, "too old");

#define SAME_PLACE(ours, theirs)                                            \
  _Static_assert(                                                           \
      offsetof(fsdp_nccl_config, ours) == offsetof(ncclConfig_t, theirs) && \
          sizeof(((fsdp_nccl_config *)0)->ours) ==                          \
              sizeof(((ncclConfig_t *)0)->theirs),                          \
      "ncclConfig_t." #theirs)
SAME_PLACE(nbytes, size);
SAME_PLACE(magic, magic);
SAME_PLACE(version, version);
SAME_PLACE(blocking, blocking);
SAME_PLACE(cga_cluster_size, cgaClusterSize);
SAME_PLACE(min_ctas, minCTAs);
SAME_PLACE(max_ctas, maxCTAs);
SAME_PLACE(net_name, netName);
SAME_PLACE(split_share, splitShare);
/* The library copies `nbytes`, what follows split_share included. */
_Static_assert(sizeof(fsdp_nccl_config) <= sizeof(ncclConfig_t), "prefix");
/* ---- Signatures: ours and theirs side by side
 * ------------------------------*/

typedef fsdp_nccl_comm *our_comm;
typedef const void *in;
typedef ncclResult_t their_result;

#define OURS(member, result, ...)                                            \
  _Static_assert(                                                            \
      __builtin_types_compatible_p(__typeof__(((fsdp_nccl_api *)0)->member), \
                                   result (*)(__VA_ARGS__)),                 \
      "fsdp_nccl_api." #member)
#define THEIRS(name, result, ...)                                       \
  _Static_assert(__builtin_types_compatible_p(__typeof__(&name),        \
                                              result (*)(__VA_ARGS__)), \
                 #name)

OURS(get_version, int, int *);
THEIRS(ncclGetVersion, their_result, int *);
OURS(get_unique_id, int, fsdp_nccl_id *);
THEIRS(ncclGetUniqueId, their_result, ncclUniqueId *);
OURS(comm_init_rank_config, int, our_comm *, int, fsdp_nccl_id, int,
     fsdp_nccl_config *);
THEIRS(ncclCommInitRankConfig, their_result, ncclComm_t *, int, ncclUniqueId,
       int, ncclConfig_t *);
OURS(comm_get_async_error, int, our_comm, int *);
THEIRS(ncclCommGetAsyncError, their_result, ncclComm_t, ncclResult_t *);
OURS(comm_finalize, int, our_comm);
THEIRS(ncclCommFinalize, their_result, ncclComm_t);
OURS(comm_destroy, int, our_comm);
THEIRS(ncclCommDestroy, their_result, ncclComm_t);
OURS(comm_abort, int, our_comm);
THEIRS(ncclCommAbort, their_result, ncclComm_t);
OURS(get_error_string, const char *, int);
THEIRS(ncclGetErrorString, const char *, ncclResult_t);
OURS(group_start, int, void);
THEIRS(ncclGroupStart, their_result, void);
OURS(group_end, int, void);
THEIRS(ncclGroupEnd, their_result, void);
OURS(all_gather, int, in, void *, size_t, int, our_comm, void *);
THEIRS(ncclAllGather, their_result, in, void *, size_t, ncclDataType_t,
       ncclComm_t, cudaStream_t);
OURS(reduce_scatter, int, in, void *, size_t, int, int, our_comm, void *);
THEIRS(ncclReduceScatter, their_result, in, void *, size_t, ncclDataType_t,
       ncclRedOp_t, ncclComm_t, cudaStream_t);
OURS(all_reduce, int, in, void *, size_t, int, int, our_comm, void *);
THEIRS(ncclAllReduce, their_result, in, void *, size_t, ncclDataType_t,
       ncclRedOp_t, ncclComm_t, cudaStream_t);
OURS(broadcast, int, in, void *, size_t, int, int, our_comm, void *);
THEIRS(ncclBroadcast, their_result, in, void *, size_t, ncclDataType_t, int,
       ncclComm_t, cudaStream_t);
OURS(get_last_error, const char *, our_comm);
THEIRS(ncclGetLastError, const char *, ncclComm_t);
#ifdef NCCL_REVOKE_DEFAULT
OURS(comm_revoke, int, our_comm, int);
THEIRS(ncclCommRevoke, their_result, ncclComm_t, int);
SAME_NUMBER(0, NCCL_REVOKE_DEFAULT);
#endif

/* ---- Symbols
 * ---------------------------------------------------------------*/

/* Older headers have no name for it. */
TEST(test_magic_of_the_configuration) {
  const ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  CHECK(config.magic == FSDP_NCCL_CONFIG_MAGIC);
  CHECK(config.size == sizeof config &&
        config.size >= sizeof(fsdp_nccl_config));
}

static fsdp_nccl_library g_library;

/* Taken by the linker, so a name that the library lacks ends the build. */
#define FOUND(member, name)             \
  CHECK(g_library.api.member != NULL && \
        (void (*)(void))g_library.api.member == (void (*)(void)) & name)

TEST(test_the_loader_finds_what_the_linker_finds) {
  const fsdp_nccl_search search = {.forced_path = NCCL_LIBRARY};
  fsdp_error error = {0};
  const fsdp_status status =
      fsdp_nccl_library_open(&search, &g_library, &error);
  if (!CHECK(status == FSDP_OK)) {
    printf("%s\n", error.message);
    return;
  }
  FOUND(get_version, ncclGetVersion);
  FOUND(get_unique_id, ncclGetUniqueId);
  FOUND(comm_init_rank_config, ncclCommInitRankConfig);
  FOUND(comm_get_async_error, ncclCommGetAsyncError);
  FOUND(comm_finalize, ncclCommFinalize);
  FOUND(comm_destroy, ncclCommDestroy);
  FOUND(comm_abort, ncclCommAbort);
  FOUND(get_error_string, ncclGetErrorString);
  FOUND(group_start, ncclGroupStart);
  FOUND(group_end, ncclGroupEnd);
  FOUND(all_gather, ncclAllGather);
  FOUND(reduce_scatter, ncclReduceScatter);
  FOUND(all_reduce, ncclAllReduce);
  FOUND(broadcast, ncclBroadcast);
  FOUND(get_last_error, ncclGetLastError);
#ifdef NCCL_REVOKE_DEFAULT
  FOUND(comm_revoke, ncclCommRevoke);
#endif
  CHECK_I64(g_library.version, NCCL_VERSION_CODE);
}

/* This program has the library loaded, as one with torch in it has. */
TEST(test_the_loaded_copy_is_taken) {
  const fsdp_nccl_search search = {.wheel_path = "/nowhere"};
  fsdp_nccl_library library = {.version = 0};
  fsdp_error error;
  CHECK_OK(fsdp_nccl_library_open(&search, &library, &error));
  CHECK_I64(library.origin, FSDP_NCCL_LOADED);
  CHECK(library.api.all_gather == g_library.api.all_gather);
}

/* The real library behind the transport: its first call makes a communicator,
 * which fails without a GPU. Moves nothing: the buffer is the host's. */
TEST(test_connecting) {
  const fsdp_store store = nccl_fake_store();
  fsdp_nccl_options options;
  fsdp_transport *transport = NULL;
  fsdp_error error = {0};
  nccl_fake_reset();
  fsdp_nccl_options_init(&options);
  options.prefix = "p";
  options.init_timeout_ms = 60000;
  CHECK_OK(
      fsdp_nccl_create(&g_library, &options, &store, 0, 1, &transport, &error));
  fsdp_nccl_transport *self = fsdp_nccl_priv_of(transport);
  CHECK_OK(fsdp_nccl_priv_lock_channel(self, FSDP_CHANNEL_GATHER, &error));
  const fsdp_status status =
      fsdp_nccl_priv_connect(self, FSDP_CHANNEL_GATHER, &error);
  fsdp_nccl_priv_unlock_channel(self, FSDP_CHANNEL_GATHER);
  if (status == FSDP_OK) {
    CHECK_OK(transport->ops->check(transport, &error));
    printf("connected\n");
  } else {
    CHECK(status == FSDP_BACKEND);
    CHECK(strstr(error.message, "rank 0 of 1: nccl") == error.message);
    printf("cannot connect here: %s\n", error.message);
  }
  transport->ops->destroy(transport);
}
