"""Attention as functions: the rich form, and PyTorch's own signature."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from . import masks, ops


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = ...,
    bias: Tensor | None = ...,
    is_causal: bool = ...,
    dropout_p: float = ...,
    scale: float | None = ...,
    need_weights: Literal[False] = ...,
    need_logsumexp: Literal[False] = ...,
    key_lengths: Tensor | None = ...,
    causal_bottom_right: bool = ...,
    uniform_dead_rows: bool = ...,
    seed: Tensor | None = ...,
) -> Tensor: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = ...,
    bias: Tensor | None = ...,
    is_causal: bool = ...,
    dropout_p: float = ...,
    scale: float | None = ...,
    need_weights: bool = ...,
    need_logsumexp: bool = ...,
    key_lengths: Tensor | None = ...,
    causal_bottom_right: bool = ...,
    uniform_dead_rows: bool = ...,
    seed: Tensor | None = ...,
) -> Tensor | tuple[Tensor, ...]: ...


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
    need_logsumexp: bool = False,
    key_lengths: Tensor | None = None,
    causal_bottom_right: bool = False,
    uniform_dead_rows: bool = False,
    seed: Tensor | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """softmax(scale Q K^T + bias) V of query (B, H, Lq, D), key (B, Hkv, Lk, D) and value (B, Hkv, Lk, Dv).

    H is a multiple of Hkv: query head h uses key head h // (H / Hkv). The options are those of `mha_ext.ops`.

    Returns output (B, H, Lq, Dv), followed by weights (B, H, Lq, Lk) if need_weights and logsumexp (B, H, Lq) if
    need_logsumexp: a tensor if neither is asked for, else a tuple. Gradients flow through all of them. A query that
    sees no key gets 0, weights 0 and logsumexp -inf. Raises ValueError or TypeError for input that does not fit.
    """
    output, weights, logsumexp = ops.attention(
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
    )
    if not (need_weights or need_logsumexp):
        return output
    return (output, *([weights] if need_weights else []), *([logsumexp] if need_logsumexp else []))


def _broadcast(a: list[int], b: list[int]) -> list[int]:
    """The common shape of two of the same rank."""
    common: list[int] = []
    for i in range(len(a)):
        if a[i] != b[i] and a[i] != 1 and b[i] != 1:
            raise ValueError(
                "scaled_dot_product_attention: expected leading dimensions that broadcast (or enable_gqa=True), "
                f"got {a} and {b}"
            )
        common.append(b[i] if a[i] == 1 else a[i])
    return common


def _with_rank(x: Tensor, rank: int) -> Tensor:
    """x with dimensions of size 1 in front."""
    while x.dim() < rank:
        x = x.unsqueeze(0)
    return x


def _as_batch(x: Tensor, batch: list[int], heads: int) -> Tensor:
    """x of shape (..., H, L, D), its leading dimensions expanded to `batch` and merged: (B, H, L, D)."""
    x = _with_rank(x, len(batch) + 3).expand(batch + [heads, -1, -1])
    return x.unsqueeze(0) if len(batch) == 0 else x.flatten(0, len(batch) - 1)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """In place of torch.nn.functional.scaled_dot_product_attention, with its arguments and their meaning.

    query (..., H, Lq, D), key (..., Hkv, Lk, D) and value (..., Hkv, Lk, Dv) of two or more dimensions, whose leading
    ones broadcast; with enable_gqa H may be a multiple of Hkv. attn_mask, bool (True = may attend) or floating (added
    to the scores), broadcasts to (..., H, Lq, Lk). dropout_p applies always. Returns (..., H, Lq, Dv); 0 for a query
    that sees no key.

    Raises ValueError for shapes that do not fit and for attn_mask together with is_causal, TypeError for dtypes.
    """
    if query.dim() < 2 or key.dim() < 2 or value.dim() < 2:
        raise ValueError(
            "scaled_dot_product_attention: expected query, key and value of at least 2 dimensions, "
            f"got {query.dim()}, {key.dim()} and {value.dim()}"
        )
    mask: Tensor | None = None
    bias: Tensor | None = None
    if attn_mask is not None:
        if is_causal:
            raise ValueError("scaled_dot_product_attention: expected either attn_mask or is_causal, got both")
        mask, bias = masks.split_attn_mask(attn_mask)

    rank = max(query.dim(), key.dim(), value.dim())
    q, k, v = _with_rank(query, max(rank, 3)), _with_rank(key, max(rank, 3)), _with_rank(value, max(rank, 3))
    batch = _broadcast(_broadcast(list(q.shape[:-3]), list(k.shape[:-3])), list(v.shape[:-3]))
    heads = [q.size(-3), k.size(-3), v.size(-3)]
    if not enable_gqa:
        common = _broadcast(_broadcast(heads[:1], heads[1:2]), heads[2:])
        heads = common * 3
    if len(batch) > 1:
        if mask is not None and mask.dim() > 3:
            mask = _as_batch(mask, batch, -1)
        if bias is not None and bias.dim() > 3:
            bias = _as_batch(bias, batch, -1)
    output = torch.ops.mha_ext.attention(
        _as_batch(q, batch, heads[0]),
        _as_batch(k, batch, heads[1]),
        _as_batch(v, batch, heads[2]),
        mask=mask,
        bias=bias,
        is_causal=is_causal,
        dropout_p=dropout_p,
        scale=scale,
    )[0]
    if rank == 4:
        return output
    return output.reshape((batch + [heads[0]])[max(3 - rank, 0) :] + list(output.shape[-2:]))
