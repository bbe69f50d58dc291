"""Floating point operations of the operators, for torch.utils.flop_counter; registered by importing this module.

The convention is that of PyTorch's own formulas. Only products of matrices count, a multiplication and an addition as
two. A mask or is_causal saves nothing. The backward of the core counts five products as those of PyTorch's fused
attention do (sdpa_backward_flop_count), the scores computed anew among them; autograd through the unfused form keeps
the weights instead and counts four. A gradient that nobody asked for counts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

_ops = torch.ops.mha_ext
_Shape = Sequence[int]


def _score_sizes(query: _Shape, key: _Shape, value: _Shape) -> tuple[int, int, int]:
    """Scores B H Lq Lk, head size D and head size Dv of what `attention` takes."""
    batch, heads, q_len, head_dim = query
    return batch * heads * q_len * key[2], head_dim, value[3]


@register_flop_formula(_ops.attention)
def attention(query: _Shape, key: _Shape, value: _Shape, *_: Any, **__: Any) -> int:
    """Q K^T and P V: 2 B H Lq Lk (D + Dv)."""
    scores, head_dim, value_dim = _score_sizes(query, key, value)
    return 2 * scores * (head_dim + value_dim)


@register_flop_formula(_ops.attention_backward)
def attention_backward(
    grad_output: _Shape,
    grad_weights: _Shape | None,
    grad_logsumexp: _Shape | None,
    query: _Shape,
    key: _Shape,
    value: _Shape,
    *_: Any,
    **__: Any,
) -> int:
    """Q K^T again, dO V^T, P^T dO, dS K and dS^T Q: 2 B H Lq Lk (3 D + 2 Dv)."""
    scores, head_dim, value_dim = _score_sizes(query, key, value)
    return 2 * scores * (3 * head_dim + 2 * value_dim)


def _rows(x: _Shape) -> int:
    """B L of x (B, L, features)."""
    return x[0] * x[1]


def _product(rows: int, weight: _Shape) -> int:
    """x W^T of x (rows, in) and W (out, in); its two backward products cost the same."""
    return 2 * rows * weight[0] * weight[1]


def _heads(
    query: _Shape, key: _Shape, w_q: _Shape, w_k: _Shape, w_v: _Shape, num_heads: int
) -> tuple[_Shape, _Shape, _Shape]:
    """The shapes of projected query (B, H, Lq, D), key (B, Hkv, Lk, D) and value (B, Hkv, Lk, Dv)."""
    head_dim = w_q[0] // num_heads
    kv_heads = w_k[0] // head_dim
    (batch, q_len), kv_len = query[:2], key[1]
    return (
        (batch, num_heads, q_len, head_dim),
        (batch, kv_heads, kv_len, head_dim),
        (batch, kv_heads, kv_len, w_v[0] // kv_heads),
    )


@register_flop_formula([_ops.multi_head_attention, _ops.multi_head_attention_forward])
def multi_head_attention(
    query: _Shape,
    key: _Shape,
    value: _Shape,
    w_q: _Shape,
    w_k: _Shape,
    w_v: _Shape,
    w_o: _Shape,
    b_q: _Shape | None,
    b_k: _Shape | None,
    b_v: _Shape | None,
    b_o: _Shape | None,
    num_heads: int,
    **_: Any,
) -> int:
    """Four projections and the core."""
    inputs = ((query, w_q), (key, w_k), (value, w_v), (query, w_o))
    projections = sum(_product(_rows(x), weight) for x, weight in inputs)
    return projections + attention(*_heads(query, key, w_q, w_k, w_v, num_heads))


@register_flop_formula(_ops.multi_head_attention_backward)
def multi_head_attention_backward(
    grad_output: _Shape,
    grad_weights: _Shape | None,
    query: _Shape,
    key: _Shape,
    value: _Shape,
    w_q: _Shape,
    w_k: _Shape,
    w_v: _Shape,
    w_o: _Shape,
    b_q: _Shape | None,
    b_k: _Shape | None,
    b_v: _Shape | None,
    b_o: _Shape | None,
    q: _Shape,
    k: _Shape,
    v: _Shape,
    context: _Shape,
    weights: _Shape,
    logsumexp: _Shape,
    num_heads: int,
    *,
    output_mask: Sequence[bool],
    self_attention: bool = False,
    **_: Any,
) -> int:
    """The gradients in output_mask: two products for each projection, and the backward of the core."""
    wanted_inputs, wanted_weights, wanted_biases = output_mask[:3], output_mask[3:7], output_mask[7:]
    if self_attention:
        wanted_inputs = [output_mask[0]] * 3  # their sum
    sides = ((query, w_q), (key, w_k), (value, w_v))
    count = wanted_weights[3] * _product(_rows(query), w_o)
    for (x, weight), wanted_input, wanted_weight in zip(sides, wanted_inputs, wanted_weights, strict=False):
        count += (wanted_input + wanted_weight) * _product(_rows(x), weight)
    beyond_the_core = (*wanted_inputs, *wanted_weights[:3], *wanted_biases[:3], wanted_biases[4])
    if any(beyond_the_core):
        query_heads, key_heads, value_heads = _heads(query, key, w_q, w_k, w_v, num_heads)
        count += _product(_rows(query), w_o)  # the gradient of the merged heads
        count += attention_backward(context, None, None, query_heads, key_heads, value_heads)
    return count
