"""The rows of the benchmark: what is computed, how much work that is, and what we want to reach."""

from __future__ import annotations

import dataclasses
import fnmatch
from typing import Literal

FLOAT_BYTES = 4
CORE_BACKWARD = 2.5  # five matrix products in the backward, two in the forward
LINEAR_BACKWARD = 2.0  # gradients of input and weight


@dataclasses.dataclass(frozen=True)
class Target:
    """Wanted ratio (best peer's time / ours): base + slope * (g - 1), g = oneDNN's linear rate / torch's."""

    base: float
    slope: float = 0.0

    def ratio(self, g: float) -> float:
        return self.base + self.slope * max(0.0, g - 1.0)


@dataclasses.dataclass(frozen=True)
class Row:
    """One problem. A layer projects (batch, len, heads * head_dim) inputs; a core takes query (batch, heads, q_len,
    head_dim) and key, value (batch, kv_heads, kv_len, head_dim). All in float32.

    work: 'forward' runs without autograd; 'train' is forward and backward for parameters and inputs, from the loss
    sum(output * constant); 'backward' is the second half alone.
    """

    name: str
    kind: Literal["layer", "core"]
    work: Literal["forward", "train", "backward"]
    batch: int
    q_len: int
    heads: int
    head_dim: int
    kv_len: int = 0  # 0: as q_len
    kv_heads: int = 0  # 0: as heads
    feature: str = ""  # for the table
    causal: bool = False
    key_lengths: tuple[int, ...] = ()  # live keys of each sequence; empty: all
    dropout: float = 0.0
    weights: bool = False  # returned
    bias: bool = False  # learned, (1, heads, q_len, kv_len)
    layers: int = 1  # so many sets of inputs, one after the other: keys and values come from memory, not from a cache
    by_default: bool = True  # otherwise chosen by name only
    target: Target | None = None
    share_target: float | None = None  # wanted share of the machine's peak
    bound: Literal["FMA", "read"] = "FMA"  # which peak

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_len", self.kv_len or self.q_len)
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)

    @property
    def d_model(self) -> int:
        return self.heads * self.head_dim

    @property
    def shape(self) -> str:
        if self.kind == "layer":
            return f"({self.batch}, {self.q_len}, {self.d_model}, {self.heads})"
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads} on {self.kv_heads}"
        lengths = f"{self.q_len}" if self.q_len == self.kv_len else f"{self.q_len} x {self.kv_len}"
        return f"({self.batch}, {heads}, {lengths}, {self.head_dim})"

    @property
    def flops(self) -> float:
        """Useful floating point operations of one layer: hidden scores count nothing."""
        lengths = self.key_lengths or (self.kv_len,) * self.batch
        if self.causal:
            scores = sum(min(i + 1, length) for length in lengths for i in range(self.q_len))
        else:
            scores = sum(self.q_len * length for length in lengths)
        core = 4.0 * self.heads * self.head_dim * scores
        linear = 4.0 * self.batch * (self.q_len + self.kv_len) * self.d_model**2 if self.kind == "layer" else 0.0
        forward = core + linear
        backward = CORE_BACKWARD * core + LINEAR_BACKWARD * linear
        return {"forward": forward, "train": forward + backward, "backward": backward}[self.work]

    @property
    def read_bytes(self) -> float:
        """Keys and values of one layer: what has to come from memory at least."""
        return 2.0 * FLOAT_BYTES * self.batch * self.kv_heads * self.kv_len * self.head_dim

    @property
    def score_bytes(self) -> float:
        """Size of one full matrix of scores, as unfused implementations store several of."""
        return float(FLOAT_BYTES) * self.batch * self.heads * self.q_len * self.kv_len

    def small(self, length: int = 16) -> Row:
        """The same kind of work in a size that costs little; the share of padding stays."""
        q_len, kv_len, batch = min(self.q_len, length), min(self.kv_len, length), min(self.batch, 2)
        lengths = tuple(max(1, live * kv_len // self.kv_len) for live in self.key_lengths[:batch])
        return dataclasses.replace(self, batch=batch, q_len=q_len, kv_len=kv_len, key_lengths=lengths, layers=1)


def _layer(
    group: str, work: Literal["forward", "train"], batch: int, length: int, d_model: int, heads: int, **options
) -> Row:
    name = f"{group}-{batch}x{length}x{d_model}x{heads}-{work}"
    return Row(name, "layer", work, batch, length, heads, d_model // heads, **options)


def _core(group: str, work: Literal["forward", "train", "backward"], length: int, head_dim: int = 64, **options) -> Row:
    name = f"{group}-8x{length}x{head_dim}-{work}"
    return Row(name, "core", work, 1, length, heads=8, head_dim=head_dim, **options)


_PLAIN = Target(1.1, 0.9)
_HALF = (512,) * 4
_RAGGED = (64, 128, 192, 256, 320, 384, 448, 512)

ROWS: tuple[Row, ...] = (
    *(
        _layer("plain", work, *shape, target=_PLAIN)
        for shape in ((8, 128, 512, 8), (4, 512, 512, 8), (1, 4096, 768, 12), (16, 64, 256, 4))
        for work in ("forward", "train")
    ),
    # the documents' own example
    _layer("example", "forward", 2, 10, 512, 8, target=Target(1.3, 1.0)),
    _layer("example", "train", 2, 10, 512, 8, target=Target(1.4, 1.1)),
    _layer("example-weights", "train", 2, 10, 512, 8, feature="weights", weights=True, target=Target(1.5, 1.1)),
    _layer("causal", "train", 1, 2048, 512, 8, feature="causal", causal=True, target=Target(1.2, 1.0)),
    _layer("padding", "train", 4, 1024, 512, 8, feature="half padding", key_lengths=_HALF, target=Target(1.6, 1.5)),
    _layer("ragged", "train", 8, 512, 512, 8, feature="ragged", key_lengths=_RAGGED, target=Target(1.3, 1.2)),
    _layer("dropout", "train", 4, 512, 512, 8, feature="dropout 0.1", dropout=0.1, target=Target(2.0, 1.8)),
    _layer("dropout", "train", 1, 2048, 512, 8, feature="dropout 0.1", dropout=0.1, target=Target(3.0, 2.5)),
    _layer("weights", "forward", 4, 512, 512, 8, feature="weights", weights=True, target=Target(1.6, 1.4)),
    _layer("weights", "train", 1, 2048, 512, 8, feature="weights", weights=True, target=Target(1.8, 1.8)),
    Row(
        "bias-2x8x512x64-train",
        "core",
        "train",
        2,
        512,
        8,
        64,
        feature="learned bias",
        bias=True,
        target=Target(1.5, 1.3),
    ),  # fmt: skip
    Row(
        "decode-32on8x4096x128-forward",
        "core",
        "forward",
        1,
        1,
        32,
        128,
        kv_len=4096,
        kv_heads=8,
        feature="decode",
        layers=8,
        target=Target(1.3),
        share_target=0.80,
        bound="read",
    ),  # fmt: skip
    *(_core("core", work, length, share_target=0.75) for length in (2048, 4096) for work in ("forward", "backward")),
    # never slower than a peer
    *(
        _core("sweep", "train", length, head_dim, by_default=False, target=Target(1.0))
        for head_dim in (16, 32, 128, 256)
        for length in (1, 8, 64, 512, 4096)
    ),
    # how time and memory grow with the length; the longest take minutes
    *(_core("length", "train", 1024 * 2**i, by_default=False) for i in range(6)),
)


def select(patterns: str | None, rows: tuple[Row, ...] = ROWS) -> list[Row]:
    """Rows whose names match one of the comma-separated globs, in order; without globs those run by default.

    Raises ValueError for a glob that matches nothing.
    """
    if patterns is None:
        return [row for row in rows if row.by_default]
    chosen: set[str] = set()
    for pattern in filter(None, (part.strip() for part in patterns.split(","))):
        matches = fnmatch.filter((row.name for row in rows), pattern)
        if not matches:
            raise ValueError(f"bench: expected --rows to name rows (see --list), got {pattern!r}")
        chosen.update(matches)
    if not chosen:
        raise ValueError(f"bench: expected --rows to name rows (see --list), got {patterns!r}")
    return [row for row in rows if row.name in chosen]
