// Exchanges over tensors: the results, and what is to be passed, copied
// and unpacked.
#include "state/exchange.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <Python.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <vector>

#include "torch/bridge.h"
#include "torch/copies.hpp"
#include "torch/guard.hpp"
#include "torch/large_pages.hpp"
#include "torch/objects.hpp"
#include "torch/unit.hpp"

namespace fsdp_torch {
namespace {

struct Message {
  int64_t peer;
  at::Tensor bytes;
};

struct Prepared {
  std::vector<Message> outgoing;
  std::vector<Message> incoming;
  Copies copies;
  Copies unpacking;
};

// One item, as this rank sees it.
struct Item {
  at::Tensor source;  // undefined: it holds nothing
  at::Tensor target;  // undefined until it is made
  at::ScalarType dtype;
  std::vector<int64_t> shape;  // of the target, if it is made
};

std::string item_name(const char *side, int64_t index) {
  return std::string(side) + " of item " + std::to_string(index);
}

at::Tensor read_tensor(PyObject *object, const char *side, int64_t index) {
  if (object == Py_None) return {};
  if (!THPVariable_Check(object)) {
    throw std::invalid_argument(item_name(side, index) + " is no tensor");
  }
  return THPVariable_Unpack(object);
}

// The shape of a result of `numel` elements: the given one, if that is what it
// has.
std::vector<int64_t> read_shape(PyObject *object, int64_t numel) {
  if (object == Py_None) return {numel};
  if (!PyTuple_Check(object)) {
    throw std::invalid_argument("the shape of an item is no tuple");
  }
  std::vector<int64_t> shape;
  int64_t product = 1;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(object); i++) {
    shape.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(object, i)));
    if (shape.back() == -1 && PyErr_Occurred()) throw python_error();
    product *= shape.back();
  }
  if (product != numel) return {numel};
  return shape;
}

std::vector<Item> read_items(const fsdp_exchange *exchange,
                             const fsdp_torch_move *moves) {
  std::vector<Item> items;
  const int64_t num_items = fsdp_exchange_num_items(exchange);
  items.reserve(static_cast<size_t>(num_items));
  for (int64_t i = 0; i < num_items; i++) {
    const fsdp_torch_move &move = moves[i];
    const int64_t numel =
        fsdp_exchange_needed_nbytes(exchange, i) / move.dtype.itemsize;
    items.push_back({read_tensor(move.source, "source", i),
                     read_tensor(move.target, "target", i),
                     static_cast<at::ScalarType>(move.dtype.code),
                     read_shape(move.shape, numel)});
  }
  return items;
}

void check_nbytes(const at::Tensor &tensor, int64_t nbytes,
                  const std::string &name) {
  if (static_cast<int64_t>(tensor.nbytes()) == nbytes) return;
  throw std::invalid_argument(c10::str(name, " has ", tensor.nbytes(),
                                       " bytes, the exchange has ", nbytes,
                                       " there"));
}

// Makes the targets that are not given; on an accelerator all of them, which
// is where the messages come.
void make_targets(std::vector<Item> &items, c10::Device device) {
  std::vector<TensorSpec> specs;
  for (Item &item : items) {
    if (!device.is_cpu()) {
      item.target = at::empty(
          item.shape, at::TensorOptions().dtype(item.dtype).device(device));
    } else if (!item.target.defined()) {
      specs.push_back({c10::multiply_integers(item.shape), item.dtype});
    }
  }
  auto made = empty_tensors(specs);
  auto next = made.begin();
  for (Item &item : items) {
    if (item.target.defined()) continue;
    item.target = std::move(*next++);
    item.target.unsafeGetTensorImpl()->set_sizes_contiguous(item.shape);
  }
}

// The tensors of one rank; a source may be absent.
class Sides {
 public:
  // Brings the sources to where the targets are.
  Sides(const fsdp_exchange *exchange, std::vector<Item> &items,
        c10::Device device)
      : items_(items), device_(device), keys_(keys_of(device)) {
    make_targets(items, device);
    for (size_t i = 0; i < items.size(); i++) {
      const auto index = static_cast<int64_t>(i);
      check_target(items[i].target,
                   fsdp_exchange_needed_nbytes(exchange, index), index);
      bring_source(items[i].source, fsdp_exchange_held_nbytes(exchange, index),
                   index);
    }
  }

  c10::DispatchKeySet keys() const { return keys_; }

  const at::Tensor &source(int64_t item) const {
    return items_[static_cast<size_t>(item)].source;
  }
  const at::Tensor &target(int64_t item) const {
    return items_[static_cast<size_t>(item)].target;
  }
  at::Tensor empty_bytes(int64_t nbytes) const {
    return at::empty({nbytes},
                     at::TensorOptions().dtype(at::kByte).device(device_));
  }

 private:
  void check_target(const at::Tensor &target, int64_t nbytes,
                    int64_t index) const {
    const std::string name = item_name("target", index);
    check_memory(target, name);
    check_nbytes(target, nbytes, name);
    if (target.device() == device_) return;
    throw std::invalid_argument(name + " is on " + target.device().str() +
                                ", the exchange on " + device_.str());
  }

  void bring_source(at::Tensor &source, int64_t nbytes, int64_t index) const {
    const std::string name = item_name("source", index);
    if (source.defined()) {
      if (source.device() != device_) source = source.detach().to(device_);
      source = source.resolve_conj().resolve_neg().contiguous();
      check_memory(source, name);
      check_nbytes(source, nbytes, name);
    } else if (nbytes > 0) {
      throw std::invalid_argument(c10::str(name, " is None, the exchange has ",
                                           nbytes, " bytes there"));
    }
  }

  const std::vector<Item> &items_;
  c10::Device device_;
  c10::DispatchKeySet keys_;
};

at::Tensor pack(const Sides &sides, const fsdp_exchange_message &message) {
  const at::Tensor packed = sides.empty_bytes(message.nbytes);
  int64_t begin = 0;
  for (int64_t i = 0; i < message.num_pieces; i++) {
    const fsdp_exchange_piece &piece = message.pieces[i];
    make_copy(
        {sides.source(piece.item), piece.offset, packed, begin, piece.nbytes},
        sides.keys());
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
      bytes = sides.empty_bytes(0);
    } else if (message.num_pieces == 1) {
      const fsdp_exchange_piece &first = message.pieces[0];
      bytes = bytes_of(sides.source(first.item), first.offset, first.nbytes,
                       sides.keys());
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
          {message.peer, bytes_of(sides.target(first.item), first.offset,
                                  first.nbytes, sides.keys())});
      continue;
    }
    const at::Tensor packed = sides.empty_bytes(message.nbytes);
    int64_t begin = 0;
    for (int64_t j = 0; j < message.num_pieces; j++) {
      const fsdp_exchange_piece &piece = message.pieces[j];
      prepared.unpacking.push_back({packed, begin, sides.target(piece.item),
                                    piece.offset, piece.nbytes});
      begin += piece.nbytes;
    }
    prepared.incoming.push_back({message.peer, packed});
  }
}

Prepared prepare(const fsdp_exchange *exchange, const Sides &sides) {
  Prepared prepared;
  int64_t num_copies = 0;
  const fsdp_exchange_copy *copies =
      fsdp_exchange_copies(exchange, &num_copies);
  for (int64_t i = 0; i < num_copies; i++) {
    const fsdp_exchange_copy &copy = copies[i];
    prepared.copies.push_back({sides.source(copy.item), copy.source_offset,
                               sides.target(copy.item), copy.target_offset,
                               copy.nbytes});
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

py::list results_of(const std::vector<Item> &items) {
  py::list list(items.size());
  for (size_t i = 0; i < items.size(); i++) {
    PyObject *result = THPVariable_Wrap(items[i].target);
    if (result == nullptr) throw python_error();
    PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i), result);
  }
  return list;
}

}  // namespace
}  // namespace fsdp_torch

extern "C" fsdp_status fsdp_torch_exchange_prepare(
    const fsdp_exchange *exchange, const fsdp_torch_move *moves,
    PyObject *device, PyObject **prepared, fsdp_error *error) {
  GUARDED(error) {
    if (!THPDevice_Check(device)) {
      throw std::invalid_argument("expected a torch.device");
    }
    const c10::Device where = reinterpret_cast<THPDevice *>(device)->device;
    const at::NoGradGuard no_grad;
    std::vector<fsdp_torch::Item> items =
        fsdp_torch::read_items(exchange, moves);
    fsdp_torch::Prepared found;
    {
      const py::gil_scoped_release released;
      const fsdp_torch::Sides sides(exchange, items, where);
      found = fsdp_torch::prepare(exchange, sides);
    }
    const auto copies = py::reinterpret_steal<py::object>(
        fsdp_torch::wrap_copies(std::move(found.copies)));
    const auto unpacking = py::reinterpret_steal<py::object>(
        fsdp_torch::wrap_copies(std::move(found.unpacking)));
    *prepared =
        py::make_tuple(fsdp_torch::results_of(items),
                       fsdp_torch::list_of(found.outgoing),
                       fsdp_torch::list_of(found.incoming), copies, unpacking)
            .release()
            .ptr();
    return FSDP_OK;
  };
}
