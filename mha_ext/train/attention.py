"""The attention modules that `--attention` chooses from.

All have the parameters, the initial values and the call of `mha_ext.MultiHeadAttention`, so that a model, its
state_dict and its checkpoints do not depend on the choice:

    forward(query, key, value, is_causal=False, need_weights=True, key_lengths=None) -> (output, weights)

query (B, Lq, E), key and value (B, Lk, E), key_lengths (B,) int64: keys at and beyond it are hidden;
output (B, Lq, E), weights (B, H, Lq, Lk) or None.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ATTENTION_NAMES = ("mha_ext", "reference", "sdpa", "torch")


def make_attention(name: str, d_model: int, num_heads: int) -> nn.Module:
    """The attention module called `name`, one of ATTENTION_NAMES."""
    if name == "mha_ext":
        import mha_ext

        return mha_ext.MultiHeadAttention(d_model, num_heads)
    modules = {"reference": ReferenceAttention, "sdpa": SdpaAttention, "torch": TorchAttention}
    return modules[name](d_model, num_heads)


def causal_mask(query: Tensor, key: Tensor) -> Tensor:
    """(Lq, Lk) bool, True where query i may see key j: j <= i."""
    return torch.ones(query.size(1), key.size(1), dtype=torch.bool, device=key.device).tril()


def padding_mask(key: Tensor, key_lengths: Tensor) -> Tensor:
    """(B, Lk) bool, True where the key is real and not padding."""
    return torch.arange(key.size(1), device=key.device) < key_lengths.unsqueeze(1)


def visible_keys(query: Tensor, key: Tensor, is_causal: bool, key_lengths: Tensor | None) -> Tensor | None:
    """Which keys each query may see, broadcastable to (B, H, Lq, Lk); None when every query sees them all."""
    visible: Tensor | None = None
    if is_causal:
        visible = causal_mask(query, key)
    if key_lengths is not None:
        real = padding_mask(key, key_lengths).unsqueeze(1).unsqueeze(1)
        visible = real if visible is None else visible & real
    return visible


class ProjectedAttention(nn.Module):
    """The four projections that every choice shares, created in the same order and so with the same values."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.d_model = d_model
        self.num_heads = num_heads
        self.d_k = d_model // num_heads
        self.W_q = nn.Linear(d_model, d_model)
        self.W_k = nn.Linear(d_model, d_model)
        self.W_v = nn.Linear(d_model, d_model)
        self.W_o = nn.Linear(d_model, d_model)

    def split_heads(self, x: Tensor) -> Tensor:
        """(B, L, E) -> (B, H, L, d_k)"""
        return x.view(x.size(0), x.size(1), self.num_heads, self.d_k).transpose(1, 2)

    def merge_heads(self, x: Tensor) -> Tensor:
        """(B, H, L, d_k) -> (B, L, E)"""
        return x.transpose(1, 2).contiguous().view(x.size(0), x.size(2), self.d_model)


class ReferenceAttention(ProjectedAttention):
    """softmax(Q K^T / sqrt(d_k)) V in plain PyTorch, with every score and weight in memory."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_causal: bool = False,
        need_weights: bool = True,
        key_lengths: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        q = self.split_heads(self.W_q(query))
        k = self.split_heads(self.W_k(key))
        v = self.split_heads(self.W_v(value))
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.d_k)
        visible = visible_keys(query, key, is_causal, key_lengths)
        if visible is not None:
            scores = scores.masked_fill(visible.logical_not(), -1e9)
        weights = F.softmax(scores, dim=-1)
        output = self.W_o(self.merge_heads(torch.matmul(weights, v)))
        return output, weights if need_weights else None


class SdpaAttention(ProjectedAttention):
    """The same with F.scaled_dot_product_attention, which has no weights to return: they are always None."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_causal: bool = False,
        need_weights: bool = True,
        key_lengths: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        q = self.split_heads(self.W_q(query))
        k = self.split_heads(self.W_k(key))
        v = self.split_heads(self.W_v(value))
        if key_lengths is None:
            context = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        else:
            visible = visible_keys(query, key, is_causal, key_lengths)
            context = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return self.W_o(self.merge_heads(context)), None


class TorchAttention(ProjectedAttention):
    """What torch.nn.MultiheadAttention computes, its packed input projection put together from W_q, W_k and W_v."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_causal: bool = False,
        need_weights: bool = True,
        key_lengths: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        # In this function's masks True hides.
        attn_mask: Tensor | None = None
        if is_causal:
            attn_mask = causal_mask(query, key).logical_not()
        key_padding_mask: Tensor | None = None
        if key_lengths is not None:
            key_padding_mask = padding_mask(key, key_lengths).logical_not()

        # As torch.nn.MultiheadAttention with batch_first: one tensor stays one tensor, so that self-attention takes
        # the single packed product.
        if query is key and key is value:
            query = key = value = query.transpose(0, 1)
        elif key is value:
            query = query.transpose(0, 1)
            key = value = key.transpose(0, 1)
        else:
            query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        output, weights = F.multi_head_attention_forward(
            query,
            key,
            value,
            self.d_model,
            self.num_heads,
            in_proj_weight=torch.cat([self.W_q.weight, self.W_k.weight, self.W_v.weight]),
            in_proj_bias=torch.cat([self.W_q.bias, self.W_k.bias, self.W_v.bias]),
            bias_k=None,
            bias_v=None,
            add_zero_attn=False,
            dropout_p=0.0,
            out_proj_weight=self.W_o.weight,
            out_proj_bias=self.W_o.bias,
            training=self.training,
            key_padding_mask=key_padding_mask,
            need_weights=need_weights,
            attn_mask=attn_mask,
            average_attn_weights=False,
            is_causal=is_causal,
        )
        return output.transpose(0, 1), weights
