// Public C++ interface of mha_ext: the layer as a torch::nn module, the same as mha_ext.MultiHeadAttention in Python.
#pragma once

#include "mha_ext.h"

#include <torch/nn/cloneable.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <iosfwd>
#include <tuple>

namespace mha_ext::nn {

struct MultiHeadAttentionOptions {
  MultiHeadAttentionOptions(int64_t d_model = 512, int64_t num_heads = 8) : d_model_(d_model), num_heads_(num_heads) {}

  TORCH_ARG(int64_t, d_model);       // features
  TORCH_ARG(int64_t, num_heads);     // divides d_model
  TORCH_ARG(bool, bias) = true;      // of the four projections
  TORCH_ARG(double, dropout) = 0.0;  // probability of dropping a weight while training
};

// W_o(softmax(Q K^T / sqrt(d_k)) V, heads side by side), Q = W_q(query) and so on, as one operator with one autograd
// node. Parameters, their names and order, initial values and the use of the random number generator are those of the
// Python class: torch::manual_seed with the same seed gives the same layer, and its state_dict loads.
class MultiHeadAttentionImpl : public torch::nn::Cloneable<MultiHeadAttentionImpl> {
 public:
  explicit MultiHeadAttentionImpl(int64_t d_model = 512, int64_t num_heads = 8)
      : MultiHeadAttentionImpl(MultiHeadAttentionOptions(d_model, num_heads)) {}
  explicit MultiHeadAttentionImpl(const MultiHeadAttentionOptions& options);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  // query (B, Lq, d_model), key and value (B, Lk, d_model) -> output (B, Lq, d_model), weights (B, H, Lq, Lk).
  //
  //   mask                 any dtype, broadcasts to (B, H, Lq, Lk); `mask == 0` hides
  //   is_causal            query i sees keys j <= i, or j <= i + Lk - Lq with causal_bottom_right
  //   need_weights         false: an undefined tensor in place of the weights, and no memory for them
  //   key_lengths          int32 or int64 (B,): keys j >= key_lengths[b] are hidden (padding)
  //   bias                 floating, broadcasts to (B, H, Lq, Lk); added to the scaled scores
  //
  // Undefined tensors are none. A query that sees no key takes the mean of all values. Throws c10::ValueError or
  // c10::TypeError for input that does not fit.
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                             const at::Tensor& mask = {}, bool is_causal = false,
                                             bool need_weights = true, const at::Tensor& key_lengths = {},
                                             const at::Tensor& bias = {}, bool causal_bottom_right = false);

  MultiHeadAttentionOptions options;
  torch::nn::Linear W_q{nullptr}, W_k{nullptr}, W_v{nullptr}, W_o{nullptr};

 protected:
  // Lets containers (torch::nn::Sequential, AnyModule) call forward with fewer arguments.
  FORWARD_HAS_DEFAULT_ARGS({3, torch::nn::AnyValue(at::Tensor())}, {4, torch::nn::AnyValue(false)},
                           {5, torch::nn::AnyValue(true)}, {6, torch::nn::AnyValue(at::Tensor())},
                           {7, torch::nn::AnyValue(at::Tensor())}, {8, torch::nn::AnyValue(false)})

  template <typename ModuleType, typename... ArgumentTypes>
  friend struct torch::nn::AnyModuleHolder;
};

TORCH_MODULE(MultiHeadAttention);

}  // namespace mha_ext::nn
