#include "checks.h"

#include "outputs.h"

#include <ATen/TensorSubclassLikeUtils.h>

#include <algorithm>
#include <initializer_list>
#include <string_view>

namespace mha_ext {
namespace {

using at::Tensor;
using c10::SymInt;
using c10::SymIntArrayRef;
using OptionalTensor = std::optional<Tensor>;

// What every check needs to speak: the operator's name, and the dtype and device that all tensors share with query.
struct Context {
  const char* op;
  at::ScalarType dtype;
  at::Device device;
};

// As Python spells it.
std::string_view name_of(at::ScalarType dtype) { return c10::getDtypeNames(dtype).first; }

bool given(const OptionalTensor& tensor) { return tensor.has_value() && tensor->defined(); }

// Symbolic sizes add a guard, sizes that are known only at run time an assertion at run time.
bool equal(const SymInt& a, const SymInt& b) { return a.sym_eq(b).expect_true(__FILE__, __LINE__); }
bool at_least(const SymInt& a, int64_t least) { return a.sym_ge(least).expect_true(__FILE__, __LINE__); }
bool is_one(const SymInt& a) { return a.sym_eq(1).guard_or_false(__FILE__, __LINE__); }
bool multiple_of(const SymInt& a, const SymInt& b) { return equal(a % b, 0); }

void check_strided(const char* op, const char* name, const Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.defined(), op, ": expected ", name, " to be a tensor, got an undefined one");
  TORCH_CHECK_TYPE(!tensor.is_nested(), op, ": expected ", name, " to be a dense tensor, got a nested one");
  TORCH_CHECK_TYPE(tensor.layout() == at::kStrided, op, ": expected ", name, " of layout torch.strided, got torch.",
                   tensor.layout());
  TORCH_CHECK_TYPE(!tensor.is_quantized(), op, ": expected ", name, " to be a plain tensor, got a quantized one");
}

bool is_supported(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kHalf;
}

void check_supported(const char* op, const char* name, at::ScalarType dtype) {
  TORCH_CHECK_TYPE(is_supported(dtype), op, ": expected ", name,
                   " of dtype float32, float64, bfloat16 or float16, got ", name_of(dtype));
}

void check_device(const Context& c, const char* name, const Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.device() == c.device, c.op, ": expected ", name, " on ", c.device, " as query is, got ",
                    tensor.device());
}

void check_rank(const Context& c, const char* name, const Tensor& tensor, int64_t rank, const char* meaning) {
  TORCH_CHECK_VALUE(tensor.dim() == rank, c.op, ": expected ", name, " of shape ", meaning, ", got ",
                    tensor.sym_sizes());
}

// Strided, on query's device and of the given dtype.
void check_kind(const Context& c, const char* name, const Tensor& tensor, at::ScalarType dtype) {
  check_strided(c.op, name, tensor);
  TORCH_CHECK_TYPE(tensor.scalar_type() == dtype, c.op, ": expected ", name, " of dtype ", name_of(dtype), ", got ",
                   name_of(tensor.scalar_type()));
  check_device(c, name, tensor);
}

void check_kind(const Context& c, const char* name, const Tensor& tensor) { check_kind(c, name, tensor, c.dtype); }

void check_shape(const Context& c, const char* name, const Tensor& tensor, std::initializer_list<SymInt> sizes,
                 const char* meaning) {
  const auto actual = tensor.sym_sizes();
  const bool same = actual.size() == sizes.size() && std::equal(actual.begin(), actual.end(), sizes.begin(), equal);
  TORCH_CHECK_VALUE(same, c.op, ": expected ", name, " of shape ", meaning, " = ", SymIntArrayRef(sizes), ", got ",
                    actual);
}

// Each dimension, counted from the last, is 1 or that of (B, H, Lq, Lk).
void check_broadcasts(const Context& c, const char* name, const Tensor& tensor, const AttentionSizes& s) {
  const SymInt* const full[] = {&s.batch, &s.heads, &s.q_len, &s.kv_len};
  const auto sizes = tensor.sym_sizes();
  bool fits = sizes.size() <= 4;
  for (size_t i = 0; fits && i < sizes.size(); ++i) {
    const auto& size = sizes[sizes.size() - 1 - i];
    fits = is_one(size) || equal(size, *full[3 - i]);
  }
  TORCH_CHECK_VALUE(fits, c.op, ": expected ", name, " that broadcasts to (B, H, Lq, Lk) = (", s.batch, ", ", s.heads,
                    ", ", s.q_len, ", ", s.kv_len, "), got ", sizes);
}

void check_key_lengths(const Context& c, const Tensor& key_lengths, const AttentionSizes& s) {
  check_strided(c.op, "key_lengths", key_lengths);
  const auto dtype = key_lengths.scalar_type();
  TORCH_CHECK_TYPE(dtype == at::kInt || dtype == at::kLong, c.op,
                   ": expected key_lengths of dtype int32 or int64, got ", name_of(dtype));
  check_device(c, "key_lengths", key_lengths);
  check_shape(c, "key_lengths", key_lengths, {s.batch}, "(B,)");
}

void check_seed(const Context& c, const Tensor& seed) {
  check_strided(c.op, "seed", seed);
  TORCH_CHECK_TYPE(seed.scalar_type() == at::kLong, c.op, ": expected seed of dtype int64, got ",
                   name_of(seed.scalar_type()));
  TORCH_CHECK_VALUE(equal(seed.sym_numel(), 1), c.op, ": expected seed of one element, got shape ", seed.sym_sizes());
  TORCH_CHECK_VALUE(seed.is_cpu() || seed.device() == c.device, c.op, ": expected seed on cpu or ", c.device, ", got ",
                    seed.device());
}

void check_options(const Context& c, const AttentionSizes& s, const AttentionOptions& options) {
  TORCH_CHECK_VALUE(options.dropout_p >= 0 && options.dropout_p <= 1, c.op,
                    ": expected dropout_p between 0 and 1, got ", options.dropout_p);
  TORCH_CHECK_VALUE(options.is_causal || !options.causal_bottom_right, c.op,
                    ": expected is_causal=True with causal_bottom_right=True, got is_causal=False");
  // Beyond that c or 1 / c is no float.
  const double softcap = options.softcap.value_or(1);
  TORCH_CHECK_VALUE(softcap >= 1e-30 && softcap <= 1e30, c.op, ": expected softcap between 1e-30 and 1e30, got ",
                    softcap);
  if (given(options.mask)) {
    check_strided(c.op, "mask", *options.mask);
    TORCH_CHECK_TYPE(options.mask->scalar_type() == at::kBool, c.op,
                     ": expected mask of dtype bool (True = may attend), got ", name_of(options.mask->scalar_type()));
    check_device(c, "mask", *options.mask);
    check_broadcasts(c, "mask", *options.mask, s);
  }
  if (given(options.bias)) {
    check_strided(c.op, "bias", *options.bias);
    check_supported(c.op, "bias", options.bias->scalar_type());
    check_device(c, "bias", *options.bias);
    check_broadcasts(c, "bias", *options.bias, s);
  }
  if (given(options.key_lengths)) check_key_lengths(c, *options.key_lengths, s);
  if (given(options.seed)) check_seed(c, *options.seed);
}

// Query decides about dtype and device.
Context check_query(const char* op, const Tensor& query) {
  check_strided(op, "query", query);
  check_supported(op, "query", query.scalar_type());
  return {op, query.scalar_type(), query.device()};
}

// The engine's scratch is a few times L * D elements: beyond this its size would overflow, whatever an expanded tensor
// claims.
void check_extent(const Context& c, const AttentionSizes& s) {
  const auto number = [](const SymInt& n) { return static_cast<double>(n.maybe_as_int().value_or(1)); };
  const double longest = std::max({number(s.q_len), number(s.kv_len), 64.0});
  const double widest = std::max(number(s.head_dim), number(s.value_dim));
  TORCH_CHECK_VALUE(longest * widest < 0x1p44, c.op, ": expected lengths times head size below 2^44, got ", longest,
                    " times ", widest);
}

AttentionSizes check_heads(const Context& c, const Tensor& query, const Tensor& key, const Tensor& value) {
  check_kind(c, "key", key);
  check_kind(c, "value", value);
  check_rank(c, "query", query, 4, "(B, H, Lq, D)");
  check_rank(c, "key", key, 4, "(B, Hkv, Lk, D)");
  check_rank(c, "value", value, 4, "(B, Hkv, Lk, Dv)");
  const auto q = query.sym_sizes(), k = key.sym_sizes(), v = value.sym_sizes();
  AttentionSizes s{q[0], q[1], k[1], q[2], k[2], q[3], v[3]};
  TORCH_CHECK_VALUE(equal(k[0], s.batch), c.op, ": expected key of query's batch size ", s.batch, ", got ", k[0]);
  TORCH_CHECK_VALUE(equal(k[3], s.head_dim), c.op, ": expected key of query's head size ", s.head_dim, ", got ", k[3]);
  TORCH_CHECK_VALUE(equal(v[0], s.batch), c.op, ": expected value of query's batch size ", s.batch, ", got ", v[0]);
  TORCH_CHECK_VALUE(equal(v[1], s.kv_heads), c.op, ": expected value of as many heads as key, ", s.kv_heads, ", got ",
                    v[1]);
  TORCH_CHECK_VALUE(equal(v[2], s.kv_len), c.op, ": expected value of key's length ", s.kv_len, ", got ", v[2]);
  TORCH_CHECK_VALUE(at_least(s.head_dim, 1), c.op, ": expected head size >= 1, got ", s.head_dim);
  TORCH_CHECK_VALUE(at_least(s.value_dim, 1), c.op, ": expected head size of value >= 1, got ", s.value_dim);
  // No heads at all are fine; but query heads need key heads.
  const bool no_heads = s.heads.sym_eq(0).guard_or_false(__FILE__, __LINE__);
  TORCH_CHECK_VALUE(no_heads || (at_least(s.kv_heads, 1) && multiple_of(s.heads, s.kv_heads)), c.op,
                    ": expected query's number of heads to be a multiple of key's, got ", s.heads, " and ", s.kv_heads);
  check_extent(c, s);
  return s;
}

// What weights and their gradients look like wherever they are given.
void check_weights(const Context& c, const Tensor& weights, const OptionalTensor& grad_weights, const AttentionSizes& s,
                   bool averaged) {
  const auto check_scores = [&](const char* name, const Tensor& tensor) {
    if (averaged) return check_shape(c, name, tensor, {s.batch, s.q_len, s.kv_len}, "(B, Lq, Lk)");
    check_shape(c, name, tensor, {s.batch, s.heads, s.q_len, s.kv_len}, "(B, H, Lq, Lk)");
  };
  check_kind(c, "weights", weights);
  if (given(grad_weights)) {
    check_kind(c, "grad_weights", *grad_weights);
    check_scores("grad_weights", *grad_weights);
  } else if (weights.dim() == 1 && equal(weights.sym_size(0), 0)) {
    return;  // not asked for in the forward
  }
  check_scores("weights", weights);
}

void check_saved_logsumexp(const Context& c, const char* name, const Tensor& logsumexp, const AttentionSizes& s) {
  check_kind(c, name, logsumexp, accumulate_dtype(c.dtype));
  check_shape(c, name, logsumexp, {s.batch, s.heads, s.q_len}, "(B, H, Lq)");
}

void check_backward_options(const Context& c, const AttentionOptions& options, bool need_bias_grad) {
  TORCH_CHECK_VALUE(options.dropout_p == 0 || given(options.seed), c.op,
                    ": expected the forward's seed with dropout_p > 0, got none");
  TORCH_CHECK_VALUE(!need_bias_grad || given(options.bias), c.op,
                    ": expected a bias when its gradient is asked for, got none");
}

void check_linear(const Context& c, const char* name, const Tensor& weight, const char* bias_name,
                  const OptionalTensor& bias, const SymInt* in_features, const char* meaning) {
  check_kind(c, name, weight);
  check_rank(c, name, weight, 2, meaning);
  if (in_features) {
    TORCH_CHECK_VALUE(equal(weight.sym_size(1), *in_features), c.op, ": expected ", name, " of ", *in_features,
                      " input features, got shape ", weight.sym_sizes());
  }
  if (given(bias)) {
    check_kind(c, bias_name, *bias);
    check_shape(c, bias_name, *bias, {weight.sym_size(0)}, "(out_features,)");
  }
}

LayerSizes check_layer_sizes(const Context& c, const Tensor& query, const Tensor& key, const Tensor& value,
                             const Projections& p, int64_t num_heads) {
  check_kind(c, "key", key);
  check_kind(c, "value", value);
  check_rank(c, "query", query, 3, "(B, Lq, E)");
  check_rank(c, "key", key, 3, "(B, Lk, Ek)");
  check_rank(c, "value", value, 3, "(B, Lk, Ev)");
  const auto q = query.sym_sizes(), k = key.sym_sizes(), v = value.sym_sizes();
  TORCH_CHECK_VALUE(equal(k[0], q[0]), c.op, ": expected key of query's batch size ", q[0], ", got ", k[0]);
  TORCH_CHECK_VALUE(equal(v[0], q[0]), c.op, ": expected value of query's batch size ", q[0], ", got ", v[0]);
  TORCH_CHECK_VALUE(equal(v[1], k[1]), c.op, ": expected value of key's length ", k[1], ", got ", v[1]);
  check_linear(c, "w_q", p.w_q, "b_q", p.b_q, &q[2], "(H * D, E)");
  check_linear(c, "w_k", p.w_k, "b_k", p.b_k, &k[2], "(Hkv * D, Ek)");
  check_linear(c, "w_v", p.w_v, "b_v", p.b_v, &v[2], "(Hkv * Dv, Ev)");
  check_linear(c, "w_o", p.w_o, "b_o", p.b_o, nullptr, "(out_features, H * Dv)");

  TORCH_CHECK_VALUE(num_heads >= 1, c.op, ": expected num_heads >= 1, got ", num_heads);
  const auto q_features = p.w_q.sym_size(0), k_features = p.w_k.sym_size(0), v_features = p.w_v.sym_size(0);
  TORCH_CHECK_VALUE(at_least(q_features, 1) && multiple_of(q_features, num_heads), c.op,
                    ": expected w_q's rows to be a multiple of num_heads = ", num_heads, ", got ", q_features);
  const auto head_dim = q_features / num_heads;
  TORCH_CHECK_VALUE(at_least(k_features, 1) && multiple_of(k_features, head_dim), c.op,
                    ": expected w_k's rows to be a multiple of the head size ", head_dim, ", got ", k_features);
  const auto kv_heads = k_features / head_dim;
  TORCH_CHECK_VALUE(multiple_of(num_heads, kv_heads), c.op, ": expected num_heads = ", num_heads,
                    " to be a multiple of the number of key heads, got ", kv_heads);
  TORCH_CHECK_VALUE(at_least(v_features, 1) && multiple_of(v_features, kv_heads), c.op,
                    ": expected w_v's rows to be a multiple of the number of key heads ", kv_heads, ", got ",
                    v_features);
  const auto value_dim = v_features / kv_heads;
  TORCH_CHECK_VALUE(equal(p.w_o.sym_size(1), value_dim * num_heads), c.op, ": expected w_o of ", value_dim * num_heads,
                    " input features (all heads), got shape ", p.w_o.sym_sizes());
  LayerSizes sizes{{q[0], num_heads, kv_heads, q[1], k[1], head_dim, value_dim}, p.w_o.sym_size(0)};
  check_extent(c, sizes.core);
  return sizes;
}

// Without memory of its own that could be read: fake, functional, inside a transform.
bool is_wrapper(const Tensor& tensor) { return !(tensor.key_set() & at::kTensorSubclassLike).empty(); }

template <typename T>
void check_key_length_values(const char* op, const Tensor& key_lengths, int64_t kv_len) {
  const auto lengths = key_lengths.accessor<T, 1>();
  for (int64_t b = 0; b < lengths.size(0); ++b) {
    TORCH_CHECK_VALUE(lengths[b] >= 0 && lengths[b] <= kv_len, op, ": expected key_lengths between 0 and Lk = ", kv_len,
                      ", got ", lengths[b], " at index ", b);
  }
}

}  // namespace

AttentionSizes check_attention(const char* op, const Tensor& query, const Tensor& key, const Tensor& value,
                               const AttentionOptions& options) {
  const auto c = check_query(op, query);
  auto sizes = check_heads(c, query, key, value);
  check_options(c, sizes, options);
  return sizes;
}

AttentionSizes check_attention_backward(const char* op, const Tensor& grad_output, const OptionalTensor& grad_weights,
                                        const OptionalTensor& grad_logsumexp, const AttentionSaved& saved,
                                        const AttentionOptions& options, bool need_bias_grad) {
  const auto c = check_query(op, saved.query);
  auto s = check_heads(c, saved.query, saved.key, saved.value);
  check_options(c, s, options);
  check_backward_options(c, options, need_bias_grad);
  check_kind(c, "grad_output", grad_output);
  check_shape(c, "grad_output", grad_output, {s.batch, s.heads, s.q_len, s.value_dim}, "(B, H, Lq, Dv)");
  if (given(grad_logsumexp)) check_saved_logsumexp(c, "grad_logsumexp", *grad_logsumexp, s);
  check_kind(c, "output", saved.output);
  check_shape(c, "output", saved.output, {s.batch, s.heads, s.q_len, s.value_dim}, "(B, H, Lq, Dv)");
  check_weights(c, saved.weights, grad_weights, s, options.average_weights);
  check_saved_logsumexp(c, "logsumexp", saved.logsumexp, s);
  return s;
}

LayerSizes check_layer(const char* op, const Tensor& query, const Tensor& key, const Tensor& value,
                       const Projections& projections, int64_t num_heads, const AttentionOptions& options) {
  const auto c = check_query(op, query);
  auto sizes = check_layer_sizes(c, query, key, value, projections, num_heads);
  check_options(c, sizes.core, options);
  return sizes;
}

LayerSizes check_layer_backward(const char* op, const Tensor& grad_output, const OptionalTensor& grad_weights,
                                const Tensor& query, const Tensor& key, const Tensor& value,
                                const Projections& projections, const LayerSaved& saved, int64_t num_heads,
                                const AttentionOptions& options, bool self_attention,
                                const LayerGradMask& output_mask) {
  const auto c = check_query(op, query);
  auto sizes = check_layer_sizes(c, query, key, value, projections, num_heads);
  const auto& s = sizes.core;
  check_options(c, s, options);
  check_backward_options(c, options, output_mask[kBias]);
  const std::pair<LayerGrad, const OptionalTensor*> biases[] = {
      {kBq, &projections.b_q}, {kBk, &projections.b_k}, {kBv, &projections.b_v}, {kBo, &projections.b_o}};
  for (const auto& [grad, bias] : biases) {
    TORCH_CHECK_VALUE(!output_mask[grad] || given(*bias), op, ": expected output_mask[", static_cast<int>(grad),
                      "] to be False when there is no such bias, got True");
  }
  if (self_attention) {
    const bool same = std::equal(query.sym_sizes().begin(), query.sym_sizes().end(), key.sym_sizes().begin(), equal) &&
                      std::equal(query.sym_sizes().begin(), query.sym_sizes().end(), value.sym_sizes().begin(), equal);
    TORCH_CHECK_VALUE(same, op, ": expected query, key and value of one shape with self_attention=True, got ",
                      query.sym_sizes(), ", ", key.sym_sizes(), " and ", value.sym_sizes());
  }
  check_kind(c, "grad_output", grad_output);
  check_shape(c, "grad_output", grad_output, {s.batch, s.q_len, sizes.out_features}, "(B, Lq, out_features)");
  check_kind(c, "q", saved.q);
  check_shape(c, "q", saved.q, {s.batch, s.q_len, s.heads * s.head_dim}, "(B, Lq, H * D)");
  check_kind(c, "k", saved.k);
  check_shape(c, "k", saved.k, {s.batch, s.kv_len, s.kv_heads * s.head_dim}, "(B, Lk, Hkv * D)");
  check_kind(c, "v", saved.v);
  check_shape(c, "v", saved.v, {s.batch, s.kv_len, s.kv_heads * s.value_dim}, "(B, Lk, Hkv * Dv)");
  check_kind(c, "context", saved.context);
  check_shape(c, "context", saved.context, {s.batch, s.q_len, s.heads * s.value_dim}, "(B, Lq, H * Dv)");
  check_weights(c, saved.weights, grad_weights, s, options.average_weights);
  check_saved_logsumexp(c, "logsumexp", saved.logsumexp, s);
  return sizes;
}

void check_key_length_values(const char* op, const OptionalTensor& key_lengths, const SymInt& kv_len) {
  if (!given(key_lengths)) return;
  const auto most = kv_len.maybe_as_int();
  if (!most || !key_lengths->is_cpu() || is_wrapper(*key_lengths)) return;
  if (key_lengths->scalar_type() == at::kInt) {
    check_key_length_values<int32_t>(op, *key_lengths, *most);
  } else {
    check_key_length_values<int64_t>(op, *key_lengths, *most);
  }
}

}  // namespace mha_ext
