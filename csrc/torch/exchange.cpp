// Exchanges over tensors: what is to be passed, copied and unpacked, as views.
#include "state/exchange.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <Python.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cstring>
#include <string>
#include <vector>

#include "torch/bridge.h"
#include "torch/guard.hpp"
#include "torch/objects.hpp"
#include "torch/unit.hpp"

namespace fsdp_torch {
namespace {

struct Message {
  int64_t peer;
  at::Tensor bytes;
};

struct Copy {
  at::Tensor source;
  at::Tensor target;
};

struct Prepared {
  std::vector<Message> outgoing;
  std::vector<Message> incoming;
  std::vector<Copy> copies;
  std::vector<Copy> unpacking;
};

std::string item_name(const char *side, size_t index) {
  return std::string(side) + " of item " + std::to_string(index);
}

const at::Tensor &tensor_of(PyObject *object, const std::string &name) {
  if (!THPVariable_Check(object)) {
    throw std::invalid_argument(name + " is no tensor");
  }
  return THPVariable_Unpack(object);
}

void check_nbytes(const at::Tensor &tensor, int64_t nbytes,
                  const std::string &name) {
  if (static_cast<int64_t>(tensor.nbytes()) == nbytes) return;
  throw std::invalid_argument(c10::str(name, " has ", tensor.nbytes(),
                                       " bytes, the exchange has ", nbytes,
                                       " there"));
}

// The tensors of one rank, each as bytes; a source may be absent.
class Sides {
 public:
  Sides(const fsdp_exchange *exchange, fsdp_torch_buffers sources,
        fsdp_torch_buffers targets)
      : exchange_(exchange) {
    const int64_t num_items = fsdp_exchange_num_items(exchange);
    if (sources.num_tensors != num_items || targets.num_tensors != num_items) {
      throw std::invalid_argument(
          c10::str(sources.num_tensors, " sources and ", targets.num_tensors,
                   " targets, the exchange has ", num_items, " items"));
    }
    for (int64_t i = 0; i < num_items; i++) add_target(i, targets.tensors[i]);
    for (int64_t i = 0; i < num_items; i++) add_source(i, sources.tensors[i]);
    if (!targets_.empty()) keys_ = keys_of(device());
  }

  bool is_empty() const { return targets_.empty(); }
  c10::Device device() const { return targets_.front().device(); }

  at::Tensor source(int64_t item, int64_t offset, int64_t nbytes) const {
    return bytes(sources_[static_cast<size_t>(item)], offset, nbytes);
  }
  at::Tensor target(int64_t item, int64_t offset, int64_t nbytes) const {
    return bytes(targets_[static_cast<size_t>(item)], offset, nbytes);
  }

 private:
  void add_target(int64_t index, PyObject *object) {
    const std::string name = item_name("target", static_cast<size_t>(index));
    const at::Tensor &target = tensor_of(object, name);
    check_memory(target, name);
    check_nbytes(target, fsdp_exchange_needed_nbytes(exchange_, index), name);
    if (!targets_.empty() && target.device() != device()) {
      throw std::invalid_argument(name + " is on " + target.device().str() +
                                  ", others on " + device().str());
    }
    targets_.push_back(target);
  }

  // It is brought to where the targets are.
  void add_source(int64_t index, PyObject *object) {
    const std::string name = item_name("source", static_cast<size_t>(index));
    at::Tensor source;
    if (object != Py_None) {
      source = tensor_of(object, name);
      if (source.device() != device()) source = source.detach().to(device());
      source = source.resolve_conj().resolve_neg().contiguous();
      check_memory(source, name);
    }
    const int64_t nbytes = fsdp_exchange_held_nbytes(exchange_, index);
    if (source.defined()) {
      check_nbytes(source, nbytes, name);
    } else if (nbytes > 0) {
      throw std::invalid_argument(c10::str(name, " is None, the exchange has ",
                                           nbytes, " bytes there"));
    }
    sources_.push_back(std::move(source));
  }

  at::Tensor bytes(const at::Tensor &tensor, int64_t offset,
                   int64_t nbytes) const {
    const int64_t begin =
        tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize());
    return make_view(
        StoragePtr::reclaim_copy(tensor.storage().unsafeGetStorageImpl()),
        keys_, at::kByte, {nbytes}, begin + offset);
  }

  const fsdp_exchange *exchange_;
  std::vector<at::Tensor> sources_;
  std::vector<at::Tensor> targets_;
  c10::DispatchKeySet keys_;
};

at::Tensor empty_bytes(const Sides &sides, int64_t nbytes) {
  return at::empty({nbytes},
                   at::TensorOptions().dtype(at::kByte).device(sides.device()));
}

void copy_bytes(const at::Tensor &source, const at::Tensor &target) {
  if (!source.is_cpu()) {
    target.copy_(source);
    return;
  }
  std::memcpy(target.mutable_data_ptr(), source.const_data_ptr(),
              source.nbytes());
}

at::Tensor pack(const Sides &sides, const fsdp_exchange_message &message) {
  const at::Tensor packed = empty_bytes(sides, message.nbytes);
  int64_t begin = 0;
  for (int64_t i = 0; i < message.num_pieces; i++) {
    const fsdp_exchange_piece &piece = message.pieces[i];
    copy_bytes(sides.source(piece.item, piece.offset, piece.nbytes),
               packed.narrow(0, begin, piece.nbytes));
    begin += piece.nbytes;
  }
  return packed;
}

void add_outgoing(const fsdp_exchange *exchange, const Sides &sides,
                  Prepared &prepared) {
  int64_t num_messages = 0;
  const fsdp_exchange_message *messages =
      fsdp_exchange_outgoing(exchange, &num_messages);
  for (int64_t i = 0; i < num_messages; i++) {
    const fsdp_exchange_message &message = messages[i];
    at::Tensor bytes;
    if (message.num_pieces == 0) {
      bytes = empty_bytes(sides, 0);
    } else if (message.num_pieces == 1) {
      const fsdp_exchange_piece &first = message.pieces[0];
      bytes = sides.source(first.item, first.offset, first.nbytes);
    } else if (message.same_as < i) {
      bytes = prepared.outgoing[static_cast<size_t>(message.same_as)].bytes;
    } else {
      bytes = pack(sides, message);
    }
    prepared.outgoing.push_back({message.peer, std::move(bytes)});
  }
}

void add_incoming(const fsdp_exchange *exchange, const Sides &sides,
                  Prepared &prepared) {
  int64_t num_messages = 0;
  const fsdp_exchange_message *messages =
      fsdp_exchange_incoming(exchange, &num_messages);
  for (int64_t i = 0; i < num_messages; i++) {
    const fsdp_exchange_message &message = messages[i];
    if (message.num_pieces == 1) {
      const fsdp_exchange_piece &first = message.pieces[0];
      prepared.incoming.push_back(
          {message.peer, sides.target(first.item, first.offset, first.nbytes)});
      continue;
    }
    const at::Tensor packed = empty_bytes(sides, message.nbytes);
    int64_t begin = 0;
    for (int64_t j = 0; j < message.num_pieces; j++) {
      const fsdp_exchange_piece &piece = message.pieces[j];
      prepared.unpacking.push_back(
          {packed.narrow(0, begin, piece.nbytes),
           sides.target(piece.item, piece.offset, piece.nbytes)});
      begin += piece.nbytes;
    }
    prepared.incoming.push_back({message.peer, packed});
  }
}

Prepared prepare(const fsdp_exchange *exchange, const Sides &sides) {
  Prepared prepared;
  if (sides.is_empty()) return prepared;
  int64_t num_copies = 0;
  const fsdp_exchange_copy *copies =
      fsdp_exchange_copies(exchange, &num_copies);
  for (int64_t i = 0; i < num_copies; i++) {
    const fsdp_exchange_copy &copy = copies[i];
    prepared.copies.push_back(
        {sides.source(copy.item, copy.source_offset, copy.nbytes),
         sides.target(copy.item, copy.target_offset, copy.nbytes)});
  }
  add_outgoing(exchange, sides, prepared);
  add_incoming(exchange, sides, prepared);
  return prepared;
}

py::list list_of(const std::vector<Message> &messages) {
  py::list list;
  for (const Message &each : messages) {
    list.append(py::make_tuple(each.peer, each.bytes));
  }
  return list;
}

py::list list_of(const std::vector<Copy> &copies) {
  py::list list;
  for (const Copy &each : copies) {
    list.append(py::make_tuple(each.source, each.target));
  }
  return list;
}

}  // namespace
}  // namespace fsdp_torch

extern "C" fsdp_status fsdp_torch_exchange_prepare(
    const fsdp_exchange *exchange, fsdp_torch_buffers sources,
    fsdp_torch_buffers targets, PyObject **prepared, fsdp_error *error) {
  GUARDED(error) {
    const at::NoGradGuard no_grad;
    const fsdp_torch::Sides sides(exchange, sources, targets);
    fsdp_torch::Prepared found;
    {
      const py::gil_scoped_release released;
      found = fsdp_torch::prepare(exchange, sides);
    }
    *prepared = py::make_tuple(fsdp_torch::list_of(found.outgoing),
                               fsdp_torch::list_of(found.incoming),
                               fsdp_torch::list_of(found.copies),
                               fsdp_torch::list_of(found.unpacking))
                    .release()
                    .ptr();
    return FSDP_OK;
  };
}

extern "C" fsdp_status fsdp_torch_copy_tensors(const fsdp_torch_copy *copies,
                                               int64_t num_copies,
                                               fsdp_error *error) {
  GUARDED(error) {
    const at::NoGradGuard no_grad;
    std::vector<fsdp_torch::Copy> read;
    for (int64_t i = 0; i < num_copies; i++) {
      const at::Tensor &source =
          fsdp_torch::tensor_of(copies[i].source, "the source of a copy");
      const at::Tensor &target =
          fsdp_torch::tensor_of(copies[i].target, "the target of a copy");
      fsdp_torch::check_memory(source, "the source of a copy");
      fsdp_torch::check_memory(target, "the target of a copy");
      fsdp_torch::check_nbytes(target, static_cast<int64_t>(source.nbytes()),
                               "the target of a copy");
      read.push_back({source, target});
    }
    const py::gil_scoped_release released;
    for (const fsdp_torch::Copy &copy : read) {
      fsdp_torch::copy_bytes(copy.source, copy.target);
    }
    return FSDP_OK;
  };
}
