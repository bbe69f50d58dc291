"""The operators of torch.ops.mha_ext with types and documentation; nothing is computed or changed on the way.

Shapes: B batch, H query heads, Hkv key/value heads (H a multiple of Hkv), Lq and Lk lengths, D head size, Dv head size
of the values, E features. Dtypes: float32, float64, bfloat16 or float16, the same for every tensor but `bias`, which
may be any of them. Wrong input raises ValueError or TypeError before anything is read.

Options that all operators share:
    mask                bool, broadcasts to (B, H, Lq, Lk); True = may attend
    bias                floating, broadcasts to (B, H, Lq, Lk); added to the scaled scores, -inf hides
    is_causal           query i sees keys j <= i
    causal_bottom_right with is_causal: query i sees keys j <= i + Lk - Lq
    key_lengths         int32 or int64 (B,): keys j >= key_lengths[b] are hidden; 0 to Lk (not checked inside vmap, grad
                        and other transforms: less hides every key, more hides none)
    dropout_p, seed     probability of dropping a weight, and an int64 scalar that decides which; drawn when absent
    scale               factor of the scores, 1 / sqrt(D) when absent
    uniform_dead_rows   a query that sees no key takes the mean of all values instead of 0
    average_weights     the weights returned are the mean over the heads, (B, Lq, Lk); none are stored for each head
    weights_before_dropout  the weights returned are those before dropout
    softcap             c, 1e-30 to 1e30: scores become c tanh(scale Q K^T / c), before the bias (Gemma Team 2024)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ops = torch.ops.mha_ext


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    need_weights: bool = False,
    key_lengths: Tensor | None = None,
    causal_bottom_right: bool = False,
    uniform_dead_rows: bool = False,
    seed: Tensor | None = None,
    average_weights: bool = False,
    weights_before_dropout: bool = False,
    softcap: float | None = None,
    need_logsumexp: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """softmax(scale Q K^T + bias) V of query (B, H, Lq, D), key (B, Hkv, Lk, D) and value (B, Hkv, Lk, Dv).

    Returns output (B, H, Lq, Dv), stored as (B, Lq, H, Dv); weights (B, H, Lq, Lk) as they multiplied the values, or an
    empty tensor unless need_weights; logsumexp (B, H, Lq) in float32 (float64 for float64), -inf where no key is seen,
    or an empty tensor with need_logsumexp=False. Gradients flow through all three.

    On devices other than the CPU, PyTorch's fused kernels can serve a call that asks for the output alone.
    """
    return _ops.attention.default(
        query,
        key,
        value,
        mask=mask,
        bias=bias,
        is_causal=is_causal,
        dropout_p=dropout_p,
        scale=scale,
        need_weights=need_weights,
        key_lengths=key_lengths,
        causal_bottom_right=causal_bottom_right,
        uniform_dead_rows=uniform_dead_rows,
        seed=seed,
        average_weights=average_weights,
        weights_before_dropout=weights_before_dropout,
        softcap=softcap,
        need_logsumexp=need_logsumexp,
    )


def attention_backward(
    grad_output: Tensor,
    grad_weights: Tensor | None,
    grad_logsumexp: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    weights: Tensor,
    logsumexp: Tensor,
    *,
    need_bias_grad: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `attention` (query, key, value, bias) from its results and the gradients that arrive for them.

    `options` are those of the forward without need_weights and need_logsumexp, with its seed if there was dropout. The
    gradient of the bias is an empty tensor unless need_bias_grad.
    """
    return _ops.attention_backward.default(
        grad_output,
        grad_weights,
        grad_logsumexp,
        query,
        key,
        value,
        output,
        weights,
        logsumexp,
        need_bias_grad=need_bias_grad,
        **options,
    )


def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    w_q: Tensor,
    w_k: Tensor,
    w_v: Tensor,
    w_o: Tensor,
    b_q: Tensor | None,
    b_k: Tensor | None,
    b_v: Tensor | None,
    b_o: Tensor | None,
    num_heads: int,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    need_weights: bool = True,
    key_lengths: Tensor | None = None,
    causal_bottom_right: bool = False,
    uniform_dead_rows: bool = False,
    seed: Tensor | None = None,
    average_weights: bool = False,
    weights_before_dropout: bool = False,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """A whole layer on query (B, Lq, E) and key and value (B, Lk, E): projections, `attention`, output projection.

    The projections are as nn.Linear stores them: w_q (H * D, E), w_k (Hkv * D, E), w_v (Hkv * Dv, E), w_o (out, H * Dv)
    and biases (rows,). Returns output (B, Lq, out) and weights (B, H, Lq, Lk), empty unless need_weights.
    """
    return _ops.multi_head_attention.default(
        query,
        key,
        value,
        w_q,
        w_k,
        w_v,
        w_o,
        b_q,
        b_k,
        b_v,
        b_o,
        num_heads,
        mask=mask,
        bias=bias,
        is_causal=is_causal,
        dropout_p=dropout_p,
        scale=scale,
        need_weights=need_weights,
        key_lengths=key_lengths,
        causal_bottom_right=causal_bottom_right,
        uniform_dead_rows=uniform_dead_rows,
        seed=seed,
        average_weights=average_weights,
        weights_before_dropout=weights_before_dropout,
        softcap=softcap,
    )


def multi_head_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    w_q: Tensor,
    w_k: Tensor,
    w_v: Tensor,
    w_o: Tensor,
    b_q: Tensor | None,
    b_k: Tensor | None,
    b_v: Tensor | None,
    b_o: Tensor | None,
    num_heads: int,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`multi_head_attention` with what its backward needs: output, weights, q, k, v, context, logsumexp.

    q (B, Lq, H * D), k (B, Lk, Hkv * D), v (B, Lk, Hkv * Dv) are the projected inputs, context (B, Lq, H * Dv) the
    merged heads before w_o.
    """
    return _ops.multi_head_attention_forward.default(
        query, key, value, w_q, w_k, w_v, w_o, b_q, b_k, b_v, b_o, num_heads, **options
    )


def multi_head_attention_backward(
    grad_output: Tensor,
    grad_weights: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    w_q: Tensor,
    w_k: Tensor,
    w_v: Tensor,
    w_o: Tensor,
    b_q: Tensor | None,
    b_k: Tensor | None,
    b_v: Tensor | None,
    b_o: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: Tensor,
    weights: Tensor,
    logsumexp: Tensor,
    num_heads: int,
    *,
    output_mask: list[bool],
    self_attention: bool = False,
    **options: Any,
) -> tuple[Tensor, ...]:
    """Gradients of a layer from the results of `multi_head_attention_forward`.

    Twelve tensors: of query, key, value, w_q, w_k, w_v, w_o, b_q, b_k, b_v, b_o and bias; empty where output_mask (12
    bools) does not ask for them. With self_attention (query, key and value are one tensor) the first is its whole
    gradient.
    """
    return _ops.multi_head_attention_backward.default(
        grad_output,
        grad_weights,
        query,
        key,
        value,
        w_q,
        w_k,
        w_v,
        w_o,
        b_q,
        b_k,
        b_v,
        b_o,
        q,
        k,
        v,
        context,
        weights,
        logsumexp,
        num_heads,
        output_mask=output_mask,
        self_attention=self_attention,
        **options,
    )
