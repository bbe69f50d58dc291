"""What recording and gating heads costs: `python -m mha_ext bench --heads`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

import mha_ext
from mha_ext.heads.recording import gate, record

from . import report
from .timing import in_turns, quartiles, ratios

MARKS = ("<!-- heads: begin -->", "<!-- heads: end -->")
HEADINGS = ("forward", "shape", "plain ms", "its ms", "its time / plain (quartiles)")
SHAPES = ((8, 128, 512, 8), (1, 2048, 512, 8))
_WIDTHS = (52, 18, 9, 9, 28)

Context = Callable[[], AbstractContextManager[Any]]


def subjects(layer: mha_ext.MultiHeadAttention, batch: int) -> dict[str, tuple[Context, dict[str, Any]]]:
    """What to enter around the forward, and what to give it."""
    ones = torch.ones(layer.num_heads)
    per_sequence = ones.expand(batch, -1)
    return {
        "in record()": (partial(record, layer), {}),
        "in record(streaming=True), 16 rows of each sequence": (partial(record, layer, streaming=True), {}),
        "in record(streaming=True, queries=None)": (partial(record, layer, streaming=True, queries=None), {}),
        "in gate(), (H,)": (partial(gate, layer, {"": ones}), {}),
        "head_mask=, (H,)": (nullcontext, {"head_mask": ones}),
        "head_mask=, (B, H)": (nullcontext, {"head_mask": per_sequence}),
    }


def measurements(quick: bool, budget: float) -> Iterator[list[str]]:
    """The lines of the table, each once it is measured; in quick mode of the first shape alone."""
    for shape in SHAPES[:1] if quick else SHAPES:
        yield from measure(*shape, budget)


def measure(batch: int, length: int, d_model: int, heads: int, budget: float) -> list[list[str]]:
    """The cells of a line for each subject, all timed in turns with the plain forward, which returns weights too."""
    layer = mha_ext.MultiHeadAttention(d_model, heads).eval()
    x = torch.randn(batch, length, d_model, generator=torch.Generator().manual_seed(0))
    found = subjects(layer, batch)
    calls = {"plain": partial(_forward, layer, x, nullcontext, {})}
    calls |= {name: partial(_forward, layer, x, context, options) for name, (context, options) in found.items()}
    times = in_turns(calls, budget)
    shape = f"({batch}, {length}, {d_model}, {heads})"
    return [[name, shape, *_cells(times["plain"], times[name])] for name in found]


@torch.no_grad()
def _forward(layer: mha_ext.MultiHeadAttention, x: Tensor, context: Context, options: dict[str, Any]) -> None:
    with context():
        layer(x, x, x, **options)


def _cells(plain: list[float], other: list[float]) -> list[str]:
    low, median, high = ratios(other, plain)
    taken = (f"{1e3 * quartiles(times).median:.2f}" for times in (plain, other))
    return [*taken, f"{median:.2f} ({low:.2f}-{high:.2f})"]


def text_line(cells: list[str]) -> str:
    """One line of the table on a terminal."""
    return report.text_line(cells, _WIDTHS)


def markdown(lines: list[list[str]], machine: str) -> str:
    """The table for the README, with the machine named under it."""
    table = report.markdown_table(HEADINGS, lines)
    return (
        f"{table}\n\n{machine}. mha_ext.MultiHeadAttention without gradients, (batch, length, d_model, heads); plain: "
        "the forward that returns weights. Taken in turns, entering and leaving `with` counted."
    )
