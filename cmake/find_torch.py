"""Prints, for CMake, where torch is: its folder; its version; the folder with pybind11's headers. Empty: not found.

Runs in the Python that builds and does not import torch, which would take seconds.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path


def package(name: str) -> Path | None:
    """The folder of an installed package."""
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec and spec.origin else None


def main() -> None:
    torch, version, pybind11 = package("torch"), "", None
    if torch:
        found = re.search(r"__version__\s*=\s*'([^']+)'", (torch / "version.py").read_text())
        version = found[1] if found else ""
        folders = [torch / "include"] + ([package_dir / "include"] if (package_dir := package("pybind11")) else [])
        pybind11 = next((folder for folder in folders if (folder / "pybind11" / "pybind11.h").is_file()), None)
    print(torch or "", version, pybind11 or "", sep=";")


main()
