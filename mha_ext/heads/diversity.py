"""Losses that grow with how alike the heads of a layer are, to be added to what a model is trained on.

`redundancy` is about what heads tell, `positions` and `jensen_shannon` about where they look. `outputs` and `subspaces`
are about directions: with them, heads learn to point opposite ways, and o_h = -o_g tells nothing that o_g does not.

`positions`, `outputs` and `subspaces` are the disagreement terms of Li et al., "Multi-Head Attention with Disagreement
Regularization" (EMNLP 2018), turned round so that less is better. They differ from the paper in that

- only pairs of two heads count: the mean is over the H (H - 1) pairs g != h, where the paper divides the sum over all
  H^2 by H^2. What a head has in common with itself says nothing;
- cosines and products are taken row by row, and the mean is over the rows that count. The paper's `positions` is a sum
  over all queries, which grows with the length.

All results are scalars, float64 for float64, else float32, and have finite gradients everywhere, at weights of 0 and
vectors of 0 too. What counts is as in `metrics`; rows that do not count may hold anything, NaN too. With one head, or
where nothing counts, nothing is alike: 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import metrics
from .metrics import Mean

if TYPE_CHECKING:
    from .recording import Attended, Recording


def redundancy(outputs: Tensor, queries: Tensor | None = None) -> Tensor:
    """How much the heads tell the same: the linear CKA of their outputs, mean over pairs of heads, 0 to 1.

    As in `metrics.linear_cka`: over all tokens of the call at once, and whatever directions a head uses. A head whose
    outputs do not vary is like none. outputs (B, H, Lq, D) floating, what each head hands to W_o; queries bool (B, Lq):
    those that count, None: all.
    """
    metrics.check_outputs("redundancy", outputs, queries)
    cka = metrics.linear_cka(outputs, queries)
    return _over_pairs(Mean(cka.nan_to_num(0.0), cka.isfinite().double()), outputs.dtype)


def subspaces(values: Tensor, keys: Tensor | None = None) -> Tensor:
    """How much the heads' values point the same way: the mean of cos(v_g, v_h) over pairs of heads and keys, -1 to 1.

    values (B, H, Lk, D) floating; keys bool (B, Lk): those that count, None: all.
    """
    metrics.check_outputs("subspaces", values, keys)
    return _over_pairs(metrics.cosine_rows(metrics.output_rows(values, keys)), values.dtype)


def positions(weights: Tensor, queries: Tensor | None = None) -> Tensor:
    """How much the heads look at the same keys: the mean of sum_j A_g[i, j] A_h[i, j] over pairs of heads and queries.

    1 where all heads give all their weight to one key, 0 where no two share a key, 1 / n where all spread evenly over
    the same n keys. weights (B, H, Lq, Lk) floating; queries bool (B, Lq): those that count, None: all.
    """
    metrics.check_weights("positions", weights, queries)
    counts = metrics.counted(weights, queries)
    rows = weights.to(metrics.at_least_float32(weights.dtype)).masked_fill(~counts.unsqueeze(-1), 0.0)
    rows, together = rows.transpose(0, 1).flatten(1), counts.transpose(0, 1).flatten(1).double()
    with torch.autocast(weights.device.type, enabled=False):
        return _over_pairs(Mean((rows @ rows.mT).double(), together @ together.mT), weights.dtype)


def outputs(outputs: Tensor, queries: Tensor | None = None) -> Tensor:
    """How much the heads say the same: the mean of cos(o_g, o_h) over pairs of heads and queries, -1 to 1.

    outputs (B, H, Lq, D) floating, what each head hands to W_o; queries bool (B, Lq): those that count, None: all.
    """
    metrics.check_outputs("outputs", outputs, queries)
    return _over_pairs(metrics.cosine_rows(metrics.output_rows(outputs, queries)), outputs.dtype)


def jensen_shannon(weights: Tensor, queries: Tensor | None = None) -> Tensor:
    """How much the heads' weights overlap: the mean of ln 2 - JS(A_g, A_h) over pairs of heads and queries, in nats.

    ln 2 where all heads attend alike, 0 where no two share a key; JS as in `metrics.jensen_shannon`.
    weights (B, H, Lq, Lk) floating; queries bool (B, Lq): those that count, None: all.
    """
    metrics.check_weights("jensen_shannon", weights, queries)
    counts = metrics.counted(weights, queries)
    divergence = metrics.divergence_rows(weights, counts, metrics.row_entropy(weights, counts))
    return _over_pairs(Mean(math.log(2) * divergence.count - divergence.total, divergence.count), weights.dtype)


def diversity_loss(recording: Recording, kind: str = "redundancy") -> Tensor:
    """How alike the heads are: the mean over the layers of a recording, of each layer the mean over its calls.

        with record(model, keep_graph=True) as recording:
            loss = criterion(model(inputs), targets)
        (loss + 0.1 * diversity_loss(recording)).backward()

    kind    "redundancy", "outputs", "positions", "subspaces" or "js" (jensen_shannon): the function that is taken of
            each call; keys that no query attends to do not count

    Raises ValueError for another kind, and for a recording that is empty or was made without keep_graph.
    """
    if kind not in LOSSES:
        raise ValueError(f"diversity_loss: expected a kind of {', '.join(LOSSES)}, got {kind!r}")
    if not recording:
        raise ValueError("diversity_loss: expected a recording of at least one layer, got an empty one")
    for layer in recording.values():
        if not layer.calls or any(call.values is None for call in layer.calls):
            raise ValueError(f"diversity_loss: expected a recording with keep_graph=True, got {layer.name} without")
    layers = [torch.stack([LOSSES[kind](call) for call in layer.calls]).mean() for layer in recording.values()]
    return torch.stack(layers).mean()


def _subspaces_of(call: Attended) -> Tensor:
    assert call.values is not None  # diversity_loss looked
    if call.visible is None:
        return subspaces(call.values)
    attended = (call.weights.detach() > 0).any(1)  # (B, Lq, Lk)
    if call.queries is not None:
        attended = attended & call.queries.unsqueeze(-1)
    return subspaces(call.values, attended.any(1))


LOSSES: dict[str, Callable[[Attended], Tensor]] = {
    "redundancy": lambda call: redundancy(call.outputs, call.queries),
    "outputs": lambda call: outputs(call.outputs, call.queries),
    "positions": lambda call: positions(call.weights, call.queries),
    "subspaces": _subspaces_of,
    "js": lambda call: jensen_shannon(call.weights, call.queries),
}


def _over_pairs(mean: Mean, dtype: torch.dtype) -> Tensor:
    """Of means (H, H): that over the pairs of two heads that have rows, 0 if none have."""
    itself = torch.eye(mean.count.size(0), dtype=torch.bool, device=mean.count.device)
    pairs = (mean.count > 0) & ~itself
    values = mean.total / mean.count.clamp_min(1)
    return (values[pairs].sum() / pairs.sum().clamp_min(1)).to(metrics.at_least_float32(dtype))
