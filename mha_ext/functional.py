"""Attention as functions: the rich form, and PyTorch's own signature."""

from __future__ import annotations

from typing import Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import CausalBias
from torch.overrides import handle_torch_function, has_torch_function

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
    average_weights: bool = ...,
    weights_before_dropout: bool = ...,
    softcap: float | None = ...,
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
    average_weights: bool = ...,
    weights_before_dropout: bool = ...,
    softcap: float | None = ...,
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
    average_weights: bool = False,
    weights_before_dropout: bool = False,
    softcap: float | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """softmax(scale Q K^T + bias) V of query (B, H, Lq, D), key (B, Hkv, Lk, D) and value (B, Hkv, Lk, Dv).

    H is a multiple of Hkv: query head h uses key head h // (H / Hkv). The options are those of `mha_ext.ops`.

    Returns output (B, H, Lq, Dv), followed by weights (B, H, Lq, Lk), or (B, Lq, Lk) with average_weights, if
    need_weights and logsumexp (B, H, Lq) if need_logsumexp: a tensor if neither is asked for, else a tuple. Gradients
    flow through all of them. A query that sees no key gets 0, weights 0 and logsumexp -inf. TorchScript, which knows no
    optional keyword-only arguments, compiles torch.ops.mha_ext.attention instead. Raises ValueError or TypeError for
    input that does not fit.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise TypeError(f"attention: expected {name} to be a tensor, got {type(x).__name__}")
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
        average_weights=average_weights,
        weights_before_dropout=weights_before_dropout,
        softcap=softcap,
        need_logsumexp=need_logsumexp,
    )
    if not (need_weights or need_logsumexp):
        return output
    return (output, *([weights] if need_weights else []), *([logsumexp] if need_logsumexp else []))


def _common_shape(a: list[int], b: list[int]) -> list[int]:
    """What two shapes of the same rank broadcast to."""
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
    if len(batch) == 1:
        return x
    return x.unsqueeze(0) if len(batch) == 0 else x.flatten(0, len(batch) - 1)


def _mask_as_batch(attn_mask: Tensor, batch: list[int]) -> Tensor:
    """attn_mask with its leading dimensions merged as those of query are; four and fewer broadcast as they are."""
    if len(batch) < 2 or attn_mask.dim() < 4:
        return attn_mask
    leading = list(_with_rank(attn_mask, len(batch) + 3).shape[:-3])
    for i in range(len(batch)):
        if leading[i] != batch[i] and leading[i] != 1:
            raise ValueError(
                f"scaled_dot_product_attention: expected attn_mask whose leading dimensions broadcast to {batch}, "
                f"got {leading}"
            )
    return _as_batch(attn_mask, batch, -1)


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    """(..., Hkv, L, D) with every head repeated until there are `heads`."""
    return x.repeat_interleave(heads // max(x.size(-3), 1), -3)


def _torch_function_of(cls: type) -> object:
    """What stands behind the class method __torch_function__ if it is written in Python, else None."""
    return getattr(getattr(cls, "__torch_function__", None), "__func__", None)


@torch.compiler.assume_constant_result  # the compiler would find no __func__
def _replaces_torch_function(cls: type) -> bool:
    return _torch_function_of(cls) not in (None, _torch_function_of(Tensor))


def has_own_meaning(x: object) -> bool:
    """Whether x is of a class that has another __torch_function__ than Tensor, and so its own idea of attention."""
    return _replaces_torch_function(type(x)) and not getattr(x, "is_nested", False)


def _ask_classes(tensors: tuple[Tensor | None, ...], *args, **options) -> Tensor:
    """What the classes of the tensors say that PyTorch's function means."""
    return handle_torch_function(F.scaled_dot_product_attention, tensors, *args, **options)


def _check_kinds(tensors: tuple[object, ...]) -> None:
    """Raises TypeError for what is no tensor, or one of another layout."""
    for name, x in zip(("query", "key", "value", "attn_mask"), tensors, strict=False):
        if not isinstance(x, Tensor):
            raise TypeError(f"scaled_dot_product_attention: expected {name} to be a tensor, got {type(x).__name__}")
        if x.layout is not torch.strided and not x.is_nested:
            raise TypeError(f"scaled_dot_product_attention: expected {name} of layout torch.strided, got {x.layout}")


def _check_ranks(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, enable_gqa: bool) -> None:
    least = 3 if enable_gqa else 2
    if query.dim() < least or key.dim() < least or value.dim() < least:
        raise ValueError(
            f"scaled_dot_product_attention: expected query, key and value of at least {least} dimensions, "
            f"got {query.dim()}, {key.dim()} and {value.dim()}"
        )
    rank = max(query.dim(), key.dim(), value.dim())
    if attn_mask is not None and attn_mask.dim() > rank:
        raise ValueError(
            f"scaled_dot_product_attention: expected attn_mask of at most {rank} dimensions, got {attn_mask.dim()}"
        )


def _dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    causal_bottom_right: bool,
) -> Tensor:
    """Attention of two or more dimensions: views of four for the engine, and its output with the leading ones back."""
    _check_ranks(query, key, value, attn_mask, enable_gqa)
    rank = max(query.dim(), key.dim(), value.dim())
    value_dim = value.size(-1)
    if query.size(-1) == 0 and key.size(-1) == 0:  # every score is 0
        query, key, scale = torch.constant_pad_nd(query, [0, 1]), torch.constant_pad_nd(key, [0, 1]), 1.0
    if value_dim == 0:
        value = torch.constant_pad_nd(value, [0, 1])

    q, k, v = _with_rank(query, max(rank, 3)), _with_rank(key, max(rank, 3)), _with_rank(value, max(rank, 3))
    batch = _common_shape(_common_shape(list(q.shape[:-3]), list(k.shape[:-3])), list(v.shape[:-3]))
    heads, kv_heads = q.size(-3), -1  # -1: as they are
    if not enable_gqa:
        kv_heads = _common_shape([k.size(-3)], [v.size(-3)])[0]  # if 1, the engine shares it
        heads = _common_shape([heads], [kv_heads])[0]
    elif k.size(-3) != v.size(-3):
        k, v = _repeat_heads(k, heads), _repeat_heads(v, heads)
    mask: Tensor | None = None
    bias: Tensor | None = None
    if attn_mask is not None:
        mask, bias = masks.split_attn_mask(_mask_as_batch(attn_mask, batch))
    output = torch.ops.mha_ext.attention(
        _as_batch(q, batch, heads),
        _as_batch(k, batch, kv_heads),
        _as_batch(v, batch, kv_heads),
        mask=mask,
        bias=bias,
        is_causal=is_causal,
        dropout_p=dropout_p,
        scale=scale,
        causal_bottom_right=causal_bottom_right,
        need_logsumexp=False,
    )[0]
    if value_dim == 0:
        output = output[..., :0]
    if rank == 4:
        return output
    return output.reshape((batch + [heads])[max(3 - rank, 0) :] + list(output.shape[-2:]))


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
    to the scores), broadcasts to (..., H, Lq, Lk); a torch.nn.attention.bias.CausalBias is is_causal from its corner.
    dropout_p applies always. Returns (..., H, Lq, Dv); 0 for a query that sees no key.

    Nested tensors go to PyTorch's function. A tensor class with a __torch_function__ of its own is asked what
    torch.nn.functional.scaled_dot_product_attention means.

    Raises ValueError for shapes that do not fit and for attn_mask together with is_causal, TypeError for dtypes and
    layouts.
    """
    if attn_mask is not None and is_causal:
        raise ValueError("scaled_dot_product_attention: expected either attn_mask or is_causal, got both")
    if not torch.jit.is_scripting():
        tensors: tuple[Tensor, ...] = (query, key, value)
        if attn_mask is not None and not isinstance(attn_mask, CausalBias):
            tensors = (*tensors, attn_mask)
        if has_torch_function(tensors) and any(map(has_own_meaning, tensors)):
            args = (query, key, value, attn_mask, dropout_p, is_causal)
            return _ask_classes(tensors, *args, scale=scale, enable_gqa=enable_gqa)
        _check_kinds(tensors)
    if query.is_nested or key.is_nested or value.is_nested:
        return torch._C._nn.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    causal_bottom_right = False
    if not torch.jit.is_scripting() and isinstance(attn_mask, CausalBias):
        causal_bottom_right = masks.is_bottom_right(attn_mask, query.size(-2), key.size(-2))
        attn_mask, is_causal = None, True
    return _dense_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, causal_bottom_right)
