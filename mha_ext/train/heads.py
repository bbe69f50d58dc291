"""What the heads do while a model trains: measured on held-out text, drawn over the steps, and pushed apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..heads.diversity import diversity_loss
from ..heads.recording import Recording, record
from .checkpoint import build_model
from .data import Batch
from .model import UNKNOWN, CharacterModel
from .report import write_figure
from .settings import Settings
from .table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass
class HeadRow:
    """One head after one step in heads.csv."""

    step: int
    layer: str  # its module
    head: int
    relative_entropy: float  # of its weights: 0 looks at one character, 1 at all it sees alike
    redundancy: float  # mean linear CKA between its outputs and those of the other heads: 1 says the same


class HeadMetrics(Table[HeadRow]):
    """heads.csv: a row per head at every look at held-out text."""

    kind = HeadRow


def recordable(model: CharacterModel, settings: Settings) -> CharacterModel:
    """The model, or a twin with mha_ext's attention on the same parameters: there, all heads can be seen."""
    if settings.attention == "mha_ext":
        return model
    with torch.device("meta"):  # draws no random numbers, and needs no memory
        twin = build_model(dataclasses.replace(settings, attention="mha_ext"), "".join(model.characters))
    twin.load_state_dict(model.state_dict(), assign=True)
    return twin


def look_at_heads(model: CharacterModel, batch: Batch, step: int) -> list[HeadRow]:
    """Every head of every layer on a batch without padding."""
    was_training = model.training
    model.eval()
    with torch.no_grad(), record(model, streaming=True, queries=32) as recording:
        model(*batch.inputs)
    model.train(was_training)
    rows = []
    for name, layer in recording.items():
        statistics = layer.statistics()
        measured = zip(statistics.relative_entropy().tolist(), statistics.redundancy().tolist(), strict=True)
        rows += [HeadRow(step, name, head, *values) for head, values in enumerate(measured)]
    return rows


def diversity(recording: Recording, batch: Batch, kind: str) -> Tensor:
    """The diversity loss of a training step, padding left out."""
    counts = batch.targets != UNKNOWN
    if not counts.all():
        for name, layer in recording.items():
            if not name.startswith("encoder."):  # a causal layer cannot know what is padding
                layer.calls = [dataclasses.replace(call, queries=counts) for call in layer.calls]
    return diversity_loss(recording, kind)


def write_heads(path: Path, rows: Sequence[HeadRow], title: str) -> str | None:
    """Draws entropy and redundancy of the heads over the steps; returns why not when it cannot."""

    def draw(figure: Figure) -> None:
        figure.suptitle(f"{title}: heads (thin), and the mean of each layer")
        entropy, redundancy = figure.subplots(1, 2)
        draw_heads(entropy, rows, "relative_entropy")
        entropy.set(ylabel="relative entropy of the weights", ylim=(0, 1.02))
        draw_heads(redundancy, rows, "redundancy")
        redundancy.set(ylabel="linear CKA with the other heads, mean", ylim=(0, 1.02))
        handles, labels = entropy.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper")

    return write_figure(path, (11, 4.5), draw)


def draw_heads(axes: Axes, rows: Sequence[HeadRow], column: str) -> None:
    """A thin line per head and a thick one per layer, their mean, in the layer's colour."""
    import matplotlib

    layers = list(dict.fromkeys(row.layer for row in rows))
    colors = matplotlib.colormaps["viridis"](torch.linspace(0, 0.9, len(layers)).tolist())
    for layer, color in zip(layers, colors, strict=True):
        of_heads: dict[int, dict[int, float]] = {}
        of_steps: dict[int, list[float]] = {}
        for row in rows:
            if row.layer == layer:
                of_heads.setdefault(row.head, {})[row.step] = getattr(row, column)
                of_steps.setdefault(row.step, []).append(getattr(row, column))
        for line in of_heads.values():
            axes.plot(list(line), list(line.values()), color=color, alpha=0.35, linewidth=0.8)
        means = [sum(values) / len(values) for values in of_steps.values()]
        axes.plot(list(of_steps), means, "o-", color=color, markersize=3, label=layer)
    axes.set(xlabel="step")
    axes.grid(alpha=0.3)
