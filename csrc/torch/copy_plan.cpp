// Copy plans over tensors: checks them, then copies.
#include "state/copy_plan.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <Python.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "torch/bridge.h"
#include "torch/guard.hpp"
#include "torch/objects.hpp"

namespace fsdp_torch {
namespace {

// One side's tensors; an absent one is undefined, its numel -1.
struct Buffers {
  std::string side;  // "source" or "target"
  std::vector<at::Tensor> tensors;
  std::vector<int64_t> numels;

  std::string name(size_t index) const {
    return side + " " + std::to_string(index);
  }
  fsdp_buffer_numels core() const {
    return {numels.data(), static_cast<int64_t>(numels.size())};
  }
};

Buffers read_buffers(const std::string &side, fsdp_torch_buffers objects) {
  Buffers buffers;
  buffers.side = side;
  for (int64_t i = 0; i < objects.num_tensors; i++) {
    PyObject *object = objects.tensors[i];
    const std::string name = buffers.name(static_cast<size_t>(i));
    if (object == Py_None) {
      buffers.tensors.emplace_back();
      buffers.numels.push_back(-1);
      continue;
    }
    if (!THPVariable_Check(object)) {
      throw std::invalid_argument(name + " is neither a tensor nor None");
    }
    const at::Tensor &tensor = THPVariable_Unpack(object);
    check_memory(tensor, name);
    buffers.tensors.push_back(tensor);
    buffers.numels.push_back(tensor.numel());
  }
  return buffers;
}

// The dtype of all tensors, or none when all are absent.
class CommonDtype {
 public:
  void add(const Buffers &buffers) {
    for (size_t i = 0; i < buffers.tensors.size(); i++) {
      const at::Tensor &tensor = buffers.tensors[i];
      if (!tensor.defined()) continue;
      if (!dtype_.has_value()) {
        dtype_ = tensor.scalar_type();
        first_ = buffers.name(i);
      }
      if (tensor.scalar_type() == *dtype_) continue;
      throw std::invalid_argument(buffers.name(i) + " is of " +
                                  c10::toString(tensor.scalar_type()) + ", " +
                                  first_ + " of " + c10::toString(*dtype_) +
                                  "; a plan copies between tensors of one "
                                  "dtype (use tensor.view(dtype) "
                                  "to copy bits)");
    }
  }
  int32_t itemsize() const {
    return dtype_.has_value() ? core_dtype(*dtype_).itemsize : 1;
  }

 private:
  std::optional<at::ScalarType> dtype_;
  std::string first_;
};

// Which buffers the plan reads and writes, with both sides there.
struct Uses {
  std::vector<bool> sources;
  std::vector<bool> targets;
};

Uses find_uses(const fsdp_copy_plan *plan, const Buffers &sources,
               const Buffers &targets) {
  Uses uses = {std::vector<bool>(sources.tensors.size()),
               std::vector<bool>(targets.tensors.size())};
  const fsdp_copy *copies = fsdp_copy_plan_copies(plan);
  for (int64_t i = 0; i < fsdp_copy_plan_num_copies(plan); i++) {
    const auto from = static_cast<size_t>(copies[i].source_buffer);
    const auto to = static_cast<size_t>(copies[i].target_buffer);
    if (sources.numels[from] < 0 || targets.numels[to] < 0) continue;
    uses.sources[from] = true;
    uses.targets[to] = true;
  }
  return uses;
}

// The memory of one used tensor.
struct Extent {
  c10::Device device;
  const char *begin;
  const char *end;
  bool is_target;
  size_t index;
};

void add_extents(const Buffers &buffers, const std::vector<bool> &uses,
                 bool is_target, std::vector<Extent> *extents) {
  for (size_t i = 0; i < uses.size(); i++) {
    if (!uses[i]) continue;
    const at::Tensor &tensor = buffers.tensors[i];
    const char *begin = static_cast<const char *>(tensor.const_data_ptr());
    extents->push_back(
        {tensor.device(), begin, begin + tensor.nbytes(), is_target, i});
  }
}

// A copy would read what another one wrote.
void refuse_overlap(const Buffers &sources, const Buffers &targets,
                    const Uses &uses) {
  std::vector<Extent> extents;
  add_extents(sources, uses.sources, false, &extents);
  add_extents(targets, uses.targets, true, &extents);
  std::sort(extents.begin(), extents.end(),
            [](const Extent &a, const Extent &b) {
              if (a.device != b.device) {
                return std::pair(a.device.type(), a.device.index()) <
                       std::pair(b.device.type(), b.device.index());
              }
              return a.begin < b.begin;
            });
  const Extent *last[2] = {nullptr, nullptr};  // of each side, ends last
  for (const Extent &extent : extents) {
    const Extent *other = last[!extent.is_target];
    if (other != nullptr && other->device == extent.device &&
        other->end > extent.begin) {
      const auto source = extent.is_target ? other->index : extent.index;
      const auto target = extent.is_target ? extent.index : other->index;
      throw std::invalid_argument(
          sources.name(source) + " shares memory with " + targets.name(target) +
          "; copy one of them first");
    }
    const Extent *&own = last[extent.is_target];
    if (own == nullptr || own->device != extent.device ||
        own->end < extent.end) {
      own = &extent;
    }
  }
}

bool all_on_host(const Buffers &buffers, const std::vector<bool> &uses) {
  for (size_t i = 0; i < uses.size(); i++) {
    if (uses[i] && !buffers.tensors[i].is_cpu()) return false;
  }
  return true;
}

void copy_on_host(const fsdp_copy_plan *plan, const Buffers &sources,
                  const Buffers &targets, const Uses &uses, int32_t itemsize) {
  std::vector<const void *> from(sources.tensors.size());
  std::vector<void *> to(targets.tensors.size());
  for (size_t i = 0; i < from.size(); i++) {
    if (uses.sources[i]) from[i] = sources.tensors[i].const_data_ptr();
  }
  for (size_t i = 0; i < to.size(); i++) {
    if (uses.targets[i]) to[i] = targets.tensors[i].mutable_data_ptr();
  }
  fsdp_copy_plan_run(plan, from.data(), to.data(), itemsize);
  for (size_t i = 0; i < to.size(); i++) {
    if (!uses.targets[i] || targets.tensors[i].is_inference()) continue;
    targets.tensors[i].unsafeGetTensorImpl()->bump_version();
  }
}

void copy_by_views(const fsdp_copy_plan *plan, const Buffers &sources,
                   const Buffers &targets) {
  const auto flatten = [](const Buffers &buffers) {
    std::vector<at::Tensor> flat;
    for (const at::Tensor &tensor : buffers.tensors) {
      flat.push_back(tensor.defined() ? tensor.detach().view(-1) : tensor);
    }
    return flat;
  };
  const auto from = flatten(sources);
  const auto to = flatten(targets);
  const fsdp_copy *copies = fsdp_copy_plan_copies(plan);
  for (int64_t i = 0; i < fsdp_copy_plan_num_copies(plan); i++) {
    const fsdp_copy &copy = copies[i];
    const at::Tensor &source = from[static_cast<size_t>(copy.source_buffer)];
    const at::Tensor &target = to[static_cast<size_t>(copy.target_buffer)];
    if (!source.defined() || !target.defined()) continue;
    target.narrow(0, copy.target_offset, copy.numel)
        .copy_(source.narrow(0, copy.source_offset, copy.numel));
  }
}

}  // namespace
}  // namespace fsdp_torch

extern "C" fsdp_status fsdp_torch_copy_plan_run(const fsdp_copy_plan *plan,
                                                fsdp_torch_buffers sources,
                                                fsdp_torch_buffers targets,
                                                fsdp_error *error) {
  GUARDED(error) {
    const auto from = fsdp_torch::read_buffers("source", sources);
    const auto to = fsdp_torch::read_buffers("target", targets);
    fsdp_torch::CommonDtype dtype;
    dtype.add(from);
    dtype.add(to);
    const fsdp_status status =
        fsdp_copy_plan_check(plan, from.core(), to.core(), error);
    if (status != FSDP_OK) return status;
    const auto uses = fsdp_torch::find_uses(plan, from, to);
    fsdp_torch::refuse_overlap(from, to, uses);
    const py::gil_scoped_release released;
    const at::NoGradGuard no_grad;
    if (fsdp_torch::all_on_host(from, uses.sources) &&
        fsdp_torch::all_on_host(to, uses.targets)) {
      fsdp_torch::copy_on_host(plan, from, to, uses, dtype.itemsize());
    } else {
      fsdp_torch::copy_by_views(plan, from, to);
    }
    return FSDP_OK;
  };
}
