/*
 * Logs every allocation and free of tensor memory. Loaded with LD_PRELOAD.
 *
 * torch's CPU allocator takes all its memory from posix_memalign() with an
 * alignment of 64 bytes. fsdp_c's blocks, slabs and shards (csrc/host/pages.c) are
 * mapped and then populated; shards move into a file later, page for page. Pages that
 * it keeps are free (MADV_FREE), and needed again (MADV_WILLNEED). Such calls,
 * and the free() and munmap() of what they returned, are logged in the order in which
 * they happen, on all threads.
 * memory_trace.py reads the log. glibc only: its own functions do the work.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
  ALIGNMENT = 64,
  WILLNEED = 3,        /* MADV_WILLNEED */
  FREE = 8,            /* MADV_FREE */
  POPULATE_WRITE = 23, /* MADV_POPULATE_WRITE */
  NUM_SLOTS = 1 << 20, /* of the hash table; a power of 2 */
  MAX_ENTRIES = 1 << 22,
  EMPTY = 0,
  DELETED = 1 /* no address: not aligned */
};

/* nbytes > 0: allocated at `value`; < 0: freed; 0: the mark `value`. */
typedef struct log_entry {
  int64_t value;
  int64_t nbytes;
} log_entry;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static log_entry entries[MAX_ENTRIES];
static int64_t num_entries; /* MAX_ENTRIES + 1: something was lost */
static uintptr_t live_address[NUM_SLOTS];
static int64_t live_nbytes[NUM_SLOTS];

extern void *__libc_memalign(size_t alignment, size_t nbytes);
extern void __libc_free(void *memory);

static void add_entry(int64_t value, int64_t nbytes) {
  if (num_entries < MAX_ENTRIES) {
    entries[num_entries] = (log_entry){.value = value, .nbytes = nbytes};
  }
  if (num_entries <= MAX_ENTRIES) num_entries++;
}

static size_t first_slot(uintptr_t address) {
  return (size_t)(address / ALIGNMENT * UINT64_C(0x9E3779B97F4A7C15) >> 40) &
         (NUM_SLOTS - 1);
}

static void note_allocation(uintptr_t address, int64_t nbytes) {
  size_t slot = first_slot(address);
  while (live_address[slot] > DELETED) slot = (slot + 1) & (NUM_SLOTS - 1);
  live_address[slot] = address;
  live_nbytes[slot] = nbytes;
  add_entry((int64_t)address, nbytes);
}

static void note_free(uintptr_t address) {
  size_t slot = first_slot(address);
  while (live_address[slot] != EMPTY) {
    if (live_address[slot] == address) {
      live_address[slot] = DELETED;
      add_entry((int64_t)address, -live_nbytes[slot]);
      return;
    }
    slot = (slot + 1) & (NUM_SLOTS - 1);
  }
}

int posix_memalign(void **memory, size_t alignment, size_t nbytes) {
  void *result = __libc_memalign(alignment, nbytes);
  if (result == NULL) return ENOMEM;
  *memory = result;
  if (alignment == ALIGNMENT && nbytes > 0) {
    pthread_mutex_lock(&mutex);
    note_allocation((uintptr_t)result, (int64_t)nbytes);
    pthread_mutex_unlock(&mutex);
  }
  return 0;
}

void free(void *memory) {
  if (memory != NULL && (uintptr_t)memory % ALIGNMENT == 0) {
    pthread_mutex_lock(&mutex);
    note_free((uintptr_t)memory);
    pthread_mutex_unlock(&mutex);
  }
  __libc_free(memory);
}

int madvise(void *memory, size_t nbytes, int advice) {
  if (advice == POPULATE_WRITE || advice == WILLNEED || advice == FREE) {
    pthread_mutex_lock(&mutex);
    if (advice == FREE) {
      note_free((uintptr_t)memory);
    } else {
      note_allocation((uintptr_t)memory, (int64_t)nbytes);
    }
    pthread_mutex_unlock(&mutex);
  }
  return (int)syscall(SYS_madvise, memory, nbytes, advice);
}

int munmap(void *memory, size_t nbytes) {
  pthread_mutex_lock(&mutex);
  note_free((uintptr_t)memory);
  pthread_mutex_unlock(&mutex);
  return (int)syscall(SYS_munmap, memory, nbytes);
}

/* Puts a mark into the log. */
void memory_count_mark(int64_t mark) {
  pthread_mutex_lock(&mutex);
  add_entry(mark, 0);
  pthread_mutex_unlock(&mutex);
}

const log_entry *memory_count_entries(void) {
  return entries;
}

/* More than memory_count_max_entries(): the log is incomplete. */
int64_t memory_count_num_entries(void) {
  return num_entries;
}

int64_t memory_count_max_entries(void) {
  return MAX_ENTRIES;
}
