"""What is known of a model's heads: the one thing that the page, the figures and the summary are drawn from.

Sizes: H heads of a layer, Lq and Lk the lengths of an input. Tensors are float32 on the CPU without a graph.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Layer:
    """One attention layer and its parameters. None: cannot be told."""

    name: str  # of the module in the model
    heads: int
    output_share: Tensor | None  # (H,) of W_o, sums to 1
    subspace_overlap: Tensor | None  # (H, H) 0 to 1
    expected_overlap: float | None  # of independent random subspaces of these sizes


@dataclass(frozen=True)
class Attention:
    """One layer on one input, and a randomly initialised twin of it on the same input: linear CKA depends on the number
    of tokens, so a twin is compared on none but its own."""

    queries: int  # whose tokens the rows are: an index into Input.sequences
    keys: int  # and the columns
    weights: Tensor  # (H, Lq, Lk)
    entropy: Tensor  # (H,) nats
    relative_entropy: Tensor  # (H,) 0 to 1
    distance: Tensor | None  # (H,) tokens; None in cross-attention
    shares: dict[str, Tensor]  # previous, next, self, first: (H,) each; empty in cross-attention
    divergence: Tensor  # (H, H) Jensen-Shannon, nats, 0 to ln 2
    similarity: Tensor  # (H, H) linear CKA between the heads' outputs, 0 to 1
    cosine: Tensor  # (H, H) between the heads' outputs, -1 to 1
    effective_rank: float  # 1 to H: how many different heads
    importance: Tensor | None  # (H,) |dL/d gate|; None where there is no loss
    order: list[int]  # the heads, similar ones side by side
    random_relative_entropy: Tensor | None  # (H,) of the twin; None where there is none
    random_similarity: Tensor | None  # (H, H) likewise
    random_effective_rank: float | None


@dataclass(frozen=True)
class Input:
    """One text through the model."""

    text: str
    sequences: list[list[str]]  # tokens as they are shown: of the text, and of the target where there is one
    attention: list[Attention]  # as many as Report.layers
    note: str = ""  # what was cut off


@dataclass(frozen=True)
class Report:
    """A model, its layers and the inputs that were tried."""

    model: str  # how people call it
    layers: list[Layer]
    inputs: list[Input]
    loss: str = ""  # what importance is about, for people to read
    notes: list[str] = field(default_factory=list)  # what was left out, and why
