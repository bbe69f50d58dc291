"""Fixtures that every test file shares."""

from __future__ import annotations

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "isa: is also run with the kernels of every instruction set (test_isa.py)")


@pytest.fixture(autouse=True)
def seeded():
    """Every test starts from the same random numbers and leaves the thread count as it was."""
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
