"""Front of the benchmark in benchmarks/, for `python -m mha_ext bench`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path


def main(argv: list[str]) -> int:
    """Runs the benchmark with the arguments after `bench`; returns its exit code, 2 if it is not there."""
    root = Path(__file__).resolve().parents[1]
    if all((root / part).is_file() for part in ("csrc/library.cpp", "benchmarks/cli.py")):  # a clone
        sys.path.insert(0, str(root))
        cli = importlib.import_module("benchmarks.cli")
    else:
        try:
            cli = importlib.import_module("mha_ext._benchmarks.cli")  # the wheel's copy
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("mha_ext._benchmarks"):
                raise
            print("bench: expected the folder benchmarks/ of a clone, got an installation without it", file=sys.stderr)
            return 2
    return cli.main(argv)
