"""Figures hold the report's numbers, at their places, whatever the tokens are; and what a caller can get wrong."""

from __future__ import annotations

import importlib.util
import io
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.text import Text

from mha_ext.heads import plots
from mha_ext.heads.report import Report
from tests.heads.sample_report import (
    TOKENS,
    large_report,
    sentence_report,
    smallest_report,
    translation_report,
    unknown_report,
)

FIGURES: dict[str, Callable[[Report], Figure]] = {
    "attention_grid": plots.attention_grid,
    "head": lambda report: plots.head(report, 0, 0),
    "lines": lambda report: plots.lines(report, 0, 0),
    "redundancy": lambda report: plots.redundancy(report, 0),
    "metric": lambda report: plots.metric(report, "entropy"),
    "mechanisms": plots.mechanisms,
    "summary": plots.summary,
}
REPORTS = [sentence_report, translation_report, smallest_report, unknown_report]
HOSTILE = [
    "$x_1^{2}$",
    r"\frac{1}{0}",
    "$",
    "_",
    "a\nb",
    "\t",
    "\0",
    "\x1b[31m",
    "\ud800",
    "\u202egnihtyna",
    "\U0001f436\U0001f3fd",
    "\u4e2d\u6587",
    "\u0645\u0631\u062d\u0628\u0627",
    "e\u0301\u0301\u0301",
    "\ufffe",
    "</script><script>alert(1)</script>",
    "word" * 1000,
    "",
]


def image_of(figure: Figure) -> tuple[int, int]:
    """Width and height of the figure as a PNG; a warning on the way is an error."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.savefig(buffer, format="png", dpi=30)
    header = buffer.getvalue()[:24]
    assert header.startswith(b"\x89PNG")
    return int.from_bytes(header[16:20]), int.from_bytes(header[20:24])


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text)]


def labels(axis) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]


def with_tokens(report: Report, tokens: list[str]) -> Report:
    """The report with other words for its first input's first tokens, for its text and for its names."""
    first = report.inputs[0]
    words = [(tokens + sequence[len(tokens) :])[: len(sequence)] for sequence in first.sequences]
    renamed = [replace(layer, name="".join(tokens)) for layer in report.layers]
    shown = [replace(first, sequences=words, text=" ".join(tokens)), *report.inputs[1:]]
    return replace(report, model=" ".join(tokens), layers=renamed, inputs=shown)


@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.parametrize("report", REPORTS, ids=lambda make: make.__name__)
def test_every_figure_of_every_report(name: str, report: Callable[[], Report]) -> None:
    width, height = image_of(FIGURES[name](report()))
    assert 60 < width < 1000 and 30 < height < 1000


@pytest.mark.parametrize("name", ["head", "lines", "redundancy", "summary"])
def test_many_heads_and_tokens(name: str) -> None:
    width, height = image_of(FIGURES[name](large_report(layers=12, heads=12, tokens=128)))
    assert width < 1000 and height < 1000


def test_the_grid_has_a_map_per_head_where_it_belongs() -> None:
    report = sentence_report(layers=3, heads=5)
    axes = plots.attention_grid(report, input=1).axes[0]
    assert len(axes.images) == 15
    for image in axes.images:
        left, right, bottom, top = image.get_extent()
        layer, head = math.floor(top), math.floor(left)
        assert (math.floor(right), math.floor(bottom)) == (head, layer)
        np.testing.assert_array_equal(image.get_array(), report.inputs[1].attention[layer].weights[head])
    assert axes.get_ylim() == (3, 0) and axes.get_xlim() == (0, 5)
    assert labels(axes.xaxis) == ["0", "1", "2", "3", "4"] and labels(axes.yaxis) == ["0", "1", "2"]


def test_a_head_with_its_tokens() -> None:
    report = sentence_report()
    axes = plots.head(report, 0, 3).axes[0]
    np.testing.assert_array_equal(axes.images[0].get_array(), report.inputs[0].attention[0].weights[3])
    assert labels(axes.xaxis) == TOKENS and labels(axes.yaxis) == TOKENS


def test_cross_attention_has_the_tokens_of_both_sides() -> None:
    axes = plots.head(translation_report(), 1, 0).axes[0]
    assert labels(axes.yaxis) == ["<s>", "the", "dog"]
    assert labels(axes.xaxis) == ["der", "Hund", "ist", "m\u00fcde", "."]


def test_lines_go_from_queries_to_keys_with_the_weight_as_strength() -> None:
    report = sentence_report()
    weights = report.inputs[0].attention[0].weights[3]
    axes = plots.lines(report, 0, 3).axes[0]
    (collection,) = [c for c in axes.collections if isinstance(c, LineCollection)]
    drawn = {}
    for segment, colour in zip(collection.get_segments(), collection.get_colors(), strict=True):
        (x0, query), (x1, key) = segment
        assert (x0, x1) == (0, 1)
        drawn[int(query), int(key)] = colour[3]
    assert set(drawn) == {tuple(place) for place in weights.gt(0.005).nonzero().tolist()}
    for place, strength in drawn.items():
        assert strength == pytest.approx(float(weights[place]) ** 0.75, abs=1e-6)
    assert max(drawn, key=lambda place: drawn[place] if place[0] == 10 else 0) == (10, 2)  # "it" looks at "animal"
    assert [text.get_text() for text in axes.texts] == TOKENS * 2


def test_lines_of_one_query() -> None:
    axes = plots.lines(sentence_report(), 0, 3, query=10).axes[0]
    (collection,) = axes.collections
    blue = [colour[2] > 0.5 > colour[0] for colour in collection.get_colors()]
    assert {int(s[0][1]) for s, is_blue in zip(collection.get_segments(), blue, strict=True) if is_blue} == {10}
    assert [text.get_text() for text in axes.texts if text.get_fontweight() == "bold"] == ["it"]


def test_redundancy_is_clustered_and_beside_its_twin() -> None:
    report = sentence_report()
    attention = report.inputs[1].attention[2]
    own, twin = plots.redundancy(report, 2, input=1).axes[:2]
    np.testing.assert_array_equal(own.images[0].get_array(), attention.similarity[attention.order][:, attention.order])
    assert labels(own.xaxis) == labels(own.yaxis) == [str(head) for head in attention.order]
    np.testing.assert_array_equal(twin.images[0].get_array(), attention.random_similarity)
    assert own.get_title() == f"effective rank {attention.effective_rank:.1f} of 8"
    assert twin.get_title() == f"randomly initialised: effective rank {attention.random_effective_rank:.1f}"
    assert len(plots.redundancy(smallest_report(), 0).axes) == 2  # no twin: the matrix and its colours


@pytest.mark.parametrize("name", plots.METRICS)
def test_metrics_are_layers_by_heads(name: str) -> None:
    report = sentence_report(layers=3, heads=5)
    table = np.ma.filled(plots.metric(report, name, input=1).axes[0].images[0].get_array(), np.nan)
    assert table.shape == (3, 5)
    for row, layer, attention in zip(table, report.layers, report.inputs[1].attention, strict=True):
        others = ~torch.eye(5, dtype=torch.bool)
        expected = {
            **attention.shares,
            "output_share": layer.output_share,
            "subspace_overlap": torch.stack([m[o].mean() for m, o in zip(layer.subspace_overlap, others, strict=True)]),
            "redundancy": torch.stack([m[o].mean() for m, o in zip(attention.similarity, others, strict=True)]),
        }
        np.testing.assert_allclose(row, expected[name] if name in expected else getattr(attention, name), rtol=1e-6)


def test_what_is_not_known_is_grey() -> None:
    report = translation_report()
    table = plots.metric(report, "distance").axes[0].images[0].get_array()
    np.testing.assert_array_equal(np.ma.getmaskarray(table), [[False, False], [True, True]])  # no distance across
    cells = plots.metric(report, "importance").axes[0].images[0]
    assert np.ma.getmaskarray(cells.get_array()).all()
    assert tuple(cells.cmap.get_bad()) == matplotlib.colors.to_rgba(plots.MISSING)


def test_fewer_heads_in_one_layer() -> None:
    report = sentence_report(layers=2, heads=4)
    one = report.inputs[0].attention[1]
    few = {
        name: getattr(one, name)[:2] for name in ("weights", "entropy", "relative_entropy", "distance", "importance")
    }
    few["random_relative_entropy"] = few["random_similarity"] = few["random_effective_rank"] = None
    square = {name: getattr(one, name)[:2, :2] for name in ("divergence", "similarity", "cosine")}
    pruned = replace(one, **few, **square, order=[1, 0], shares={name: share[:2] for name, share in one.shares.items()})
    layers = [report.layers[0], replace(report.layers[1], heads=2, output_share=None)]
    report = replace(
        report, layers=layers, inputs=[replace(report.inputs[0], attention=[report.inputs[0].attention[0], pruned])]
    )
    assert len(plots.attention_grid(report).axes[0].images) == 6
    table = plots.metric(report, "entropy").axes[0].images[0].get_array()
    np.testing.assert_array_equal(np.ma.getmaskarray(table), [[False] * 4, [False, False, True, True]])
    image_of(plots.summary(report))
    image_of(plots.mechanisms(report))


def alike(similarity: torch.Tensor) -> float:
    """The mean over pairs of different heads."""
    return float(similarity[~torch.eye(len(similarity), dtype=torch.bool)].mean())


def test_mechanisms_show_this_model_beside_a_random_one() -> None:
    report = sentence_report()
    panels = plots.mechanisms(report).axes
    assert [axes.get_title()[:2] for axes in panels] == ["1.", "2.", "3.", "4.", "5.", ""]
    assert list(panels[4].lines[2].get_ydata()) == [8] * 4  # heads
    for axes, numbers in [
        (panels[0], lambda a: (alike(a.similarity), alike(a.random_similarity))),
        (panels[4], lambda a: (a.effective_rank, a.random_effective_rank)),
    ]:
        expected = np.mean([[numbers(a) for a in text.attention] for text in report.inputs], axis=0)  # over the inputs
        found = np.stack([line.get_ydata() for line in axes.lines[:2]], axis=-1)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    dots = np.concatenate([line.get_ydata() for line in panels[3].lines[:4]])
    np.testing.assert_allclose(dots, torch.cat([layer.output_share for layer in report.layers]))


def test_pruning_curve() -> None:
    curve = SimpleNamespace(pruned=[0, 1, 4], scores=[0.9, 0.8, 0.25])
    figure = plots.pruning_curve(curve, "accuracy of $this$")
    image_of(figure)
    line = figure.axes[0].lines[-1]
    assert list(line.get_xdata()) == [0, 1, 4] and list(line.get_ydata()) == [0.9, 0.8, 0.25]
    assert figure.axes[0].get_ylabel() == "accuracy of $this$"


def test_the_summary_shows_the_first_input() -> None:
    report = sentence_report()
    figure = plots.summary(report)
    grid = figure.subfigs[0].axes[0]
    for image, weights in zip(grid.images, torch.cat([a.weights for a in report.inputs[0].attention]), strict=True):
        np.testing.assert_array_equal(image.get_array(), weights)
    assert report.model in figure.get_suptitle() and report.inputs[0].text in figure.get_suptitle()
    layer = plots.most_redundant_layer(report.inputs[0])
    means = [float((a.similarity.sum() - 8) / 56) for a in report.inputs[0].attention]
    assert means[layer] == max(means)
    assert any(report.layers[layer].name in text for text in texts(figure))
    (ranks,) = [axes for axes in figure.axes if axes.get_ylabel() == "effective rank"]
    trained, random, _ = ranks.lines
    assert list(trained.get_ydata()) == [a.effective_rank for a in report.inputs[0].attention]
    assert list(random.get_ydata()) == [a.random_effective_rank for a in report.inputs[0].attention]


@pytest.mark.parametrize("name", FIGURES)
def test_tokens_are_drawn_as_they_are(name: str) -> None:
    figure = FIGURES[name](with_tokens(sentence_report(layers=1, heads=8), HOSTILE[:16]))
    image_of(figure)
    from_outside = [text for text in figure.findobj(Text) if "$" in text.get_text() or "\\" in text.get_text()]
    assert from_outside and not any(text.get_parse_math() for text in from_outside)


@pytest.mark.parametrize("token", HOSTILE, ids=range(len(HOSTILE)))
def test_one_token_of_any_kind(token: str) -> None:
    report = with_tokens(sentence_report(layers=1, heads=2), [token, "next"])
    figure = plots.head(report, 0, 0)
    image_of(figure)
    drawn = labels(figure.axes[0].xaxis)[0]
    assert len(drawn) <= plots.LONGEST_LABEL and drawn.isprintable()
    if token.isascii() and token.isprintable() and len(token) < 20:
        assert drawn == token


def test_pyplot_is_left_alone() -> None:
    from matplotlib import pyplot

    settings, open_figures = dict(matplotlib.rcParams), pyplot.get_fignums()
    for draw in FIGURES.values():
        draw(sentence_report(layers=1, heads=2))
    assert pyplot.get_fignums() == open_figures and dict(matplotlib.rcParams) == settings


def test_names_of_layers_are_what_differs() -> None:
    def labels_of(*names: str) -> list[str]:
        layers = [SimpleNamespace(name=name) for name in names]
        return plots.layer_labels(SimpleNamespace(layers=layers))

    assert labels_of("encoder.layer.0.attention.self", "encoder.layer.1.attention.self") == ["0", "1"]
    assert labels_of("encoder.0.attention", "decoder.0.cross_attention") == [
        "encoder.attention",
        "decoder.cross_attention",
    ]
    assert labels_of("attention") == ["attention"]
    assert labels_of("a.b", "a.b.c") == ["a.b", "a.b.c"]


@pytest.mark.parametrize(
    "draw, error, message",
    [
        (lambda r: plots.head(r, 4, 0), ValueError, "head: expected layer from 0 to 3, got 4"),
        (lambda r: plots.head(r, 0, -1), ValueError, "head: expected head from 0 to 7, got -1"),
        (lambda r: plots.head(r, 0, 0, input=2), ValueError, "head: expected input from 0 to 1, got 2"),
        (lambda r: plots.head(r, "0", 0), TypeError, "head: expected layer of type int, got str"),
        (lambda r: plots.lines(r, 0, 8), ValueError, "lines: expected head from 0 to 7, got 8"),
        (lambda r: plots.lines(r, 0, 0, query=16), ValueError, "lines: expected query from 0 to 15, got 16"),
        (lambda r: plots.redundancy(r, 9), ValueError, "redundancy: expected layer from 0 to 3, got 9"),
        (lambda r: plots.metric(r, "speed"), ValueError, "metric: expected one of entropy, relative_entropy"),
        (
            lambda r: plots.attention_grid(replace(r, layers=[])),
            ValueError,
            "attention_grid: expected a report with layers and",
        ),
        (
            lambda r: plots.summary(replace(r, inputs=[])),
            ValueError,
            "with layers and inputs, got 4 layers and 0 inputs",
        ),
        (lambda r: plots.pruning_curve(SimpleNamespace(pruned=[0, 1], scores=[0.5])), ValueError, "got 1 and 2"),
        (lambda r: plots.pruning_curve(SimpleNamespace(pruned=[], scores=[])), ValueError, "got 0 and 0"),
    ],
)
def test_what_a_caller_can_get_wrong(draw: Callable[[Report], Figure], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        draw(sentence_report())


@pytest.mark.parametrize(
    "draw", [*FIGURES.values(), lambda _: plots.pruning_curve(SimpleNamespace(pruned=[0], scores=[1.0]))]
)
def test_without_matplotlib(draw: Callable[[Report], Figure], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="plots: expected matplotlib, found none; `pip install matplotlib`"):
        draw(sentence_report(layers=1, heads=2))
