"""Masks in the one polarity that the operators know: bool, True = may attend."""

from __future__ import annotations

import torch
from torch import Tensor


def visible(mask: Tensor) -> Tensor:
    """The rule of the document's module, `mask == 0` hides, for a mask of any dtype and shape."""
    return mask if mask.dtype == torch.bool else mask != 0


def causal(q_len: int, kv_len: int, bottom_right: bool = False, device: torch.device | str | None = None) -> Tensor:
    """(Lq, Lk): query i sees keys j <= i, or j <= i + Lk - Lq with bottom_right. The option is_causal needs no mask."""
    offset = kv_len - q_len if bottom_right else 0
    return torch.ones(q_len, kv_len, dtype=torch.bool, device=device).tril(offset)


def padding(key_lengths: Tensor, kv_len: int) -> Tensor:
    """(B, 1, 1, Lk) of integer (B,): keys j < key_lengths[b] are seen. The option key_lengths needs no mask."""
    return (torch.arange(kv_len, device=key_lengths.device) < key_lengths[:, None])[:, None, None, :]


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
