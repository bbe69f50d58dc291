"""Figures of a Report. Each function returns a matplotlib Figure and leaves pyplot's state alone.

    figure = plots.attention_grid(report)
    figure.savefig("grid.png", dpi=150)

Layers, heads and inputs are counted from 0; ValueError for one that the report lacks, ImportError without matplotlib.
Text is drawn as it is, never as mathematics; a character that no font has becomes a box.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from .report import Attention, Input, Layer, Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WEIGHTS, SIMILARITY, METRIC = "Blues", "OrRd", "YlGnBu"  # colour maps
TRAINED, RANDOM, NEUTRAL = "#1f5fa8", "#d9822b", "#8a8f98"  # colours
MISSING = "#e4e6ea"  # of a value that is not there
LONGEST_LABEL = 28  # characters
LONGEST_TITLE = 90
NUMBERED_CELLS = 16  # a larger matrix has no numbers in it

# Families that have what matplotlib's own font lacks, where the machine has them.
FALLBACK_FAMILIES = (
    "Noto Sans CJK JP",
    "Noto Sans CJK SC",
    "Microsoft YaHei",
    "Yu Gothic",
    "Malgun Gothic",
    "Hiragino Sans",
    "PingFang SC",
    "Arial Unicode MS",
    "Noto Sans",
)


def mean_of_others(matrix: Tensor) -> Tensor:
    """(H, H) -> (H,): the mean of each row without its diagonal and without NaN; NaN for a single head."""
    hidden = torch.eye(len(matrix), dtype=torch.bool)
    return matrix.masked_fill(hidden, math.nan).nanmean(1)


def likeness(similarity: Tensor | None) -> float:
    """The mean of a (H, H) similarity over pairs of different heads; NaN if it is not known."""
    return math.nan if similarity is None else float(mean_of_others(similarity).nanmean())


def mean_of_known(values: Iterable[float | None]) -> float:
    """The mean of those that are numbers; NaN if none is."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    return sum(known) / len(known) if known else math.nan


Values = Callable[[Layer, Attention], "Tensor | None"]


def _share(name: str) -> Values:
    return lambda layer, attention: attention.shares.get(name)


def _overlap(layer: Layer, attention: Attention) -> Tensor | None:
    return None if layer.subspace_overlap is None else mean_of_others(layer.subspace_overlap)


# name -> what is written over the map, the largest value of its colours (None: of the values), and the values (H,)
METRICS: dict[str, tuple[str, float | None, Values]] = {
    "entropy": ("entropy (nats)", None, lambda layer, attention: attention.entropy),
    "relative_entropy": ("entropy / that of equal weights", 1.0, lambda layer, attention: attention.relative_entropy),
    "distance": ("attention distance (tokens)", None, lambda layer, attention: attention.distance),
    "previous": ("share on the previous token", 1.0, _share("previous")),
    "next": ("share on the next token", 1.0, _share("next")),
    "self": ("share on the token itself", 1.0, _share("self")),
    "first": ("share on the first token", 1.0, _share("first")),
    "importance": ("importance |dL/d gate|", None, lambda layer, attention: attention.importance),
    "output_share": ("share of W_o", None, lambda layer, attention: layer.output_share),
    "subspace_overlap": ("overlap of W_q W_k^T with the other heads'", 1.0, _overlap),
    "redundancy": ("similarity with the other heads' outputs", 1.0, lambda _, a: mean_of_others(a.similarity)),
}


class Curve(Protocol):
    """A score after each number of pruned heads, as pruning.PruningCurve has it."""

    @property
    def pruned(self) -> Sequence[int]: ...

    @property
    def scores(self) -> Sequence[float]: ...


def attention_grid(report: Report, input: int = 0) -> Figure:
    """Layers x heads, a small map of the weights for each: rows are queries, columns keys."""
    shown = _input("attention_grid", report, input)
    heads, layers = max(layer.heads for layer in report.layers), len(report.layers)
    figure = _figure(min(24.0, 2.6 + 0.95 * heads), min(48.0, 1.3 + 0.95 * layers))
    axes = figure.add_subplot()
    _draw_grid(axes, report, shown)
    figure.colorbar(axes.images[0], ax=axes, label="weight", fraction=0.05, pad=0.02, aspect=30)
    _title(figure, report.model, shown.text)
    return figure


def head(report: Report, layer: int, head: int, input: int = 0) -> Figure:
    """The weights of one head, its tokens beside it: each row says where one token looks."""
    shown, attention = _head("head", report, layer, head, input)
    queries, keys = shown.sequences[attention.queries], shown.sequences[attention.keys]
    size, font = _room(max(len(queries), len(keys)))
    figure = _figure(3.2 + size * len(keys), 2.2 + size * len(queries), "compressed")
    axes = figure.add_subplot()
    image = axes.imshow(attention.weights[head].numpy(), norm=_weight_norm(), cmap=_colours(WEIGHTS), aspect="equal")
    axes.xaxis.tick_top()
    _ticks(axes.set_xticks, keys, font, rotation=90)
    _ticks(axes.set_yticks, queries, font)
    axes.tick_params(length=0)
    figure.colorbar(image, ax=axes, label="weight", fraction=0.04, pad=0.02)
    _title(figure, f"{report.model}, head {head} of {report.layers[layer].name}")
    return figure


def lines(report: Report, layer: int, head: int, input: int = 0, query: int | None = None) -> Figure:
    """One head as lines from the tokens on the left to those they look at; the stronger the weight the darker.

    query: only the lines of this token are in colour.
    """
    from matplotlib.collections import LineCollection
    from matplotlib.colors import to_rgb

    shown, attention = _head("lines", report, layer, head, input)
    queries, keys = shown.sequences[attention.queries], shown.sequences[attention.keys]
    if query is not None:
        _check_index("lines", "query", query, len(queries))
    size, font = _room(max(len(queries), len(keys)))
    figure = _figure(5.5, 1.2 + size * max(len(queries), len(keys)))
    axes = figure.add_subplot()
    weights = attention.weights[head].nan_to_num()
    strongest = weights.gt(0.005).nonzero().tolist()  # others would not be seen
    strongest.sort(key=lambda place: float(weights[place[0], place[1]]))
    segments = [[(0.0, i), (1.0, j)] for i, j in strongest]
    chosen = [to_rgb(TRAINED if query in (None, i) else MISSING) for i, _ in strongest]
    strength = [float(weights[i, j]) for i, j in strongest]
    colours = [(*colour, min(1.0, w**0.75)) for colour, w in zip(chosen, strength, strict=True)]
    axes.add_collection(LineCollection(segments, colors=colours, linewidths=[0.4 + 2.2 * w for w in strength]))
    for x, tokens, side in ((-0.03, queries, "right"), (1.03, keys, "left")):
        for y, token in enumerate(tokens):
            bold = "bold" if x < 0 and y == query else "normal"
            axes.text(x, y, _label(token), ha=side, va="center", fontsize=font, fontweight=bold, **_literal())
    axes.set(xlim=(-0.6, 1.6), ylim=(max(len(queries), len(keys)) - 0.5, -0.5))
    axes.axis("off")
    _title(figure, f"{report.model}, head {head}", f"of {report.layers[layer].name}")
    return figure


def redundancy(report: Report, layer: int, input: int = 0) -> Figure:
    """How alike the outputs of a layer's heads are (linear CKA), similar ones side by side, and of its random twin."""
    shown = _input("redundancy", report, input)
    _check_index("redundancy", "layer", layer, len(report.layers))
    described, attention = report.layers[layer], shown.attention[layer]
    twin = attention.random_similarity
    side = 1.6 + 0.42 * min(described.heads, 32)
    figure = _figure(1.2 + side * (1 if twin is None else 2), 1.0 + side, "compressed")
    panels = figure.subplots(1, 1 if twin is None else 2, squeeze=False)[0]
    _draw_matrix(panels[0], attention.similarity, attention.order)
    panels[0].set_title(f"effective rank {attention.effective_rank:.1f} of {described.heads}", fontsize=10)
    if twin is not None:
        _draw_matrix(panels[1], twin, list(range(described.heads)))
        rank = attention.random_effective_rank
        found = "" if rank is None else f": effective rank {rank:.1f}"
        panels[1].set_title(f"randomly initialised{found}", fontsize=10)
    figure.colorbar(panels[0].images[0], ax=list(panels), label="linear CKA", fraction=0.04, pad=0.02)
    _title(figure, f"{report.model}: {described.name}", shown.text)
    return figure


def metric(report: Report, name: str, input: int = 0) -> Figure:
    """Layers x heads, one of METRICS as colour and number; grey where it means nothing or is not known."""
    if name not in METRICS:
        raise ValueError(f"metric: expected one of {', '.join(METRICS)}, got {name!r}")
    shown = _input("metric", report, input)
    heads, layers = max(layer.heads for layer in report.layers), len(report.layers)
    figure = _figure(min(24.0, 3.2 + 0.55 * heads), min(48.0, 1.4 + 0.42 * layers))
    axes = figure.add_subplot()
    _draw_metric(axes, report, shown, name)
    axes.set_title("")
    figure.colorbar(axes.images[0], ax=axes, fraction=0.05, pad=0.02)
    _title(figure, METRICS[name][0], report.model)
    return figure


def mechanisms(report: Report, input: int = 0) -> Figure:
    """What keeps heads apart, over the layers: where they start, gradients, subspaces, W_o, what remains.

    Likeness and effective rank, of this model and of its random twin, are means over the inputs.
    """
    shown = _input("mechanisms", report, input)
    figure = _figure(13, 7.2)
    panels = figure.subplots(2, 3).flatten()
    for number, draw in enumerate((_draw_start, _draw_gradients, _draw_subspaces, _draw_output, _draw_ranks), 1):
        axes = panels[number - 1]
        draw(axes, report, shown)
        axes.set_title(f"{number}. {axes.get_title()}", fontsize=11, **_literal())
        _layer_axis(axes, report)
    handles = {
        label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    panels[5].axis("off")
    panels[5].legend(handles.values(), handles.keys(), loc="center", frameon=False, fontsize=11)
    _title(figure, f"{report.model}: what keeps its heads apart", shown.text)
    return figure


def pruning_curve(curve: Curve, score: str = "score") -> Figure:
    """A score after each number of pruned heads; `score` names it on the axis."""
    figure = _figure(7, 4.2)
    from matplotlib.ticker import MaxNLocator

    pruned, scores = list(curve.pruned), list(curve.scores)
    if not pruned or len(pruned) != len(scores):
        raise ValueError(f"pruning_curve: expected a score per number of heads, got {len(scores)} and {len(pruned)}")
    axes = figure.add_subplot()
    axes.axhline(scores[0], color=NEUTRAL, linewidth=1, linestyle=":")
    axes.plot(pruned, scores, "o-", color=TRAINED, markersize=4)
    axes.set_xlabel("pruned heads")
    axes.set_ylabel(_drawable(score), **_literal())
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _tidy(axes)
    return figure


def summary(report: Report) -> Figure:
    """The first input on one sheet: the maps, the most redundant layer, effective ranks, entropy and importance."""
    shown = _input("summary", report, 0)
    heads, layers = max(layer.heads for layer in report.layers), len(report.layers)
    wide = heads > 6
    cell = min(1.6, 15 / heads, 14 / layers) if wide else min(1.8, 14 / layers)  # inches of a map
    if wide:  # four panels below the maps, or beside them
        figure = _figure(max(13.0, 2.6 + cell * heads), 6.4 + cell * layers)
        maps, others = figure.subfigures(2, 1, height_ratios=[1.6 + cell * layers, 4.8], squeeze=False)[:, 0]
        panels = others.subplots(1, 4)
    else:
        figure = _figure(12.6 + cell * heads, max(9.0, 2.2 + cell * layers))
        maps, others = figure.subfigures(1, 2, width_ratios=[3.6 + cell * heads, 9], squeeze=False)[0]
        panels = others.subplots(2, 2).flatten()
    grid = maps.add_subplot()
    _draw_grid(grid, report, shown)
    grid.set_aspect("equal")
    grid.set_title("where each head looks: rows are queries, columns keys", fontsize=11)
    maps.colorbar(
        grid.images[0], ax=grid, label="weight", fraction=0.04, pad=0.02, aspect=30, shrink=0.8, panchor=False
    )
    _draw_panels(panels, replace(report, inputs=[shown]), shown)
    for axes in (panels[0], panels[2], panels[3]):
        others.colorbar(axes.images[0], ax=axes, location="bottom", fraction=0.06, pad=0.02)
    _title(figure, report.model, shown.text)
    return figure


def most_redundant_layer(shown: Input) -> int:
    """The layer whose heads' outputs are most alike on average."""
    means = [likeness(attention.similarity) for attention in shown.attention]
    return max(range(len(means)), key=lambda i: -1.0 if math.isnan(means[i]) else means[i])


def layer_labels(report: Report) -> list[str]:
    """The parts in which the layers' names differ: 'encoder.layer.0.attention.self' -> '0'."""
    names = [layer.name.split(".") for layer in report.layers]
    if len(names) == 1 or len({len(name) for name in names}) > 1:
        return [layer.name for layer in report.layers]
    differ = [len(set(parts)) > 1 for parts in zip(*names, strict=True)]
    return [".".join(part for part, kept in zip(name, differ, strict=True) if kept) for name in names]


# What a figure is made of.


def _draw_panels(panels: Sequence[Axes], report: Report, shown: Input) -> None:
    """The four small panels of the summary."""
    layer = most_redundant_layer(shown)
    _draw_matrix(panels[0], shown.attention[layer].similarity, shown.attention[layer].order)
    name = _drawable(_shortened(report.layers[layer].name, 40))
    panels[0].set_title(f"likeness of outputs, most redundant layer\n{name}", fontsize=10, **_literal())
    _draw_ranks(panels[1], report, shown)
    panels[1].legend(fontsize=9, frameon=False, loc="lower left")
    known = all(attention.importance is not None for attention in shown.attention)
    _draw_metric(panels[2], report, shown, "relative_entropy", numbers=False)
    _draw_metric(panels[3], report, shown, "importance" if known else "output_share", numbers=False)
    _layer_axis(panels[1], report, named=False)
    for axes in (panels[2], panels[3]):
        _layer_ticks(axes, report, 0.0, named=False)


def _draw_grid(axes: Axes, report: Report, shown: Input) -> None:
    norm, colours = _weight_norm(), _colours(WEIGHTS)
    for row, attention in enumerate(shown.attention):
        for column, weights in enumerate(attention.weights):
            place = (column + 0.04, column + 0.96, row + 0.96, row + 0.04)
            axes.imshow(weights.numpy(), extent=place, norm=norm, cmap=colours, aspect="auto")
    heads = max(len(attention.weights) for attention in shown.attention)
    axes.set(xlim=(0, heads), ylim=(len(shown.attention), 0), xlabel="head")
    axes.set_facecolor(MISSING)
    axes.set_xticks([i + 0.5 for i in range(heads)], [str(i) for i in range(heads)])
    _layer_ticks(axes, report, 0.5)


def _draw_matrix(axes: Axes, matrix: Tensor, order: list[int]) -> None:
    """A (H, H) similarity with its rows and columns in this order."""
    axes.imshow(matrix[order][:, order].numpy(), vmin=0, vmax=1, cmap=_colours(SIMILARITY), aspect="equal")
    font = 9 if len(order) <= 16 else 6
    axes.set_xticks(range(len(order)), [str(i) for i in order], fontsize=font)
    axes.set_yticks(range(len(order)), [str(i) for i in order], fontsize=font)
    axes.tick_params(length=0)
    axes.set(xlabel="head", ylabel="head")
    if len(order) <= NUMBERED_CELLS:
        _write_numbers(axes, matrix[order][:, order], 1.0)


def _draw_metric(axes: Axes, report: Report, shown: Input, name: str, numbers: bool = True) -> None:
    title, most, values = METRICS[name]
    table = torch.full((len(report.layers), max(layer.heads for layer in report.layers)), math.nan)
    for row, (layer, attention) in enumerate(zip(report.layers, shown.attention, strict=True)):
        found = values(layer, attention)
        if found is not None:
            table[row, : len(found)] = found
    finite = table[table.isfinite()]
    top = most or (float(finite.max()) if finite.numel() else 0.0) or 1.0
    axes.imshow(table.numpy(), vmin=0, vmax=top, cmap=_colours(METRIC), aspect="auto")
    axes.set_title(title, fontsize=11, **_literal())
    axes.set_xlabel("head")
    axes.set_xticks(range(table.size(1)), [str(i) for i in range(table.size(1))])
    axes.tick_params(length=0)
    _layer_ticks(axes, report, 0.0)
    if numbers and table.size(1) <= NUMBERED_CELLS:
        _write_numbers(axes, table, top)


def _write_numbers(axes: Axes, table: Tensor, most: float) -> None:
    """Each value in its cell, light on dark; two digits of the largest."""
    image = axes.images[0]
    decimals = 1 - math.floor(math.log10(max(most * 0.999, 1e-30)))
    for row, values in enumerate(table.tolist()):
        for column, value in enumerate(values):
            if math.isfinite(value):
                red, green, blue, _ = image.cmap(image.norm(value))
                colour = "white" if 0.3 * red + 0.59 * green + 0.11 * blue < 0.55 else "#222222"
                text = f"{value:.0e}" if decimals > 4 else f"{value:.{max(decimals, 0)}f}"
                text = text.removeprefix("0") if 0 < value < 1 else text
                axes.text(column, row, text, ha="center", va="center", fontsize=7.5, color=colour)


def _draw_start(axes: Axes, report: Report, shown: Input) -> None:
    axes.set_title("where heads start: likeness of outputs")
    trained = _mean_over_inputs(report, lambda attention: likeness(attention.similarity))
    random = _mean_over_inputs(report, lambda attention: likeness(attention.random_similarity))
    axes.plot(trained, "o-", color=TRAINED, label="this model")
    axes.plot(random, "s--", color=RANDOM, label="randomly initialised")
    axes.set(ylabel="mean linear CKA of two heads", ylim=(0, 1))


def _draw_gradients(axes: Axes, report: Report, shown: Input) -> None:
    axes.set_title("what the loss asks of each head", fontsize=11)
    _dots(axes, [attention.importance for attention in shown.attention])
    axes.set_ylabel("importance |dL/d gate|")


def _draw_subspaces(axes: Axes, report: Report, shown: Input) -> None:
    axes.set_title("subspaces of W_q W_k^T", fontsize=11, **_literal())
    _dots(axes, [_overlap(layer, attention) for layer, attention in zip(report.layers, shown.attention, strict=True)])
    expected = [math.nan if layer.expected_overlap is None else layer.expected_overlap for layer in report.layers]
    axes.plot(expected, "s--", color=RANDOM)
    axes.set_ylabel("mean overlap with the other heads")


def _draw_output(axes: Axes, report: Report, shown: Input) -> None:
    axes.set_title("how W_o weighs the heads", fontsize=11, **_literal())
    _dots(axes, [layer.output_share for layer in report.layers])
    axes.plot([1 / layer.heads for layer in report.layers], ":", color=NEUTRAL, label="an equal share")
    axes.set_ylabel("share of W_o", **_literal())


def _draw_ranks(axes: Axes, report: Report, shown: Input) -> None:
    axes.set_title("how many different heads are left")
    trained = _mean_over_inputs(report, lambda attention: attention.effective_rank)
    random = _mean_over_inputs(report, lambda attention: attention.random_effective_rank)
    axes.plot(trained, "o-", color=TRAINED, label="this model")
    axes.plot(random, "s--", color=RANDOM, label="randomly initialised")
    axes.plot([layer.heads for layer in report.layers], "-.", color=NEUTRAL, label="number of heads")
    axes.set(ylabel="effective rank")
    axes.set_ylim(bottom=0)


def _mean_over_inputs(report: Report, value: Callable[[Attention], float | None]) -> list[float]:
    """A number per layer."""
    by_layer = zip(*(text.attention for text in report.inputs), strict=True)
    return [mean_of_known(map(value, seen)) for seen in by_layer]


def _dots(axes: Axes, rows: Sequence[Tensor | None]) -> None:
    """A dot per head over its layer."""
    for x, values in enumerate(rows):
        if values is not None:
            offsets = torch.linspace(-0.18, 0.18, len(values)) if len(values) > 1 else torch.zeros(1)
            axes.plot(
                (x + offsets).tolist(), values.tolist(), "o", color=TRAINED, markersize=4, alpha=0.7, label="one head"
            )
    if all(values is None for values in rows):
        axes.text(0.5, 0.5, "not known", transform=axes.transAxes, ha="center", color=NEUTRAL)
    axes.set_ylim(bottom=0)


def _layer_ticks(axes: Axes, report: Report, offset: float, named: bool = True) -> None:
    labels = _layer_names(report, named)
    axes.set_yticks([i + offset for i in range(len(labels))], labels, **_literal())
    axes.set_ylabel("layer")
    axes.tick_params(length=0)


def _layer_axis(axes: Axes, report: Report, named: bool = True) -> None:
    """Layers from left to right."""
    labels = _layer_names(report, named)
    long = max(map(len, labels)) > 3
    places = range(0, len(labels), -(-len(labels) // 16))
    turn: dict[str, Any] = {"rotation": 60, "ha": "right", "rotation_mode": "anchor"} if long else {}
    axes.set_xticks(places, [labels[i] for i in places], fontsize=8, **turn, **_literal())
    axes.set(xlabel="layer", xlim=(-0.5, len(labels) - 0.5))
    _tidy(axes)


def _layer_names(report: Report, named: bool) -> list[str]:
    """What stands at an axis of layers: their numbers, and if they are to be named their names."""
    labels = layer_labels(report)
    if all(len(label) <= 3 for label in labels):
        return [_label(label) for label in labels]
    return [f"{_label(label)}  {i}" if named else str(i) for i, label in enumerate(labels)]


def _tidy(axes: Axes) -> None:
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _ticks(place: Callable[..., Any], tokens: Sequence[str], font: float, **style: Any) -> None:
    place(range(len(tokens)), [_label(token) for token in tokens], fontsize=font, **style, **_literal())


def _room(tokens: int) -> tuple[float, float]:
    """Inches for a token and points of its text: small where there are many."""
    size = min(0.3, max(0.12, 16 / max(tokens, 1)))
    return size, min(10.0, 60 * size)


# Text, colours, and what a caller can get wrong.


def _figure(width: float, height: float, layout: Literal["constrained", "compressed"] = "constrained") -> Figure:
    """An empty figure, inches; "compressed" is for panels whose shape is given."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("plots: expected matplotlib, found none; `pip install matplotlib`")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout=layout)
    FigureCanvasAgg(figure)
    return figure


def _title(figure: Figure, *parts: str) -> None:
    longest = min(LONGEST_TITLE, int(9 * figure.get_figwidth()))
    lines = [_shortened(_drawable(" ".join(part.split())), longest) for part in parts]
    figure.suptitle("\n".join(lines), fontsize=12, **_literal())


def _weight_norm() -> Any:
    """The root of a weight is its darkness: 1/128 is still seen, and all maps share the scale."""
    from matplotlib.colors import PowerNorm

    return PowerNorm(0.5, vmin=0, vmax=1)


def _colours(name: str) -> Any:
    from matplotlib import colormaps

    return colormaps[name].with_extremes(bad=MISSING)


def _literal() -> dict[str, Any]:
    """Properties of a text that comes from outside: no mathematics, and fonts for more scripts."""
    return {"parse_math": False, "fontfamily": [family for family, _ in _fonts()]}


@functools.cache
def _fonts() -> list[tuple[str, Any]]:
    """Families and their fonts: the one that figures have anyway, then those that fill its gaps."""
    from matplotlib import font_manager

    own = font_manager.FontProperties().get_name()
    installed = set(font_manager.get_font_names())
    families = [own, *(family for family in FALLBACK_FAMILIES if family in installed and family != own)]
    return [(family, font_manager.get_font(font_manager.findfont(family))) for family in families]


def _label(token: str) -> str:
    return _drawable(_shortened(token, LONGEST_LABEL))


def _shortened(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "\u2026"


def _drawable(text: str) -> str:
    """The text with a box in place of each character that is not to be seen or that no font has."""
    return "".join(c if c.isprintable() and _has_glyph(c) else "\u25a1" for c in text)


@functools.cache
def _has_glyph(character: str) -> bool:
    return any(font.get_char_index(ord(character)) for _, font in _fonts())


def _input(op: str, report: Report, input: int) -> Input:
    if not report.layers or not report.inputs:
        found = f"{len(report.layers)} layers and {len(report.inputs)} inputs"
        raise ValueError(f"{op}: expected a report with layers and inputs, got {found}")
    _check_index(op, "input", input, len(report.inputs))
    return report.inputs[input]


def _head(op: str, report: Report, layer: int, head: int, input: int) -> tuple[Input, Attention]:
    shown = _input(op, report, input)
    _check_index(op, "layer", layer, len(report.layers))
    _check_index(op, "head", head, report.layers[layer].heads)
    return shown, shown.attention[layer]


def _check_index(op: str, name: str, value: int, count: int) -> None:
    if type(value) is not int:
        raise TypeError(f"{op}: expected {name} of type int, got {type(value).__name__}")
    if not 0 <= value < count:
        raise ValueError(f"{op}: expected {name} from 0 to {count - 1}, got {value}")
