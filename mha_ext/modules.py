"""Attention layers as torch.nn modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from . import masks
from .head_mask import check_head_mask, masked_columns, masked_heads
from .projections import modules_are_called_plainly, plain_parameters

_PROJECTIONS = ("W_q", "W_k", "W_v", "W_o")


def _split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, L, heads * D) -> (B, heads, L, D)"""
    return x.reshape(x.size(0), x.size(1), heads, x.size(-1) // heads).transpose(1, 2)


def _seen_keys(
    query: Tensor, key: Tensor, is_causal: bool, bottom_right: bool, key_lengths: Tensor | None
) -> Tensor | None:
    """What is_causal and key_lengths leave to be seen, broadcast to (B, 1, Lq, Lk); None: everything."""
    seen: Tensor | None = None
    if key_lengths is not None:
        seen = masks.padding(key_lengths, key.size(1))
    if is_causal:
        causal = masks.causal(query.size(1), key.size(1), bottom_right, query.device)
        seen = causal if seen is None else seen & causal
    return seen


def _broadcasts(x: Tensor | None, shape: list[int], device: torch.device) -> bool:
    """Whether an option is absent, or on `device` and of a size that broadcasts to `shape`."""
    if x is None:
        return True
    if x.dim() > len(shape) or x.device != device:
        return False
    for i in range(x.dim()):
        if x.size(-1 - i) != 1 and x.size(-1 - i) != shape[-1 - i]:
            return False
    return True


def _hidden_keys(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    heads: int,
    mask: Tensor | None,
    bias: Tensor | None,
    is_causal: bool,
    bottom_right: bool,
    key_lengths: Tensor | None,
) -> tuple[Tensor, Tensor] | None:
    """Keys and values that no query uses, two (B or 1, Lk, 1); None: all are used, or the operator will refuse.

    A NaN there would reach the gradients of projections that are called, as 0 NaN = NaN. A query that sees no key uses
    the values of all.
    """
    if mask is None and bias is None and key_lengths is None and not is_causal:
        return None
    batch, q_len, kv_len = query.size(0), query.size(1), key.size(1)
    if kv_len == 0 or key.size(0) != batch or value.size(0) != batch or value.size(1) != kv_len:
        return None
    shape = [batch, heads, q_len, kv_len]
    if not (_broadcasts(mask, shape, query.device) and _broadcasts(bias, shape, query.device)):
        return None
    seen = torch.ones([1, 1, 1, kv_len], dtype=torch.bool, device=query.device)
    if key_lengths is not None:
        if key_lengths.dim() != 1 or key_lengths.size(0) != batch or key_lengths.device != query.device:
            return None
        seen = masks.padding(key_lengths, kv_len)
    if mask is not None:
        seen = seen & mask
    if bias is not None:
        seen = seen & (bias != -float("inf"))
    by_first = by_last = seen  # what the first and the last query see; the others see no less, and no more
    if is_causal:
        if seen.size(2) == 1:  # no (Lq, Lk) that nobody asked for
            positions = torch.arange(kv_len, device=query.device)
            offset = kv_len - q_len if bottom_right else 0
            by_first, by_last = seen & (positions <= offset), seen & (positions < offset + q_len)
        else:
            by_first = by_last = seen & masks.causal(q_len, kv_len, bottom_right, query.device)
    unseen = by_last.flatten(1, 2).any(1).logical_not().unsqueeze(-1)
    dead = by_first.any(-1).logical_not().flatten(1).any(1)
    return unseen, unseen & dead.logical_not().view(-1, 1, 1)


def _added_mask(mask: Tensor, dtype: torch.dtype, seen: Tensor | None) -> Tensor:
    """mask * -1e9, less what the seen keys of a row have in common: that changes no softmax, but saves the scores of a
    row of nothing but -1e9 from being rounded away."""
    mask = mask.to(dtype)
    if mask.dim() == 0:
        mask = mask.unsqueeze(0)
    if mask.size(-1) > 0 and (seen is None or seen.size(-1) > 0):
        least = mask if seen is None else torch.where(seen, mask, float("inf"))
        least = least.amin(-1, keepdim=True)
        mask = mask - least.masked_fill(least.isinf(), 0.0)
    return mask * -1e9


def load_pruned_heads(layer: nn.Module, state_dict: dict[str, Any], prefix: str, errors: list[str]) -> bool:
    """Prunes the layer as the one was whose state_dict is loaded, which then has the entry pruned_heads.

    False, and a text more in `errors`, if that cannot be.
    """
    if prefix + "pruned_heads" not in state_dict:
        return True
    from .heads.pruning import prune_as_saved

    error = prune_as_saved(layer, state_dict, prefix)
    if error is not None:
        errors.append(error)
    return error is None


class MultiHeadAttention(nn.Module):
    """Multi-head attention: W_o(softmax(Q K^T / sqrt(d_k)) V, heads side by side), Q = W_q(query) and so on.

    Four nn.Linear(d_model, d_model), so the same state_dict, the same initial values and the same use of the random
    number generator as a module that creates them in this order. As long as they are plain nn.Linear, the layer is one
    operator with one autograd node. A projection that is anything else (another module, a subclass, one with hooks, a
    parametrisation or an adapter) is called as a module, and the operator does the rest: nothing is bypassed.

    Arguments: d_model features, num_heads (must divide d_model), bias for the projections, dropout probability of the
    weights while training, device and dtype of the parameters.
    """

    __constants__ = ["d_model", "num_heads", "d_k", "dropout", "plain", "adds_mask"]

    def __init__(
        self,
        d_model: int = 512,
        num_heads: int = 8,
        *,
        bias: bool = True,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_heads < 1:
            raise ValueError(f"MultiHeadAttention: expected num_heads >= 1, got {num_heads}")
        if d_model % num_heads != 0:
            raise AssertionError("d_model must be divisible by num_heads")
        if not 0.0 <= dropout <= 1.0:
            raise ValueError(f"MultiHeadAttention: expected dropout between 0 and 1, got {dropout}")
        self.d_model = d_model
        self.num_heads = num_heads
        self.d_k = d_model // num_heads
        self.dropout = float(dropout)
        self.W_q = nn.Linear(d_model, d_model, bias=bias, device=device, dtype=dtype)
        self.W_k = nn.Linear(d_model, d_model, bias=bias, device=device, dtype=dtype)
        self.W_v = nn.Linear(d_model, d_model, bias=bias, device=device, dtype=dtype)
        self.W_o = nn.Linear(d_model, d_model, bias=bias, device=device, dtype=dtype)
        self.plain = True  # which way a scripted module goes, decided when it is scripted
        self.adds_mask = False  # see from_numpy

    @classmethod
    def from_numpy(cls, W_q: Any, W_k: Any, W_v: Any, W_o: Any, num_heads: int) -> MultiHeadAttention:
        """The layer x @ W_q, x @ W_k, x @ W_v, ... @ W_o of the document's NumPy class: no biases.

        The matrices (d_model, d_model) are arrays or tensors of one floating dtype, are copied and keep their dtype.
        The mask of this layer is that class's too: `mask * -1e9` is added to the scores, so 1 hides and 0 shows; a row
        in which everything is hidden is the softmax of its scores, as it is there.
        """
        matrices = {"W_q": W_q, "W_k": W_k, "W_v": W_v, "W_o": W_o}
        tensors = {name: torch.as_tensor(matrix).detach() for name, matrix in matrices.items()}
        first = tensors["W_q"]
        if first.dim() != 2 or first.size(0) != first.size(1):
            raise ValueError(f"from_numpy: expected W_q of shape (d_model, d_model), got {tuple(first.shape)}")
        for name, tensor in tensors.items():
            if tensor.shape != first.shape:
                raise ValueError(
                    f"from_numpy: expected {name} of shape {tuple(first.shape)}, got {tuple(tensor.shape)}"
                )
            if not tensor.is_floating_point() or tensor.dtype != first.dtype:
                raise TypeError(
                    f"from_numpy: expected four matrices of one floating dtype, got {name} of {tensor.dtype}"
                )
        layer = cls(first.size(0), num_heads, bias=False, device="meta", dtype=first.dtype)
        for name, tensor in tensors.items():
            weight = tensor.t().clone(memory_format=torch.contiguous_format)
            getattr(layer, name).weight = nn.Parameter(weight)
        layer.adds_mask = True
        return layer

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        is_causal: bool = False,
        need_weights: bool = True,
        key_lengths: Tensor | None = None,
        bias: Tensor | None = None,
        causal_bottom_right: bool = False,
        head_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """query (B, Lq, d_model), key and value (B, Lk, d_model) -> output (B, Lq, d_model), weights (B, H, Lq, Lk).

        mask                any dtype, broadcasts to (B, H, Lq, Lk); `mask == 0` hides (but see from_numpy)
        is_causal           query i sees keys j <= i, or j <= i + Lk - Lq with causal_bottom_right
        need_weights        False: None in place of the weights, and no memory for them
        key_lengths         int32 or int64 (B,): keys j >= key_lengths[b] are hidden (padding)
        bias                floating, broadcasts to (B, H, Lq, Lk); added to the scaled scores
        head_mask           floating (H,) or (B, H), differentiable: multiplies what each head hands to W_o, and its
                            weights (Michel et al. 2019)

        A query that sees no key takes the mean of all values (weights 1 / Lk). The weights are those that multiplied
        the values, with dropout while training. Gradients flow through both results. Raises ValueError or TypeError for
        input that does not fit.
        """
        if mask is not None:
            if self.adds_mask:
                seen = _seen_keys(query, key, is_causal, causal_bottom_right, key_lengths)
                added = _added_mask(mask, torch.float64 if query.dtype == torch.float64 else torch.float32, seen)
                bias = added if bias is None else bias + added
                mask = None
            else:
                mask = masks.visible(mask)
        if head_mask is not None:
            batch = query.size(0) if query.dim() > 0 else 0
            check_head_mask("MultiHeadAttention", head_mask, batch, self.num_heads, query.device)
        dropout_p = self._dropout_p()
        weights: list[Tensor] = []  # of the projections; none: they are called as modules
        biases: list[Tensor | None] = []
        if torch.jit.is_scripting():
            if self.plain:  # a constant: what it excludes is not even compiled
                weights = [self.W_q.weight, self.W_k.weight, self.W_v.weight, self.W_o.weight]
                biases = [self.W_q.bias, self.W_k.bias, self.W_v.bias, self.W_o.bias]
        else:
            weights, biases = self._plain_parameters()
        if len(weights) > 0 and (head_mask is None or head_mask.dim() == 1):
            output, attended = torch.ops.mha_ext.multi_head_attention(
                query,
                key,
                value,
                weights[0],
                weights[1],
                weights[2],
                weights[3] if head_mask is None else masked_columns(weights[3], head_mask),
                biases[0],
                biases[1],
                biases[2],
                biases[3],
                self.num_heads,
                mask=mask,
                bias=bias,
                is_causal=is_causal,
                dropout_p=dropout_p,
                need_weights=need_weights,
                key_lengths=key_lengths,
                causal_bottom_right=causal_bottom_right,
                uniform_dead_rows=True,
            )
        else:
            hidden = _hidden_keys(
                query, key, value, self.num_heads, mask, bias, is_causal, causal_bottom_right, key_lengths
            )
            q = self.W_q(query)
            k = self.W_k(key if hidden is None else key.masked_fill(hidden[0], 0.0))
            v = self.W_v(value if hidden is None else value.masked_fill(hidden[1], 0.0))
            kv_heads = k.size(-1) * self.num_heads // q.size(-1)
            heads, attended, _ = torch.ops.mha_ext.attention(
                _split_heads(q, self.num_heads),
                _split_heads(k, kv_heads),
                _split_heads(v, kv_heads),
                mask=mask,
                bias=bias,
                is_causal=is_causal,
                dropout_p=dropout_p,
                need_weights=need_weights,
                key_lengths=key_lengths,
                causal_bottom_right=causal_bottom_right,
                uniform_dead_rows=True,
                need_logsumexp=False,
            )
            if head_mask is not None:
                heads = masked_heads(heads, head_mask)
            output = self.W_o(heads.transpose(1, 2).flatten(2))
        if head_mask is not None and need_weights:
            attended = masked_heads(attended, head_mask)
        return output, attended if need_weights else None

    def _dropout_p(self) -> float:
        """The share of the weights that this call drops."""
        return self.dropout if self.training else 0.0

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *options: Any) -> None:
        """Loses the heads that are missing in what is loaded: see `mha_ext.heads.prune_heads`."""
        if load_pruned_heads(self, state_dict, prefix, errors=options[-1]):
            super()._load_from_state_dict(state_dict, prefix, *options)

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}, num_heads={self.num_heads}, dropout={self.dropout}"

    def __prepare_scriptable__(self) -> MultiHeadAttention:
        self.plain = len(self._plain_parameters()[0]) > 0
        return self

    @torch.jit.unused
    def _plain_parameters(self) -> tuple[list[Tensor], list[Tensor | None]]:
        """The weights and biases of the four projections if all of them are plain nn.Linear, else empty lists."""
        weights: list[Tensor] = []
        biases: list[Tensor | None] = []
        if modules_are_called_plainly():
            for name in _PROJECTIONS:
                parameters = plain_parameters(self._modules[name])
                if parameters is None:
                    return [], []
                weights.append(parameters[0])
                biases.append(parameters[1])
        return weights, biases
