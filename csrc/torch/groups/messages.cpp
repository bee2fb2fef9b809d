// What Python sends itself between the ranks of a group, through its transport:
// messages between two ranks, and broadcasts.
#include <ATen/core/Tensor.h>
#include <Python.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "shm/shm_transport.h"
#include "torch/bridge.h"
#include "torch/copies.hpp"
#include "torch/groups/nccl_group.hpp"
#include "torch/groups/transports.hpp"
#include "torch/guard.hpp"
#include "torch/objects.hpp"

namespace fsdp_torch {
namespace {

constexpr int64_t kPiece = int64_t{1} << 20;

at::Tensor read_tensor(PyObject *object, const char *what) {
  if (!THPVariable_Check(object)) {
    throw std::invalid_argument(std::string(what) + " is not a tensor");
  }
  at::Tensor tensor = THPVariable_Unpack(object);
  check_memory(tensor, what);
  if (!tensor.is_cpu()) {
    throw std::invalid_argument(std::string(what) + " is on " +
                                tensor.device().str() + ", need it on the CPU");
  }
  return tensor;
}

void start(fsdp_transport *transport, const fsdp_torch_message &message,
           const at::Tensor &tensor, const char *label) {
  const auto nbytes = static_cast<int64_t>(tensor.nbytes());
  fsdp_error error = {};
  const fsdp_status status =
      message.is_outgoing
          ? fsdp_shm_send(transport, message.peer, tensor.const_data_ptr(),
                          nbytes, label, &error)
          : fsdp_shm_recv(transport, message.peer, tensor.mutable_data_ptr(),
                          nbytes, label, &error);
  if (status != FSDP_OK) throw_error(error);
}

void throw_unless_sent(fsdp_status status, const fsdp_error &error) {
  if (status != FSDP_OK) C10_THROW_ERROR(DistBackendError, text_of(error));
}

void wait(fsdp_transport *transport) {
  fsdp_error error = {};
  throw_unless_sent(fsdp_shm_wait_messages(transport, &error), error);
}

// The messages move on meanwhile: other ranks that send must not wait until all
// copies are made.
void run(const Copies &copies, fsdp_transport *transport) {
  int64_t unmoved = 0;
  for (const Copy &copy : copies) {
    Copy piece = copy;
    for (int64_t left = copy.nbytes; left > 0; left -= piece.nbytes) {
      piece.nbytes = std::min(kPiece, left);
      make_copy(piece, c10::DispatchKeySet());
      piece.source_offset += piece.nbytes;
      piece.target_offset += piece.nbytes;
      unmoved += piece.nbytes;
      if (unmoved < kPiece) continue;
      unmoved = 0;
      fsdp_error error = {};
      throw_unless_sent(fsdp_shm_move_messages(transport, &error), error);
    }
  }
}

// Another rank may write into memory that it was offered even after a failure:
// then the memory is never given back.
class KeptIfWritten {
 public:
  KeptIfWritten(fsdp_transport *transport,
                const std::vector<at::Tensor> &tensors)
      : transport_(transport), tensors_(tensors) {}
  KeptIfWritten(const KeptIfWritten &) = delete;
  KeptIfWritten &operator=(const KeptIfWritten &) = delete;
  ~KeptIfWritten() {
    if (!fsdp_shm_has_writers(transport_)) return;
    static auto *kept = new std::vector<at::Tensor>;
    static std::mutex mutex;
    const std::lock_guard<std::mutex> lock(mutex);
    kept->insert(kept->end(), tensors_.begin(), tensors_.end());
  }

 private:
  fsdp_transport *transport_;
  const std::vector<at::Tensor> &tensors_;
};

}  // namespace
}  // namespace fsdp_torch

extern "C" fsdp_status fsdp_torch_pass_messages(
    PyObject *group, const fsdp_torch_messages *given, bool *are_passed,
    fsdp_error *error) {
  GUARDED(error) {
    fsdp_torch::Group found = fsdp_torch::group_from(group, c10::kCPU);
    std::vector<at::Tensor> tensors;
    static const fsdp_torch::Copies none;
    const fsdp_torch::Copies &copies =
        given->copies == Py_None ? none : fsdp_torch::copies_in(given->copies);
    for (const fsdp_torch::Copy &copy : copies) {
      if (copy.target.is_cpu()) continue;
      throw std::invalid_argument("a copy is not on the CPU");
    }
    for (int64_t i = 0; i < given->num_messages; i++) {
      tensors.push_back(
          fsdp_torch::read_tensor(given->messages[i].tensor, "a message"));
    }
    const pybind11::gil_scoped_release no_gil;
    fsdp_torch::connect(found, c10::kCPU, 0);
    fsdp_transport *transport = found.transport.get();
    *are_passed =
        transport != nullptr && std::strcmp(transport->ops->name, "shm") == 0;
    if (!*are_passed) return FSDP_OK;
    const fsdp_torch::KeptIfWritten kept(transport, tensors);
    for (int64_t i = 0; i < given->num_messages; i++) {
      fsdp_torch::start(transport, given->messages[i],
                        tensors[static_cast<size_t>(i)], given->label);
    }
    fsdp_torch::run(copies, transport);
    fsdp_torch::wait(transport);
    return FSDP_OK;
  };
}

extern "C" fsdp_status fsdp_torch_broadcast(PyObject *group, PyObject *tensor,
                                            const char *label, bool *was_sent,
                                            fsdp_error *error) {
  GUARDED(error) {
    if (!THPVariable_Check(tensor)) {
      throw std::invalid_argument("what is broadcast is not a tensor");
    }
    const at::Tensor &given = THPVariable_Unpack(tensor);
    fsdp_torch::check_memory(given, "what is broadcast");
    const c10::Device device = given.device();
    *was_sent = false;
    if (device.is_cpu()) return FSDP_OK;
    fsdp_torch::Group found = fsdp_torch::group_from(group, device);
    const pybind11::gil_scoped_release no_gil;
    const c10::DeviceGuard on_device(device);
    fsdp_torch::connect(found, device, 0);
    fsdp_transport *transport = found.transport.get();
    if (transport == nullptr || !fsdp_torch::is_nccl(*transport)) {
      return FSDP_OK;
    }
    const c10::Stream stream =
        c10::impl::VirtualGuardImpl(device.type()).getStream(device);
    fsdp_torch::know_stream(stream);
    fsdp_call call = {};
    call.channel = FSDP_CHANNEL_GATHER;
    call.stream = stream.native_handle();
    call.label = label;
    constexpr fsdp_dtype kBytes = {static_cast<int32_t>(at::kByte), 1};
    fsdp_error failure = {};
    fsdp_torch::throw_unless_sent(
        transport->ops->broadcast(transport, &call, given.data_ptr(),
                                  static_cast<int64_t>(given.nbytes()), 0,
                                  kBytes, nullptr, &failure),
        failure);
    *was_sent = true;
    return FSDP_OK;
  };
}
