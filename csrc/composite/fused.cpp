#include "fused.h"

#include "../autograd/transforms.h"
#include "attention.h"

#include <ATen/ATen.h>

#include <atomic>
#include <limits>

namespace mha_ext::composite {
namespace {

using at::Tensor;
using c10::SymInt;
using OptionalTensor = std::optional<Tensor>;

std::atomic<bool> fused_on_cpu{false};

bool given(const OptionalTensor& tensor) { return tensor.has_value() && tensor->defined(); }

bool equal(const SymInt& a, const SymInt& b) { return a.sym_eq(b).guard_or_false(__FILE__, __LINE__); }

// What at::scaled_dot_product_attention means by is_causal, and nothing else.
bool only_its_causal(const AttentionSizes& s, const AttentionOptions& options) {
  return only_causal(options) && (!options.causal_bottom_right || equal(s.q_len, s.kv_len));
}

// `seen` (B, H, Lq, Lk) or 1 in any place -> the keys that no query sees, as (B, Hkv, Lk, 1) or 1 in any place.
Tensor unseen_keys(const Tensor& seen, const AttentionSizes& s) {
  auto by_some = seen.any(2);
  if (!equal(s.heads, s.kv_heads) && !equal(by_some.sym_size(1), 1)) {
    by_some = by_some.unflatten_symint(1, {s.kv_heads, s.heads / s.kv_heads}).any(2);
  }
  return by_some.logical_not().unsqueeze(-1);
}

// Value (B, Hkv, Lk, Dv) -> the mean of all values for each query head, (B, H, 1, Dv).
Tensor mean_value(const Tensor& value, const AttentionSizes& s) {
  const auto mean = value.mean(-2, true);
  return equal(s.heads, s.kv_heads) ? mean : mean.repeat_interleave_symint(s.heads / s.kv_heads, 1);
}

Tensor sdpa(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& mask, bool is_causal,
            const AttentionSizes& s, const AttentionOptions& options) {
  return at::scaled_dot_product_attention(query, key, value, mask, /*dropout_p=*/0.0, is_causal, options.scale,
                                          /*enable_gqa=*/!equal(s.heads, s.kv_heads));
}

Tensor causal_attention(const Tensor& query, const Tensor& key, const Tensor& value, const AttentionSizes& s,
                        const AttentionOptions& options) {
  if (s.kv_len.sym_le(s.q_len).guard_or_false(__FILE__, __LINE__)) {
    return sdpa(query, key, value, std::nullopt, true, s, options);
  }
  const auto integers = at::TensorOptions().dtype(at::kLong).device(key.device());
  const auto unseen = at::arange(s.kv_len, integers).ge(s.q_len).unsqueeze(-1);
  return sdpa(query, key.masked_fill(unseen, 0.0), value.masked_fill(unseen, 0.0), std::nullopt, true, s, options);
}

Tensor masked_attention(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& seen,
                        const AttentionSizes& s, const AttentionOptions& options) {
  const auto unseen = unseen_keys(seen, s);
  // A dead row sees every key in the fused kernel, which keeps it finite, and is then replaced.
  const auto dead = seen.any(-1, true).logical_not();
  auto mask = seen.logical_or(dead);
  if (given(options.bias)) {
    mask = at::where(seen, *options.bias, -std::numeric_limits<double>::infinity()).masked_fill(dead, 0.0);
  }
  const auto output = sdpa(query.masked_fill(dead, 0.0), key.masked_fill(unseen, 0.0), value.masked_fill(unseen, 0.0),
                           mask.expand_symint({s.batch, s.heads, s.q_len, s.kv_len}), /*is_causal=*/false, s, options);
  return options.uniform_dead_rows ? at::where(dead, mean_value(value, s), output) : output.masked_fill(dead, 0.0);
}

}  // namespace

bool fused_attention_serves(const Tensor& query, const Tensor& key, const Tensor& value, const AttentionSizes& s,
                            const AttentionOptions& options) {
  if (query.is_meta() || (query.is_cpu() && !fused_on_cpu)) return false;
  if (options.need_weights || options.need_logsumexp || options.dropout_p > 0 || options.softcap) return false;
  // They scale what is hidden, too: -inf times 0 or less is no longer -inf.
  if (options.scale && *options.scale <= 0) return false;
  // They add the bias in query's dtype, and scale no empty row.
  if (given(options.bias) && options.bias->scalar_type() != query.scalar_type()) return false;
  for (const auto& size : {s.batch, s.heads, s.q_len, s.kv_len}) {
    if (size.sym_eq(0).guard_or_false(__FILE__, __LINE__)) return false;
  }
  // They have first derivatives in reverse only.
  return !autograd::inside_functorch() && !autograd::any_tangent({query, key, value, options.bias});
}

Tensor fused_attention(const Tensor& query, const Tensor& key, const Tensor& value, const AttentionSizes& s,
                       const AttentionOptions& options) {
  if (only_its_causal(s, options)) return causal_attention(query, key, value, s, options);
  const auto seen = visible_keys(s, options, query.device());
  if (!seen) return sdpa(query, key, value, std::nullopt, false, s, options);
  return masked_attention(query, key, value, *seen, s, options);
}

void set_fused_on_cpu(bool on) { fused_on_cpu = on; }

}  // namespace mha_ext::composite
