// The core operator and its backward in plain ATen calls: any device, differentiable by autograd as often as one likes,
// by forward-mode AD and under functorch. They call no operator of mha_ext. The scores are stored (O(Lq * Lk) memory),
// unless fused.h can serve a call.
#pragma once

#include "../checks.h"

namespace mha_ext::composite {

// The same as mha_ext::attention.
std::tuple<at::Tensor, at::Tensor, at::Tensor> attention(const at::Tensor& query, const at::Tensor& key,
                                                         const at::Tensor& value, const AttentionOptions& options);

// The same as mha_ext::attention_backward. Computed from query, key, value and the options alone; the results of the
// forward in `saved` are not used, so that the gradients are themselves differentiable.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention_backward(
    const at::Tensor& grad_output, const std::optional<at::Tensor>& grad_weights,
    const std::optional<at::Tensor>& grad_logsumexp, const AttentionSaved& saved, const AttentionOptions& options,
    bool need_bias_grad);

// The gradients themselves, once everything has been checked.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention_gradients(
    const AttentionSizes& sizes, const at::Tensor& grad_output, const std::optional<at::Tensor>& grad_weights,
    const std::optional<at::Tensor>& grad_logsumexp, const at::Tensor& query, const at::Tensor& key,
    const at::Tensor& value, const AttentionOptions& options, bool need_bias_grad);

// Whether is_causal hides and nothing else does, so that no mask is needed to tell what is seen.
bool only_causal(const AttentionOptions& options);

// Which keys are seen: bool (B, H, Lq, Lk), or 1 in any place. None when nothing is hidden.
std::optional<at::Tensor> visible_keys(const AttentionSizes& sizes, const AttentionOptions& options, at::Device device);

// Which weights dropout keeps: bool (B, H, Lq, Lk) on `device`. The same bits on every device and in every kernel.
at::Tensor dropout_keep(const at::Tensor& seed, const c10::SymInt& batch, const c10::SymInt& heads,
                        const c10::SymInt& q_len, const c10::SymInt& kv_len, double dropout_p, at::Device device);

// The options with a seed drawn from the default generator of the CPU, if there is dropout and no seed yet.
AttentionOptions with_seed(const AttentionOptions& options);

}  // namespace mha_ext::composite
