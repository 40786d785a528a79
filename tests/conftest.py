"""Puts the scripts on sys.path and holds what all tests use."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).parents[1] / "cleanrl_graph"
sys.path.insert(0, str(SCRIPTS))


def pytest_addoption(parser):
    parser.addoption(
        "--virtual-cuda", action="store_true", help="with the CUDA device of virtual_cuda.py"
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes long, `-m 'not slow'` leaves it out")
    config.addinivalue_line("markers", "cuda: needs a CUDA device")
    torch.set_num_threads(1)
    if config.getoption("--virtual-cuda"):
        importlib.import_module("virtual_cuda").install()


@pytest.fixture(autouse=True)
def seeded():
    """Every test starts from the same torch seed, in whatever order they run."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_races(request):
    """With --virtual-cuda: no test uses pinned memory while it is copied."""
    yield
    if request.config.getoption("--virtual-cuda"):
        assert not sys.modules["virtual_cuda"].log.races
