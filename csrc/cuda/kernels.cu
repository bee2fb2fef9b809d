// The kernels, their launches, and the table that the bridge gets.
#include <cuda_runtime.h>

#include "cuda/kernels.h"
#include "cuda/launch.hpp"
#include "cuda/work.hpp"

namespace fsdp_cuda {
namespace {

template <int Capacity>
__global__ void __launch_bounds__(kThreads)
    pack_kernel(const __grid_constant__ Table<Capacity> table, double scale) {
  pack_thread(table, static_cast<int>(blockIdx.x),
              static_cast<int>(threadIdx.x), scale);
}

// Leaves the sum of `width` neighbours of a warp with the first of them.
__device__ double warp_sum(double sum, int width, double power) {
  return norm_fold(sum, width, power, [](double value, int half) {
    return __shfl_down_sync(0xffffffffU, value, half);
  });
}

// Leaves the sum of a block's threads with thread 0: within the warps, then
// over them, with one barrier between.
__device__ double block_sum(double sum, double power) {
  __shared__ double sums[kWarps];
  const int thread = static_cast<int>(threadIdx.x);
  sum = warp_sum(sum, kWarp, power);
  if (thread % kWarp == 0) sums[thread / kWarp] = sum;
  __syncthreads();
  return warp_sum(thread < kWarps ? sums[thread] : 0.0, kWarps, power);
}

template <int Capacity>
__global__ void __launch_bounds__(kThreads)
    norm_kernel(const __grid_constant__ Table<Capacity> table, double power,
                double *partials) {
  const double sum =
      block_sum(norm_thread(table, static_cast<int>(blockIdx.x),
                            static_cast<int>(threadIdx.x), power),
                power);
  if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads)
    norm_finish_kernel(const double *partials, int64_t num_partials,
                       double power, double *norm) {
  const double sum =
      block_sum(norm_partials(partials, num_partials,
                              static_cast<int>(threadIdx.x), power),
                power);
  if (threadIdx.x == 0) *norm = norm_of_sum(sum, power);
}

template <int Capacity>
__global__ void __launch_bounds__(kThreads)
    scale_kernel(const __grid_constant__ Table<Capacity> table,
                 const float *scale) {
  scale_thread(table, static_cast<int>(blockIdx.x),
               static_cast<int>(threadIdx.x), *scale);
}

// cudaGetLastError also clears what an earlier launch left.
fsdp_status launched(const char *operation, int num_blocks, fsdp_error *error) {
  const cudaError_t code = cudaGetLastError();
  if (code == cudaSuccess) return FSDP_OK;
  return FSDP_FAIL(
      error, FSDP_BACKEND, "CUDA %s: launching %d blocks failed: %s (%s)",
      operation, num_blocks, cudaGetErrorString(code), cudaGetErrorName(code));
}

fsdp_status pack(const fsdp_pack_item *items, int64_t num_items, double scale,
                 void *stream, fsdp_error *error) {
  const fsdp_status status = check_pack(items, num_items, error);
  if (status != FSDP_OK) return status;
  const cudaStream_t on = static_cast<cudaStream_t>(stream);
  return for_tables(
      num_items, [&](int64_t i) { return items[i].numel; },
      [&](int64_t i, int64_t *num_tiles) {
        return item_for_pack(items[i], num_tiles);
      },
      [&](const Table<kManyItems> &table) {
        if (table.num_items <= kFewItems) {
          pack_kernel<<<table.num_tiles, kThreads, 0, on>>>(few_items(table),
                                                            scale);
        } else {
          pack_kernel<<<table.num_tiles, kThreads, 0, on>>>(table, scale);
        }
        return launched("pack", table.num_tiles, error);
      },
      error);
}

fsdp_status norm_scratch(const fsdp_host_span *spans, int64_t num_spans,
                         int64_t *nbytes, fsdp_error *error) {
  fsdp_status status = check_spans(spans, num_spans, "norm", error);
  int64_t num_partials = 0;
  if (status != FSDP_OK) return status;
  status = for_tables(
      num_spans, [&](int64_t i) { return spans[i].numel; },
      [&](int64_t i, int64_t *num_tiles) {
        return item_for_norm(spans[i], num_tiles);
      },
      [&](const Table<kManyItems> &table) {
        num_partials += table.num_tiles;
        return FSDP_OK;
      },
      error);
  if (status != FSDP_OK) return status;
  *nbytes = 8 * (num_partials > 0 ? num_partials : 1);
  return FSDP_OK;
}

fsdp_status norm(const fsdp_host_span *spans, int64_t num_spans, double power,
                 void *scratch, double *result, void *stream,
                 fsdp_error *error) {
  fsdp_status status = check_spans(spans, num_spans, "norm", error);
  if (status != FSDP_OK) return status;
  if (!(power > 0)) {
    return FSDP_FAIL(error, FSDP_INVALID_ARGUMENT,
                     "CUDA norm: the power is %g, it must be > 0 or infinity",
                     power);
  }
  const cudaStream_t on = static_cast<cudaStream_t>(stream);
  double *partials = static_cast<double *>(scratch);
  int64_t num_partials = 0;
  status = for_tables(
      num_spans, [&](int64_t i) { return spans[i].numel; },
      [&](int64_t i, int64_t *num_tiles) {
        return item_for_norm(spans[i], num_tiles);
      },
      [&](const Table<kManyItems> &table) {
        double *own = partials + num_partials;
        if (table.num_items <= kFewItems) {
          norm_kernel<<<table.num_tiles, kThreads, 0, on>>>(few_items(table),
                                                            power, own);
        } else {
          norm_kernel<<<table.num_tiles, kThreads, 0, on>>>(table, power, own);
        }
        num_partials += table.num_tiles;
        return launched("norm", table.num_tiles, error);
      },
      error);
  if (status != FSDP_OK) return status;
  norm_finish_kernel<<<1, kThreads, 0, on>>>(partials, num_partials, power,
                                             result);
  return launched("norm", 1, error);
}

fsdp_status scale(const fsdp_host_span *spans, int64_t num_spans,
                  const float *factor, void *stream, fsdp_error *error) {
  const fsdp_status status = check_spans(spans, num_spans, "scale", error);
  if (status != FSDP_OK) return status;
  const cudaStream_t on = static_cast<cudaStream_t>(stream);
  return for_tables(
      num_spans, [&](int64_t i) { return spans[i].numel; },
      [&](int64_t i, int64_t *num_tiles) {
        return item_for_span(spans[i], num_tiles);
      },
      [&](const Table<kManyItems> &table) {
        if (table.num_items <= kFewItems) {
          scale_kernel<<<table.num_tiles, kThreads, 0, on>>>(few_items(table),
                                                             factor);
        } else {
          scale_kernel<<<table.num_tiles, kThreads, 0, on>>>(table, factor);
        }
        return launched("scale", table.num_tiles, error);
      },
      error);
}

const fsdp_cuda_kernels kernels = {FSDP_CUDA_KERNELS_VERSION, pack,
                                   norm_scratch, norm, scale};

}  // namespace
}  // namespace fsdp_cuda

// The only symbol that leaves the library.
extern "C" __attribute__((visibility("default"))) const fsdp_cuda_kernels *
fsdp_cuda_kernels_table(fsdp_error *error) {
  constexpr int kMajor = 1000;  // of a version, as 12040 for 12.4
  constexpr int kMinor = 10;
  int driver = 0;
  int runtime = 0;
  cudaFuncAttributes attributes = {};
  cudaError_t code = cudaDriverGetVersion(&driver);
  if (code == cudaSuccess) code = cudaRuntimeGetVersion(&runtime);
  if (code == cudaSuccess && driver / kMajor >= runtime / kMajor) {
    code = cudaFuncGetAttributes(
        &attributes,
        reinterpret_cast<const void *>(fsdp_cuda::norm_finish_kernel));
    if (code == cudaSuccess) return &fsdp_cuda::kernels;
  }
  (void)cudaGetLastError();  // reported here, and no launch's failure
  (void)FSDP_FAIL(
      error, FSDP_BACKEND,
      "the CUDA kernels cannot run here: %s; driver %d.%d, built with %d.%d",
      code != cudaSuccess ? cudaGetErrorString(code) : "the driver is too old",
      driver / kMajor, driver % kMajor / kMinor, runtime / kMajor,
      runtime % kMajor / kMinor);
  return nullptr;
}
