"""Masks in the one polarity that the operators know: bool, True = may attend."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias, CausalVariant


def visible(mask: Tensor) -> Tensor:
    """The rule of the document's module, `mask == 0` hides, for a mask of any dtype and shape."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"visible: expected mask to be a tensor, got {type(mask).__name__}")
    return mask if mask.dtype == torch.bool else mask != 0


def causal(q_len: int, kv_len: int, bottom_right: bool = False, device: torch.device | None = None) -> Tensor:
    """(Lq, Lk): query i sees keys j <= i, or j <= i + Lk - Lq with bottom_right. The option is_causal needs no mask."""
    last = torch.arange(q_len, device=device) + (kv_len - q_len if bottom_right else 0)
    return torch.arange(kv_len, device=device) <= last.unsqueeze(-1)


def padding(key_lengths: Tensor, kv_len: int) -> Tensor:
    """(B, 1, 1, Lk) of integer (B,): keys j < key_lengths[b] are seen. The option key_lengths needs no mask."""
    return torch.arange(kv_len, device=key_lengths.device) < key_lengths.view(-1, 1, 1, 1)


def split_attn_mask(attn_mask: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """(mask, bias) of PyTorch's attn_mask: bool hides where False, floating is added to the scores.

    Raises TypeError for any other dtype.
    """
    if attn_mask.dtype == torch.bool:
        return attn_mask, None
    if not attn_mask.is_floating_point():
        raise TypeError(
            f"scaled_dot_product_attention: expected attn_mask of dtype bool or floating, got {attn_mask.dtype}"
        )
    return None, attn_mask


def is_bottom_right(causal_bias: CausalBias, q_len: int, kv_len: int) -> bool:
    """Whether PyTorch's causal bias for Lq queries and Lk keys starts at the bottom-right corner, not at the top-left.

    Raises ValueError for one that was made for other lengths, unless its corner is the top-left, which has none.
    """
    if causal_bias.variant == CausalVariant.UPPER_LEFT:
        return False
    made_for = (causal_bias.seq_len_q, causal_bias.seq_len_kv)
    if made_for != (q_len, kv_len):
        raise ValueError(
            f"scaled_dot_product_attention: expected causal_lower_right(Lq, Lk) = {(q_len, kv_len)}, got {made_for}"
        )
    return True
