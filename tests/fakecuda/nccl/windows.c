/*
 * Symmetric memory of the fake libnccl: windows, and what tests ask about them.
 * A digest of where the collectives are in the windows must be the same on all
 * ranks: NCCL would write to the wrong memory otherwise.
 */
#include <cuda_runtime_api.h>

#include "fake_nccl.h"

enum { MAX_WINDOWS = 256 };

typedef struct window {
  const comm *comm; /* NULL: deregistered */
  const char *data;
  size_t nbytes;
  int number; /* in its communicator */
} window;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static window windows[MAX_WINDOWS]; /* in the order of their registration */
static int num_windows;
static unsigned long long digest;
static atomic_llong num_open;
static atomic_llong num_in_windows;
static atomic_llong num_blocks;
static atomic_llong num_registered;
static atomic_bool is_out_of_memory;

void count(atomic_llong *counter, long long change) {
  atomic_fetch_add(counter, change);
}

ncclResult_t ncclMemAlloc(void **buffer, size_t nbytes) {
  if (atomic_load(&is_out_of_memory) ||
      cudaMalloc(buffer, nbytes) != cudaSuccess) {
    (void)cudaGetLastError();
    return ncclUnhandledCudaError;
  }
  count(&num_blocks, 1);
  return ncclSuccess;
}

ncclResult_t ncclMemFree(void *buffer) {
  count(&num_blocks, -1);
  return cudaFree(buffer) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

ncclResult_t ncclCommWindowRegister(ncclComm_t self, void *buffer,
                                    size_t nbytes, ncclWindow_t *handle,
                                    int flags) {
  if (flags != NCCL_WIN_COLL_SYMMETRIC) return ncclInvalidArgument;
  pthread_mutex_lock(&mutex);
  window *made = num_windows < MAX_WINDOWS ? &windows[num_windows] : NULL;
  if (made != NULL) {
    *made = (window){.comm = self, .data = buffer, .nbytes = nbytes};
    for (int i = 0; i < num_windows; i++) {
      made->number += windows[i].comm == self;
    }
    num_windows++;
    count(&num_open, 1);
  }
  pthread_mutex_unlock(&mutex);
  *handle = (ncclWindow_t)(void *)made;
  return made == NULL ? ncclInternalError : ncclSuccess;
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t self, ncclWindow_t handle) {
  window *ended = (window *)(void *)handle;
  pthread_mutex_lock(&mutex);
  const bool is_right = ended->comm == self;
  ended->comm = NULL;
  pthread_mutex_unlock(&mutex);
  count(&num_open, -1);
  return is_right ? ncclSuccess : ncclInvalidArgument;
}

void note_place(const comm *self, const void *buffer) {
  const char *data = buffer;
  pthread_mutex_lock(&mutex);
  for (int i = 0; i < num_windows; i++) {
    const window *each = &windows[i];
    if (each->comm != self || data < each->data ||
        data >= each->data + each->nbytes) {
      continue;
    }
    count(&num_in_windows, 1);
    digest = digest * 31 + (unsigned long long)each->number + 1;
    digest = digest * 31 + (unsigned long long)(data - each->data);
  }
  pthread_mutex_unlock(&mutex);
}

ncclResult_t ncclCommRegister(const ncclComm_t self, void *buffer,
                              size_t nbytes, void **handle) {
  if (self == NULL || nbytes == 0) return ncclInvalidArgument;
  *handle = buffer;
  count(&num_registered, 1);
  return ncclSuccess;
}

ncclResult_t ncclCommDeregister(const ncclComm_t self, void *handle) {
  if (self == NULL || handle == NULL) return ncclInvalidArgument;
  count(&num_registered, -1);
  return ncclSuccess;
}

long long fake_nccl_num_windows(void) {
  return atomic_load(&num_open);
}

long long fake_nccl_num_in_windows(void) {
  return atomic_load(&num_in_windows);
}

long long fake_nccl_num_blocks(void) {
  return atomic_load(&num_blocks);
}

long long fake_nccl_num_registered(void) {
  return atomic_load(&num_registered);
}

unsigned long long fake_nccl_places(void) {
  pthread_mutex_lock(&mutex);
  const unsigned long long copy = digest;
  pthread_mutex_unlock(&mutex);
  return copy;
}

void fake_nccl_run_out_of_memory(bool is_out) {
  atomic_store(&is_out_of_memory, is_out);
}
