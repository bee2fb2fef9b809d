/* The memory that the ranks of a communicator share. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "fake_nccl.h"

typedef struct header {
  meeting host;
  meeting device;
} header;

struct segment {
  header *header;
  slot *slots;
  letter *letters;
  char *pieces;
  size_t nbytes;
  int rank;
  int num_ranks;
};

static size_t up(size_t nbytes) {
  return (nbytes + 4095) & ~(size_t)4095;
}

/* Files of zeros: every field of a new segment starts so. */
segment *segment_open(const char *name, int rank, int num_ranks) {
  const size_t ranks = (size_t)num_ranks;
  const size_t slots = up(ranks * sizeof(slot));
  const size_t letters = up(ranks * ranks * sizeof(letter));
  const size_t nbytes =
      up(sizeof(header)) + slots + letters + ranks * (size_t)PIECE;
  const int file = shm_open(name, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0) return NULL;
  char *data = MAP_FAILED;
  if (ftruncate(file, (off_t)nbytes) == 0) {
    data = mmap(NULL, nbytes, PROT_READ | PROT_WRITE,
                MAP_SHARED | MAP_NORESERVE, file, 0);
  }
  close(file);
  if (data == MAP_FAILED) return NULL;
  segment *made = malloc(sizeof *made);
  if (made == NULL) abort();
  made->header = (header *)(void *)data;
  made->slots = (slot *)(void *)(data + up(sizeof(header)));
  made->letters = (letter *)(void *)(data + up(sizeof(header)) + slots);
  made->pieces = data + up(sizeof(header)) + slots + letters;
  made->nbytes = nbytes;
  made->rank = rank;
  made->num_ranks = num_ranks;
  return made;
}

void segment_close(segment *self) {
  if (self == NULL) return;
  munmap(self->header, self->nbytes);
  free(self);
}

slot *segment_slot(segment *self, int rank) {
  return &self->slots[rank];
}

char *segment_piece(segment *self, int rank) {
  return self->pieces + (size_t)rank * PIECE;
}

letter *segment_letter(segment *self, int from, int to) {
  return &self->letters[from * self->num_ranks + to];
}

meeting *segment_host_meeting(segment *self) {
  return &self->header->host;
}

meeting *segment_device_meeting(segment *self) {
  return &self->header->device;
}

void segment_new_name(char name[NAME_NBYTES]) {
  static atomic_int num_names;
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  snprintf(name, NAME_NBYTES, "/fakenccl-%d-%lld-%ld-%d", (int)getpid(),
           (long long)now.tv_sec, now.tv_nsec, atomic_fetch_add(&num_names, 1));
}
