/*
 * The driver's calls that torch looks up by name: contexts, and memory that is
 * reserved, made and mapped apart (expandable segments).
 */
#include <cuda.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../runtime/fake.h"

enum { GRANULARITY = 2 << 20 };

static _Thread_local CUcontext context;

CUresult cuInit(unsigned flags) {
  (void)flags;
  return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *version) {
  return (CUresult)cudaDriverGetVersion(version);
}

CUresult cuDeviceGet(CUdevice *device, int index) {
  *device = index;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count) {
  *count = fake_num_devices();
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute,
                              CUdevice device) {
  /* The driver's attributes have the runtime's numbers. */
  return (CUresult)cudaDeviceGetAttribute(value, (enum cudaDeviceAttr)attribute,
                                          device);
}

CUresult cuCtxGetCurrent(CUcontext *current) {
  *current = context;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext wanted) {
  context = wanted;
  return CUDA_SUCCESS;
}

/* A context is its device's number, counted from 1. */
CUresult cuDevicePrimaryCtxRetain(CUcontext *made, CUdevice device) {
  static char contexts[FAKE_MAX_DEVICES];
  *made = (CUcontext)(void *)&contexts[device];
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags,
                                    int *is_active) {
  (void)device;
  *flags = 0;
  *is_active = 1;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult code, const char **text) {
  *text = cudaGetErrorString((cudaError_t)code);
  return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult code, const char **text) {
  *text = cudaGetErrorName((cudaError_t)code);
  return CUDA_SUCCESS;
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
  enum cudaStreamCaptureMode same = (enum cudaStreamCaptureMode) * mode;
  const cudaError_t code = cudaThreadExchangeStreamCaptureMode(&same);
  *mode = (CUstreamCaptureMode)same;
  return (CUresult)code;
}

CUresult cuStreamGetId(CUstream stream, unsigned long long *id) {
  return (CUresult)cudaStreamGetId(stream, id);
}

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute,
                               CUdeviceptr address) {
  const fake_region region = fake_region_of((const void *)address);
  if (region.kind == FAKE_UNKNOWN) {
    return (CUresult)fake_refuse(__func__, cudaErrorInvalidValue,
                                 "%p is the host's", (void *)address);
  }
  if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) {
    memcpy(value, &region.device, sizeof region.device);
    return CUDA_SUCCESS;
  }
  return (CUresult)fake_refuse(__func__, cudaErrorNotSupported, "attribute %d",
                               (int)attribute);
}

/* ---- Memory in parts ----------------------------------------------------- */

/* A handle of memory is a file that lies nowhere, and its size. */
typedef struct memory {
  int file;
  int device;
  size_t nbytes;
  int num_references; /* the handle's, each mapping's */
} memory;

static CUresult out_of_memory(void) {
  return (CUresult)fake_result(cudaErrorMemoryAllocation);
}

CUresult cuMemGetAllocationGranularity(size_t *nbytes,
                                       const CUmemAllocationProp *properties,
                                       CUmemAllocationGranularity_flags flags) {
  (void)properties;
  (void)flags;
  *nbytes = GRANULARITY;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *address, size_t nbytes,
                             size_t alignment, CUdeviceptr wanted,
                             unsigned long long flags) {
  (void)alignment;
  (void)wanted;
  (void)flags;
  void *data = mmap(NULL, nbytes, PROT_NONE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) return out_of_memory();
  *address = (CUdeviceptr)data;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t nbytes) {
  munmap((void *)address, nbytes);
  return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t nbytes,
                     const CUmemAllocationProp *properties,
                     unsigned long long flags) {
  (void)flags;
  const int device = properties->location.id;
  if (!fake_memory_take(device, nbytes)) return out_of_memory();
  memory *made = calloc(1, sizeof *made);
  if (made != NULL) made->file = memfd_create("fakecuda", MFD_CLOEXEC);
  if (made == NULL || made->file < 0 ||
      ftruncate(made->file, (off_t)nbytes) != 0) {
    fake_memory_give(device, nbytes);
    free(made);
    return out_of_memory();
  }
  made->device = device;
  made->nbytes = nbytes;
  made->num_references = 1;
  *handle = (CUmemGenericAllocationHandle)(uintptr_t)made;
  return CUDA_SUCCESS;
}

static void let_go(memory *self) {
  if (--self->num_references > 0) return;
  close(self->file);
  fake_memory_give(self->device, self->nbytes);
  free(self);
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  let_go((memory *)(uintptr_t)handle);
  return CUDA_SUCCESS;
}

enum { MAX_MAPPINGS = 65536 };
static struct {
  CUdeviceptr address;
  memory *memory;
} mappings[MAX_MAPPINGS];

CUresult cuMemMap(CUdeviceptr address, size_t nbytes, size_t offset,
                  CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
  (void)flags;
  memory *mapped = (memory *)(uintptr_t)handle;
  int free_one = 0;
  while (free_one < MAX_MAPPINGS && mappings[free_one].memory != NULL) {
    free_one++;
  }
  void *data = mmap((void *)address, nbytes, PROT_NONE, MAP_SHARED | MAP_FIXED,
                    mapped->file, (off_t)offset);
  if (data == MAP_FAILED || free_one == MAX_MAPPINGS) return out_of_memory();
  mappings[free_one].address = address;
  mappings[free_one].memory = mapped;
  mapped->num_references++;
  fake_region_add(&(fake_region){data, nbytes, FAKE_MAPPED, mapped->device});
  return CUDA_SUCCESS;
}

/* Memory that became readable is fresh, and poisoned. */
CUresult cuMemSetAccess(CUdeviceptr address, size_t nbytes,
                        const CUmemAccessDesc *access, size_t count) {
  if (count != 1 || access->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE) {
    return CUDA_SUCCESS; /* for a peer, which reads nothing here */
  }
  if (mprotect((void *)address, nbytes, PROT_READ | PROT_WRITE) != 0) {
    return (CUresult)fake_refuse(__func__, cudaErrorInvalidValue,
                                 "%zu bytes at %p are not mapped", nbytes,
                                 (void *)address);
  }
  if (!fakecuda_is_noop()) memset((void *)address, FAKE_POISON, nbytes);
  return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t nbytes) {
  fake_region removed;
  for (size_t done = 0; done < nbytes; done += removed.nbytes) {
    char *at = (char *)address + done;
    if (!fake_region_remove(at, FAKE_MAPPED, &removed)) {
      return (CUresult)fake_refuse(__func__, cudaErrorInvalidValue,
                                   "%p is not mapped", (void *)at);
    }
    fake_synchronize(removed.device);
    mmap(at, removed.nbytes, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    for (int i = 0; i < MAX_MAPPINGS; i++) {
      if (mappings[i].memory == NULL || mappings[i].address != (CUdeviceptr)at)
        continue;
      let_go(mappings[i].memory);
      mappings[i].memory = NULL;
    }
  }
  return CUDA_SUCCESS;
}

/* ---- By name ------------------------------------------------------------- */

/* What is looked up and not here is refused when it is called, by its name. */
enum { MAX_UNSUPPORTED = 64 };
static const char *unsupported_names[MAX_UNSUPPORTED];

static CUresult refuse(int index) {
  return (CUresult)fake_refuse(unsupported_names[index], cudaErrorNotSupported,
                               "the fake does not do it");
}

#define STUB(n)                           \
  static CUresult unsupported_##n(void) { \
    return refuse(0##n);                  \
  }
#define EIGHT(of, n) \
  of(n##0) of(n##1) of(n##2) of(n##3) of(n##4) of(n##5) of(n##6) of(n##7)
#define ALL(of) \
  EIGHT(of, 0)  \
  EIGHT(of, 1)  \
  EIGHT(of, 2) EIGHT(of, 3) EIGHT(of, 4) EIGHT(of, 5) EIGHT(of, 6) EIGHT(of, 7)
#define NAME(n) unsupported_##n,
ALL(STUB)
static CUresult (*const unsupported[MAX_UNSUPPORTED])(void) = {ALL(NAME)};

CUresult cuLogsRegisterCallback(CUlogsCallback function, void *argument,
                                CUlogsCallbackHandle *handle) {
  (void)function;
  (void)argument;
  if (handle != NULL) memset(handle, 0, sizeof *handle);
  return CUDA_SUCCESS; /* nothing is logged */
}

CUresult cuLogsUnregisterCallback(CUlogsCallbackHandle handle) {
  (void)handle;
  return CUDA_SUCCESS;
}

static void *find(const char *name) {
  static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  void *found = dlsym(RTLD_DEFAULT, name);
  if (found != NULL) return found;
  pthread_mutex_lock(&mutex);
  int index = 0;
  while (index < MAX_UNSUPPORTED - 1 && unsupported_names[index] != NULL &&
         strcmp(unsupported_names[index], name) != 0) {
    index++;
  }
  if (unsupported_names[index] == NULL) unsupported_names[index] = name;
  memcpy((void *)&found, &unsupported[index], sizeof found);
  pthread_mutex_unlock(&mutex);
  return found;
}

CUresult cuGetProcAddress_v2(const char *name, void **function, int version,
                             cuuint64_t flags,
                             CUdriverProcAddressQueryResult *found) {
  (void)version;
  (void)flags;
  *function = dlsym(RTLD_DEFAULT, name);
  if (found != NULL) {
    *found = *function != NULL ? CU_GET_PROC_ADDRESS_SUCCESS
                               : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  }
  return *function != NULL ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

cudaError_t cudaGetDriverEntryPointByVersion(
    const char *name, void **function, unsigned version,
    unsigned long long flags, enum cudaDriverEntryPointQueryResult *found) {
  (void)version;
  (void)flags;
  *function = find(name);
  if (found != NULL) *found = cudaDriverEntryPointSuccess;
  return fake_result(cudaSuccess);
}
