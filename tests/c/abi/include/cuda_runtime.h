/*
 * What nccl.h needs of CUDA's header of this name, for machines without CUDA.
 */
#ifndef FSDP_TESTS_ABI_CUDA_RUNTIME_H
#define FSDP_TESTS_ABI_CUDA_RUNTIME_H

#include <stddef.h>
#include <stdint.h>

#define CUDART_VERSION 0          /* no header for bf16 or fp8 either */
#define __CUDA_BF16_TYPES_EXIST__ /* older headers number bf16 only then */

typedef struct CUstream_st *cudaStream_t;
typedef struct CUevent_st *cudaEvent_t;

#endif /* FSDP_TESTS_ABI_CUDA_RUNTIME_H */
