/*
 * Kernels. No machine code of a device runs here: what torch would launch is
 * done by an operator of the CPU, and whatever still arrives is refused by its
 * name, but for torch.cuda._sleep().
 */
#define _POSIX_C_SOURCE 200809L /* nanosleep */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "fake.h"

typedef struct kernel {
  const void *function;
  const char *name;
} kernel;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static kernel
    *kernels; /* as their libraries named them when they were loaded */
static size_t num_kernels;
static size_t capacity;

static const char *name_of(const void *function) {
  const char *found = "a kernel without a name";
  pthread_mutex_lock(&mutex);
  for (size_t i = 0; i < num_kernels; i++) {
    if (kernels[i].function == function) found = kernels[i].name;
  }
  pthread_mutex_unlock(&mutex);
  return found;
}

/* What the compiler calls when a library is loaded. */
void **__cudaRegisterFatBinary(void *binary) {
  static void *handle;
  (void)binary;
  return &handle;
}

void __cudaRegisterFatBinaryEnd(void **handle) {
  (void)handle;
}

void __cudaUnregisterFatBinary(void **handle) {
  (void)handle;
}

char __cudaInitModule(void **handle) {
  (void)handle;
  return 1;
}

void __cudaRegisterFunction(void **handle, const char *function,
                            char *device_function, const char *name, int limit,
                            uint3 *thread, uint3 *block, dim3 *block_size,
                            dim3 *grid_size, int *warp_size) {
  (void)handle, (void)device_function, (void)limit, (void)thread, (void)block;
  (void)block_size, (void)grid_size, (void)warp_size;
  pthread_mutex_lock(&mutex);
  if (num_kernels == capacity) {
    capacity = 2 * capacity + 1024;
    kernels = realloc(kernels, capacity * sizeof *kernels);
    if (kernels == NULL) abort();
  }
  kernels[num_kernels++] = (kernel){function, name};
  pthread_mutex_unlock(&mutex);
}

void __cudaRegisterVar(void **handle, char *variable, char *address,
                       const char *name, int is_external, size_t nbytes,
                       int is_constant, int is_global) {
  (void)handle, (void)variable, (void)address, (void)name, (void)is_external;
  (void)nbytes, (void)is_constant, (void)is_global;
}

static _Thread_local struct {
  dim3 grid;
  dim3 block;
  size_t shared;
  void *stream;
} configuration;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared,
                                     void *stream) {
  configuration.grid = grid;
  configuration.block = block;
  configuration.shared = shared;
  configuration.stream = stream;
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared,
                                       void *stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared = configuration.shared;
  memcpy(stream, &configuration.stream, sizeof configuration.stream);
  return cudaSuccess;
}

static void sleep_cycles(void *argument) {
  const int64_t cycles = *(const int64_t *)argument;
  enum { HZ = 1000000000 }; /* so a cycle is a nanosecond */
  const struct timespec time = {.tv_sec = (time_t)(cycles / HZ),
                                .tv_nsec = (long)(cycles % HZ)};
  nanosleep(&time, NULL);
}

/* torch.cuda._sleep(cycles). False: it is another kernel. */
static bool sleeps(const void *function, void **arguments,
                   cudaStream_t handle) {
  fake_stream *stream = fake_stream_find(handle);
  if (stream == NULL || strstr(name_of(function), "spin_kernel") == NULL) {
    return false;
  }
  int64_t *cycles = malloc(sizeof *cycles);
  if (cycles == NULL) abort();
  *cycles = *(const int64_t *)arguments[0];
  fake_stream_push(stream, sleep_cycles, free, cycles);
  return true;
}

static cudaError_t refuse(const void *function) {
  fake_count(FAKE_LAUNCHES);
  return fake_refuse("cudaLaunchKernel", cudaErrorNoKernelImageForDevice,
                     "no code of a device runs here: %s", name_of(function));
}

cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block,
                             void **arguments, size_t shared,
                             cudaStream_t stream) {
  FAKE_ENTER();
  (void)grid, (void)block, (void)shared;
  if (sleeps(function, arguments, stream)) return fake_result(cudaSuccess);
  return refuse(function);
}

cudaError_t __cudaLaunchKernel(cudaKernel_t function, dim3 grid, dim3 block,
                               void **arguments, size_t shared,
                               cudaStream_t stream) {
  return cudaLaunchKernel((const void *)function, grid, block, arguments,
                          shared, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config,
                                const void *function, void **arguments) {
  FAKE_ENTER();
  (void)config, (void)arguments;
  return refuse(function);
}

cudaError_t __cudaGetKernel(cudaKernel_t *found, const void *function) {
  memcpy((void *)found, &function, sizeof function);
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes,
                                  const void *function) {
  FAKE_ENTER();
  (void)function;
  *attributes = (struct cudaFuncAttributes){.maxThreadsPerBlock = 1024,
                                            .ptxVersion = 90,
                                            .binaryVersion = 90,
                                            .numRegs = 32};
  return fake_result(cudaSuccess);
}

cudaError_t cudaFuncSetAttribute(const void *function,
                                 enum cudaFuncAttribute attribute, int value) {
  FAKE_ENTER();
  (void)function, (void)attribute, (void)value;
  return fake_result(cudaSuccess);
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int *count, const void *function, int block_size, size_t shared,
    unsigned flags) {
  FAKE_ENTER();
  (void)function, (void)block_size, (void)shared, (void)flags;
  *count = 2;
  return fake_result(cudaSuccess);
}
