"""Training under torch.compile against eager mode: `python -m mha_ext bench --compiled`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

import mha_ext
from mha_ext.train.model import SelfAttentionBlock

from . import report
from .timing import in_turns, quartiles, ratios

MARKS = ("<!-- compiled: begin -->", "<!-- compiled: end -->")
HEADINGS = ("compiled", "against", "its ms", "compiled ms", "ratio (quartiles)")
EAGER = "itself in eager mode"
_TOLERANCE = 1e-3  # of results and gradients of unit size in float32
_WIDTHS = (54, 32, 8, 12, 18)


@dataclass(frozen=True)
class Subject:
    """What is compiled, others that it is measured against once they are compiled too, and the input of all."""

    name: str
    module: nn.Module
    x: Tensor
    others: dict[str, nn.Module] = field(default_factory=dict)


class SelfAttention(nn.Module):
    """mha_ext.MultiHeadAttention with one input and one result."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.attention = mha_ext.MultiHeadAttention(d_model, heads)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


def layer(batch: int, length: int, d_model: int, heads: int) -> Subject:
    """mha_ext.MultiHeadAttention alone."""
    name = f"mha_ext.MultiHeadAttention, ({batch}, {length}, {d_model}, {heads})"
    return Subject(name, SelfAttention(d_model, heads), _input(batch, length, d_model))


def block(batch: int, length: int, d_model: int, heads: int) -> Subject:
    """A pre-norm Transformer block with ours, and its like with F.scaled_dot_product_attention."""
    ours, sdpa = (
        SelfAttentionBlock(attention, d_model, heads, dropout=0.0, is_causal=False) for attention in ("mha_ext", "sdpa")
    )
    sdpa.load_state_dict(ours.state_dict())
    name = f"pre-norm Transformer block, ({batch}, {length}, {d_model}, {heads})"
    return Subject(name, ours, _input(batch, length, d_model), {"the block with SDPA, compiled": sdpa})


def _input(*size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0)).requires_grad_()


def measurements(quick: bool, budget: float) -> Iterator[list[str]]:
    """The lines of the table, each once it is measured; there is nothing to leave out when it is to be quick."""
    for subject in (layer(8, 128, 512, 8), block(8, 128, 512, 8)):
        yield from measure(subject, budget)


def measure(subject: Subject, budget: float) -> list[list[str]]:
    """The cells of a line for eager mode and for each of the others, all timed in turns for about `budget` seconds.

    Raises RuntimeError if they disagree, or if torch.compile finds no compiler.
    """
    torch.compiler.reset()
    compiled = torch.compile(subject.module, fullgraph=True)
    against = {EAGER: subject.module}
    against |= {name: torch.compile(module, fullgraph=True) for name, module in subject.others.items()}
    for name, module in against.items():
        _check_agreement(f"{subject.name} and {name}", subject.x, compiled, module)
    calls = {"compiled": partial(_train, compiled, subject.x)}
    calls |= {name: partial(_train, module, subject.x) for name, module in against.items()}
    times = in_turns(calls, budget)
    return [[subject.name, name, *_cells(times[name], times["compiled"])] for name in against]


def _cells(other: list[float], compiled: list[float]) -> list[str]:
    low, median, high = ratios(other, compiled)
    taken = (f"{1e3 * quartiles(times).median:.1f}" for times in (other, compiled))
    return [*taken, f"{median:.2f} ({low:.2f}-{high:.2f})"]


def _train(module: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Forward and backward for input and parameters."""
    module(x).backward(x.detach())


def _check_agreement(names: str, x: Tensor, *modules: Callable[[Tensor], Tensor]) -> None:
    """Results and gradients of the input."""
    found = []
    for module in modules:
        y = module(x)
        found.append((y.detach(), *torch.autograd.grad(y, x, x.detach())))
    difference = max((a - b).abs().max().item() for a, b in zip(*found, strict=True))
    if not difference < _TOLERANCE:
        raise RuntimeError(f"bench: expected {names} to agree, got a difference of {difference:g}")


def text_line(cells: list[str]) -> str:
    """One line of the table on a terminal."""
    return report.text_line(cells, _WIDTHS)


def markdown(lines: list[list[str]], machine: str) -> str:
    """The table for the README, with the machine named under it."""
    table = report.markdown_table(HEADINGS, lines)
    return (
        f"{table}\n\n{machine}. Forward and backward, (batch, length, d_model, heads). "
        "The ratio is the other's time over that of the compiled one, taken in turns."
    )
