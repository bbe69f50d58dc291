"""Named shapes and option sets, those of the benchmark among them, and the tensors that go with them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.rows import ROWS, Row

DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
}


@dataclass(frozen=True)
class Case:
    """One use of attention: sizes and options. Kinds of masks, biases and layouts are keys of the tables below.

    Cases that differ in their names only are equal.
    """

    name: str = field(compare=False)
    batch: int = 2
    heads: int = 2
    q_len: int = 16
    kv_len: int = 16
    head_dim: int = 8
    kv_heads: int | None = None  # as heads
    value_dim: int | None = None  # as head_dim
    mask: str = "none"
    bias: str = "none"
    causal: str = "none"  # "top_left" or "bottom_right"
    key_lengths: bool | tuple[int, ...] = False  # drawn, or one for each sequence
    dropout_p: float = 0.0
    scale: float | None = None
    need_weights: bool = False
    uniform_dead_rows: bool = False
    average_weights: bool = False
    weights_before_dropout: bool = False
    softcap: float | None = None

    @staticmethod
    def of(row: Mapping[str, Any]) -> Case:
        """A case of 4 heads out of a row of `all_pairs`; its dims are (head_dim, value_dim)."""
        names = {name: row[name] for name in row if name in Case.__dataclass_fields__}
        if "dims" in row:
            names["head_dim"], names["value_dim"] = row["dims"]
        return Case("row", heads=4, **names)

    @staticmethod
    def of_benchmark(row: Row, length: int) -> Case:
        """What a row of the benchmark attends to, with lengths cut to `length`."""
        row = row.small(length)
        return Case(
            row.name,
            row.batch,
            row.heads,
            row.q_len,
            row.kv_len,
            row.head_dim,
            row.kv_heads,
            bias="plane_per_head" if row.bias else "none",
            causal="top_left" if row.causal else "none",
            key_lengths=row.key_lengths,
            dropout_p=row.dropout,
            need_weights=row.weights,
        )

    def options(self) -> dict[str, Any]:
        """The options of the operator that are no tensors."""
        return {
            "is_causal": self.causal != "none",
            "causal_bottom_right": self.causal == "bottom_right",
            "dropout_p": self.dropout_p,
            "scale": self.scale,
            "need_weights": self.need_weights,
            "uniform_dead_rows": self.uniform_dead_rows,
            "average_weights": self.average_weights,
            "weights_before_dropout": self.weights_before_dropout,
            "softcap": self.softcap,
        }


@dataclass
class Inputs:
    """The tensors of a case: what attention takes (`**options` as keywords) and gradients for what it returns."""

    query: Tensor
    key: Tensor
    value: Tensor
    options: dict[str, Any]
    grad_output: Tensor
    grad_weights: Tensor | None
    grad_logsumexp: Tensor

    def leaves(self) -> dict[str, Tensor]:
        """What gradients are taken of, by name."""
        tensors = {"query": self.query, "key": self.key, "value": self.value}
        if self.options.get("bias") is not None:
            tensors["bias"] = self.options["bias"]
        return tensors

    def requires_grad_(self) -> Inputs:
        for tensor in self.leaves().values():
            tensor.requires_grad_()
        return self


# --- How a (B, H, L, D) tensor may lie in memory ------------------------------------------------------------------


def in_heads_last(x: Tensor) -> Tensor:
    """Stored as (B, L, H, D), as a projection leaves it."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def in_inner_transposed(x: Tensor) -> Tensor:
    """Stored as (B, H, D, L): the last dimension has stride L."""
    return x.transpose(2, 3).contiguous().transpose(2, 3)


def in_expanded(x: Tensor) -> Tensor:
    """One batch and one head, seen by all: strides of 0."""
    return x[:1, :1].contiguous().expand(x.shape)


def in_odd_strides(x: Tensor) -> Tensor:
    """Inside a larger buffer: odd offset, rows padded to odd distances, every second element."""
    batch, heads, length, width = x.shape
    buffer = x.new_full((batch, heads + 1, length + 1, 2 * width + 3), float("nan"))
    view = buffer[:, 1:, 1:, 3 : 3 + 2 * width : 2]
    view.copy_(x)
    return view


LAYOUTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "contiguous": torch.Tensor.contiguous,
    "heads_last": in_heads_last,
    "inner_transposed": in_inner_transposed,
    "expanded": in_expanded,
    "odd_strides": in_odd_strides,
}

# --- Masks and biases, by the shape in which they broadcast to (B, H, Lq, Lk) --------------------------------------

BROADCAST: Mapping[str, Callable[[int, int, int, int], tuple[int, ...]]] = {
    "scalar": lambda b, h, q, k: (),
    "keys": lambda b, h, q, k: (b, 1, 1, k),
    "rows": lambda b, h, q, k: (q, 1),
    "heads": lambda b, h, q, k: (h, 1, 1),
    "plane": lambda b, h, q, k: (q, k),
    "plane_per_head": lambda b, h, q, k: (1, h, q, k),
    "plane_per_batch": lambda b, h, q, k: (b, 1, q, k),
    "full": lambda b, h, q, k: (b, h, q, k),
}


def random_mask(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Lets 7 of 10 pass; in whole planes also a row that sees nothing and one whose first half is hidden."""
    mask = torch.rand(shape, generator=generator) < 0.7
    if len(shape) >= 2 and shape[-2] > 2:
        mask[..., 1, :] = False
        mask[..., 2, : shape[-1] // 2] = False
    return mask


def block_mask(q_len: int, kv_len: int, generator: torch.Generator, block: int = 32) -> Tensor:
    """Whole blocks hidden or seen, so that whole tiles are, too."""
    coarse = torch.rand(q_len // block + 1, kv_len // block + 1, generator=generator) < 0.5
    return coarse.repeat_interleave(block, 0).repeat_interleave(block, 1)[:q_len, :kv_len]


def make_mask(kind: str, shape: tuple[int, int, int, int], generator: torch.Generator) -> Tensor | None:
    """A bool mask: a kind of BROADCAST, or "blocks", "inner_transposed", "expanded"."""
    if kind == "none":
        return None
    if kind == "blocks":
        return block_mask(shape[2], shape[3], generator)
    if kind == "inner_transposed":
        return random_mask(shape, generator).transpose(2, 3).contiguous().transpose(2, 3)
    if kind == "expanded":
        return random_mask((shape[0], 1, *shape[2:]), generator).expand(shape)
    return random_mask(BROADCAST[kind](*shape), generator)


def make_bias(
    kind: str, shape: tuple[int, int, int, int], dtype: torch.dtype, generator: torch.Generator
) -> Tensor | None:
    """An additive bias: a kind of BROADCAST, "infinite" (a plane with -inf in it) or "float32" (a plane in float32)."""
    if kind == "none":
        return None
    broadcast = BROADCAST["plane" if kind in ("infinite", "float32") else kind](*shape)
    bias = torch.randn(broadcast, generator=generator)
    if kind == "infinite":
        bias = bias.masked_fill(~random_mask(broadcast, generator), float("-inf"))
    return bias.to(torch.float32 if kind == "float32" else dtype)


CAUSAL = ("none", "top_left", "bottom_right")
MASKS = ("none", *BROADCAST, "blocks", "inner_transposed", "expanded")
BIASES = ("none", *BROADCAST, "infinite", "float32")


def make(case: Case, dtype: torch.dtype = torch.float32, layout: str = "contiguous", seed: int = 0) -> Inputs:
    """The tensors of a case, the same for the same arguments."""
    generator = torch.Generator().manual_seed(seed)
    kv_heads = case.heads if case.kv_heads is None else case.kv_heads
    value_dim = case.head_dim if case.value_dim is None else case.value_dim
    shape = (case.batch, case.heads, case.q_len, case.kv_len)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    lay = LAYOUTS[layout]
    query = lay(normal(case.batch, case.heads, case.q_len, case.head_dim))
    key = lay(normal(case.batch, kv_heads, case.kv_len, case.head_dim))
    value = lay(normal(case.batch, kv_heads, case.kv_len, value_dim))
    options = case.options()
    options["mask"] = make_mask(case.mask, shape, generator)
    options["bias"] = make_bias(case.bias, shape, dtype, generator)
    if case.key_lengths:
        if isinstance(case.key_lengths, tuple):
            lengths = torch.tensor(case.key_lengths)
        else:
            lengths = torch.randint(0, case.kv_len + 1, (case.batch,), generator=generator)
        options["key_lengths"] = lengths if seed % 2 else lengths.int()
    if case.dropout_p > 0:
        options["seed"] = torch.tensor(0x1234_5678_9ABC + seed)
    grad_weights = None
    if case.need_weights:
        grad_weights = lay(normal(case.batch, 1, *shape[2:]))[:, 0] if case.average_weights else lay(normal(*shape))
    return Inputs(
        query=query,
        key=key,
        value=value,
        options=options,
        grad_output=lay(normal(case.batch, case.heads, case.q_len, value_dim)),
        grad_weights=grad_weights,
        grad_logsumexp=torch.randn(shape[:3], generator=generator).to(
            torch.float64 if dtype == torch.float64 else torch.float32
        ),
    )


def benchmark(kind: Literal["layer", "core"], length: int = 270) -> list[Case]:
    """The cases of the benchmark's rows of this kind, each once: forward and train, say, are one.

    Lengths are cut, by default to a little more than a tile of scores.
    """
    return list(dict.fromkeys(Case.of_benchmark(row, length) for row in ROWS if row.kind == kind))


def all_pairs(**factors: Sequence[Any]) -> list[dict[str, Any]]:
    """A short list of combinations in which every two values of any two factors meet at least once."""
    names = list(factors)
    choice = random.Random(0)

    def pairs(row: Mapping[str, Any], name: str, value: Any) -> set[tuple]:
        index = factors[name].index(value)
        return {
            tuple(sorted(((name, index), (other, factors[other].index(row[other]))))) for other in row if other != name
        }

    missing = {
        tuple(sorted(((a, i), (b, j))))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }
    rows = []
    while missing:
        (a, i), (b, j) = min(missing)
        row = {a: factors[a][i], b: factors[b][j]}
        for name in choice.sample(names, len(names)):
            if name not in row:
                values = choice.sample(list(factors[name]), len(factors[name]))
                row[name] = max(values, key=lambda value: len(pairs(row, name, value) & missing))
        for name in names:
            missing -= pairs(row, name, row[name])
        rows.append({name: row[name] for name in names})
    return rows


def row_id(row: Mapping[str, Any]) -> str:
    """The name of a row of `all_pairs` in a test's name."""
    return "-".join("x".join(map(str, value)) if isinstance(value, tuple) else str(value) for value in row.values())
