// One autograd node for a whole layer; see attention.cpp.
#include "../composite/multi_head_attention.h"
#include "../checks.h"
#include "../composite/attention.h"
#include "../flat_signatures.h"
#include "saved_options.h"
#include "transforms.h"

#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

namespace mha_ext::autograd {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using LayerInputs = std::array<OptionalTensor, kLayerGrads>;

// Everything that a gradient may flow to, in the order of LayerGrad.
LayerInputs inputs_of(const Tensor& query, const Tensor& key, const Tensor& value, const Projections& p,
                      const OptionalTensor& bias) {
  return {query, key, value, p.w_q, p.w_k, p.w_v, p.w_o, p.b_q, p.b_k, p.b_v, p.b_o, bias};
}

bool composite_is_needed(const LayerInputs& inputs) { return inside_functorch() || any_tangent(inputs); }

}  // namespace

// Not in the unnamed namespace: profiles and grad_fn.name() show its name.
struct MultiHeadAttentionBackward : torch::autograd::Function<MultiHeadAttentionBackward> {
  static constexpr bool is_traceable = true;  // see attention.cpp

  // The flat arguments are those that autograd tracks.
  static variable_list forward(AutogradContext* ctx, const Tensor& query, const Tensor& key, const Tensor& value,
                               const Tensor& w_q, const Tensor& w_k, const Tensor& w_v, const Tensor& w_o,
                               const OptionalTensor& b_q, const OptionalTensor& b_k, const OptionalTensor& b_v,
                               const OptionalTensor& b_o, const OptionalTensor& bias, int64_t num_heads,
                               AttentionOptions options) {
    at::AutoDispatchBelowADInplaceOrView guard;
    options.bias = bias;
    const Projections projections = {w_q, w_k, w_v, w_o, b_q, b_k, b_v, b_o};
    auto [output, saved] = mha_ext::multi_head_attention_forward(query, key, value, projections, num_heads, options);
    const SavedOptions kept(ctx, options);
    kept.save({query, key, value, w_q, w_k, w_v, w_o, b_q.value_or(Tensor()), b_k.value_or(Tensor()),
               b_v.value_or(Tensor()), b_o.value_or(Tensor()), saved.q, saved.k, saved.v, saved.context, saved.weights,
               saved.logsumexp});
    ctx->saved_data["num_heads"] = num_heads;
    ctx->saved_data["self_attention"] = query.is_same(key) && query.is_same(value);
    c10::List<bool> wanted;
    for (const auto& input : inputs_of(query, key, value, projections, bias)) wanted.push_back(requires_grad(input));
    ctx->saved_data["wanted"] = wanted;
    ctx->set_materialize_grads(false);
    return options.need_weights ? variable_list{output, saved.weights} : variable_list{output};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto [t, options] = SavedOptions::load(ctx);
    const auto given = [](const Tensor& tensor) { return tensor.defined() ? OptionalTensor(tensor) : std::nullopt; };
    const Projections projections = {t[3], t[4], t[5], t[6], given(t[7]), given(t[8]), given(t[9]), given(t[10])};
    const LayerSaved saved = {t[11], t[12], t[13], t[14], t[15], t[16]};
    const bool self_attention = ctx->saved_data["self_attention"].toBool();
    LayerGradMask wanted;
    const auto list = ctx->saved_data["wanted"].toBoolList();
    for (size_t i = 0; i < wanted.size(); ++i) wanted[i] = list.get(i);
    if (self_attention) wanted[kKey] = wanted[kValue] = false;

    const Tensor grad_output = grads[0].defined() ? grads[0] : zero_grad_output(t[0], projections.w_o);
    auto results = mha_ext::multi_head_attention_backward(
        grad_output, options.need_weights ? given(grads[1]) : std::nullopt, t[0], t[1], t[2], projections, saved,
        ctx->saved_data["num_heads"].toInt(), options, self_attention, wanted);
    variable_list gradients(kLayerGrads + 2);  // num_heads and options have none
    for (size_t i = 0; i < wanted.size(); ++i) {
      if (wanted[i]) gradients[i] = results[i];
    }
    return gradients;
  }

  // Only the weights were used: the output's gradient is zero, and takes no memory.
  static Tensor zero_grad_output(const Tensor& query, const Tensor& w_o) {
    return at::zeros({}, query.options()).expand_symint({query.sym_size(0), query.sym_size(1), w_o.sym_size(0)});
  }
};

namespace {

TwoTensors multi_head_attention(const Tensor& query, const Tensor& key, const Tensor& value, const Projections& p,
                                int64_t num_heads, const AttentionOptions& given) {
  if (!all_defined({query, key, value, p.w_q, p.w_k, p.w_v, p.w_o})) {
    check_layer("multi_head_attention", query, key, value, p, num_heads, given);  // throws
  }
  const LayerInputs inputs = inputs_of(query, key, value, p, given.bias);
  if (composite_is_needed(inputs)) return composite::multi_head_attention(query, key, value, p, num_heads, given);
  const AttentionOptions options = composite::with_seed(given);
  if (!any_requires_grad(inputs)) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return mha_ext::multi_head_attention(query, key, value, p, num_heads, options);
  }
  const auto results = MultiHeadAttentionBackward::apply(query, key, value, p.w_q, p.w_k, p.w_v, p.w_o, p.b_q, p.b_k,
                                                         p.b_v, p.b_o, options.bias, num_heads, options);
  if (query.is_same(key) && query.is_same(value)) {
    // The gradient of the one input arrives whole as the query's. Compiled autograd would add the absent ones to it.
    for (const auto absent : {kKey, kValue}) results[0].grad_fn()->set_next_edge(absent, torch::autograd::Edge());
  }
  return {results[0], options.need_weights ? results[1] : at::empty({0}, query.options())};
}

// Called by itself with gradients wanted, the forward that returns its intermediate results is the composite one.
std::tuple<Tensor, LayerSaved> multi_head_attention_forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                                            const Projections& p, int64_t num_heads,
                                                            const AttentionOptions& options) {
  const LayerInputs inputs = inputs_of(query, key, value, p, options.bias);
  if (composite_is_needed(inputs) || any_requires_grad(inputs)) {
    return composite::multi_head_attention_forward(query, key, value, p, num_heads, options);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return mha_ext::multi_head_attention_forward(query, key, value, p, num_heads, options);
}

LayerGrads multi_head_attention_backward(const Tensor& grad_output, const OptionalTensor& grad_weights,
                                         const Tensor& query, const Tensor& key, const Tensor& value,
                                         const Projections& p, const LayerSaved& saved, int64_t num_heads,
                                         const AttentionOptions& options, bool self_attention,
                                         const LayerGradMask& wanted) {
  const LayerInputs inputs = inputs_of(query, key, value, p, options.bias);
  if (composite_is_needed(inputs) || any_requires_grad(inputs) || any_requires_grad({grad_output, grad_weights}) ||
      any_tangent({grad_output, grad_weights})) {
    return composite::multi_head_attention_backward(grad_output, grad_weights, query, key, value, p, saved, num_heads,
                                                    options, self_attention, wanted);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return mha_ext::multi_head_attention_backward(grad_output, grad_weights, query, key, value, p, saved, num_heads,
                                                options, self_attention, wanted);
}

void implement(torch::Library& m) {
  m.impl("multi_head_attention", TORCH_FN(FlatLayer<&multi_head_attention>::call));
  m.impl("multi_head_attention_forward", TORCH_FN(FlatLayerForward<&multi_head_attention_forward>::call));
  m.impl("multi_head_attention_backward", TORCH_FN(FlatLayerBackward<&multi_head_attention_backward>::call));
}

}  // namespace
}  // namespace mha_ext::autograd

TORCH_LIBRARY_IMPL(mha_ext, AutogradCPU, m) { mha_ext::autograd::implement(m); }
TORCH_LIBRARY_IMPL(mha_ext, AutogradMeta, m) { mha_ext::autograd::implement(m); }
