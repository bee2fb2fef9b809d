// Dtypes that CUDA refuses, and neither the CPU's kernels nor meta tensors do.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <map>
#include <string>

#include "fake.hpp"

namespace fakecuda {
namespace {

// In backward only CUDA's kernel for channels that lie side by side takes them.
void check_statistics(const c10::FunctionSchema &schema,
                      const Stack &arguments) {
  if (schema.name() != "aten::native_batch_norm_backward") return;
  const at::Tensor input = arguments[1].toTensor();
  const bool are_channels_last =
      input.is_contiguous(at::MemoryFormat::ChannelsLast) ||
      input.is_contiguous(at::MemoryFormat::ChannelsLast3d) ||
      (input.is_contiguous() && input.stride(1) == 1);
  const auto optional = [&](size_t index) {
    const c10::IValue &value = arguments[index];
    return value.isTensor() ? value.toTensor() : at::Tensor();
  };
  const at::Tensor weight = optional(2);
  const at::Tensor mean = optional(3);
  if (are_channels_last || !mean.defined()) return;
  const at::ScalarType expected =
      (weight.defined() ? weight : input).scalar_type();
  TORCH_CHECK(mean.scalar_type() == expected,
              "Expected running_mean to have type ", expected, " but got ",
              mean.scalar_type());
}

// Of a product of matrices, which meta tensors do not compare.
void check_products(const c10::FunctionSchema &schema, const Stack &arguments) {
  static const std::map<std::string, size_t> places = {
      {"aten::mm", 0}, {"aten::addmm", 1}, {"aten::addmm_", 1}};
  const auto found = places.find(schema.name());
  if (found == places.end()) return;
  const auto dtype = [&](size_t index) {
    return arguments[found->second + index].toTensor().scalar_type();
  };
  TORCH_CHECK(dtype(0) == dtype(1),
              "mat1 and mat2 must have the same dtype, but got ", dtype(0),
              " and ", dtype(1));
}

}  // namespace

void check_dtypes(const c10::FunctionSchema &schema, const Stack &arguments) {
  check_statistics(schema, arguments);
  check_products(schema, arguments);
}

}  // namespace fakecuda
