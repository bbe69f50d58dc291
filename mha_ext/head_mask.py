"""head_mask: a factor for each head, on what the head hands to W_o and on the weights that are returned."""

from __future__ import annotations

import torch
from torch import Tensor


def check_head_mask(op: str, head_mask: Tensor, batch: int, heads: int, device: torch.device) -> None:
    """Raises TypeError unless floating, ValueError unless (H,) or (B, H) and on the device of the inputs."""
    if not isinstance(head_mask, Tensor):
        raise TypeError(f"{op}: expected head_mask to be a tensor, got {type(head_mask).__name__}")
    if not head_mask.is_floating_point():
        raise TypeError(f"{op}: expected head_mask of a floating dtype, got {head_mask.dtype}")
    shape = list(head_mask.shape)
    if shape != [heads] and shape != [batch, heads]:
        raise ValueError(f"{op}: expected head_mask of shape {[heads]} or {[batch, heads]}, got {shape}")
    if head_mask.device != device:
        raise ValueError(f"{op}: expected head_mask on the device of query, {device}, got {head_mask.device}")


def masked_columns(w_o: Tensor, head_mask: Tensor) -> Tensor:
    """W_o (out, H Dv) that multiplies head h by head_mask (H,)[h]: W_o (m * heads) = (W_o * m) heads."""
    return (w_o.unflatten(1, [head_mask.size(0), -1]) * head_mask.to(w_o.dtype).unsqueeze(-1)).flatten(1)


def masked_heads(x: Tensor, head_mask: Tensor) -> Tensor:
    """x (B, H, L, D) times head_mask (H,) or (B, H), in the dtype of x."""
    return x * head_mask.to(x.dtype).unsqueeze(-1).unsqueeze(-1)


def masked_weights(weights: Tensor, head_mask: Tensor, average: bool) -> Tensor:
    """Weights (B, H, Lq, Lk) times head_mask (H,) or (B, H), or the mean of these over the heads."""
    masked = masked_heads(weights, head_mask)
    return masked.mean(1) if average else masked
