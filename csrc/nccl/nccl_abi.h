/*
 * The part of NCCL's binary interface that the transport uses. It is declared
 * here so that building needs neither CUDA nor nccl.h; tests/c/abi compares it
 * with a real nccl.h.
 *
 * Enums are passed as int and streams as void *, which use the same registers
 * on every platform that NCCL supports.
 */
#ifndef FSDP_NCCL_ABI_H
#define FSDP_NCCL_ABI_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fsdp_nccl_comm fsdp_nccl_comm; /* what ncclComm_t points at */

enum { FSDP_NCCL_ID_NBYTES = 128 };

typedef struct fsdp_nccl_id { /* ncclUniqueId */
  char internal[FSDP_NCCL_ID_NBYTES];
} fsdp_nccl_id;

/* ncclResult_t */
enum {
  FSDP_NCCL_SUCCESS = 0,
  FSDP_NCCL_UNHANDLED_CUDA_ERROR = 1,
  FSDP_NCCL_SYSTEM_ERROR = 2,
  FSDP_NCCL_INTERNAL_ERROR = 3,
  FSDP_NCCL_INVALID_ARGUMENT = 4,
  FSDP_NCCL_INVALID_USAGE = 5,
  FSDP_NCCL_REMOTE_ERROR = 6,
  FSDP_NCCL_IN_PROGRESS = 7
};

/* ncclDataType_t */
enum {
  FSDP_NCCL_INT8 = 0,
  FSDP_NCCL_UINT8 = 1,
  FSDP_NCCL_INT32 = 2,
  FSDP_NCCL_INT64 = 4,
  FSDP_NCCL_FLOAT16 = 6,
  FSDP_NCCL_FLOAT32 = 7,
  FSDP_NCCL_FLOAT64 = 8,
  FSDP_NCCL_BFLOAT16 = 9
};

/* ncclRedOp_t */
enum { FSDP_NCCL_SUM = 0, FSDP_NCCL_AVG = 4 };

/* The beginning of ncclConfig_t, as of NCCL 2.18, which `version` declares. The
 * library uses its own defaults for the rest. */
typedef struct fsdp_nccl_config {
  size_t nbytes;
  unsigned int magic;
  unsigned int version;
  int blocking;
  int cga_cluster_size;
  int min_ctas;
  int max_ctas;
  const char *net_name;
  int split_share;
} fsdp_nccl_config;

#define FSDP_NCCL_CONFIG_MAGIC 0xcafebeefu
enum {
  FSDP_NCCL_OLDEST_VERSION = 21800, /* 2.18.0, as ncclGetVersion codes it */
  FSDP_NCCL_CONFIG_UNDEFINED = -0x7fffffff - 1
};

/* The entry points, under NCCL's names without "nccl". */
typedef struct fsdp_nccl_api {
  int (*get_version)(int *version);
  int (*get_unique_id)(fsdp_nccl_id *id);
  int (*comm_init_rank_config)(fsdp_nccl_comm **comm, int num_ranks,
                               fsdp_nccl_id id, int rank,
                               fsdp_nccl_config *config);
  int (*comm_get_async_error)(fsdp_nccl_comm *comm, int *async_error);
  int (*comm_finalize)(fsdp_nccl_comm *comm);
  int (*comm_destroy)(fsdp_nccl_comm *comm);
  int (*comm_abort)(fsdp_nccl_comm *comm);
  const char *(*get_error_string)(int result);
  int (*group_start)(void);
  int (*group_end)(void);
  int (*all_gather)(const void *send, void *receive, size_t send_numel,
                    int dtype, fsdp_nccl_comm *comm, void *stream);
  int (*reduce_scatter)(const void *send, void *receive, size_t receive_numel,
                        int dtype, int op, fsdp_nccl_comm *comm, void *stream);
  int (*all_reduce)(const void *send, void *receive, size_t numel, int dtype,
                    int op, fsdp_nccl_comm *comm, void *stream);
  int (*broadcast)(const void *send, void *receive, size_t numel, int dtype,
                   int root, fsdp_nccl_comm *comm, void *stream);

  /* Optional: NULL in a library without them. */
  const char *(*get_last_error)(fsdp_nccl_comm *comm);
  int (*comm_revoke)(fsdp_nccl_comm *comm, int flags);
} fsdp_nccl_api;

#ifdef __cplusplus
}
#endif
#endif /* FSDP_NCCL_ABI_H */
