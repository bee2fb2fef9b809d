/*
 * What torch's libraries import and the fake does not do: each an error that
 * names the call.
 */
#define FAKE_API __attribute__((visibility("default")))

/* As fake.h has it, whose prototypes these would contradict. */
int fake_refuse(const char *call, int code, const char *why, ...);

enum { NOT_SUPPORTED = 801 };

/* Without a prototype of its own each takes what it is given. */
#define UNSUPPORTED(name)                                                \
  FAKE_API int name(void);                                               \
  int name(void) {                                                       \
    return fake_refuse(#name, NOT_SUPPORTED, "the fake does not do it"); \
  }
UNSUPPORTED(cudaGetSymbolAddress)
UNSUPPORTED(cudaGraphAddNode)
UNSUPPORTED(cudaGraphConditionalHandleCreate)
UNSUPPORTED(cudaGraphNodeGetDependencies)
UNSUPPORTED(cudaIpcCloseMemHandle)
UNSUPPORTED(cudaIpcGetEventHandle)
UNSUPPORTED(cudaIpcGetMemHandle)
UNSUPPORTED(cudaIpcOpenEventHandle)
UNSUPPORTED(cudaIpcOpenMemHandle)
UNSUPPORTED(cudaKernelSetAttributeForDevice)
UNSUPPORTED(cudaLibraryGetKernel)
UNSUPPORTED(cudaLibraryLoadData)
UNSUPPORTED(cudaLibraryUnload)
UNSUPPORTED(cudaStreamBeginCaptureToGraph)
UNSUPPORTED(cudaStreamUpdateCaptureDependencies)
