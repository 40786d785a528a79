"""Puts the scripts on sys.path and holds what all tests use."""

import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).parents[1] / "cleanrl_graph"
sys.path.insert(0, str(SCRIPTS))


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes long, `-m 'not slow'` leaves it out")
    config.addinivalue_line("markers", "cuda: needs a CUDA device")
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded():
    """Every test starts from the same torch seed, in whatever order they run."""
    torch.manual_seed(0)
