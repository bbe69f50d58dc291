// The core operator in the fused kernels of at::scaled_dot_product_attention, which store no scores on devices that
// have them. For devices other than the CPU, which has the engine.
#pragma once

#include "../checks.h"

namespace mha_ext::composite {

// Whether at::scaled_dot_product_attention computes all that `options` ask for. Decided without reading a tensor: a
// device is not waited for, a captured or traced graph takes the same way.
bool fused_attention_serves(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                            const AttentionSizes& sizes, const AttentionOptions& options);

// The output of `attention` (B, H, Lq, Dv), in any strides. A NaN in a key that no query sees, or in a query that sees
// no key, goes nowhere. One in a key that only some queries see may reach the others, since the kernels multiply it by
// 0.
at::Tensor fused_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                           const AttentionSizes& sizes, const AttentionOptions& options);

// For tests: lets tensors of the CPU take this way, too.
void set_fused_on_cpu(bool on);

}  // namespace mha_ext::composite
