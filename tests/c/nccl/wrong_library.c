/*
 * Libraries that are no usable NCCL, by macro: OLD is an old one, FAILING one
 * whose version cannot be asked, DATA one whose ncclCommAbort is no function;
 * without a macro a usable one that does nothing.
 */
#define EXPORTED __attribute__((visibility("default")))
#define FUNCTION(name)     \
  EXPORTED int name(void); \
  int name(void) {         \
    return 0;              \
  }

EXPORTED int ncclGetVersion(int *version);
int ncclGetVersion(int *version) {
#if defined(OLD)
  *version = 21203;
#else
  *version = 23203;
#endif
#if defined(FAILING)
  return 3;
#else
  return 0;
#endif
}

#if defined(DATA)
EXPORTED extern int ncclCommAbort;
int ncclCommAbort = 1;
#else
FUNCTION(ncclCommAbort)
#endif
FUNCTION(ncclGetUniqueId)
FUNCTION(ncclCommInitRankConfig)
FUNCTION(ncclCommGetAsyncError)
FUNCTION(ncclCommFinalize)
FUNCTION(ncclCommDestroy)
FUNCTION(ncclGetErrorString)
FUNCTION(ncclGroupStart)
FUNCTION(ncclGroupEnd)
FUNCTION(ncclAllGather)
FUNCTION(ncclReduceScatter)
FUNCTION(ncclAllReduce)
FUNCTION(ncclBroadcast)
