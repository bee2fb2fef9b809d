/* Devices, and counts of the calls. */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fake.h"

enum { DRIVER_VERSION = 13000, NUM_MULTIPROCESSORS = 132 };
static const size_t shared_optin = 232448;

static _Thread_local int current;

/* FAKE_CUDA_DEVICES (1), as far as CUDA_VISIBLE_DEVICES shows them. */
int fake_num_devices(void) {
  const char *devices = getenv("FAKE_CUDA_DEVICES");
  const char *visible = getenv("CUDA_VISIBLE_DEVICES");
  int count = devices == NULL ? 1 : atoi(devices);
  if (count > FAKE_MAX_DEVICES) count = FAKE_MAX_DEVICES;
  if (visible == NULL) return count;
  int shown = 0;
  for (const char *at = visible; *at != '\0'; shown++) {
    char *end = NULL;
    const long index = strtol(at, &end, 10);
    if (end == at || index < 0 || index >= count) break;
    at = *end == ',' ? end + 1 : end;
  }
  return shown;
}

int fakecuda_current_device(void) {
  return current;
}

static bool is_device(int device) {
  return device >= 0 && device < fake_num_devices();
}

cudaError_t cudaGetDeviceCount(int *count) {
  *count = fake_num_devices();
  return fake_result(*count > 0 ? cudaSuccess : cudaErrorNoDevice);
}

cudaError_t cudaSetDevice(int device) {
  FAKE_ENTER();
  if (!is_device(device)) {
    FAKE_REFUSE(cudaErrorInvalidDevice, "device %d of %d", device,
                fake_num_devices());
  }
  current = device;
  return fake_result(cudaSuccess);
}

cudaError_t cudaGetDevice(int *device) {
  *device = current;
  return fake_result(fake_num_devices() > 0 ? cudaSuccess : cudaErrorNoDevice);
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties,
                                    int device) {
  FAKE_ENTER();
  if (!is_device(device)) {
    FAKE_REFUSE(cudaErrorInvalidDevice, "device %d of %d", device,
                fake_num_devices());
  }
  size_t free_nbytes;
  size_t total;
  const int before = current;
  current = device;
  const cudaError_t code = cudaMemGetInfo(&free_nbytes, &total);
  current = before;
  if (code != cudaSuccess) return code;
  *properties = (struct cudaDeviceProp){
      .name = "Fake CUDA device",
      .totalGlobalMem = total,
      .sharedMemPerBlock = 49152,
      .sharedMemPerBlockOptin = shared_optin,
      .sharedMemPerMultiprocessor = 233472,
      .regsPerBlock = 65536,
      .regsPerMultiprocessor = 65536,
      .warpSize = 32,
      .maxThreadsPerBlock = 1024,
      .maxThreadsPerMultiProcessor = 2048,
      .maxThreadsDim = {1024, 1024, 64},
      .maxGridSize = {2147483647, 65535, 65535},
      .major = 9,
      .minor = 0,
      .multiProcessorCount = NUM_MULTIPROCESSORS,
      .l2CacheSize = 50 << 20,
      .memoryBusWidth = 5120,
      .textureAlignment = 512,
      .unifiedAddressing = 1,
      .concurrentKernels = 1,
      .canMapHostMemory = 1,
      .asyncEngineCount = 3,
      .pciBusID = device + 1,
  };
  memcpy(properties->uuid.bytes, "fakecuda-device", 15);
  properties->uuid.bytes[15] = (char)device;
  return fake_result(cudaSuccess);
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute,
                                   int device) {
  FAKE_ENTER();
  (void)device;
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = NUM_MULTIPROCESSORS;
      break;
    case cudaDevAttrMaxThreadsPerBlock:
      *value = 1024;
      break;
    case cudaDevAttrWarpSize:
      *value = 32;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = (int)shared_optin;
      break;
    default:
      *value = 0;
  }
  return fake_result(cudaSuccess);
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int capacity, int device) {
  FAKE_ENTER();
  snprintf(text, (size_t)capacity, "0000:%02x:00.0", device + 1);
  return fake_result(cudaSuccess);
}

/* Nobody reads another device's memory: copies between devices work. */
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
  FAKE_ENTER();
  (void)device;
  (void)peer;
  *can = 0;
  return fake_result(cudaSuccess);
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
  FAKE_ENTER();
  (void)flags;
  FAKE_REFUSE(cudaErrorPeerAccessUnsupported, "device %d", peer);
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = -5;
  return fake_result(cudaSuccess);
}

cudaError_t cudaDeviceSynchronize(void) {
  FAKE_ENTER();
  FAKE_ALLOWED();
  fake_count(FAKE_SYNCHRONIZATIONS);
  fake_synchronize(current);
  return fake_enter(__func__);
}

cudaError_t cudaDriverGetVersion(int *version) {
  *version = DRIVER_VERSION;
  return fake_result(cudaSuccess);
}

cudaError_t cudaRuntimeGetVersion(int *version) {
  *version = DRIVER_VERSION;
  return fake_result(cudaSuccess);
}

cudaError_t cudaProfilerStart(void) {
  return fake_result(cudaSuccess);
}

cudaError_t cudaProfilerStop(void) {
  return fake_result(cudaSuccess);
}

/* ---- Counters ------------------------------------------------------------ */

static atomic_long counters[FAKE_NUM_COUNTERS];

void fake_count(fake_counter counter) {
  atomic_fetch_add(&counters[counter], 1);
}

void fakecuda_count_launch(void) {
  fake_count(FAKE_LAUNCHES);
}

void fakecuda_count_operator(void) {
  fake_count(FAKE_OPERATORS);
}

long fakecuda_count(const char *name) {
  static const char *const names[FAKE_NUM_COUNTERS] = {
      [FAKE_MALLOCS] = "mallocs",
      [FAKE_FREES] = "frees",
      [FAKE_LAUNCHES] = "launches",
      [FAKE_OPERATORS] = "operators",
      [FAKE_MEMCPYS] = "memcpys",
      [FAKE_EVENT_CREATES] = "event_creates",
      [FAKE_EVENT_RECORDS] = "event_records",
      [FAKE_EVENT_WAITS] = "event_waits",
      [FAKE_EVENT_QUERIES] = "event_queries",
      [FAKE_SYNCHRONIZATIONS] = "synchronizations",
      [FAKE_POINTER_QUERIES] = "pointer_queries"};
  for (int i = 0; i < FAKE_NUM_COUNTERS; i++) {
    if (strcmp(name, names[i]) == 0) return atomic_load(&counters[i]);
  }
  return -1;
}
