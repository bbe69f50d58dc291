"""Fixtures that every test file shares."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # some tests use more threads than there are cores: do not spin
import torch


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
