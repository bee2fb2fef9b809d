/*
 * A libnvidia-ml for the fake CUDA: what torch asks before it uses expandable
 * segments (is there a fabric between GPUs?), when it counts devices, and when
 * it reports a lack of memory.
 */
#define FAKE_API __attribute__((visibility("default")))

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3 };

/* Of the runtime, which is loaded before torch. */
int cudaGetDeviceCount(int *count);

static char devices[16]; /* a handle is an address here */

FAKE_API int nvmlInit_v2(void);
int nvmlInit_v2(void) {
  return SUCCESS;
}

FAKE_API int nvmlShutdown(void);
int nvmlShutdown(void) {
  return SUCCESS;
}

FAKE_API int nvmlDeviceGetCount_v2(unsigned *count);
int nvmlDeviceGetCount_v2(unsigned *count) {
  int found = 0;
  const int result = cudaGetDeviceCount(&found);
  *count = (unsigned)found;
  return result == 0 ? SUCCESS : NOT_SUPPORTED;
}

FAKE_API int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device);
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
  if (index >= sizeof devices) return INVALID_ARGUMENT;
  *device = &devices[index];
  return SUCCESS;
}

FAKE_API int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device);
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) {
  (void)id;
  return nvmlDeviceGetHandleByIndex_v2(0, device);
}

/* None, for torch's report of a lack of memory; torch 2.11 takes no refusal. */
FAKE_API int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count,
                                                  void *processes);
int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count,
                                         void *processes) {
  (void)device;
  (void)processes;
  *count = 0;
  return SUCCESS;
}

FAKE_API const char *nvmlErrorString(int result);
const char *nvmlErrorString(int result) {
  return result == SUCCESS ? "Success" : "Not Supported";
}

#define UNSUPPORTED(name)  \
  FAKE_API int name(void); \
  int name(void) {         \
    return NOT_SUPPORTED;  \
  }
UNSUPPORTED(nvmlDeviceGetGpuFabricInfoV)
UNSUPPORTED(nvmlDeviceGetHandleByUUID)
UNSUPPORTED(nvmlDeviceGetNvLinkRemoteDeviceType)
UNSUPPORTED(nvmlDeviceGetNvLinkRemotePciInfo_v2)
UNSUPPORTED(nvmlDeviceGetP2PStatus)
UNSUPPORTED(nvmlDeviceGetUUID)
UNSUPPORTED(nvmlSystemGetCudaDriverVersion_v2)
