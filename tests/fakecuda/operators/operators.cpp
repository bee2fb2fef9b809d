// Operators of the fake CUDA: the CPU's, run by tasks of the current stream
// over the same memory.
#include <ATen/ATen.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <iostream>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>

#include "fake.hpp"

namespace fakecuda {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;

// Replaces every tensor of a value, in lists too.
template <typename Convert>
IValue convert_tensors(const IValue &value, const Convert &convert) {
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

template <typename Visit>
void visit_tensors(const IValue &value, const Visit &visit) {
  convert_tensors(value, [&](const at::Tensor &tensor) {
    if (tensor.defined()) visit(tensor);
    return tensor;
  });
}

template <typename Convert>
Stack convert_stack(const Stack &arguments, const Convert &convert) {
  Stack out;
  for (const IValue &value : arguments) {
    out.push_back(convert_tensors(value, convert));
  }
  return out;
}

// Numbers stay what they are: only they may be mixed with other devices.
at::Tensor meta_of(const at::Tensor &tensor) {
  if (!tensor.defined() || (!tensor.is_cuda() && tensor.dim() == 0)) {
    return tensor;
  }
  at::Tensor meta = at::empty_strided(
      tensor.sizes(), tensor.strides(),
      tensor.options().device(c10::kMeta).pinned_memory(false));
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    meta.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return meta;
}

// What a task may use: memory of the device by address; the host's as it is
// now.
at::Tensor operand_of(const at::Tensor &tensor) {
  if (!tensor.defined()) return tensor;
  if (tensor.is_cuda()) return host_alias(tensor);
  at::Tensor kept = tensor.clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    kept.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return kept;
}

bool is_generator(const c10::Argument &argument) {
  return argument.name() == "generator";
}

void replace_devices(const c10::FunctionSchema &schema, Stack &arguments,
                     c10::DeviceType type) {
  for (size_t i = 0; i < arguments.size(); i++) {
    IValue &value = arguments[i];
    if (value.isDevice() && value.toDevice().is_cuda()) {
      value = c10::Device(type);
    }
    if (is_generator(schema.arguments()[i])) value = IValue();
  }
}

// The argument that a return is, for in-place and out= operators.
std::optional<size_t> argument_of_return(const c10::FunctionSchema &schema,
                                         size_t index) {
  const c10::AliasInfo *wanted = schema.returns()[index].alias_info();
  if (wanted == nullptr) return std::nullopt;
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

// Operators whose results are values for the host.
bool tells_the_host(const c10::FunctionSchema &schema) {
  for (const c10::Argument &result : schema.returns()) {
    if (!result.type()->isSubtypeOf(*c10::TensorType::get()) &&
        result.type()->kind() != c10::TypeKind::ListType) {
      return true;
    }
  }
  return false;
}

// Works in place, and resizes nothing.
bool is_in_place(const c10::FunctionSchema &schema) {
  for (size_t i = 0; i < schema.returns().size(); i++) {
    if (schema.returns()[i].alias_info() == nullptr) return false;
  }
  return schema.name().back() == '_';
}

// The device that the operator runs on. As on a GPU, only scalars and indices
// may be on the host, and no tensor on another device.
c10::Device check_devices(const c10::FunctionSchema &schema,
                          const Stack &arguments) {
  // Of what tests compare and look up; torch refuses scalars of the host here.
  const bool is_strict =
      schema.name() == "aten::equal" || schema.name() == "aten::index_select";
  const bool takes_indices =
      !is_strict && (schema.name().find("index") != std::string::npos ||
                     schema.name().find("foreach") != std::string::npos ||
                     schema.name().find("fused") != std::string::npos ||
                     schema.name().find("_amp_") != std::string::npos);
  std::optional<c10::Device> device;
  for (const IValue &value : arguments) {
    if (value.isDevice() && value.toDevice().is_cuda()) {
      device = value.toDevice();
    }
    visit_tensors(value, [&](const at::Tensor &tensor) {
      if (!tensor.is_cuda()) return;
      if (!device) device = tensor.device();
      TORCH_CHECK(tensor.device() == *device || takes_indices,
                  "Expected all tensors to be on the same device, but found at "
                  "least two devices, ",
                  *device, " and ", tensor.device(), "! (",
                  schema.operator_name(), ")");
    });
  }
  if (!device || !device->has_index()) {
    device = c10::Device(c10::kCUDA, c10::cuda::current_device());
  }
  for (const IValue &value : arguments) {
    visit_tensors(value, [&](const at::Tensor &tensor) {
      TORCH_CHECK(tensor.is_cuda() || (tensor.dim() == 0 && !is_strict) ||
                      takes_indices,
                  "Expected all tensors to be on the same device, but found at "
                  "least two devices, ",
                  *device, " and ", tensor.device(), "! (",
                  schema.operator_name(), ")");
    });
  }
  return *device;
}

void call(const c10::OperatorHandle &op, DispatchKey key, Stack &stack) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  op.redispatchBoxed(DispatchKeySet(key), &stack);
}

std::optional<at::Generator> generator_of(const c10::FunctionSchema &schema,
                                          const Stack &arguments,
                                          bool *is_random) {
  *is_random = false;
  for (size_t i = 0; i < arguments.size(); i++) {
    if (!is_generator(schema.arguments()[i])) continue;
    *is_random = true;
    if (!arguments[i].isNone()) return arguments[i].toGenerator();
  }
  return std::nullopt;
}

void give_generator(const c10::FunctionSchema &schema, Stack &arguments,
                    const at::Generator &generator) {
  for (size_t i = 0; i < arguments.size(); i++) {
    if (is_generator(schema.arguments()[i])) arguments[i] = generator;
  }
}

// ---- At once ----------------------------------------------------------------

void write_back(const at::Tensor &target, const at::Tensor &value) {
  if (!target.is_cuda()) return;
  if (target.sizes() != value.sizes()) target.resize_(value.sizes());
  target.copy_(value);
}

void run_now(const c10::OperatorHandle &op, Stack &arguments, Stack *results) {
  const c10::FunctionSchema &schema = op.schema();
  const c10::Device device(c10::kCUDA, c10::cuda::current_device());
  // For debugging: what the host waits for.
  static const bool is_shown = std::getenv("FAKE_CUDA_SHOW_WAITS") != nullptr;
  if (is_shown) std::cerr << "fake CUDA: at once: " << schema << '\n';
  bool is_random = false;
  const auto given = generator_of(schema, arguments, &is_random);
  std::function<at::Generator()> draw;
  if (is_random) draw = draw_from(given);
  synchronize();
  Stack operands = convert_stack(arguments, operand_of);
  // What works in place is given the memory itself; anything else may resize
  // it.
  const bool may_resize = schema.name().back() != '_';
  for (size_t i = 0; i < operands.size(); i++) {
    if (may_resize && is_written(schema.arguments()[i])) {
      operands[i] = convert_tensors(operands[i], [](const at::Tensor &each) {
        return each.defined() ? each.clone() : each;
      });
    }
  }
  replace_devices(schema, operands, c10::DeviceType::CPU);
  if (is_random) give_generator(schema, operands, draw());
  Stack stack = operands;
  call(op, DispatchKey::CPU, stack);
  for (size_t i = 0; i < operands.size(); i++) {
    if (!may_resize || !is_written(schema.arguments()[i])) continue;
    std::vector<at::Tensor> written;
    visit_tensors(operands[i],
                  [&](const at::Tensor &each) { written.push_back(each); });
    size_t next = 0;
    visit_tensors(arguments[i], [&](const at::Tensor &each) {
      write_back(each, written[next++]);
    });
  }
  for (size_t i = 0; i < stack.size(); i++) {
    const auto argument = argument_of_return(schema, i);
    results->push_back(
        argument ? arguments[*argument]
                 : convert_tensors(stack[i], [&](const at::Tensor &each) {
                     return each.defined() ? each.to(device) : each;
                   }));
  }
}

// ---- Later ------------------------------------------------------------------

// The CPU's kernel may leave out what nobody reads: batch norm does, in
// evaluation.
void copy_result(const at::Tensor &from, const at::Tensor &to) {
  if (from.defined() && to.defined() && from.numel() > 0) to.copy_(from);
}

void copy_results(const IValue &from, const IValue &to) {
  if (from.isTensor()) {
    if (to.isTensor()) copy_result(from.toTensor(), to.toTensor());
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
    if (!is_written(schema.arguments()[i]) || !arguments[i].isTensor()) {
      continue;
    }
    const at::Tensor &mine = arguments[i].toTensor();
    const at::Tensor &wanted = meta[i].toTensor();
    if (mine.is_cuda() && mine.sizes() != wanted.sizes()) {
      mine.resize_(wanted.sizes());
    }
  }
}

// Note [Results on meta tensors]
// Many operators run on meta tensors by way of Python, a hundred times slower
// than the operator itself. What came out is kept by all that it depends on:
// the operator, the metadata of its tensors and the other arguments.
struct Inference {
  bool is_possible = false;
  Stack arguments;  // on meta; outputs may have been resized
  Stack results;
};

template <typename T>
void append_value(std::string &key, T value) {
  key.append(reinterpret_cast<const char *>(&value), sizeof value);
}

void append_numbers(std::string &key, c10::IntArrayRef numbers) {
  key.append(reinterpret_cast<const char *>(numbers.data()),
             numbers.size() * sizeof(int64_t));
}

void append_tensor(std::string &key, const at::Tensor &tensor) {
  if (!tensor.defined()) {
    key += 'u';
    return;
  }
  key += 't';
  append_value(key, tensor.scalar_type());
  append_value(key, tensor.is_cuda());
  append_value(key, tensor.unsafeGetTensorImpl()->is_wrapped_number());
  append_value(key, tensor.dim());
  append_numbers(key, tensor.sizes());
  append_numbers(key, tensor.strides());
}

// False: results may depend on something that a key cannot hold.
bool append_argument(std::string &key, const IValue &value) {
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
  } else if (value.isNone() || value.isGenerator()) {
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
    for (const IValue &each : value.toListRef()) append_argument(key, each);
    key += '.';
  } else {
    return false;
  }
  return true;
}

// Where a normalisation has its weights, and batch norm its statistics behind
// them: the first and the end. Empty for other operators.
std::pair<size_t, size_t> places_of_weights(const c10::FunctionSchema &schema) {
  static const std::map<std::string, std::pair<size_t, size_t>> places = {
      {"aten::native_layer_norm", {2, 3}},
      {"aten::native_group_norm", {1, 2}},
      {"aten::native_batch_norm", {1, 5}},
      {"aten::native_batch_norm_backward", {2, 5}}};
  const auto found = places.find(schema.name());
  return found == places.end() ? std::make_pair(size_t{0}, size_t{0})
                               : found->second;
}

bool has_dtype(const IValue &value, at::ScalarType dtype) {
  return value.isTensor() && value.toTensor().defined() &&
         value.toTensor().scalar_type() == dtype;
}

// Meta tensors have what CUDA returns. The CPU's kernels, which run here, keep
// the statistics of a normalisation in the dtype of its input, unless its
// weights have another.
void use_dtypes_of_host(const c10::OperatorHandle &op, Inference &made) {
  const auto [first, end] = places_of_weights(op.schema());
  if (end == 0 || op.schema().name() == "aten::native_batch_norm_backward") {
    return;
  }
  at::ScalarType dtype = made.arguments[0].toTensor().scalar_type();
  for (size_t i = first; i < end; i++) {
    if (has_dtype(made.arguments[i], at::kFloat)) dtype = at::kFloat;
  }
  for (size_t i = 1; i < made.results.size(); i++) {
    const at::Tensor &old = made.results[i].toTensor();
    made.results[i] = at::empty(old.sizes(), old.options().dtype(dtype));
  }
}

// CUDA's batch norm takes weights of the input's dtype beside statistics in
// fp32. The CPU's takes both in one dtype.
void use_one_dtype(const c10::FunctionSchema &schema, Stack &operands) {
  const auto [first, end] = places_of_weights(schema);
  if (end - first < 2) return;
  const size_t statistics = end - 2;
  if (!has_dtype(operands[statistics], at::kFloat)) return;
  for (size_t i = first; i < statistics; i++) {
    operands[i] = convert_tensors(operands[i], [](const at::Tensor &each) {
      return each.defined() ? each.to(at::kFloat) : each;
    });
  }
}

Inference infer_anew(const c10::OperatorHandle &op, const Stack &arguments) {
  Inference made;
  made.arguments = convert_stack(arguments, meta_of);
  made.results = made.arguments;
  replace_devices(op.schema(), made.results, c10::DeviceType::Meta);
  if (!op.hasComputedKernelForDispatchKey(DispatchKey::Meta)) return made;
  try {
    call(op, DispatchKey::Meta, made.results);
    use_dtypes_of_host(op, made);
    made.is_possible = true;
  } catch (const std::exception &error) {
    // run_now succeeds or says why it cannot.
    static const bool is_shown = std::getenv("FAKE_CUDA_SHOW_WAITS") != nullptr;
    if (is_shown) std::cerr << "fake CUDA: on meta: " << error.what() << '\n';
  }
  return made;
}

std::shared_ptr<const Inference> infer(const c10::OperatorHandle &op,
                                       const Stack &arguments) {
  static std::mutex mutex;
  static auto &kept =
      *new std::unordered_map<std::string, std::shared_ptr<const Inference>>;
  constexpr size_t kMaxKept = 50000;
  std::string key = op.schema().name() + '.' + op.schema().overload_name();
  bool is_whole = true;
  for (const IValue &value : arguments) {
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

at::Tensor device_like(const at::Tensor &meta) {
  if (!meta.defined()) return meta;
  const c10::Device device(c10::kCUDA, c10::cuda::current_device());
  return at::empty_strided(meta.sizes(), meta.strides(),
                           meta.options().device(device));
}

void run_later(const c10::OperatorHandle &op, Stack &arguments,
               const Inference *inference, Stack *results) {
  const c10::FunctionSchema &schema = op.schema();
  if (inference != nullptr) {
    resize_outputs(schema, arguments, inference->arguments);
  }
  Stack targets;  // by return; None where it is an argument
  for (size_t i = 0; i < schema.returns().size(); i++) {
    const auto argument = argument_of_return(schema, i);
    if (argument) {
      results->push_back(arguments[*argument]);
      targets.emplace_back();
    } else {
      results->push_back(convert_tensors(inference->results[i], device_like));
      targets.push_back(convert_tensors(results->back(), operand_of));
    }
  }
  bool is_random = false;
  const auto given = generator_of(schema, arguments, &is_random);
  std::function<at::Generator()> draw;
  if (is_random) draw = draw_from(given);
  Stack operands = convert_stack(arguments, operand_of);
  replace_devices(schema, operands, c10::DeviceType::CPU);
  enqueue([op, operands = std::move(operands), targets = std::move(targets),
           draw = std::move(draw)] {
    const c10::FunctionSchema &own = op.schema();
    Stack stack = operands;  // it may run again: a graph's replay
    if (draw) give_generator(own, stack, draw());
    use_one_dtype(own, stack);
    try {
      op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &stack);
      for (size_t i = 0; i < targets.size(); i++) {
        if (!targets[i].isNone()) copy_results(stack[i], targets[i]);
      }
    } catch (const c10::Error &error) {
      TORCH_CHECK(false, own.operator_name(), ": ",
                  error.what_without_backtrace());
    }
  });
}

Stack take_arguments(const c10::FunctionSchema &schema, Stack *stack) {
  const size_t count = schema.arguments().size();
  Stack arguments(stack->end() - static_cast<std::ptrdiff_t>(count),
                  stack->end());
  stack->resize(stack->size() - count);
  return arguments;
}

struct OnHost : c10::OperatorKernel {
  void operator()(const c10::OperatorHandle &op, DispatchKeySet /*keys*/,
                  Stack *stack) {
    const c10::FunctionSchema &schema = op.schema();
    Stack arguments = take_arguments(schema, stack);
    const at::AutoDispatchBelowADInplaceOrView below;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(
        c10::autocast_dispatch_keyset);
    const c10::cuda::CUDAGuard guard(check_devices(schema, arguments));
    check_dtypes(schema, arguments);
    if (!tells_the_host(schema)) {
      const std::shared_ptr<const Inference> inference = infer(op, arguments);
      if (inference->is_possible || is_in_place(schema)) {
        run_later(op, arguments,
                  inference->is_possible ? inference.get() : nullptr, stack);
        return;
      }
    }
    run_now(op, arguments, stack);
  }
};

struct Refused : c10::OperatorKernel {
  void operator()(const c10::OperatorHandle &op, DispatchKeySet /*keys*/,
                  Stack * /*stack*/) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "the fake CUDA cannot do ",
                                op.schema().operator_name(),
                                ": the CPU has no kernel of it");
  }
};

// ---- Which operators --------------------------------------------------------

// Torch's own work here: they move no data, or call the runtime for it.
const std::set<std::string> &kept_operators() {
  static const std::set<std::string> names = {
      "aten::_local_scalar_dense", "aten::empty", "aten::empty_strided",
      "aten::set_", "aten::resize_", "aten::record_stream", "aten::is_set_to",
      "aten::_has_same_storage_numel", "aten::_pin_memory", "aten::is_pinned",
      "aten::resize_as_sparse_", "aten::_copy_from_and_resize", "aten::copy_",
      "aten::_fused_sdp_choice",
      // fused.cpp
      "aten::native_dropout", "aten::_fused_rms_norm_backward",
      "aten::_thnn_fused_lstm_cell",
      "aten::_thnn_fused_lstm_cell_backward_impl", "aten::_thnn_fused_gru_cell",
      "aten::_thnn_fused_gru_cell_backward", "aten::batch_norm_stats",
      "aten::batch_norm_gather_stats_with_counts", "aten::batch_norm_elemt",
      "aten::batch_norm_backward_reduce", "aten::batch_norm_backward_elemt"};
  return names;
}

// What composites would take apart into operators that only CUDA has.
const std::set<std::string> &whole_operators() {
  static const std::set<std::string> names = {"aten::convolution",
                                              "aten::convolution_backward"};
  return names;
}

bool is_view(const c10::FunctionSchema &schema) {
  for (const c10::Argument &result : schema.returns()) {
    const c10::AliasInfo *alias = result.alias_info();
    if (alias != nullptr && !alias->isWrite()) return true;
  }
  return false;
}

}  // namespace

int install_operators() {
  static std::vector<std::unique_ptr<torch::Library>> libraries;
  std::map<std::string, torch::Library *> by_namespace;
  c10::Dispatcher &dispatcher = c10::Dispatcher::singleton();
  int num_installed = 0;
  for (const c10::OperatorName &name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(name);
    const auto in = name.getNamespace();
    if (!op || !in || (*in != "aten" && *in != "torchvision")) continue;
    if (!op->hasKernelForDispatchKey(DispatchKey::CUDA) &&
        whole_operators().count(name.name) == 0) {
      continue;
    }
    if (kept_operators().count(name.name) > 0 || is_view(op->schema())) {
      continue;
    }
    const std::string space(*in);
    torch::Library *&library = by_namespace[space];
    if (library == nullptr) {
      libraries.push_back(std::make_unique<torch::Library>(
          torch::Library::IMPL, space, DispatchKey::CUDA, __FILE__, __LINE__));
      library = libraries.back().get();
    }
    std::string own = name.name.substr(space.size() + 2);
    if (!name.overload_name.empty()) own += "." + name.overload_name;
    const bool is_known = op->hasComputedKernelForDispatchKey(DispatchKey::CPU);
    library->impl(own.c_str(), is_known
                                   ? torch::CppFunction::makeFromBoxedFunctor(
                                         std::make_unique<OnHost>())
                                   : torch::CppFunction::makeFromBoxedFunctor(
                                         std::make_unique<Refused>()));
    num_installed++;
  }
  return num_installed;
}

}  // namespace fakecuda
