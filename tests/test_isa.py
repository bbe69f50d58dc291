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


def run(level: str, onednn: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own, with PyTorch and us held back to a level, oneDNN to another."""
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": level, "ONEDNN_MAX_CPU_ISA": onednn}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)


@pytest.mark.skipif("ATEN_CPU_CAPABILITY" in os.environ, reason="the instruction set is chosen already")
@pytest.mark.parametrize(
    "level, onednn",
    # The best level runs everywhere else, but not without oneDNN's fast kernels.
    [*((level, "ALL") for level in LEVELS[:BEST]), (LEVELS[BEST], "SSE41")],
)
def test_values_and_gradients(level, onednn):
    used = run(level, onednn, "-c", "from mha_ext import _C; print(_C.cpu_capability())")
    assert used.stdout.strip() == level, used.stderr
    marked = run(level, onednn, "-m", "pytest", "-q", "-x", "-m", "isa", "-p", "no:cacheprovider", "tests")
    assert marked.returncode == 0, marked.stdout[-4000:] + marked.stderr[-1000:]
