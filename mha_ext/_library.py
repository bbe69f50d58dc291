"""Loads libmha_ext, the compiled operators, into PyTorch: importing this module does it, once.

Raises ImportError with one sentence that says what to do when the library is missing or was built for another torch.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

LIBRARY = Path(__file__).with_name("libmha_ext.dylib" if sys.platform == "darwin" else "libmha_ext.so")


def _rebuild() -> str:
    """What to do about a library that does not load."""
    advice = "build it with `make build` in the source tree, or with `pip install --no-build-isolation .`"
    if Path(__file__).parents[1].joinpath("CMakeLists.txt").is_file():
        advice += "; this is the source folder, and an installed mha_ext is found from any other"
    return advice


def _release(version: str) -> str:
    """'2.13.0+cpu' -> '2.13': releases with the same two numbers are binary compatible."""
    return ".".join(version.split("+")[0].split(".")[:2])


def _load() -> str:
    """Checks and loads the library; returns the version of mha_ext it was built as."""
    try:
        from ._build import TORCH_VERSION, VERSION
    except ModuleNotFoundError:
        raise ImportError(f"mha_ext: expected the compiled library {LIBRARY}, found none; {_rebuild()}") from None
    if not LIBRARY.is_file():
        raise ImportError(f"mha_ext: expected the compiled library {LIBRARY}, found none; {_rebuild()}")
    if _release(TORCH_VERSION) != _release(torch.__version__):
        raise ImportError(
            f"mha_ext: expected torch {_release(TORCH_VERSION)}, for which {LIBRARY.name} was built, "
            f"got {torch.__version__}; {_rebuild()}"
        )
    try:
        torch.ops.load_library(LIBRARY)
    except OSError as error:
        raise ImportError(f"mha_ext: expected {LIBRARY.name} to load, got: {error}; {_rebuild()}") from None
    return VERSION


__version__ = _load()
