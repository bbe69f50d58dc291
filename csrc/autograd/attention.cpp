// One autograd node for the core operator. The first backward runs in the engine; whatever needs more than that (double
// backward, forward mode, functorch transforms) takes the composite form, which autograd differentiates by itself.
#include "../composite/attention.h"
#include "../checks.h"
#include "../flat_signatures.h"
#include "../outputs.h"
#include "saved_options.h"
#include "transforms.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

namespace mha_ext::autograd {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

// Not in the unnamed namespace: profiles and grad_fn.name() show its name.
struct AttentionBackward : torch::autograd::Function<AttentionBackward> {
  static constexpr bool is_traceable = true;  // compiled autograd may run the backward on fake tensors

  static variable_list forward(AutogradContext* ctx, const Tensor& query, const Tensor& key, const Tensor& value,
                               const OptionalTensor& bias, AttentionOptions options) {
    at::AutoDispatchBelowADInplaceOrView guard;
    options.bias = bias;
    AttentionOptions kept = options;
    kept.need_logsumexp = true;  // for the backward
    auto [output, weights, logsumexp] = mha_ext::attention(query, key, value, kept);
    SavedOptions saved(ctx, options);
    saved.save({query, key, value, output, weights, logsumexp});
    ctx->saved_data["need_bias_grad"] = requires_grad(bias);
    ctx->set_materialize_grads(false);
    // Only what is wanted: compiled autograd knows no results without gradients.
    variable_list wanted = {output};
    if (options.need_weights) wanted.push_back(weights);
    if (options.need_logsumexp) wanted.push_back(logsumexp);
    return wanted;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto [tensors, options] = SavedOptions::load(ctx);
    const AttentionSaved saved = {tensors[0], tensors[1], tensors[2], tensors[3], tensors[4], tensors[5]};
    const Tensor grad_output =
        grads[0].defined() ? grads[0] : at::zeros({}, saved.output.options()).expand_as(saved.output);
    auto next = grads.begin() + 1;
    const auto gradient = [&](bool wanted) -> OptionalTensor {
      if (!wanted) return std::nullopt;
      const Tensor& grad = *next++;
      return grad.defined() ? OptionalTensor(grad) : std::nullopt;
    };
    const OptionalTensor grad_weights = gradient(options.need_weights);
    const OptionalTensor grad_logsumexp = gradient(options.need_logsumexp);
    const bool need_bias_grad = ctx->saved_data["need_bias_grad"].toBool();
    auto [grad_query, grad_key, grad_value, grad_bias] =
        mha_ext::attention_backward(grad_output, grad_weights, grad_logsumexp, saved, options, need_bias_grad);
    return {grad_query, grad_key, grad_value, need_bias_grad ? grad_bias : Tensor(), Tensor()};
  }
};

namespace {

ThreeTensors attention(const Tensor& query, const Tensor& key, const Tensor& value, const AttentionOptions& given) {
  if (!all_defined({query, key, value})) check_attention("attention", query, key, value, given);  // throws
  if (inside_functorch() || any_tangent({query, key, value, given.bias})) {
    return composite::attention(query, key, value, given);
  }
  const AttentionOptions options = composite::with_seed(given);
  if (!any_requires_grad({query, key, value, options.bias})) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return mha_ext::attention(query, key, value, options);
  }
  const auto results = AttentionBackward::apply(query, key, value, options.bias, options);
  auto next = results.begin() + 1;
  const auto result = [&](bool wanted, at::ScalarType dtype) {
    return wanted ? *next++ : at::empty({0}, query.options().dtype(dtype));
  };
  const auto dtype = query.scalar_type();
  const Tensor weights = result(options.need_weights, dtype);
  const Tensor logsumexp = result(options.need_logsumexp, accumulate_dtype(dtype));
  return {results[0], weights, logsumexp};
}

FourTensors attention_backward(const Tensor& grad_output, const OptionalTensor& grad_weights,
                               const OptionalTensor& grad_logsumexp, const AttentionSaved& saved,
                               const AttentionOptions& options, bool need_bias_grad) {
  if (inside_functorch() ||
      any_requires_grad(
          {grad_output, grad_weights, grad_logsumexp, saved.query, saved.key, saved.value, options.bias}) ||
      any_tangent({grad_output, grad_weights, grad_logsumexp, saved.query, saved.key, saved.value, options.bias})) {
    return composite::attention_backward(grad_output, grad_weights, grad_logsumexp, saved, options, need_bias_grad);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return mha_ext::attention_backward(grad_output, grad_weights, grad_logsumexp, saved, options, need_bias_grad);
}

void implement(torch::Library& m) {
  m.impl("attention", TORCH_FN(FlatAttention<&attention>::call));
  m.impl("attention_backward", TORCH_FN(FlatAttentionBackward<&attention_backward>::call));
}

}  // namespace
}  // namespace mha_ext::autograd

TORCH_LIBRARY_IMPL(mha_ext, AutogradCPU, m) { mha_ext::autograd::implement(m); }
TORCH_LIBRARY_IMPL(mha_ext, AutogradMeta, m) { mha_ext::autograd::implement(m); }
