// What Python sends itself between the ranks of a group, through its transport:
// messages between two ranks, broadcasts and sums.
#include <ATen/core/Tensor.h>
#include <Python.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "nccl/nccl_transport.h"
#include "shm/shm_transport.h"
#include "torch/bridge.h"
#include "torch/guard.hpp"
#include "torch/objects.hpp"
#include "torch/port/nccl_group.hpp"
#include "torch/port/transports.hpp"

namespace fsdp_torch {
namespace {

constexpr size_t kPiece = size_t{1} << 20;

// nullptr: the CPU.
c10::Device read_device(PyObject *object) {
  if (object == nullptr) return c10::kCPU;
  if (!THPDevice_Check(object)) {
    throw std::invalid_argument("expected a torch.device");
  }
  return reinterpret_cast<THPDevice *>(object)->device;
}

at::Tensor read_tensor(PyObject *object, c10::Device device, const char *what) {
  if (!THPVariable_Check(object)) {
    throw std::invalid_argument(std::string(what) + " is not a tensor");
  }
  at::Tensor tensor = THPVariable_Unpack(object);
  check_memory(tensor, what);
  if (tensor.device() != device) {
    throw std::invalid_argument(std::string(what) + " is on " +
                                tensor.device().str() + ", need it on " +
                                device.str());
  }
  return tensor;
}

struct TensorCopy {
  at::Tensor source;
  at::Tensor target;
};

TensorCopy read_copy(const fsdp_torch_copy &given, c10::Device device) {
  TensorCopy copy = {read_tensor(given.source, device, "the source of a copy"),
                     read_tensor(given.target, device, "the target of a copy")};
  if (copy.source.nbytes() != copy.target.nbytes()) {
    throw std::invalid_argument(c10::str("a copy of ", copy.source.nbytes(),
                                         " bytes into ", copy.target.nbytes()));
  }
  return copy;
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
  if (status != FSDP_OK) C10_THROW_ERROR(DistBackendError, error.message);
}

void wait(fsdp_transport *transport) {
  fsdp_error error = {};
  throw_unless_sent(fsdp_shm_wait_messages(transport, &error), error);
}

// The messages move on between the pieces: other ranks that send must not wait
// until a long copy is made.
void run(const TensorCopy &copy, fsdp_transport *transport) {
  const size_t nbytes = copy.source.nbytes();
  if (nbytes == 0) return;
  const auto *source = static_cast<const char *>(copy.source.const_data_ptr());
  auto *target = static_cast<char *>(copy.target.mutable_data_ptr());
  for (size_t begin = 0; begin < nbytes; begin += kPiece) {
    std::memcpy(target + begin, source + begin,
                std::min(kPiece, nbytes - begin));
    fsdp_error error = {};
    throw_unless_sent(fsdp_shm_move_messages(transport, &error), error);
  }
}

// What the ranks pass and what this one copies, of one device.
struct Traffic {
  c10::Device device;
  std::vector<at::Tensor> tensors;  // of the messages
  std::vector<TensorCopy> copies;
};

Traffic read_traffic(const fsdp_torch_messages &given) {
  Traffic traffic = {read_device(given.device), {}, {}};
  for (int64_t i = 0; i < given.num_messages; i++) {
    traffic.tensors.push_back(
        read_tensor(given.messages[i].tensor, traffic.device, "a message"));
  }
  for (int64_t i = 0; i < given.num_copies; i++) {
    traffic.copies.push_back(read_copy(given.copies[i], traffic.device));
  }
  return traffic;
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

void pass_in_memory(fsdp_transport *transport, const fsdp_torch_messages &given,
                    const Traffic &traffic) {
  const KeptIfWritten kept(transport, traffic.tensors);
  for (int64_t i = 0; i < given.num_messages; i++) {
    start(transport, given.messages[i], traffic.tensors[static_cast<size_t>(i)],
          given.label);
  }
  for (const TensorCopy &copy : traffic.copies) run(copy, transport);
  wait(transport);
}

// On the gathers' channel and the current stream.
fsdp_call call_on(c10::Device device, const char *label) {
  const c10::Stream stream =
      c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  know_stream(stream);
  fsdp_call call = {};
  call.channel = FSDP_CHANNEL_GATHER;
  call.stream = stream.native_handle();
  call.label = label;
  return call;
}

void pass_over_nccl(fsdp_transport *transport, const fsdp_torch_messages &given,
                    const Traffic &traffic) {
  std::vector<fsdp_nccl_message> messages;
  for (int64_t i = 0; i < given.num_messages; i++) {
    const at::Tensor &tensor = traffic.tensors[static_cast<size_t>(i)];
    messages.push_back({tensor.data_ptr(),
                        static_cast<int64_t>(tensor.nbytes()),
                        given.messages[i].peer, given.messages[i].is_outgoing});
  }
  const fsdp_call call = call_on(traffic.device, given.label);
  fsdp_error failure = {};
  const fsdp_status status = fsdp_nccl_pass_messages(
      transport, &call, messages.data(), given.num_messages, &failure);
  if (status == FSDP_INVALID_ARGUMENT) throw_error(failure);
  throw_unless_sent(status, failure);
  const at::NoGradGuard no_grad;
  for (const TensorCopy &copy : traffic.copies) copy.target.copy_(copy.source);
}

// Makes a collective of a tensor, on the current stream of its device. False:
// the group has no NCCL there, and nothing was done.
template <typename Collective>
bool over_nccl(PyObject *group, PyObject *tensor, const char *label,
               Collective collective) {
  if (!THPVariable_Check(tensor)) {
    throw std::invalid_argument("what is sent is not a tensor");
  }
  const at::Tensor &given = THPVariable_Unpack(tensor);
  check_memory(given, "what is sent");
  const c10::Device device = given.device();
  if (device.is_cpu()) return false;
  Group found = group_from(group, device);
  const pybind11::gil_scoped_release no_gil;
  const c10::DeviceGuard on_device(device);
  connect(found, device, 0);
  fsdp_transport *transport = found.transport.get();
  if (transport == nullptr || !is_nccl(*transport)) return false;
  const fsdp_call call = call_on(device, label);
  fsdp_error failure = {};
  throw_unless_sent(collective(transport, call, given, &failure), failure);
  return true;
}

}  // namespace
}  // namespace fsdp_torch

extern "C" fsdp_status fsdp_torch_pass_messages(
    PyObject *group, const fsdp_torch_messages *given, bool *are_passed,
    fsdp_error *error) {
  GUARDED(error) {
    const fsdp_torch::Traffic traffic = fsdp_torch::read_traffic(*given);
    fsdp_torch::Group found = fsdp_torch::group_from(group, traffic.device);
    const pybind11::gil_scoped_release no_gil;
    const c10::DeviceGuard on_device(traffic.device);
    fsdp_torch::connect(found, traffic.device, 0);
    fsdp_transport *transport = found.transport.get();
    *are_passed = true;
    if (transport != nullptr && fsdp_torch::is_nccl(*transport)) {
      fsdp_torch::pass_over_nccl(transport, *given, traffic);
    } else if (transport != nullptr && traffic.device.is_cpu() &&
               std::strcmp(transport->ops->name, "shm") == 0) {
      fsdp_torch::pass_in_memory(transport, *given, traffic);
    } else {
      *are_passed = false;
    }
    return FSDP_OK;
  };
}

extern "C" fsdp_status fsdp_torch_broadcast(PyObject *group, PyObject *tensor,
                                            const char *label, bool *was_sent,
                                            fsdp_error *error) {
  GUARDED(error) {
    *was_sent = fsdp_torch::over_nccl(
        group, tensor, label,
        [](fsdp_transport *transport, const fsdp_call &call,
           const at::Tensor &given, fsdp_error *failure) {
          constexpr fsdp_dtype kBytes = {static_cast<int32_t>(at::kByte), 1};
          return transport->ops->broadcast(transport, &call, given.data_ptr(),
                                           static_cast<int64_t>(given.nbytes()),
                                           0, kBytes, nullptr, failure);
        });
    return FSDP_OK;
  };
}

extern "C" fsdp_status fsdp_torch_all_reduce(PyObject *group, PyObject *tensor,
                                             const char *label, bool *was_sent,
                                             fsdp_error *error) {
  GUARDED(error) {
    *was_sent = fsdp_torch::over_nccl(
        group, tensor, label,
        [](fsdp_transport *transport, const fsdp_call &call,
           const at::Tensor &given, fsdp_error *failure) {
          return transport->ops->all_reduce(
              transport, &call, given.data_ptr(), given.numel(),
              fsdp_torch::core_dtype(given.scalar_type()), nullptr, failure);
        });
    return FSDP_OK;
  };
}
