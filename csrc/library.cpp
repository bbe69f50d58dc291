// Every operator schema of mha_ext, and nothing else. Shapes and meanings: mha_ext.h.
#include <torch/library.h>

TORCH_LIBRARY(mha_ext, m) {
  // softmax(scale * Q K^T + bias) V with masks, dropout, returned weights and log-sum-exp.
  m.def(
      "attention(Tensor query, Tensor key, Tensor value, *, Tensor? mask=None, Tensor? bias=None, "
      "bool is_causal=False, float dropout_p=0.0, float? scale=None, bool need_weights=False, "
      "Tensor? key_lengths=None, bool causal_bottom_right=False, bool uniform_dead_rows=False, "
      "Tensor? seed=None, bool average_weights=False, bool weights_before_dropout=False, float? softcap=None, "
      "bool need_logsumexp=True) -> (Tensor output, Tensor weights, Tensor logsumexp)");

  // Gradients of `attention` from what its forward left; grad_bias is empty unless need_bias_grad.
  m.def(
      "attention_backward(Tensor grad_output, Tensor? grad_weights, Tensor? grad_logsumexp, "
      "Tensor query, Tensor key, Tensor value, Tensor output, Tensor weights, Tensor logsumexp, *, "
      "Tensor? mask=None, Tensor? bias=None, bool is_causal=False, float dropout_p=0.0, float? scale=None, "
      "Tensor? key_lengths=None, bool causal_bottom_right=False, bool uniform_dead_rows=False, "
      "Tensor? seed=None, bool average_weights=False, bool weights_before_dropout=False, float? softcap=None, bool "
      "need_bias_grad=False) "
      "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_bias)");

  // A whole layer: projections, attention over num_heads heads, output projection.
  m.def(
      "multi_head_attention(Tensor query, Tensor key, Tensor value, Tensor w_q, Tensor w_k, Tensor w_v, Tensor w_o, "
      "Tensor? b_q, Tensor? b_k, Tensor? b_v, Tensor? b_o, int num_heads, *, Tensor? mask=None, Tensor? bias=None, "
      "bool is_causal=False, float dropout_p=0.0, float? scale=None, bool need_weights=True, "
      "Tensor? key_lengths=None, bool causal_bottom_right=False, bool uniform_dead_rows=False, "
      "Tensor? seed=None, bool average_weights=False, bool weights_before_dropout=False, float? softcap=None) -> "
      "(Tensor output, Tensor weights)");

  // The same, returning also what the backward needs: projected q, k, v (B, L, H * D), merged heads and log-sum-exp.
  m.def(
      "multi_head_attention_forward(Tensor query, Tensor key, Tensor value, Tensor w_q, Tensor w_k, Tensor w_v, "
      "Tensor w_o, Tensor? b_q, Tensor? b_k, Tensor? b_v, Tensor? b_o, int num_heads, *, Tensor? mask=None, "
      "Tensor? bias=None, bool is_causal=False, float dropout_p=0.0, float? scale=None, bool need_weights=True, "
      "Tensor? key_lengths=None, bool causal_bottom_right=False, bool uniform_dead_rows=False, Tensor? seed=None, bool "
      "average_weights=False, bool weights_before_dropout=False, float? softcap=None) "
      "-> (Tensor output, Tensor weights, Tensor q, Tensor k, Tensor v, Tensor context, Tensor logsumexp)");

  // Gradients of a layer in the order of enum LayerGrad; those that output_mask does not ask for are empty. With
  // self_attention the gradient of the one input tensor is returned whole as grad_query.
  m.def(
      "multi_head_attention_backward(Tensor grad_output, Tensor? grad_weights, Tensor query, Tensor key, "
      "Tensor value, Tensor w_q, Tensor w_k, Tensor w_v, Tensor w_o, Tensor? b_q, Tensor? b_k, Tensor? b_v, "
      "Tensor? b_o, Tensor q, Tensor k, Tensor v, Tensor context, Tensor weights, Tensor logsumexp, int num_heads, *, "
      "Tensor? mask=None, Tensor? bias=None, bool is_causal=False, float dropout_p=0.0, float? scale=None, "
      "Tensor? key_lengths=None, bool causal_bottom_right=False, bool uniform_dead_rows=False, "
      "Tensor? seed=None, bool average_weights=False, bool weights_before_dropout=False, float? softcap=None, bool "
      "self_attention=False, bool[12] output_mask) "
      "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_w_q, Tensor grad_w_k, "
      "Tensor grad_w_v, Tensor grad_w_o, Tensor grad_b_q, Tensor grad_b_k, Tensor grad_b_v, Tensor grad_b_o, "
      "Tensor grad_bias)");
}
