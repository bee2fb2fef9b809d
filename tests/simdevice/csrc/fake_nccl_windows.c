/*
 * Symmetric memory of the fake libnccl: windows, and what tests ask about them.
 * A digest of where the collectives are in the windows must be the same on all
 * ranks: NCCL would write to the wrong memory otherwise.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "fake_nccl.h"

enum { MAX_WINDOWS = 256, ALIGNMENT = 4096, POISON = 0xFF };

typedef struct window {
  struct comm *comm; /* NULL: deregistered */
  const char *data;
  size_t nbytes;
  int number; /* in its communicator */
} window;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static window windows[MAX_WINDOWS]; /* in the order of their registration */
static int num_windows;
static long long num_open;
static long long num_in_windows;
static long long num_blocks;
static unsigned long long digest;
static bool is_out_of_memory;

int ncclMemAlloc(void **buffer, size_t nbytes) {
  if (is_out_of_memory) return INTERNAL_ERROR;
  *buffer = aligned_alloc(ALIGNMENT,
                          (nbytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
  if (*buffer == NULL) return INTERNAL_ERROR;
  memset(*buffer, POISON, nbytes);
  fake_count(&num_blocks, 1);
  return SUCCESS;
}

int ncclMemFree(void *buffer) {
  free(buffer);
  fake_count(&num_blocks, -1);
  return SUCCESS;
}

int ncclCommWindowRegister(ncclComm_t comm, void *buffer, size_t nbytes,
                           void **handle, int flags) {
  if (flags != 1) return INVALID_ARGUMENT;
  pthread_mutex_lock(&mutex);
  window *made = num_windows < MAX_WINDOWS ? &windows[num_windows] : NULL;
  if (made != NULL) {
    *made = (window){.comm = comm, .data = buffer, .nbytes = nbytes};
    for (int i = 0; i < num_windows; i++)
      made->number += windows[i].comm == comm;
    num_windows++;
    num_open++;
  }
  pthread_mutex_unlock(&mutex);
  *handle = made;
  return made == NULL ? INTERNAL_ERROR : SUCCESS;
}

int ncclCommWindowDeregister(ncclComm_t comm, void *handle) {
  window *ended = handle;
  pthread_mutex_lock(&mutex);
  const bool is_right = ended->comm == comm;
  ended->comm = NULL;
  num_open--;
  pthread_mutex_unlock(&mutex);
  return is_right ? SUCCESS : INVALID_ARGUMENT;
}

void fake_note_place(const struct comm *comm, const void *buffer) {
  const char *data = buffer;
  pthread_mutex_lock(&mutex);
  for (int i = 0; i < num_windows; i++) {
    const window *each = &windows[i];
    if (each->comm != comm || data < each->data ||
        data >= each->data + each->nbytes) {
      continue;
    }
    num_in_windows++;
    digest = digest * 31 + (unsigned long long)each->number + 1;
    digest = digest * 31 + (unsigned long long)(data - each->data);
  }
  pthread_mutex_unlock(&mutex);
}

static long long read_locked(const long long *value) {
  pthread_mutex_lock(&mutex);
  const long long copy = *value;
  pthread_mutex_unlock(&mutex);
  return copy;
}

long long fake_nccl_num_windows(void) {
  return read_locked(&num_open);
}

long long fake_nccl_num_in_windows(void) {
  return read_locked(&num_in_windows);
}

long long fake_nccl_num_blocks(void) {
  return fake_read_counter(&num_blocks);
}

unsigned long long fake_nccl_places(void) {
  pthread_mutex_lock(&mutex);
  const unsigned long long copy = digest;
  pthread_mutex_unlock(&mutex);
  return copy;
}

void fake_nccl_run_out_of_memory(bool is_out) {
  is_out_of_memory = is_out;
}
