/* What torch's libraries import and the fake does not do: an error by name. */
#include <stdio.h>

enum { INVALID_USAGE = 5 };

/* Without a prototype of its own each takes what it is given. */
#define UNSUPPORTED(name)                                             \
  __attribute__((visibility("default"))) int name(void);              \
  int name(void) {                                                    \
    fputs("fake NCCL: " #name ": the fake does not do it\n", stderr); \
    return INVALID_USAGE;                                             \
  }
UNSUPPORTED(ncclCommDeregister)
UNSUPPORTED(ncclCommGetUniqueId)
UNSUPPORTED(ncclCommGrow)
UNSUPPORTED(ncclCommInitAll)
UNSUPPORTED(ncclCommMemStats)
UNSUPPORTED(ncclCommRegister)
UNSUPPORTED(ncclCommResume)
UNSUPPORTED(ncclCommShrink)
UNSUPPORTED(ncclCommSuspend)
UNSUPPORTED(ncclCommWindowDeregister)
UNSUPPORTED(ncclCommWindowRegister)
UNSUPPORTED(ncclDevCommCreate)
UNSUPPORTED(ncclDevCommDestroy)
UNSUPPORTED(ncclGetLsaMultimemDevicePointer)
UNSUPPORTED(ncclGetPeerDevicePointer)
UNSUPPORTED(ncclGroupSimulateEnd)
UNSUPPORTED(ncclMemAlloc)
UNSUPPORTED(ncclMemFree)
UNSUPPORTED(ncclPutSignal)
UNSUPPORTED(ncclSignal)
UNSUPPORTED(ncclWaitSignal)
UNSUPPORTED(ncclWinGetUserPtr)
