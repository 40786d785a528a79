"""Environments in worker processes are those of one process, and no process stays behind."""

import contextlib
import multiprocessing
import os
import random
import time
from functools import partial
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from helpers import RandomEnv, sample, small_args, vector
from processes import is_alive
from torch.utils._pytree import tree_flatten

from cleanrl_graph import ppo_graph
from cleanrl_graph.services import workers
from cleanrl_graph.services.check import UsageError, make_envs
from cleanrl_graph.services.workers import WorkerEnvs

NODES = ("graph_edges", "discrete", "nodes")


def in_this_process(makers, first=0):
    """The checked Envs of a script."""
    return make_envs(ppo_graph, small_args(), makers, first)


@contextlib.contextmanager
def started(makers, num_workers, first=0, **flags):
    """WorkerEnvs that are closed at the end."""
    args = small_args(num_workers=num_workers, num_envs=len(makers), **flags)
    make = partial(make_envs, ppo_graph, SimpleNamespace(**vars(args)))
    with contextlib.closing(WorkerEnvs(make, makers, args, first)) as envs:
        yield envs


def same(one, two):
    """Whether two Steps are equal bit by bit."""

    def plain(step):
        leaves, form = tree_flatten(step)
        arrays = [(x.dtype, x.shape, x.tolist()) if hasattr(x, "dtype") else x for x in leaves]
        return arrays, form

    return plain(one) == plain(two)


@pytest.mark.parametrize("observation, action, head", [("mixed", "mixed", "flat"), NODES])
def test_steps_are_the_same(observation, action, head):
    """Every Step is that of Envs bit by bit, the last observations of truncated episodes and what
    is known of those that ended included. The environments are spread evenly, and all processes
    end."""
    makers, rng = [lambda: RandomEnv(observation, action, head)] * 5, np.random.default_rng(0)
    local, finals, ended = in_this_process(makers, 10), 0, []
    with started(makers, 2, 10) as envs:
        assert [span for _, _, span in envs.workers] == [slice(0, 3), slice(3, 5)]
        processes = [process for process, _, _ in envs.workers]
        assert same(local.reset(7), envs.reset(7))
        for _ in range(15):
            actions = [sample(local.action_space, rng) if head == "flat" else 0] * 5
            step, other = local.step(actions), envs.step(actions)
            assert same(step, other)
            finals += len(other.finals)
            ended += other.infos
        assert envs.leaves == local.leaves
        assert envs.action_space == local.action_space and envs.num_steps == 15
        assert finals and {i for i, _ in ended} == set(range(5))
        assert same(local.reset(7), envs.reset(7))
    assert [process.exitcode for process in processes] == [0, 0]


class Own(gym.Env):
    """Shows [number, the id of its process, draws of the global generators]."""

    action_space = spaces.Discrete(9)
    observation_space = vector(4, low=-np.inf, high=np.inf)

    number = t = 0

    def observe(self):
        return np.float32([self.number, os.getpid() % 65536, random.random(), np.random.random()])

    def reset(self, *, seed=None, options=None):
        return self.observe(), {}

    def step(self, action):
        self.t += 1
        return self.observe(), 1.0, False, False, {}


def simulate(pipe):
    """Answers each number by the next one."""
    for number in iter(pipe.recv, None):
        pipe.send(number + 1)


class Simulated(Own):
    """Its numbers come from a process that it starts; the last one is that process's id."""

    def __init__(self):
        context = multiprocessing.get_context("fork")
        self.pipe, child = context.Pipe()
        self.simulator = context.Process(target=simulate, args=(child,), daemon=True)
        self.simulator.start()

    def observe(self):
        self.pipe.send(self.t)
        return np.float32([self.pipe.recv(), 0, 0, self.simulator.pid])


def test_environments_that_start_processes():
    """In a worker, which ends them when it ends."""
    begin = time.time()
    with started([Simulated] * 2, 2) as envs:
        rows = envs.reset(0).obs.values[0]
        simulators = rows[:, 3].astype(int).tolist()
        assert rows[:, 0].tolist() == [1, 1] and all(map(is_alive, simulators))
        assert envs.step([0] * 2).obs.values[0][:, 0].tolist() == [2, 2]
    assert time.time() - begin < 10 and not any(map(is_alive, simulators))


@pytest.mark.slow
def test_spawned_workers(monkeypatch):
    """Where processes cannot be forked they are spawned; makers that can be pickled, as those of
    the scripts are, give the same Steps."""
    name = "cleanrl_graph.envs:PoissonGraph-v0"
    args = SimpleNamespace(env_id=name, env_kwargs={"episode_length": 3})
    makers = [partial(ppo_graph.make_env, args, i) for i in range(2)]
    monkeypatch.setattr(workers.mp, "get_all_start_methods", lambda: ["spawn"])
    local = in_this_process(makers)
    with started(makers, 1) as envs:
        assert same(local.reset(3), envs.reset(3))
        for _ in range(4):
            assert same(local.step([0, 0]), envs.step([0, 0]))
        with pytest.raises(UsageError, match="env 0, step 5"):
            envs.step(["left", 0])


def test_global_generators():
    """Environments that draw from the global generators draw other numbers in each worker, the same
    in each run."""
    draws = []
    for _ in range(2):
        with started([Own] * 4, 2) as envs:
            rows = np.array([envs.reset(0).obs.values[0], envs.step([0] * 4).obs.values[0]])
        draws.append(rows[:, :, 2:])
        assert len(np.unique(rows[:, :, 1])) == 2
    assert np.array_equal(*draws) and len(np.unique(draws[0])) == 16


def test_entries_that_differ_are_found_before_workers_start():
    """An entry of --env-kwargs whose actions are others, also one whose environments are in another
    worker."""

    class Wide(Own):
        action_space = spaces.Discrete(8)

    with pytest.raises(UsageError, match="--env-kwargs: not all entries have the action space"):
        with started([Own, Wide, Own, Wide], 4, env_kwargs=[{}, {}]):
            pass
