"""What the machine can do, measured: the peaks that the benchmark's shares refer to."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import mha_ext

from .timing import best_rate, in_turns, quartiles, ratios


@dataclasses.dataclass(frozen=True)
class Machine:
    """cpu, cores, threads used, instruction set of torch; versions; rates with that many threads.

    fma_gflops: float32, multiplications and additions that stay in registers; exp_giga: exponentials, 10^9 a second, in
    cache; read_gbytes: 10^9 bytes a second from memory; linear_gain: oneDNN's rate for a linear layer over torch's
    (g). projections: who multiplies ours. A machine that others use too changes within minutes: `yardsticks` are for
    what is compared with these rates.
    """

    cpu: str
    cores: int
    threads: int
    capability: str
    torch: str
    mha_ext: str
    fma_gflops: float
    exp_giga: float
    read_gbytes: float
    linear_gain: float
    projections: str = ""

    def describe(self) -> str:
        return (
            f"{self.cpu}, {self.threads} of {self.cores} cores, {self.capability}, torch {self.torch}, "
            f"mha_ext {self.mha_ext}: fp32 {self.fma_gflops:.0f} GF/s, exp {self.exp_giga:.2f} G/s, "
            f"read {self.read_gbytes:.1f} GB/s, oneDNN / torch linear g = {self.linear_gain:.2f}"
            + (f", projections {self.projections}" if self.projections else "")
        )


def probe() -> Machine:
    """Measures with as many threads as torch is set to use; takes about three seconds."""
    pace = read_yardsticks(in_turns(yardsticks(reads=True), budget=2))
    return Machine(
        cpu=_cpu_name(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        capability=torch.backends.cpu.get_cpu_capability(),
        torch=torch.__version__,
        mha_ext=getattr(mha_ext, "__version__", "unknown"),
        fma_gflops=pace.fma_gflops,
        exp_giga=_exp_rate() / 1e9,
        read_gbytes=pace.read_gbytes or 0.0,
        linear_gain=pace.linear_gain,
        projections=_projections(),
    )


class Pace(NamedTuple):
    """What the yardsticks say; see Machine."""

    fma_gflops: float
    read_gbytes: float | None
    linear_gain: float


_FMA_ITERATIONS = 1_000_000
_READ_SIZE = 8192  # a matrix of 256 MB: no cache holds it


def yardsticks(reads: bool) -> dict[str, Callable[[], object]]:
    """Calls that tell the machine's pace, to be timed in turns with what is held against it; `reads`: memory's, too."""
    x, w = torch.randn(1024, 512), torch.randn(512, 512)
    calls: dict[str, Callable[[], object]] = {"FMA": partial(mha_ext._C.multiply_add, _FMA_ITERATIONS)}
    calls |= {f"{name} linear": partial(path, x, w) for name, path in _linear_paths().items()}
    if reads:
        matrix, vector = torch.ones(_READ_SIZE, _READ_SIZE), torch.ones(_READ_SIZE)
        calls |= {"sum": matrix.sum, "product with a vector": partial(torch.mv, matrix, vector)}
    return calls


def read_yardsticks(times: dict[str, list[float]]) -> Pace:
    """From the seconds of their calls. g is 1 where this torch has no oneDNN."""
    reading = [quartiles(times[name]).median for name in ("sum", "product with a vector") if name in times]
    onednn = times.get("oneDNN linear")
    return Pace(
        fma_gflops=mha_ext._C.multiply_add(_FMA_ITERATIONS) / quartiles(times["FMA"]).median / 1e9,
        read_gbytes=4e-9 * _READ_SIZE**2 / min(reading) if reading else None,
        linear_gain=ratios(times["torch linear"], onednn).median if onednn else 1.0,
    )


def _projections() -> str:
    """'tiles', say, or each product's."""
    backends = mha_ext._C.linear_backends()
    names = set(backends.values())
    return names.pop() if len(names) == 1 else ", ".join(f"{product} {name}" for product, name in backends.items())


def _linear_paths() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """torch's own linear layer, and oneDNN's where this torch has it."""
    paths: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"torch": F.linear}
    if torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        paths["oneDNN"] = lambda x, w: torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")
    return paths


def _exp_rate() -> float:
    x = torch.randn(32768 * torch.get_num_threads())  # as many as torch gives one thread at least
    out = torch.empty_like(x)
    return best_rate(lambda: torch.exp(x, out=out), x.numel())


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
