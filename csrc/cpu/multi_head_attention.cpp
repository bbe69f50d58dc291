// CPU kernels of the layer: projections, the engine on views of the projected heads, output projection; and backward.
#include "../checks.h"
#include "../composite/attention.h"
#include "../flat_signatures.h"
#include "../outputs.h"
#include "attention.h"
#include "linear.h"
#include "live_rows.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

namespace mha_ext::cpu {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// (B, L, heads * dim) seen as (B, heads, L, dim)
Tensor heads_of(const Tensor& x, const c10::SymInt& heads, const c10::SymInt& dim) {
  return x.view_symint({x.sym_size(0), x.sym_size(1), heads, dim}).transpose(1, 2);
}

bool given(const OptionalTensor& tensor) { return tensor.has_value() && tensor->defined(); }

bool hides_anything(const AttentionOptions& o) {
  return o.is_causal || given(o.mask) || given(o.bias) || given(o.key_lengths);
}

// Whether some query may take the mean of all values, those that are hidden from every query among them.
bool may_need_hidden_values(const AttentionOptions& o, const Tensor& query, const Tensor& key) {
  if (!o.uniform_dead_rows) return false;
  if (given(o.mask) || given(o.bias) || (o.causal_bottom_right && query.size(1) > key.size(1))) return true;
  return o.key_lengths->numel() > 0 && o.key_lengths->min().item<int64_t>() == 0;
}

// What of key and value has to be projected.
struct LiveKeysAndValues {
  LiveRows keys, values;

  LiveKeysAndValues(const AttentionOptions& options, const Tensor& query, const Tensor& key)
      : keys(options.key_lengths, key.size(1)) {
    if (given(options.key_lengths) && !may_need_hidden_values(options, query, key)) values = keys;
  }
};

// x for dw = dy^T x. A hidden row has dy = 0, but 0 * NaN would reach dw: where x is not finite such rows are cleared.
Tensor without_hidden_rows(const Tensor& dy, const Tensor& x, const AttentionOptions& options) {
  if (!hides_anything(options) || x.sum().isfinite().item<bool>()) return x;
  return x.masked_fill(dy.eq(0).all(-1, /*keepdim=*/true), 0);
}

// Also reached through multi_head_attention, whose autograd node calls it: its errors name that operator.
std::tuple<Tensor, LayerSaved> multi_head_attention_forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                                            const Projections& p, int64_t num_heads,
                                                            const AttentionOptions& given) {
  const char* op = "multi_head_attention";
  const LayerSizes sizes = check_layer(op, query, key, value, p, num_heads, given);
  check_key_length_values(op, given.key_lengths, key.size(1));
  const AttentionOptions options = composite::with_seed(given);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCPU);
  const AttentionSizes& s = sizes.core;
  LayerSaved saved;
  const LiveKeysAndValues live(options, query, key);
  LinearProducts projections;
  saved.q = projections.forward(query, p.w_q, p.b_q);
  const Tensor k = projections.forward(live.keys.take(key), p.w_k, p.b_k);
  const Tensor v = projections.forward(live.values.take(value), p.w_v, p.b_v);
  projections.run();
  saved.k = live.keys.put(k);
  saved.v = live.values.put(v);
  saved.context = empty_features(s.batch, s.q_len, s.heads * s.value_dim, query.options());
  saved.weights = empty_weights(s, options, query.options());
  saved.logsumexp = empty_logsumexp(s, options, query.options());
  attention_into(heads_of(saved.q, s.heads, s.head_dim), heads_of(saved.k, s.kv_heads, s.head_dim),
                 heads_of(saved.v, s.kv_heads, s.value_dim), options, heads_of(saved.context, s.heads, s.value_dim),
                 saved.weights, saved.logsumexp);
  const Tensor output = projections.forward(saved.context, p.w_o, p.b_o);
  projections.run();
  return {output, saved};
}

std::tuple<Tensor, Tensor> multi_head_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                                const Projections& projections, int64_t num_heads,
                                                const AttentionOptions& options) {
  auto [output, saved] = cpu::multi_head_attention_forward(query, key, value, projections, num_heads, options);
  return {output, saved.weights};
}

LayerGrads multi_head_attention_backward(const Tensor& grad_output, const OptionalTensor& grad_weights,
                                         const Tensor& query, const Tensor& key, const Tensor& value,
                                         const Projections& p, const LayerSaved& saved, int64_t num_heads,
                                         const AttentionOptions& options, bool self_attention,
                                         const LayerGradMask& wanted) {
  const char* op = "multi_head_attention_backward";
  const LayerSizes sizes = check_layer_backward(op, grad_output, grad_weights, query, key, value, p, saved, num_heads,
                                                options, self_attention, wanted);
  check_key_length_values(op, options.key_lengths, key.size(1));
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCPU);
  const AttentionSizes& s = sizes.core;
  LayerGrads grads;
  LinearProducts products;
  std::tie(grads[kWo], grads[kBo]) = products.grad_weight(grad_output, saved.context, wanted[kWo], wanted[kBo]);

  const bool query_side = wanted[kQuery] || wanted[kWq] || wanted[kBq];
  const bool key_side = wanted[kKey] || wanted[kWk] || wanted[kBk];
  const bool value_side = wanted[kValue] || wanted[kWv] || wanted[kBv];
  if (!query_side && !key_side && !value_side && !wanted[kBias]) {
    products.run();
    return with_empty_rest(std::move(grads), query.options());
  }

  const Tensor grad_context = products.grad_input({{grad_output, p.w_o}});
  products.run();
  const Tensor dq = empty(saved.q.sym_sizes(), query.options());
  const Tensor dk = empty(saved.k.sym_sizes(), query.options());
  const Tensor dv = empty(saved.v.sym_sizes(), query.options());
  const AttentionSaved core = {heads_of(saved.q, s.heads, s.head_dim),
                               heads_of(saved.k, s.kv_heads, s.head_dim),
                               heads_of(saved.v, s.kv_heads, s.value_dim),
                               heads_of(saved.context, s.heads, s.value_dim),
                               saved.weights,
                               saved.logsumexp};
  grads[kBias] = attention_backward_into(heads_of(grad_context, s.heads, s.value_dim), grad_weights, std::nullopt, core,
                                         options, wanted[kBias], heads_of(dq, s.heads, s.head_dim),
                                         heads_of(dk, s.kv_heads, s.head_dim), heads_of(dv, s.kv_heads, s.value_dim));

  const LiveKeysAndValues live(options, query, key);
  const struct {
    LiveRows rows;
    const Tensor &dy, &x, &w;
    LayerGrad input, weight, bias;
  } sides[] = {{LiveRows(), dq, query, p.w_q, kQuery, kWq, kBq},
               {live.keys, dk, key, p.w_k, kKey, kWk, kBk},
               {live.values, dv, value, p.w_v, kValue, kWv, kBv}};
  std::vector<std::pair<Tensor, Tensor>> into_query;           // dy, w
  std::vector<std::pair<const LiveRows*, Tensor>> live_grads;  // of some rows of the query
  for (const auto& side : sides) {
    const Tensor dy = side.rows.take(side.dy);
    const Tensor x = wanted[side.weight] ? without_hidden_rows(dy, side.rows.take(side.x), options) : side.x;
    std::tie(grads[side.weight], grads[side.bias]) =
        products.grad_weight(dy, x, wanted[side.weight], wanted[side.bias]);
    if (!wanted[self_attention ? kQuery : side.input]) continue;
    if (self_attention && side.rows.all()) {
      into_query.emplace_back(dy, side.w);
    } else if (self_attention) {
      live_grads.emplace_back(&side.rows, products.grad_input({{dy, side.w}}));
    } else {
      grads[side.input] = products.grad_input({{dy, side.w}});
    }
  }
  if (!into_query.empty()) grads[kQuery] = products.grad_input(into_query);
  products.run();
  for (const auto& [rows, grad] : live_grads) rows->add_to(grads[kQuery], grad);
  if (!self_attention) {
    for (const auto& side : sides) {
      if (wanted[side.input]) grads[side.input] = side.rows.put(grads[side.input]);
    }
  }
  return with_empty_rest(std::move(grads), query.options());
}

TORCH_LIBRARY_IMPL(mha_ext, CPU, m) {
  m.impl("multi_head_attention", TORCH_FN(FlatLayer<&multi_head_attention>::call));
  m.impl("multi_head_attention_forward", TORCH_FN(FlatLayerForward<&multi_head_attention_forward>::call));
  m.impl("multi_head_attention_backward", TORCH_FN(FlatLayerBackward<&multi_head_attention_backward>::call));
}

}  // namespace
}  // namespace mha_ext::cpu
