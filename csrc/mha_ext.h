// Public C++ interface of mha_ext: the operators as typed functions, for LibTorch programs and for this library itself.
// Every function goes through PyTorch's dispatcher, so autograd, autocast and the tracers see the call.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <tuple>

namespace mha_ext {

// Everything that modifies softmax(scale * Q K^T + bias) V. The defaults are plain attention.
struct AttentionOptions {
  std::optional<at::Tensor> mask = std::nullopt;  // bool, broadcasts to (B, H, Lq, Lk); true = may attend
  std::optional<at::Tensor> bias = std::nullopt;  // floating, broadcasts to (B, H, Lq, Lk); added to the scaled scores
  bool is_causal = false;                         // query i sees keys j <= i (top-left corner)
  double dropout_p = 0.0;                         // probability of dropping a weight
  std::optional<double> scale = std::nullopt;     // default 1 / sqrt(D)
  bool need_weights = false;                      // return the weights that multiplied V (after dropout)
  std::optional<at::Tensor> key_lengths = std::nullopt;  // int32 or int64 (B,): keys j >= key_lengths[b] are hidden
  bool causal_bottom_right = false;                      // with is_causal: query i sees keys j <= i + Lk - Lq
  bool uniform_dead_rows = false;                        // a row that sees no key: uniform weights instead of zeros
  std::optional<at::Tensor> seed = std::nullopt;         // int64 scalar: the dropout seed; drawn when absent
  bool average_weights = false;                          // the weights returned are (B, Lq, Lk): the mean over heads
  bool weights_before_dropout = false;                   // return the weights as they were before dropout
  std::optional<double> softcap = std::nullopt;          // scores become c tanh(scale Q K^T / c), before the bias
  bool need_logsumexp = true;                            // of `attention`: return logsumexp
};

// query (B, H, Lq, D), key (B, Hkv, Lk, D), value (B, Hkv, Lk, Dv), H a multiple of Hkv.
// Returns output (B, H, Lq, Dv) stored as (B, Lq, H, Dv), weights (B, H, Lq, Lk) or empty, logsumexp (B, H, Lq)
// or empty.
std::tuple<at::Tensor, at::Tensor, at::Tensor> attention(const at::Tensor& query, const at::Tensor& key,
                                                         const at::Tensor& value, const AttentionOptions& options = {});

// What the forward of `attention` leaves for its backward.
struct AttentionSaved {
  at::Tensor query, key, value;
  at::Tensor output, weights, logsumexp;
};

// Gradients of query, key, value and bias; the last is empty unless need_bias_grad.
// Undefined incoming gradients of weights and logsumexp count as zero.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention_backward(
    const at::Tensor& grad_output, const std::optional<at::Tensor>& grad_weights,
    const std::optional<at::Tensor>& grad_logsumexp, const AttentionSaved& saved, const AttentionOptions& options,
    bool need_bias_grad);

// The four projections of a layer as nn.Linear stores them: w (out, in), b (out,).
struct Projections {
  at::Tensor w_q, w_k, w_v, w_o;
  std::optional<at::Tensor> b_q = std::nullopt, b_k = std::nullopt, b_v = std::nullopt, b_o = std::nullopt;
};

// query (B, Lq, E), key and value (B, Lk, E). Returns output (B, Lq, E) and weights (B, H, Lq, Lk) or empty.
std::tuple<at::Tensor, at::Tensor> multi_head_attention(const at::Tensor& query, const at::Tensor& key,
                                                        const at::Tensor& value, const Projections& projections,
                                                        int64_t num_heads, const AttentionOptions& options = {});

// What the forward of a layer leaves for its backward: the projected heads (B, L, H * D), the merged heads before w_o
// (B, Lq, H * Dv), weights and logsumexp of the core.
struct LayerSaved {
  at::Tensor q, k, v, context, weights, logsumexp;
};

// multi_head_attention together with its intermediate results.
std::tuple<at::Tensor, LayerSaved> multi_head_attention_forward(const at::Tensor& query, const at::Tensor& key,
                                                                const at::Tensor& value, const Projections& projections,
                                                                int64_t num_heads, const AttentionOptions& options);

// Order of the gradients that multi_head_attention_backward returns, and of its output_mask.
enum LayerGrad { kQuery, kKey, kValue, kWq, kWk, kWv, kWo, kBq, kBk, kBv, kBo, kBias, kLayerGrads };
using LayerGradMask = std::array<bool, kLayerGrads>;
using LayerGrads = std::array<at::Tensor, kLayerGrads>;

// Gradients of the inputs, the projections and the bias; those not asked for in output_mask are empty. With
// self_attention (query, key and value are one tensor) the gradient of that tensor is returned whole as kQuery.
LayerGrads multi_head_attention_backward(const at::Tensor& grad_output, const std::optional<at::Tensor>& grad_weights,
                                         const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                         const Projections& projections, const LayerSaved& saved, int64_t num_heads,
                                         const AttentionOptions& options, bool self_attention,
                                         const LayerGradMask& output_mask);

}  // namespace mha_ext
