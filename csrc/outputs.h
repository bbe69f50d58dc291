// Shapes, dtypes and strides of everything the operators return; shared by the kernels of the CPU and of meta tensors.
#pragma once

#include "checks.h"
#include "cpu/kept_memory.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>

namespace mha_ext {

// The dtype of scores, accumulators and logsumexp.
inline at::ScalarType accumulate_dtype(at::ScalarType dtype) { return dtype == at::kDouble ? at::kDouble : at::kFloat; }

// Not initialised. Large ones of the CPU lie in memory that is kept between calls.
inline at::Tensor empty(c10::SymIntArrayRef sizes, const at::TensorOptions& options) {
  if (!options.device().is_cpu()) return at::empty_symint(sizes, options);
  const c10::IntArrayRef known = C10_AS_INTARRAYREF_SLOW(sizes);
  const auto count = static_cast<size_t>(c10::multiply_integers(known));
  return at::detail::empty_generic(known, &cpu::allocator_for(count * options.dtype().itemsize()),
                                   c10::DispatchKeySet(c10::DispatchKey::CPU),
                                   c10::typeMetaToScalarType(options.dtype()), std::nullopt);
}

// (B, heads, L, dim), stored as (B, L, heads, dim), so that merging the heads is a view.
inline at::Tensor empty_heads(const c10::SymInt& batch, const c10::SymInt& heads, const c10::SymInt& length,
                              const c10::SymInt& dim, const at::TensorOptions& options) {
  return empty({batch, length, heads, dim}, options).transpose(1, 2);
}

inline at::Tensor empty_output(const AttentionSizes& s, const at::TensorOptions& options) {
  return empty_heads(s.batch, s.heads, s.q_len, s.value_dim, options);
}

// (B, H, Lq, Lk), or (B, Lq, Lk) if they are averaged, or (0,) when the caller does not want the weights.
inline at::Tensor empty_weights(const AttentionSizes& s, const AttentionOptions& options,
                                const at::TensorOptions& tensor_options) {
  if (!options.need_weights) return at::empty({0}, tensor_options);
  if (options.average_weights) return empty({s.batch, s.q_len, s.kv_len}, tensor_options);
  return empty({s.batch, s.heads, s.q_len, s.kv_len}, tensor_options);
}

// (B, H, Lq), or (0,) when the caller does not want it.
inline at::Tensor empty_logsumexp(const AttentionSizes& s, const AttentionOptions& options,
                                  const at::TensorOptions& tensor_options) {
  const auto dtype = accumulate_dtype(c10::typeMetaToScalarType(tensor_options.dtype()));
  if (!options.need_logsumexp) return at::empty({0}, tensor_options.dtype(dtype));
  return empty({s.batch, s.heads, s.q_len}, tensor_options.dtype(dtype));
}

// The gradient of query, key or value (B, heads, L, dim): contiguous if the tensor is, as autograd would copy it
// otherwise, else stored as (B, L, heads, dim), which is how heads that were split from features lie.
inline at::Tensor empty_heads_like(const at::Tensor& tensor) {
  const auto sizes = tensor.sym_sizes();
  if (tensor.is_contiguous_or_false()) return empty(sizes, tensor.options());
  return empty_heads(sizes[0], sizes[1], sizes[2], sizes[3], tensor.options());
}

// A contiguous tensor in the shape of `tensor`, or (0,) when the caller does not want it.
inline at::Tensor empty_grad(const at::Tensor& tensor, bool wanted) {
  if (!wanted) return at::empty({0}, tensor.options());
  return empty(tensor.sym_sizes(), tensor.options());
}

// The same for a tensor that may be absent; (0,) has the options of `query`.
inline at::Tensor empty_grad(const std::optional<at::Tensor>& tensor, bool wanted, const at::Tensor& query) {
  return wanted ? empty_grad(*tensor, true) : empty_grad(query, false);
}

// (B, L, features): the projected heads of a layer, its merged heads, its output.
inline at::Tensor empty_features(const c10::SymInt& batch, const c10::SymInt& length, const c10::SymInt& features,
                                 const at::TensorOptions& options) {
  return empty({batch, length, features}, options);
}

// Every gradient of a layer that output_mask asks for. With self_attention those of key and value are within kQuery.
inline LayerGrads empty_layer_grads(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                    const Projections& p, const AttentionOptions& options, bool self_attention,
                                    const LayerGradMask& wanted) {
  return {empty_grad(query, wanted[kQuery]),
          empty_grad(key, wanted[kKey] && !self_attention),
          empty_grad(value, wanted[kValue] && !self_attention),
          empty_grad(p.w_q, wanted[kWq]),
          empty_grad(p.w_k, wanted[kWk]),
          empty_grad(p.w_v, wanted[kWv]),
          empty_grad(p.w_o, wanted[kWo]),
          empty_grad(p.b_q, wanted[kBq], query),
          empty_grad(p.b_k, wanted[kBk], query),
          empty_grad(p.b_v, wanted[kBv], query),
          empty_grad(p.b_o, wanted[kBo], query),
          empty_grad(options.bias, wanted[kBias], query)};
}

// The gradients with an empty tensor for each that was not asked for, one of its own: results do not alias.
inline LayerGrads with_empty_rest(LayerGrads grads, const at::TensorOptions& tensor_options) {
  for (auto& grad : grads) {
    if (!grad.defined()) grad = at::empty({0}, tensor_options);
  }
  return grads;
}

}  // namespace mha_ext
