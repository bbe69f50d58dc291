#include "mha_ext_nn.h"

#include <ostream>

namespace mha_ext::nn {

MultiHeadAttentionImpl::MultiHeadAttentionImpl(const MultiHeadAttentionOptions& options) : options(options) {
  MultiHeadAttentionImpl::reset();
}

void MultiHeadAttentionImpl::reset() {
  const int64_t d_model = options.d_model(), num_heads = options.num_heads();
  const double dropout = options.dropout();
  TORCH_CHECK_VALUE(num_heads >= 1, "MultiHeadAttention: expected num_heads >= 1, got ", num_heads);
  TORCH_CHECK_VALUE(d_model >= 1 && d_model % num_heads == 0,
                    "MultiHeadAttention: expected d_model >= 1, a multiple of num_heads, got ", d_model, " and ",
                    num_heads);
  TORCH_CHECK_VALUE(dropout >= 0 && dropout <= 1, "MultiHeadAttention: expected dropout between 0 and 1, got ",
                    dropout);
  const auto linear = [&](const char* name) {
    return register_module(name, torch::nn::Linear(torch::nn::LinearOptions(d_model, d_model).bias(options.bias())));
  };
  W_q = linear("W_q");
  W_k = linear("W_k");
  W_v = linear("W_v");
  W_o = linear("W_o");
}

void MultiHeadAttentionImpl::pretty_print(std::ostream& stream) const {
  stream << "mha_ext::nn::MultiHeadAttention(d_model=" << options.d_model() << ", num_heads=" << options.num_heads()
         << ", dropout=" << options.dropout() << ")";
}

std::tuple<at::Tensor, at::Tensor> MultiHeadAttentionImpl::forward(const at::Tensor& query, const at::Tensor& key,
                                                                   const at::Tensor& value, const at::Tensor& mask,
                                                                   bool is_causal, bool need_weights,
                                                                   const at::Tensor& key_lengths,
                                                                   const at::Tensor& bias, bool causal_bottom_right) {
  const auto given = [](const at::Tensor& tensor) {
    return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt;
  };
  AttentionOptions attention;
  if (mask.defined()) {
    const bool as_it_is = mask.scalar_type() == at::kBool || mask.layout() != at::kStrided;  // the latter is refused
    attention.mask = as_it_is ? mask : mask.ne(0);
  }
  attention.bias = given(bias);
  attention.is_causal = is_causal;
  attention.dropout_p = is_training() ? options.dropout() : 0.0;
  attention.need_weights = need_weights;
  attention.key_lengths = given(key_lengths);
  attention.causal_bottom_right = causal_bottom_right;
  attention.uniform_dead_rows = true;
  const Projections projections = {
      W_q->weight,      W_k->weight,      W_v->weight,      W_o->weight,
      given(W_q->bias), given(W_k->bias), given(W_v->bias), given(W_o->bias),
  };
  const auto [output, weights] = multi_head_attention(query, key, value, projections, options.num_heads(), attention);
  return {output, need_weights ? weights : at::Tensor()};
}

}  // namespace mha_ext::nn
