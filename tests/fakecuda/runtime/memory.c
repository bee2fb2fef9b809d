/* Memory of devices, pinned memory, what an address is. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "fake.h"

enum { GRANULARITY = 2 << 20, PAGE = 4096 };
static const size_t default_memory = (size_t)80 << 30;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static fake_region *regions; /* in the order of their addresses */
static size_t num_regions;
static size_t capacity;
static size_t taken[FAKE_MAX_DEVICES];
static size_t limits[FAKE_MAX_DEVICES];

enum { COMPUTES = 1, SHAPES_ONLY, ALONE };

static int read_mode(void) {
  static atomic_int kept; /* 0: not read yet */
  int mode = atomic_load(&kept);
  if (mode != 0) return mode;
  const char *said = getenv("FAKE_CUDA_NOOP");
  mode = said == NULL                 ? COMPUTES
         : strcmp(said, "alone") == 0 ? ALONE
                                      : SHAPES_ONLY;
  atomic_store(&kept, mode);
  return mode;
}

bool fakecuda_is_noop(void) {
  return read_mode() != COMPUTES;
}

bool fakecuda_is_alone(void) {
  return read_mode() == ALONE;
}

/* ---- Regions ------------------------------------------------------------- */

/* The first one that starts after the address. */
static size_t after(const char *data) {
  size_t low = 0;
  size_t high = num_regions;
  while (low < high) {
    const size_t middle = (low + high) / 2;
    if (regions[middle].data <= data) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

void fake_region_add(const fake_region *region) {
  pthread_mutex_lock(&mutex);
  if (num_regions == capacity) {
    capacity = 2 * capacity + 64;
    regions = realloc(regions, capacity * sizeof *regions);
    if (regions == NULL) abort();
  }
  const size_t index = after(region->data);
  memmove(&regions[index + 1], &regions[index],
          (num_regions - index) * sizeof *regions);
  regions[index] = *region;
  num_regions++;
  pthread_mutex_unlock(&mutex);
}

bool fake_region_remove(void *data, fake_kind kind, fake_region *removed) {
  pthread_mutex_lock(&mutex);
  const size_t index = after(data);
  const bool is_found = index > 0 && regions[index - 1].data == data &&
                        regions[index - 1].kind == kind;
  if (is_found) {
    *removed = regions[index - 1];
    memmove(&regions[index - 1], &regions[index],
            (num_regions - index) * sizeof *regions);
    num_regions--;
  }
  pthread_mutex_unlock(&mutex);
  return is_found;
}

fake_region fake_region_of(const void *data) {
  fake_region found = {.data = NULL, .kind = FAKE_UNKNOWN, .device = -1};
  pthread_mutex_lock(&mutex);
  const size_t index = after(data);
  if (index > 0) {
    const fake_region *before = &regions[index - 1];
    if ((const char *)data < before->data + before->nbytes) found = *before;
  }
  pthread_mutex_unlock(&mutex);
  return found;
}

bool fakecuda_is_one_region(const void *data, size_t nbytes) {
  const fake_region region = fake_region_of(data);
  return (const char *)data + nbytes <= region.data + region.nbytes;
}

bool fakecuda_is_reached(const void *data, size_t nbytes) {
  if (nbytes == 0) return true;
  const char *last = (const char *)data + nbytes - 1;
  return fake_region_of(data).kind != FAKE_UNKNOWN &&
         fake_region_of(last).kind != FAKE_UNKNOWN;
}

/* ---- How much there is --------------------------------------------------- */

static size_t limit_of(int device) {
  if (limits[device] != 0) return limits[device];
  const char *said = getenv("FAKE_CUDA_MEMORY");
  return said == NULL ? default_memory : (size_t)strtoull(said, NULL, 10);
}

bool fake_memory_take(int device, size_t nbytes) {
  pthread_mutex_lock(&mutex);
  const size_t limit = limit_of(device);
  const bool is_there =
      taken[device] <= limit && nbytes <= limit - taken[device];
  if (is_there) taken[device] += nbytes;
  pthread_mutex_unlock(&mutex);
  return is_there;
}

void fake_memory_give(int device, size_t nbytes) {
  pthread_mutex_lock(&mutex);
  taken[device] -= nbytes;
  pthread_mutex_unlock(&mutex);
}

void fakecuda_set_memory(int device, size_t nbytes) {
  pthread_mutex_lock(&mutex);
  limits[device] = nbytes;
  pthread_mutex_unlock(&mutex);
}

cudaError_t cudaMemGetInfo(size_t *free_nbytes, size_t *total) {
  FAKE_ENTER();
  const int device = fakecuda_current_device();
  pthread_mutex_lock(&mutex);
  *total = limit_of(device);
  *free_nbytes = *total > taken[device] ? *total - taken[device] : 0;
  pthread_mutex_unlock(&mutex);
  return fake_result(cudaSuccess);
}

/* ---- Allocations --------------------------------------------------------- */

static size_t round_up(size_t nbytes, size_t unit) {
  return (nbytes + unit - 1) / unit * unit;
}

static void *map(size_t nbytes) {
  void *data = mmap(NULL, nbytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return data == MAP_FAILED ? NULL : data;
}

/* Memory of the device, in whole pages of it; not filled yet. */
static cudaError_t take_memory(void **data, size_t nbytes) {
  const int device = fakecuda_current_device();
  const size_t whole = round_up(nbytes, GRANULARITY);
  *data = NULL;
  if (nbytes == 0) return cudaSuccess;
  if (nbytes > SIZE_MAX / 4 || !fake_memory_take(device, whole)) {
    return cudaErrorMemoryAllocation;
  }
  *data = map(whole);
  if (*data == NULL) {
    fake_memory_give(device, whole);
    return cudaErrorMemoryAllocation;
  }
  fake_region_add(&(fake_region){*data, whole, FAKE_DEVICE, device});
  return cudaSuccess;
}

static void poison(void *argument) {
  const fake_region region = fake_region_of(argument);
  if (region.data != NULL) memset(region.data, FAKE_POISON, region.nbytes);
}

cudaError_t cudaMalloc(void **data, size_t nbytes) {
  FAKE_ENTER();
  FAKE_ALLOWED();
  fake_count(FAKE_MALLOCS);
  const cudaError_t code = take_memory(data, nbytes);
  if (code == cudaSuccess && !fakecuda_is_noop()) poison(*data);
  return fake_result(code);
}

/* Memory that is gone has no page: who still uses it dies. */
static bool give_memory(void *data) {
  fake_region removed;
  if (!fake_region_remove(data, FAKE_DEVICE, &removed)) return false;
  munmap(removed.data, removed.nbytes);
  fake_memory_give(removed.device, removed.nbytes);
  return true;
}

cudaError_t cudaFree(void *data) {
  FAKE_ENTER();
  if (data == NULL) return fake_result(cudaSuccess);
  FAKE_ALLOWED();
  fake_count(FAKE_FREES);
  const fake_region region = fake_region_of(data);
  if (region.kind != FAKE_DEVICE || region.data != data) {
    FAKE_REFUSE(cudaErrorInvalidValue, "%p is not what cudaMalloc returned",
                data);
  }
  fake_synchronize(region.device);
  give_memory(data);
  return fake_enter(__func__);
}

/* ---- In the order of a stream -------------------------------------------- */

static void free_in_order(void *data) {
  give_memory(data);
}

/* The memory is the stream's: the poison is written at its turn. */
cudaError_t cudaMallocAsync(void **data, size_t nbytes, cudaStream_t handle) {
  FAKE_ENTER();
  fake_count(FAKE_MALLOCS);
  fake_stream *stream = fake_stream_find(handle);
  if (stream == NULL) {
    FAKE_REFUSE(cudaErrorInvalidResourceHandle, "there is no such stream");
  }
  if (fake_graph_of(stream) != 0) {
    FAKE_REFUSE(cudaErrorNotSupported, "the fake captures no allocation");
  }
  const cudaError_t code = take_memory(data, nbytes);
  if (code == cudaSuccess && *data != NULL && !fakecuda_is_noop()) {
    fake_stream_push(stream, poison, NULL, *data);
  }
  return fake_result(code);
}

cudaError_t cudaFreeAsync(void *data, cudaStream_t handle) {
  FAKE_ENTER();
  fake_count(FAKE_FREES);
  fake_stream *stream = fake_stream_find(handle);
  if (stream == NULL) {
    FAKE_REFUSE(cudaErrorInvalidResourceHandle, "there is no such stream");
  }
  if (data == NULL) return fake_result(cudaSuccess);
  const fake_region region = fake_region_of(data);
  if (region.kind != FAKE_DEVICE || region.data != data) {
    FAKE_REFUSE(cudaErrorInvalidValue, "%p is not what an allocation returned",
                data);
  }
  fake_stream_push(stream, free_in_order, NULL, data);
  return fake_result(cudaSuccess);
}

/* ---- Pools: the device's default one, which keeps nothing ---------------- */

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) {
  FAKE_ENTER();
  static char pools[FAKE_MAX_DEVICES];
  *pool = (cudaMemPool_t)(void *)&pools[device];
  return fake_result(cudaSuccess);
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool,
                                    enum cudaMemPoolAttr attribute,
                                    void *value) {
  FAKE_ENTER();
  (void)pool;
  (void)attribute;
  (void)value;
  return fake_result(cudaSuccess);
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool,
                                    enum cudaMemPoolAttr attribute,
                                    void *value) {
  FAKE_ENTER();
  (void)pool;
  (void)attribute;
  memset(value, 0, sizeof(uint64_t));
  return fake_result(cudaSuccess);
}

cudaError_t cudaMemPoolSetAccess(cudaMemPool_t pool,
                                 const struct cudaMemAccessDesc *access,
                                 size_t count) {
  FAKE_ENTER();
  (void)pool;
  (void)access;
  (void)count;
  return fake_result(cudaSuccess);
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t nbytes) {
  FAKE_ENTER();
  (void)pool;
  (void)nbytes;
  return fake_result(cudaSuccess);
}

cudaError_t cudaDeviceGetGraphMemAttribute(
    int device, enum cudaGraphMemAttributeType attribute, void *value) {
  FAKE_ENTER();
  (void)device;
  (void)attribute;
  memset(value, 0, sizeof(uint64_t));
  return fake_result(cudaSuccess);
}

cudaError_t cudaDeviceSetGraphMemAttribute(
    int device, enum cudaGraphMemAttributeType attribute, void *value) {
  FAKE_ENTER();
  (void)device;
  (void)attribute;
  (void)value;
  return fake_result(cudaSuccess);
}

/* ---- Pinned memory ------------------------------------------------------- */

cudaError_t cudaHostAlloc(void **data, size_t nbytes, unsigned flags) {
  FAKE_ENTER();
  FAKE_ALLOWED();
  (void)flags;
  const size_t whole = round_up(nbytes, PAGE);
  *data = nbytes == 0 ? NULL : map(whole);
  if (nbytes == 0) return fake_result(cudaSuccess);
  if (*data == NULL) return fake_result(cudaErrorMemoryAllocation);
  if (!fakecuda_is_noop()) memset(*data, FAKE_POISON, whole);
  fake_region_add(
      &(fake_region){*data, whole, FAKE_PINNED, fakecuda_current_device()});
  return fake_result(cudaSuccess);
}

cudaError_t cudaFreeHost(void *data) {
  FAKE_ENTER();
  if (data == NULL) return fake_result(cudaSuccess);
  FAKE_ALLOWED();
  const fake_region region = fake_region_of(data);
  fake_region removed;
  if (region.data != data || region.kind != FAKE_PINNED) {
    FAKE_REFUSE(cudaErrorInvalidValue, "%p is not what cudaHostAlloc returned",
                data);
  }
  fake_synchronize(-1);
  fake_region_remove(data, FAKE_PINNED, &removed);
  munmap(removed.data, removed.nbytes);
  return fake_enter(__func__);
}

cudaError_t cudaHostRegister(void *data, size_t nbytes, unsigned flags) {
  FAKE_ENTER();
  FAKE_ALLOWED();
  (void)flags;
  if (fake_region_of(data).kind != FAKE_UNKNOWN) {
    FAKE_REFUSE(cudaErrorHostMemoryAlreadyRegistered, "%p", data);
  }
  fake_region_add(
      &(fake_region){data, nbytes, FAKE_REGISTERED, fakecuda_current_device()});
  return fake_result(cudaSuccess);
}

cudaError_t cudaHostUnregister(void *data) {
  FAKE_ENTER();
  FAKE_ALLOWED();
  fake_region removed;
  fake_synchronize(-1);
  if (!fake_region_remove(data, FAKE_REGISTERED, &removed)) {
    FAKE_REFUSE(cudaErrorHostMemoryNotRegistered, "%p", data);
  }
  return fake_enter(__func__);
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes,
                                     const void *data) {
  FAKE_ENTER();
  fake_count(FAKE_POINTER_QUERIES);
  const fake_region region = fake_region_of(data);
  void *address = NULL;
  memcpy(&address, &data, sizeof address);
  *attributes = (struct cudaPointerAttributes){.device = region.device};
  switch (region.kind) {
    case FAKE_UNKNOWN:
      attributes->type = cudaMemoryTypeUnregistered;
      attributes->device = -2;
      attributes->hostPointer = address;
      break;
    case FAKE_PINNED:
    case FAKE_REGISTERED:
      attributes->type = cudaMemoryTypeHost;
      attributes->hostPointer = address;
      attributes->devicePointer = address;
      break;
    default:
      attributes->type = cudaMemoryTypeDevice;
      attributes->devicePointer = address;
  }
  return fake_result(cudaSuccess);
}
