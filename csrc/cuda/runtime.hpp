// The runtime that launches the kernels: CUDA's, or HIP's under CUDA's names,
// when hipcc compiles for AMD. HIP's versions have other digits.
#pragma once

#if defined(__HIPCC__)
#include <hip/hip_runtime.h>

#define FSDP_CUDA_RUNTIME "HIP"
#define FSDP_CUDA_MAJOR 10000000
#define FSDP_CUDA_MINOR 100000

#define cudaDriverGetVersion hipDriverGetVersion
#define cudaError_t hipError_t
#define cudaFuncAttributes hipFuncAttributes
#define cudaFuncGetAttributes hipFuncGetAttributes
#define cudaGetErrorName hipGetErrorName
#define cudaGetErrorString hipGetErrorString
#define cudaGetLastError hipGetLastError
#define cudaRuntimeGetVersion hipRuntimeGetVersion
#define cudaStream_t hipStream_t
#define cudaSuccess hipSuccess

#if !defined(__grid_constant__)
#define __grid_constant__  // the compiler reads parameters where they are
#endif
// Of a wavefront, of 32 or 64 threads, `kWarp` shuffle by themselves.
#define __shfl_down_sync(mask, value, half) __shfl_down(value, half, kWarp)
#else
#include <cuda_runtime.h>

#define FSDP_CUDA_RUNTIME "CUDA"
#define FSDP_CUDA_MAJOR 1000
#define FSDP_CUDA_MINOR 10
#endif
