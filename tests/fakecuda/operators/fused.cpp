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
}

}  // namespace fakecuda
