"""The kernels that the rest of the tests do not reach on this machine: those of lesser instruction sets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
LEVELS = ["default", "avx2", "avx512"]  # as ATEN_CPU_CAPABILITY names them
FOUND = torch.backends.cpu.get_cpu_capability().lower()
BEST = LEVELS.index(FOUND) if FOUND in LEVELS else 0
NEEDED = {"default": set(), "avx2": {"avx2", "fma", "f16c"}, "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"}}

# Says which kernels are used and uses them. NumPy's arrays, because PyTorch believes ATEN_CPU_CAPABILITY unchecked.
SCRIPT = """
import numpy, torch
from mha_ext import _C

query, key, value = (torch.from_numpy(numpy.full((1, 2, 70, 8), x, numpy.float32)) for x in (0, 1, 2))
output = torch.ops.mha_ext.attention(query, key, value)[0].numpy()
assert abs(output - 2).max() < 1e-5, output
print(_C.cpu_capability())
"""


def run(level: str | None, *arguments: str, products: str = "onednn") -> subprocess.CompletedProcess[str]:
    """Python in a process of its own, held back to a level (None: not); products: "own" or "onednn"."""
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": level or "", "MHA_EXT_TILE_PRODUCTS": products}
    if level is None:
        del environment["ATEN_CPU_CAPABILITY"]
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)


@pytest.mark.skipif("ATEN_CPU_CAPABILITY" in os.environ, reason="the instruction set is chosen already")
@pytest.mark.parametrize(
    "level, products",
    # The best level runs everywhere else, but not without oneDNN's tile products.
    [*((level, "onednn") for level in LEVELS[:BEST]), (LEVELS[BEST], "own")],
)
def test_values_and_gradients(level, products):
    used = run(level, "-c", SCRIPT + "print(_C.brgemm_available())", products=products)
    assert used.stdout.split()[0] == level, used.stderr
    assert products == "onednn" or used.stdout.split()[1] == "False"
    marked = run(level, "-m", "pytest", "-q", "-x", "-m", "isa", "-p", "no:cacheprovider", "tests", products=products)
    assert marked.returncode == 0, marked.stdout[-4000:] + marked.stderr[-1000:]


def processor_flags() -> set[str]:
    """What the processor can do, as Linux names it; nothing where it does not say."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return {flag for line in lines if line.startswith("flags") for flag in line.partition(":")[2].split()}


@pytest.fixture(scope="module")
def best() -> str:
    """What is used when nothing is asked for."""
    used = run(None, "-c", SCRIPT)
    assert used.returncode == 0, used.stderr
    return used.stdout.strip()


@pytest.mark.parametrize("level", ["avx512", "avx1024", ""])
def test_a_level_beyond_the_processor_or_unknown_is_the_best(level, best):
    used = run(level, "-c", SCRIPT)
    assert used.returncode == 0, used.stderr
    assert used.stdout.strip() == best
    assert NEEDED[best] <= processor_flags()
