// The typed functions of mha_ext.h: each finds its operator once and calls it through the dispatcher.
#include "mha_ext.h"

#include "flat_signatures.h"

#include <ATen/core/dispatch/Dispatcher.h>

namespace mha_ext {
namespace {

template <typename Flat>
auto find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<typename Flat::Signature>();
}

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor> attention(const at::Tensor& query, const at::Tensor& key,
                                                         const at::Tensor& value, const AttentionOptions& options) {
  static const auto op = find_operator<FlatAttention<&attention>>("mha_ext::attention");
  const auto& o = options;
  return op.call(query, key, value, o.mask, o.bias, o.is_causal, o.dropout_p, o.scale, o.need_weights, o.key_lengths,
                 o.causal_bottom_right, o.uniform_dead_rows, o.seed, o.average_weights, o.weights_before_dropout,
                 o.softcap, o.need_logsumexp);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention_backward(
    const at::Tensor& grad_output, const std::optional<at::Tensor>& grad_weights,
    const std::optional<at::Tensor>& grad_logsumexp, const AttentionSaved& saved, const AttentionOptions& options,
    bool need_bias_grad) {
  static const auto op = find_operator<FlatAttentionBackward<&attention_backward>>("mha_ext::attention_backward");
  const auto& o = options;
  return op.call(grad_output, grad_weights, grad_logsumexp, saved.query, saved.key, saved.value, saved.output,
                 saved.weights, saved.logsumexp, o.mask, o.bias, o.is_causal, o.dropout_p, o.scale, o.key_lengths,
                 o.causal_bottom_right, o.uniform_dead_rows, o.seed, o.average_weights, o.weights_before_dropout,
                 o.softcap, need_bias_grad);
}

std::tuple<at::Tensor, at::Tensor> multi_head_attention(const at::Tensor& query, const at::Tensor& key,
                                                        const at::Tensor& value, const Projections& projections,
                                                        int64_t num_heads, const AttentionOptions& options) {
  static const auto op = find_operator<FlatLayer<&multi_head_attention>>("mha_ext::multi_head_attention");
  const auto& p = projections;
  const auto& o = options;
  return op.call(query, key, value, p.w_q, p.w_k, p.w_v, p.w_o, p.b_q, p.b_k, p.b_v, p.b_o, num_heads, o.mask, o.bias,
                 o.is_causal, o.dropout_p, o.scale, o.need_weights, o.key_lengths, o.causal_bottom_right,
                 o.uniform_dead_rows, o.seed, o.average_weights, o.weights_before_dropout, o.softcap);
}

std::tuple<at::Tensor, LayerSaved> multi_head_attention_forward(const at::Tensor& query, const at::Tensor& key,
                                                                const at::Tensor& value, const Projections& projections,
                                                                int64_t num_heads, const AttentionOptions& options) {
  static const auto op =
      find_operator<FlatLayerForward<&multi_head_attention_forward>>("mha_ext::multi_head_attention_forward");
  const auto& p = projections;
  const auto& o = options;
  auto [output, weights, q, k, v, context, logsumexp] =
      op.call(query, key, value, p.w_q, p.w_k, p.w_v, p.w_o, p.b_q, p.b_k, p.b_v, p.b_o, num_heads, o.mask, o.bias,
              o.is_causal, o.dropout_p, o.scale, o.need_weights, o.key_lengths, o.causal_bottom_right,
              o.uniform_dead_rows, o.seed, o.average_weights, o.weights_before_dropout, o.softcap);
  return {output, LayerSaved{q, k, v, context, weights, logsumexp}};
}

LayerGrads multi_head_attention_backward(const at::Tensor& grad_output, const std::optional<at::Tensor>& grad_weights,
                                         const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                         const Projections& projections, const LayerSaved& saved, int64_t num_heads,
                                         const AttentionOptions& options, bool self_attention,
                                         const LayerGradMask& output_mask) {
  static const auto op =
      find_operator<FlatLayerBackward<&multi_head_attention_backward>>("mha_ext::multi_head_attention_backward");
  const auto& p = projections;
  const auto& o = options;
  return to_array(op.call(grad_output, grad_weights, query, key, value, p.w_q, p.w_k, p.w_v, p.w_o, p.b_q, p.b_k, p.b_v,
                          p.b_o, saved.q, saved.k, saved.v, saved.context, saved.weights, saved.logsumexp, num_heads,
                          o.mask, o.bias, o.is_causal, o.dropout_p, o.scale, o.key_lengths, o.causal_bottom_right,
                          o.uniform_dead_rows, o.seed, o.average_weights, o.weights_before_dropout, o.softcap,
                          self_attention, output_mask));
}

}  // namespace mha_ext
