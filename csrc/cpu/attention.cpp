// CPU kernels of attention and attention_backward: tensors become a params struct, the work is split into tasks, the
// kernels of the instruction set in use do the rest.
#include "attention.h"

#include "../checks.h"
#include "../composite/attention.h"
#include "../flat_signatures.h"
#include "../outputs.h"
#include "dispatch.h"
#include "kernels/tile_size.h"
#include "parallel.h"
#include "work_split.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <cmath>
#include <vector>

namespace mha_ext::cpu {
namespace {

bool present(const std::optional<at::Tensor>& tensor) { return tensor.has_value() && tensor->defined(); }

Dtype dtype_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kDouble: return Dtype::f64;
    case at::kBFloat16: return Dtype::bf16;
    case at::kHalf: return Dtype::f16;
    case at::kBool: return Dtype::boolean;
    default: return Dtype::f32;
  }
}

View view_of(const at::Tensor& tensor) {
  View v;
  v.data = const_cast<void*>(tensor.const_data_ptr());
  v.dtype = dtype_of(tensor);
  for (int64_t d = 0; d < tensor.dim(); ++d) v.stride[d] = tensor.stride(d);
  return v;
}

Dropout dropout_of(const AttentionOptions& options) {
  Dropout d;
  if (options.dropout_p == 0.0) return d;
  const auto seed = static_cast<uint64_t>(options.seed->item<int64_t>());
  d.active = true;
  d.drops_all = options.dropout_p == 1.0;
  d.threshold = static_cast<int32_t>(std::min(std::nearbyint(options.dropout_p * 0x1p31), 0x1p31 - 1));
  d.keep_scale = d.drops_all ? 0.0 : 1.0 / (1.0 - options.dropout_p);
  d.seed_low = static_cast<uint32_t>(seed);
  d.seed_high = static_cast<uint32_t>(seed >> 32);
  return d;
}

// The parameters, and the tensors made on the way that they point into.
template <typename Params>
struct Prepared {
  Params params;
  at::Tensor key_lengths, mask, bias;
};

template <typename Params>
Prepared<Params> prepare(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const AttentionOptions& options) {
  Prepared<Params> prepared;
  Params& p = prepared.params;
  p.batch = query.size(0);
  p.heads = query.size(1);
  p.kv_heads = key.size(1);
  p.q_len = query.size(2);
  p.kv_len = key.size(2);
  p.head_dim = query.size(3);
  p.value_dim = value.size(3);
  p.scale = options.scale.value_or(1.0 / std::sqrt(static_cast<double>(p.head_dim)));
  p.query = view_of(query);
  p.key = view_of(key);
  p.value = view_of(value);
  const std::array<int64_t, 4> scores = {p.batch, p.heads, p.q_len, p.kv_len};
  if (present(options.mask)) {
    prepared.mask = options.mask->expand(scores);
    p.mask = view_of(prepared.mask);
  }
  if (present(options.bias)) {
    prepared.bias = options.bias->expand(scores);
    p.bias = view_of(prepared.bias);
  }
  if (present(options.key_lengths)) {
    prepared.key_lengths = options.key_lengths->to(at::kLong).contiguous();
    p.key_lengths = static_cast<const int64_t*>(prepared.key_lengths.const_data_ptr());
  }
  p.is_causal = options.is_causal;
  p.causal_offset = options.causal_bottom_right ? p.kv_len - p.q_len : 0;
  p.uniform_dead_rows = options.uniform_dead_rows;
  p.dropout = dropout_of(options);
  p.softcap = options.softcap.value_or(0);
  p.weights_before_dropout = options.weights_before_dropout && p.dropout.active;
  p.tile = tile_size();
  p.tile.forward_queries = balanced(p.kv_heads > 0 ? p.group() * p.q_len : 0, p.tile.forward_queries);
  p.tile.backward_queries = balanced(p.q_len, p.tile.backward_queries);
  // Forward and backward alike, so that both find the same scores to the last bit.
  p.few_rows = p.kv_heads > 0 && p.group() * p.q_len <= kernel_table().few_rows;
  if (p.few_rows) p.tile.forward_queries = std::max(p.tile.forward_queries, padded(p.group() * p.q_len));
  return prepared;
}

// (B, Lq, Lk) as every head's, to be summed up or read in the dtype that accumulates.
at::Tensor for_all_heads(const AttentionParams& p, const at::Tensor& averaged) {
  return averaged.unsqueeze(1).expand({p.batch, p.heads, p.q_len, p.kv_len});
}

// The gradient of the weights of each head from that of their mean.
at::Tensor grad_of_each_head(const AttentionParams& p, const at::Tensor& grad_mean) {
  return for_all_heads(p,
                       grad_mean.to(accumulate_dtype(grad_mean.scalar_type())).mul(1.0 / static_cast<double>(p.heads)));
}

bool is_empty(const AttentionParams& p) { return p.batch == 0 || p.heads == 0 || p.q_len == 0; }

// Multiplications and additions of one product over all visible pairs, roughly.
double product_flops(const AttentionParams& p) {
  return 2.0 * static_cast<double>(p.batch * p.heads) * static_cast<double>(p.q_len) * static_cast<double>(p.kv_len) *
         static_cast<double>(std::max(p.head_dim, p.value_dim));
}

// Memory for the parts of few rows.
struct PartsMemory {
  Parts parts;
  at::Tensor memory;
  std::vector<std::atomic<int64_t>> finished;

  PartsMemory(const AttentionParams& p, int64_t count, int64_t width, at::ScalarType dtype)
      : finished(count > 1 ? p.batch * p.kv_heads : 0) {
    parts.count = count;
    if (count == 1) return;
    memory =
        empty({p.batch * p.kv_heads, count, p.group() * p.q_len, width}, at::TensorOptions(accumulate_dtype(dtype)));
    parts.memory = memory.mutable_data_ptr();
    parts.finished = finished.data();
  }
};

void run_backward(const BackwardParams& p, at::ScalarType dtype) {
  const Kernels& kernels = kernels_for(dtype);
  const int64_t threads = useful_threads(5 * product_flops(p));
  const BackwardSplit split = split_backward(p, threads);
  TaskQueue<BackwardTask> queue{split.tasks.data(), static_cast<int64_t>(split.tasks.size())};
  GradQueryOrder order;
  at::Tensor accumulator;
  std::vector<std::atomic<int64_t>> progress(split.ordered ? p.batch * p.heads * p.key_blocks() : 0);
  if (split.ordered) {
    const int64_t block = padded(std::min(p.tile.backward_queries, p.q_len));
    accumulator = empty({p.batch * p.heads, p.query_blocks(), padded(p.head_dim), block},
                        at::TensorOptions(accumulate_dtype(dtype)));
    order = {accumulator.mutable_data_ptr(), progress.data(), &queue.stopped, {}};
  }
  const PartsMemory memory(p, split.parts, padded(p.head_dim), dtype);
  order.parts = memory.parts;
  const int64_t bytes = kernels.backward_scratch_bytes(p, order, split.task_key_blocks);
  run_workers(threads, queue, bytes,
              [&](std::byte* scratch) { kernels.backward_worker(p, queue, order, split.task_key_blocks, scratch); });
}

// A bias that is the same for all keys: the sum of dS over a row is dLSE there, since softmax does not see such a bias.
at::Tensor key_broadcast_grad_bias(const at::Tensor& bias, const std::optional<at::Tensor>& grad_logsumexp,
                                   const at::Tensor& logsumexp) {
  if (!present(grad_logsumexp)) return at::zeros(bias.sizes(), bias.options());
  const at::Tensor dead = logsumexp.eq(-std::numeric_limits<double>::infinity());
  return grad_logsumexp->masked_fill(dead, 0).unsqueeze(-1).sum_to_size(bias.sizes()).to(bias.scalar_type());
}

}  // namespace

void attention_into(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                    const AttentionOptions& options, const at::Tensor& output, const at::Tensor& weights,
                    const at::Tensor& logsumexp) {
  auto prepared = prepare<AttentionParams>(query, key, value, options);
  AttentionParams& p = prepared.params;
  if (is_empty(p)) {
    weights.zero_();  // the mean over no heads
    return;
  }
  p.output = view_of(output);
  if (options.need_logsumexp) p.logsumexp = view_of(logsumexp);
  at::Tensor mean, mean_of_heads;
  if (options.need_weights && p.kv_len > 0) {
    p.average_weights = options.average_weights;
    if (p.average_weights) {
      // Summed in the dtype that accumulates, which may be that of the weights.
      const auto dtype = accumulate_dtype(weights.scalar_type());
      mean = dtype == weights.scalar_type() ? weights : empty(weights.sym_sizes(), weights.options().dtype(dtype));
      mean_of_heads = for_all_heads(p, mean);
    }
    p.weights = view_of(p.average_weights ? mean_of_heads : weights);
  }
  const Kernels& kernels = kernels_for(query.scalar_type());
  const int64_t threads = useful_threads(2 * product_flops(p));
  const ForwardSplit split = split_forward(p, threads);
  TaskQueue<ForwardTask> queue{split.tasks.data(), static_cast<int64_t>(split.tasks.size())};
  const PartsMemory memory(p, split.parts, 2 + padded(p.value_dim), query.scalar_type());
  run_workers(threads, queue, kernels.forward_scratch_bytes(p),
              [&](std::byte* scratch) { kernels.forward_worker(p, queue, memory.parts, scratch); });
  if (p.average_weights && !mean.is_same(weights)) weights.copy_(mean);
}

at::Tensor attention_backward_into(const at::Tensor& grad_output, const std::optional<at::Tensor>& grad_weights,
                                   const std::optional<at::Tensor>& grad_logsumexp, const AttentionSaved& saved,
                                   const AttentionOptions& options, bool need_bias_grad, const at::Tensor& grad_query,
                                   const at::Tensor& grad_key, const at::Tensor& grad_value) {
  auto prepared = prepare<BackwardParams>(saved.query, saved.key, saved.value, options);
  BackwardParams& p = prepared.params;
  p.output = view_of(saved.output);
  p.logsumexp = view_of(saved.logsumexp);
  p.grad_output = view_of(grad_output);
  if (present(grad_logsumexp)) p.grad_logsumexp = view_of(*grad_logsumexp);
  at::Tensor grad_of_heads;
  if (present(grad_weights)) {
    grad_of_heads = options.average_weights && !is_empty(p) ? grad_of_each_head(p, *grad_weights) : *grad_weights;
    p.grad_weights = view_of(grad_of_heads);
    if (!options.average_weights) p.weights = view_of(saved.weights);
  }
  p.grad_query = view_of(grad_query);
  p.grad_key = view_of(grad_key);
  p.grad_value = view_of(grad_value);

  at::Tensor grad_bias, accumulator;
  if (need_bias_grad) {
    const at::Tensor& bias = *options.bias;
    const bool per_key = p.kv_len <= 1 || (bias.dim() > 0 && bias.size(-1) != 1);
    if (per_key) {
      grad_bias = empty(bias.sym_sizes(), bias.options().dtype(accumulate_dtype(saved.query.scalar_type()))).zero_();
      accumulator = grad_bias.expand({p.batch, p.heads, p.q_len, p.kv_len});
      p.grad_bias = view_of(accumulator);
    } else {
      grad_bias = key_broadcast_grad_bias(bias, grad_logsumexp, saved.logsumexp);
    }
  }
  if (is_empty(p) || p.kv_len == 0) {
    grad_query.zero_();
    grad_key.zero_();
    grad_value.zero_();
  } else {
    run_backward(p, saved.query.scalar_type());
  }
  return need_bias_grad ? grad_bias.to(options.bias->scalar_type()) : at::empty({0}, saved.query.options());
}

namespace {

std::tuple<at::Tensor, at::Tensor, at::Tensor> attention(const at::Tensor& query, const at::Tensor& key,
                                                         const at::Tensor& value, const AttentionOptions& given) {
  const AttentionSizes sizes = check_attention("attention", query, key, value, given);
  check_key_length_values("attention", given.key_lengths, key.size(2));
  const AttentionOptions options = composite::with_seed(given);
  const at::Tensor output = empty_output(sizes, query.options());
  const at::Tensor weights = empty_weights(sizes, options, query.options());
  const at::Tensor logsumexp = empty_logsumexp(sizes, options, query.options());
  attention_into(query, key, value, options, output, weights, logsumexp);
  return {output, weights, logsumexp};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention_backward(
    const at::Tensor& grad_output, const std::optional<at::Tensor>& grad_weights,
    const std::optional<at::Tensor>& grad_logsumexp, const AttentionSaved& saved, const AttentionOptions& options,
    bool need_bias_grad) {
  check_attention_backward("attention_backward", grad_output, grad_weights, grad_logsumexp, saved, options,
                           need_bias_grad);
  check_key_length_values("attention_backward", options.key_lengths, saved.key.size(2));
  const at::Tensor grad_query = empty_heads_like(saved.query);
  const at::Tensor grad_key = empty_heads_like(saved.key);
  const at::Tensor grad_value = empty_heads_like(saved.value);
  at::Tensor grad_bias = attention_backward_into(grad_output, grad_weights, grad_logsumexp, saved, options,
                                                 need_bias_grad, grad_query, grad_key, grad_value);
  return {grad_query, grad_key, grad_value, grad_bias};
}

TORCH_LIBRARY_IMPL(mha_ext, CPU, m) {
  m.impl("attention", TORCH_FN(FlatAttention<&attention>::call));
  m.impl("attention_backward", TORCH_FN(FlatAttentionBackward<&attention_backward>::call));
}

}  // namespace
}  // namespace mha_ext::cpu
