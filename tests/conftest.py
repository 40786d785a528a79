"""What all tests use. pyproject.toml puts the repository's root and this folder on sys.path."""

import importlib
import os
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
IGNORED = {
    "__pycache__",
    "venv",
}  # folders that may change; so may those whose names begin with a dot
BEFORE = pytest.StashKey[set]()  # the files in the checkout
LEFT = pytest.StashKey[list]()  # those that were not there when the tests began


def files_of(folder: Path) -> set[str]:
    """The files in a checkout, but for those of git, virtual environments and caches."""
    paths = set()
    for at, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in IGNORED and name[0] != "."]
        paths |= {os.path.relpath(os.path.join(at, name), folder) for name in names}
    return paths


def pytest_addoption(parser):
    parser.addoption(
        "--virtual-cuda", action="store_true", help="with the CUDA device of virtual_cuda.py"
    )


def pytest_configure(config):
    torch.set_num_threads(1)
    if config.getoption("--virtual-cuda"):
        importlib.import_module("virtual_cuda").install()


def is_worker(config) -> bool:
    """Whether this is a process of pytest-xdist that runs tests for another one."""
    return hasattr(config, "workerinput")


def pytest_sessionstart(session):
    if not is_worker(session.config):
        session.config.stash[BEFORE] = files_of(ROOT)


def pytest_sessionfinish(session):
    """Tests write to folders of their own: files that they leave in the checkout are a failure."""
    if is_worker(session.config):
        return
    left = sorted(files_of(ROOT) - session.config.stash[BEFORE])
    session.config.stash[LEFT] = left
    if left:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    left = config.stash.get(LEFT, [])
    if left:
        terminalreporter.section("files that the tests left in the checkout", red=True)
        for path in left:
            terminalreporter.write_line(path)


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
