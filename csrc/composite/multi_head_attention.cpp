#include "multi_head_attention.h"

#include "../checks.h"
#include "../flat_signatures.h"
#include "attention.h"

#include <ATen/ATen.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <torch/library.h>

#include <cmath>

namespace mha_ext::composite {
namespace {

using at::Tensor;
using c10::SymInt;
using OptionalTensor = std::optional<Tensor>;

bool given(const OptionalTensor& tensor) { return tensor.has_value() && tensor->defined(); }

// (B, L, heads * dim) seen as (B, heads, L, dim).
Tensor split_heads(const Tensor& x, const SymInt& heads, const SymInt& dim) {
  return x.view_symint({x.sym_size(0), x.sym_size(1), heads, dim}).transpose(1, 2);
}

// (B, heads, L, dim), stored as (B, L, heads, dim), seen as (B, L, heads * dim).
Tensor merge_heads(const Tensor& x) { return x.transpose(1, 2).flatten(2); }

struct Projected {
  Tensor q, k, v;  // (B, L, features)

  Tensor q_heads(const AttentionSizes& s) const { return split_heads(q, s.heads, s.head_dim); }
  Tensor k_heads(const AttentionSizes& s) const { return split_heads(k, s.kv_heads, s.head_dim); }
  Tensor v_heads(const AttentionSizes& s) const { return split_heads(v, s.kv_heads, s.value_dim); }
};

Projected project(const Tensor& query, const Tensor& key, const Tensor& value, const Projections& p) {
  return {at::linear(query, p.w_q, p.b_q).contiguous(), at::linear(key, p.w_k, p.b_k).contiguous(),
          at::linear(value, p.w_v, p.b_v).contiguous()};
}

// What at::scaled_dot_product_attention means by is_causal, and nothing else.
bool only_causal(const AttentionOptions& options) {
  return options.is_causal && !options.causal_bottom_right && !given(options.mask) && !given(options.key_lengths);
}

bool known_finite(const Tensor& tensor) { return std::isfinite(tensor.detach().sum().item<double>()); }

// ATen's fused kernels multiply hidden values by 0, which is not the same thing for a NaN; traced values are trusted.
bool fused_core_agrees(const Projected& x, const AttentionSizes& s, const AttentionOptions& options) {
  if (x.q.is_cpu() || x.q.is_meta()) return false;
  if (options.need_weights || options.dropout_p > 0 || given(options.bias) || options.softcap) return false;
  if (s.kv_len.sym_eq(0).guard_or_true(__FILE__, __LINE__)) return false;
  const bool hides = given(options.mask) || given(options.key_lengths) || options.is_causal;
  return !hides || at::isTensorSubclassLike(x.q) || (known_finite(x.q) && known_finite(x.k) && known_finite(x.v));
}

// softmax(Q K^T) V in (B, Lq, H * Dv) by at::scaled_dot_product_attention.
Tensor fused_core(const Projected& x, const AttentionSizes& s, const AttentionOptions& options) {
  OptionalTensor mask, dead;
  if (!only_causal(options)) mask = visible_keys(s, options, x.q.device());
  if (mask) {
    // A dead row sees every key in the fused kernel, which keeps it finite, and is then replaced.
    dead = mask->any(-1, true).logical_not();
    mask = mask->logical_or(*dead).expand_symint({s.batch, s.heads, s.q_len, s.kv_len});
  }
  const auto v = x.v_heads(s);
  auto output = at::scaled_dot_product_attention(x.q_heads(s), x.k_heads(s), v, mask, 0.0, options.is_causal && !mask,
                                                 options.scale,
                                                 /*enable_gqa=*/s.heads != s.kv_heads);
  if (dead) {
    auto instead = options.uniform_dead_rows ? v.mean(-2, true) : at::zeros_like(v.slice(-2, 0, 1));
    if (s.heads != s.kv_heads) instead = instead.repeat_interleave_symint(s.heads / s.kv_heads, 1);
    output = at::where(*dead, instead, output);
  }
  return merge_heads(output);
}

// The gradients of y = x w^T + b, summed over batch and length.
Tensor weight_grad(const Tensor& grad, const Tensor& x) { return at::matmul(grad.flatten(0, 1).t(), x.flatten(0, 1)); }
Tensor bias_grad(const Tensor& grad) { return grad.sum(at::IntArrayRef{0, 1}); }

}  // namespace

std::tuple<Tensor, LayerSaved> multi_head_attention_forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                                            const Projections& p, int64_t num_heads,
                                                            const AttentionOptions& options) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto s = check_layer("multi_head_attention", query, key, value, p, num_heads, options).core;
  check_key_length_values("multi_head_attention", options.key_lengths, s.kv_len);
  const auto x = project(query, key, value, p);
  const auto [heads, weights, logsumexp] = composite::attention(x.q_heads(s), x.k_heads(s), x.v_heads(s), options);
  const auto context = merge_heads(heads);
  return {at::linear(context, p.w_o, p.b_o), {x.q, x.k, x.v, context, weights, logsumexp}};
}

std::tuple<Tensor, Tensor> multi_head_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                                const Projections& p, int64_t num_heads,
                                                const AttentionOptions& options) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto s = check_layer("multi_head_attention", query, key, value, p, num_heads, options).core;
  check_key_length_values("multi_head_attention", options.key_lengths, s.kv_len);
  const auto x = project(query, key, value, p);
  if (fused_core_agrees(x, s, options)) {
    return {at::linear(fused_core(x, s, options), p.w_o, p.b_o), at::empty({0}, query.options())};
  }
  const auto [heads, weights, logsumexp] = composite::attention(x.q_heads(s), x.k_heads(s), x.v_heads(s), options);
  return {at::linear(merge_heads(heads), p.w_o, p.b_o), weights};
}

LayerGrads multi_head_attention_backward(const Tensor& grad_output, const OptionalTensor& grad_weights,
                                         const Tensor& query, const Tensor& key, const Tensor& value,
                                         const Projections& p, const LayerSaved& saved, int64_t num_heads,
                                         const AttentionOptions& options, bool self_attention,
                                         const LayerGradMask& output_mask) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto s = check_layer_backward("multi_head_attention_backward", grad_output, grad_weights, query, key, value, p,
                                      saved, num_heads, options, self_attention, output_mask)
                     .core;
  check_key_length_values("multi_head_attention_backward", options.key_lengths, s.kv_len);
  const auto x = project(query, key, value, p);
  const auto q = x.q_heads(s), k = x.k_heads(s), v = x.v_heads(s);
  LayerGrads grads;
  const auto set = [&](LayerGrad which, const auto& compute) {
    if (output_mask[which]) grads[which] = compute().contiguous();
  };

  // y = context w_o^T + b_o
  set(kWo, [&] { return weight_grad(grad_output, merge_heads(std::get<0>(composite::attention(q, k, v, options)))); });
  set(kBo, [&] { return bias_grad(grad_output); });
  const auto grad_heads = split_heads(at::matmul(grad_output, p.w_o), s.heads, s.value_dim);
  const auto [dq, dk, dv, grad_bias] =
      attention_gradients(s, grad_heads, grad_weights, std::nullopt, q, k, v, options, output_mask[kBias]);
  set(kBias, [&] { return grad_bias; });

  // q = query w_q^T + b_q, and the same for k and v
  const auto grad_q = merge_heads(dq), grad_k = merge_heads(dk), grad_v = merge_heads(dv);
  const auto input_grad = [&](const Tensor& grad, const Tensor& w) { return at::matmul(grad, w); };
  if (self_attention) {
    set(kQuery, [&] { return input_grad(grad_q, p.w_q) + input_grad(grad_k, p.w_k) + input_grad(grad_v, p.w_v); });
  } else {
    set(kQuery, [&] { return input_grad(grad_q, p.w_q); });
    set(kKey, [&] { return input_grad(grad_k, p.w_k); });
    set(kValue, [&] { return input_grad(grad_v, p.w_v); });
  }
  set(kWq, [&] { return weight_grad(grad_q, query); });
  set(kWk, [&] { return weight_grad(grad_k, key); });
  set(kWv, [&] { return weight_grad(grad_v, value); });
  set(kBq, [&] { return bias_grad(grad_q); });
  set(kBk, [&] { return bias_grad(grad_k); });
  set(kBv, [&] { return bias_grad(grad_v); });
  for (auto& grad : grads) {
    if (!grad.defined()) grad = at::empty({0}, query.options());
  }
  return grads;
}

}  // namespace mha_ext::composite

namespace {

void implement(torch::Library& m) {
  using namespace mha_ext;
  m.impl("multi_head_attention", TORCH_FN(FlatLayer<&composite::multi_head_attention>::call));
  m.impl("multi_head_attention_forward", TORCH_FN(FlatLayerForward<&composite::multi_head_attention_forward>::call));
  m.impl("multi_head_attention_backward", TORCH_FN(FlatLayerBackward<&composite::multi_head_attention_backward>::call));
}

}  // namespace

TORCH_LIBRARY_IMPL(mha_ext, CompositeExplicitAutograd, m) { implement(m); }
TORCH_LIBRARY_IMPL(mha_ext, Autograd, m) { implement(m); }
TORCH_LIBRARY_IMPL(mha_ext, FuncTorchBatched, m) { implement(m); }  // vmap
