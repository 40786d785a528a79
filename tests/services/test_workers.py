"""Environments in worker processes are those of one process, and no process stays behind."""

import contextlib
import multiprocessing
import multiprocessing.connection as mp_connection
import os
import random
import signal
import time
from functools import partial
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from helpers import RandomEnv, sample, small_args, vector
from processes import is_alive, wait_for

from cleanrl_graph import ppo_graph
from cleanrl_graph.services import workers
from cleanrl_graph.services.check import UsageError, make_envs
from cleanrl_graph.services.workers import WorkerEnvs


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


def plain(value):
    """Nested tuples, dicts and arrays as what == compares, with dtypes."""
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    if isinstance(value, (list, dict)):
        return [plain(v) for v in (value.items() if isinstance(value, dict) else value)]
    return (value.dtype, value.shape, value.tolist()) if isinstance(value, np.ndarray) else value


def same(a, b):
    assert type(a) is type(b) is ppo_graph.Step and plain(a) == plain(b)


def some_actions(envs, step, rng):
    """One action per environment, a row of the observation where the actions choose one."""
    group = ppo_graph.parts_of(envs.action_space, envs.leaves, small_args())[0].group
    rows = np.split(step.obs.counts[group], len(step.reward)) if group else None
    if rows:
        return [int(rng.integers(num[0])) for num in rows]
    return [sample(envs.action_space, rng) for _ in step.reward]


@pytest.mark.parametrize(
    "observation, action, head", [("mixed", "mixed", "flat"), ("graph_edges", "discrete", "nodes")]
)
def test_steps_are_the_same(observation, action, head):
    """Every Step is that of Envs bit by bit, the last observations of truncated episodes and what
    is known of those that ended included."""
    makers, rng = [lambda: RandomEnv(observation, action, head)] * 5, np.random.default_rng(0)
    local, first, finals, ended = in_this_process(makers, 10), [], 0, []
    with started(makers, 2, 10) as envs:
        same(step := local.reset(7), first := envs.reset(7))
        for _ in range(15):
            actions = some_actions(local, step, rng)
            same(step := local.step(actions), other := envs.step(actions))
            finals += len(other.finals)
            ended += other.infos
        assert envs.leaves == local.leaves
        assert envs.action_space == local.action_space and envs.num_steps == 15
        assert finals and {i for i, _ in ended} == set(range(5))
        same(local.reset(7), again := envs.reset(7))
        assert plain(again.obs) == plain(first.obs)


@pytest.mark.parametrize("num_envs, num_workers, spans", [(5, 2, [3, 2]), (3, 8, [1, 1, 1])])
def test_shares(num_envs, num_workers, spans):
    """The environments are spread evenly, and no worker is without one."""
    with started([RandomEnv] * num_envs, num_workers) as envs:
        assert [span.stop - span.start for _, _, span in envs.workers] == spans
        assert len({process.pid for process, _, _ in envs.workers}) == len(spans)
        assert all(process.is_alive() for process, _, _ in envs.workers)
        processes = [process for process, _, _ in envs.workers]
    assert [process.exitcode for process in processes] == [0] * len(spans)


class Own(gym.Env):
    """Shows [number, the id of its process, a draw of the global generators]. In step 3 of the
    environment that was seeded with 1 there is a `fault`."""

    action_space = spaces.Discrete(9)
    observation_space = vector(4, low=-np.inf, high=np.inf)

    def __init__(self, number=0, fault=""):
        self.number, self.fault = number, fault
        self.first_seed, self.t = None, 0

    def observe(self):
        return np.float32([self.number, os.getpid() % 65536, random.random(), np.random.random()])

    def reset(self, *, seed=None, options=None):
        self.first_seed = seed if self.first_seed is None else self.first_seed
        return self.observe(), {}

    def step(self, action):
        self.t += 1
        reward = 1.0
        if self.t == 3 and self.first_seed == 1:
            if self.fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault == "hang":
                time.sleep(1000)
            if self.fault == "raise":
                raise KeyError("the engine is on fire")
            reward = np.nan if self.fault == "nan" else 1.0
        return self.observe(), reward, False, False, {}


gym.register("Own-v0", entry_point=Own)

ERRORS = {
    "raise": r'raise KeyError\("the engine is on fire"\)(.|\n)*env 1, step 3, step\(4,\): KeyError',
    "nan": "env 1, step 3: reward is nan, not a finite number",
}


@pytest.mark.parametrize("fault", ERRORS)
def test_errors_are_those_of_one_process(fault):
    """What goes wrong in an environment is the same error, word for word, with its own frames."""
    makers, texts = [lambda: Own(fault=fault)] * 3, []
    with started(makers, 2) as envs:
        for stepped in (in_this_process(makers), envs):
            stepped.reset(0)
            with pytest.raises(UsageError, match=ERRORS[fault]) as error:
                for _ in range(5):
                    stepped.step([4] * 3)
            texts.append(str(error.value))
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "fault, sentence",
    [("kill", "died with exit code -9"), ("hang", r"did not answer within --env-timeout 0.5 s")],
)
def test_worker_that_is_lost(fault, sentence):
    """It is named by its environments, those of rank 1 from 6 on, and the step; the other one
    leaves as ever."""
    with started([lambda: Own(fault=fault)] * 3, 2, 6, env_timeout=0.5) as envs:
        envs.reset(0)
        words = f"step 3: the worker of envs 6 to 7 {sentence}"
        with pytest.raises(ChildProcessError, match=words):
            for _ in range(5):
                envs.step([0] * 3)
        processes, begin = [process for process, _, _ in envs.workers], time.time()
    assert time.time() - begin < 8 and not any(process.is_alive() for process in processes)


def simulate(pipe):
    """Answers each number by the next one."""
    for number in iter(pipe.recv, None):
        pipe.send(number + 1)


class Simulated(Own):
    """Its numbers come from a process that it starts; the last one is that process's id."""

    def __init__(self, fault=""):
        super().__init__(fault=fault)
        context = multiprocessing.get_context("fork")
        self.pipe, child = context.Pipe()
        self.simulator = context.Process(target=simulate, args=(child,), daemon=True)
        self.simulator.start()

    def observe(self):
        self.pipe.send(self.t)
        return np.float32([self.pipe.recv(), 0, 0, self.simulator.pid])


@pytest.mark.parametrize("fault", ["", "kill"])
def test_environments_that_start_processes(fault):
    """In a worker, which ends them when it ends. A worker that dies is seen at once, although they
    are still there."""
    begin = time.time()
    with started([partial(Simulated, fault)] * 2, 2) as envs:
        rows = envs.reset(0).obs.values[0]
        simulators = rows[:, 3].astype(int).tolist()
        assert rows[:, 0].tolist() == [1, 1] and all(map(is_alive, simulators))
        assert envs.step([0] * 2).obs.values[0][:, 0].tolist() == [2, 2]
        if fault:
            with pytest.raises(ChildProcessError, match="envs 1 to 1 died with exit code -9"):
                for _ in range(2):
                    envs.step([0] * 2)
    assert time.time() - begin < 10
    assert not any(map(is_alive, simulators[: 1 if fault else 2]))
    if fault:
        os.kill(simulators[1], signal.SIGTERM)
        wait_for(lambda: not is_alive(simulators[1]), 5)


class Large(gym.Env):
    """Actions and observations of 4 MB."""

    observation_space = action_space = vector(10**6)

    def reset(self, *, seed=None, options=None):
        return np.zeros(10**6, np.float32), {}

    def step(self, action):
        return action, 0.0, False, False, {}


@pytest.mark.parametrize("moment", ["before", "halfway"])
def test_worker_that_stops(moment, monkeypatch):
    """--env-timeout also holds where the actions fill the pipe of a worker that was stopped, and
    where a worker is stopped halfway through its answer."""
    actions = [np.zeros(10**6, np.float32)] * 2
    with started([Large] * 2, 1, env_timeout=0.5) as envs:
        envs.reset(0)
        envs.step(actions)
        process = envs.workers[0].process
        stop = partial(os.kill, process.pid, signal.SIGSTOP)
        if moment == "before":
            stop()
        else:  # the pipe takes a part of the answer at once, and the others wait
            poll = mp_connection.Connection.poll
            patched = lambda pipe, timeout: poll(pipe, timeout) and not stop()
            monkeypatch.setattr(mp_connection.Connection, "poll", patched)
        begin = time.time()
        words = "step 2: .* envs 0 to 1 did not answer within --env-timeout 0.5"
        with pytest.raises(ChildProcessError, match=words):
            envs.step(actions)
        monkeypatch.undo()
    assert time.time() - begin < 10 and not process.is_alive()


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
        same(local.reset(3), envs.reset(3))
        for _ in range(4):
            same(local.step([0, 0]), envs.step([0, 0]))
        with pytest.raises(UsageError, match="env 0, step 5"):
            envs.step(["left", 0])


def pipes_of(pid):
    """The sockets and pipes that a process holds."""
    found = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            name = os.readlink(f"/proc/{pid}/fd/{fd}")
            found |= {name} if name.startswith("socket:") else set()
    return found


def test_no_pipe_is_inherited():
    """No worker holds this process's end of a pipe, its own or another's, so that each sees when it
    is gone."""
    before = pipes_of(os.getpid())
    with started([Own] * 3, 3) as envs:
        envs.reset(0)
        mine = pipes_of(os.getpid()) - before
        assert len(mine) == 3
        for process, _, _ in envs.workers:
            assert not pipes_of(process.pid) & mine and len(pipes_of(process.pid) - before) == 1
    assert pipes_of(os.getpid()) == before


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
