"""The metrics over many calls, without keeping a call: sums that grow with the heads and never with the tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import metrics
from .metrics import Mean, Moments


class Statistics:
    """What `metrics` tells about one layer, over all rows that were ever added.

    The same values as the functions of these names in `metrics` on everything at once, up to rounding and however the
    rows were split into calls: means are sums and counts, linear CKA has the mean and the scatter of the outputs.
    State: O(H^2 D^2) float64, on the device of the first call. Results are on that device, without a graph, and
    float32; float64 if anything that was added was. Can be pickled and copied.
    """

    def __init__(self) -> None:
        self._rows = 0
        self._heads = 0
        self._dtype = torch.float32
        self._means: dict[str, Mean] = {}
        self._moments: Moments | None = None  # of the outputs, once there were any

    @property
    def rows(self) -> int:
        """How many queries counted, for one head at least."""
        return self._rows

    @property
    def heads(self) -> int:
        """0: nothing was added yet."""
        return self._heads

    @torch.no_grad()
    def add(
        self,
        weights: Tensor,
        outputs: Tensor | None = None,
        *,
        queries: Tensor | None = None,
        visible: Tensor | int | None = None,
        offset: int | None = 0,
        rows: Tensor | None = None,
    ) -> None:
        """Adds the rows of a call.

        weights   (B, H, Lq, Lk) floating
        outputs   (B, H, Lq, D) floating, what each head hands to W_o; None: no part in cosine_similarity and linear_cka
        queries   bool (B, Lq): the rows that count; None: all
        visible   int or integers that broadcast to (B, H, Lq): how many keys each query may see; None: Lk
        offset    query i stands at key position i + offset; None: no part in distance and position_shares
        rows      int64 or int32 (R,): weights, outputs and visible are of these queries alone; `queries` is of all

        Raises ValueError or TypeError for what does not fit, also to the heads or D of earlier calls, and adds nothing
        then.
        """
        op = "Statistics.add"
        if rows is not None:
            metrics.check_weights(op, weights, None)
            metrics.check_rows(op, rows, queries, weights)
        of_rows = queries if queries is None or rows is None else queries[:, rows]
        metrics.check_weights(op, weights, of_rows)
        metrics.check_visible(op, visible, weights)
        metrics.check_offset(op, offset)
        batch = Statistics()
        batch._add_weights(weights, of_rows, queries, visible, offset, rows)
        if outputs is not None:
            metrics.check_outputs(op, outputs, of_rows)
            if outputs.shape[:3] != weights.shape[:3]:
                raise ValueError(
                    f"{op}: expected outputs of shape (B, H, Lq, D) with B, H, Lq of the weights, "
                    f"{tuple(weights.shape[:3])}, got {tuple(outputs.shape)}"
                )
            batch._add_outputs(outputs, of_rows)
        self._absorb(op, batch)

    def merge(self, other: Statistics) -> None:
        """Adds what `other` was given: of another process, or another part of the data. `other` stays as it is.

        Raises ValueError if the heads or D differ.
        """
        if not isinstance(other, Statistics):
            raise TypeError(f"Statistics.merge: expected Statistics, got {type(other).__name__}")
        self._absorb("Statistics.merge", other)

    def entropy(self) -> Tensor:
        """(H,) nats."""
        return self._mean("entropy")

    def relative_entropy(self) -> Tensor:
        """(H,) 0 to 1."""
        return self._mean("relative_entropy")

    def distance(self) -> Tensor:
        """(H,) tokens: metrics.attention_distance."""
        return self._mean("distance")

    def position_shares(self) -> dict[str, Tensor]:
        """previous, next, self, first: (H,) each, 0 to 1."""
        return {name: self._mean(name) for name in ("previous", "next", "self", "first")}

    def jensen_shannon(self) -> Tensor:
        """(H, H) nats, 0 to ln 2."""
        return self._mean("jensen_shannon")

    def cosine_similarity(self) -> Tensor:
        """(H, H) -1 to 1."""
        return self._mean("cosine_similarity")

    def linear_cka(self) -> Tensor:
        """(H, H) 0 to 1; NaN without outputs."""
        self._expect_rows()
        if self._moments is None:
            return self._means["cosine_similarity"].value(self._dtype)
        return self._moments.linear_cka(self._dtype)

    def effective_rank(self) -> Tensor:
        """() 1 to H: metrics.effective_rank of the linear CKA."""
        return metrics.effective_rank(self.linear_cka())

    def redundancy(self) -> Tensor:
        """How much each head tells what the others tell too: its mean linear CKA with them, 0 to 1, (H,).

        NaN for a layer of one head.
        """
        return self.linear_cka().fill_diagonal_(math.nan).nanmean(1)

    def _add_weights(
        self,
        weights: Tensor,
        of_rows: Tensor | None,
        queries: Tensor | None,
        visible: Tensor | int | None,
        offset: int | None,
        rows: Tensor | None,
    ) -> None:
        counts = metrics.counted(weights, of_rows)
        entropies = metrics.row_entropy(weights, counts)
        heads = weights.size(1)
        self._rows = int(counts.any(1).sum())
        self._heads = heads
        self._dtype = metrics.at_least_float32(weights.dtype)
        self._means = {
            "entropy": Mean.of(entropies, counts),
            "relative_entropy": metrics.relative_rows(entropies, counts, visible, weights.size(3)),
            "distance": metrics.distance_rows(weights, counts, offset, rows),
            **metrics.share_rows(weights, counts, queries, offset, rows),
            "jensen_shannon": metrics.divergence_rows(weights, counts, entropies),
            "cosine_similarity": Mean.of_nothing(heads, heads, device=weights.device),
        }

    def _add_outputs(self, outputs: Tensor, queries: Tensor | None) -> None:
        rows = metrics.output_rows(outputs, queries)
        self._dtype = torch.promote_types(self._dtype, rows.dtype)
        self._means["cosine_similarity"] = metrics.cosine_rows(rows)
        self._moments = Moments.of(rows)

    def _absorb(self, op: str, other: Statistics) -> None:
        """Means and moments are never changed in place, so both sides may hold the same ones."""
        self._expect_same_sizes(op, other)
        self._rows += other._rows
        self._heads = self._heads or other._heads
        self._dtype = torch.promote_types(self._dtype, other._dtype)
        for name, mean in other._means.items():
            self._means[name] = self._means[name] + mean if name in self._means else mean
        if other._moments is not None:
            self._moments = other._moments if self._moments is None else self._moments + other._moments

    def _expect_same_sizes(self, op: str, other: Statistics) -> None:
        if self._heads and other._heads and self._heads != other._heads:
            raise ValueError(f"{op}: expected {self._heads} heads as before, got {other._heads}")
        if self._moments is not None and other._moments is not None:
            features, others = (m.mean.numel() // m.heads for m in (self._moments, other._moments))
            if features != others:
                raise ValueError(f"{op}: expected outputs with D = {features} as before, got {others}")

    def _expect_rows(self) -> None:
        if not self._heads:
            raise ValueError("Statistics: expected at least one call of add, got none")

    def _mean(self, name: str) -> Tensor:
        self._expect_rows()
        return self._means[name].value(self._dtype)
