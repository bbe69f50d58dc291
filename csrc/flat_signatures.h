// The operators' flat dispatcher signatures, once: adapters that turn a function taking the option structs of mha_ext.h
// into one that TORCH_LIBRARY_IMPL can register. The argument order is that of library.cpp; the typed calls in
// mha_ext.cpp use the same `Flat...<>::Signature`.
#pragma once

#include "mha_ext.h"

#include <tuple>
#include <utility>

namespace mha_ext {

using OptionalTensor = std::optional<at::Tensor>;
using TwoTensors = std::tuple<at::Tensor, at::Tensor>;
using ThreeTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using FourTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using SevenTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using TwelveTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor,
                                 at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

inline TwelveTensors to_tuple(const LayerGrads& g) {
  return {g[0], g[1], g[2], g[3], g[4], g[5], g[6], g[7], g[8], g[9], g[10], g[11]};
}

inline LayerGrads to_array(TwelveTensors&& t) {
  return std::apply([](auto&&... g) { return LayerGrads{std::move(g)...}; }, std::move(t));
}

template <auto implementation>
struct FlatAttention {
  static ThreeTensors call(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                           const OptionalTensor& mask, const OptionalTensor& bias, bool is_causal, double dropout_p,
                           std::optional<double> scale, bool need_weights, const OptionalTensor& key_lengths,
                           bool causal_bottom_right, bool uniform_dead_rows, const OptionalTensor& seed,
                           bool average_weights, bool weights_before_dropout, std::optional<double> softcap,
                           bool need_logsumexp) {
    return implementation(query, key, value,
                          {mask, bias, is_causal, dropout_p, scale, need_weights, key_lengths, causal_bottom_right,
                           uniform_dead_rows, seed, average_weights, weights_before_dropout, softcap, need_logsumexp});
  }
  using Signature = decltype(call);
};

template <auto implementation>
struct FlatAttentionBackward {
  static FourTensors call(const at::Tensor& grad_output, const OptionalTensor& grad_weights,
                          const OptionalTensor& grad_logsumexp, const at::Tensor& query, const at::Tensor& key,
                          const at::Tensor& value, const at::Tensor& output, const at::Tensor& weights,
                          const at::Tensor& logsumexp, const OptionalTensor& mask, const OptionalTensor& bias,
                          bool is_causal, double dropout_p, std::optional<double> scale,
                          const OptionalTensor& key_lengths, bool causal_bottom_right, bool uniform_dead_rows,
                          const OptionalTensor& seed, bool average_weights, bool weights_before_dropout,
                          std::optional<double> softcap, bool need_bias_grad) {
    // need_weights in the backward means: the forward returned weights.
    return implementation(
        grad_output, grad_weights, grad_logsumexp, {query, key, value, output, weights, logsumexp},
        {mask, bias, is_causal, dropout_p, scale, grad_weights.has_value(), key_lengths, causal_bottom_right,
         uniform_dead_rows, seed, average_weights, weights_before_dropout, softcap},
        need_bias_grad);
  }
  using Signature = decltype(call);
};

template <auto implementation>
struct FlatLayer {
  static TwoTensors call(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& w_q,
                         const at::Tensor& w_k, const at::Tensor& w_v, const at::Tensor& w_o, const OptionalTensor& b_q,
                         const OptionalTensor& b_k, const OptionalTensor& b_v, const OptionalTensor& b_o,
                         int64_t num_heads, const OptionalTensor& mask, const OptionalTensor& bias, bool is_causal,
                         double dropout_p, std::optional<double> scale, bool need_weights,
                         const OptionalTensor& key_lengths, bool causal_bottom_right, bool uniform_dead_rows,
                         const OptionalTensor& seed, bool average_weights, bool weights_before_dropout,
                         std::optional<double> softcap) {
    return implementation(query, key, value, {w_q, w_k, w_v, w_o, b_q, b_k, b_v, b_o}, num_heads,
                          {mask, bias, is_causal, dropout_p, scale, need_weights, key_lengths, causal_bottom_right,
                           uniform_dead_rows, seed, average_weights, weights_before_dropout, softcap});
  }
  using Signature = decltype(call);
};

template <auto implementation>
struct FlatLayerForward {
  static SevenTensors call(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                           const at::Tensor& w_q, const at::Tensor& w_k, const at::Tensor& w_v, const at::Tensor& w_o,
                           const OptionalTensor& b_q, const OptionalTensor& b_k, const OptionalTensor& b_v,
                           const OptionalTensor& b_o, int64_t num_heads, const OptionalTensor& mask,
                           const OptionalTensor& bias, bool is_causal, double dropout_p, std::optional<double> scale,
                           bool need_weights, const OptionalTensor& key_lengths, bool causal_bottom_right,
                           bool uniform_dead_rows, const OptionalTensor& seed, bool average_weights,
                           bool weights_before_dropout, std::optional<double> softcap) {
    auto [output, saved] =
        implementation(query, key, value, {w_q, w_k, w_v, w_o, b_q, b_k, b_v, b_o}, num_heads,
                       {mask, bias, is_causal, dropout_p, scale, need_weights, key_lengths, causal_bottom_right,
                        uniform_dead_rows, seed, average_weights, weights_before_dropout, softcap});
    return {output, saved.weights, saved.q, saved.k, saved.v, saved.context, saved.logsumexp};
  }
  using Signature = decltype(call);
};

template <auto implementation>
struct FlatLayerBackward {
  static TwelveTensors call(const at::Tensor& grad_output, const OptionalTensor& grad_weights, const at::Tensor& query,
                            const at::Tensor& key, const at::Tensor& value, const at::Tensor& w_q,
                            const at::Tensor& w_k, const at::Tensor& w_v, const at::Tensor& w_o,
                            const OptionalTensor& b_q, const OptionalTensor& b_k, const OptionalTensor& b_v,
                            const OptionalTensor& b_o, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const at::Tensor& context, const at::Tensor& weights, const at::Tensor& logsumexp,
                            int64_t num_heads, const OptionalTensor& mask, const OptionalTensor& bias, bool is_causal,
                            double dropout_p, std::optional<double> scale, const OptionalTensor& key_lengths,
                            bool causal_bottom_right, bool uniform_dead_rows, const OptionalTensor& seed,
                            bool average_weights, bool weights_before_dropout, std::optional<double> softcap,
                            bool self_attention, std::array<bool, kLayerGrads> output_mask) {
    return to_tuple(
        implementation(grad_output, grad_weights, query, key, value, {w_q, w_k, w_v, w_o, b_q, b_k, b_v, b_o},
                       {q, k, v, context, weights, logsumexp}, num_heads,
                       {mask, bias, is_causal, dropout_p, scale, grad_weights.has_value(), key_lengths,
                        causal_bottom_right, uniform_dead_rows, seed, average_weights, weights_before_dropout, softcap},
                       self_attention, output_mask));
  }
  using Signature = decltype(call);
};

}  // namespace mha_ext
