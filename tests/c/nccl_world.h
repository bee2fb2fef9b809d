/*
 * A NCCL and a store for several ranks, each a process of its own: they share
 * this memory. A collective ends when all ranks have launched it, a
 * communicator is made when all ranks have come. Knows how things go wrong: a
 * rank that is gone, a store that is gone or does not answer, a launch that
 * fails, an abort that waits for the other communicator's kernel.
 */
#ifndef FSDP_TESTS_NCCL_WORLD_H
#define FSDP_TESTS_NCCL_WORLD_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "nccl/nccl_transport.h"

enum {
  NCCL_WORLD_MAX_RANKS = 4,
  NCCL_WORLD_MAX_GROUPS = 2,
  NCCL_WORLD_MAX_KEYS = 64,
  NCCL_WORLD_VALUE_NBYTES = 1024
};

typedef enum nccl_world_store_mode {
  NCCL_WORLD_STORE_WORKS = 0,
  NCCL_WORLD_STORE_FAILS, /* every request, at once */
  NCCL_WORLD_STORE_HANGS  /* every request, for good */
} nccl_world_store_mode;

/* The ranks of one communicator; `launched` is -1 before they came. */
typedef struct nccl_world_group {
  _Atomic int64_t launched[NCCL_WORLD_MAX_RANKS];
  _Atomic bool is_aborted[NCCL_WORLD_MAX_RANKS];
  _Atomic bool has_left[NCCL_WORLD_MAX_RANKS];
} nccl_world_group;

typedef struct nccl_world_entry {
  char key[256];
  char value[NCCL_WORLD_VALUE_NBYTES];
  int64_t nbytes;
} nccl_world_entry;

/* In memory that the processes share, zero before nccl_world_init. */
typedef struct nccl_world {
  int64_t world_size;
  bool is_death_noticed; /* by NCCL, as a closed connection */
  _Atomic bool is_dead[NCCL_WORLD_MAX_RANKS];
  _Atomic int store_mode;
  _Atomic int64_t num_wrong; /* calls that no caller may make */
  _Atomic int64_t num_ids;
  nccl_world_group groups[NCCL_WORLD_MAX_GROUPS];
  _Atomic bool store_lock;
  int64_t num_entries;
  nccl_world_entry entries[NCCL_WORLD_MAX_KEYS];
} nccl_world;

void nccl_world_init(nccl_world *world, int64_t world_size);

/* Of this process: which rank it is, and its launch that fails (from 0; -1:
 * none). Before anything else here. */
void nccl_world_enter(nccl_world *world, int64_t rank, int64_t failing_launch);
/* Before the process goes: its threads hold nothing of the store any more. */
void nccl_world_be_silent(void);
fsdp_nccl_library nccl_world_library(void);
fsdp_store nccl_world_store(void);
fsdp_nccl_events nccl_world_events(void);

#endif /* FSDP_TESTS_NCCL_WORLD_H */
