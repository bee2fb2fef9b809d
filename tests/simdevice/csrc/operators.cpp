// Operators of the simulated device: the CPU's, run by tasks of the current
// stream over the same memory.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

#include "sim.hpp"

namespace sim {

at::Tensor host_alias(const at::Tensor &tensor) {
  void *data = tensor.numel() == 0 ? nullptr : tensor.data_ptr();
  at::Tensor cpu = at::from_blob(data, tensor.sizes(), tensor.strides(),
                                 tensor.options().device(c10::kCPU));
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    cpu.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return cpu;
}

namespace {

using torch::jit::Stack;

// Replaces every tensor of a value, in lists too.
template <typename Convert>
c10::IValue convert_tensors(const c10::IValue &value, const Convert &convert) {
  if (value.isTensor()) return convert(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> out;
    for (const at::Tensor &each : value.toTensorVector()) {
      out.push_back(convert(each));
    }
    return out;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> out;
    for (const std::optional<at::Tensor> &each :
         value.toOptionalTensorVector()) {
      out.push_back(each && each->defined()
                        ? std::optional<at::Tensor>(convert(*each))
                        : std::nullopt);
    }
    return out;
  }
  return value;
}

template <typename Convert>
Stack convert_stack(const Stack &arguments, const Convert &convert) {
  Stack out;
  for (const c10::IValue &value : arguments) {
    out.push_back(convert_tensors(value, convert));
  }
  return out;
}

// Numbers stay what they are: only they may be mixed with other devices.
at::Tensor meta_of(const at::Tensor &tensor) {
  if (!tensor.defined() || (!is_ours(tensor) && tensor.dim() == 0)) {
    return tensor;
  }
  return at::empty_strided(
      tensor.sizes(), tensor.strides(),
      tensor.options().device(c10::kMeta).pinned_memory(false));
}

// What a task may use: memory of the device by address; scalars of the host as
// they are now; other host tensors (indices) likewise.
at::Tensor operand_of(const at::Tensor &tensor) {
  if (!tensor.defined()) return tensor;
  if (is_ours(tensor)) return host_alias(tensor);
  at::Tensor kept = tensor.clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    kept.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return kept;
}

void replace_devices(Stack &arguments, c10::DeviceType type) {
  for (c10::IValue &value : arguments) {
    if (value.isDevice() && value.toDevice().type() == kType) {
      value = c10::Device(type);
    }
  }
}

// The argument that a return is, for in-place and out= operators.
std::optional<size_t> argument_of_return(const c10::FunctionSchema &schema,
                                         size_t index) {
  const c10::AliasInfo *wanted = schema.returns()[index].alias_info();
  if (wanted == nullptr) return std::nullopt;
  TORCH_CHECK(wanted->isWrite(), "the sim device has no view operator ",
              schema.operator_name());
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    const c10::AliasInfo *mine = schema.arguments()[i].alias_info();
    if (mine != nullptr && mine->beforeSets() == wanted->beforeSets()) return i;
  }
  TORCH_CHECK(false, "no argument of ", schema.operator_name(),
              " is its return ", index);
}

bool is_written(const c10::Argument &argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

bool is_tensor_type(const c10::TypePtr &type) {
  return type->isSubtypeOf(*c10::TensorType::get());
}

// Operators that have to run at once: their results are values for the host, or
// they draw from a generator, whose numbers follow the order of the calls.
bool runs_at_once(const c10::FunctionSchema &schema) {
  for (const c10::Argument &argument : schema.arguments()) {
    if (argument.name() == "generator") return true;
  }
  for (const c10::Argument &result : schema.returns()) {
    if (!is_tensor_type(result.type()) &&
        result.type()->kind() != c10::TypeKind::ListType) {
      return true;
    }
  }
  static const std::vector<std::string> random = {
      "aten::native_dropout", "aten::rrelu_with_noise", "aten::multinomial"};
  return std::find(random.begin(), random.end(), schema.name()) != random.end();
}

// As on a GPU, only scalars and indices may be on the host.
void check_devices(const c10::FunctionSchema &schema, const Stack &arguments) {
  const bool takes_indices =
      schema.name().find("index") != std::string::npos ||
      schema.name().find("foreach") != std::string::npos ||
      schema.name().find("_amp_") != std::string::npos;
  for (const c10::IValue &value : arguments) {
    convert_tensors(value, [&](const at::Tensor &tensor) {
      TORCH_CHECK(!tensor.defined() || is_ours(tensor) || tensor.dim() == 0 ||
                      takes_indices,
                  "Expected all tensors to be on the same device, but ",
                  schema.operator_name(), " got one on ", tensor.device(),
                  " with others on sim");
      return tensor;
    });
  }
}

void call(const c10::OperatorHandle &op, Stack &stack) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  op.callBoxed(stack);
}

// ---- At once
// -------------------------------------------------------------------

void write_back(const at::Tensor &target, const at::Tensor &value) {
  if (!is_ours(target)) return;
  if (target.sizes() != value.sizes()) target.resize_(value.sizes());
  target.copy_(value);
}

c10::IValue on_device(const c10::IValue &value) {
  return convert_tensors(value, [](const at::Tensor &tensor) {
    return tensor.defined() ? tensor.to(device()) : tensor;
  });
}

void run_now(const c10::OperatorHandle &op, Stack &arguments, Stack *results) {
  const c10::FunctionSchema &schema = op.schema();
  // For debugging: what the host waits for.
  static const bool is_shown = std::getenv("SIM_SHOW_WAITS") != nullptr;
  if (is_shown) std::cerr << "sim: at once: " << schema << '\n';
  synchronize(current_stream());
  Stack operands = convert_stack(arguments, operand_of);
  // What works in place is given the memory itself.
  const bool may_resize = schema.name().back() != '_';
  for (size_t i = 0; i < operands.size(); i++) {
    // Written to afterwards: the operator may resize it.
    if (may_resize && is_written(schema.arguments()[i])) {
      operands[i] = convert_tensors(
          operands[i], [](const at::Tensor &each) { return each.clone(); });
    }
  }
  replace_devices(operands, c10::DeviceType::CPU);
  Stack stack = operands;
  call(op, stack);
  for (size_t i = 0; i < operands.size(); i++) {
    if (!may_resize || !is_written(schema.arguments()[i])) continue;
    std::vector<at::Tensor> written;
    convert_tensors(operands[i], [&](const at::Tensor &each) {
      written.push_back(each);
      return each;
    });
    size_t next = 0;
    convert_tensors(arguments[i], [&](const at::Tensor &each) {
      write_back(each, written[next++]);
      return each;
    });
  }
  for (size_t i = 0; i < stack.size(); i++) {
    const auto argument = argument_of_return(schema, i);
    results->push_back(argument ? arguments[*argument] : on_device(stack[i]));
  }
}

// ---- Later
// ----------------------------------------------------------------------

at::Tensor device_like(const at::Tensor &meta) {
  if (!meta.defined()) return meta;
  return at::empty_strided(meta.sizes(), meta.strides(),
                           meta.options().device(device()));
}

// The CPU's kernel may leave out what nobody reads: batch norm does, in
// evaluation.
void copy_result(const at::Tensor &from, const at::Tensor &to) {
  if (from.defined() && from.numel() > 0) to.copy_(from);
}

// Pairs of the operator's results and where they belong, filled by the task.
void copy_results(const c10::IValue &from, const c10::IValue &to) {
  if (from.isTensor()) {
    copy_result(from.toTensor(), to.toTensor());
    return;
  }
  const auto sources = from.toTensorVector();
  const auto targets = to.toTensorVector();
  for (size_t i = 0; i < sources.size(); i++) {
    copy_result(sources[i], targets[i]);
  }
}

// Outputs that the operator would have resized get their sizes now.
void resize_outputs(const c10::FunctionSchema &schema, const Stack &arguments,
                    const Stack &meta) {
  for (size_t i = 0; i < arguments.size(); i++) {
    if (!is_written(schema.arguments()[i]) || !arguments[i].isTensor())
      continue;
    const at::Tensor &mine = arguments[i].toTensor();
    const at::Tensor &wanted = meta[i].toTensor();
    if (is_ours(mine) && mine.sizes() != wanted.sizes()) {
      mine.resize_(wanted.sizes());
    }
  }
}

// Note [Inferred results]
// Many operators run on meta tensors by way of Python, a hundred times slower
// than the operator itself. What came out is kept by all that it depends on:
// the operator, the metadata of its tensors and the other arguments.
struct Inference {
  bool is_possible = false;
  Stack arguments;  // on meta; outputs may have been resized
  Stack results;
};

void append_bytes(std::string &key, const void *data, size_t nbytes) {
  key.append(static_cast<const char *>(data), nbytes);
}

template <typename T>
void append_value(std::string &key, T value) {
  append_bytes(key, &value, sizeof value);
}

void append_tensor(std::string &key, const at::Tensor &tensor) {
  if (!tensor.defined()) {
    key += 'u';
    return;
  }
  key += 't';
  append_value(key, tensor.scalar_type());
  append_value(key, is_ours(tensor));
  append_value(key, tensor.unsafeGetTensorImpl()->is_wrapped_number());
  append_value(key, tensor.dim());
  append_bytes(key, tensor.sizes().data(), tensor.sizes().size() * 8);
  append_bytes(key, tensor.strides().data(), tensor.strides().size() * 8);
}

// False: results may depend on something that a key cannot hold.
bool append_argument(std::string &key, const c10::IValue &value) {
  if (value.isTensor()) {
    append_tensor(key, value.toTensor());
  } else if (value.isTensorList()) {
    key += 'T';
    for (const at::Tensor &each : value.toTensorVector()) {
      append_tensor(key, each);
    }
    key += '.';
  } else if (value.isOptionalTensorList()) {
    key += 'O';
    for (const auto &each : value.toOptionalTensorVector()) {
      append_tensor(key, each.value_or(at::Tensor()));
    }
    key += '.';
  } else if (value.isString()) {
    key += 's' + value.toStringRef() + '.';
  } else if (value.isNone()) {
    key += 'n';
  } else if (value.isInt()) {
    key += 'i';
    append_value(key, value.toInt());
  } else if (value.isDouble()) {
    key += 'd';
    append_value(key, value.toDouble());
  } else if (value.isBool()) {
    key += value.toBool() ? '1' : '0';
  } else if (value.isDevice()) {
    key += 'D';
  } else if (value.isIntList() || value.isBoolList() || value.isDoubleList()) {
    key += 'l';
    for (const c10::IValue &each : value.toListRef()) {
      append_argument(key, each);
    }
    key += '.';
  } else {
    return false;
  }
  return true;
}

// Meta tensors have what CUDA returns. The CPU's kernels, which run here, keep
// the statistics of a normalisation in the dtype of its input, unless its
// weights have another.
void use_dtypes_of_host(const c10::OperatorHandle &op, Inference &made) {
  const std::string &name = op.schema().name();
  size_t weight_index = 1;
  if (name == "aten::native_layer_norm") {
    weight_index = 2;
  } else if (name != "aten::native_group_norm" &&
             name != "aten::native_batch_norm") {
    return;
  }
  const at::Tensor &input = made.arguments[0].toTensor();
  const c10::IValue &weight = made.arguments[weight_index];
  const bool is_mixed = weight.isTensor() && weight.toTensor().defined() &&
                        weight.toTensor().scalar_type() != input.scalar_type();
  const at::ScalarType dtype = is_mixed ? at::kFloat : input.scalar_type();
  for (size_t i = 1; i < made.results.size(); i++) {
    const at::Tensor &old = made.results[i].toTensor();
    made.results[i] = at::empty(old.sizes(), old.options().dtype(dtype));
  }
}

Inference infer_anew(const c10::OperatorHandle &op, const Stack &arguments) {
  Inference made;
  made.arguments = convert_stack(arguments, meta_of);
  made.results = made.arguments;
  replace_devices(made.results, c10::DeviceType::Meta);
  try {
    call(op, made.results);
    use_dtypes_of_host(op, made);
    made.is_possible = true;
  } catch (const std::exception &error) {
    // run_now succeeds or says why it cannot.
    static const bool is_shown = std::getenv("SIM_SHOW_WAITS") != nullptr;
    if (is_shown) std::cerr << "sim: on meta: " << error.what() << '\n';
  }
  return made;
}

std::shared_ptr<const Inference> infer(const c10::OperatorHandle &op,
                                       const Stack &arguments) {
  static std::mutex mutex;
  static std::unordered_map<std::string, std::shared_ptr<const Inference>> kept;
  constexpr size_t kMaxKept = 50000;
  std::string key = op.schema().name() + '.' + op.schema().overload_name();
  bool is_whole = true;
  for (const c10::IValue &value : arguments) {
    is_whole = is_whole && append_argument(key, value);
  }
  if (is_whole) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = kept.find(key);
    if (found != kept.end()) return found->second;
  }
  auto made = std::make_shared<const Inference>(infer_anew(op, arguments));
  if (is_whole) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (kept.size() >= kMaxKept) kept.clear();
    kept.emplace(std::move(key), made);
  }
  return made;
}

void run_later(const c10::OperatorHandle &op, Stack &arguments,
               const Inference &inference, Stack *results) {
  const c10::FunctionSchema &schema = op.schema();
  const Stack &inferred = inference.results;
  resize_outputs(schema, arguments, inference.arguments);
  Stack targets;  // by return; None where it is an argument
  for (size_t i = 0; i < inferred.size(); i++) {
    const auto argument = argument_of_return(schema, i);
    if (argument) {
      results->push_back(arguments[*argument]);
      targets.emplace_back();
    } else {
      results->push_back(convert_tensors(inferred[i], device_like));
      targets.push_back(convert_tensors(results->back(), operand_of));
    }
  }
  Stack operands = convert_stack(arguments, operand_of);
  replace_devices(operands, c10::DeviceType::CPU);
  enqueue(current_stream(),
          [op, operands = std::move(operands), targets = std::move(targets)] {
            const at::AutoDispatchBelowADInplaceOrView guard;
            try {
              Stack stack = operands;  // it may run again: a graph's replay
              op.callBoxed(stack);     // which leaves its results there
              for (size_t i = 0; i < targets.size(); i++) {
                if (!targets[i].isNone()) copy_results(stack[i], targets[i]);
              }
            } catch (const c10::Error &e) {
              TORCH_CHECK(false, op.schema().operator_name(), ": ",
                          e.what_without_backtrace());
            }
          });
}

void fallback(const c10::OperatorHandle &op, Stack *stack) {
  const c10::FunctionSchema &schema = op.schema();
  const size_t count = schema.arguments().size();
  Stack arguments(stack->end() - static_cast<std::ptrdiff_t>(count),
                  stack->end());
  stack->resize(stack->size() - count);
  const at::AutoDispatchBelowADInplaceOrView guard;
  check_devices(schema, arguments);
  if (!runs_at_once(schema)) {
    const std::shared_ptr<const Inference> inference = infer(op, arguments);
    if (inference->is_possible) {
      run_later(op, arguments, *inference, stack);
      return;
    }
  }
  run_now(op, arguments, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// What the dispatcher would take apart first: convolutions into operators that
// only backends have, the loss into one whose result meta tensors get wrong,
// normalisations into others than the ones whose backward is called.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  for (const char *name : {"convolution", "convolution_backward", "mse_loss",
                           "native_layer_norm", "native_group_norm"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

}  // namespace
}  // namespace sim
