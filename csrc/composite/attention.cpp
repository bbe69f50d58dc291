#include "attention.h"

#include "../checks.h"
#include "../flat_signatures.h"
#include "../outputs.h"
#include "fused.h"

#include <ATen/ATen.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace mha_ext::composite {
namespace {

using at::Tensor;
using c10::SymInt;
using OptionalTensor = std::optional<Tensor>;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

bool given(const OptionalTensor& tensor) { return tensor.has_value() && tensor->defined(); }

bool is_zero(const SymInt& size) { return size.sym_eq(0).guard_or_false(__FILE__, __LINE__); }

Tensor select(const Tensor& condition, const Tensor& tensor, double otherwise) {
  return at::where(condition, tensor, otherwise);
}

// ---------------------------------------------------------------------------------------------------------------------
// Products in which hidden entries do not exist.
//
// A hidden weight is 0, but 0 * NaN is NaN: a plain matmul would let a NaN (or infinity) that sits in a hidden key,
// value or gradient reach rows that must not see it, here or in the backward of the product. So each product is taken
// over finite copies of its operands, and where an entry that is *not* hidden was involved the IEEE result is selected.
// That costs further products, so it is done only when an operand does hold such a value, which is looked up in one
// pass over it. Values that cannot be read (fake tensors, under vmap) count as non-finite: always right, seldom fast.

bool may_be_non_finite(const Tensor& tensor) {
  if (at::isTensorSubclassLike(tensor)) return true;
  return !std::isfinite(tensor.detach().sum().item<double>());
}

// 1 where an entry is NaN or infinite, else 0.
Tensor non_finite(const Tensor& tensor) { return at::isfinite(tensor).logical_not().to(tensor.dtype()); }

Tensor finite_copy(const Tensor& tensor) { return select(at::isfinite(tensor), tensor, 0.0); }

// rows (B, H, M, D) x columns (B, Hkv, N, D) -> (B, H, M, N). Query heads that share a key head are stacked along M, so
// that no key is repeated.
Tensor stacked_rows(const Tensor& tensor, const SymInt& kv_heads) {
  const auto s = tensor.sym_sizes();
  if (s[1].sym_eq(kv_heads).guard_or_false(__FILE__, __LINE__)) return tensor;
  const SymInt group = is_zero(kv_heads) ? SymInt(0) : s[1] / kv_heads;
  return tensor.reshape_symint({s[0], kv_heads, group * s[2], s[3]});
}

Tensor unstacked_rows(const Tensor& tensor, const SymInt& heads, const SymInt& rows) {
  return tensor.reshape_symint({tensor.sym_size(0), heads, rows, tensor.sym_size(3)});
}

// A B^T: rows (B, H, M, D) and columns (B, Hkv, N, D) -> (B, H, M, N).
Tensor plain_dots(const Tensor& rows, const Tensor& columns) {
  const auto product = at::matmul(stacked_rows(rows, columns.sym_size(1)), columns.transpose(-2, -1));
  return unstacked_rows(product, rows.sym_size(1), rows.sym_size(2));
}

// W X: weights (B, H, M, N) and x (B, Hkv, N, D) -> (B, H, M, D).
Tensor plain_mix(const Tensor& weights, const Tensor& x) {
  return unstacked_rows(at::matmul(stacked_rows(weights, x.sym_size(1)), x), weights.sym_size(1), weights.sym_size(2));
}

// W^T X: weights (B, H, M, N) and x (B, H, M, D) -> (B, Hkv, N, D), summed over the heads that share a key head.
Tensor plain_mix_transposed(const Tensor& weights, const Tensor& x, const SymInt& kv_heads) {
  return at::matmul(stacked_rows(weights, kv_heads).transpose(-2, -1), stacked_rows(x, kv_heads));
}

// A B^T whose hidden entries the caller will discard. The entries of non-finite rows or columns are constants.
Tensor dots(const Tensor& rows, const Tensor& columns, bool anything_hidden) {
  if (!anything_hidden || !(may_be_non_finite(rows) || may_be_non_finite(columns))) return plain_dots(rows, columns);
  const auto bad =
      plain_dots(non_finite(rows), at::ones_like(columns)) + plain_dots(at::ones_like(rows), non_finite(columns));
  return at::where(bad > 0, plain_dots(rows.detach(), columns.detach()),
                   plain_dots(finite_copy(rows), finite_copy(columns)));
}

// W X or W^T X (`product`), where `visible` (the shape of W) tells which entries of W are not hidden; the others are 0.
template <typename Product>
Tensor visible_product(const Product& product, const Tensor& weights, const OptionalTensor& visible, const Tensor& x) {
  if (!visible || !may_be_non_finite(x)) return product(weights, x);
  const auto sees = visible->to(x.dtype()).expand_as(weights);
  const auto bad = product(sees, non_finite(x)) > 0;
  return at::where(bad, product(weights.detach(), x.detach()), product(weights, finite_copy(x)));
}

Tensor mix(const Tensor& weights, const OptionalTensor& visible, const Tensor& x) {
  return visible_product(plain_mix, weights, visible, x);
}

Tensor mix_transposed(const Tensor& weights, const OptionalTensor& visible, const Tensor& x, const SymInt& kv_heads) {
  const auto product = [&](const Tensor& w, const Tensor& y) { return plain_mix_transposed(w, y, kv_heads); };
  return visible_product(product, weights, visible, x);
}

// ---------------------------------------------------------------------------------------------------------------------
// The softmax.

// P (B, H, Lq, Lk), 0 where hidden; with uniform_dead_rows 1 / Lk throughout a dead row.
struct Softmax {
  Tensor p;
  Tensor logsumexp;            // (B, H, Lq), -inf in dead rows
  Tensor dead;                 // bool (B, H, Lq, 1): no key is seen
  OptionalTensor visible;      // broadcastable to P: which entries take part in the softmax; none = all
  OptionalTensor contributes;  // the same for the products with V: dead rows that are uniform see every key
  OptionalTensor slope;        // with softcap: what it multiplies the gradient of a score by
};

double score_scale(const AttentionSizes& s, const AttentionOptions& options) {
  return options.scale ? *options.scale : 1 / std::sqrt(static_cast<double>(s.head_dim.guard_int(__FILE__, __LINE__)));
}

Softmax softmax(const Tensor& query, const Tensor& key, const AttentionSizes& s, const AttentionOptions& options) {
  const auto visible = visible_keys(s, options, query.device());
  // S = scale * Q K^T, with softcap c: c tanh(S / c), + bias
  auto scores = dots(query, key, visible.has_value()) * score_scale(s, options);
  OptionalTensor slope;
  if (options.softcap) {
    if (visible) scores = select(*visible, scores, 0.0);  // a product that overflowed would have a derivative of NaN
    const auto tanh = (scores / *options.softcap).tanh();
    scores = tanh * *options.softcap;
    slope = 1 - tanh * tanh;
  }
  if (given(options.bias)) scores = scores + *options.bias;
  if (is_zero(s.kv_len)) {
    const auto nothing = scores.sum(-1);  // 0, and connected to the inputs
    return {scores, nothing - kInfinity, at::ones_like(nothing, at::kBool).unsqueeze(-1), visible, visible, slope};
  }
  if (visible) scores = select(*visible, scores, -kInfinity);

  // P = exp(S - max) / sum; the maximum is a constant, of which neither P nor logsumexp depends.
  const auto max = scores.detach().amax(-1, true);
  const auto dead = max == -kInfinity;
  const auto shift = select(dead.logical_not(), max, 0.0);
  const auto e = (scores - shift).exp();
  const auto sum = e.sum(-1, true) + dead.to(e.dtype());
  auto p = e / sum;
  auto logsumexp = select(dead.logical_not(), shift + sum.log(), -kInfinity).squeeze(-1);
  OptionalTensor contributes = visible;
  // Selected once more, so that no gradient enters through hidden entries (one that is NaN would spread by the sum).
  if (visible) p = select(*visible, p, 0.0);
  if (options.uniform_dead_rows) {
    p = at::where(dead, at::ones_like(max) / at::scalar_tensor(s.kv_len, max.options()), p);
    if (visible) contributes = visible->logical_or(dead);
  }
  return {p, logsumexp, dead, visible, contributes, slope};
}

// The weights that the caller is given.
Tensor returned_weights(const AttentionSizes& s, const AttentionOptions& options, const Tensor& p,
                        const Tensor& weights) {
  const auto& chosen = options.weights_before_dropout ? p : weights;
  if (!options.average_weights) return chosen;
  return chosen.sum(1) / at::scalar_tensor(s.heads.max(1), chosen.options());
}

// The gradient of each head's weights.
Tensor per_head(const AttentionSizes& s, const AttentionOptions& options, const Tensor& grad_weights) {
  if (!options.average_weights) return grad_weights;
  return grad_weights.unsqueeze(1) / at::scalar_tensor(s.heads.max(1), grad_weights.options());
}

// keep / (1 - p) as a factor of P; none without dropout.
OptionalTensor dropout_factor(const AttentionSizes& s, const AttentionOptions& options, const Tensor& p) {
  if (options.dropout_p == 0) return std::nullopt;
  const auto keep = dropout_keep(*options.seed, s.batch, s.heads, s.q_len, s.kv_len, options.dropout_p, p.device());
  return keep.to(p.dtype()) * (options.dropout_p < 1 ? 1 / (1 - options.dropout_p) : 0.0);
}

// ---------------------------------------------------------------------------------------------------------------------

// Scores and everything after them are computed in the dtype that accumulates, or in that of a bias that is wider.
at::ScalarType compute_dtype(const Tensor& query, const OptionalTensor& bias) {
  const auto dtype = accumulate_dtype(query.scalar_type());
  return given(bias) ? at::promote_types(dtype, bias->scalar_type()) : dtype;
}

// The same values, stored as (B, L, H, D).
Tensor stored_by_length(const Tensor& heads) { return heads.transpose(1, 2).contiguous().transpose(1, 2); }

// x as an unsigned 32-bit number held in int64; every intermediate result stays below 2^63.
constexpr int64_t kLow = 0xffffffff;

Tensor multiply(const Tensor& x, int64_t factor) {
  const auto high = (x * (factor >> 16)).bitwise_and(0xffff) * 0x10000;
  return (x * (factor & 0xffff) + high).bitwise_and(kLow);
}

Tensor shift_right(const Tensor& x, int64_t shift) { return x.bitwise_right_shift(shift); }

Tensor xor_shift(const Tensor& x, int64_t shift) { return x.bitwise_xor(shift_right(x, shift)); }

Tensor hash(const Tensor& x) {
  return xor_shift(multiply(xor_shift(multiply(xor_shift(x, 16), 0x7feb352d), 15), 0x846ca68b), 16);
}

}  // namespace

bool only_causal(const AttentionOptions& options) {
  return options.is_causal && !given(options.mask) && !given(options.bias) && !given(options.key_lengths);
}

OptionalTensor visible_keys(const AttentionSizes& s, const AttentionOptions& options, at::Device device) {
  OptionalTensor visible;
  const auto intersect = [&](const Tensor& other) { visible = visible ? visible->logical_and(other) : other; };
  const auto integers = at::TensorOptions().dtype(at::kLong).device(device);
  if (given(options.mask)) intersect(*options.mask);
  if (given(options.bias)) intersect(options.bias->ne(-kInfinity));
  if (given(options.key_lengths)) {
    intersect(at::arange(s.kv_len, integers) < options.key_lengths->unsqueeze(-1).unsqueeze(-1).unsqueeze(-1));
  }
  if (options.is_causal) {
    const SymInt offset = options.causal_bottom_right ? s.kv_len - s.q_len : SymInt(0);
    const auto last = at::arange(offset, s.q_len + offset, integers).unsqueeze(-1);
    intersect(at::arange(s.kv_len, integers) <= last);
  }
  while (visible && visible->dim() < 4) visible = visible->unsqueeze(0);
  return visible;
}

Tensor dropout_keep(const Tensor& seed, const SymInt& batch, const SymInt& heads, const SymInt& q_len,
                    const SymInt& kv_len, double dropout_p, at::Device device) {
  const auto integers = at::TensorOptions().dtype(at::kLong).device(device);
  const auto b = at::arange(batch, integers).view_symint({batch, 1, 1, 1});
  const auto h = at::arange(heads, integers).view_symint({heads, 1, 1});
  const auto q = at::arange(q_len, integers).view_symint({q_len, 1});
  const auto k = at::arange(kv_len, integers);
  const auto bits = seed.detach().to(device).reshape({});
  const auto low = bits.bitwise_and(kLow), high = shift_right(bits, 32).bitwise_and(kLow);
  const auto plus = [](const Tensor& x, int64_t y) { return (x + y).bitwise_and(kLow); };

  // Two keys for each row (b, h, q).
  const auto a = hash(hash(hash(hash(plus(q, 0x9e3779b9)).bitwise_xor(h)).bitwise_xor(b)).bitwise_xor(low));
  const auto c =
      hash(hash(hash(hash(plus(q, 0xc2b2ae35)).bitwise_xor(h)).bitwise_xor(plus(b, 0x85ebca6b))).bitwise_xor(high));
  // One number for each weight.
  auto x = (multiply(k, 0x9e3779b9) + a).bitwise_and(kLow);
  x = multiply(xor_shift(x, 16), 0x7feb352d).bitwise_xor(c);
  x = xor_shift(multiply(xor_shift(x, 15), 0x846ca68b), 16);

  if (dropout_p == 1) return at::zeros_like(x, at::kBool);
  const double threshold = std::min(std::nearbyint(dropout_p * 2147483648.0), 2147483647.0);
  return shift_right(x, 1) >= static_cast<int64_t>(threshold);
}

AttentionOptions with_seed(const AttentionOptions& options) {
  if (options.dropout_p == 0 || given(options.seed)) return options;
  auto seeded = options;
  // The device is said: torch.compile asks the call for it when it draws again within a checkpoint.
  seeded.seed = at::randint(std::numeric_limits<int64_t>::max(), {}, at::TensorOptions(at::kCPU).dtype(at::kLong));
  return seeded;
}

std::tuple<Tensor, Tensor, Tensor> attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                             const AttentionOptions& given_options) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto s = check_attention("attention", query, key, value, given_options);
  const auto options = with_seed(given_options);
  check_key_length_values("attention", options.key_lengths, s.kv_len);
  const auto nothing = [&](at::ScalarType dtype) { return at::empty({0}, query.options().dtype(dtype)); };
  const auto accumulate = accumulate_dtype(query.scalar_type());
  if (fused_attention_serves(query, key, value, s, options)) {
    const auto output = fused_attention(query, key, value, s, options);
    return {stored_by_length(output), nothing(query.scalar_type()), nothing(accumulate)};
  }

  const auto dtype = compute_dtype(query, options.bias);
  const auto soft = softmax(query.to(dtype), key.to(dtype), s, options);
  const auto factor = dropout_factor(s, options, soft.p);
  const auto weights = factor ? soft.p * *factor : soft.p;
  const auto output = mix(weights, soft.contributes, value.to(dtype));
  return {stored_by_length(output.to(query.dtype())),
          options.need_weights ? returned_weights(s, options, soft.p, weights).to(query.dtype()).contiguous()
                               : nothing(query.scalar_type()),
          options.need_logsumexp ? soft.logsumexp.to(accumulate).contiguous() : nothing(accumulate)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_gradients(const AttentionSizes& s, const Tensor& grad_output,
                                                               const OptionalTensor& grad_weights,
                                                               const OptionalTensor& grad_logsumexp,
                                                               const Tensor& query_, const Tensor& key_,
                                                               const Tensor& value_, const AttentionOptions& options,
                                                               bool need_bias_grad) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto dtype = compute_dtype(query_, options.bias);
  const auto query = query_.to(dtype), key = key_.to(dtype), value = value_.to(dtype);
  const auto grad = grad_output.to(dtype);

  const auto soft = softmax(query, key, s, options);
  const auto factor = dropout_factor(s, options, soft.p);
  // dV = (P keep / (1 - p))^T dO
  const auto weights = factor ? soft.p * *factor : soft.p;
  const auto grad_value = mix_transposed(weights, soft.contributes, grad, s.kv_heads);
  // dP = (dO V^T + dW) keep / (1 - p), or dO V^T keep / (1 - p) + dW
  auto grad_p = dots(grad, value, soft.visible.has_value());
  const auto add_grad_weights = [&](bool now) {
    if (now && given(grad_weights)) grad_p = grad_p + per_head(s, options, grad_weights->to(dtype));
  };
  add_grad_weights(!options.weights_before_dropout);
  if (factor) grad_p = grad_p * *factor;
  add_grad_weights(options.weights_before_dropout);
  // dS = P (dP - rowsum(P dP) + dLSE), nothing in dead rows and in hidden entries
  auto live = soft.dead.logical_not();
  if (soft.visible) live = live.logical_and(*soft.visible);
  grad_p = select(live, grad_p, 0.0);
  auto row = -(soft.p * grad_p).sum(-1, true);
  if (given(grad_logsumexp)) row = row + grad_logsumexp->to(dtype).unsqueeze(-1);
  const auto grad_scores = select(live, soft.p * (grad_p + row), 0.0);
  // dQ = scale dS K, dK = scale dS^T Q
  auto scaled = grad_scores * score_scale(s, options);
  if (soft.slope) scaled = select(live, scaled * *soft.slope, 0.0);
  const OptionalTensor visible = soft.visible ? OptionalTensor(live) : std::nullopt;
  const auto grad_query = mix(scaled, visible, key);
  const auto grad_key = mix_transposed(scaled, visible, query, s.kv_heads);
  const auto grad_bias =
      need_bias_grad
          ? grad_scores.sum_to_size_symint(options.bias->sym_sizes()).to(options.bias->scalar_type()).contiguous()
          : at::empty({0}, query_.options());
  const auto stored_like = [](const Tensor& gradient, const Tensor& tensor) {
    const auto heads = gradient.to(tensor.scalar_type());
    return tensor.is_contiguous_or_false() ? heads.contiguous() : stored_by_length(heads);
  };
  return {stored_like(grad_query, query_), stored_like(grad_key, key_), stored_like(grad_value, value_), grad_bias};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(const Tensor& grad_output,
                                                              const OptionalTensor& grad_weights,
                                                              const OptionalTensor& grad_logsumexp,
                                                              const AttentionSaved& saved,
                                                              const AttentionOptions& options, bool need_bias_grad) {
  const auto s = check_attention_backward("attention_backward", grad_output, grad_weights, grad_logsumexp, saved,
                                          options, need_bias_grad);
  check_key_length_values("attention_backward", options.key_lengths, s.kv_len);
  return attention_gradients(s, grad_output, grad_weights, grad_logsumexp, saved.query, saved.key, saved.value, options,
                             need_bias_grad);
}

}  // namespace mha_ext::composite

namespace {

void implement(torch::Library& m) {
  using namespace mha_ext;
  m.impl("attention", TORCH_FN(FlatAttention<&composite::attention>::call));
  m.impl("attention_backward", TORCH_FN(FlatAttentionBackward<&composite::attention_backward>::call));
}

}  // namespace

// For every device without kernels of its own; under autograd too, where the gradients are those of the ATen calls.
TORCH_LIBRARY_IMPL(mha_ext, CompositeExplicitAutograd, m) { implement(m); }
TORCH_LIBRARY_IMPL(mha_ext, Autograd, m) { implement(m); }
TORCH_LIBRARY_IMPL(mha_ext, FuncTorchBatched, m) { implement(m); }  // vmap
