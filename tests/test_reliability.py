"""X3 and what stops a run: kill -9, signals, faults of environments, bad numbers, damaged checkpoints, a full disk."""

import importlib
import json
import multiprocessing as mp
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import ppo_graph
import pytest
import torch
from gymnasium import spaces
from helpers import small_args, vector
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

FORK = mp.get_context("fork")  # a process that has torch already
GRAPH = dict(env_id="envs:PoissonGraph-v0", env_kwargs={"episode_length": 5})

# name -> (script, flags): what is kept between two updates, all of it
RUNS = {
    "graph, statistics": ("ppo_graph", GRAPH | dict(norm_obs=True)),
    "graph, workers": ("ppo_graph", GRAPH | dict(norm_obs=True, num_workers=2)),
    "graph, JobShop": ("ppo_graph", dict(env_id="envs:JobShop-v0", anneal_lr=False, target_kl=0.01)),
    "graph, pairs": ("ppo_graph", dict(env_id="envs:PairNodes-v0", autoregressive=True)),
    "shifts, time limit": ("ppo_framestack", dict(env_id="envs:StatelessCartPole-v1", obs_shifts="-11:0",
                                                  action_shifts="-12,-1", reward_shifts="-9:-1", norm_obs=True)),
    "shifts, workers": ("ppo_framestack", dict(env_id="envs:LastGraphs-v0", num_workers=2, obs_shifts="-3:0")),
    "LSTM, remembered edges": ("ppo_lstm_sparse", dict(env_id="envs:GraphExplore-v0", remember_edges=True, lstm_dim=8,
                                                       prev_action=True, prev_reward=True)),
    "LSTM, workers": ("ppo_lstm_sparse", dict(env_id="envs:GraphExplore-v0", lstm_dim=8, num_workers=2,
                                              norm_obs=True)),
    "LSTM, no ids": ("ppo_lstm_sparse", dict(env_id="envs:Recall-v0", lstm_dim=8)),
    "transformer, previous": ("ppo_gtrxl", dict(env_id="envs:StatelessCartPole-v1", prev_action=True, prev_reward=True,
                                                memory_length=11, dim=8, num_heads=2, norm_obs=True)),
    "transformer, workers": ("ppo_gtrxl", dict(env_id="envs:GraphExplore-v0", memory_length=5, dim=8, num_heads=2,
                                               prev_action=True, num_workers=2)),
}


def args_of(run_dir, script="ppo_graph", **flags):
    module = importlib.import_module(script)
    defaults = dict(run_dir=str(run_dir), total_timesteps=144, checkpoint_every=1, keep_checkpoints=100,
                    save_model=True)
    return module, small_args(module, **defaults | flags)


def train(run_dir, script="ppo_graph", **flags):
    """The folder of the run."""
    module, args = args_of(run_dir, script, **flags)
    module.main(args)
    return folder_of(run_dir)


def start(run_dir, script="ppo_graph", **flags):
    """A process that trains."""
    module, args = args_of(run_dir, script, **flags)
    process = FORK.Process(target=module.main, args=(args,))
    process.start()
    return process


def folder_of(run_dir):
    (folder,) = Path(run_dir).iterdir()
    return folder


def weights(folder):
    return torch.load(Path(folder) / "model.pt", weights_only=True)["model"]


def assert_equal(a, b):
    assert list(a) == list(b)
    for name in a:
        assert torch.equal(a[name], b[name]), name


def log_of(folder):
    """name -> [(step, value)], without what depends on the clock."""
    log = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    log.Reload()
    return {name: [(event.step, event.value) for event in log.Scalars(name)]
            for name in log.Tags()["scalars"] if name != "charts/SPS"}


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


def shared_memory():
    return set(os.listdir("/dev/shm"))


# ---- Checkpoint and resume ----
@pytest.mark.parametrize("name", RUNS)
def test_resume_is_bitwise_the_same(name, tmp_path):
    """X3: a run that lost everything after its k-th checkpoint ends with the weights and the log of one that did not.
    The log file still holds what came after that checkpoint."""
    script, flags = RUNS[name]
    whole = train(tmp_path / "a", script, **flags)
    k = random.Random(name).randrange(1, 6)
    folder = tmp_path / "b" / whole.name
    shutil.copytree(whole, folder)
    for path in ppo_graph.checkpoints_in(str(folder))[:6 - k]:
        os.remove(path)
    (folder / "model.pt").unlink()
    module, args = args_of(tmp_path / "b", script, resume="auto", **flags)
    module.main(args)
    assert_equal(weights(folder), weights(whole))
    assert log_of(folder) == log_of(whole)
    last = [ppo_graph.load_checkpoint(ppo_graph.checkpoints_in(str(path))[0]) for path in (folder, whole)]
    for part in ("random", "envs", "actor", "optimizer", "iteration", "num_steps"):
        assert torch.equal(*(flat(state[part]) for state in last)), part
    assert list(last[0]["logger"]["recent"]) == list(last[1]["logger"]["recent"])


def flat(value):
    """All bytes of nested values in one tensor."""
    return torch.frombuffer(bytearray(repr(plain(value)).encode()), dtype=torch.uint8)


def plain(value):
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value.tolist() if isinstance(value, (torch.Tensor, np.ndarray)) else value


def newest(run_dir):
    """The step of the newest checkpoint, 0 if there is none."""
    return max((int(path.stem.split("_")[1]) for path in Path(run_dir).glob("*/checkpoint_*.ckpt")), default=0)


KILLED = ["graph, workers", "shifts, time limit", "LSTM, remembered edges", "transformer, workers"]


@pytest.mark.parametrize("name", KILLED)
def test_killed_at_a_random_moment(name, tmp_path):
    """X3: kill -9 twice in a run, wherever it is, and the weights and the log are those of an uninterrupted run. Its
    workers leave and no shared memory stays."""
    script, flags = RUNS[name]
    flags = flags | dict(total_timesteps=480, keep_checkpoints=2)
    whole, rng, memory = train(tmp_path / "a", script, **flags), random.Random(), shared_memory()
    for kill in range(2):
        process = start(tmp_path / "b", script, resume="auto", **flags)
        steps = 24 * rng.randrange(4 + 8 * kill, 9 + 8 * kill)
        wait_for(lambda: newest(tmp_path / "b") >= steps)
        time.sleep(rng.random() * 0.03)
        workers = children(process.pid)
        process.kill()
        process.join()
        wait_for(lambda: not any(map(is_alive, workers)), 20)
    assert process.exitcode == -signal.SIGKILL and len(workers) == flags.get("num_workers", 0)
    folder = train(tmp_path / "b", script, resume="auto", **flags)
    assert_equal(weights(folder), weights(whole))
    assert log_of(folder) == log_of(whole)
    assert shared_memory() <= memory
