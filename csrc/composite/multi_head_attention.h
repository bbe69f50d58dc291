// A whole layer in plain ATen calls, on top of composite/attention.h; see there.
#pragma once

#include "../mha_ext.h"

namespace mha_ext::composite {

// The same as mha_ext::multi_head_attention.
std::tuple<at::Tensor, at::Tensor> multi_head_attention(const at::Tensor& query, const at::Tensor& key,
                                                        const at::Tensor& value, const Projections& projections,
                                                        int64_t num_heads, const AttentionOptions& options);

// The same as mha_ext::multi_head_attention_forward.
std::tuple<at::Tensor, LayerSaved> multi_head_attention_forward(const at::Tensor& query, const at::Tensor& key,
                                                                const at::Tensor& value, const Projections& projections,
                                                                int64_t num_heads, const AttentionOptions& options);

// The same as mha_ext::multi_head_attention_backward. Computed from the inputs and the options alone; `saved` is not
// used, so that the gradients are themselves differentiable.
LayerGrads multi_head_attention_backward(const at::Tensor& grad_output, const std::optional<at::Tensor>& grad_weights,
                                         const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                         const Projections& projections, const LayerSaved& saved, int64_t num_heads,
                                         const AttentionOptions& options, bool self_attention,
                                         const LayerGradMask& output_mask);

}  // namespace mha_ext::composite
