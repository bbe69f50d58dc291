"""Attention of nested tensors: projected as they are, without padding, and padded for the scores alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from .. import masks
from ..head_mask import check_head_mask
from .functional import attend, cleared, hidden_keys, hides, pair_mask, projections, visible_and_added, with_extra_keys


def forward_nested(
    layer: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    need_weights: bool,
    attn_mask: Tensor | None,
    average_attn_weights: bool,
    is_causal: bool,
    weights_before_dropout: bool,
    head_mask: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """forward of a layer on nested query, key and value (N, L*, E)."""
    _check_kinds(layer, query, key, value, key_padding_mask)
    heads, lengths = layer.num_heads, _lengths(query)
    packed = layer.in_proj_weight
    w_q, w_k, w_v, b_q, b_k, b_v = projections(
        packed, layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight, layer.in_proj_bias, packed is None
    )
    _check_features((query, key, value), (w_q, w_k, w_v))
    if head_mask is not None:
        check_head_mask("MultiheadAttention", head_mask, query.size(0), heads, query.device)
    pairs: Tensor | None = None
    if packed is not None and key is query and value is key and attn_mask is None:
        q, k, v = _padded_heads(linear(query, packed, layer.in_proj_bias), 3 * heads).chunk(3, 1)
        padding = _padding(lengths, q.size(2))
    else:
        q = _padded_heads(linear(query, w_q, b_q), heads)
        padding = _padding(lengths, q.size(2))
        if attn_mask is not None or is_causal:  # some keys may be hidden from all queries
            key_in, value_in = (torch.nested.to_padded_tensor(x, 0.0) for x in (key, value))
            q_len, kv_len = q.size(2), key_in.size(1)
            pairs = pair_mask(attn_mask, q.size(0), heads, q_len, kv_len)
            unseen = padding[:, None, :, None] if pairs is None else padding[:, None, :, None] | hides(pairs)
            hidden = hidden_keys(None, unseen, is_causal, q_len, kv_len, q.device)
            key_in, value_in = cleared(key_in, hidden), cleared(value_in, hidden)
        else:
            key_in, value_in = key, value
        k = _padded_heads(linear(key_in, w_k, b_k), heads)
        v = _padded_heads(linear(value_in, w_v, b_v), heads)
    extra = int(layer.bias_k is not None) + int(layer.add_zero_attn)
    # Padded queries see nothing, which saves their rows; but extra keys every query sees.
    mask, bias = visible_and_added(padding[:, None, :, None] if extra == 0 else None, pairs)
    context, weights = attend(
        q,
        with_extra_keys(k, layer.bias_k, layer.add_zero_attn),
        with_extra_keys(v, layer.bias_v, layer.add_zero_attn),
        extra,
        mask,
        bias,
        _lengths(key),
        is_causal,
        layer.dropout if layer.training else 0.0,
        need_weights,
        average_attn_weights,
        weights_before_dropout,
        head_mask,
    )
    output = layer.out_proj(_nested_like(query, context[~padding], lengths))
    if not need_weights:
        return output, None
    if extra > 0:
        rows = padding if average_attn_weights else padding.unsqueeze(1)
        weights = weights.masked_fill(rows.unsqueeze(-1), 0.0)
    return output, weights


def _check_kinds(
    layer: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None
) -> None:
    if not (query.is_nested and key.is_nested and value.is_nested):
        raise ValueError("MultiheadAttention: expected query, key and value all nested or none, got a mix")
    if key_padding_mask is not None:
        raise ValueError("MultiheadAttention: expected no key_padding_mask with nested tensors, got one")
    if not layer.batch_first:
        raise ValueError("MultiheadAttention: expected batch_first=True with nested tensors, got False")
    if value is not key and not _lengths(key).equal(_lengths(value)):
        raise ValueError(
            "MultiheadAttention: expected key and value of the same lengths, "
            f"got {_lengths(key).tolist()} and {_lengths(value).tolist()}"
        )
    if query.size(0) != key.size(0):
        raise ValueError(
            f"MultiheadAttention: expected query and key of one batch size, got {query.size(0)} and {key.size(0)}"
        )


def _check_features(inputs: tuple[Tensor, Tensor, Tensor], weights: tuple[Tensor, Tensor, Tensor]) -> None:
    for name, x, weight in zip(("query", "key", "value"), inputs, weights, strict=True):
        if x.size(-1) != weight.size(1):
            raise ValueError(f"MultiheadAttention: expected {name} of {weight.size(1)} features, got {x.size(-1)}")
        if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
            raise TypeError(f"MultiheadAttention: expected {name} of dtype {weight.dtype}, got {x.dtype}")


def _lengths(nested: Tensor) -> Tensor:
    """(N,) of a nested (N, L*, E)"""
    if nested.layout == torch.jagged:
        return nested.offsets().diff()  # type: ignore[attr-defined]
    return nested._nested_tensor_size()[:, 0].to(nested.device)


def _padding(lengths: Tensor, length: int) -> Tensor:
    """(N, L): True beyond the lengths."""
    return masks.padding(lengths, length)[:, 0, 0].logical_not()


def _padded_heads(x: Tensor, heads: int) -> Tensor:
    """(N, H, L, D) of x (N, L, H D) or nested (N, L*, H D), then 0 beyond the lengths."""
    padded = torch.nested.to_padded_tensor(x, 0.0) if x.is_nested else x
    return padded.unflatten(-1, (heads, -1)).transpose(1, 2)


def _nested_like(nested: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
    """The rows of values, sequence after sequence, in the layout and with the lengths of nested."""
    if nested.layout == torch.jagged:
        return torch.nested.nested_tensor_from_jagged(values, nested.offsets())  # type: ignore[attr-defined]
    width = values.size(1)
    sizes = torch.stack([lengths, torch.full_like(lengths, width)], 1).cpu()
    strides = torch.tensor([[width, 1]]).expand_as(sizes).contiguous()
    offsets = (lengths.cumsum(0) - lengths).mul(width).cpu()
    return torch._nested_view_from_buffer(values.reshape(-1), sizes, strides, offsets)  # as_nested_tensor copies
