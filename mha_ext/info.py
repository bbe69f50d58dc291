"""What is installed and what it uses on this machine."""

from __future__ import annotations

import platform
from typing import TypedDict

import torch

from . import _C, _build


class Info(TypedDict):
    """What `info` returns."""

    version: str
    torch: str
    built_for_torch: str
    compiler: str
    python: str
    cpu_capability: str
    tile_products: str
    projections: dict[str, str]
    keep_mb: int
    threads: int
    interop_threads: int


def info() -> Info:
    """Versions, the instruction set in use, the backends of the matrix products, and threads.

    cpu_capability is 'default', 'avx2' or 'avx512': the best that the processor, this build and the environment
    variable ATEN_CPU_CAPABILITY allow. tile_products is 'onednn' or 'own': who multiplies the float32 tiles of
    attention. projections is 'tiles' (our own), 'onednn' or 'blas' for each product of a linear layer: the fastest,
    measured at first use. keep_mb: how much memory of freed results is kept for later calls at most.
    """
    return {
        "version": _build.VERSION,
        "torch": torch.__version__,
        "built_for_torch": _build.TORCH_VERSION,
        "compiler": f"{_build.COMPILER}, {_build.BUILD_TYPE}",
        "python": platform.python_version(),
        "cpu_capability": _C.cpu_capability(),
        "tile_products": "onednn" if _C.brgemm_available() else "own",
        "projections": _C.linear_backends(),
        "keep_mb": _C.kept_memory()[1] >> 20,
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
    }


def main(argv: list[str]) -> int:
    """`python -m mha_ext info`: prints what `info` returns, a line each, or as JSON with --json."""
    import json

    from .cli import CommandError, Parser, fail

    parser = Parser(
        prog="mha-ext info",
        description="Versions, the instruction set in use, who multiplies the matrices, and threads.",
        epilog="ATEN_CPU_CAPABILITY=avx2 or =default picks older instructions than the processor has; "
        "MHA_EXT_LINEAR=tiles, =onednn or =blas picks who multiplies in projections, "
        "MHA_EXT_TILE_PRODUCTS=own or =onednn in the tiles of attention; "
        "OMP_NUM_THREADS sets the threads; MHA_EXT_KEEP_MB=N limits the memory kept between calls.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")
    try:
        as_json = parser.parse_args(argv).json
    except CommandError as error:
        return fail(parser.prog, error)
    try:
        found = info()
    except ValueError as error:  # of an environment variable
        return fail(parser.prog, error)
    if as_json:
        print(json.dumps(found, indent=2))
        return 0
    for name, value in found.items():
        text = ", ".join(f"{key} {item}" for key, item in value.items()) if isinstance(value, dict) else value
        print(f"{name.replace('_', ' '):<16}{text}")
    return 0
