"""Runs in processes of their own, which tests stop, kill and resume, alone and as ranks."""

import contextlib
import importlib
import multiprocessing as mp
import os
import re
import resource
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import shared_blocks
from helpers import small_args
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from cleanrl_graph import services

FORK = mp.get_context("fork")  # a process that has torch already
HERE = {path.stem for path in shared_blocks.scripts()}
SCRIPTS = [
    name for name in ("ppo_graph", "ppo_framestack", "ppo_lstm_sparse", "ppo_gtrxl") if name in HERE
]
SMALL = {
    "ppo_framestack": {"obs_shifts": "-3:0"},
    "ppo_lstm_sparse": {"lstm_dim": 8},
    "ppo_gtrxl": {"dim": 8, "num_heads": 2, "memory_length": 5},
}


def args_of(run_dir, script="ppo_graph", **flags):
    """The script and the flags for 6 updates with a checkpoint after every other one."""
    module = importlib.import_module(f"cleanrl_graph.{script}")
    defaults = dict(run_dir=str(run_dir), total_timesteps=144, checkpoint_every=2, save_model=True)
    return module, small_args(module, **SMALL.get(script, {}) | defaults | flags)


def train(run_dir, script="ppo_graph", **flags):
    """The folder of the run."""
    services.run(*args_of(run_dir, script, **flags))
    return folder_of(run_dir)


def start(run_dir, script="ppo_graph", patch=lambda module: None, **flags):
    """A process that trains, in a process group of its own; `patch` is called in it before."""
    module, args = args_of(run_dir, script, **flags)

    def target():
        os.setpgid(0, 0)
        tqdm.set_lock(threading.RLock())  # its own may be held when this process dies
        patch(module)
        services.run(module, args)

    process = FORK.Process(target=target)
    process.start()
    return process


def folder_of(run_dir):
    """The only folder of a run that has ended or has a checkpoint."""
    (folder,) = {
        path.parent for name in ("model.pt", "*.ckpt") for path in Path(run_dir).glob(f"*/{name}")
    }
    return folder


def newest(run_dir):
    """The step of the newest checkpoint, 0 if there is none."""
    paths = Path(run_dir).glob("*/checkpoint_*.ckpt")
    return max((int(path.stem.split("_")[1]) for path in paths), default=0)


def begun_earlier(run_dir):
    """The names of logs hold seconds, by which they are read one after the other: that of a run
    that was killed gets an earlier one, without waiting. A run that was killed before its first
    checkpoint is moved out of the way."""
    for path in list(Path(run_dir).glob("*/events*")):
        earlier = lambda match: f"tfevents.{int(match[1]) - 1000}."
        path.rename(path.with_name(re.sub(r"tfevents\.(\d+)\.", earlier, path.name)))
    for folder in list(Path(run_dir).iterdir()):
        if not list(folder.glob("*.ckpt")):
            folder.rename(Path(run_dir).parent / f"{folder.name}.killed")


@contextlib.contextmanager
def full_disk(limit):
    """No file may grow beyond `limit` bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def wait_for(condition, seconds=60):
    end = time.time() + seconds
    while not condition():
        assert time.time() < end, "waited too long"
        time.sleep(0.005)


def children(pid):
    """Process ids of the children that are alive."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rsplit(")", 1)[1].split()[:2]
        except OSError:
            continue
        if int(parent) == pid and state != "Z":
            found.append(int(stat.parent.name))
    return found


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


class Dies:
    """Makes a process kill -9 itself, or send a signal to its group, in the `at`-th call of a
    function; only those count that have `arg` in them."""

    def __init__(self, owner, name, at, arg=None, number=signal.SIGKILL):
        self.owner, self.name, self.at, self.arg, self.number = owner, name, at, arg, number

    def __call__(self, module):
        owner, calls = module.Envs if self.owner == "Envs" else self.owner, []
        original = getattr(owner, self.name)

        def dying(*args, **kwargs):
            if self.arg is None or self.arg in args:
                calls.append(0)
                if len(calls) == self.at:
                    kill = os.kill if self.number == signal.SIGKILL else os.killpg
                    kill(os.getpid(), self.number)
            return original(*args, **kwargs)

        setattr(owner, self.name, dying)
        flush_always()


def flush_always():
    """Logs are on the disk at once, also what comes after the last checkpoint."""
    original = SummaryWriter.add_scalar

    def add_scalar(self, *args):
        original(self, *args)
        self.flush()

    SummaryWriter.add_scalar = add_scalar


def start_ranks(run_dir, script="ppo_graph", patch=lambda module: None, num_ranks=2, **flags):
    """The processes of the ranks, as torchrun starts them, but forked, which saves the imports;
    `patch` is called in each of them before it trains. What rank k prints is in the file
    `run_dir`.k"""
    module, args = args_of(run_dir, script, **flags)
    with contextlib.closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def target(rank):
        os.setpgid(0, 0)
        tqdm.set_lock(threading.RLock())
        os.dup2(os.open(f"{run_dir}.{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        module.RANK, module.WORLD_SIZE = rank, num_ranks
        patch(module)
        services.run(module, args)

    processes = [FORK.Process(target=target, args=(rank,)) for rank in range(num_ranks)]
    for process in processes:
        process.start()
    return processes


def train_ranks(run_dir, script="ppo_graph", patch=lambda module: None, **flags):
    """The exit codes of the ranks, which must end within a minute."""
    processes, end = start_ranks(run_dir, script, patch, **flags), time.time() + 60
    for process in processes:
        process.join(max(0, end - time.time()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes
