#include "multi_head_attention.h"

#include "../checks.h"
#include "../flat_signatures.h"
#include "../outputs.h"
#include "attention.h"

#include <ATen/ATen.h>
#include <torch/library.h>

namespace mha_ext::composite {
namespace {

using at::Tensor;
using c10::SymInt;
using OptionalTensor = std::optional<Tensor>;

// (B, L, heads * dim) seen as (B, heads, L, dim).
Tensor split_heads(const Tensor& x, const SymInt& heads, const SymInt& dim) {
  return x.view_symint({x.sym_size(0), x.sym_size(1), heads, dim}).transpose(1, 2);
}

// (B, heads, L, dim), stored as (B, L, heads, dim), seen as (B, L, heads * dim).
Tensor merge_heads(const Tensor& x) { return x.transpose(1, 2).flatten(2); }

// What a layer is given, with 0 in the rows that no result depends on: a NaN there would reach the gradients of the
// projections, as 0 NaN = NaN.
struct Inputs {
  Tensor query, key, value;  // (B, L, features)

  Inputs(const Tensor& query, const Tensor& key, const Tensor& value, const AttentionSizes& s,
         const AttentionOptions& options)
      : query(query), key(key), value(value) {
    if (only_causal(options)) {
      clear_beyond_causal(s, options);
    } else if (const auto seen = visible_keys(s, options, query.device())) {
      clear_hidden(*seen, options);
    }
  }

 private:
  // seen: (B, H, Lq, Lk), or 1 in any place
  void clear_hidden(const Tensor& seen, const AttentionOptions& options) {
    const auto dead = seen.any(3).logical_not();                   // (B, H, Lq)
    auto unseen = seen.any(2).any(1).logical_not().unsqueeze(-1);  // (B, Lk, 1)
    query = query.masked_fill(dead.all(1).unsqueeze(-1), 0.0);
    key = key.masked_fill(unseen, 0.0);
    if (options.uniform_dead_rows) unseen = unseen.logical_and(dead.any(2).any(1).logical_not().view({-1, 1, 1}));
    value = value.masked_fill(unseen, 0.0);
  }

  // Without the mask that is_causal stands for.
  void clear_beyond_causal(const AttentionSizes& s, const AttentionOptions& options) {
    const auto positions = [&](const SymInt& length) {
      return at::arange(length, at::TensorOptions().dtype(at::kLong).device(query.device())).unsqueeze(-1);
    };
    if (options.causal_bottom_right) {
      query = query.masked_fill(positions(s.q_len) < s.q_len - s.kv_len, 0.0);
    } else {
      const auto unseen = positions(s.kv_len) >= s.q_len;
      key = key.masked_fill(unseen, 0.0);
      value = value.masked_fill(unseen, 0.0);
    }
  }
};

struct Projected {
  Tensor q, k, v;  // (B, L, features)

  Tensor q_heads(const AttentionSizes& s) const { return split_heads(q, s.heads, s.head_dim); }
  Tensor k_heads(const AttentionSizes& s) const { return split_heads(k, s.kv_heads, s.head_dim); }
  Tensor v_heads(const AttentionSizes& s) const { return split_heads(v, s.kv_heads, s.value_dim); }
};

Projected project(const Inputs& x, const Projections& p) {
  return {at::linear(x.query, p.w_q, p.b_q).contiguous(), at::linear(x.key, p.w_k, p.b_k).contiguous(),
          at::linear(x.value, p.w_v, p.b_v).contiguous()};
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
  const Inputs inputs(query, key, value, s, options);
  const auto x = project(inputs, p);
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
  const Inputs inputs(query, key, value, s, options);
  const auto x = project(inputs, p);
  auto core = options;
  core.need_logsumexp = false;
  const auto [heads, weights, logsumexp] = composite::attention(x.q_heads(s), x.k_heads(s), x.v_heads(s), core);
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
  const Inputs inputs(query, key, value, s, options);
  const auto x = project(inputs, p);
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
  set(kWq, [&] { return weight_grad(grad_q, inputs.query); });
  set(kWk, [&] { return weight_grad(grad_k, inputs.key); });
  set(kWv, [&] { return weight_grad(grad_v, inputs.value); });
  set(kBq, [&] { return bias_grad(grad_q); });
  set(kBk, [&] { return bias_grad(grad_k); });
  set(kBv, [&] { return bias_grad(grad_v); });
  return with_empty_rest(std::move(grads), query.options());
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
