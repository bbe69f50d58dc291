"""Loads libmha_ext, the compiled operators, into PyTorch: importing this module does it, once.

Raises ImportError with one sentence that says what to do when the library is missing or was built for another torch.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

REBUILD = "build it with `make build` in the source tree, or with `pip install --no-build-isolation .`"
if Path(__file__).parents[1].joinpath("CMakeLists.txt").is_file():
    REBUILD += "; this is the source folder, and an installed mha_ext is found from any other"
LIBRARY = Path(__file__).with_name("libmha_ext.dylib" if sys.platform == "darwin" else "libmha_ext.so")


def _release(version: str) -> str:
    """'2.13.0+cpu' -> '2.13': releases with the same two numbers are binary compatible."""
    return ".".join(version.split("+")[0].split(".")[:2])


def _load() -> str:
    """Checks and loads the library; returns the version of mha_ext it was built as."""
    try:
        from ._build import TORCH_VERSION, VERSION
    except ModuleNotFoundError:
        raise ImportError(f"mha_ext: expected the compiled library {LIBRARY}, found none; {REBUILD}") from None
    if not LIBRARY.is_file():
        raise ImportError(f"mha_ext: expected the compiled library {LIBRARY}, found none; {REBUILD}")
    if _release(TORCH_VERSION) != _release(torch.__version__):
        raise ImportError(
            f"mha_ext: expected torch {_release(TORCH_VERSION)}, for which {LIBRARY.name} was built, "
            f"got {torch.__version__}; {REBUILD}"
        )
    try:
        torch.ops.load_library(LIBRARY)
    except OSError as error:
        raise ImportError(f"mha_ext: expected {LIBRARY.name} to load, got: {error}; {REBUILD}") from None
    return VERSION


__version__ = _load()
