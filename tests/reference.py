"""The slow, obviously right attention: float64, one query row at a time, forward and backward by hand, no autograd.

A row takes out of K, V and the bias only the keys that it may see and computes with nothing else. Whatever hides behind
a mask (a NaN, say) takes no part by construction. Every function takes the arguments of the operator of the same name.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# --- Dropout bits -------------------------------------------------------------------------------------------------


def hash_bits(x: int) -> int:
    """A 32-bit integer hash (full avalanche), in plain integers."""
    x ^= x >> 16
    x = x * 0x7FEB352D & 0xFFFFFFFF
    x ^= x >> 15
    x = x * 0x846CA68B & 0xFFFFFFFF
    return x ^ x >> 16


def dropout_threshold(dropout_p: float) -> int:
    """Keep where the upper 31 bits of a draw are at least this; dropout_p = 1 is not expressed by it."""
    return min(round(dropout_p * 2**31), 2**31 - 1)


def keep_one(seed: int, batch: int, head: int, query: int, key: int, dropout_p: float) -> bool:
    """Whether dropout keeps the weight of one (query, key) pair: a function of these numbers and of nothing else."""
    if dropout_p == 1.0:
        return False
    low, high = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    first = hash_bits(low ^ hash_bits(batch ^ hash_bits(head ^ hash_bits(query + 0x9E3779B9 & 0xFFFFFFFF))))
    inner = hash_bits(head ^ hash_bits(query + 0xC2B2AE35 & 0xFFFFFFFF))
    second = hash_bits(high ^ hash_bits((batch + 0x85EBCA6B & 0xFFFFFFFF) ^ inner))
    x = key * 0x9E3779B9 + first & 0xFFFFFFFF
    x ^= x >> 16
    x = x * 0x7FEB352D & 0xFFFFFFFF
    x ^= second
    x ^= x >> 15
    x = x * 0x846CA68B & 0xFFFFFFFF
    x ^= x >> 16
    return x >> 1 >= dropout_threshold(dropout_p)


def keep_mask(seed: int, shape: tuple[int, int, int, int], dropout_p: float) -> np.ndarray:
    """`keep_one` of every element of (B, H, Lq, Lk), in NumPy's wrapping uint32."""
    if dropout_p == 1.0:
        return np.zeros(shape, dtype=bool)

    def hashed(x: np.ndarray) -> np.ndarray:
        x = (x ^ x >> np.uint32(16)) * np.uint32(0x7FEB352D)
        x = (x ^ x >> np.uint32(15)) * np.uint32(0x846CA68B)
        return x ^ x >> np.uint32(16)

    batch, head, query, key = np.ogrid[tuple(slice(n) for n in shape)]
    batch, head, query, key = (index.astype(np.uint32) for index in (batch, head, query, key))
    low, high = np.uint32(seed & 0xFFFFFFFF), np.uint32(seed >> 32 & 0xFFFFFFFF)
    first = hashed(low ^ hashed(batch ^ hashed(head ^ hashed(query + np.uint32(0x9E3779B9)))))
    second = hashed(
        high ^ hashed((batch + np.uint32(0x85EBCA6B)) ^ hashed(head ^ hashed(query + np.uint32(0xC2B2AE35))))
    )
    x = key * np.uint32(0x9E3779B9) + first
    x = (x ^ x >> np.uint32(16)) * np.uint32(0x7FEB352D) ^ second
    x = (x ^ x >> np.uint32(15)) * np.uint32(0x846CA68B)
    x = x ^ x >> np.uint32(16)
    return x >> np.uint32(1) >= np.uint32(dropout_threshold(dropout_p))


# --- The attention core -------------------------------------------------------------------------------------------


def double(tensor: Tensor) -> np.ndarray:
    return tensor.detach().to(torch.float64).numpy()


def visible(
    shape: tuple[int, int, int, int],
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    is_causal: bool = False,
    key_lengths: Tensor | None = None,
    causal_bottom_right: bool = False,
) -> np.ndarray:
    """Which keys each query may see: bool (B, H, Lq, Lk)."""
    batch, _, q_len, kv_len = shape
    seen = np.ones(shape, dtype=bool)
    if mask is not None:
        seen &= np.broadcast_to(mask.numpy(), shape)
    if bias is not None:
        seen &= np.broadcast_to(double(bias), shape) != -np.inf
    if is_causal:
        offset = kv_len - q_len if causal_bottom_right else 0
        seen &= np.arange(kv_len)[None, :] <= np.arange(q_len)[:, None] + offset
    if key_lengths is not None:
        seen &= np.arange(kv_len) < key_lengths.numpy().reshape(batch, 1, 1, 1)
    return seen


# The dtype in which an implementation is to accumulate.
ACCUMULATE = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}


def storing_error(dtype: torch.dtype) -> float:
    """What rounding a number to dtype costs, in units of 4 eps of the dtype that accumulates."""
    return torch.finfo(dtype).eps / 2 / (4 * torch.finfo(ACCUMULATE[dtype]).eps)


@dataclass
class Attended:
    """What attention returns: output (B, H, Lq, Dv), weights (B, H, Lq, Lk), logsumexp (B, H, Lq)."""

    output: Tensor
    weights: Tensor
    logsumexp: Tensor


@dataclass
class Gradients:
    """Gradients, each in the shape of what it belongs to; bias is None where there is none."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None


class Problem:
    """The arguments of attention in float64, and its softmax row by row."""

    def __init__(
        self,
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
    ) -> None:
        del need_weights  # the reference returns them always
        self.average_weights, self.weights_before_dropout = average_weights, weights_before_dropout
        self.softcap = softcap
        self.query, self.key, self.value = double(query), double(key), double(value)
        batch, heads, q_len, head_dim = query.shape
        self.kv_len = key.shape[2]
        self.shape = (batch, heads, q_len, self.kv_len)
        self.group = heads // max(key.shape[1], 1)
        self.scale = head_dim**-0.5 if scale is None else scale
        self.bias = np.broadcast_to(0.0 if bias is None else double(bias), self.shape)
        self.seen = visible(self.shape, mask, bias, is_causal, key_lengths, causal_bottom_right)
        self.uniform_dead_rows = uniform_dead_rows
        self.multiplier = np.ones(self.shape)  # what dropout multiplies each weight with
        if dropout_p > 0:
            kept = keep_mask(int(seed), self.shape, dropout_p)
            self.multiplier = np.where(kept, 1 / (1 - dropout_p) if dropout_p < 1 else 0.0, 0.0)

    def rows(self):
        """Yields (batch, head, row, kv head) for every query row."""
        for b, h, i in np.ndindex(self.shape[:3]):
            yield b, h, i, h // self.group

    def softmax(self, b: int, h: int, i: int) -> tuple[np.ndarray, np.ndarray, float]:
        """The keys that take part in a row, their probabilities before dropout, and the row's log-sum-exp."""
        keys = np.flatnonzero(self.seen[b, h, i])
        if keys.size == 0:  # a dead row
            keys = np.arange(self.kv_len if self.uniform_dead_rows else 0)
            return keys, np.full(keys.size, 1 / max(self.kv_len, 1)), -np.inf
        scores = self.scale * (self.key[b, h // self.group, keys] @ self.query[b, h, i])
        if self.softcap is not None:
            scores = self.softcap * np.tanh(scores / self.softcap)
        scores = scores + self.bias[b, h, i, keys]
        top = scores.max()
        exponentials = np.exp(scores - top)
        total = exponentials.sum()
        return keys, exponentials / total, top + np.log(total)

    def slope(self, b: int, h: int, i: int, keys: np.ndarray) -> np.ndarray:
        """The derivative of the capped scores of a row by the scores: 1 without softcap."""
        if self.softcap is None:
            return np.ones(keys.size)
        scores = self.scale * (self.key[b, h // self.group, keys] @ self.query[b, h, i])
        return 1 - np.tanh(scores / self.softcap) ** 2


def attention(query: Tensor, key: Tensor, value: Tensor, **options) -> Attended:
    """softmax(scale Q K^T + bias) V in float64."""
    p = Problem(query, key, value, **options)
    output = np.zeros((*p.shape[:3], value.shape[3]))
    weights = np.zeros(p.shape)
    logsumexp = np.zeros(p.shape[:3])
    for b, h, i, g in p.rows():
        keys, probabilities, logsumexp[b, h, i] = p.softmax(b, h, i)
        used = probabilities * p.multiplier[b, h, i, keys]
        weights[b, h, i, keys] = probabilities if p.weights_before_dropout else used
        output[b, h, i] = used @ p.value[b, g, keys]
    if p.average_weights:
        weights = weights.sum(1) / max(p.shape[1], 1)
    return Attended(*(torch.from_numpy(x) for x in (output, weights, logsumexp)))


def attention_backward(
    grad_output: Tensor,
    grad_weights: Tensor | None,
    grad_logsumexp: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    magnitude: torch.dtype | None = None,
    **options,
) -> Gradients:
    """Gradients of attention in float64.

    With `magnitude`, every term of every sum enters by its absolute value: the size of what may cancel, to which the
    rounding errors are proportional of any implementation that stores its output in that dtype.
    """
    p = Problem(query, key, value, **options)
    signless = np.abs if magnitude else np.asarray
    q, k, v, d_output = (signless(double(x)) for x in (query, key, value, grad_output))
    d_weights = np.zeros(p.shape) if grad_weights is None else signless(double(grad_weights))
    if p.average_weights and grad_weights is not None:
        d_weights = np.broadcast_to(d_weights[:, None] / max(p.shape[1], 1), p.shape)
    d_logsumexp = np.zeros(p.shape[:3]) if grad_logsumexp is None else signless(double(grad_logsumexp))
    d_query, d_key, d_value, d_scores = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape), np.zeros(p.shape)

    for b, h, i, g in p.rows():
        keys, probabilities, logsumexp = p.softmax(b, h, i)
        multiplier = p.multiplier[b, h, i, keys]
        # output = sum_j used_j V_j
        d_value[b, g, keys] += np.outer(probabilities * multiplier, d_output[b, h, i])
        if logsumexp == -np.inf:
            continue  # a dead row's weights are constants
        d_used = v[b, g, keys] @ d_output[b, h, i]
        # used = probabilities * multiplier; the weights are either
        d_probabilities = d_used * multiplier
        d_probabilities += d_weights[b, h, i, keys] * (1 if p.weights_before_dropout else multiplier)
        # probabilities = softmax(scores): d_scores_j = p_j (d_p_j - sum_k p_k d_p_k); d logsumexp / d scores_j = p_j
        mean = -probabilities @ d_probabilities
        if magnitude:  # the same sum is taken from the stored output, as d_output . output
            output = (probabilities * multiplier) @ p.value[b, g, keys]
            mean = -mean + storing_error(magnitude) * (d_output[b, h, i] @ np.abs(output))
        d_row = probabilities * (d_probabilities + mean + d_logsumexp[b, h, i])
        d_scores[b, h, i, keys] = d_row
        # scores_j = softcap tanh(scale q . k_j / softcap) + bias_j
        d_row = d_row * p.slope(b, h, i, keys)
        d_query[b, h, i] = p.scale * (d_row @ k[b, g, keys])
        d_key[b, g, keys] += p.scale * np.outer(d_row, q[b, h, i])

    bias = options.get("bias")
    d_bias = None if bias is None else torch.from_numpy(d_scores).sum_to_size(bias.shape)
    return Gradients(*(torch.from_numpy(x) for x in (d_query, d_key, d_value)), d_bias)


# --- A whole layer ------------------------------------------------------------------------------------------------

LAYER_GRADIENTS = ("query", "key", "value", "w_q", "w_k", "w_v", "w_o", "b_q", "b_k", "b_v", "b_o", "bias")


@dataclass
class Layer:
    """What a layer computes on its way: heads (B, H, L, D), context (B, Lq, H Dv), output (B, Lq, E), weights."""

    q: Tensor
    k: Tensor
    v: Tensor
    context: Tensor
    weights: Tensor
    output: Tensor


def project(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = x.double() @ weight.double().T
    return y if bias is None else y + bias.double()


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, L, H D) -> (B, H, L, D)"""
    batch, length, width = x.shape
    return x.reshape(batch, length, heads, width // heads).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """(B, H, L, D) -> (B, L, H D)"""
    batch, heads, length, head_dim = x.shape
    return x.transpose(1, 2).reshape(batch, length, heads * head_dim)


@torch.no_grad()
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
    **options,
) -> Layer:
    """Projections, attention over num_heads heads, output projection, in float64."""
    kv_heads = w_k.shape[0] // (w_q.shape[0] // num_heads)
    q = split_heads(project(query, w_q, b_q), num_heads)
    k = split_heads(project(key, w_k, b_k), kv_heads)
    v = split_heads(project(value, w_v, b_v), kv_heads)
    attended = attention(q, k, v, **options)
    context = merge_heads(attended.output)
    return Layer(q, k, v, context, attended.weights, project(context, w_o, b_o))


@torch.no_grad()
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
    num_heads: int,
    *,
    magnitude: torch.dtype | None = None,
    **options,
) -> dict[str, Tensor]:
    """Gradients of a layer by name (LAYER_GRADIENTS) in float64; each input has its own, even if all are one."""
    layer = multi_head_attention(query, key, value, w_q, w_k, w_v, w_o, b_q, b_k, b_v, b_o, num_heads, **options)
    signless = torch.abs if magnitude else torch.clone
    d_output = signless(grad_output.double())

    def linear_backward(name: str, x: Tensor, weight: Tensor, d_y: Tensor) -> Tensor:
        # y = x W^T + b
        x, weight = signless(x.double()).flatten(0, 1), signless(weight.double())
        gradients[f"w_{name}"] = d_y.flatten(0, 1).T @ x
        gradients[f"b_{name}"] = d_y.sum((0, 1))
        return d_y @ weight

    gradients: dict[str, Tensor] = {}
    d_context = linear_backward("o", layer.context, w_o, d_output)
    core = attention_backward(
        split_heads(d_context, num_heads),
        grad_weights,
        None,
        layer.q,
        layer.k,
        layer.v,
        magnitude=magnitude,
        **options,
    )
    gradients["query"] = linear_backward("q", query, w_q, merge_heads(core.query))
    gradients["key"] = linear_backward("k", key, w_k, merge_heads(core.key))
    gradients["value"] = linear_backward("v", value, w_v, merge_heads(core.value))
    if core.bias is not None:
        gradients["bias"] = core.bias
    return gradients
