"""The same tests with the kernels of every instruction set that this machine has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
LEVELS = ["default", "avx2", "avx512"]  # as ATEN_CPU_CAPABILITY names them


def best_level() -> int:
    """The index of the highest level of this machine."""
    found = torch.backends.cpu.get_cpu_capability().lower()
    return LEVELS.index(found) if found in LEVELS else 0


def run(level: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "ATEN_CPU_CAPABILITY": level, **environment},
        capture_output=True,
        text=True,
        timeout=900,
    )


# With oneDNN held back to SSE4.1, tile products run in the kernels' own matrix product.
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("onednn", ["ALL", "SSE41"])
def test_values_and_gradients(level, onednn):
    if "ATEN_CPU_CAPABILITY" in os.environ:
        pytest.skip("already inside of one")
    if LEVELS.index(level) > best_level():
        pytest.skip(f"no {level} on this machine")
    used = run(level, "-c", "import mha_ext; print(mha_ext._C.cpu_capability())")
    assert used.stdout.strip() == level, used.stderr
    marked = run(
        level, "-m", "pytest", "-q", "-x", "-m", "isa", "-p", "no:cacheprovider", "tests", ONEDNN_MAX_CPU_ISA=onednn
    )
    assert marked.returncode == 0, marked.stdout[-4000:] + marked.stderr[-1000:]
