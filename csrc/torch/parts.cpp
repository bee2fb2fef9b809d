// What of fsdp_c's own transports and kernels can be used on this machine.
#include <ATen/Context.h>
#include <Python.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>

#include "shm/shm_transport.h"
#include "torch/bridge.h"
#include "torch/device/cuda_kernels.hpp"
#include "torch/groups/nccl_group.hpp"
#include "torch/guard.hpp"

namespace fsdp_torch {
namespace {

fsdp_status forget(void * /*context*/, const char * /*key*/,
                   const void * /*value*/, int64_t /*nbytes*/,
                   fsdp_error * /*error*/) {
  return FSDP_OK;
}

fsdp_status find_nothing(void * /*context*/, const char *key,
                         int64_t /*timeout_ms*/, void * /*value*/,
                         int64_t /*capacity*/, int64_t * /*nbytes*/,
                         fsdp_error *error) {
  return FSDP_FAIL(error, FSDP_INTERNAL, "nobody has written '%s'", key);
}

// Why a transport through shared memory cannot be made here; "" if one was
// made, and given back: that of a rank alone, which reads nothing in a store.
std::string why_no_shm() {
  const fsdp_store store = {nullptr, forget, find_nothing, nullptr};
  fsdp_shm_options options = {};
  options.nbytes = sizeof(options);
  options.key_prefix = "parts/";
  fsdp_transport *transport = nullptr;
  fsdp_shm_verdict verdict = {};
  fsdp_error error = {};
  if (fsdp_shm_create(&store, &options, 0, 1, &transport, &verdict, &error) !=
      FSDP_OK) {
    return text_of(error);
  }
  if (transport == nullptr) return verdict.reason;
  transport->ops->destroy(transport);
  return "";
}

std::string why_no_kernels() {
  try {
    if (!at::hasCUDA()) return "torch sees no CUDA device";
    return why_no_cuda_kernels(c10::Device(c10::kCUDA, 0));
  } catch (const c10::Error &e) {
    return e.what_without_backtrace();  // a driver that does not work
  }
}

}  // namespace
}  // namespace fsdp_torch

extern "C" PyObject *fsdp_torch_parts(void) {
  HANDLE_TH_ERRORS
  std::string shm;
  std::string kernels;
  fsdp_torch::NcclLibrary nccl;
  {
    const pybind11::gil_scoped_release no_gil;
    shm = fsdp_torch::why_no_shm();
    nccl = fsdp_torch::find_nccl();
    kernels = fsdp_torch::why_no_kernels();
  }
  return Py_BuildValue("{ssssssssssss}", "why_no_shm", shm.c_str(),
                       "why_no_nccl", nccl.why_not.c_str(), "nccl_path",
                       nccl.path.c_str(), "nccl_origin", nccl.origin.c_str(),
                       "nccl_version", nccl.version.c_str(),
                       "why_no_cuda_kernels", kernels.c_str());
  END_HANDLE_TH_ERRORS
}
