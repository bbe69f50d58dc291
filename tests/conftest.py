"""Fixtures that every test file shares."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # some tests use more threads than there are cores: do not spin
import torch

from tests.commands import ROOT, run


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "isa: is also run with the kernels of every instruction set (test_isa.py)")


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Every test starts from the same random numbers and leaves the thread count as it was."""
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def set_tile_size() -> Iterator[Callable[[int, int, int, int], None]]:
    """mha_ext._C.set_tile_size, undone after the test."""
    from mha_ext import _C

    before = _C.tile_size()
    yield _C.set_tile_size
    _C.set_tile_size(*before)


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a new environment with mha_ext's wheel, and torch from the environment that runs the tests."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", folder, ROOT)
    wheels = list(folder.glob("mha_ext-*.whl"))
    assert len(wheels) == 1, wheels
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv")
    python = folder / "venv" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheels[0])
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    # A plain path: what lies there can be imported, but mha_ext's own editable installation is not in effect.
    (Path(site) / "torch.pth").write_text(str(Path(torch.__file__).parents[1]) + "\n")
    return python
