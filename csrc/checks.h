// All validation and every error text. Each function throws ValueError or TypeError (as Python sees them) with the text
// `op: expected RULE, got VALUE`, reads no element of any tensor, and accepts symbolic sizes, so that the kernels of
// every device, of meta tensors and the composite ones reject the same input with the same words.
#pragma once

#include <c10/core/SymInt.h>

#include "mha_ext.h"

namespace mha_ext {

// The sizes of query (B, H, Lq, D), key (B, Hkv, Lk, D) and value (B, Hkv, Lk, Dv).
struct AttentionSizes {
  c10::SymInt batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim;
};

// The sizes of a layer: those of its core, and the last dimension of its output.
struct LayerSizes {
  AttentionSizes core;
  c10::SymInt out_features;
};

AttentionSizes check_attention(const char* op, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                               const AttentionOptions& options);

AttentionSizes check_attention_backward(const char* op, const at::Tensor& grad_output,
                                        const std::optional<at::Tensor>& grad_weights,
                                        const std::optional<at::Tensor>& grad_logsumexp, const AttentionSaved& saved,
                                        const AttentionOptions& options, bool need_bias_grad);

LayerSizes check_layer(const char* op, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                       const Projections& projections, int64_t num_heads, const AttentionOptions& options);

LayerSizes check_layer_backward(const char* op, const at::Tensor& grad_output,
                                const std::optional<at::Tensor>& grad_weights, const at::Tensor& query,
                                const at::Tensor& key, const at::Tensor& value, const Projections& projections,
                                const LayerSaved& saved, int64_t num_heads, const AttentionOptions& options,
                                bool self_attention, const LayerGradMask& output_mask);

// The one check that reads elements: each of key_lengths lies in [0, kv_len]. Nothing is checked where they are absent
// or cannot be read here: on another device, in a meta or fake tensor, wrapped by a transform (vmap, grad).
void check_key_length_values(const char* op, const std::optional<at::Tensor>& key_lengths, const c10::SymInt& kv_len);

}  // namespace mha_ext
