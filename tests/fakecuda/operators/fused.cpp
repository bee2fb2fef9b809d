// Operators that only CUDA has, in place of several that the CPU has, too.
#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "fake.hpp"

namespace fakecuda {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

OptionalTensor alias_of(const OptionalTensor &tensor) {
  if (!tensor.has_value() || !tensor->defined()) return std::nullopt;
  return host_alias(*tensor);
}

// 0 for what is not there.
at::Tensor or_zeros(const OptionalTensor &tensor, const at::Tensor &like) {
  return tensor ? *tensor : at::zeros_like(like);
}

std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor &input,
                                                  double p,
                                                  std::optional<bool> train) {
  at::Tensor result = at::empty_like(input);
  at::Tensor mask = at::empty_like(input, input.options().dtype(at::kBool));
  const auto draw = draw_from(std::nullopt);
  const bool is_kept = train.has_value() && !*train;
  enqueue([from = host_alias(input), to = host_alias(result),
           kept = host_alias(mask), p, is_kept, draw] {
    if (is_kept || p == 0) {
      kept.fill_(true);
      to.copy_(from);
      return;
    }
    kept.bernoulli_(1 - p, draw());
    to.copy_(from * kept * (p == 1 ? 0.0 : 1.0 / (1.0 - p)));
  });
  return {result, mask};
}

// The gradients of x * rstd * weight, in fp32 as CUDA's.
std::tuple<at::Tensor, at::Tensor> rms_norm_backward(
    const at::Tensor &grad, const at::Tensor &input, at::IntArrayRef shape,
    const at::Tensor &rstd, const OptionalTensor &weight,
    std::array<bool, 2> mask) {
  const c10::cuda::CUDAGuard guard(input.device());
  const bool has_weight = weight.has_value() && weight->defined();
  at::Tensor grad_input = at::empty_like(input);
  at::Tensor grad_weight;
  if (mask[1] && has_weight) grad_weight = at::empty_like(*weight);
  enqueue([g = host_alias(grad), x = host_alias(input), r = host_alias(rstd),
           w = alias_of(weight), to = host_alias(grad_input),
           to_weight = alias_of(grad_weight), num_dims = shape.size()] {
    const bool is_wide = x.scalar_type() == at::kDouble;
    const auto wide = is_wide ? at::kDouble : at::kFloat;
    const at::Tensor scale = r.to(wide);
    const at::Tensor normal = x.to(wide) * scale;
    const at::Tensor upstream = g.to(wide);
    const at::Tensor scaled = w ? upstream * w->to(wide) : upstream;
    std::vector<int64_t> inner;
    std::vector<int64_t> outer;
    for (int64_t i = 0; i < x.dim(); i++) {
      const bool is_inner = i >= x.dim() - static_cast<int64_t>(num_dims);
      (is_inner ? inner : outer).push_back(i);
    }
    to.copy_(scale * (scaled - normal * (scaled * normal).mean(inner, true)));
    if (!to_weight) return;
    const at::Tensor each = upstream * normal;
    to_weight->copy_(outer.empty() ? each : each.sum(outer));
  });
  return {grad_input, grad_weight};
}

// ---- Cells of recurrent layers ----------------------------------------------

at::Tensor add_biases(const at::Tensor &input, const at::Tensor &hidden,
                      const OptionalTensor &first,
                      const OptionalTensor &second) {
  at::Tensor sum = input + hidden;
  if (first) sum = sum + *first;
  return second ? sum + *second : sum;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(
    const at::Tensor &input, const at::Tensor &hidden, const at::Tensor &cell,
    const OptionalTensor &input_bias, const OptionalTensor &hidden_bias) {
  const c10::cuda::CUDAGuard guard(input.device());
  at::Tensor out = at::empty_like(cell);
  at::Tensor next = at::empty_like(cell);
  at::Tensor gates = at::empty_like(input);
  enqueue([i = host_alias(input), h = host_alias(hidden), c = host_alias(cell),
           ib = alias_of(input_bias), hb = alias_of(hidden_bias),
           to = host_alias(out), to_next = host_alias(next),
           kept = host_alias(gates)] {
    const auto raw = add_biases(i, h, ib, hb).chunk(4, 1);
    const at::Tensor in = raw[0].sigmoid();
    const at::Tensor forget = raw[1].sigmoid();
    const at::Tensor value = raw[2].tanh();
    const at::Tensor open = raw[3].sigmoid();
    to_next.copy_(forget * c + in * value);
    to.copy_(open * to_next.tanh());
    kept.copy_(at::cat({in, forget, value, open}, 1));
  });
  return {out, next, gates};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell_backward(
    const OptionalTensor &grad_out, const OptionalTensor &grad_next,
    const at::Tensor &cell, const at::Tensor &next, const at::Tensor &gates,
    bool has_bias) {
  const c10::cuda::CUDAGuard guard(cell.device());
  at::Tensor grad_gates = at::empty_like(gates);
  at::Tensor grad_cell = at::empty_like(cell);
  at::Tensor grad_bias;
  if (has_bias) grad_bias = at::empty({gates.size(1)}, gates.options());
  enqueue([go = alias_of(grad_out), gn = alias_of(grad_next),
           c = host_alias(cell), n = host_alias(next), kept = host_alias(gates),
           to = host_alias(grad_gates), to_cell = host_alias(grad_cell),
           to_bias = alias_of(grad_bias)] {
    const auto parts = kept.chunk(4, 1);
    const at::Tensor &in = parts[0];
    const at::Tensor &forget = parts[1];
    const at::Tensor &value = parts[2];
    const at::Tensor &open = parts[3];
    const at::Tensor upstream = or_zeros(go, c);
    const at::Tensor wave = n.tanh();
    const at::Tensor grad =
        upstream * open * (1 - wave * wave) + or_zeros(gn, c);
    to_cell.copy_(grad * forget);
    to.copy_(at::cat(
        {grad * value * in * (1 - in), grad * c * forget * (1 - forget),
         grad * in * (1 - value * value), upstream * wave * open * (1 - open)},
        1));
    if (to_bias) to_bias->copy_(to.sum(0));
  });
  return {grad_gates, grad_cell, grad_bias};
}

std::tuple<at::Tensor, at::Tensor> gru_cell(const at::Tensor &input,
                                            const at::Tensor &hidden,
                                            const at::Tensor &state,
                                            const OptionalTensor &input_bias,
                                            const OptionalTensor &hidden_bias) {
  const c10::cuda::CUDAGuard guard(input.device());
  at::Tensor out = at::empty_like(state);
  at::Tensor kept =
      at::empty({state.size(0), 5 * state.size(1)}, state.options());
  enqueue([i = host_alias(input), h = host_alias(hidden), s = host_alias(state),
           ib = alias_of(input_bias), hb = alias_of(hidden_bias),
           to = host_alias(out), to_kept = host_alias(kept)] {
    const auto from_input = (ib ? i + *ib : i).chunk(3, 1);
    const auto from_hidden = (hb ? h + *hb : h).chunk(3, 1);
    const at::Tensor reset = (from_input[0] + from_hidden[0]).sigmoid();
    const at::Tensor keep = (from_input[1] + from_hidden[1]).sigmoid();
    const at::Tensor fresh = (from_input[2] + reset * from_hidden[2]).tanh();
    to.copy_(fresh + keep * (s - fresh));
    to_kept.copy_(at::cat({reset, keep, fresh, s, from_hidden[2]}, 1));
  });
  return {out, kept};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>
gru_cell_backward(const at::Tensor &grad_out, const at::Tensor &kept,
                  bool has_bias) {
  const c10::cuda::CUDAGuard guard(kept.device());
  const int64_t width = grad_out.size(1);
  at::Tensor grad_input = at::empty({kept.size(0), 3 * width}, kept.options());
  at::Tensor grad_hidden = at::empty_like(grad_input);
  at::Tensor grad_state = at::empty_like(grad_out);
  at::Tensor input_bias;
  at::Tensor hidden_bias;
  if (has_bias) {
    input_bias = at::empty({3 * width}, kept.options());
    hidden_bias = at::empty_like(input_bias);
  }
  enqueue([g = host_alias(grad_out), all = host_alias(kept),
           to_input = host_alias(grad_input),
           to_hidden = host_alias(grad_hidden),
           to_state = host_alias(grad_state), ib = alias_of(input_bias),
           hb = alias_of(hidden_bias)] {
    const auto parts = all.chunk(5, 1);
    const at::Tensor &reset = parts[0];
    const at::Tensor &keep = parts[1];
    const at::Tensor &fresh = parts[2];
    const at::Tensor grad_fresh = g * (1 - keep) * (1 - fresh * fresh);
    const at::Tensor grad_keep = g * (parts[3] - fresh) * keep * (1 - keep);
    const at::Tensor grad_reset = grad_fresh * parts[4] * reset * (1 - reset);
    to_state.copy_(g * keep);
    to_input.copy_(at::cat({grad_reset, grad_keep, grad_fresh}, 1));
    to_hidden.copy_(at::cat({grad_reset, grad_keep, grad_fresh * reset}, 1));
    if (ib) ib->copy_(to_input.sum(0));
    if (hb) hb->copy_(to_hidden.sum(0));
  });
  return {grad_input, grad_hidden, grad_state, input_bias, hidden_bias};
}

// ---- Batch norm over ranks (SyncBatchNorm) ----------------------------------

at::ScalarType wide_dtype(const at::Tensor &tensor) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// All dimensions but that of channels.
std::vector<int64_t> summed_dims(const at::Tensor &input) {
  std::vector<int64_t> dims;
  for (int64_t i = 0; i < input.dim(); i++) {
    if (i != 1) dims.push_back(i);
  }
  return dims;
}

// Values of channels, to go with an input.
at::Tensor by_channel(const at::Tensor &values, const at::Tensor &input) {
  std::vector<int64_t> shape(static_cast<size_t>(input.dim()), 1);
  shape[1] = values.numel();
  return values.to(wide_dtype(input)).view(shape);
}

std::tuple<at::Tensor, at::Tensor> norm_stats(const at::Tensor &input,
                                              double eps) {
  const c10::cuda::CUDAGuard guard(input.device());
  at::Tensor mean =
      at::empty({input.size(1)}, input.options().dtype(wide_dtype(input)));
  at::Tensor invstd = at::empty_like(mean);
  enqueue([x = host_alias(input), to_mean = host_alias(mean),
           to_invstd = host_alias(invstd), eps] {
    const at::Tensor wide = x.to(to_mean.scalar_type());
    const auto dims = summed_dims(x);
    to_mean.copy_(wide.mean(dims));
    to_invstd.copy_((wide.var(dims, false) + eps).rsqrt());
  });
  return {mean, invstd};
}

// Of all ranks, a row each.
std::tuple<at::Tensor, at::Tensor> joined_stats(
    const at::Tensor &input, const at::Tensor &means, const at::Tensor &invstds,
    const OptionalTensor &running_mean, const OptionalTensor &running_var,
    double momentum, double eps, const at::Tensor &counts) {
  const c10::cuda::CUDAGuard guard(input.device());
  at::Tensor mean = at::empty({means.size(1)}, means.options());
  at::Tensor invstd = at::empty_like(mean);
  enqueue([from = host_alias(means), from_invstd = host_alias(invstds),
           count = host_alias(counts), to_mean = host_alias(mean),
           to_invstd = host_alias(invstd), kept_mean = alias_of(running_mean),
           kept_var = alias_of(running_var), momentum, eps] {
    const at::Tensor each = count.to(from.scalar_type()).view({-1, 1});
    const at::Tensor total = each.sum();
    to_mean.copy_((from * each).sum(0) / total);
    const at::Tensor var = from_invstd.pow(-2) - eps;
    const at::Tensor squares =
        ((var + (from - to_mean).square()) * each).sum(0);
    to_invstd.copy_((squares / total + eps).rsqrt());
    if (kept_mean) kept_mean->lerp_(to_mean.to(kept_mean->dtype()), momentum);
    if (kept_var) {
      kept_var->lerp_((squares / (total - 1)).to(kept_var->dtype()), momentum);
    }
  });
  return {mean, invstd};
}

at::Tensor norm_elements(const at::Tensor &input, const OptionalTensor &weight,
                         const OptionalTensor &bias, const at::Tensor &mean,
                         const at::Tensor &invstd, double /*eps*/) {
  const c10::cuda::CUDAGuard guard(input.device());
  at::Tensor out = at::empty_like(input);
  enqueue([x = host_alias(input), w = alias_of(weight), b = alias_of(bias),
           m = host_alias(mean), s = host_alias(invstd), to = host_alias(out)] {
    at::Tensor normal =
        (x.to(wide_dtype(x)) - by_channel(m, x)) * by_channel(s, x);
    if (w) normal = normal * by_channel(*w, x);
    if (b) normal = normal + by_channel(*b, x);
    to.copy_(normal);
  });
  return out;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> norm_sums(
    const at::Tensor &grad, const at::Tensor &input, const at::Tensor &mean,
    const at::Tensor &invstd, const OptionalTensor &weight, bool is_input,
    bool is_weight, bool is_bias) {
  const c10::cuda::CUDAGuard guard(input.device());
  const at::Tensor &like = weight && weight->defined() ? *weight : mean;
  at::Tensor sum;
  at::Tensor product;
  at::Tensor grad_weight;
  at::Tensor grad_bias;
  if (is_input) sum = at::empty_like(mean);
  if (is_input) product = at::empty_like(mean);
  if (is_weight) grad_weight = at::empty_like(like);
  if (is_bias) grad_bias = at::empty_like(like);
  enqueue([g = host_alias(grad), x = host_alias(input), m = host_alias(mean),
           s = host_alias(invstd), to_sum = alias_of(sum),
           to_product = alias_of(product), to_weight = alias_of(grad_weight),
           to_bias = alias_of(grad_bias)] {
    const at::Tensor upstream = g.to(wide_dtype(x));
    const auto dims = summed_dims(x);
    const at::Tensor total = upstream.sum(dims);
    const at::Tensor moved =
        (upstream * (x.to(wide_dtype(x)) - by_channel(m, x))).sum(dims);
    if (to_sum) to_sum->copy_(total);
    if (to_product) to_product->copy_(moved);
    if (to_weight) to_weight->copy_(moved * s);
    if (to_bias) to_bias->copy_(total);
  });
  return {sum, product, grad_weight, grad_bias};
}

at::Tensor norm_gradient(const at::Tensor &grad, const at::Tensor &input,
                         const at::Tensor &mean, const at::Tensor &invstd,
                         const OptionalTensor &weight, const at::Tensor &sum,
                         const at::Tensor &product, const at::Tensor &count) {
  const c10::cuda::CUDAGuard guard(input.device());
  at::Tensor out = at::empty_like(input);
  enqueue([g = host_alias(grad), x = host_alias(input), m = host_alias(mean),
           s = host_alias(invstd), w = alias_of(weight), all = host_alias(sum),
           moved = host_alias(product), n = host_alias(count),
           to = host_alias(out)] {
    const at::Tensor total = n.sum().to(wide_dtype(x));
    const at::Tensor scale = by_channel(s, x);
    const at::Tensor normal = (x.to(wide_dtype(x)) - by_channel(m, x)) * scale;
    at::Tensor result = g.to(wide_dtype(x)) - by_channel(all, x) / total -
                        normal * scale * by_channel(moved, x) / total;
    result = result * scale;
    to.copy_(w ? result * by_channel(*w, x) : result);
  });
  return out;
}

}  // namespace

void install_fused() {
  static torch::Library library(torch::Library::IMPL, "aten",
                                c10::DispatchKey::CUDA, __FILE__, __LINE__);
  library.impl("native_dropout", &native_dropout);
  library.impl("_fused_rms_norm_backward", &rms_norm_backward);
  library.impl("_thnn_fused_lstm_cell", &lstm_cell);
  library.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
  library.impl("_thnn_fused_gru_cell", &gru_cell);
  library.impl("_thnn_fused_gru_cell_backward", &gru_cell_backward);
  library.impl("batch_norm_stats", &norm_stats);
  library.impl("batch_norm_gather_stats_with_counts", &joined_stats);
  library.impl("batch_norm_elemt", &norm_elements);
  library.impl("batch_norm_backward_reduce", &norm_sums);
  library.impl("batch_norm_backward_elemt", &norm_gradient);
}

}  // namespace fakecuda
