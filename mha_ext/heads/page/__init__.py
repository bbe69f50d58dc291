"""A report as one HTML file that needs nothing else: no network, no fonts, no server.

page.html holds the text, page.css the looks, and the scripts what moves:

    data.js       the report as the page works with it: weights, links, numbers
    dom.js        elements, tokens and numbers as people read them
    colour.js     colour scales, light and dark; when canvases are painted
    figures.js    the figures that views are made of: heat map, legend, rows of dots, ranking
    links.js      two columns of tokens and the lines between them
    grid.js, head.js, redundancy.js, mechanisms.js, compare.js    one section of the page each
    main.js       what is shown, and who is told when it changes
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import html
import json
import math
import string
from pathlib import Path
from typing import Any

from torch import Tensor

from mha_ext.heads.report import Attention, Input, Layer, Report

FOLDER = Path(__file__).parent
SCRIPTS = ("data", "dom", "colour", "figures", "links", "grid", "head", "redundancy", "mechanisms", "compare", "main")
LEVELS = 254  # a byte holds a weight as one of LEVELS + 1 levels
MISSING = 255  # or says that it is not a number


def write_page(report: Report) -> str:
    """The HTML of a page that shows the report; ASCII, so that every encoding of the file is right.

    Weights are kept in steps of 1/254 of their square root: a weight p is off by at most sqrt(p) / 254 + 4e-6, which
    is 0.004 at p = 1 and 0.0004 at p = 0.01. Other numbers keep four digits. Twelve layers of twelve heads at 128
    tokens are 3.3 MB for each input.

    Raises:
        ValueError: shapes that do not belong together, or weights that are not from 0 to 1 (NaN is shown as a dash)
    """
    _check(report)
    style = _text("page.css")
    script = "".join(_text(f"{name}.js") for name in SCRIPTS)
    parts = {
        "title": html.escape(f"The heads of {report.model}").encode("ascii", "xmlcharrefreplace").decode(),
        "policy": f"default-src 'none'; script-src {_source(script)}; style-src {_source(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'",
        "style": style,
        "script": script,
        # In ASCII JSON a < can only stand in a string. Without it nothing ends the script element, or opens a comment.
        "data": json.dumps(_plain(report), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
    }
    return string.Template(_text("page.html")).substitute(parts)


def _text(name: str) -> str:
    return (FOLDER / name).read_text(encoding="ascii")


def _source(text: str) -> str:
    """How a Content-Security-Policy names a text that stands in the page."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _plain(value: Any) -> Any:
    """What JSON can say: numbers with four digits, null for those that are none, three-dimensional tensors packed."""
    match value:
        case Tensor():
            return _packed(value) if value.dim() == 3 else _plain(value.tolist())
        case float():
            return float(f"{value:.4g}") if math.isfinite(value) else None
        case list() | tuple():
            return [_plain(item) for item in value]
        case dict():
            return {name: _plain(item) for name, item in value.items()}
        case Report() | Layer() | Input() | Attention():
            return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value


def _packed(weights: Tensor) -> str:
    """A byte for each weight, round(254 sqrt(weight)), in base64."""
    levels = (weights.float().clamp(0, 1).sqrt() * LEVELS).round().nan_to_num(MISSING)
    return base64.b64encode(bytes(levels.int().flatten().tolist())).decode()


def _check(report: Report) -> None:
    if not report.layers or not report.inputs:
        raise ValueError(
            f"write_page: expected layers and inputs, got {len(report.layers)} layers and {len(report.inputs)} inputs"
        )
    for layer in report.layers:
        _check_layer(layer)
    for i, text in enumerate(report.inputs):
        if len(text.attention) != len(report.layers):
            raise ValueError(
                f"write_page: expected the attention of {len(report.layers)} layers in input {i}, "
                f"got {len(text.attention)}"
            )
        for layer, attention in zip(report.layers, text.attention, strict=True):
            _check_attention(f"of {layer.name} in input {i}", layer.heads, text.sequences, attention)


def _check_layer(layer: Layer) -> None:
    if layer.heads < 1:
        raise ValueError(f"write_page: expected a head or more in {layer.name}, got {layer.heads}")
    _check_shape(f"output_share of {layer.name}", layer.output_share, (layer.heads,))
    _check_shape(f"subspace_overlap of {layer.name}", layer.subspace_overlap, (layer.heads, layer.heads))


def _check_attention(where: str, heads: int, sequences: list[list[str]], attention: Attention) -> None:
    for name in ("queries", "keys"):
        index = getattr(attention, name)
        if not 0 <= index < len(sequences) or not sequences[index]:
            raise ValueError(
                f"write_page: expected {name} {where} to be the index of a sequence with tokens, got {index}, "
                f"of sequences of {[len(tokens) for tokens in sequences]} tokens"
            )
    rows, columns = len(sequences[attention.queries]), len(sequences[attention.keys])
    _check_shape(f"weights {where}", attention.weights, (heads, rows, columns))
    wrong = attention.weights[(attention.weights < -1e-3) | (attention.weights > 1 + 1e-3)]
    if wrong.numel():
        raise ValueError(f"write_page: expected weights {where} from 0 to 1, got {wrong[0].item():.4g}")
    for name in ("entropy", "relative_entropy", "distance", "importance", "random_relative_entropy"):
        _check_shape(f"{name} {where}", getattr(attention, name), (heads,))
    for name, share in attention.shares.items():
        _check_shape(f"shares[{name!r}] {where}", share, (heads,))
    for name in ("divergence", "similarity", "cosine", "random_similarity"):
        _check_shape(f"{name} {where}", getattr(attention, name), (heads, heads))
    if sorted(attention.order) != list(range(heads)):
        raise ValueError(f"write_page: expected order {where} to name {heads} heads once, got {attention.order}")


def _check_shape(what: str, value: Tensor | None, shape: tuple[int, ...]) -> None:
    if value is not None and tuple(value.shape) != shape:
        raise ValueError(f"write_page: expected {what} of shape {shape}, got {tuple(value.shape)}")
