// The engine for the core operator on already checked CPU tensors; shared with the layer operator.
#pragma once

#include "../mha_ext.h"

namespace mha_ext::cpu {

// Writes output (B, H, Lq, Dv), weights (B, H, Lq, Lk; skipped unless options.need_weights) and logsumexp (B, H, Lq).
// The options hold a seed if there is dropout.
void attention_into(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                    const AttentionOptions& options, const at::Tensor& output, const at::Tensor& weights,
                    const at::Tensor& logsumexp);

// Writes grad_query, grad_key and grad_value in the inputs' shapes. Returns the gradient of bias in its own shape and
// dtype if need_bias_grad, else an empty tensor.
at::Tensor attention_backward_into(const at::Tensor& grad_output, const std::optional<at::Tensor>& grad_weights,
                                   const std::optional<at::Tensor>& grad_logsumexp, const AttentionSaved& saved,
                                   const AttentionOptions& options, bool need_bias_grad, const at::Tensor& grad_query,
                                   const at::Tensor& grad_key, const at::Tensor& grad_value);

}  // namespace mha_ext::cpu
