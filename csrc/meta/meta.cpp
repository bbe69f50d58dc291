// Kernels of meta tensors: the real checks, and results without values. Fake tensors, torch.compile and torch.export
// run them, with symbolic sizes.
#include "../checks.h"
#include "../flat_signatures.h"
#include "../outputs.h"

#include <torch/library.h>

namespace mha_ext::meta {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

ThreeTensors attention(const Tensor& query, const Tensor& key, const Tensor& value, const AttentionOptions& options) {
  const auto s = check_attention("attention", query, key, value, options);
  return {empty_output(s, query.options()), empty_weights(s, options, query.options()),
          empty_logsumexp(s, options, query.options())};
}

FourTensors attention_backward(const Tensor& grad_output, const OptionalTensor& grad_weights,
                               const OptionalTensor& grad_logsumexp, const AttentionSaved& saved,
                               const AttentionOptions& options, bool need_bias_grad) {
  check_attention_backward("attention_backward", grad_output, grad_weights, grad_logsumexp, saved, options,
                           need_bias_grad);
  return {empty_heads_like(saved.query), empty_heads_like(saved.key), empty_heads_like(saved.value),
          empty_grad(options.bias, need_bias_grad, saved.query)};
}

TwoTensors multi_head_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                const Projections& projections, int64_t num_heads, const AttentionOptions& options) {
  const auto s = check_layer("multi_head_attention", query, key, value, projections, num_heads, options);
  return {empty_features(s.core.batch, s.core.q_len, s.out_features, query.options()),
          empty_weights(s.core, options, query.options())};
}

std::tuple<Tensor, LayerSaved> multi_head_attention_forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                                            const Projections& projections, int64_t num_heads,
                                                            const AttentionOptions& options) {
  const auto [s, out_features] =
      check_layer("multi_head_attention", query, key, value, projections, num_heads, options);
  const auto tensor_options = query.options();
  return {empty_features(s.batch, s.q_len, out_features, tensor_options),
          {empty_features(s.batch, s.q_len, s.heads * s.head_dim, tensor_options),
           empty_features(s.batch, s.kv_len, s.kv_heads * s.head_dim, tensor_options),
           empty_features(s.batch, s.kv_len, s.kv_heads * s.value_dim, tensor_options),
           empty_features(s.batch, s.q_len, s.heads * s.value_dim, tensor_options),
           empty_weights(s, options, tensor_options), empty_logsumexp(s, options, tensor_options)}};
}

LayerGrads multi_head_attention_backward(const Tensor& grad_output, const OptionalTensor& grad_weights,
                                         const Tensor& query, const Tensor& key, const Tensor& value,
                                         const Projections& projections, const LayerSaved& saved, int64_t num_heads,
                                         const AttentionOptions& options, bool self_attention,
                                         const LayerGradMask& output_mask) {
  check_layer_backward("multi_head_attention_backward", grad_output, grad_weights, query, key, value, projections,
                       saved, num_heads, options, self_attention, output_mask);
  return empty_layer_grads(query, key, value, projections, options, self_attention, output_mask);
}

}  // namespace
}  // namespace mha_ext::meta

TORCH_LIBRARY_IMPL(mha_ext, Meta, m) {
  using namespace mha_ext;
  m.impl("attention", TORCH_FN(FlatAttention<&meta::attention>::call));
  m.impl("attention_backward", TORCH_FN(FlatAttentionBackward<&meta::attention_backward>::call));
  m.impl("multi_head_attention", TORCH_FN(FlatLayer<&meta::multi_head_attention>::call));
  m.impl("multi_head_attention_forward", TORCH_FN(FlatLayerForward<&meta::multi_head_attention_forward>::call));
  m.impl("multi_head_attention_backward", TORCH_FN(FlatLayerBackward<&meta::multi_head_attention_backward>::call));
}
